"""Timing: alternating rounds (A B A B) in one process, and the limits of the machine."""

from __future__ import annotations

import gc
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

#: A sample lasts at least this long; shorter calls are repeated within it.
FLOOR = 0.02
#: A call that took this long when it was checked is warm.
LONG = 2.0


class Elsewhere(ABC):
    """A call in a fresh process, which reports its time and memory."""

    seconds = 0.0
    peak = 0

    @abstractmethod
    def __call__(self) -> dict[str, Tensor]:
        """Return the result, and set ``seconds`` and ``peak`` (bytes)."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call, one sample for each round, of ``loops`` calls each."""

    samples: tuple[float, ...]
    loops: int

    @property
    def median(self) -> float:
        """The median in seconds."""
        return statistics.median(self.samples)


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians, and the smallest and largest ratio within a round."""

    value: float
    low: float
    high: float


def ratio(over: Timing, under: Timing) -> Ratio:
    """Return ``over / under``: how much longer ``over`` takes.

    Both must come from the same rounds; a single sample stands for every round.
    """
    count = max(len(over.samples), len(under.samples))
    above, below = (t.samples * count if len(t.samples) == 1 else t.samples for t in (over, under))
    rounds = [a / b for a, b in zip(above, below, strict=True)]
    return Ratio(over.median / under.median, min(rounds), max(rounds))


def sample(call: Callable[[], object], loops: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds per call of ``loops`` calls."""
    if isinstance(call, Elsewhere):
        call()
        return call.seconds
    began = clock()
    for _ in range(loops):
        call()
    return (clock() - began) / loops


def loops_for(call: Callable[[], object], floor: float = FLOOR, clock: Callable[[], float] = time.perf_counter) -> int:
    """Return how many calls fill a sample; finding out warms up."""
    loops = 1
    if isinstance(call, Elsewhere):
        call()
        return loops
    while (taken := sample(call, loops, clock) * loops) < floor:
        loops = max(loops * 2, int(loops * floor * 1.2 / taken) if taken else 0)
    return loops


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    floor: float = FLOOR,
    earlier: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Timing]:
    """Time calls in turn, A B A B, after a warm-up of each; ``earlier`` returns the time of the previous call."""
    loops = {name: 1 if earlier.get(name, 0) > LONG else loops_for(call, floor) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in calls.items():
                samples[name].append(sample(call, loops[name]))
    finally:
        gc.enable()
    return {name: Timing(tuple(samples[name]), loops[name]) for name in calls}


@dataclass(frozen=True)
class Limits:
    """What the machine did at its best: FLOP/s of sgemm, and bytes/s of a copy (read and written bytes)."""

    flops: float
    bytes: float


def limits(side: int = 2048, megabytes: int = 256, rounds: int = 7) -> Limits:
    """Measure sgemm of ``side``³ and a copy of ``megabytes``; the fastest of ``rounds`` counts."""
    a, b = torch.randn(2, side, side).unbind(0)
    out, source = torch.empty(side, side), torch.ones(megabytes * 2**18)
    target = torch.empty_like(source)
    timings = interleaved({"gemm": lambda: torch.mm(a, b, out=out), "copy": lambda: target.copy_(source)}, rounds)
    moved = 2 * source.numel() * source.element_size()
    return Limits(2 * side**3 / min(timings["gemm"].samples), moved / min(timings["copy"].samples))
