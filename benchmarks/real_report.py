"""The comparison on real data in words and tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.report import seconds

LEGEND = """\
All contenders get the same folds and the same features, standardized on the training folds, and take turns fold by
fold. The best value among contenders that ran on all folds is **bold**. *worse by* is the error (of
classifiers, the share of wrong answers) minus that of the best contender: the mean of this difference over folds ± its
standard error, as if folds were independent. *fit* and *predict* are medians over
folds; fit includes the choice of all parameters. *covered* is the share of true values within two standard deviations
of the prediction (95 % for a normal distribution)."""

Row = dict[str, Any]
Table = dict[str, Any]


def pooled(row: Row) -> float:
    """Return the error over all rows that were predicted: root mean square, or the share of wrong classes.

    >>> pooled({"folds": [{"rows": 1, "error": 4.0, "covered": 1}, {"rows": 3, "error": 0.0, "covered": 1}]})
    1.0
    """
    count = sum(fold["rows"] for fold in row["folds"])
    total = sum(fold["rows"] * fold["error"] for fold in row["folds"])
    return _root(row, total / count)


def _root(row: Row, error: float) -> float:
    return error if row.get("classifies") else math.sqrt(error)


def best(table: Table) -> Row:
    """Return the contender with the least error, of those that had all folds."""
    return min(_complete(table), key=pooled)


def _complete(table: Table) -> list[Row]:
    return [row for row in _rows(table) if len(row["folds"]) == table["folds"]]


def _rows(table: Table) -> list[Row]:
    return [row | {"classifies": table["unit"] is None} for row in table["rows"]]


def worse(row: Row, than: Row) -> tuple[float, float]:
    """Return the mean difference of the folds' errors, and its standard error; NaN of one fold."""
    gaps = [_root(row, a["error"]) - _root(row, b["error"]) for a, b in zip(row["folds"], than["folds"])]
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
    return statistics.mean(gaps), error


def _gap(row: Row, first: Row) -> str:
    if row["contender"] == first["contender"]:
        return ""
    gap, error = (each * (100 if row["classifies"] else 1) for each in worse(row, first))
    unit = " points" if row["classifies"] else ""
    return f"{gap:+.2f}".replace("-", "−") + ("" if math.isnan(error) else f" ± {error:.2f}") + unit


def _median(row: Row, name: str) -> float:
    return statistics.median(fold[name] for fold in row["folds"])


def markdown(table: Table) -> str:
    """Return a table of one data set, with a line about it above."""
    rows, first = _rows(table), best(table)
    quick = {name: min(_median(row, name) for row in _complete(table)) for name in ("fit", "predict")}
    classifies = table["unit"] is None
    what = ["accuracy"] if classifies else [f"RMSE ({table['unit']})", "R²"]
    head = ["contender", *what, "worse by", *([] if classifies else ["covered"]), "fit", "predict"]
    lines = [about(table), "", f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    for row in rows:
        if not row["folds"]:
            lines.append(f"| {row['contender']} | {row['reason']} |" + " |" * (len(head) - 2))
            continue
        error = pooled(row)
        cells = [f"{1 - error:.2%}"] if classifies else [f"{error:.4g}", f"{1 - error**2 / table['variance']:.3f}"]
        if row["contender"] == first["contender"]:
            cells = [f"**{cell}**" for cell in cells]
        cells.append(_gap(row, first))
        if not classifies:
            shares = [fold["rows"] * fold["covered"] for fold in row["folds"] if "covered" in fold]
            cells.append(f"{sum(shares) / sum(fold['rows'] for fold in row['folds']):.1%}" if shares else "–")
        for name, least in quick.items():
            took = _median(row, name)
            cells.append(f"**{seconds(took)}**" if took == least else seconds(took))
        fewer = f" ({row['reason']})" if row["reason"] else ""
        lines.append(f"| {row['contender']}{fewer} | {' | '.join(cells)} |")
    return "\n".join(lines)


def about(table: Table) -> str:
    """Return the size of the data and how they were divided."""
    folds = table["folds"] // table["repeats"]
    each = f"{table['repeats']} × {folds}-fold" if table["repeats"] > 1 else f"{folds}-fold"
    features = f"{table['features']} feature{'s' if table['features'] > 1 else ''}"
    return f"{table['points']:,} points, {features}; {each} cross-validation."


def verdict(table: Table) -> str:
    """Return who has the least error, and how far the nearest of regard and of the others is from it."""
    first = best(table)
    rows = [row for row in _complete(table) if row["contender"].startswith("regard") != _ours(first)]
    text = f"{_named(first)} has the lowest error"
    if rows:
        other = min(rows, key=pooled)
        whose = "the best other contender is" if _ours(first) else "regard's best is"
        text += f"; {whose} {_named(other)}, {_gap(other, first).removeprefix('+')} worse"
        gap, error = worse(other, first)
        if gap < 2 * error:
            text += " (within two standard errors)"
    return text


def _named(row: Row) -> str:
    return f"`{row['contender']}`"


def _ours(row: Row) -> bool:
    return row["contender"].startswith("regard")


def contents(found: dict[str, Any]) -> dict[str, Callable[[], str]]:
    """Return what docs/regression-results.md shows, by the name of its mark."""
    where = found["machine"]
    made: dict[str, Callable[[], str]] = {
        "legend": lambda: LEGEND,
        "machine": lambda: f"{where['CPU']}, {where['cores']} cores, {where['threads']} threads; {where['date']}.",
    }
    for table in found["tables"]:
        made[table["name"]] = lambda table=table: markdown(table)
        made[f"{table['name']}:best"] = lambda table=table: verdict(table)
    return made


def document(found: dict[str, Any]) -> str:
    """Return the report."""
    lines = ["# Kernel regression on real data", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in found["machine"].items()]
    lines += ["", LEGEND, ""]
    for table in found["tables"]:
        lines += [f"## {table['title'].capitalize()}", "", markdown(table), "", f"{verdict(table)}.", ""]
    return "\n".join(lines).rstrip() + "\n"
