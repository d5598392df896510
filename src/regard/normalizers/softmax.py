"""Softmax: weights proportional to the exponentials of the scores."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._utils.mechanism import mechanism
from regard.normalizers.base import Normalizer, Statistic, Sweep, register


def row_max(scores: Tensor) -> Tensor:
    """Return the largest score of each row (..., L, 1), detached; 0 in fully masked rows."""
    if scores.shape[-1] == 0:
        return scores.new_zeros(*scores.shape[:-1], 1)
    peak = scores.detach().amax(-1, keepdim=True)
    return torch.where(peak == -torch.inf, 0.0, peak)


def sum_of_powers(sweep: Sweep, peak: Tensor, total: Tensor) -> Statistic:
    """Return the largest score of each row, and the log of the sum of exponentials relative to it, in one sweep.

    ``peak`` and ``total`` (..., L, 1) are those of logits that are not among the scores: −inf and 0 for none.
    """

    def visit(scores: Tensor, kv_idx: Tensor) -> None:  # noqa: ARG001
        nonlocal peak, total
        new = torch.maximum(peak, scores.amax(-1, keepdim=True))
        shift = torch.where(new == -torch.inf, 0.0, new)
        total = total * torch.exp(peak - shift) + torch.exp(scores - shift).sum(-1, keepdim=True)
        peak = new

    sweep(visit)
    empty = peak == -torch.inf
    return Statistic(torch.where(empty, 0.0, peak), torch.where(empty, 1.0, total).log())


@register("softmax")
@mechanism(
    formula="exp(s_i) / Σ_j exp(s_j)",
    cost="O(L·S)",
)
class Softmax(Normalizer):
    """Softmax, ``exp(s_i) / Σ_j exp(s_j)``; fully masked rows get zeros.

    Examples
    --------
    >>> import torch
    >>> Softmax().weights(torch.tensor([[0.0, 0.0, -torch.inf], [-torch.inf, -torch.inf, -torch.inf]]))
    tensor([[0.5000, 0.5000, 0.0000],
            [0.0000, 0.0000, 0.0000]])
    """

    streams = True
    online = True

    def weights(self, scores: Tensor) -> Tensor:
        powers = torch.exp(scores - row_max(scores))
        total = powers.sum(-1, keepdim=True)
        return powers / torch.where(total == 0, 1, total)

    def statistic(self, sweep: Sweep, like: Tensor) -> Statistic:
        """Compute the maximum, and the log of the sum of exponentials relative to it, in one sweep."""
        return sum_of_powers(sweep, torch.full_like(like, -torch.inf), torch.zeros_like(like))

    def tile_weights(self, scores: Tensor, row: Statistic, kv_idx: Tensor) -> Tensor:  # noqa: ARG002
        return torch.exp(scores - row.shift - row.offset)

    def tile_slope(self, weights: Tensor) -> Tensor:
        return weights
