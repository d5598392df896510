"""Names of other libraries: each has one row, and what stands in it exists."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from benchmarks import coverage

NAMES = json.loads(coverage.NAMES.read_text(encoding="utf-8"))


@pytest.mark.parametrize("library", list(coverage.LIBRARIES))
def test_every_name_has_one_row_and_every_row_a_name(library: str) -> None:
    rows, names = coverage.LIBRARIES[library][2], NAMES[library]["names"]
    assert len(names) == len(set(names))
    for name in names:
        assert sum(row.fits(name) for row in rows) == 1, name
    for row in rows:
        assert any(row.fits(name) for name in names), row.theirs


@pytest.mark.parametrize("library", list(coverage.LIBRARIES))
def test_a_row_names_what_exists_or_says_why_nothing_does(library: str) -> None:
    for row in coverage.LIBRARIES[library][2]:
        assert row.found() or row.why, row.theirs


def test_baselines_name_what_exists_or_say_why_nothing_does() -> None:
    rows = [row for kind in coverage.BASELINES.values() for row in kind]
    assert len({row.theirs for row in rows}) == len(rows)
    for row in rows:
        assert row.found() == list(row.ours) and bool(row.ours) != bool(row.why), row.theirs


def test_the_page_is_what_the_rows_say() -> None:
    page = coverage.NAMES.parents[1] / "docs" / "coverage.md"
    assert page.read_text(encoding="utf-8") == coverage.page(), "run `make docs`"


#: The formulas of the patterns, once more.
SIZES = {"w": 3, "n": 2, "l": 4, "C": 5, "L": 17}
w, n, step, C, L = SIZES.values()
FORMULAS: list[Callable[[int, int], bool]] = [
    lambda q, k: abs(q - k) <= w or k < n or q < n,
    lambda q, k: abs(q - k) <= step * w and (q - k) % step == 0,
    lambda q, k: k <= q and (q - k <= w or k < n),
    lambda q, k: k <= q and (q - k < step or (q - k) % step == 0),
    lambda q, k: k <= q and (k // step == q // step or k % step >= step - n),
    lambda q, k: k <= q and k // C == q // C,
    lambda q, k: k // C <= q // C,
    lambda q, k: k <= q or k < n,
    lambda q, k: abs(q - k) <= 1 or k == 0 or q == 0,
]


@pytest.mark.parametrize("i", range(len(coverage.PATTERNS)))
def test_a_mask_shows_what_its_formula_says(i: int) -> None:
    index = torch.arange(L)
    found = coverage.made(coverage.PATTERNS[i], **SIZES)(0, 0, index.unsqueeze(1), index).expand(L, L)
    assert found.tolist() == [[FORMULAS[i](q, k) for k in range(L)] for q in range(L)]
    assert len(FORMULAS) == len(coverage.PATTERNS)
