"""Turn a mask into what the kernels read: an interval of keys for each row, or the tiles that each block sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.engines.fused.kernels.arguments import BLOCK
from regard.engines.problem import Problem
from regard.engines.tiles import BlockMask, Run
from regard.masks.base import EMPTY, FULL, Extent, Mask

#: Keys by which a mask that is no interval is classified.
KEYS = 128
#: Pairs of a mask that may be kept as numbers.
KEPT = 1 << 16
#: Numbers that are added to scores in one call at most, where heads can be taken one by one.
LARGEST = 1 << 22


@dataclass(frozen=True)
class WorkItem:
    """Rows of work for one call of a kernel.

    ``first`` and ``last`` count blocks of all heads, or heads where ``block`` names the only block meant. ``segments``
    (n, 3) are then start, stop and column of what is added, and ``columns`` the keys of these columns. ``cost`` is
    about the visible pairs.
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
        The interval of each row; None where there is no mask, or it is no interval.
    mask : Mask or None
        What is evaluated for each block; None where intervals tell everything.
    added : Tensor (B or 1, H or 1, L, S), or None
        What is added to every score, where calls are traced and where a function says it; −inf where masked.
    numbers : dict of str to int
        The strides of the intervals, by the name of the kernels' argument.
    """

    extent: Extent
    start: Tensor | None = None
    stop: Tensor | None = None
    mask: Mask | None = None
    added: Tensor | None = None
    numbers: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem) -> VisibleKeys:
        """Return what a problem's mask lets be seen."""
        extent, mask = problem.extent, problem.mask
        if mask is None:
            return cls(extent)
        spans = None if mask.has_bias else problem.intervals
        if spans is not None:
            return cls.between(extent, *spans)
        mask = mask.cast(problem.compute_dtype)
        learned = torch.is_grad_enabled() and any(t.requires_grad for t in mask.tensors())
        if extent.L * extent.S <= KEPT and mask.calls_a_function() and not learned:
            # A function costs as much for a block as for all of a short sequence.
            index = [torch.arange(n, device="cpu") for n in (extent.B, extent.H, extent.L, extent.S)]
            b, h, q_idx = index[0].view(-1, 1, 1, 1), index[1].view(-1, 1, 1), index[2].unsqueeze(1)
            added = mask.matrix(b, h, q_idx, index[3], problem.compute_dtype)
            return cls(extent, added=added.contiguous())
        return cls(extent, mask=mask)

    @classmethod
    def between(cls, extent: Extent, start: Tensor, stop: Tensor) -> VisibleKeys:
        """Return the visible of intervals."""
        start, stop = (t.contiguous() for t in torch.broadcast_tensors(start, stop))
        strides = [0 if n == 1 else step for n, step in zip(start.shape, start.stride())]
        return cls(extent, start, stop, numbers=dict(zip(("interval_b", "interval_h", "interval_r"), strides)))

    @property
    def everything(self) -> bool:
        """Whether every query sees every key."""
        return self.start is None and self.mask is None and self.added is None

    @property
    def plain(self) -> bool:
        """Whether nothing finite is added to any score."""
        return self.added is None and (self.mask is None or not self.mask.has_bias)

    @property
    def is_small_and_fixed(self) -> bool:
        """Whether what is added to scores, if anything, may be kept for later calls."""
        if self.mask is None:
            return self.added is None
        return self.mask.is_fixed and self.extent.L * self.extent.S <= KEPT

    def costs(self) -> Tensor | None:
        """Return about what each block of queries costs, (B · H · blocks,); None where all cost the same."""
        B, H, L = self.extent.B, self.extent.H, self.extent.L
        blocks = -(-L // BLOCK)
        if self.start is None or self.stop is None:
            return None
        # Visible pairs, and something for each block's own sake.
        width = (self.stop - self.start).expand(-1, -1, L).double()
        padded = torch.nn.functional.pad(width, (0, blocks * BLOCK - L)).unflatten(-1, (blocks, BLOCK)).sum(-1)
        return (padded / BLOCK + 16).expand(B, H, blocks).flatten()

    def units(self) -> Iterator[WorkItem]:
        """Yield all work where the mask is evaluated, block by block."""
        assert self.mask is not None
        extent, biased = self.extent, self.mask.has_bias
        blocks = BlockMask.of(self.mask, extent, BLOCK, KEYS)
        by_head = any(blocks.differs) or self._is_large()
        for b, h, block, runs in blocks.rows(by_head):
            heads = (b * extent.H + h, b * extent.H + h + 1) if by_head else (0, extent.B * extent.H)
            segments, columns = _segments(runs, biased)
            if segments:
                cost = float((heads[1] - heads[0]) * sum(stop - start for start, stop, _ in segments) + 64)
                keys = torch.cat([torch.arange(*span, device="cpu") for span in columns]) if columns else None
                yield WorkItem(*heads, cost, block, torch.tensor(segments, device="cpu"), keys)
            else:  # rows that see nothing still get their zeros
                yield WorkItem(*heads, 1.0, block, torch.tensor([[0, 0, -1]], device="cpu"))

    def _is_large(self) -> bool:
        """Whether a block's bias for all heads at once would be large."""
        return self.extent.B * self.extent.H * min(BLOCK, self.extent.L) * self.extent.S > LARGEST

    def added_to(self, unit: WorkItem, dtype: torch.dtype, mask: Mask | None = None) -> Tensor | None:
        """Return what is added to the scores of a unit's segments, (b, h, rows, columns), −inf where masked.

        ``mask`` stands in for the own one, so that a gradient can be taken to its tensors.
        """
        mask = self.mask if mask is None else mask
        if unit.columns is None or mask is None:
            return None
        H, L = self.extent.H, self.extent.L
        if unit.last - unit.first == 1:
            b, h = (torch.tensor([index], device="cpu") for index in divmod(unit.first, H))
        else:
            b, h = (torch.arange(n, device="cpu") for n in (self.extent.B, H))
        q_idx = torch.arange(unit.block * BLOCK, min((unit.block + 1) * BLOCK, L), device="cpu").unsqueeze(1)
        return mask.matrix(b.view(-1, 1, 1, 1), h.view(-1, 1, 1), q_idx, unit.columns, dtype)


def _segments(runs: list[Run], biased: bool) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
    """Return start, stop and column of each run that is seen, and the keys of the columns."""
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
