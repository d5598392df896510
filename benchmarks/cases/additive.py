"""Additive attention: a score that no kernel of torch's knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.contenders import by_regard, by_torch, compiled, differentiated, seeded
from benchmarks.registry import Call, Case, Contender, Goal, MissingError, Point, register
from benchmarks.work import Work
from regard import scores

WIDTH = 64
#: Features of the case that is compared, and of those that grow.
FEATURES, FEW = 128, 64
EAGER, COMPILED, STREAMING = "eager formula", "compiled formula", "regard, streaming"
SDPA = "torch SDPA, 4 heads of 64 (other work)"
#: Bytes beyond which the plain formula is not run.
TOO_LARGE = 4e9


def formula(query: Tensor, key: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    """Return the scores (..., L, S)."""
    query, key = query @ parameters["w_q"].mT, key @ parameters["w_k"].mT
    return torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) @ parameters["w_v"]


def built(batch: int, features: int) -> Callable[[Point], Work]:
    """Return what makes the work of a point: one head, projections given."""

    def build(point: Point) -> Work:
        *ends, w_v, w_q, w_k = seeded(
            *[(batch, 1, point.size, WIDTH)] * 3, (features,), (features, WIDTH), (features, WIDTH)
        )
        return Work(
            *ends,
            backward=point.backward,
            scores=formula,
            parameters={"w_v": w_v, "w_q": w_q / WIDTH**0.5, "w_k": w_k / WIDTH**0.5},
            features=features,
            # Add, tanh (counted as one), multiply, add for each feature; multiply and add for each value.
            pair_flops=4.0 * features + 2.0 * WIDTH,
        )

    return build


def options(work: Work) -> dict[str, Any]:
    """Return what makes ``regard.attention`` additive."""
    return {"score": scores.Additive(*(work.parameters[name] for name in ("w_v", "w_q", "w_k")))}


def eager(work: Work) -> Call:
    """Return the plain formula's call."""
    pairs = work.query.shape[0] * work.query.shape[2] * work.key.shape[2]
    if (hidden := 4.0 * pairs * work.features) > TOO_LARGE:
        raise MissingError(
            f"not run: its tensor L×S×{work.features} alone is {hidden / 1e9:.1f} GB, and it holds several"
        )
    return differentiated(work, lambda: formula(work.query, work.key, work.parameters).softmax(-1) @ work.value)


def _compiled(work: Work) -> Call:
    def attend(query: Tensor, key: Tensor, value: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        return formula(query, key, parameters).softmax(-1) @ value

    return compiled(work, attend, work.query, work.key, work.value, work.parameters)


def _four_heads(point: Point) -> Work:
    return Work(*seeded(*[(4, 4, point.size, WIDTH)] * 3), backward=point.backward)


headline = built(4, FEATURES)

register(
    Case(
        name="additive",
        title=f"Additive attention, {FEATURES} features, values of {WIDTH}, a batch of 4",
        unit="queries and keys",
        build=headline,
        contenders={
            EAGER: Contender(eager),
            COMPILED: Contender(_compiled, compiles=True),
            "regard": by_regard(options),
            SDPA: by_torch(lambda _: {}, build=_four_heads),
        },
        baseline=EAGER,
        points=(Point(512), Point(512, backward=True)),
        quick=16,
        goals=(
            Goal("additive-eager", "speed", 80, 512),
            Goal("additive-compiled", "speed", 20, 512, against=COMPILED),
            Goal("additive-backward", "speed", 30, 512, backward=True),
            Goal("additive-sdpa", "time", 1.3, 512, against=SDPA),
        ),
        notes="SDPA is a yardstick: dot products of 4 heads, as many queries and keys, in the same batch.",
    )
)

register(
    Case(
        name="additive-growth",
        title=f"Additive attention, {FEW} features, over length",
        unit="queries and keys",
        build=built(1, FEW),
        contenders={
            EAGER: Contender(eager),
            COMPILED: Contender(_compiled, compiles=True),
            "regard": by_regard(options),
        },
        baseline=EAGER,
        points=(
            *(Point(size) for size in (128, 512)),
            Point(2048, rounds=5),
            Point(8192, only=(COMPILED, "regard"), rounds=3),
            Point(32768, only=("regard",), rounds=2),
            *(Point(size, backward=True, only=(EAGER, "regard"), rounds=5) for size in (128, 512, 2048)),
            Point(8192, backward=True, only=("regard",), rounds=3),
        ),
        quick=16,
        notes="What is missing at a size would not fit into memory there, or take too long.",
    )
)

register(
    Case(
        name="additive-memory",
        title=f"Additive attention, {FEW} features: peak memory",
        unit="queries and keys",
        build=built(1, FEW),
        contenders={
            EAGER: Contender(eager),
            "regard": by_regard(options),
            STREAMING: by_regard(lambda work: {**options(work), "engine": "streaming"}),
        },
        baseline=EAGER,
        points=(Point(8192, rounds=1), Point(8192, backward=True, rounds=1)),
        quick=16,
        goals=(
            Goal("additive-memory", "memory", 150, 8192),
            Goal("additive-memory-backward", "memory", 150, 8192, backward=True),
            Goal("streaming-memory", "memory", 150, 8192, contender=STREAMING),
            Goal("streaming-memory-backward", "memory", 150, 8192, backward=True, contender=STREAMING),
        ),
        notes="Memory is what counts here: times are those of one round.",
    )
)
