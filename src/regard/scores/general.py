"""General: a dot product through a learned matrix."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from regard._catalogue import mechanism
from regard._constraints import TensorOf
from regard._errors import rejected, shape
from regard.scores.base import register
from regard.scores.dot_like import DotLike


@register("general")
@mechanism(
    formula="qᵀ W k",
    sources=("luong2015",),
    learned="W (Eq, Ek)",
    cost="O(L·Eq·Ek + L·S·Ek)",
)
class General(DotLike):
    """Luong's general score, ``qᵀ W k`` (Luong et al. 2015, arXiv 1508.04025).

    Parameters
    ----------
    weight : Tensor (Eq, Ek) or (H, Eq, Ek)
        The matrix W, shared by the heads or one for each query head.

    Examples
    --------
    >>> import torch
    >>> score = General(torch.eye(2, 3))
    >>> score.compare(*score.project(torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([[[[3.0, 4.0, 5.0]]]])))
    tensor([[[[11.]]]])
    """

    mixed_widths = True

    def __init__(self, weight: Tensor) -> None:
        self.weight = TensorOf(("Eq", "Ek"), ("H", "Eq", "Ek"))(self, "weight", weight)

    def check(self, query: Tensor, key: Tensor) -> None:
        wanted = (query.shape[-1], key.shape[-1])
        per_head = self.weight.dim() == 3
        if tuple(self.weight.shape[-2:]) != wanted or (per_head and self.weight.shape[0] != query.shape[1]):
            heads = f" or {(query.shape[1], *wanted)}"
            raise rejected("attention", "score General's weight", f"have shape {wanted}{heads}", shape(self.weight))

    def project(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query @ self.weight, key

    @classmethod
    def sample(cls, query_width: int, key_width: int, keys: int, generator: torch.Generator) -> Self:  # noqa: ARG003
        return cls(torch.randn(query_width, key_width, generator=generator) / max(query_width, 1) ** 0.5)
