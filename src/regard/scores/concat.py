"""Concat: the additive score with one matrix for the query and key joined."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from regard._catalogue import mechanism
from regard._constraints import TensorOf, floats
from regard._errors import rejected, shape
from regard.scores.additive import check_heads, tanh_scores
from regard.scores.base import Score, register


@register("concat")
@mechanism(
    formula="w_vᵀ tanh(W [q; k])",
    sources=("luong2015",),
    learned="W (C, Eq + Ek), w_v (C)",
    cost="O((L·Eq + S·Ek)·C + L·S·C)",
)
class Concat(Score):
    """Luong's concat score, ``w_vᵀ tanh(W [q; k])`` (Luong et al. 2015, arXiv 1508.04025).

    It equals :class:`Additive` with the columns of W split between query and key.

    Parameters
    ----------
    w_v : Tensor (C,) or (H, C)
        Weight of each hidden feature.
    weight : Tensor (C, Eq + Ek)
        The matrix W, laid out as ``nn.Linear.weight``; its first Eq columns meet the query.

    Examples
    --------
    >>> import torch, regard
    >>> q, k = torch.randn(1, 1, 5, 8), torch.randn(1, 1, 7, 6)
    >>> regard.attention(q, k, k, score=Concat(torch.randn(16), torch.randn(16, 14))).shape
    torch.Size([1, 1, 5, 6])
    """

    mixed_widths = True

    def __init__(self, w_v: Tensor, weight: Tensor) -> None:
        width = TensorOf(("C",), ("H", "C"))(self, "w_v", w_v).shape[-1]
        floats(self, "weight", weight, width, "Eq + Ek")
        self.w_v, self.weight = w_v, weight

    @property
    def per_head(self) -> bool:
        """True where w_v differs per head."""
        return self.w_v.dim() == 2

    def check(self, query: Tensor, key: Tensor) -> None:
        width = query.shape[-1] + key.shape[-1]
        if self.weight.shape[1] != width:
            expected = f"have query's and key's widths together, {query.shape[-1]} + {key.shape[-1]}, as columns"
            raise rejected("attention", "score Concat's weight", expected, shape(self.weight))
        check_heads("Concat", {"w_v": self.w_v}, query.shape[1])

    def project(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        split = query.shape[-1]
        return query @ self.weight[:, :split].mT, key @ self.weight[:, split:].mT

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        return tanh_scores(query, key, self.w_v)

    def pair_size(self, width: int) -> int:
        return width

    def pair_flops(self, width: int) -> int:
        return 4 * width

    @classmethod
    def sample(cls, query_width: int, key_width: int, keys: int, generator: torch.Generator) -> Self:  # noqa: ARG003
        weight = torch.randn(4, query_width + key_width, generator=generator)
        return cls(torch.randn(4, generator=generator), weight)
