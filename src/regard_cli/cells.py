"""Parse a column of text as numbers or dates: every interpretation that all cells allow.

pandas reads plain numbers and ISO dates. It has no say in which mark divides thousands or whether a day comes before
its month: ``read_csv`` takes one answer for a whole file, and ``to_datetime`` decides by the first cell. The functions
here look at all cells of a column, and return more than one reading where these leave a choice.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from pandas import Series


@dataclass(frozen=True)
class Reading:
    """One interpretation of the cells of a column."""

    values: Series  # numbers or dates; missing where a cell is something else
    way: Any  # Marks of numbers; "day first", "month first" or "" for dates
    decided: bool = False  # whether the cells themselves rule out other interpretations
    unit: str = ""  # what stands around numbers: "%" or a currency
    example: str = ""  # if there are several interpretations: an ambiguous cell


# Numbers --------------------------------------------------------------------------------------------------------------


class Marks(NamedTuple):
    """The characters between the digits of numbers."""

    decimal: str = "."
    thousands: str = ""


DECIMALS, THOUSANDS = (".", ","), (".", ",", " ", "'")
#: How many different cells are tried before a column is taken for other text than dates, or numbers.
_TRIED, _MANY = 200, 1000
_MONEY = "$€£¥₹"
_SIGN = "[-+−]?"
#: A sign and a currency in any order, digits with marks, an exponent, and a percent sign or a currency.
_CELL = re.compile(
    rf"(?P<sign>{_SIGN}) ?(?P<before>[{_MONEY}]?) ?(?P<minus>{_SIGN})"
    rf"(?P<body>[\d.,' ]*\d[.,]?)(?P<power>[eE][-+]?\d+)? ?(?P<after>[%{_MONEY}]?)"
)
#: Spaces and apostrophes that stand between digits.
_SPACES = str.maketrans({"\u00a0": " ", "\u202f": " ", "\u2009": " ", "’": "'"})
#: A dot that a decimal or a thousands mark can be.
_EITHER = r"[-+]?[1-9]\d{0,2}\.\d{3}"
_CHOICES = [Marks(d, t) for d in DECIMALS for t in ("", *THOUSANDS) if t != d]


def _pattern(marks: Marks) -> re.Pattern[str]:
    decimal, grouped = re.escape(marks.decimal), rf"[1-9]\d{{0,2}}(?:{re.escape(marks.thousands)}\d{{3}})+"
    whole = rf"(?:{grouped}|\d+)" if marks.thousands else r"\d+"
    return re.compile(rf"{whole}(?:{decimal}\d*)?|{decimal}\d+")


_PATTERNS = {marks: _pattern(marks) for marks in _CHOICES}


def read_numbers(text: Series) -> list[Reading]:
    """Return the interpretations of a column as numbers: two if a mark may be for thousands or for decimals.

    Examples
    --------
    >>> import pandas as pd
    >>> [(found.way.decimal, found.values.tolist()) for found in read_numbers(pd.Series(["1.088", "948"]))]
    [('.', [1.088, 948.0]), (',', [1088, 948])]
    >>> [found.values.tolist() for found in read_numbers(pd.Series(["$1,234", "$12,345,678.50"]))]
    [[1234.0, 12345678.5]]
    """
    import pandas as pd

    codes, cells, counts = _distinct(text)
    plain = pd.to_numeric(cells, errors="coerce")
    if plain.notna().all():
        dotted = cells[cells.str.contains(".", regex=False)]
        found = _spread(plain, codes, text)
        if dotted.empty or not dotted.str.fullmatch(_EITHER).all():
            return [Reading(found, Marks(), decided=not dotted.empty)]
        whole = pd.to_numeric(cells.str.replace(".", "", regex=False))
        example = str(dotted.iloc[0])
        return [
            Reading(found, Marks(), example=example),
            Reading(_spread(whole, codes, text), Marks(",", "."), example=example),
        ]
    if len(cells) > _MANY and not any(_CELL.fullmatch(str(each).translate(_SPACES)) for each in cells[:_MANY]):
        return [Reading(_spread(plain, codes, text), Marks())]  # text of some kind
    return [
        Reading(_spread(each.values, codes, text), each.way, each.decided, each.unit, each.example)
        for each in _marked_numbers(cells, plain, dict(zip(cells, counts)))
    ]


def _distinct(text: Series) -> tuple[Any, Series, list[int]]:
    """Return the index of each cell among the distinct ones (−1 if missing), the distinct cells, and their counts."""
    import pandas as pd

    codes, cells = text.factorize()
    return codes, pd.Series(cells, dtype=text.dtype), np.bincount(codes[codes >= 0], minlength=len(cells)).tolist()


def _spread(values: Series, codes: Any, text: Series) -> Series:
    """Return the value of each cell, given those of distinct cells; missing cells stay missing."""
    if values.empty:
        return values.reindex(text.index)
    found = values.take(np.maximum(codes, 0)).set_axis(text.index)
    return found.where(codes >= 0) if (codes < 0).any() else found


def _marked_numbers(text: Series, plain: Series, cells: Mapping[str, int]) -> list[Reading]:
    """Return the interpretations of distinct texts as numbers, if some are not plain numbers; ``cells`` counts them."""
    parts = {cell: found for cell in cells if (found := _CELL.fullmatch(cell.translate(_SPACES)))}
    units = Counter({"": 0})
    for cell, part in parts.items():
        units[part["before"] or part["after"]] += cells[cell]
    unit = max((each for each in units if each), key=units.__getitem__, default="")
    # A percentage among shares would be 100 times too large; amounts often stand without their currency.
    parts = {cell: part for cell, part in parts.items() if _is_of(part, unit)}
    money = bool(unit) and unit in _MONEY
    matched: dict[Marks, dict[str, float]] = {}
    for marks, pattern in _PATTERNS.items():
        fits = {cell: part for cell, part in parts.items() if pattern.fullmatch(part["body"])}
        if money and any(re.search(rf"{re.escape(marks.decimal)}\d{{3}}$", part["body"]) for part in fits.values()):
            continue  # no currency has thousandths
        matched[marks] = {cell: _number(part, marks) for cell, part in fits.items()}
    counts = {marks: sum(cells[cell] for cell in values) for marks, values in matched.items()}
    most = max(counts.values(), default=0)
    best = [marks for marks, count in counts.items() if count == most]
    decided = len({marks.decimal for marks in best}) == 1
    ways: list[Marks] = []
    for marks in best:
        if not any(matched[marks] == matched[other] for other in ways):
            ways.append(marks)
    example = ""
    if len(ways) > 1:
        example = next(cell for cell in matched[ways[0]] if matched[ways[0]][cell] != matched[ways[1]].get(cell))
    words = plain.where(plain.notna() & ~text.str.contains(r"\d", na=False))  # "inf" is a number to pandas alone
    return [
        Reading(
            text.map(matched[marks]).astype("float64").fillna(words), marks, decided and len(ways) == 1, unit, example
        )
        for marks in ways
    ]


def _is_of(part: re.Match[str], unit: str) -> bool:
    own = part["before"] or part["after"]
    return own == unit or (not own and (unit != "%" or not part["body"].strip("0.,")))


def _number(part: re.Match[str], marks: Marks) -> float:
    digits = part["body"].replace(marks.thousands, "") if marks.thousands else part["body"]
    value = float(digits.replace(marks.decimal, ".") + (part["power"] or ""))
    return -value if (part["sign"] + part["minus"]) in ("-", "−") else value


# Dates ----------------------------------------------------------------------------------------------------------------


DAY_FIRST, MONTH_FIRST = "day first", "month first"
_MONTHS = {name: i for i, name in enumerate("jan feb mar apr may jun jul aug sep oct nov dec".split(), start=1)}  # noqa: SIM905
_FULL = ("january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
         "december", "sept")  # fmt: skip
_YEAR, _NAME = r"(?P<y>\d{4}|\d\d)", r"(?P<name>[A-Za-z]{3,9})\.?"
_ISO = r"\d{4}-\d\d-\d\d([T ].*)?"
_TIME = re.compile(
    r"(?P<date>.*?)[T ,]+(?P<h>\d{1,2}):(?P<min>\d\d)(?::(?P<s>\d\d(?:\.\d{1,9})?))?(?: ?(?P<half>[AaPp])\.?[Mm]\.?)?"
)
_FORMS = [
    re.compile(each)
    for each in (
        r"(?P<y>\d{4})(?P<mark>[-/.])(?P<m>\d{1,2})(?P=mark)(?P<d>\d{1,2})",  # 2012/1/31
        r"(?P<y>\d{4})[-/](?P<m>\d\d)",  # 2012-01
        r"(?P<a>\d{1,2})(?P<mark>[-/])(?P<b>\d{1,2})(?P=mark)" + _YEAR,  # 12/31/2023
        r"(?P<a>\d{1,2})\.(?P<b>\d{1,2})\.(?P<y>\d{4})",  # 31.12.2023
        r"(?P<a>\d\d)\.(?P<b>\d\d)\.(?P<y>\d\d)",  # but 1.2.10 is a version
        r"(?P<y>\d{4})[-: ]?[Qq](?P<q>[1-4])",  # 1974Q1
        r"[Qq](?P<q>[1-4])[-/ ]?(?P<y>\d{4})",
        r"(?P<y>\d{4})M(?P<m>\d\d?)",  # 1974M01
        r"(?:[A-Za-z]{3,9},? )?(?P<d>\d{1,2})[-/. ]*" + _NAME + r"[-/., ]*" + _YEAR,  # 1-Aug-03
        r"(?:[A-Za-z]{3,9},? )?" + _NAME + r"[-/ ]*(?P<d>\d{1,2})(?:st|nd|rd|th)?[-/., ]+(?P<y>\d{4})",  # Apr-1-1995
        _NAME + r"[-/., ]*(?P<y>\d{4})",  # Aug 2003
        r"(?P<y>\d{4})[-/., ]*" + _NAME,
    )
]


def read_dates(text: Series) -> list[Reading]:
    """Return the interpretations of a column as dates: two if the order of day and month is ambiguous.

    Examples
    --------
    >>> import pandas as pd
    >>> [(found.way, str(found.values[0])[:10]) for found in read_dates(pd.Series(["01/02/2023"]))]
    [('day first', '2023-02-01'), ('month first', '2023-01-02')]
    >>> (found,) = read_dates(pd.Series(["1-Aug-03", "1-Sep-03"]))
    >>> found.values.dt.strftime("%Y-%m-%d").tolist()
    ['2003-08-01', '2003-09-01']
    """
    import pandas as pd

    codes, cells, counts = _distinct(text)
    is_iso = cells.str.fullmatch(_ISO).astype(bool)
    parts = {str(each): _parts(str(each)) for each in cells[~is_iso][:_TRIED]}
    if not any(parts.values()):
        dates = pd.to_datetime(cells.where(is_iso), errors="coerce", format="ISO8601", utc=True)
        zoned = cells.str.contains(r":\d\d.*(?:Z|[+-]\d\d(?::?\d\d)?)$").any()
        return [Reading(_spread(dates if zoned else dates.dt.tz_localize(None), codes, text), "")]
    parts = {cell: found for cell in map(str, cells) if (found := _parts(cell))}
    readings: list[Reading] = []
    read: list[int] = []
    orders = (DAY_FIRST, MONTH_FIRST) if any("a" in each for each in parts.values() if each) else ("",)
    for way in orders:
        iso = {cell: _stamp(each, way) for cell, each in parts.items() if each}
        dates = pd.to_datetime(cells.map(iso), errors="coerce", format="ISO8601")
        read.append(int(np.dot(counts, dates.notna())))
        readings.append(Reading(_spread(dates, codes, text), way))
    best = [each for each, count in zip(readings, read) if count == max(read)]
    if len(best) == 1:
        return [Reading(best[0].values, best[0].way, decided=bool(best[0].way))]
    if best[0].values.equals(best[1].values):
        return [Reading(best[0].values, "")]
    example = str(text[best[0].values.ne(best[1].values) & best[0].values.notna()].iloc[0])
    return [Reading(each.values, each.way, example=example) for each in best]


def _parts(cell: str) -> dict[str, Any] | None:
    """Return year, month and day (``a`` and ``b`` if their order is open) and seconds; None for other text."""
    cell, seconds = " ".join(cell.split()), 0.0
    if (timed := _TIME.fullmatch(cell)) is not None:
        hour = int(timed["h"])
        if timed["half"]:
            hour = hour % 12 + 12 * (timed["half"] in "Pp")
        seconds = 3600 * hour + 60 * int(timed["min"]) + float(timed["s"] or 0)
        cell = timed["date"]
    for form in _FORMS:
        if (found := form.fullmatch(cell)) is None:
            continue
        parts: dict[str, Any] = {key: value for key, value in found.groupdict().items() if value is not None}
        if "name" in parts:
            name = parts["name"].lower()
            if name not in _MONTHS and name not in _FULL:
                continue
            parts["m"] = _MONTHS[name[:3]]
        if "q" in parts:
            parts["m"] = 3 * int(parts["q"]) - 2
        return parts | {"seconds": seconds}
    return None


def _stamp(parts: dict[str, Any], way: str) -> str:
    """Return a date in ISO format; two-digit years are from 1969 to 2068, as in POSIX."""
    year = int(parts["y"])
    if len(parts["y"]) == 2:
        year += 1900 if year >= 69 else 2000
    day, month = (parts["a"], parts["b"]) if "a" in parts else (parts.get("d", 1), parts["m"])
    if "a" in parts and way == MONTH_FIRST:
        day, month = month, day
    minutes, seconds = divmod(parts["seconds"], 60)
    hours, minutes = divmod(int(minutes), 60)
    whole = math.floor(seconds)
    micro = round(1e6 * (seconds - whole))
    return f"{year:04}-{int(month):02}-{int(day):02}T{hours:02}:{minutes:02}:{whole:02}.{micro:06}"
