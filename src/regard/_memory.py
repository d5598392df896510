"""Turn a failed allocation into an error of one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def fitting(sentence: str, kind: type[Exception] = MemoryError) -> Iterator[None]:
    """Raise an error of this kind with this sentence where an allocation fails."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_memory_error(error):
            raise
        raise kind(sentence) from error


def is_memory_error(error: Exception) -> bool:
    """Whether an allocation failed."""
    text = str(error).lower()
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or "can't allocate memory" in text or "out of memory" in text


def available_memory() -> int | None:
    """Return how many bytes of memory can be had without swapping; None where the system does not say."""
    try:
        with Path("/proc/meminfo").open() as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
