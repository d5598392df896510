"""Local parabolas and slopes, against least squares point by point, statsmodels and differences."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from reference import weights

from regard.regression import ExtrapolationWarning, NadarayaWatsonRegressor
from regard.scores.kernels import kernels

pytestmark = pytest.mark.filterwarnings("ignore::regard.regression.ExtrapolationWarning")
SMOOTH = [name for name, form in kernels().items() if form.smooth]


def fitted(kernel, query, X, y, bandwidth, order, sample_weight=None):
    """Return value, slopes and weights on the targets of a polynomial by weighted least squares, for each query."""
    values, slopes, rows = [], [], []
    for row, w in zip(query, weights(kernel, query, X, bandwidth, sample_weight)):
        u = (X - row) / bandwidth
        i, j = np.triu_indices(X.shape[1])
        design = np.column_stack([np.ones(len(X)), u, *([u[:, i] * u[:, j]] if order == 2 else [])])
        root = np.sqrt(w)[:, None]
        solved = np.linalg.pinv(root * design) * root.T
        values.append(solved[0] @ y)
        slopes.append((solved[1 : 1 + X.shape[1]] @ y).T / bandwidth)
        rows.append(solved[0])
    slopes = np.array(slopes)
    return np.array(values), slopes if y.ndim == 1 else slopes.transpose(0, 2, 1), np.array(rows)


def data(width, count=200, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(count, width))
    return X, np.sin(2 * X[:, 0]) + X[:, -1] ** 2 + 0.1 * rng.normal(size=count), 0.7 * rng.normal(size=(25, width))


@pytest.mark.campaign(keep=24)
@pytest.mark.parametrize("method", ["exact", "tiles"])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("kernel", kernels())
def test_values_slopes_and_weights_are_least_squares(kernel, width, order, method):
    X, y, query = data(width)
    rng = np.random.default_rng(width)
    y, w = np.column_stack([y, rng.normal(size=len(X))]), rng.uniform(0.5, 2, len(X))
    h = rng.uniform(0.9, 1.1, width) * (2.0 if kernels()[kernel].compact else 0.5)
    values, slopes, rows = fitted(kernel, query, X, y, h, order, w)
    model = NadarayaWatsonRegressor(kernel, h, order=order, method=method).fit(X, y, w)
    np.testing.assert_allclose(model.predict(query), values, atol=1e-10)
    np.testing.assert_allclose(model.predict_gradient(query), slopes, atol=1e-9)
    np.testing.assert_allclose(model.weights(query), rows, atol=1e-10)


@pytest.mark.parametrize("kernel", SMOOTH)
@pytest.mark.parametrize("width", [1, 3])
def test_slopes_of_an_average_are_its_derivatives(kernel, width):
    X, y, query = data(width)
    h = 2.0 if kernels()[kernel].compact else 0.5
    model = NadarayaWatsonRegressor(kernel, h).fit(X, y)
    steps = 1e-6 * np.eye(width)
    expected = np.stack([(model.predict(query + step) - model.predict(query - step)) / 2e-6 for step in steps], 1)
    np.testing.assert_allclose(model.predict_gradient(query), expected, atol=1e-7)
    by_tiles = NadarayaWatsonRegressor(kernel, h, method="tiles").fit(X, y).predict_gradient(query)
    np.testing.assert_allclose(by_tiles, expected, atol=1e-7)


def test_slopes_of_lines_agree_with_marginal_effects_of_statsmodels():
    from statsmodels.nonparametric.kernel_regression import KernelReg

    X, y, query = data(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about a generator that is not used
        theirs = KernelReg(y, X, var_type="cc", reg_type="ll", bw=[0.4, 0.6])
    found = NadarayaWatsonRegressor(bandwidth=[0.4, 0.6], order=1).fit(X, y).predict_gradient(query)
    np.testing.assert_allclose(found, theirs.fit(query)[1], atol=1e-8)


@pytest.mark.parametrize("bandwidth", [0.01, 0.1, 1.0, 100.0, 1e160])
@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_a_parabola_is_exact_on_quadratic_data(bandwidth, shift):
    x = np.linspace(-3, 3, 2000)
    X, query = x[:, None] + shift, np.linspace(-3, 3, 301)
    y = 1 + 2 * x - 3 * x**2
    model = NadarayaWatsonRegressor(bandwidth=bandwidth, order=2).fit(X, y)
    np.testing.assert_allclose(model.predict(query[:, None] + shift), 1 + 2 * query - 3 * query**2, atol=1e-8)
    np.testing.assert_allclose(model.predict_gradient(query[:, None] + shift)[:, 0], 2 - 6 * query, atol=1e-6)


@pytest.mark.slow
def test_a_parabola_in_three_dimensions_is_exact_on_products():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(800, 3)) * [1e-3, 1.0, 1e3]
    u = X / [1e-3, 1.0, 1e3]
    y = u[:, 0] * u[:, 1] - u[:, 1] * u[:, 2] + u[:, 2] ** 2 - u[:, 0]
    model = NadarayaWatsonRegressor(bandwidth="loo", order=2).fit(X, y)
    np.testing.assert_allclose(model.predict(X[:50]), y[:50], atol=1e-7)
    slopes = np.stack([u[:, 1] - 1, u[:, 0] - u[:, 2], 2 * u[:, 2] - u[:, 1]], 1) / [1e-3, 1.0, 1e3]
    np.testing.assert_allclose(model.predict_gradient(X[:50]) * [1e-3, 1, 1e3], slopes[:50] * [1e-3, 1, 1e3], atol=1e-6)


@pytest.mark.parametrize("order", [1, 2])
def test_angles_and_categories(order):
    rng = np.random.default_rng(0)
    n, unit = 300, 24 / (2 * np.pi)
    X = np.column_stack([rng.uniform(0, 24, n), rng.normal(size=n), rng.integers(0, 3, n)])
    y = np.cos(X[:, 0] / unit) + X[:, 1] ** 2 * (X[:, 2] == 1)
    query, h = X[:20] + np.array([0.3, 0.1, 0]), np.array([4, 0.7, 0.5])
    metric = [("angular", 24), "euclidean", "categorical"]
    model = NadarayaWatsonRegressor(bandwidth=h, order=order, metric=metric).fit(X, y)
    expected = []
    for row in query:
        turn, d = (X[:, 0] - row[0]) / unit, X[:, 1] - row[1]
        u = np.column_stack([2 * unit * np.sin(turn / 2), d, X[:, 2] != row[2]]) / h
        s = unit * np.sin(turn)
        design = np.column_stack([np.ones(n), s, d, *([s * s, s * d, d * d] if order == 2 else [])])
        root = np.exp(-(u**2).sum(1) / 4)
        expected.append(np.linalg.lstsq(root[:, None] * design, root * y, rcond=None)[0][:3])
    slopes = model.predict_gradient(query)
    np.testing.assert_allclose(np.column_stack([model.predict(query), slopes[:, :2]]), expected, atol=1e-9)
    assert np.isnan(slopes[:, 2]).all()


def test_slopes_of_an_average_of_angles_are_derivatives():
    hours = np.random.default_rng(0).uniform(0, 24, (200, 1))
    model = NadarayaWatsonRegressor(bandwidth=2.0, metric=("angular", 24)).fit(hours, np.cos(hours[:, 0] * np.pi / 12))
    at = np.array([[0.0], [7.0], [23.5]])
    expected = (model.predict(at + 1e-5) - model.predict(at - 1e-5)) / 2e-5
    np.testing.assert_allclose(model.predict_gradient(at)[:, 0], expected, atol=1e-8)


@pytest.mark.filterwarnings("ignore:.*rows depend on those next to them")
@pytest.mark.parametrize("kernel", ["gaussian", "epanechnikov"])
def test_searches_and_predictions_without_a_row(kernel):
    X, y, _ = data(2, 120)
    w = np.random.default_rng(1).integers(1, 3, len(X)).astype(float)
    model = NadarayaWatsonRegressor(kernel, "loo", order=2).fit(X, y, w)
    h, repeated = model.bandwidth_, np.arange(len(X)).repeat(w.astype(int))
    X, y = X[repeated], y[repeated]
    expected = [fitted(kernel, X[[i]], np.delete(X, i, 0), np.delete(y, i), h, 2)[0][0] for i in range(len(X))]
    alone = NadarayaWatsonRegressor(kernel, h, order=2).fit(X, y)
    np.testing.assert_allclose(alone.loo_predict()[:20], expected[:20], atol=1e-7)
    assert model.loo_error_ == pytest.approx(alone.loo_error(), rel=1e-9)
    assert model.loo_error_ <= min(alone.loo_error(h * 0.8), alone.loo_error(h * 1.2))


@pytest.mark.slow
def test_learned_bandwidths_of_a_parabola():
    X, y, _ = data(2, 120)
    model = NadarayaWatsonRegressor(bandwidth="learned", order=2, max_iter=5).fit(X, y)
    assert model.loo_error_ <= NadarayaWatsonRegressor(bandwidth="loo", order=2).fit(X, y).loo_error_


@pytest.mark.parametrize("order", [1, 2])
def test_the_standard_deviation_has_the_residual_degrees_of_freedom(order):
    X, y, query = data(2)
    model = NadarayaWatsonRegressor(bandwidth=0.7, order=order).fit(X, y)
    found = model.predict(query, return_std=True)[1]
    for row, w, std in zip(query, weights("gaussian", query, X, 0.7), found):
        u, (i, j), a = X - row, np.triu_indices(2), w / w.sum()
        design = np.column_stack([np.ones(len(X)), u, *([u[:, i] * u[:, j]] if order == 2 else [])])
        gram = design.T @ (a[:, None] * design)
        residual = y - design @ np.linalg.solve(gram, design.T @ (a * y))
        freedom = 1 - np.trace(np.linalg.solve(gram, design.T @ (a[:, None] ** 2 * design)))
        if not np.isnan(std):
            assert std == pytest.approx(np.sqrt(a @ residual**2 / freedom), rel=1e-7)
    assert not np.isnan(found).all()


def test_quantiles_shift_along_the_parabola():
    X = np.linspace(-1, 1, 201)[:, None]
    model = NadarayaWatsonRegressor("boxcar", 0.5, order=2).fit(X, X[:, 0] ** 2)
    np.testing.assert_allclose(model.predict_quantiles([[0.0], [0.3]], (0.1, 0.9)), [[0, 0], [0.09, 0.09]], atol=1e-9)


def test_too_few_points_for_a_parabola_leave_a_line_and_then_a_constant():
    two = NadarayaWatsonRegressor(bandwidth=1.0, order=2).fit([[0.0], [1.0]], [0.0, 2.0])
    np.testing.assert_allclose(two.predict([[0.5], [2.0]]), [1.0, 4.0])
    np.testing.assert_allclose(two.predict_gradient([[0.5], [2.0]]), [[2.0], [2.0]])
    one = NadarayaWatsonRegressor(bandwidth=1.0, order=2).fit([[0.0], [0.0]], [0.0, 2.0])
    np.testing.assert_allclose(one.predict([[0.5]]), [1.0])
    assert np.isnan(one.predict_gradient([[0.5]])).all()


def test_slopes_that_points_do_not_determine_are_nan():
    t = np.linspace(-2, 2, 100)
    X = np.column_stack([t, 2 * t, np.random.default_rng(0).normal(size=100)])
    slopes = NadarayaWatsonRegressor(bandwidth=0.7, order=1).fit(X, 4 * t + X[:, 2]).predict_gradient(X[40:60])
    assert np.isnan(slopes[:, :2]).all()
    np.testing.assert_allclose(slopes[:, 2], 1.0)


def test_slopes_far_away_are_nan_with_a_warning():
    model = NadarayaWatsonRegressor("epanechnikov", 0.5, order=1).fit([[0.0], [0.1]], [0.0, 0.1])
    with pytest.warns(ExtrapolationWarning, match="1 of 2 queries"):
        slopes = model.predict_gradient([[0.0], [5.0]])
    np.testing.assert_allclose(slopes, [[1.0], [np.nan]])
    with pytest.raises(ValueError, match="lie within the kernel's reach"):
        model.set_params(empty="raise").predict_gradient([[5.0]])


def test_more_than_three_numbers_are_refused():
    X = np.random.default_rng(0).normal(size=(50, 4))
    model = NadarayaWatsonRegressor(order=2)
    with pytest.raises(ValueError, match=r"X must have at most 3 numeric features for order=2 .* got 4"):
        model.fit(X, X[:, 0])
    codes = X.copy()
    codes[:, 3] = np.arange(50) % 3
    model.set_params(metric={3: "categorical"}).fit(codes, X[:, 0]).predict(codes)


@pytest.mark.parametrize("kernel", ["boxcar", "constant"])
def test_an_average_that_does_not_change_smoothly_has_no_slopes(kernel):
    model = NadarayaWatsonRegressor(kernel, 1.0).fit([[0.0], [1.0]], [0.0, 1.0])
    with pytest.raises(ValueError, match="order must be 1 or 2 for slopes with a kernel whose weights"):
        model.predict_gradient([[0.5]])


def test_methods_say_that_slopes_and_parabolas_are_exact():
    pytest.importorskip("finufft")
    X, y, query = data(1)
    model = NadarayaWatsonRegressor(bandwidth=0.5, method="nufft", order=1).fit(X, y)
    exact = NadarayaWatsonRegressor(bandwidth=0.5, method="exact", order=1).fit(X, y)
    np.testing.assert_allclose(model.predict_gradient(query), exact.predict_gradient(query), atol=1e-9)
    assert model.plan_.method == "tiles" and "slopes are summed up exactly" in model.plan_.reason
    with pytest.warns(match="parabolas are summed up exactly"):
        NadarayaWatsonRegressor(bandwidth=0.5, method="nufft", order=2).fit(X, y)
