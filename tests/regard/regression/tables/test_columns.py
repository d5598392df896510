"""Columns of tables: text cut into cells, cells as numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from regard_cli.regress_model import prepare
from regard_cli.tables import Table, read


def _table(**columns: list[object]) -> Table:
    return Table("a.csv", pd.DataFrame(columns), "CSV")


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_every_end_of_line(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(ending.join(["", "x;note", "1,5;a", '2,5;"b', 'c"', "", "3,5;d", ""]).encode())
    table = read(path)
    assert table.frame["x"].tolist() == ["1,5", "2,5", "3,5"]
    assert table.frame["note"].tolist() == ["a", "b\nc", "d"]
    assert table.column("x").values.tolist() == [1.5, 2.5, 3.5]


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
def test_a_wrong_byte_is_found_in_its_line(tmp_path: Path, ending: bytes) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(ending.join([b"x,y", b"1,2", b"K\xf6ln,3", b""]))
    with pytest.raises(ValueError, match=r"got byte 0xf6 in line 3 \(save it in UTF-8, or name its encoding"):
        read(path)


def test_dates_of_all_years() -> None:
    table = _table(d=["0001-01-01", "1969-12-31T12:00", "2024-03-01 06:00:00+02:00", "9999-12-31", ""])
    column = table.column("d")
    assert column.kind == "date"
    days = table.numbers(column)
    np.testing.assert_allclose(days, [-719162, -0.5, 19783 + 4 / 24, 2932896, np.nan], rtol=1e-12)
    assert table.typed()["d"].dtype.kind == "M"


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_dates_of_every_unit(unit: str) -> None:
    dates = pd.Series(np.array(["1999-12-31T18:00", "NaT", "2000-01-02"], f"datetime64[{unit}]"))
    for series in (dates, dates.dt.tz_localize("Europe/Berlin"), dates.astype(f"timestamp[{unit}][pyarrow]")):
        table = Table("a.parquet", pd.DataFrame({"d": series}), "Parquet")
        days = table.numbers(table.column("d"))
        np.testing.assert_allclose(days - days[0], [0, np.nan, 1.25])
        assert days[0] == 10956.75 - (series.dt.tz is not None) / 24


@pytest.mark.parametrize("number", ["1e200", "-2e100", "1e308"])
def test_numbers_whose_squares_are_none(number: str) -> None:
    table = _table(x=["1", number, "3"], y=["1", "2", "4"])
    for target in ("x", "y"):
        with pytest.raises(ValueError) as caught:
            prepare(table, target)
        assert str(caught.value) == (
            f"regress: column 'x' of a.csv must be finite and not above 1e+100 in size, got {float(number):g} in row 2."
        )
    assert table.typed()["x"].tolist() == [1, float(number), 3], "what is not used is written as it came"
