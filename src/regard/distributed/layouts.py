"""Which positions of a sequence each rank holds, and moving between the whole sequence and its slices."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from regard._errors import rejected, shape, unknown_name
from regard.distributed.ring import Ring

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
