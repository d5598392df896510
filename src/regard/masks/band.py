"""A band around the diagonal: causal masks and sliding windows."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from regard._errors import rejected
from regard.masks._checks import as_int
from regard.masks.aligned import Aligned, Offset, checked
from regard.masks.base import Diagonals, Extent, Mask
from regard.masks.intervals import Span
from regard.masks.tiling import Tiling


def causal(align: str | None = None, offset: Offset = None) -> Mask:
    """Return the mask that shows a query the keys up to its own position.

    Visible iff ``k ≤ q + offset``.

    Parameters
    ----------
    align : {"upper_left", "lower_right"}, optional
        "upper_left" is offset 0, torch's ``is_causal=True``. "lower_right" is offset S − L: the last query sees
        every key, as in FlashAttention. The two agree where L = S; elsewhere one must be stated, or an offset.
        Called by itself, without lengths, a mask with neither takes offset 0.
    offset : int or Tensor () or (B,), optional
        How many keys come before query 0. When decoding with a cache: the number of keys in it, which may
        differ from sequence to sequence.

    Raises
    ------
    ValueError
        If ``align`` is none of these, or given together with ``offset``.
    TypeError
        If ``offset`` is neither an int nor an integer tensor.

    Examples
    --------
    >>> from regard import masks
    >>> print(masks.causal(offset=2).draw(3, 6))
    causal(offset=2)
    3 queries ↓, 6 keys →; █ visible, · not
      0    5
    0 ███···
    1 ████··
    2 █████·
    """
    return Band("causal", -1, 0, *checked("causal", align, offset))


def window(left: int, right: int, align: str | None = None, offset: Offset = None) -> Mask:
    """Return the mask that shows a query the keys near its own position.

    Visible iff ``q + offset − left ≤ k ≤ q + offset + right``; −1 is no bound. Neither count includes the
    query's own position, which is always visible.

    Parameters
    ----------
    left, right : int
        How many keys before and after, or −1 for all.
    align, offset
        As in :func:`causal`.

    Notes
    -----
    The same window elsewhere:

    ===============================================  =======================================
    there                                            here
    ===============================================  =======================================
    FlashAttention ``window_size=(l, r)``            ``window(l, r, align="lower_right")``
    JAX ``local_window_size=(l, r)``                 ``window(l, r)``
    JAX ``local_window_size=w``                      ``window(w, w)``
    transformers ``sliding_window=w`` (Mistral)      ``window(w - 1, 0)``
    Longformer ``attention_window=w`` (even)         ``window(w // 2, w // 2)``
    a centred window of odd total width w            ``window(w // 2, w // 2)``
    ===============================================  =======================================

    transformers counts the query itself (``k > q − w``); FlashAttention and JAX do not.

    Raises
    ------
    ValueError
        If a count is less than −1, or ``align`` is not known or given together with ``offset``.
    TypeError
        If a count is not an int.

    Examples
    --------
    >>> from regard import masks
    >>> print(masks.window(2, 0).draw(5))
    window(2, 0)
    5 queries ↓, 5 keys →; █ visible, · not
      0
    0 █····
    1 ██···
    2 ███··
    3 ·███·
    4 ··███
    """
    note = " (-1 is no bound)"
    left = as_int("masks.window", "left", left, -1, note)
    right = as_int("masks.window", "right", right, -1, note)
    return Band("window", min(left, _FAR), min(right, _FAR), *checked("window", align, offset))


#: Farther than any position; positions and this add up without an overflow.
_FAR = 1 << 61


@final
class Band(Aligned):
    """Keys from ``left`` before to ``right`` after the query's position; −1 is no bound."""

    def __init__(
        self,
        name: str,
        left: int,
        right: int,
        align: str | None,
        offset: Offset,
        lengths: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(align, offset)
        self.name = name
        self.left = left
        self.right = right
        #: The only L and S it is for; None for any.
        self.lengths = lengths

    def _twin(self) -> Band:
        return Band(self.name, self.left, self.right, self.align, self.offset, self.lengths)

    def fit(self, extent: Extent, device: torch.device) -> Mask:
        """Resolve the alignment, and check the lengths."""
        if self.lengths not in (None, (extent.L, extent.S)):
            expected = f"be made for (L, S) = {(extent.L, extent.S)}"
            raise rejected("masks.as_mask", "CausalBias", expected, f"one made for {self.lengths}")
        return super().fit(extent, device)

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return where left ≤ k − position ≤ right."""
        if not self.hides:
            return None
        position = self.positions(b, q_idx)
        if self.left < 0:
            return kv_idx <= (position + self.right if self.right else position)
        above = kv_idx >= position - self.left
        return above if self.right < 0 else above & (kv_idx <= position + self.right)

    @property
    def hides(self) -> bool:
        """Whether there is a bound."""
        return self.left >= 0 or self.right >= 0

    @property
    def bounds_are_exact(self) -> bool:
        """Always: k − q takes every value between its least and greatest in a tile."""
        return True

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return which tiles meet the band, and which lie in it."""
        first, last = self.tile_positions(tiling.q_lo), self.tile_positions(tiling.q_hi)
        some = every = None
        if self.right >= 0:
            some = tiling.k_lo <= last + self.right
            every = tiling.k_hi <= first + self.right
        if self.left >= 0:
            some_left, every_left = tiling.k_hi >= first - self.left, tiling.k_lo >= last - self.left
            some = some_left if some is None else some & some_left
            every = every_left if every is None else every & every_left
        if some is None or every is None:
            return tiling.full()
        return some, every

    def as_band(self, extent: Extent) -> Diagonals | None:
        """Return the bounds of k − q, unless the offset is a tensor."""
        if not self.hides:
            return None, None
        if isinstance(self.offset, Tensor):
            return None
        bound = self if self._shift is not None else self.fit(extent, torch.device("cpu"))
        shift = bound._shift if isinstance(bound, Band) and bound._shift else 0
        return None if self.left < 0 else shift - self.left, None if self.right < 0 else shift + self.right

    def span(self, extent: Extent, device: torch.device) -> Span | None:
        """Return the band's edges in each row."""
        if not self.hides:
            return None, None
        b = torch.arange(extent.B, device=device)[:, None, None]
        position = self.positions(b, torch.arange(extent.L, device=device)[None, None])
        # Clamped before 1 is added, which could overflow.
        stop = None if self.right < 0 else (position + self.right).clamp(max=extent.S - 1) + 1
        return None if self.left < 0 else position - self.left, stop

    def __repr__(self) -> str:
        return self._call() if self.name == "causal" else self._call(self.left, self.right)
