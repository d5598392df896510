"""Several documents in one sequence: a query sees its own document alone."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from regard._utils.constraints import TensorOf, reach
from regard._utils.errors import described, rejected, shape
from regard._utils.part import brief
from regard._utils.tracing import values_unavailable
from regard.masks.base import Extent, Mask, Sizes, Span, Tiling, constant, lookup

#: Documents of queries, and the limits of packed sequences.
_IDS, _LIMITS = TensorOf(("L",), ("B", "L"), integer=True), TensorOf(("N + 1",), integer=True)


def document(ids: Tensor, kv_ids: Tensor | None = None) -> Mask:
    """Return the mask that shows a query the keys of its own document.

    Visible iff ``ids[b, q] = kv_ids[b, k]``.

    Parameters
    ----------
    ids : Tensor (L,) or (B, L), integer
        The document of each query. Equal ids need not be neighbours; the numbers mean nothing.
    kv_ids : Tensor (S,) or (B, S), integer, optional
        The document of each key; by default as for the queries.

    Raises
    ------
    TypeError
        If a tensor does not hold integers.
    ValueError
        If it has another number of dimensions; when used, if its sizes are not those of the call.

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


def from_cu_seqlens(
    cu_q: Tensor,
    cu_kv: Tensor | None = None,
    *,
    window: tuple[int, int] | None = None,
    align: str | None = None,
) -> Mask:
    """Return the mask of sequences packed one behind the other, from their cumulative lengths.

    Query q is of sequence i iff ``cu_q[i] ≤ q < cu_q[i + 1]``, and sees the keys of that sequence:
    ``cu_kv[i] ≤ k < cu_kv[i + 1]``. With a window (left, right) it sees those of them for which
    ``p − left ≤ k ≤ p + right``, where p is the key at which the query lies: ``p = q + cu_kv[i + 1] − cu_q[i + 1]``
    (lower right) or ``p = q + cu_kv[i] − cu_q[i]`` (upper left). What lies past the last end is padding: it sees
    nothing, and nothing sees it.

    Parameters
    ----------
    cu_q : Tensor (N + 1,), integer
        Where each of N sequences of queries begins, and where the last one ends: ``[0, 3, 7]`` for lengths 3 and 4.
    cu_kv : Tensor (N + 1,), integer, optional
        The same for keys; by default as for queries.
    window : (int, int), optional
        How many keys before and after its own position a query sees, or −1 for all: ``(-1, 0)`` is causal.
    align : {"lower_right", "upper_left"}, optional
        Where the queries of a sequence lie among its keys: the last query at the last key (the default), or query 0
        at key 0. The two agree where a sequence has as many queries as keys. Only with a window.

    Raises
    ------
    TypeError
        If a tensor does not hold integers, or ``window`` is not a pair of ints.
    ValueError
        If a tensor is not one-dimensional, the two differ in length, a count is less than −1, or ``align`` is not
        known or given without ``window``. On the CPU, where looking costs nothing, also if a tensor does not begin
        with 0 or descends; when used, if its last end is past the last query or key.

    Notes
    -----
    FlashAttention's ``flash_attn_varlen_func`` takes the same tensors:

    ===============================================  =======================================
    there                                            here
    ===============================================  =======================================
    ``cu_seqlens_q, cu_seqlens_k``                   ``from_cu_seqlens(cu_q, cu_kv)``
    ``causal=True``                                  ``window=(-1, 0)``
    ``window_size=(l, r)``                           ``window=(l, r)``
    ``causal=True, window_size=(l, r)``              ``window=(l, 0)``
    ===============================================  =======================================

    ``from_cu_seqlens(cu) & causal()`` is the same as ``window=(-1, 0)`` where ``cu_kv`` is ``cu_q``. Where the
    lengths differ, no single offset aligns all sequences.

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

    Two sequences: 2 new queries behind a cache of 3 keys, and 3 queries without one.

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
    if _can_look(cu):
        if int(cu[0]) != 0:
            raise rejected(
                function, argument, "begin with 0 (it holds cumulative lengths, not lengths)", cu.tolist()[:8]
            )
        if bool((cu[1:] < cu[:-1]).any()):
            raise rejected(function, argument, "never descend", cu.tolist()[:8])
    return cu


def _can_look(tensor: Tensor) -> bool:
    """Whether a tensor's values can be read for nothing."""
    return tensor.is_cpu and not values_unavailable(tensor)


def _window(window: Any, align: Any) -> tuple[int, int] | None:
    function = "masks.from_cu_seqlens"
    if align not in (None, "lower_right", "upper_left"):
        raise rejected(function, "align", "be 'lower_right', 'upper_left' or None", repr(align))
    if window is None:
        if align is not None:
            raise rejected(function, "align", "be left out where no window is given", repr(align))
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise rejected(function, "window", "be a pair (left, right) or None", described(window), TypeError)
    left, right = (reach(function, f"window[{i}]", side) for i, side in enumerate(window))
    return min(left, _FAR), min(right, _FAR)


#: Farther than any position; positions and this add up without an overflow.
_FAR = 1 << 61


@final
class Documents(Mask):
    """Pairs of equal ids."""

    def __init__(self, ids: Tensor, kv_ids: Tensor | None) -> None:
        self.ids = ids
        self.kv_ids = kv_ids

    @property
    def _keys(self) -> Tensor:
        return self.ids if self.kv_ids is None else self.kv_ids

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return where the ids are equal."""
        own = lookup(self.ids, *(b, q_idx)[-self.ids.dim() :])
        return own == lookup(self._keys, *(b, kv_idx)[-self._keys.dim() :])

    def fit(self, extent: Extent, device: torch.device) -> Mask:  # noqa: ARG002
        """Check the tensors' sizes."""
        if self.kv_ids is None and extent.L != extent.S:
            expected = "be given where there are not as many queries as keys"
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
        """Return which tiles' ranges of ids overlap, and which hold one id only."""
        q_ids = (self.ids if self.ids.dim() == 1 else self.ids[:, None])[..., None]
        k_ids = self._keys if self._keys.dim() == 1 else self._keys[:, None, None]
        q_min, q_max = tiling.over_queries(q_ids, "amin"), tiling.over_queries(q_ids, "amax")
        k_min, k_max = tiling.over_keys(k_ids, "amin"), tiling.over_keys(k_ids, "amax")
        return _overlap(q_min, q_max, k_min, k_max)

    def span(self, extent: Extent, device: torch.device) -> Span | None:
        """Return where each query's document is, if the keys of every document that is asked for are neighbours."""
        if extent.S == 0:
            return None, constant(0, device)
        q_ids, k_ids = (torch.atleast_2d(ids.to(torch.int64)) for ids in (self.ids, self._keys))
        if values_unavailable(q_ids) or values_unavailable(k_ids):
            return None
        # In a stable order, the keys of a document follow each other, first to last.
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
        """Return B, L and S of the tensors."""
        B = next((ids.shape[0] for ids in (self.ids, self._keys) if ids.dim() == 2), None)
        return B, None, self.ids.shape[-1], self._keys.shape[-1]

    def __repr__(self) -> str:
        keys = "" if self.kv_ids is None else f", {brief(self.kv_ids)}"
        return f"document({brief(self.ids)}{keys})"


@final
class Packed(Mask):
    """Pairs of the same packed sequence; with a window, those of them that are near each other.

    Each query sees one run of keys. Its start and its stop never descend from query to query.
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
        """Return where a key lies in the query's run."""
        start, stop = self._run(q_idx)
        return (start <= kv_idx) & (kv_idx < stop)

    def fit(self, extent: Extent, device: torch.device) -> Mask:  # noqa: ARG002
        """Check the last ends."""
        for cu, size, what in ((self.cu_q, extent.L, "queries"), (self._cu_keys, extent.S, "keys")):
            if _can_look(cu) and (end := int(cu[-1])) > size:
                argument = "cu_q" if cu is self.cu_q else "cu_kv"
                expected = f"end at {size}, the number of {what}, or before"
                raise rejected("masks.from_cu_seqlens", argument, expected, end)
        return self

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return which tiles the runs of the first and last query leave open, and which lie in both."""
        (first_start, first_stop), (last_start, last_stop) = self._run(tiling.q_lo), self._run(tiling.q_hi)
        some = (first_start <= tiling.k_hi) & (tiling.k_lo < last_stop) & (tiling.q_lo < self.cu_q[-1])
        return some, (last_start <= tiling.k_lo) & (tiling.k_hi < first_stop)

    def span(self, extent: Extent, device: torch.device) -> Span | None:
        """Return each query's run."""
        q_idx = torch.arange(extent.L, device=device)[None, None]
        start, stop, _ = torch.broadcast_tensors(*self._run(q_idx), q_idx)
        return start, stop

    def _run(self, q_idx: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys start ≤ k < stop that queries see; of padding, both are the end of the last sequence."""
        own = torch.bucketize(q_idx, self.cu_q[1:].to(q_idx.dtype), right=True)  # how many ends lie at or before it
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
        """Return the ends of the last sequences."""
        return None, None, max(int(self.cu_q[-1]), 1), max(int(self._cu_keys[-1]), 1)

    def __repr__(self) -> str:
        keys = "" if self.cu_kv is None else f", {brief(self.cu_kv)}"
        window = "" if self.window is None else f", window={self.window}"
        align = "" if self.align is None else f", align={self.align!r}"
        return f"from_cu_seqlens({brief(self.cu_q)}{keys}{window}{align})"


def _at(cu: Tensor, index: Tensor) -> Tensor:
    """Return cumulative lengths, in integers that can be subtracted."""
    return lookup(cu, index).to(torch.int64)


def _overlap(q_min: Tensor, q_max: Tensor, k_min: Tensor, k_max: Tensor) -> tuple[Tensor, Tensor]:
    some = (q_min <= k_max) & (k_min <= q_max)
    return some, some & (q_min == q_max) & (k_min == k_max)
