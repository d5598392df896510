"""Columns of a table as numbers: which are numbers, dates or categories, and what is missing in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from regard._utils.errors import rejected
from regard_cli.tables.reading import Table

if TYPE_CHECKING:
    from pandas import DataFrame, Series

#: Cells of a text that say that there is nothing, in small letters and without spaces around.
_MISSING = ("", "na", "n/a", "#n/a", "<na>", "nan", "null")
#: Larger numbers are refused: their squares, and sums of those, should still be numbers.
_LARGEST = 1e100
#: A column of text is numbers (or dates) if no more than this share of what stands in it is something else.
_ODD = 0.1
#: Microseconds of a day.
_DAY = 86_400_000_000
Kind = Literal["number", "date", "category"]


@dataclass(frozen=True)
class Column:
    """How the cells of a column become numbers.

    Attributes
    ----------
    name : str
    kind : str
        ``"number"``; ``"date"``, in days since ``origin``; ``"category"``, a code for each different text.
    categories : tuple of str
        In the order of their codes; what is none of them gets the next code.
    origin : float
        The earliest date, in days since 1970.
    odd : tuple of str
        Some of the texts among the numbers or dates, which count as missing.
    """

    name: str
    kind: Kind
    categories: tuple[str, ...] = ()
    origin: float = 0.0
    odd: tuple[str, ...] = ()


@dataclass(frozen=True)
class Coded:
    """A column's cells as numbers.

    Attributes
    ----------
    values : ndarray (N,), float64
        NaN where the cell is missing or odd.
    odd : tuple of str
        The texts that should have been numbers or dates, each once.
    new : tuple of str
        The categories that were not known, each once.
    """

    values: np.ndarray
    odd: tuple[str, ...] = ()
    new: tuple[str, ...] = ()


def recognise(table: Table, name: str) -> Column | str:
    """Return what a column is, or why it cannot be used."""
    import pandas as pd
    from pandas.api import types

    series = table.frame[name]
    if types.is_numeric_dtype(series) and not types.is_bool_dtype(series) and not types.is_complex_dtype(series):
        return Column(name, "number")
    if types.is_datetime64_any_dtype(series):
        return Column(name, "date", origin=float(np.nanmin(_days(series)))) if series.notna().any() else "empty"
    if types.is_timedelta64_dtype(series):
        return Column(name, "date")
    text, missing = _cells(series)
    if missing.all():
        return "empty"
    written = text[~missing]
    if not types.is_bool_dtype(series) and not isinstance(series.dtype, pd.CategoricalDtype):
        if any(isinstance(each, (list, dict, set, tuple, bytes, np.ndarray)) for each in series[~missing].head(100)):
            return "neither numbers nor text"
        numbers = _numbers(written, table.decimal)
        if np.isnan(numbers).mean() <= _ODD:
            return Column(name, "number", odd=_some(written[np.isnan(numbers)]))
        days = _dates(written)
        if np.isnan(days).mean() <= _ODD:
            return Column(name, "date", origin=float(np.nanmin(days)), odd=_some(written[np.isnan(days)]))
    return Column(name, "category", categories=tuple(sorted(set(written))))


def encode(column: Column, table: Table) -> Coded:
    """Return the cells of a table's column as numbers.

    Raises
    ------
    ValueError
        If the table has no such column, if most of it is not what it should be, or if a number is infinite or above
        1e100 in size.
    """
    coded = _encoded(column, table)
    large = np.flatnonzero(np.abs(coded.values) > _LARGEST)
    if len(large):
        value = coded.values[large[0]]
        expected = f"be finite{'' if np.isinf(value) else f' and not above {_LARGEST:g} in size'}"
        subject = f"column {column.name!r} of {table.name}"
        raise rejected("regress", subject, expected, f"{value:g} in row {large[0] + 1}")
    return coded


def _encoded(column: Column, table: Table) -> Coded:
    from pandas.api import types

    name = column.name
    if name not in table.frame.columns:
        raise rejected("regress", table.name, f"have the column {name!r}, as the rows learned from have", "no such one")
    series = table.frame[name]
    if column.kind == "category":
        text, missing = _cells(series)
        codes = {each: code for code, each in enumerate(column.categories)}
        values = np.array([np.nan if gone else codes.get(each, len(codes)) for each, gone in zip(text, missing)], float)
        return Coded(values, new=_some(text[values == len(codes)]))
    if types.is_timedelta64_dtype(series):
        return Coded(series.dt.total_seconds().to_numpy(float, na_value=np.nan) / 86400)
    is_date = types.is_datetime64_any_dtype(series)
    is_number = types.is_numeric_dtype(series) and not types.is_bool_dtype(series)
    odd: tuple[str, ...] = ()
    if is_date and column.kind == "date":
        values = _days(series) - column.origin
    elif is_number and column.kind == "number":
        values = series.to_numpy(float, na_value=np.nan)
    else:
        text, missing = _cells(series)
        values = np.full(len(text), np.nan)
        written = text[~missing]
        values[~missing] = (
            _numbers(written, table.decimal) if column.kind == "number" else _dates(written) - column.origin
        )
        strange = text[~missing & np.isnan(values)]
        odd = _some(strange)
        if len(strange) > 0.5 * len(written):
            raise rejected("regress", f"column {name!r} of {table.name}", f"hold {column.kind}s", repr(odd[0]))
    return Coded(values, odd=odd)


def typed(table: Table) -> DataFrame:
    """Return a table with numbers and dates as such, where all of a column's cells are; the rest as it is."""
    import pandas as pd
    from pandas.api import types

    columns = {}
    for name in table.frame.columns:
        series = table.frame[name]
        column = recognise(table, name)
        if types.is_numeric_dtype(series) or types.is_datetime64_any_dtype(series) or isinstance(column, str):
            columns[name] = series
        elif column.kind == "number" and not column.odd:
            values = _encoded(column, table).values
            whole = not np.isnan(values).any() and (values == np.floor(values)).all() and np.abs(values).max() < 2**53
            columns[name] = pd.Series(values.astype(np.int64) if whole else values)
        elif column.kind == "date" and not column.odd:
            text, missing = _cells(series)
            texts = pd.Series(text).mask(missing)
            dates = pd.to_datetime(texts, format="ISO8601", utc=True)
            zoned = texts.str.contains(r":\d\d.*(?:Z|[+-]\d\d(?::?\d\d)?)$", na=False).any()
            columns[name] = dates if zoned else dates.dt.tz_localize(None)
        else:
            columns[name] = series
    return pd.DataFrame(columns)


def _cells(series: Series) -> tuple[np.ndarray, np.ndarray]:
    """Return the cells as text without spaces around, and which of them are missing."""
    text = series.astype(str).str.strip()
    missing = series.isna() | text.str.lower().isin(_MISSING)
    return text.to_numpy(object), missing.to_numpy(bool)


def _numbers(cells: np.ndarray, decimal: str) -> np.ndarray:
    """Return texts as numbers, NaN where they are none."""
    import pandas as pd

    text = pd.Series(cells, dtype=object)
    if decimal != ".":
        text = text.str.replace(decimal, ".", regex=False)
    return pd.to_numeric(text, errors="coerce").to_numpy(np.float64, na_value=np.nan)


def _dates(cells: np.ndarray) -> np.ndarray:
    """Return texts as days since 1970, NaN where they are no dates as 2024-12-31, with a time or without."""
    import pandas as pd

    text = pd.Series(cells, dtype=object)
    text = text.where(text.str.match(r"\d{4}-\d\d-\d\d([T ].*)?$"))
    return _days(pd.to_datetime(text, errors="coerce", format="ISO8601", utc=True))


def _days(series: Series) -> np.ndarray:
    """Return dates as days since 1970, by integers: pandas' own differences end with the year 2262."""
    naive = series if series.dt.tz is None else series.dt.tz_convert("UTC").dt.tz_localize(None)
    dates = naive.to_numpy("datetime64[us]")
    return np.where(np.isnat(dates), np.nan, dates.astype(np.int64) / _DAY)


def _some(cells: np.ndarray) -> tuple[str, ...]:
    """Return each text once, in the order of the rows."""
    return tuple(dict.fromkeys(cells.tolist()))
