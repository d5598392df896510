"""Pictures of estimators: what they show is what the estimators say."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.exceptions import NotFittedError

from regard.regression import (
    NadarayaWatsonClassifier,
    NadarayaWatsonRegressor,
    plot_fit,
    plot_loo,
    plot_weights,
)

mpl.use("agg")
PLOTS = [plot_fit, plot_weights, plot_loo]


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close the figures that a test opened."""
    yield
    plt.close("all")


def made(count: int = 60, width: int = 1, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    X = generator.uniform(0, 6, (count, width))
    return X, np.sin(X[:, 0]) + 0.1 * generator.standard_normal(count)


def fitted(**options) -> NadarayaWatsonRegressor:
    return NadarayaWatsonRegressor(**options).fit(*made())


def line(ax, label: str):
    (found,) = [line for line in ax.lines if line.get_label() == label]
    return found


def test_the_curve_is_what_is_predicted() -> None:
    model = fitted(bandwidth=0.4)
    ax = plot_fit(model, grid=30)
    x, y = line(ax, "prediction").get_data()
    np.testing.assert_array_equal(x, np.linspace(*model._X[[model._X.argmin(), model._X.argmax()], 0], 30))
    mean, deviation = model.predict(x[:, None], return_std=True)
    np.testing.assert_allclose(y, mean)
    (band,) = ax.collections
    top = band.get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx((mean + 2 * deviation).max())
    np.testing.assert_array_equal(line(ax, "training points").get_xdata(), model._X[:, 0])


def test_band_and_points_can_be_left_out() -> None:
    ax = plot_fit(fitted(), band=False, points=False)
    assert not ax.collections and len(ax.lines) == 1


def test_a_band_has_gaps_where_one_point_has_all_the_weight() -> None:
    model = NadarayaWatsonRegressor("boxcar", 0.5).fit([[0.0], [0.2], [5.0]], [0.0, 1.0, 2.0])
    ax = plot_fit(model, grid=21)  # at 0, 0.25, ...
    whole, dotted = (line(ax, label).get_ydata() for label in ("prediction", "extrapolated"))
    assert np.flatnonzero(np.isnan(whole)).tolist() == list(range(3, 18))
    assert np.flatnonzero(np.isfinite(dotted)).tolist() == list(range(2, 19)), "up to where the curve begins again"
    (band,) = ax.collections
    assert band.get_paths()[0].vertices[:, 0].max() < 1


def test_many_points_are_thinned_and_the_same_each_time() -> None:
    model = NadarayaWatsonRegressor(bandwidth=0.5).fit(*made(5000))
    first, second = (line(plot_fit(model, grid=5, band=False), "training points").get_xdata() for _ in range(2))
    assert len(first) == 2000
    np.testing.assert_array_equal(first, second)


def test_other_features_are_held_where_the_data_lie() -> None:
    X = np.array([[0, 1, 0, 23], [1, 2, 1, 1], [2, 9, 1, 0.3]])
    model = NadarayaWatsonRegressor(bandwidth=1.0, metric={2: "categorical", 3: ("angular", 24)}).fit(X, [0.0, 1, 2])
    ax = plot_fit(model, grid=3, band=False)
    hour = np.angle(np.exp(2j * np.pi * X[:, 3] / 24).mean()) * 24 / (2 * np.pi) % 24
    assert hour < 0.2
    expected = model.predict(np.array([[x, 2, 1, hour] for x in (0, 1, 2)]))
    np.testing.assert_allclose(line(ax, "prediction").get_ydata(), expected)
    np.testing.assert_array_equal(line(plot_fit(model, feature=2), "prediction").get_xdata(), [0, 1])


def test_names_label_axes_and_no_warning_comes_of_them() -> None:
    X, y = made(width=2)
    model = NadarayaWatsonRegressor().fit(pd.DataFrame(X, columns=["left", "right"]), y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plot_fit(model, feature="right").get_xlabel() == "right"
        ax = plot_weights(model, feature=1)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("training point, by right", "query, by right")


def test_one_of_several_targets() -> None:
    X, y = made()
    model = NadarayaWatsonRegressor().fit(X, np.stack([y, 3 * y], 1))
    first, second = (plot_fit(model, output=output) for output in (0, 1))
    np.testing.assert_allclose(
        3 * line(first, "prediction").get_ydata(), line(second, "prediction").get_ydata(), atol=1e-12
    )
    assert second.get_ylabel() == "y1"


def test_a_classifiers_probabilities() -> None:
    X, y = made()
    model = NadarayaWatsonClassifier().fit(X, np.where(y > 0, "up", "down"))
    ax = plot_fit(model, grid=9)
    down, up = (line(ax, label) for label in ("down", "up"))
    np.testing.assert_allclose(down.get_ydata() + up.get_ydata(), 1)
    np.testing.assert_allclose(up.get_ydata(), model.predict_proba(up.get_xdata()[:, None])[:, 1])
    ticks = [each for each in ax.lines if each not in (down, up)]
    assert [len(each.get_xdata()) for each in ticks] == [(y <= 0).sum(), (y > 0).sum()]
    assert ax.get_ylabel() == "probability"


def test_weights_are_sorted_both_ways() -> None:
    model = fitted(bandwidth=0.3)
    query = np.array([[5.0], [1.0], [3.0]])
    ax = plot_weights(model, query)
    seen = model._X[:, 0].argsort()
    np.testing.assert_allclose(ax.images[0].get_array(), model.weights(query)[[1, 2, 0]][:, seen])
    assert ax.images[0].get_cmap().name == "Blues"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1", "3", "5"]
    assert any(each.get_ylabel() == "weight" for each in ax.figure.axes), "there is a colour bar"


def test_negative_weights_get_a_colour_of_their_own() -> None:
    (image,) = plot_weights(fitted(bandwidth=0.8, order=1)).images
    low, high = image.get_clim()
    assert image.get_array().min() < 0 and low == -high
    heaviest = np.abs(image.get_array()).max(1)
    assert (heaviest > high).mean() <= 0.1 and image.colorbar.extend == "both"


def test_weights_of_a_tensor_and_without_the_points_of_weight_0() -> None:
    X, y = made()
    model = NadarayaWatsonRegressor().fit(X, y, np.arange(60) % 2)
    (image,) = plot_weights(model, torch.from_numpy(X[:7])).images
    assert image.get_array().shape == (7, 30)
    np.testing.assert_allclose(image.get_array().sum(1), 1)


def test_queries_without_weights_are_blank() -> None:
    model = NadarayaWatsonRegressor("boxcar", 0.5, empty="nan").fit([[0.0], [1.0]], [0.0, 1.0])
    (image,) = plot_weights(model, [[0.0], [9.0]]).images
    np.testing.assert_array_equal(image.get_array().mask, [[False, False], [True, True]])
    assert image.get_clim() == (0, 1) and image.colorbar.extend == "neither"
    (image,) = plot_weights(model, [[9.0]]).images
    assert image.get_clim() == (0, 1)


def test_the_curve_of_errors_is_least_at_the_bandwidth() -> None:
    model = fitted(bandwidth="loo")
    ax = plot_loo(model)
    x, errors = line(ax, "leave-one-out error").get_data()
    at = errors.argmin()
    assert x[at] == pytest.approx(model.bandwidth_[0], rel=0.1)
    assert errors[at] == pytest.approx(model.loo_error_, rel=1e-2) and errors[at] >= model.loo_error_ * (1 - 1e-9)
    tried = line(ax, "tried by the fit").get_data()
    np.testing.assert_allclose([model.loo_error([x]) for x in tried[0]], tried[1])
    assert line(ax, f"bandwidth {model.bandwidth_[0]:.3g}").get_xdata()[0] == model.bandwidth_[0]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("bandwidth of x0", "leave-one-out mean squared error")


def test_errors_of_several_features_are_over_multiples() -> None:
    model = NadarayaWatsonRegressor(bandwidth="learned", max_iter=5).fit(*made(width=2))
    ax = plot_loo(model, factors=[2, 1, 0.5])
    x, errors = line(ax, "leave-one-out error").get_data()
    assert x.tolist() == [0.5, 1, 2]
    np.testing.assert_allclose(errors, [model.loo_error(factor * model.bandwidth_) for factor in x])
    assert line(ax, "tried by the fit").get_xdata() == pytest.approx([1])
    assert "multiple" in ax.get_xlabel()


def test_a_fit_by_rule_tried_nothing_and_classes_have_the_brier_score() -> None:
    X, y = made()
    ax = plot_loo(NadarayaWatsonClassifier().fit(X, y > 0), factors=2.0)
    assert len(ax.lines) == 2
    assert ax.get_ylabel() == "leave-one-out Brier score"


@pytest.mark.parametrize("plot", PLOTS)
def test_it_draws_where_it_is_told(plot) -> None:
    figure, axes = plt.subplots(1, 2)
    assert plot(fitted(), ax=axes[1]) is axes[1]
    assert axes[1].has_data() and not axes[0].has_data()
    assert plt.get_fignums() == [figure.number]


@pytest.mark.parametrize("plot", PLOTS)
def test_what_is_no_fitted_estimator_is_told(plot) -> None:
    with pytest.raises(NotFittedError):
        plot(NadarayaWatsonRegressor())
    name = plot.__name__
    with pytest.raises(TypeError, match=f"{name}: estimator must be a NadarayaWatsonRegressor or .*, got 3"):
        plot(3)
    with pytest.raises(TypeError, match=f"{name}: ax must be a matplotlib Axes or None, got 'here'"):
        plot(fitted(), ax="here")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plot_fit(fitted(), feature=1), "plot_fit: feature must be below the number of features, 1, got 1."),
        (lambda: plot_weights(fitted(), feature="x"), "plot_weights: feature must name a feature that X had, got 'x'."),
        (lambda: plot_fit(fitted(), output=1), "plot_fit: output must be below the number of targets .*, 1, got 1."),
        (lambda: plot_fit(fitted(), grid=1), "plot_fit: grid must be an int of at least 2, got 1."),
        (lambda: plot_weights(fitted(), np.empty((0, 1))), "minimum of 1 is required"),
        (lambda: plot_loo(fitted(), factors=[1, 0]), r"plot_loo: factors must be positive numbers, got \[1, 0\]."),
        (lambda: plot_loo(fitted(), factors=[]), r"plot_loo: factors must be positive numbers, got \[\]."),
    ],
)
def test_wrong_arguments_are_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_hours_of_a_day_have_ticks_of_their_own() -> None:
    frame = pd.DataFrame({"t": pd.date_range("2024-05-01", periods=96, freq="15min")})
    ax = plot_fit(NadarayaWatsonRegressor().fit(frame, np.arange(96.0)))
    ax.figure.canvas.draw()
    texts = [each.get_text() for each in ax.get_xticklabels()]
    assert "12:00" in texts
    assert len(set(texts)) == len(texts)


def test_dates_of_every_year_have_ticks() -> None:
    frame = pd.DataFrame({"t": np.array(["0001-01-01", "5000-01-01", "9999-12-31"], "datetime64[s]")})
    ax = plot_fit(NadarayaWatsonRegressor().fit(frame, [0.0, 1.0, 2.0]))
    ax.figure.canvas.draw()
    assert any(each.get_text().startswith("4000-") for each in ax.get_xticklabels()) or len(ax.get_xticklabels()) > 3


def test_many_classes_leave_room_for_the_curves() -> None:
    x = np.random.default_rng(0).uniform(0, 26, 400)
    y = np.array(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))[x.astype(int)]
    ax = plot_fit(NadarayaWatsonClassifier(bandwidth=1.0).fit(x[:, None], y))
    assert ax.get_ylim()[0] > -0.3
    texts = [each.get_text() for each in ax.get_legend().get_texts()]
    assert len(texts) == 10
    assert texts[-1] == "17 others"


def test_of_many_categories_the_most_frequent_are_drawn() -> None:
    towns = np.repeat([f"town {i}" for i in range(30)], np.arange(1, 31))
    model = NadarayaWatsonRegressor(bandwidth=0.3).fit(pd.DataFrame({"town": towns}), np.arange(len(towns)) * 1.0)
    ax = plot_fit(model)
    texts = [each.get_text() for each in ax.get_xticklabels()]
    assert sorted(texts) == sorted(f"town {i}" for i in range(10, 30))
    assert ax.get_xlabel() == "town (the 20 most frequent of 30)"
    at, shown = line(ax, "training points").get_data()
    assert len(shown) == (towns >= "town 10").sum() - sum(int(each[5:]) < 10 for each in towns[towns >= "town 10"])
    np.testing.assert_array_equal([texts[int(each)] for each in at], towns[shown.astype(int)])


def test_points_of_several_features_are_partial_residuals() -> None:
    X, _ = made(80, 2)
    y = np.sin(X[:, 0]) + 5 * X[:, 1]
    model = NadarayaWatsonRegressor(bandwidth=0.5).fit(X, y)
    ax = plot_fit(model)
    x, shown = line(ax, "partial residuals").get_data()
    others = np.stack([X[:, 0], np.full(80, np.median(X[:, 1]))], 1)
    np.testing.assert_array_equal(x, X[:, 0])
    np.testing.assert_allclose(shown, model.predict(others) + y - model.predict(X))
    assert ax.get_title() == "others held at their median"
    assert plot_fit(fitted()).get_title() == ""


def test_a_band_of_the_mean_is_narrower_and_has_its_own_colour_and_label() -> None:
    model = fitted(bandwidth=0.4)
    ax = plot_fit(model, grid=30, confidence=0.9)
    labels = [each.get_text() for each in ax.get_legend().get_texts()]
    assert labels == ["training points", "± 2 standard deviations", "90 % band of the mean", "prediction"]
    data, mean = ax.collections
    assert (data.get_facecolor() != mean.get_facecolor()).any()
    low, high = model.predict_band(line(ax, "prediction").get_xdata()[:, None], 0.9).T
    drawn = mean.get_paths()[0].vertices[:, 1]
    assert (drawn.min(), drawn.max()) == pytest.approx((low.min(), high.max()))
    alone = plot_fit(model, band=False, confidence=0.955)
    assert "95.5 % band of the mean" in [each.get_text() for each in alone.get_legend().get_texts()]
    assert len(alone.collections) == 1


def test_a_band_of_the_mean_of_categories_and_of_one_of_several_targets() -> None:
    X, y = np.repeat(np.arange(3.0), 20)[:, None], made()[1]
    model = NadarayaWatsonRegressor(bandwidth=0.3, metric="categorical").fit(X, np.stack([y, 3 * y + 1], 1))
    bars = plot_fit(model, output=1, confidence=0.95, band=False).collections[-1].get_segments()
    found = np.array([bar[:, 1] for bar in bars])
    np.testing.assert_allclose(found, model.predict_band([[0.0], [1.0], [2.0]])[:, 1])


@pytest.mark.parametrize(
    ("make", "confidence", "message"),
    [
        (NadarayaWatsonRegressor, 1.0, "plot_fit: confidence must be a number in (0, 1), got 1.0."),
        (NadarayaWatsonClassifier, 0.9, "plot_fit: confidence must be None for a classifier, got 0.9."),
    ],
)
def test_a_band_that_cannot_be_is_a_sentence(make, confidence, message) -> None:
    X, y = made()
    with pytest.raises(ValueError) as caught:
        plot_fit(make().fit(X, y > 0), confidence=confidence)
    assert str(caught.value) == message


@pytest.mark.parametrize("as_text", [True, False])
def test_ordered_categories_stand_side_by_side_in_their_order(as_text) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 3, 60)
    sizes = ["small", "medium", "large"]
    column = pd.Categorical.from_codes(codes, sizes, ordered=True) if as_text else 10.0 * codes
    X = pd.DataFrame({"size": column, "x": rng.uniform(size=60)})
    metric = "euclidean" if as_text else {"size": "ordered"}
    model = NadarayaWatsonRegressor(bandwidth=0.3, metric=metric).fit(X, codes + X["x"])
    ax = plot_fit(model, feature="size")
    assert [each.get_text() for each in ax.get_xticklabels()] == (sizes if as_text else ["0", "10", "20"])
    x, y = line(ax, "prediction").get_data()
    np.testing.assert_array_equal(x, [0, 1, 2])
    values = pd.Categorical(sizes, sizes, ordered=True) if as_text else [0.0, 10.0, 20.0]
    np.testing.assert_allclose(y, model.predict(pd.DataFrame({"size": values, "x": X["x"].median()})))
    np.testing.assert_array_equal(np.sort(line(ax, "partial residuals").get_xdata()), np.sort(codes))
    assert plot_fit(model, feature="x").get_title() == "others held at their median"


def test_places_on_the_earth_are_held_at_their_median() -> None:
    rng = np.random.default_rng(0)
    X = np.stack([rng.uniform(40, 50, 60), rng.uniform(0, 10, 60), rng.uniform(size=60)], 1)
    model = NadarayaWatsonRegressor(metric={(0, 1): "haversine"}).fit(X, X[:, 2])
    assert plot_fit(model, feature=2).get_title() == "others held at their median"
