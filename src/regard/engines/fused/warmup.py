"""Compiling kernels ahead of their first use, several at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

_COMPILE: Final = """
import logging, sys, torch
from regard.engines.fused import compiler
logging.getLogger("regard").setLevel(logging.ERROR)  # the caller reports progress
compiler.load(sys.argv[1], getattr(torch, sys.argv[2]))
"""
#: Polling interval of the processes, in seconds.
_PAUSE: Final = 0.05


@dataclass(frozen=True)
class Target:
    """A kernel to compile for a dtype."""

    name: str
    dtype: torch.dtype

    @property
    def words(self) -> tuple[str, str]:
        """The names of the kernel and the dtype."""
        return self.name, str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        return " for ".join(self.words)


def compile_ahead(targets: Sequence[Target]) -> Generator[tuple[Target, bool]]:
    """Compile kernels into the cache on all cores; yield each when done, and whether it succeeded.

    Each kernel compiles in its own process, because Numba holds the GIL. Closing or interrupting the iterator kills
    running processes, which leave no partial files.
    """
    remaining = list(reversed(targets))
    running: dict[subprocess.Popen[bytes], Target] = {}
    try:
        while remaining or running:
            while remaining and len(running) < _cores():
                target = remaining.pop()
                # A new session, so that Ctrl-C reaches only this process, which then kills the others.
                command = [sys.executable, "-c", _COMPILE, *target.words]
                running[subprocess.Popen(command, start_new_session=True)] = target
            for process in [each for each in running if each.poll() is not None]:
                yield running.pop(process), process.returncode == 0
            time.sleep(_PAUSE)
    finally:
        for process in running:
            process.kill()
            process.wait()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
