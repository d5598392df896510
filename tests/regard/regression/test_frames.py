"""Pandas frames as they come: categories, text, dates, and what scikit-learn does with the estimators around them."""

from __future__ import annotations

import pickle
from inspect import signature

import numpy as np
import pandas as pd
import pytest
from sklearn.compose import make_column_transformer
from sklearn.inspection import partial_dependence
from sklearn.model_selection import GridSearchCV, KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OrdinalEncoder, StandardScaler

from regard.regression import NadarayaWatsonClassifier, NadarayaWatsonRegressor, plot_fit

pytestmark = pytest.mark.filterwarnings("ignore::regard.regression.ExtrapolationWarning")


@pytest.fixture
def weather() -> tuple[pd.DataFrame, pd.Series]:
    rng = np.random.default_rng(0)
    city = rng.choice(["Ulm", "Bonn", "Köln"], 120)
    frame = pd.DataFrame(
        {
            "day": pd.date_range("2024-01-01", periods=120, tz="Europe/Berlin"),
            "city": pd.Categorical(city),
            "sky": rng.choice(["clear", "cloudy"], 120),
            "heat": rng.normal(15, 5, 120),
            "wet": rng.random(120) < 0.3,
        }
    )
    return frame, 0.05 * np.arange(120) + 3.0 * (frame["city"] == "Ulm") + 0.1 * frame["heat"]


def by_hand(frame: pd.DataFrame) -> np.ndarray:
    """Return the same frame as numbers."""
    codes = []
    for name in ("city", "sky"):
        place = {value: code for code, value in enumerate(sorted(set(frame[name])))}
        codes.append(frame[name].astype(str).map(place))
    days = (frame["day"] - pd.Timestamp("1970-01-01", tz="UTC")) / pd.Timedelta(days=1)
    return np.stack([days, *codes, frame["heat"], frame["wet"]], 1).astype(float)


@pytest.mark.parametrize("order", [0, 1])
def test_frames_are_what_their_numbers_are(weather, order):
    frame, y = weather
    metric = ["euclidean", "categorical", "categorical", "euclidean", "euclidean"]
    model = NadarayaWatsonRegressor(order=order).fit(frame, y)
    own = NadarayaWatsonRegressor(order=order, metric=metric).fit(by_hand(frame), y)
    np.testing.assert_allclose(model.predict(frame[:9]), own.predict(by_hand(frame)[:9]))
    np.testing.assert_allclose(model.bandwidth_, own.bandwidth_)
    mixed = frame[:9].assign(city=frame["city"][:9].astype(str), day=frame["day"][:9].dt.tz_convert("UTC"))
    np.testing.assert_allclose(model.predict(mixed), own.predict(by_hand(frame)[:9]), err_msg="the same values")
    assert (pickle.loads(pickle.dumps(model)).predict(frame) == model.predict(frame)).all()


def test_what_was_not_there_is_like_nothing_else(weather):
    frame, y = weather
    model = NadarayaWatsonRegressor(bandwidth=[1000, 0.2, 0.2, 100, 100]).fit(frame, y)
    assert model.extrapolates(frame[:3]).tolist() == [False] * 3
    assert model.extrapolates(frame[:3].assign(city="Rom")).all()
    assert model.extrapolates(frame[:3].assign(day=pd.Timestamp("2031-01-01", tz="UTC"))).all()
    assert model.extrapolates(frame[:3].assign(city=None)).all()
    with pytest.raises(ValueError, match="contains NaN"):
        model.predict(frame[:3].assign(day=pd.NaT))


def test_further_rows_may_bring_further_categories(weather):
    frame, y = weather
    first = frame.assign(city=frame["city"].astype(str)).query("city != 'Ulm'")
    rest = frame[~frame.index.isin(first.index)]
    parts = NadarayaWatsonRegressor(bandwidth=0.5).partial_fit(first, y[first.index]).partial_fit(rest, y[rest.index])
    whole = NadarayaWatsonRegressor(bandwidth=0.5).fit(frame, y)
    np.testing.assert_allclose(parts.predict(frame), whole.predict(frame))


def test_explanations_and_pictures_have_the_values_of_the_frame(weather):
    frame, y = weather
    model = NadarayaWatsonRegressor(bandwidth=[30, 0.5, 0.5, 10, 1]).fit(frame, y)
    for one in (frame.iloc[[5]], frame.iloc[5]):
        (row,) = model.explain(one, topk=1).rows
        assert row["city"] == frame["city"][5] and row["sky"] == frame["sky"][5]
        assert row["day"] == np.datetime64(frame["day"][5].tz_convert("UTC").tz_localize(None))
    ax = plot_fit(model, feature="city")
    assert [each.get_text() for each in ax.get_xticklabels()] == ["Bonn", "Köln", "Ulm"]


@pytest.mark.slow
def test_searches_and_partial_dependence(weather):
    frame, y = weather
    folds = KFold(3, shuffle=True, random_state=0)
    search = GridSearchCV(NadarayaWatsonRegressor(), {"bandwidth": [0.5, "scott"], "order": [0, 1]}, cv=folds)
    assert search.fit(frame, y).best_params_["bandwidth"] == "scott"
    assert search.best_score_ > 0.5
    (cities,) = partial_dependence(search, frame, ["city"], categorical_features=["city"])["average"]
    assert cities[2] - cities[0] == pytest.approx(3, abs=1)  # in order of the alphabet
    (heat,) = partial_dependence(search, frame, ["heat"], grid_resolution=4)["average"]
    assert (np.diff(heat) > 0).all()
    if "custom_values" in signature(partial_dependence).parameters:  # scikit-learn 1.7: dates have no percentiles
        days = {"day": frame["day"][::40].to_numpy()}
        assert len(partial_dependence(search, frame, ["day"], custom_values=days)["average"][0]) == 3
    chosen = make_column_transformer((OrdinalEncoder(), ["city", "sky"]), (StandardScaler(), ["heat"]))
    pipeline = make_pipeline(chosen.set_output(transform="pandas"), NadarayaWatsonRegressor())
    grid = {"nadarayawatsonregressor__metric": ["euclidean", {"ordinalencoder__city": "categorical"}]}
    assert GridSearchCV(pipeline, grid, cv=folds).fit(frame, y).best_score_ > 0
    classifier = NadarayaWatsonClassifier().fit(frame.drop(columns="sky"), frame["sky"])
    shares = partial_dependence(classifier, frame.drop(columns="sky"), ["heat"], grid_resolution=3)["average"]
    assert np.isfinite(shares).all()
