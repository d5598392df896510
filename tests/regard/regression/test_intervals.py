"""Conformal intervals: the quantile, coverage, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from regard.regression import NadarayaWatsonRegressor
from regard.regression.regressor import half_width


def sample(rng, n):
    X = rng.uniform(0, 6, (n, 1))
    return X, np.sin(X[:, 0]) + (0.1 + 0.1 * X[:, 0]) * rng.standard_t(4, n)


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
def test_intervals_cover_what_they_say(split):
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(60):
        X, y = sample(rng, 200)
        model = NadarayaWatsonRegressor(bandwidth=0.4)
        model = model.fit(X[:100], y[:100]).calibrate(X[100:], y[100:]) if split else model.fit(X, y)
        new, target = sample(rng, 200)
        low, high = model.predict_interval(new, 0.9).T
        covered.append(((low <= target) & (target <= high)).mean())
    # The mean of 60 shares, each of which scatters by about 0.03.
    assert np.mean(covered) == pytest.approx(0.9, abs=4 * 0.03 / 60**0.5 + 0.005)


def test_the_width_is_a_residual():
    rng = np.random.default_rng(1)
    X, y = sample(rng, 60)
    y = np.column_stack([y, 3 * y])
    model = NadarayaWatsonRegressor(bandwidth=0.5).fit(X, y)
    found = model.predict_interval(X[:7], 0.8)
    residuals = np.sort(np.abs(model.loo_predict() - y), 0)
    reach = residuals[int(np.ceil(61 * 0.8)) - 1]
    np.testing.assert_allclose(found, np.stack([model.predict(X[:7]) - reach, model.predict(X[:7]) + reach], -1))
    assert np.isinf(model.predict_interval(X[:1], 0.99)).all()


def test_weights_count_repetitions():
    rng = np.random.default_rng(2)
    residuals, times = rng.random((20, 1)), rng.integers(1, 4, 20)
    for coverage in (0.1, 0.5, 0.9, 0.97):
        many = half_width(np.repeat(residuals, times, 0), coverage)
        np.testing.assert_array_equal(half_width(residuals, coverage, times.astype(float)), many)


def test_training_again_forgets_residuals():
    rng = np.random.default_rng(3)
    X, y = sample(rng, 50)
    model = NadarayaWatsonRegressor(bandwidth=0.5).fit(X, y).calibrate(X, y + 100)
    assert np.diff(model.predict_interval(X[:1])).item() > 150
    model.partial_fit(X, y)
    assert np.diff(model.predict_interval(X[:1])).item() < 10


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, X, y: m.predict_interval(X, 1.0), "coverage must be a number in (0, 1), got 1.0"),
        (lambda m, X, y: m.calibrate(X, y[:3]), "y must have shape (30,), got (3,)"),
        (lambda m, X, y: m.calibrate(X, y * np.nan), "y must hold no NaN, got one"),
    ],
)
def test_what_cannot_be_is_a_sentence(call, message):
    X, y = sample(np.random.default_rng(4), 30)
    model = NadarayaWatsonRegressor(bandwidth=0.5).fit(X, y)
    with pytest.raises(ValueError) as caught:
        call(model, X, y)
    assert str(caught.value) == f"NadarayaWatsonRegressor: {message}."
