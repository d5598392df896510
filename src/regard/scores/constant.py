"""Constant: every key counts the same, so attention is average pooling."""

from __future__ import annotations

from torch import Tensor

from regard._catalogue import mechanism
from regard.scores.base import register
from regard.scores.dot_like import DotLike


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
