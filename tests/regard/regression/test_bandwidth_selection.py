"""Rules of thumb, and what the searches say of themselves."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from pairwise import across
from reference import weight
from scipy.stats import gaussian_kde

import regard
from regard import RegardWarning
from regard.regression import NadarayaWatsonRegressor
from regard.regression._bandwidth import LeaveOneOut, ParabolaSearch
from regard.regression._sums import smoother as _kernel_smoother
from regard.regression._sums.smoother import resolve_kernel
from regard.scores.kernels import kernels


def made(n=150, width=2, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, width)) * np.arange(1, width + 1)
    return X, np.sin(X[:, 0]) + 0.2 * rng.normal(size=n)


@pytest.mark.parametrize("rule", ["scott", "silverman"])
@pytest.mark.parametrize("width", [1, 3])
def test_rules_are_scipys(rule, width):
    X, y = made(width=width)
    model = NadarayaWatsonRegressor(bandwidth=rule).fit(X, y)
    factor = gaussian_kde(X.T, rule).factor
    np.testing.assert_allclose(model.bandwidth_, factor * X.std(0))


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("width", [1, 2, 3])
def test_kernels_of_equal_spread(kernel, width):
    if math.isinf(kernels()[kernel].variance(width)):
        pytest.skip("its tails are too heavy for a variance")
    # The variance along the first coordinate of the kernel as a density, summed over a grid.
    axis = np.linspace(-1, 1, 81) * (1.05 if kernels()[kernel].compact else 12)
    axis = axis if width < 3 else axis[::2]
    grid = np.stack(np.meshgrid(*[axis] * width, indexing="ij"), -1)
    weights = weight(kernel, grid)
    variance = (weights * grid[..., 0] ** 2).sum() / weights.sum()
    assert resolve_kernel("test", kernel).canonical_factor(width) ** 2 * variance == pytest.approx(1, rel=0.08)


def test_the_curve_holds_the_minimum():
    X, y = made()
    model = NadarayaWatsonRegressor(bandwidth="loo").fit(X, y)
    curve = model.loo_curve_
    assert curve.bandwidths.shape == (len(curve.errors), 2)
    assert (np.diff(curve.bandwidths[:, 0]) > 0).all()
    assert model.loo_error_ == curve.errors.min() == pytest.approx(model.loo_error())
    assert (curve.bandwidths[curve.errors.argmin()] == model.bandwidth_).all()
    for bandwidth, error in zip(curve.bandwidths[::7], curve.errors[::7]):
        assert model.loo_error(bandwidth) == pytest.approx(error)
    # One multiple of the features' spreads.
    np.testing.assert_allclose(model.bandwidth_[1] / model.bandwidth_[0], X[:, 1].std() / X[:, 0].std())


@pytest.mark.campaign(keep=7)
@across({"nearest": [True, False], "order": [0, 1], "kernel": [*kernels(), "constant", lambda u: 1 / (1 + u**4)]})
def test_errors_of_many_bandwidths_are_those_of_each(kernel, order, nearest, monkeypatch):
    X, y = made(n=60)
    sample_weight = np.random.default_rng(0).uniform(0.5, 2, 60)
    model = NadarayaWatsonRegressor(kernel, 1.0, order=order).fit(X, np.stack([y, X[:, 1]], 1), sample_weight)
    bandwidths = torch.logspace(-3, 1, 9, dtype=torch.float64)[:, None] * torch.tensor([1.0, 2.0])
    rel = 1e-6 if order else 1e-9  # a line through hardly more than one point is told by what rounding leaves
    for rows in (None, torch.tensor([3, 50, 7])):
        loo = LeaveOneOut(model._smoother(), nearest, model._evaluator, rows)
        alone = [float(loo.error(bandwidth)) for bandwidth in bandwidths]
        assert list(loo.errors(bandwidths)) == pytest.approx(alone, rel=rel)
        with monkeypatch.context() as patched:
            patched.setattr("regard.regression._sums.smoother.PAIRS", 1)
            patched.setattr("regard.regression._sums.smoother.ROWS", 150)
            assert list(loo.errors(bandwidths)) == pytest.approx(alone, rel=rel)


def searched(function, low, high, center, step, closer=8):
    search, seen = ParabolaSearch(low, high, center, step, closer), {}
    while search.step:
        seen |= {place: function(place) for place in search.places}
        search.advance(seen)
    return search.center, len(seen)


def test_a_parabola_is_searched_to_its_vertex_within_bounds():
    assert searched(lambda x: (x - 331) ** 2, 0, 800, 400, 400) == (331, 8)
    assert searched(lambda x: (x + 9) ** 2, 0, 800, 400, 400)[0] == 0
    assert searched(lambda x: -x, 0, 800, 400, 400)[0] == 800
    assert searched(lambda x: 1.0, 0, 800, 400, 400)[0] == 400
    assert searched(lambda x: np.inf, 0, 800, 0, 400)[0] == 0
    assert abs(searched(lambda x: np.cosh((x - 517) / 100), 0, 800, 400, 400)[0] - 517) <= 1
    assert abs(searched(lambda x: abs(x - 517), 0, 800, 400, 400, closer=3)[0] - 517) <= 1


def test_few_points_share_calls(monkeypatch):
    calls = []
    monkeypatch.setattr(_kernel_smoother, "attention", lambda *a, **o: calls.append(a) or regard.attention(*a, **o))
    monkeypatch.setattr("regard.regression._training.FEWEST_IN_SEQUENCE", 1000)
    X, y = made(width=1)
    model = NadarayaWatsonRegressor(bandwidth="loo").fit(X, y)
    assert len(model.loo_curve_.errors) > 20
    assert len(calls) < 8


@pytest.mark.parametrize("kernel", [name for name, kernel in kernels().items() if kernel.smooth])
@pytest.mark.parametrize("order", [0, 1])
def test_the_error_has_the_gradient_that_learning_follows(kernel, order):
    X, y = made(n=60)
    model = NadarayaWatsonRegressor(kernel, [1.5, 3.0], order=order, engine="reference").fit(X, y)
    loo = LeaveOneOut(model._smoother(), nearest=True, evaluator=model._evaluator)
    bandwidth = torch.tensor([1.5, 3.0], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(loo.error(bandwidth), bandwidth)
    for i in range(2):
        step = torch.zeros(2, dtype=torch.float64)
        step[i] = 1e-6
        with torch.no_grad():
            rise = (loo.error(bandwidth + step) - loo.error(bandwidth - step)) / 2e-6
        assert slope[i] == pytest.approx(float(rise), rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("order", [0, 1])
def test_learning_never_ends_above_where_it_began(order):
    X, y = made()
    searched = NadarayaWatsonRegressor(bandwidth="loo", order=order).fit(X, y)
    learned = NadarayaWatsonRegressor(bandwidth="learned", order=order).fit(X, y)
    assert learned.loo_error_ <= searched.loo_error_
    assert learned.loo_error_ == pytest.approx(learned.loo_error(), rel=1e-6)
    short = NadarayaWatsonRegressor(bandwidth="learned", order=order, max_iter=1).fit(X, y)
    assert short.n_iter_ == 1 <= learned.n_iter_ < 200


def test_learning_may_be_asked_for_without_gradients():
    X, y = made(n=60)
    expected = NadarayaWatsonRegressor(bandwidth="learned").fit(X, y).bandwidth_
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert (NadarayaWatsonRegressor(bandwidth="learned").fit(X, y).bandwidth_ == expected).all()


@pytest.mark.parametrize("kernel", [lambda u: (u < 1).double(), lambda u: np.exp(-u.numpy())])
def test_a_kernel_without_a_gradient_is_not_learned(kernel):
    X, y = made(n=30)
    with pytest.raises(ValueError, match="kernel must have weights that are differentiable in torch"):
        NadarayaWatsonRegressor(kernel, bandwidth="learned").fit(X, y)


@pytest.mark.slow
@pytest.mark.parametrize("order", [0, 1])
def test_parts_make_no_difference(order, monkeypatch):
    X, y = made(n=90)
    sample_weight = np.random.default_rng(0).uniform(0.5, 2, 90)
    whole = NadarayaWatsonRegressor(bandwidth="learned", order=order).fit(X, y, sample_weight)
    monkeypatch.setattr("regard.regression._sums.smoother.ROWS", 17)
    monkeypatch.setattr("regard.regression._sums.smoother.PAIRS", 1)
    monkeypatch.setattr("regard.regression._sums.smoother.COLUMNS", 1)
    parts = NadarayaWatsonRegressor(bandwidth="learned", order=order).fit(X, y, sample_weight)
    np.testing.assert_allclose(parts.loo_error(), whole.loo_error(), rtol=1e-6)
    np.testing.assert_allclose(parts.loo_error([1.0, 2.0]), whole.loo_error([1.0, 2.0]), rtol=1e-12)
    np.testing.assert_allclose(parts.bandwidth_, whole.bandwidth_, rtol=1e-3)


def test_a_rule_says_what_it_takes_for_the_number_of_points():
    X, y = made(n=60)
    with pytest.warns(RegardWarning, match="sample_weight counts repetitions and sums to 1 for 60 rows"):
        NadarayaWatsonRegressor().fit(X, y, np.full(60, 1 / 60))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NadarayaWatsonRegressor().fit(X, y, np.full(60, 1.0))
        NadarayaWatsonRegressor(bandwidth="loo").fit(X, y, np.full(60, 1 / 60))


@pytest.mark.slow
def test_a_subsample_is_seeded_and_near():
    X, y = made(n=800)
    whole = NadarayaWatsonRegressor(bandwidth="loo").fit(X, y)
    for way in ("loo", "learned"):
        some, same = (NadarayaWatsonRegressor(bandwidth=way, subsample=200, random_state=3).fit(X, y) for _ in range(2))
        assert (some.bandwidth_ == same.bandwidth_).all()
        assert whole.loo_error(some.bandwidth_) < 1.1 * whole.loo_error_
    other = NadarayaWatsonRegressor(bandwidth="loo", subsample=200, random_state=np.random.RandomState(5)).fit(X, y)
    assert other.bandwidth_[0] != some.bandwidth_[0]


def test_a_look_at_some_finds_the_minimum_over_all(monkeypatch):
    X, y = made(n=600)
    exact = NadarayaWatsonRegressor(bandwidth="loo").fit(X, y)
    monkeypatch.setattr("regard.regression._bandwidth.COARSE", 300)
    looked = NadarayaWatsonRegressor(bandwidth="loo", random_state=0).fit(X, y)
    assert looked.loo_error_ == pytest.approx(exact.loo_error_, rel=1e-3)


class TestLeftOut:
    def test_points_that_nobody_else_reaches(self):
        X, y = [[0.0], [0.5], [9.0]], [1.0, 2.0, 6.0]
        nearest = NadarayaWatsonRegressor("boxcar", 1.0).fit(X, y)
        np.testing.assert_allclose(nearest.loo_predict(), [2.0, 1.0, 2.0])
        mean = NadarayaWatsonRegressor("boxcar", 1.0, empty="mean").fit(X, y)
        np.testing.assert_allclose(mean.loo_predict(), [2.0, 1.0, 1.5])
        assert mean.loo_error() == pytest.approx((1 + 1 + 4.5**2) / 3)
        weighed = NadarayaWatsonRegressor("boxcar", 1.0, empty="mean").fit(X, y, [0.5, 1.5, 1.0])
        np.testing.assert_allclose(weighed.loo_predict(), [2.0, 1.0, 7 / 4])
        counted = NadarayaWatsonRegressor("boxcar", 1.0, empty="mean").fit(X, y, [1.0, 3.0, 2.0])
        np.testing.assert_allclose(counted.loo_predict(), [2.0, 5 / 3, 6.0], err_msg="other repetitions stay")
        nothing = NadarayaWatsonRegressor("boxcar", 1.0, empty="nan").fit(X, y)
        np.testing.assert_allclose(nothing.loo_predict(), [2.0, 1.0, np.nan])
        assert nothing.loo_error() == mean.loo_error()
        with pytest.raises(ValueError, match=r"reach \(empty='raise'\), got 1 of 3 without a neighbour in reach"):
            NadarayaWatsonRegressor("boxcar", 1.0, empty="raise").fit(X, y).loo_predict()

    def test_rows_without_weight(self):
        X, y = [[0.0], [0.5], [0.7]], [1.0, 2.0, 6.0]
        model = NadarayaWatsonRegressor(bandwidth=1.0).fit(X, y, [0.5, 0.0, 1.5])
        np.testing.assert_allclose(model.loo_predict(), [6.0, np.nan, 1.0])
        assert model.loo_error() == pytest.approx(25)

    def test_a_name_is_no_bandwidth_here(self):
        model = NadarayaWatsonRegressor().fit(*made())
        with pytest.raises(ValueError, match="bandwidth must be a number, or one for each feature, got 'loo'"):
            model.loo_error("loo")

    @pytest.mark.parametrize("way", ["loo", "learned"])
    def test_one_point(self, way):
        with pytest.raises(ValueError, match=f"X must have at least 2 rows for bandwidth='{way}', got n_samples = 1"):
            NadarayaWatsonRegressor(bandwidth=way).fit([[0.0]], [1.0])
