"""Run the compiled kernels over a whole problem: partition, arguments and scratch memory."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.engines.fused import pool
from regard.engines.fused.arguments import BAND, BLOCK, BLOCKS, CHUNK, GROUP, PAD, ROW, TILE
from regard.engines.fused.families import Gradients, Rows
from regard.engines.fused.kernel_call import KernelCall
from regard.engines.fused.morton import boxes
from regard.engines.fused.pages import in_large_pages
from regard.engines.fused.visible_keys import VisibleKeys, WorkItem, compact, strides
from regard.masks.base import Extent

# Partition of the work into shares, which depends only on the problem and the number of threads -----------------------


#: Shares per thread: enough for load balancing; fewer for gradients with few heads, as each share allocates sums for
#: the keys of its heads.
SHARES, FEW_SHARES = 8, 2
#: Minimum pairs × (features + values) of a share; smaller ones finish before another thread can start.
SHARE = 1 << 21
#: Pairs × (features + values) of a forward pass, and of a backward pass, up to which one thread is faster.
ALONE, ALONE_BACKWARD = 10 << 20, 4 << 20


@dataclass(eq=False, repr=False)
class Partition:
    """The units of one task, and the ranges of heads and key heads that they cover, by :class:`Order`'s places."""

    units: list[WorkItem]
    heads: range
    kv_heads: range


class Order(NamedTuple):
    """The order of the work: blocks that add to the same elements of the bias' gradient follow each other.

    A share takes all of them, so that no other thread adds to these elements, and sums do not depend on the threads.

    Attributes
    ----------
    extent : Extent
    groups : int
        Number of key heads.
    is_gathered : bool
        Whether sequences have all keys in common. Then sums are kept by head alone, and work is sorted by head first.
    by_sequence, by_head : bool
        Whether the bias' gradient differs by sequence, and by head. True if there is none.
    """

    extent: Extent
    groups: int
    is_gathered: bool = False
    by_sequence: bool = True
    by_head: bool = True

    @classmethod
    def of(cls, visible: VisibleKeys, groups: int, bias: Tensor | None = None) -> Order:
        """Return the order for the gradient of a bias (B or 1, H or 1, ...), None for no gradient."""
        extent, is_gathered = visible.extent, visible.query_rows is not None
        if bias is None:
            return cls(extent, groups, is_gathered)
        return cls(extent, groups, is_gathered, bias.shape[0] == extent.B, bias.shape[1] == extent.H)

    @property
    def together(self) -> int:
        """The number of heads, of all sequences, whose blocks add to the same elements."""
        return (1 if self.by_sequence else self.extent.B) * (1 if self.by_head else self.extent.H)

    @property
    def transposed(self) -> bool:
        """Whether sums are kept by head, then sequence: a share then covers few heads of all sequences."""
        return self.by_head and not self.by_sequence

    @property
    def numbers(self) -> dict[str, int]:
        """The strides of the places of heads and key heads among the sums, by kernel argument."""
        if self.is_gathered:
            return {"head_b": 0, "head_h": 1, "kv_b": 0, "kv_h": 1}
        if self.transposed:
            return {"head_b": 1, "head_h": self.extent.B, "kv_b": 1, "kv_h": self.extent.B}
        return {"head_b": self.extent.H, "head_h": 1, "kv_b": self.groups, "kv_h": 1}

    def sort(self, by_item: Tensor) -> Tensor:
        """Sort values of all work items."""
        dims = (1, 0, 2) if self.is_gathered else (0, 1, 2)
        outer = [dim for dim in dims if (self.by_sequence, self.by_head, True)[dim]]
        inner = [dim for dim in (0, 1) if dim not in outer]
        return by_item.view(self.extent.B, self.extent.H, -1).permute(*outer, *inner).flatten()

    def by_sequences(self, sums: Tensor) -> Tensor:
        """Return sums (places, ...) as (B, heads, ...)."""
        if self.is_gathered:
            return sums.unsqueeze(0)
        if self.transposed:
            return sums.unflatten(0, (-1, self.extent.B)).transpose(0, 1)
        return sums.unflatten(0, (self.extent.B, -1))

    def key(self, unit: WorkItem) -> tuple[int, int, int]:
        """Return what units have in common that add to the same elements."""
        H, count = self.extent.H, unit.last - unit.first
        b = unit.first // H if self.by_sequence and count <= H else 0
        return b, unit.first % H if self.by_head and count == 1 else 0, unit.block

    def share(self, units: list[WorkItem], heads: range) -> Partition:
        """Return the share of units that cover these places of heads."""
        R, B = self.extent.H // self.groups, self.extent.B
        if self.transposed and not self.is_gathered:
            return Partition(units, heads, range(heads[0] // B // R * B, (heads[-1] // B // R + 1) * B))
        return Partition(units, heads, range(heads[0] // R, heads[-1] // R + 1))

    def heads(self, unit: WorkItem) -> range:
        """Return the places of a unit's heads."""
        H, B = self.extent.H, self.extent.B
        if not self.transposed:
            return range(unit.first, unit.last)
        if unit.last - unit.first > 1:
            return range(B * H)
        place = unit.first % H * B + unit.first // H
        return range(place, place + 1)


def partitions(visible: VisibleKeys, order: Order, width: int, backward: bool = False) -> list[Partition]:
    """Split the work into shares of about equal cost, deterministically for a problem and number of threads.

    ``width`` is the number of features plus values.
    """
    extent, threads = visible.extent, torch.get_num_threads()
    few = backward and (1 if order.is_gathered else extent.B) * order.groups < threads * SHARES
    work = extent.B * extent.H * extent.L * extent.S * width
    alone = threads == 1 or work < (ALONE_BACKWARD if backward else ALONE)
    count = 1 if alone else min(threads * (FEW_SHARES if few else SHARES), max(threads, work // SHARE))
    if visible.mask is None:
        return _of_items(visible, order, count)
    units = sorted(visible.units(), key=order.key)
    tiles = [list(group) for _, group in groupby(units, order.key)]
    costs = [sum(unit.cost for unit in tile) for tile in tiles]
    cuts = _cuts(torch.tensor(costs, dtype=torch.float64, device="cpu"), count)
    parts = [[unit for tile in tiles[first:last] for unit in tile] for first, last in pairwise(cuts) if first < last]
    covered = [[order.heads(unit) for unit in part] for part in parts]
    return [
        order.share(part, range(min(heads.start for heads in each), max(heads.stop for heads in each)))
        for part, each in zip(parts, covered)
    ]


def cuts_of_items(visible: VisibleKeys, order: Order, count: int) -> list[int]:
    """Return the boundaries of at most ``count`` ranges of work items, of whole runs that add to the same elements."""
    extent, together = visible.extent, order.together
    tiles = extent.B * extent.H * -(-extent.L // BLOCK) // together
    costs = visible.costs()
    if costs is None:
        cuts = [tiles * i // count for i in range(count + 1)]
    else:
        cuts = _cuts(order.sort(costs).view(tiles, together).sum(1), count)
    return [cut * together for cut in sorted(set(cuts))]


def _of_items(visible: VisibleKeys, order: Order, count: int) -> list[Partition]:
    """Split work items into at most ``count`` ranges."""
    extent, together = visible.extent, order.together
    if order.is_gathered:
        together = 1 if order.by_head else extent.H  # heads whose items follow each other
    per_head = -(-extent.L // BLOCK) * (extent.B * together if order.is_gathered else together)
    return [
        order.share(
            [WorkItem(first, last)], range(first // per_head * together, ((last - 1) // per_head + 1) * together)
        )
        for first, last in pairwise(cuts_of_items(visible, order, count))
    ]


def _cuts(costs: Tensor, count: int) -> list[int]:
    """Return the boundaries that split costs into ``count`` parts of about equal sum."""
    each = costs.numpy()
    done = np.cumsum(each)
    ends = done[-1] * np.arange(1, count) / count
    return [0, *np.searchsorted(done - each / 2, ends).tolist(), len(costs)]  # a part has what mostly lies in it


# Arguments of one unit of work ----------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class Arguments:
    """The arguments that belong to one item of work: arrays, numbers, and sizes of these arrays."""

    arrays: dict[str, Tensor]
    numbers: dict[str, int]
    sizes: dict[str, int]

    @classmethod
    def of(cls, visible: VisibleKeys, share: Partition, unit: WorkItem, added: Tensor | None) -> Arguments:
        """Return the arguments of a unit, including the contiguous tensor ``added`` to its scores."""
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
        """Set the offset and strides of what is added to scores, relative to the whole problem."""
        H, count, first = extent.H, unit.last - unit.first, unit.block * BLOCK
        assert unit.columns is not None
        full = max(count // H, 1), min(count, H), min(BLOCK, extent.L - first), len(unit.columns)
        shape = tuple(added.shape)
        if not all(n in (1, size) for n, size in zip(shape[:3], full)) or shape[3] != full[3]:
            raise RuntimeError(f"what is added to scores must broadcast to {full}, got {shape}.")
        b, h, row, _ = strides(shape)
        at = -first * row - unit.first // H * b - unit.first % H * h
        self.arrays["added"] = added
        self.numbers.update(added_at=at, added_b=b, added_h=h, added_r=row)
        self.sizes["added_numbers"] = added.numel()


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
        """Lend scratch memory and yield its address."""
        buffer, address = borrowed(self.size * self.dtype.itemsize)
        try:
            yield address
        finally:
            give_back(buffer)


def borrowed(size: int) -> tuple[Tensor, int]:
    """Return a buffer for at least so many bytes and its address; reuses earlier ones, whose pages are mapped."""
    whole = 1 << (size + 64).bit_length()
    try:
        buffer = _spare.setdefault(whole, []).pop()
    except IndexError:
        buffer = torch.empty(whole, dtype=torch.uint8, device="cpu")
    return buffer, -(-buffer.data_ptr() // 64) * 64


def give_back(buffer: Tensor) -> None:
    """Keep a borrowed buffer for later calls."""
    size = buffer.numel()
    spare = _spare[size]
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
    key = rows.planes * C * ROW + ROW + (4 + 2 * BLOCK // GROUP) * C + 1
    common = {"score": (3 if rows.softcap and backward else 2) * GROUP * ROW, "query": GROUP * C}
    if rows.has_threshold and (rows.family == "dot" or not backward):
        held, row = held_scores(keys)
        common |= {"held": held * row, "found": row, "place": row, "line": row}
    if rows.in_place:
        pair = 2 * PAD
        return {
            "score": GROUP * ROW,
            "query": GROUP * -(-C // pair) * pair,
            "key": 0,
            "weight": GROUP * ROW,
            "value": GROUP * -(-V // pair) * pair,
            "state": 4 * BLOCK,
            "output": max(v_chunks, 1) * BLOCK * CHUNK,
        }
    if not backward:
        value = v_chunks * ROW * CHUNK + spare if value_lanes else V * ROW
        blocks = BLOCKS if rows.family == "dot" else 1
        return common | {
            "key": key,
            "weight": GROUP * ROW,
            "value": value,
            "state": blocks * 4 * BLOCK,
            "output": blocks * max(v_chunks, 1) * BLOCK * CHUNK,
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


def gathered_size(rows: Rows, V: int, K: int, keys: int) -> int:
    """Return the number of elements of what a work item gathers, as in ``csrc/gathered.h``, or somewhat more."""
    C, arrays = rows.width, 24
    of_query = 4 * C + 2 * V + 3 * K + 6
    of_key = 4 * C + 2 * V + 2
    return BLOCK * of_query + keys * of_key + arrays * PAD


# Running the kernels --------------------------------------------------------------------------------------------------


#: Number of elements of keys and values per tile, so that it fits a core's cache.
TILE_NUMBERS = 96 * 1024
#: Number of keys per tile for compact kernels, which can skip tiles.
NEAR_TILE = 128
#: With fewer values than this, the kernels vectorize over keys.
FEW_VALUES = 12


class ForwardRequest(NamedTuple):
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


class Dropout(NamedTuple):
    """Which weights are dropped: those whose 32 random bits are below a threshold.

    The bits follow from the seed, the head, the query and the key alone, whatever the threads and tiles.
    """

    seed: int
    p: float

    @property
    def threshold(self) -> int:
        """The number of 32 bits below which a weight is dropped."""
        return min(round(self.p * 2**32), 2**32 - 1)

    @property
    def kept(self) -> float:
        """The factor of the weights that are kept."""
        return 1 / (1 - self.p) if self.p < 1 else 0.0

    def drop(self, weights: Tensor, first: int, length: int) -> Tensor:
        """Drop weights (B, H, l, S) of queries from ``first`` on, of ``length`` in all, as the kernels do."""
        B, H, rows, S = weights.shape
        place = torch.arange(B * H, device="cpu").view(B, H, 1) * length + torch.arange(rows, device="cpu") + first
        own = np.uint64(self.seed) + (place.numpy().astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            own = (own ^ own >> np.uint64(shift)) * np.uint64(factor)
        own = (own ^ own >> np.uint64(31))[..., None]
        bits = np.arange(S, dtype=np.uint32) ^ own.astype(np.uint32)
        bits = (bits ^ bits >> np.uint32(17)) * np.uint32(0xED5AD4BB)
        bits = ((bits ^ bits >> np.uint32(11)) + (own >> np.uint64(32)).astype(np.uint32)) * np.uint32(0xAC4C1B51)
        bits = (bits ^ bits >> np.uint32(15)) * np.uint32(0x31848BAB)
        bits ^= bits >> np.uint32(14)
        return torch.where(torch.from_numpy(bits >= np.uint32(self.threshold)), weights * self.kept, 0.0)


@dataclass(slots=True, eq=False, repr=False)
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
    sink : Tensor (B, H, L), or None
        The logit of each row's sink. Output and ``received`` take it into account, the other fields do not.
    direct : bool
        Whether ``top`` and ``best`` are kernel weights instead of scores, and the peak is 0.
    is_finite : bool or None
        Whether the output has no NaN or infinity, which the kernels see; None if they did not run.
    """

    output: Tensor
    peak: Tensor
    total: Tensor
    top: Tensor | None = None
    entropy: Tensor | None = None
    received: Tensor | None = None
    best: Tensor | None = None
    best_key: Tensor | None = None
    sink: Tensor | None = None
    direct: bool = False
    is_finite: bool | None = None

    def by_row(self, function: Callable[[Tensor], Tensor]) -> ForwardResult:
        """Return the results with those of rows, (B, H, L, ...), as a function gives them."""
        names = ("output", "peak", "total", "top", "entropy", "best", "best_key", "sink")
        found = {name: function(t) for name in names if (t := getattr(self, name)) is not None}
        return ForwardResult(**found, received=self.received, direct=self.direct, is_finite=self.is_finite)

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp (B, H, L) of each row's scores, −inf in empty rows."""
        empty = self.total == 0
        return torch.where(empty, -torch.inf, self.peak + torch.where(empty, 1.0, self.total).log())

    @property
    def sink_share(self) -> Tensor | None:
        """The weight (B, H, L) of each row's sink, 0 in empty rows; None without sinks."""
        return None if self.sink is None else torch.where(self.total == 0, 0.0, torch.sigmoid(self.sink - self.lse))

    @property
    def shares(self) -> tuple[Tensor, Tensor]:
        """Peak and total (B, H, L) from which weights follow: those of keys and sink together."""
        if self.sink is None:
            return self.peak, self.total
        if self.direct:
            return self.peak, self.total + self.sink.exp()
        peak = torch.maximum(self.peak, self.sink)
        safe = torch.where(peak == -torch.inf, 0.0, peak)
        return peak, self.total * (self.peak - safe).exp() + (self.sink - safe).exp()


@dataclass(eq=False, repr=False)
class BiasGradient:
    """The gradient of a bias, which the kernels add to.

    Attributes
    ----------
    array : Tensor (B or 1, H or 1, L or blocks, S or 1)
        If queries share a bias, one row per block of queries.
    by_row : bool
        Whether each query has its own bias.
    """

    array: Tensor
    by_row: bool

    @classmethod
    def of(cls, bias: Tensor, L: int) -> BiasGradient:
        """Return zeros for a bias (B or 1, H or 1, L or 1, S or 1)."""
        by_row = bias.shape[2] == L
        rows = L if by_row else -(-L // BLOCK)
        return cls(bias.new_zeros(*bias.shape[:2], rows, bias.shape[3]), by_row)

    @property
    def numbers(self) -> dict[str, int]:
        """The strides of the gradient, by kernel argument."""
        b, h, r, c = strides(self.array.shape)
        return {"d_bias_b": b, "d_bias_h": h, "d_bias_r": r, "d_bias_c": c, "d_bias_by_row": int(self.by_row)}

    def total(self) -> Tensor:
        """Return the gradient in the bias' shape, summed in a fixed order."""
        if self.by_row:
            return self.array
        total = torch.zeros_like(self.array[:, :, :1])
        for part in self.array.split(1, 2):
            total += part
        return total


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
    order : Order or None
        None if the bias gets no gradient.
    """

    def __init__(
        self, name: str, rows: Rows, value: Tensor, visible: VisibleKeys, K: int = 0, order: Order | None = None
    ) -> None:
        backward = name == "backward"
        extent, V, S = visible.extent, value.shape[-1], visible.extent.S
        self.visible = visible
        if extent.H % value.shape[1]:
            raise RuntimeError(f"kernel {name}: {value.shape[1]} key heads must divide {extent.H} query heads.")
        lanes = not backward and V >= FEW_VALUES
        dtype = rows.arrays["query"].dtype
        self.order = order = order or Order.of(visible, value.shape[1])
        self.partitions = partitions(visible, order, rows.width + V, backward)
        keys = self._most_keys() if rows.has_threshold else 0
        held, held_row = held_scores(keys)
        needed = scratch_sizes(rows, V, backward, lanes, keys)
        if visible.query_rows is not None:
            needed["gathered"] = gathered_size(rows, V, K, S)
        self.memory = Scratch(needed, dtype)
        self.tile = tile = _tile(rows, V, S)
        queries = rows.arrays["query"].shape[2]
        sizes = {
            "B": value.shape[0], "H": extent.H, "L": queries, "S": value.shape[2], "G": value.shape[1],
            "sequences": extent.B, "rows": extent.L, "keys": S, "C": rows.width, "V": V, "K": K,
            "tile": tile, "tiles": -(-S // tile),
            "two": 2, "three": 3, "intervals": 0 if visible.start is None else visible.start.numel(),
            "items": extent.B * extent.H * -(-extent.L // BLOCK), "scratch_numbers": self.memory.size,
            "bias_numbers": visible.bias_size, "held": held, "held_row": held_row,
        }  # fmt: skip
        numbers = {**rows.numbers, **visible.numbers, **self.memory.places, **order.numbers, "value_lanes": int(lanes)}
        numbers.update(L=extent.L, S=S, all_queries=queries, all_keys=value.shape[2])
        ends = {name: getattr(visible, name) for name in ("start", "stop", "planes", "query_rows", "key_rows")}
        if (order.together > 1 and visible.mask is None) or order.is_gathered:
            ends["order"] = order.sort(torch.arange(sizes["items"], device="cpu"))
        stored = value.dtype if rows.in_place else None
        self.call = KernelCall(f"{rows.family}.{name}", dtype, sizes, ends, numbers, stored)
        self.near = visible.in_any_order and rows.is_compact
        self._kept: dict[int, Arguments] | None = {} if visible.is_small_and_fixed else None

    @classmethod
    def of(
        cls,
        kept: Passes,
        name: str,
        rows: Rows,
        value: Tensor,
        visible: VisibleKeys,
        K: int = 0,
        order: Order | None = None,
    ) -> Pass:
        """Return the cached pass for rows of this kind, or create it."""
        key = name, order, *rows.numbers.values()
        found = kept.get(key)
        if found is None:
            found = kept[key] = cls(name, rows, value, visible, K, order)
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
        with torch.no_grad():
            added = self.visible.added_to(unit, self.call.dtype)
        own = Arguments.of(self.visible, share, unit, None if added is None else compact(added, 3).contiguous())
        if kept is not None:
            kept[id(unit)] = own
        return own

    def given(
        self,
        rows: Rows,
        value: Tensor,
        visible: VisibleKeys,
        dropout: Dropout | None,
        arrays: Mapping[str, Tensor | None],
        d_bias: BiasGradient | None = None,
        flawed: int = 0,
    ) -> KernelCall:
        """Return the kernel with the arrays and numbers that all shares use.

        ``flawed`` is the address of an integer that a forward pass sets to 1 if the output is not finite.
        """
        arrays = {**rows.arrays, "value": value, "bias": visible.bias_array(), "own": visible.own, **arrays}
        arrays["boxes"] = boxes(rows.arrays["key"].mT, self.tile) if self.near else None
        reals = [rows.scale, rows.softcap]
        numbers: dict[str, int] = {"flawed": flawed}
        sizes: dict[str, int] = {}
        if dropout is not None:
            reals.append(dropout.kept)
            numbers.update(seed=dropout.seed, threshold=dropout.threshold)
        if d_bias is not None:
            arrays["d_bias"] = d_bias.array
            numbers.update(d_bias.numbers)
            sizes["d_bias_numbers"] = d_bias.array.numel()
        return self.call.given(arrays, *reals, numbers=numbers, sizes=sizes)


#: The passes of a plan, by kernel and flags of the rows.
Passes = dict[tuple[Any, ...], Pass]


def forward(
    rows: Rows,
    value: Tensor,
    visible: VisibleKeys,
    wants: ForwardRequest,
    kept: Passes,
    sink: Tensor | None = None,
    dropout: Dropout | None = None,
) -> ForwardResult:
    """Run the forward kernel over all of a problem.

    value (B, G, S, V) is contiguous and in the rows' dtype, unless the rows are read in place. ``sink`` (B, H, 1) are
    the logits of sinks. Where rows are gathered, B is 1.
    """
    query = rows.arrays["query"]
    (B, H, L, _), S, V = query.shape, value.shape[2], value.shape[3]
    new = query.new_empty
    arrays: dict[str, Any] = {"output": in_large_pages(new(B, H, L, V)), "peak": new(B, H, L), "total": new(B, H, L)}
    if wants.top:
        arrays["top"] = new(B, H, L)
    if wants.entropy:
        arrays["entropy"] = new(B, H, L)
    if wants.k:
        arrays["best"] = query.new_full((B, H, L, wants.k), 0.0 if rows.is_direct else -math.inf)
        arrays["best_key"] = torch.full((B, H, L, wants.k), -1, device="cpu")
    if sink is not None:
        arrays["sink"] = sink.detach().expand(B, H, L).contiguous()
    found = ForwardResult(**arrays, direct=rows.is_direct)
    made = Pass.of(kept, "forward", rows, value, visible, wants.k)
    flawed = array("q", (0,))
    call = made.given(rows, value, visible, dropout, arrays, flawed=flawed.buffer_info()[0])
    # Keys without weight are not read, so the kernels must not skip values that make NaN of a weight of 0.
    reads_all = {"read_all": 1} if rows.has_threshold and not math.isfinite(value.sum().item()) else {}
    received: dict[int, Tensor] = {}

    def task(i: int) -> None:
        share, common = made.partitions[i], {}
        if wants.received:
            common["received"] = received[i] = query.new_zeros(len(share.heads), S)
        with made.memory.lent() as scratch:
            for unit in share.units:
                _run_unit(call, scratch, common, made.arguments(share, unit), reads_all)

    pool.run([partial(task, i) for i in range(len(made.partitions))])
    found.is_finite = not flawed[0]
    if wants.received:
        found.received = query.new_zeros(B * H, S)
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


@dataclass(eq=False, repr=False)
class BackwardResult:
    """The results of a backward pass.

    Attributes
    ----------
    rows : Gradients
        Gradients of the projected rows.
    value : Tensor (B, G, S, V)
    mask : list of Tensor or None
        Gradients of the bias and of the mask's tensors.
    """

    rows: Gradients
    value: Tensor
    mask: list[Tensor | None]


def backward(
    rows: Rows,
    value: Tensor,
    visible: VisibleKeys,
    found: ForwardResult,
    grad: Tensor,
    wanted: list[bool],
    kept: Passes,
    dropout: Dropout | None = None,
) -> BackwardResult:
    """Run the backward kernel; ``wanted`` says which of ``visible.tensors()`` need gradients."""
    B, H, L, _ = rows.arrays["query"].shape
    G, S, V = value.shape[1:]
    C, linear = rows.width, rows.family == "dot"
    # Query gradients of dot products are written once; others are accumulated.
    d_query = (value.new_empty if linear else value.new_zeros)(B, H, L, C)
    bias = visible.bias if visible.bias is not None and wanted[0] else None
    order = Order.of(visible, G, bias)
    made = Pass.of(kept, "backward", rows, value, visible, order=order)
    arrays = {"output": found.output, "d_query": d_query, "peak": found.peak, "total": found.total}
    arrays["grad"] = grad.resolve_neg().contiguous()
    d_bias = None if bias is None else BiasGradient.of(bias, visible.extent.L)
    call = made.given(rows, value, visible, dropout, arrays, d_bias)
    key_shape = (S, C) if linear else (C, S)
    totals = {
        "d_key": in_large_pages(value.new_empty(B * G, *key_shape)).zero_(),
        "d_value": in_large_pages(value.new_empty(B * G, S, V)).zero_(),
        "d_weight": value.new_zeros(B * H, 2 * C),
    }
    # Shares accumulate directly into the totals, except for heads that several shares cover.
    shared_by = Counter(head for share in made.partitions for head in share.kv_heads)
    common = {head for head, count in shared_by.items() if count > 1}
    own_sums = [_Sums.of(share, totals, not common.isdisjoint(share.kv_heads)) for share in made.partitions]
    rest = wanted if visible.bias is None else wanted[1:]

    def task(share: Partition, sums: _Sums) -> None:
        sums.begin()
        with made.memory.lent() as scratch:
            for unit in share.units:
                _backward_unit(made, call, scratch, visible, unit, share, sums, rest)

    pool.run([partial(task, *each) for each in zip(made.partitions, own_sums)])
    tensors = [] if visible.rest is None else visible.rest.tensors()
    pulled = {i: torch.zeros_like(t) for i, t in enumerate(tensors) if rest[i]}
    for sums in own_sums:
        sums.end()
        for i, part in sums.masks.items():
            pulled[i] += part
    masks = [pulled.get(i) for i in range(len(rest))]
    if visible.bias is not None:
        masks = [None if d_bias is None else d_bias.total(), *masks]
    d_key, d_value, d_weight = (order.by_sequences(total) for total in totals.values())
    return BackwardResult(Gradients(d_query, d_key, d_weight), d_value, masks)


@dataclass(eq=False, repr=False)
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
    wanted: list[bool],
) -> None:
    """Run one unit, and backpropagate the gradient of what ``visible.rest`` adds to its ``wanted`` tensors."""
    if not any(wanted) or visible.rest is None:
        _run_unit(call, scratch, sums.parts, made.arguments(share, unit))
        return
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_(want) for t, want in zip(visible.rest.tensors(), wanted)]
        added = replace(visible, rest=visible.rest.with_tensors(leaves)).added_to(unit, call.dtype)
        if added is None:
            _run_unit(call, scratch, sums.parts, made.arguments(share, unit))
            return
        varying = compact(added, 3)
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
