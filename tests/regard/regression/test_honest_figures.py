"""Figures that hold on new rows: far rows, ties, dependent rows, weights as repetitions, nested estimates."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from sklearn.model_selection import GroupKFold

from regard import RegardWarning
from regard.regression import NadarayaWatsonClassifier, NadarayaWatsonRegressor


def autoregressive(rho: float, seed: int = 0, n: int = 400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return times, a sine with noise that depends on the noise before it, and the sine."""
    rng, noise = np.random.default_rng(seed), np.zeros(n)
    for i in range(1, n):
        noise[i] = rho * noise[i - 1] + 0.5 * rng.normal()
    time = np.linspace(0, 10, n)
    return time[:, None], np.sin(time) + noise, np.sin(time)


class TestFarRows:
    def test_one_far_row_is_named_and_leaves_the_bandwidth_alone(self):
        x = np.append(np.random.default_rng(0).uniform(size=300), 1e6)
        clean = NadarayaWatsonRegressor(bandwidth="loo").fit(x[:300, None], x[:300])
        with pytest.warns(RegardWarning, match=r"in x0, row 300 \(1e\+06\), counted from 0, lies far from all others"):
            model = NadarayaWatsonRegressor(bandwidth="loo").fit(x[:, None], x)
        assert model.far_rows_.tolist() == [300]
        assert model.bandwidth_[0] == pytest.approx(clean.bandwidth_[0], rel=0.05)
        assert model.loo_error_ == pytest.approx(clean.loo_error_, rel=0.05)
        assert model.predict([[0.5]])[0] == pytest.approx(0.5, abs=0.01)
        rule = NadarayaWatsonRegressor()
        with pytest.warns(RegardWarning, match="row 300"):
            rule.fit(x[:, None], x)
        assert rule.bandwidth_[0] == pytest.approx(
            NadarayaWatsonRegressor().fit(x[:300, None], x[:300]).bandwidth_[0], rel=0.01
        )

    @pytest.mark.parametrize("shape", ["normal", "lognormal", "exponential", "rare", "clusters"])
    def test_ordinary_data_have_none(self, shape):
        rng = np.random.default_rng(1)
        x = {
            "normal": rng.normal(size=500), "lognormal": rng.lognormal(size=500),
            "exponential": rng.exponential(size=500),
            "rare": (rng.random(500) < 0.02) * 1.0, "clusters": np.repeat([0.0, 100.0], 250) + rng.normal(size=500),
        }[shape]  # fmt: skip
        model = NadarayaWatsonRegressor().fit(x[:, None], x)
        assert len(model.far_rows_) == 0
        assert model.bandwidth_[0] == pytest.approx(x.std() * 500**-0.2)


class TestTies:
    def test_of_equal_errors_the_widest_bandwidth_is_chosen(self):
        X, y = np.arange(30.0)[:, None], np.ones(30)
        model = NadarayaWatsonRegressor(bandwidth="loo").fit(X, y)
        assert model.bandwidth_[0] == pytest.approx(10 * X.std(), rel=1e-2)
        assert not np.isnan(model.predict([[3.0]], return_std=True)[1]).any()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RegardWarning)
            twice = NadarayaWatsonRegressor(bandwidth="loo").fit(np.repeat(X, 2, 0), np.repeat(X[:, 0] % 7, 2))
        assert twice.loo_error_ == pytest.approx(0)
        curve = twice.loo_curve_
        assert (curve.errors[curve.bandwidths[:, 0] > twice.bandwidth_[0]] > 0).all()
        assert not np.isnan(twice.predict(X, return_std=True)[1]).any()

    def test_the_narrowest_of_the_grid_is_pointed_out(self):
        rng = np.random.default_rng(0)
        X = np.repeat(rng.normal(size=(40, 2)), 2, 0)
        y = np.repeat(rng.normal(size=40), 2) + 1e-3 * rng.normal(size=80)
        with pytest.warns(RegardWarning, match="the least error is that of the narrowest bandwidth tried"):
            NadarayaWatsonRegressor(bandwidth="loo").fit(X, y)


class TestDependentRows:
    @pytest.mark.slow
    def test_dependence_is_pointed_out_and_blocks_help(self):
        X, y, truth = autoregressive(0.7)
        with pytest.warns(RegardWarning, match=r"rows depend on those next to them: left out one by one, R² is 0\.\d+"):
            single = NadarayaWatsonRegressor(bandwidth="loo").fit(X, y)
        blocks = NadarayaWatsonRegressor(bandwidth="loo", cv=10).fit(X, y)
        off = [np.sqrt(np.mean((model.predict(X) - truth) ** 2)) for model in (single, blocks)]
        assert off[1] < 0.6 * off[0]
        assert blocks.loo_error_ > single.loo_error_

    def test_independent_rows_are_not_accused(self):
        for seed in range(5):
            X, y, _ = autoregressive(0.0, seed)
            with warnings.catch_warnings():
                warnings.simplefilter("error", RegardWarning)
                NadarayaWatsonRegressor(bandwidth="loo").fit(X, y)

    @pytest.mark.slow
    @pytest.mark.parametrize("kernel", ["gaussian", "epanechnikov"])
    @pytest.mark.parametrize("order", [0, 1])
    def test_the_error_is_that_of_scikit_learns_folds(self, kernel, order):
        rng = np.random.default_rng(0)
        X, groups, weight = rng.normal(size=(90, 2)), rng.integers(0, 6, 90), rng.uniform(0.5, 2, 90)
        y = np.sin(X[:, 0]) + 0.2 * rng.normal(size=90)
        splits = list(GroupKFold(3).split(X, y, groups))
        model = NadarayaWatsonRegressor(kernel, "loo", order=order, cv=splits).fit(X, y, weight)
        squares = np.zeros(90)
        for rest, fold in splits:
            part = NadarayaWatsonRegressor(kernel, model.bandwidth_, order=order).fit(X[rest], y[rest], weight[rest])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RegardWarning)
                squares[fold] = (part.predict(X[fold]) - y[fold]) ** 2
        assert model.loo_error_ == pytest.approx(np.average(squares, weights=weight), rel=1e-6)
        assert NadarayaWatsonRegressor(bandwidth="learned", cv=splits, max_iter=3).fit(X, y).loo_error_ > 0

    def test_a_subsample_and_folds_exclude_each_other(self):
        with pytest.raises(ValueError, match="subsample must be None with cv, which leaves out all rows, got 5"):
            NadarayaWatsonRegressor(bandwidth="loo", cv=3, subsample=5).fit(np.arange(9.0)[:, None], np.arange(9.0))


class TestWeights:
    @pytest.mark.parametrize("kernel", ["gaussian", "epanechnikov"])
    @pytest.mark.parametrize("order", [0, 1])
    @pytest.mark.filterwarnings("ignore::regard.RegardWarning")
    def test_whole_numbers_are_repetitions_in_every_respect(self, kernel, order):
        rng = np.random.default_rng(0)
        X, times = rng.normal(size=(60, 2)), rng.integers(0, 4, 60)
        y = np.sin(X[:, 0]) + 0.2 * rng.normal(size=60)
        # Roundings decide where a search ends if errors jump (compact kernels) or lines have few points.
        for bandwidth in ("loo", 0.7) if kernel == "gaussian" and not order else (0.7,):
            weighted = NadarayaWatsonRegressor(kernel, bandwidth, order=order).fit(X, y, times)
            repeated = NadarayaWatsonRegressor(kernel, bandwidth, order=order).fit(
                np.repeat(X, times, 0), np.repeat(y, times)
            )
            np.testing.assert_allclose(weighted.bandwidth_, repeated.bandwidth_, rtol=1e-9)
            if bandwidth == "loo":
                continue  # so narrow here that rounding decides whether a degree of freedom is left
            found, expected = (model.predict(X, return_std=True) for model in (weighted, repeated))
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(weighted.predict_interval(X), repeated.predict_interval(X), rtol=1e-7, atol=1e-9)
            left_out = np.repeat(weighted.loo_predict(), times)
            np.testing.assert_allclose(left_out, repeated.loo_predict(), rtol=1e-7, atol=1e-9)
            assert weighted.loo_error() == pytest.approx(repeated.loo_error(), rel=1e-7)


class TestNested:
    @pytest.mark.campaign
    @pytest.mark.slow
    def test_noise_is_not_explained(self):
        found, reported = [], []
        for seed in range(6):
            rng = np.random.default_rng(seed)
            X, y = rng.normal(size=(60, 20)), rng.normal(size=60)
            model = NadarayaWatsonRegressor(bandwidth="learned", max_iter=20).fit(X, y)
            reported.append(1 - model.loo_error_ / y.var())
            found.append(1 - np.mean((model.cross_val_predict() - y) ** 2) / y.var())
        assert np.mean(found) < 0
        assert np.mean(found) < np.mean(reported) < 0.2

    @pytest.mark.campaign(keep=1)
    @pytest.mark.parametrize("shape", ["sum", "noise", "varying"])
    def test_intervals_after_learning_cover_new_rows(self, shape):
        covered = []
        for seed in range(6):
            rng = np.random.default_rng(seed)
            X = rng.uniform(0, 6, (460, 4))
            y = {
                "sum": np.sin(X[:, 0]) + 0.3 * X[:, 1] + 0.2 * rng.normal(size=460), "noise": rng.normal(size=460),
                "varying": np.sin(X[:, 0]) + (0.1 + 0.1 * X[:, 1]) * rng.standard_t(4, 460),
            }[shape]  # fmt: skip
            model = NadarayaWatsonRegressor(bandwidth="learned", max_iter=15).fit(X[:60], y[:60])
            low, high = model.predict_interval(X[60:]).T
            covered.append(np.mean((low <= y[60:]) & (y[60:] <= high)))
        assert np.mean(covered) > 0.88

    @pytest.mark.slow
    def test_classes(self):
        X = np.random.default_rng(0).normal(size=(80, 2))
        model = NadarayaWatsonClassifier(bandwidth="learned", max_iter=5).fit(X, X[:, 0] > 0)
        shares = model.cross_val_predict_proba()
        assert shares.shape == (80, 2)
        np.testing.assert_allclose(shares.sum(1), 1)
        assert ((shares[:, 1] > 0.5) == (X[:, 0] > 0)).mean() > 0.85
