"""Several documents in one sequence: a query sees its own document alone."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from regard._errors import rejected, shape
from regard._part import brief
from regard._tracing import is_blind
from regard.masks._checks import int_tensor, lookup
from regard.masks.base import Extent, Mask, Sizes
from regard.masks.intervals import Span, constant
from regard.masks.tiling import Tiling


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
    ids = int_tensor("masks.document", "ids", ids, "an integer tensor (L,) or (B, L)", (1, 2))
    if kv_ids is not None:
        kv_ids = int_tensor("masks.document", "kv_ids", kv_ids, "an integer tensor (S,) or (B, S)", (1, 2))
    return Documents(ids, kv_ids)


def from_cu_seqlens(cu_q: Tensor, cu_kv: Tensor | None = None) -> Mask:
    """Return the mask of sequences packed one behind the other, from their cumulative lengths.

    Query q is of sequence i iff ``cu_q[i] ≤ q < cu_q[i + 1]``, and sees the keys of that sequence. What lies
    past the last end is padding: it sees nothing, and nothing sees it. With ``& causal()`` it is causal within
    each sequence if ``cu_kv`` is ``cu_q``; where the lengths differ, one offset cannot align all sequences.

    Parameters
    ----------
    cu_q : Tensor (N + 1,), integer
        Where each of N sequences of queries begins, and where the last one ends: ``[0, 3, 7]`` for lengths 3 and 4.
    cu_kv : Tensor (N + 1,), integer, optional
        The same for keys; by default as for queries.

    Raises
    ------
    TypeError
        If a tensor does not hold integers.
    ValueError
        If it is not one-dimensional, does not begin with 0 or descends (checked on the CPU alone, where looking
        costs nothing), or the two differ in length.

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
    """
    cu_q = _cumulative("cu_q", cu_q)
    if cu_kv is not None:
        cu_kv = _cumulative("cu_kv", cu_kv)
        if cu_kv.shape != cu_q.shape:
            raise rejected("masks.from_cu_seqlens", "cu_kv", f"have cu_q's length {len(cu_q)}", len(cu_kv))
    return Packed(cu_q, cu_kv)


def _cumulative(argument: str, cu: Tensor) -> Tensor:
    function, expected = "masks.from_cu_seqlens", "be an integer tensor (N + 1,)"
    cu = int_tensor(function, argument, cu, expected.removeprefix("be "), (1,))
    if cu.shape[0] == 0:
        raise rejected(function, argument, "begin with 0", "an empty tensor")
    if cu.device.type == "cpu" and not torch.compiler.is_compiling():
        if int(cu[0]) != 0:
            raise rejected(
                function, argument, "begin with 0 (it holds cumulative lengths, not lengths)", cu.tolist()[:8]
            )
        if bool((cu.diff() < 0).any()):
            raise rejected(function, argument, "never descend", cu.tolist()[:8])
    return cu


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
        if is_blind(q_ids) or is_blind(k_ids):
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
    """Pairs of the same packed sequence."""

    def __init__(self, cu_q: Tensor, cu_kv: Tensor | None) -> None:
        self.cu_q = cu_q
        self.cu_kv = cu_kv

    @property
    def _cu_keys(self) -> Tensor:
        return self.cu_q if self.cu_kv is None else self.cu_kv

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return where both are of the same sequence."""
        own = _sequence(self.cu_q, q_idx)
        return (own == _sequence(self._cu_keys, kv_idx)) & (own < self.cu_q.shape[0] - 1)

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return which tiles' ranges of sequences overlap, and which hold one sequence only."""
        first, last = _sequence(self.cu_q, tiling.q_lo), _sequence(self.cu_q, tiling.q_hi)
        k_first, k_last = _sequence(self._cu_keys, tiling.k_lo), _sequence(self._cu_keys, tiling.k_hi)
        some, every = _overlap(first, last, k_first, k_last)
        real = self.cu_q.shape[0] - 1  # from here on, it is padding
        return some & (first < real) & (k_first < real), every & (first < real)

    def span(self, extent: Extent, device: torch.device) -> Span | None:
        """Return where each query's sequence of keys begins and ends."""
        own = _sequence(self.cu_q, torch.arange(extent.L, device=device))[None, None]
        edges = torch.nn.functional.pad(self._cu_keys[1:].to(torch.int64), (1, 0))
        # Past the last sequence of queries both are its end.
        return edges[own], edges[(own + 1).clamp(max=self.cu_q.shape[0] - 1)]

    def sizes(self) -> Sizes:
        """Return the ends of the last sequences."""
        return None, None, max(int(self.cu_q[-1]), 1), max(int(self._cu_keys[-1]), 1)

    def __repr__(self) -> str:
        keys = "" if self.cu_kv is None else f", {brief(self.cu_kv)}"
        return f"from_cu_seqlens({brief(self.cu_q)}{keys})"


def _sequence(cu: Tensor, position: Tensor) -> Tensor:
    """Return which sequence a position is of: how many ends lie at or before it."""
    return torch.bucketize(position, cu[1:].to(position.dtype), right=True)


def _overlap(q_min: Tensor, q_max: Tensor, k_min: Tensor, k_max: Tensor) -> tuple[Tensor, Tensor]:
    some = (q_min <= k_max) & (k_min <= q_max)
    return some, some & (q_min == q_max) & (k_min == k_max)
