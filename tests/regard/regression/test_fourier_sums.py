"""Sums of Gaussians by transforms, and moments about queries: never further off than their bound says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from regard.regression._sums.fourier import MARGIN, FourierSums, Series


def sums(query, points, columns, power):
    """Return the sums in long doubles (R, L)."""
    u = points.astype(np.longdouble) - query[:, None].astype(np.longdouble)
    kernel = np.exp(-(u**2).sum(-1) / 2) * np.prod([u[..., i] ** b for i, b in enumerate(power)], axis=0)
    return columns.astype(np.longdouble) @ kernel.T


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None)
@given(
    d=st.integers(1, 3),
    n=st.integers(1, 60),
    spans=st.permutations([0.0, 1e-6, 1.0, 12.0, 40.0]),
    digits=st.integers(7, 14),
    size=st.sampled_from([1e-100, 1.0, 1e100]),
    seed=st.integers(0, 2**20),
)
def test_no_sum_is_further_off_than_its_bound(d, n, spans, digits, size, seed):
    rng = np.random.default_rng(seed)
    points = rng.choice([rng.random((n, d)), np.zeros((n, d)), np.round(rng.random((n, d)))]) * np.array(spans[:d])
    columns = size * np.stack([np.ones(n), rng.normal(size=n), rng.standard_cauchy(n)])
    series = Series(points.min(0), points.max(0), 10.0**-digits)
    query = points[rng.integers(n, size=20)] + rng.normal(size=(20, d))
    query = query.clip(series.low - MARGIN, series.high + MARGIN)
    powers = [power for power in itertools.product(range(5), repeat=d) if sum(power) <= 4]
    made = FourierSums(series, list(points.T), list(columns))
    found, errors = made.at(list(query.T), powers), made.errors(powers)
    for i, power in enumerate(powers):
        wrong = np.abs(found[:, i] - sums(query, points, columns, power)).max(1)
        assert (wrong <= errors[:, i]).all(), (power, wrong, errors[:, i])
    assert (errors[:, 0] <= 1e4 * 10.0**-digits * np.abs(columns).sum(1) * 3).any()  # and a bound says something


@pytest.mark.parametrize("n", [1, 3])
def test_the_bound_is_of_one_point_what_it_is_of_many(n):
    points = np.full((n, 1), 3.7)
    made = FourierSums(Series(np.zeros(1), np.full(1, 900.0), 1e-12), [points[:, 0]], [np.ones(n)])
    found = made.at([np.array([3.7, 5.0, 500.0])], [(0,)])[0, 0]
    expected = n * np.exp([0.0, -(1.3**2) / 2, -1e5])
    assert (np.abs(found - expected) <= made.errors([(0,)])[0, 0]).all()
