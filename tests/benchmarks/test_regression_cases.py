"""What is called right where every contender chooses a bandwidth of its own, and other formulas of the cases."""

from __future__ import annotations

import benchmarks.cases  # noqa: F401
import numpy as np
import pytest
import torch
from benchmarks.bandwidths import left_out_error
from benchmarks.cases import regression_fit, regression_neighbours
from benchmarks.check import Checker
from benchmarks.registry import CASES, Point
from benchmarks.work import Work


def chosen(work: Work, bandwidth: torch.Tensor, off: float = 0.0):
    """Return a contender that chose a bandwidth, and predicts with it."""
    away = (work.query[0, 0, :, None] - work.key[0, 0]) / bandwidth
    output = (-0.5 * away.square().sum(-1)).softmax(-1) @ work.value[0, 0] + off
    return lambda: {"output": output[None, None], "bandwidth": bandwidth}


def test_a_chosen_bandwidth_must_be_near_the_best_and_predictions_its_own() -> None:
    case = CASES["regress-fit"]
    work = case.build(Point(300))  # with fewer rows, learning holds back on purpose
    checker = Checker(work, case.tolerance)
    X, y = work.key[0, 0], work.value[0, 0]
    good = torch.from_numpy(case.contenders[regression_fit.LEARNED].prepare(work)()["bandwidth"].numpy())
    wrong = {name: error.wrong for name, error in checker.errors(chosen(work, good)).items()}
    assert wrong == {"choice": False, "output": False}
    assert checker.errors(chosen(work, good, off=0.01))["output"].wrong
    far = checker.errors(chosen(work, good * 1.5))
    assert far["choice"].wrong and not far["output"].wrong
    brute = regression_fit.Brute(X, y).error(good * 1.5)
    assert brute == pytest.approx(left_out_error(X.numpy(), y[:, 0].numpy(), good.numpy() * 1.5))
    assert far["choice"].found == pytest.approx(brute / regression_fit.Brute(X, y).least(True) - 1, rel=1e-3)


def test_one_multiple_of_the_spreads_is_no_better_than_a_bandwidth_for_each_feature() -> None:
    work = CASES["regress-fit"].build(Point(80))
    brute = regression_fit.Brute(work.key[0, 0], work.value[0, 0])
    assert brute.least(True) <= brute.least(False)


def test_the_formula_of_a_line_is_the_least_squares_one() -> None:
    work = CASES["regress-line"].build(Point(40))
    found = work.expected(torch.arange(40), torch.float64)["output"][0, 0, :, 0].numpy()
    query, key, value = (t[0, 0].numpy() for t in (work.query, work.key, work.value))
    for i in (0, 17, 39):
        away = key - query[i]
        root = np.exp(-0.25 * (away**2).sum(1) / 0.25**2)
        design = np.column_stack([np.ones(40), away]) * root[:, None]
        assert found[i] == pytest.approx(np.linalg.lstsq(design, root * value[:, 0], rcond=None)[0][0], abs=1e-9)


@pytest.mark.parametrize("size", [200, 5000])
def test_compact_kernels_and_neighbours_reach_one_percent(size: int) -> None:
    case = CASES["regress-neighbours"]
    point = Point(size, variant=regression_neighbours.BOXCAR)
    work = case.build(point)
    square = torch.cdist(work.query[0, 0], work.key[0, 0])
    within = (square <= regression_neighbours.reach(work)).sum(1)
    assert int(within.min()) >= 1  # no query is without a point
    if size > regression_neighbours.FEW:
        assert float(within.double().mean()) == pytest.approx(0.01 * size, rel=0.1)
    nearest = case.work(point, regression_neighbours.ONE)
    scores = nearest.scores(nearest.query[:, :, :9], nearest.key, {})
    assert (scores.isfinite().sum(-1) == regression_neighbours.count(work)).all()
