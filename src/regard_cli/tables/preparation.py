"""Choose the columns and rows of a table to learn a target from, and say what is left out and why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from regard._utils.errors import rejected, unknown_name
from regard_cli.tables.columns import Column, encode, recognise
from regard_cli.tables.reading import Table

#: Text with more different values than this share of the rows is a name or a remark, not a category.
_REPEATING, _FEW = 0.5, 10
#: Numbers no further apart than this count as the same: the squares of their differences are nothing.
_APART = 1e-100
#: More categories than this cost too much, and a column less filled than this too many rows, to be used unasked.
_MANY, _FILLED = 100, 0.5


@dataclass(frozen=True)
class Prepared:
    """The columns and rows that are learned from.

    Attributes
    ----------
    table : Table
    target : Column
    columns : tuple of Column
        The features, in order.
    listed : tuple of str
        The features before any was left out.
    X : ndarray (N, n_features)
        Of all rows of the table, NaN where a cell is missing.
    y : ndarray (N,)
        The target; for a category, its code.
    weight : ndarray (N,) or None
    used : ndarray (N,), bool
        The rows that miss nothing.
    left_out : dict of str to str
        Columns that are not used, and why.
    missing : dict of str to int
        How many rows miss each column, where any does.
    """

    table: Table
    target: Column
    columns: tuple[Column, ...]
    listed: tuple[str, ...]
    X: np.ndarray
    y: np.ndarray
    weight: np.ndarray | None
    used: np.ndarray
    left_out: dict[str, str] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)

    @property
    def metric(self) -> list[str]:
        """The metric of each feature."""
        return ["categorical" if column.kind == "category" else "euclidean" for column in self.columns]


def prepare(table: Table, target: str, features: Sequence[str] | None = None, weights: str | None = None) -> Prepared:
    """Find out what the columns of a table are, and which rows and columns can be learned from.

    Text of which nine tenths are numbers is numbers, dates as 2024-12-31 are days, and other text is categories.
    Features that are the same everywhere are left out; and of columns that nobody listed, text that hardly repeats.

    Parameters
    ----------
    table : Table
    target : str
        The column to predict: numbers, or text for a classification.
    features : sequence of str, optional
        The columns to predict it from; all others by default.
    weights : str, optional
        The column that says how often each row counts.

    Raises
    ------
    ValueError
        If a column does not exist or cannot be what it is wanted for, or if nothing is left to learn from.

    Examples
    --------
    >>> import pandas as pd
    >>> frame = pd.DataFrame({"city": ["Ulm", "Bonn", "Ulm"], "rain": ["1.5", "NA", "0"], "y": [1, 2, 3]})
    >>> found = prepare(Table("weather.csv", frame, "CSV"), target="y")
    >>> [(column.name, column.kind) for column in found.columns], found.missing
    ([('rain', 'number')], {'rain': 1})
    >>> found.left_out
    {'city': 'the same in all rows that miss nothing'}
    """
    names = [str(each) for each in table.frame.columns]
    for option, given in (("target", target), ("weights", weights), *(("features", each) for each in features or ())):
        if given is not None and given not in names:
            raise unknown_name("regress", option, given, names)
    if weights == target:
        raise rejected("regress", "weights", "be another column than the target", repr(weights))
    listed = _listed(names, target, features, weights)
    goal, y = _target(table, target)
    weight = None if weights is None else _weights(table, weights)
    columns, values, left_out = [], [], {}
    for name in listed:
        if features is None and _is_prediction(name, target, names):
            left_out[name] = "an earlier prediction of the target"
            continue
        column = recognise(table, name)
        if isinstance(column, str):
            left_out[name] = column
            continue
        coded = encode(column, table)
        reason = _useless(column, coded.values, listed=features is not None)
        if reason:
            left_out[name] = reason
            continue
        columns.append(column)
        values.append(coded.values)
    if not columns:
        raise _no_features(left_out, table)
    X = np.stack(values, 1)
    gone = {goal.name: np.isnan(y), **({} if weight is None else {str(weights): np.isnan(weight)})}
    gone |= {column.name: np.isnan(X[:, i]) for i, column in enumerate(columns)}
    used = ~np.any(list(gone.values()), axis=0)
    missing = {name: int(rows.sum()) for name, rows in gone.items() if rows.any()}
    _check_rows(table, goal, y, weight, used, missing)
    keep = [i for i in range(len(columns)) if np.ptp(X[used, i]) > _APART]
    left_out |= {
        columns[i].name: "the same in all rows that miss nothing" for i in set(range(len(columns))) - set(keep)
    }
    if not keep:
        raise _no_features(left_out, table)
    kept = tuple(columns[i] for i in keep)
    return Prepared(table, goal, kept, tuple(listed), X[:, keep], y, weight, used, left_out, missing)


def _listed(names: list[str], target: str, features: Sequence[str] | None, weights: str | None) -> list[str]:
    if features is None:
        return [each for each in names if each not in (target, weights)]
    for each in features:
        if each in (target, weights):
            what = "the target" if each == target else "the weights"
            raise rejected("regress", "features", "be other columns than target and weights", f"{each!r}, {what}")
    if len(set(features)) != len(features):
        twice = next(each for each in features if list(features).count(each) > 1)
        raise rejected("regress", "features", "name each column once", f"{twice!r} twice")
    return list(features)


def _is_prediction(name: str, target: str, names: list[str]) -> bool:
    """Return whether a column came from predictions of the target that were written before."""
    added = rf"{re.escape(target)}_(predicted|extrapolated|std|q[\d.]+|probability_.*)"
    return f"{target}_predicted" in names and re.fullmatch(added, name) is not None


def _target(table: Table, name: str) -> tuple[Column, np.ndarray]:
    column = recognise(table, name)
    if isinstance(column, str) or column.kind == "date":
        got = f"a column that is {column}" if isinstance(column, str) else "dates"
        raise rejected("regress", f"target {name!r}", "hold numbers, or text for a classification", got)
    values = encode(column, table).values
    there = values[~np.isnan(values)]
    if len(there) > 1 and np.ptp(there) <= _APART:
        only = repr(column.categories[0]) if column.kind == "category" else f"{there[0]:g}"
        raise rejected(
            "regress", f"target {name!r}", "differ between rows", f"{only} in all: there is nothing to learn"
        )
    if column.kind == "category" and len(column.categories) == len(there) > 1:
        raise rejected("regress", f"target {name!r}", "repeat its texts, one for each class", "another in every row")
    return column, values


def _weights(table: Table, name: str) -> np.ndarray:
    column = recognise(table, name)
    expected = "hold numbers of at least 0, not all 0"
    if isinstance(column, str) or column.kind != "number":
        got = f"a column that is {column}" if isinstance(column, str) else {"date": "dates"}.get(column.kind, "text")
        raise rejected("regress", f"weights {name!r}", expected, got)
    values = encode(column, table).values
    there = values[~np.isnan(values)]
    if len(there) and (there.min() < 0 or there.max() == 0):
        row = int(np.nanargmin(values)) + 1
        got = f"{there.min():g} in row {row}" if there.min() < 0 else "0 in every row"
        raise rejected("regress", f"weights {name!r}", expected, got)
    return values


def _useless(column: Column, values: np.ndarray, *, listed: bool) -> str | None:
    """Return why nothing can be learned from a feature, or why it is not used unless somebody listed it."""
    there = values[~np.isnan(values)]
    if len(there) == 0:
        return "empty"
    if np.ptp(there) <= _APART:
        return "the same in every row"
    if listed:
        return None
    different = len(column.categories)
    if different == len(there) or different > max(_FEW, _REPEATING * len(there)):
        return f"text that hardly repeats, such as {_brief(column.categories[0])}"
    if different > _MANY:
        return f"text with {different:,} different values; name it in --features to use it"
    if len(there) < _FILLED * len(values):
        return f"missing in {1 - len(there) / len(values):.0%} of the rows"
    return None


def _no_features(left_out: dict[str, str], table: Table) -> Exception:
    reasons = "; ".join(f"{name!r} is {reason}" for name, reason in left_out.items())
    return rejected("regress", table.name, "have a column to learn from beside the target", reasons or "none")


def _check_rows(
    table: Table, target: Column, y: np.ndarray, weight: np.ndarray | None, used: np.ndarray, missing: dict[str, int]
) -> None:
    """Raise if the rows that miss nothing are too few to learn from."""
    where = ", ".join(f"{name!r} in {count:,}" for name, count in missing.items())
    counted = used if weight is None else used & (weight > 0)
    if counted.sum() < 2:
        got = f"{int(counted.sum())} of {len(used):,}" + (f" (missing: {where})" if where else "")
        expected = "have two rows or more that miss nothing" + (" and have a weight" if weight is not None else "")
        raise rejected("regress", table.name, expected, got)
    if np.ptp(y[counted]) <= _APART:
        got = "one value in all of them: there is nothing to learn"
        raise rejected("regress", f"target {target.name!r}", "differ between the rows that miss nothing", got)


def _brief(text: str) -> str:
    return repr(text if len(text) <= 30 else text[:29] + "…")
