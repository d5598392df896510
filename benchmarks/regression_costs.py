"""Fit what ``method="auto"`` chooses by: ``python -m benchmarks.regression_costs`` writes regression/costs.json."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import regard.regression
from benchmarks.costs import fitted
from benchmarks.machine import facts
from regard.regression import NadarayaWatsonRegressor
from regard.regression._sums import evaluator
from regard.regression._sums.fourier import FourierSums, Series
from regard.regression._sums.near import BLOCK, Neighbours, Tiles

TARGET = Path(regard.regression.__file__).with_name("costs.json")
#: Least of so many samples.
SAMPLES = 3


def least(call: Callable[[], object]) -> float:
    """Return the seconds of a call, the least of some."""
    found = []
    for _ in range(SAMPLES):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)


def exact(kernel: str) -> list[float]:
    """Return the rates of comparing all pairs: of a call, a pair, its features, and its values."""
    rng = np.random.default_rng(0)
    rows, seconds = [], []
    for d in (1, 2, 3):
        for N, L, M in (
            (20_000, 1000, 1),
            (20_000, 8000, 1),
            (100_000, 1000, 1),
            (100_000, 4000, 1),
            (100_000, 500, 4),
        ):
            X, y, query = rng.random((N, d)), rng.random((N, M)), rng.random((L, d))
            model = NadarayaWatsonRegressor(kernel, 0.05, method="exact").fit(X, y)
            smoother = model._smoother()
            at, width = torch.from_numpy(query - model._features.center), model._bandwidth(smoother)
            seconds.append(least(lambda s=smoother, q=at, w=width: s.estimate(q, w, peak=kernel == "gaussian")))
            rows.append((1.0, N * L, N * L * d, N * L * (1 + M)))
    return fitted(rows, seconds)


def transforms(way: str, d: int) -> list[float]:
    """Return the rates of a transform of points, or back to queries: of a call, a point, its spread, and the grid."""
    rng = np.random.default_rng(0)
    rows, seconds = [], []
    for count in (20_000, 200_000, 1_000_000):
        for span in {1: (10, 1000, 20_000), 2: (5, 40, 150), 3: (3, 10, 20)}[d]:
            for eps in (1e-8, 1e-11, 1e-14):
                points = list(rng.random((d, count)) * span)
                series = Series(np.zeros(d), np.full(d, float(span)), eps)
                columns = [np.ones(count), rng.normal(size=count)]
                made = FourierSums(series, [each[:1000] for each in points], [each[:1000] for each in columns])
                made.__dict__["_eps_back"] = eps
                if way == "forth":
                    seconds.append(least(lambda p=points, s=series, c=columns: FourierSums(s, p, c)))
                else:
                    seconds.append(least(lambda m=made, p=points: m.at(p, [(0,) * d])))
                spread = count * (math.log(1 / eps) / (math.pi * math.sqrt(0.5)) + 2) ** d
                grid = series.size * 2**d
                rows.append((1.0, count, spread, grid * math.log2(grid)))
    return fitted(rows, seconds)


def tiles() -> list[float]:
    """Return the seconds of putting a point in order, of a look, of a look for each point there is, and of a pair."""
    rng = np.random.default_rng(0)
    order, rows, seconds = [], [], []
    for N in (50_000, 400_000):
        X = rng.random((N, 2))
        smoother = NadarayaWatsonRegressor(bandwidth=1e-4, method="tiles").fit(X, X[:, 0])._smoother(double=True)
        order.append(least(lambda s=smoother: Tiles.of(s.key)) / N)
        made = Tiles.of(smoother.key)
        for L, bandwidth in ((500, 1e-4), (500, 0.02), (4000, 1e-4), (4000, 0.02)):
            own, width = torch.arange(0, N, N // L), torch.full((2,), bandwidth, dtype=torch.float64)
            query = smoother.key[own]
            looks = [(len(some), len(seen)) for some, seen in made._looks(smoother, query, width)]
            seconds.append(least(partial(made.estimate, smoother, query, width, own, lambda *_: None)))
            rows.append((len(looks), len(looks) * float(N), sum(max(some, BLOCK) * seen for some, seen in looks)))
    return [float(f"{np.median(order):.3g}"), *fitted(rows, seconds)]


def neighbours() -> list[float]:
    """Return the seconds of putting a point into a tree, of a call, a query, a pair found, and one for a bandwidth."""
    rng = np.random.default_rng(0)
    tree, rows, seconds = [], [], []
    for N in (50_000, 1_000_000):
        X = rng.random((N, 2))
        smoother = NadarayaWatsonRegressor(bandwidth=1e-4, method="tiles").fit(X, X[:, 0])._smoother(double=True)
        unit = torch.full((2,), 1e-4, dtype=torch.float64)
        tree.append(least(lambda s=smoother, u=unit: Neighbours.of(s, u)) / N)
        made = Neighbours.of(smoother, unit)
        assert made is not None
        for L, times, W in ((20, 1, 1), (2000, 1, 1), (2000, 10, 1), (2000, 30, 1), (2000, 10, 8), (2000, 30, 4)):
            own, width = torch.arange(0, N, N // L), unit.expand(W, 2) * times
            query = smoother.key[own]
            pairs = made.counts(smoother, query, made._radii(smoother, query, width, own)).sum()
            bandwidth = width if W > 1 else width[0]
            seconds.append(least(partial(made.estimate, smoother, query, bandwidth, own, lambda *_: None)))
            rows.append((1.0, float(len(query)), float(pairs), float(pairs) * W))
    return [float(f"{np.median(tree):.3g}"), *fitted(rows, seconds)]


def around(d: int) -> list[float]:
    """Return the seconds of a prediction without its transforms: per call, and per frequency of a transform."""
    rng = np.random.default_rng(0)
    rows, seconds = [], []
    X, query = rng.random((5000, d)), rng.random((5000, d))
    for bandwidth in ((0.1, 0.05, 0.005), (0.1, 0.05, 0.02), (0.1, 0.05, 0.04))[d - 1]:
        model = NadarayaWatsonRegressor(bandwidth=bandwidth, method="nufft").fit(X, X[:, 0])

        def predict(model: NadarayaWatsonRegressor = model) -> None:
            model._evaluator._forget()
            model.predict(query)

        taken = least(predict)
        smoother = model._smoother(double=True)
        width = model._bandwidth(smoother)
        series = model._evaluator._series(smoother, width, False)
        expected = model._evaluator.choose(smoother, len(query), width).seconds["nufft"]
        rows.append((1.0, series.size * 2))
        seconds.append(max(taken - expected, taken / 10))
    return fitted(rows, seconds)


def write(path: Path, rates: dict[str, Any], took: float) -> None:
    """Write the rates, and where they were measured."""
    command = {"command": "python -m benchmarks.regression_costs", "took": f"{took:.0f} s"}
    body = {"machine": facts() | command, "rates": rates}
    path.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, fit and write."""
    parser = argparse.ArgumentParser("python -m benchmarks.regression_costs", description=__doc__)
    parser.add_argument("--out", type=Path, default=TARGET, help="where to write")
    options = parser.parse_args(argv)
    began = time.monotonic()
    rates: dict[str, Any] = {
        "exact": {"all": exact("gaussian"), "compact": exact("epanechikov")},
        **{way: {str(d): transforms(way, d) for d in (1, 2, 3)} for way in ("forth", "back")},
        "tiles": tiles(),
        "neighbours": neighbours(),
        "around": {str(d): [0.0, 0.0] for d in (1, 2, 3)},
    }
    with patch.object(evaluator, "_costs", lambda: rates):
        rates["around"] = {str(d): around(d) for d in (1, 2, 3)}
    write(options.out, rates, time.monotonic() - began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
