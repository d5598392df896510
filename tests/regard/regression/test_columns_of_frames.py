"""Columns of frames of every library: times in days, and errors before any work."""

from __future__ import annotations

from datetime import date, datetime, timedelta

import numpy as np
import pandas as pd
import pytest

from regard.regression import NadarayaWatsonClassifier, NadarayaWatsonRegressor

pytestmark = pytest.mark.filterwarnings("ignore::regard.regression.ExtrapolationWarning")
Y = np.arange(8.0) ** 2
DAYS = np.arange(8.0)[:, None]


def _frames() -> dict[str, object]:
    days = pd.date_range("2024-01-01", periods=8)
    spans = pd.to_timedelta(range(8), unit="D")
    return {
        **{
            f"pandas {unit}": pd.DataFrame({"d": days.astype(f"datetime64[{unit}]")})
            for unit in ("s", "ms", "us", "ns")
        },
        **{
            f"spans {unit}": pd.DataFrame({"d": spans.astype(f"timedelta64[{unit}]")})
            for unit in ("s", "ms", "us", "ns")
        },
        "zone": pd.DataFrame({"d": days.tz_localize("UTC")}),
        "periods": pd.DataFrame({"d": pd.period_range("2024-01-01", periods=8, freq="D")}),
        "date": pd.DataFrame({"d": [date(2024, 1, 1 + i) for i in range(8)]}, dtype=object),
        "datetime": pd.DataFrame({"d": [datetime(2024, 1, 1 + i) for i in range(8)]}, dtype=object),
        "timedelta": pd.DataFrame({"d": [timedelta(days=i) for i in range(8)]}, dtype=object),
        "NumPy": days.to_numpy()[:, None],
        "NumPy spans": spans.to_numpy()[:, None],
    }


@pytest.mark.parametrize("name", list(_frames()))
def test_a_bandwidth_of_one_is_a_day(name: str) -> None:
    X = _frames()[name]
    expected = NadarayaWatsonRegressor(bandwidth=1.0).fit(DAYS, Y).predict(DAYS)
    np.testing.assert_allclose(NadarayaWatsonRegressor(bandwidth=1.0).fit(X, Y).predict(X), expected)


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_polars_frames(unit: str) -> None:
    polars = pytest.importorskip("polars")
    days = polars.Series("d", [datetime(2024, 1, 1 + i) for i in range(8)])
    kind = polars.Series("k", list("abababab"))
    expected = NadarayaWatsonRegressor(bandwidth=1.0).fit(DAYS, Y).predict(DAYS)
    times = days.cast(polars.Datetime(unit))
    spans = (days - days[0]).cast(polars.Duration(unit))
    for column in (times, days.cast(polars.Date), spans, times.dt.replace_time_zone("UTC")):
        X = polars.DataFrame({"d": column})
        np.testing.assert_allclose(NadarayaWatsonRegressor(bandwidth=1.0).fit(X, Y).predict(X), expected)
    frame = pd.DataFrame({"d": pd.date_range("2024-01-01", periods=8), "k": list("abababab")})
    expected = NadarayaWatsonRegressor(bandwidth=[1.0, 0.5]).fit(frame, Y).predict(frame)
    for text in (polars.String, polars.Categorical, polars.Enum(["b", "a"])):
        X = polars.DataFrame({"d": days.cast(polars.Datetime(unit)), "k": kind.cast(text)})
        model = NadarayaWatsonRegressor(bandwidth=[1.0, 0.5]).fit(X, Y)
        np.testing.assert_allclose(model.predict(X), expected)
        with pytest.raises(ValueError, match="Feature names must be in the same order"):
            model.predict(X.select(["k", "d"]))


def test_what_is_wrong_is_said_before_any_work() -> None:
    frame = pd.DataFrame(
        {"heat": np.arange(8.0), "city": list("abababab"), "day": pd.date_range("2024-01-01", periods=8)}
    )
    model = NadarayaWatsonRegressor().fit(frame, Y)
    with pytest.raises(ValueError, match="Expected a 2-dimensional container but got"):
        NadarayaWatsonRegressor().fit(frame["heat"], Y)
    with pytest.raises(ValueError, match="Expected a 2-dimensional container but got"):
        model.predict(frame["heat"])
    with pytest.raises(ValueError, match="Feature names must be in the same order"):
        model.predict(frame[["city", "heat", "day"]])
    with pytest.raises(ValueError, match="Feature names seen at fit time, yet now missing"):
        model.predict(frame[["heat", "city"]])
    for wrong, message in (
        ({"heat": list("abcdefgh")}, "column 'heat' of X must hold numbers, as in fit, got text"),
        ({"heat": frame["day"]}, "column 'heat' of X must hold numbers, as in fit, got dates"),
        ({"day": frame["heat"]}, "column 'day' of X must hold dates, as in fit, got numbers"),
        (
            {"day": frame["day"].dt.tz_localize("UTC")},
            "column 'day' of X must hold dates without a time zone, as in fit, got dates with a time zone",
        ),
        ({"day": frame["day"] - frame["day"][0]}, "column 'day' of X must hold dates, as in fit, got time spans"),
    ):
        with pytest.raises(ValueError, match=f"NadarayaWatsonRegressor: {message}"):
            model.predict(frame.assign(**wrong))
    with pytest.raises(ValueError, match="column 'heat' of X must hold numbers, as in fit, got text"):
        NadarayaWatsonRegressor().partial_fit(frame, Y).partial_fit(frame.assign(heat="warm"), Y)
    with pytest.raises(ValueError, match="could not convert string to float"):
        NadarayaWatsonRegressor().fit([["a"], ["b"]], [1.0, 2.0])


def test_dates_with_a_time_zone_are_told_from_others() -> None:
    polars = pytest.importorskip("polars")
    days = pd.Series(pd.date_range("2024-01-01", periods=8, tz="Europe/Berlin"))
    model = NadarayaWatsonRegressor().fit(days.to_frame("day"), Y)
    utc = polars.DataFrame({"day": days.dt.tz_convert("UTC").dt.to_pydatetime()}).cast(polars.Datetime(time_zone="UTC"))
    for same in (days.dt.tz_convert("UTC").to_frame("day"), days.astype(object).to_frame("day"), utc):
        np.testing.assert_allclose(model.predict(same), model.predict(days.to_frame("day")))
    with pytest.raises(ValueError, match="must hold dates with a time zone, as in fit, got dates without a time zone"):
        model.predict(days.dt.tz_localize(None).to_frame("day"))


@pytest.mark.parametrize("kind", [NadarayaWatsonRegressor, NadarayaWatsonClassifier])
def test_dates_are_no_target(kind) -> None:
    for y, got in ((pd.Series(pd.date_range("2024-01-01", periods=8)), "dates"),
                   (pd.Series(pd.to_timedelta(range(8), unit="D")), "time spans")):  # fmt: skip
        with pytest.raises(ValueError, match=f"{kind.__name__}: y must hold numbers or classes, got {got}."):
            kind().fit(DAYS, y)
