"""How good predictions are, and which rows have none."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from regard_cli.regress_model import fit, prepare, quality
from regard_cli.tables import Table


def _table(**columns: list[object]) -> Table:
    return Table("a.csv", pd.DataFrame(columns), "CSV")


def test_the_largest_numbers_that_are_taken() -> None:
    x = np.linspace(-1, 1, 12)
    large = _table(x=list(1e100 * x), y=list(1e100 * x))
    small = _table(x=list(x), y=list(x))
    for order in (0, 1):
        found, plain = (quality(fit(prepare(each, "y"), order=order)) for each in (large, small))
        assert found.r2 == pytest.approx(plain.r2, abs=1e-3)
        assert found.error < 0.5e100


def test_numbers_that_differ_by_next_to_nothing() -> None:
    close = ["1e-200", "3e-200", "2e-200"]
    found = prepare(_table(x=close, z=["1", "2", "3"], y=["1", "2", "4"]), "y")
    assert found.left_out == {"x": "the same in every row"}
    with pytest.raises(ValueError, match="target 'y' must differ between rows, got 1e-200 in all"):
        prepare(_table(x=["1", "2", "3"], y=close), "y")


def test_rows_that_no_other_reaches_are_counted() -> None:
    table = _table(x=[0, 1, 2, 10, 20, 21], y=[1, 2, 3, 4, 5, ""])
    fitted = fit(prepare(table, "y"), kernel="boxcar", bandwidth=[1.5], empty="nan")
    found = quality(fitted)
    assert (found.rows, found.out_of_reach) == (3, 2)
    added = fitted.predict_own_rows()
    np.testing.assert_array_equal(added.frame["y_predicted"], [2, 2, 2, np.nan, np.nan, 5])
    assert added.out_of_reach == 2
    others = np.array([3.5, 3.25, 3.0])
    assert found.baseline == pytest.approx(np.sqrt(np.mean((others - [1, 2, 3]) ** 2)))


@pytest.mark.parametrize("y", [[1, 2, 3, 4], ["a", "b", "a", "b"]])
def test_rows_that_nobody_reaches_are_refused_on_request(y: list[object]) -> None:
    fitted = fit(prepare(_table(x=[0, 1, 10, 20], y=y), "y"), kernel="boxcar", bandwidth=[1.5], empty="raise")
    with pytest.raises(ValueError, match=r"got 2 of 4"):
        quality(fitted)


def test_the_mean_is_that_of_the_others() -> None:
    draw = np.random.default_rng(0)
    table = _table(x=list(range(60)), y=list(draw.normal(size=60)))
    found = quality(fit(prepare(table, "y"), kernel="boxcar", bandwidth=[1e-3], empty="mean"))
    assert found.error == pytest.approx(found.baseline)
    assert found.r2 == pytest.approx(1 - (60 / 59) ** 2), "of all rows, whose mean no row is left out of"


def test_two_columns_of_a_hundred_categories_with_a_line() -> None:
    draw = np.random.default_rng(0)
    city, shop = draw.integers(0, 100, (2, 400))
    x = draw.normal(size=400)
    names = {"city": [f"c{i}" for i in city], "shop": [f"s{i}" for i in shop]}
    prepared = prepare(_table(**names, x=list(x), y=list(3 * x)), "y", ["city", "shop", "x"])
    found = quality(fit(prepared, order=1, bandwidth=[10.0, 10.0, 0.5]))
    assert found.r2 > 0.999
