"""Quality of selected bandwidths: ``python -m benchmarks.bandwidths``, into benchmarks/results.

Compares the error of ``bandwidth="loo"`` with the minimum over a dense grid by brute-force leave-one-out in NumPy, and
``"learned"`` with ``"loo"`` on data with irrelevant features.
"""

from __future__ import annotations

import datetime
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.machine import ROOT, facts
from regard.regression import NadarayaWatsonRegressor

RESULTS = ROOT / "benchmarks" / "results"
#: Multiples of the standard deviations that brute force tries.
MULTIPLES = np.geomspace(0.01, 10.0, 400)
SEEDS, TESTED = 5, 2000

#: Kernels of the squared distance in bandwidths, written down apart from regard's.
KERNELS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "gaussian": lambda square: np.exp(-0.5 * square),
    "epanechnikov": lambda square: np.maximum(1 - square, 0),
    "triangular": lambda square: np.maximum(1 - np.sqrt(square), 0),
}


def sine(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return one feature and a noisy sine of it."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(0, 6, (n, 1))
    return X, np.sin(X[:, 0]) + 0.3 * rng.normal(size=n)


def smooth(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return three features and a noisy function of all."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (n, 3))
    return X, np.sin(2 * X[:, 0]) + X[:, 1] ** 2 + 0.5 * X[:, 2] + 0.2 * rng.normal(size=n)


def left_out_error(
    X: np.ndarray, y: np.ndarray, bandwidth: np.ndarray, kernel: str = "gaussian", order: int = 0
) -> float:
    """Return the mean squared error of predicting each point by a fit to all the others, one fit after the other."""
    errors = []
    for i in range(len(X)):
        others = np.arange(len(X)) != i
        away = X[others] - X[i]
        square = ((away / bandwidth) ** 2).sum(1)
        # A common factor changes nothing, and keeps the Gaussian from underflow.
        weight = KERNELS[kernel](square - square.min() if kernel == "gaussian" else square)
        target = y[others]
        if not weight.any():
            guess = target[square.argmin()]
        elif order:
            root = np.sqrt(weight)
            design = np.column_stack([np.ones(len(away)), away / bandwidth]) * root[:, None]
            guess = np.linalg.lstsq(design, root * target, rcond=None)[0][0]
        else:
            guess = weight @ target / weight.sum()
        errors.append((guess - y[i]) ** 2)
    return float(np.mean(errors))


@dataclass(frozen=True)
class Search:
    """Results of ``"loo"`` and of brute force; bandwidths are multiples of the standard deviations."""

    data: str
    points: int
    features: int
    kernel: str
    order: int
    tried: int
    chosen: float
    error: float
    best: float
    least: float

    @property
    def above(self) -> float:
        """The relative excess of the error over the minimum."""
        return self.error / self.least - 1


def search(
    data: str, X: np.ndarray, y: np.ndarray, kernel: str, order: int, multiples: np.ndarray = MULTIPLES
) -> Search:
    """Compare ``bandwidth="loo"`` with brute force; both errors are brute force's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about points without any other in reach
        model = NadarayaWatsonRegressor(kernel, "loo", order=order).fit(X, y)
    spread = X.std(0)
    errors = [left_out_error(X, y, spread * multiple, kernel, order) for multiple in multiples]
    best = int(np.argmin(errors))
    return Search(
        data, *X.shape, kernel, order, len(model.loo_curve_.errors), float(model.bandwidth_[0] / spread[0]),
        left_out_error(X, y, model.bandwidth_, kernel, order), float(multiples[best]), errors[best],
    )  # fmt: skip


def two_of_six(n: int, seed: int) -> tuple[np.ndarray, np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Return six features, of which two matter, with targets and the function behind them."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 6))

    def signal(X: np.ndarray) -> np.ndarray:
        return np.sin(2 * X[:, 0]) + 0.5 * X[:, 1]

    return X, signal(X) + 0.2 * rng.normal(size=n), signal


def friedman(n: int, seed: int) -> tuple[np.ndarray, np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Return Friedman's first problem (1991): ten features, of which five matter."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(size=(n, 10))

    def signal(X: np.ndarray) -> np.ndarray:
        return 10 * np.sin(np.pi * X[:, 0] * X[:, 1]) + 20 * (X[:, 2] - 0.5) ** 2 + 10 * X[:, 3] + 5 * X[:, 4]

    return X, signal(X) + rng.normal(size=n), signal


PROBLEMS = {"2 of 6 features matter": two_of_six, "Friedman's first, 5 of 10 features matter": friedman}


@dataclass(frozen=True)
class Margin:
    """Root mean squared errors on fresh points, against the function without noise, one for each seed."""

    data: str
    points: int
    loo: tuple[float, ...]
    learned: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """How many times as large the error of ``"loo"`` is."""
        return [one / each for one, each in zip(self.loo, self.learned)]


def margin(data: str, n: int, seeds: int = SEEDS, tested: int = TESTED) -> Margin:
    """Compare one width for all features with a learned one for each."""
    found: dict[str, list[float]] = {"loo": [], "learned": []}
    for seed in range(seeds):
        X, y, signal = PROBLEMS[data](n, seed)
        fresh = PROBLEMS[data](tested, seed + seeds)[0]
        for way, errors in found.items():
            guess = NadarayaWatsonRegressor(bandwidth=way).fit(X, y).predict(fresh)
            errors.append(float(np.sqrt(np.mean((guess - signal(fresh)) ** 2))))
    return Margin(data, n, tuple(found["loo"]), tuple(found["learned"]))


def markdown(searches: list[Search], margins: list[Margin], where: dict[str, str]) -> str:
    """Return the tables."""
    lines = ["# Bandwidths that are chosen", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in where.items()]
    lines += [
        "", '## `"loo"` against brute force', "",
        f"Leave-one-out errors, of the bandwidth found and the least over {len(MULTIPLES)} multiples of the standard "
        "deviations; both by predicting each point anew from all the others, in NumPy.", "",
        "| data | points | features | kernel | order | tried | found at | error | least at | least | above |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    lines += [
        f"| {s.data} | {s.points} | {s.features} | {s.kernel} | {s.order} | {s.tried} | {s.chosen:.4f} | {s.error:.6g} "
        f"| {s.best:.4f} | {s.least:.6g} | {s.above:+.3%} |"
        for s in searches
    ]
    lines += [
        "", '## `"learned"` against `"loo"`', "",
        f"Root mean squared errors on {TESTED:,} fresh points against the function without noise, means over {SEEDS} "
        "seeds; the margin is how many times as large the error of `loo` is, in the mean and at the least.", "",
        "| data | points | loo | learned | margin | least margin |", "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    lines += [
        f"| {m.data} | {m.points} | {np.mean(m.loo):.4f} | {np.mean(m.learned):.4f} | {np.mean(m.ratios):.2f} × "
        f"| {min(m.ratios):.2f} × |"
        for m in margins
    ]
    return "\n".join(lines) + "\n"


def marks(searches: list[Search], margins: list[Margin]) -> dict[str, str]:
    """Return the numbers for documentation texts, by name."""
    above = max(0.0, *(s.above for s in searches))
    ahead = ", ".join(f"{np.mean(m.ratios):.1f} × ({m.data})" for m in margins)
    return {"bandwidth-loo": f"{above:.2%} higher", "bandwidth-learned": ahead}


def main(folder: Path = RESULTS) -> int:
    """Calculate, print and write; return 1 where ``"loo"`` misses the minimum by more than 1 %."""
    where = facts()
    where["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    searches = [
        search("sine", *sine(200), "gaussian", 0),
        search("sine", *sine(200), "gaussian", 1),
        search("sine", *sine(200), "triangular", 0),
        search("smooth", *smooth(500), "gaussian", 0),
        search("smooth", *smooth(500), "gaussian", 1),
        search("smooth", *smooth(500), "epanechnikov", 0),
    ]
    margins = [margin(data, 500) for data in PROBLEMS]
    text = markdown(searches, margins, where)
    print(text)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bandwidths.md").write_text(text, encoding="utf-8")
    numbers = {
        "machine": where,
        "marks": marks(searches, margins),
        "searches": [asdict(s) | {"above": s.above} for s in searches],
        "margins": [asdict(m) | {"ratios": m.ratios} for m in margins],
    }
    (folder / "bandwidths.json").write_text(json.dumps(numbers, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return int(any(s.above > 0.01 for s in searches))


if __name__ == "__main__":
    sys.exit(main())
