"""Convert a mask for the kernels: an interval or hidden key per row, or the visible tiles of each block; and a bias."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_

import numpy as np
import torch
from torch import Tensor

from regard._utils.tracing import values_unavailable
from regard.engines import cost_model, dense
from regard.engines.fused.arguments import BLOCK
from regard.engines.problem import Problem
from regard.engines.tiles import BlockMask, Run
from regard.masks import Dense, LeaveOneOut
from regard.masks.base import EMPTY, FULL, AndMask, Extent, Mask
from regard.masks.padding import KeyPadding

#: Number of keys per tile of a mask without intervals.
KEYS = 128
#: Maximum number of pairs for which a materialized mask is cached.
KEPT = 1 << 16
#: Maximum size of the bias of one call; larger ones are computed for fewer heads at a time.
LARGEST = 1 << 22


@dataclass(eq=False, repr=False)
class WorkItem:
    """The rows of one kernel call.

    ``first`` and ``last`` count blocks over all heads or, with ``segments``, heads for a single ``block``. ``segments``
    (n, 3) holds start, stop and column of what is added, and ``columns`` the keys of these columns. ``cost`` is roughly
    the number of visible pairs.
    """

    first: int
    last: int
    cost: float = 0.0
    block: int = 0
    segments: Tensor | None = None
    columns: Tensor | None = None


@dataclass(eq=False, repr=False)
class VisibleKeys:
    """The keys that the queries of a problem see.

    Attributes
    ----------
    extent : Extent
    start, stop : Tensor (B or 1, H or 1, L or 1), int64, or None
        The interval of each row; None without a mask, or for a mask without intervals.
    mask : Mask or None
        The mask whose visible tiles are looked up per block; None if intervals suffice.
    rest : Mask or None
        The part of ``mask`` that is evaluated per block: all but the bias.
    bias : Tensor (B or 1, H or 1, L or 1, S or 1), or None
        A tensor that the kernels read themselves, −inf where masked.
    planes : Tensor (B,), int64, or None
        Which matrix of the bias each sequence has, if several have the same; the bias then gets no gradient.
    own : Tensor (B, H, L), int64, or None
        The key that is hidden from each row, of all keys; an index that is not a key hides nothing.
    query_rows, key_rows : Tensor (B, L), Tensor (B, S), int64, or None
        The queries and keys of each sequence among the rows of a head, −1 for none. Sequences then have all heads in
        common, and no two of them the same query.
    """

    extent: Extent
    start: Tensor | None = None
    stop: Tensor | None = None
    mask: Mask | None = None
    rest: Mask | None = None
    bias: Tensor | None = None
    own: Tensor | None = None
    planes: Tensor | None = None
    query_rows: Tensor | None = None
    key_rows: Tensor | None = None

    @classmethod
    def of(cls, problem: Problem) -> VisibleKeys:
        """Convert a problem's mask."""
        extent, mask = problem.extent, problem.mask
        if mask is None:
            return cls(extent)
        if isinstance(mask, LeaveOneOut):
            own = torch.arange(extent.L, device="cpu") if mask.own is None else mask.own.long()
            return cls(extent, own=own.expand(extent.B, extent.H, extent.L).contiguous())
        if (marked := marked_keys(mask, extent)) is not None:
            keep, start, stop = marked
            if keep is None:
                return cls.between(extent, start, stop)
            hidden = torch.zeros(keep.shape, dtype=problem.compute_dtype, device="cpu").masked_fill_(~keep, -torch.inf)
            return cls.between(extent, start, stop, hidden)
        learned = torch.is_grad_enabled() and any(t.requires_grad for t in mask.tensors())
        if type(mask) is Dense and cost_model.is_small(problem) and not learned:  # looking for intervals takes longer
            return cls(extent, bias=dense.bias_of(mask.values.detach(), problem.compute_dtype))
        if not mask.has_bias and (spans := problem.intervals) is not None:
            return cls.between(extent, *spans)
        mask = mask.cast(problem.compute_dtype)
        if extent.L * extent.S <= KEPT and mask.calls_a_function() and not learned:
            # For short sequences, evaluating a function on everything costs no more than on one block.
            return cls(extent, bias=mask.matrix(*extent.indices("cpu"), problem.compute_dtype))
        bias, rest = split(mask)
        if bias is None or bool((bias.detach().amin() == -torch.inf).item()):  # tiles that it hides can be skipped
            return cls(extent, mask=mask, rest=rest, bias=bias)
        if rest is None:
            return cls(extent, bias=bias)
        spans = None if rest.has_bias else rest.intervals(extent)
        return cls(extent, mask=rest, rest=rest, bias=bias) if spans is None else cls.between(extent, *spans, bias)

    @classmethod
    def between(cls, extent: Extent, start: Tensor, stop: Tensor, bias: Tensor | None = None) -> VisibleKeys:
        """Return the visible keys for given intervals."""
        start, stop = (t.contiguous() for t in torch.broadcast_tensors(start, stop))
        return cls(extent, start, stop, bias=bias)

    def bias_array(self) -> Tensor | None:
        """Return the bias as the kernels read it: contiguous, with size 1 where it is constant."""
        return None if self.bias is None else compact(self.bias.detach().resolve_neg(), 4).contiguous()

    @property
    def numbers(self) -> dict[str, int]:
        """Return strides of the intervals and the bias, by kernel argument."""
        numbers: dict[str, int] = {}
        if self.start is not None:
            numbers.update(zip(("interval_b", "interval_h", "interval_r"), strides(self.start.shape)))
        if self.bias is not None:
            numbers.update(zip(("bias_b", "bias_h", "bias_r", "bias_c"), strides(compact(self.bias, 4).shape)))
        return numbers

    @property
    def bias_size(self) -> int:
        """The size of :meth:`bias_array`, which must broadcast to the scores."""
        if self.bias is None:
            return 0
        shape, full = tuple(compact(self.bias, 4).shape), (self.extent.B, self.extent.H, self.extent.L, self.extent.S)
        if self.planes is not None:
            full = (int(self.planes.max()) + 1, *full[1:])
        if len(shape) != 4 or not all(n in (1, size) for n, size in zip(shape, full)):
            raise RuntimeError(f"a bias must broadcast to {full}, got {tuple(self.bias.shape)}.")
        return math.prod(shape)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that may get gradients: the bias, then those of ``rest``."""
        bias = [] if self.bias is None else [self.bias]
        return bias if self.rest is None else bias + self.rest.tensors()

    def with_tensors(self, tensors: list[Tensor]) -> VisibleKeys:
        """Return the same keys around other tensors, in the order of :meth:`tensors`."""
        bias, others = (None, tensors) if self.bias is None else (tensors[0], tensors[1:])
        return replace(self, bias=bias, rest=None if self.rest is None else self.rest.with_tensors(others))

    @property
    def in_any_order(self) -> bool:
        """Whether keys may be reordered, as every query sees every key, or all but its own."""
        everything = self.start is None and self.mask is None and self.bias is None
        return everything and self.query_rows is None

    @property
    def plain(self) -> bool:
        """Whether there is no finite bias."""
        return self.bias is None and (self.rest is None or not self.rest.has_bias)

    @property
    def is_small_and_fixed(self) -> bool:
        """Whether what is evaluated per block, if anything, can be cached for later calls."""
        return self.rest is None or (self.rest.is_fixed and self.extent.L * self.extent.S <= KEPT)

    def costs(self) -> Tensor | None:
        """Return the approximate cost of each block of queries, (B · H · blocks,); None if all are equal."""
        B, H, L = self.extent.B, self.extent.H, self.extent.L
        blocks = -(-L // BLOCK)
        if self.start is None or self.stop is None:
            return None
        # Visible pairs, plus a constant overhead per block. NumPy takes less time than torch for so few numbers.
        width = (self.stop.numpy() - self.start.numpy()).astype(np.float64)
        rows = np.zeros((*width.shape[:2], blocks * BLOCK))
        rows[..., :L] = width
        each = rows.reshape(*width.shape[:2], blocks, BLOCK).sum(-1) / BLOCK + 16
        return torch.from_numpy(np.broadcast_to(each, (B, H, blocks)).flatten())

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
        extent = self.extent
        blocks = BlockMask.of(self.mask, extent, BLOCK, KEYS)
        # A unit covers one head, the heads of one sequence, or all heads: as many as can share a mask of limited size.
        differs_by_sequence, differs_by_head = blocks.differs
        largest = LARGEST // max(min(BLOCK, extent.L) * extent.S, 1)
        by_head = differs_by_head or largest < extent.H
        by_sequence = by_head or differs_by_sequence or largest < extent.B * extent.H
        together = 1 if by_head else extent.H if by_sequence else extent.B * extent.H
        for b, h, block, runs in blocks.rows(extent.B if by_sequence else 1, extent.H if by_head else 1):
            first = b * extent.H + h
            segments, columns = _segments(runs, self.rest)
            if segments:
                cost = float(together * sum(stop - start for start, stop, _ in segments) + 64)
                keys = torch.cat([torch.arange(*span, device="cpu") for span in columns]) if columns else None
                yield WorkItem(first, first + together, cost, block, torch.tensor(segments, device="cpu"), keys)
            else:  # empty rows still need zeros
                yield WorkItem(first, first + together, 1.0, block, torch.tensor([[0, 0, -1]], device="cpu"))

    def added_to(self, unit: WorkItem, dtype: torch.dtype) -> Tensor | None:
        """Return what ``rest`` adds to a unit's segments, (b, h, rows, columns), −inf where masked."""
        if unit.columns is None or self.rest is None:
            return None
        H, L = self.extent.H, self.extent.L
        b = torch.arange(unit.first // H, -(-unit.last // H), device="cpu")
        h = unit.first % H + torch.arange(min(unit.last - unit.first, H), device="cpu")
        q_idx = torch.arange(unit.block * BLOCK, min((unit.block + 1) * BLOCK, L), device="cpu").unsqueeze(1)
        return self.rest.matrix(b.view(-1, 1, 1, 1), h.view(-1, 1, 1), q_idx, unit.columns, dtype)


def marked_keys(mask: Mask, extent: Extent) -> tuple[Tensor | None, Tensor, Tensor] | None:
    """Split a mask into the keys that all rows may see, (B or 1, 1, 1, S), and an interval for each row.

    The keys are None if the intervals alone say what is visible. None for other masks, and if most keys between the
    first and the last marked one are hidden: their tiles can be skipped. NumPy takes a tenth of torch's time here.
    """
    parts = mask.masks if isinstance(mask, AndMask) else (mask,)
    marks = [torch.atleast_2d(part.keep)[:, None, None] for part in parts if isinstance(part, KeyPadding)]
    S = extent.S
    if not marks or not S or mask.has_bias or any(map(values_unavailable, marks)):
        return None
    others = tuple(part for part in parts if not isinstance(part, KeyPadding))
    spans = _spans(AndMask(others), extent) if others else None
    if others and spans is None:
        return None
    marked = reduce(and_, marks) if len(marks) > 1 else marks[0].clone()  # NumPy must not hold a caller's tensor
    keep = marked.numpy()
    some = keep.any(-1)
    start, stop = np.where(some, keep.argmax(-1), S), np.where(some, S - keep[..., ::-1].argmax(-1), 0)
    count = keep.sum(-1)
    if (count * 2 < stop - start).any():
        return None
    whole = bool((count == np.maximum(stop - start, 0)).all())
    if spans is not None:
        start, stop = np.maximum(start, spans[0]), np.minimum(stop, spans[1])
    start = np.minimum(start, S)
    stop = np.minimum(np.maximum(start, stop), S)
    return (None if whole else marked), torch.from_numpy(start), torch.from_numpy(stop)


def _spans(mask: Mask, extent: Extent) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the interval (B or 1, H or 1, L or 1) of each query, or None if the mask has none."""
    band = mask.as_band(extent)
    if band is None:
        spans = mask.intervals(extent)
        return None if spans is None else (spans[0].numpy(), spans[1].numpy())
    q_idx = np.arange(extent.L)[None, None]
    low, high = band
    start = np.zeros_like(q_idx) if low is None else np.maximum(q_idx + low, 0)
    return start, np.full_like(q_idx, extent.S) if high is None else np.minimum(q_idx + high, extent.S - 1) + 1


def split(mask: Mask) -> tuple[Tensor | None, Mask | None]:
    """Split a mask into the tensor (b, h, l, s) that the kernels read as its bias, and the rest.

    A tensor that needs a gradient comes first, then the largest: others are evaluated per block.
    """
    parts = mask.masks if isinstance(mask, AndMask) else (mask,)
    dense = [part for part in parts if isinstance(part, Dense) and part.has_bias]
    if not dense:
        return None, mask
    chosen = max(dense, key=lambda part: (part.values.requires_grad, part.values.numel()))
    rest = tuple([part for part in parts if part is not chosen])
    bias = chosen.values[(None,) * (4 - chosen.values.dim())]
    return bias, AndMask(rest) if len(rest) > 1 else rest[0] if rest else None


def compact(tensor: Tensor, dims: int) -> Tensor:
    """Reduce those of the first dimensions along which a tensor is expanded to size 1."""
    index = tuple(slice(0, n if step or n == 1 else 1) for n, step in zip(tensor.shape[:dims], tensor.stride()))
    return tensor[index]


def strides(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor, 0 along dimensions of size 1."""
    return [0 if n == 1 else math.prod(shape[dim + 1 :]) for dim, n in enumerate(shape)]


def _segments(runs: list[Run], rest: Mask | None) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
    """Return start, stop and column of each visible run, and the keys of the columns, at which to evaluate ``rest``."""
    segments: list[tuple[int, int, int]] = []
    columns: list[tuple[int, int]] = []
    place = 0
    for run in runs:
        if run.state == EMPTY:
            continue
        if rest is None or (run.state == FULL and not rest.has_bias):
            segments.append((run.start, run.stop, -1))
        else:
            segments.append((run.start, run.stop, place))
            columns.append((run.start, run.stop))
            place += run.stop - run.start
    return segments, columns
