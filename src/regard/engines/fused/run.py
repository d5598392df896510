"""Running the kernels: shares of the work for each thread, and sums over them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.engines.fused import pool
from regard.engines.fused.arguments import Arguments, compact
from regard.engines.fused.call import Call
from regard.engines.fused.families import Gradients, Rows
from regard.engines.fused.kernels.fields import PAD, TILE
from regard.engines.fused.order import boxes
from regard.engines.fused.scratch import Scratch, padded, scratch_sizes
from regard.engines.fused.shares import Share, shares
from regard.engines.fused.sight import Sight, Unit

#: Numbers of keys and values that a tile should hold, so that it stays in a core's cache.
TILE_NUMBERS = 96 * 1024
#: Keys of a tile where tiles can be out of reach.
NEAR_TILE = 128
#: Values fewer than this are read with keys as lanes.
FEW_VALUES = 12


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


def _tile(rows: Rows, V: int, S: int) -> int:
    """Return how many keys a tile has."""
    if rows.is_compact:
        return min(NEAR_TILE, padded(S))  # small tiles are skipped more often
    fit = TILE_NUMBERS // max(rows.planes * rows.width + V, 1) // PAD * PAD
    return max(min(TILE, fit, padded(S)), 4 * PAD if S > 4 * PAD else PAD)


def _call(
    name: str, rows: Rows, sight: Sight, value: Tensor, memory: Scratch, arrays: dict[str, Tensor | None], K: int = 0
) -> Call:
    """Return the forward or backward kernel with what all of its units have in common."""
    extent, numbers = sight.extent, rows.numbers | sight.numbers | memory.places
    V, S = value.shape[-1], extent.S
    tile = _tile(rows, V, S)
    intervals = 0 if sight.start is None else sight.start.numel()
    sizes = {
        **vars(extent), "G": value.shape[1], "C": rows.width, "V": V, "K": K, "tile": tile, "tiles": -(-S // tile),
        "two": 2, "three": 3, "intervals": intervals, "scratch_numbers": memory.size,
    }  # fmt: skip
    if extent.H % value.shape[1]:
        raise RuntimeError(f"kernel {name}: {value.shape[1]} key heads must divide {extent.H} query heads.")
    call = Call(f"{rows.family}.{name}", value.dtype, rows.scale, sizes)
    near = boxes(rows.arrays["key"].mT, tile) if sight.everything and rows.is_compact else None
    common = {"value": value, "start": sight.start, "stop": sight.stop, "boxes": near}
    call.give({**rows.arrays, **common, **arrays}, numbers)
    return call


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
    memory = Scratch(scratch_sizes(rows, V, False, value_lanes), dtype)
    fields = ("output", "peak", "total", "top", "entropy", "best", "best_key")
    call = _call("forward", rows, sight, value, memory, {name: getattr(found, name) for name in fields}, wants.k)
    call.numbers["value_lanes"] = int(value_lanes)
    parts = shares(sight, value.shape[1], rows.width + V)

    def task(share: Share) -> Callable[[], None]:
        def run() -> None:
            if wants.received:
                share.sums["received"] = value.new_zeros(len(share.heads), S)
            with memory.lent() as scratch:
                for unit in share.units:
                    added = sight.added if sight.added is not None else sight.added_to(unit, dtype)
                    own = Arguments.of(sight, unit, None if added is None else compact(added).contiguous())
                    _run_unit(call, share, scratch, share.sums, own)

        return run

    with torch.no_grad():
        pool.run([_quiet(task(share)) for share in parts])
    if found.received is not None:
        for share in parts:
            found.received[share.heads[0] : share.heads[-1] + 1] += share.sums["received"]
    return found


def _run_unit(call: Call, share: Share, scratch: int, common: dict[str, Tensor], own: Arguments) -> None:
    """Run a unit with the arrays that its share has for all of its units, and those of its own."""
    numbers = {"scratch": scratch, "head_first": share.heads[0], "kv_first": share.kv_heads[0], **own.numbers}
    sizes = {"share_heads": len(share.heads), "share_kv_heads": len(share.kv_heads), **own.sizes}
    call({**common, **own.arrays}, numbers, sizes)


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
    memory = Scratch(scratch_sizes(rows, V, True, False), dtype)
    arrays = {"grad": grad, "output": found.output, "d_query": d_query, "peak": found.peak, "total": found.total}
    call = _call("backward", rows, sight, value, memory, {**arrays, "value_keys": value.mT.contiguous()})
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
            with memory.lent() as scratch:
                for unit in share.units:
                    _backward_unit(call, scratch, sight, unit, dtype, mask_tensors, wanted, d_added, share)

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
        for i, part in share.mask_sums.items():
            total = masks[i]
            masks[i] = part if total is None else total + part
    if d_added is not None:
        masks = [d_added]
    d_key, d_weight = totals["d_key"].view(B, G, *key_shape), totals["d_weight"].view(B, H, 2 * C)
    return Pulled(Gradients(d_query, d_key, d_weight), totals["d_value"].view(B, G, S, V), masks)


def _backward_unit(
    call: Call,
    scratch: int,
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
        target = {} if d_added is None else {"d_added": d_added}
        _run_unit(call, share, scratch, {**share.sums, **target}, Arguments.of(sight, unit, sight.added))
        return
    if not any(wanted) or sight.mask is None:
        added = sight.added_to(unit, dtype)
        own = Arguments.of(sight, unit, None if added is None else compact(added).contiguous())
        _run_unit(call, share, scratch, share.sums, own)
        return
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() if want else t.detach() for t, want in zip(tensors, wanted)]
        added = sight.added_to(unit, dtype, sight.mask.with_tensors(leaves))
        if added is None:
            _run_unit(call, share, scratch, share.sums, Arguments.of(sight, unit, None))
            return
        varying = compact(added)
    total = torch.zeros(varying.shape, dtype=dtype, device="cpu")
    own = Arguments.of(sight, unit, varying.detach().contiguous())
    _run_unit(call, share, scratch, {**share.sums, "d_added": total}, own)
    if not varying.requires_grad:
        return
    found = torch.autograd.grad(varying, [t for t in leaves if t.requires_grad], total, allow_unused=True)
    places = [i for i, want in enumerate(wanted) if want]
    for i, gradient in zip(places, found):
        if gradient is not None:
            share.mask_sums[i] = gradient if i not in share.mask_sums else share.mask_sums[i] + gradient
