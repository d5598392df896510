"""Many categories: counted by table, or compared as codes, with the results of one axis for each category."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from regard.regression import NadarayaWatsonClassifier, NadarayaWatsonRegressor, _features
from regard.regression._sums.smoother import resolve_kernel

KERNELS = {
    "gaussian": lambda u: np.exp(-(u**2) / 2),
    "laplacian": lambda u: np.exp(-u),
    "epanechnikov": lambda u: np.maximum(1 - u**2, 0),
    "triangular": lambda u: np.maximum(1 - u, 0),
    "boxcar": lambda u: (u <= 1) * 1.0,
}


def distances(query, X, categorical, bandwidth, kernel):
    """Return the distance of each pair in bandwidths (L, N), one pair and feature at a time."""
    total = np.zeros((len(query), len(X)))
    for j, is_category in enumerate(categorical):
        gap = np.subtract.outer(query[:, j], X[:, j])
        gap = ((gap != 0) if is_category else np.abs(gap)) / bandwidth[j]
        total += gap if kernel == "laplacian" else gap**2
    return total if kernel == "laplacian" else np.sqrt(total)


def drawn(categorical, count, categories, seed=0):
    rng = np.random.default_rng(seed)
    X = np.column_stack([rng.integers(categories, size=count) if each else rng.normal(size=count)
                         for each in categorical]).astype(float)  # fmt: skip
    return X, rng.normal(size=count) + X[:, 0] % 3, rng.integers(1, 4, count).astype(float)


@pytest.mark.campaign(keep=16)
@pytest.mark.parametrize("weighted", [None, "repetitions", "importances"])
@pytest.mark.parametrize(("kernel", "columns"), [("gaussian", 1), ("gaussian", 3), ("laplacian", 2), ("boxcar", 1),
                                                 ("epanechnikov", 1), ("triangular", 1)])  # fmt: skip
@pytest.mark.parametrize("bandwidth", [0.4, 1.3])
def test_tables_are_sums_over_all_pairs(kernel, columns, bandwidth, weighted):
    X, y, weight = drawn([True] * columns, 700, 12)
    weight = None if weighted is None else weight if weighted == "repetitions" else weight / 3
    query = np.vstack([X[:300], np.full((1, columns), 99.0), [[0.5, *X[0, 1:]]]])
    model = NadarayaWatsonRegressor(kernel, bandwidth, metric="categorical", empty="nan")
    model.fit(X, y, sample_weight=weight)
    found = model.predict(query)
    assert model.plan_.method == "table"
    w = np.ones(len(X)) if weight is None else weight
    K = KERNELS[kernel](distances(query, X, [True] * columns, [bandwidth] * columns, kernel))
    with np.errstate(invalid="ignore"):
        alpha = K * w / (K * w).sum(1, keepdims=True)
    np.testing.assert_allclose(found, alpha @ y, rtol=1e-10, atol=1e-10)
    mean, std = model.predict(query[:300], return_std=True)
    squares = alpha[:300] @ y**2 - mean**2
    used = (alpha[:300] ** 2 if weighted != "repetitions" else alpha[:300] ** 2 / w).sum(1)
    np.testing.assert_allclose(std, np.sqrt(squares / (1 - used)), rtol=1e-8)
    pairs = NadarayaWatsonRegressor(kernel, bandwidth, metric="categorical", empty="nan", method="exact")
    pairs.fit(X, y, sample_weight=weight)
    np.testing.assert_allclose(pairs.predict(query), found, atol=1e-12)
    np.testing.assert_array_equal(pairs.extrapolates(query), model.extrapolates(query))
    own = KERNELS[kernel](distances(X, X, [True] * columns, [bandwidth] * columns, kernel)) * w
    np.fill_diagonal(own, np.diag(own) - (1 if weighted == "repetitions" else w))
    np.testing.assert_allclose(model.loo_predict(), own @ y / own.sum(1), rtol=1e-9, atol=1e-9)


def test_a_row_alone_in_its_category_is_predicted_by_the_others():
    X, y, _ = drawn([True], 900, 9)
    X[5] = 50.0
    for bandwidth in (1e-3, 0.5):
        model = NadarayaWatsonRegressor(bandwidth=bandwidth, metric="categorical").fit(X, y)
        assert model.loo_predict()[5] == pytest.approx(np.delete(y, 5).mean())
        assert model.extrapolates([[50.0], [51.0]]).tolist() == [False, True]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("way", ["loo", "learned"])
def test_searches_by_table_find_what_all_pairs_find(way):
    X, y, _ = drawn([True, True], 600, 8)
    y = y + 5 * (X[:, 1] == 3)
    by_table, by_pairs = (
        NadarayaWatsonRegressor(bandwidth=way, metric="categorical", method=method).fit(X, y)
        for method in ("auto", "exact")
    )
    np.testing.assert_allclose(by_table.bandwidth_, by_pairs.bandwidth_, rtol=1e-3)
    assert by_table.loo_error_ == pytest.approx(by_pairs.loo_error_, rel=1e-9)


@pytest.mark.campaign(keep=5)
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("kernel", KERNELS)
def test_codes_give_the_results_of_corners(monkeypatch, kernel, order):
    categorical = [True, False, True]
    X, y, weight = drawn(categorical, 400, 30)
    query = np.vstack([X[:60] + np.array([0, 0.1, 0]), [[99.0, 0.0, 3.0]]])
    models = []
    for corners in (100, 10):
        monkeypatch.setattr(_features, "CORNERS", corners)
        model = NadarayaWatsonRegressor(kernel, order=order, metric=["categorical", "euclidean", "categorical"])
        models.append(model.set_params(bandwidth=[1.2, 0.9, 1.5]).fit(X, y, sample_weight=weight))
        assert bool(model._features.coded) == (corners == 10)
    corners, codes = models
    np.testing.assert_allclose(codes.predict(query), corners.predict(query), atol=1e-8)
    np.testing.assert_allclose(codes.predict(query, return_std=True)[1], corners.predict(query, return_std=True)[1],
                               atol=1e-5)  # fmt: skip
    np.testing.assert_allclose(codes.weights(query), corners.weights(query), atol=1e-8)
    np.testing.assert_array_equal(codes.extrapolates(query), corners.extrapolates(query))
    np.testing.assert_allclose(codes.predict_quantiles(query), corners.predict_quantiles(query), atol=1e-6)
    np.testing.assert_allclose(codes.loo_predict(), corners.loo_predict(), atol=1e-8)
    mine, theirs = (model.explain(query[:1], topk=3).to_frame()["distance"] for model in (codes, corners))
    np.testing.assert_allclose(np.sort(mine), np.sort(theirs), atol=1e-6)
    if order == 0:
        u = distances(query, X, categorical, [1.2, 0.9, 1.5], kernel)
        K = KERNELS[kernel](u) * weight
        reached = K.sum(1) > 0
        np.testing.assert_allclose(codes.predict(query)[reached], (K @ y / K.sum(1))[reached], atol=1e-10)


@pytest.mark.parametrize("kernel", ["gaussian", "laplacian", "epanechnikov"])
@pytest.mark.parametrize("way", ["scott", "silverman", "loo"])
def test_the_bandwidth_does_not_depend_on_how_categories_are_compared(monkeypatch, kernel, way):
    X, y, weight = drawn([True, False], 300, 20)
    found = []
    for corners in (100, 0):
        monkeypatch.setattr(_features, "CORNERS", corners)
        model = NadarayaWatsonRegressor(kernel, way, metric=["categorical", "euclidean"])
        found.append(model.fit(X, y, sample_weight=weight).bandwidth_)
    np.testing.assert_allclose(found[0], found[1], rtol=2e-3 if way == "loo" else 1e-12)


def test_rules_of_a_table_are_those_of_corners():
    X, y, _ = drawn([True], 500, 40)
    share = np.unique(X, return_counts=True)[1] / 500
    model = NadarayaWatsonRegressor("epanechnikov", metric="categorical").fit(X, y)
    unit = np.sqrt(0.5 * (1 - (share**2).sum())) * resolve_kernel("", "epanechnikov").canonical_factor(40)
    assert model.bandwidth_[0] == pytest.approx(unit * 500 ** (-1 / 5))


def test_classes_are_counted_by_table():
    X, y, _ = drawn([True], 800, 200)
    label = np.where(y > 1, "high", "low")
    model = NadarayaWatsonClassifier(bandwidth=0.5, metric="categorical").fit(X, label)
    K = KERNELS["gaussian"]((X != X.T) / 0.5)
    expected = np.stack([K @ (label == each) for each in ("high", "low")], 1) / K.sum(1)[:, None]
    np.testing.assert_allclose(model.predict_proba(X), expected, atol=1e-12)
    assert model.plan_.method == "table"


@pytest.mark.slow
def test_float32_and_folds_by_table():
    X, y, _ = drawn([True, True], 600, 6)
    single = NadarayaWatsonRegressor(bandwidth=0.5, metric="categorical").fit(X.astype(np.float32), y)
    double = NadarayaWatsonRegressor(bandwidth=0.5, metric="categorical").fit(X, y)
    assert single.predict(X.astype(np.float32)).dtype == np.float32
    np.testing.assert_allclose(single.predict(X.astype(np.float32)), double.predict(X), atol=1e-5)
    folds = NadarayaWatsonRegressor(bandwidth="loo", metric="categorical", cv=4).fit(X, y)
    pairs = NadarayaWatsonRegressor(bandwidth="loo", metric="categorical", cv=4, method="exact").fit(X, y)
    np.testing.assert_allclose(folds.bandwidth_, pairs.bandwidth_, rtol=1e-3)
    np.testing.assert_allclose(folds.cross_val_predict(), pairs.cross_val_predict(), atol=1e-4)


def test_the_gradient_by_table_is_that_of_all_pairs():
    X, y, _ = drawn([True, True], 300, 5)
    slopes = []
    for method in ("auto", "exact"):
        model = NadarayaWatsonRegressor(bandwidth=0.5, metric="categorical", method=method).fit(X, y)
        smoother = model._smoother(double=True).to(torch.float64)
        rows, width = torch.arange(300), torch.tensor([0.6, 0.8], dtype=torch.float64, requires_grad=True)
        found = model._evaluator.estimate(smoother, smoother.key, width, rows)
        (slope,) = torch.autograd.grad((found.mean * smoother.key.new_tensor(y)[:, None]).sum(), width)
        slopes.append(slope.numpy())
    np.testing.assert_allclose(slopes[0], slopes[1], rtol=1e-9)


def test_thousands_of_categories_of_a_frame():
    rng = np.random.default_rng(0)
    shop = rng.integers(2000, size=20_000)
    frame = pd.DataFrame({"shop": shop.astype(str)})
    y = np.sin(shop) + 0.1 * rng.normal(size=len(shop))
    model = NadarayaWatsonRegressor(bandwidth=0.3).fit(frame, y)
    assert model._smoother().key.shape == (20_000, 1)
    other = np.exp(-1 / (2 * 0.3**2))
    sums, counts = np.bincount(shop, y), np.bincount(shop)
    expected = (other * y.sum() + (1 - other) * sums[shop]) / (other * len(y) + (1 - other) * counts[shop])
    np.testing.assert_allclose(model.predict(frame), expected, rtol=1e-10)
