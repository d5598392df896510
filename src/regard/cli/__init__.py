"""The command line: parse, then call. Importing this package needs none of the optional packages."""

from __future__ import annotations

import io
import os
import sys
import time
from importlib.util import find_spec


def main(arguments: list[str] | None = None) -> None:
    """Run ``regard`` with these arguments (by default the process's own), and exit.

    Exit codes: 0 done, 2 the input was wrong or a package is missing (one sentence on stderr says what), 130
    interrupted from the keyboard, 1 nobody reads the output any more.
    """
    started = time.monotonic()
    if arguments is None:
        _tame_threads(sys.argv[1:])
    _open_streams()
    if any(find_spec(name) is None for name in ("typer", "rich", "safetensors")):
        print(
            "regard: the command line needs packages that are missing: pip install 'regard[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        from regard.cli.app import app

        app(args=arguments, prog_name="regard", obj=started)
    except KeyboardInterrupt:
        sys.exit(130)


#: What says how long a thread of libgomp waits for its next task before it sleeps.
_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
#: Spinning for ever loses most of the speed on a machine that is busy with something else, and sleeping at once a third
#: of it on one that is not.
_SPINS = "20000"


def _tame_threads(arguments: list[str]) -> None:
    """Start the process anew where it is to train and nobody has said how long threads wait for their next task.

    torch's OpenMP reads that while it is loaded, which was before this was called.
    """
    trains = arguments[:1] in (["train"], ["compare"]) or (arguments[:1] == ["demo"] and "--train" in arguments)
    chosen = any(name in os.environ for name in _WAITING) or os.environ.get("OMP_NUM_THREADS") == "1"
    if trains and not chosen and sys.platform == "linux" and sys.executable:
        os.environ["GOMP_SPINCOUNT"] = _SPINS
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _open_streams() -> None:
    """Read nothing from, and write nothing to, standard streams that are closed; write what an encoding lacks as ?."""
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: PTH123, SIM115
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
        setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
