"""The command line: parse, then call. Importing this package needs none of the optional packages, and not torch."""

from __future__ import annotations

import io
import os
import sys
import time
from importlib.util import find_spec

from regard_cli import startup


def command() -> None:
    """Run ``regard`` as a process of its own."""
    startup.prepare()
    main()


def main(arguments: list[str] | None = None) -> None:
    """Run ``regard`` with these arguments (by default the process's own), and exit.

    Exit codes: 0 done, 2 the input was wrong or a package is missing (one sentence on stderr says what), 130
    interrupted from the keyboard, 1 nobody reads the output any more.
    """
    started = time.monotonic()
    _open_streams()
    if any(find_spec(name) is None for name in ("typer", "rich", "safetensors")):
        print(
            "regard: the command line needs packages that are missing: pip install 'regard[cli]'",
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
        if error.filename is not None:  # elsewhere that is a bug: only standard streams have no name
            raise
        print(f"regard: standard output cannot be used: {error.strerror or error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes it once more
        sys.exit(2)


def _open_streams() -> None:
    """Read nothing from, and write nothing to, standard streams that are closed; write what an encoding lacks as ?."""
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: PTH123, SIM115
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
        setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
