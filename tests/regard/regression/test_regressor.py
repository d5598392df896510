"""The regressor against formulas written out, and its laws."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import across
from reference import predicted, weights
from sklearn import config_context
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tiers import examples

from regard import RegardWarning
from regard.regression import ExtrapolationWarning, NadarayaWatsonRegressor
from regard.regression._sums.smoother import names

NAMES = sorted(names())


def made(n=120, width=2, outputs=None, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, width))
    y = np.sin(2 * X[:, 0]) + X[:, -1] ** 2 + 0.1 * rng.normal(size=n)
    if outputs:
        y = np.stack([y + i * X[:, 0] for i in range(outputs)], 1)
    return X, y, rng.normal(size=(40, width))


@across({"order": [0, 1], "outputs": [None, 1, 3], "kernel": NAMES})
def test_the_formula(kernel, outputs, order):
    X, y, query = made(outputs=outputs)
    bandwidth = np.array([0.9, 1.3])
    rng = np.random.default_rng(1)
    for sample_weight in (None, rng.uniform(0.1, 3, len(X))):
        model = NadarayaWatsonRegressor(kernel, bandwidth, order=order, empty="nan").fit(X, y, sample_weight)
        expected = predicted(kernel, query, X, y, bandwidth, order, sample_weight)
        # Few points in reach lie almost on a line, where any slope across it is as good.
        sure = (weights(kernel, query, X, bandwidth) > 0).sum(1) >= (8 if order else 0)
        assert sure.sum() > 25
        found = model.predict(query)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found[sure], expected[sure], rtol=0, atol=1e-9)


@pytest.mark.parametrize("width", [1, 5])
def test_other_widths_of_data(width):
    X, y, query = made(n=300, width=width)
    for order in (0, 1):
        model = NadarayaWatsonRegressor(bandwidth=0.8, order=order).fit(X, y)
        np.testing.assert_allclose(model.predict(query), predicted("gaussian", query, X, y, 0.8, order), atol=1e-9)


def test_a_kernel_of_ones_own():
    X, y, query = made()
    named = NadarayaWatsonRegressor("triangular", 1.1).fit(X, y)
    own = NadarayaWatsonRegressor(lambda u: torch.clamp(1 - u, min=0), 1.1).fit(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RegardWarning)
        np.testing.assert_allclose(own.predict(query), named.predict(query), atol=1e-12)
    in_numpy = NadarayaWatsonRegressor(lambda u: np.exp(-(u.numpy() ** 2) / 2), 0.7).fit(X, y)
    np.testing.assert_allclose(in_numpy.predict(query), predicted("gaussian", query, X, y, 0.7), atol=1e-12)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda u: u.sum(), "kernel must return a weight for each distance"),
        (lambda u: 1 / (u - u), "kernel must return finite weights of at least 0, got inf|got nan"),
        (lambda u: 0.5 - u, "kernel must return finite weights of at least 0, got -"),
    ],
)
def test_a_kernel_that_is_none(function, message):
    X, y, query = made()
    with pytest.raises(ValueError, match=message):
        NadarayaWatsonRegressor(function, 1.0).fit(X, y).predict(query)


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), kernel=st.sampled_from(NAMES), width=st.integers(1, 4), weighted=st.booleans())
def test_laws(seed, kernel, width, weighted):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 60))
    X, y, query = rng.normal(size=(n, width)), rng.normal(size=n), rng.normal(size=(9, width))
    sample_weight = rng.uniform(0.1, 5, n) if weighted else None
    bandwidth = rng.uniform(0.3, 3, width)
    model = NadarayaWatsonRegressor(kernel, bandwidth, empty="mean").fit(X, y, sample_weight)
    found = model.predict(query)
    # In the convex hull of the targets.
    assert (found >= y.min() - 1e-9).all() and (found <= y.max() + 1e-9).all()
    # The order of the training data does not matter.
    mixed = rng.permutation(n)
    other = clone(model).fit(X[mixed], y[mixed], None if sample_weight is None else sample_weight[mixed])
    np.testing.assert_allclose(other.predict(query), found, atol=1e-9)
    # Units and origins of features and targets do not matter.
    unit, origin = rng.uniform(0.1, 10, width), rng.normal(size=width) * 10
    moved = NadarayaWatsonRegressor(kernel, bandwidth * unit, empty="mean")
    moved.fit(X * unit + origin, 3 * y - 7, sample_weight)
    edge = np.abs(weights(kernel, query, X, bandwidth * 1.0000001) - weights(kernel, query, X, bandwidth)).max(1) < 1e-5
    np.testing.assert_allclose(moved.predict(query * unit + origin)[edge], (3 * found - 7)[edge], atol=1e-6)
    # Weights times targets are the prediction.
    table = model.weights(query)
    assert (table >= 0).all()
    np.testing.assert_allclose(table.sum(1), 1, atol=1e-9)
    np.testing.assert_allclose(table @ y, found, atol=1e-9)


@pytest.mark.parametrize("kernel", ["gaussian", "epanechnikov", "constant"])
def test_a_local_line_is_exact_for_linear_targets(kernel):
    X, _, query = made(n=400, width=3)
    slope = np.array([[1.0, -2.0], [0.5, 0.0], [3.0, 1.0]])
    model = NadarayaWatsonRegressor(kernel, 3.0, order=1).fit(X, X @ slope + 4)
    np.testing.assert_allclose(model.predict(query), query @ slope + 4, atol=1e-8)


def test_a_line_through_few_points_has_no_slope_across():
    # Two points in reach, both on the first axis: along it a line, across it the average.
    model = NadarayaWatsonRegressor("boxcar", 1.5, order=1).fit([[0.0, 0.0], [1.0, 0.0], [9.0, 9.0]], [0.0, 1.0, 5.0])
    np.testing.assert_allclose(model.predict([[0.5, 0.0], [0.25, 0.5], [9.0, 9.5]]), [0.5, 0.25, 5.0], atol=1e-12)


def test_a_line_far_from_the_origin():
    X, y, query = made(n=200)
    near = NadarayaWatsonRegressor(bandwidth=0.5, order=1).fit(X, y).predict(query)
    far = NadarayaWatsonRegressor(bandwidth=0.5, order=1).fit(X + 1e6, y + 1e6).predict(query + 1e6) - 1e6
    np.testing.assert_allclose(far, near, atol=1e-6)


@pytest.mark.parametrize("kernel", ["gaussian", "boxcar"])
@pytest.mark.parametrize("order", [0, 1])
def test_weights_repeat_rows(kernel, order):
    X, y, query = made(n=60)
    counts = np.random.default_rng(3).integers(0, 4, len(X))
    one = NadarayaWatsonRegressor(kernel, 1.5, order=order, empty="mean").fit(X, y, counts)
    other = NadarayaWatsonRegressor(kernel, 1.5, order=order, empty="mean").fit(
        np.repeat(X, counts, 0), np.repeat(y, counts)
    )
    np.testing.assert_allclose(one.predict(query), other.predict(query), atol=1e-8)
    several, same = one.predict_quantiles(query), other.predict_quantiles(query)
    # A row left out leaves its repetition in but not its weight: what is known of the scatter may differ.
    known = np.isfinite(several) & np.isfinite(same)
    assert known.sum() > 60
    np.testing.assert_allclose(several[known], same[known], atol=1e-12)


class TestEmpty:
    X, y = np.array([[0.0], [1.0], [2.0]]), np.array([1.0, 2.0, 6.0])
    query = np.array([[0.5], [5.0], [-4.0]])

    def model(self, empty):
        return NadarayaWatsonRegressor("epanechnikov", 1.0, empty=empty).fit(self.X, self.y)

    def test_nearest_warns_once_with_a_count(self):
        message = (
            r"2 of 3 queries lie beyond the reach of the training data .*; 2 of them get the target of the nearest"
        )
        with pytest.warns(ExtrapolationWarning, match=message) as caught:
            found = self.model("nearest").predict(self.query)
        np.testing.assert_allclose(found, [1.5, 6.0, 1.0])
        assert len(caught) == 1
        assert caught[0].filename == __file__

    def test_mean(self):
        np.testing.assert_allclose(self.model("mean").predict(self.query), [1.5, 3.0, 3.0])

    def test_nan(self):
        np.testing.assert_allclose(self.model("nan").predict(self.query), [1.5, np.nan, np.nan])

    def test_raise(self):
        message = r"X must lie within the kernel's reach \(empty='raise'\), got 2 of 3 queries"
        with pytest.raises(ValueError, match=message):
            self.model("raise").predict(self.query)
        np.testing.assert_allclose(self.model("raise").predict([[0.5]]), [1.5])
        for method in ("weights", "attention"):
            with pytest.raises(ValueError, match=message):
                getattr(self.model("raise"), method)(self.query)

    @pytest.mark.parametrize("empty", ["nearest", "mean", "nan"])
    def test_weights_and_points_agree_with_predictions(self, empty):
        model = self.model(empty)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RegardWarning)
            expected = model.predict(self.query)
        np.testing.assert_allclose(model.weights(self.query) @ self.y, expected)
        found = model.attention(self.query, topk=3)
        assert found.indices[0].tolist()[2] == -1
        assert found.indices[1].tolist() == ([2, -1, -1] if empty == "nearest" else [-1, -1, -1])
        assert np.isnan(found.weights[1]).all() == (empty == "nan")

    def test_deviation_of_nothing_is_nan(self):
        _, deviation = self.model("mean").predict(self.query, return_std=True)
        assert np.isfinite(deviation[0]) and np.isnan(deviation[1:]).all()

    def test_far_queries_of_a_gaussian_get_the_nearest(self):
        model = NadarayaWatsonRegressor(bandwidth=1e-3).fit(self.X, self.y)
        with pytest.warns(ExtrapolationWarning, match=r"2 of 2 queries lie .* extrapolated\. extrapolates"):
            np.testing.assert_allclose(model.predict([[1e3], [-1e3]]), [6.0, 1.0])
        tiny = NadarayaWatsonRegressor(bandwidth=1e-200).fit(self.X, self.y)
        with pytest.warns(ExtrapolationWarning, match="1 of 2 queries .* 1 of them get the target of the nearest"):
            np.testing.assert_allclose(tiny.predict([[1.0], [1.9]]), [2.0, 6.0])


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("sample_weight", [None, np.random.default_rng(5).uniform(0.5, 2, 120)])
def test_deviation(order, sample_weight):
    X, y, query = made()
    model = NadarayaWatsonRegressor(bandwidth=0.9, order=order).fit(X, y, sample_weight)
    _, found = model.predict(query, return_std=True)
    share = weights("gaussian", query, X, 0.9, sample_weight)
    share /= share.sum(1, keepdims=True)
    for row, w, deviation in zip(query, share, found):
        design = np.column_stack([np.ones(len(X)), *([X - row] if order else [])])
        root = np.sqrt(w)[:, None]
        rest = y - design @ np.linalg.lstsq(root * design, root[:, 0] * y, rcond=None)[0]
        # Fan and Gijbels (1996): the trace of W − W X (XᵀWX)⁻¹ XᵀW.
        hat = np.linalg.solve(design.T @ (w[:, None] * design), design.T @ (w[:, None] ** 2 * design))
        assert deviation == pytest.approx(np.sqrt((w * rest**2).sum() / (1 - np.trace(hat))), rel=1e-8)


def test_one_point_has_no_deviation():
    model = NadarayaWatsonRegressor(bandwidth=1.0).fit([[0.0]], [2.0])
    mean, deviation = model.predict([[0.3]], return_std=True)
    assert mean == pytest.approx(2.0) and np.isnan(deviation).all()


@across({"weighted": [False, True], "n": [1, 2, 33, 1200], "kernel": ["gaussian", "boxcar"]})
def test_quantiles(kernel, n, weighted):
    rng = np.random.default_rng(n)
    X, query = rng.normal(size=(n, 1)), rng.normal(size=(30, 1))
    y = rng.integers(0, 20, size=(n, 2)).astype(float)
    counts = rng.uniform(0.2, 2, n) if weighted else None
    shares = [0.0, 0.1, 0.5, 0.77, 1.0]
    model = NadarayaWatsonRegressor(kernel, 0.7, empty="nan").fit(X, y, counts)
    found = model.predict_quantiles(query, shares)
    assert found.shape == (30, 2, 5)
    beyond = model.extrapolates(query)
    for row, got, far in zip(weights(kernel, query, X, 0.7, counts), found, beyond):
        if far or (row**2).sum() >= (1 - 1e-8) * row.sum() ** 2:  # nothing is known of their scatter
            assert np.isnan(got).all()
            continue
        for column, values in zip(y.T, got):
            for share, value in zip(shares, values):
                assert value in column[row > 0]
                # Up to it lies at least the share, below it less; rounding may decide a tie either way.
                slack = 1e-9 * row.sum()
                assert row[column <= value].sum() >= share * row.sum() - slack
                assert share == 0 or row[column < value].sum() <= share * row.sum() + slack


def test_quantiles_beyond_reach():
    for empty in ("nearest", "mean", "nan"):
        model = NadarayaWatsonRegressor("boxcar", 1.0, empty=empty).fit([[0.0], [1.0]], [1.0, 3.0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExtrapolationWarning)
            found = model.predict_quantiles([[0.5], [9.0]], [0.1, 0.9])
        assert found[0].tolist() == [1.0, 3.0] and np.isnan(found[1]).all(), "no interval of width 0"
    with pytest.raises(ValueError, match=r"quantiles must be numbers in \[0, 1\], got \[2\]"):
        model.predict_quantiles([[0.0]], [2])


@pytest.mark.parametrize("order", [0, 1])
def test_attention_names_the_points(order):
    X, y, query = made(n=80)
    sample_weight = np.random.default_rng(2).integers(0, 3, len(X)).astype(float)
    model = NadarayaWatsonRegressor(bandwidth=0.8, order=order).fit(X, y, sample_weight)
    table = model.weights(query)
    assert (table[:, sample_weight == 0] == 0).all()
    found = model.attention(query, topk=len(X))
    real = found.indices >= 0
    assert (sample_weight[found.indices[real]] > 0).all()
    np.testing.assert_allclose(np.where(real, found.weights * y[found.indices], 0).sum(1), model.predict(query))
    few = model.attention(query, topk=5)
    np.testing.assert_allclose(np.abs(few.weights), -np.sort(-np.abs(table), 1)[:, :5], atol=1e-12)
    np.testing.assert_allclose(np.take_along_axis(table, few.indices, 1), few.weights, atol=1e-12)


def test_explanation():
    frame = pd.DataFrame({"hour": [1.0, 2.0, 3.0, 9.0], "heat": [0.0, 0.0, 1.0, 1.0]})
    model = NadarayaWatsonRegressor(bandwidth=[1.0, 2.0]).fit(frame, [1.0, 2.0, 3.0, 9.0])
    found = model.explain(frame.iloc[[1]], topk=2)
    assert [row["index"] for row in found.rows] == [1, 2] or [row["index"] for row in found.rows] == [1, 0]
    assert found.rows[0] | {"weight": 0} == {
        "index": 1, "weight": 0, "target": 2.0, "distance": 0.0, "hour": 2.0, "heat": 0.0,
    }  # fmt: skip
    assert found.prediction == pytest.approx(model.predict(frame.iloc[[1]])[0])
    table = model.weights(frame.iloc[[1]])[0]
    assert found.effective == pytest.approx(1 / (table**2).sum())
    assert found.share == pytest.approx(np.sort(table)[-2:].sum())
    lines = str(found).splitlines()
    assert (
        len(lines) == 4 and lines[0].startswith("prediction ") and lines[1].split()[:3] == ["index", "weight", "target"]
    )
    assert list(found.to_frame().columns) == ["index", "weight", "target", "distance", "hour", "heat"]
    with pytest.raises(ValueError, match="x must be one row, got 2 rows"):
        model.explain(frame.iloc[:2])


class TestPartialFit:
    @pytest.mark.parametrize("bandwidth", [0.7, "scott", "silverman"])
    @pytest.mark.parametrize("weighted", [False, True])
    def test_parts_make_the_whole(self, bandwidth, weighted):
        X, y, query = made()
        sample_weight = np.random.default_rng(0).integers(0, 3, len(X)).astype(float) if weighted else None
        whole = NadarayaWatsonRegressor(bandwidth=bandwidth).fit(X, y, sample_weight)
        parts = NadarayaWatsonRegressor(bandwidth=bandwidth)
        for rows in (slice(0, 50), slice(50, 51), slice(51, None)):
            parts.partial_fit(X[rows], y[rows], None if sample_weight is None else sample_weight[rows])
        np.testing.assert_allclose(parts.bandwidth_, whole.bandwidth_)
        np.testing.assert_allclose(parts.predict(query), whole.predict(query))
        assert parts.attention(query).indices.tolist() == whole.attention(query).indices.tolist()

    def test_a_searched_bandwidth_stays(self):
        X, y, _ = made()
        model = NadarayaWatsonRegressor(bandwidth="loo").partial_fit(X[:60], y[:60])
        before = model.bandwidth_.copy()
        assert (model.partial_fit(X[60:], y[60:]).bandwidth_ == before).all()
        assert len(model.weights(X)[0]) == len(X)

    def test_another_number_of_targets(self):
        X, y, _ = made()
        with pytest.raises(ValueError, match=r"y must have shape \(n, \*\(\)\), got"):
            NadarayaWatsonRegressor().fit(X, y).partial_fit(X, np.stack([y, y], 1))


class TestInputs:
    def test_tensors_give_tensors(self):
        X, y, query = (torch.from_numpy(each) for each in made())
        model = NadarayaWatsonRegressor(bandwidth=0.5).fit(X, y)
        found, deviation = model.predict(query, return_std=True)
        assert isinstance(found, torch.Tensor) and isinstance(deviation, torch.Tensor)
        assert isinstance(model.predict(query.numpy()), np.ndarray)
        np.testing.assert_allclose(found, model.predict(query.numpy()))
        assert isinstance(model.predict_quantiles(query), torch.Tensor)

    def test_frames_keep_names(self):
        X, y, _ = made()
        frame = pd.DataFrame(X, columns=["left", "right"])
        model = NadarayaWatsonRegressor().fit(frame, pd.Series(y))
        assert model.feature_names_in_.tolist() == ["left", "right"]
        with pytest.raises(ValueError, match="feature names should match"):
            model.predict(frame.rename(columns={"left": "up"}))

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("order", [0, 1])
    def test_dtype_follows_x(self, dtype, order):
        X, y, query = made()
        exact = NadarayaWatsonRegressor(bandwidth=0.5, order=order).fit(X, y).predict(query)
        found = NadarayaWatsonRegressor(bandwidth=0.5, order=order).fit(X.astype(dtype), y).predict(query.astype(dtype))
        assert found.dtype == dtype
        np.testing.assert_allclose(found, exact, atol=2e-6)

    def test_dtype_as_asked(self):
        X, y, query = made()
        assert NadarayaWatsonRegressor(dtype="float32").fit(X, y).predict(query).dtype == np.float32
        assert NadarayaWatsonRegressor(dtype=torch.float32).fit(X, y).predict(query).dtype == np.float32
        assert NadarayaWatsonRegressor(dtype=np.float64).fit(X.astype("f4"), y).predict(query).dtype == np.float64
        with pytest.raises(ValueError, match=r"dtype must be 'float32', 'float64' or None, got torch\.float16"):
            NadarayaWatsonRegressor(dtype="float16").fit(X, y)

    def test_nothing_to_predict(self):
        X, y, _ = made()
        with pytest.raises(ValueError, match="Found array with 0 sample"):
            NadarayaWatsonRegressor().fit(X, y).predict(X[:0])

    def test_weights_of_zero_alone(self):
        X, y, _ = made()
        with pytest.raises(ValueError, match="must contain at least one non-zero"):
            NadarayaWatsonRegressor().fit(X, y, np.zeros(len(X)))

    def test_negative_weights(self):
        X, y, _ = made()
        with pytest.raises(ValueError, match="Negative values"):
            NadarayaWatsonRegressor().fit(X, y, -np.ones(len(X)))


@pytest.mark.parametrize(
    ("options", "factors", "message"),
    [
        ({}, (1e160, 1), "X must hold numbers up to 1e+150, as sums of larger ones overflow (use another unit)"),
        ({"order": 2}, (1e80, 1), "X must hold numbers up to 1e+75, as sums of"),
        ({"bandwidth": "loo"}, (1, 1e200), "y must hold numbers up to 1e+150, as sums of"),
        ({"bandwidth": "loo", "dtype": "float32"}, (1, 1e20), "y must hold numbers up to 1e+18, as sums of"),
        ({"dtype": "float32"}, (1, 1e200), "y must hold numbers up to 1e+37, as sums of"),
        ({}, (1e-160, 1), "X must be constant or vary by 1e-150, as smaller squares vanish (use another unit)"),
        ({"bandwidth": "aicc"}, (1, 1e-160), "y must be constant or vary by 1e-150, as smaller"),
        ({"bandwidth": "learned", "dtype": "float32"}, (1, 1e-20), "y must be constant or vary by 1e-18, as smaller"),
    ],
)
def test_numbers_whose_sums_overflow_or_vanish(options, factors, message):
    X, y, _ = made(n=12)
    with pytest.raises(ValueError) as caught:
        NadarayaWatsonRegressor(**options).fit(X * factors[0], y * factors[1])
    assert str(caught.value).startswith(f"NadarayaWatsonRegressor: {message}")


def test_large_numbers_are_another_unit():
    X, y, query = made(n=12)
    plain, large = (NadarayaWatsonRegressor(order=2).fit(X * a, y * b) for a, b in ((1, 1), (1e74, 1e149)))
    np.testing.assert_allclose(large.predict(query * 1e74) / 1e149, plain.predict(query), rtol=1e-6)


class TestLargeWeights:
    def test_they_are_whole_for_lack_of_digits_and_count_no_repetitions(self):
        X, y, query = made(n=12)
        weight = np.random.default_rng(0).uniform(0.5, 1.5, 12)
        plain, large = (NadarayaWatsonRegressor(bandwidth="aicc").fit(X, y, weight * scale) for scale in (1, 1e20))
        for one, other in zip(plain.predict(query, return_std=True), large.predict(query, return_std=True)):
            np.testing.assert_allclose(one, other, rtol=1e-6)

    def test_their_sum_overflows(self):
        X, y, _ = made(n=12)
        with pytest.raises(ValueError, match="sample_weight must hold numbers up to 1e\\+300, as sums of"):
            NadarayaWatsonRegressor().fit(X, y, np.full(12, 1e308))


class TestAllOrNothing:
    def test_a_call_that_fails_changes_nothing(self):
        X, y, query = made()
        model = NadarayaWatsonRegressor(bandwidth=0.5).fit(X, y)
        before, state = model.predict(query), dict(vars(model))
        model.set_params(bandwidth=-1.0)
        for call in (lambda: model.fit(X[:9] * 3, y[:9]), lambda: model.partial_fit(X[:5], y[:5] + 100)):
            with pytest.raises(ValueError, match="bandwidth must be a positive number"):
                call()
            assert vars(model) == state | {"bandwidth": -1.0}
        model.set_params(bandwidth=0.5)
        assert (model.predict(query) == before).all()

    def test_a_first_fit_that_fails_leaves_an_unfitted_estimator(self):
        X, y, _ = made()
        model = NadarayaWatsonRegressor("boxcar", "learned")
        for method in (model.fit, model.partial_fit):
            with pytest.raises(ValueError, match="'learned' with kernel='boxcar'"):
                method(X, y)
            with pytest.raises(NotFittedError):
                model.predict(X)

    def test_an_interrupt_while_searching(self, monkeypatch):
        X, y, query = made()
        model = NadarayaWatsonRegressor(bandwidth="loo").fit(X, y)
        before = model.predict(query)

        def interrupted(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr("regard.regression._bandwidth.LeaveOneOut.error", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.fit(X[:50], y[:50])
        assert (model.predict(query) == before).all()

    def test_what_was_searched_for_other_data_goes(self):
        X, y, _ = made()
        model = NadarayaWatsonRegressor(bandwidth="loo").fit(X, y)
        assert hasattr(model, "loo_curve_")
        model.partial_fit(X, y)
        assert not hasattr(model, "loo_error_") and not hasattr(model, "loo_curve_")


def test_constant_factors_of_weights_do_not_matter():
    X, y, query = made()
    drawn = np.random.default_rng(0).uniform(0.5, 2, len(X))
    for dtype in ("float32", "float64"):
        expected = NadarayaWatsonRegressor(bandwidth=0.5, dtype=dtype).fit(X, y, drawn).predict(query)
        for factor in (1e-50, 1e45):
            found = NadarayaWatsonRegressor(bandwidth=0.5, dtype=dtype).fit(X, y, drawn * factor).predict(query)
            np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ties_of_quantiles(dtype):
    model = NadarayaWatsonRegressor("boxcar", 10.0, dtype=dtype).fit(np.arange(10.0)[:, None] / 10, np.arange(10.0))
    assert model.predict_quantiles([[0.5]], [0.1, 0.3, 0.5, 0.7, 0.9]).tolist() == [[0, 2, 4, 6, 8]]
    assert model.predict_quantiles([[0.5]], []).shape == (1, 0)


def test_features_called_like_columns_of_an_explanation():
    frame = pd.DataFrame({"weight": [100.0, 200.0, 300.0], "index": [7.0, 8.0, 9.0]})
    model = NadarayaWatsonRegressor(bandwidth=200.0).fit(frame, [1.0, 2.0, 3.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = model.explain(frame.iloc[0])
    assert found.share == pytest.approx(1)
    assert [row["index"] for row in found.rows] == [0, 1, 2]
    assert [row["feature weight"] for row in found.rows] == [100.0, 200.0, 300.0]


def test_arrays_that_must_not_be_written_to():
    X, y, query = made()
    for array in (X, y, query):
        array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = NadarayaWatsonRegressor(bandwidth=np.broadcast_to(0.5, 2)).fit(X, y)
        assert np.isfinite(model.predict(query)).all()


class TestAmongOthers:
    def test_pipeline_search_and_pickle(self):
        X, y, query = made()
        pipeline = make_pipeline(StandardScaler(), NadarayaWatsonRegressor())
        grid = {"nadarayawatsonregressor__bandwidth": [0.2, 5.0], "nadarayawatsonregressor__order": [0, 1]}
        search = GridSearchCV(pipeline, grid, cv=3).fit(X, y)
        assert search.best_params_["nadarayawatsonregressor__bandwidth"] == 0.2
        copy = pickle.loads(pickle.dumps(search.best_estimator_))
        assert (copy.predict(query) == search.predict(query)).all()

    def test_weights_are_routed(self):
        X, y, query = made()
        sample_weight = np.where(X[:, 0] > 0, 1.0, 0.0)
        with config_context(enable_metadata_routing=True):
            model = NadarayaWatsonRegressor(bandwidth=0.5).set_fit_request(sample_weight=True)
            search = GridSearchCV(model.set_score_request(sample_weight=True), {"order": [0]}, cv=2)
            search.fit(X, y, sample_weight=sample_weight)
            routed = make_pipeline(model).fit(X, y, sample_weight=sample_weight)
        alone = NadarayaWatsonRegressor(bandwidth=0.5).fit(X[X[:, 0] > 0], y[X[:, 0] > 0])
        np.testing.assert_allclose(routed.predict(query), alone.predict(query))
        np.testing.assert_allclose(search.predict(query), alone.predict(query))

    def test_unfitted(self):
        for method in ("predict", "attention", "weights", "explain", "predict_quantiles"):
            with pytest.raises(NotFittedError):
                getattr(NadarayaWatsonRegressor(), method)([[0.0]])
        for method in ("loo_predict", "loo_error"):
            with pytest.raises(NotFittedError):
                getattr(NadarayaWatsonRegressor(), method)()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"kernel": "gausian"}, ValueError, r"kernel must be one of .*, got 'gausian' \(did you mean 'gaussian'\?\)"),
        ({"kernel": 3}, TypeError, "kernel must be a name or a function of distances, got 3"),
        ({"bandwidth": "wide"}, ValueError, "bandwidth must be a positive number, 2 of them, or .*'wide'"),
        ({"bandwidth": "lo"}, ValueError, r"bandwidth must be .*, got 'lo' \(did you mean 'loo'\?\)"),
        ({"empty": "neares"}, ValueError, r"empty must be .*, got 'neares' \(did you mean 'nearest'\?\)"),
        ({"bandwidth": 0.0}, ValueError, "bandwidth must be a positive number, .* got 0.0"),
        ({"bandwidth": True}, ValueError, "bandwidth must be a positive number, .* got True"),
        ({"bandwidth": [1.0, 2.0, 3.0]}, ValueError, r"bandwidth must be .* got an array of shape \(3,\)"),
        ({"bandwidth": [1.0, np.nan]}, ValueError, "bandwidth must be a positive number"),
        ({"bandwidth": {}}, TypeError, "bandwidth must be a positive number"),
        ({"bandwidth": "learned", "kernel": "boxcar"}, ValueError, "bandwidth must be .* a kernel without a gradient"),
        ({"bandwidth": ["1", "1"]}, ValueError, "bandwidth must be a positive number"),
        ({"bandwidth": [True, 2.0]}, ValueError, "bandwidth must be a positive number"),
        ({"device": "nonsense"}, ValueError, "device must be the name of an available torch device"),
        ({"order": 3}, ValueError, "order must be one of 0, 1, 2, got 3"),
        ({"order": True}, TypeError, "order must be one of 0, 1, 2, got True"),
        ({"empty": "zero"}, ValueError, "empty must be one of 'mean', 'nan', 'nearest', 'raise', got 'zero'"),
        ({"max_iter": 0}, ValueError, "max_iter must be an int of at least 1, got 0"),
        ({"max_iter": 1.5}, TypeError, "max_iter must be an int of at least 1, got 1.5"),
        ({"tol": -1.0}, ValueError, "tol must be a finite number of at least 0, got -1.0"),
        ({"subsample": 1}, ValueError, "subsample must be an int of at least 2, got 1"),
        ({"metric": "cosine"}, ValueError, "metric must be 'euclidean', .*'ordered' or .* got 'cosine'"),
    ],
)  # fmt: skip
def test_wrong_parameters(options, kind, message):
    X, y, _ = made()
    with pytest.raises(kind, match=f"NadarayaWatsonRegressor: {message}"):
        NadarayaWatsonRegressor(**options).fit(X, y)
