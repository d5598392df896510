"""Few combinations of options that hold every pair of their values, in place of all combinations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = dict[Any, Any]


def pairwise(options: Mapping[Any, Sequence[Any]], valid: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Return combinations in which every pair of values of two options is, if any valid combination has it.

    Each is the valid combination with most pairs that are still missing, the first of those in the options' order: the
    same on every machine.
    """
    rows = [row for values in product(*options.values()) if valid(row := dict(zip(options, values)))]
    chosen = covering([[(name, options[name].index(value)) for name, value in row.items()] for row in rows])
    return [rows[i] for i in chosen]


def covering(rows: Sequence[Sequence[Any]], most: int | None = None) -> list[int]:
    """Return which rows hold every pair of two places that any row holds, or so many rows with most of the pairs."""
    bits: dict[object, int] = {}
    masks = []
    for places in rows:
        pairs = combinations(places, min(2, len(places)))  # of one parameter, its values
        masks.append(sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs))
    missing, chosen = (1 << len(bits)) - 1, []
    while missing and (most is None or len(chosen) < most):
        best = max(range(len(rows)), key=lambda i: (masks[i] & missing).bit_count())
        chosen.append(best)
        missing &= ~masks[best]
    return chosen


def across(options: Mapping[str | tuple[str, ...], Iterable[Any]]) -> pytest.MarkDecorator:
    """Parametrize a test by combinations that hold every pair of values of two options.

    Parameters
    ----------
    options : mapping
        Values by the name of an argument, or by the names of several that change together.
    """
    values = {names: list(each) for names, each in options.items()}
    rows = pairwise({names: range(len(each)) for names, each in values.items()})
    cases = []
    for row in rows:
        chosen = [(values[names][place], isinstance(names, str)) for names, place in row.items()]
        cases.append([argument for each, alone in chosen for argument in ([each] if alone else each)])
    arguments = [name for names in values for name in ([names] if isinstance(names, str) else names)]
    return pytest.mark.parametrize(arguments, cases, ids=_name)


def _name(value: object) -> str | None:
    """Return what a short list or dict is named by in a test's name; pytest names others."""
    text = str(value) if isinstance(value, list | tuple | dict) else ""
    return text if 0 < len(text) < 50 and " at 0x" not in text else None  # an address is another one in each process
