"""``regard regress``: what it reads, what it says, what it writes and draws."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from datetime import date
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import r2_score

from regard.regression import NadarayaWatsonClassifier, NadarayaWatsonRegressor
from regard.regression._sums.smoother import names
from regard_cli import regress as command
from regard_cli import regress_model


@pytest.fixture
def curve(tmp_path: Path) -> Path:
    """Forty rows of y = x² on a grid, with a little noise."""
    x = np.linspace(0, 4, 40).round(3)
    y = (x**2 + 0.1 * np.random.default_rng(0).normal(size=40)).round(3)
    return _csv(tmp_path / "curve.csv", x=x, y=y)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Numbers, text, truth values, dates, gaps, a name for each row, and a column that never changes."""
    draw = np.random.default_rng(1)
    day = pd.Series(pd.date_range("2024-01-01", periods=60)).dt.strftime("%Y-%m-%d")
    city = np.array(["Bonn", "Köln", "Ulm"])[draw.integers(0, 3, 60)].astype(object)
    wet = draw.integers(0, 2, 60).astype(bool)
    height = draw.normal(200, 20, 60).round(1).astype(object)
    temp = (np.arange(60) / 6 + 3.0 * (city == "Ulm") + draw.normal(size=60)).round(2).astype(object)
    city[4], height[5], height[6], temp[7] = None, "NA", "broken", ""
    name = [f"row {i}" for i in range(60)]
    return _csv(tmp_path / "mixed.csv", name=name, day=day, city=city, wet=wet, height=height, unit="C", temp=temp)


def _csv(path: Path, **columns) -> Path:
    pd.DataFrame(columns).to_csv(path, index=False)
    return path


def test_it_says_what_it_did(regard, curve: Path) -> None:
    outcome = regard("regress", curve, "--target", "y")
    assert outcome.code == 0
    assert outcome.err == ""
    data = pd.read_csv(curve)
    model = NadarayaWatsonRegressor(bandwidth="loo").fit(data[["x"]], data["y"])
    error = np.sqrt(np.mean((model.loo_predict() - data["y"]) ** 2))
    others = (data["y"].sum() - data["y"]) / 39
    simple = np.sqrt(np.mean((others - data["y"]) ** 2))
    lines = outcome.out.splitlines()
    assert lines[0] == f"{curve}: 40 rows, 2 columns (CSV with commas)."
    assert "Learned from 40 rows: weighted averages, kernel gaussian." in lines
    assert lines[-1] == (
        f"Each row, predicted from all the others: off by {error:.4g} (root mean square); the mean of y: off by "
        f"{simple:.4g}; leave-one-out R² = {r2_score(data['y'], model.loo_predict()):.3f}."
    )
    row = next(line for line in lines if line.startswith("  x "))
    assert row.split() == ["x", "number", f"{model.bandwidth_[0]:.4g}"]


def test_predictions_are_the_estimators(regard, curve: Path, tmp_path: Path) -> None:
    new = _csv(tmp_path / "new.csv", label=["a", "b", "c"], x=["0.50", "", "3.25"])
    out = tmp_path / "out.csv"
    outcome = regard("regress", curve, "--target", "y", "--bandwidth", "0.3", "--order", "1", "--predict", new,
                     "--out", out, "--std", "--quantiles", "0.9,0.1")  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert "Predicted 2 of 3 rows" in outcome.out
    assert "(x: 1)" in outcome.out
    assert f"Wrote the rows of {new} with y_predicted, y_std, y_q0.1, y_q0.9, y_extrapolated: {out}" in outcome.out
    text = out.read_text()
    assert text.splitlines()[0] == "label,x,y_predicted,y_std,y_q0.1,y_q0.9,y_extrapolated"
    assert text.splitlines()[1].startswith("a,0.50,"), "cells are written as they were read"
    assert text.splitlines()[2] == "b,,,,,,"
    data = pd.read_csv(curve)
    model = NadarayaWatsonRegressor(bandwidth=0.3, order=1).fit(data[["x"]], data["y"])
    at = pd.DataFrame({"x": [0.5, 3.25]})
    mean, std = model.predict(at, return_std=True)
    written = pd.read_csv(out).iloc[[0, 2]]
    np.testing.assert_allclose(written["y_predicted"], mean, rtol=1e-12)
    np.testing.assert_allclose(written["y_std"], std, rtol=1e-12)
    np.testing.assert_allclose(written[["y_q0.1", "y_q0.9"]], model.predict_quantiles(at, (0.1, 0.9)), rtol=1e-12)


def test_a_method_is_the_estimators(regard, curve: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    real = NadarayaWatsonRegressor.predict

    def predict(self: NadarayaWatsonRegressor, *arguments: object, **options: object) -> object:
        found = real(self, *arguments, **options)
        ran.append((self.plan_.method, self.plan_.rtol))
        return found

    monkeypatch.setattr(NadarayaWatsonRegressor, "predict", predict)
    outcome = regard("regress", curve, "--target", "y", "--bandwidth", "0.3", "--method", "nufft", "--rtol", "1e-4",
                     "--predict", curve)  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert set(ran) == {("nufft", 1e-4)}


def test_its_own_rows_are_predicted_from_the_others(regard, tmp_path: Path) -> None:
    data = _csv(tmp_path / "a.csv", x=["1", "2", "3", "4", ""], y=["1", "2", "", "4", "9"], w=["1", "2", "1", "0", "1"],
                half=["0.5", "1", "0.5", "0", "0.5"])  # fmt: skip
    out = tmp_path / "out.tsv"
    outcome = regard("regress", data, "--target", "y", "--features", "x", "--weights", "w", "--bandwidth", "1",
                     "--out", out)  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert "Left out: 2 rows with missing values (y: 1, x: 1); --keep-missing uses" in outcome.out
    assert "Left out: 1 row of weight 0." in outcome.out
    assert "from all the others and its own repetitions (whole-number weights count rows): off by" in outcome.out
    found = pd.read_csv(out, sep="\t")["y_predicted"]
    side = np.exp(-1 / 2)  # without one of its two repetitions, the second row has the other and the first row
    np.testing.assert_allclose(found[:2], [2.0, (side * 1 + 1 * 2) / (side + 1)])
    errors = np.array([2.0 - 1.0, found[1] - 2.0])
    assert f"off by {np.sqrt((errors**2) @ [1, 2] / 3):.4g} (root mean square); the mean of y: off by" in outcome.out
    # The mean of the others is 2 for the first row and 1.5 for the second, whose other repetition counts.
    assert f"the mean of y: off by {np.sqrt((1 + 2 * 0.5**2) / 3):.4g};" in outcome.out
    lines = regard("regress", data, "--target", "y", "--features", "x", "--weights", "half", "--bandwidth", "1",
                   "--out", tmp_path / "half.tsv").out  # fmt: skip
    assert "Each row, predicted from all the others: off by" in lines
    np.testing.assert_allclose(pd.read_csv(tmp_path / "half.tsv", sep="\t")["y_predicted"][:2], [2.0, 1.0])
    near = np.exp(-(np.array([2.0, 1.0]) ** 2) / 2) * [1, 2]
    np.testing.assert_allclose(found[2], near @ [1.0, 2.0] / near.sum()), "its target is missing: all rows count"
    far = np.exp(-(np.array([3.0, 2.0]) ** 2) / 2) * [1, 2]
    np.testing.assert_allclose(found[3], far @ [1.0, 2.0] / far.sum())
    assert np.isnan(found[4])


def test_each_kind_of_column(regard, mixed: Path) -> None:
    outcome = regard("regress", mixed, "--target", "temp", "--bandwidth", "scott")
    assert outcome.code == 0, outcome.err
    for line in (
        "Not used: name, text that hardly repeats, such as 'row 0'.",
        "Not used: unit, the same in every row.",
        "In height, what is no number counts as missing: 'broken'.",
        "Left out: 4 rows with missing values (temp: 1, city: 1, height: 2); --keep-missing uses those that "
        "only miss features.",
        "Learned from 56 rows: weighted averages, kernel gaussian.",
        "Bandwidth: by Scott's rule of thumb.",
    ):
        assert line in outcome.out.splitlines()
    table = {line.split()[0]: line for line in outcome.out.splitlines() if line.startswith("  ")}
    assert list(table) == ["feature", "day", "city", "wet", "height"]
    assert "date, in days" in table["day"]
    assert table["day"].endswith(" days")
    assert "3 categories" in table["city"]
    assert "(another category counts " in table["wet"]


def test_metrics_and_codes_are_what_the_estimator_wants(regard, mixed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    regard("regress", mixed, "--target", "temp", "--features", "day,city", "--bandwidth", "4,0.5", "--out", out)
    data = pd.read_csv(mixed).dropna(subset=["city", "temp"])
    X = np.stack([np.arange(60)[data.index], data["city"].map({"Bonn": 5, "Köln": 7, "Ulm": 9})], 1)
    model = NadarayaWatsonRegressor(bandwidth=[4, 0.5], metric=["euclidean", "categorical"]).fit(X, data["temp"])
    np.testing.assert_allclose(pd.read_csv(out)["temp_predicted"][data.index], model.loo_predict(), rtol=1e-9)


def test_a_new_category_is_like_no_other(regard, tmp_path: Path) -> None:
    data = _csv(tmp_path / "a.csv", kind=["a", "a", "b", "b"], x=[1, 2, 1, 2], y=[0, 0, 4, 4])
    new = _csv(tmp_path / "new.csv", kind=["a", "c"], x=[1.5, 1.5])
    outcome = regard("regress", data, "--target", "y", "--bandwidth", "0.2", "--predict", new, "--json")
    assert [each["y_predicted"] for each in json.loads(outcome.out)["predictions"]] == pytest.approx([0, 2], abs=1e-4)
    outcome = regard("regress", data, "--target", "y", "--bandwidth", "0.2", "--predict", new)
    assert "has no 'c': such rows count as unlike all rows there." in outcome.out
    assert outcome.out.splitlines()[-1] == "--out predictions.csv writes them."


def test_a_target_of_text_is_classified(regard, tmp_path: Path) -> None:
    x = np.r_[0:5:0.5, 10:16:0.5].round(1)
    y = np.where(x < 7, "low", "high")
    data = _csv(tmp_path / "a.csv", x=x, y=y)
    new = _csv(tmp_path / "new.csv", x=[1, 12, ""], y=["low", "low", "low"])
    out = tmp_path / "out.csv"
    outcome = regard("regress", data, "--target", "y", "--bandwidth", "2", "--predict", new, "--out", out)
    assert outcome.code == 0, outcome.err
    assert "Target: y, text with 2 classes (high, low)." in outcome.out
    assert "Each row, predicted from all the others: 100.0% right; the most frequent class: 54.5% right." in outcome.out
    assert "50.0% right; the most frequent class: 0.0% right." in outcome.out
    found = pd.read_csv(out)
    assert list(found.columns) == [
        "x", "y", "y_predicted", "y_probability_high", "y_probability_low", "y_extrapolated",
    ]  # fmt: skip
    assert found["y_predicted"].fillna("-").tolist() == ["low", "high", "-"]
    model = NadarayaWatsonClassifier(bandwidth=2.0).fit(x[:, None], y)
    np.testing.assert_allclose(found.iloc[:2, 3:5].astype(float), model.predict_proba([[1.0], [12.0]]), rtol=1e-12)
    assert regard("regress", data, "--target", "y", "--bandwidth", "2", "--out", out).code == 0
    own = pd.read_csv(out)
    assert own["y_predicted"].tolist() == model.loo_predict().tolist()
    np.testing.assert_allclose(own.iloc[:, 3:].sum(axis=1), 1)


@pytest.mark.parametrize(
    "form", ["tsv", "semicolons", "bars", "gzip", "bom", "utf-16", "windows", "mac", "stdin", "parquet"]
)
def test_forms_of_one_table(regard, tmp_path: Path, form: str) -> None:
    frame = pd.DataFrame({"größe, cm": [1.5, 2.25, 3.0, 4.5, 5.0], "y": [1, 4, 9, 20, 25]})
    separator = {"tsv": "\t", "semicolons": ";", "bars": "|"}.get(form, ",")
    text = frame.to_csv(index=False, sep=separator, decimal="," if form == "semicolons" else ".")
    path = tmp_path / {"gzip": "a.csv.gz", "parquet": "a.parquet"}.get(form, "a.csv")
    data = text.replace("\n", {"windows": "\r\n", "mac": "\r"}.get(form, "\n")).encode(
        "utf-16" if form == "utf-16" else "utf-8"
    )
    data = {"gzip": gzip.compress(data), "bom": b"\xef\xbb\xbf" + data}.get(form, data)
    if form == "parquet":
        frame.to_parquet(path)
    else:
        path.write_bytes(data)
    given = ("-", text) if form == "stdin" else (path, "")
    outcome = regard("regress", given[0], "--target", "y", "--bandwidth", "1", "--json", stdin=given[1])
    assert outcome.code == 0, outcome.err
    record = json.loads(outcome.out)
    assert [each["name"] for each in record["features"]] == ["größe, cm"]
    assert record["rows_learned"] == 5
    plain = NadarayaWatsonRegressor(bandwidth=1.0).fit(frame.iloc[:, :1], frame["y"])
    assert record["quality"]["rmse"] == pytest.approx(np.sqrt(plain.loo_error()))


@pytest.mark.slow
def test_parquet_comes_out_with_types(regard, mixed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    assert regard("regress", mixed, "--target", "temp", "--bandwidth", "scott", "--out", out).code == 0
    frame = pd.read_parquet(out)
    assert frame["temp"].dtype == frame["temp_predicted"].dtype == float
    assert str(frame["day"].dtype).startswith("datetime64")
    assert frame["day"].dt.tz is None
    again = regard("regress", out, "--target", "temp", "--features", "day,city,wet", "--bandwidth", "scott")
    assert again.code == 0, again.err
    assert "2 categories" in again.out


def test_a_column_that_counts_the_rows_is_not_used(regard, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    pd.DataFrame({"x": [1, 2, 3], "y": [1, 4, 9]}).to_csv(path)
    outcome = regard("regress", path, "--target", "y", "--bandwidth", "1")
    assert "Not used: column 1, which has no name and is empty or counts the rows." in outcome.out
    assert "  x        number" in outcome.out


def test_earlier_predictions_are_not_learned_from(regard, curve: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    regard("regress", curve, "--target", "y", "--bandwidth", "1", "--predict", curve, "--out", out, "--std")
    outcome = regard("regress", out, "--target", "y", "--bandwidth", "1")
    assert "Not used: y_predicted, y_std, y_extrapolated, from earlier predictions of the target." in outcome.out
    assert (
        outcome.out.splitlines()[-1]
        == regard("regress", curve, "--target", "y", "--bandwidth", "1").out.splitlines()[-1]
    )


def test_spaces_around_cells_and_empty_lines(regard, tmp_path: Path) -> None:
    path, new = tmp_path / "a.csv", tmp_path / "new.csv"
    path.write_bytes(b'\r\n x , "the y, cm"\r\n1, 2\r\n\r\n2, 3\r\n3, 5\r\n\r\n')
    new.write_text("x\n1\n\n3\n\n")
    outcome = regard("regress", path, "--target", "the y, cm", "--bandwidth", "0.1", "--predict", new, "--json")
    assert outcome.code == 0, outcome.err
    record = json.loads(outcome.out)
    assert record["rows_learned"] == 3
    assert [each["the y, cm_predicted"] for each in record["predictions"]] == [pytest.approx(2), None, pytest.approx(5)]


def test_json_holds_no_character_that_a_terminal_obeys(regard, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + "".join(f"{name},{i}\n" for i, name in enumerate(["\x9b31m", "b", "\x7f", "b"] * 4)))
    outcome = regard("regress", path, "--target", "y", "--json")
    assert json.loads(outcome.out)["features"][0]["categories"] == ["b", "\x7f", "\x9b31m"]
    assert outcome.out.rstrip("\n").isprintable()


def test_every_type_of_parquet(regard, tmp_path: Path) -> None:
    whole = np.arange(8)
    frame = pd.DataFrame(
        {
            "decimal": [Decimal(i) / 3 for i in range(8)],
            "nullable": pd.array([0, 1, None, 3, 4, 5, 6, 7], dtype="Int64"),
            "truth": [True, False, None, True, True, False, True, False],
            "date": [date(2024, 1, 1 + i) for i in range(8)],
            "zoned": pd.date_range("2024-01-01", periods=8, tz="Europe/Berlin"),
            "span": pd.to_timedelta(whole, "h"),
            "kind": pd.Categorical(["a", "b"] * 4),
            "nothing": [None] * 8,
            "list": [[i] for i in range(8)],
            "small": whole.astype("uint8"),
            "y": whole.astype("float32") ** 2,
        }
    )
    path = tmp_path / "a.parquet"
    frame.to_parquet(path)
    outcome = regard("regress", path, "--target", "y", "--bandwidth", "1", "--json")
    assert outcome.code == 0, outcome.err
    record = json.loads(outcome.out)
    assert {each["name"]: each["kind"] for each in record["features"]} == {
        "decimal": "number", "nullable": "number", "truth": "category", "date": "date", "zoned": "date",
        "span": "date", "kind": "category", "small": "number",
    }  # fmt: skip
    assert record["columns_not_used"] == {"nothing": "empty", "list": "neither numbers nor text"}
    assert record["rows_missing"] == {"nullable": 1, "truth": 1}
    assert record["rows_learned"] == 7


def test_nothing_in_a_table_speaks_to_the_terminal(regard, tmp_path: Path) -> None:
    data = _csv(tmp_path / "a.csv", **{"x\x1b[31m": ["\x1b[2J", "b", "\x1b[2J", "b"], "y": [1, 2, 3, 5]})
    outcome = regard("regress", data, "--target", "y", "--bandwidth", "1", "--predict", data)
    assert outcome.code == 0, outcome.err
    assert r"x\u001b[31m" in outcome.out
    assert "\x1b" not in outcome.out


def test_predictions_alone_on_standard_output(regard, curve: Path) -> None:
    outcome = regard("regress", curve, "--target", "y", "--out", "-")
    assert outcome.code == 0
    assert len(pd.read_csv(io.StringIO(outcome.out))) == 40
    assert "Each row, predicted from all the others" in outcome.err


@pytest.mark.parametrize("kernel", names())
def test_every_kernel(regard, curve: Path, kernel: str) -> None:
    record = json.loads(regard("regress", curve, "--target", "y", "--kernel", kernel, "--json").out)
    assert record["kernel"] == kernel
    assert (
        record["quality"]["r2"] == pytest.approx(0, abs=0.1) if kernel == "constant" else record["quality"]["r2"] > 0.9
    )


@pytest.mark.slow
def test_learned_bandwidths_say_what_hardly_matters(regard, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x, noise = draw.uniform(0, 6, 80), draw.normal(size=80)
    data = _csv(tmp_path / "a.csv", x=x, noise=noise, y=np.sin(x))
    outcome = regard("regress", data, "--target", "y", "--bandwidth", "learned")
    assert "Bandwidth: one for each feature" in outcome.out
    row = next(line for line in outcome.out.splitlines() if line.startswith("  noise"))
    assert row.endswith("(so wide that it hardly matters)")


def test_a_wide_bandwidth_of_a_line_is_a_slope(regard, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    wave, slope, noise = draw.uniform(0, 6, 80), draw.normal(size=80), draw.normal(size=80)
    data = _csv(tmp_path / "a.csv", wave=wave, slope=slope, noise=noise, y=np.sin(wave) + 2 * slope)
    outcome = regard("regress", data, "--target", "y", "--bandwidth", "0.5,1e3,1e3", "--order", "1")
    rows = {line.split()[0]: line for line in outcome.out.splitlines() if line.startswith("  ")}
    assert "(so wide that it enters as a straight line, slope " in rows["slope"]
    assert float(rows["slope"].split()[-1].rstrip(")")) == pytest.approx(2, abs=0.05)
    assert "(so wide that it enters as a straight line, slope " in rows["noise"]
    assert rows["noise"].endswith(": it hardly matters)")
    assert rows["wave"].split() == ["wave", "number", "0.5"]
    outcome = regard("regress", data, "--target", "y", "--kernel", "constant", "--bandwidth", "1")
    assert outcome.out.count("(of no effect, as all rows count alike)") == 3


def test_many_rows_are_sampled(regard, curve: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_PAIRS": 400, "_LEAST": 10, "_ROWS": 30, "_HELD": 15}.items():
        monkeypatch.setattr(regress_model, name, value)
    outcome = regard("regress", curve, "--target", "y", "--method", "exact")
    assert "seen on 10 rows drawn at random." in outcome.out
    assert "15 rows drawn at random, predicted from the rest: off by" in outcome.out
    for options in ([], ["--empty", "raise", "--kernel", "epanechnikov", "--bandwidth", "0.2"]):
        record = json.loads(regard("regress", curve, "--target", "y", "--json", *options).out)
        assert record["quality"]["way"] == "held out"
        assert record["quality"]["rows"] + record["quality"]["rows_lost"] == 15
        assert record["quality"]["r2"] > 0.5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--target", "temp", "--features", "day"], "temp as predicted over day"),
        (["--target", "temp"], "temp as predicted over each feature, the others held at"),
        (["--target", "city", "--features", "day,temp"], "the probability of each city over each feature"),
    ],
)
def test_pictures(regard, mixed: Path, tmp_path: Path, options: list[str], said: str) -> None:
    png = tmp_path / "fit.png"
    outcome = regard("regress", mixed, *options, "--bandwidth", "scott", "--plot", png)
    assert outcome.code == 0, outcome.err
    assert f"Drew {said}" in outcome.out
    assert png.read_bytes().startswith(b"\x89PNG")


def test_an_interrupt_exits_quietly(regard, curve: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "fit", interrupt)
    outcome = regard("regress", curve, "--target", "y", "--out", tmp_path / "out.csv")
    assert outcome.code == 130
    assert "interrupted" in outcome.err
    assert "Traceback" not in outcome.err
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.campaign
@pytest.mark.slow
def test_a_plain_pipe_gets_plain_characters(mixed: Path) -> None:
    code = "from regard_cli import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", code, "regress", str(mixed), "--target", "city", "--features", "temp"],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.isascii()
    assert b"(Bonn, K?ln, Ulm)" in run.stdout
