"""Cells as numbers and dates: read as a person would read them, or refused with the option that decides."""

from __future__ import annotations

import bz2
import io
import lzma
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from regard_cli.cells import Marks, read_dates, read_numbers
from regard_cli.regress_model import prepare
from regard_cli.tables import Options, Table, read, write


def _read(tmp_path: Path, text: str | bytes, name: str = "a.csv", **options) -> Table:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read(path, options=Options(**options))


def _values(table: Table, name: str) -> list[float]:
    column = table.column(name)
    assert not isinstance(column, str), column
    return table.numbers(column).tolist()


def _refusal(call) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


# Marks ----------------------------------------------------------------------------------------------------------------


def test_where_a_row_is_behind_a_huge_cell(tmp_path: Path) -> None:
    table = _read(tmp_path, f"x,y\n1,2\n{'a' * 200_000},3\n4,5\n")
    assert [table.where(row) for row in range(3)] == ["line 2", "row 2", "row 3"]


def test_other_columns_say_what_a_dot_is(tmp_path: Path) -> None:
    table = _read(tmp_path, "Temp;Umsatz\n6,25;948\n8,97;1.088\n")
    assert _values(table, "Umsatz") == [948, 1088]
    assert table.column("Umsatz").as_in == "Temp"
    assert _values(table, "Temp") == [6.25, 8.97]
    table = _read(tmp_path, 'temp,sales\n6.25,948\n8.97,"1,088"\n')
    assert _values(table, "sales") == [948, 1088]


@pytest.mark.parametrize(("cell", "decimal", "thousands"), [("1.088", ".", "."), ("1,088", ",", ",")])
def test_two_readings_are_refused_and_an_option_decides(
    tmp_path: Path, cell: str, decimal: str, thousands: str
) -> None:
    text = f"x;y\n1;948\n2;{cell}\n"
    readings = {f"1.088 with --decimal '{decimal}'", f"1088 with --thousands '{thousands}'"}
    message = _refusal(lambda: _read(tmp_path, text).column("y"))
    assert "column 'y' of" in message
    assert f"must have numbers that can be read in one way, got '{cell}' in line 3, which is " in message
    assert all(each in message for each in readings)
    assert _values(_read(tmp_path, text, decimal=decimal), "y") == [948, 1.088]
    assert _values(_read(tmp_path, text, thousands=thousands), "y") == [948, 1088]


def test_columns_that_disagree_decide_nothing(tmp_path: Path) -> None:
    table = _read(tmp_path, "a;b;y\n1,5;2.5;1.088\n2,5;3.5;948\n")
    assert "can be read in one way" in _refusal(lambda: table.column("y"))


@pytest.mark.parametrize(
    ("cells", "values", "way", "unit"),
    [
        (["1,234", "12,345,678"], [1234, 12345678], Marks(".", ","), ""),
        (["$1,234", "$948"], [1234, 948], Marks(".", ","), "$"),
        (["1.088 €", "-948 €"], [1088, -948], Marks(",", "."), "€"),
        (["12 %", "3.5 %"], [12, 3.5], Marks(".", ""), "%"),
        (["1,5", "2"], [1.5, 2], Marks(",", ""), ""),
        (["1.234.567,5", "2"], [1234567.5, 2], Marks(",", "."), ""),
        (["1 234,5", "1\u202f000"], [1234.5, 1000], Marks(",", " "), ""),
        (["1'234.5", "7"], [1234.5, 7], Marks(".", "'"), ""),
        (["−5", "+3"], [-5, 3], Marks(".", ""), ""),
        (["1e-3", "2.5E+2", ".5", "5."], [0.001, 250, 0.5, 5], Marks(".", ""), ""),
        (["0.123", "1.088"], [0.123, 1.088], Marks(".", ""), ""),
        (["1.088", "1234.567"], [1.088, 1234.567], Marks(".", ""), ""),
    ],
)
def test_marks(cells: list[str], values: list[float], way: Marks, unit: str) -> None:
    (found,) = read_numbers(pd.Series(cells, dtype=str))
    assert (found.values.tolist(), found.way, found.unit) == (values, way, unit)


def test_percentages_among_shares_are_odd() -> None:
    (found,) = read_numbers(pd.Series(["12 %", "0.3", "0", "5 %"], dtype=str))
    np.testing.assert_array_equal(found.values, [12, np.nan, 0, 5])


@pytest.mark.parametrize("target", ["1,234\n5,678,901", "$1,234\n$2", "12 %\n7 %", "1,5\n2,25"])
def test_targets_are_numbers(tmp_path: Path, target: str) -> None:
    first, second = target.split("\n")
    assert prepare(_read(tmp_path, f'x,y\n1,"{first}"\n2,"{second}"\n3,"{first}"\n'), "y").target.kind == "number"


def test_new_rows_are_read_like_those_learned_from(tmp_path: Path) -> None:
    old = _read(tmp_path, "x;y\n1.088,5;1\n2,5;2\n")
    new = _read(tmp_path, "x\n1.088\n948\n")
    assert new.numbers(new.column("x", "number", old.column("x"))).tolist() == [1088, 948]


# Missing values, and columns that are partly numbers ------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["?", "-", "None", ".", "missing", "#NA", "#N/A", "--", "null", "NaN", ""])
def test_usual_marks_of_missing_values(tmp_path: Path, mark: str) -> None:
    rows = "".join(f"{i},{i * i if i % 5 else mark}\n" for i in range(1000))
    found = prepare(_read(tmp_path, "x,y\n" + rows), "y")
    assert found.target.kind == "number"
    assert found.missing == {"y": 200}
    assert found.target.odd == ()


def test_further_marks(tmp_path: Path) -> None:
    text = "x,y\n1,2\n2,unknown\n3,-999\n4,5\n"
    values = _values(_read(tmp_path, text, missing=("-999", "UNKNOWN")), "y")
    np.testing.assert_array_equal(values, [2, np.nan, np.nan, 5])
    table = Table("a.parquet", pd.DataFrame({"y": [1, -999, 3]}), "Parquet", options=Options(missing=("-999",)))
    np.testing.assert_array_equal(_values(table, "y"), [1, np.nan, 3])


def test_mostly_numbers_are_never_classes(tmp_path: Path) -> None:
    table = _read(tmp_path, "x,y\n" + "".join(f"{i},{i if i % 5 else 'high'}\n" for i in range(1, 101)))
    assert _refusal(lambda: prepare(table, "y")) == (
        "regress: target 'y' must hold numbers, or text for a classification, got numbers in 80% of its cells, but "
        "'high' in line 6 (--missing 'high' counts it as missing, --classify reads all as classes)."
    )
    assert prepare(table, "y", classify=True).classifies
    assert prepare(table, "x", ["y"], categorical=["y"]).columns[0].kind == "category"
    assert "column 'y' of" in _refusal(lambda: prepare(table, "x", ["y"]))
    assert "numbers in 80% of its cells" in str(prepare(
        _read(tmp_path, "x,y,z\n" + "".join(f"{i},{i if i % 5 else 'high'},{i % 7}\n" for i in range(1, 101))), "x"
    ).left_out["y"])  # fmt: skip


def test_a_minus_among_pluses_is_a_category(tmp_path: Path) -> None:
    assert _read(tmp_path, "x,y\n+,1\n-,2\n+,3\n").column("x").categories == ["+", "-"]
    assert _read(tmp_path, "x,y\na,1\n-,2\na,3\n").column("x").categories == ["a"]
    assert _read(tmp_path, "x,y\nnone,1\nsome,2\nnone,3\n").column("x").categories == ["none", "some"]


# Dates ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "day"),
    [
        ("2012/01/01", "2012-01-01"), ("2012.1.31", "2012-01-31"), ("2012-01-01T06:00", "2012-01-01T06:00"),
        ("1-Aug-03", "2003-08-01"), ("1-Aug-99", "1999-08-01"), ("Apr-1-1995", "1995-04-01"),
        ("1974Q1", "1974-01-01"), ("Q3 1974", "1974-07-01"), ("1974M11", "1974-11-01"), ("2012-07", "2012-07-01"),
        ("12/31/2023", "2023-12-31"), ("31/12/2023", "2023-12-31"), ("31.12.2023", "2023-12-31"),
        ("31.12.99", "1999-12-31"), ("Jan 1 2000", "2000-01-01"), ("1 January 2000", "2000-01-01"),
        ("Sat, January 1st, 2000", "2000-01-01"), ("Aug 2003", "2003-08-01"),
        ("12/31/2023 2:05 PM", "2023-12-31T14:05"), ("12/31/2023 00:30:15", "2023-12-31T00:30:15"),
    ],
)  # fmt: skip
def test_forms_of_dates(tmp_path: Path, cell: str, day: str) -> None:
    table = _read(tmp_path, f'd;y\n"{cell}";1\n"{cell}";2\n')
    column = table.column("d")
    assert column.kind == "date"
    assert table.numbers(column)[0] == pytest.approx(
        (np.datetime64(day, "s") - np.datetime64(0, "s")) / np.timedelta64(1, "D")
    )
    assert "got dates" in _refusal(lambda: prepare(table, "d"))


@pytest.mark.parametrize("cell", ["01.02.2023", "01/02/2023", "1-2-23"])
def test_ambiguous_dates(tmp_path: Path, cell: str) -> None:
    text = f"d;y\n01.01.2023;1\n{cell};2\n"
    message = _refusal(lambda: _read(tmp_path, text).column("d"))
    assert f"got '{cell}' in line 3, which is 1 February 2023 with --day-first and 2 January 2023 with" in message
    for first, days in ((True, 19389), (False, 19359)):
        assert _values(_read(tmp_path, text, day_first=first), "d")[1] == days
    both = f"d;e;y\n01.01.2023;31.12.2023;1\n{cell};30.12.2023;2\n"
    assert _values(_read(tmp_path, both), "d")[1] == 19389, "another column puts the day first"


def test_what_is_no_date() -> None:
    for cells in (["1.2.10"], ["12345"], ["2012-13"], ["13/13/2013"], ["May be 2003"], ["A-1-2003"]):
        assert read_dates(pd.Series(cells, dtype=str))[0].values.isna().all()


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "skipped"),
    [
        ("sep=;\nx;y\n1;2\n3;4\n", "line 1 names the separator"),
        ('"sep=;"\nx;y\n1;2\n3;4\n', "line 1 names the separator"),
        ("# from a station\n# in 2024\nx,y\n1,2\n# a gap\n3,4\n", "3 lines of comments"),
        ("# station\n#x,y\n1,2\n3,4\n", "1 line of comments"),
        ("Sales of 2024\n\nx,y\n1,2\n3,4\n", "line 1, 'Sales of 2024'"),
        ("Sales of 2024;;\nx;z;y\n1;0;2\n3;0;4\n", "line 1, 'Sales of 2024'"),
        ("x y\n", None),
    ],
)
def test_lines_above_the_names(tmp_path: Path, text: str, skipped: str | None) -> None:
    if skipped is None:
        assert "must have rows below the names" in _refusal(lambda: _read(tmp_path, text))
        return
    table = _read(tmp_path, text)
    assert table.skipped == skipped
    assert (_values(table, "x"), _values(table, "y")) == ([1, 3], [2, 4])
    assert table.where(1) == f"line {len(text.splitlines())}", "lines are counted as an editor counts them"


def test_names_of_rows_without_a_name(tmp_path: Path) -> None:
    table = _read(tmp_path, "x y\tz\nBonn\t1\t2\nUlm\t3\t4\n")
    assert list(table.frame) == ["column 1", "x y", "z"]
    table = _read(tmp_path, "x,y\n1,2,\n3,4,\n")
    assert list(table.frame) == ["x", "y"] and _values(table, "y") == [2, 4]


def test_latin_1_by_name(tmp_path: Path) -> None:
    data = "x,y\nKöln,1\nUlm,2\n".encode("latin-1")
    assert "line 2 (save it in UTF-8, or name its encoding, such as --encoding latin-1)" in _refusal(
        lambda: _read(tmp_path, data)
    )
    assert _read(tmp_path, data, encoding="latin-1").column("x").categories == ["Köln", "Ulm"]


def _zip(**files: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, text in files.items():
            file.writestr(name.replace("_", "."), text)
    return buffer.getvalue()


def test_zip_files(tmp_path: Path) -> None:
    assert _values(_read(tmp_path, _zip(a_csv="x,y\n1,2\n3,4\n"), "a.zip"), "y") == [2, 4]
    assert "hold one file if it is a zip file, got 2: a.csv, b.csv" in _refusal(
        lambda: _read(tmp_path, _zip(a_csv="x", b_csv="y"))
    )
    workbook = _zip(a_csv="x").replace(b"a.csv", b"[Con]")
    assert "must be a whole zip file" in _refusal(lambda: _read(tmp_path, workbook[:40]))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("[Content_Types].xml", "")
    assert "an Excel workbook (save it as CSV)" in _refusal(lambda: _read(tmp_path, buffer.getvalue()))


def test_what_is_written_can_be_read_again(tmp_path: Path) -> None:
    table = _read(tmp_path, 'd;Umsatz;Anteil;"t, e";n\n31.12.2023;1.088;6,25 %;"a;b";0010\n01.02.2024;948;?;c;2\n')
    write(table.plain(), tmp_path / "b.csv")
    assert (tmp_path / "b.csv").read_text() == (
        'd,Umsatz,Anteil,"t, e",n\n2023-12-31,1088,6.25,a;b,0010\n2024-02-01,948,?,c,2\n'
    )
    again = read(tmp_path / "b.csv")
    for name in ("d", "Umsatz", "Anteil", "n"):
        np.testing.assert_array_equal(_values(again, name), _values(table, name))


def test_hints_about_counters_codes_and_classes(tmp_path: Path) -> None:
    rows = "".join(f"{i},{i % 5:05d},{i % 3},{i % 2},{i * i % 7}\n" for i in range(1, 41))
    found = prepare(_read(tmp_path, "row,plz4,store_id,won,y\n" + rows), "won")
    assert found.hints[0] == "row counts the rows; --ignore row leaves it out, unless it is time"
    assert found.hints[1].startswith("plz4 (written with leading zeros), store_id look like codes")
    assert "--categorical plz4 " in found.hints[1]
    assert found.hints[2] == "won is 0 or 1, and learned as a number; --classify learns two classes"
    assert prepare(_read(tmp_path, "x,y\n1,2\n2,4\n3,5\n"), "y").hints == ()


def test_dots_are_decimal_marks_where_commas_separate_cells(tmp_path: Path) -> None:
    table = _read(tmp_path, "eruptions,waiting\n3.600,79\n1.800,54\n")
    assert _values(table, "eruptions") == [3.6, 1.8]
    assert table.column("eruptions").as_in == "CSV with commas"
    assert _values(_read(tmp_path, "x,y\n3.600,79\n1.800,54\n", thousands="."), "x") == [3600, 1800]
    assert _values(_read(tmp_path, 'x,y\n3.600,"7,5"\n1.800,"5,4"\n'), "x") == [3600, 1800], "y has decimal commas"


@pytest.mark.parametrize("pack", [bz2.compress, lzma.compress])
def test_packed_files(tmp_path: Path, pack) -> None:
    data = pack(b"x,y\n1,2\n3,4\n")
    assert _values(_read(tmp_path, data), "y") == [2, 4]
    assert "one that is cut short or damaged" in _refusal(lambda: _read(tmp_path, data[:-9]))


def test_cells_between_spaces(tmp_path: Path) -> None:
    table = _read(tmp_path, '"the x" y\n 1   2\n30 4 \n')
    assert (_values(table, "the x"), _values(table, "y"), table.form) == ([1, 30], [2, 4], "CSV with spaces")
    assert list(_read(tmp_path, "full name\nAda Byron\nAlan Turing\n").frame) == ["full name"]


def test_rows_without_names(tmp_path: Path) -> None:
    text = "18.0,8,307.0,chevrolet malibu\n15.0,8,350.0,buick skylark\n"
    assert "must have the names of its columns in its first row, got 3 numbers, such as '18.0'" in _refusal(
        lambda: _read(tmp_path, text)
    )
    assert list(_read(tmp_path, "country,1960,1961\nAruba,4.8,4.7\n").frame) == ["country", "1960", "1961"]
