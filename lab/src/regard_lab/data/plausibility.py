"""Data that is not what it seems: targets in another order than their sources, and a header row among the examples."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

# Targets in another order than their sources --------------------------------------------------------------------------


#: Maximum number of pairs to inspect; random orders to compare with; parts of a file that are judged separately.
_PAIRS, _ORDERS, _PARTS = 1000, 50, 10
#: Pairs match if they fit better than random orders by this many standard deviations. 3,279 wholes and parts of 51
#: files of translations, pronunciations and captions reached 8.4 or more, and 4.7 or less when shuffled.
_LIMIT = 5.0
#: Typical relative difference in length between translations. Pairs are judged only if, by their lengths alone, pairs
#: that match would fit better than random orders by this many standard deviations: not a few texts, or equally long
#: ones.
_NOISE, _EXPECTED = 0.3, 8.0
_WORD = re.compile(r"\w+")


def unrelated(first: Sequence[str], second: Sequence[str]) -> bool:
    """Return whether texts fit each other, by length and shared words, no better than in random order.

    Parameters
    ----------
    first, second : sequence of N str
        Not empty. Of N above 1,000, some are looked at. A few, or some of nearly equal length, are always taken to fit.

    Examples
    --------
    >>> words = ["ha" * (1 + number % 40) for number in range(200)]
    >>> unrelated(words, [f"{word}!" for word in words]), unrelated(words, sorted(words))
    (False, True)
    """
    rows = np.linspace(0, len(first) - 1, min(len(first), _PAIRS)).astype(int)
    texts = [[side[row] for row in rows] for side in (first, second)]
    x, y = (np.log([len(text) for text in side]) for side in texts)
    spread = min(x.std(), y.std())
    if spread * np.sqrt(len(rows) - 1) < _EXPECTED * np.hypot(spread, _NOISE):
        return False
    ours, theirs = ([set(_WORD.findall(text.lower())) for text in side] for side in texts)

    def fit(order: np.ndarray) -> tuple[float, int]:
        return float(x @ y[order]), sum(len(words & theirs[row]) for words, row in zip(ours, order))

    random = np.random.default_rng(0)
    chance = np.array([fit(random.permutation(len(rows))) for _ in range(_ORDERS)])
    # A single shared word is not evidence if words are rarely shared.
    deviation = np.sqrt(chance.var(0) + np.array([0.0, 1.0]))
    return bool((fit(np.arange(len(rows))) - chance.mean(0) < _LIMIT * deviation).all())


def shuffled_rows(sources: Sequence[str], targets: Sequence[str]) -> range | None:
    """Return the rows whose targets look shuffled against their sources: all, or from the first such tenth on."""
    if unrelated(sources, targets):
        return range(len(sources))
    for start, stop in pairwise(np.linspace(0, len(sources), _PARTS + 1).astype(int).tolist()):
        if stop > start and unrelated(sources[start:stop], targets[start:stop]):
            return range(start, len(sources))
    return None


# A header row ---------------------------------------------------------------------------------------------------------


#: Common names of columns.
_COLUMNS = """
    source src target tgt trg input output reference translation original text sentence premise hypothesis question
    answer review comment title id label class category sentiment polarity score rating word pronunciation phonemes
    image file filename caption english french german spanish italian portuguese dutch polish russian chinese japanese
    arabic en fr de es it pt nl pl ru zh ja ar
"""
_NAME = re.compile(r"[^\W\d]\w*(?:[ -]\w+){0,2}")
_LETTERS = re.compile(r"[^\W\d_]+")
#: A label that occurs only in the first line is a header if every other label occurs at least this often.
_USUAL = 5


def names_columns(cells: Sequence[str]) -> bool:
    """Return whether the cells of a line are different common names of columns.

    Examples
    --------
    >>> names_columns(["English", "French"]), names_columns(["source_text", "label"]), names_columns(["Go.", "Va !"])
    (True, True, False)
    """
    words, known = [_LETTERS.findall(cell.lower()) for cell in cells], set(_COLUMNS.split())
    return len(set(cells)) == len(cells) and all(each and known.issuperset(each) for each in words)


def is_header(cells: Sequence[str], labels: Sequence[str]) -> bool:
    """Return whether the first line of labelled examples looks like a header: its label occurs nowhere else.

    Parameters
    ----------
    cells : sequence of str
        Of the first line, the label last.
    labels : sequence of str
        Of all lines.

    Examples
    --------
    >>> is_header(["Satz", "Klasse"], ["Klasse", *["gut", "schlecht"] * 9])
    True
    """
    others = Counter(labels)
    if others.pop(cells[-1]) > 1:
        return False
    usual = min(others.values(), default=0) >= _USUAL
    return names_columns(cells) or (usual and all(map(_NAME.fullmatch, cells)))
