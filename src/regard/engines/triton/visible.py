"""Convert a mask for the kernels: an interval of keys per query, or bits of mixed tiles; a bias; and lists of tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard._utils.tracing import is_traced
from regard.engines.problem import Problem
from regard.masks import Dense
from regard.masks.base import EMPTY, FULL, MIXED, PAIRS_AT_ONCE, AndMask, Extent, Mask
from regard.masks.padding import KeyPadding

#: Number of bits of a word.
WORD = 32


@dataclass(frozen=True)
class VisibleKeys:
    """What the queries of a problem see.

    Attributes
    ----------
    start, stop : Tensor (B or 1, H or 1, L), int32, or None
        The interval of each query.
    by_query, by_key : Tensor (B or 1, H or 1, blocks, 2 + blocks), int32, or None
        For each block of queries, or of keys: the number of full tiles, that of visible ones, and their places.
    tiles : Tensor (B or 1, H or 1, query blocks, key blocks), int32, or None
        Which of ``words`` a tile has, −1 for none.
    words : Tensor (n, rows, words), int32, or None
        A bit for each pair of a mixed tile.
    bias : Tensor (B or 1, H or 1, L or 1, S or 1), or None
        It is added to scores, and −inf where it hides.
    """

    start: Tensor | None = None
    stop: Tensor | None = None
    by_query: Tensor | None = None
    by_key: Tensor | None = None
    tiles: Tensor | None = None
    words: Tensor | None = None
    bias: Tensor | None = None

    @classmethod
    def of(cls, problem: Problem, tile_of: Callable[[bool], tuple[int, int]] | None) -> VisibleKeys:
        """Convert a problem's mask.

        ``tile_of`` returns the queries and keys of a tile, with or without a bias. It is None for a step of decoding,
        whose kernels need no lists of tiles, and for which a matrix of all pairs is small.
        """
        mask, extent, device = problem.mask, problem.extent, problem.query.device
        if mask is None:
            return cls()
        mask = mask.cast(problem.compute_dtype)
        bias, rest = _split(mask, extent, device, problem.compute_dtype)
        if rest is None:
            return cls(bias=bias)
        spans = rest.intervals(extent)
        if spans is not None:
            found = replace(_between(*spans, extent, device), bias=bias)
            return found if tile_of is None else found.with_lists(extent.S, tile_of(bias is not None))
        if tile_of is None or is_traced(problem.query):
            return cls(bias=_matrix(mask, extent, device, problem.compute_dtype))
        return replace(_evaluated(rest, extent, tile_of(bias is not None), device), bias=bias)

    def with_lists(self, S: int, tile: tuple[int, int]) -> VisibleKeys:
        """Return the intervals with the tiles that they visit."""
        assert self.start is not None and self.stop is not None
        states = _states(self.start, self.stop, S, *tile)
        return replace(self, by_query=listed(states), by_key=listed(states.mT))


def _matrix(mask: Mask, extent: Extent, device: torch.device, dtype: torch.dtype) -> Tensor:
    return mask.matrix(*extent.indices(device), dtype)


def _split(mask: Mask, extent: Extent, device: torch.device, dtype: torch.dtype) -> tuple[Tensor | None, Mask | None]:
    """Split a mask into what is added to scores, (B or 1, H or 1, L or 1, S or 1), and the part that hides pairs.

    A float tensor, and keys that are hidden from all queries, are added as they are.
    """
    parts = mask.masks if isinstance(mask, AndMask) else (mask,)
    added: list[Tensor] = []
    rest: list[Mask] = []
    for part in parts:
        if isinstance(part, Dense) and part.has_bias:
            added.append(part.values[(None,) * (4 - part.values.dim())].to(dtype))
            continue
        if isinstance(part, KeyPadding):
            keep = torch.atleast_2d(part.keep)[:, None, None]
            added.append(torch.zeros(keep.shape, dtype=dtype, device=device).masked_fill(~keep, -torch.inf))
            continue
        if part.has_bias:
            found = part.bias(*extent.indices(device))
            if found is not None:
                added.append(found.to(dtype)[(None,) * (4 - found.dim())])
        if part.hides:
            rest.append(part)
    bias = sum(added[1:], start=added[0]) if added else None
    return bias, (AndMask(tuple(rest)) if len(rest) > 1 else rest[0]) if rest else None


# Intervals ------------------------------------------------------------------------------------------------------------


def _between(start: Tensor, stop: Tensor, extent: Extent, device: torch.device) -> VisibleKeys:
    """Return the visible keys of intervals, (B or 1, H or 1, L or 1) each."""
    start, stop = torch.broadcast_tensors(start.to(device), stop.to(device))
    start, stop = (t.expand(*t.shape[:2], extent.L).to(torch.int32).contiguous() for t in (start, stop))
    return VisibleKeys(start, stop)


def _states(start: Tensor, stop: Tensor, S: int, rows: int, cols: int) -> Tensor:
    """Return the states of the tiles of intervals (b, h, L): (b, h, query blocks, key blocks), int8."""
    extra = (0, -start.shape[-1] % rows)
    empty = start >= stop

    def blocks(tensor: Tensor, fill: int) -> Tensor:
        return torch.nn.functional.pad(tensor, extra, value=fill).unflatten(-1, (-1, rows))

    first = blocks(start.masked_fill(empty, S), S).amin(-1, keepdim=True)
    last = blocks(stop.masked_fill(empty, 0), 0).amax(-1, keepdim=True)
    # A row that is no query makes its tiles mixed.
    inner_first = blocks(start, S).amax(-1, keepdim=True)
    inner_last = blocks(stop.masked_fill(empty, 0), 0).amin(-1, keepdim=True)
    low = torch.arange(0, S, cols, device=start.device, dtype=torch.int32)
    some = (low < last) & (low + cols > first)
    every = (low >= inner_first) & (low + cols <= inner_last)
    return some.to(torch.int8) + (some & every)


def listed(states: Tensor) -> Tensor:
    """Return the tiles that each block visits, from their states (b, h, n, m): (b, h, n, 2 + m), int32.

    Nothing waits for the device: the lists have room for all tiles.
    """
    order = states.sort(stable=True, dim=-1, descending=True).indices
    full, seen = (states == FULL).sum(-1, keepdim=True), (states != EMPTY).sum(-1, keepdim=True)
    return torch.cat((full, seen, order), -1).to(torch.int32).contiguous()


# Other masks: the bits of mixed tiles ---------------------------------------------------------------------------------

#: Bytes of the bits of all tiles up to which nothing waits to learn which are mixed.
MOST_BITS = 1 << 28


def _evaluated(mask: Mask, extent: Extent, tile: tuple[int, int], device: torch.device) -> VisibleKeys:
    """Return the visible keys of a mask without intervals.

    The host never waits for the device: a mask without tensors is evaluated on the CPU, and of one with tensors all
    tiles have bits. Above ``MOST_BITS`` the number of its mixed tiles is read, to save memory.
    """
    rows, cols = tile
    if mask.listed_keys is not None:
        lists = mask.key_lists(extent)
        assert lists is not None
        return _of_lists(lists, extent, tile)
    states = mask.tiles(extent, rows, cols)
    if not mask.is_structural:  # a function may show each head, and each sequence, other pairs of a mixed tile
        b, h, q_idx, kv_idx = extent.indices(states.device)
        first = mask.visible(b, h, q_idx[:1], kv_idx[:1])
        assert first is not None
        states = states.expand(torch.broadcast_shapes(states.shape, (*first.shape[:-2], 1, 1)))
    every = not mask.is_structural and states.numel() * rows * cols <= 8 * MOST_BITS
    if every:
        place = torch.arange(states.numel(), device=states.device)
        some = torch.stack(torch.unravel_index(place, tuple(states.shape)), 1)
    else:
        states = mask.tiles(extent, rows, cols, exact=True)
        if extent.L % rows:  # rows that are no queries
            states[:, :, -1].clamp_(max=MIXED)
        if extent.S % cols:
            states[..., -1].clamp_(max=MIXED)
        some = (states == MIXED).nonzero()
    tiles = torch.full(states.shape, -1, dtype=torch.int32, device=states.device)
    tiles[tuple(some.unbind(1))] = torch.arange(len(some), dtype=torch.int32, device=states.device)
    states, tiles, some = (t.to(device, non_blocking=True) for t in (states, tiles, some))
    at_once = max(PAIRS_AT_ONCE // (rows * cols), 1)
    found = [_bits(mask, extent, tile, part) for part in some.split(at_once)] if len(some) else []
    words = torch.cat(found) if found else torch.zeros(1, rows, -(-cols // WORD), dtype=torch.int32, device=device)
    if every:
        bits = torch.stack([((words >> bit) & 1).sum((1, 2)) for bit in range(WORD)]).sum(0)
        states = ((bits > 0).to(torch.int8) + (bits == rows * cols)).view(states.shape)
    return VisibleKeys(by_query=listed(states), by_key=listed(states.mT), tiles=tiles.contiguous(), words=words)


def _of_lists(lists: Tensor, extent: Extent, tile: tuple[int, int]) -> VisibleKeys:
    """Return the visible keys of lists (b, h, L, K) of keys, in any order and maybe repeated; −1 is no key."""
    (rows, cols), (b, h, L, K), device = tile, lists.shape, lists.device
    nq, nk, width = -(-L // rows), -(-extent.S // cols), -(-cols // WORD)
    keys = torch.nn.functional.pad(lists.to(torch.int64).sort(-1).values, (1, 0), value=-1)
    keys = torch.where(keys[..., 1:] == keys[..., :-1], -1, keys[..., 1:])
    query = torch.arange(L, device=device).unsqueeze(-1)
    place = torch.where(keys >= 0, query // rows * nk + keys // cols, nq * nk)
    counts = torch.zeros(b, h, nq * nk + 1, dtype=torch.int32, device=device)
    ones = torch.ones((), dtype=torch.int32, device=device).expand(b, h, L * K)
    counts = counts.scatter_add_(-1, place.flatten(-2), ones)[..., :-1].unflatten(-1, (nq, nk))
    states = (counts > 0).to(torch.int8) + (counts == rows * cols)
    # Each block of queries has room for as many mixed tiles as its lists can meet.
    room = max(min(nk, rows * K), 1)
    mixed = states == MIXED
    order = torch.arange(b * h * nq, device=device).view(b, h, nq, 1) * room + mixed.cumsum(-1) - 1
    tiles = torch.where(mixed, order, -1).to(torch.int32)
    held = torch.nn.functional.pad(tiles.flatten(-2), (0, 1), value=-1).gather(-1, place.flatten(-2)).view_as(place)
    held = held.to(torch.int64)
    total = b * h * nq * room * rows * width
    bit = keys % cols
    at = torch.where(held >= 0, (held * rows + query % rows) * width + bit // WORD, total)
    powers = torch.ones(K, dtype=torch.int32, device=device) << (bit % WORD).to(torch.int32)
    words = torch.zeros(total + 1, dtype=torch.int32, device=device).scatter_add_(0, at.flatten(), powers.flatten())
    return VisibleKeys(
        by_query=listed(states), by_key=listed(states.mT), tiles=tiles, words=words[:-1].view(-1, rows, width)
    )


def _bits(mask: Mask, extent: Extent, tile: tuple[int, int], some: Tensor) -> Tensor:
    """Evaluate some tiles (n, 4) of sequence, head, block of queries and of keys: (n, rows, words)."""
    rows, cols = tile
    b, h, block, col = (place.view(-1, 1, 1, 1) for place in some.unbind(1))
    q_idx = block * rows + torch.arange(rows, device=some.device).view(1, 1, -1, 1)
    kv_idx = col * cols + torch.arange(cols, device=some.device).view(1, 1, 1, -1)
    visible = mask.visible(b, h, q_idx.clamp(max=extent.L - 1), kv_idx.clamp(max=extent.S - 1))
    assert visible is not None
    inside = (q_idx < extent.L) & (kv_idx < extent.S)
    visible = (visible & inside).expand(len(some), 1, rows, cols).squeeze(1)
    visible = torch.nn.functional.pad(visible, (0, -cols % WORD)).unflatten(-1, (-1, WORD))
    powers = torch.ones((), dtype=torch.int64, device=some.device) << torch.arange(WORD, device=some.device)
    packed = (visible * powers).sum(-1)
    return torch.where(packed >= 1 << (WORD - 1), packed - (1 << WORD), packed).to(torch.int32)
