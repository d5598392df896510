"""Every method against float64 sums: what it returns holds its bound, or is exact."""

from __future__ import annotations

import pickle
from contextlib import contextmanager
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import across
from reference import predicted
from sklearn.base import clone
from tiers import examples

from regard._utils.errors import RegardWarning
from regard.regression import NadarayaWatsonClassifier, NadarayaWatsonRegressor
from regard.regression._bandwidth import LeaveOneOut
from regard.regression._sums import evaluator as _evaluator
from regard.regression._sums import smoother as _smoother
from regard.scores.kernels import kernels

#: By transforms, by tiles looked at together, and by points that a tree finds near each query.
FAST = ["nufft", "tiles", "tree"]


@contextmanager
def summing(way):
    """Yield what to give as ``method`` for a way to sum up, which is then taken."""
    with patch.object(_evaluator, "TREE_SHARE", np.inf if way == "tree" else 0.0):
        yield "tiles" if way == "tree" else way


pytestmark = pytest.mark.usefixtures("quiet")


def data(seed, n=700, d=2):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    y = np.column_stack([np.sin(3 * X[:, 0]) + 0.1 * rng.normal(size=n), 5 + X[:, -1] ** 2])
    query = np.concatenate([rng.normal(size=(60, d)), 2.5 * rng.normal(size=(30, d)), X[:10]])
    return X, y, query, rng.uniform(0.1, 3, n)


def wrong(found, expected, y, weight=None):
    """Return errors beside the distance from the mean and the standard deviation of targets: what rtol bounds."""
    mean = np.average(y, axis=0, weights=weight)
    scale = np.sqrt(np.average((y - mean) ** 2, axis=0, weights=weight))
    # What is compared with is rounded, too: of one point, or equal ones, nothing else is left.
    error = np.maximum(np.abs(found - expected) - 4 * np.finfo(float).eps * np.abs(expected), 0)
    return (error / (np.abs(expected - mean) + np.where(scale > 0, scale, 1))).max()


@settings(max_examples=examples(30), deadline=None)
@given(
    way=st.sampled_from(FAST),
    d=st.integers(1, 3),
    n=st.integers(1, 80),
    width=st.sampled_from([0.05, 0.4, 3.0, 100.0]),
    shape=st.sampled_from(["normal", "cauchy", "lattice", "equal", "far"]),
    big=st.sampled_from([1e-12, 1.0, 1e12]),
    digits=st.integers(4, 12),
    seed=st.integers(0, 2**20),
)
def test_predictions_hold_rtol_tails_included(way, d, n, width, shape, big, digits, seed):
    rng = np.random.default_rng(seed)
    X = {
        "normal": rng.normal(size=(n, d)), "cauchy": rng.standard_cauchy((n, d)).clip(-50, 50),
        "lattice": rng.integers(3, size=(n, d)).astype(float), "equal": np.full((n, d), 0.1),
        "far": rng.normal(size=(n, d)) + 1e12 * width * rng.integers(2, size=(n, 1)),
    }[shape]  # fmt: skip
    y = big * (3 + np.stack([rng.normal(size=n), rng.standard_cauchy(n)], 1))
    weight = rng.uniform(0.1, 10, n)
    query = X[rng.integers(n, size=8)] + 2 * width * rng.normal(size=(8, d))
    with summing(way) as method:
        model = NadarayaWatsonRegressor(bandwidth=width, method=method, rtol=10.0**-digits).fit(X, y, weight)
        found = model.predict(query)
    unit = model._features.coordinates  # what is compared are these: a far point has them rounded
    log = -0.5 * ((unit(query)[:, None] - unit(X)) / width) ** 2
    log = log.sum(-1) - log.sum(-1).max(1, keepdims=True)
    share = np.exp(log) * weight
    assert wrong(found, share @ y / share.sum(1, keepdims=True), y, weight) <= 10.0**-digits


@pytest.mark.campaign(keep=12)
@across({("way", "kernel"): [("nufft", "gaussian"), *product(FAST[1:], kernels())], "order": [0, 1], "d": [1, 2, 3]})
def test_all_that_an_estimator_says_is_what_all_pairs_say(way, kernel, order, d):
    with summing(way) as method:
        compare_with_all_pairs(method, kernel, order, d)


def compare_with_all_pairs(method, kernel, order, d):
    X, y, query, weight = data(d, d=d)
    width = np.array([0.5, 0.9, 0.8])[:d]
    model = NadarayaWatsonRegressor(kernel, width, order=order, method=method, rtol=1e-8).fit(X, y, weight)
    exact = clone(model).set_params(method="exact").fit(X, y, weight)
    mean, deviation = model.predict(query, return_std=True)
    mean_of_all, deviation_of_all = exact.predict(query, return_std=True)
    assert model.plan_.method == method and exact.plan_.method == "exact"
    # A line through a few points in a tail magnifies roundings, whoever sums up.
    near = ~exact.extrapolates(query) if order else slice(None)
    assert wrong(mean[near], mean_of_all[near], y, weight) < (1e-6 if order else 1e-8)
    np.testing.assert_array_equal(np.isnan(deviation), np.isnan(deviation_of_all))
    known = ~np.isnan(deviation).any(1)
    assert (np.abs(deviation - deviation_of_all)[known] <= 1e-7 * (deviation_of_all[known] + y.std(0))).all()
    np.testing.assert_array_equal(model.extrapolates(query), exact.extrapolates(query))
    assert wrong(model.loo_predict(), exact.loo_predict(), y, weight) < 1e-7
    assert model.loo_error() == pytest.approx(exact.loo_error(), rel=1e-7)
    np.testing.assert_allclose(model.predict_quantiles(query[:5]), exact.predict_quantiles(query[:5]), atol=1e-9)


def test_predictions_are_those_of_the_formula():
    X, y, query, _ = data(0)
    model = NadarayaWatsonRegressor(bandwidth=0.4, order=1, method="nufft").fit(X, y)
    near = query[np.abs(query).max(1) < 2]
    assert wrong(model.predict(near), predicted("gaussian", near, X, y, 0.4, 1), y) < 1e-6
    assert model.plan_.bound <= 1e-6


@pytest.mark.campaign(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("bandwidth", ["loo", "learned"])
def test_searches_find_what_all_pairs_find(bandwidth):
    X, y, _, weight = data(0, n=250)
    found = [
        NadarayaWatsonRegressor(bandwidth=bandwidth, method=method, max_iter=6).fit(X, y[:, 0], weight)
        for method in ("nufft", "exact")
    ]
    np.testing.assert_allclose(found[0].bandwidth_, found[1].bandwidth_, rtol=1e-3)
    assert found[0].loo_error_ == pytest.approx(found[1].loo_error_, rel=1e-6)


def test_probabilities_and_repetitions():
    X, y, query, _ = data(1)
    labels = np.digitize(y[:, 0], [-0.5, 0.5])
    fast, exact = (NadarayaWatsonClassifier(bandwidth=0.3, method=each).fit(X, labels) for each in ("nufft", "exact"))
    np.testing.assert_allclose(fast.predict_proba(query), exact.predict_proba(query), atol=1e-6)
    np.testing.assert_allclose(fast.loo_predict_proba(), exact.loo_predict_proba(), atol=1e-6)


def test_float32_is_summed_in_float64():
    X, y, query, _ = (each.astype(np.float32) for each in data(2))
    model = NadarayaWatsonRegressor(bandwidth=0.3, method="nufft").fit(X, y)
    found = model.predict(query)
    assert found.dtype == np.float32
    exact = NadarayaWatsonRegressor(bandwidth=0.3, method="exact", dtype="float64").fit(X, y).predict(query)
    assert wrong(found, exact, y) < 1e-6


def test_auto_chooses_by_sizes_and_says_so(monkeypatch):
    X, y, query, _ = data(3, n=5000)
    assert NadarayaWatsonRegressor(bandwidth=0.3).fit(X, y).plan_ is None
    model = NadarayaWatsonRegressor(bandwidth=0.3).fit(X, y)
    model.predict(query)
    assert (model.plan_.method, model.plan_.reason) == ("exact", "all pairs are few")
    monkeypatch.setattr(_evaluator, "FEW_PAIRS", 1)
    never = {"PAIRS_OF_FREQUENCY": np.inf, "TREE_SHARE": 0.0, "TREE_POINTS": 0, "TILES_SHARE": 0.0}
    for value, method, by_tree, reason in (
        ({}, "exact", False, "queries need many of the points"),
        ({"PAIRS_OF_FREQUENCY": 0}, "nufft", False, "a transform has few frequencies beside all pairs"),
        ({"TREE_SHARE": 2.0}, "tiles", True, "queries need few of the points"),
        ({"TILES_SHARE": 2.0}, "tiles", False, "queries need some of the points"),
    ):
        for name, each in (never | value).items():
            monkeypatch.setattr(_evaluator, name, each)
        model.predict(query)
        assert (model.plan_.method, model.plan_.by_tree) == (method, by_tree)
        assert reason in model.plan_.reason
    text = str(NadarayaWatsonRegressor(bandwidth=0.3, method="nufft").fit(X, y).plan_)
    assert "nufft" in text and "MB" in text


@pytest.mark.parametrize(
    ("kernel", "n", "count", "d", "bandwidth", "method", "by_tree"),
    [
        ("gaussian", 10_000, 10_000, 3, 0.05, "exact", False),
        ("gaussian", 100_000, 10_000, 3, 0.05, "nufft", False),
        ("gaussian", 100_000, 1_000, 2, 0.002, "tiles", True),
        ("gaussian", 30_000, 1_000, 5, 0.01, "tiles", True),
        ("gaussian", 30_000, 1_000, 5, 0.2, "exact", False),
        ("laplacian", 100_000, 10_000, 1, 0.0002, "tiles", False),
        ("epanechnikov", 100_000, 10_000, 3, 0.02, "exact", False),
        ("epanechnikov", 1_000_000, 10_000, 3, 0.01, "tiles", True),
        ("epanechnikov", 1_000_000, 10_000, 2, 0.02, "exact", False),
    ],
)  # fmt: skip
def test_what_was_fastest_is_chosen(kernel, n, count, d, bandwidth, method, by_tree):
    X = np.random.default_rng(0).random((n, d))
    model = NadarayaWatsonRegressor(kernel, bandwidth).fit(X, X[:, 0])
    smoother = model._smoother(double=True)
    plan = model._evaluator.choose(smoother, count, model._bandwidth(smoother))
    assert (plan.method, plan.by_tree) == (method, by_tree)


@pytest.mark.parametrize(("bandwidth", "calls"), [(0.01, 1), (0.5, 8)])
def test_queries_that_reach_few_points_share_a_call(bandwidth, calls, monkeypatch):
    X, query = np.random.default_rng(0).random((2, 4_000, 2))
    model = NadarayaWatsonRegressor("boxcar", bandwidth).fit(X, X[:, 0])
    whole = model.predict(query)
    monkeypatch.setattr(_evaluator, "FEW_PAIRS", 0)
    monkeypatch.setattr(_smoother, "ROWS", 500)
    monkeypatch.setattr(_smoother, "PAIRS", 500 * len(X) // 2)
    with patch.object(_smoother, "attention", wraps=_smoother.attention) as attention:
        np.testing.assert_allclose(model.predict(query), whole, rtol=1e-13)
    assert sum(call.args[2].shape[1] == 2 for call in attention.call_args_list) == calls


def test_points_are_transformed_once(monkeypatch):
    X, y, query, _ = data(4)
    made = []
    real = _evaluator.TransformedPoints.transform

    def transform(self, smoother, kind="mean"):
        if kind not in self._sums:
            made.append(kind)
        return real(self, smoother, kind)

    monkeypatch.setattr(_evaluator.TransformedPoints, "transform", transform)
    model = NadarayaWatsonRegressor(bandwidth=0.3, method="nufft").fit(X, y)
    first = model.predict(query)
    model.predict(query[:3])
    assert made == ["mean"]
    copy = pickle.loads(pickle.dumps(model))
    assert len(pickle.dumps(model)) < len(pickle.dumps((X, y))) + 60_000
    assert wrong(copy.predict(query), first, y) < 1e-9


def test_a_grid_that_does_not_fit_is_tiles_and_says_so():
    X, y = data(5)[:2]
    with pytest.warns(RegardWarning, match=r"a grid of .* frequencies would take .* GB, so sums are tiles"):
        model = NadarayaWatsonRegressor(bandwidth=1e-9, method="nufft").fit(X, y)
    np.testing.assert_allclose(model.predict(X), y, rtol=1e-12)
    with pytest.warns(RegardWarning, match="points have 5 coordinates, more than 3"):
        NadarayaWatsonRegressor(method="nufft").fit(np.random.default_rng(0).normal(size=(50, 5)), y[:50])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "nuft"}, "NadarayaWatsonRegressor: method must be one of 'auto', 'exact', 'nufft', 'tiles', "
                             "got 'nuft' (did you mean 'nufft'?)."),
        ({"method": "nufft", "kernel": "boxcar"}, "NadarayaWatsonRegressor: method must be 'auto', 'exact' or 'tiles' "
                                                  "for a kernel but the Gaussian, got 'nufft'."),
        ({"rtol": 1e-17}, "NadarayaWatsonRegressor: rtol must be at least 2e-15, what float64 can hold, and below 1, "
                          "got 1e-17."),
        ({"rtol": 1e-8, "dtype": "float32"}, "NadarayaWatsonRegressor: rtol must be at least 1e-06, what float32 can "
                                             "hold, and below 1, got 1e-08."),
        ({"rtol": 2}, "NadarayaWatsonRegressor: rtol must be a number in (0, 1), got 2."),
    ],
)  # fmt: skip
def test_what_cannot_be_is_a_sentence(options, message):
    with pytest.raises(ValueError) as caught:
        NadarayaWatsonRegressor(**options).fit(*data(6)[:2])
    assert str(caught.value) == message


def test_without_finufft_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr("regard.regression._sums.fourier.find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"needs finufft, which is missing: pip install 'regard\[nufft\]'"):
        NadarayaWatsonRegressor(method="nufft").fit(*data(7)[:2])
    assert NadarayaWatsonRegressor().fit(*data(7)[:2]).predict([[0.0, 0.0]]).shape == (1, 2)


@pytest.mark.campaign(keep=3)
@across({"way": FAST[1:], "order": [0, 1], "kernel": ["gaussian", "laplacian", "epanechnikov"]})
def test_bandwidths_that_share_looks_have_the_errors_of_each(way, order, kernel):
    X, y, _, weight = data(5, n=400)
    X[7] = X[3]  # a point whose nearest other is no distance away
    with summing(way) as method:
        model = NadarayaWatsonRegressor(kernel, [0.5, 0.25], order=order, method=method).fit(X, y, weight)
        some = torch.tensor([3, 7, 399, 20])
        # A line through hardly more than one point is told by what rounding leaves.
        several = (
            torch.tensor([0.4 if order else 0.05, 0.6, 1.0, 2.0, 5.0, 90.0]).double()[:, None]
            * torch.tensor([0.5, 0.25]).double()
        )
        for rows in (None, some):
            loo = LeaveOneOut(model._smoother(double=True), False, model._evaluator, rows)
            alone = [float(loo.error(width)) for width in several]
            assert list(loo.errors(several)) == pytest.approx(alone, rel=1e-6 if order else 1e-10)


def test_the_gradient_of_sums_over_neighbours_is_that_of_all_pairs():
    X, y, _, weight = data(6, n=300)
    slopes = []
    for way in ("tree", "exact"):
        with summing(way) as method:
            model = NadarayaWatsonRegressor(bandwidth=[0.3, 0.5], method=method).fit(X, y, weight)
            loo = LeaveOneOut(model._smoother(double=True), False, model._evaluator, None)
            width = torch.tensor([0.3, 0.5], dtype=torch.float64, requires_grad=True)
            slopes += torch.autograd.grad(loo.error(width), width)
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 300])
def test_no_queries_are_no_error(n):
    X, y, query, _ = data(7, n=n)
    for way in FAST[1:]:
        with summing(way) as method:
            model = NadarayaWatsonRegressor(bandwidth=0.4, method=method).fit(X, y)
            smoother = model._smoother(double=True)
            none = torch.from_numpy(query[:0])
            assert model._evaluator.estimate(smoother, none, model._bandwidth(smoother)).mean.shape == (0, 2)


@pytest.mark.parametrize("way", FAST[1:])
def test_queries_that_no_point_reaches(way):
    X, y, _, _ = data(8, n=50)
    with summing(way) as method:
        for bandwidth in (0.1, 0.1 * torch.ones(2, 2)):
            model = NadarayaWatsonRegressor("epanechnikov", 0.1, method=method, empty="mean").fit(X, y)
            far = np.array([[90.0, 90.0], [-90.0, 3.0]])
            np.testing.assert_allclose(model.predict(far), np.tile(y.mean(0), (2, 1)))
            smoother, own = model._smoother(double=True), torch.tensor([0, 1])
            width = model._bandwidth(smoother) * 1e-6 if isinstance(bandwidth, float) else bandwidth.double() * 1e-6
            found = model._evaluator.estimate(smoother, smoother.key[own], width, own, plan=model.plan_)
            assert not found.reached.any() and not found.mean.any()
