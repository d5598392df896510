"""The comparison on tables: what is read, what is computed, what is printed."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks import tables


@pytest.mark.parametrize("name", list(tables.TABLES))
def test_tables_are_whole(name):
    table = tables.TABLES[name]()
    assert len(table.X) == len(table.y) > 100
    assert np.isfinite(table.y).all() and table.y.std() > 0
    assert not table.X.isna().any().any()
    numbers = [kind.kind for column, kind in table.X.dtypes.items() if column not in table.categories]
    assert set(numbers) <= {"f", "i"}


@pytest.mark.slow
def test_a_comparison_is_printed_with_the_best_in_bold(monkeypatch):
    monkeypatch.setattr(tables, "ROWS", 60)
    row = tables.compare(tables.TABLES["iris"]())
    assert row["rows"] == 60 and (row["numbers"], row["categories"]) == (3, 1)
    assert {len(folds) for folds in row["contenders"].values()} == {tables.FOLDS}
    best = min(row["contenders"], key=lambda name: tables.unexplained(row, name))
    lines = tables.markdown({"tables": [row]}).splitlines()
    place = list(row["contenders"]).index(best) + 4
    assert lines[2].split("|")[place].strip() == f"**{tables.unexplained(row, best):.3f}**"
    assert lines[3].startswith("| geometric mean |") and lines[-1].startswith("| longest |")
