"""Kinds of features: angles around a circle, categories apart from each other."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from regard.regression import NadarayaWatsonRegressor


def test_midnight_is_near_midnight():
    hour = np.array([[23.5], [12.0]])
    model = NadarayaWatsonRegressor(bandwidth=1.0, metric=("angular", 24)).fit(hour, [1.0, 0.0])
    assert model.predict([[0.5]]) == pytest.approx(1.0)
    plain = NadarayaWatsonRegressor(bandwidth=1.0).fit(hour, [1.0, 0.0])
    assert plain.predict([[0.5]]) == pytest.approx(0.0)


@pytest.mark.parametrize("order", [0, 1])
def test_a_circle_has_no_beginning(order):
    rng = np.random.default_rng(0)
    angle = rng.uniform(-10, 10, (200, 1))
    y, query = np.cos(angle[:, 0]), rng.uniform(-3, 3, (20, 1))
    model = NadarayaWatsonRegressor(bandwidth=0.3, metric="angular", order=order).fit(angle, y)
    turned = NadarayaWatsonRegressor(bandwidth=0.3, metric="angular", order=order).fit(angle + 1.7, y)
    np.testing.assert_allclose(model.predict(query), model.predict(query + 2 * np.pi), atol=1e-9)
    np.testing.assert_allclose(turned.predict(query + 1.7), model.predict(query), atol=1e-9)
    np.testing.assert_allclose(model.predict(query), np.cos(query[:, 0]), atol=0.1)


def test_the_gaussian_of_an_angle_is_von_mises():
    rng = np.random.default_rng(1)
    angle, query = rng.uniform(0, 6, (50, 1)), rng.uniform(0, 6, (10, 1))
    y = rng.normal(size=50)
    kernel = np.exp(np.cos(query - angle.T) / 0.4**2)
    model = NadarayaWatsonRegressor(bandwidth=0.4, metric="angular").fit(angle, y)
    np.testing.assert_allclose(model.predict(query), kernel @ y / kernel.sum(1), atol=1e-10)


def test_a_line_along_a_circle_mends_what_is_lopsided():
    # Only one side of the query has points: an average leans to it, a line does not.
    angle = np.linspace(0.05, 1.0, 40)[:, None]
    y = 3 * np.sin(angle[:, 0])
    at = np.array([[0.0]])
    average, line = (
        NadarayaWatsonRegressor(bandwidth=0.2, metric="angular", order=order).fit(angle, y).predict(at)[0]
        for order in (0, 1)
    )
    assert abs(average) > 0.3
    assert abs(line) < 0.03


@pytest.mark.parametrize("kernel", ["gaussian", "triangular", "laplacian"])
@pytest.mark.parametrize("categories", [2, 5])
def test_categories_lie_one_apart(kernel, categories):
    X = np.arange(categories, dtype=float)[:, None] * 7
    y = np.arange(categories, dtype=float)
    bandwidth = 1.6
    model = NadarayaWatsonRegressor(kernel, bandwidth, metric="categorical").fit(X, y)
    u = 1 / bandwidth
    other = {"gaussian": np.exp(-(u**2) / 2), "triangular": 1 - u, "laplacian": np.exp(-u)}[kernel]
    expected = np.where(np.eye(categories, dtype=bool), 1.0, other)
    np.testing.assert_allclose(model.weights(X), expected / expected.sum(1, keepdims=True), atol=1e-12)
    # What was never seen is as far from all.
    np.testing.assert_allclose(model.weights([[3.5]]), np.full((1, categories), 1 / categories), atol=1e-12)


def test_a_line_has_no_slope_along_categories():
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.integers(0, 3, 120), rng.normal(size=120)]).astype(float)
    y = 10 * X[:, 0] + 2 * X[:, 1]
    model = NadarayaWatsonRegressor(bandwidth=[0.1, 3.0], order=1, metric=["categorical", "euclidean"]).fit(X, y)
    query = np.array([[0.0, 2.0], [2.0, -2.0]])
    np.testing.assert_allclose(model.predict(query), 10 * query[:, 0] + 2 * query[:, 1], atol=1e-8)
    only = NadarayaWatsonRegressor(bandwidth=0.5, order=1, metric="categorical").fit(X[:, :1], y)
    average = NadarayaWatsonRegressor(bandwidth=0.5, order=0, metric="categorical").fit(X[:, :1], y)
    np.testing.assert_allclose(only.predict(query[:, :1]), average.predict(query[:, :1]))


def test_metrics_by_name_or_index():
    frame = pd.DataFrame({"hour": [23.0, 1.0, 12.0], "heat": [0.0, 0.1, 0.2]})
    y = [1.0, 2.0, 3.0]
    by_name = NadarayaWatsonRegressor(bandwidth=1.0, metric={"hour": ("angular", 24)}).fit(frame, y)
    by_index = NadarayaWatsonRegressor(bandwidth=1.0, metric={0: ("angular", 24)}).fit(frame.to_numpy(), y)
    as_list = NadarayaWatsonRegressor(bandwidth=1.0, metric=[("angular", 24), "euclidean"]).fit(frame.to_numpy(), y)
    query = np.array([[0.0, 0.0]])
    assert by_name.predict(pd.DataFrame(query, columns=frame.columns)) == by_index.predict(query)
    assert as_list.predict(query) == by_index.predict(query)


def test_rules_know_the_spread_of_each_kind():
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=500) * 4
    X = np.column_stack([numbers, rng.integers(0, 2, 500), rng.uniform(0, 24, 500)])
    model = NadarayaWatsonRegressor(metric=["euclidean", "categorical", ("angular", 24)]).fit(X, numbers)
    factor = 500 ** (-1 / 7)
    assert model.bandwidth_[0] == pytest.approx(factor * numbers.std())
    # Half of all pairs differ by 1; points spread evenly lie a radius from the centre.
    assert model.bandwidth_[1] == pytest.approx(factor * 0.5, rel=0.01)
    assert model.bandwidth_[2] == pytest.approx(factor * 24 / (2 * np.pi), rel=0.01)


def test_a_constant_feature_counts_for_nothing():
    X = np.column_stack([np.linspace(0, 1, 30), np.full(30, 1e8) + 0.1])
    y = np.sin(5 * X[:, 0])
    both = NadarayaWatsonRegressor(bandwidth=[0.1, 1.0]).fit(X, y)
    assert NadarayaWatsonRegressor().fit(X, y).bandwidth_[1] == pytest.approx(30 ** (-1 / 6))
    np.testing.assert_allclose(
        both.predict(X), NadarayaWatsonRegressor(bandwidth=0.1).fit(X[:, :1], y).predict(X[:, :1])
    )


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (["euclidean"], "got 1 of them for 2 features"),
        ({"left": "angular"}, "metric must name features that X has, got 'left'"),
        ({5: "angular"}, "metric must name features by name or index below 2, got 5"),
        (("angular", -1), "got \\('angular', -1\\)"),
        ({0: ("angular", "day")}, "got \\('angular', 'day'\\)"),
        (7, "got 7"),
    ],
)
def test_wrong_metrics(metric, message):
    with pytest.raises(ValueError, match=message):
        NadarayaWatsonRegressor(metric=metric).fit([[0.0, 1.0], [1.0, 0.0]], [0.0, 1.0])


def test_a_sum_of_absolute_differences_knows_no_circle():
    with pytest.raises(
        ValueError, match="metric must be 'euclidean' or 'categorical', got 'angular' with a kernel of the Manhattan"
    ):
        NadarayaWatsonRegressor("laplacian", metric="angular").fit([[0.0], [1.0]], [0.0, 1.0])
