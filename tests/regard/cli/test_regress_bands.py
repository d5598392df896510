"""``regard regress``: bands of the mean, degrees of freedom, AICc and weights of classes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from regard.regression import NadarayaWatsonClassifier, NadarayaWatsonRegressor


@pytest.fixture
def curve(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    x = np.linspace(0, 4, 60).round(3)
    return _csv(tmp_path / "curve.csv", x=x, y=(np.sin(2 * x) + 0.3 * rng.normal(size=60)).round(3))


@pytest.fixture
def sold(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    x = rng.normal(size=120).round(2)
    return _csv(tmp_path / "sold.csv", x=x, sold=np.where(x + rng.normal(size=120) > 1.5, "yes", "no"))


def _csv(path: Path, **columns) -> Path:
    pd.DataFrame(columns).to_csv(path, index=False)
    return path


def test_bands_are_written_drawn_and_read_again(regard, curve: Path, tmp_path: Path) -> None:
    new, out, picture = _csv(tmp_path / "new.csv", x=[0.5, 3.2, 90.0]), tmp_path / "out.csv", tmp_path / "fit.svg"
    outcome = regard("regress", curve, "--target", "y", "--bandwidth", "0.3", "--order", "1", "--predict", new,
                     "--out", out, "--std", "--band", "0.9", "--plot", picture)  # fmt: skip
    assert outcome.code == 0, outcome.err
    data, written = pd.read_csv(curve), pd.read_csv(out)
    model = NadarayaWatsonRegressor(bandwidth=0.3, order=1).fit(data[["x"]], data["y"])
    assert list(written) == ["x", "y_predicted", "y_std", "y_band_low", "y_band_high", "y_extrapolated"]
    expected = model.predict_band(pd.DataFrame({"x": [0.5, 3.2]}), 0.9)
    np.testing.assert_allclose(written.loc[:1, ["y_band_low", "y_band_high"]], expected)
    assert written.loc[2, ["y_band_low", "y_band_high"]].isna().all()
    assert "y_std, y_band_low, y_band_high stay empty there" in outcome.out
    assert "<!-- 90 % band of the mean -->" in picture.read_text()
    _csv(out, **written.assign(y=[1.0, 2.0, 4.0]))
    again = regard("regress", out, "--target", "y", "--bandwidth", "1")
    assert "y_band_high, y_extrapolated, from earlier predictions of the target." in again.out


@pytest.mark.parametrize("bandwidth", ["loo", "aicc", "0.4"])
def test_degrees_of_freedom_and_aicc_are_the_estimators(regard, curve: Path, bandwidth: str) -> None:
    data = pd.read_csv(curve)
    way = bandwidth if bandwidth != "0.4" else 0.4
    model = NadarayaWatsonRegressor(bandwidth=way, order=1).fit(data[["x"]], data["y"])
    outcome = regard("regress", curve, "--target", "y", "--bandwidth", bandwidth, "--order", "1")
    line = f"Effective degrees of freedom: {model.effective_dof():.4g}; AICc = {model.aicc():.4g}."
    assert line in outcome.out.splitlines()
    assert ("Bandwidth: chosen for the least AICc (corrected Akaike criterion)." in outcome.out) == (way == "aicc")
    found = json.loads(
        regard("regress", curve, "--target", "y", "--bandwidth", bandwidth, "--order", "1", "--json").out
    )
    assert found["effective_dof"] == pytest.approx(model.effective_dof())
    assert found["aicc"] == pytest.approx(model.aicc())


def test_what_is_noted_names_options(regard, curve: Path) -> None:
    outcome = regard("regress", curve, "--target", "y", "--bandwidth", "aicc", "--order", "1")
    assert "--bandwidth loo with --cv 10 leaves out blocks." in outcome.out


def test_many_rows_are_sampled_for_them(regard, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.random(12_000).round(5)
    many = _csv(tmp_path / "many.csv", x=x, y=(np.sin(6 * x) + rng.normal(size=len(x))).round(3))
    outcome = regard("regress", many, "--target", "y", "--bandwidth", "0.05")
    line = next(each for each in outcome.out.splitlines() if each.startswith("Effective"))
    assert line.endswith("estimated from 8,333 rows drawn at random.")
    model = NadarayaWatsonRegressor(bandwidth=0.05).fit(x[:, None], pd.read_csv(many)["y"])
    assert float(line.split()[4].rstrip(";")) == pytest.approx(model.effective_dof(), rel=0.05)


@pytest.mark.parametrize("given", ["balanced", "yes:5"])
def test_weights_of_classes_are_the_estimators(regard, sold: Path, given: str, tmp_path: Path) -> None:
    new, out = _csv(tmp_path / "new.csv", x=[-1.0, 0.5, 1.0]), tmp_path / "out.csv"
    outcome = regard("regress", sold, "--target", "sold", "--class-weight", given, "--predict", new, "--out", out)
    assert outcome.code == 0, outcome.err
    data = pd.read_csv(sold)
    weight = given if given == "balanced" else {"yes": 5}
    model = NadarayaWatsonClassifier(bandwidth="loo", class_weight=weight).fit(data[["x"]], data["sold"])
    found = pd.read_csv(out)
    expected = model.predict_proba(pd.read_csv(new))
    np.testing.assert_allclose(found[["sold_probability_no", "sold_probability_yes"]], expected, atol=1e-9)
    right = model.loo_predict() == data["sold"]
    mean = right.groupby(data["sold"]).mean().mean()
    assert f"{right.mean():.1%} right; on average over classes {mean:.1%}; the most frequent class:" in outcome.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--band 2 --plot fit.png", "--band must be a number in (0, 1), got 2.0"),
        ("--band 0.9", "--band must come with --predict, or with --plot and no --out, got none"),
        ("--band 0.9 --out o.csv --plot fit.png",
         "--band must come with --predict, or with --plot and no --out, got --out alone"),
        ("--class-weight balanced",
         "--class-weight must come with a target of text, or --classify, got numbers in 'y'"),
        ("--bandwidth aicc --cv 5",
         "--cv must come with --bandwidth loo or learned, which choose one, got aicc"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_a_sentence(regard, curve: Path, options: str, message: str) -> None:
    outcome = regard("regress", curve, "--target", "y", *options.split())
    assert outcome.code != 0
    assert outcome.err.strip() == f"regard: regress: {message}."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--class-weight yess:5", "--class-weight must be one of 'no', 'yes', got 'yess' (did you mean 'yes'?)"),
        ("--class-weight yes", "--class-weight must be balanced, or names of classes with weights of at least 0, such "
         "as yes:5,no:1, got 'yes'"),
        ("--bandwidth aicc", "--bandwidth aicc must come with a target of numbers, got text in 'sold'"),
        ("--band 0.9 --plot fit.png", "--band must come with a target of numbers, got text in 'sold'"),
    ],
)  # fmt: skip
def test_options_that_do_not_suit_classes(regard, sold: Path, options: str, message: str) -> None:
    outcome = regard("regress", sold, "--target", "sold", *options.split())
    assert outcome.code != 0
    assert outcome.err.strip() == f"regard: regress: {message}."
