"""ColumnEncoder of a pandas frame that are no numbers: dates become days, text and categories become codes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_DAY = np.timedelta64(1, "D")


@dataclass(frozen=True)
class ColumnEncoder:
    """Encode the columns of a frame as numbers, as the training data had them.

    Attributes
    ----------
    categories : dict of int to list
        By the place of the column, the values in the order of their codes.
    dates : tuple of int
        The places of columns of dates.
    """

    categories: dict[int, list[Any]] = field(default_factory=dict)
    dates: tuple[int, ...] = ()

    @classmethod
    def fit(cls, X: Any, before: ColumnEncoder | None = None) -> ColumnEncoder:
        """Return the categories of training data; those of data ``before`` keep their codes."""
        known = {} if before is None else {place: list(values) for place, values in before.categories.items()}
        for place, column in _categorical(X, tuple(known)):
            values = known.setdefault(place, [])
            there = column.dropna()
            fresh = there.cat.categories if hasattr(there, "cat") and not values else there.unique()
            values += [value for value in fresh if value not in values]
        return cls(known, tuple(_dates(X)))

    def transform(self, X: Any) -> Any:
        """Return X with numbers for dates (days since 1970) and categories; one that is not known gets a new code."""
        if not hasattr(X, "iloc"):
            return _days(X) if _is_time(X) else X
        coded = {place: self._codes(place, column) for place, column in _categorical(X, tuple(self.categories))}
        coded |= {i: _days(X.iloc[:, i].to_numpy("datetime64[us]", na_value=np.datetime64("NaT"))) for i in _dates(X)}
        if not coded:
            return X
        found = X.copy()
        for place, values in coded.items():
            found.isetitem(place, values)
        return found

    def _codes(self, place: int, column: Any) -> np.ndarray:
        codes = {value: float(code) for code, value in enumerate(self.categories[place])}
        values = [codes.get(value, float(len(codes))) for value in column.astype(object)]
        return np.where(column.isna().to_numpy(), np.nan, values)

    def decode(self, place: int, value: float) -> Any:
        """Return a value of a column as it was before it became a number."""
        if place in self.dates:
            return np.datetime64(round(value * 86400), "s")
        values = self.categories.get(place)
        return value if values is None else values[int(value)]


def _categorical(X: Any, known: tuple[int, ...]) -> Iterator[tuple[int, Any]]:
    """Yield the place and the column of each that holds text or categories, or is ``known`` to."""
    if not hasattr(X, "iloc"):
        return
    for place in range(X.shape[1]):
        column = X.iloc[:, place]
        is_text = column.dtype.kind not in "biufcMm" and any(isinstance(each, str) for each in column)
        if place in known or is_text or isinstance(column.dtype, _categorical_dtype()):
            yield place, column


def _categorical_dtype() -> type:
    import pandas as pd

    return pd.CategoricalDtype


def _dates(X: Any) -> list[int]:
    """Return the places of a frame's columns of dates."""
    return (
        [] if not hasattr(X, "iloc") else [place for place in range(X.shape[1]) if X.iloc[:, place].dtype.kind == "M"]
    )


def _is_time(X: Any) -> bool:
    return isinstance(X, np.ndarray) and X.dtype.kind == "M"


def _days(dates: np.ndarray) -> np.ndarray:
    """Return dates as days since 1970, NaN where there is none."""
    return (dates - np.datetime64(0, "D")) / _DAY
