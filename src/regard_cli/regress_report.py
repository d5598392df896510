"""The report of ``regard regress``: plain lines, or the same as a record for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from regard.scores.kernels import kernels
from regard_cli.tables import Added, Coded, Column, Fitted, Prepared, Quality

_WAYS = {
    "loo": "chosen for the least leave-one-out error",
    "learned": "one for each feature, by gradient descent on the leave-one-out error",
    "scott": "by Scott's rule of thumb",
    "silverman": "by Silverman's rule of thumb",
}
#: A bandwidth of so many times what a feature spans makes no difference between rows.
_WIDE = 3.0
#: A line that rises less than this share of what the target spans says hardly anything.
_FLAT = 0.02
#: Names that are listed before the rest is counted.
_LISTED = 8


def of_table(prepared: Prepared) -> Iterator[str]:
    """Say what was read, and what of it is used."""
    table, target = prepared.table, prepared.target
    size = f"{_count(len(table.frame), 'row')}, {_count(len(table.frame.columns), 'column')}"
    yield f"{table.name}: {size} ({table.form})."
    y = prepared.y[prepared.used]
    if target.kind == "category":
        yield f"Target: {_name(target.name)}, text with {len(target.categories)} classes ({_names(target.categories)})."
    else:
        yield f"Target: {_name(target.name)}, a number from {number(y.min())} to {number(y.max())}."
    for name in table.nameless:
        yield f"Not used: {name}, which has no name and is empty or counts the rows."
    for name, reason in prepared.left_out.items():
        yield f"Not used: {_name(name)}, {reason}."
    for column in (target, *prepared.columns):
        if column.odd:
            yield f"In {_name(column.name)}, what is no {column.kind} counts as missing: {_quoted(column.odd)}."
    gone = int((~prepared.used).sum())
    if gone:
        yield f"Left out: {_count(gone, 'row')} with missing values ({_missing(prepared.missing)})."
    if prepared.weight is not None and (zero := int((prepared.weight[prepared.used] == 0).sum())):
        yield f"Left out: {_count(zero, 'row')} of weight 0."


def of_fit(fitted: Fitted, bandwidth: str | Sequence[float]) -> Iterator[str]:
    """Say how it was learned, and what was found for each feature."""
    estimator, prepared = fitted.estimator, fitted.prepared
    how = "a line around each row" if getattr(estimator, "order", 0) else "weighted averages"
    how = "weighted votes" if fitted.classifies else how
    way = _WAYS[bandwidth] if isinstance(bandwidth, str) else "as given"
    drawn = f", seen on {fitted.subsample:,} rows drawn at random" if fitted.subsample else ""
    yield f"Learned from {_count(int(fitted.learned.sum()), 'row')}: {how}, kernel {estimator.kernel}."
    yield f"Bandwidth: {way}{drawn}."
    if bandwidth == "loo" and len(prepared.columns) > 1:
        yield "It is one multiple of each feature's spread; --bandwidth learned finds one for each feature."
    yield ""
    rows = [("feature", "treated as", "bandwidth")]
    for i, column in enumerate(prepared.columns):
        rows.append((_name(column.name), _kind(column), _width(fitted, i)))
    yield from _aligned(rows)
    yield ""


def of_quality(quality: Quality, fitted: Fitted, where: str | None = None) -> Iterator[str]:
    """Say how good predictions are of rows that were not learned from, in another table or in this one."""
    if where is None and quality.lost:
        which = _count(quality.rows + quality.lost, "row") + ("" if quality.exact else " drawn at random")
        done, rest = (f"{quality.rows:,}", "the rest") if quality.rows else ("None", "they")
        yield f"{done} of {which} could be predicted from the others; {rest} are {_why(fitted)}."
    if quality.rows == 0:
        return
    if where is not None:
        one = quality.rows == 1
        and_predicted = f" and {'was' if one else 'were'} predicted" if quality.lost else ""
        which = "that tells" if one else "that tell"
        who = f"The {_count(quality.rows, 'row')} of {where} {which} {_name(fitted.name)}{and_predicted}"
    elif quality.exact:
        who = f"Each {'of these' if quality.lost else 'row'}, predicted from all the others"
    else:
        who = f"{quality.rows:,} rows drawn at random, predicted from the rest"
    if fitted.classifies:
        yield (
            f"{who}: {1 - quality.error:.1%} right; the most frequent class: {1 - quality.simple:.1%} right."
        )  # fmt: skip
        return
    simple = f"the mean of {_name(fitted.name)}" + (f" in {fitted.prepared.table.name}" if where is not None else "")
    yield (
        f"{who}: off by {number(quality.error)} (root mean square); {simple}: off by {number(quality.simple)}"
        f"{_r2(quality, where)}."
    )
    if quality.error >= quality.simple:
        yield "That is no better than the mean: these features say nothing about the target in this way."
    elif quality.r2 <= 0:
        yield "That is no better than the mean of these rows themselves: what sets them apart is not predicted."


def _r2(quality: Quality, where: str | None) -> str:
    """Return R² and by name which one it is, where there is one."""
    if math.isnan(quality.r2):
        return ""
    if where is not None:
        return f"; R² on these rows = {quality.r2:.3f}"
    return f"; {'leave-one-out' if quality.exact else 'held-out'} R² = {quality.r2:.3f}"


def of_prediction(added: Added, coded: Mapping[str, Coded], fitted: Fitted, name: str) -> Iterator[str]:
    """Say which rows were predicted, and what was strange about them."""
    able, whole = int(added.predicted.sum()), len(added.predicted)
    done = able - added.lost
    if able < whole:
        others = "the others" if done == able else f"{whole - able:,} of the others"
        yield (
            f"Predicted {done:,} of {_count(whole, 'row')} of {name}; {others} miss a feature and stay empty "
            f"({_missing(added.missing)})."
        )
    elif done < whole:
        yield f"Predicted {done:,} of {_count(whole, 'row')} of {name}."
    else:
        yield f"Predicted {_count(whole, 'row')} of {name}."
    yield from of_lost(added, fitted)
    yield from _of_extrapolated(added, fitted)
    for feature, each in coded.items():
        if each.new:
            yield (
                f"In {_name(feature)}, {fitted.prepared.table.name} has no {_quoted(each.new)}: such rows count as "
                "unlike all rows there."
            )
        if each.odd:
            yield f"In {_name(feature)} of {name}, what is no number or date counts as missing: {_quoted(each.odd)}."


def _of_extrapolated(added: Added, fitted: Fitted) -> Iterator[str]:
    """Say how many rows lie beyond the rows that were learned from, and what is not known of them."""
    if not added.extrapolated:
        return
    lies = "lies" if added.extrapolated == 1 else "lie"
    names = [name for name in added.columns if name.startswith((f"{fitted.name}_std", f"{fitted.name}_q"))]
    empty = f"; {_names(names)} stay{'s' * (len(names) == 1)} empty there" if names else ""
    yield (
        f"{_count(added.extrapolated, 'row')} {lies} beyond the reach of the rows learned from "
        f"({_name(fitted.name)}_extrapolated says which): what is predicted there is extrapolated, and nothing tells "
        f"how far off it is{empty}."
    )


def of_lost(added: Added, fitted: Fitted) -> Iterator[str]:
    """Say how many rows have no prediction though they miss no feature, and why."""
    if added.lost:
        which = "which is" if added.lost == 1 else "which are"
        yield f"Predictions stay empty in {_count(added.lost, 'row')}, {which} {_why(fitted)}."


def record(fitted: Fitted, bandwidth: str | Sequence[float], quality: Quality) -> dict[str, Any]:
    """Return what was learned, for JSON."""
    prepared, estimator = fitted.prepared, fitted.estimator
    features = [
        {
            "name": column.name,
            "kind": column.kind,
            **({"categories": list(column.categories)} if column.kind == "category" else {}),
            "bandwidth": float(width),
        }
        for column, width in zip(prepared.columns, estimator.bandwidth_)
    ]
    return {
        "data": prepared.table.name,
        "rows": len(prepared.table.frame),
        "rows_learned": int(fitted.learned.sum()),
        "target": prepared.target.name,
        "task": "classification" if fitted.classifies else "regression",
        "features": features,
        "columns_not_used": dict(prepared.left_out) | dict.fromkeys(prepared.table.nameless, "no name"),
        "rows_missing": dict(prepared.missing),
        "kernel": estimator.kernel,
        "order": getattr(estimator, "order", 0),
        "bandwidth": bandwidth if isinstance(bandwidth, str) else list(bandwidth),
        "quality": quality_record(quality, fitted),
    }


def quality_record(quality: Quality, fitted: Fitted) -> dict[str, Any]:
    """Return how good it is, for JSON."""
    way = {"way": "leave-one-out" if quality.exact else "held out", "rows": quality.rows, "rows_lost": quality.lost}
    if fitted.classifies:
        return way | {"accuracy": 1 - quality.error, "accuracy_of_most_frequent": 1 - quality.simple}
    return way | {"rmse": quality.error, "rmse_of_mean": quality.simple, "r2": quality.r2}


def plain(value: Any) -> Any:
    """Return a value as JSON knows it: no NaN, nothing of NumPy's."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def number(value: float) -> str:
    """Return a number as people write it, with four digits that count."""
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-4:
        return f"{value:.3e}"
    if size >= 1e4:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _why(fitted: Fitted) -> str:
    """Return what rows without a prediction are."""
    if fitted.estimator.empty == "nan":
        return "beyond the kernel's reach (--empty nan)"
    return "beyond what can be calculated at this bandwidth"


def _kind(column: Column) -> str:
    if column.kind == "category":
        return f"{len(column.categories)} categories"
    return "date, in days" if column.kind == "date" else "number"


def _width(fitted: Fitted, feature: int) -> str:
    """Return a bandwidth in the unit of its column, and what it means where that is not plain to see."""
    column, kernel = fitted.prepared.columns[feature], fitted.estimator.kernel
    width = float(fitted.estimator.bandwidth_[feature])
    if column.kind == "category":
        weight = 1.0 if kernel == "constant" else float(kernels()[kernel].profile(1 / width))
        return f"{number(width)} (another category counts {weight:.0%})"
    text = number(width) + (" days" if column.kind == "date" else "")
    span = float(np.ptp(fitted.prepared.X[fitted.learned, feature]))
    if width <= _WIDE * span and kernel != "constant":
        return text
    wide = "of no effect, as all rows count alike" if kernel == "constant" else "so wide that it hardly matters"
    if not getattr(fitted.estimator, "order", 0):
        return f"{text} ({wide})"
    # A line is fitted across all rows then: what the feature does is in its slope.
    slope = fitted.slope(feature)
    line = f"a straight line, slope {number(slope)}{' a day' if column.kind == 'date' else ''}"
    if abs(slope) * span < _FLAT * float(np.ptp(fitted.prepared.y[fitted.learned])):
        line += ": it hardly matters"
    return f"{text} ({'of no effect: it enters' if kernel == 'constant' else 'so wide that it enters'} as {line})"


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    sizes = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(size) for cell, size in zip(row, sizes)).rstrip()


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _missing(missing: Mapping[str, int]) -> str:
    return _joined([f"{_name(name)}: {count:,}" for name, count in missing.items()])


def _names(names: Iterable[str]) -> str:
    return _joined([_name(each) for each in names])


def _quoted(texts: Iterable[str]) -> str:
    return _joined([f"'{_name(each)}'" for each in texts])


def _joined(texts: list[str]) -> str:
    rest = len(texts) - _LISTED
    return ", ".join(texts[:_LISTED]) + (f" and {rest:,} more" if rest > 0 else "")


def _name(name: str) -> str:
    """Return a name without what would not print, and not too long."""
    text = printable(name)
    return text if len(text) <= 40 else text[:39] + "…"


def printable(text: str) -> str:
    """Return a text with escapes for what a terminal would obey instead of showing it."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
