"""Check the result of every contender against the formula in float64 before timing it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.registry import Call, Result
from benchmarks.work import Work

#: How much worse than the plain formula in float32 a contender may be and still be called right.
SLACK = 16.0


@dataclass(frozen=True)
class Error:
    """The largest absolute error of one quantity, that of the plain formula in the same dtype, and the limit."""

    found: float
    eager: float
    limit: float

    @property
    def wrong(self) -> bool:
        """Whether the result is not the right one, not even roughly; NaN is wrong, too."""
        return not self.found <= self.limit


class Checker:
    """The right results of a piece of work, calculated once."""

    def __init__(self, work: Work, tolerance: float) -> None:
        self.work, self.tolerance = work, tolerance
        self.flops, self.bytes = work.flops(), work.bytes()
        #: Seconds of the call that was checked last.
        self.seconds = 0.0
        self.rows = work.rows()
        self.truth = work.expected(self.rows, torch.float64, weights=bool(work.topk))
        dtype = work.query.dtype
        self.eager = self.truth if dtype == torch.float64 else work.expected(self.rows, dtype)

    @property
    def share(self) -> str:
        """What was checked, in words."""
        L = self.work.query.shape[2]
        return "all rows" if len(self.rows) == L else f"{len(self.rows):,} of {L:,} query rows"

    def errors(self, call: Call, does: tuple[str, ...] = ()) -> dict[str, Error]:
        """Run ``call`` and return the error of each quantity, or of those that it ``does``."""
        dense = self.work.grad
        self.work.grad = torch.zeros_like(dense).index_copy_(2, self.rows, dense[:, :, self.rows])
        began = time.perf_counter()
        try:
            result = call()
        finally:
            self.seconds = time.perf_counter() - began
            self.work.grad = dense
        result = self.work.achieved(result)
        wanted = set(does) or {name for name in self.truth if name != "weights"}
        if lacking := wanted - set(result):
            raise ValueError(f"the result lacks {sorted(lacking)}")
        return {name: self._error(name, result[name].detach(), result) for name in sorted(wanted)}

    def _error(self, name: str, tensor: Tensor, result: Result) -> Error:
        truth = self.truth[name]
        if name in ("output", "d_query", "entropy", "topk"):
            tensor = tensor[:, :, self.rows]
        if tensor.shape != truth.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(truth.shape)}")
        found = _distance(tensor, truth)
        if name == "topk":  # the keys that are named must have those weights
            named = self.truth["weights"].gather(-1, result["topk_keys"][:, :, self.rows])
            found = max(found, _distance(named, truth))
        eager = _distance(self.eager[name], truth)
        return Error(found, eager, max(SLACK * eager, self.tolerance * float(truth.abs().max())))


def _distance(tensor: Tensor, truth: Tensor) -> float:
    return float((tensor.double() - truth).abs().max()) if truth.numel() else 0.0
