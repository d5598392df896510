"""An overview of a layer's matrices of any size: the entropy of their rows, and the largest weights of blocks.

Dimensions: H heads, L queries, S keys; h heads, l queries and s keys of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.inspect._record.summary import AttentionSummary, Level
from regard.inspect._record.tiles import Tile

#: The most blocks along the longer side of a thumbnail, and of a pooled matrix.
_THUMBNAIL, _POOLED = 48, 2048
#: Weights below 2 to this power count as zero.
_LEAST = -24
#: A key with at least this share of all attention is a sink, in a matrix with more rows and columns than this.
_SINK, _SMALL = 0.3, 3


@dataclass(frozen=True)
class Overview:
    """An overview of a layer's heads, the last of which may be their mean.

    Attributes
    ----------
    entropy : Tensor (H,)
        The mean entropy of the rows, in nats.
    received : Tensor (H,)
        The share of the key that receives most.
    diagonal : Tensor (H,)
        The mean weight within one position of the query's own; NaN unless queries and keys are as many.
    hidden : Tensor (H,)
        The mean weight of a query on sinks and special tokens.
    sinks : Tensor (H,) of int32
        The key that receives most of the attention; −1 where there is none.
    row_max, bare_max, row_entropy : Tensor (H, L)
        The largest weight of each row, with and without sinks, and its entropy in nats.
    spans : Tensor (3, rows)
        The first key that queries of each row of a thumbnail see, the one after the last, and their mean number.
    spread : Tensor (H, rows) of uint8
        The mean entropy of each row of a thumbnail, in 255ths of the logarithm of the number of keys.
    thumbnails : Tensor (H, rows, cols) of uint8
        The largest weights of the blocks of a thumbnail, as :func:`codes`; 0 where all pairs are masked.
    bare : tuple of H Tensors (rows, number of blocks) of uint8
        The same without sinks, for the columns of a thumbnail that have any; 0 where there are only sinks. Empty if
        each block is one column.
    pooled : Tensor (H, rows, cols) of uint8
        The largest weights of the blocks of a pooled matrix without sinks, as :func:`codes`; empty if it is small.
    apart : tuple of H Tensors (rows, number of sinks) of uint8
        The largest weights of each sink in these blocks.
    lse : Tensor (H, L), optional
        The log-sum-exp of each query's scores, if weights are exp(score − lse).
    """

    entropy: Tensor
    received: Tensor
    diagonal: Tensor
    hidden: Tensor
    sinks: Tensor
    row_max: Tensor
    bare_max: Tensor
    row_entropy: Tensor
    spans: Tensor
    spread: Tensor
    thumbnails: Tensor
    bare: tuple[Tensor, ...]
    pooled: Tensor
    apart: tuple[Tensor, ...]
    lse: Tensor | None = None


def codes(weights: Tensor) -> Tensor:
    """Return weights as bytes: 1 for zero, then even steps of the logarithm from 2⁻²⁴ to 1; 0 is for masked pairs.

    A step is a factor of 2^(24/253), so a weight is off by at most 3.4 %.
    """
    steps = 2 + torch.round(253 * (1 - weights.abs().clamp_min(2.0**_LEAST).log2() / _LEAST))
    return torch.where(weights.abs() < 2.0**_LEAST, 1, steps.clamp(2, 255)).to(torch.uint8)


def thumbnail_block(length: int) -> int:
    """Return how many of a side's cells a block of a thumbnail covers."""
    return max(-(-length // _THUMBNAIL), 1)


def pooled_block(length: int) -> int:
    """Return how many of a side's cells a pooled block covers: a power of two, 1 for a short side."""
    return 1 if length <= _POOLED else 1 << (length - 1).bit_length() - _POOLED.bit_length() + 1


def likely_sinks(received: Tensor, queries: int) -> Tensor:
    """Return the keys (H,) that may be sinks, from how much keys receive (H, S) from some queries; −1 for none."""
    if min(queries, received.shape[1]) == 0:
        return torch.full((len(received),), -1)
    largest, at = (received / queries).max(-1)
    return torch.where(largest > _SINK / 2, at, -1)


def overview(
    tiles: Callable[[], Iterable[Tile]], shape: tuple[int, int, int], *, special: Sequence[int] = (),
    likely: Tensor | None = None, mean: bool = False, seen: Callable[[], Tensor | None] = lambda: None,
    masked: Callable[[], Tensor | None] = lambda: None,
) -> Overview:  # fmt: skip
    """Read a layer's matrices once, tile by tile.

    Parameters
    ----------
    tiles : callable
        Returns the weights, all heads of some queries before the next queries.
    shape : (int, int, int)
        H, L and S.
    special : sequence of int
        The keys that are special tokens.
    likely : Tensor, optional
        The key of each head, and of the mean, that may be a sink, −1 for none; a matrix without it has no sinks. If
        another key is one after all, the matrices are read once more.
    mean : bool
        Whether the mean of the heads is the last.
    seen : callable
        Returns the first key that each query sees, the one after its last, and how many it sees (3, L); None if all.
    masked : callable
        Returns which pairs (H or 1, L, S) are masked, for masks with gaps; None if unknown.
    """
    H, L, S = shape
    found = _Read(H + mean, L, S, special, likely)
    total = torch.zeros(0)
    for tile in tiles():
        stop = tile.head + len(tile.weights)
        if mean:
            sums = tile.weights.sum(0)
            total = sums if tile.head == 0 else total + sums
        found.add(tile)
        if mean and stop == H:
            found.add(Tile.of(H, tile.first, (total / H)[None]))
    received, sinks = found.sinks()
    if bool(((sinks >= 0) & (sinks != found.likely) & ~torch.isin(sinks, found.special)).any()):
        return overview(tiles, shape, special=special, likely=sinks, mean=mean, seen=seen, masked=masked)
    return found.finish(received, sinks, _all_of(L, S) if (some := seen()) is None else some.cpu(), masked())


class _Read:
    """What was read of a layer's matrices so far."""

    def __init__(self, H: int, L: int, S: int, special: Sequence[int], likely: Tensor | None) -> None:
        self.shape, self.special = (H, L, S), torch.tensor(sorted(special), dtype=torch.long)
        self.size, self.small = (pooled_block(L), pooled_block(S)), (thumbnail_block(L), thumbnail_block(S))
        self.likely = torch.full((H,), -1) if likely is None else likely.clone()
        self.is_searched = likely is not None
        self.likely[torch.isin(self.likely, self.special)] = -1
        self.large = max(self.size) > 1
        down = -(-L // self.size[0]) if self.large else 0
        self.received = torch.zeros(H, S)
        self.diagonal = torch.zeros(H) if L == S else torch.full((H,), math.nan)
        self.row_max, self.bare_max, self.row_entropy, self.lse, self.sink = (torch.zeros(H, L) for _ in range(5))
        self.hidden, self.has_lse = torch.zeros(H), False
        self.thumbnails, self.bare = (
            torch.zeros(H, *(-(-length // by) for length, by in zip((L, S), self.small))) for _ in range(2)
        )
        self.pooled = torch.zeros(H, down, -(-S // self.size[1]))
        self.apart = torch.zeros(H, down, len(special))

    def add(self, tile: Tile) -> None:
        """Read a tile, and overwrite its weights."""
        head, first, weights = tile.head, tile.first, tile.weights
        h, l, s = weights.shape  # noqa: E741
        H, at, (_, L, S) = slice(head, head + h), slice(first, first + l), self.shape
        self.received[H, :s] += weights.sum(1)
        weights.abs_()
        self.row_entropy[H, at] = tile.entropy
        if tile.lse is not None:
            self.lse[H, at], self.has_lse = tile.lse, True
        self.row_max[H, at] = self.bare_max[H, at] = weights.amax(2)
        if L == S:
            for offset in (-1, 0, 1):
                self.diagonal[H] += weights.diagonal(first + offset, 1, 2).sum(1)
        _fold(self.thumbnails[H], first, self.small, weights)
        if len(self.special) or bool((self.likely[H] >= 0).any()):
            self._hide(head, first, weights)
            self.bare_max[H, at] = weights.amax(2)
            _fold(self.bare[H], first, self.small, weights)
        if self.large:
            _fold(self.pooled[H], first, self.size, weights)

    def _hide(self, head: int, first: int, weights: Tensor) -> None:
        """Note the weights of special tokens and likely sinks, and set them to 0."""
        h, l, s = weights.shape  # noqa: E741
        columns = self.special[self.special < s]
        if len(columns):
            found = weights[:, :, columns]
            self.hidden[head : head + h] += found.sum((1, 2))
            if self.large:
                _fold(self.apart[head : head + h, :, : len(columns)], first, (self.size[0], 1), found)
            weights[:, :, columns] = 0.0
        for i, key in enumerate(self.likely[head : head + h].tolist()):
            if 0 <= key < s:
                self.sink[head + i, first : first + l] = weights[i, :, key]
                weights[i, :, key] = 0.0

    def sinks(self) -> tuple[Tensor, Tensor]:
        """Return the share of the key of each head that receives most, and the key if it is a sink, else −1."""
        H, L, _ = self.shape
        if not self.is_searched:
            return torch.zeros(H), torch.full((H,), -1)
        return _sinks(self.received / max(L, 1), L)

    def finish(self, received: Tensor, sinks: Tensor, seen: Tensor, gaps: Tensor | None) -> Overview:
        """Return the overview: ``sinks`` are the likely ones, special tokens, or none."""
        _, L, S = self.shape
        for head, (key, sink) in enumerate(zip(self.likely.tolist(), sinks.tolist())):
            if key >= 0 and sink != key:  # not a sink after all
                column = self.sink[head, :, None]
                self.bare_max[head] = torch.maximum(self.bare_max[head], column[:, 0])
                for blocks, size in ((self.bare, self.small), (self.pooled, self.size)):
                    if blocks.numel():
                        _fold(blocks[head : head + 1, :, key // size[1], None], 0, (size[0], 1), column[None])
            elif key >= 0:
                self.hidden[head] += self.sink[head].sum()
        spans, spread = _spread(self.row_entropy, seen, self.thumbnails.shape[1])
        coded = [codes(self.thumbnails), codes(self.pooled)]
        if gaps is not None:
            coded = [_without_gaps(each, ~gaps, by) for each, by in zip(coded, (self.small, self.size))]
        special = self.special.tolist()
        bare, apart = [], []
        for head, sink in enumerate(sinks.tolist()):
            columns = sorted({*special, *([sink] if sink >= 0 else [])})
            bare.append(_bare(self.bare[head], columns, self.small[1], S))
            maxima = {key: self.apart[head, :, i] for i, key in enumerate(special)}
            if self.large and sink >= 0 and sink not in maxima:
                maxima[sink] = torch.zeros(1, self.apart.shape[1], 1)
                _fold(maxima[sink], 0, (self.size[0], 1), self.sink[head, None, :, None])
                maxima[sink] = maxima[sink][0, :, 0]
            parts = [maxima[key] for key in columns] if self.large else []
            apart.append(codes(torch.stack(parts, 1) if parts else torch.zeros(self.apart.shape[1], len(columns))))
        n = max(L, 1)
        return Overview(
            self.row_entropy.sum(1) / n, received, self.diagonal / n, self.hidden / n, sinks.int(), self.row_max,
            self.bare_max, self.row_entropy, spans, spread, coded[0], tuple(bare), coded[1], tuple(apart),
            self.lse if self.has_lse else None,
        )  # fmt: skip


def _bare(blocks: Tensor, columns: Sequence[int], size: int, S: int) -> Tensor:
    """Return codes of a thumbnail (rows, cols) without sinks, in the columns that have any; 0 if they are alone."""
    partly = sorted({each // size for each in columns}) if size > 1 else []
    found = codes(blocks[:, partly])
    for i, block in enumerate(partly):
        if set(range(block * size, min((block + 1) * size, S))) <= set(columns):
            found[:, i] = 0
    return found


def _without_gaps(coded: Tensor, visible: Tensor, size: tuple[int, int]) -> Tensor:
    """Return codes of blocks (H, rows, cols) with 0 where no pair of the mask (heads, L, S) is visible."""
    if not coded.numel():
        return coded
    found = torch.zeros(len(visible), *coded.shape[1:])
    _fold(found, 0, size, visible.float())
    if 1 < len(found) < len(coded):  # the mean of all heads is the last
        found = torch.cat([found, found.amax(0, keepdim=True)])
    return coded.masked_fill(found == 0, 0)


def _all_of(L: int, S: int) -> Tensor:
    """Return the first key, the one after the last, and the number of keys (3, L) of queries that see all."""
    return torch.tensor([0, S, S])[:, None].expand(3, L)


def _spread(entropy: Tensor, seen: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return which keys queries see in each row of a thumbnail (3, rows), and how even they are (H, rows).

    Parameters
    ----------
    entropy : Tensor (H, L)
    seen : Tensor (3, L)
        The first key that each query sees, the one after its last, and how many it sees.
    rows : int
    """
    L = seen.shape[1]
    if L == 0:
        return torch.zeros(3, 0), torch.zeros(len(entropy), 0, dtype=torch.uint8)
    at = torch.arange(L) // -(-L // rows)
    starts, stops, counts = seen.float()
    share = (entropy / counts.clamp_min(2).log()).clamp(0, 1)
    size = torch.bincount(at, minlength=rows)
    spread = torch.zeros(len(entropy), rows).index_add(1, at, share) / size
    found = torch.stack([
        torch.zeros(rows).scatter_reduce(0, at, starts, "amin", include_self=False),
        torch.zeros(rows).scatter_reduce(0, at, stops, "amax", include_self=False),
        torch.zeros(rows).index_add(0, at, counts) / size,
    ])  # fmt: skip
    return found, (255 * spread).round().to(torch.uint8)


def summary_thumbnail(run: AttentionSummary) -> Level:
    """Return the level of a summary's pyramid that serves as a thumbnail."""
    levels = run.pyramid()
    return next((each for each in levels if max(each.max.shape[2:]) <= _THUMBNAIL), levels[-1])


def summary_overview(run: AttentionSummary, batch: int, special: Sequence[int]) -> Overview:
    """Return the overview of a summary; the blocks of its pyramid include sinks."""
    top, base = run.topk(run.k), run.pyramid()[0].max[batch]
    weights, keys = top.weights[batch], top.indices[batch]
    received = run.received()[batch].float().cpu() / run.shape[2]
    largest, sinks = _sinks(received, run.shape[2])
    hidden = [sorted({*special, *([sink] if sink >= 0 else [])}) for sink in sinks.tolist()]
    without = torch.stack([
        each.masked_fill(torch.isin(at, torch.tensor(columns, dtype=at.dtype)), 0.0).amax(-1)
        for each, at, columns in zip(weights, keys, hidden)
    ])  # fmt: skip
    apart = tuple(torch.zeros(base.shape[1], len(columns), dtype=torch.uint8) for columns in hidden)
    entropy, small = run.entropy()[batch].float(), summary_thumbnail(run).max[batch]
    H, L = entropy.shape
    spans, spread = _spread(entropy, _all_of(L, run.shape[3]), small.shape[1])
    near = (keys - torch.arange(L)[:, None]).abs() <= 1
    diagonal = (weights * near).sum((1, 2)) / L if run.shape[3] == L else torch.full((H,), math.nan)
    share = torch.stack([each[columns].sum() for each, columns in zip(received, hidden)])
    level = summary_thumbnail(run).size
    bare = tuple(_bare_blocks(*each, level, small.shape[1]) for each in zip(weights, keys, hidden))
    return Overview(
        entropy.mean(-1), largest, diagonal, share, sinks.int(), weights.amax(-1), without, entropy, spans, spread,
        codes(small), bare, codes(base), apart,
    )  # fmt: skip


def _sinks(received: Tensor, L: int) -> tuple[Tensor, Tensor]:
    """Return the largest share (H,) of all attention that a key receives (H, S), and the key if it is a sink or −1."""
    if min(L, received.shape[1]) == 0:
        return torch.zeros(len(received)), torch.full((len(received),), -1)
    share, at = received.max(-1)
    return share, torch.where((share > _SINK) & (min(L, received.shape[1]) > _SMALL), at, -1)


def _bare_blocks(weights: Tensor, keys: Tensor, columns: Sequence[int], size: int, rows: int) -> Tensor:
    """Return the largest known weights of a head's blocks that have sinks (rows, number of blocks), without these.

    Known are the largest weights of each query and their keys (L, k).
    """
    partly = sorted({each // size for each in columns}) if size > 1 else []
    weights = weights.masked_fill(torch.isin(keys, torch.tensor(list(columns), dtype=keys.dtype)), 0.0)
    found = torch.zeros(rows, len(partly))
    for i, block in enumerate(partly):
        inside = (weights * (keys.div(size, rounding_mode="floor") == block)).amax(-1)
        _fold(found[None, :, i : i + 1], 0, (size, 1), inside[None, :, None])
    return codes(found)


def _fold(into: Tensor, first: int, size: tuple[int, int], weights: Tensor) -> None:
    """Update the largest weights of blocks (h, rows, cols) with more rows of weights (h, l, s), from ``first`` on."""
    down, across = size
    l, at = weights.shape[1], first // down  # noqa: E741
    lead = min(-first % down, l)  # rows of a block that has earlier ones
    whole = (l - lead) // down
    parts = []
    if lead:
        parts.append(weights[:, :lead].amax(1, keepdim=True))
    if whole:
        parts.append(weights[:, lead : lead + whole * down].unflatten(1, (whole, down)).amax(2))
    if lead + whole * down < l:
        parts.append(weights[:, lead + whole * down :].amax(1, keepdim=True))
    blocks = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    blocks = F.pad(blocks, (0, -blocks.shape[2] % across)).unflatten(2, (-1, across)).amax(3)
    part = into[:, at : at + blocks.shape[1], : blocks.shape[2]]
    torch.maximum(part, blocks, out=part)
