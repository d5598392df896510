"""Scores of captions, against those who defined them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycocoevalcap.bleu.bleu import Bleu
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.rouge.rouge import Rouge

from regard.vision.caption_metrics import bleu_scores, caption_scores, caption_words, cider_d, rouge_l

WORDS = ["a", "dog", "cat", "man", "red", "ball", "runs", "sits", "in", "the", "snow", "on", "grass", "with"]
CAPTION = st.lists(st.sampled_from(WORDS), min_size=1, max_size=12)
CORPUS = st.lists(st.tuples(CAPTION, st.lists(CAPTION, min_size=1, max_size=5)), min_size=2, max_size=8)


def keyed(corpus: list[tuple[list[str], list[list[str]]]]) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """Return references and captions as pycocoevalcap takes them."""
    theirs = {i: [" ".join(each) for each in right] for i, (_, right) in enumerate(corpus)}
    return theirs, {i: [" ".join(mine)] for i, (mine, _) in enumerate(corpus)}


@given(CORPUS)
def test_cider_d(corpus: list[tuple[list[str], list[list[str]]]]) -> None:
    _, scores = Cider().compute_score(*keyed(corpus))
    ours = cider_d([mine for mine, _ in corpus], [right for _, right in corpus])
    np.testing.assert_allclose(ours, scores, rtol=1e-9, atol=1e-12)


@given(CORPUS)
def test_rouge_l(corpus: list[tuple[list[str], list[list[str]]]]) -> None:
    mean, scores = Rouge().compute_score(*keyed(corpus))
    ours = [rouge_l(mine, right) for mine, right in corpus]
    np.testing.assert_allclose(ours, scores, rtol=1e-9, atol=1e-12)
    assert math.isclose(float(np.mean(ours)), mean, rel_tol=1e-9, abs_tol=1e-12)


def test_bleu() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        corpus = [
            (list(random.choice(WORDS, random.integers(1, 12))), [list(random.choice(WORDS, 8)) for _ in range(4)])
            for _ in range(30)
        ]
        corpus += [(right[0], right) for _, right in corpus[:3]]
        theirs, _ = Bleu(4).compute_score(*keyed(corpus), verbose=0)
        ours = bleu_scores([mine for mine, _ in corpus], [right for _, right in corpus])
        np.testing.assert_allclose(ours, 100 * np.array(theirs), rtol=1e-6)


def test_all_of_a_corpus() -> None:
    written = ["A man's dog , in the snow .", ""]
    scores = caption_scores(written, [["a man's dog in the snow"], ["two cats", "a cat and a cat"]])
    assert set(scores) == {"bleu1", "bleu2", "bleu3", "bleu4", "bleu", "chrf", "rouge", "cider"}
    assert scores["rouge"] == pytest.approx(50)
    assert scores["bleu"] == scores["bleu4"] < 100
    assert caption_words("It's 2 dogs—RUNNING!") == ["it's", "2", "dogs", "running"]


def test_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"references must be as many as captions, at least one, got 1 for 0 captions"):
        caption_scores([], [["a"]])
    assert rouge_l([], [["a"]]) == 0
    assert cider_d([[]], [[["a", "b"]]]).tolist() == [0.0]
