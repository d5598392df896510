"""The arguments of one unit of work: where it is, and where the kernels find what is added to its scores."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from regard.engines.fused.kernels.fields import BLOCK
from regard.engines.fused.visible_keys import VisibleKeys, WorkItem
from regard.engines.fused.work_partition import Partition
from regard.masks.base import Extent


@dataclass(frozen=True)
class Arguments:
    """The arguments that belong to one item of work: arrays, numbers, and sizes of these arrays."""

    arrays: dict[str, Tensor]
    numbers: dict[str, int]
    sizes: dict[str, int]

    @classmethod
    def of(cls, visible: VisibleKeys, share: Partition, unit: WorkItem, added: Tensor | None) -> Arguments:
        """Return where the unit is, and where the kernels find what is added to its scores: ``added``, contiguous."""
        first, last, heads, kv_heads = unit.first, unit.last, share.heads, share.kv_heads
        numbers = {"first": first, "last": last, "head_first": heads[0], "kv_first": kv_heads[0]}
        extent = visible.extent
        found = cls({}, numbers, {"share_heads": len(heads), "share_kv_heads": len(kv_heads)})
        whole = extent.B * extent.H * (-(-extent.L // BLOCK) if unit.segments is None else 1)
        if not 0 <= first <= last <= whole:
            raise RuntimeError(f"a unit of work must be among {whole} blocks, got {first} to {last}.")
        if unit.segments is not None:
            found.arrays["segments"] = unit.segments
            found.numbers.update(block=unit.block, segment_count=len(unit.segments))
            found.sizes["segment_count"] = len(unit.segments)
        if added is not None:
            found._add(extent, unit, added)
        return found

    def _add(self, extent: Extent, unit: WorkItem, added: Tensor) -> None:
        """Say where the first number of the whole problem would be, and how far those of other rows are."""
        B, H, L, S = extent.B, extent.H, extent.L, extent.S
        single = unit.segments is not None and unit.last - unit.first == 1
        first = 0 if unit.segments is None else unit.block * BLOCK
        rows = L if unit.segments is None else min(first + BLOCK, L) - first
        cols = S if unit.columns is None else len(unit.columns)
        heads = (1, 1) if single else (B, H)
        shape = tuple(added.shape)
        if not all(n in (1, full) for n, full in zip(shape[:3], (*heads, rows))) or shape[3] != cols:
            raise RuntimeError(f"what is added to scores must broadcast to {(*heads, rows, cols)}, got {shape}.")
        b, h, row = (
            0 if n == 1 else step for n, step in zip(shape, (shape[1] * shape[2] * cols, shape[2] * cols, cols))
        )
        at = -first * row - (unit.first // H * b + unit.first % H * h if single else 0)
        self.arrays["added"] = added
        self.numbers.update(added_at=at, added_b=b, added_h=h, added_r=row, has_added=1)
        self.sizes["added_numbers"] = added.numel()


def compact(added: Tensor) -> Tensor:
    """Return what is added with size 1 where it does not vary with the batch, the head or the query.

    Sums over these are the kernels' own; keys stand side by side for them, each with a number of its own.
    """
    index = tuple(slice(0, n if step or n == 1 else 1) for n, step in zip(added.shape[:3], added.stride()))
    return added[index]
