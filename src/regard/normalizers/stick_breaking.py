"""Stick-breaking: each key takes a share of what later keys have left."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._utils.mechanism import mechanism
from regard.normalizers.base import Normalizer, register


@register("stick_breaking")
@mechanism(
    formula="σ(s_i) Π_{j > i} (1 − σ(s_j))",
    sources=("tan2024",),
    cost="O(L·S)",
)
class StickBreaking(Normalizer):
    """Stick-breaking, ``σ(s_i) Π_{j > i} (1 − σ(s_j))``: the nearest key takes first (Tan 2024, arXiv 2410.17980).

    Keys are visited from the last visible one back. Each takes the share σ(s) of what is left of the row's weight 1, so
    that the weights of a row sum to at most 1, and recent keys win ties: positions are not needed. In the paper a query
    does not see its own key, ``masks.causal(offset=-1)``; the first row then gets 0.

    The order of keys counts. Weights are computed from whole rows, in memory that grows with L×S.

    Examples
    --------
    >>> import torch
    >>> StickBreaking().weights(torch.tensor([[0.0, 0.0, 0.0, -torch.inf]]))
    tensor([[0.1250, 0.2500, 0.5000, 0.0000]])
    """

    convex = False
    monotone = False
    positional = True

    def weights(self, scores: Tensor) -> Tensor:
        left = F.pad(F.logsigmoid(-scores)[..., 1:], (0, 1 if scores.shape[-1] else 0))  # log of what each key leaves
        return torch.exp(F.logsigmoid(scores) + left.flip(-1).cumsum(-1).flip(-1))
