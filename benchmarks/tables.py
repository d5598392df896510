"""Kernel regression on tables of numbers and categories, compared with scikit-learn: ``python -m benchmarks.tables``.

The tables come with statsmodels and scikit-learn; one is made like the diamonds of ggplot2. Every contender gets the
same folds and chooses its parameters within each (nested cross-validation); gradient boosting, neighbours and lines
have the settings that scikit-learn gives them. Times are of one thread, as CPU time.

    python -m benchmarks.tables [--data NAME ...]

Writes benchmarks/results/tables.json and .md; ``python -m benchmarks.readme`` puts the table into
docs/regression-results.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.machine import ROOT, facts
from benchmarks.report import seconds

if TYPE_CHECKING:
    import pandas as pd

TARGET = ROOT / "benchmarks" / "results" / "tables.json"
FOLDS = 5
#: The most rows of a table, drawn at random.
ROWS = 4_000


@dataclass(frozen=True)
class Table:
    """Features and a target of numbers.

    Attributes
    ----------
    name : str
    source : str
        The package that ships it, and the name of the table there.
    X : DataFrame (n, n_features)
        Columns without an order have the dtype "category".
    y : ndarray (n,)
    """

    name: str
    source: str
    X: pd.DataFrame
    y: np.ndarray

    @property
    def categories(self) -> list[str]:
        """The columns without an order."""
        return [name for name in self.X if self.X[name].dtype == "category"]


def _statsmodels(
    name: str, target: str, *, categories: Sequence[str] = (), without: Sequence[str] = (), title: str | None = None
) -> Table:
    import statsmodels.api as sm

    frame = getattr(sm.datasets, name).load_pandas().data.dropna()
    X = frame.drop(columns=[target, *without])
    X = X.astype(float, errors="ignore").astype(dict.fromkeys(categories, "category"))
    return Table(title or name, f"statsmodels, {name}", X, frame[target].to_numpy(float))


def _sklearn(name: str, target: str = "target", *, categories: Sequence[str] = ()) -> Table:
    from sklearn import datasets

    found = getattr(datasets, f"load_{name}")(as_frame=True)
    X = found.frame.rename(columns=str)
    y = X.pop(target).to_numpy(float)
    return Table(name, f"scikit-learn, {name}", X.astype(dict.fromkeys(categories, "category")), y)


def elnino() -> Table:
    """Return monthly temperatures of the sea surface, by year and month."""
    import statsmodels.api as sm

    wide = sm.datasets.elnino.load_pandas().data
    frame = wide.melt(id_vars="YEAR", var_name="month", value_name="temperature").dropna()
    X = frame[["YEAR", "month"]].astype({"YEAR": float, "month": "category"}).reset_index(drop=True)
    return Table("El Niño", "statsmodels, elnino", X, frame["temperature"].to_numpy(float))


def fertility() -> Table:
    """Return births per woman by year and country, of every fifth country."""
    import statsmodels.api as sm

    wide = sm.datasets.fertility.load_pandas().data[::5]
    years = [name for name in wide if str(name).isdigit()]
    frame = wide.melt(id_vars="Country Name", value_vars=years, var_name="year", value_name="births").dropna()
    X = frame[["Country Name", "year"]].astype({"Country Name": "category", "year": float}).reset_index(drop=True)
    return Table("fertility", "statsmodels, fertility", X, frame["births"].to_numpy(float))


def diamonds(count: int = 10_000) -> Table:
    """Return a simulation of the logarithm of a diamond's price: six numbers, three grades, noise of 0.09.

    Carats pile up at round numbers, sizes follow from carats, price grows by a power of carat that depends on the
    grades. All ranges are those of the table ``diamonds`` of ggplot2, which no package here ships.
    """
    import pandas as pd

    rng = np.random.default_rng(0)
    carat = np.exp(rng.normal(-0.4, 0.58, count)).clip(0.2, 4)
    round_ones = np.array([0.3, 0.4, 0.5, 0.7, 0.9, 1.0, 1.2, 1.5, 2.0])
    nearest = round_ones[np.abs(carat[:, None] - round_ones).argmin(1)]
    carat = np.where(rng.uniform(size=count) < 0.5, nearest + np.abs(rng.normal(0, 0.02, count)), carat).round(2)
    cut = rng.choice(5, count, p=[0.03, 0.09, 0.22, 0.26, 0.40])
    color = rng.choice(7, count, p=[0.13, 0.18, 0.18, 0.21, 0.15, 0.10, 0.05])
    clarity = rng.choice(8, count, p=[0.014, 0.17, 0.242, 0.227, 0.151, 0.094, 0.068, 0.034])
    depth = rng.normal(61.7, np.where(cut == 0, 3.0, 1.2)).round(1)
    table = rng.normal(57.5 + 1.5 * (cut < 3), 2).round(0)
    x = 6.45 * carat ** (1 / 3) * (61.7 / depth) ** (1 / 3) * np.exp(rng.normal(0, 0.005, count))
    y = x * np.exp(rng.normal(0, 0.006, count))
    z = depth / 100 * (x + y) / 2 * np.exp(rng.normal(0, 0.004, count))
    grade = np.array([-0.55, -0.32, -0.12, 0.0, 0.1, 0.2, 0.3, 0.38])[clarity]
    shade = np.array([0.2, 0.15, 0.12, 0.04, -0.07, -0.2, -0.33])[color]
    price = 8.45 + (1.85 + 0.25 * grade + 0.2 * shade) * np.log(carat) - 0.03 * np.log(carat) ** 2 + grade + shade
    price += 0.04 * cut - 0.06 * ((carat < 1) & (carat > 0.9)) - 0.01 * np.abs(depth - 61.7)
    price += 0.09 * rng.standard_t(8, count)
    names = {
        "cut": (cut, ["Fair", "Good", "Very Good", "Premium", "Ideal"]),
        "color": (color, list("DEFGHIJ")),
        "clarity": (clarity, ["I1", "SI2", "SI1", "VS2", "VS1", "VVS2", "VVS1", "IF"]),
    }
    numbers = {"carat": carat, "depth": depth, "table": table, "x": x.round(2), "y": y.round(2), "z": z.round(2)}
    grades = {name: pd.Categorical.from_codes(codes, values) for name, (codes, values) in names.items()}
    return Table("diamonds, simulated", "made here", pd.DataFrame(numbers | grades), price)


TABLES: dict[str, Callable[[], Table]] = {
    "engel": lambda: _statsmodels("engel", "foodexp", title="Engel"),
    "diabetes": lambda: _sklearn("diabetes", categories=["sex"]),
    "iris": lambda: _sklearn("iris", "petal width (cm)", categories=["target"]),
    "wine": lambda: _sklearn("wine", "alcohol", categories=["target"]),
    "grunfeld": lambda: _statsmodels("grunfeld", "invest", categories=["firm"], title="Grunfeld"),
    "travel": lambda: _statsmodels(
        "modechoice", "gc", categories=["mode", "choice"], without=["individual"], title="travel modes"
    ),
    "elnino": elnino,
    "fertility": fertility,
    "fair": lambda: _statsmodels("fair", "affairs", categories=["occupation", "occupation_husb"], title="affairs"),
    "randhie": lambda: _statsmodels("randhie", "mdvis", categories=["idp", "physlm"], title="visits to doctors"),
    "diamonds": diamonds,
}  # fmt: skip


def contenders() -> dict[str, Callable[[Table], Any]]:
    """Return what makes each contender's estimator for a table."""
    from sklearn.compose import make_column_transformer
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.linear_model import LinearRegression
    from sklearn.neighbors import KNeighborsRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    from regard.regression import NadarayaWatsonRegressor

    def on_columns(estimator: Any) -> Callable[[Table], Any]:
        def make(table: Table) -> Any:
            categories = (OneHotEncoder(handle_unknown="ignore", sparse_output=False), table.categories)
            return make_pipeline(make_column_transformer(categories, remainder=StandardScaler()), estimator)

        return make

    def regard(**options: Any) -> Callable[[Table], Any]:
        return lambda _: NadarayaWatsonRegressor(random_state=0, **options)

    return {
        "regard, scott": regard(),
        "regard, loo": regard(bandwidth="loo"),
        "regard, learned": regard(bandwidth="learned"),
        "regard, learned, order 1": regard(bandwidth="learned", order=1),
        "HistGradientBoosting": lambda _: HistGradientBoostingRegressor(
            categorical_features="from_dtype", random_state=0
        ),
        "KNeighbors": on_columns(KNeighborsRegressor()),
        "LinearRegression": on_columns(LinearRegression()),
    }


def compare(table: Table) -> dict[str, Any]:
    """Return the mean squared error and the CPU time of each contender in each fold, with rows in random order."""
    from sklearn.model_selection import KFold

    rows = np.random.default_rng(0).permutation(len(table.y))[:ROWS]
    X, y = table.X.iloc[rows].reset_index(drop=True), table.y[rows]
    makers = contenders()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in makers}
    for learn, test in KFold(FOLDS).split(X):
        for name, make in makers.items():
            began = time.process_time()
            predicted = make(table).fit(X.iloc[learn], y[learn]).predict(X.iloc[test])
            took = time.process_time() - began
            found[name].append({"error": float(np.mean((predicted - y[test]) ** 2)), "seconds": took})
    return {
        "name": table.name, "source": table.source, "rows": len(y), "numbers": X.shape[1] - len(table.categories),
        "categories": len(table.categories), "variance": float(y.var()), "contenders": found,
    }  # fmt: skip


def unexplained(row: dict[str, Any], name: str) -> float:
    """Return the root mean square error of a contender as a share of the target's standard deviation.

    >>> folds = [{"error": 1.0, "seconds": 0.1}, {"error": 3.0, "seconds": 0.1}]
    >>> unexplained({"variance": 8.0, "contenders": {"A": folds}}, "A")
    0.5
    """
    folds = row["contenders"][name]
    return math.sqrt(statistics.mean(fold["error"] for fold in folds) / row["variance"])


def markdown(found: dict[str, Any]) -> str:
    """Return the errors of all contenders on all tables, and their times."""
    names = list(found["tables"][0]["contenders"])
    lines = [f"| table | rows | numbers + categories | {' | '.join(names)} |", "| --- |" + " ---: |" * (len(names) + 2)]
    for row in found["tables"]:
        errors = {name: unexplained(row, name) for name in names}
        least = min(errors.values())
        cells = [f"**{error:.3f}**" if error == least else f"{error:.3f}" for error in errors.values()]
        size = f"{row['rows']:,} | {row['numbers']} + {row['categories']}"
        lines.append(f"| {row['name']} | {size} | {' | '.join(cells)} |")
    means = [math.exp(statistics.mean(math.log(unexplained(row, name)) for row in found["tables"])) for name in names]
    lines.append(f"| geometric mean | | | {' | '.join(f'{each:.3f}' for each in means)} |")
    for title, pick in (("median time of a fold", statistics.median), ("longest", max)):
        times = [
            pick([statistics.median(fold["seconds"] for fold in row["contenders"][name]) for row in found["tables"]])
            for name in names
        ]
        lines.append(f"| {title} | | | {' | '.join(map(seconds, times))} |")
    return "\n".join(lines)


def contents(found: dict[str, Any]) -> dict[str, Callable[[], str]]:
    """Return what docs/regression-results.md shows, by the name of its mark."""
    where = found["machine"]
    return {
        "tables": lambda: markdown(found),
        "tables:machine": lambda: f"{where['CPU']}, 1 thread, load average {where['load average'].partition(';')[0]}",
    }


def document(found: dict[str, Any]) -> str:
    """Return the report."""
    sources = [f"- {row['name']}: {row['source']}" for row in found["tables"]]
    facts_ = [f"| {name} | {value} |" for name, value in found["machine"].items()]
    head = ["# Kernel regression on tables", "", "| | |", "| --- | --- |", *facts_, ""]
    about = f"Root mean square errors as shares of the target's standard deviation; {FOLDS}-fold cross-validation."
    return "\n".join([*head, about, "", markdown(found), "", *sources]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and write, table by table."""
    parser = argparse.ArgumentParser("python -m benchmarks.tables", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", nargs="+", choices=list(TABLES), help="these tables alone; the others stay")
    options = parser.parse_args(arguments)
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = json.loads(TARGET.read_text(encoding="utf-8")) if options.data and TARGET.exists() else {"tables": []}
    found["machine"] = facts()
    with threadpool_limits(1):
        for name in options.data or TABLES:
            row = compare(TABLES[name]())
            print(
                f"{name}: {json.dumps({each: unexplained(row, each) for each in row['contenders']})}", file=sys.stderr
            )
            others = [each for each in found["tables"] if each["name"] != row["name"]]
            found["tables"] = sorted([*others, row], key=lambda each: (each["rows"], each["name"]))
            TARGET.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            TARGET.with_suffix(".md").write_text(document(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
