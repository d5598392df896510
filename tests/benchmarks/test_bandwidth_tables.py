"""The tables of bandwidths, at tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks import bandwidths, readme
from benchmarks.bandwidths import Margin, Search

pytestmark = pytest.mark.slow


def test_brute_force_leaves_each_point_out() -> None:
    X, y = np.array([[0.0], [1.0], [3.0]]), np.array([0.0, 1.0, 5.0])
    weight = np.exp(-0.5 * np.array([1.0, 4.0, 9.0]))  # of distances 1, 2, 3
    guesses = [
        (weight[0] * 1 + weight[2] * 5) / (weight[0] + weight[2]),
        (weight[0] * 0 + weight[1] * 5) / (weight[0] + weight[1]),
        (weight[2] * 0 + weight[1] * 1) / (weight[2] + weight[1]),
    ]
    found = bandwidths.left_out_error(X, y, np.ones(1))
    assert found == pytest.approx(np.mean((np.array(guesses) - y) ** 2))
    # A line through the other two points.
    assert bandwidths.left_out_error(X, y, np.ones(1), order=1) == pytest.approx(np.mean([1.0, (2 / 3) ** 2, 4.0]))
    # Nobody but the nearest.
    assert bandwidths.left_out_error(X, y, np.full(1, 0.5), "triangular") == pytest.approx(np.mean([1.0, 1.0, 16.0]))


@pytest.mark.parametrize(("kernel", "order"), [("gaussian", 0), ("gaussian", 1), ("triangular", 0)])
def test_a_search_is_near_the_least(kernel: str, order: int) -> None:
    found = bandwidths.search("sine", *bandwidths.sine(60), kernel, order, np.geomspace(0.05, 3, 25))
    assert found.above < 0.01
    assert (found.points, found.features, found.kernel, found.order) == (60, 1, kernel, order)


def test_a_margin_is_how_many_times_the_error_is() -> None:
    found = bandwidths.margin("2 of 6 features matter", 120, seeds=2, tested=200)
    assert len(found.ratios) == 2
    assert min(found.ratios) > 1.2


def test_tables_and_marks(tmp_path: Path) -> None:
    searches = [Search("sine", 9, 1, "gaussian", 0, 20, 0.1, error, 0.1, 1.0) for error in (0.9, 1.004)]
    margins = [Margin("some", 9, (2.0, 3.0), (1.0, 1.0))]
    text = bandwidths.markdown(searches, margins, {"CPU": "made up"})
    assert "| +0.400% |" in text and "| some | 9 | 2.5000 | 1.0000 | 2.50 × | 2.00 × |" in text
    numbers = tmp_path / "bandwidths.json"
    assert readme.of_bandwidths(numbers) == {}
    numbers.write_text(json.dumps({"marks": bandwidths.marks(searches, margins)}), encoding="utf-8")
    page = "<!-- bandwidth-loo -->?<!-- /bandwidth-loo -->; <!-- bandwidth-learned -->?<!-- /bandwidth-learned -->"
    filled = readme.filled(page, readme.of_bandwidths(numbers))
    assert "-->0.40% higher<!--" in filled and "-->2.5 × (some)<!--" in filled
