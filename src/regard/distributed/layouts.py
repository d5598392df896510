"""Which positions of a sequence each rank holds, and which pieces of the mask are computed when."""

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

# Which positions of a sequence each rank holds, and moving between the whole sequence and its slices ------------------


#: How positions are divided. "contiguous": rank r of W holds the r-th of W pieces. "zigzag": of 2 W pieces it holds
#: the r-th and the (2 W − 1 − r)-th, an early and a late one; under a causal mask all ranks then do equally much.
Layout = Literal["contiguous", "zigzag"]


def checked_layout(function: str, layout: str) -> None:
    """Raise unless a layout is known."""
    if layout not in get_args(Layout):
        raise unknown_name(function, "layout", layout, get_args(Layout))


def pieces_of(rank: int, size: int, layout: str) -> tuple[int, ...]:
    """Return the pieces that a rank holds, in order.

    Examples
    --------
    >>> [pieces_of(rank, 3, "zigzag") for rank in range(3)]
    [(0, 5), (1, 4), (2, 3)]
    """
    return (rank,) if layout == "contiguous" else (rank, 2 * size - 1 - rank)


def shard_sequence(
    x: Tensor, dim: int, group: dist.ProcessGroup | None = None, layout: Layout = "contiguous"
) -> Tensor:
    """Return this rank's slice of a sequence that every rank has whole.

    Parameters
    ----------
    x : Tensor (..., L, ...)
    dim : int
        The dimension of positions.
    group : ProcessGroup, optional
        The ranks that divide it; None is all.
    layout : {"contiguous", "zigzag"}
        Zigzag divides the work under a causal mask equally.

    Returns
    -------
    Tensor (..., L / W, ...)
        A copy; with gradients.

    Raises
    ------
    ValueError
        If L is not a multiple of W (2 W in a zigzag): pad the sequence, and hide the padding by
        :func:`regard.masks.padding`.
    """
    ring = Ring.of("shard_sequence", group)
    piece = _piece("shard_sequence", x, dim, ring.size, layout)
    return torch.cat([x.narrow(dim, i * piece, piece) for i in pieces_of(ring.rank, ring.size, layout)], dim)


def gather_sequence(
    x: Tensor, dim: int, group: dist.ProcessGroup | None = None, layout: Layout = "contiguous"
) -> Tensor:
    """Return the whole sequence on every rank, from the slices of all: what undoes :func:`shard_sequence`.

    Parameters
    ----------
    x : Tensor (..., L / W, ...)
        Without gradients: every rank makes its loss from its own positions, and nothing needs to be gathered for it.
    dim, group, layout
        As in :func:`shard_sequence`.

    Returns
    -------
    Tensor (..., L, ...)

    Raises
    ------
    ValueError
        If ``x`` is part of a graph.
    """
    ring = Ring.of("gather_sequence", group)
    checked_layout("gather_sequence", layout)
    if torch.is_grad_enabled() and x.requires_grad:
        raise rejected("gather_sequence", "x", "be detached: it gives no gradients", "a tensor that requires them")
    held = [pieces_of(rank, ring.size, layout) for rank in range(ring.size)]
    if x.shape[dim] % len(held[0]):
        raise rejected("gather_sequence", "x", "have a multiple of 2 positions in a zigzag", shape(x))
    parts = [part.chunk(len(held[0]), dim) if x.shape[dim] else (part,) * len(held[0]) for part in ring.gathered(x)]
    by_piece = {i: piece for own, part in zip(held, parts) for i, piece in zip(own, part)}
    return torch.cat([by_piece[i] for i in range(len(by_piece))], dim)


def shard_positions(
    length: int,
    group: dist.ProcessGroup | None = None,
    layout: Layout = "contiguous",
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the positions that this rank holds of a sequence: what rotary and other encodings of positions need.

    Parameters
    ----------
    length : int
        How many positions all ranks hold together.
    group, layout
        As in :func:`shard_sequence`.
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
    """Return how long a piece of ``x`` is, or raise where pieces would not be equally long."""
    checked_layout(function, layout)
    pieces = size * len(pieces_of(0, size, layout))
    if x.shape[dim] % pieces:
        expected = f"have a multiple of {pieces} positions for {size} ranks (pad it, and hide that by masks.padding)"
        raise rejected(function, "length" if function == "shard_positions" else "x", expected, x.shape[dim])
    return x.shape[dim] // pieces


# Which parts of the score matrix a rank computes when, and how far keys need to travel --------------------------------


@dataclass(frozen=True)
class Region:
    """Neighbouring queries of a rank against neighbouring keys of a block that it has at hand.

    Attributes
    ----------
    rows, keys : (int, int)
        Where they are in the rank's queries and in the block: first, and one past the last.
    first_query, first_key : int
        The position in the whole sequence of the first of each; where several pieces are joined, of the first piece.
    masked : bool
        Whether the mask has something to say in it.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    first_query: int
    first_key: int
    masked: bool


@dataclass(frozen=True)
class Schedule:
    """The parts of the score matrix, piece by piece of queries and keys.

    Attributes
    ----------
    layout : str
    rank, size : int
    extent : Extent
        The size of the whole problem, over all ranks.
    states : list of list of int
        EMPTY, MIXED or FULL for each piece of queries and of keys, over all batches and heads.
    positional : bool
        Whether positions matter even where nothing is hidden: there, pieces cannot be joined.
    """

    layout: str
    rank: int
    size: int
    extent: Extent
    states: list[list[int]]
    positional: bool

    @classmethod
    def of(cls, layout: str, rank: int, size: int, extent: Extent, mask: Mask | None, positional: bool) -> Schedule:
        """Ask the mask, bound to the whole problem, which pieces it shows."""
        pieces = size * len(pieces_of(0, size, layout))
        if mask is None:
            states = [[FULL] * pieces for _ in range(pieces)]
        else:
            states = BlockMask.of(mask, extent, extent.L // pieces, extent.S // pieces).over_heads()
        biased = mask is not None and mask.has_bias
        if biased:  # there is something to add, also where nothing is hidden
            states = [[MIXED if state == FULL else state for state in row] for row in states]
        return cls(layout, rank, size, extent, states, positional or biased)

    @property
    def hops(self) -> int:
        """How many places keys travel at most before nobody needs them any more."""
        needed = [0]
        for query_rank in range(self.size):
            for key_rank in range(self.size):
                if any(state != EMPTY for _, _, state in self._cells(query_rank, key_rank)):
                    needed.append((query_rank - key_rank) % self.size)
        return max(needed)

    def regions(self, source: int) -> list[Region]:
        """Return what this rank computes with the keys of rank ``source``."""
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
        """Return a region that engines see as they see this one: the same for all in which positions do not matter."""
        if self.positional or region.masked:
            return region
        (first, last), (first_key, last_key) = region.rows, region.keys
        return Region((0, last - first), (0, last_key - first_key), 0, 0, False)

    def _cells(self, query_rank: int, key_rank: int) -> list[tuple[int, int, int]]:
        """Return the state of each piece of one rank's queries against each of another's keys, by their places."""
        rows, keys = (pieces_of(rank, self.size, self.layout) for rank in (query_rank, key_rank))
        return [(i, j, self.states[row][key]) for i, row in enumerate(rows) for j, key in enumerate(keys)]

    def _joins(self, a: Region, b: Region) -> bool:
        """Whether two neighbours can be one region: nothing in them depends on positions."""
        return not (self.positional or a.masked or b.masked)

    def _stacked(self, lines: list[list[Region]]) -> list[Region]:
        """Return the regions of all pieces of queries, joined where they see the same keys."""
        first, *others = lines
        same = all([r.keys for r in line] == [r.keys for r in first] for line in others)
        if not others or not same or not all(self._joins(a, a) for line in lines for a in line):
            return [region for line in lines for region in line]
        rows = (first[0].rows[0], others[-1][0].rows[1]) if first else (0, 0)
        return [Region(rows, r.keys, r.first_query, r.first_key, False) for r in first]
