"""Running the kernels: scratch memory, shares of the work for each thread, and sums over them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.engines.fused import pool
from regard.engines.fused.call import Call
from regard.engines.fused.families import Gradients, Rows
from regard.engines.fused.kernels.fields import BAND, BLOCK, CHUNK, GROUP, PAD, ROW, TILE
from regard.engines.fused.order import boxes
from regard.engines.fused.shares import Share, shares
from regard.engines.fused.sight import Sight, Unit

#: Numbers of keys and values that a tile should hold, so that it stays in a core's cache.
TILE_NUMBERS = 96 * 1024
#: Keys of a tile where tiles can be out of reach.
NEAR_TILE = 128
#: Values fewer than this are read with keys as lanes.
FEW_VALUES = 12
#: Bytes of a scratch buffer that is kept for the next call.
KEPT = 4 << 20
#: Buffers that nobody uses, by size.
_spare: dict[int, list[Tensor]] = {}


@dataclass(frozen=True)
class Wants:
    """What a forward pass should tell beside the output.

    Attributes
    ----------
    top, entropy, received : bool
        The largest score and the entropy of each row, the sum of weights of each key.
    k : int
        How many of a row's best keys, 0 for none.
    """

    top: bool = False
    entropy: bool = False
    received: bool = False
    k: int = 0


@dataclass(frozen=True)
class Found:
    """What a forward pass yields; what was not asked for is None.

    Weights are ``exp(score − peak) / total``, or ``kernel weight / total`` for rows that are direct.

    Attributes
    ----------
    output : Tensor (B, H, L, V)
    peak, total : Tensor (B, H, L)
        A row's largest score and the sum of its weights relative to that; a total of 0 where a row sees nothing.
    top : Tensor (B, H, L), or None
        The largest score.
    entropy : Tensor (B, H, L), or None
        ``Σ w log w`` of the weights w before they are divided by the total.
    received : Tensor (B · H, S), or None
        The weights that each key received.
    best, best_key : Tensor (B, H, L, k), or None
        The largest scores and their keys, −1 where there are fewer.
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


def _padded(count: int) -> int:
    return -(-count // PAD) * PAD


def _tile(rows: Rows, V: int, S: int) -> int:
    """Return how many keys a tile has."""
    if rows.is_compact:
        return min(NEAR_TILE, _padded(S))  # small tiles are skipped more often
    fit = TILE_NUMBERS // max(rows.planes * rows.width + V, 1) // PAD * PAD
    return max(min(TILE, fit, _padded(S)), 4 * PAD if S > 4 * PAD else PAD)


class _Memory:
    """The parts of one task's scratch memory."""

    def __init__(self, sizes: dict[str, int], dtype: torch.dtype) -> None:
        self.places: dict[str, int] = {}
        place = 0
        for name, size in sizes.items():
            self.places[f"at_{name}"] = place
            place += _padded(size)
        self.size, self.dtype = place, dtype

    @contextmanager
    def lent(self) -> Iterator[int]:
        """Lend the address of scratch memory; what was used before is used again, as its pages are there already."""
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


def _sizes(rows: Rows, V: int, backward: bool, value_lanes: bool) -> dict[str, int]:
    C = rows.width
    v_chunks, c_chunks = -(-V // CHUNK), -(-C // CHUNK)
    spare = 4 * CHUNK
    key = rows.planes * C * ROW + ROW + (4 + 2 * BLOCK // GROUP) * C
    common = {"score": (2 * GROUP + 1) * ROW, "query": GROUP * C}
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


class _Call(Call):
    """A forward or backward kernel on a problem."""

    def __init__(self, name: str, rows: Rows, sight: Sight, value: Tensor, numbers: dict[str, int]) -> None:
        super().__init__(f"{rows.family}.{name}", value.dtype, rows.scale)
        extent = sight.extent
        V, S = value.shape[-1], extent.S
        tile = _tile(rows, V, S)
        self.values |= {"H": extent.H, "G": value.shape[1], "L": extent.L, "S": S, "C": rows.width, "V": V}
        self.values |= {"tile": tile, "value": value.data_ptr()}
        self.values |= rows.numbers | sight.numbers | numbers
        self.values |= {name: tensor.data_ptr() for name, tensor in rows.arrays.items()}
        if sight.start is not None and sight.stop is not None:
            self.values |= {"start": sight.start.data_ptr(), "stop": sight.stop.data_ptr()}
        if sight.everything and rows.is_compact:
            self.boxes = boxes(rows.arrays["key"].mT, tile)
            self.values["boxes"] = self.boxes.data_ptr()


def _added_fields(sight: Sight, unit: Unit, added: Tensor) -> dict[str, int]:
    """Return where the kernels find what is added: as if for the whole problem, counted from the unit's part."""
    b, h, row, _ = (0 if n == 1 else step for n, step in zip(added.shape, added.stride()))
    H = sight.extent.H
    single = unit.last - unit.first == 1 and unit.segments is not None
    base = (unit.first // H * b + unit.first % H * h) if single else 0
    if unit.segments is not None:
        base += unit.block * BLOCK * row
    address = added.data_ptr() - base * added.element_size()
    return {"added": address, "added_b": b, "added_h": h, "added_r": row, "has_added": 1}


def _unit_fields(unit: Unit) -> dict[str, int]:
    fields = {"first": unit.first, "last": unit.last}
    if unit.segments is not None:
        fields |= {"block": unit.block, "segments": unit.segments.data_ptr(), "segment_count": len(unit.segments)}
    return fields


def forward(rows: Rows, value: Tensor, sight: Sight, wants: Wants) -> Found:
    """Run the forward kernel over all of a problem; value (B, G, S, V) contiguous, in the rows' dtype."""
    extent, dtype = sight.extent, value.dtype
    B, H, L, S, V = extent.B, extent.H, extent.L, extent.S, value.shape[-1]
    new = value.new_empty
    found = Found(
        new(B, H, L, V),
        new(B, H, L),
        new(B, H, L),
        new(B, H, L) if wants.top else None,
        new(B, H, L) if wants.entropy else None,
        value.new_zeros(B * H, S) if wants.received else None,
        value.new_full((B, H, L, wants.k), 0.0 if rows.is_direct else -math.inf) if wants.k else None,
        torch.full((B, H, L, wants.k), -1, device="cpu") if wants.k else None,
        rows.is_direct,
    )
    value_lanes = V >= FEW_VALUES
    numbers = {"K": wants.k, "value_lanes": int(value_lanes)}
    fields = ("output", "peak", "total", "top", "entropy", "best", "best_key")
    tensors = {name: getattr(found, name) for name in fields}
    call = _Call(
        "forward", rows, sight, value, numbers | {n: t.data_ptr() for n, t in tensors.items() if t is not None}
    )
    memory = _Memory(_sizes(rows, V, False, value_lanes), dtype)
    parts = shares(sight, value.shape[1], rows.width + V)

    def task(share: Share) -> Callable[[], None]:
        def run() -> None:
            common = {"head_first": share.heads[0], **memory.places}
            if wants.received:
                share.sums["received"] = value.new_zeros(len(share.heads), S)
                common["received"] = share.sums["received"].data_ptr()
            with memory.lent() as scratch:
                for unit in share.units:
                    added = sight.added if sight.added is not None else sight.added_to(unit, dtype)
                    extra = {} if added is None else _added_fields(sight, unit, added)
                    call(scratch=scratch, **common, **_unit_fields(unit), **extra)

        return run

    with torch.no_grad():
        pool.run([_quiet(task(share)) for share in parts])
    if found.received is not None:
        for share in parts:
            found.received[share.heads[0] : share.heads[-1] + 1] += share.sums["received"]
    return found


def _quiet(task: Callable[[], None]) -> Callable[[], None]:
    """Return the task with autograd off, which is a thread's own setting."""

    def run() -> None:
        with torch.no_grad():
            task()

    return run


@dataclass(frozen=True)
class Pulled:
    """What a backward pass yields.

    Attributes
    ----------
    rows : Gradients
        Those of the compared rows.
    value : Tensor (B, G, S, V)
    added : list of Tensor or None
        Those of the mask's tensors.
    """

    rows: Gradients
    value: Tensor
    added: list[Tensor | None]


def backward(
    rows: Rows, value: Tensor, sight: Sight, found: Found, grad: Tensor, mask_tensors: list[Tensor], wanted: list[bool]
) -> Pulled:
    """Run the backward kernel; ``mask_tensors`` are those of the mask, of which ``wanted`` get gradients."""
    extent, dtype = sight.extent, value.dtype
    B, H, L, S, V = extent.B, extent.H, extent.L, extent.S, value.shape[-1]
    G, C, linear = value.shape[1], rows.width, rows.family == "dot"
    grad = grad.contiguous()
    # Dot products' gradients to queries are written once, others added to.
    d_query = (value.new_empty if linear else value.new_zeros)(B, H, L, C)
    numbers = {"grad": grad.data_ptr(), "output": found.output.data_ptr(), "d_query": d_query.data_ptr()}
    value_keys = value.mT.contiguous()
    numbers |= {"value_keys": value_keys.data_ptr()}
    numbers |= {"peak": found.peak.data_ptr(), "total": found.total.data_ptr()}
    call = _Call("backward", rows, sight, value, numbers)
    memory = _Memory(_sizes(rows, V, True, False), dtype)
    parts = shares(sight, G, C + V, backward=True)
    key_shape = (S, C) if linear else (C, S)
    d_added = None if sight.added is None or not any(wanted) else torch.zeros_like(sight.added)
    totals = {
        "d_key": value.new_zeros(B * G, *key_shape),
        "d_value": value.new_zeros(B * G, S, V),
        "d_weight": value.new_zeros(B * H, 2 * C),
    }
    # A share adds to the totals themselves, but for heads that it has in common with another.
    shared_by = Counter(head for part in parts for head in part.kv_heads)
    common_heads = {head for head, count in shared_by.items() if count > 1}

    def task(share: Share) -> Callable[[], None]:
        def run() -> None:
            places = {"d_key": share.kv_heads, "d_value": share.kv_heads, "d_weight": share.heads}
            share.sums |= {name: totals[name][r[0] : r[-1] + 1] for name, r in places.items()}
            if not common_heads.isdisjoint(share.kv_heads):
                share.sums |= {name: torch.zeros_like(share.sums[name]) for name in totals}
            common = {"head_first": share.heads[0], "kv_first": share.kv_heads[0]}
            common |= memory.places | {name: tensor.data_ptr() for name, tensor in share.sums.items()}
            with memory.lent() as scratch:
                common["scratch"] = scratch
                for unit in share.units:
                    _backward_unit(call, common, sight, unit, dtype, mask_tensors, wanted, d_added, share)

        return run

    tasks = [_quiet(task(share)) for share in parts]
    if d_added is not None and d_added.shape[:2] != (B, H):
        for each in tasks:  # heads add to the same numbers
            each()
    else:
        pool.run(tasks)
    masks: list[Tensor | None] = [None] * len(mask_tensors)
    for share in parts:
        if not common_heads.isdisjoint(share.kv_heads):
            for name, places in (("d_key", share.kv_heads), ("d_value", share.kv_heads), ("d_weight", share.heads)):
                totals[name][places[0] : places[-1] + 1] += share.sums[name]
        for i, _ in enumerate(mask_tensors):
            if f"mask{i}" in share.sums:
                part, total = share.sums[f"mask{i}"], masks[i]
                masks[i] = part if total is None else total + part
    if d_added is not None:
        masks = [d_added]
    d_key, d_weight = totals["d_key"].view(B, G, *key_shape), totals["d_weight"].view(B, H, 2 * C)
    return Pulled(Gradients(d_query, d_key, d_weight), totals["d_value"].view(B, G, S, V), masks)


def _backward_unit(
    call: _Call,
    common: dict[str, int],
    sight: Sight,
    unit: Unit,
    dtype: torch.dtype,
    tensors: list[Tensor],
    wanted: list[bool],
    d_added: Tensor | None,
    share: Share,
) -> None:
    """Run one unit, and take the gradient of what it adds to scores on to the mask's tensors."""
    if sight.added is not None:
        extra = _added_fields(sight, unit, sight.added)
        if d_added is not None:
            extra["d_added"] = d_added.data_ptr()
        call(**common, **_unit_fields(unit), **extra)
        return
    if not any(wanted) or sight.mask is None:
        added = sight.added_to(unit, dtype)
        call(**common, **_unit_fields(unit), **({} if added is None else _added_fields(sight, unit, added)))
        return
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() if want else t.detach() for t, want in zip(tensors, wanted)]
        added = sight.added_to(unit, dtype, sight.mask.with_tensors(leaves))
        if added is None:
            call(**common, **_unit_fields(unit))
            return
        # Dimensions in which the bias does not vary are summed by the kernel.
        shape = [n if step or n == 1 else 1 for n, step in zip(added.shape, added.stride())]
        compact = added[tuple(slice(0, n) for n in shape)]
    target = torch.zeros(compact.shape, dtype=dtype, device="cpu")
    values = compact.detach().contiguous()
    extra = _added_fields(sight, unit, values)
    extra["d_added"] = target.data_ptr() - (values.data_ptr() - extra["added"])
    call(**common, **_unit_fields(unit), **extra)
    if not compact.requires_grad:
        return
    found = torch.autograd.grad(compact, [t for t in leaves if t.requires_grad], target, allow_unused=True)
    places = [i for i, want in enumerate(wanted) if want]
    for i, gradient in zip(places, found):
        if gradient is not None:
            name = f"mask{i}"
            share.sums[name] = gradient if name not in share.sums else share.sums[name] + gradient
