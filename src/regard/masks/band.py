"""Masks that depend on the distance of query and key: causal, sliding window and dilated."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, final

import torch
from torch import Tensor

from regard._utils.constraints import integer, offsets, reach, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard._utils.part import brief
from regard.masks.base import (
    Diagonals,
    Extent,
    Mask,
    Sizes,
    Span,
    Tiling,
    is_instance,
    lookup,
    register_conversion,
)

# Alignment of queries and keys ----------------------------------------------------------------------------------------


#: Type of ``offset``: query i is at key position i + offset.
Offset = int | Tensor | None

_ALIGNMENT_NEEDED = (
    "be given if the numbers of queries and keys differ: 'upper_left' (query 0 is at key 0) "
    "or 'lower_right' (the last query is at the last key)"
)


class Aligned(Mask):
    """A mask in which query i is at key position i + offset.

    Parameters
    ----------
    align : {"upper_left", "lower_right"}, optional
        Offset 0, or S − L. If L ≠ S, an alignment or an offset is required.
    offset : int or Tensor () or (B,), optional
        Number of keys before query 0: when decoding, the length of the cache.
    """

    #: The function that made the mask, for error messages and the repr.
    name: str

    def __init__(self, align: str | None, offset: Offset) -> None:
        self.align = align
        self.offset = offset
        #: The offset if it is an int; None if it is a tensor or not resolved yet.
        self._shift: int | None = offset if isinstance(offset, int) else None

    @abstractmethod
    def _twin(self) -> Aligned:
        """Return a new mask with the same arguments."""

    def fit(self, extent: Extent, device: torch.device) -> Mask:  # noqa: ARG002
        """Resolve the alignment."""
        offset, function = self.offset, f"masks.{self.name}"
        if isinstance(offset, Tensor):
            if offset.dim() == 1 and offset.shape[0] != extent.B:
                raise rejected(function, "offset", f"have one entry per sequence ({extent.B})", tuple(offset.shape))
            return self
        if offset is not None or self.align == "upper_left":
            return self
        L, S = extent.L, extent.S
        if self.align is None and L != S and L != 0 and S != 0:
            raise rejected(function, "align", _ALIGNMENT_NEEDED, f"None ({L} queries, {S} keys)")
        twin = self._twin()
        twin._shift = S - L if self.align == "lower_right" else 0
        return twin

    def in_tensors(self, dtype: torch.dtype, device: torch.device) -> Mask:
        """Return the mask with a tensor as its offset."""
        if isinstance(self.offset, Tensor):
            return self.cast(dtype)
        twin = self._twin()
        twin.align, twin.offset, twin._shift = None, torch.tensor(self._shift or 0, device=device), None
        return twin.cast(dtype)

    def for_lengths(self, queries: Tensor, keys: Tensor) -> Mask:
        """Return the mask with one offset per sequence, if its alignment depends on the lengths."""
        if self.offset is not None or self.align == "upper_left":
            return self
        twin = self._twin()
        if self.align == "lower_right":
            twin.align, twin.offset = None, keys - queries
            return twin
        unclear = (queries != keys) & (queries != 0) & (keys != 0)
        if bool(unclear.any()):
            i = int(unclear.int().argmax())
            got = f"None ({int(queries[i])} queries, {int(keys[i])} keys in sequence {i})"
            raise rejected(f"masks.{self.name}", "align", _ALIGNMENT_NEEDED, got)
        twin.align = "upper_left"
        return twin

    def positions(self, b: Tensor, q_idx: Tensor) -> Tensor:
        """Return the key positions of queries, which depend on b if there is an offset per sequence."""
        if isinstance(self.offset, Tensor):
            return q_idx + (lookup(self.offset, b) if self.offset.dim() else self.offset)
        if self._shift is None and self.align == "lower_right":
            raise ValueError(
                f"masks.{self.name}: align='lower_right' needs the numbers of queries and keys; "
                f"call .bind(Extent(B, H, L, S), device) first, or pass an offset."
            )
        return q_idx + self._shift if self._shift else q_idx

    def tile_positions(self, q_idx: Tensor) -> Tensor:
        """Return the key positions of queries (nq, 1) as (nq, 1), or (B, 1, nq, 1)."""
        if isinstance(self.offset, Tensor):
            return q_idx + self.offset.reshape(-1, 1, 1, 1)
        return q_idx + self._shift if self._shift else q_idx

    def sizes(self) -> Sizes:
        """Return the size B of an offset per sequence."""
        B = self.offset.shape[0] if isinstance(self.offset, Tensor) and self.offset.dim() else None
        return B, None, None, None

    def _call(self, *arguments: Any) -> str:
        written = [str(x) for x in arguments]
        if self.align is not None:
            written.append(f"align={self.align!r}")
        if self.offset is not None:
            shown = brief(self.offset) if isinstance(self.offset, Tensor) else self.offset
            written.append(f"offset={shown}")
        return f"{self.name}({', '.join(written)})"


def checked(name: str, align: Any, offset: Any) -> tuple[str | None, Offset]:
    """Return a valid alignment and offset, or raise."""
    function = f"masks.{name}"
    if align not in (None, "upper_left", "lower_right"):
        raise rejected(function, "align", "be 'upper_left', 'lower_right' or None", repr(align))
    if offset is None:
        return align, None
    if align is not None:
        raise rejected(function, "offset", "be None if align is given", f"align={align!r} and an offset")
    if isinstance(offset, Tensor):
        return None, offsets(function, "offset", offset)
    return None, integer(function, "offset", offset)


# Causal masks and sliding windows -------------------------------------------------------------------------------------


@mechanism(formula="visible iff j ≤ i", sources=("vaswani2017",), cost="O(L·S·E)")
def causal(align: str | None = None, offset: Offset = None) -> Mask:
    """Return the causal mask: each query sees the keys up to its own position.

    Visible iff ``k ≤ q + offset``.

    Parameters
    ----------
    align : {"upper_left", "lower_right"}, optional
        "upper_left" is offset 0, torch's ``is_causal=True``. "lower_right" is offset S − L: the last query sees
        every key, as in FlashAttention. The two agree if L = S; otherwise ``align`` or ``offset`` is required.
        A mask called directly, without lengths, uses offset 0 by default.
    offset : int or Tensor () or (B,), optional
        Number of keys before query 0. When decoding, the number of cached keys, which may differ per sequence.

    Raises
    ------
    ValueError
        If ``align`` is unknown, or given together with ``offset``.
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


@mechanism(formula="visible iff i − left ≤ j ≤ i + right", sources=("beltagy2020",), cost="O(L·w·E)")
def window(left: int, right: int, align: str | None = None, offset: Offset = None) -> Mask:
    """Return the sliding-window mask: each query sees the keys near its own position.

    Visible iff ``q + offset − left ≤ k ≤ q + offset + right``; −1 is no bound. Neither count includes the
    query's own position, which is always visible.

    Parameters
    ----------
    left, right : int
        Number of keys before and after the query, or −1 for all.
    align, offset
        See :func:`causal`.

    Notes
    -----
    The same window in other libraries:

    ===============================================  =======================================
    library                                          regard
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
        If a count is less than −1, or ``align`` is unknown or given together with ``offset``.
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
    left, right = reach("masks.window", "left", left), reach("masks.window", "right", right)
    return Band("window", min(left, _FAR), min(right, _FAR), *checked("window", align, offset))


#: Beyond any position, and small enough that adding it to a position does not overflow.
_FAR = 1 << 61


@final
class Band(Aligned):
    """Keys from ``left`` positions before to ``right`` positions after the query; −1 is no bound."""

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
        #: The only L and S that the mask supports; None for any.
        self.lengths = lengths

    @property
    def ends_at_last(self) -> bool:
        """Whether the last query sees every key, whatever the numbers of queries and keys are."""
        aligned = self.align == "lower_right" and self.offset is None and self._shift is None
        return aligned and self.left < 0 and self.lengths is None

    def _twin(self) -> Band:
        return Band(self.name, self.left, self.right, self.align, self.offset, self.lengths)

    def fit(self, extent: Extent, device: torch.device) -> Mask:
        """Resolve the alignment, and check the lengths."""
        if self.lengths not in (None, (extent.L, extent.S)):
            expected = f"be made for (L, S) = {(extent.L, extent.S)}"
            raise rejected("masks.as_mask", "CausalBias", expected, f"one made for {self.lengths}")
        return super().fit(extent, device)

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return which keys satisfy −left ≤ k − position ≤ right."""
        if not self.hides:
            return None
        position = self.positions(b, q_idx)
        if self.left < 0:
            return kv_idx <= (position + self.right if self.right else position)
        above = kv_idx >= position - self.left
        return above if self.right < 0 else above & (kv_idx <= position + self.right)

    @property
    def hides(self) -> bool:
        """Whether there is a bound on either side."""
        return self.left >= 0 or self.right >= 0

    @property
    def bounds_are_exact(self) -> bool:
        """Always: k − q takes every value between its minimum and maximum in a tile."""
        return True

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return which tiles overlap the band, and which lie within it."""
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
        # Clamp before adding 1, which could overflow.
        stop = None if self.right < 0 else (position + self.right).clamp(max=extent.S - 1) + 1
        return None if self.left < 0 else position - self.left, stop

    def __repr__(self) -> str:
        return self._call() if self.name == "causal" else self._call(self.left, self.right)


# Dilated masks --------------------------------------------------------------------------------------------------------


@mechanism(formula="visible iff i − j is a multiple of the step", sources=("child2019",), cost="O(L·S·E)")
def dilated(step: int, align: str | None = None, offset: Offset = None) -> Mask:
    """Return the dilated mask: each query sees every ``step``-th key, counted from its own position in both directions.

    Visible iff ``(q + offset − k) mod step = 0``. A dilated window is ``dilated(2) & window(8, 8)``.

    Parameters
    ----------
    step : int
        At least 1, which shows all keys.
    align, offset
        See :func:`~regard.masks.causal`.

    Raises
    ------
    ValueError
        If ``step`` is less than 1, or ``align`` is unknown or given together with ``offset``.
    TypeError
        If ``step`` is not an int.

    Examples
    --------
    >>> from regard import masks
    >>> print((masks.dilated(2) & masks.causal()).draw(4))
    dilated(2) & causal()
    4 queries ↓, 4 keys →; █ visible, · not
      0
    0 █···
    1 ·█··
    2 █·█·
    3 ·█·█
    """
    return Dilated(size("masks.dilated", "step", step), *checked("dilated", align, offset))


@final
class Dilated(Aligned):
    """Keys whose distance from the query is a multiple of ``step``."""

    name = "dilated"

    def __init__(self, step: int, align: str | None, offset: Offset) -> None:
        super().__init__(align, offset)
        self.step = step

    def _twin(self) -> Dilated:
        return Dilated(self.step, self.align, self.offset)

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return the keys for which ``step`` divides position − k."""
        return (self.positions(b, q_idx) - kv_idx) % self.step == 0

    @property
    def bounds_are_exact(self) -> bool:
        """Always: position − k takes every value between its minimum and maximum in a tile."""
        return True

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return which tiles contain a multiple of the step among their distances, and which contain nothing else."""
        least = self.tile_positions(tiling.q_lo) - tiling.k_hi
        greatest = self.tile_positions(tiling.q_hi) - tiling.k_lo
        some = greatest - greatest % self.step >= least
        return some, some & ((least == greatest) | (self.step == 1))

    def span(self, extent: Extent, device: torch.device) -> Span | None:  # noqa: ARG002
        """Return all keys for step 1."""
        return (None, None) if self.step == 1 else None

    def __repr__(self) -> str:
        return self._call(self.step)


def _is_causal_bias(value: Any) -> bool:
    return is_instance(value, "torch.nn.attention.bias.CausalBias")


def _of_causal_bias(bias: Any, function: str, argument: str) -> Band:  # noqa: ARG001
    if bias.variant.name == "UPPER_LEFT":
        return Band("causal", -1, 0, None, 0)
    lengths = bias.seq_len_q, bias.seq_len_kv
    return Band("causal", -1, 0, None, lengths[1] - lengths[0], lengths)


register_conversion(_is_causal_bias, _of_causal_bias)
