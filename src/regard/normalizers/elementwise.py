"""Sigmoid and ReLU: weights that do not depend on other keys."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._utils.constraints import OneOf
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


@register("relu")
@mechanism(
    formula="max(s_i, 0)^p",
    sources=("wortsman2023",),
    cost="O(L·S)",
)
class ReLU(Normalizer):
    """Positive parts of the scores, ``max(s, 0)^p`` (Wortsman et al. 2023, arXiv 2309.08586): not normalized.

    Each weight depends on its own score alone; there is no upper bound, and negative scores weigh 0. The paper divides
    by the number of keys n: pass ``scale=1 / (n * width**0.5)``, which is also where squared ReLU attention divides
    (FLASH, Hua et al. 2022). Sums of large weights may overflow, unlike those of softmax.

    Parameters
    ----------
    power : {1, 2}, default 1

    Examples
    --------
    >>> import torch
    >>> ReLU(power=2).weights(torch.tensor([[3.0, -1.0, -torch.inf]]))
    tensor([[9., 0., 0.]])
    """

    streams = True
    row_normalized = False
    convex = False
    bounded = False

    def __init__(self, power: int = 1) -> None:
        self.power = OneOf((1, 2))(self, "power", power)

    def weights(self, scores: Tensor) -> Tensor:
        slope = torch.where(scores.isnan(), scores.detach(), 1.0)  # of NaN, NaN
        positive = torch.where(scores <= 0, 0.0, scores * slope)
        return positive.square() if self.power == 2 else positive

    def statistic(self, sweep: Sweep, like: Tensor) -> Statistic:  # noqa: ARG002
        return Statistic(torch.zeros_like(like), torch.zeros_like(like))

    def tile_weights(self, scores: Tensor, row: Statistic, kv_idx: Tensor) -> Tensor:  # noqa: ARG002
        return self.weights(scores)

    def tile_slope(self, weights: Tensor) -> Tensor:
        if self.power == 1:
            return torch.where(weights > 0, 1.0, weights.detach())
        none = weights <= 0
        return torch.where(none, 0.0, 2 * torch.where(none, 1.0, weights).sqrt())

    @classmethod
    def sample(cls, generator: torch.Generator) -> ReLU:
        return cls(1 + int(torch.randint(2, (), generator=generator)))
