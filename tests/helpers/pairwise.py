"""Few combinations of options that hold every pair of their values, in place of all combinations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]


def pairwise(options: Mapping[str, Sequence[Any]], valid: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Return combinations in which every pair of values of two options is, if any valid combination has it.

    Each is the valid combination with most pairs that are still missing, the first of those in the options' order: the
    same on every machine.
    """
    rows = [row for values in product(*options.values()) if valid(row := dict(zip(options, values)))]
    bits: dict[object, int] = {}
    masks = []
    for row in rows:
        places = [(name, options[name].index(value)) for name, value in row.items()]
        masks.append(sum(1 << bits.setdefault(pair, len(bits)) for pair in combinations(places, 2)))
    missing, chosen = (1 << len(bits)) - 1, []
    while missing:
        best = max(range(len(rows)), key=lambda i: (masks[i] & missing).bit_count())
        chosen.append(rows[best])
        missing &= ~masks[best]
    return chosen
