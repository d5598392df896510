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

import numpy as np
import torch

from benchmarks.costs import fitted
from benchmarks.machine import facts
from regard.regression import NadarayaWatsonRegressor, _plan
from regard.regression._fourier_sums import FourierSums, Series
from regard.regression._tiles import Tiles

TARGET = Path(_plan.__file__).with_name("costs.json")
#: Least of so many samples.
SAMPLES = 2


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
    for count in (20_000, 200_000):
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
    """Return the seconds of putting a point in order, of a look, and of a look for each point there is."""
    rng = np.random.default_rng(0)
    order, rows, seconds = [], [], []
    for N in (50_000, 400_000):
        X = rng.random((N, 2))
        model = NadarayaWatsonRegressor(bandwidth=1e-4, method="tiles").fit(X, X[:, 0])
        smoother = model._smoother(double=True)
        width, query = model._bandwidth(smoother), smoother.key[:: N // 500]
        order.append(least(lambda s=smoother: Tiles.of(s.key)) / N)
        made = Tiles.of(smoother.key)
        looks = sum(1 for _ in made._looks(smoother, query, width))
        seconds.append(least(partial(made.estimate, smoother, query, width, None, lambda *_: None, peak=True)) / looks)
        rows.append((1.0, float(N)))
    return [float(f"{np.median(order):.3g}"), *fitted(rows, seconds)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, fit and write."""
    parser = argparse.ArgumentParser("python -m benchmarks.regression_costs", description=__doc__)
    parser.add_argument("--out", type=Path, default=TARGET, help="where to write")
    options = parser.parse_args(argv)
    began = time.monotonic()
    rates = {
        "exact": {"all": exact("gaussian"), "compact": exact("epanechikov")},
        **{way: {str(d): transforms(way, d) for d in (1, 2, 3)} for way in ("forth", "back")},
        "tiles": tiles(),
    }
    command = {"command": "python -m benchmarks.regression_costs", "took": f"{time.monotonic() - began:.0f} s"}
    body = {"machine": facts() | command, "rates": rates}
    options.out.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
