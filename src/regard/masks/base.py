"""The base class of masks, their algebra, and the tile states and key intervals that engines use."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Union, final

import torch
from torch import Tensor

from regard._utils.constraints import count, size
from regard._utils.elementwise import meaning, per_element
from regard._utils.errors import described, rejected
from regard._utils.part import Part
from regard._utils.tracing import is_symbolic, values_unavailable

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from regard.masks.drawing import Picture


# The lookup that several masks share ------------------------- --------------------------------------------------------


def lookup(table: Tensor, *index: Tensor) -> Tensor:
    """Return ``table[index]`` with one index per dimension; dimensions of size 1 broadcast.

    Unlike ``table[index]``, this never reads an index in Python, so that 0-d indices work under vmap.
    """
    shared = [dim for dim, size in enumerate(table.shape) if size == 1]
    used = [i for dim, i in enumerate(index) if dim not in shared]
    if shared:  # name the dimensions: a dynamic size of an exported program may become 1
        table = table.squeeze(shared)
    return torch.ops.aten.index.Tensor(table, used) if used else table


# Intervals of visible keys: intersection, union and complement --------------------------------------------------------


#: Query q sees exactly the keys start ≤ k < stop: two int64 tensors (B or 1, H or 1, L or 1), or None for no bound on
#: that side. They may lie outside [0, S], and start may exceed stop in a row without visible keys.
Span = tuple[Tensor | None, Tensor | None]


def clamped(span: Span, S: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the span as two tensors with 0 ≤ start ≤ stop ≤ S.

    Examples
    --------
    >>> import torch
    >>> start, stop = clamped((None, torch.tensor([[[-1, 3, 9]]])), 5, torch.device("cpu"))
    >>> start.tolist(), stop.tolist()
    ([[[0]]], [[[0, 3, 5]]])
    """
    start, stop = (None if edge is None else edge.clamp(0, S) for edge in span)
    if start is not None and stop is not None:
        stop = torch.maximum(start, stop)
    return (
        constant(0, device) if start is None else start,
        constant(S, device) if stop is None else stop,
    )


def constant(value: int, device: torch.device) -> Tensor:
    """Return the same edge for every row: (1, 1, 1), int64."""
    return torch.full((1, 1, 1), value, dtype=torch.int64, device=device)


def intersection(spans: list[Span]) -> Span:
    """Return the intersection of spans."""
    starts = [start for start, _ in spans if start is not None]
    stops = [stop for _, stop in spans if stop is not None]
    return reduce(torch.maximum, starts) if starts else None, reduce(torch.minimum, stops) if stops else None


def union(spans: list[Span], S: int, device: torch.device) -> Span | None:
    """Return the union of spans; None if some row has a gap or values are unavailable."""
    starts = [start for start, _ in spans if start is not None]
    stops = [stop for _, stop in spans if stop is not None]
    if not starts or not stops:  # all spans begin with the first key, or all end with the last
        from_first = reduce(torch.maximum, stops) if len(stops) == len(spans) else None
        to_last = reduce(torch.minimum, starts) if len(starts) == len(spans) else None
        return to_last, from_first
    edges = [edge for span in spans for edge in clamped(span, S, device)]
    if any(values_unavailable(edge) for edge in edges):
        return None
    stacked = torch.stack(torch.broadcast_tensors(*edges))
    first, end = stacked[::2], stacked[1::2]
    empty = first == end  # sort empty spans last, where they cannot fill a gap
    first, order = first.masked_fill(empty, S).sort(0)
    reached = end.masked_fill(empty, 0).gather(0, order).cummax(0).values
    if bool(((first[1:] > reached[:-1]) & (first[1:] < S)).any()):
        return None
    return first[0], reached[-1]


def outside(span: Span, S: int, device: torch.device) -> Span | None:
    """Return the complement of a span; None if some row has keys on both sides or values are unavailable."""
    start, stop = span
    if start is None:
        return (constant(S, device) if stop is None else stop), None
    if stop is None:
        return None, start
    start, stop = clamped(span, S, device)
    if values_unavailable(start) or values_unavailable(stop):
        return None
    empty = start == stop
    before = start.masked_fill(empty, 0)  # number of keys before the span
    if bool(((before > 0) & (stop < S)).any()):
        return None
    return torch.where(before == 0, stop.masked_fill(empty, 0), 0), torch.where(before == 0, S, before)


def run(marks: Tensor) -> Span | None:
    """Return the span of the marked keys; None if some row's are not contiguous or values are unavailable.

    Parameters
    ----------
    marks : Tensor (B or 1, H or 1, L or 1, S), bool

    Examples
    --------
    >>> import torch
    >>> run(torch.tensor([[[[False, True, True, False]]]]))
    (tensor([[[1]]]), tensor([[[3]]]))
    >>> run(torch.tensor([[[[False, True, False, True]]]])) is None
    True
    """
    if values_unavailable(marks):
        return None
    k = torch.arange(marks.shape[-1] + 1, device=marks.device)
    marks = torch.nn.functional.pad(marks, (0, 1))  # amin needs at least one key
    start = torch.where(marks, k, marks.shape[-1]).amin(-1)
    stop = torch.where(marks, k + 1, 0).amax(-1)
    counts = marks.sum(-1)
    if bool(((stop - start != counts) & (counts > 0)).any()):
        return None
    return start, stop


def reached(start: Tensor, stop: Tensor, keys: int) -> Tensor:
    """Return which keys (b, h, S) lie in the interval of at least one row, for intervals (b, h, L)."""
    start, stop = torch.broadcast_tensors(start, stop)
    one = (start < stop).to(torch.int64)
    counts = one.new_zeros(*start.shape[:2], keys + 1)
    return counts.scatter_add(-1, start, one).scatter_add(-1, stop, -one).cumsum(-1)[..., :keys] > 0


# The mask interface ---------------------------------------------------------------------------------------------------


#: States of a tile. Engines skip EMPTY tiles and do not evaluate the mask in FULL ones.
EMPTY, MIXED, FULL = 0, 1, 2

#: Number of queries for which a mask is evaluated at once.
ROWS = 512

#: A FlexAttention ``mask_mod``: (b, h, q_idx, kv_idx) -> bool tensor.
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

#: The smallest and the largest visible k − q; None is unbounded.
Diagonals = tuple[int | None, int | None]

#: The sizes (B, H, L, S) implied by the tensors of a mask; None if unknown.
Sizes = tuple[int | None, int | None, int | None, int | None]


class Extent(NamedTuple):
    """The size of the score matrices: B sequences, H query heads, L queries, S keys."""

    B: int
    H: int
    L: int
    S: int

    def indices(self, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return b (B, 1, 1, 1), h (H, 1, 1), q_idx (L, 1) and kv_idx (S,) of all pairs, as masks take them."""
        b, h, q_idx, kv_idx = (torch.arange(n, device=device) for n in self)
        return b.view(-1, 1, 1, 1), h.view(-1, 1, 1), q_idx.unsqueeze(1), kv_idx


@dataclass(eq=False, repr=False)
class Cover:
    """Tiles of queries, each with a list of keys that holds all that its queries see.

    An engine gathers the keys of a tile once, and computes the pairs of a tile instead of all pairs. So a mask whose
    visible keys are near each other, but not in the order of the sequence, costs what it shows.

    Attributes
    ----------
    queries : Tensor (T, l), int64
        Every query is in one tile; −1 is none.
    keys : Tensor (T, s), int64
        No key is twice in a tile; −1 is none.
    kinds : Tensor (T,), int64, or None
        Tiles of one kind show the same pairs, by their places in the tile. None if that is not known.
    whole : bool
        Whether all queries of a tile see all of its keys; both are then before the −1.
    """

    #: Number of queries of a tile that suits the kernels.
    QUERIES: ClassVar[int] = 64

    queries: Tensor
    keys: Tensor
    kinds: Tensor | None = None
    whole: bool = False

    @property
    def pairs(self) -> int:
        """Number of pairs of all tiles."""
        return self.queries.numel() * self.keys.shape[1]


class Mask(Part, ABC):
    """The visible (query, key) pairs, and a bias added to their scores.

    Call a mask like FlexAttention's ``mask_mod``: ``mask(b, h, q_idx, kv_idx)``, with integers or with integer tensors
    that broadcast against each other, returns True where the query may attend to the key. Compose masks with ``&``,
    ``|`` and ``~``; biases add up under ``&``.

    A subclass defines :meth:`visible`, or :meth:`bias` and ``has_bias`` (with ``hides = False`` if it hides nothing).
    Everything else has a default. Tensors stored as attributes get gradients. Define :meth:`bounds` to let engines
    skip tiles, and :meth:`span` if each query sees one contiguous range of keys.

    Examples
    --------
    >>> from regard import masks
    >>> class Even(masks.Mask):
    ...     def visible(self, b, h, q_idx, kv_idx):
    ...         return kv_idx % 2 == 0
    >>> (masks.causal() & Even())(0, 0, 3, 2)
    tensor(True)
    """

    shortcuts: ClassVar[Mapping[str, frozenset[str]]] = {
        "hides": frozenset({"visible"}),
        "bounds": frozenset({"visible", "hides"}),
        "bounds_are_exact": frozenset({"visible", "hides", "bounds"}),
        "span": frozenset({"visible", "hides"}),
        "as_band": frozenset({"visible", "hides", "bias", "has_bias"}),
        "cover": frozenset({"visible", "hides"}),
    }
    # NumPy must not apply ``array & mask`` element by element.
    __array_ufunc__ = None

    @abstractmethod
    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return which pairs are visible: a bool tensor that broadcasts with the indices, or None for all.

        The index tensors broadcast against each other; engines pass b (B, 1, 1, 1), h (H, 1, 1), q_idx (l, 1)
        and kv_idx (s,). Use tensor operations only, no Python branches on index values.
        """

    def bias(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return the bias of the scaled scores: a float tensor that broadcasts with the indices, or None.

        It has the dtype of the mask's tensors, and is finite wherever these are.
        """
        return None

    def matrix(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the bias of these pairs, with −inf for hidden ones.

        Parameters
        ----------
        b, h, q_idx, kv_idx : Tensor (B, 1, 1, 1), (H, 1, 1), (l, 1) and (s,)
        dtype : torch.dtype

        Returns
        -------
        Tensor (B or 1, H or 1, l, s)
            With stride 0 in dimensions along which it is constant.
        """
        bias = self.cast(dtype).bias(b, h, q_idx, kv_idx) if self.has_bias else None
        added = torch.zeros((), dtype=dtype, device=kv_idx.device) if bias is None else bias.to(dtype)
        visible = self.visible(b, h, q_idx, kv_idx)
        if visible is not None:
            added = torch.where(visible, added, -torch.inf)
        added = added[(None,) * (4 - added.dim())]
        return added.expand(*added.shape[:2], q_idx.shape[0], kv_idx.shape[0])

    @property
    def has_bias(self) -> bool:
        """Whether the mask adds a bias."""
        return False

    @property
    def hides(self) -> bool:
        """Whether the mask may hide pairs; if not, :meth:`visible` always returns None."""
        return True

    @property
    def is_structural(self) -> bool:
        """Whether :meth:`tiles` reads no tensor values, so that it works on meta tensors and under torch.compile."""
        return not self.hides or not self.tensors()

    @property
    def bounds_are_exact(self) -> bool:
        """Whether :meth:`bounds` gives the exact state of every tile."""
        return False

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return for each tile whether any pair may be visible, and whether all pairs are certainly visible.

        Two bool tensors that broadcast to (B or 1, H or 1, nq, nk). For a tile of unknown state, return True and False.
        """
        unknown = torch.ones((), dtype=torch.bool, device=tiling.device)
        return unknown, ~unknown

    def fit(self, extent: Extent, device: torch.device) -> Mask:  # noqa: ARG002
        """Resolve the alignment for this extent; raise ValueError if a tensor of the mask has the wrong size."""
        return self

    def in_tensors(self, dtype: torch.dtype, device: torch.device) -> Mask:  # noqa: ARG002
        """Return the bound mask, cast to this dtype, with numbers that change from call to call as tensors.

        Compilers compile again for another number, and not for another tensor.
        """
        return self.cast(dtype)

    def for_lengths(self, queries: Tensor, keys: Tensor) -> Mask:  # noqa: ARG002
        """Return the mask for padded sequences with these numbers of queries and keys (B,).

        Alignments that depend on both numbers are then resolved for each sequence.
        """
        return self

    def sizes(self) -> Sizes:
        """Return the sizes (B, H, L, S) implied by the mask's tensors, for drawing."""
        return None, None, None, None

    def as_band(self, extent: Extent) -> Diagonals | None:  # noqa: ARG002
        """Return (lo, hi) if the mask is exactly lo ≤ k − q ≤ hi and adds no bias; the band may be empty (lo > hi)."""
        return None

    def span(self, extent: Extent, device: torch.device) -> Span | None:  # noqa: ARG002
        """Return (start, stop) if each query of the bound mask sees exactly the keys start ≤ k < stop, else None.

        Two int64 tensors (B or 1, H or 1, L or 1) on the device, not clamped to [0, S], or None for no bound on that
        side. By default, the span of a mask that hides pairs is unknown.
        """
        return None if self.hides else (None, None)

    def intervals(self, extent: Extent) -> tuple[Tensor, Tensor] | None:
        """Return (start, stop) if each query sees exactly the keys start ≤ k < stop, else None.

        Biases do not count: they hide nothing. Under torch.compile and vmap, intervals that depend on tensor values
        are None. No L×S matrix is built.

        Parameters
        ----------
        extent : Extent
            The extent passed to :meth:`bind`.

        Returns
        -------
        (Tensor, Tensor) or None
            int64 with 0 ≤ start ≤ stop ≤ S, each (B or 1, H or 1, L or 1), on the device of the mask's tensors, or the
            CPU. A row without visible keys has start = stop.

        Examples
        --------
        >>> from regard import masks
        >>> extent = masks.Extent(1, 1, 4, 4)
        >>> start, stop = masks.window(1, 0).bind(extent, "cpu").intervals(extent)
        >>> start, stop
        (tensor([[[0, 0, 1, 2]]]), tensor([[[1, 2, 3, 4]]]))
        >>> masks.dilated(2).bind(extent, "cpu").intervals(extent) is None
        True
        """
        device = self._device()
        span = self.span(extent, device)
        return None if span is None else clamped(span, extent.S, device)

    def key_lists(self, extent: Extent, first: int = 0, last: int | None = None) -> Tensor | None:  # noqa: ARG002
        """Return the visible keys of each query as lists if the mask holds such lists, else None.

        Parameters
        ----------
        extent : Extent
            The extent passed to :meth:`bind`.
        first, last : int, optional
            The first query and one past the last; all by default.

        Returns
        -------
        Tensor (B or 1, H or 1, last - first, K), integer, or None
            Indices of keys, in any order and possibly repeated; −1 is no key.
        """
        return None

    @property
    def listed_keys(self) -> int | None:
        """The length K of :meth:`key_lists`; None without lists."""
        return None

    def cover(self, extent: Extent, queries: int = Cover.QUERIES) -> Cover | None:  # noqa: ARG002
        """Return tiles of at most about so many queries with the keys that they see; None if no tiles are known.

        It follows from the mask's settings alone, never from tensors, and is on the CPU.
        """
        return None

    def nonempty_rows(self, extent: Extent) -> Tensor:
        """Return which queries of the bound mask have at least one visible key: bool (B or 1, H or 1, L or 1)."""
        spans = self.intervals(extent)
        if spans is not None:
            return spans[1] > spans[0]
        return torch.cat([rows.any(-1) for rows in self._visible_rows(extent)], -1)

    def visible_keys(self, extent: Extent) -> Tensor:
        """Return which keys of the bound mask are visible to at least one query: bool (B or 1, H or 1, S)."""
        spans = self.intervals(extent)
        if spans is not None:
            return reached(*spans, extent.S)
        found = torch.zeros(1, 1, extent.S, dtype=torch.bool, device=self._device())
        for rows in self._visible_rows(extent):
            found = found | rows.any(-2)
        return found

    def _visible_rows(self, extent: Extent) -> Iterator[Tensor]:
        """Yield the visible pairs of the bound mask, (B or 1, H or 1, l, S), in chunks of rows."""
        b, h, q_idx, kv_idx = extent.indices(self._device())
        for rows in q_idx.split(ROWS):
            added = self.matrix(b, h, rows, kv_idx, torch.float32)
            yield added.detach() > -torch.inf

    def is_plain_causal(self, extent: Extent) -> bool:
        """Whether the mask is exactly torch's ``is_causal=True`` at this extent: k ≤ q, no bias, nothing else."""
        return self.as_band(extent) == (None, 0)

    def shows_everything(self, extent: Extent) -> bool:
        """Whether the bound mask hides and adds nothing, as far as known without reading tensor values."""
        if is_symbolic(extent.L) or is_symbolic(extent.S):
            return False
        band = self.as_band(extent)
        if band is None:
            return False
        low, high = band
        return (low is None or low <= 1 - extent.L) and (high is None or high >= extent.S - 1)

    def bind(self, extent: Extent, device: torch.device | str) -> Mask:
        """Bind the mask to a call: resolve the alignment, and check sizes and devices.

        Parameters
        ----------
        extent : Extent
            The size of the score matrices.
        device : torch.device or str
            Device of the queries. The mask's tensors must be on it; only 0-d CPU tensors are moved, as in torch.

        Raises
        ------
        ValueError
            If a tensor of the mask has the wrong size or device, or an alignment is required but not given.

        Examples
        --------
        >>> from regard import masks
        >>> bound = masks.causal(align="lower_right").bind(masks.Extent(1, 1, 2, 5), "cpu")
        >>> bound(0, 0, 0, 3), bound(0, 0, 0, 4)
        (tensor(True), tensor(False))
        """
        device = torch.device(device)
        mask = self
        if any(t.device != device for t in self.tensors()):
            mask = self.map_tensors(lambda t: _on(t, device))
        return mask.fit(extent, device)

    def tiles(
        self,
        extent: Extent,
        q_block: int,
        kv_block: int,
        exact: bool = False,
        *,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Return which tiles are EMPTY (0), MIXED (1) or FULL (2), without building the L×S matrix.

        Parameters
        ----------
        extent : Extent
            The size of the score matrices. Zero sizes are allowed; the last tiles may be partial.
        q_block, kv_block : int
            The size of a tile.
        exact : bool
            Whether to evaluate tiles whose state is unknown, a bounded number of pairs at a time. Otherwise they are
            MIXED.
        device : torch.device or str, optional
            Device of the result: by default the CPU for a structural mask, else the device of the mask's tensors.

        Returns
        -------
        Tensor (B or 1, H or 1, ⌈L / q_block⌉, ⌈S / kv_block⌉), int8

        Examples
        --------
        >>> from regard import masks
        >>> masks.causal().tiles(masks.Extent(1, 1, 8, 8), 4, 4)[0, 0]
        tensor([[1, 0],
                [2, 1]], dtype=torch.int8)
        """
        home = self._device()
        where = torch.device(device or "cpu") if self.is_structural else home
        states = tile_states(self.fit(extent, home), Tiling(extent, q_block, kv_block, exact, where))
        return states if device is None else states.to(device)

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Tensor:
        """Return which pairs are visible, as a bool tensor: FlexAttention's ``mask_mod``. Biases are not included."""
        device = next((i.device for i in (b, h, q_idx, kv_idx) if isinstance(i, Tensor)), None) or self._device()
        b, h, q_idx, kv_idx = (torch.as_tensor(i, device=device) for i in (b, h, q_idx, kv_idx))
        shape = torch.broadcast_shapes(b.shape, h.shape, q_idx.shape, kv_idx.shape)
        visible = self.visible(b, h, q_idx, kv_idx)
        return torch.ones(shape, dtype=torch.bool, device=device) if visible is None else visible.expand(shape)

    def _device(self) -> torch.device:
        inside = self.tensors()
        return inside[0].device if inside else torch.device("cpu")

    def __and__(self, other: Any) -> Mask:

        return both(self, other)

    def __rand__(self, other: Any) -> Mask:

        return both(other, self)

    def __or__(self, other: Any) -> Mask:

        return either(self, other)

    def __ror__(self, other: Any) -> Mask:

        return either(other, self)

    def __invert__(self) -> Mask:

        return complement(self)

    def __bool__(self) -> bool:
        # ``a and b`` would silently drop a.
        raise TypeError("a mask has no truth value; combine masks with &, | and ~ instead of and, or and not.")

    def draw(self, L: int | None = None, S: int | None = None, *, b: int = 0, h: int = 0) -> str:
        """Return the mask as text: queries down, keys across; █ visible, · not.

        Parameters
        ----------
        L, S : int, optional
            Number of queries and keys; by default the sizes of the mask's tensors, else 16. Large masks are drawn as
            tiles: █ full, ▒ mixed, · empty.
        b, h : int
            Index of the sequence and of the head.

        Examples
        --------
        >>> from regard import masks
        >>> print(masks.window(1, 0).draw(3))
        window(1, 0)
        3 queries ↓, 3 keys →; █ visible, · not
          0
        0 █··
        1 ██·
        2 ·██
        """
        from regard.masks.drawing import as_text

        return as_text(self._picture(L, S, b, h))

    def _picture(self, L: int | None, S: int | None, b: int, h: int) -> Picture:
        B, H, rows, columns = self.sizes()
        L = count("Mask.draw", "L", L) if L is not None else rows or columns or S or 16
        S = count("Mask.draw", "S", S) if S is not None else columns or L
        extent = Extent(B or 1, H or 1, L, S)
        for argument, index, limit in (("b", b, extent.B), ("h", h, extent.H)):
            if not 0 <= index < limit:
                raise rejected("Mask.draw", argument, f"be an index below {limit}", index)
        from regard.masks.drawing import picture

        return picture(self, self.bind(extent, self._device()), extent, b, h)

    def __str__(self) -> str:
        try:
            return self.draw()
        except ValueError as error:  # printing must not fail, even for parts of inconsistent sizes
            return f"{self!r}\n(cannot be drawn: {error})"

    def _repr_html_(self) -> str:
        from html import escape

        from regard.masks.drawing import as_html

        try:
            return as_html(self._picture(None, None, 0, 0))
        except ValueError:
            return f"<pre>{escape(str(self))}</pre>"


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device, moving 0-d CPU tensors; raise for others."""
    here = tensor.device
    if here.type == device.type and (here.index == device.index or None in (here.index, device.index)):
        return tensor
    if tensor.dim() == 0 and here.type == "cpu":
        return tensor.to(device)
    raise rejected("attention", "attn_mask", f"hold tensors on the query's device {device}", f"one on {here}")


#: A bool or float tensor, a Mask, or FlexAttention's ``mask_mod`` or BlockMask.
MaskLike = Union[Tensor, Mask, MaskMod, "BlockMask"]


# States of the tiles of the score matrix ------------------------------------------------------------------------------


#: Number of pairs evaluated at once in mixed tiles.
PAIRS_AT_ONCE = 1 << 21


class Tiling:
    """A grid of tiles over L queries and S keys.

    Attributes
    ----------
    extent : Extent
    q_block, kv_block : int
        The size of a tile; the last row and column of tiles may be smaller.
    exact : bool
        Whether mixed tiles are evaluated pair by pair.
    q_lo, q_hi : Tensor (nq, 1)
        The first and last query of each row of tiles.
    k_lo, k_hi : Tensor (nk,)
        The first and last key of each column of tiles.
    first_query, first_key : int
        Start of the grid, if it covers a part of the matrices.
    lengths : (int, int)
        Number of queries and keys that the grid covers.
    """

    def __init__(self, extent: Extent, q_block: int, kv_block: int, exact: bool, device: torch.device) -> None:
        self.extent = extent
        self.q_block = size("Mask.tiles", "q_block", q_block)
        self.kv_block = size("Mask.tiles", "kv_block", kv_block)
        self.exact = exact
        self.device = device
        self.q_lo, self.q_hi = (x.unsqueeze(1) for x in _edges(extent.L, self.q_block, device))
        self.k_lo, self.k_hi = _edges(extent.S, self.kv_block, device)
        self.first_query = self.first_key = 0
        self.lengths = extent.L, extent.S

    def inside(self, whole: Extent, first_query: int, first_key: int) -> Tiling:
        """Return the same tiles, shifted into larger matrices, where they start at this query and key."""
        tiling = copy.copy(self)
        tiling.extent = whole
        tiling.q_lo, tiling.q_hi = (edge + first_query for edge in (self.q_lo, self.q_hi))
        tiling.k_lo, tiling.k_hi = (edge + first_key for edge in (self.k_lo, self.k_hi))
        tiling.first_query, tiling.first_key = self.first_query + first_query, self.first_key + first_key
        return tiling

    @property
    def counts(self) -> tuple[int, int]:
        """Number of rows and columns of tiles."""
        return self.q_lo.shape[0], self.k_lo.shape[0]

    def full(self) -> tuple[Tensor, Tensor]:
        """Return the bounds of a mask that hides nothing."""
        every = torch.ones((), dtype=torch.bool, device=self.device)
        return every, every

    def over_queries(self, x: Tensor, how: Reduction) -> Tensor:
        """Return (..., L, n) reduced over the queries of each row of tiles: (..., nq, n)."""
        return _reduce(_narrowed(x, -2, self.first_query, self.lengths[0]), -2, self.q_block, how)

    def over_keys(self, x: Tensor, how: Reduction) -> Tensor:
        """Return (..., S) reduced over the keys of each column of tiles: (..., nk)."""
        return _reduce(_narrowed(x, -1, self.first_key, self.lengths[1]), -1, self.kv_block, how)


Reduction = Literal["any", "all", "amax", "amin"]


def tile_states(mask: Mask, tiling: Tiling) -> Tensor:
    """Return the state of every tile of a bound mask: (B or 1, H or 1, nq, nk), int8; see :meth:`Mask.tiles`."""
    nq, nk = tiling.counts
    if not mask.hides:
        return torch.full((1, 1, nq, nk), FULL, dtype=torch.int8, device=tiling.device)
    some, every = mask.bounds(tiling)
    states = some.to(torch.int8) + every.to(torch.int8)
    states = states.expand(torch.broadcast_shapes(states.shape, (1, 1, nq, nk)))
    if tiling.exact and not mask.bounds_are_exact:
        states = _evaluate_mixed(mask, tiling, states)
    return states


def _edges(size: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    first = torch.arange(0, size, block, device=device)
    return first, (first + (block - 1)).clamp(max=size - 1)


def _narrowed(x: Tensor, dim: int, first: int, count: int) -> Tensor:
    return x if x.shape[dim] in (1, count) else x.narrow(dim, first, count)


def _reduce(x: Tensor, dim: int, block: int, how: Reduction) -> Tensor:
    size = x.shape[dim]
    if size == 1:  # one element, or broadcast along the dimension
        return x
    # Reduce the partial block at the end separately: padding would copy the whole tensor.
    whole = size // block * block
    parts = [x.narrow(dim, 0, whole).unflatten(dim, (whole // block, block)), x.narrow(dim, whole, size - whole)]
    done = [getattr(parts[0], how)(dim)] if whole else [x.narrow(dim, 0, 0)]
    if whole < size:
        done.append(getattr(parts[1].unsqueeze(dim - 1), how)(dim))
    return torch.cat(done, dim) if len(done) > 1 else done[0]


def _evaluate_mixed(mask: Mask, tiling: Tiling, states: Tensor) -> Tensor:
    """Replace the state of mixed tiles by the exact one."""
    mixed = (states == MIXED).nonzero()
    if len(mixed) == 0:
        return states
    states = states.clone(memory_format=torch.contiguous_format)
    per_tile = tiling.q_block * tiling.kv_block
    for tile in mixed.split(max(1, PAIRS_AT_ONCE // per_tile)):
        some = torch.zeros(len(tile), dtype=torch.bool, device=states.device)
        every = torch.ones_like(some)
        for visible in _evaluated(mask, tiling, tile):
            some |= visible.any(2).any(1)
            every &= visible.all(2).all(1)
        found = torch.where(every, FULL, torch.where(some, MIXED, EMPTY)).to(torch.int8)
        states[tuple(tile.T)] = found
    return states


def _evaluated(mask: Mask, tiling: Tiling, tile: Tensor) -> Iterator[Tensor]:
    """Yield which pairs are visible, (tiles, rows, kv_block), in chunks of rows of each tile (b, h, i, j).

    Rows and keys past the end repeat the last one, which changes neither "any" nor "all".
    """
    b, h, i, j = tile.T[:, :, None, None]
    kv_block = min(tiling.kv_block, tiling.extent.S)
    q_block = min(tiling.q_block, tiling.extent.L)
    kv_idx = (j * tiling.kv_block + torch.arange(kv_block, device=tile.device)).clamp(max=tiling.extent.S - 1)
    rows = torch.arange(q_block, device=tile.device)[:, None]
    for some_rows in rows.split(max(1, PAIRS_AT_ONCE // (len(tile) * kv_block))):
        q_idx = (i * tiling.q_block + some_rows).clamp(max=tiling.extent.L - 1)
        yield mask(b, h, q_idx, kv_idx)


# Mask algebra: and, or, not, and the mask that hides nothing ----------------------------------------------------------


def both(a: Any, b: Any) -> Mask:
    """Return ``a & b``: pairs visible in both masks; biases add up."""
    return AndMask((*_parts(as_mask(a), AndMask), *_parts(as_mask(b), AndMask)))


def either(a: Any, b: Any) -> Mask:
    """Return ``a | b``: pairs visible in at least one mask.

    Raises
    ------
    TypeError
        If one of them adds a bias, which is undefined for pairs visible only in the other.
    """
    sides = as_mask(a), as_mask(b)
    for side in sides:
        if side.has_bias:
            raise TypeError(f"|: {side!r} adds a bias, and | takes masks without one; add the bias with &.")
    return OrMask((*_parts(sides[0], OrMask), *_parts(sides[1], OrMask)))


def complement(mask: Mask) -> Mask:
    """Return ``~mask``: the pairs that the mask hides.

    Raises
    ------
    TypeError
        If the mask adds a bias, which has no complement.
    """
    if mask.has_bias:
        raise TypeError(f"~: {mask!r} adds a bias, which has no complement.")
    return mask.mask if isinstance(mask, NotMask) else NotMask(mask)


def everything() -> Mask:
    """Return the mask that hides nothing; ``~everything()`` hides all.

    Examples
    --------
    >>> from regard import masks
    >>> masks.everything()(0, 0, 3, 9), (~masks.everything())(0, 0, 3, 9)
    (tensor(True), tensor(False))
    """
    return Everything()


class _Node(Mask):
    """Base of masks composed of several masks."""

    def __init__(self, masks: tuple[Mask, ...]) -> None:
        self.masks = masks

    def fit(self, extent: Extent, device: torch.device) -> Mask:
        return type(self)(tuple([mask.fit(extent, device) for mask in self.masks]))

    def in_tensors(self, dtype: torch.dtype, device: torch.device) -> Mask:
        return type(self)(tuple([mask.in_tensors(dtype, device) for mask in self.masks]))

    def for_lengths(self, queries: Tensor, keys: Tensor) -> Mask:
        return type(self)(tuple([mask.for_lengths(queries, keys) for mask in self.masks]))

    @property
    def is_structural(self) -> bool:
        return all(mask.is_structural for mask in self.masks)

    def sizes(self) -> Sizes:
        return _largest([mask.sizes() for mask in self.masks])


@final
class AndMask(_Node):
    """The intersection of several masks; biases add up."""

    def fit(self, extent: Extent, device: torch.device) -> Mask:
        """Fit the masks, and drop those that hide and add nothing at this extent."""
        fitted = [mask.fit(extent, device) for mask in self.masks]
        needed = [mask for mask in fitted if not mask.shows_everything(extent)]
        return AndMask(tuple(needed)) if len(needed) > 1 else (needed or fitted)[0]

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return the pairs that are visible in all masks."""
        found = [mask.visible(b, h, q_idx, kv_idx) for mask in self.masks if mask.hides]
        visible = [x for x in found if x is not None]
        return reduce(and_, visible) if visible else None

    def bias(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return the sum of the biases."""
        found = [mask.bias(b, h, q_idx, kv_idx) for mask in self.masks if mask.has_bias]
        added = [x for x in found if x is not None]
        return sum(added[1:], start=added[0]) if added else None

    @property
    def has_bias(self) -> bool:
        """Whether one of the masks has a bias."""
        return any(mask.has_bias for mask in self.masks)

    @property
    def hides(self) -> bool:
        """Whether one of the masks hides pairs."""
        return any(mask.hides for mask in self.masks)

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return the conjunction of the bounds."""
        found = [mask.bounds(tiling) for mask in self.masks if mask.hides]
        if not found:
            return tiling.full()
        return reduce(and_, [some for some, _ in found]), reduce(and_, [every for _, every in found])

    @property
    def bounds_are_exact(self) -> bool:
        """Whether only one of the masks hides pairs, and its bounds are exact."""
        hiding = [mask for mask in self.masks if mask.hides]
        return len(hiding) == 1 and hiding[0].bounds_are_exact

    def as_band(self, extent: Extent) -> Diagonals | None:
        """Return the intersection of the bands, if all masks are bands."""
        lo: int | None = None
        hi: int | None = None
        for mask in self.masks:
            band = mask.as_band(extent)
            if band is None:
                return None
            if band[0] is not None:
                lo = band[0] if lo is None else max(lo, band[0])
            if band[1] is not None:
                hi = band[1] if hi is None else min(hi, band[1])
        return lo, hi

    def key_lists(self, extent: Extent, first: int = 0, last: int | None = None) -> Tensor | None:
        """Return the shortest lists among the masks without the keys that another mask hides."""
        listing = [mask for mask in self.masks if mask.listed_keys is not None]
        if not listing:
            return None
        shortest = min(listing, key=lambda mask: mask.listed_keys or 0)
        lists = shortest.key_lists(extent, first, last)
        assert lists is not None
        others = AndMask(tuple(mask for mask in self.masks if mask is not shortest))
        return _without_hidden(lists, others, extent, first)

    def cover(self, extent: Extent, queries: int = Cover.QUERIES) -> Cover | None:
        """Return the cover of fewest pairs among the masks; others may hide more of them."""
        covers = {i: cover for i, mask in enumerate(self.masks) if (cover := mask.cover(extent, queries)) is not None}
        if not covers:
            return None
        best = min(covers, key=lambda i: covers[i].pairs)
        alone = not any(mask.hides for i, mask in enumerate(self.masks) if i != best)
        return covers[best] if alone else Cover(covers[best].queries, covers[best].keys)

    @property
    def listed_keys(self) -> int | None:
        """The length of the shortest lists among the masks."""
        return min((mask.listed_keys for mask in self.masks if mask.listed_keys is not None), default=None)

    def span(self, extent: Extent, device: torch.device) -> Span | None:
        """Return the intersection of the spans, if all are known."""
        found = [mask.span(extent, device) for mask in self.masks if mask.hides]
        spans = [span for span in found if span is not None]
        return intersection(spans) if len(spans) == len(found) else None

    def __repr__(self) -> str:
        return " & ".join([_wrapped(mask) for mask in self.masks])


@final
class OrMask(_Node):
    """The union of several masks."""

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return the pairs that are visible in at least one mask."""
        found = [mask.visible(b, h, q_idx, kv_idx) for mask in self.masks]
        visible = [x for x in found if x is not None]
        return reduce(or_, visible) if len(visible) == len(found) else None

    @property
    def hides(self) -> bool:
        """Whether all of the masks hide pairs."""
        return all(mask.hides for mask in self.masks)

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return the disjunction of the bounds."""
        found = [mask.bounds(tiling) for mask in self.masks]
        return reduce(or_, [some for some, _ in found]), reduce(or_, [every for _, every in found])

    def span(self, extent: Extent, device: torch.device) -> Span | None:
        """Return the union of the spans, if all are known and it has no gap."""
        if not self.hides:
            return None, None
        found = [mask.span(extent, device) for mask in self.masks]
        spans = [span for span in found if span is not None]
        return union(spans, extent.S, device) if len(spans) == len(found) else None

    def __repr__(self) -> str:
        return " | ".join([_wrapped(mask) for mask in self.masks])


@final
class NotMask(Mask):
    """The complement of a mask."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return the pairs that the mask hides."""
        visible = self.mask.visible(b, h, q_idx, kv_idx)
        return torch.zeros((), dtype=torch.bool, device=kv_idx.device) if visible is None else ~visible

    @property
    def bounds_are_exact(self) -> bool:
        """Whether the bounds of the mask are exact."""
        return self.mask.bounds_are_exact

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return the negated bounds, in reverse order."""
        some, every = self.mask.bounds(tiling)
        return ~every, ~some

    def span(self, extent: Extent, device: torch.device) -> Span | None:
        """Return the complement of the mask's span, if it is a span."""
        span = self.mask.span(extent, device)
        return None if span is None else outside(span, extent.S, device)

    def fit(self, extent: Extent, device: torch.device) -> Mask:
        """Fit the mask inside."""
        return NotMask(self.mask.fit(extent, device))

    def in_tensors(self, dtype: torch.dtype, device: torch.device) -> Mask:
        """Return the complement of the mask with tensors."""
        return NotMask(self.mask.in_tensors(dtype, device))

    def for_lengths(self, queries: Tensor, keys: Tensor) -> Mask:
        """Return the mask inside for these lengths, negated."""
        return NotMask(self.mask.for_lengths(queries, keys))

    def sizes(self) -> Sizes:
        """Return the sizes of the mask inside."""
        return self.mask.sizes()

    def __repr__(self) -> str:
        return f"~{_wrapped(self.mask)}"


@final
class Everything(Mask):
    """The mask that hides nothing."""

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return None."""
        return None

    @property
    def hides(self) -> bool:
        """Never."""
        return False

    @property
    def bounds_are_exact(self) -> bool:
        """Always."""
        return True

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return True and True: all pairs are visible."""
        return tiling.full()

    def as_band(self, extent: Extent) -> Diagonals | None:  # noqa: ARG002
        """Return the band without bounds."""
        return None, None

    def __repr__(self) -> str:
        return "everything()"


def _without_hidden(lists: Tensor, mask: Mask, extent: Extent, first: int) -> Tensor:
    """Return lists of keys, of queries from ``first`` on, with −1 in place of those that a mask hides."""
    device = lists.device
    b, h = torch.arange(extent.B, device=device).view(-1, 1, 1, 1), torch.arange(extent.H, device=device).view(-1, 1, 1)
    q_idx, kept = torch.arange(first, first + lists.shape[2], device=device), []
    for rows, some in zip(q_idx.split(ROWS), lists.split(ROWS, 2)):
        visible = mask.visible(b, h, rows.unsqueeze(1), some.clamp(min=0).to(torch.int64))
        kept.append(some if visible is None else torch.where(visible, some, -1))
    return torch.cat(kept, 2)


def _parts(mask: Mask, kind: type[_Node]) -> tuple[Mask, ...]:
    return mask.masks if isinstance(mask, _Node) and type(mask) is kind else (mask,)


def _wrapped(mask: Mask) -> str:
    return f"({mask!r})" if isinstance(mask, _Node) else repr(mask)


def _largest(found: list[Sizes]) -> Sizes:
    b, h, q, k = (max([size for size in axis if size is not None], default=None) for axis in zip(*found))
    return b, h, q, k


# A mask given as a function: FlexAttention's mask_mod -----------------------------------------------------------------


@final
class Predicate(Mask):
    """Pairs for which ``mask_mod(b, h, q_idx, kv_idx)`` is True; made by :func:`~regard.masks.as_mask`.

    As in FlexAttention, the function takes one pair, as 0-d tensors, and must work under ``torch.vmap``. Engines cannot
    find tensors in its closure: these must be on the query's device.
    """

    def __init__(self, mask_mod: Callable[..., Any]) -> None:
        self.mask_mod = mask_mod

    def structure(self) -> tuple[Any, ...]:
        """Return a key for the function; None in it for a function whose results are not known to be constant."""
        return Predicate, meaning(self.mask_mod)

    @property
    def is_fixed(self) -> bool:
        """Whether the function always returns the same result for the same arguments."""
        return meaning(self.mask_mod) is not None

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return the result of the function."""
        return called(self.mask_mod, b, h, q_idx, kv_idx)

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return True and False: nothing is known."""
        # With exact states, tiles may differ per sequence and head.
        shape = (tiling.extent.B, tiling.extent.H, 1, 1) if tiling.exact else ()
        unknown = torch.ones(shape, dtype=torch.bool, device=tiling.device)
        return unknown, ~unknown

    def __repr__(self) -> str:
        return f"as_mask({getattr(self.mask_mod, '__name__', type(self.mask_mod).__name__)})"


def called(mask_mod: Callable[..., Any], b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Evaluate a mask_mod on every pair; dimensions on which it does not depend have size 1."""
    if isinstance(mask_mod, Mask):
        visible = mask_mod.visible(b, h, q_idx, kv_idx)
        return torch.ones((), dtype=torch.bool, device=kv_idx.device) if visible is None else visible
    visible = per_element(mask_mod, b, h, q_idx, kv_idx, kind="bool", blame=("masks.as_mask", "mask_mod"))
    for dim, stride in enumerate(visible.stride()):
        if not is_symbolic(stride) and stride == 0:
            visible = visible.narrow(dim, 0, 1)
    return visible


# Conversion to masks --------------------------------------------------------------------------------------------------


#: Conversions of types other than Mask and functions, registered by the modules of masks.
_CONVERSIONS: list[tuple[Callable[[Any], bool], Callable[[Any, str, str], Mask]]] = []


def as_mask(mask: MaskLike, function: str = "masks.as_mask", argument: str = "mask") -> Mask:
    """Convert to a Mask.

    Parameters
    ----------
    mask : Mask, callable, BlockMask, CausalBias or Tensor
        A callable is a FlexAttention ``mask_mod``: it takes one pair, as 0-d tensors, and must work under
        ``torch.vmap``. A BlockMask is torch's; its block lists and its ``mask_mod`` both apply. A tensor becomes
        :func:`~regard.masks.dense`.
    function, argument : str
        Names for error messages.

    Raises
    ------
    TypeError
        If ``mask`` has another type, or is an integer tensor.

    Examples
    --------
    >>> from regard import masks
    >>> masks.as_mask(lambda b, h, q_idx, kv_idx: kv_idx % 2 == 0)(0, 0, 1, 2)
    tensor(True)
    """
    if isinstance(mask, Mask):
        return mask
    for applies, convert in _CONVERSIONS:
        if applies(mask):
            return convert(mask, function, argument)
    if callable(mask) and not isinstance(mask, type):
        return Predicate(mask)
    expected = "be a Mask, a mask_mod(b, h, q_idx, kv_idx), a BlockMask, or a bool or float tensor"
    hint = "; torch.tensor makes it a tensor" if isinstance(mask, list | tuple) else ""
    if isinstance(mask, str):
        hint = "; names are functions of regard.masks, such as masks.causal()"
    raise rejected(function, argument, expected, f"{described(mask)}{hint}", TypeError)


def register_conversion(applies: Callable[[Any], bool], convert: Callable[[Any, str, str], Mask]) -> None:
    """Let :func:`as_mask` convert values for which ``applies`` is True by ``convert(value, function, argument)``."""
    _CONVERSIONS.append((applies, convert))


def is_instance(value: Any, name: str) -> bool:
    """Whether a value is an instance of the class with this full name, without importing it, which may be slow."""
    return any(f"{kind.__module__}.{kind.__qualname__}" == name for kind in type(value).__mro__)
