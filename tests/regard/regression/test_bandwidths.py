"""Bandwidths that are chosen: the least leave-one-out error, by brute force, and widths that tell features apart."""

from __future__ import annotations

import numpy as np
import pytest

from regard.regression import NadarayaWatsonRegressor

KERNELS = {
    "gaussian": lambda square: np.exp(-0.5 * square),
    "epanechnikov": lambda square: np.maximum(1 - square, 0),
}


def refitted(X: np.ndarray, y: np.ndarray, bandwidth: np.ndarray, kernel: str, order: int) -> np.ndarray:
    """Return the prediction of each point by a fit to all the others."""
    found = np.empty(len(X))
    for i in range(len(X)):
        away, target = np.delete(X, i, 0) - X[i], np.delete(y, i)
        square = ((away / bandwidth) ** 2).sum(1)
        weight = KERNELS[kernel](square)
        if not weight.any():
            found[i] = target[square.argmin()]
        elif order:
            design = np.column_stack([np.ones(len(away)), away])
            root = np.sqrt(weight)
            found[i] = np.linalg.lstsq(design * root[:, None], target * root, rcond=None)[0][0]
        else:
            found[i] = weight @ target / weight.sum()
    return found


def waves(n: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 3, (n, width))
    return X, np.sin(2 * X).sum(1) + 0.3 * rng.normal(size=n)


CASES = pytest.mark.parametrize(
    ("width", "kernel", "order"),
    [(1, "gaussian", 0), (3, "gaussian", 0), (1, "gaussian", 1), (2, "epanechnikov", 0)],
)


@CASES
def test_left_out_predictions_are_those_of_refits(width: int, kernel: str, order: int) -> None:
    X, y = waves(60, width)
    bandwidth = np.linspace(0.8, 1.2, width)
    model = NadarayaWatsonRegressor(kernel, bandwidth, order=order).fit(X, y)
    brute = refitted(X, y, bandwidth, kernel, order)
    np.testing.assert_allclose(model.loo_predict(), brute, rtol=0, atol=1e-9)
    assert model.loo_error() == pytest.approx(np.mean((brute - y) ** 2), rel=1e-9)


@CASES
@pytest.mark.filterwarnings("ignore:.*beyond the reach")
def test_loo_finds_the_least_error_to_a_percent(width: int, kernel: str, order: int) -> None:
    X, y = waves(80, width)
    model = NadarayaWatsonRegressor(kernel, "loo", order=order).fit(X, y)

    def error(bandwidth: np.ndarray) -> float:
        return float(np.mean((refitted(X, y, bandwidth, kernel, order) - y) ** 2))

    least = min(error(X.std(0) * multiple) for multiple in np.geomspace(0.03, 6, 60))
    assert error(model.bandwidth_) <= 1.01 * least
    assert model.loo_error_ == pytest.approx(error(model.bandwidth_), rel=1e-6)
    assert model.loo_error_ == model.loo_curve_.errors.min()


def test_learned_tells_features_apart_that_say_nothing() -> None:
    rng = np.random.default_rng(0)
    X, fresh = rng.normal(size=(200, 5)), rng.normal(size=(300, 5))

    def signal(X: np.ndarray) -> np.ndarray:
        return np.sin(2 * X[:, 0]) + 0.5 * X[:, 1]

    y = signal(X) + 0.2 * rng.normal(size=len(X))
    models = {way: NadarayaWatsonRegressor(bandwidth=way).fit(X, y) for way in ("loo", "learned")}
    missed = {way: np.sqrt(np.mean((model.predict(fresh) - signal(fresh)) ** 2)) for way, model in models.items()}
    assert missed["loo"] > 1.5 * missed["learned"]
    assert models["learned"].bandwidth_[2:].min() > 3 * models["learned"].bandwidth_[:2].max()
    assert models["learned"].loo_error_ < models["loo"].loo_error_


def test_learned_bandwidth_is_a_minimum() -> None:
    X, y = waves(100, 2)
    begin = NadarayaWatsonRegressor(bandwidth="loo").fit(X, y).bandwidth_
    model = NadarayaWatsonRegressor(bandwidth="learned", tol=1e-10).fit(X, y)

    def goal(width: np.ndarray) -> float:  # both features matter; a prior with a standard deviation of 1/4
        return float(np.log(model.loo_error(width)) + (np.log(width / begin) ** 2).sum() / (100 / 16))

    for factor in ([1.05, 1.0], [0.95, 1.0], [1.0, 1.05], [1.0, 0.95]):
        assert goal(model.bandwidth_ * factor) > goal(model.bandwidth_)


@pytest.mark.slow
def test_learning_from_many_rows_compares_some_and_scales_to_all() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(3_000, 4))
    y = np.sin(2 * X[:, 0]) + 0.5 * X[:, 1] + 0.2 * rng.normal(size=len(X))
    model = NadarayaWatsonRegressor(bandwidth="learned", random_state=0).fit(X, y)
    assert model.bandwidth_[2:].min() > 100 * model.bandwidth_[:2].max()
    assert model.loo_error_ == pytest.approx(model.loo_error(), rel=1e-9), "of all rows"
    for factor in (0.8, 1.25):
        assert model.loo_error(model.bandwidth_ * factor) > model.loo_error_
    few = NadarayaWatsonRegressor(bandwidth="learned").fit(X[:200], y[:200])
    assert (few.bandwidth_[:2] > model.bandwidth_[:2]).all()
    folds = NadarayaWatsonRegressor(bandwidth="learned", cv=4, random_state=0).fit(X, y)
    assert model.loo_error(folds.bandwidth_) < 1.05 * model.loo_error_
    assert folds.bandwidth_[2:].min() > 100 * folds.bandwidth_[:2].max()


def test_a_feature_that_only_disturbs_is_screened_out() -> None:
    X, y = waves(150, 3)
    y = y - y.mean()
    X[:, 2] = np.random.default_rng(1).normal(size=len(X))
    model = NadarayaWatsonRegressor(bandwidth="learned").fit(X, y)
    alone = NadarayaWatsonRegressor(bandwidth="learned").fit(X[:, :2], y)
    assert model.bandwidth_[2] > 100 * X[:, 2].std()
    np.testing.assert_allclose(model.predict(X), alone.predict(X[:, :2]), atol=0.1)
