"""Local lines where units differ, points are few or far away, or features many."""

from __future__ import annotations

import numpy as np
import pytest
from reference import predicted
from sklearn.linear_model import LinearRegression

from regard.regression import NadarayaWatsonRegressor
from regard.regression._sums import smoother as _kernel_smoother


@pytest.fixture
def columns(monkeypatch):
    """Return a list that gets the number of columns of every call of attention."""
    found, real = [], _kernel_smoother.attention

    def counted(query, key, value, *arguments, **options):
        found.append(value.shape[1])
        return real(query, key, value, *arguments, **options)

    monkeypatch.setattr(_kernel_smoother, "attention", counted)
    return found


@pytest.mark.parametrize("bandwidth", [5000.0, [5000.0, 1.0], [1e9, 0.3], [3e4, 1e9]])
def test_units_of_features_do_not_matter(bandwidth):
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.normal(60_000, 30_000, 500), rng.uniform(0, 0.3, 500)])
    y = 1e-4 * X[:, 0] + 30 * X[:, 1]
    found = NadarayaWatsonRegressor(bandwidth=bandwidth, order=1).fit(X, y).predict(X)
    np.testing.assert_allclose(found, y, atol=1e-8)


@pytest.mark.parametrize("bandwidth", [1e-160, 1.0, 1e160])
def test_a_line_of_equal_weights_is_least_squares(bandwidth):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(80, 3)) * [1e-4, 1.0, 1e4] + [0, 5, 1e5]
    y = rng.normal(size=80)
    alike = (X - X.mean(0)) / X.std(0)
    expected = LinearRegression().fit(alike, y).predict(alike)
    found = NadarayaWatsonRegressor("constant", bandwidth, order=1).fit(X, y).predict(X)
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize("far", [1e3, 1e6, 1e12])
def test_points_far_away_take_no_slope_away(far):
    X, query = np.linspace(0, 1, 200)[:, None], np.array([[0.0], [0.5], [1.0]])
    y = 3 * X[:, 0]
    with_far = NadarayaWatsonRegressor(bandwidth=0.02, order=1).fit(np.r_[X, [[far]]], np.r_[y, 0.0])
    np.testing.assert_allclose(with_far.predict(query), 3 * query[:, 0], atol=1e-8)


def test_a_feature_of_two_far_values_takes_no_slope_from_another():
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.uniform(-1, 1, 400), np.where(rng.random(400) < 0.5, 0.0, 3e4)])
    y = 3 * X[:, 0]
    found = NadarayaWatsonRegressor(bandwidth=[0.3, 1e-3], order=1).fit(X, y).predict(X)
    np.testing.assert_allclose(found, y, atol=1e-8)


def test_points_on_a_line_in_the_plane():
    t = np.linspace(-2, 2, 100)
    X = np.column_stack([t, 2 * t])
    found = NadarayaWatsonRegressor(bandwidth=0.5, order=1).fit(X, 4 * t).predict(X)
    np.testing.assert_allclose(found, 4 * t, atol=1e-9)


def test_many_features_are_averaged_some_at_a_time(monkeypatch, columns):
    rng = np.random.default_rng(0)
    X, query = rng.normal(size=(400, 20)), rng.normal(size=(30, 20))
    y = X @ rng.normal(size=20) + np.sin(X[:, 0])
    monkeypatch.setattr(_kernel_smoother, "COLUMNS", 400 * 16)
    found = NadarayaWatsonRegressor(bandwidth=3.0, order=1).fit(X, y).predict(query)
    assert max(columns) == 16 and sum(columns) == 2 + 20 + 210 + 20
    np.testing.assert_allclose(found, predicted("gaussian", query, X, y, 3.0, 1), atol=1e-9)


def test_categories_cost_no_moments(columns):
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.integers(0, 50, 300), rng.normal(size=300)]).astype(float)
    NadarayaWatsonRegressor(bandwidth=1.0, order=1, metric=["categorical", "euclidean"]).fit(X, X[:, 1]).predict(X)
    assert [count for count in columns if count] == [
        5
    ]  # weight, target, number, its square, and its product with the target
