"""A part of a larger mask: some neighbouring queries against some neighbouring keys."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from regard._errors import rejected
from regard.masks.base import Diagonals, Extent, Mask
from regard.masks.intervals import Span
from regard.masks.matrix import Dense
from regard.masks.tiling import Tiling


@final
class Submatrix(Mask):
    """The queries from ``first_query`` on against the keys from ``first_key`` on, of a mask for more of both.

    Where a sequence is divided, among processes or into chunks, a mask goes on speaking of positions in the whole.

    Parameters
    ----------
    mask : Mask
        Bound to the whole, by :meth:`Mask.bind`.
    whole : Extent
        The size it is bound to.
    first_query, first_key : int
        Where the part begins. Its own size is that of the call.

    Examples
    --------
    >>> from regard import masks
    >>> whole = masks.Extent(1, 1, 8, 8)
    >>> part = Submatrix(masks.window(2, 0).bind(whole, "cpu"), whole, 4, 2)
    >>> print(part.draw(4, 4))
    window(2, 0)[4:, 2:]
    4 queries ↓, 4 keys →; █ visible, · not
      0
    0 ███·
    1 ·███
    2 ··██
    3 ···█
    """

    def __init__(self, mask: Mask, whole: Extent, first_query: int, first_key: int) -> None:
        self.mask = mask
        self.first_query = first_query
        self.first_key = first_key
        self._sizes = (whole.B, whole.H, whole.L, whole.S)

    @property
    def whole(self) -> Extent:
        """The size of the mask inside."""
        return Extent(*self._sizes)

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return what the mask shows at the positions in the whole."""
        return self.mask.visible(b, h, q_idx + self.first_query, kv_idx + self.first_key)

    def bias(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return what the mask adds at the positions in the whole."""
        return self.mask.bias(b, h, q_idx + self.first_query, kv_idx + self.first_key)

    @property
    def has_bias(self) -> bool:
        """Whether the mask has."""
        return self.mask.has_bias

    @property
    def hides(self) -> bool:
        """Whether the mask does."""
        return self.mask.hides

    @property
    def is_structural(self) -> bool:
        """Whether the mask is."""
        return self.mask.is_structural

    @property
    def bounds_are_exact(self) -> bool:
        """Whether the mask's are."""
        return self.mask.bounds_are_exact

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return the mask's bounds of tiles that lie in the part."""
        return self.mask.bounds(tiling.inside(self.whole, self.first_query, self.first_key))

    def fit(self, extent: Extent, device: torch.device) -> Mask:  # noqa: ARG002
        """Check that the part lies in the whole."""
        B, H, L, S = self._sizes
        fits = self.first_query + extent.L <= L and self.first_key + extent.S <= S
        if (extent.B, extent.H) == (B, H) and fits:
            return self
        expected = f"be a part of (B, H, L, S) = {self._sizes} from ({self.first_query}, {self.first_key}) on"
        raise rejected("masks.Submatrix", "mask", expected, f"one of {(extent.B, extent.H, extent.L, extent.S)}")

    def as_band(self, extent: Extent) -> Diagonals | None:  # noqa: ARG002
        """Return the mask's band, moved."""
        band = self.mask.as_band(self.whole)
        if band is None:
            return None
        moved = self.first_query - self.first_key
        low, high = (None if edge is None else edge + moved for edge in band)
        return low, high

    def span(self, extent: Extent, device: torch.device) -> Span | None:
        """Return the mask's span, moved."""
        band = self.as_band(extent)
        if band is not None:
            q_idx = torch.arange(extent.L, device=device)[None, None]
            low, high = (None if edge is None else q_idx + max(min(edge, extent.S), -extent.L) for edge in band)
            return low, None if high is None else high + 1
        span = self.mask.span(self.whole, device)
        if span is None:
            return None
        start, stop = (None if edge is None else self._moved(edge, extent.L) for edge in span)
        return start, stop

    def _moved(self, edge: Tensor, count: int) -> Tensor:
        """Return an edge (B or 1, H or 1, L or 1) of the rows in the part, counted from its first key."""
        shared = edge.shape[-1] == 1
        return (edge if shared else edge.narrow(-1, self.first_query, count)) - self.first_key

    def __repr__(self) -> str:
        return f"{self.mask!r}[{self.first_query}:, {self.first_key}:]"


def submatrix(mask: Mask, whole: Extent, rows: tuple[int, int], keys: tuple[int, int]) -> Mask:
    """Return the part of a bound mask for some queries and keys, (first, count) each; a matrix is cut.

    Examples
    --------
    >>> import torch
    >>> from regard import masks
    >>> submatrix(masks.dense(torch.ones(8, 8).tril().bool()), masks.Extent(1, 1, 8, 8), (0, 4), (4, 2))
    dense(tensor[4, 2])
    """
    if not isinstance(mask, Dense):
        return Submatrix(mask, whole, rows[0], keys[0])
    values = mask.values
    for dim, (first, count) in ((-2, rows), (-1, keys)):
        values = values if values.shape[dim] == 1 else values.narrow(dim, first, count)
    return Dense.of(values, "masks.submatrix", "mask")
