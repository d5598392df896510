"""Measures of classifiers from a matrix of counts: those of scikit-learn on the labels themselves."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from sklearn import metrics

from regard_lab.tasks.classification.training import classification_metrics


@pytest.mark.parametrize("seed", range(12))
def test_they_are_scikit_learns(seed: int) -> None:
    random = np.random.default_rng(seed)
    C = int(random.integers(2, 6))
    true, named = random.integers(0, C, (2, int(random.integers(1, 40))))
    if seed % 3 == 0:
        named[:] = named[0]  # a label that is always named, others that never are
    confusion = np.bincount(C * true + named, minlength=C * C).reshape(C, C)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = classification_metrics(confusion, [str(i) for i in range(C)])
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(true, named))
    assert found["f1"] == pytest.approx(metrics.f1_score(true, named, average="macro", zero_division=0.0))
    assert found["matthews"] == pytest.approx(metrics.matthews_corrcoef(true, named))
    assert ("f1_positive" in found) == (C == 2)
    if C == 2:
        expected = metrics.f1_score(true, named, labels=[0, 1], zero_division=0.0)
        assert found["f1_positive"] == pytest.approx(expected)


def test_of_nothing_there_are_none() -> None:
    assert classification_metrics(np.zeros((2, 2), int), ["a", "b"]) == {}
