"""Choosing a bandwidth by cross-validation, and predicting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from benchmarks.cases.kernels import STATSMODELS, distance
from benchmarks.cases.regression import arrays, column, kernel_reg
from benchmarks.registry import Call, Case, Contender, Goal, Point, Result, register
from benchmarks.work import Work

LOO, LEARNED = "regard, loo", "regard, learned"
NOISE = 0.3


def _signal(X: Tensor) -> Tensor:
    return (2 * X[..., :1]).sin() + X[..., 1:2] / 2 + X[..., 2:].square() / 8


class Brute:
    """Leave-one-out errors by the whole matrix of pairs, in float64."""

    def __init__(self, X: Tensor, y: Tensor) -> None:
        self.X, self.y = X, y
        self.squares = [(column[:, None] - column).square().fill_diagonal_(torch.inf) for column in X.T.contiguous()]

    def error(self, bandwidth: Tensor) -> float:
        """Return the mean squared error of predicting each point from all the others."""
        scores = sum(square * (-0.5 / float(h) ** 2) for square, h in zip(self.squares, bandwidth))
        return float((scores.softmax(1) @ self.y - self.y).square().mean())

    def least(self, each: bool) -> float:
        """Return the least error of a multiple of the spreads, or of a bandwidth for ``each`` feature."""
        from scipy.optimize import minimize, minimize_scalar

        spread = self.X.std(0, correction=0)
        grid = np.geomspace(0.02, 10, 60)
        errors = [self.error(spread * float(factor)) for factor in grid]
        at = int(np.argmin(errors))

        def error_of(logs: np.ndarray) -> float:
            return self.error(spread * torch.from_numpy(np.exp(np.broadcast_to(logs, (len(spread),)).copy())))

        begin = np.log(grid[at])
        if each:
            found = minimize(error_of, np.full(len(spread), begin), method="Nelder-Mead", options={"xatol": 1e-3})
        else:
            found = minimize_scalar(error_of, bounds=(begin - 0.2, begin + 0.2), method="bounded")
        return min(float(found.fun), errors[at])


@lru_cache(maxsize=4)
def _least(size: int, each: bool) -> float:
    X, y, _ = _data(size)
    return Brute(X, y).least(each)


def _data(size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    X, queries = (torch.randn(size, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    return [X, _signal(X) + NOISE * torch.randn(size, 1, generator=generator, dtype=torch.float64), queries]


@dataclass
class CrossValidated(Work):
    """Predictions with a bandwidth of one's own choice: the formula with that one, and how good it is.

    ``output`` is a prediction's distance from the formula's with the bandwidth that was chosen, on top of 1; ``choice``
    that bandwidth's leave-one-out error over the least there is, by brute force; 1 where it is less than that.
    """

    each: bool = False
    ones: Tensor = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ones = torch.ones(1, 1, self.query.shape[2], 1, dtype=torch.float64)

    def rows(self) -> Tensor:
        return torch.arange(self.query.shape[2])

    def expected(self, rows: Tensor, dtype: torch.dtype, *, weights: bool = False) -> Result:  # noqa: ARG002
        return {"output": self.ones, "choice": torch.ones(1, dtype=torch.float64)}

    def achieved(self, result: Result) -> Result:
        bandwidth, X, y = result["bandwidth"], self.key[0, 0], self.value[0, 0]
        formula = torch.softmax(-0.5 * distance(self.query[0, 0] / bandwidth, X / bandwidth).square(), 1) @ y
        error = Brute(X, y).error(bandwidth) / _least(len(X), self.each)
        choice = torch.tensor([max(error, 1.0)], dtype=torch.float64)
        return {"output": self.ones + (result["output"] - formula), "choice": choice}


def _build(point: Point) -> Work:
    X, y, queries = (t[None, None] for t in _data(point.size))
    return CrossValidated(queries, X, y, each=True)


def _one_multiple(point: Point) -> Work:
    return replace(_build(point), each=False)


def _by_regard(bandwidth: str) -> Callable[[Work], Call]:
    def prepare(work: Work) -> Call:
        from regard.regression import NadarayaWatsonRegressor

        X, y, queries = arrays(work)

        def call() -> Result:
            model = NadarayaWatsonRegressor(bandwidth=bandwidth).fit(X, y)
            return {"output": column(model.predict(queries)), "bandwidth": torch.from_numpy(model.bandwidth_)}

        return call

    return prepare


def _by_statsmodels(work: Work) -> Call:
    build = kernel_reg()
    X, y, queries = arrays(work)

    def call() -> Result:
        model = build(y, X, var_type="ccc", reg_type="lc", bw="cv_ls")
        return {"output": column(model.fit(queries)[0]), "bandwidth": torch.from_numpy(np.abs(model.bw))}

    return call


BOTH = ("output", "choice")

register(
    Case(
        name="regress-fit",
        title="Fit with a cross-validated bandwidth and predict, Gaussian kernel, 3-D, float64",
        unit="points and queries",
        build=_build,
        contenders={
            STATSMODELS: Contender(_by_statsmodels, does=BOTH, once=True),
            LEARNED: Contender(_by_regard("learned"), does=BOTH),
            LOO: Contender(_by_regard("loo"), does=BOTH, build=_one_multiple),
        },
        baseline=STATSMODELS,
        points=(Point(2000, rounds=5),),
        quick=200,  # of fewer points, learned bandwidths stay near where they began, on purpose
        goals=(
            Goal("regress-fit-learned", "speed", 50, 2000, contender=LEARNED),
            Goal("regress-fit-loo", "speed", 50, 2000, contender=LOO),
        ),
        bound="",
        tolerance=1e-3,
        notes="Inputs are normally distributed, outputs a smooth function with noise. statsmodels "
        '(`bw="cv_ls"`) and `learned` choose a bandwidth for each of the 3 features, `loo` one multiple of their '
        "standard deviations, which is less work. Results are right if predictions agree with the formula at the "
        "chosen bandwidth (*output*), and if that bandwidth's leave-one-out error is at most 0.1 % above the minimum "
        "found by brute force (*choice*). statsmodels also computes marginal effects, and is called once.",
    )
)
