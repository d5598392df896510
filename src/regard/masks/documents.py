"""Packed sequences: a query sees only the keys of its own document."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from regard._utils.constraints import TensorOf, reach
from regard._utils.errors import described, rejected, shape
from regard._utils.mechanism import mechanism
from regard._utils.part import brief
from regard._utils.tracing import values_unavailable
from regard.masks.base import Extent, Mask, Sizes, Span, Tiling, constant, lookup

#: Documents of queries, and the limits of packed sequences.
_IDS, _LIMITS = TensorOf(("L",), ("B", "L"), integer=True), TensorOf(("N + 1",), integer=True)


@mechanism(formula="visible iff i and j are in one document", cost="O(L·n·E)")
def document(ids: Tensor, kv_ids: Tensor | None = None) -> Mask:
    """Return the mask in which each query sees only the keys of its own document.

    Visible iff ``ids[b, q] = kv_ids[b, k]``.

    Parameters
    ----------
    ids : Tensor (L,) or (B, L), integer
        The document id of each query. Any integers; documents need not be contiguous.
    kv_ids : Tensor (S,) or (B, S), integer, optional
        The document id of each key; defaults to ``ids``.

    Raises
    ------
    TypeError
        If a tensor does not hold integers.
    ValueError
        If a tensor has another number of dimensions or, when used, sizes that do not match the call.

    Examples
    --------
    >>> import torch
    >>> from regard import masks
    >>> print((masks.document(torch.tensor([7, 7, 9, 9, 9])) & masks.causal()).draw())
    document(tensor[5]) & causal()
    5 queries ↓, 5 keys →; █ visible, · not
      0
    0 █····
    1 ██···
    2 ··█··
    3 ··██·
    4 ··███
    """
    ids = _IDS("masks.document", "ids", ids)
    if kv_ids is not None:
        kv_ids = TensorOf(("S",), ("B", "S"), integer=True)("masks.document", "kv_ids", kv_ids)
    return Documents(ids, kv_ids)


@mechanism(formula="visible iff i and j are in one packed sequence", cost="O(L·n·E)")
def from_cu_seqlens(
    cu_q: Tensor,
    cu_kv: Tensor | None = None,
    *,
    window: tuple[int, int] | None = None,
    align: str | None = None,
) -> Mask:
    """Return the mask of packed sequences, from their cumulative lengths.

    Query q belongs to sequence i iff ``cu_q[i] ≤ q < cu_q[i + 1]``, and sees the keys of that sequence:
    ``cu_kv[i] ≤ k < cu_kv[i + 1]``. With a window (left, right) it sees those with ``p − left ≤ k ≤ p + right``, where
    p is the key position of the query: ``p = q + cu_kv[i + 1] − cu_q[i + 1]`` (lower right) or
    ``p = q + cu_kv[i] − cu_q[i]`` (upper left). Positions past the last sequence are padding: they see nothing and are
    hidden.

    Parameters
    ----------
    cu_q : Tensor (N + 1,), integer
        Start of each of N sequences of queries, and the end of the last: ``[0, 3, 7]`` for lengths 3 and 4.
    cu_kv : Tensor (N + 1,), integer, optional
        The same for keys; defaults to ``cu_q``.
    window : (int, int), optional
        Number of keys visible before and after the query's own position, or −1 for all: ``(-1, 0)`` is causal.
    align : {"lower_right", "upper_left"}, optional
        Positions of the queries among the keys of a sequence: the last query at the last key (the default), or query 0
        at key 0. The two agree for sequences with as many queries as keys. Requires ``window``.

    Raises
    ------
    TypeError
        If a tensor does not hold integers, or ``window`` is not a pair of ints.
    ValueError
        If a tensor is not one-dimensional, the two differ in length, a window count is less than −1, or ``align`` is
        unknown or given without ``window``. On the CPU also if a tensor does not start with 0 or decreases and, when
        used, if it ends past the last query or key. Values on other devices are not checked.

    Notes
    -----
    FlashAttention's ``flash_attn_varlen_func`` takes the same tensors:

    ===============================================  =======================================
    FlashAttention                                   regard
    ===============================================  =======================================
    ``cu_seqlens_q, cu_seqlens_k``                   ``from_cu_seqlens(cu_q, cu_kv)``
    ``causal=True``                                  ``window=(-1, 0)``
    ``window_size=(l, r)``                           ``window=(l, r)``
    ``causal=True, window_size=(l, r)``              ``window=(l, 0)``
    ===============================================  =======================================

    If ``cu_kv`` equals ``cu_q``, ``from_cu_seqlens(cu) & causal()`` is the same as ``window=(-1, 0)``. If the lengths
    differ, no single offset aligns all sequences.

    Examples
    --------
    >>> import torch
    >>> from regard import masks
    >>> print(masks.from_cu_seqlens(torch.tensor([0, 2, 4])).draw(5, 5))
    from_cu_seqlens(tensor[3])
    5 queries ↓, 5 keys →; █ visible, · not
      0
    0 ██···
    1 ██···
    2 ··██·
    3 ··██·
    4 ·····

    Two sequences: 2 new queries with a cache of 3 keys, and 3 queries without a cache.

    >>> cu_q, cu_kv = torch.tensor([0, 2, 5]), torch.tensor([0, 5, 8])
    >>> print(masks.from_cu_seqlens(cu_q, cu_kv, window=(-1, 0)))
    from_cu_seqlens(tensor[3], tensor[3], window=(-1, 0))
    5 queries ↓, 8 keys →; █ visible, · not
      0    5
    0 ████····
    1 █████···
    2 ·····█··
    3 ·····██·
    4 ·····███
    """
    cu_q = _cumulative("cu_q", cu_q)
    if cu_kv is not None:
        cu_kv = _cumulative("cu_kv", cu_kv)
        if cu_kv.shape != cu_q.shape:
            raise rejected("masks.from_cu_seqlens", "cu_kv", f"have cu_q's length {len(cu_q)}", len(cu_kv))
    return Packed(cu_q, cu_kv, _window(window, align), align)


def _cumulative(argument: str, cu: Tensor) -> Tensor:
    function = "masks.from_cu_seqlens"
    cu = _LIMITS(function, argument, cu)
    if cu.shape[0] == 0:
        raise rejected(function, argument, "begin with 0", "an empty tensor")
    if _is_readable(cu):
        if int(cu[0]) != 0:
            raise rejected(
                function, argument, "begin with 0 (it holds cumulative lengths, not lengths)", cu.tolist()[:8]
            )
        if bool((cu[1:] < cu[:-1]).any()):
            raise rejected(function, argument, "be non-decreasing", cu.tolist()[:8])
    return cu


def _is_readable(tensor: Tensor) -> bool:
    """Whether reading the tensor's values is possible and cheap."""
    return tensor.is_cpu and not values_unavailable(tensor)


def _window(window: Any, align: Any) -> tuple[int, int] | None:
    function = "masks.from_cu_seqlens"
    if align not in (None, "lower_right", "upper_left"):
        raise rejected(function, "align", "be 'lower_right', 'upper_left' or None", repr(align))
    if window is None:
        if align is not None:
            raise rejected(function, "align", "be None without a window", repr(align))
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise rejected(function, "window", "be a pair (left, right) or None", described(window), TypeError)
    left, right = (reach(function, f"window[{i}]", side) for i, side in enumerate(window))
    return min(left, _FAR), min(right, _FAR)


#: Beyond any position, and small enough that adding it to a position does not overflow.
_FAR = 1 << 61


@final
class Documents(Mask):
    """Pairs with equal document ids."""

    def __init__(self, ids: Tensor, kv_ids: Tensor | None) -> None:
        self.ids = ids
        self.kv_ids = kv_ids

    @property
    def _keys(self) -> Tensor:
        return self.ids if self.kv_ids is None else self.kv_ids

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return which pairs have equal ids."""
        own = lookup(self.ids, *(b, q_idx)[-self.ids.dim() :])
        return own == lookup(self._keys, *(b, kv_idx)[-self._keys.dim() :])

    def fit(self, extent: Extent, device: torch.device) -> Mask:  # noqa: ARG002
        """Check the tensors' sizes."""
        if self.kv_ids is None and extent.L != extent.S:
            expected = "be given if the numbers of queries and keys differ"
            raise rejected("masks.document", "kv_ids", expected, f"None ({extent.L} queries, {extent.S} keys)")
        for argument, ids, size in (("ids", self.ids, extent.L), ("kv_ids", self._keys, extent.S)):
            if tuple(ids.shape) != (extent.B, size)[-ids.dim() :]:
                what, letter = ("query", "L") if argument == "ids" else ("key", "S")
                expected = (
                    f"have one id per {what}: shape ({letter},) = ({size},) or (B, {letter}) = {(extent.B, size)}"
                )
                raise rejected("masks.document", argument, expected, shape(ids))
        return self

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return which tiles have overlapping ranges of ids, and which contain a single id."""
        q_ids = (self.ids if self.ids.dim() == 1 else self.ids[:, None])[..., None]
        k_ids = self._keys if self._keys.dim() == 1 else self._keys[:, None, None]
        q_min, q_max = tiling.over_queries(q_ids, "amin"), tiling.over_queries(q_ids, "amax")
        k_min, k_max = tiling.over_keys(k_ids, "amin"), tiling.over_keys(k_ids, "amax")
        return _overlap(q_min, q_max, k_min, k_max)

    def span(self, extent: Extent, device: torch.device) -> Span | None:
        """Return the keys of each query's document, if they are contiguous."""
        if extent.S == 0:
            return None, constant(0, device)
        q_ids, k_ids = (torch.atleast_2d(ids.to(torch.int64)) for ids in (self.ids, self._keys))
        if values_unavailable(q_ids) or values_unavailable(k_ids):
            return None
        # A stable sort groups the keys of each document, in order.
        k_ids, order = k_ids.sort(stable=True)
        B = max(q_ids.shape[0], k_ids.shape[0]) if extent.B else 0
        q_ids, k_ids, order = (x.expand(B, -1).contiguous() for x in (q_ids, k_ids, order))
        first, end = (torch.searchsorted(k_ids, q_ids, right=right) for right in (False, True))
        counts = end - first
        start = order.gather(1, first.clamp(max=extent.S - 1))
        stop = torch.where(counts > 0, order.gather(1, (end - 1).clamp(min=0)) + 1, start)
        if bool((stop - start != counts).any()):
            return None
        return start[:, None], stop[:, None]

    def sizes(self) -> Sizes:
        """Return the sizes B, L and S of the tensors."""
        B = next((ids.shape[0] for ids in (self.ids, self._keys) if ids.dim() == 2), None)
        return B, None, self.ids.shape[-1], self._keys.shape[-1]

    def __repr__(self) -> str:
        keys = "" if self.kv_ids is None else f", {brief(self.kv_ids)}"
        return f"document({brief(self.ids)}{keys})"


@final
class Packed(Mask):
    """Pairs of the same packed sequence, optionally within a window.

    Each query sees one contiguous range of keys, whose start and stop are non-decreasing in q.
    """

    def __init__(
        self, cu_q: Tensor, cu_kv: Tensor | None, window: tuple[int, int] | None = None, align: str | None = None
    ) -> None:
        self.cu_q = cu_q
        self.cu_kv = cu_kv
        self.window = window
        self.align = align

    @property
    def _cu_keys(self) -> Tensor:
        return self.cu_q if self.cu_kv is None else self.cu_kv

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return which keys lie in the query's range."""
        start, stop = self._run(q_idx)
        return (start <= kv_idx) & (kv_idx < stop)

    def fit(self, extent: Extent, device: torch.device) -> Mask:  # noqa: ARG002
        """Check that the last sequence ends within the sizes."""
        for cu, size, what in ((self.cu_q, extent.L, "queries"), (self._cu_keys, extent.S, "keys")):
            if _is_readable(cu) and (end := int(cu[-1])) > size:
                argument = "cu_q" if cu is self.cu_q else "cu_kv"
                expected = f"end at or before {size}, the number of {what}"
                raise rejected("masks.from_cu_seqlens", argument, expected, end)
        return self

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return which tiles touch the ranges of their first and last query, and which lie in both."""
        (first_start, first_stop), (last_start, last_stop) = self._run(tiling.q_lo), self._run(tiling.q_hi)
        some = (first_start <= tiling.k_hi) & (tiling.k_lo < last_stop) & (tiling.q_lo < self.cu_q[-1])
        return some, (last_start <= tiling.k_lo) & (tiling.k_hi < first_stop)

    def span(self, extent: Extent, device: torch.device) -> Span | None:
        """Return each query's range of keys."""
        q_idx = torch.arange(extent.L, device=device)[None, None]
        start, stop, _ = torch.broadcast_tensors(*self._run(q_idx), q_idx)
        return start, stop

    def _run(self, q_idx: Tensor) -> tuple[Tensor, Tensor]:
        """Return the visible keys start ≤ k < stop; for padding, both are the end of the last sequence."""
        own = torch.bucketize(q_idx, self.cu_q[1:].to(q_idx.dtype), right=True)  # index of the query's sequence
        following = (own + 1).clamp(max=self.cu_q.shape[0] - 1)
        start, stop = _at(self._cu_keys, own), _at(self._cu_keys, following)
        if self.window is None:
            return start, stop
        left, right = self.window
        behind = start - _at(self.cu_q, own) if self.align == "upper_left" else stop - _at(self.cu_q, following)
        position = q_idx + behind
        low = start if left < 0 else (position - left).clamp(start, stop)
        high = stop if right < 0 else (position + right + 1).clamp(start, stop)
        return low, high

    def sizes(self) -> Sizes:
        """Return the total lengths L and S."""
        return None, None, max(int(self.cu_q[-1]), 1), max(int(self._cu_keys[-1]), 1)

    def __repr__(self) -> str:
        keys = "" if self.cu_kv is None else f", {brief(self.cu_kv)}"
        window = "" if self.window is None else f", window={self.window}"
        align = "" if self.align is None else f", align={self.align!r}"
        return f"from_cu_seqlens({brief(self.cu_q)}{keys}{window}{align})"


def _at(cu: Tensor, index: Tensor) -> Tensor:
    """Return cumulative lengths as int64."""
    return lookup(cu, index).to(torch.int64)


def _overlap(q_min: Tensor, q_max: Tensor, k_min: Tensor, k_max: Tensor) -> tuple[Tensor, Tensor]:
    some = (q_min <= k_max) & (k_min <= q_max)
    return some, some & (q_min == q_max) & (k_min == k_max)
