"""Scores that do not depend on the content of the key: constant and location."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from regard._utils.constraints import floats
from regard._utils.errors import rejected, shape
from regard._utils.mechanism import mechanism
from regard.scores.base import register
from regard.scores.dot_products import DotLike

# Constant: average pooling --------------------------------------------------------------------------------------------


@register("constant")
@mechanism(
    formula="0: average pooling",
    cost="O(L·S)",
)
class Constant(DotLike):
    """The constant score 0: average pooling over the visible values.

    Examples
    --------
    >>> import torch, regard
    >>> regard.attention(torch.zeros(1, 4), torch.zeros(3, 4), torch.tensor([[1.0], [2.0], [6.0]]), score=Constant())
    tensor([[3.]])
    """

    mixed_widths = True

    def project(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query.new_zeros(*query.shape[:-1], 1), key.new_zeros(*key.shape[:-1], 1)

    def positions(self, query: Tensor, key: Tensor) -> None:  # noqa: ARG002
        return None  # what it compares says nothing of keys


# Location: one score per key position, from the query alone -----------------------------------------------------------


@register("location")
@mechanism(
    formula="(W q)_i, by the position i of the key",
    sources=("luong2015",),
    learned="W (S, Eq)",
    cost="O(L·S·Eq)",
)
class Location(DotLike):
    """Luong's location score, ``(W q)_i`` for the key at position i (Luong et al. 2015, arXiv 1508.04025).

    Only the position of the key matters, not its content.

    Parameters
    ----------
    weight : Tensor (S_max, Eq)
        One row per position; calls may have up to S_max keys.

    Examples
    --------
    >>> import torch, regard
    >>> q, kv = torch.randn(1, 1, 5, 8), torch.randn(1, 1, 7, 3)
    >>> regard.attention(q, kv, kv, score=Location(torch.randn(20, 8))).shape
    torch.Size([1, 1, 5, 3])
    """

    mixed_widths = True
    positional = True

    def __init__(self, weight: Tensor) -> None:
        self.weight = floats(self, "weight", weight, "S_max", "Eq")

    def check(self, query: Tensor, key: Tensor) -> None:
        if self.weight.shape[1] != query.shape[-1] or self.weight.shape[0] < key.shape[-2]:
            expected = f"have at least one row for each of {key.shape[-2]} keys and query's width {query.shape[-1]}"
            raise rejected("attention", "score Location's weight", expected, shape(self.weight))

    def project(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        B, G, S, _ = key.shape
        return query, self.weight[:S].expand(B, G, S, -1)

    def positions(self, query: Tensor, key: Tensor) -> None:  # noqa: ARG002
        return None  # what it compares says nothing of keys

    def at(self, first_query: int, first_key: int) -> Location:  # noqa: ARG002
        return Location(self.weight[first_key:])

    @classmethod
    def sample(cls, query_width: int, key_width: int, keys: int, generator: torch.Generator) -> Self:  # noqa: ARG003
        return cls(torch.randn(keys + 1, query_width, generator=generator))
