"""What is said of quality is what scikit-learn says of the same rows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_diabetes
from sklearn.metrics import accuracy_score, r2_score, root_mean_squared_error
from tiers import examples

from regard_cli.regress_model import features_of, fit, prepare, quality
from regard_cli.tables import Table

pytestmark = pytest.mark.filterwarnings("ignore::regard.regression.ExtrapolationWarning")


def held_out(frame: pd.DataFrame, count: int, **options):
    """Return what was learned from all but the last rows, the predictions of these, and what is said of them."""
    table, new = (Table(name, part.astype(str), "CSV") for name, part in (("a", frame[:-count]), ("b", frame[-count:])))
    fitted = fit(prepare(table, "y"), **options)
    added = fitted.predict(features_of(fitted.prepared, new))
    return fitted, added, added.quality


def carbon_dioxide() -> pd.DataFrame:
    from statsmodels.datasets import co2

    return co2.load_pandas().data.dropna().iloc[-600:].reset_index().set_axis(["day", "y"], axis=1)


def diabetes() -> pd.DataFrame:
    X, y = load_diabetes(return_X_y=True)
    return pd.DataFrame(X[:, 2:5]).add_prefix("x").assign(y=y)


def waves() -> pd.DataFrame:
    x = np.linspace(0, 30, 300)
    return pd.DataFrame({"x": x, "y": 5 * x + np.sin(x)})


@pytest.mark.parametrize("load", [carbon_dioxide, diabetes, waves])
@pytest.mark.parametrize("order", [0, 1])
def test_r2_is_scikit_learns(load, order):
    frame = load()
    fitted, added, found = held_out(frame, 50, order=order, bandwidth="scott")
    truth, mine = frame["y"].to_numpy()[-50:], added.frame["y_predicted"]
    assert found.r2 == pytest.approx(r2_score(truth, mine))
    assert found.error == pytest.approx(root_mean_squared_error(truth, mine))
    assert found.baseline == pytest.approx(root_mean_squared_error(truth, np.full(50, frame["y"][:-50].mean())))
    own = quality(fitted)
    assert own.r2 == pytest.approx(r2_score(frame["y"][:-50], fitted.out_of_sample))


def test_rows_to_come_are_worse_than_their_own_mean_and_are_extrapolated():
    _, added, found = held_out(carbon_dioxide(), 104)
    assert found.r2 < 0 < 1 - (found.error / found.baseline) ** 2, "far better than the mean of the rows before them"
    flags = added.frame["y_extrapolated"]
    assert flags[0] is False and all(flags[10:])
    assert added.extrapolated == sum(flags)


@pytest.mark.slow
@settings(max_examples=examples(20), deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), shift=st.floats(-100, 100), weighted=st.booleans())
def test_r2_wherever_the_new_rows_lie(seed, shift, weighted):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"x": rng.normal(size=40), "y": rng.normal(size=40), "w": rng.uniform(0.1, 2, 40).round(3)})
    new = pd.DataFrame({"x": rng.normal(size=9), "y": shift + rng.normal(size=9), "w": 1.0})
    table, other = Table("a", frame, "CSV"), Table("b", new, "CSV")
    fitted = fit(prepare(table, "y", ["x"], "w" if weighted else None), bandwidth=[0.5])
    added = fitted.predict(features_of(fitted.prepared, other))
    found = added.quality
    assert found.r2 == pytest.approx(r2_score(new["y"], added.frame["y_predicted"]))
    weight = frame["w"] if weighted else None
    assert quality(fitted).r2 == pytest.approx(r2_score(frame["y"], fitted.out_of_sample, sample_weight=weight))


def test_where_there_is_no_r2():
    frame = pd.DataFrame({"x": range(9), "y": [*range(8), 3]})
    assert np.isnan(held_out(frame, 1, bandwidth=[1.0])[2].r2), "one row has no spread"
    frame["y"] = ["a", "b"] * 4 + ["a"]
    _, added, found = held_out(frame, 3, bandwidth=[1.0])
    assert np.isnan(found.r2)
    assert 1 - found.error == pytest.approx(accuracy_score(frame["y"][-3:], added.frame["y_predicted"]))


def test_a_slope_is_what_a_feature_does():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=80), "z": rng.normal(size=80)})
    frame["y"] = 3 * frame["x"] + 0.01 * rng.normal(size=80)
    fitted = fit(prepare(Table("a", frame, "CSV"), "y"), bandwidth=[1e3], order=1)
    assert [fitted.slope(each) for each in ("x", "z")] == pytest.approx([3, 0], abs=0.01)
