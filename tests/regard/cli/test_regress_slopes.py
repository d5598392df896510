"""``regard regress``: slopes, parabolas, and bandwidths by neighbours."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from regard.regression import NadarayaWatsonRegressor


@pytest.fixture
def hills(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(draw.uniform(-1, 1, (60, 4)).round(3), columns=["east", "north", "c", "d"])
    frame["soil"] = draw.choice(["clay", "sand"], 60)
    frame["height"] = (frame["east"] ** 2 - frame["north"] + (frame["soil"] == "sand")).round(4)
    frame.to_csv(path := tmp_path / "hills.csv", index=False)
    return path


@pytest.mark.parametrize("order", [0, 1, 2])
def test_slopes_are_columns(regard, hills: Path, tmp_path: Path, order: int) -> None:
    out = tmp_path / "out.csv"
    options = ("--features", "east,north,soil", "--bandwidth", "0.6", "--order", order, "--predict", hills)
    outcome = regard("regress", hills, "--target", "height", *options, "--slopes", "--out", out)
    assert outcome.code == 0, outcome.err
    around = ("weighted averages", "a line around each row", "a parabola around each row")[order]
    assert f"Learned from 60 rows: {around}, kernel gaussian." in outcome.out
    data, found = pd.read_csv(hills), pd.read_csv(out)
    X = data[["east", "north", "soil"]]
    model = NadarayaWatsonRegressor(bandwidth=0.6, order=order).fit(X, data["height"])
    columns = ["height_slope_east", "height_slope_north"]
    assert [each for each in found if "_slope_" in each] == columns
    np.testing.assert_allclose(found[columns], model.predict_gradient(X)[:, :2], atol=1e-9)
    again = json.loads(regard("regress", out, "--target", "height", "--bandwidth", "1", "--json").out)
    assert {*columns, "height_predicted"} <= set(again["columns_not_used"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--slopes",), "--slopes must come with --predict, which may be DATA itself, got none"),
        (("--slopes", "--predict", "{}", "--kernel", "boxcar"), "--slopes must come with --order 1, or a kernel whose"),
        (("--slopes", "--predict", "{}", "--features", "soil"), "--slopes must come with features of numbers or dates"),
        (("--slopes", "--predict", "{}", "--target", "soil"), "--slopes must come with a target of numbers, got text"),
        (("--order", "2", "--target", "soil", "--features", "c"), "--order 2 must come with a target of numbers"),
        (("--neighbors", "9", "--bandwidth", "loo"), "--bandwidth must be scott, silverman or numbers with"),
        (("--neighbors", "few"), "--neighbors must be loo or a whole number of at least 1, got 'few'"),
        (("--neighbors", "1", "--kernel", "epanechnikov"), "of at least 2 with --kernel epanechnikov, got '1'"),
        (("--neighbors", "61"), "--neighbors must be at most the 60 rows to learn from, got 61"),
        (("--neighbors", "9", "--kernel", "constant"), "--kernel must be another with --neighbors, got constant"),
        (("--neighbors", "9", "--slopes", "--predict", "{}"), "--slopes must come with --order 1 or 2 where"),
        (("--neighbors", "9", "--cv", "5"), "--cv must come with --bandwidth loo or learned"),
        (("--order", "2"), "must have at most 3 features of numbers or dates for --order 2, which --features can"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(regard, hills: Path, options: tuple[str, ...], message: str) -> None:
    outcome = regard("regress", hills, "--target", "height", *(each.replace("{}", str(hills)) for each in options))
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("neighbors", ["12", "loo"])
def test_bandwidths_by_neighbours(regard, hills: Path, tmp_path: Path, neighbors: str) -> None:
    out, options = tmp_path / "out.csv", ("--features", "east,north,soil", "--order", "1", "--neighbors", neighbors)
    outcome = regard("regress", hills, "--target", "height", *options, "--predict", hills, "--out", out)
    assert outcome.code == 0, outcome.err
    data = pd.read_csv(hills)
    X = data[["east", "north", "soil"]]
    k = neighbors if neighbors == "loo" else int(neighbors)
    model = NadarayaWatsonRegressor(n_neighbors=k, order=1).fit(X, data["height"])
    way = "as given" if neighbors == "12" else "chosen for the least leave-one-out error"
    text = f"Bandwidth: at each row, the distance to the {model.n_neighbors_} nearest rows ({way})."
    assert text in outcome.out and "unit of distance" in outcome.out
    np.testing.assert_allclose(pd.read_csv(out)["height_predicted"], model.predict(X), atol=1e-9)
    record = json.loads(regard("regress", hills, "--target", "height", *options, "--json").out)
    assert record["n_neighbors"] == model.n_neighbors_
    assert record["quality"]["rmse"] == pytest.approx(np.sqrt(model.loo_error()))
