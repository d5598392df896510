"""Prepare the process of the command ``regard`` before torch is imported."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

#: Environment variables for how long an idle OpenMP thread spins before it sleeps, and our default. Endless spinning
#: loses most of the speed on a busy machine; sleeping at once loses a third of it on an idle one.
_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_SPINS = "20000"


def prepare() -> None:
    """Make the command exit with one sentence if the import of torch fails or is interrupted.

    oneMKL, a dependency of torch, kills the process if the current directory was removed, and a keyboard interrupt
    during thousands of imports prints a useless traceback. OpenMP reads its environment when torch loads it.
    """
    try:
        os.getcwd()  # noqa: PTH109 - pathlib would import more modules
    except FileNotFoundError:
        sys.stderr.write("regard: the current directory no longer exists. Change to another one.\n")
        sys.exit(2)
    if not any(name in os.environ for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = _SPINS
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def finish() -> None:
    """Restore KeyboardInterrupt once everything is imported."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(*_: Any) -> None:
    os.write(2, b"\nregard: interrupted\n")
    os._exit(130)
