"""Scaled dot product: the score of the Transformer, and of torch's SDPA."""

from __future__ import annotations

from regard._catalogue import mechanism
from regard.scores.base import register
from regard.scores.dot_like import DotLike


@register("scaled_dot")
@mechanism(
    formula="q·k / √E",
    sources=("vaswani2017",),
    cost="O(L·S·E)",
)
class ScaledDot(DotLike):
    """Scaled dot product, ``q·k / √E`` (Vaswani et al. 2017, arXiv 1706.03762). The default.

    The factor 1/√E is the score's own ``scale``: passing ``scale=`` to :func:`regard.attention` replaces it.

    Examples
    --------
    >>> ScaledDot().default_scale(64)
    0.125
    """

    def default_scale(self, width: int) -> float:
        return 1.0 if width == 0 else 1.0 / width**0.5  # width**-0.5 is not, to the last bit, what torch takes
