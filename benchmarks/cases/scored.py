"""Scores that torch's kernels do not know."""

from __future__ import annotations

import torch
from torch import Tensor

import regard
from benchmarks.cases.contenders import by_regard, compiled, differentiated, seeded
from benchmarks.registry import Call, Case, Contender, Goal, MissingError, Point, register
from benchmarks.work import Work
from regard import scores

FEATURES = 64
BANDWIDTH = 0.25
EAGER, COMPILED, CDIST, KEOPS = "eager formula", "compiled formula", "cdist + softmax", "KeOps"
#: Bytes beyond which the plain formula is not run.
TOO_LARGE = 4e9


def _additive_scores(query: Tensor, key: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    query, key = query @ parameters["w_q"].mT, key @ parameters["w_k"].mT
    return torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) @ parameters["w_v"]


def _additive(point: Point) -> Work:
    *ends, w_v, w_q, w_k = seeded(*[(1, 1, point.size, 64)] * 3, (FEATURES,), (FEATURES, 64), (FEATURES, 64))
    return Work(
        *ends,
        backward=point.backward,
        scores=_additive_scores,
        parameters={"w_v": w_v, "w_q": w_q / 8, "w_k": w_k / 8},
        features=FEATURES,
        # Add, tanh (counted as one), multiply, add for each feature; multiply and add for each value.
        pair_flops=4.0 * FEATURES + 2.0 * 64,
    )


def _additive_formula(work: Work) -> Call:
    hidden = 4.0 * work.query.shape[2] * work.key.shape[2] * FEATURES
    if hidden > TOO_LARGE:
        raise MissingError(f"not run: its tensor L×S×{FEATURES} alone is {hidden / 1e9:.1f} GB, and it holds several")

    def formula() -> Tensor:
        return _additive_scores(work.query, work.key, work.parameters).softmax(-1) @ work.value

    return differentiated(work, formula)


def _additive_compiled(work: Work) -> Call:
    def formula(query: Tensor, key: Tensor, value: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        return _additive_scores(query, key, parameters).softmax(-1) @ value

    return compiled(work, formula, work.query, work.key, work.value, work.parameters)


def _gaussian_scores(query: Tensor, key: Tensor, parameters: dict[str, Tensor]) -> Tensor:  # noqa: ARG001
    distance = torch.cdist(query, key, compute_mode="donot_use_mm_for_euclid_dist")
    return -0.5 * (distance / BANDWIDTH).square()


def _gaussian(point: Point) -> Work:
    points = (1, 1, point.size, 3)
    return Work(*seeded(points, points, (1, 1, point.size, 1)), scores=_gaussian_scores, pair_flops=3 * 3 + 2)


def _cdist(work: Work) -> Call:
    def formula() -> Tensor:
        return torch.softmax(-0.5 * (torch.cdist(work.query, work.key) / BANDWIDTH).square(), -1) @ work.value

    return differentiated(work, formula)


def _keops(work: Work) -> Call:
    try:
        from pykeops.torch import LazyTensor
    except ImportError:
        raise MissingError("pykeops is not installed") from None
    query, key, value = (t[0, 0].contiguous() for t in (work.query, work.key, work.value))

    def formula() -> Tensor:
        rows, columns = LazyTensor(query[:, None]), LazyTensor(key[None])
        log_weight = ((rows - columns) ** 2).sum(-1) * (-0.5 / BANDWIDTH**2)
        return log_weight.sumsoftmaxweight(LazyTensor(value[None]), dim=1)[None, None]

    try:
        formula()
    except Exception as error:
        raise MissingError(f"KeOps failed: {type(error).__name__}: {str(error).splitlines()[0][:160]}") from error
    return differentiated(work, formula)


register(
    Case(
        name="additive-memory",
        title=f"Additive attention, {FEATURES} features: memory that does not grow with L×S",
        unit="queries and keys",
        build=_additive,
        contenders={
            EAGER: Contender(_additive_formula),
            "regard": by_regard(
                lambda work: {
                    "score": scores.Additive(*(work.parameters[name] for name in ("w_v", "w_q", "w_k"))),
                    "engine": "streaming",
                }
            ),
            COMPILED: Contender(_additive_compiled, compiles=True),
        },
        baseline=EAGER,
        points=(
            *(Point(size, backward, only=(EAGER, "regard")) for backward in (False, True) for size in (256, 512, 1024)),
            Point(2048, rounds=7),
            Point(2048, backward=True, rounds=7),
            Point(8192, only=(EAGER, "regard"), rounds=3),
            Point(8192, backward=True, only=(EAGER, "regard"), rounds=1),
        ),
        quick=16,
        goals=(Goal("memory", 150, 8192), Goal("memory", 150, 8192, backward=True)),
        notes="Engine streaming. At 8,192 nothing is compared, so fewer rounds are run.",
    )
)

register(
    Case(
        name="gaussian",
        title="Gaussian kernel regression in 3-D, one target",
        unit="points and queries",
        build=_gaussian,
        contenders={
            CDIST: Contender(_cdist),
            "regard": by_regard(lambda _: {"score": regard.scores.Gaussian(BANDWIDTH), "engine": "sdpa"}),
            KEOPS: Contender(_keops, compiles=True),
        },
        baseline=CDIST,
        points=(Point(2000), Point(4000), Point(8000)),
        quick=64,
        tolerance=1e-3,
        notes="torch.cdist expands the square and cancels; so 0.1 % of the largest target is called right here.",
    )
)
