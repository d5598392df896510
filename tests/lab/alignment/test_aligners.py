"""Aligners find which words go together, in blocks as in one go, and say what is wrong."""

from __future__ import annotations

import random
import sys
from types import ModuleType

import pytest

from regard_lab.tasks.translation.alignment import links as aligners
from regard_lab.tasks.translation.alignment.links import align_words, lexical


def made(count: int = 400, seed: int = 0) -> tuple[list[list[str]], list[list[str]], list[set[tuple[int, int]]]]:
    """Return sentences of made-up words, their translations with neighbours exchanged, and who goes with whom."""
    drawn = random.Random(seed)
    sources, targets, links = [], [], []
    for _ in range(count):
        words = drawn.sample(range(60), drawn.randint(2, 9))
        order = list(range(len(words)))
        for place in range(len(order) - 1):
            if drawn.random() < 0.3:
                order[place : place + 2] = reversed(order[place : place + 2])
        sources.append([f"E{word}" for word in words])
        targets.append([f"f{words[place]}" for place in order])
        links.append({(place, j) for j, place in enumerate(order)})
    return sources, targets, links


def test_words_that_go_together_are_linked():
    sources, targets, links = made()
    for method in ("intersection", "grow-diag-final-and"):
        found = align_words(sources, targets, method=method)
        right = sum(len(one & two) for one, two in zip(found, links))
        assert right / sum(map(len, links)) > 0.99
        assert right / sum(map(len, found)) > 0.98


def test_words_of_no_counterpart_are_not_linked():
    sources, targets, _ = made()
    for number, each in enumerate(targets):
        each.insert(number % (len(each) + 1), "ne")
    found = align_words(sources, targets, method="intersection")
    linked = sum(targets[k][j] == "ne" for k, links in enumerate(found) for _, j in links)
    assert linked < 0.02 * len(targets)


def test_blocks_change_nothing(monkeypatch):
    sources, targets, _ = made(60)
    whole = align_words(sources, targets)
    monkeypatch.setattr(aligners, "_BLOCK", 50)
    assert align_words(sources, targets) == whole
    # What is beyond the most to learn from is linked all the same.
    monkeypatch.setattr(aligners, "_MOST", 1500)
    few = align_words(sources, targets)
    assert len(few) == len(whole) and all(few[-5:])


def test_capitals_make_no_other_word():
    sources, targets, _ = made(100)
    shouted = [[word.upper() for word in each] if i % 2 else each for i, each in enumerate(targets)]
    assert align_words(sources, shouted) == align_words(sources, targets)


@pytest.mark.parametrize("sides", [([], []), ([[]], [[]]), ([["a"], []], [[], ["b"]]), ([["a"]], [["b"]])])
def test_empty_sides_have_no_links(sides):
    found = align_words(*sides)
    assert found == [{(0, 0)} if source and target else set() for source, target in zip(*sides)]
    assert len(list(lexical(*sides))) == len(sides[0])


def test_sides_must_have_as_many_sentences():
    with pytest.raises(ValueError, match="targets must be as many as sources, 1, got 2"):
        align_words([["a"]], [["b"], ["c"]])


def test_an_unknown_aligner_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="one of 'eflomal', 'lexical', got 'giza'"):
        align_words([["a"]], [["b"]], "giza")


def test_a_missing_aligner_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "eflomal", None)
    with pytest.raises(ValueError, match=r"be installed \(pip install 'regard-lab\[align\]'\), got 'eflomal'"):
        align_words([["a"]], [["b"]], "eflomal")


@pytest.fixture
def eflomal(monkeypatch):
    """A stand-in that writes what it is told to, as the package would."""

    class Aligner:
        lines = ("0-0\n", "0-0\n")
        failure: Exception | None = None
        given: list[list[str]]

        def align(self, source, target, links_filename_fwd, links_filename_rev, quiet):
            assert quiet
            Aligner.given = [list(source), list(target)]
            if self.failure is not None:
                raise self.failure
            for name, text in zip((links_filename_fwd, links_filename_rev), self.lines):
                with open(name, "w", encoding="utf-8") as file:  # noqa: PTH123
                    file.write(text)

    package = ModuleType("eflomal")
    package.Aligner = Aligner
    monkeypatch.setitem(sys.modules, "eflomal", package)
    return Aligner


def test_another_aligner_is_given_words_between_spaces(eflomal):
    eflomal.lines = ("0-0 1-1\n\n", "0-0\n\n")
    assert align_words([["New York", "B"], []], [["c", "d"], ["e"]], "eflomal", "union") == [{(0, 0), (1, 1)}, set()]
    assert eflomal.given == [["new_york b", ""], ["c d", "e"]]


@pytest.mark.parametrize("failure", [OSError("no space"), RuntimeError("killed")])
def test_another_aligner_that_fails_is_told(eflomal, failure):
    eflomal.failure = failure
    with pytest.raises(ValueError, match=f"eflomal has failed: {failure}"):
        align_words([["a"]], [["b"]], "eflomal")


@pytest.mark.parametrize("lines", [("", ""), ("0-0\n0-0\n", "0-0\n"), ("0-x\n", "0-0\n")])
def test_another_aligner_that_answers_nonsense_is_told(eflomal, lines):
    eflomal.lines = lines
    with pytest.raises(ValueError, match=r"eflomal('s answer)? must (give|have)"):
        align_words([["a"]], [["b"]], "eflomal")
