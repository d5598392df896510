"""Each model class in a process of its own, which may take long, or die."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

#: Seconds after which a class is given up.
PATIENCE = 120

#: Returns what the checks of a class found, given where it is and its name.
Examine = Callable[[str, str], list[dict[str, str]]]


def alone(examine: Examine, module: str, name: str) -> list[dict[str, str]]:
    """Return what the checks of one class found, in a process of its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(examine, module, name, sender))
    child.start()
    sender.close()
    try:
        found: list[dict[str, str]] = receiver.recv()
    except EOFError:
        found = []
    child.join()
    if found:
        return found
    code = child.exitcode
    why = f"took more than {PATIENCE} s" if code == -signal.SIGALRM else f"its process ended with {code}"
    return [{"check": "run", "verdict": "not run", "detail": why}]


def _in_child(examine: Examine, module: str, name: str, connection: Any) -> None:
    torch.set_num_threads(1)
    signal.alarm(PATIENCE)
    with Path(os.devnull).open("w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        connection.send(examine(module, name))
