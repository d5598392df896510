"""Dot product: how far query and key point the same way, times their lengths."""

from __future__ import annotations

from regard._catalogue import mechanism
from regard.scores.base import register
from regard.scores.dot_like import DotLike


@register("dot")
@mechanism(
    formula="q·k",
    sources=("luong2015",),
    cost="O(L·S·E)",
)
class Dot(DotLike):
    """Dot product, ``q·k`` (Luong et al. 2015, arXiv 1508.04025).

    Examples
    --------
    >>> import torch, regard
    >>> q = torch.tensor([[1.0, -1.0, 2.0]])
    >>> k = torch.tensor([[2.0, 1.0, -2.0], [1.0, 2.0, -1.0], [3.0, -2.0, 0.0]])
    >>> regard.scores.Dot().compare(q, k)
    tensor([[-3., -3.,  5.]])
    """
