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
logging.getLogger("regard").setLevel(logging.ERROR)  # whoever asked for it need not be told
compiler.load(sys.argv[1], getattr(torch, sys.argv[2]))
"""
#: Seconds between two looks at the processes.
_PAUSE: Final = 0.05


@dataclass(frozen=True)
class Target:
    """A kernel to compile for a dtype."""

    name: str
    dtype: torch.dtype

    @property
    def words(self) -> tuple[str, str]:
        """Its name and that of its dtype."""
        return self.name, str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        return " for ".join(self.words)


def compile_ahead(targets: Sequence[Target]) -> Generator[tuple[Target, bool]]:
    """Compile kernels into the cache on all cores, and yield each, with whether that went well, as it is done.

    Each has a process of its own, since Numba holds the GIL. Those that are at work are killed when the iterator is
    closed or interrupted; what they had not finished leaves no file.
    """
    remaining = list(reversed(targets))
    running: dict[subprocess.Popen[bytes], Target] = {}
    try:
        while remaining or running:
            while remaining and len(running) < _cores():
                target = remaining.pop()
                # A session of its own: a terminal's Ctrl-C goes to this process alone, which then ends the others.
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
