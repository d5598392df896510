"""The command line. Importing this package needs no optional packages, and not torch."""

from __future__ import annotations

import io
import os
import sys
import time
from importlib.util import find_spec

from regard_cli import startup


def command() -> None:
    """Run ``regard`` as the main program of a process."""
    startup.prepare()
    main()


def main(arguments: list[str] | None = None) -> None:
    """Run ``regard`` with these arguments (those of the process by default), and exit.

    Exit codes: 0 success; 2 invalid input or a missing package, with one sentence on stderr; 130 keyboard interrupt; 1
    closed output pipe.
    """
    started = time.monotonic()
    _open_streams()
    if any(find_spec(name) is None for name in ("typer", "rich", "safetensors")):
        print(
            "regard: the command line needs more packages: pip install 'regard[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        from regard_cli.app import app

        try:
            app(args=arguments, prog_name="regard", obj=started)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("\nregard: interrupted", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        if error.filename is not None:  # only standard streams have no name; anything else is a bug
            raise
        print(f"regard: standard output cannot be used: {error.strerror or error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout once more at exit
        sys.exit(2)


def _open_streams() -> None:
    """Replace closed standard streams by null devices; write characters that the encoding lacks as ?."""
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: PTH123, SIM115
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
        setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
