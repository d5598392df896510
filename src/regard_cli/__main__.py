"""`python -m regard_cli` is the command `regard`."""

from regard_cli import command

if __name__ == "__main__":
    command()
