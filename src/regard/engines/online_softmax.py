"""The running state of a softmax read: (maximum, denominator, output), in a form that merges."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class OnlineSoftmax:
    """``Σ exp(s − max)`` and ``Σ exp(s − max) v`` over the keys seen so far, one row for each query.

    The neutral element is (−inf, 0, 0). Factors that change the reference point are constants to autograd: the
    finished output does not depend on it.

    Attributes
    ----------
    peak : Tensor (B, H, l, 1)
    total : Tensor (B, H, l, 1)
    out : Tensor (B, H, l, V)
    """

    def __init__(self, like: Tensor, width: int) -> None:
        self.peak = torch.full_like(like, -torch.inf)
        self.total = torch.zeros_like(like)
        self.out = like.new_zeros(*like.shape[:-1], width)

    def update(self, scores: Tensor, read: Callable[[Tensor], Tensor]) -> None:
        """Add a tile of scores (B, H, l, s); ``read`` multiplies its unnormalized weights into the values."""
        shift = self._move(scores.detach().amax(-1, keepdim=True))
        weights = torch.exp(scores - shift)
        self.total = self.total + weights.sum(-1, keepdim=True)
        self.out = self.out + read(weights)

    def merge(self, out: Tensor, lse: Tensor) -> None:
        """Add a finished read over other keys: its output (B, H, l, V) and log-sum-exp (B, H, l, 1)."""
        weight = torch.exp(lse - self._move(lse))
        self.total = self.total + weight
        self.out = self.out + weight * out

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return the output, 0 in empty rows, and the log-sum-exp (B, H, l, 1), −inf there."""
        total = torch.where(self.total == 0, 1, self.total)
        return self.out / total, self.peak + total.log()

    def _move(self, peak: Tensor) -> Tensor:
        """Take a new maximum into account and return the reference point, finite also where nothing was seen."""
        peak = torch.maximum(self.peak, peak)
        shift = torch.where(peak == -torch.inf, 0.0, peak)
        factor = torch.exp(self.peak - shift)
        self.peak, self.total, self.out = peak, self.total * factor, self.out * factor
        return shift
