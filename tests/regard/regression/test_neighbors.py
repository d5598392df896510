"""Bandwidths by the distance to the k-th neighbour, against NumPy point by point and scikit-learn."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from reference import predicted
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor

from regard.regression import NadarayaWatsonClassifier, NadarayaWatsonRegressor, plot_loo
from regard.regression._sums import evaluator as _evaluator
from regard.scores.kernels import kernels

pytestmark = pytest.mark.filterwarnings("ignore::regard.regression.ExtrapolationWarning")
SMOOTH = [name for name, form in kernels().items() if form.smooth]


def data(width, count=200, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(count, width)) ** 3
    return X, np.sin(X[:, 0]) + 0.1 * rng.normal(size=count), rng.normal(size=(20, width))


def reach(kernel, row, X, scale, k, weight=None):
    """Return the distance to the k-th nearest point, in scales; whole-number weights are repetitions."""
    d = np.abs((X - row) / scale)
    d = d.sum(1) if kernels()[kernel].manhattan else np.sqrt((d**2).sum(1))
    return np.sort(d if weight is None else d.repeat(weight.astype(int)))[k - 1]


def expected(kernel, query, X, y, scale, k, order, weight=None):
    found = [
        predicted(kernel, row[None], X, y, scale * reach(kernel, row, X, scale, k, weight), order, weight)[0]
        for row in query
    ]
    return np.array(found)


@pytest.mark.campaign(keep=12)
@pytest.mark.parametrize("k", [8, 150])
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("kernel", SMOOTH)
def test_predictions_are_those_of_the_bandwidth_at_each_query(kernel, width, order, k):
    X, y, query = data(width)
    y, scale = np.column_stack([y, X[:, 0]]), X.std(0)
    model = NadarayaWatsonRegressor(kernel, scale, n_neighbors=k, order=order).fit(X, y)
    wanted = expected(kernel, query, X, y, scale, k, order)
    np.testing.assert_allclose(model.predict(query), wanted, atol=1e-9)
    np.testing.assert_allclose(model.weights(query) @ y, wanted, atol=1e-9)
    by_rule = NadarayaWatsonRegressor(kernel, n_neighbors=k, order=order).fit(X, y)
    np.testing.assert_allclose(by_rule.predict(query), wanted, atol=1e-9)
    rows = [expected(kernel, X[[i]], np.delete(X, i, 0), np.delete(y, i, 0), scale, k, order)[0] for i in range(10)]
    np.testing.assert_allclose(model.loo_predict()[:10], rows, atol=1e-9)


@pytest.mark.parametrize("kernel", ["gaussian", "epanechnikov", "laplacian"])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_tree_and_all_pairs_agree(kernel, order, monkeypatch):
    monkeypatch.setattr(_evaluator, "NEIGHBOURS_SHARE_COMPILED", 0.1)
    monkeypatch.setattr(_evaluator, "TREE_POINTS_COMPACT", 0)
    X, y, query = data(1, 3000)
    model = NadarayaWatsonRegressor(kernel, n_neighbors=5 if kernel == "laplacian" else 20, order=order).fit(X, y)
    found = model.predict(query, return_std=True)
    assert model.plan_.by_tree
    pairs = NadarayaWatsonRegressor(kernel, n_neighbors=model.n_neighbors_, order=order).fit(X, y)
    pairs._evaluator.choose = lambda *_, **__: type(model.plan_)("exact", "", 0)
    for mine, theirs in zip(found, pairs.predict(query, return_std=True)):
        np.testing.assert_allclose(mine, theirs, atol=1e-8)


@pytest.mark.parametrize(("kernel", "k", "by_tree"), [
    ("gaussian", 5, True), ("gaussian", 20, False), ("laplacian", 5, False), ("epanechnikov", 5, False),
])  # fmt: skip
def test_a_tree_finds_few_neighbours_faster_than_compiled_kernels(kernel, k, by_tree):
    X, y, query = data(1, 12_000)
    model = NadarayaWatsonRegressor(kernel, n_neighbors=k).fit(X, y)
    model.predict(query)
    assert model.plan_.by_tree is by_tree
    assert model.plan_.method == ("tiles" if by_tree else "exact")


@pytest.mark.parametrize("k", [1, 5, 40])
@pytest.mark.parametrize("width", [1, 3])
def test_a_boxcar_is_the_k_nearest_neighbours_of_scikit_learn(k, width):
    X, y, query = data(width)
    model = NadarayaWatsonRegressor("boxcar", 1.0, n_neighbors=k).fit(X, y)
    np.testing.assert_allclose(model.predict(query), KNeighborsRegressor(k).fit(X, y).predict(query), atol=1e-12)
    votes = NadarayaWatsonClassifier("boxcar", 1.0, n_neighbors=k).fit(X, y > 0)
    theirs = KNeighborsClassifier(k).fit(X, y > 0)
    np.testing.assert_allclose(votes.predict_proba(query), theirs.predict_proba(query), atol=1e-12)


def test_weights_that_count_repetitions_count_as_neighbours():
    X, y, query = data(2, 80)
    w = np.random.default_rng(1).integers(1, 4, len(X)).astype(float)
    model = NadarayaWatsonRegressor(bandwidth=1.0, n_neighbors=30).fit(X, y, w)
    repeated = np.arange(len(X)).repeat(w.astype(int))
    alike = NadarayaWatsonRegressor(bandwidth=1.0, n_neighbors=30).fit(X[repeated], y[repeated])
    np.testing.assert_allclose(model.predict(query), alike.predict(query), atol=1e-12)
    np.testing.assert_allclose(model.predict(query), expected("gaussian", query, X, y, 1.0, 30, 0, w), atol=1e-12)
    np.testing.assert_allclose(model.loo_error(), alike.loo_error(), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["gaussian", "epanechnikov"])
def test_the_search_finds_the_least_leave_one_out_error(kernel):
    X, y, _ = data(1, 120)
    model = NadarayaWatsonRegressor(kernel, n_neighbors="loo", order=1).fit(X, y)
    errors = {
        k: NadarayaWatsonRegressor(kernel, n_neighbors=k, order=1).fit(X, y).loo_error() for k in range(2, 120, 3)
    }
    assert model.loo_error_ <= 1.02 * min(errors.values())
    assert model.loo_error_ == pytest.approx(model.loo_error())
    curve = model.loo_curve_
    assert curve.errors.min() == model.loo_error_ and model.n_neighbors_ in curve.n_neighbors
    assert (np.diff(curve.n_neighbors) > 0).all() and curve.n_neighbors[-1] == 119
    blocks = NadarayaWatsonRegressor(kernel, n_neighbors="loo", order=1, cv=4).fit(X, y)
    assert blocks.loo_curve_.n_neighbors[-1] == 90
    assert np.isfinite(blocks.cross_val_predict()).all()


def test_points_that_coincide_with_a_query():
    X = np.array([[0.0]] * 6 + [[1.0], [3.0]])
    y = np.arange(8.0)
    model = NadarayaWatsonRegressor("epanechnikov", 1.0, n_neighbors=3).fit(X, y)
    np.testing.assert_allclose(model.predict([[0.0]]), [2.5])
    gauss = NadarayaWatsonRegressor(bandwidth=1.0, n_neighbors=3).fit(X, y)
    np.testing.assert_allclose(gauss.predict([[0.0]]), predicted("gaussian", np.array([[0.0]]), X, y, 1.0))
    same = NadarayaWatsonRegressor(bandwidth=1.0, n_neighbors=3).fit(np.zeros((5, 1)), np.arange(5.0))
    np.testing.assert_allclose(same.predict([[0.0]]), [2.0])


def test_categories_angles_quantiles_and_explanations():
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.uniform(0, 24, 300), rng.normal(size=300), rng.integers(0, 3, 300)])
    y = np.cos(X[:, 0] * np.pi / 12) + (X[:, 2] == 1)
    metric = [("angular", 24), "euclidean", "categorical"]
    model = NadarayaWatsonRegressor(bandwidth=[5, 1, 0.5], metric=metric, n_neighbors=25, order=1).fit(X, y)
    unit = 24 / (2 * np.pi)
    for row in X[:5] + np.array([0.3, 0.1, 0]):
        turn = (X[:, 0] - row[0]) / unit
        u = np.column_stack([2 * unit * np.sin(turn / 2), X[:, 1] - row[1], X[:, 2] != row[2]]) / [5, 1, 0.5]
        d = np.sqrt((u**2).sum(1))
        root = np.exp(-((d / np.sort(d)[24]) ** 2) / 4)
        design = np.column_stack([np.ones(300), unit * np.sin(turn), X[:, 1] - row[1]])
        value = np.linalg.lstsq(root[:, None] * design, root * y, rcond=None)[0][0]
        assert model.predict(row[None])[0] == pytest.approx(value, abs=1e-9)
        shares = NadarayaWatsonRegressor("boxcar", [5, 1, 0.5], metric=metric, n_neighbors=25).fit(X, y)
        low, high = shares.predict_quantiles(row[None], (0, 1))[0]
        assert (low, high) == (y[d.argsort()[:25]].min(), y[d.argsort()[:25]].max())
        nearest = model.explain(row).rows[0]
        assert nearest["distance"] == pytest.approx(d[nearest["index"]] / np.sort(d)[24])


def test_float32_pickles_and_more_data():
    X, y, query = data(2)
    model = NadarayaWatsonRegressor(n_neighbors=20, dtype="float32").fit(X, y)
    assert model.predict(query).dtype == np.float32
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict(query), model.predict(query))
    more = NadarayaWatsonRegressor(bandwidth=1.0, n_neighbors="loo").partial_fit(X[:100], y[:100])
    k = more.n_neighbors_
    more.partial_fit(X[100:], y[100:])
    assert more.n_neighbors_ == k
    np.testing.assert_allclose(more.predict(query), expected("gaussian", query, X, y, 1.0, k, 0), atol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_neighbors": 0}, "n_neighbors must be"),
        ({"n_neighbors": "many"}, "n_neighbors must be a whole number, 'loo' or None, got 'many'"),
        ({"n_neighbors": 1, "kernel": "triangular"}, "n_neighbors must be"),
        ({"n_neighbors": 51}, "n_neighbors must be at most the number of rows, got 51 for n_samples = 50"),
        ({"bandwidth": "learned"}, "bandwidth must be a rule or numbers with n_neighbors"),
        ({"bandwidth": "loo"}, "bandwidth must be a rule or numbers with n_neighbors"),
        ({"kernel": "constant"}, "kernel must have a bandwidth for n_neighbors"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(options, message):
    X, y, _ = data(1, 50)
    with pytest.raises(ValueError, match=message):
        NadarayaWatsonRegressor(**{"n_neighbors": 5, **options}).fit(X, y)


def test_what_needs_one_bandwidth():
    X, y, _ = data(1, 50)
    model = NadarayaWatsonRegressor(n_neighbors=5).fit(X, y)
    with pytest.raises(ValueError, match="order must be 1 or 2 for slopes with n_neighbors"):
        model.predict_gradient(X)
    with pytest.raises(ValueError, match="estimator must have one bandwidth; loo_curve_ has the errors"):
        plot_loo(model)
