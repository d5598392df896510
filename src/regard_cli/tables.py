"""Tables in files, read and written by pandas: CSV in its dialects, and Parquet; columns as numbers, dates or text."""

from __future__ import annotations

import csv
import gzip
import io
import re
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from regard._utils.errors import rejected, rejection
from regard._utils.files import display_name, read_bytes, write_out

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
#: How much of a text is read to find its delimiter.
_SAMPLE, _SAMPLE_ROWS = 1 << 16, 100
_PARQUET, _ZIP = b"PAR1", b"PK\x03\x04"
#: Most bytes, cells and columns of a table: as text, a cell takes some fifty bytes.
_LARGEST, _CELLS, _COLUMNS = 1 << 27, 20_000_000, 10_000
#: Rows of a Parquet file that are decoded at a time.
_ROWS = 4096
SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet")
#: Text that stands for a missing value, in lower case.
_MISSING = ("", "na", "n/a", "#n/a", "<na>", "nan", "null")
#: Larger numbers are refused: their squares, and sums of those, must be finite.
_LARGEST_NUMBER = 1e100
#: Text is numbers (or dates) if at most this share of it is something else.
_ODD = 0.1
#: What no cell of a column that can be used is.
_NESTED = (list, dict, set, tuple, bytes, np.ndarray)
Kind = Literal["number", "date", "category"]


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str
    kind: Kind
    values: Series  # numbers, dates or text; missing where a cell is, or is odd
    odd: tuple[str, ...] = ()  # texts among the numbers or dates, each once

    @cached_property
    def categories(self) -> list[str]:
        """The different texts of a category, sorted."""
        return sorted(self.values.dropna().unique()) if self.kind == "category" else []


@dataclass(frozen=True)
class Table:
    """A table and where it came from."""

    name: str  # the file, as messages call it
    frame: DataFrame  # from CSV, every cell is its text, to be written again unchanged; from Parquet, with its types
    form: str  # "CSV" with what separates its columns, or "Parquet"
    decimal: str = "."  # the decimal mark: "," in some files with semicolons or tabs
    nameless: tuple[str, ...] = ()  # columns without a name that were left out, as they are empty or count the rows

    def column(self, name: str, kind: Kind | None = None) -> Column | str:
        """Return a column, of the given kind or the one that its cells suggest; or why it cannot be used.

        Raises
        ------
        ValueError
            If there is no such column, or more than half of it is not of the given kind.
        """
        from pandas.api import types

        if name not in self.frame.columns:
            got = "no such one"
            raise rejected("regress", self.name, f"have the column {name!r}, as the rows learned from have", got)
        raw = self.frame[name].reset_index(drop=True)
        is_bool, is_span = types.is_bool_dtype(raw), types.is_timedelta64_dtype(raw)
        if kind in (None, "date") and (is_span or types.is_datetime64_any_dtype(raw)):
            return Column(name, "date", raw) if kind or raw.notna().any() else "empty"
        if kind in (None, "number") and types.is_any_real_numeric_dtype(raw) and not is_bool:
            return Column(name, "number", raw)
        text = raw.astype(str).str.strip()
        text = text.mask(raw.isna() | text.str.lower().isin(_MISSING))
        there = text.notna()
        if kind is None and not there.any():
            return "empty"
        if kind is None and any(isinstance(each, _NESTED) for each in raw[there].head(100)):
            return "neither numbers nor text"
        is_text = kind == "category" or (kind is None and (is_bool or raw.dtype == "category"))
        ways: dict[Kind, Any] = {} if is_text else {"number": self._numbers, "date": self._dates}
        for parsed, parse in ways.items():
            if kind in (None, parsed):
                odd = text[there & (values := parse(text)).isna()]
                if kind and len(odd) > 0.5 * there.sum():
                    raise rejected("regress", f"column {name!r} of {self.name}", f"hold {kind}s", repr(odd.iloc[0]))
                if kind or len(odd) <= _ODD * there.sum():
                    return Column(name, parsed, values, tuple(odd.unique()))
        return Column(name, "category", text)

    def _numbers(self, text: Series) -> Series:
        import pandas as pd

        text = text if self.decimal == "." else text.str.replace(self.decimal, ".", regex=False)
        return pd.to_numeric(text, errors="coerce")

    def _dates(self, text: Series) -> Series:
        """Return dates as 2024-12-31, with a time or without: in UTC if one has a zone."""
        import pandas as pd

        text = text.where(text.str.match(r"\d{4}-\d\d-\d\d([T ].*)?$", na=False))
        dates = pd.to_datetime(text, errors="coerce", format="ISO8601", utc=True)
        zoned = text.str.contains(r":\d\d.*(?:Z|[+-]\d\d(?::?\d\d)?)$", na=False).any()
        return dates if zoned else dates.dt.tz_localize(None)

    def numbers(self, column: Column) -> Series:
        """Return numbers, and dates as days since 1970, float64 with NaN where missing; text as it is.

        Raises
        ------
        ValueError
            If a number is infinite, or above 1e100 in size.
        """
        import pandas as pd

        values = column.values
        if column.kind == "category":
            return values
        if column.kind == "number":
            found = values.to_numpy(np.float64, na_value=np.nan)
        elif values.dtype.kind == "m":
            found = values.to_numpy("timedelta64[us]") / np.timedelta64(1, "D")
        else:
            naive = values if values.dt.tz is None else values.dt.tz_convert(None)
            found = (naive.to_numpy("datetime64[us]") - np.datetime64(0, "us")) / np.timedelta64(1, "D")
        if len(large := np.flatnonzero(np.abs(found) > _LARGEST_NUMBER)):
            value, subject = found[large[0]], f"column {column.name!r} of {self.name}"
            expected = f"be finite{'' if np.isinf(value) else f' and not above {_LARGEST_NUMBER:g} in size'}"
            raise rejected("regress", subject, expected, f"{value:g} in row {large[0] + 1}")
        return pd.Series(found)

    def typed(self) -> DataFrame:
        """Return the table with text as numbers or dates in columns where all of it is."""
        found = self.frame.reset_index(drop=True)
        for name in found:
            column = self.column(name)
            if isinstance(column, Column) and not column.odd and column.kind != "category":
                found[name] = column.values
        return found


def read(path: str | Path, *, least: int = 1) -> Table:
    r"""Read a table with named columns.

    CSV is text in UTF-8 or, with a byte order mark, UTF-16; its columns are separated by commas, semicolons, tabs or
    bars, whichever cuts the first rows into the same number of cells. Both formats are known by their contents. A table
    may have 128 MiB, unpacked, 10,000 columns and 20 million cells.

    Parameters
    ----------
    path : str or Path
        A CSV file, plain or compressed by gzip, or a Parquet file; ``"-"`` reads CSV from standard input.
    least : int, default 1
        How many columns there should be.

    Raises
    ------
    ValueError
        If there is no such file, or it is no table, damaged, or larger.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "a.csv"
    ...     _ = path.write_text("x;y\n0,5;1\n1,5;2\n")
    ...     table = read(path)
    >>> table.form, table.decimal, table.frame["x"].tolist(), table.column("x").values.tolist()
    ('CSV with semicolons', ',', ['0,5', '1,5'], [0.5, 1.5])
    """
    name = display_name(path)
    data = read_bytes(path, "read", _LARGEST)
    if not data:
        raise rejected("read", name, "have a row of names and rows of values", "an empty file")
    is_parquet = data.startswith(_PARQUET) or Path(name).suffix == ".parquet"
    table = _from_parquet(data, name) if is_parquet else _from_text(_text(data, name), name)
    names = list(table.frame.columns)
    for twice in sorted(each for each, times in Counter(names).items() if times > 1):
        raise rejected("read", name, "have a name for each column", f"{twice!r} twice")
    if len(names) < least:
        between = "" if is_parquet else f", separated by {', '.join(_DELIMITERS.values())}"
        got = f"{len(names)}: {', '.join(names)[:60]!r}"
        raise rejected("read", name, f"have {least} columns or more{between}", got)
    if len(table.frame) == 0:
        raise rejected("read", name, "have rows below the names of its columns", "none")
    return table


def _text(data: bytes, name: str) -> str:
    """Return the text of a file without its byte order mark, every line ended by a line feed."""
    expected = "be a table in CSV or Parquet"
    if data.startswith(_ZIP):
        raise rejected("read", name, expected, "a zip file or an Excel workbook (save it as CSV)")
    wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    try:
        text = data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        if not wide and b"\0" in data:
            raise rejected("read", name, expected, "a binary file") from None
        line = len((data[: error.start] + b".").splitlines())
        byte = f"byte 0x{data[error.start]:02x} in line {line} (save it in UTF-8)"
        raise rejected("read", name, "be text in UTF-8", byte) from None
    if "\0" in text:
        raise rejected("read", name, expected, "a binary file")
    if not text.strip():
        raise rejected("read", name, "have a row of names and rows of values", "an empty file")
    return text.replace("\r\n", "\n").replace("\r", "\n").strip("\n")  # Windows, and Macintosh of old


def _rows(text: str, delimiter: str) -> Any:
    return csv.reader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True)


def _from_text(text: str, name: str) -> Table:
    import pandas as pd

    delimiter = _delimiter(text)
    try:
        names = next((row for row in _rows(text, delimiter) if any(row)), None)
        got = "nothing but empty cells"
    except csv.Error:
        names = None
        got = f"one of more than {csv.field_size_limit():,} characters, or a quotation mark that is never closed"
    if names is None:
        raise rejected("read", name, "have names of columns in its first row", got)
    _check_size(name, text.count("\n") + 1, len(names))
    if all(re.fullmatch(r"\s*[-+]?[\d.,]+([eE][-+]?\d+)?\s*", each) for each in names):
        raise rejected("read", name, "have the names of its columns in its first row", "numbers alone")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = pd.read_csv(
                io.BytesIO(text.encode()), sep=delimiter, header=0, names=range(len(names)), index_col=False,
                dtype=str, keep_default_na=False, na_filter=False, skipinitialspace=True,
                skip_blank_lines=len(names) > 1,  # in a single column they are empty cells
            )  # fmt: skip
    except (pd.errors.ParserError, pd.errors.ParserWarning):
        got = _longer(text, delimiter, len(names))
        raise rejected("read", name, f"have {len(names)} cells in every row as in its first", got) from None
    frame = frame.fillna("")  # the cells that a short row lacks
    frame.columns = pd.Index([each.strip() or f"column {i}" for i, each in enumerate(names, start=1)], dtype=object)
    counts = [list(map(str, range(k, k + len(frame)))) for k in (0, 1)]
    idle = [
        i for i, each in enumerate(names)
        if not each.strip() and (not frame.iloc[:, i].any() or frame.iloc[:, i].tolist() in counts)
    ]  # fmt: skip
    kept = frame.iloc[:, [i for i in range(len(names)) if i not in idle]]
    return Table(name, kept, f"CSV with {_DELIMITERS[delimiter]}", _decimal(text[:_SAMPLE], delimiter),
                 tuple(frame.columns[idle]))  # fmt: skip


def _from_parquet(data: bytes, name: str) -> Table:
    import pandas as pd
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(pyarrow.BufferReader(data))
        _check_size(name, file.metadata.num_rows, file.metadata.num_columns)
        batches, size = [], 0
        for batch in file.iter_batches(_ROWS):  # a few bytes can stand for gigabytes
            size += batch.nbytes
            if size > _LARGEST:
                raise rejected("read", name, f"have at most {_LARGEST:,} bytes (unpacked, if it is compressed)", "more")
            batches.append(batch)
        table = pyarrow.Table.from_batches(batches, file.schema_arrow)
        # What else pandas writes there could contradict the table; an index without a name is no column.
        kept = [i for i, each in enumerate(table.column_names) if not re.fullmatch(r"__index_level_\d+__", each)]
        table = table.select(kept)
        unique = len(set(table.column_names)) == len(kept)  # names that repeat are refused later
        frame = table.to_pandas(ignore_metadata=True) if unique else pd.DataFrame(columns=table.column_names)
    except (pyarrow.ArrowException, OSError, OverflowError, ValueError) as error:  # of text or JSON in its metadata
        if rejection(error) is not None:
            raise
        raise rejected("read", name, "be a whole Parquet file", "one that is cut short or something else") from None
    return Table(name, frame, "Parquet")


def _check_size(name: str, rows: int, columns: int) -> None:
    """Raise where a table is too large, before memory is taken for it."""
    if columns > _COLUMNS:
        raise rejected("read", name, f"have at most {_COLUMNS:,} columns", f"{columns:,}")
    if rows * columns > _CELLS:
        raise rejected("read", name, f"have at most {_CELLS:,} cells", f"{columns:,} columns and about {rows:,} rows")


def _delimiter(text: str) -> str:
    """Return what cuts the first rows into the same number of cells, most of them numbers; a comma if nothing cuts."""
    sample = text[:_SAMPLE]
    if len(text) > _SAMPLE:
        sample = sample[: sample.rfind("\n") + 1] or sample

    def score(delimiter: str) -> tuple[float, float, int]:
        try:
            rows = list(islice((row for row in _rows(sample, delimiter) if any(row)), _SAMPLE_ROWS))
        except csv.Error:  # a cell of absurd length
            return 0.0, 0.0, 1
        if not rows or len(rows[0]) < 2:
            return 0.0, 0.0, 1
        numbers = [re.fullmatch(r"\s*-?\d+([.,]\d+)?\s*", cell) is not None for row in rows for cell in row]
        return float(np.mean([len(row) == len(rows[0]) for row in rows])), float(np.mean(numbers)), len(rows[0])

    return max(_DELIMITERS, key=score)


def _longer(text: str, delimiter: str, width: int) -> str:
    """Return what is wrong with a text that has a row of more than ``width`` cells, or a quotation mark too few."""
    reader = _rows(text, delimiter)
    try:
        for row in reader:
            if len(row) > width:
                return f"{len(row)} in line {reader.line_num}"
    except csv.Error:
        pass
    return "a quotation mark that is never closed"


def _decimal(sample: str, delimiter: str) -> str:
    if delimiter == ",":
        return "."
    number = r"[{0}\n] *-?\d+{1}\d+ *(?=[{0}\n])"
    comma, dot = (len(re.findall(number.format(re.escape(delimiter), mark), sample)) for mark in (",", r"\."))
    return "," if comma > dot else "."


def write(frame: DataFrame, path: str | Path) -> None:
    """Write a table in the format that its path ends in: .csv, .tsv, these with .gz, or .parquet."""
    ending = Path(path).name.lower()
    if ending.endswith(".parquet"):
        buffer = io.BytesIO()
        frame.to_parquet(buffer, engine="pyarrow", index=False)
        data = buffer.getvalue()
    else:
        text = frame.to_csv(index=False, sep="\t" if ".tsv" in ending[-7:] else ",", lineterminator="\n")
        data = gzip.compress(text.encode(), mtime=0) if ending.endswith(".gz") else text.encode()
    write_out(Path(path), data)
