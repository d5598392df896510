"""Layouts of a sequence over ranks, and the schedule of ring attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from regard._utils.errors import rejected, shape, unknown_name
from regard.distributed.ring import Ring
from regard.engines.tiles import BlockMask
from regard.masks.base import EMPTY, FULL, MIXED, Extent, Mask

# Layouts, sharding and gathering --------------------------------------------------------------------------------------


#: Layouts. "contiguous": rank r of W holds the r-th of W pieces. "zigzag": it holds the r-th and the (2 W − 1 − r)-th
#: of 2 W pieces, which balances the work under a causal mask.
Layout = Literal["contiguous", "zigzag"]


def checked_layout(function: str, layout: str) -> None:
    """Raise if a layout is unknown."""
    if layout not in get_args(Layout):
        raise unknown_name(function, "layout", layout, get_args(Layout))


def pieces_of(rank: int, size: int, layout: str) -> tuple[int, ...]:
    """Return the indices of a rank's pieces, in order.

    Examples
    --------
    >>> [pieces_of(rank, 3, "zigzag") for rank in range(3)]
    [(0, 5), (1, 4), (2, 3)]
    """
    return (rank,) if layout == "contiguous" else (rank, 2 * size - 1 - rank)


def shard_sequence(
    x: Tensor, dim: int, group: dist.ProcessGroup | None = None, layout: Layout = "contiguous"
) -> Tensor:
    """Return this rank's slice of a sequence that is replicated on all ranks.

    Parameters
    ----------
    x : Tensor (..., L, ...)
    dim : int
        The dimension of positions.
    group : ProcessGroup, optional
        The ranks that share the sequence; None is all.
    layout : {"contiguous", "zigzag"}
        "zigzag" balances the work under a causal mask.

    Returns
    -------
    Tensor (..., L / W, ...)
        A differentiable copy.

    Raises
    ------
    ValueError
        If L is not a multiple of W (2 W for "zigzag"). Pad the sequence, and hide the padding with
        :func:`regard.masks.padding`.
    """
    ring = Ring.of("shard_sequence", group)
    piece = _piece("shard_sequence", x, dim, ring.size, layout)
    return torch.cat([x.narrow(dim, i * piece, piece) for i in pieces_of(ring.rank, ring.size, layout)], dim)


def gather_sequence(
    x: Tensor, dim: int, group: dist.ProcessGroup | None = None, layout: Layout = "contiguous"
) -> Tensor:
    """Return the whole sequence on every rank, from the slices of all ranks; the inverse of :func:`shard_sequence`.

    Parameters
    ----------
    x : Tensor (..., L / W, ...)
        Must not require gradients: each rank computes its loss from its own positions, without gathering.
    dim, group, layout
        See :func:`shard_sequence`.

    Returns
    -------
    Tensor (..., L, ...)

    Raises
    ------
    ValueError
        If ``x`` requires gradients.
    """
    ring = Ring.of("gather_sequence", group)
    checked_layout("gather_sequence", layout)
    if torch.is_grad_enabled() and x.requires_grad:
        raise rejected("gather_sequence", "x", "be detached", "a tensor that requires gradients")
    held = [pieces_of(rank, ring.size, layout) for rank in range(ring.size)]
    if x.shape[dim] % len(held[0]):
        raise rejected("gather_sequence", "x", "have an even number of positions for layout 'zigzag'", shape(x))
    parts = [part.chunk(len(held[0]), dim) if x.shape[dim] else (part,) * len(held[0]) for part in ring.gathered(x)]
    by_piece = {i: piece for own, part in zip(held, parts) for i, piece in zip(own, part)}
    return torch.cat([by_piece[i] for i in range(len(by_piece))], dim)


def shard_positions(
    length: int,
    group: dist.ProcessGroup | None = None,
    layout: Layout = "contiguous",
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the positions of this rank's slice, for rotary and other position encodings.

    Parameters
    ----------
    length : int
        Length of the whole sequence.
    group, layout
        See :func:`shard_sequence`.
    device : torch.device or str, optional

    Returns
    -------
    Tensor (length / W,), int64
    """
    ring = Ring.of("shard_positions", group)
    every = torch.arange(length, device=device)
    piece = _piece("shard_positions", every, 0, ring.size, layout)
    return torch.cat([every.narrow(0, i * piece, piece) for i in pieces_of(ring.rank, ring.size, layout)])


def _piece(function: str, x: Tensor, dim: int, size: int, layout: str) -> int:
    """Return the length of a piece of ``x``, or raise if pieces would differ in length."""
    checked_layout(function, layout)
    pieces = size * len(pieces_of(0, size, layout))
    if x.shape[dim] % pieces:
        name, verb = ("length", "be") if function == "shard_positions" else ("x", "have")
        expected = f"{verb} a multiple of {pieces} positions for {size} ranks (pad it, and use masks.padding)"
        raise rejected(function, name, expected, x.shape[dim])
    return x.shape[dim] // pieces


# The schedule of ring attention ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Region:
    """Consecutive queries of a rank against consecutive keys of the current block.

    Attributes
    ----------
    rows, keys : (int, int)
        Start and stop in the rank's queries and in the block.
    first_query, first_key : int
        Positions of the first query and key in the whole sequence; of the first piece if several are joined.
    masked : bool
        Whether the mask must be applied.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    first_query: int
    first_key: int
    masked: bool


@dataclass(frozen=True)
class Schedule:
    """The regions of the score matrix that each rank computes, in pieces of queries and keys.

    Attributes
    ----------
    layout : str
    rank, size : int
    extent : Extent
        The size of the whole problem, over all ranks.
    states : list of list of int
        EMPTY, MIXED or FULL for each piece of queries and of keys, over all batches and heads.
    positional : bool
        Whether scores depend on positions even if nothing is hidden, so that pieces cannot be joined.
    """

    layout: str
    rank: int
    size: int
    extent: Extent
    states: list[list[int]]
    positional: bool

    @classmethod
    def of(cls, layout: str, rank: int, size: int, extent: Extent, mask: Mask | None, positional: bool) -> Schedule:
        """Compute the states of all pieces from the mask, bound to the whole problem."""
        pieces = size * len(pieces_of(0, size, layout))
        if mask is None:
            states = [[FULL] * pieces for _ in range(pieces)]
        else:
            states = BlockMask.of(mask, extent, extent.L // pieces, extent.S // pieces).over_heads()
        biased = mask is not None and mask.has_bias
        if biased:  # the bias applies even if nothing is hidden
            states = [[MIXED if state == FULL else state for state in row] for row in states]
        return cls(layout, rank, size, extent, states, positional or biased)

    @property
    def hops(self) -> int:
        """The maximum number of hops after which no rank needs a block of keys."""
        needed = [0]
        for query_rank in range(self.size):
            for key_rank in range(self.size):
                if any(state != EMPTY for _, _, state in self._cells(query_rank, key_rank)):
                    needed.append((query_rank - key_rank) % self.size)
        return max(needed)

    def regions(self, source: int) -> list[Region]:
        """Return the regions that this rank computes with the keys of rank ``source``."""
        own = pieces_of(self.rank, self.size, self.layout)
        rows, keys = self.extent.L // len(self.states), self.extent.S // len(self.states)
        lines: list[list[Region]] = [[] for _ in own]
        for i, j, state in self._cells(self.rank, source):
            if state == EMPTY:
                continue
            place = (i * rows, (i + 1) * rows), (j * keys, (j + 1) * keys)
            first_key = pieces_of(source, self.size, self.layout)[j] * keys
            region = Region(*place, own[i] * rows, first_key, state == MIXED)
            line = lines[i]
            if line and self._joins(line[-1], region) and line[-1].keys[1] == region.keys[0]:
                first = line[-1]
                line[-1] = Region(
                    first.rows, (first.keys[0], region.keys[1]), first.first_query, first.first_key, False
                )
            else:
                line.append(region)
        return self._stacked(lines)

    def representative(self, region: Region) -> Region:
        """Return a region equivalent to this one for engines: the same for all regions independent of positions."""
        if self.positional or region.masked:
            return region
        (first, last), (first_key, last_key) = region.rows, region.keys
        return Region((0, last - first), (0, last_key - first_key), 0, 0, False)

    def _cells(self, query_rank: int, key_rank: int) -> list[tuple[int, int, int]]:
        """Return the states of one rank's pieces of queries against another's pieces of keys, with their indices."""
        rows, keys = (pieces_of(rank, self.size, self.layout) for rank in (query_rank, key_rank))
        return [(i, j, self.states[row][key]) for i, row in enumerate(rows) for j, key in enumerate(keys)]

    def _joins(self, a: Region, b: Region) -> bool:
        """Whether two neighbours can be joined: nothing in them depends on positions."""
        return not (self.positional or a.masked or b.masked)

    def _stacked(self, lines: list[list[Region]]) -> list[Region]:
        """Return the regions of all pieces of queries, joined if they see the same keys."""
        first, *others = lines
        same = all([r.keys for r in line] == [r.keys for r in first] for line in others)
        if not others or not same or not all(self._joins(a, a) for line in lines for a in line):
            return [region for line in lines for region in line]
        rows = (first[0].rows[0], others[-1][0].rows[1]) if first else (0, 0)
        return [Region(rows, r.keys, r.first_query, r.first_key, False) for r in first]
