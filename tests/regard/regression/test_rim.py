"""Queries around the training points, and the choice of a method by its cost."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.base import clone

from regard.regression import NadarayaWatsonRegressor


def square(n=30_000, queries=20_000, beyond=0.25):
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(n, 2))
    y = np.sin(6 * X[:, 0]) + X[:, 1] + 0.3 * rng.normal(size=n)
    return X, y, rng.uniform(-beyond, 1 + beyond, (queries, 2))


pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("weighted", [False, True])
def test_queries_beyond_the_box_are_transformed_and_hold_rtol(weighted):
    X, y, query = square()
    weight = np.random.default_rng(1).uniform(0.1, 3, len(X)) if weighted else None
    model = NadarayaWatsonRegressor(bandwidth=0.05, method="nufft", rtol=1e-7).fit(X, y, weight)
    mean, deviation = model.predict(query, return_std=True)
    far = np.flatnonzero((np.abs(query - 0.5) > 0.65).any(1))[:300]  # three bandwidths and more beyond
    assert len(far) == 300
    assert model.plan_.by_tiles < len(query) / 100
    exact = clone(model).set_params(method="exact").fit(X, y, weight)
    expected, spread = exact.predict(query[far], return_std=True)
    center = np.average(y, weights=weight)
    scale = np.sqrt(np.average((y - center) ** 2, weights=weight))
    assert (np.abs(mean[far] - expected) <= 1e-7 * (np.abs(expected - center) + scale)).all()
    np.testing.assert_allclose(deviation[far], spread, atol=1e-6)
    np.testing.assert_array_equal(model.extrapolates(query)[far], exact.extrapolates(query[far]))


@pytest.mark.slow
def test_which_queries_lie_beyond_is_what_all_pairs_say():
    X, y, query = square(4_000, 3_000)
    hole = (np.abs(X - 0.5) > 0.2).any(1)
    for kernel in ("gaussian", "laplacian"):
        model = NadarayaWatsonRegressor(kernel, bandwidth=0.03).fit(X[hole], y[hole])
        gap = np.abs(query[:, None] - X[hole]) / 0.03
        nearest = (gap.sum(-1) if kernel == "laplacian" else np.sqrt((gap**2).sum(-1))).min(1)
        reach = np.log(100) if kernel == "laplacian" else np.sqrt(2 * np.log(100))
        np.testing.assert_array_equal(model.extrapolates(query), nearest > reach)


def test_many_features_have_no_tree():
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(2_200, 8))
    model = NadarayaWatsonRegressor("epanechnikov", 0.05, order=1).fit(X, X[:, 0])
    assert len(model.loo_predict()) == 2_200
    assert not model._evaluator._trees
