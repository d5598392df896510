"""Kernels that reach few points, compared with scikit-learn's nearest neighbours."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.cases.kernels import REACHED, distance
from benchmarks.cases.regression import arrays, by_estimator, column, in_a_cube
from benchmarks.registry import Call, Case, Contender, Goal, Point, register
from benchmarks.work import Work

RADIUS = "RadiusNeighborsRegressor"
ONE, TWO = "KNeighborsRegressor, 1 job", "KNeighborsRegressor, 2 jobs"
#: Up to this size, some query might be out of every point's reach.
FEW = 4096
BOXCAR, EPANECHNIKOV = "boxcar", "Epanechnikov"


def reach(work: Work) -> float:
    """Return the radius within which a share :data:`REACHED` of the pairs lies, on average."""
    some = distance(work.query[0, 0, :512], work.key[0, 0])
    radius = float(some.flatten().kthvalue(math.ceil(REACHED * some.numel())).values)
    if len(work.query[0, 0]) <= FEW:
        radius = max(radius, 1.01 * float(distance(work.query[0, 0], work.key[0, 0]).amin(1).amax()))
    return radius


def count(work: Work) -> int:
    """Return how many points such a share is."""
    return max(round(REACHED * work.key.shape[2]), 1)


def _points(point: Point) -> Work:
    query, key = in_a_cube(point.size, point.size)
    return Work(query, key, (4 * key).sum(-1, keepdim=True).sin(), kernel=point.variant)


def _within(point: Point) -> Work:
    work = _points(point)
    radius = reach(work)

    def log_weight(query: Tensor, key: Tensor, parameters: dict[str, Tensor]) -> Tensor:  # noqa: ARG001
        square = (distance(query, key) / radius).square()
        return ((square <= 1).to(square) if point.variant == BOXCAR else (1 - square).clamp_min(0)).log()

    return replace(work, scores=log_weight)


def _nearest(point: Point) -> Work:
    work = _points(point)
    k = count(work)

    def log_weight(query: Tensor, key: Tensor, parameters: dict[str, Tensor]) -> Tensor:  # noqa: ARG001
        away = distance(query, key)
        weight = torch.zeros_like(away) if point.variant == BOXCAR else -away.log()
        return weight.masked_fill(away > away.kthvalue(k, -1, keepdim=True).values, -torch.inf)

    return replace(work, scores=log_weight)


def _by_regard(work: Work) -> Call:
    kernel = "boxcar" if work.kernel == BOXCAR else "epanechnikov"
    return by_estimator(kernel=kernel, bandwidth=reach(work)).prepare(work)


def _by_radius(work: Work) -> Call:
    from sklearn.neighbors import RadiusNeighborsRegressor

    X, y, queries = arrays(work)
    radius = reach(work)

    def paraboloid(distances: np.ndarray) -> np.ndarray:  # an array of arrays
        return 1 - (distances / radius) ** 2

    model = RadiusNeighborsRegressor(radius, weights="uniform" if work.kernel == BOXCAR else paraboloid)
    return lambda: {"output": column(model.fit(X, y).predict(queries))}


def _by_neighbours(jobs: int) -> Contender:
    def prepare(work: Work) -> Call:
        from sklearn.neighbors import KNeighborsRegressor

        X, y, queries = arrays(work)
        weights = "uniform" if work.kernel == BOXCAR else "distance"
        model = KNeighborsRegressor(count(work), weights=weights, algorithm="kd_tree", n_jobs=jobs)
        return lambda: {"output": column(model.fit(X, y).predict(queries))}

    return Contender(prepare, build=_nearest)


register(
    Case(
        name="regress-neighbours",
        title="Fit and predict with a kernel that reaches 1 % of the points, 3-D, float64",
        unit="points and queries",
        build=_within,
        contenders={
            ONE: _by_neighbours(1),
            TWO: _by_neighbours(2),
            "regard": Contender(_by_regard),
            RADIUS: Contender(_by_radius),
        },
        baseline=ONE,
        points=(
            Point(20_000, variant=BOXCAR, rounds=3),
            Point(20_000, variant=EPANECHNIKOV, rounds=3),
        ),
        quick=200,
        goals=tuple(
            Goal(f"regress-neighbours-{name}{jobs}", "time", 1.0, 20_000, against=who, variant=variant)
            for name, variant in (("boxcar", BOXCAR), ("epanechnikov", EPANECHNIKOV))
            for jobs, who in (("", TWO), ("-1-job", ONE))
        ),
        bound="",
        tolerance=1e-8,
        notes=f"Points are drawn from a cube. KNeighborsRegressor is a yardstick with other work: {REACHED:.0%} of "
        "the points (k = 200 at 20,000) are its neighbours, with uniform weights beside the boxcar and weights by "
        "distance beside Epanechnikov, found by a k-d tree. RadiusNeighborsRegressor does the same work as regard.",
    )
)
