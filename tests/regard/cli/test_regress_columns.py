"""``regard regress``: options for columns, what is said of many, and its own files read again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from regard.regression import NadarayaWatsonClassifier, NadarayaWatsonRegressor


@pytest.fixture
def rides(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    hour, shop = draw.integers(0, 24, 80), draw.integers(1, 4, 80)
    rain = draw.normal(size=80).round(2)
    path = tmp_path / "rides.csv"
    y = (np.cos(hour * np.pi / 12) + shop + draw.normal(size=80) / 9).round(3)
    pd.DataFrame({"hour": hour, "shop": shop, "rain": rain, "full": y.astype(int), "y": y}).to_csv(path, index=False)
    return path


def test_angles_categories_and_columns_to_ignore(regard, rides: Path) -> None:
    options = ("--angular", "hour:24", "--categorical", "shop", "--ignore", "rain,full", "--bandwidth", "2,0.5")
    outcome = regard("regress", rides, "--target", "y", *options)
    assert outcome.code == 0, outcome.err
    assert "  hour     angle, period 24  2" in outcome.out
    assert "  shop     3 categories      0.5 (another category counts" in outcome.out
    record = json.loads(regard("regress", rides, "--target", "y", *options, "--json").out)
    data = pd.read_csv(rides)
    metric = {"hour": ("angular", 24), "shop": "categorical"}
    model = NadarayaWatsonRegressor(bandwidth=[2, 0.5], metric=metric).fit(data[["hour", "shop"]], data["y"])
    assert record["quality"]["rmse"] == pytest.approx(np.sqrt(model.loo_error()))
    assert [each["kind"] for each in record["features"]] == ["angle", "category"]


def test_numbers_as_classes(regard, rides: Path) -> None:
    options = ("--target", "full", "--features", "hour,shop", "--bandwidth", "1")
    record = json.loads(regard("regress", rides, *options, "--classify", "--json").out)
    data = pd.read_csv(rides)
    model = NadarayaWatsonClassifier(bandwidth=1.0).fit(data[["hour", "shop"]], data["full"].astype(str))
    assert record["task"] == "classification"
    assert record["quality"]["accuracy"] == pytest.approx((model.loo_predict() == data["full"].astype(str)).mean())
    assert json.loads(regard("regress", rides, *options, "--json").out)["task"] == "regression"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--categorical", "shoe"), "--categorical must be one of 'full', 'hour', 'rain', 'shop', 'y', got 'shoe'"),
        (("--categorical", "y"), "--categorical must name features, got 'y', which is none"),
        (("--angular", "hour:24", "--categorical", "hour"), "--angular must name features, got 'hour', which is categ"),
        (("--angular", "hour:0"), "--angular must have periods above 0, got 0 for 'hour'"),
        (("--angular", "hour", "--kernel", "laplacian"), "--angular must come with another kernel, got --kernel lap"),
        (("--ignore", "y"), "ignore must name columns that are not used otherwise, got 'y', the target"),
        (("--ignore", ""), "--ignore must name columns, separated by commas, got ''"),
        (("--decimal", ";"), "--decimal must be one of '.', ',', got ';'"),
        (("--decimal", ",", "--thousands", ","), "--thousands must be another mark than --decimal, got ','"),
        (("--encoding", "latin-9000"), "--encoding must be an encoding that Python knows, such as latin-1"),
    ],
)  # fmt: skip
def test_wrong_options(regard, rides: Path, options: tuple[str, ...], message: str) -> None:
    outcome = regard("regress", rides, "--target", "y", *options)
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1


def test_thousands_of_columns_are_a_summary(regard, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    columns = {f"gene{i}": draw.normal(size=12).round(2) if i % 2 else np.ones(12) for i in range(60)}
    path = tmp_path / "wide.csv"
    pd.DataFrame({**columns, "y": np.arange(12.0)}).to_csv(path, index=False)
    outcome = regard("regress", path, "--target", "y", "--bandwidth", "1")
    assert outcome.code == 0, outcome.err
    assert len(outcome.out.splitlines()) < 40
    assert "gene14 and 22 more, the same in every row." in outcome.out
    assert "  and 10 more; --json lists all" in outcome.out
    outcome = regard("regress", path, "--target", "gene")
    assert "must be one of the 61 columns, got 'gene' (did you mean 'gene" in outcome.err
    assert len(outcome.err) < 300


def test_it_reads_its_own_file(regard, tmp_path: Path) -> None:
    path, out = tmp_path / "a.csv", tmp_path / "b.csv"
    rows = "".join(f"{d}.12.2023;{d},5;{d}.{d + 100};{d * d % 7},25\n" for d in range(1, 29))
    path.write_text("# Bericht\ntag;temp;umsatz;y\n" + rows)
    outcome = regard("regress", path, "--target", "y", "--bandwidth", "scott", "--out", out)
    assert outcome.code == 0, outcome.err
    assert "Skipped: 1 line of comments." in outcome.out
    assert "In umsatz, numbers have decimal commas and dots between thousands, as in temp." in outcome.out
    assert "In tag, dates have the day first." in outcome.out
    assert out.read_text().splitlines()[1].startswith("2023-12-01,1.5,1101,1.25,")
    again = regard("regress", out, "--target", "y", "--bandwidth", "scott")
    assert again.code == 0, again.err
    assert again.out.splitlines()[-1] == outcome.out.splitlines()[-2]


def test_pictures_of_times_and_many_categories(regard, tmp_path: Path) -> None:
    times = pd.date_range("2024-05-01", periods=96, freq="15min").strftime("%Y-%m-%d %H:%M")
    town = [f"a rather long name of town {i % 24}" for i in range(96)]
    path, png = tmp_path / "a.csv", tmp_path / "a.png"
    pd.DataFrame({"t": times, "town": town, "y": np.arange(96) % 17}).to_csv(path, index=False)
    outcome = regard("regress", path, "--target", "y", "--bandwidth", "scott", "--plot", png)
    assert outcome.code == 0, outcome.err
    assert png.read_bytes().startswith(b"\x89PNG")
