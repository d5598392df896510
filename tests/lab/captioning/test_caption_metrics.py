"""Scores of captions, against those who defined them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pycocoevalcap.bleu.bleu import Bleu
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.rouge.rouge import Rouge

from regard_lab.models.base import END
from regard_lab.tasks.captioning.metrics import (
    CaptionReward,
    CiderD,
    bleu_scores,
    caption_scores,
    caption_words,
    cider_d,
    rouge_l,
)
from regard_lab.text.ragged import pad
from regard_lab.text.vocabulary import SubwordVocabulary

WORDS = ["a", "dog", "cat", "man", "red", "ball", "runs", "sits", "in", "the", "snow", "on", "grass", "with"]
CAPTION = st.lists(st.sampled_from(WORDS), min_size=1, max_size=12)
CORPUS = st.lists(st.tuples(CAPTION, st.lists(CAPTION, min_size=1, max_size=5)), min_size=2, max_size=8)


def keyed(corpus: list[tuple[list[str], list[list[str]]]]) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """Return references and captions as pycocoevalcap takes them."""
    theirs = {i: [" ".join(each) for each in right] for i, (_, right) in enumerate(corpus)}
    return theirs, {i: [" ".join(mine)] for i, (mine, _) in enumerate(corpus)}


@pytest.mark.slow
@given(CORPUS)
def test_cider_d(corpus: list[tuple[list[str], list[list[str]]]]) -> None:
    _, scores = Cider().compute_score(*keyed(corpus))
    ours = cider_d([mine for mine, _ in corpus], [right for _, right in corpus])
    np.testing.assert_allclose(ours, scores, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
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


@pytest.mark.slow
@given(CORPUS)
def test_captions_of_any_image_have_the_frequencies_of_all(
    corpus: list[tuple[list[str], list[list[str]]]],
) -> None:
    metric = CiderD([right for _, right in corpus])
    whole = cider_d([mine for mine, _ in corpus], [right for _, right in corpus])
    for image, (mine, _) in reversed(list(enumerate(corpus))):
        assert metric(image, mine) == whole[image]


def test_what_captions_earn() -> None:
    references = [["a dog runs in the snow", "a brown dog in snow"], ["two cats sleep"], ["a man with a red ball"]]
    vocabulary = SubwordVocabulary.train([text for each in references for text in each], "characters")
    texts = [["a dog runs in the snow", "two cats"], ["a man", ""]]  # of the first image, and of the last
    numbers = [[*vocabulary.encode(text), END] for each in texts for text in each]
    written = pad(numbers)[0]
    metric, words = CiderD([[one.split() for one in each] for each in references]), [t for each in texts for t in each]
    wanted = torch.tensor([metric(image, text.split()) for image, text in zip([0, 0, 2, 2], words)]).view(2, 2)
    rows = torch.tensor([0, 2])
    torch.testing.assert_close(CaptionReward(references, vocabulary)(written, rows), wanted)
    bleu = CaptionReward(references, vocabulary, cider=0.0, bleu=2.0)(written, rows)
    assert bleu[0, 0] == pytest.approx(2.0)
    assert bleu[0, 1] < bleu[1, 0] < 1.0
    assert bleu[1, 1] == 0
    both = CaptionReward(references, vocabulary, cider=1.0, bleu=2.0)(written, rows)
    torch.testing.assert_close(both, wanted + bleu)
