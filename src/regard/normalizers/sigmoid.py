"""Sigmoid: weights that do not depend on other keys."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._utils.mechanism import mechanism
from regard.normalizers.base import Normalizer, Statistic, Sweep, register


@register("sigmoid")
@mechanism(
    formula="1 / (1 + exp(−s_i))",
    sources=("ramapuram2024",),
    cost="O(L·S)",
)
class Sigmoid(Normalizer):
    """Sigmoid, ``1 / (1 + exp(−s))``: the weights of a row are independent and need not sum to 1.

    Add a bias of ``−log S`` to get outputs of the same magnitude as softmax (Ramapuram et al. 2024, arXiv 2409.04431).

    Examples
    --------
    >>> import torch
    >>> Sigmoid().weights(torch.tensor([[0.0, -torch.inf]]))
    tensor([[0.5000, 0.0000]])
    """

    streams = True
    row_normalized = False
    convex = False

    def weights(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores)

    def statistic(self, sweep: Sweep, like: Tensor) -> Statistic:  # noqa: ARG002
        return Statistic(torch.zeros_like(like), torch.zeros_like(like))

    def tile_weights(self, scores: Tensor, row: Statistic, kv_idx: Tensor) -> Tensor:  # noqa: ARG002
        return torch.sigmoid(scores)

    def tile_slope(self, weights: Tensor) -> Tensor:
        return weights * (1 - weights)
