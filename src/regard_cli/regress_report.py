"""The report of ``regard regress``: text, a JSON record, and a plot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np

from regard._utils.files import naming
from regard.scores.kernels import kernels
from regard_cli.cells import Marks
from regard_cli.regress_model import Complexity, Fitted, NewRows, Predictions, Prepared, Quality
from regard_cli.tables import COMMAS, Column

_WAYS = {
    "loo": "chosen for the least leave-one-out error",
    "learned": "one for each feature, by gradient descent on the leave-one-out error",
    "aicc": "chosen for the least AICc (corrected Akaike criterion)",
    "scott": "by Scott's rule of thumb",
    "silverman": "by Silverman's rule of thumb",
}
#: A bandwidth of so many times the span of a feature makes no difference between rows.
_WIDE = 3.0
#: A line that rises less than this share of the target's span says hardly anything.
_FLAT = 0.02
#: Names that are listed before the rest is counted, and letters of one.
_LISTED, _LETTERS = 8, 40
#: Features in the table of bandwidths, and lines about columns that are not used.
_FEATURES, _REASONS = 20, 8
#: Features that are drawn, inches of a panel, and letters of a category that is named below it.
_PANELS, _WIDTH, _HEIGHT, _SHORT = 6, 4.6, 3.6, 14


def of_table(prepared: Prepared) -> Iterator[str]:
    """Return the lines about what was read and used."""
    table, target, y = prepared.table, prepared.target, prepared.y[prepared.used]
    size = f"{_count(len(table.frame), 'row')}, {_count(len(table.frame.columns), 'column')}"
    yield f"{table.name}: {size} ({table.form})."
    if target.kind == "category":
        yield f"Target: {_name(target.name)}, text with {len(target.categories)} classes ({names(target.categories)})."
    else:
        yield f"Target: {_name(target.name)}, a number from {number(y.min())} to {number(y.max())}."
    if table.skipped:
        yield f"Skipped: {table.skipped}."
    if table.nameless:
        has, is_ = ("have no name", "are") if len(table.nameless) > 1 else ("has no name", "is")
        counts = "count" if len(table.nameless) > 1 else "counts"
        yield f"Not used: {names(table.nameless)}, which {has} and {is_} empty or {counts} the rows."
    yield from _not_used(prepared.left_out)
    for column in (target, *prepared.columns):
        yield from _how_read(column)
    if gone := int((~prepared.used).sum()):
        features = any(column.name in prepared.missing for column in prepared.columns)
        hint = "; --keep-missing uses those that only miss features" if features else ""
        yield f"Left out: {_count(gone, 'row')} with missing values ({_missing(prepared.missing)}){hint}."
    if zero := int((prepared.weights[prepared.used] == 0).sum()):
        yield f"Left out: {_count(zero, 'row')} of weight 0."
    for hint in prepared.hints:
        yield f"Note: {hint}."


def _not_used(left_out: Mapping[str, str]) -> Iterator[str]:
    """Return a few lines about unused columns, one for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, which in list(by_reason.items())[:_REASONS]:
        yield f"Not used: {names(which)}, {reason}."
    if rest := sum(len(which) for which in list(by_reason.values())[_REASONS:]):
        yield f"Not used: {_count(rest, 'more column')}; --json says why."


def _how_read(column: Column) -> Iterator[str]:
    """Return how the texts of a column were parsed, unless they are plain."""
    name, way = _name(column.name), column.way
    if column.kind == "number" and isinstance(way, Marks) and (way != Marks() or column.as_in or column.unit):
        marks = {".": "dots", ",": "commas", " ": "spaces", "'": "apostrophes"}
        said = [f"decimal {marks[way.decimal]}"] + (
            [f"{marks[way.thousands]} between thousands"] if way.thousands else []
        )
        where = f", as in {_name(column.as_in)}" if column.as_in else ""
        if column.as_in == COMMAS:
            where = f", as is usual in CSV with commas (--thousands '{way.decimal}' reads them otherwise)"
        unit = f" in {column.unit}" if column.unit else ""
        yield f"In {name}, numbers{unit} have {' and '.join(said)}{where}."
    elif column.kind == "date" and way:
        where = f", as in {_name(column.as_in)}" if column.as_in else ""
        yield f"In {name}, dates have the {way}{where}."
    if column.odd:
        yield f"In {name}, what is no {column.kind} counts as missing: {_quoted(column.odd)}."
    if column.blank:
        yield f"In {name}, these count as missing: {_quoted(column.blank)}."


def of_fit(fitted: Fitted, bandwidth: str | Sequence[float], size: Complexity) -> Iterator[str]:
    """Return the lines about the fit and the bandwidth of each feature."""
    estimator, columns = fitted.estimator, fitted.prepared.columns
    around = ("weighted averages", "a line around each row", "a parabola around each row")
    how = "weighted votes" if fitted.classifies else around[_order(fitted)]
    way = _WAYS[bandwidth] if isinstance(bandwidth, str) else "as given"
    drawn = f", seen on {estimator.subsample:,} rows drawn at random" if estimator.subsample else ""
    yield f"Learned from {_count(int(fitted.learned.sum()), 'row')}: {how}, kernel {estimator.kernel}."
    adapts = estimator.n_neighbors is not None
    if adapts:
        way = "chosen for the least leave-one-out error" if estimator.n_neighbors == "loo" else "as given"
        yield f"Bandwidth: at each row, the distance to the {estimator.n_neighbors_:,} nearest rows ({way})."
    else:
        yield f"Bandwidth: {way}{drawn}."
    if bandwidth in ("loo", "aicc") and len(columns) > 1:
        yield "It is one multiple of each feature's spread; --bandwidth learned finds one for each feature."
    kinds = {"date": "date, in days", "number": "number"}
    rows = [("feature", "treated as", "unit of distance" if adapts else "bandwidth")]
    for column, width in list(zip(columns, estimator.bandwidth_))[:_FEATURES]:
        kind = kinds.get(column.kind, f"{len(column.categories)} categories")
        if column.name in fitted.prepared.angular:
            kind = f"angle, period {number(fitted.prepared.angular[column.name])}"
        elif column.name in fitted.prepared.ordered:
            count = len(fitted.prepared.ordered[column.name]) or fitted.prepared.X[column.name].nunique()
            kind = f"{count} ordered categories"
        elif column.name in fitted.prepared.haversine:
            kind = "latitude" if column.name == fitted.prepared.haversine[0] else "longitude"
        rows.append((_name(column.name), kind, _width(fitted, column, float(width))))
    sizes = [max(map(len, cells)) for cells in zip(*rows)]
    more = [f"  and {len(columns) - _FEATURES:,} more; --json lists all"] if len(columns) > _FEATURES else []
    yield from ("", *("  " + "  ".join(map(str.ljust, row, sizes)).rstrip() for row in rows), *more, "")
    by = "" if size.exact else f", estimated from {size.rows:,} rows drawn at random"
    aicc = f"; AICc = {number(size.aicc)}" if math.isfinite(size.aicc) else ""
    yield f"Effective degrees of freedom: {number(size.dof)}{aicc}{by}."


def _width(fitted: Fitted, column: Column, width: float) -> str:
    """Return a bandwidth in the unit of its column, with an explanation if needed."""
    prepared, kernel, is_date = fitted.prepared, fitted.estimator.kernel, column.kind == "date"
    if fitted.estimator.n_neighbors is not None:
        unit = " km" if column.name in prepared.haversine else " days" if is_date else ""
        return f"{number(width)}{unit}"
    if column.kind == "category" or column.name in prepared.ordered:
        weight = 1.0 if kernel == "constant" else float(kernels()[kernel].profile(1 / width))
        which = "the next" if column.name in prepared.ordered else "another"
        return f"{number(width)} ({which} category counts {weight:.0%})"
    if column.name in prepared.haversine:
        return f"{number(width)} km"
    text = number(width) + " days" * is_date
    span = float(np.ptp(prepared.X[column.name][fitted.learned].dropna()))
    if width <= _WIDE * span and kernel != "constant":
        return text
    if not _order(fitted):
        wide = "of no effect, as all rows count alike" if kernel == "constant" else "so wide that it hardly matters"
        return f"{text} ({wide})"
    wide = "of no effect: it enters" if kernel == "constant" else "so wide that it enters"
    if _order(fitted) == 2:
        return f"{text} ({wide} as a parabola)"
    # A line is fitted across all rows then: what the feature does is in its slope.
    slope = fitted.slope(column.name)
    line = f"a straight line, slope {number(slope)}{' a day' * is_date}"
    line += ": it hardly matters" * (abs(slope) * span < _FLAT * float(np.ptp(prepared.y[fitted.learned])))
    return f"{text} ({wide} as {line})"


def of_quality(quality: Quality, fitted: Fitted, where: str | None = None) -> Iterator[str]:
    """Return the lines about the accuracy on rows that were not used for the fit, of either table."""
    if where is None and quality.out_of_reach:
        which = _count(quality.rows + quality.out_of_reach, "row") + ("" if quality.exact else " drawn at random")
        done, rest = (f"{quality.rows:,}", "the rest") if quality.rows else ("None", "they")
        yield f"{done} of {which} could be predicted from the others; {rest} are {_why(fitted)}."
    if quality.far:
        yield f"{_count(quality.far, 'row')} far from all others {'is' if quality.far == 1 else 'are'} not counted."
    if quality.rows == 0:
        return
    if where is not None:
        tells, was = ("tells", "was") if quality.rows == 1 else ("tell", "were")
        predicted = f" and {was} predicted" if quality.out_of_reach else ""
        who = f"The {_count(quality.rows, 'row')} of {where} that {tells} {_name(fitted.name)}{predicted}"
    elif quality.nested:
        which = "of these" if quality.out_of_reach else "row"
        who = f"Each {which}, predicted from other folds of rows with a bandwidth chosen without it"
    elif quality.exact:
        which = "of these" if quality.out_of_reach else "row"
        also = " and its own repetitions (whole-number weights count rows)" if quality.repeated else ""
        who = f"Each {which}, predicted from all the others{also}"
    else:
        who = f"{quality.rows:,} rows drawn at random, predicted from the rest"
    if fitted.classifies:
        weighed = fitted.estimator.class_weight is not None
        each = f"; on average over classes {quality.balanced:.1%}" if weighed else ""
        yield f"{who}: {1 - quality.error:.1%} right{each}; the most frequent class: {1 - quality.baseline:.1%} right."
        return
    mean = f"the mean of {_name(fitted.name)}" + (f" in {fitted.prepared.table.name}" if where is not None else "")
    kind = "R² on these rows" if where is not None else f"{_way(quality).replace('held out', 'held-out')} R²"
    r2 = "" if math.isnan(quality.r2) else f"; {kind} = {quality.r2:.3f}"
    off, simple = number(quality.error), number(quality.baseline)
    yield f"{who}: off by {off} (root mean square); {mean}: off by {simple}{r2}."
    if quality.error >= quality.baseline:
        yield "That is no better than the mean: these features say nothing about the target in this way."
    elif quality.r2 <= 0:
        yield "That is no better than the mean of these rows themselves: what sets them apart is not predicted."


def of_prediction(predictions: Predictions, new: NewRows, fitted: Fitted) -> Iterator[str]:
    """Return the lines about predicted rows and anything unusual about them."""
    name, able, whole = new.table.name, int(predictions.predicted.sum()), len(predictions.predicted)
    done = able - predictions.out_of_reach
    some, rows = "" if done == whole else f"{done:,} of ", f"{_count(whole, 'row')} of {name}"
    if able < whole:
        others = "the others" if done == able else f"{whole - able:,} of the others"
        rows += f"; {others} miss a feature and stay empty ({_missing(predictions.missing)})"
    yield f"Predicted {some}{rows}."
    yield from of_rows_out_of_reach(predictions, fitted)
    if predictions.extrapolated:
        lies = "lies" if predictions.extrapolated == 1 else "lie"
        unknown = tuple(f"{fitted.name}_{each}" for each in ("std", "band", "q"))
        empty = [each for each in predictions.frame if each.startswith(unknown)]
        stay = f"; {names(empty)} stay{'s' * (len(empty) == 1)} empty there" if empty else ""
        yield (
            f"{_count(predictions.extrapolated, 'row')} {lies} beyond the reach of the rows learned from "
            f"({_name(fitted.name)}_extrapolated says which): what is predicted there is extrapolated, and nothing "
            f"tells how far off it is{stay}."
        )
    for old, each in zip(fitted.prepared.columns, new.columns):
        if other := sorted(set(each.categories) - set(old.categories)):
            has = f"In {_name(each.name)}, {fitted.prepared.table.name} has no {_quoted(other)}"
            yield f"{has}: such rows count as unlike all rows there."
        if each.odd:
            yield f"In {_name(each.name)} of {name}, what is no number or date counts as missing: {_quoted(each.odd)}."


def of_rows_out_of_reach(predictions: Predictions, fitted: Fitted) -> Iterator[str]:
    """Return a line about rows with all features but without a prediction."""
    if predictions.out_of_reach:
        which = "which is" if predictions.out_of_reach == 1 else "which are"
        yield f"Predictions stay empty in {_count(predictions.out_of_reach, 'row')}, {which} {_why(fitted)}."


def _order(fitted: Fitted) -> int:
    return getattr(fitted.estimator, "order", 0)


def _why(fitted: Fitted) -> str:
    """Return how rows without a prediction are described."""
    if fitted.estimator.empty == "nan":
        return "beyond the kernel's reach (--empty nan)"
    return "beyond what can be calculated at this bandwidth"


def record(fitted: Fitted, bandwidth: str | Sequence[float], size: Complexity, quality: Quality) -> dict[str, Any]:
    """Return the fit as a JSON record."""
    prepared, estimator = fitted.prepared, fitted.estimator
    features = [
        {"name": column.name, "kind": _kind(prepared, column)}
        | ({"categories": column.categories} if column.kind == "category" else {})
        | {"bandwidth": float(width)}
        for column, width in zip(prepared.columns, estimator.bandwidth_)
    ]
    return {
        "data": prepared.table.name,
        "rows": len(prepared.table.frame),
        "rows_learned": int(fitted.learned.sum()),
        "target": fitted.name,
        "task": "classification" if fitted.classifies else "regression",
        "features": features,
        "columns_not_used": prepared.left_out | dict.fromkeys(prepared.table.nameless, "no name"),
        "rows_missing": prepared.missing,
        "hints": list(prepared.hints),
        "kernel": estimator.kernel,
        "order": _order(fitted),
        "bandwidth": bandwidth,
        "n_neighbors": getattr(estimator, "n_neighbors_", None),
        "effective_dof": size.dof,
        "aicc": size.aicc,
        "rows_for_dof": size.rows,
        "quality": quality_record(quality, fitted),
    }


def _kind(prepared: Prepared, column: Column) -> str:
    if column.name in prepared.haversine:
        return "latitude" if column.name == prepared.haversine[0] else "longitude"
    return "angle" if column.name in prepared.angular else "ordered" if column.name in prepared.ordered else column.kind


def _way(quality: Quality) -> str:
    return "nested cross-validated" if quality.nested else "leave-one-out" if quality.exact else "held out"


def quality_record(quality: Quality, fitted: Fitted) -> dict[str, Any]:
    """Return the accuracy as a JSON record."""
    way = {"way": _way(quality), "rows": quality.rows, "rows_lost": quality.out_of_reach}
    if fitted.classifies:
        return way | {"accuracy": 1 - quality.error, "accuracy_of_most_frequent": 1 - quality.baseline,
                      "balanced_accuracy": quality.balanced}  # fmt: skip
    return way | {"rmse": quality.error, "rmse_of_mean": quality.baseline, "r2": quality.r2}


def plain(value: Any) -> Any:
    """Return a value in JSON types, with null for NaN."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def number(value: float) -> str:
    """Return a number with four significant digits."""
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-4:
        return f"{value:.3e}"
    return f"{value:,.0f}" if size >= 1e4 else f"{value:.4g}"


def names(texts: Iterable[str]) -> str:
    """Return the first names of a list, and the number of the others."""
    return _joined([_name(each) for each in texts])


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _missing(missing: Mapping[str, int]) -> str:
    return _joined([f"{_name(name)}: {count:,}" for name, count in missing.items()])


def _quoted(texts: Iterable[str]) -> str:
    return _joined([f"'{_name(each)}'" for each in texts])


def _joined(texts: list[str]) -> str:
    rest = len(texts) - _LISTED
    return ", ".join(texts[:_LISTED]) + (f" and {rest:,} more" if rest > 0 else "")


def _name(name: str) -> str:
    """Return a name, truncated if it is long."""
    return name if len(name) <= _LETTERS else name[: _LETTERS - 1] + "…"


def draw(fitted: Fitted, path: Path, confidence: float | None = None) -> str:
    """Plot the predictions over each feature, with the others held at typical values; return the description."""
    from matplotlib.figure import Figure

    from regard.regression import plot_fit
    from regard.regression.plots import label_dates

    estimator = copy(fitted.estimator).set_params(verbose=0)  # no bar for each panel
    columns = fitted.prepared.columns[:_PANELS]
    across = math.ceil(len(columns) / math.ceil(len(columns) / 3))
    down = math.ceil(len(columns) / across)
    size = (6.4, 4.8) if len(columns) == 1 else (across * _WIDTH, down * _HEIGHT + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    entries: dict[str, Any] = {}
    for i, (column, ax) in enumerate(zip(columns, panels)):
        plot_fit(estimator, ax=ax, feature=i, confidence=confidence)
        ax.set_ylabel(f"probability of {fitted.name}" if fitted.classifies else fitted.name)
        if column.kind == "category":
            texts = [each.get_text() for each in ax.get_xticklabels()]
            ax.set_xticklabels([each if len(each) <= _SHORT else each[: _SHORT - 1] + "…" for each in texts])
        elif column.kind == "date" and column.values.dtype.kind != "m":
            label_dates(ax)
        handles, labels = ax.get_legend_handles_labels()
        entries = dict(zip(labels, handles)) | entries
    for ax in panels[len(columns) :]:
        ax.set_axis_off()
    if len(columns) > 1:  # one legend above all panels instead of one in each
        for ax in panels:
            if (legend := ax.get_legend()) is not None:
                legend.remove()
        figure.legend(entries.values(), entries, loc="outside upper center", ncols=min(len(entries), 6), frameon=False)
    with naming(path):
        figure.savefig(path, dpi=144)
    what = f"the probability of each {fitted.name}" if fitted.classifies else f"{fitted.name} as predicted"
    if len(columns) == 1:
        return f"{what} over {columns[0].name}"
    some = f"the first {_PANELS} features" if len(columns) < len(fitted.prepared.columns) else "each feature"
    return f"{what} over {some}, the others held at their median or most frequent category"
