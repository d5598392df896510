"""Kernel regression by the estimators: predictions against other libraries, and what they hold."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.cases.kernels import BANDWIDTH, KEOPS, POINTS, STATSMODELS, gaussian_scores, keops, points
from benchmarks.registry import Call, Case, Contender, Goal, MissingError, Point, register
from benchmarks.work import Work

FLOAT64, FLOAT32 = "float64", "float32"
#: Error that is called right, as a share of the largest target (about 4): 1e−8 of a target of 4.
CLOSE = 2.5e-9
#: Training points for each query of the case of memory.
KEYS = 100


def arrays(work: Work) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return training points (S, E), their targets (S,) and the queries (L, E)."""
    return work.key[0, 0].numpy(), work.value[0, 0, :, 0].numpy(), work.query[0, 0].numpy()


def column(found: np.ndarray) -> Tensor:
    """Return predictions (L,) as an output (1, 1, L, 1)."""
    return torch.from_numpy(np.asarray(found))[None, None, :, None]


def in_a_cube(*sizes: int) -> list[Tensor]:
    """Return points (1, 1, size, 3) drawn from a cube, float64: none lies far outside of the others."""
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(1, 1, size, 3, generator=generator, dtype=torch.float64) for size in sizes]


def by_estimator(*, fitted: bool = False, **options: Any) -> Contender:
    """Return regard's estimator: ``fit`` and ``predict``, or ``predict`` of one that is ``fitted`` beforehand."""

    def prepare(work: Work) -> Call:
        from regard.regression import NadarayaWatsonRegressor

        X, y, queries = arrays(work)
        model = NadarayaWatsonRegressor(**options).fit(X, y)
        if fitted:
            return lambda: {"output": column(model.predict(queries))}
        return lambda: {"output": column(model.fit(X, y).predict(queries))}

    return Contender(prepare)


def kernel_reg() -> Callable[..., Any]:
    """Return what makes statsmodels' estimator, or raise."""
    try:
        from statsmodels.nonparametric.kernel_regression import KernelReg
    except ImportError:
        raise MissingError("statsmodels is not installed") from None

    def build(*arguments: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of pandas, about a generator that is not used
            return KernelReg(*arguments, **options)

    return build


def _by_statsmodels(kind: str) -> Callable[[Work], Call]:
    def prepare(work: Work) -> Call:
        build = kernel_reg()
        if work.query.dtype != torch.float64:
            raise MissingError("it calculates in float64")
        X, y, queries = arrays(work)
        model = build(y, X, var_type="ccc", reg_type=kind, bw=[BANDWIDTH] * 3)
        return lambda: {"output": column(model.fit(queries)[0])}

    return prepare


def _predict(point: Point) -> Work:
    dtype = torch.float32 if point.variant == FLOAT32 else torch.float64
    return Work(*(t.to(dtype) for t in points(point.size)), scores=gaussian_scores)


def _wave(key: Tensor) -> Tensor:
    return (4 * key).sum(-1, keepdim=True).sin()


@dataclass
class Line(Work):
    """A line fitted around each query, by its normal equations."""

    def _rows(self, leaves: dict[str, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
        alpha, _ = super()._rows(leaves, rows)
        away = leaves["key"][0, 0] - leaves["query"][0, 0, rows, None]  # (l, S, E)
        design = torch.cat([torch.ones_like(away[..., :1]), away], -1)
        weighed = design.mT * alpha[0, 0, :, None]
        return alpha, torch.linalg.solve(weighed @ design, weighed @ leaves["value"][0, 0])[None, None, :, 0]


def _linear(point: Point) -> Work:
    query, key = in_a_cube(point.size, point.size)
    return Line(query, key, _wave(key), scores=gaussian_scores, features=16)


def _large(point: Point) -> Work:
    dtype = torch.float32 if point.variant == FLOAT32 else torch.float64
    query, key = in_a_cube(max(point.size // KEYS, 1), point.size)
    return Work(*(t.to(dtype) for t in (query, key, _wave(key))), scores=gaussian_scores)


register(
    Case(
        name="regress-predict",
        title="Predictions of a fitted estimator, Gaussian kernel, 3-D",
        unit="points and queries",
        build=_predict,
        contenders={
            STATSMODELS: Contender(_by_statsmodels("lc"), once=True),
            "regard": by_estimator(fitted=True, bandwidth=BANDWIDTH),
            KEOPS: Contender(keops, compiles=True),
        },
        baseline=KEOPS,
        points=(
            Point(20_000, variant=FLOAT64, rounds=5),
            Point(20_000, variant=FLOAT32, only=("regard", KEOPS), rounds=5),
        ),
        quick=64,
        goals=(
            Goal("regress-predict-statsmodels", "speed", 200, 20_000, against=STATSMODELS, variant=FLOAT64),
            Goal("regress-predict-keops", "speed", 8, 20_000, variant=FLOAT64),
            Goal("regress-predict-keops-float32", "speed", 8, 20_000, variant=FLOAT32),
        ),
        bound="",
        tolerance=CLOSE,
        notes=f"{POINTS}; the bandwidth is {BANDWIDTH}. In float64 all must agree with the formula to 1e−8. "
        "statsmodels finds marginal effects besides, calculates in float64 alone, and was called once.",
    )
)

register(
    Case(
        name="regress-line",
        title="Predictions by a local line (`order=1`), Gaussian kernel, 3-D, float64",
        unit="points and queries",
        build=_linear,
        contenders={
            STATSMODELS: Contender(_by_statsmodels("ll")),
            "regard": by_estimator(fitted=True, bandwidth=BANDWIDTH, order=1),
        },
        baseline=STATSMODELS,
        points=(Point(2000, rounds=3),),
        quick=64,
        bound="",
        tolerance=CLOSE,
        notes="Points are drawn from a cube. Both must agree with the normal equations of the formula to 1e−8.",
    )
)

register(
    Case(
        name="regress-memory",
        title=f"Fit and predict, Gaussian kernel, 3-D, one query per {KEYS} training points",
        unit="training points",
        build=_large,
        contenders={"regard": by_estimator(bandwidth=BANDWIDTH)},
        baseline="regard",
        points=tuple(Point(1_000_000, variant=dtype, rounds=1) for dtype in (FLOAT64, FLOAT32)),
        quick=6400,
        goals=(
            Goal("regress-memory", "memory", 200, 1_000_000, variant=FLOAT64),
            Goal("regress-memory-float32", "memory", 200, 1_000_000, variant=FLOAT32),
        ),
        bound="",
        tolerance=1e-5,
        notes="Points are drawn from a cube. What the fitted estimator keeps of the training data counts.",
    )
)
