"""Prepare the process of the command ``regard`` before torch is imported."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

#: What says how long a thread of OpenMP waits for its next task before it sleeps, and what the command says: spinning
#: for ever loses most of the speed on a machine that is busy with something else, and sleeping at once a third of it
#: on one that is not.
_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_SPINS = "20000"


def prepare() -> None:
    """Let the command end in one sentence where torch cannot be imported: without a working directory, or interrupted.

    oneMKL, which torch brings along, ends the process where the working directory was removed; and a keyboard
    interrupt anywhere among thousands of imports is a traceback of no use. OpenMP reads what it is to do while it is
    loaded with torch.
    """
    try:
        os.getcwd()  # noqa: PTH109 - Path.cwd() is the same, and says less
    except FileNotFoundError:
        sys.stderr.write("regard: the working directory must exist, got one that was removed.\n")
        sys.exit(2)
    if not any(name in os.environ for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = _SPINS
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def finish() -> None:
    """Let a keyboard interrupt be an exception again: everything is imported."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(*_: Any) -> None:
    os.write(2, b"\nregard: interrupted\n")
    os._exit(130)
