"""Features of the estimators together: each pair works as its parts define it, or is refused in one sentence."""

from __future__ import annotations

import math

import numpy as np
import pytest

from regard.regression import NadarayaWatsonClassifier, NadarayaWatsonRegressor

pytestmark = pytest.mark.filterwarnings("ignore::regard._utils.errors.RegardWarning")
ROWS = 120


def tables():
    """Return tables of each kind of feature, with the options for it and a bandwidth for the Gaussian."""
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(ROWS, 2))
    gaps = np.where(rng.random((ROWS, 2)) < 0.1, np.nan, numbers)
    gaps[np.isnan(gaps).all(1)] = 0.3
    place = np.column_stack([rng.uniform(45, 55, ROWS), rng.uniform(5, 15, ROWS), numbers[:, 0]])
    coded = np.column_stack([np.arange(ROWS) % 110, numbers[:, 0]])
    sphere = {"metric": {(0, 1): "haversine"}}
    lost = place.copy()
    lost[::7, 0], lost[::9, 2] = np.nan, np.nan
    return {
        "numbers": (numbers, {}, 0.8),
        "angles": (rng.uniform(0, 24, (ROWS, 2)), {"metric": ("angular", 24)}, 3.0),
        "place": (place, sphere, [300.0, 300.0, 1.0]),
        "ordered": (np.column_stack([rng.integers(0, 5, ROWS), numbers[:, 0]]), {"metric": {0: "ordered"}}, 1.0),
        "codes": (coded, {"metric": ["categorical", "euclidean"]}, 0.8),
        "categories": (rng.integers(0, 4, (ROWS, 2)).astype(float), {"metric": "categorical"}, 0.8),
        "gaps": (gaps, {"missing": "marginal"}, 0.8),
        "gaps in places": (lost, sphere | {"missing": "marginal"}, [300.0, 300.0, 1.0]),
    }  # fmt: skip


TABLES = tables()
ADAPTS = ["numbers", "angles", "place", "ordered"]


def target(seed=1):
    rng = np.random.default_rng(seed)
    return 2 + np.sin(np.arange(ROWS) / 9) + 0.3 * rng.normal(size=ROWS), rng.uniform(0.5, 2, ROWS)


def check_linear_smoother(model, X, y, weight):
    """Check a fit against its effective weights: prediction, standard error, degrees of freedom and AICc."""
    query = X[:20]
    L, S = model.weights(query), model.weights(X)
    mean, std, se = model.predict(query, return_std=True, return_se=True)
    np.testing.assert_allclose(mean, L @ y, atol=1e-9)
    assert np.isfinite(std).mean() > 0.5
    np.testing.assert_allclose(se, std * np.sqrt((L**2).sum(1)), rtol=1e-7)
    assert model.effective_dof() == pytest.approx(np.trace(S), abs=1e-7)
    variance = np.average((y - S @ y) ** 2, weights=weight)
    penalty = 1 + 2 * (np.trace(S) + 1) / (ROWS - np.trace(S) - 2)
    assert model.aicc() == pytest.approx(math.log(variance) + penalty, abs=1e-8)
    low, high = model.predict_band(query, 0.5).T
    np.testing.assert_allclose((low + high)[~np.isnan(low)] / 2, mean[~np.isnan(low)], rtol=1e-9)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("kind", TABLES)
def test_errors_and_degrees_of_freedom_are_those_of_effective_weights(kind, order):
    X, options, bandwidth = TABLES[kind]
    y, weight = target()
    model = NadarayaWatsonRegressor(bandwidth=bandwidth, order=order, **options).fit(X, y, weight)
    check_linear_smoother(model, X, y, weight)


@pytest.mark.campaign(keep=12)
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("kernel", ["gaussian", "epanechnikov", "boxcar"])
@pytest.mark.parametrize("kind", ADAPTS)
def test_the_same_for_bandwidths_of_neighbours(kind, kernel, order):
    X, options, bandwidth = TABLES[kind]
    y, weight = target()
    model = NadarayaWatsonRegressor(kernel, bandwidth, n_neighbors=50, order=order, **options).fit(X, y, weight)
    check_linear_smoother(model, X, y, weight)


@pytest.mark.parametrize("kernel", ["gaussian", "laplacian", "epanechnikov"])
@pytest.mark.parametrize("weighing", [None, "repetitions", "shares"])
def test_tables_of_categories_have_leverages_and_standard_errors(kernel, weighing):
    rng = np.random.default_rng(0)
    X, y = rng.integers(0, 5, (400, 1)).astype(float), rng.normal(size=400)
    weight = {None: None, "repetitions": rng.integers(1, 4, 400), "shares": rng.uniform(0.5, 2, 400)}[weighing]
    table, pairs = (
        NadarayaWatsonRegressor(kernel, 1.5, metric="categorical", method=method).fit(X, y, weight)
        for method in ("auto", "exact")
    )
    for one, other in zip(table.predict(X, True, True), pairs.predict(X, True, True)):
        np.testing.assert_allclose(one, other, rtol=1e-9)
    assert (table.plan_.method, pairs.plan_.method) == ("table", "exact")
    assert table.effective_dof() == pytest.approx(pairs.effective_dof(), rel=1e-10)
    assert table.aicc() == pytest.approx(pairs.aicc(), rel=1e-10)


@pytest.mark.parametrize("kind", ["place", "ordered", "codes", "gaps", "gaps in places"])
def test_slopes_of_averages_are_differences_by_a_unit_of_the_feature(kind):
    X, options, bandwidth = TABLES[kind]
    y, _ = target()
    model = NadarayaWatsonRegressor(bandwidth=bandwidth, **options).fit(X, y)
    found = model.predict_gradient(X[:40])
    for place, values in enumerate(X[:40].T):
        if kind in ("ordered", "codes") and place == 0:
            assert np.isnan(found[:, place]).all()
            continue
        step = np.zeros(X.shape[1])
        step[place] = 1e-5
        expected = (model.predict(X[:40] + step) - model.predict(X[:40] - step)) / 2e-5
        lost = np.isnan(X[:40, [0, 1]]).any(1) if kind == "gaps in places" and place < 2 else np.isnan(values)
        np.testing.assert_array_equal(np.isnan(found[:, place]), lost)
        np.testing.assert_allclose(found[~lost, place], expected[~lost], atol=1e-6)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("n_neighbors", [None, 60])
def test_slopes_of_a_place_are_by_degree(order, n_neighbors):
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.uniform(49, 51, 400), rng.uniform(9, 11, 400)])
    y = 3 * X[:, 0] - 2 * X[:, 1]
    model = NadarayaWatsonRegressor(
        bandwidth=20.0, n_neighbors=n_neighbors, order=order, metric={(0, 1): "haversine"}
    ).fit(X, y)
    query = rng.uniform([49.5, 9.5], [50.5, 10.5], (20, 2))
    np.testing.assert_allclose(model.predict_gradient(query), np.tile([3.0, -2.0], (20, 1)), atol=0.06)


@pytest.mark.parametrize("kind", ["gaps", "codes", "categories"])
def test_neighbours_need_distances_of_coordinates(kind):
    X, options, _ = TABLES[kind]
    expected = {
        "gaps": "missing must be 'error' with n_neighbors: the distance to a point that misses a value is unknown",
        "codes": "X must have a feature that is no category, and at most 100 categories, for n_neighbors, got",
        "categories": "X must have a feature that is no category, and at most 100 categories, for n_neighbors, got",
    }[kind]
    with pytest.raises(ValueError, match=expected):
        NadarayaWatsonRegressor(n_neighbors=20, **options).fit(X, target()[0])


def test_what_else_is_refused():
    X, options, _ = TABLES["categories"]
    y, _ = target()
    for order in (0, 1, 2):
        model = NadarayaWatsonRegressor(order=order, **options).fit(X, y)
        with pytest.raises(ValueError, match="X must have a feature that is no category, for slopes, got none"):
            model.predict_gradient(X)
    with pytest.raises(ValueError, match="bandwidth must be a rule or numbers with n_neighbors"):
        NadarayaWatsonRegressor(bandwidth="aicc", n_neighbors=20).fit(*TABLES["numbers"][:1], y)
    place = np.column_stack([TABLES["place"][0], np.arange(ROWS)])
    with pytest.raises(ValueError, match="at most 3 numeric features for order=2"):
        NadarayaWatsonRegressor(order=2, metric={(0, 1): "haversine"}).fit(np.column_stack([place, y]), y)


@pytest.mark.campaign(keep=10)
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("way", ["loo", "learned", "aicc"])
def test_searches_take_every_kind_of_feature(kind, way):
    X, options, _ = TABLES[kind]
    y, _ = target()
    order = 2 if way == "loo" and kind in ADAPTS else 1
    model = NadarayaWatsonRegressor(bandwidth=way, order=order, **options).fit(X, y)
    assert np.isfinite(model.bandwidth_).all() and (model.bandwidth_ > 0).all()
    if way == "aicc":
        assert model.aicc() == pytest.approx(model.aicc_curve_.errors.min(), rel=1e-9)
    else:
        assert model.loo_error() == pytest.approx(model.loo_error_, rel=1e-5)
    if "place" in kind:
        assert model.bandwidth_[0] == model.bandwidth_[1]


def test_screening_keeps_a_place_where_nothing_else_matters():
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.uniform(45, 55, 150), rng.uniform(5, 15, 150), rng.normal(size=150)])
    metric = {(0, 1): "haversine"}
    matters = NadarayaWatsonRegressor(bandwidth="learned", metric=metric).fit(X, np.sin(X[:, 0]))
    assert matters.bandwidth_[0] < 1000 and matters.bandwidth_[2] > 100
    nothing = NadarayaWatsonRegressor(bandwidth="learned", metric=metric).fit(X, rng.normal(size=150))
    assert nothing.bandwidth_[0] < 1e4 or nothing.bandwidth_[2] < 100  # the last feature stays


@pytest.mark.parametrize("kind", ["numbers", "codes", "gaps"])
def test_weights_of_classes_are_weights_of_rows_for_every_kind_of_feature(kind):
    X, options, bandwidth = TABLES[kind]
    y = target()[0] > 2
    weighted = NadarayaWatsonClassifier(bandwidth=bandwidth, class_weight={True: 3.0, False: 1.0}, **options).fit(X, y)
    by_row = NadarayaWatsonClassifier(bandwidth=bandwidth, **options).fit(X, y, np.where(y, 3.0, 1.0))
    np.testing.assert_allclose(weighted.predict_proba(X), by_row.predict_proba(X), rtol=1e-12)
    if kind == "numbers":
        weighted, by_row = (each.set_params(n_neighbors=30) for each in (weighted, by_row))
        # Weights of classes are no repetitions, which would count as neighbours.
        shares = by_row.fit(X, y, np.where(y, 1.5, 0.5)).predict_proba(X)
        np.testing.assert_allclose(weighted.fit(X, y).predict_proba(X), shares, rtol=1e-12)


def test_quantiles_and_explanations_of_every_kind():
    y, _ = target()
    for kind, (X, options, bandwidth) in TABLES.items():
        for more in ({}, *[{"n_neighbors": 40}] * (kind in ADAPTS)):
            model = NadarayaWatsonRegressor(bandwidth=bandwidth, order=1, **options, **more).fit(X, y)
            low, high = model.predict_quantiles(X[:10], (0.1, 0.9)).T
            assert (low <= high)[~np.isnan(low)].all()
            rows = model.set_params(order=0).fit(X, y).explain(X[0], topk=5).rows
            nearer = [row["distance"] for row in rows]
            assert nearer == sorted(nearer) and nearer[0] == pytest.approx(0, abs=1e-6)
