"""``regard regress`` with missing values, ordered categories, places, and numbers that stand for a missing value."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from regard.regression import NadarayaWatsonRegressor


@pytest.fixture
def table(tmp_path):
    rng = np.random.default_rng(0)
    n = 80
    frame = pd.DataFrame(
        {
            "lat": rng.uniform(40, 50, n).round(4),
            "lon": (rng.uniform(355, 365, n) % 360).round(4),
            "size": rng.choice(["small", "medium", "large"], n),
            "stars": rng.integers(1, 6, n),
            "heat": rng.uniform(0, 30, n).round(2),
        }
    )
    frame["y"] = (np.sin(frame["lat"]) + frame["heat"] / 10 + (frame["size"] == "large")).round(3)
    return frame, tmp_path / "data.csv"


def record(regard, path, *options):
    return json.loads(regard("regress", path, "--target", "y", "--json", *options).out)


def test_places_and_ordered_categories_are_those_of_the_estimator(regard, table):
    frame, path = table
    frame.to_csv(path, index=False)
    found = record(regard, path, "--haversine", "lat,lon", "--ordered", "stars,size:small<medium<large", "--bandwidth",
                   "200,200,1,2,5", "--out", path.with_name("out.csv"))  # fmt: skip
    assert [each["kind"] for each in found["features"]] == ["latitude", "longitude", "ordered", "ordered", "number"]
    frame["size"] = pd.Categorical(frame["size"], ["small", "medium", "large"], ordered=True)
    model = NadarayaWatsonRegressor(
        bandwidth=[200, 200, 1, 2, 5], metric={("lat", "lon"): "haversine", "stars": "ordered"}
    ).fit(frame.drop(columns="y"), frame["y"])
    out = pd.read_csv(path.with_name("out.csv"))
    np.testing.assert_allclose(out["y_predicted"], model.loo_predict(), rtol=1e-9)


def test_rows_that_miss_features_are_kept(regard, table):
    frame, path = table
    frame.loc[3, "heat"], frame.loc[5, "size"], frame.loc[7, "y"] = np.nan, None, np.nan
    frame.loc[9, ["lat", "lon", "size", "stars", "heat"]] = None
    frame.to_csv(path, index=False)
    text = regard("regress", path, "--target", "y").out
    assert "Left out: 4 rows with missing values" in text
    assert "; --keep-missing uses those that only miss features." in text
    found = record(regard, path, "--keep-missing", "--bandwidth", "3", "--out", path.with_name("out.csv"))
    assert found["rows_learned"] == 78
    assert found["rows_not_predicted"]["missing"] == 1  # that without any feature
    out = pd.read_csv(path.with_name("out.csv"))
    assert np.flatnonzero(out["y_predicted"].isna()).tolist() == [9]
    rows = frame.drop(index=[7, 9])
    model = NadarayaWatsonRegressor(bandwidth=3, missing="marginal").fit(rows.drop(columns="y"), rows["y"])
    np.testing.assert_allclose(out.loc[rows.index, "y_predicted"], model.loo_predict(), rtol=1e-9)
    frame.head(6).drop(columns="y").to_csv(path.with_name("new.csv"), index=False)
    new = record(regard, path, "--keep-missing", "--bandwidth", "3", "--predict", path.with_name("new.csv"))
    assert [each["y_predicted"] for each in new["predictions"]] == pytest.approx(
        model.predict(frame.head(6).drop(columns="y")), rel=1e-9
    )


@pytest.mark.parametrize(("value", "hinted"), [("-999", True), ("9999", True), ("77777", True), ("35", False)])
def test_numbers_that_may_stand_for_a_missing_value(regard, table, value, hinted):
    frame, path = table
    frame.loc[::9, "heat"] = float(value)
    frame.to_csv(path, index=False)
    text = regard("regress", path, "--target", "y", "--bandwidth", "5").out
    note = f"Note: heat is {value} in 9 rows, and from 0.28 to 29.91 in the others; --missing={value} counts {value}"
    assert (note.split(", and", maxsplit=1)[0] in text) is hinted
    assert (f"--missing={value} counts {value} as missing." in text) is hinted
    left = regard("regress", path, "--target", "y", "--bandwidth", "5", f"--missing={value}").out
    assert "Left out: 9 rows" in left
    assert "Note: heat" not in left


def test_counts_with_many_zeros_and_two_values_are_left_alone(regard, tmp_path):
    rng = np.random.default_rng(0)
    many = np.where(rng.random(60) < 0.5, 0, rng.integers(500, 600, 60))
    frame = pd.DataFrame({"many": many, "flag": rng.integers(0, 2, 60) * 99, "y": rng.normal(size=60)})
    frame.to_csv(tmp_path / "a.csv", index=False)
    assert "as missing" not in regard("regress", tmp_path / "a.csv", "--target", "y", "--bandwidth", "5").out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--haversine", "lat"], "--haversine must name a column of latitudes and one of longitudes"),
        (["--haversine", "lat,nowhere"], "haversine must be"),
        (["--haversine", "lat,lon", "--angular", "lon"], "haversine must name features, got 'lon', which is angular"),
        (["--haversine", "lat,lon", "--kernel", "laplacian"], "--haversine must come with another kernel"),
        (["--haversine", "heat,y"], "haversine must name features"),
        (["--ordered", "size:small<large"], "must hold 'small', 'large', as --ordered says, got 'medium' in line"),
        (["--ordered", "size:small<small"], "--ordered must name each category once"),
        (["--ordered", "size"], "must hold numbers"),
    ],
)
def test_what_cannot_be(regard, table, options, message):
    frame, path = table
    frame.to_csv(path, index=False)
    found = regard("regress", path, "--target", "y", *options)
    assert found.code == 2
    assert message in " ".join(found.err.split())
