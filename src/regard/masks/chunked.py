"""Chunked attention: a query sees only the keys of its own chunk of positions."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from regard._utils.constraints import size as positive_size
from regard._utils.mechanism import mechanism
from regard.masks.band import Aligned, Offset, checked
from regard.masks.base import Extent, Mask, Span, Tiling


@mechanism(formula="visible iff i and j are in one chunk of C positions", cost="O(L·C·E)")
def chunked(size: int, align: str | None = None, offset: Offset = None) -> Mask:
    """Return the mask in which each query sees only the keys of its own chunk of ``size`` positions.

    Visible iff ``⌊k / size⌋ = ⌊(q + offset) / size⌋``. ``causal() & chunked(8192)`` is that of the layers with rotary
    positions in Llama 4 (iRoPE), whose other layers have no positions and see all earlier keys.

    Parameters
    ----------
    size : int
        Number of positions in a chunk.
    align, offset
        See :func:`causal`.

    Raises
    ------
    ValueError
        If ``size`` is less than 1, or ``align`` is unknown or given together with ``offset``.
    TypeError
        If ``size`` is not an int.

    Examples
    --------
    >>> from regard import masks
    >>> print((masks.causal() & masks.chunked(3)).draw(5))
    causal() & chunked(3)
    5 queries ↓, 5 keys →; █ visible, · not
      0
    0 █····
    1 ██···
    2 ███··
    3 ···█·
    4 ···██
    """
    return Chunked(positive_size("masks.chunked", "size", size), *checked("chunked", align, offset))


@final
class Chunked(Aligned):
    """Pairs of the same chunk of positions."""

    name = "chunked"

    def __init__(self, size: int, align: str | None, offset: Offset) -> None:
        super().__init__(align, offset)
        self.size = size

    def _twin(self) -> Chunked:
        return Chunked(self.size, self.align, self.offset)

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return which keys are in the query's chunk."""
        return kv_idx // self.size == self.positions(b, q_idx) // self.size

    @property
    def bounds_are_exact(self) -> bool:
        """Always: a tile has every position between its first and its last."""
        return True

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return which tiles have a chunk in common, and which lie in one."""
        q_first, q_last = (self.tile_positions(edge) // self.size for edge in (tiling.q_lo, tiling.q_hi))
        k_first, k_last = tiling.k_lo // self.size, tiling.k_hi // self.size
        some = (q_first <= k_last) & (k_first <= q_last)
        return some, some & (q_first == q_last) & (k_first == k_last)

    def span(self, extent: Extent, device: torch.device) -> Span | None:
        """Return the edges of each query's chunk."""
        b = torch.arange(extent.B, device=device)[:, None, None]
        start = self.positions(b, torch.arange(extent.L, device=device)[None, None]) // self.size * self.size
        return start, start + self.size

    def __repr__(self) -> str:
        return self._call(self.size)
