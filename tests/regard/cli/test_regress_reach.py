"""``regard regress``: rows that nothing reaches, and bandwidths that are out of all proportion."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import r2_score


@pytest.fixture
def curve(tmp_path: Path) -> Path:
    """Forty rows of y = x² on a grid."""
    x = np.linspace(0, 4, 40).round(3)
    return _csv(tmp_path / "curve.csv", x=x, y=x**2)


def _csv(path: Path, **columns) -> Path:
    pd.DataFrame(columns).to_csv(path, index=False)
    return path


def test_queries_out_of_reach_are_told(regard, curve: Path, tmp_path: Path) -> None:
    new = _csv(tmp_path / "new.csv", x=[1.0, 50.0, 60.0])
    common = ("regress", curve, "--target", "y", "--kernel", "boxcar", "--bandwidth", "0.5", "--predict", new)
    outcome = regard(*common)
    assert "2 rows lie beyond the reach of the rows learned from (y_extrapolated says which)" in outcome.out
    record = json.loads(regard(*common, "--json").out)
    assert record["rows_extrapolated"] == 2
    assert record["notes"] == []
    assert [each["y_extrapolated"] for each in record["predictions"]] == [False, True, True]
    empty = json.loads(regard(*common, "--json", "--empty", "nan").out)
    assert [each["y_predicted"] is None for each in empty["predictions"]] == [False, True, True]
    refused = regard(*common, "--empty", "raise")
    assert refused.code == 2
    assert "2 of 3 queries" in refused.err


def test_rows_that_no_other_reaches(regard, tmp_path: Path) -> None:
    data = _csv(tmp_path / "a.csv", x=range(60), y=[i * i % 17 for i in range(60)])
    out = tmp_path / "out.csv"
    common = ("regress", data, "--target", "y", "--kernel", "boxcar", "--bandwidth", "1e-3", "--out", out)
    outcome = regard(*common, "--empty", "nan")
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[-2:] == [
        "None of 60 rows could be predicted from the others; they are beyond the kernel's reach (--empty nan).",
        f"Wrote the rows of {data} with y_predicted: {out}",
    ]
    assert pd.read_csv(out)["y_predicted"].isna().all()
    record = json.loads(regard(*common, "--empty", "nan", "--json").out)
    assert record["quality"]["rows_lost"] == 60
    assert record["quality"]["r2"] is None
    assert record["rows_not_predicted"] == {"missing": 0, "beyond_reach": 60}
    y = np.arange(60) ** 2 % 17
    others = (y.sum() - y) / 59
    assert f"leave-one-out R² = {r2_score(y, others):.3f}." in regard(*common, "--empty", "mean").out
    out.unlink()
    outcome = regard(*common, "--empty", "raise")
    assert outcome.code == 2
    assert "60 of 60" in outcome.err
    assert outcome.err.count("\n") == 1
    assert not out.exists()


def test_what_has_no_prediction_is_counted_with_its_reason(regard, tmp_path: Path) -> None:
    data = _csv(tmp_path / "a.csv", x=[0, 1, 2, 10, 20, 21], y=["1", "2", "3", "4", "5", ""])
    new = _csv(tmp_path / "new.csv", x=["1", "", "50", "60"], y=["2", "2", "2", "2"])
    common = ("regress", data, "--target", "y", "--kernel", "boxcar", "--bandwidth", "1.5", "--empty", "nan")
    lines = regard(*common, "--predict", new).out.splitlines()
    for line in (
        "3 of 5 rows could be predicted from the others; the rest are beyond the kernel's reach (--empty nan).",
        "Each of these, predicted from all the others: off by 0.8165 (root mean square); the mean of y: off by 1.614; "
        "leave-one-out R² = 0.000.",
        f"Predicted 1 of 4 rows of {new}; 1 of the others miss a feature and stay empty (x: 1).",
        "Predictions stay empty in 2 rows, which are beyond the kernel's reach (--empty nan).",
        f"The 1 row of {new} that tells y and was predicted: off by 0 (root mean square); the mean of y in {data}: "
        "off by 1.",
    ):
        assert line in lines
    record = json.loads(regard(*common, "--predict", new, "--json").out)
    assert record["rows_not_predicted"] == {"missing": 1, "beyond_reach": 2}
    _csv(new, x=["1", "2", "60"])
    lines = regard(*common, "--predict", new).out.splitlines()
    assert f"Predicted 2 of 3 rows of {new}." in lines
    assert "Predictions stay empty in 1 row, which is beyond the kernel's reach (--empty nan)." in lines


@pytest.mark.parametrize("bandwidth", ["1e-160", "1e-300", "1e160", "1e300"])
@pytest.mark.parametrize("kernel", ["constant", "gaussian", "boxcar"])
def test_absurd_bandwidths_of_a_line(regard, curve: Path, kernel: str, bandwidth: str) -> None:
    outcome = regard("regress", curve, "--target", "y", "--kernel", kernel, "--order", "1", "--bandwidth", bandwidth,
                     "--predict", curve)  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert "RuntimeWarning" not in outcome.err
    assert "Each row, predicted from all the others" in outcome.out
    assert f"Predicted 40 rows of {curve}." in outcome.out
    assert "stay empty" not in outcome.out
