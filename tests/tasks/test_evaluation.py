"""Edit distance and error rates, by hand and against a definition written out."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.tasks.evaluation import ErrorRates, edit_distance, error_rates

words = st.text("abc", max_size=7)


def _by_definition(ours: str, theirs: str) -> int:
    @cache
    def distance(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return i + j
        same = distance(i - 1, j - 1) + (ours[i - 1] != theirs[j - 1])
        return min(same, distance(i - 1, j) + 1, distance(i, j - 1) + 1)

    return distance(len(ours), len(theirs))


@given(words, words)
def test_edit_distance_is_its_definition(ours: str, theirs: str) -> None:
    assert edit_distance(ours, theirs) == _by_definition(ours, theirs)


@given(words, words, words)
def test_edit_distance_is_a_metric(a: str, b: str, c: str) -> None:
    assert (edit_distance(a, b) == 0) == (a == b)
    assert edit_distance(a, b) == edit_distance(b, a)
    assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)


def test_rates_by_hand() -> None:
    references = {
        "cat": [("K", "AE", "T")],
        "read": [("R", "EH", "D"), ("R", "IY", "D")],
        "a": [("AH",), ("EY",)],
        "unsaid": [("X",)],
    }
    said = {"cat": ("K", "AE", "T", "S"), "read": ("R", "IY", "D"), "a": ()}
    # One insertion; the second pronunciation exactly; one deletion: 2 edits on 3 + 3 + 1 phonemes, 2 of 3 words wrong.
    rates = error_rates(said, references)
    assert rates == ErrorRates(2, 7, 2, 3)
    assert rates.symbol == pytest.approx(200 / 7)
    assert rates.sequence == pytest.approx(200 / 3)


def test_the_nearest_reference_counts_with_its_own_length() -> None:
    rates = error_rates({"w": tuple("abcd")}, {"w": [tuple("ab"), tuple("abcde")]})
    assert rates == ErrorRates(1, 5, 1, 1)


def test_what_cannot_be_scored_is_refused() -> None:
    with pytest.raises(ValueError, match="error_rates: said must have at least one word, got none"):
        error_rates({}, {})
    with pytest.raises(ValueError, match="references must have an entry for every word, got none for 'dog'"):
        error_rates({"dog": ("D",)}, {"cat": [("K",)]})
