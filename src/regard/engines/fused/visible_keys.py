"""Convert a mask for the kernels: to an interval of keys per row, or to the visible tiles of each block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.engines.fused.arguments import BLOCK
from regard.engines.problem import Problem
from regard.engines.tiles import BlockMask, Run
from regard.masks.base import EMPTY, FULL, Extent, Mask

#: Number of keys per tile of a mask without intervals.
KEYS = 128
#: Maximum number of pairs for which a materialized mask is cached.
KEPT = 1 << 16
#: Maximum size of the bias of one call; larger ones are computed for fewer heads at a time.
LARGEST = 1 << 22


@dataclass(frozen=True)
class WorkItem:
    """The rows of one kernel call.

    ``first`` and ``last`` count blocks over all heads or, with ``segments``, heads for a single ``block``. ``segments``
    (n, 3) holds start, stop and column of the bias, and ``columns`` the keys of these columns. ``cost`` is roughly the
    number of visible pairs.
    """

    first: int
    last: int
    cost: float = 0.0
    block: int = 0
    segments: Tensor | None = None
    columns: Tensor | None = None


@dataclass(frozen=True)
class VisibleKeys:
    """The keys that the queries of a problem see.

    Attributes
    ----------
    extent : Extent
    start, stop : Tensor (B or 1, H or 1, L or 1), int64, or None
        The interval of each row; None without a mask, or for a mask without intervals.
    mask : Mask or None
        The mask to evaluate per block; None if intervals suffice.
    added : Tensor (B or 1, H or 1, L, S), or None
        A materialized bias, −inf where masked, for traced calls and function masks.
    numbers : dict of str to int
        Strides of the intervals, by kernel argument.
    """

    extent: Extent
    start: Tensor | None = None
    stop: Tensor | None = None
    mask: Mask | None = None
    added: Tensor | None = None
    numbers: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem) -> VisibleKeys:
        """Convert a problem's mask."""
        extent, mask = problem.extent, problem.mask
        if mask is None:
            return cls(extent)
        spans = None if mask.has_bias else problem.intervals
        if spans is not None:
            return cls.between(extent, *spans)
        mask = mask.cast(problem.compute_dtype)
        learned = torch.is_grad_enabled() and any(t.requires_grad for t in mask.tensors())
        if extent.L * extent.S <= KEPT and mask.calls_a_function() and not learned:
            # For short sequences, evaluating a function on everything costs no more than on one block.
            index = [torch.arange(n, device="cpu") for n in (extent.B, extent.H, extent.L, extent.S)]
            b, h, q_idx = index[0].view(-1, 1, 1, 1), index[1].view(-1, 1, 1), index[2].unsqueeze(1)
            added = mask.matrix(b, h, q_idx, index[3], problem.compute_dtype)
            return cls(extent, added=added.contiguous())
        return cls(extent, mask=mask)

    @classmethod
    def between(cls, extent: Extent, start: Tensor, stop: Tensor) -> VisibleKeys:
        """Return the visible keys for given intervals."""
        start, stop = (t.contiguous() for t in torch.broadcast_tensors(start, stop))
        strides = [0 if n == 1 else step for n, step in zip(start.shape, start.stride())]
        return cls(extent, start, stop, numbers=dict(zip(("interval_b", "interval_h", "interval_r"), strides)))

    @property
    def everything(self) -> bool:
        """Whether every query sees every key."""
        return self.start is None and self.mask is None and self.added is None

    @property
    def plain(self) -> bool:
        """Whether there is no finite bias."""
        return self.added is None and (self.mask is None or not self.mask.has_bias)

    @property
    def is_small_and_fixed(self) -> bool:
        """Whether the bias, if any, can be cached for later calls."""
        if self.mask is None:
            return self.added is None
        return self.mask.is_fixed and self.extent.L * self.extent.S <= KEPT

    def costs(self) -> Tensor | None:
        """Return the approximate cost of each block of queries, (B · H · blocks,); None if all are equal."""
        B, H, L = self.extent.B, self.extent.H, self.extent.L
        blocks = -(-L // BLOCK)
        if self.start is None or self.stop is None:
            return None
        # Visible pairs, plus a constant overhead per block.
        width = (self.stop - self.start).expand(-1, -1, L).double()
        padded = torch.nn.functional.pad(width, (0, blocks * BLOCK - L)).unflatten(-1, (blocks, BLOCK)).sum(-1)
        return (padded / BLOCK + 16).expand(B, H, blocks).flatten()

    def most_keys(self) -> int:
        """Return the largest number of keys that a block of queries sees, if the mask is not evaluated by block."""
        L, S = self.extent.L, self.extent.S
        if self.start is None or self.stop is None:
            return S
        start, stop = (t.clamp(0, S).expand(-1, -1, L) for t in (self.start, self.stop))
        empty, extra = start >= stop, (0, -L % BLOCK)
        first = torch.nn.functional.pad(start.masked_fill(empty, S), extra, value=S).unflatten(-1, (-1, BLOCK)).amin(-1)
        last = torch.nn.functional.pad(stop.masked_fill(empty, 0), extra).unflatten(-1, (-1, BLOCK)).amax(-1)
        return max(int((last - first).amax()), 0)

    def units(self) -> Iterator[WorkItem]:
        """Yield all work items of a mask that is evaluated block by block."""
        assert self.mask is not None
        extent, biased = self.extent, self.mask.has_bias
        blocks = BlockMask.of(self.mask, extent, BLOCK, KEYS)
        # A unit covers one head, the heads of one sequence, or all heads: as many as can share a mask of limited size.
        differs_by_sequence, differs_by_head = blocks.differs
        largest = LARGEST // max(min(BLOCK, extent.L) * extent.S, 1)
        by_head = differs_by_head or largest < extent.H
        by_sequence = by_head or differs_by_sequence or largest < extent.B * extent.H
        together = 1 if by_head else extent.H if by_sequence else extent.B * extent.H
        for b, h, block, runs in blocks.rows(extent.B if by_sequence else 1, extent.H if by_head else 1):
            first = b * extent.H + h
            segments, columns = _segments(runs, biased)
            if segments:
                cost = float(together * sum(stop - start for start, stop, _ in segments) + 64)
                keys = torch.cat([torch.arange(*span, device="cpu") for span in columns]) if columns else None
                yield WorkItem(first, first + together, cost, block, torch.tensor(segments, device="cpu"), keys)
            else:  # empty rows still need zeros
                yield WorkItem(first, first + together, 1.0, block, torch.tensor([[0, 0, -1]], device="cpu"))

    def added_to(self, unit: WorkItem, dtype: torch.dtype, mask: Mask | None = None) -> Tensor | None:
        """Return the bias of a unit's segments, (b, h, rows, columns), −inf where masked.

        ``mask`` replaces the problem's mask, to compute gradients of its tensors.
        """
        mask = self.mask if mask is None else mask
        if unit.columns is None or mask is None:
            return None
        H, L = self.extent.H, self.extent.L
        b = torch.arange(unit.first // H, -(-unit.last // H), device="cpu")
        h = unit.first % H + torch.arange(min(unit.last - unit.first, H), device="cpu")
        q_idx = torch.arange(unit.block * BLOCK, min((unit.block + 1) * BLOCK, L), device="cpu").unsqueeze(1)
        return mask.matrix(b.view(-1, 1, 1, 1), h.view(-1, 1, 1), q_idx, unit.columns, dtype)


def _segments(runs: list[Run], biased: bool) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
    """Return start, stop and column of each visible run, and the keys of the columns."""
    segments: list[tuple[int, int, int]] = []
    columns: list[tuple[int, int]] = []
    place = 0
    for run in runs:
        if run.state == FULL and not biased:
            segments.append((run.start, run.stop, -1))
        elif run.state != EMPTY:
            segments.append((run.start, run.stop, place))
            columns.append((run.start, run.stop))
            place += run.stop - run.start
    return segments, columns
