"""Cog attention: weights with the signs of the scores."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._utils.mechanism import mechanism
from regard.normalizers.base import Normalizer, register
from regard.normalizers.softmax import Softmax


@register("cog")
@mechanism(
    formula="sgn(s_i) exp(|s_i|) / Σ_j exp(|s_j|)",
    sources=("lv2024",),
    cost="O(L·S)",
)
class Cog(Normalizer):
    """Cog attention, ``sgn(s) · softmax(|s|)``: a key that scores below 0 is subtracted (Lv 2024, arXiv 2411.07176).

    The absolute weights of a row sum to 1. The sign depends on more than the distance to one number per row, so weights
    are computed from whole rows, in memory that grows with L×S.

    Examples
    --------
    >>> import torch
    >>> Cog().weights(torch.tensor([[1.0, -1.0, -torch.inf]]))
    tensor([[ 0.5000, -0.5000,  0.0000]])
    """

    convex = False
    monotone = False

    def weights(self, scores: Tensor) -> Tensor:
        hidden = scores == -torch.inf
        shown = torch.where(hidden, 0.0, scores)
        return shown.sign() * Softmax().weights(torch.where(hidden, -torch.inf, shown.abs()))
