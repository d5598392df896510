"""A matrix at a glance, however large: how spread its rows are, and its largest weights, in blocks.

Dimensions: H heads, L queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from regard.inspect.summary import AttentionSummary, Level

#: Blocks along the longer side of a thumbnail, and of a pooled matrix, at most; and what is read at once.
_THUMBNAIL, _POOLED = 48, 2048
_AT_ONCE = 1 << 23
#: Weights below 2 to this are as good as none.
_LEAST = -24


@dataclass(frozen=True)
class Overview:
    """What is known of a layer's heads before somebody looks at one.

    Attributes
    ----------
    entropy : Tensor (H,)
        Of a row, in nats; the mean over rows.
    row_max, bare_max : Tensor (H, L)
        The largest weight of each row, among all keys and among those that are no sinks.
    thumbnails : Tensor (H, rows, cols) of uint8
        The largest weights of blocks, as :func:`codes`.
    pooled : Tensor (H, rows, cols) of uint8
        The largest weights of larger blocks, sinks left out, as :func:`codes`; no rows where the matrix is small.
    sinks : tuple of H Tensors (rows, number of sinks) of uint8
        Those of sinks, each column by itself.
    """

    entropy: Tensor
    row_max: Tensor
    bare_max: Tensor
    thumbnails: Tensor
    pooled: Tensor
    sinks: tuple[Tensor, ...]


def codes(weights: Tensor) -> Tensor:
    """Return weights as bytes: 0 is none, others are even steps of the logarithm from 2⁻²⁴ to 1.

    A step is a factor of 2^(24/254), so that a weight is off by 3.4 % at most.
    """
    steps = 1 + torch.round(254 * (1 - weights.abs().clamp_min(2.0**_LEAST).log2() / _LEAST))
    return torch.where(weights.abs() < 2.0**_LEAST, 0, steps.clamp(1, 255)).to(torch.uint8)


def thumbnail_block(L: int, S: int) -> int:
    """Return how many cells the side of a thumbnail's block has."""
    return max(-(-max(L, S) // _THUMBNAIL), 1)


def pooled_block(L: int, S: int) -> int:
    """Return how many cells the side of a pooled block has: a power of two, 1 for small matrices."""
    return 1 if max(L, S) <= _POOLED else 1 << (max(L, S) - 1).bit_length() - _POOLED.bit_length() + 1


def overview(
    rows: Callable[[int, int], Tensor], shape: tuple[int, int, int], hidden: Sequence[Sequence[int]]
) -> Overview:
    """Read a layer's matrices once, some rows at a time.

    Parameters
    ----------
    rows : callable
        Returns the weights (H, last − first, S) of the queries from first to before last.
    shape : (int, int, int)
        H, L and S.
    hidden : sequence of sequences of int
        For each head, the keys that are sinks, sorted.
    """
    H, L, S = shape
    size, small = pooled_block(L, S), thumbnail_block(L, S)
    entropy = torch.zeros(H)
    row_max, bare_max = torch.zeros(H, L), torch.zeros(H, L)
    thumbnails = torch.zeros(H, -(-L // small), -(-S // small))
    pooled = torch.zeros(H, -(-L // size) if size > 1 else 0, -(-S // size))
    sinks = [torch.zeros(pooled.shape[1], len(each)) for each in hidden]
    step = max(_AT_ONCE // (H * S), 1)
    for first in range(0, L, step):
        last = min(first + step, L)
        weights = rows(first, last).float().abs()
        entropy += torch.special.entr(weights).sum((1, 2))
        row_max[:, first:last] = weights.amax(2)
        _fold(thumbnails, first, small, weights)
        for head, columns in enumerate(hidden):
            if columns:
                if size > 1:
                    _fold(sinks[head][None], first, size, weights[head : head + 1, :, list(columns)], across=1)
                weights[head, :, list(columns)] = 0
        bare_max[:, first:last] = weights.amax(2)
        if size > 1:
            _fold(pooled, first, size, weights)
    entropy /= max(L, 1)
    return Overview(entropy, row_max, bare_max, codes(thumbnails), codes(pooled), tuple(map(codes, sinks)))


def summary_thumbnail(run: AttentionSummary) -> Level:
    """Return the level of a summary's pyramid that stands for a thumbnail."""
    levels = run.pyramid()
    return next((each for each in levels if max(each.max.shape[2:]) <= _THUMBNAIL), levels[-1])


def summary_overview(run: AttentionSummary, batch: int, hidden: Sequence[Sequence[int]]) -> Overview:
    """Return what a summary knows; the blocks of its pyramid hold sinks, too."""
    top, base = run.topk(run.k), run.pyramid()[0].max[batch]
    weights, keys = top.weights[batch], top.indices[batch]
    bare = torch.stack([
        each.masked_fill(torch.isin(at, torch.tensor(list(columns), dtype=at.dtype)), 0.0).amax(-1)
        for each, at, columns in zip(weights, keys, hidden)
    ])  # fmt: skip
    sinks = tuple(torch.zeros(base.shape[1], len(columns), dtype=torch.uint8) for columns in hidden)
    entropy, small = run.entropy()[batch].mean(-1), summary_thumbnail(run).max[batch]
    return Overview(entropy, weights.amax(-1), bare, codes(small), codes(base), sinks)


def _fold(into: Tensor, first: int, size: int, weights: Tensor, across: int | None = None) -> None:
    """Take the largest weights of blocks, into what earlier rows have left there."""
    across = size if across is None else across
    blocks = F.pad(weights, (0, -weights.shape[-1] % across)).unflatten(-1, (-1, across)).amax(-1)
    lead = first % size  # rows of the first block that were there before
    blocks = F.pad(blocks, (0, 0, lead, -(lead + blocks.shape[1]) % size)).unflatten(1, (-1, size)).amax(2)
    at = slice(first // size, first // size + blocks.shape[1])
    torch.maximum(into[:, at], blocks, out=into[:, at])
