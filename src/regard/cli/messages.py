"""How the command line speaks: what went wrong in one sentence, and text that every terminal can show."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import typer

#: Exit codes.
WRONG, INTERRUPTED = 2, 130


def fail(message: str) -> typer.Exit:
    """Print a sentence on stderr and return the exit to raise."""
    print(f"regard: {message}", file=sys.stderr)
    return typer.Exit(WRONG)


@contextmanager
def explained(extra: str = "pronunciation") -> Iterator[None]:
    """Turn the errors that a user can cause into one sentence and exit code 2.

    To be held around calls that check what the user gave, not around everything: elsewhere a ValueError is a bug.

    Parameters
    ----------
    extra : str
        What installs the packages that the command needs: ``regard[extra]``.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise fail(f"{error.name} is missing: pip install 'regard[{extra}]'") from None
    except BrokenPipeError:  # nobody reads on: typer ends it without a word
        raise
    except OSError as error:
        subject = error.filename if error.filename is not None else "the file"
        raise fail(f"{subject} cannot be used: {error.strerror or error}") from None
    except (ValueError, MemoryError) as error:
        raise fail(str(error) or "memory is full") from None


@contextmanager
def interruptible() -> Iterator[None]:
    """End with exit code 130 and no traceback on a keyboard interrupt."""
    try:
        yield
    except KeyboardInterrupt:
        print("\nregard: interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


def require(package: str) -> None:
    """Raise ModuleNotFoundError now, rather than after minutes of work, if an optional package is missing."""
    if find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def require_writable(*paths: Path | None) -> None:
    """Raise OSError now, rather than after minutes of work, if a file cannot be there."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        if not path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))


def ascii_only() -> bool:
    """Return whether standard output cannot show block characters."""
    try:
        "░▒▓█✓✗".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return True
    return False
