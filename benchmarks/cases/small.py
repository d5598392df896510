"""Calls so small that what surrounds the kernel counts: one sentence, and one step of decoding."""

from __future__ import annotations

from array import array
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import regard
from benchmarks.cases.contenders import by_regard, by_torch, seeded
from benchmarks.registry import Call, Case, Contender, Goal, MissingError, Point, register
from benchmarks.work import Formula, Work
from regard import masks, scores
from regard.engines.fused.arguments import F
from regard.engines.fused.kernel_call import KernelCall

HEADS, KEY_HEADS, WIDTH, LEFT = 8, 2, 64, 16
LENGTH, CACHE = 64, 256
TORCH, REFERENCE, KERNELS = "torch SDPA", "regard, reference", "its kernels alone"


def _additive(query: Tensor, key: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    return torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) @ parameters["w_v"]


def _gaussian(query: Tensor, key: Tensor, parameters: dict[str, Tensor]) -> Tensor:  # noqa: ARG001
    return -(query.unsqueeze(-2) - key.unsqueeze(-3)).square().sum(-1) / 2


FORMULAS: dict[str, Formula] = {"Gaussian": _gaussian, "additive": _additive}


def _causal(rows: Tensor) -> Tensor:
    return (torch.arange(LENGTH) <= rows.unsqueeze(-1))[None, None]


def _window(rows: Tensor) -> Tensor:
    kv, q = torch.arange(LENGTH), rows.unsqueeze(-1)
    return ((kv <= q) & (kv >= q - LEFT))[None, None]


CAUSAL: dict[str, dict[str, Any]] = {
    "is_causal=True": {"is_causal": True},
    "masks.causal()": {"attn_mask": masks.causal()},
    "bool matrix": {"attn_mask": _causal(torch.arange(LENGTH))},
}
GROUPED, DECODING, BAND = "grouped queries", "decoding", f"causal() & window({LEFT}, 0)"


def _size(variant: str) -> int:
    return CACHE if variant == DECODING else LENGTH


def build(point: Point) -> Work:
    """Return one sentence, or one query over a cache."""
    queries = 1 if point.variant == DECODING else point.size
    groups = KEY_HEADS if point.variant in (GROUPED, DECODING) else HEADS
    ends = seeded((1, HEADS, queries, WIDTH), *[(1, groups, point.size, WIDTH)] * 2)
    visible = _causal if point.variant in CAUSAL else _window if point.variant == BAND else None
    if point.variant not in FORMULAS:
        return Work(*ends, visible=visible, kernel=point.variant)
    (weight,) = seeded((WIDTH,))
    parameters = {"w_v": weight} if point.variant == "additive" else {}
    return Work(*ends, scores=FORMULAS[point.variant], features=WIDTH, parameters=parameters, kernel=point.variant)


def options(work: Work) -> dict[str, Any]:
    """Return what a variant means to ``regard.attention``."""
    if work.kernel == BAND:
        return {"attn_mask": masks.causal() & masks.window(LEFT, 0)}
    if work.kernel in FORMULAS:
        return {"score": scores.Additive(work.parameters["w_v"]) if work.parameters else "gaussian"}
    return CAUSAL.get(work.kernel, {"enable_gqa": True})


def _torchs(work: Work) -> dict[str, Any]:
    """Return what is the same in torch."""
    if work.kernel in FORMULAS:
        raise MissingError(f"torch has no {work.kernel} score")
    if work.kernel in (BAND, "bool matrix"):
        return {"attn_mask": work.dense()}
    return {"is_causal": True} if work.kernel in CAUSAL else {"enable_gqa": True}


def _kernels(work: Work) -> Call:
    """Return a call's compiled kernels, run again with the arguments of that call."""
    if work.kernel not in FORMULAS:
        raise MissingError("it is torch's kernel that runs")
    ran: list[tuple[KernelCall, array[int], dict[str, Tensor]]] = []
    run = KernelCall.__call__

    def watched(call: KernelCall, arrays: dict[str, Tensor], numbers: dict[str, int], sizes: Any = None) -> None:
        ran.append((call, call.filled(arrays, numbers, sizes), arrays))  # which must live as long
        run(call, arrays, numbers, sizes)

    with patch.object(KernelCall, "__call__", watched):
        regard.attention(work.query, work.key, work.value, engine="fused", **options(work))
    output = ran[-1][0].arrays["output"]
    # The scratch memory of that call may be lent again: kernels take memory of their own here.
    size = max(call.sizes["scratch_numbers"] for call, *_ in ran) + 16
    scratch = torch.empty(size, dtype=output.dtype)
    for _, arguments, _ in ran:
        arguments[F.scratch] = -(-scratch.data_ptr() // 64) * 64

    def again(_: Tensor = scratch) -> dict[str, Tensor]:
        for call, arguments, _ in ran:
            call.execute(arguments)
        return {"output": output}

    return again


#: What a variant is called in the names of goals, and how many µs more than torch it may take.
GOALS = {
    "is_causal=True": ("is-causal", 30.0),
    "masks.causal()": ("causal", 30.0),
    "bool matrix": ("matrix", 30.0),
    GROUPED: ("grouped", 30.0),
    DECODING: ("decoding", 30.0),
    BAND: ("window", 40.0),
}

register(
    Case(
        name="small",
        title=f"Small calls: {HEADS} heads of {WIDTH}, {LENGTH} tokens; decoding: one query over {CACHE} keys",
        unit="keys",
        build=build,
        contenders={
            TORCH: by_torch(_torchs),
            "regard": by_regard(options),
            REFERENCE: by_regard(lambda work: {**options(work), "engine": "reference"}),
            KERNELS: Contender(_kernels),
        },
        baseline="regard",
        points=(
            *(Point(_size(variant), variant=variant, only=(TORCH, "regard", REFERENCE)) for variant in GOALS),
            *(Point(LENGTH, variant=variant, only=("regard", REFERENCE, KERNELS)) for variant in FORMULAS),
        ),
        quick=LENGTH,
        goals=(
            *(
                Goal(f"small-{name}", "overhead", limit, _size(variant), against=TORCH, variant=variant)
                for variant, (name, limit) in GOALS.items()
            ),
            *(
                Goal(f"small-{variant.lower()}", "overhead", 60, LENGTH, against=KERNELS, variant=variant)
                for variant in FORMULAS
            ),
            *(
                Goal(f"small-reference-{i}", "time", 1, _size(variant), against=REFERENCE, variant=variant)
                for i, variant in enumerate((*GOALS, *FORMULAS))
            ),
        ),
        bound="",
        notes="Masks are made before the clock starts. The last contender is the compiled kernels of the same call, "
        "with all their arguments at hand.",
    )
)  # fmt: skip
