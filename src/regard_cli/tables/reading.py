"""Tables in files: CSV in whatever dress it comes, and Parquet; read as they are, and written whole or not at all."""

from __future__ import annotations

import csv
import gzip
import io
import re
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from regard._utils.errors import rejected, rejection
from regard._utils.files import display_name, naming, read_bytes, write_atomically
from regard_cli.printing import printable

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
#: How much of a text is looked at to find its delimiter.
_SAMPLE, _SAMPLE_ROWS = 1 << 16, 100
_PARQUET, _ZIP = b"PAR1", b"PK\x03\x04"
#: Bytes of a table, cells and columns that it may have: each cell takes some fifty bytes where it is looked at as text.
_LARGEST, _CELLS, _COLUMNS = 1 << 27, 20_000_000, 10_000
#: Rows of a Parquet file that are taken into memory together.
_ROWS = 4096
_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet")


@dataclass(frozen=True)
class Table:
    """A table and where it came from.

    Attributes
    ----------
    name : str
        The file, as messages call it.
    frame : DataFrame
        From CSV, every cell is the text that stands there, so that it can be written again unchanged. From Parquet,
        columns have the types they were saved with.
    form : str
        ``"CSV"`` with what separates its columns, or ``"Parquet"``.
    decimal : str
        What separates whole and broken part of a number: ``"."``, or ``","`` in some files with semicolons or tabs.
    nameless : tuple of str
        Columns without a name that were left out because they were empty or counted the rows.
    """

    name: str
    frame: DataFrame
    form: str
    decimal: str = "."
    nameless: tuple[str, ...] = ()


def read(path: str | Path, *, least: int = 1) -> Table:
    r"""Read a table with named columns.

    CSV is text in UTF-8 or, with a byte order mark, UTF-16; its columns are separated by commas, semicolons, tabs or
    bars, whichever cuts the first rows into the same number of cells. Both formats are known by their contents. A table
    may have 128 MiB, unpacked, 10,000 columns and 20 million cells.

    Parameters
    ----------
    path : str or Path
        A CSV file, plain or compressed by gzip, or a Parquet file; ``"-"`` reads CSV from standard input. Needs
        pandas, and pyarrow for Parquet.
    least : int, default 1
        How many columns there should be.

    Returns
    -------
    Table

    Raises
    ------
    ValueError
        If there is no such file, or it is empty, damaged, something else than a table, or has nameless or repeated
        columns, rows of unequal length, no rows, or more than the limits above.
    OSError
        If it cannot be read.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "a.csv"
    ...     _ = path.write_text("x;y\n0,5;1\n1,5;2\n")
    ...     table = read(path)
    >>> table.form, table.decimal, table.frame["x"].tolist()
    ('CSV with semicolons', ',', ['0,5', '1,5'])
    """
    name = display_name(path)
    data = read_bytes(path, "read", _LARGEST)
    if not data:
        raise rejected("read", name, "have a row of names and rows of values", "an empty file")
    if data.startswith(_PARQUET) or Path(name).suffix == ".parquet":
        table = _from_parquet(data, name)
    else:
        table = _from_text(_text(data, name), name)
    names = list(table.frame.columns)
    for twice in sorted(each for each, times in Counter(names).items() if times > 1):
        raise rejected("read", name, "have a name for each column", f"{twice!r} twice")
    if len(names) < least:
        between = f", separated by {', '.join(_DELIMITERS.values())}" if table.form != "Parquet" else ""
        raise rejected(
            "read", name, f"have {least} columns or more{between}", f"{len(names)}: {', '.join(names)[:60]!r}"
        )
    if len(table.frame) == 0:
        raise rejected("read", name, "have rows below the names of its columns", "none")
    return table


def check_out(path: str | Path) -> None:
    """Check now that a table can be written to a path, rather than when all the work is done.

    Raises
    ------
    ValueError
        If its ending says no format, or its folder does not exist.
    """
    if str(path) == "-":
        return
    path = Path(path)
    if not path.name.lower().endswith(_SUFFIXES):
        raise rejected("write", "the file for predictions", f"end in one of {', '.join(_SUFFIXES)}", str(path))
    if not path.parent.is_dir():
        raise rejected("write", str(path), "be in a folder that exists", f"{path.parent}, which does not")
    if path.is_dir():
        raise rejected("write", str(path), "be a file", "a folder")


def write(frame: DataFrame, path: str | Path) -> None:
    """Write a table in the format that its path ends in: .csv, .tsv, these with .gz, or .parquet; ``"-"`` prints CSV.

    Raises
    ------
    ValueError
        As :func:`check_out`.
    OSError
        If it cannot be written.
    """
    check_out(path)
    if str(path) == "-":
        text = frame.to_csv(index=False, lineterminator="\n")
        # As ls does: what reads a pipe gets every character as it is.
        sys.stdout.write(printable(text, "\n\t") if sys.stdout.isatty() else text)
        return
    path = Path(path)
    ending = path.name.lower()
    if ending.endswith(".parquet"):
        buffer = io.BytesIO()
        frame.to_parquet(buffer, engine="pyarrow", index=False)
        data = buffer.getvalue()
    else:
        separator = "\t" if ".tsv" in ending[-7:] else ","
        data = frame.to_csv(index=False, sep=separator, lineterminator="\n").encode()
        if ending.endswith(".gz"):
            data = gzip.compress(data, mtime=0)
    if path.exists() and not path.is_file():  # a pipe or a device, which nothing can be moved over
        with naming(path):
            path.write_bytes(data)
        return
    write_atomically(path, data)


def _text(data: bytes, name: str) -> str:
    """Return the text of a file without its byte order mark, every line ended by a line feed."""
    expected = "be a table in CSV or Parquet"
    if data.startswith(_ZIP):
        raise rejected("read", name, expected, "a zip file or an Excel workbook (save it as CSV)")
    wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    if not wide and b"\0" in data:
        raise rejected("read", name, expected, "a binary file")
    try:
        text = data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = len((data[: error.start] + b".").splitlines())
        byte = f"byte 0x{data[error.start]:02x} in line {line} (save it in UTF-8)"
        raise rejected("read", name, "be text in UTF-8", byte) from None
    if "\0" in text:
        raise rejected("read", name, expected, "a binary file")
    if not text.strip():
        raise rejected("read", name, "have a row of names and rows of values", "an empty file")
    return text.replace("\r\n", "\n").replace("\r", "\n")  # Windows, and Macintosh of old


def _from_text(text: str, name: str) -> Table:
    import pandas as pd

    delimiter = _delimiter(text)
    text = text.strip("\n")
    names = _names(text, delimiter, name)
    _check_size(name, text.count("\n") + 1, len(names))
    if all(re.fullmatch(r"\s*[-+]?[\d.,]+([eE][-+]?\d+)?\s*", each) for each in names):
        raise rejected("read", name, "have the names of its columns in its first row", "numbers alone")
    blank = {i for i, each in enumerate(names) if not each.strip()}
    names = [each.strip() or f"column {i}" for i, each in enumerate(names, start=1)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = pd.read_csv(
                io.BytesIO(text.encode()),
                sep=delimiter,
                header=0,
                names=list(range(len(names))),
                index_col=False,
                dtype=str,
                keep_default_na=False,
                na_filter=False,
                skipinitialspace=True,
                skip_blank_lines=len(names) > 1,  # in a single column they are empty cells
            )
    except (pd.errors.ParserError, pd.errors.ParserWarning):
        found = _longer(text, delimiter, len(names))
        raise rejected("read", name, f"have {len(names)} cells in every row as in its first", found) from None
    frame = frame.fillna("")  # the cells that a short row lacks
    nameless = [i for i in sorted(blank) if _tells_nothing(frame[i])]
    left_out = tuple(names[i] for i in nameless)
    frame = frame.drop(columns=nameless)
    frame.columns = pd.Index([each for i, each in enumerate(names) if i not in nameless], dtype=object)
    return Table(name, frame, f"CSV with {_DELIMITERS[delimiter]}", _decimal(text[:_SAMPLE], delimiter), left_out)


def _names(text: str, delimiter: str, name: str) -> list[str]:
    """Return the cells of the first row that has any."""
    try:
        for row in csv.reader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True):
            if any(row):
                return row
    except csv.Error:
        got = f"one of more than {csv.field_size_limit():,} characters, or a quotation mark that is never closed"
        raise rejected("read", name, "have names of columns in its first row", got) from None
    raise rejected("read", name, "have names of columns in its first row", "nothing but empty cells")


def _check_size(name: str, rows: int, columns: int) -> None:
    """Raise where a table is too large, before memory is taken for it."""
    if columns > _COLUMNS:
        raise rejected("read", name, f"have at most {_COLUMNS:,} columns", f"{columns:,}")
    if rows * columns > _CELLS:
        raise rejected("read", name, f"have at most {_CELLS:,} cells", f"{columns:,} columns and about {rows:,} rows")


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
        if len(set(table.column_names)) == len(kept):
            frame = table.to_pandas(ignore_metadata=True)
        else:
            frame = pd.DataFrame(columns=table.column_names)  # for its names, which are refused
    except (pyarrow.ArrowException, OSError, OverflowError, ValueError) as error:  # of text or JSON in its metadata
        if rejection(error) is not None:
            raise
        raise rejected("read", name, "be a whole Parquet file", "one that is cut short or something else") from None
    return Table(name, frame, "Parquet")


def _delimiter(text: str) -> str:
    """Return what cuts the first rows into the same number of cells, most of them numbers; a comma if nothing cuts."""
    sample = text[:_SAMPLE]
    if len(text) > _SAMPLE:
        sample = sample[: sample.rfind("\n") + 1] or sample
    best: tuple[float, float, int, str] = (0.0, 0.0, 1, ",")
    for delimiter in _DELIMITERS:
        widths, cells = [], []
        try:
            for row in csv.reader(io.StringIO(sample), delimiter=delimiter, skipinitialspace=True):
                if any(row):
                    widths.append(len(row))
                    cells += row
                if len(widths) == _SAMPLE_ROWS:
                    break
        except csv.Error:  # a cell of absurd length
            continue
        if widths and widths[0] > 1:
            numbers = sum(re.fullmatch(r"\s*-?\d+([.,]\d+)?\s*", cell) is not None for cell in cells) / len(cells)
            found = (widths.count(widths[0]) / len(widths), numbers, widths[0], delimiter)
            best = max(best, found, key=lambda each: each[:3])
    return best[3]


def _longer(text: str, delimiter: str, width: int) -> str:
    """Return what is wrong with a text that has a row of more than ``width`` cells, or a quotation mark too few."""
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True)
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


def _tells_nothing(column: Series) -> bool:
    """Return whether the cells are empty, or count the rows from 0 or 1."""
    cells = list(column)
    return not any(cells) or any(cells == list(map(str, range(k, k + len(cells)))) for k in (0, 1))
