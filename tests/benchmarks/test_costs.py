"""The fit of the cost model."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.costs import fitted


def test_rates_are_found_again_whatever_one_call_took() -> None:
    draw = np.random.default_rng(0)
    rates = np.array([1e-5, 2e-5, 3e-10, 0.0, 2e-11, 5e-10])
    rows = [
        (1.0, float(batch), pairs, pairs * keys, pairs * values, numbers)
        for batch, pairs, keys, values, numbers in zip(
            draw.integers(1, 64, 80), 10 ** draw.uniform(2, 8, 80), draw.integers(1, 128, 80),
            draw.integers(1, 128, 80), 10 ** draw.uniform(2, 6, 80),
        )
    ]  # fmt: skip
    seconds = [float(rates @ row) for row in rows]
    seconds[3] *= 20
    found = fitted(rows, seconds)
    assert min(found) >= 0
    predicted = np.array(rows) @ np.array(found)
    np.testing.assert_allclose(np.delete(predicted, 3), np.delete(seconds, 3), rtol=0.1)
    assert found[2] == pytest.approx(3e-10, rel=0.1)
