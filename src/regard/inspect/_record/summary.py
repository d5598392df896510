"""Summaries of a layer's weights without queries and keys, in memory that grows with L + S.

Dimensions: B batch, H query heads, G key–value heads, L queries, S keys, E width of a head, R and C blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import AuxRequest, TopK
from regard._utils.errors import rejected
from regard.inspect._record.calls import AttentionCall, Projected, entropy_of, topk_of
from regard.inspect._record.layer_record import LayerRecord, shifted

#: Blocks along a side of a pyramid's base, at most; a power of two.
BASE = 128
#: How many weights to hold at once when summarizing a call.
_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Level:
    """A coarse view of a matrix: the largest weight and the mean of each block of size × size cells.

    Attributes
    ----------
    size : int
        Cells along the side of a block; blocks at the right and bottom edges may be smaller.
    max, mean : Tensor (B, H, R, C) of float32
    """

    size: int
    max: Tensor
    mean: Tensor


class Pyramid:
    """Largest weights and means of the blocks of a matrix that grows row by row.

    Parameters
    ----------
    shape : (int, int)
        B and H.
    base : int
        Blocks along a side, at most.
    """

    def __init__(self, shape: tuple[int, int], base: int = BASE) -> None:
        self.base = base
        self.size, self.rows, self.cols = 1, 0, 0
        self.largest, self.total = (torch.zeros(*shape, 0, 0) for _ in range(2))

    @property
    def nbytes(self) -> int:
        """The size of the blocks in bytes."""
        return self.largest.nbytes + self.total.nbytes

    @classmethod
    def of(cls, largest: Tensor, total: Tensor, size: int, shape: tuple[int, int]) -> Self:
        """Return a pyramid from the blocks of its base and the shape of its matrix."""
        made = cls((0, 0))
        made.size, (made.rows, made.cols) = size, shape
        made.largest, made.total = largest, total
        blocks = tuple(-(-each // size) for each in shape) if size > 0 else ()
        if largest.shape != total.shape or largest.dim() != 4 or largest.shape[2:] != blocks:
            raise TypeError(f"a pyramid of {shape} has blocks {tuple(largest.shape)}")
        return made

    def add(self, weights: Tensor) -> None:
        """Append rows of weights (B, H, l, S), with at least as many keys as before."""
        l, S = weights.shape[2:]  # noqa: E741
        first = self.rows
        self.rows, self.cols = first + l, max(self.cols, S)
        while max(self.rows, self.cols) > self.base * self.size:
            self.size *= 2
            self.largest = _halved(self.largest, "max")
            self.total = _halved(self.total, "sum")
        size, lead = self.size, first % self.size  # earlier rows of the first block
        blocks = F.pad(weights, (0, -S % size, lead, -(lead + l) % size))
        blocks = blocks.unflatten(3, (-1, size)).unflatten(2, (-1, size))
        down, across = (-(-each // size) for each in (self.rows, self.cols))
        room = (0, across - self.largest.shape[3], 0, down - self.largest.shape[2])
        self.largest, self.total = F.pad(self.largest, room), F.pad(self.total, room)
        at = (slice(None), slice(None), slice(first // size, down), slice(0, blocks.shape[4]))
        self.largest[at] = torch.maximum(self.largest[at], blocks.amax((3, 5)))
        self.total[at] += blocks.sum((3, 5))

    def levels(self) -> list[Level]:
        """Return all levels, from the base to a single block; the block size doubles at each level."""
        size, largest, total, found = self.size, self.largest, self.total, []
        while True:
            down, across = (_cells(each, size) for each in (self.rows, self.cols))
            found.append(Level(size, largest, total / (down[:, None] * across)))
            if max(largest.shape[2:]) <= 1:
                return found
            size, largest, total = 2 * size, _halved(largest, "max"), _halved(total, "sum")


class AttentionSummary(LayerRecord):
    """A layer's largest weights, entropies, column sums and pyramid in one run, without queries and keys.

    Parameters
    ----------
    name : str
        The layer's name in the model.
    attended : AttentionCall or Projected
        The first call.
    k : int
        How many weights of each query to keep.
    """

    def __init__(
        self, name: str, attended: AttentionCall | Projected, k: int, reads: str | None = None, windows: int = 1
    ) -> None:
        super().__init__(name, reads, windows)
        call = attended.attended() if isinstance(attended, Projected) else attended.flat()
        B, H = call.query.shape[:2]
        self.k = k
        self._pyramid = Pyramid((B, H))
        self._groups = call.key.shape[1]
        self._entropy, self._received = torch.zeros(B, H, 0), torch.zeros(B, H, 0)
        self._top = TopK(torch.zeros(B, H, 0, k), torch.zeros(B, H, 0, k, dtype=torch.int32))
        self.grow(call)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save."""
        return {
            "entropy": self._entropy, "received": self._received, "topk.weights": self._top.weights,
            "topk.indices": self._top.indices, "largest": self._pyramid.largest, "total": self._pyramid.total,
        }  # fmt: skip

    def numbers(self) -> dict[str, int]:
        """Return the numbers to save with :meth:`tensors`."""
        return {"groups": self._groups, "size": self._pyramid.size}

    @classmethod
    def of(cls, name: str, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> Self:
        """Return a summary from its :meth:`tensors` and :meth:`numbers`.

        Raises
        ------
        TypeError
            If they do not match.
        """
        made = cls.__new__(cls)
        LayerRecord.__init__(made, name)
        made._groups, size = int(numbers["groups"]), int(numbers["size"])
        made._entropy, made._received = tensors["entropy"], tensors["received"]
        made._top = TopK(tensors["topk.weights"], tensors["topk.indices"])
        B, H, L, S = made.shape
        made.k = made._top.weights.shape[-1]
        made._pyramid = Pyramid.of(tensors["largest"], tensors["total"], size, (L, S))
        fit = made._received.shape[:2] == (B, H) == made._pyramid.largest.shape[:2]
        whole = made._top.weights.shape == made._top.indices.shape == (B, H, L, made.k)
        fit = fit and all(each.is_floating_point() != (part == "topk.indices") for part, each in tensors.items())
        if not (fit and whole and min(B, S, made.k) > 0 and 0 < made._groups <= H and (made._top.indices < S).all()):
            raise TypeError(f"a summary of {made.shape} has parts of other sizes")
        return made

    @torch.no_grad()
    def grow(self, attended: AttentionCall) -> None:
        attended = attended.flat()
        (_, H, L, _), S = attended.query.shape, attended.key.shape[2]
        step = max(_AT_ONCE // max(self.shape[0] * H * S, 1), 1)
        top, entropy = [self._top], [self._entropy]
        more = attended.first + S - self._received.shape[2]
        self._received = F.pad(self._received, (0, more))
        for first in range(0, L, step):
            weights = attended.rows(first, min(first + step, L), AuxRequest(weights=True)).weights
            assert weights is not None
            weights = weights.float().cpu()
            best = topk_of(weights, self.k)
            top.append(TopK(best.weights, shifted(best.indices, attended.first)))
            entropy.append(entropy_of(weights))
            weights = F.pad(weights, (attended.first, 0))
            self._received = self._received + weights.sum(2)
            self._pyramid.add(weights)
        self._top = TopK(
            torch.cat([each.weights for each in top], 2), torch.cat([each.indices.int() for each in top], 2)
        )
        self._entropy = torch.cat(entropy, 2)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        B, H, L = self._entropy.shape
        return B, H, L, self._received.shape[2]

    @property
    def heads_per_group(self) -> int:
        return self.shape[1] // self._groups

    @property
    def nbytes(self) -> int:
        kept = (self._entropy, self._received, self._top.weights, self._top.indices)
        return sum(each.nbytes for each in kept) + self._pyramid.nbytes

    def weights(
        self, *, batch: int | slice | None = None, head: int | slice | None = None, rows: int | slice | None = None,
        cols: int | slice | None = None,
    ) -> NoReturn:  # fmt: skip
        del batch, head, rows, cols
        raise rejected("weights", "record", "be captured with its queries and keys", f"{self!r}")

    def entropy(self) -> Tensor:
        return self._entropy

    def received(self) -> Tensor:
        return self._received

    def topk(self, k: int = 5) -> TopK:
        if not 1 <= k <= self.k:
            raise rejected("topk", "k", f"be in [1, {self.k}], the number of weights in the summary", k)
        return TopK(self._top.weights[..., :k], self._top.indices[..., :k].long())

    def kept(self, batch: int, first: int, last: int) -> Tensor:
        """Return the weights (H, last − first, S) of some queries of a sequence, 0 for those that were not kept."""
        keys = self._top.indices[batch, :, first:last].long()
        weights = self._top.weights[batch, :, first:last].float() * (keys >= 0)
        return torch.zeros(*keys.shape[:2], self.shape[3]).scatter_add_(-1, keys.clamp_min(0), weights)

    def pyramid(self) -> list[Level]:
        """Return the largest weights and means of blocks: at most 128 × 128, then ever fewer."""
        return self._pyramid.levels()

    def __repr__(self) -> str:
        B, H, L, S = self.shape
        return (
            f"AttentionSummary({self.name!r}: {B} × {H} heads, {L} queries, {S} keys, {self.k} weights of each query)"
        )


def _halved(blocks: Tensor, how: str) -> Tensor:
    """Return blocks with twice the side."""
    blocks = F.pad(blocks, (0, blocks.shape[3] % 2, 0, blocks.shape[2] % 2))
    blocks = blocks.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    return blocks.amax((3, 5)) if how == "max" else blocks.sum((3, 5))


def _cells(length: int, size: int) -> Tensor:
    """Return the number of rows (or columns) of each block."""
    starts = torch.arange(0, max(length, 1), size)
    return (length - starts).clamp(1, size).float()
