"""Standard errors and bands of the mean, effective degrees of freedom, and AICc: against dense matrices in NumPy."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from pairwise import across
from reference import weights
from scipy.stats import t as student
from tiers import sized

from regard.regression import NadarayaWatsonClassifier, NadarayaWatsonRegressor

WAYS = [("nufft", "gaussian"), *product(["exact", "tiles"], ["gaussian", "epanechnikov", "laplacian"])]


pytestmark = pytest.mark.usefixtures("quiet")


def data(seed, n=150, d=1):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    y = np.column_stack([np.sin(2 * X[:, 0]) + 0.2 * rng.normal(size=n), 5 + X[:, -1] + rng.normal(size=n)])
    return X, y, 0.8 * rng.normal(size=(25, d)), [None, rng.uniform(0.3, 2, n), rng.integers(1, 4, n).astype(float)]


def repeated(X, y, weight):
    """Return the rows with their repetitions and what is left of their weights."""
    if weight is None or (weight != weight.round()).any():
        return X, y, weight
    times = weight.astype(int)
    return np.repeat(X, times, 0), np.repeat(y, times, 0), None


def local(kernel, row, X, y, bandwidth, order, weight):
    """Return the effective weights (n,), the local variance (M,) and its degrees of freedom, from whole matrices."""
    w = weights(kernel, row[None], X, bandwidth, weight)[0]
    w = w / w.sum()
    design = np.column_stack([np.ones(len(X)), *(order * (X - row).T)])[:, : 1 + order * X.shape[1]]
    inverse = np.linalg.inv(design.T @ (w[:, None] * design))
    coefficients = inverse @ (design.T * w)
    share = 1 - np.trace(inverse @ (design.T * w**2) @ design)
    variance = w @ (y - design @ (coefficients @ y)) ** 2 / share
    return coefficients[0], variance, share / (w @ w)


@across({("method", "kernel"): WAYS, "order": [0, 1], "d": [1, 2], "weighing": [0, 1, 2]})
def test_errors_and_bands_are_those_of_effective_weights(method, kernel, order, d, weighing):
    X, y, query, ways = data(d, d=d)
    weight = ways[weighing]
    model = NadarayaWatsonRegressor(kernel, 0.7, order=order, method=method, rtol=1e-9).fit(X, y, weight)
    mean, std, se = model.predict(query, return_std=True, return_se=True)
    band = model.predict_band(query, 0.9)
    assert model.plan_.method == method and band.shape == (*mean.shape, 2)
    known = ~np.isnan(std).any(1)
    assert known.sum() > 15
    np.testing.assert_array_equal(np.isnan(se), np.isnan(std))
    np.testing.assert_array_equal(np.isnan(band[..., 0]), np.isnan(std))
    for i in np.flatnonzero(known):
        line, variance, freedom = local(kernel, query[i], *repeated(X, y, weight)[:2], 0.7, order,
                                        repeated(X, y, weight)[2])  # fmt: skip
        expected = np.sqrt(variance * (line @ line))
        np.testing.assert_allclose(se[i], expected, rtol=5e-9)
        np.testing.assert_allclose(std[i], np.sqrt(variance), rtol=5e-9)
        reach = student.ppf(0.95, freedom) * expected
        np.testing.assert_allclose(band[i], np.stack([mean[i] - reach, mean[i] + reach], 1), rtol=5e-9)


def test_what_predict_returns_and_its_dtypes():
    X, y, query, _ = data(0)
    model = NadarayaWatsonRegressor(bandwidth=0.5).fit(X.astype(np.float32), y[:, 0])
    mean, se = model.predict(query.astype(np.float32), return_se=True)
    assert mean.shape == se.shape == (25,) and mean.dtype == se.dtype == np.float32
    assert model.predict_band(query.astype(np.float32)).dtype == np.float32
    _, std, again = model.predict(query.astype(np.float32), return_std=True, return_se=True)
    np.testing.assert_array_equal(se, again)
    known = np.isfinite(se)
    assert (se[known] < std[known]).all()


def test_repeated_observations_halve_the_variance_of_the_mean():
    X, y, query, _ = data(0)
    once, often = (NadarayaWatsonRegressor(bandwidth=0.5).fit(X, y[:, 0], np.full(150, w)) for w in (1, 400))
    (_, s, a), (_, t, b) = (m.predict(query[:5], return_std=True, return_se=True) for m in (once, often))
    np.testing.assert_allclose(b / t * 20, a / s, rtol=1e-10)


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize(("kernel", "order", "width"), [("boxcar", 0, 0.1), ("boxcar", 1, 0.2), ("gaussian", 1, 0.08)])
def test_bands_cover_a_mean_without_bias(kernel, order, width):
    rng = np.random.default_rng(0)
    query, inside = np.linspace(0.1, 0.9, 9)[:, None], []
    for _ in range(120):
        X = rng.random((60, 1))
        slope = 3.0 * order
        y = 1 + slope * X[:, 0] + (0.2 + X[:, 0]) * rng.normal(size=60)
        low, high = NadarayaWatsonRegressor(kernel, width, order=order).fit(X, y).predict_band(query, 0.9).T
        truth = 1 + slope * query[:, 0]
        inside.append(((low <= truth) & (truth <= high))[~np.isnan(low)].mean())
    # The mean of 120 shares, each of nine bands that are correlated.
    assert np.mean(inside) == pytest.approx(0.9, abs=4 * np.std(inside) / 120**0.5 + 0.01)


@pytest.mark.slow
def test_bias_is_left_out_and_a_narrower_bandwidth_makes_it_small():
    rng = np.random.default_rng(0)
    peak, covered = np.array([[np.pi / 2 / 6]]), {0.15: [], 0.03: []}
    for _, (width, found) in product(range(sized(150, 50)), covered.items()):
        X = rng.random((200, 1))
        model = NadarayaWatsonRegressor(bandwidth=width, order=1).fit(
            X, np.sin(6 * X[:, 0]) + 0.3 * rng.normal(size=200)
        )
        low, high = model.predict_band(peak)[0]
        found.append(low <= 1 <= high)
    assert np.mean(covered[0.15]) < 0.5 < 0.9 < np.mean(covered[0.03])


def test_no_band_beyond_the_data_and_from_one_point():
    model = NadarayaWatsonRegressor("boxcar", 0.5).fit([[0.0], [0.2], [5.0]], [0.0, 1.0, 2.0])
    band = model.predict_band([[0.1], [5.0], [50.0]])
    np.testing.assert_array_equal(np.isnan(band).all(1), [False, True, True])
    half = student.ppf(0.975, 1) * np.std([0, 1], ddof=1) / 2**0.5
    np.testing.assert_allclose(band[0], [0.5 - half, 0.5 + half])


# Degrees of freedom and AICc ------------------------------------------------------------------------------------------


def smoother_matrix(kernel, X, y, bandwidth, order, weight):
    return np.array([local(kernel, row, X, y, bandwidth, order, weight)[0] for row in X])


@across({("method", "kernel"): WAYS, "order": [0, 1], "d": [1, 2], "weighing": [0, 1, 2]})
def test_degrees_of_freedom_and_aicc_are_those_of_the_smoother_matrix(method, kernel, order, d, weighing):
    X, y, _, ways = data(d, d=d)
    X = X.clip(-1.5, 1.5)  # a line through few points magnifies rounding
    weight = ways[weighing]
    model = NadarayaWatsonRegressor(kernel, 1.2, order=order, method=method).fit(X, y, weight)
    rows, targets, rest = repeated(X, y, weight)
    S = smoother_matrix(kernel, rows, targets, 1.2, order, rest)
    assert model.effective_dof() == pytest.approx(np.trace(S), rel=1e-7)
    n, trace = len(rows), np.trace(S)
    variance = np.average((targets - S @ targets) ** 2, axis=0, weights=rest)
    expected = np.log(variance).mean() + 1 + 2 * (trace + 1) / (n - trace - 2)
    assert model.aicc() == pytest.approx(expected, rel=1e-7)


def test_aicc_agrees_with_statsmodels():
    from statsmodels.nonparametric.kernel_regression import KernelReg

    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (80, 1))
    y = np.sin(3 * X[:, 0]) + 0.2 * rng.normal(size=80)
    theirs = KernelReg(y, X, "c", "lc", bw="aic")
    model = NadarayaWatsonRegressor(bandwidth="aicc").fit(X, y)
    for width in (*theirs.bw, 0.05, 0.4):
        expected = float(np.squeeze(theirs.aic_hurvich(np.array([width]))))
        assert model.aicc(width) == pytest.approx(expected, abs=1e-10)
    np.testing.assert_allclose(model.bandwidth_, theirs.bw, rtol=2e-3)


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(("kernel", "order"), [("gaussian", 0), ("gaussian", 1), ("epanechnikov", 1), ("boxcar", 0)])
def test_the_search_finds_the_least_aicc_of_a_fine_grid(kernel, order):
    X, y, _, _ = data(3, n=120)
    model = NadarayaWatsonRegressor(kernel, "aicc", order=order).fit(X, y[:, 0])
    curve = model.aicc_curve_
    assert curve.errors.min() == pytest.approx(model.aicc(), rel=1e-9)
    grid = [model.aicc(model.bandwidth_ * each) for each in np.geomspace(0.05, 20, 300)]
    # The criterion of a kernel with an edge is not smooth.
    assert model.aicc() <= min(grid) + (1e-5 if kernel == "gaussian" else 0.02)
    assert not hasattr(model, "loo_error_") and not hasattr(model, "loo_curve_")
    model.set_params(bandwidth="loo").fit(X, y[:, 0])
    assert not hasattr(model, "aicc_curve_")


def test_a_wide_bandwidth_has_as_many_degrees_of_freedom_as_coefficients():
    X, y, _, _ = data(0, d=3)
    for order, count in ((0, 1), (1, 4)):
        model = NadarayaWatsonRegressor(bandwidth=1e4, order=order).fit(X, y)
        assert model.effective_dof() == pytest.approx(count, abs=1e-4)
        assert model.effective_dof(1e-6) == pytest.approx(len(X))
        assert model.aicc(1e-6) == np.inf
    labels = NadarayaWatsonClassifier(bandwidth=1e4).fit(X, y[:, 0] > 0)
    assert labels.effective_dof() == pytest.approx(1, abs=1e-4)


def test_a_subsample_estimates_them():
    X, y, _, _ = data(0, n=3000)
    every = NadarayaWatsonRegressor(bandwidth=0.1).fit(X, y[:, 0])
    some = NadarayaWatsonRegressor(bandwidth=0.1, subsample=1500, random_state=0).fit(X, y[:, 0])
    assert some.effective_dof() == pytest.approx(every.effective_dof(), rel=0.1)
    assert some.aicc() == pytest.approx(every.aicc(), abs=0.1)
    assert some.aicc() != every.aicc()


def test_a_perfect_fit_takes_the_widest_bandwidth():
    X = np.linspace(0, 1, 60)[:, None]
    model = NadarayaWatsonRegressor(bandwidth="aicc", order=1).fit(X, 3 * X[:, 0] - 1)
    assert model.bandwidth_[0] > 2
    np.testing.assert_allclose(model.predict([[0.3]]), [-0.1])


def test_a_far_row_does_not_choose_the_bandwidth():
    X, y, _, _ = data(5, n=100)
    without = NadarayaWatsonRegressor(bandwidth="aicc").fit(X, y[:, 0])
    with_far = NadarayaWatsonRegressor(bandwidth="aicc").fit(np.r_[X, [[1e6]]], np.r_[y[:, 0], 3.0])
    assert with_far.far_rows_.tolist() == [100]
    np.testing.assert_allclose(with_far.bandwidth_, without.bandwidth_, rtol=0.02)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda X, y: NadarayaWatsonClassifier(bandwidth="aicc").fit(X, y > 0),
         "Classifier: bandwidth must be 'loo' or another way for classes: AICc is of normal errors, got 'aicc'"),
        (lambda X, y: NadarayaWatsonRegressor(bandwidth="aicc").fit(X[:3], y[:3]),
         "Regressor: X must have at least 3 rows more than the degrees of freedom that the widest bandwidth takes, got "
         "3 rows"),
        (lambda X, y: NadarayaWatsonRegressor().fit(X, y).effective_dof("loo"),
         "Regressor: bandwidth must be a number, or one for each feature, got 'loo'"),
        (lambda X, y: NadarayaWatsonRegressor().fit(X, y).predict_band(X, 0.0),
         "Regressor: coverage must be a number in (0, 1), got 0.0"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_a_sentence(call, message):
    X, y, _, _ = data(0)
    with pytest.raises(ValueError) as caught:
        call(X, y[:, 0])
    assert str(caught.value) == f"NadarayaWatson{message}."
