"""The interface of a mask: which pairs may meet, and what is added to their score."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Union

import torch
from torch import Tensor

from regard._errors import rejected
from regard._part import Part
from regard._tracing import is_symbolic
from regard.masks.intervals import Span, clamped, reached

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from regard.masks.tiling import Tiling

#: What a tile can be. EMPTY tiles are skipped; FULL ones need no predicate.
EMPTY, MIXED, FULL = 0, 1, 2

#: Queries for which a mask is evaluated at one time.
ROWS = 512

#: A FlexAttention ``mask_mod``: (b, h, q_idx, kv_idx) -> bool tensor.
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

#: The smallest and the largest k − q that is visible; None is unbounded.
Diagonals = tuple[int | None, int | None]

#: The sizes (B, H, L, S) that the tensors inside a mask suggest; None where nothing is suggested.
Sizes = tuple[int | None, int | None, int | None, int | None]


@dataclass(frozen=True)
class Extent:
    """The size of the score matrices a mask is applied to: B batches, H query heads, L queries, S keys."""

    B: int
    H: int
    L: int
    S: int


class Mask(Part, ABC):
    """Which (query, key) pairs may meet, and what is added to their score.

    A mask is called like FlexAttention's ``mask_mod``: ``mask(b, h, q_idx, kv_idx)``, with integers or with
    integer tensors that broadcast against each other, and answers True where the pair may meet.
    Masks compose with ``&``, ``|`` and ``~``; biases add up under ``&``.

    A subclass defines :meth:`visible`, or :meth:`bias` with ``has_bias`` (and ``hides = False`` if it hides
    nothing); everything else has a default. Tensors stored as attributes are found by engines and get
    gradients. To let engines skip tiles, define :meth:`bounds`; if a query sees one run of keys, define :meth:`span`.

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
    }
    # Numpy arrays must not take ``array & mask`` apart element by element.
    __array_ufunc__ = None

    @abstractmethod
    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return where a pair may meet: a bool tensor that broadcasts with the indices; None is everywhere.

        The index tensors broadcast against each other; engines pass b (B, 1, 1, 1), h (H, 1, 1), q_idx (l, 1)
        and kv_idx (s,). The answer may depend on their values by tensor operations alone.
        """

    def bias(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return what is added to the scaled score: a float tensor that broadcasts with the indices; None is nothing.

        It is finite wherever the tensors inside are; its dtype is that of the tensors inside.
        """
        return None

    def matrix(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what is added to the scores of these pairs, −inf where they may not meet.

        Parameters
        ----------
        b, h, q_idx, kv_idx : Tensor (B, 1, 1, 1), (H, 1, 1), (l, 1) and (s,)
        dtype : torch.dtype

        Returns
        -------
        Tensor (B or 1, H or 1, l, s)
            Of stride 0 where it does not vary with a query or key.
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
        """Whether :meth:`bias` has an answer."""
        return False

    @property
    def hides(self) -> bool:
        """Whether a pair may be invisible; if not, :meth:`visible` is always None."""
        return True

    @property
    def is_structural(self) -> bool:
        """Whether :meth:`tiles` reads no tensor's data, so that it works on meta tensors and under torch.compile."""
        return not self.hides or not self.tensors()

    @property
    def bounds_are_exact(self) -> bool:
        """Whether :meth:`bounds` knows each tile's true state."""
        return False

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return for each tile whether some pair may be visible, and whether all are known to be.

        Two bool tensors that broadcast to (B or 1, H or 1, nq, nk). The first may be True and the second False
        where the mask does not know, never the other way round.
        """
        unknown = torch.ones((), dtype=torch.bool, device=tiling.device)
        return unknown, ~unknown

    def fit(self, extent: Extent, device: torch.device) -> Mask:  # noqa: ARG002
        """Return the mask for this extent, alignment resolved; raise ValueError if a tensor inside does not fit."""
        return self

    def for_lengths(self, queries: Tensor, keys: Tensor) -> Mask:  # noqa: ARG002
        """Return the mask for padded sequences whose own numbers of queries and keys (B,) these are.

        Where queries are aligned with keys by both numbers, they then are in each sequence by its own.
        """
        return self

    def sizes(self) -> Sizes:
        """Return the sizes (B, H, L, S) that the tensors inside suggest, for drawing."""
        return None, None, None, None

    def as_band(self, extent: Extent) -> Diagonals | None:  # noqa: ARG002
        """Return (lo, hi) if the mask is exactly lo ≤ k − q ≤ hi and adds no bias; the band may be empty (lo > hi)."""
        return None

    def span(self, extent: Extent, device: torch.device) -> Span | None:  # noqa: ARG002
        """Return (start, stop) if each query of the bound mask sees exactly the keys start ≤ k < stop, else None.

        Two int64 tensors (B or 1, H or 1, L or 1) on the device, not clamped to [0, S]; None in place of one is no
        bound on that side. By default unknown where anything is hidden.
        """
        return None if self.hides else (None, None)

    def intervals(self, extent: Extent) -> tuple[Tensor, Tensor] | None:
        """Return (start, stop) if each query sees exactly the keys start ≤ k < stop, else None.

        It speaks of visibility alone: a bias hides nothing. What is known without looking at a tensor's values stays
        known under torch.compile and vmap; what needs a look is None there. No L×S matrix is built.

        Parameters
        ----------
        extent : Extent
            The size the mask was bound to by :meth:`bind`.

        Returns
        -------
        (Tensor, Tensor) or None
            int64 with 0 ≤ start ≤ stop ≤ S, each (B or 1, H or 1, L or 1), on the device of the tensors inside, or the
            CPU. A row that sees nothing has start = stop.

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

    def sees(self, extent: Extent) -> Tensor:
        """Return which queries of the bound mask see any key: bool (B or 1, H or 1, L or 1)."""
        spans = self.intervals(extent)
        if spans is not None:
            return spans[1] > spans[0]
        return torch.cat([rows.any(-1) for rows in self._shown(extent)], -1)

    def seen(self, extent: Extent) -> Tensor:
        """Return which keys any query of the bound mask sees: bool (B or 1, H or 1, S)."""
        spans = self.intervals(extent)
        if spans is not None:
            return reached(*spans, extent.S)
        found = torch.zeros(1, 1, extent.S, dtype=torch.bool, device=self._device())
        for rows in self._shown(extent):
            found = found | rows.any(-2)
        return found

    def _shown(self, extent: Extent) -> Iterator[Tensor]:
        """Yield which pairs the bound mask shows, (B or 1, H or 1, l, S), for some rows after the other."""
        device = self._device()
        b, h, q_idx, kv_idx = (torch.arange(n, device=device) for n in (extent.B, extent.H, extent.L, extent.S))
        for rows in q_idx.split(ROWS):
            added = self.matrix(b.view(-1, 1, 1, 1), h.view(-1, 1, 1), rows.unsqueeze(1), kv_idx, torch.float32)
            yield added.detach() > -torch.inf

    def is_plain_causal(self, extent: Extent) -> bool:
        """Whether the mask is exactly torch's ``is_causal=True`` at this extent: k ≤ q, no bias, nothing else."""
        return self.as_band(extent) == (None, 0)

    def shows_everything(self, extent: Extent) -> bool:
        """Whether the bound mask is known, without a look at tensors, to hide nothing and to add nothing."""
        if is_symbolic(extent.L) or is_symbolic(extent.S):
            return False
        band = self.as_band(extent)
        if band is None:
            return False
        low, high = band
        return (low is None or low <= 1 - extent.L) and (high is None or high >= extent.S - 1)

    def bind(self, extent: Extent, device: torch.device | str) -> Mask:
        """Return the mask for one call: alignment resolved, sizes and devices checked.

        Parameters
        ----------
        extent : Extent
            The size of the score matrices.
        device : torch.device or str
            Where the queries are. Tensors inside must be there too; only 0-d tensors on the CPU are moved, as in torch.

        Raises
        ------
        ValueError
            If a tensor inside does not fit, is on another device, or the alignment is not stated and matters.

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
            The size of the score matrices. Zeros are legal; the last tiles may be partial.
        q_block, kv_block : int
            The size of a tile.
        exact : bool
            Without it, a tile may be called MIXED because the mask does not know better. With it, such tiles
            are evaluated, a bounded number of pairs at a time.
        device : torch.device or str, optional
            Where the answer is wanted: by default on the CPU for a structural mask, else where the tensors inside are.

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
        from regard.masks.tiling import Tiling, tile_states

        home = self._device()
        where = torch.device(device or "cpu") if self.is_structural else home
        states = tile_states(self.fit(extent, home), Tiling(extent, q_block, kv_block, exact, where))
        return states if device is None else states.to(device)

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Tensor:
        """Return where a pair may meet, as a bool tensor: FlexAttention's ``mask_mod``. Biases are not in it."""
        device = next((i.device for i in (b, h, q_idx, kv_idx) if isinstance(i, Tensor)), None) or self._device()
        b, h, q_idx, kv_idx = (torch.as_tensor(i, device=device) for i in (b, h, q_idx, kv_idx))
        shape = torch.broadcast_shapes(b.shape, h.shape, q_idx.shape, kv_idx.shape)
        seen = self.visible(b, h, q_idx, kv_idx)
        return torch.ones(shape, dtype=torch.bool, device=device) if seen is None else seen.expand(shape)

    def _device(self) -> torch.device:
        inside = self.tensors()
        return inside[0].device if inside else torch.device("cpu")

    def __and__(self, other: Any) -> Mask:
        from regard.masks.algebra import both

        return both(self, other)

    def __rand__(self, other: Any) -> Mask:
        from regard.masks.algebra import both

        return both(other, self)

    def __or__(self, other: Any) -> Mask:
        from regard.masks.algebra import either

        return either(self, other)

    def __ror__(self, other: Any) -> Mask:
        from regard.masks.algebra import either

        return either(other, self)

    def __invert__(self) -> Mask:
        from regard.masks.algebra import complement

        return complement(self)

    def __bool__(self) -> bool:
        # ``a and b`` would silently drop a.
        raise TypeError("a mask has no truth value; combine masks with &, | and ~, not with and, or and not.")

    def draw(self, L: int | None = None, S: int | None = None, *, b: int = 0, h: int = 0) -> str:
        """Return the mask as text: queries down, keys across; █ visible, · not.

        Parameters
        ----------
        L, S : int, optional
            How many queries and keys; by default as many as the tensors inside suggest, else 16. What is too
            large to draw pair by pair is drawn by tiles: █ full, ▒ mixed, · empty.
        b, h : int
            Which sequence and head.

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
        from regard.masks.drawing import as_text, sample

        return as_text(sample(self, L, S, b, h))

    def __str__(self) -> str:
        try:
            return self.draw()
        except ValueError as error:  # printing must not fail where the parts do not fit each other
            return f"{self!r}\n(cannot be drawn: {error})"

    def _repr_html_(self) -> str:
        from html import escape

        from regard.masks.drawing import as_html, sample

        try:
            return as_html(sample(self, None, None, 0, 0))
        except ValueError:
            return f"<pre>{escape(str(self))}</pre>"


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor if it is on the device, moved there if it is one number on the CPU."""
    here = tensor.device
    if here.type == device.type and (here.index == device.index or None in (here.index, device.index)):
        return tensor
    if tensor.dim() == 0 and here.type == "cpu":
        return tensor.to(device)
    raise rejected("attention", "attn_mask", f"hold tensors on the query's device {device}", f"one on {here}")


#: What stands for a mask: a bool or float tensor, a Mask, or FlexAttention's ``mask_mod`` or BlockMask.
MaskLike = Union[Tensor, Mask, MaskMod, "BlockMask"]
