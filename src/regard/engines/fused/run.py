"""Run the compiled kernels over a whole problem: partition, arguments and scratch memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from regard.engines.fused import pool
from regard.engines.fused.arguments import BAND, BLOCK, CHUNK, GROUP, PAD, ROW, TILE
from regard.engines.fused.families import Gradients, Rows
from regard.engines.fused.kernel_call import KernelCall
from regard.engines.fused.morton import boxes
from regard.engines.fused.visible_keys import VisibleKeys, WorkItem
from regard.masks.base import Extent

# Partition of the work into shares, which depends only on the problem and the number of threads -----------------------


#: Shares per thread: enough for load balancing; fewer for gradients with few heads, as each share allocates sums for
#: the keys of its heads.
SHARES, FEW_SHARES = 8, 2
#: Minimum pairs × (features + values) of a share; smaller ones finish before another thread can start.
SHARE = 1 << 21
#: Pairs × (features + values) of a forward pass, and of a backward pass, up to which one thread is faster.
ALONE, ALONE_BACKWARD = 10 << 20, 4 << 20


@dataclass(frozen=True)
class Partition:
    """The units of one task, and the ranges of heads and key heads that they cover."""

    units: list[WorkItem]
    heads: range
    kv_heads: range


def partitions(visible: VisibleKeys, groups: int, width: int, backward: bool = False) -> list[Partition]:
    """Split the work into shares of about equal cost, deterministically for a problem and number of threads.

    ``groups`` is the number of key heads, ``width`` the features plus values of a pair.
    """
    extent, threads = visible.extent, torch.get_num_threads()
    few = backward and extent.B * groups < threads * SHARES
    work = extent.B * extent.H * extent.L * extent.S * width
    alone = threads == 1 or work < (ALONE_BACKWARD if backward else ALONE)
    count = 1 if alone else min(threads * (FEW_SHARES if few else SHARES), max(threads, work // SHARE))
    H, blocks = extent.H, -(-extent.L // BLOCK)

    def share(units: list[WorkItem], heads: range) -> Partition:
        first, last = (head // H * groups + head % H // (H // groups) for head in (heads[0], heads[-1]))
        return Partition(units, heads, range(first, last + 1))

    if visible.mask is None:
        costs = visible.costs()
        whole = extent.B * H * blocks
        cuts = [whole * i // count for i in range(count + 1)] if costs is None else _cuts(costs, count)
        spans = [(first, last) for first, last in pairwise(cuts) if first < last]
        return [share([WorkItem(*span)], range(span[0] // blocks, (span[1] - 1) // blocks + 1)) for span in spans]
    units = list(visible.units())
    cuts = _cuts(torch.tensor([unit.cost for unit in units], dtype=torch.float64, device="cpu"), count)
    parts = [units[first:last] for first, last in pairwise(cuts) if first < last]
    return [share(part, range(min(u.first for u in part), max(u.last for u in part))) for part in parts]


def _cuts(costs: Tensor, count: int) -> list[int]:
    """Return the boundaries that split costs into ``count`` parts of about equal sum."""
    done = costs.cumsum(0)
    at = done[-1] * torch.arange(1, count, dtype=done.dtype, device="cpu") / count
    return [0, *torch.searchsorted(done, at).tolist(), len(costs)]


# Arguments of one unit of work ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arguments:
    """The arguments that belong to one item of work: arrays, numbers, and sizes of these arrays."""

    arrays: dict[str, Tensor]
    numbers: dict[str, int]
    sizes: dict[str, int]

    @classmethod
    def of(cls, visible: VisibleKeys, share: Partition, unit: WorkItem, added: Tensor | None) -> Arguments:
        """Return the arguments of a unit, including the contiguous bias ``added`` of its scores."""
        first, last, heads, kv_heads = unit.first, unit.last, share.heads, share.kv_heads
        numbers = {"first": first, "last": last, "head_first": heads[0], "kv_first": kv_heads[0]}
        extent = visible.extent
        found = cls({}, numbers, {"share_heads": len(heads), "share_kv_heads": len(kv_heads)})
        whole = extent.B * extent.H * (-(-extent.L // BLOCK) if unit.segments is None else 1)
        if not 0 <= first <= last <= whole:
            raise RuntimeError(f"a unit of work must lie within {whole} blocks, got {first} to {last}.")
        if unit.segments is not None:
            found.arrays["segments"] = unit.segments
            found.numbers.update(block=unit.block, segment_count=len(unit.segments))
            found.sizes["segment_count"] = len(unit.segments)
        if added is not None:
            found._add(extent, unit, added)
        return found

    def _add(self, extent: Extent, unit: WorkItem, added: Tensor) -> None:
        """Set the offset and strides of the bias, relative to the whole problem."""
        B, H, L, S = extent.B, extent.H, extent.L, extent.S
        count = B * H if unit.segments is None else unit.last - unit.first
        first = 0 if unit.segments is None else unit.block * BLOCK
        rows = L if unit.segments is None else min(first + BLOCK, L) - first
        cols = S if unit.columns is None else len(unit.columns)
        heads = (max(count // H, 1), min(count, H))
        shape = tuple(added.shape)
        if not all(n in (1, full) for n, full in zip(shape[:3], (*heads, rows))) or shape[3] != cols:
            raise RuntimeError(f"the bias of scores must broadcast to {(*heads, rows, cols)}, got {shape}.")
        b, h, row = (
            0 if n == 1 else step for n, step in zip(shape, (shape[1] * shape[2] * cols, shape[2] * cols, cols))
        )
        at = -first * row - (unit.first // H * b + unit.first % H * h if unit.segments is not None else 0)
        self.arrays["added"] = added
        self.numbers.update(added_at=at, added_b=b, added_h=h, added_r=row, has_added=1)
        self.sizes["added_numbers"] = added.numel()


def compact(added: Tensor) -> Tensor:
    """Reduce broadcast dimensions (sequence, head, query) of a bias to size 1, over which the kernels sum gradients.

    Keys stay expanded, because the kernels read them contiguously.
    """
    index = tuple(slice(0, n if step or n == 1 else 1) for n, step in zip(added.shape[:3], added.stride()))
    return added[index]


# Scratch memory -------------------------------------------------------------------------------------------------------


#: Maximum size in bytes of a scratch buffer kept for later calls.
KEPT = 4 << 20
#: Unused buffers by size.
_spare: dict[int, list[Tensor]] = {}


def padded(count: int) -> int:
    """Return ``count`` rounded up to a whole number of vectors."""
    return -(-count // PAD) * PAD


class Scratch:
    """The layout of one task's scratch memory."""

    def __init__(self, sizes: dict[str, int], dtype: torch.dtype) -> None:
        self.places: dict[str, int] = {}
        place = 0
        for name, size in sizes.items():
            self.places[f"at_{name}"] = place
            place += padded(size)
        self.size, self.dtype = place, dtype

    @contextmanager
    def lent(self) -> Iterator[int]:
        """Lend scratch memory and yield its address; reuses earlier buffers, whose pages are already mapped."""
        size = 1 << (self.size * self.dtype.itemsize + 64).bit_length()
        spare = _spare.setdefault(size, [])
        try:
            buffer = spare.pop()
        except IndexError:
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        try:
            yield -(-buffer.data_ptr() // 64) * 64
        finally:
            if size <= KEPT and len(spare) < torch.get_num_threads():
                spare.append(buffer)


#: Number of scores that a thread holds at most for a normalizer with a threshold; at least those of a group of rows.
HELD = 1 << 20


def held_scores(keys: int) -> tuple[int, int]:
    """Return the number of rows of a block whose scores are held together, and the distance of these rows."""
    row = padded(keys) + PAD
    return min(max(HELD // row // GROUP * GROUP, GROUP), BLOCK), row


def scratch_sizes(rows: Rows, V: int, backward: bool, value_lanes: bool, keys: int = 0) -> dict[str, int]:
    """Return the number of elements of each part of the scratch memory of a pass.

    ``keys`` is the largest number of keys that a block sees, for a normalizer with a threshold.
    """
    C = rows.width
    v_chunks, c_chunks = -(-V // CHUNK), -(-C // CHUNK)
    spare = 4 * CHUNK
    key = rows.planes * C * ROW + ROW + (4 + 2 * BLOCK // GROUP) * C
    common = {"score": 2 * GROUP * ROW, "query": GROUP * C}
    if rows.has_threshold and (rows.family == "dot" or not backward):
        held, row = held_scores(keys)
        common |= {"held": held * row, "found": row, "place": row, "line": row}
    if not backward:
        value = v_chunks * ROW * CHUNK + spare if value_lanes else V * ROW
        return common | {
            "key": key,
            "weight": GROUP * ROW,
            "value": value,
            "state": 4 * BLOCK,
            "output": max(v_chunks, 1) * BLOCK * CHUNK,
        }
    linear = rows.family == "dot"
    sides = c_chunks * BLOCK * CHUNK if linear else 0
    return common | {
        "key": key + (c_chunks * ROW * CHUNK + spare if linear else 0),
        "value": V * ROW,
        "state": v_chunks * BLOCK * CHUNK,
        "output": v_chunks * ROW * CHUNK + spare,
        "rows": sides,
        "d_key": c_chunks * ROW * CHUNK + spare if linear else C * ROW,
        "weight": BAND * ROW,
        "d_score": BAND * ROW,
        "d_query": sides,
        "delta": BLOCK,
    }


# Running the kernels --------------------------------------------------------------------------------------------------


#: Number of elements of keys and values per tile, so that it fits a core's cache.
TILE_NUMBERS = 96 * 1024
#: Number of keys per tile for compact kernels, which can skip tiles.
NEAR_TILE = 128
#: With fewer values than this, the kernels vectorize over keys.
FEW_VALUES = 12


@dataclass(frozen=True)
class ForwardRequest:
    """The statistics to return with the output of a forward pass.

    Attributes
    ----------
    top, entropy, received : bool
        The largest score and the entropy of each row, the sum of weights of each key.
    k : int
        Number of best keys per row, 0 for none.
    """

    top: bool = False
    entropy: bool = False
    received: bool = False
    k: int = 0


@dataclass(slots=True, eq=False)
class ForwardResult:
    """The results of a forward pass; fields that were not requested are None.

    Weights are ``exp(score − peak) / total``, or ``kernel weight / total`` for rows that are direct.

    Attributes
    ----------
    output : Tensor (B, H, L, V)
    peak, total : Tensor (B, H, L)
        A row's largest score, and the sum of its weights relative to it; 0 in empty rows.
    top : Tensor (B, H, L), or None
        The largest score.
    entropy : Tensor (B, H, L), or None
        ``Σ w log w`` of the weights w before they are divided by the total.
    received : Tensor (B · H, S), or None
        The weights that each key received.
    best, best_key : Tensor (B, H, L, k), or None
        The largest scores and their keys, padded with −1.
    direct : bool
        Whether ``top`` and ``best`` are kernel weights instead of scores, and the peak is 0.
    """

    output: Tensor
    peak: Tensor
    total: Tensor
    top: Tensor | None = None
    entropy: Tensor | None = None
    received: Tensor | None = None
    best: Tensor | None = None
    best_key: Tensor | None = None
    direct: bool = False


def _tile(rows: Rows, V: int, S: int) -> int:
    """Return the number of keys per tile."""
    if rows.is_compact:
        return min(NEAR_TILE, padded(S))  # small tiles are skipped more often
    fit = TILE_NUMBERS // max(rows.planes * rows.width + V, 1) // PAD * PAD
    return max(min(TILE, fit, padded(S)), 4 * PAD if S > 4 * PAD else PAD)


class Pass:
    """A kernel and everything shared by calls of one structure: sizes, scratch memory, partition.

    Parameters
    ----------
    name : {"forward", "backward"}
    rows : Rows
        An example; its arrays are not kept.
    value : Tensor (B, G, S, V)
        An example; not kept.
    visible : VisibleKeys
    K : int
        Number of best keys to return.
    """

    def __init__(self, name: str, rows: Rows, value: Tensor, visible: VisibleKeys, K: int = 0) -> None:
        backward = name == "backward"
        extent, V, S = visible.extent, value.shape[-1], visible.extent.S
        self.visible = visible
        if extent.H % value.shape[1]:
            raise RuntimeError(f"kernel {name}: {value.shape[1]} key heads must divide {extent.H} query heads.")
        lanes = not backward and V >= FEW_VALUES
        self.partitions = partitions(visible, value.shape[1], rows.width + V, backward)
        keys = self._most_keys() if rows.has_threshold else 0
        held, held_row = held_scores(keys)
        self.memory = Scratch(scratch_sizes(rows, V, backward, lanes, keys), value.dtype)
        self.tile = tile = _tile(rows, V, S)
        sizes = {
            **vars(extent), "G": value.shape[1], "C": rows.width, "V": V, "K": K, "tile": tile, "tiles": -(-S // tile),
            "two": 2, "three": 3, "intervals": 0 if visible.start is None else visible.start.numel(),
            "scratch_numbers": self.memory.size, "held": held, "held_row": held_row,
        }  # fmt: skip
        numbers = {**rows.numbers, **visible.numbers, **self.memory.places, "value_lanes": int(lanes)}
        ends = {"start": visible.start, "stop": visible.stop}
        self.call = KernelCall(f"{rows.family}.{name}", value.dtype, sizes, ends, numbers)
        self.near = visible.everything and rows.is_compact
        self._kept: dict[int, Arguments] | None = {} if visible.is_small_and_fixed else None

    @classmethod
    def of(cls, kept: Passes, name: str, rows: Rows, value: Tensor, visible: VisibleKeys, K: int = 0) -> Pass:
        """Return the cached pass for rows of this kind, or create it."""
        key = name, *rows.numbers.values()
        found = kept.get(key)
        if found is None:
            found = kept[key] = cls(name, rows, value, visible, K)
        return found

    def _most_keys(self) -> int:
        """Return the largest number of keys that a block of rows sees."""
        if self.visible.mask is None:
            return self.visible.most_keys()
        units = [unit.segments for share in self.partitions for unit in share.units if unit.segments is not None]
        return max((int((each[:, 1] - each[:, 0]).sum()) for each in units), default=0)

    def arguments(self, share: Partition, unit: WorkItem) -> Arguments:
        """Return the arguments of a unit of work; cached if small and constant."""
        kept = self._kept
        if kept is not None and id(unit) in kept:
            return kept[id(unit)]
        visible, added = self.visible, self.visible.added
        if visible.mask is not None:
            with torch.no_grad():
                added = visible.added_to(unit, self.call.dtype)
        own = Arguments.of(visible, share, unit, None if added is None else compact(added).contiguous())
        if kept is not None:
            kept[id(unit)] = own
        return own

    def given(self, rows: Rows, value: Tensor, arrays: dict[str, Tensor]) -> KernelCall:
        """Return the kernel with the arrays that all shares use."""
        boxed = boxes(rows.arrays["key"].mT, self.tile) if self.near else None
        return self.call.given({**rows.arrays, "value": value, "boxes": boxed, **arrays}, rows.scale)


#: The passes of a plan, by kernel and flags of the rows.
Passes = dict[tuple[Any, ...], Pass]


def forward(rows: Rows, value: Tensor, visible: VisibleKeys, wants: ForwardRequest, kept: Passes) -> ForwardResult:
    """Run the forward kernel over all of a problem; value (B, G, S, V) contiguous, in the rows' dtype."""
    extent = visible.extent
    B, H, L, S, V = extent.B, extent.H, extent.L, extent.S, value.shape[-1]
    new = value.new_empty
    arrays = {"output": new(B, H, L, V), "peak": new(B, H, L), "total": new(B, H, L)}
    if wants.top:
        arrays["top"] = new(B, H, L)
    if wants.entropy:
        arrays["entropy"] = new(B, H, L)
    if wants.k:
        arrays["best"] = value.new_full((B, H, L, wants.k), 0.0 if rows.is_direct else -math.inf)
        arrays["best_key"] = torch.full((B, H, L, wants.k), -1, device="cpu")
    found = ForwardResult(**arrays, direct=rows.is_direct)
    made = Pass.of(kept, "forward", rows, value, visible, wants.k)
    call = made.given(rows, value, arrays)
    # Keys without weight are not read, so the kernels must not skip values that make NaN of a weight of 0.
    reads_all = {"read_all": 1} if rows.has_threshold and not math.isfinite(value.sum().item()) else {}
    received: dict[int, Tensor] = {}

    def task(i: int) -> None:
        share, common = made.partitions[i], {}
        if wants.received:
            common["received"] = received[i] = value.new_zeros(len(share.heads), S)
        with made.memory.lent() as scratch:
            for unit in share.units:
                _run_unit(call, scratch, common, made.arguments(share, unit), reads_all)

    pool.run([partial(task, i) for i in range(len(made.partitions))])
    if wants.received:
        found.received = value.new_zeros(B * H, S)
        for i, share in enumerate(made.partitions):
            found.received[share.heads[0] : share.heads[-1] + 1] += received[i]
    return found


def _run_unit(
    call: KernelCall,
    scratch: int,
    common: dict[str, Tensor],
    own: Arguments,
    numbers: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Run a unit with the arrays of its share and its own."""
    call({**common, **own.arrays}, {"scratch": scratch, **numbers, **own.numbers}, own.sizes)


@dataclass(frozen=True)
class BackwardResult:
    """The results of a backward pass.

    Attributes
    ----------
    rows : Gradients
        Gradients of the projected rows.
    value : Tensor (B, G, S, V)
    added : list of Tensor or None
        Gradients of the mask's tensors.
    """

    rows: Gradients
    value: Tensor
    added: list[Tensor | None]


def backward(
    rows: Rows,
    value: Tensor,
    visible: VisibleKeys,
    found: ForwardResult,
    grad: Tensor,
    mask_tensors: list[Tensor],
    wanted: list[bool],
    kept: Passes,
) -> BackwardResult:
    """Run the backward kernel; ``wanted`` says which of the mask's tensors ``mask_tensors`` need gradients."""
    extent = visible.extent
    B, H, L, S, V = extent.B, extent.H, extent.L, extent.S, value.shape[-1]
    G, C, linear = value.shape[1], rows.width, rows.family == "dot"
    # Query gradients of dot products are written once; others are accumulated.
    d_query = (value.new_empty if linear else value.new_zeros)(B, H, L, C)
    made = Pass.of(kept, "backward", rows, value, visible)
    arrays = {"output": found.output, "d_query": d_query, "peak": found.peak, "total": found.total}
    call = made.given(rows, value, {"grad": grad.contiguous(), "value_keys": value.mT.contiguous(), **arrays})
    d_added = None if visible.added is None or not any(wanted) else torch.zeros_like(visible.added)
    key_shape = (S, C) if linear else (C, S)
    totals = {
        "d_key": value.new_zeros(B * G, *key_shape),
        "d_value": value.new_zeros(B * G, S, V),
        "d_weight": value.new_zeros(B * H, 2 * C),
    }
    # Shares accumulate directly into the totals, except for heads that several shares cover.
    shared_by = Counter(head for share in made.partitions for head in share.kv_heads)
    common = {head for head, count in shared_by.items() if count > 1}
    own_sums = [_Sums.of(share, totals, not common.isdisjoint(share.kv_heads)) for share in made.partitions]

    def task(share: Partition, sums: _Sums) -> None:
        sums.begin()
        with made.memory.lent() as scratch:
            for unit in share.units:
                _backward_unit(made, call, scratch, visible, unit, share, sums, mask_tensors, wanted, d_added)

    tasks = [partial(task, *each) for each in zip(made.partitions, own_sums)]
    if d_added is not None and d_added.shape[:2] != (B, H):
        for each in tasks:  # heads accumulate into the same elements
            each()
    else:
        pool.run(tasks)
    masks: list[Tensor | None] = [None] * len(mask_tensors)
    for sums in own_sums:
        sums.end()
        for i, part in sums.masks.items():
            total = masks[i]
            masks[i] = part if total is None else total + part
    if d_added is not None:
        masks = [d_added]
    d_key, d_weight = totals["d_key"].view(B, G, *key_shape), totals["d_weight"].view(B, H, 2 * C)
    return BackwardResult(Gradients(d_query, d_key, d_weight), totals["d_value"].view(B, G, S, V), masks)


@dataclass
class _Sums:
    """The gradient sums of one share of the backward pass, by kernel argument, and by index of a mask's tensor.

    ``totals`` are its slices of the gradients. It accumulates into ``parts``, which are separate buffers if another
    share covers the same slices (``own``).
    """

    totals: dict[str, Tensor]
    own: bool
    parts: dict[str, Tensor] = field(default_factory=dict)
    masks: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, share: Partition, totals: dict[str, Tensor], own: bool) -> _Sums:
        places = {"d_key": share.kv_heads, "d_value": share.kv_heads, "d_weight": share.heads}
        return cls({name: totals[name][place[0] : place[-1] + 1] for name, place in places.items()}, own)

    def begin(self) -> None:
        """Allocate the sums, in the thread that fills them."""
        self.parts = {name: torch.zeros_like(total) for name, total in self.totals.items()} if self.own else self.totals

    def end(self) -> None:
        """Add the sums to the totals."""
        for name, total in self.totals.items() if self.own else ():
            total += self.parts[name]


def _backward_unit(
    made: Pass,
    call: KernelCall,
    scratch: int,
    visible: VisibleKeys,
    unit: WorkItem,
    share: Partition,
    sums: _Sums,
    tensors: list[Tensor],
    wanted: list[bool],
    d_added: Tensor | None,
) -> None:
    """Run one unit, and backpropagate the gradient of its bias to the mask's tensors."""
    if visible.added is not None:
        target = {} if d_added is None else {"d_added": d_added}
        _run_unit(call, scratch, {**sums.parts, **target}, Arguments.of(visible, share, unit, visible.added))
        return
    if not any(wanted) or visible.mask is None:
        _run_unit(call, scratch, sums.parts, made.arguments(share, unit))
        return
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() if want else t.detach() for t, want in zip(tensors, wanted)]
        added = visible.added_to(unit, call.dtype, visible.mask.with_tensors(leaves))
        if added is None:
            _run_unit(call, scratch, sums.parts, Arguments.of(visible, share, unit, None))
            return
        varying = compact(added)
    total = torch.zeros(varying.shape, dtype=call.dtype, device="cpu")
    own = Arguments.of(visible, share, unit, varying.detach().contiguous())
    _run_unit(call, scratch, {**sums.parts, "d_added": total}, own)
    if not varying.requires_grad:
        return
    found = torch.autograd.grad(varying, [t for t in leaves if t.requires_grad], total, allow_unused=True)
    places = [i for i, want in enumerate(wanted) if want]
    for i, gradient in zip(places, found):
        if gradient is not None:
            sums.masks[i] = gradient if i not in sums.masks else sums.masks[i] + gradient
