"""Which tiles of the score matrix are empty, full or mixed, without building the matrix."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from regard.masks._checks import as_int
from regard.masks.base import EMPTY, FULL, MIXED, Extent, Mask

#: How many pairs are evaluated at once when mixed tiles are looked into.
PAIRS_AT_ONCE = 1 << 21


class Tiling:
    """A grid of tiles over L queries and S keys.

    Attributes
    ----------
    extent : Extent
    q_block, kv_block : int
        The size of a tile; the last row and column of tiles may be smaller.
    exact : bool
        Whether mixed tiles will be evaluated, pair by pair.
    q_lo, q_hi : Tensor (nq, 1)
        The first and last query of each row of tiles.
    k_lo, k_hi : Tensor (nk,)
        The first and last key of each column of tiles.
    first_query, first_key : int
        Where the grid begins, if it is laid over a part of the matrices: tiles are then those of the part.
    lengths : (int, int)
        How many queries and keys the grid is laid over.
    """

    def __init__(self, extent: Extent, q_block: int, kv_block: int, exact: bool, device: torch.device) -> None:
        self.extent = extent
        self.q_block = as_int("Mask.tiles", "q_block", q_block, 1)
        self.kv_block = as_int("Mask.tiles", "kv_block", kv_block, 1)
        self.exact = exact
        self.device = device
        self.q_lo, self.q_hi = (x.unsqueeze(1) for x in _edges(extent.L, self.q_block, device))
        self.k_lo, self.k_hi = _edges(extent.S, self.kv_block, device)
        self.first_query = self.first_key = 0
        self.lengths = extent.L, extent.S

    def inside(self, whole: Extent, first_query: int, first_key: int) -> Tiling:
        """Return the same tiles as those of a part of larger matrices, which begins at this query and key."""
        tiling = copy.copy(self)
        tiling.extent = whole
        tiling.q_lo, tiling.q_hi = (edge + first_query for edge in (self.q_lo, self.q_hi))
        tiling.k_lo, tiling.k_hi = (edge + first_key for edge in (self.k_lo, self.k_hi))
        tiling.first_query, tiling.first_key = self.first_query + first_query, self.first_key + first_key
        return tiling

    @property
    def counts(self) -> tuple[int, int]:
        """How many rows and columns of tiles there are."""
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
        states = _looked_into(mask, tiling, states)
    return states


def _edges(size: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    first = torch.arange(0, size, block, device=device)
    return first, (first + (block - 1)).clamp(max=size - 1)


def _narrowed(x: Tensor, dim: int, first: int, count: int) -> Tensor:
    return x if x.shape[dim] in (1, count) else x.narrow(dim, first, count)


def _reduce(x: Tensor, dim: int, block: int, how: Reduction) -> Tensor:
    size = x.shape[dim]
    if size == 1:  # either one element, or one that is shared along the dimension
        return x
    # The partial block at the end is reduced by itself: padding would copy the whole tensor.
    whole = size // block * block
    parts = [x.narrow(dim, 0, whole).unflatten(dim, (whole // block, block)), x.narrow(dim, whole, size - whole)]
    done = [getattr(parts[0], how)(dim)] if whole else [x.narrow(dim, 0, 0)]
    if whole < size:
        done.append(getattr(parts[1].unsqueeze(dim - 1), how)(dim))
    return torch.cat(done, dim) if len(done) > 1 else done[0]


def _looked_into(mask: Mask, tiling: Tiling, states: Tensor) -> Tensor:
    mixed = (states == MIXED).nonzero()
    if len(mixed) == 0:
        return states
    states = states.clone(memory_format=torch.contiguous_format)
    per_tile = tiling.q_block * tiling.kv_block
    for tile in mixed.split(max(1, PAIRS_AT_ONCE // per_tile)):
        some = torch.zeros(len(tile), dtype=torch.bool, device=states.device)
        every = torch.ones_like(some)
        for seen in _evaluated(mask, tiling, tile):
            some |= seen.any(2).any(1)
            every &= seen.all(2).all(1)
        found = torch.where(every, FULL, torch.where(some, MIXED, EMPTY)).to(torch.int8)
        states[tuple(tile.T)] = found
    return states


def _evaluated(mask: Mask, tiling: Tiling, tile: Tensor) -> Iterator[Tensor]:
    """Yield where pairs are visible, (tiles, rows, kv_block), some rows of each tile (b, h, i, j) at a time.

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
