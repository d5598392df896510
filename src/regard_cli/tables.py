"""Read and write tables with pandas: any dialect of CSV, and Parquet; columns of numbers, dates or text."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import re
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from regard._utils.errors import rejected, rejection
from regard._utils.files import display_name, read_bytes, write_out
from regard_cli import cells
from regard_cli.cells import DAY_FIRST, MONTH_FIRST, Marks, Reading

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
#: Spaces cut cells only where nothing else does.
_SPACE = " "
#: How much of a text is read to find its delimiter, and lines above the names that may be a title.
_SAMPLE, _SAMPLE_ROWS, _TITLE = 1 << 16, 100, 20
_PARQUET, _ZIP = b"PAR1", b"PK\x03\x04"
#: First bytes of files that are no tables, or are packed in a way that is not read.
_OTHERS = {
    b"\xd0\xcf\x11\xe0": "an old Excel workbook (save it as CSV)",
    b"\x28\xb5\x2f\xfd": "a Zstandard file (unpack it)",
    b"7z\xbc\xaf": "a 7z file (unpack it)",
}
#: First bytes of files packed by other programs than gzip and zip, and what opens them.
_PACKED: dict[bytes, tuple[str, Any]] = {b"BZh": ("bzip2", bz2.open), b"\xfd7zXZ": ("xz", lzma.open)}
#: Most bytes, cells and columns of a table: as text, a cell takes some fifty bytes.
_LARGEST, _CELLS, _COLUMNS = 1 << 27, 20_000_000, 10_000
#: Rows of a Parquet file that are decoded at a time.
_ROWS = 4096
SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet")
#: Text that stands for a missing value, in lower case: in every column, and where the others are numbers or dates.
_MISSING = ("", "na", "n/a", "#n/a", "#na", "#n/a n/a", "<na>", "nan", "-nan", "null", "?", "missing", "-1.#ind",
            "1.#ind", "-1.#qnan", "1.#qnan", "#null!", "#div/0!", "#value!", "#ref!", "#name?", "#num!")  # fmt: skip
_SIGNS = ("-", "--", "–", "—", ".", "..", "...")
_BLANK = (*_SIGNS, "none", "nil", "not available")
#: Larger numbers are refused: their squares, and sums of those, must be finite.
_LARGEST_NUMBER = 1e100
#: Text is numbers (or dates) if at most this share of it is something else; up to the second share it is refused.
_ODD, _MIXED = 0.1, 0.5
#: Rows of other columns that are looked at for the marks and the order of dates that a file uses.
_WITNESSES = 10_000
#: What no cell of a column that can be used is.
_NESTED = (list, dict, set, tuple, bytes, np.ndarray)
#: What decides that a dot is a decimal mark where no column does.
COMMAS = "CSV with commas"
Kind = Literal["number", "date", "category"]


@dataclass(frozen=True)
class Options:
    """How ambiguous cells are read."""

    decimal: str | None = None
    thousands: str | None = None
    day_first: bool | None = None
    missing: tuple[str, ...] = ()  # further texts that stand for a missing value
    encoding: str | None = None  # of text; UTF-8 or what a byte order mark says by default


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str
    kind: Kind
    values: Series  # numbers, dates or text; missing where a cell is, or is odd
    odd: tuple[str, ...] = ()  # texts among the numbers or dates, each once
    blank: tuple[str, ...] = ()  # other texts than an empty cell and NA that stand for a missing value
    way: Any = None  # Marks of numbers in text, or the order of dates
    as_in: str = ""  # what decided the way, if not this column: another one, or COMMAS
    unit: str = ""
    is_plain: bool = True  # whether every reader of CSV reads the cells in this way

    @cached_property
    def categories(self) -> list[str]:
        """The distinct texts of a category, sorted."""
        return sorted(self.values.dropna().unique()) if self.kind == "category" else []


@dataclass(frozen=True)
class _Source:
    """The text of a table, to find the line of a row."""

    text: str
    delimiter: str
    above: int  # lines that end with that of the names

    def line(self, row: int, single: bool) -> int | None:
        """Return the line of a row, or None behind a cell that only pandas reads."""
        body = self.text.split("\n", self.above)[-1]
        reader = _rows(body, self.delimiter)
        begin = 1
        try:
            for cells_of_row in reader:
                if cells_of_row or single:
                    if row == 0:
                        break
                    row -= 1
                begin = reader.line_num + 1
        except csv.Error:  # a cell of more than 131,072 characters
            return None
        return self.above + begin


@dataclass(frozen=True)
class Table:
    """A table and where it came from."""

    name: str  # the file, as messages call it
    frame: DataFrame  # from CSV, every cell is its text, to be written again unchanged; from Parquet, with its types
    form: str  # "CSV" with what separates its columns, or "Parquet"
    nameless: tuple[str, ...] = ()  # columns without a name that were left out, as they are empty or count the rows
    skipped: str = ""  # lines above the names that were not read
    options: Options = Options()
    _source: _Source | None = field(default=None, repr=False)

    def where(self, row: int) -> str:
        """Return where a row, counted from 0, stands in the file.

        Examples
        --------
        >>> import pandas as pd
        >>> Table("a.parquet", pd.DataFrame({"x": [1]}), "Parquet").where(0)
        'row 1'
        """
        single = self.frame.shape[1] + len(self.nameless) == 1
        line = None if self._source is None else self._source.line(row, single)
        return f"row {row + 1}" if line is None else f"line {line}"

    def column(self, name: str, kind: Kind | None = None, like: Column | None = None) -> Column | str:
        """Return a column of the given kind, or the kind that its cells suggest; or the reason why it cannot be used.

        Where cells can be read in two ways, the options decide, then the column that it should be ``like``, then the
        other columns of the file.

        Raises
        ------
        ValueError
            If there is no such column, if more than half of it is not of the given kind, or if nothing decides between
            two ways to read it.
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
            return Column(name, "number", self._without_missing_numbers(raw))
        text, lower = _texts(raw)
        gone = raw.isna() | lower.isin([*_MISSING, *(each.lower() for each in self.options.missing)])
        also = gone | lower.isin(_BLANK)
        if kind is None and gone.all():
            return "empty"
        if kind is None and any(isinstance(each, _NESTED) for each in raw[~gone].head(100)):
            return "neither numbers nor text"
        is_text = kind == "category" or (kind is None and (is_bool or raw.dtype == "category"))
        there = text.mask(also)
        mixed = ""
        ways: dict[Kind, Any] = {} if is_text else {"number": cells.read_numbers, "date": cells.read_dates}
        for parsed, parse in ways.items():
            if kind not in (None, parsed) or not there.notna().any():
                continue
            readings = parse(there)
            odd = there[there.notna() & readings[0].values.isna()]
            share = len(odd) / there.notna().sum()
            if kind and share > _MIXED:
                got = f"{odd.iloc[0]!r} in {self.where(odd.index[0])}"
                raise rejected("regress", f"column {name!r} of {self.name}", f"hold {kind}s", got)
            if kind or share <= _ODD:
                reading, as_in = self._decide(name, readings, like)
                is_plain = reading.way in (Marks(), "") and not reading.unit and not _has_form(parsed, there)
                values = self._without_missing_numbers(reading.values) if parsed == "number" else reading.values
                # --missing -999 is of -999.0 too.
                blank = _each_once(text[also | (values.isna() & reading.values.notna())])
                return Column(name, parsed, values, _each_once(odd), blank, reading.way, as_in, reading.unit,
                              is_plain)  # fmt: skip
            if share <= _MIXED:
                mixed = mixed or f"{parsed}s in {1 - share:.0%} of its cells, but {_mixture(self, odd)}"
        if mixed and kind is None:
            return mixed
        if not lower.isin(("+",)).any():
            gone |= lower.isin(_SIGNS)
        if kind is None and gone.all():
            return "empty"
        return Column(name, "category", text.mask(gone), (), _each_once(text[gone]))

    def _without_missing_numbers(self, raw: Series) -> Series:
        """Return numbers, with those that --missing names as missing."""
        import pandas as pd

        marks = pd.to_numeric(pd.Series(self.options.missing, dtype=object), errors="coerce").dropna()
        return raw.mask(raw.isin(marks.tolist())) if len(marks) else raw

    def _decide(self, name: str, readings: list[Reading], like: Column | None) -> tuple[Reading, str]:
        """Return the intended interpretation of a column, and the other column that decided it, if any."""
        if len(readings) == 1:
            return readings[0], ""
        left = [each for each in readings if self._allowed(each.way)] or readings
        if len(left) > 1 and like is not None:
            left = [each for each in left if each.way == like.way] or left
        as_in, sides = "", set[str]()
        if len(left) > 1:
            is_number = isinstance(left[0].way, Marks)
            seen = self._decided_elsewhere["number" if is_number else "date"]
            sides = set(seen.values())
            if len(sides) == 1:
                (side,) = sides
                agreed = [each for each in left if (each.way.decimal if is_number else each.way) == side]
                left, as_in = agreed or left, next(iter(seen)) if agreed else ""
        if len(left) > 1 and left[0].way == Marks() and not as_in and self.form == COMMAS and not sides:
            return left[0], COMMAS  # where numbers have decimal commas, other marks separate columns
        if len(left) > 1:
            raise self._open(name, left)
        return left[0], as_in

    def _allowed(self, way: Any) -> bool:
        """Return whether the options allow an interpretation."""
        options = self.options
        if not isinstance(way, Marks):
            return options.day_first is None or way == (DAY_FIRST if options.day_first else MONTH_FIRST)
        if options.decimal is not None and way.decimal != options.decimal:
            return False
        return options.thousands is None or (way.decimal != options.thousands
                                             and way.thousands in ("", options.thousands))  # fmt: skip

    @cached_property
    def _decided_elsewhere(self) -> dict[str, dict[str, str]]:
        """The decimal mark of each column whose cells decide it, and the order of such dates."""
        found: dict[str, dict[str, str]] = {"number": {}, "date": {}}
        for name in self.frame.columns:
            raw = self.frame[name].head(_WITNESSES).reset_index(drop=True)
            if raw.dtype.kind in "biufcMm":
                continue
            text, lower = _texts(raw)
            text = text.mask(raw.isna() | lower.isin(_MISSING + _BLANK))
            for kind, parse in (("number", cells.read_numbers), ("date", cells.read_dates)):
                (reading, *rest) = parse(text)
                if reading.decided and not rest and reading.values.notna().sum() >= (1 - _ODD) * text.notna().sum():
                    found[kind][str(name)] = reading.way.decimal if kind == "number" else reading.way
        return found

    def _open(self, name: str, readings: list[Reading]) -> Exception:
        """Return the error for an ambiguous column."""
        first, second = readings[0], readings[1]
        text, _ = _texts(self.frame[name].reset_index(drop=True))
        row = int(np.flatnonzero(text == first.example)[0])
        is_number = isinstance(first.way, Marks)
        said = [_shown(each.values[row]) if is_number else _day(each.values[row]) for each in (first, second)]
        if is_number:
            mark = next(each for each in first.example if each in ".,")
            by = [f"--{'decimal' if each.way.decimal == mark else 'thousands'} {mark!r}" for each in (first, second)]
        else:
            by = ["--day-first", "--month-first"]
        kind = "numbers" if is_number else "dates"
        got = f"{first.example!r} in {self.where(row)}, which is {said[0]} with {by[0]} and {said[1]} with {by[1]}"
        return rejected("regress", f"column {name!r} of {self.name}", f"have {kind} that can be read in one way", got)

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
            raise rejected("regress", subject, expected, f"{value:g} in {self.where(int(large[0]))}")
        return pd.Series(found)

    def typed(self) -> DataFrame:
        """Return the table with numbers or dates in the text columns that hold nothing else."""
        found = self.frame.reset_index(drop=True)
        for column in self._readable():
            if not column.odd and column.kind != "category":
                found[column.name] = column.values
        return found

    def plain(self) -> DataFrame:
        """Return the table as unambiguous text: only decimal dots, and dates as 2024-12-31.

        Cells that are in this form already, and those that are no numbers or dates, keep their text.
        """
        found = self.frame.reset_index(drop=True)
        for column in self._readable():
            if not column.is_plain and column.kind != "category":
                text = _written(column.values)
                found[column.name] = found[column.name].astype(object).mask(column.values.notna(), text)
        return found

    def _readable(self) -> list[Column]:
        """Return the columns that can be used."""
        columns = []
        for name in self.frame:
            try:
                column = self.column(name)
            except ValueError:  # it can be read in two ways, and is not used
                continue
            if isinstance(column, Column):
                columns.append(column)
        return columns


def _texts(raw: Series) -> tuple[Series, Series]:
    """Return the cells of a column as text, and in lower case."""
    import pandas as pd

    codes, found = raw.astype(str).fillna("").factorize()  # columns often repeat their cells
    text = pd.Series(found, dtype=object).astype(str).str.strip()
    return text.take(codes).set_axis(raw.index), text.str.lower().take(codes).set_axis(raw.index)


def _each_once(text: Series) -> tuple[str, ...]:
    """Return the distinct texts, without those that always mean a missing value."""
    return tuple(each for each in text.dropna().unique() if each.lower() not in ("", "na", "nan", "<na>", "nat"))


def _mixture(table: Table, odd: Series) -> str:
    """Describe the other cells of a column of numbers or dates, and the options that decide."""
    cell = str(odd.iloc[0])
    short = cell if len(cell) <= 30 else cell[:29] + "…"
    return (
        f"{short!r} in {table.where(odd.index[0])} (--missing {short!r} counts it as missing, --categorical reads all "
        f"as text, --ignore leaves the column out)"
    )


def _has_form(kind: Kind, text: Series) -> bool:
    """Return whether dates have another format than 2024-12-31."""
    return kind == "date" and not text.dropna().str.match(r"\d{4}-\d\d-\d\d").all()


def _shown(value: float) -> str:
    return f"{value:,.0f}".replace(",", "") if float(value).is_integer() else f"{value:.15g}"


def _day(date: Any) -> str:
    return f"{date.day} {date:%B %Y}"


def _written(values: Series) -> Series:
    """Return numbers and dates as text."""
    if values.dtype.kind == "M" or hasattr(values, "dt"):
        whole = (values.dropna() == values.dropna().dt.normalize()).all()
        return values.dt.strftime("%Y-%m-%d" if whole else "%Y-%m-%dT%H:%M:%S.%f").astype(object)
    return values.map(lambda each: _shown(each) if float(each).is_integer() else repr(float(each)), na_action="ignore")


def read(path: str | Path, *, least: int = 1, options: Options | None = None) -> Table:
    r"""Read a table with named columns.

    CSV is text in UTF-8 or, with a byte order mark, UTF-16; its columns are separated by commas, semicolons, tabs or
    bars, whichever cuts the first rows into the same number of cells. Lines above the names are skipped if they begin
    with ``#``, are a title in a single cell, or say ``sep=;``. Both formats are known by their contents. A table may
    have 128 MiB, unpacked, 10,000 columns and 20 million cells.

    Parameters
    ----------
    path : str or Path
        A CSV file, plain, compressed by gzip or alone in a zip file; or a Parquet file. ``"-"`` reads CSV from standard
        input.
    least : int, default 1
        How many columns there should be.
    options : Options, optional
        How to read cells that can be read in two ways, what stands for missing values, and the encoding.

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
    >>> table.form, table.frame["x"].tolist(), table.column("x").values.tolist()
    ('CSV with semicolons', ['0,5', '1,5'], [0.5, 1.5])
    """
    name, options = display_name(path), options or Options()
    data = read_bytes(path, "read", _LARGEST)
    data = _unzipped(data, name) if data.startswith(_ZIP) else _unpacked(data, name)
    if not data:
        raise rejected("read", name, "have a row of names and rows of values", "an empty file")
    is_parquet = data.startswith(_PARQUET) or Path(name).suffix == ".parquet"
    table = _from_parquet(data, name) if is_parquet else _from_text(_text(data, name, options.encoding), name)
    table = replace(table, options=options)
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


def _unpacked(data: bytes, name: str) -> bytes:
    """Return what is in a file, if bzip2 or xz packed it."""
    for start, (kind, opened) in _PACKED.items():
        if not data.startswith(start):
            continue
        try:
            with opened(io.BytesIO(data)) as file:
                data = file.read(_LARGEST + 1)
        except (OSError, EOFError, lzma.LZMAError):
            raise rejected("read", name, f"be a whole {kind} file", "one that is cut short or damaged") from None
        if len(data) > _LARGEST:
            raise rejected("read", name, f"have at most {_LARGEST:,} bytes (unpacked, if it is compressed)", "more")
    return data


def _unzipped(data: bytes, name: str) -> bytes:
    """Return the only file in a zip file."""
    expected = "be a table in CSV or Parquet"
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            parts = [
                each for each in file.infolist() if not each.is_dir() and not each.filename.startswith("__MACOSX/")
            ]
            if any(each.filename == "[Content_Types].xml" for each in parts):
                raise rejected("read", name, expected, "an Excel workbook (save it as CSV)")
            if len(parts) != 1:
                names = ", ".join(each.filename for each in parts[:8]) + ", …" * (len(parts) > 8)
                raise rejected("read", name, "hold one file if it is a zip file", f"{len(parts)}: {names or 'none'}")
            if parts[0].flag_bits & 1:
                raise rejected("read", name, expected, "a zip file with a password (unpack it)")
            with file.open(parts[0]) as part:
                found = part.read(_LARGEST + 1)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError):
        raise rejected("read", name, "be a whole zip file", "one that is cut short or damaged") from None
    if len(found) > _LARGEST:
        raise rejected("read", name, f"have at most {_LARGEST:,} bytes (unpacked, if it is compressed)", "more")
    return found


def _text(data: bytes, name: str, encoding: str | None = None) -> str:
    """Return the text of a file without its byte order mark, every line ended by a line feed."""
    expected = "be a table in CSV or Parquet"
    if other := next((what for start, what in _OTHERS.items() if data.startswith(start)), None):
        raise rejected("read", name, expected, other)
    wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    try:
        text = data.decode(encoding or ("utf-16" if wide else "utf-8-sig"))
    except UnicodeError as error:
        if not wide and b"\0" in data:
            raise rejected("read", name, expected, "a binary file") from None
        start = getattr(error, "start", 0)
        line = len((data[:start] + b".").splitlines())
        byte = f"byte 0x{data[start]:02x} in line {line}"
        remedy = "" if encoding else " (save it in UTF-8, or name its encoding, such as --encoding latin-1)"
        raise rejected("read", name, f"be text in {encoding or 'UTF-8'}", byte + remedy) from None
    if "\0" in text:
        raise rejected("read", name, expected, "a binary file")
    if not text.strip():
        raise rejected("read", name, "have a row of names and rows of values", "an empty file")
    text = text.removeprefix("\ufeff")
    return text.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n")  # Windows, and Macintosh of old


def _rows(text: str, delimiter: str) -> Any:
    return csv.reader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True)


def _from_text(text: str, name: str) -> Table:
    import pandas as pd

    text, given, skipped = _without_comments(text, name)
    delimiter = given or _delimiter(text)
    text = _trimmed(text) if delimiter == _SPACE else text
    above, names, title = _names(text, delimiter, name)
    skipped += title
    _check_size(name, text.count("\n") + 1, len(names))
    numbers = [each for each in names if re.fullmatch(r"\s*[-+]?[\d.,]*\d[.,]?([eE][-+]?\d+)?\s*", each)]
    if len(numbers) == len(names):
        raise rejected("read", name, "have the names of its columns in its first row", "numbers alone")
    if len(numbers) >= _MIXED * len(names) and (marked := [each for each in numbers if not each.strip().isdigit()]):
        got = f"{len(numbers)} numbers, such as {marked[0].strip()!r}"
        raise rejected("read", name, "have the names of its columns in its first row", got)
    body = "".join(text.split("\n", above)[above:])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = pd.read_csv(
                io.BytesIO(body.encode()), sep=r"\s+" if delimiter == _SPACE else delimiter, header=None,
                names=range(len(names)), index_col=False,
                dtype=str, keep_default_na=False, na_filter=False, skipinitialspace=True,
                skip_blank_lines=len(names) > 1,  # in a single column they are empty cells
            )  # fmt: skip
    except pd.errors.EmptyDataError:
        frame = pd.DataFrame(columns=range(len(names)), dtype=str)
    except (pd.errors.ParserError, pd.errors.ParserWarning):
        got = _longer(text, delimiter, len(names))
        raise rejected("read", name, f"have {len(names)} cells in every row as in its first", got) from None
    frame = frame.fillna("")  # the cells that a short row lacks
    frame.columns = pd.Index([each.strip() or f"column {i}" for i, each in enumerate(names, start=1)], dtype=object)
    counts = [list(map(str, range(k, k + len(frame)))) for k in (0, 1)]
    idle = [
        i for i, each in enumerate(names)
        if (not each.strip() and not frame.iloc[:, i].any())
        or (re.fullmatch(r"\s*(Unnamed: \d+)?\s*", each) and frame.iloc[:, i].tolist() in counts)
    ]  # fmt: skip
    kept = frame.iloc[:, [i for i in range(len(names)) if i not in idle]]
    form = f"CSV with {_DELIMITERS.get(delimiter, 'spaces')}"
    return Table(name, kept, form, tuple(frame.columns[idle]), _listed(skipped),
                 _source=_Source(text, delimiter, above))  # fmt: skip


def _without_comments(text: str, name: str) -> tuple[str, str, list[str]]:
    """Return a text with empty lines for comments, the delimiter that its first line names, and what was skipped."""
    lines, given, skipped = text.split("\n"), "", []
    first = next(i for i, each in enumerate(lines) if each.strip())
    if said := re.fullmatch(r'"?sep=(.|\\t)"?[,;\t ]*', lines[first].strip(" "), re.IGNORECASE):
        given = "\t" if said[1] == "\\t" else said[1]
        if given not in _DELIMITERS:
            got = f"{lines[first].strip()!r} in line {first + 1}"
            raise rejected("read", name, f"be separated by {', '.join(_DELIMITERS.values())}", got)
        lines[first] = ""
        skipped.append(f"line {first + 1} names the separator")
    leading = next((i for i, each in enumerate(lines) if each.strip() and not each.startswith("#")), len(lines))
    comments = [i for i, each in enumerate(lines[:leading]) if each.startswith("#")]
    if not comments:
        return "\n".join(lines), given, skipped
    if leading < len(lines):
        below = "\n".join(lines[leading : leading + _SAMPLE_ROWS])
        delimiter = given or _delimiter(below)
        last: list[str] = next(_rows(lines[comments[-1]][1:], delimiter), [])
        row: list[str] = next(_rows(lines[leading], delimiter), [])
        if len(last) == len(row) > 1 and _numbers_in(last) < _numbers_in(row):
            lines[comments[-1]] = lines[comments[-1]][1:]  # the names of the columns
            comments.pop()
    comments += [i for i, each in enumerate(lines[leading:], start=leading) if each.startswith("#")]
    for i in comments:
        lines[i] = ""
    if comments:
        skipped.append(f"{len(comments)} line{'s' * (len(comments) > 1)} of comments")
    if not any(each.strip() for each in lines):
        raise rejected("read", name, "have a row of names and rows of values", "comments alone")
    return "\n".join(lines), given, skipped


def _listed(skipped: Sequence[str]) -> str:
    more = f" and {len(skipped) - 3} more" if len(skipped) > 3 else ""
    return "; ".join(skipped[:3]) + more


def _numbers_in(row: Sequence[str]) -> int:
    return sum(re.fullmatch(r"\s*[-+]?\d+([.,]\d+)?([eE][-+]?\d+)?\s*", each) is not None for each in row)


def _names(text: str, delimiter: str, name: str) -> tuple[int, list[str], list[str]]:
    """Return how many lines end with that of the names, the names, and what was skipped above them."""
    reader, skipped = _rows(text, delimiter), []
    width = _width(list(_sample_rows(text, delimiter)))
    names, above = None, 0
    try:
        for row in reader:
            above = reader.line_num
            filled = sum(map(bool, map(str.strip, row)))
            is_title = filled == 1 and (len(row) == 1 < width or width > 2) and above <= _TITLE and row[0].strip()
            if filled and not is_title:
                names = row
                break
            if filled:
                skipped.append(f"line {above}, {row[0].strip()[:40]!r}")
        got = "nothing but empty cells"
        if names is not None and len(names) == width - 1:
            below = list(islice((row for row in reader if row), _SAMPLE_ROWS))
            if below and all(len(row) == width for row in below):
                # R leaves out the name of the names of rows; others end each row with a separator.
                names = [*names, ""] if not any(row[-1] for row in below) else ["", *names]
    except csv.Error:
        names = None
        got = f"one of more than {csv.field_size_limit():,} characters, or a quotation mark that is never closed"
    if names is None:
        raise rejected("read", name, "have names of columns in its first row", got)
    return above, names, skipped


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


def _sample_rows(text: str, delimiter: str) -> Any:
    """Yield the first rows that are not empty, without one that the sample cuts off."""
    sample = text[:_SAMPLE]
    if len(text) > _SAMPLE:
        sample = sample[: sample.rfind("\n") + 1] or sample
    try:
        yield from islice((row for row in _rows(sample, delimiter) if any(row)), _SAMPLE_ROWS)
    except csv.Error:  # a cell of absurd length
        return


def _trimmed(text: str) -> str:
    """Return a text without spaces at the ends of its lines, where they separate nothing."""
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


def _width(rows: Sequence[Sequence[str]]) -> int:
    """Return how many cells most rows have."""
    return Counter(map(len, rows)).most_common(1)[0][0] if rows else 1


def _delimiter(text: str) -> str:
    """Return what cuts the first rows into the same number of cells, most of them numbers; a comma if nothing cuts."""

    def score(delimiter: str) -> tuple[float, float, int]:
        rows = list(_sample_rows(_trimmed(text[:_SAMPLE]) if delimiter == _SPACE else text, delimiter))
        if (width := _width(rows)) < 2:
            return 0.0, 0.0, 1
        numbers = sum(map(_numbers_in, rows)) / sum(map(len, rows))
        return float(np.mean([len(row) == width for row in rows])), numbers, width

    best = max(_DELIMITERS, key=score)
    if score(best)[2] < 2:
        same, numbers, width = score(_SPACE)
        best = _SPACE if width > 1 and same == 1 and numbers >= _MIXED else best
    return best


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
