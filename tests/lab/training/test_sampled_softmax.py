"""Sampled softmax: its candidates and their bias by loops, and what it becomes with many draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from regard_lab.training.objectives import SampledSoftmax, cross_entropy

IGNORED = -100


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=12),
    st.integers(1, 30),
    st.integers(1, 3),
    st.integers(0, 5),
    st.booleans(),
    st.integers(0, 1000),
)
def test_candidates_and_their_bias(
    counts: list[int], draws: int, rows: int, steps: int, biased: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    N = len(counts)
    weight, bias = torch.randn(N, 4, dtype=torch.float64), torch.randn(N, dtype=torch.float64) if biased else None
    targets = torch.randint(N, (rows, steps)).masked_fill(torch.rand(rows, steps) < 0.3, IGNORED)
    (some, shift), placed = SampledSoftmax(np.array(counts), draws).among((weight, bias), targets, IGNORED)
    assert some.shape[1:] == (4,) and some.shape[0] == len(shift) <= min(N, draws + targets.numel())
    assert torch.equal(placed == IGNORED, targets == IGNORED)
    # Each candidate is a row of the vocabulary; which one tells how likely it was to be one.
    shares = [(count + 1) / sum(each + 1 for each in counts) for count in counts]
    powers = [share**0.75 for share in shares]
    n, chosen = int((targets != IGNORED).sum()), []
    for row, by in zip(some, shift):
        i = int((weight - row).abs().sum(1).argmin())
        assert torch.equal(weight[i], row)
        chosen.append(i)
        missed = (1 - shares[i]) ** n * (1 - powers[i] / sum(powers)) ** draws
        expected = -math.log(1 - missed) + (0.0 if bias is None else float(bias[i]))
        assert float(by) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert len(set(chosen)) == len(chosen)
    for place, target in zip(placed.flatten().tolist(), targets.flatten().tolist()):
        assert target == IGNORED or chosen[place] == target


def test_with_many_draws_it_is_the_cross_entropy_of_all_symbols() -> None:
    torch.manual_seed(0)
    features = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(20, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(20, (2, 5))
    targets[0, 3] = IGNORED
    found = []
    for sampled in (None, SampledSoftmax(np.arange(20), 5000)):
        given_, at = ((weight, None), targets) if sampled is None else sampled.among((weight, None), targets, IGNORED)
        loss, likely = cross_entropy(features, given_, at, ignore_index=IGNORED)
        found.append([loss, likely, *torch.autograd.grad(loss, [features, weight])])
    for all_, some in zip(*found):
        torch.testing.assert_close(some, all_, atol=1e-9, rtol=1e-9)


@pytest.mark.slow
def test_its_sum_estimates_the_sum_over_all_symbols() -> None:
    """Over many choices, exp(z − log π) of the candidates sums to about what exp(z) of all symbols does."""
    torch.manual_seed(0)
    counts, K, n = np.array([90, 40, 20, 10, 5, 5, 2, 1, 1, 0]), 3, 4
    logits = torch.randn(10, 1, dtype=torch.float64)
    sampled = SampledSoftmax(counts, K)
    frequencies = torch.from_numpy((counts + 1) / (counts + 1).sum())
    sums = []
    for _ in range(8000):
        targets = torch.multinomial(frequencies, n, replacement=True).view(1, n)  # as a text has them
        (some, shift), _ = sampled.among((logits, None), targets, IGNORED)
        sums.append(float((some[:, 0] + shift).exp().sum()))
    mean, error = np.mean(sums), np.std(sums) / math.sqrt(len(sums))
    assert abs(mean - float(logits.exp().sum())) < 4 * error < 0.1 * mean


@pytest.mark.parametrize(
    ("counts", "draws", "sentence"),
    [
        (np.array([]), 3, "counts must be one count, 0 or more, for each symbol"),
        (np.array([1, -1]), 3, "counts must be one count"),
        (np.array([1, 1]), 0, "draws must be at least 1, got 0"),
    ],
)
def test_what_is_refused(counts: np.ndarray, draws: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SampledSoftmax(counts, draws)
