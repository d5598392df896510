"""Kernel regression of a table: the choice of columns and rows, the fit, predictions, and their accuracy."""

from __future__ import annotations

import math
import re
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from regard._utils.errors import rejected, unknown_name
from regard_cli.tables import Column, Kind, Table

if TYPE_CHECKING:
    from pandas import DataFrame, Index, Series

#: Names of columns whose whole numbers are often codes rather than amounts.
_CODES = re.compile(
    r"(.*[_\W])?(id|ids|code|codes|zip|zipcode|zip_code|plz|postcode|postal_code|fips|key|sku)|.*Id|.*ID"
)
#: Why a column cannot be used, if there is nothing in it to use.
_NOTHING = ("empty", "neither numbers nor text")
#: Names that are listed in a message.
_LISTED = 20
#: Text with more different values than this share of the rows is a name or a remark, not a category.
_REPEATING, _FEW = 0.5, 10
#: Numbers no further apart than this count as the same: the squares of their differences are 0.
_APART = 1e-100
#: Unless it is listed, a feature may have so many categories, and must be filled in so many of the rows.
_MANY, _FILLED = 100, 0.5
#: Most pairs of rows that are compared for one bandwidth, and the fewest rows that are left out for it.
_PAIRS, _LEAST = 5 * 10**8, 2000
#: How often a value is at least that stands for a missing one, and different others.
_OFTEN = 3
#: Rows over which a slope is averaged.
_SLOPES = 200
#: Leaving out each row in turn compares all pairs: so many rows take a quarter of a minute. Of more, some are held out.
_ROWS, _HELD = 100_000, 10_000


@dataclass(frozen=True)
class Prepared:
    """The columns and rows of a table that are used for the fit."""

    table: Table
    target: Column
    columns: tuple[Column, ...]  # the features
    candidates: tuple[str, ...]  # the features before any was left out
    X: DataFrame  # (N, n_features), of all rows: numbers, days and text
    y: Series  # (N,), numbers or text
    weight: Series | None
    used: Series  # the rows that miss nothing
    left_out: dict[str, str]  # columns that are not used, and why
    missing: dict[str, int]  # how many rows miss each column, where any does
    angular: dict[str, float]  # the period of features that are angles
    ordered: dict[str, list[str]]  # the texts of features of ordered categories, none of numbers
    haversine: tuple[str, ...]  # the latitude and the longitude, if there is a place
    allow_missing: bool  # whether rows that miss features are used
    hints: tuple[str, ...] = ()  # what features look like, and the options for that

    @property
    def classifies(self) -> bool:
        """Whether the target is text."""
        return self.target.kind == "category"

    @property
    def numeric(self) -> list[int]:
        """The indices of the features with slopes: those that are no categories."""
        return [i for i, each in enumerate(self.columns) if each.kind != "category" and each.name not in self.ordered]

    @property
    def weights(self) -> Series:
        """The weight of each row; 1 by default."""
        return self.used.notna() * 1.0 if self.weight is None else self.weight

    @property
    def learned(self) -> Series:
        """The rows without missing values and with a positive weight."""
        return self.used & (self.weights > 0)

    def complete(self, X: DataFrame) -> Series:
        """Return which rows have all required features."""
        return X.notna().any(axis=1) if self.allow_missing else X.notna().all(axis=1)

    def missed(self, X: DataFrame) -> dict[str, int]:
        """Return the number of missing values of each required feature that has any."""
        return {} if self.allow_missing and self.complete(X).all() else _missing(X)


def prepare(
    table: Table,
    target: str,
    features: Sequence[str] | None = None,
    weights: str | None = None,
    *,
    ignore: Sequence[str] = (),
    categorical: Sequence[str] = (),
    angular: Mapping[str, float] | None = None,
    ordered: Mapping[str, Sequence[str]] | None = None,
    haversine: Sequence[str] = (),
    allow_missing: bool = False,
    classify: bool = False,
) -> Prepared:
    """Choose the columns and rows of a table for the regression of a target.

    A text column is read as numbers if nine tenths of it are; dates become days, and other text becomes categories.
    Constant features are left out, and so is text that hardly repeats, unless ``features`` names it.

    Parameters
    ----------
    table : Table
    target : str
    features, ignore : sequence of str, optional
        The columns to learn from, all others by default; and columns to leave out.
    weights : str, optional
        The column of row weights.
    categorical : sequence of str
        Features whose values have no order, although they are numbers.
    angular : mapping of str to float, optional
        Features that are angles, with the length of their circle.
    ordered : mapping of str to sequence of str, optional
        Features of ordered categories, with their texts in order, or without if they are numbers.
    haversine : sequence of str
        The features of latitude and longitude, in degrees.
    allow_missing : bool, default False
        Whether rows are used that miss features.
    classify : bool, default False
        Whether a target of numbers is one of classes.

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
    import pandas as pd

    names, angular = [str(each) for each in table.frame.columns], dict(angular or {})
    levels_of = {name: list(levels) for name, levels in (ordered or {}).items()}
    kinds: dict[str, Sequence[str]] = {
        "categorical": categorical, "angular": [*angular], "ordered": [*levels_of], "haversine": haversine
    }  # fmt: skip
    _check_names(names, {"target": [target], "weights": [weights] if weights is not None else [],
                         "features": features or (), "ignore": ignore} | kinds)  # fmt: skip
    if weights == target:
        raise rejected("regress", "weights", "be another column than the target", repr(weights))
    candidates = _candidates(names, target, features, weights, ignore)
    _check_kinds(kinds, candidates)
    goal, y = _target(table, target, classify=classify)
    weight = None if weights is None else _weights(table, weights)
    columns: dict[str, Column] = {}
    left_out: dict[str, str] = {}
    for name in candidates:
        if features is None and _is_prediction(name, target, names):
            left_out[name] = "from earlier predictions of the target"
            continue
        known = features is not None or any(name in each for each in kinds.values())
        column = table.column(name, _kind(name, categorical, [*angular, *haversine], levels_of))
        if reason := _reason_to_skip(table, name, column, named=features is not None, known=known):
            left_out[name] = reason
        else:
            columns[name] = cast(Column, column)
    X = pd.DataFrame({name: table.numbers(column) for name, column in columns.items()})
    if columns:
        filled = pd.concat([y.rename(target), *([] if weight is None else [weight.rename(weights)]), X], axis=1)
        for name, levels in levels_of.items():
            _check_levels(table, name, levels, X)
        must = filled.drop(columns=list(columns)) if allow_missing else filled
        used, missing = must.notna().all(axis=1) & X.notna().any(axis=1), _missing(must)
        _check_rows(table, target, y, weight, used, missing)
        for name in [each for each in columns if not _varies(X.loc[used, each])]:
            left_out[name] = "the same in all rows that miss nothing"
            del columns[name]
    if not columns:
        reasons = "; ".join(f"{name!r} is {reason}" for name, reason in left_out.items()) or "none"
        raise rejected("regress", table.name, "have a column to learn from beside the target", reasons)
    X = X[list(columns)]
    for name in haversine:
        if name not in columns:
            raise rejected("regress", "haversine", "name features that differ between rows", repr(name))
    angular = {name: period for name, period in angular.items() if name in columns}
    levels_of = {name: levels for name, levels in levels_of.items() if name in columns}
    hints = _hints(table, goal, y, columns, X, (*angular, *levels_of, *haversine))
    return Prepared(
        table, goal, tuple(columns.values()), tuple(candidates), X, y, weight, used, left_out, missing, angular,
        levels_of, tuple(haversine), allow_missing, hints,
    )  # fmt: skip


def _check_names(names: Sequence[str], options: Mapping[str, Sequence[str]]) -> None:
    """Raise if an option names a column that does not exist."""
    for option, given in options.items():
        for each in given:
            if each not in names:
                raise _unknown(option, each, names)


def _check_kinds(kinds: Mapping[str, Sequence[str]], candidates: Sequence[str]) -> None:
    """Raise if an option for kinds names a column that is no feature, or has a kind from another option."""
    stated: dict[str, str] = {}
    for option, given in kinds.items():
        for each in given:
            if each not in candidates or each in stated:
                got = f"{each!r}, which is {stated[each] if each in candidates else 'none'}"
                raise rejected("regress", option, "name features", got)
        stated |= {each: stated.get(each, option) for each in given}


def _unknown(option: str, given: str, names: Sequence[str]) -> Exception:
    """Return the error for a column that does not exist; of many columns, it lists only similar names."""
    if len(names) <= _LISTED:
        return unknown_name("regress", option, given, names)
    near = get_close_matches(given, names, n=3, cutoff=0.5)
    hint = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
    return rejected("regress", option, f"be one of the {len(names):,} columns", f"{given!r}{hint}")


def _kind(
    name: str, categorical: Sequence[str], numbers: Sequence[str], ordered: Mapping[str, list[str]]
) -> Kind | None:
    if name in categorical or ordered.get(name):
        return "category"
    return "number" if name in numbers or name in ordered else None


def _check_levels(table: Table, name: str, levels: Sequence[str], X: DataFrame) -> None:
    """Raise if a feature has a text that is not among its ordered categories."""
    if levels and name in X and (other := X[name].notna() & ~X[name].isin(levels)).any():
        row = int(np.flatnonzero(other)[0])
        expected = f"hold {', '.join(map(repr, levels))}, as --ordered says"
        raise rejected(
            "regress", f"column {name!r} of {table.name}", expected, f"{X[name].iloc[row]!r} in {table.where(row)}"
        )


def _hints(
    table: Table, target: Column, y: Series, columns: Mapping[str, Column], X: DataFrame, known: Sequence[str]
) -> tuple[str, ...]:
    """Return hints about numbers that look like counters, codes, classes or missing values, with the options for them.

    Features whose kind is ``known`` are no counters or codes.
    """
    hints, codes = [], []
    for column in (target, *columns.values()):
        if column.kind == "number" and (hint := _odd_value(column.name, y if column is target else X[column.name])):
            hints.append(hint)
    for name, column in columns.items():
        values = X[name].dropna()
        if column.kind != "number" or name in known or len(values) < _FEW:
            continue
        whole = bool((values == values.round()).all())
        if whole and len(values) == len(X) and (values.diff().iloc[1:] == 1).all() and values.iloc[0] in (0, 1):
            hints.append(f"{name} counts the rows; --ignore {_quoted(name)} leaves it out, unless it is time")
        elif whole and _has_leading_zeros(table, name):
            codes.append(f"{name} (written with leading zeros)")
        elif whole and _CODES.fullmatch(name):
            codes.append(name)
    if codes:
        first = _quoted(codes[0].removesuffix(" (written with leading zeros)"))
        more = f" and {len(codes) - 8:,} more" if len(codes) > 8 else ""
        are = "look like codes, but count" if len(codes) > 1 else "looks like a code, but counts"
        hints.append(
            f"{', '.join(codes[:8])}{more} {are} as numbers; --categorical "
            f"{first} treats its values as unordered, --ignore {first} leaves it out"
        )
    if target.kind == "number" and 1 < y.nunique() <= 2 and len(y.dropna()) >= _FEW:
        low, high = sorted(y.dropna().unique())
        hints.append(f"{target.name} is {low:g} or {high:g}, and learned as a number; --classify learns two classes")
    return tuple(hints)


def _odd_value(name: str, values: Series) -> str | None:
    """Return a hint if a frequent value far from all others, such as -999, may stand for missing ones.

    It is the least or the largest and further from the others than these from each other: half as far if its digits are
    all 9, three times as far if not; 0 may be a proper one.
    """
    values = values.dropna()
    for value in (values.min(), values.max()):
        rest = values[values != value]
        count = len(values) - len(rest)
        if count < _OFTEN or value == 0 or rest.nunique() < _OFTEN:
            continue
        low, high = float(rest.min()), float(rest.max())
        gap = max(low - value, value - high)
        if gap > (high - low) * (0.5 if re.fullmatch(r"-?9{2,}(\.9*0*)?", f"{value:.15g}") else 3.0):
            return (
                f"{name} is {value:g} in {count:,} rows, and from {low:g} to {high:g} in the others; "
                f"--missing={value:g} counts {value:g} as missing"
            )
    return None


def _quoted(name: str) -> str:
    """Return a name quoted for the command line."""
    return shlex.quote(f'"{name}"' if "," in name else name)


def _has_leading_zeros(table: Table, name: str) -> bool:
    cells = table.frame[name].head(_ROWS)
    return cells.dtype.kind not in "iuf" and bool(cells.astype(str).str.strip().str.fullmatch(r"0\d+").any())


def _missing(frame: DataFrame) -> dict[str, int]:
    """Return the number of missing values of each column that has any."""
    return {str(name): int(count) for name, count in frame.isna().sum().items() if count}


def _candidates(
    names: list[str], target: str, features: Sequence[str] | None, weights: str | None, ignore: Sequence[str]
) -> list[str]:
    for each in ignore:
        if each in (target, weights, *(features or ())):
            what = "the target" if each == target else "the weights" if each == weights else "one of --features"
            raise rejected("regress", "ignore", "name columns that are not used otherwise", f"{each!r}, {what}")
    if features is None:
        return [each for each in names if each not in (target, weights, *ignore)]
    for each in features:
        if each in (target, weights):
            what = "the target" if each == target else "the weights"
            raise rejected("regress", "features", "be other columns than target and weights", f"{each!r}, {what}")
        if list(features).count(each) > 1:
            raise rejected("regress", "features", "name each column once", f"{each!r} twice")
    return list(features)


def _is_prediction(name: str, target: str, names: list[str]) -> bool:
    """Return whether a column holds earlier predictions of the target."""
    added = rf"{re.escape(target)}_(predicted|extrapolated|std|band_low|band_high|q[\d.]+|probability_.*|slope_.*)"
    return f"{target}_predicted" in names and re.fullmatch(added, name) is not None


def _varies(values: Series) -> bool:
    return values.nunique() > 1 and (values.dtype != np.float64 or values.max() - values.min() > _APART)


def _target(table: Table, name: str, *, classify: bool) -> tuple[Column, Series]:
    column, subject = table.column(name, "category" if classify else None), f"target {name!r}"
    if isinstance(column, str) or column.kind == "date":
        got = "dates"
        if isinstance(column, str):
            got = f"a column that is {column}" if column in _NOTHING else column.replace(
                ", --categorical reads all as text, --ignore leaves the column out", ", --classify reads all as classes"
            )  # fmt: skip
        raise rejected("regress", subject, "hold numbers, or text for a classification", got)
    y = table.numbers(column)
    there = y.dropna()
    if len(there) > 1 and not _varies(there):
        only = repr(there.iloc[0]) if column.kind == "category" else f"{there.iloc[0]:g}"
        raise rejected("regress", subject, "differ between rows", f"{only} in all: there is nothing to learn")
    if len(column.categories) == len(there) > 1:
        raise rejected("regress", subject, "repeat its texts, one for each class", "another in every row")
    return column, y


def _weights(table: Table, name: str) -> Series:
    column = table.column(name)
    got = ""
    if isinstance(column, str):
        got = f"a column that is {column}"
    elif column.kind != "number":
        got = "dates" if column.kind == "date" else "text"
    elif (weight := table.numbers(column)).min() < 0:
        got = f"{weight.min():g} in {table.where(int(weight.argmin()))}"
    elif weight.max() == 0:
        got = "0 in every row"
    if got:
        raise rejected("regress", f"weights {name!r}", "hold numbers of at least 0, not all 0", got)
    return weight


def _reason_to_skip(table: Table, name: str, column: Column | str, *, named: bool, known: bool) -> str | None:
    """Return why a feature is left out: it has no information, or looks useless and is not ``known``.

    Raise if it cannot be read although it was named.
    """
    if isinstance(column, str):
        if named and column not in _NOTHING:
            raise rejected("regress", f"column {name!r} of {table.name}", "hold numbers, dates or text", column)
        return column
    values = table.numbers(column)
    there = values.dropna()
    if len(there) == 0:
        return "empty"
    if not _varies(there):
        return "the same in every row"
    if known:
        return None
    different = len(column.categories)
    if different == len(there) or different > max(_FEW, _REPEATING * len(there)):
        text = column.categories[0]
        return f"text that hardly repeats, such as {text if len(text) <= 30 else text[:29] + '…'!r}"
    if different > _MANY:
        return f"text with {different:,} different values; name it in --features to use it"
    if len(there) < _FILLED * len(values):
        return f"missing in {1 - len(there) / len(values):.0%} of the rows"
    return None


def _check_rows(
    table: Table, target: str, y: Series, weight: Series | None, used: Series, missing: dict[str, int]
) -> None:
    """Raise if too few rows have no missing values."""
    counted = used if weight is None else used & (weight > 0)
    if counted.sum() < 2:
        where = ", ".join(f"{name!r} in {count:,}" for name, count in missing.items())
        got = f"{int(counted.sum())} of {len(used):,}" + (f" (missing: {where})" if where else "")
        expected = "have two rows or more that miss nothing" + (" and have a weight" if weight is not None else "")
        raise rejected("regress", table.name, expected, got)
    if not _varies(y[counted]):
        got = "one value in all of them: there is nothing to learn"
        raise rejected("regress", f"target {target!r}", "differ between the rows that miss nothing", got)


@dataclass(frozen=True)
class NewRows:
    """The features in another table."""

    table: Table
    columns: list[Column]
    X: DataFrame  # (N, n_features)


def features_of(prepared: Prepared, table: Table) -> NewRows:
    """Return the features in another table; raise ValueError if one is missing or of another kind."""
    import pandas as pd

    columns = [cast(Column, table.column(each.name, each.kind, each)) for each in prepared.columns]
    X = pd.DataFrame({each.name: table.numbers(each) for each in columns})
    for name, levels in prepared.ordered.items():
        _check_levels(table, name, levels, X)
    return NewRows(table, columns, X)


@dataclass(frozen=True)
class Predictions:
    """Predictions of the rows of a table."""

    frame: DataFrame  # the columns to add to the table; missing where a row could not be predicted
    predicted: Series  # the rows that miss no feature
    missing: dict[str, int]  # how many rows miss each feature, where any does
    extrapolated: int = 0  # how many rows lie beyond the reach of the rows that were learned from
    quality: Quality | None = None  # if some rows have the target, too

    @property
    def out_of_reach(self) -> int:
        """The number of rows with all features but without a prediction."""
        return int((self.predicted & self.frame.iloc[:, 0].isna()).sum())


@dataclass(frozen=True)
class Quality:
    """Accuracy on rows that were not used for the fit."""

    rows: int  # that were predicted
    error: float  # root mean square error; of a classification, the share of wrong labels
    baseline: float  # the same of the mean of the other rows that were learned from, or of their most frequent class
    r2: float  # on these very rows; NaN of a classification, and where the rows have one target
    exact: bool = True  # whether each was predicted from all the others, rather than some from the rest
    far: int = 0  # rows that lie far from all others and are not counted
    nested: bool = False  # whether by folds, with the bandwidth chosen within each
    repeated: bool = False  # whether a row of weight 2 is predicted from itself too, as it stands for two rows
    out_of_reach: int = 0  # rows that lie beyond the reach of every other
    balanced: float = math.nan  # of a classification, the share of right labels, on average over classes


@dataclass(frozen=True)
class Fitted:
    """A regression fitted to some rows of a table; a classification if the target is text."""

    prepared: Prepared
    learned: Series  # (N,), bool
    estimator: Any

    @property
    def name(self) -> str:
        """The target's name."""
        return self.prepared.target.name

    @property
    def classifies(self) -> bool:
        """Whether the target is text."""
        return self.prepared.classifies

    @property
    def nested(self) -> bool:
        """Whether left-out predictions need their own bandwidth, because the one for all rows overfits."""
        return bool(
            self.estimator.cv is not None
            or (isinstance(self.estimator.bandwidth, str) and self.estimator.bandwidth == "learned")
        )

    @cached_property
    def out_of_sample(self) -> DataFrame:
        """The leave-one-out (or cross-validated) prediction of each row, or the probability of each class."""
        way = "cross_val" if self.nested else "loo"
        found = getattr(self.estimator, f"{way}_predict" + ("_proba" if self.classifies else ""))()
        return self._as_frame(found, self.learned.index[self.learned])

    def raw(self, X: DataFrame) -> DataFrame:
        """Return the predictions of rows without missing values, or the probability of each class."""
        return self._as_frame(self._call("predict_proba" if self.classifies else "predict", X), X.index)

    def _call(self, method: str, X: DataFrame, **options: Any) -> Any:
        """Return the result of an estimator's method for rows; with none, for some row, as it needs one."""
        return getattr(self.estimator, method)(X if len(X) else self.prepared.X[self.learned].head(1), **options)

    def _as_frame(self, found: Any, index: Index) -> DataFrame:
        import pandas as pd

        if not self.classifies:
            return pd.DataFrame({self.name: found[: len(index)]}, index)
        shares = pd.DataFrame(found[: len(index)], index, self.estimator.classes_)
        # A class may have no row that was learned from.
        return shares.reindex(columns=self.prepared.target.categories, fill_value=0.0).mask(shares.isna().any(axis=1))

    def decide(self, raw: DataFrame) -> Series:
        """Return the predictions; the most likely label of a classification."""
        return raw.dropna().idxmax(axis=1).astype(object).reindex(raw.index) if self.classifies else raw[self.name]

    def predict_own_rows(self) -> Predictions:
        """Return the predictions of the table's own rows, each from all others."""
        import pandas as pd

        X = self.prepared.X
        rest = X[self.prepared.complete(X)].drop(
            index=self.out_of_sample.index
        )  # the target is missing, or the weight is missing or 0
        return self._predictions(X, pd.concat([self.out_of_sample, self.raw(rest)]))

    def predict(
        self,
        new: NewRows,
        *,
        std: bool = False,
        band: float | None = None,
        quantiles: Sequence[float] = (),
        slopes: bool = False,
    ) -> Predictions:
        """Return the predictions of the rows of another table."""
        import pandas as pd

        X = new.X[self.prepared.complete(new.X)]
        more = pd.DataFrame(index=X.index)
        if std:
            more[f"{self.name}_std"] = self._call("predict", X, return_std=True)[1][: len(X)]
        if band is not None:
            limits = self._call("predict_band", X, coverage=band)[: len(X)]
            more[[f"{self.name}_band_low", f"{self.name}_band_high"]] = limits
        if quantiles:
            found = self._call("predict_quantiles", X, quantiles=tuple(quantiles))
            more[[f"{self.name}_q{each:g}" for each in quantiles]] = found[: len(X)]
        if slopes:
            found = self._call("predict_gradient", X)[: len(X)]
            more[slope_columns(self.prepared)] = found[:, self.prepared.numeric]
        beyond = np.asarray(self._call("extrapolates", X))[: len(X)]
        more[f"{self.name}_extrapolated"] = beyond.astype(object)
        predictions = self._predictions(new.X, self.raw(X), more, int(beyond.sum()))
        return replace(predictions, quality=self._quality_on(new.table, predictions))

    def _predictions(
        self, X: DataFrame, raw: DataFrame, more: DataFrame | None = None, extrapolated: int = 0
    ) -> Predictions:
        import pandas as pd

        found = pd.concat([self.decide(raw), raw], axis=1) if self.classifies else raw.copy()
        found.columns = pd.Index(prediction_columns(self.prepared))
        found = pd.concat([found, more], axis=1).reindex(X.index)
        return Predictions(found, self.prepared.complete(X), self.prepared.missed(X), extrapolated)

    def slope(self, feature: str) -> float:
        """Return the mean slope of predictions along a feature, over the rows of the fit."""
        import pandas as pd

        from regard.regression import ExtrapolationWarning

        X = self.prepared.X[self.learned]
        step = X[feature].std() / 2
        X = X.iloc[np.linspace(0, len(X) - 1, min(_SLOPES, len(X))).astype(int)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExtrapolationWarning)
            up, down = (self.raw(pd.DataFrame({**X, feature: X[feature] + each})) for each in (step, -step))
        return float(np.nanmean(up - down) / (2 * step))

    def _quality_on(self, table: Table, predictions: Predictions) -> Quality | None:
        """Return the accuracy on the rows of another table, or None if none of them has the target."""
        if self.name not in table.frame.columns:
            return None
        try:
            goal = self.prepared.target
            y = table.numbers(cast(Column, table.column(self.name, goal.kind, goal)))
        except ValueError:  # something else stands there, such as what is to be predicted
            return None
        y = y[predictions.predicted].dropna()
        return (
            self.compare(predictions.frame.iloc[:, 0], y, y.notna() * 1.0, self.baseline(self.learned))
            if len(y)
            else None
        )

    def baseline(self, rows: Series) -> Any:
        """Return the baseline without features: the mean of the targets, or the most frequent class."""
        y, w = self.prepared.y[rows], self.prepared.weights[rows]
        return w.groupby(y).sum().idxmax() if self.classifies else float(np.average(y, weights=w))

    def compare(self, found: Series, y: Series, w: Series, baseline: Any, exact: bool = True) -> Quality:
        """Return the accuracy of predictions, and that of a baseline, for targets (n,)."""
        import pandas as pd
        from sklearn.metrics import accuracy_score, r2_score, recall_score, root_mean_squared_error

        baseline = pd.Series(baseline, y.index)
        found = found[y.index].dropna()
        missed, y, w = len(y) - len(found), y[found.index], w[found.index]
        if found.empty:
            return Quality(0, math.nan, math.nan, math.nan, exact, out_of_reach=missed)
        error = (lambda *a, **b: 1 - accuracy_score(*a, **b)) if self.classifies else root_mean_squared_error
        r2 = math.nan if self.classifies or y.nunique() == 1 else r2_score(y, found, sample_weight=w)
        own, without = (float(error(y, each, sample_weight=w)) for each in (found, baseline[found.index]))
        balanced = math.nan
        if self.classifies:
            labels = sorted(y.unique())
            balanced = float(recall_score(y, found, labels=labels, average="macro", sample_weight=w))
        return Quality(len(y), own, without, float(r2), exact, out_of_reach=missed, balanced=balanced)


def quality(fitted: Fitted, *, exact: bool = False) -> Quality:
    """Return the accuracy on the table that was used for the fit.

    Each row is left out in turn if ``exact`` is true or they are not too many. Otherwise some are held out, with the
    bandwidth as it was found.
    """
    from sklearn.base import clone
    from sklearn.model_selection import train_test_split

    from regard.regression._training import counts_repetitions

    prepared, learned, estimator = fitted.prepared, fitted.learned, fitted.estimator
    if exact or learned.sum() <= _ROWS:
        counted = learned[learned].index.delete(estimator.far_rows_)  # no row predicts one far from all
        y, w, baseline = prepared.y[counted], prepared.weights[counted], fitted.baseline(learned)
        repeated = not fitted.nested and bool((w != 1).any()) and counts_repetitions(w.to_numpy())
        if not fitted.classifies:  # classes of one size would be all wrong by the most frequent of the others
            own = 1.0 if repeated else w
            baseline = baseline - own * (y - baseline) / (w.sum() - own)
        found = fitted.compare(fitted.decide(fitted.out_of_sample), y, w, baseline)
        return replace(found, nested=fitted.nested, far=len(estimator.far_rows_), repeated=repeated)
    _, held = train_test_split(learned.index[learned], test_size=_HELD, random_state=0)
    rest = learned & ~learned.index.isin(held)
    # A row may lie beyond reach only because its neighbours are held out too: no reason to refuse.
    empty = "nan" if estimator.empty == "raise" else estimator.empty
    same = clone(estimator).set_params(bandwidth=estimator.bandwidth_, empty=empty, verbose=0)
    if estimator.n_neighbors is not None:
        same.set_params(n_neighbors=min(estimator.n_neighbors_, int(rest.sum())), cv=None)
    without = _fitted(prepared, rest, same)
    found = without.decide(without.raw(prepared.X.loc[held]))
    return fitted.compare(found, prepared.y[held], prepared.weights[held], fitted.baseline(rest), exact=False)


def prediction_columns(
    prepared: Prepared,
    *,
    std: bool = False,
    band: bool = False,
    quantiles: Sequence[float] = (),
    slopes: bool = False,
    new: bool = False,
) -> list[str]:
    """Return the names of the columns that predictions add to a table, its own or a ``new`` one."""
    name = prepared.target.name
    shares = [f"{name}_probability_{each}" for each in prepared.target.categories]
    quantile = [f"{name}_q{each:g}" for each in quantiles]
    limits = [f"{name}_band_low", f"{name}_band_high"] if band else []
    slope = slope_columns(prepared) if slopes else []
    beyond = [f"{name}_extrapolated"] * new
    return [f"{name}_predicted", *shares, *[f"{name}_std"] * std, *limits, *quantile, *slope, *beyond]


def slope_columns(prepared: Prepared) -> list[str]:
    """Return the names of the slope columns, one for each feature that is no category."""
    return [f"{prepared.target.name}_slope_{prepared.columns[i].name}" for i in prepared.numeric]


@dataclass(frozen=True)
class Complexity:
    """The complexity of a fit."""

    dof: float  # effective degrees of freedom
    aicc: float  # NaN for a classification; infinite where there are as many as rows
    rows: int  # from which they were estimated
    exact: bool  # whether these are all rows


def complexity(fitted: Fitted) -> Complexity:
    """Return the effective degrees of freedom and the AICc, estimated from a random sample of many rows."""
    from copy import copy

    count, estimator = int(fitted.learned.sum()), copy(fitted.estimator)
    most = max(_LEAST, _PAIRS // 5 // count)
    exact = most >= count
    estimator.set_params(subsample=None if exact else most, verbose=0)
    aicc = math.nan if fitted.classifies else estimator.aicc()
    return Complexity(estimator.effective_dof(), aicc, min(most, count), exact)


def fit(prepared: Prepared, *, bandwidth: str | Sequence[float] = "loo", order: int = 0, **options: Any) -> Fitted:
    """Fit a table, with the ``options`` of :class:`~regard.regression.NadarayaWatsonRegressor`.

    The bandwidth is the name of a way to choose it, one number for all features, or one for each that was listed. For
    a classification, ``order`` has no effect.

    Examples
    --------
    >>> import pandas as pd
    >>> table = Table("a.csv", pd.DataFrame({"x": ["0", "1", "2"], "y": ["0", "1", "4"]}), "CSV")
    >>> fitted = fit(prepare(table, "y"), bandwidth=[0.5])
    >>> fitted.predict_own_rows().frame["y_predicted"].round(3).tolist()
    [1.007, 2.0, 0.998]
    """
    from regard.regression import NadarayaWatsonClassifier, NadarayaWatsonRegressor

    count = int(prepared.learned.sum())
    most = max(_LEAST, _PAIRS // count)
    drawn = most < count and bandwidth in ("loo", "learned", "aicc") and options.get("cv") is None
    subsample = most if drawn and not _transforms(prepared, **options) else None
    options |= {"bandwidth": kept_bandwidth(prepared, bandwidth), "subsample": subsample, "random_state": 0}
    metric: dict[Any, Any] = {name: ("angular", period) for name, period in prepared.angular.items()}
    metric |= dict.fromkeys(prepared.ordered, "ordered")
    metric |= {prepared.haversine: "haversine"} if prepared.haversine else {}
    options |= {"metric": metric or "euclidean", "missing": "marginal" if prepared.allow_missing else "error"}
    class_weight = options.pop("class_weight", None)
    if isinstance(class_weight, dict):  # some rows of the table may lack a class
        class_weight = dict.fromkeys(prepared.target.categories, 1.0) | class_weight
    if prepared.classifies:
        return _fitted(prepared, prepared.learned, NadarayaWatsonClassifier(class_weight=class_weight, **options))
    return _fitted(prepared, prepared.learned, NadarayaWatsonRegressor(order=order, **options))


def _transforms(prepared: Prepared, *, kernel: str = "gaussian", method: str = "auto", **_: Any) -> bool:
    """Return whether Fourier transforms can compute sums over all rows, so that a search needs no sample."""
    from regard.regression._sums.fourier import AXES, has_finufft

    numbers = all(column.kind != "category" for column in prepared.columns)
    able = (
        numbers
        and not prepared.allow_missing
        and len(prepared.columns) <= AXES
        and not (prepared.target.kind == "category" and len(prepared.target.categories) > 8)
    )
    return able and kernel == "gaussian" and method in ("auto", "nufft") and has_finufft()


def _fitted(prepared: Prepared, rows: Series, estimator: Any) -> Fitted:
    """Fit these rows."""
    import pandas as pd

    text: dict[str, Any] = {column.name: "category" for column in prepared.columns if column.kind == "category"}
    text |= {name: pd.CategoricalDtype(each, ordered=True) for name, each in prepared.ordered.items() if each}
    weight = None if prepared.weight is None else prepared.weight[rows].to_numpy()
    estimator.fit(prepared.X[rows].astype(text), prepared.y[rows].to_numpy(), sample_weight=weight)
    return Fitted(prepared, rows, estimator)


def kept_bandwidth(prepared: Prepared, bandwidth: str | Sequence[float]) -> Any:
    """Return the bandwidth for the estimator, without the numbers of columns that were left out."""
    if isinstance(bandwidth, str) or len(bandwidth) == 1:
        return bandwidth if isinstance(bandwidth, str) else bandwidth[0]
    if len(bandwidth) != len(prepared.candidates):
        more = f" and {len(prepared.candidates) - _LISTED:,} more" if len(prepared.candidates) > _LISTED else ""
        names = ", ".join(prepared.candidates[:_LISTED]) + more
        expected = f"be one number, or one for each of {len(prepared.candidates)} features ({names})"
        raise rejected("regress", "bandwidth", expected, f"{len(bandwidth)} numbers")
    return [width for name, width in zip(prepared.candidates, bandwidth) if name in prepared.X]
