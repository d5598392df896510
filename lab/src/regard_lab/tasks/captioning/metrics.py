"""Scores of captions against what people wrote, and rewards made of them.

BLEU and chrF are sacreBLEU's. Captions are compared as words in small letters, without signs, as those who defined
these scores for captions do.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from regard._utils.errors import rejected
from regard_lab.models.base import END
from regard_lab.tasks.translation.metrics import chrf
from regard_lab.text.vocabulary import Vocabulary

# Scores of captions against all that people wrote: BLEU-1 … 4, chrF, ROUGE-L and CIDEr-D ------------------------------


#: CIDEr-D (Vedantam 2015): maximum n of n-grams, standard deviation of lengths in words, and scale.
_N, _SIGMA, _CIDER = 4, 6.0, 10.0
#: Weight β of recall over precision in ROUGE-L of captions.
_BETA = 1.2
_WORD = re.compile(r"\w+(?:['’]\w+)*")

Grams = Counter[tuple[str, ...]]


def caption_words(text: str) -> list[str]:
    """Return the words that captions are compared by.

    Examples
    --------
    >>> caption_words("A man's dog , in the snow .")
    ['a', "man's", 'dog', 'in', 'the', 'snow']
    """
    return _WORD.findall(text.lower())


def caption_scores(written: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the scores of captions, each against all its references.

    Parameters
    ----------
    written : sequence of str
        One for each image.
    references : sequence of sequence of str
        For each image at least one.

    Returns
    -------
    dict
        ``bleu1`` … ``bleu4``, ``bleu`` (the last of these), ``chrf``, ``rouge`` and ``cider``: the higher the better,
        100 at most but for CIDEr-D, of which 1000 is the most.

    Raises
    ------
    ValueError
        If there are none, or not as many references.

    Examples
    --------
    >>> scores = caption_scores(["a dog runs in the snow"], [["a dog runs in the snow", "a dog in snow"]])
    >>> round(scores["bleu4"]), round(scores["rouge"])
    (100, 100)
    """
    if not written or len(written) != len(references):
        got = f"{len(references)} for {len(written)} captions"
        raise rejected("caption_scores", "references", "be as many as captions, at least one", got)
    ours = [caption_words(text) for text in written]
    theirs = [[caption_words(text) for text in each] for each in references]
    bleus = bleu_scores(ours, theirs)
    return {
        **{f"bleu{n}": value for n, value in enumerate(bleus, start=1)},
        "bleu": bleus[-1],
        "chrf": chrf([" ".join(each) for each in ours], [[" ".join(one) for one in each] for each in theirs]).value,
        "rouge": 100 * float(np.mean([rouge_l(mine, each) for mine, each in zip(ours, theirs)])),
        "cider": 100 * float(np.mean(cider_d(ours, theirs))),
    }


def bleu_scores(written: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]) -> list[float]:
    """Return BLEU-1 … BLEU-4 of a corpus of words, as sacreBLEU counts them; 0 where no n-gram is right."""
    from sacrebleu.metrics.bleu import BLEU

    streams = [[" ".join(one) for one in stream] for stream in _streams(references)]
    hypotheses = [" ".join(each) for each in written]
    made = []
    for order in range(1, _N + 1):
        metric = BLEU(tokenize="none", force=True, max_ngram_order=order, smooth_method="none")
        made.append(float(metric.corpus_score(hypotheses, streams).score))
    return made


def rouge_l(written: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return ROUGE-L (Lin 2004) of a caption, in [0, 1]: the best precision and the best recall of all references.

    ::

        F = (1 + β²) P R / (R + β² P),  P and R the longest common subsequence over the lengths,  β = 1.2

    Examples
    --------
    >>> round(rouge_l("a dog runs".split(), ["a big dog runs".split()]), 3)
    0.836
    """
    if not written:
        return 0.0
    common = [(_common_subsequence(written, each), len(each)) for each in references if each]
    precision = max((found / len(written) for found, _ in common), default=0.0)
    recall = max((found / length for found, length in common), default=0.0)
    if not precision or not recall:
        return 0.0
    return (1 + _BETA**2) * precision * recall / (recall + _BETA**2 * precision)


class CiderD:
    """CIDEr-D (Vedantam 2015, arXiv 1411.5726): how much a caption says of what those of the same image say.

    n-grams count by how rare they are among the images; of an n-gram that is written too often, no more counts than a
    reference has; and a caption of another length than the reference counts less.

    Parameters
    ----------
    references : sequence of sequence of sequence of str
        The words of each caption of each image, from which document frequencies are counted.

    Examples
    --------
    >>> metric = CiderD([[["a", "red", "ball", "flies"]], [["two", "cats", "sleep", "here"]]])
    >>> metric(0, ["a", "red", "ball", "flies"]), metric(1, ["a", "red", "ball", "flies"])
    (10.0, 0.0)
    """

    def __init__(self, references: Sequence[Sequence[Sequence[str]]]) -> None:
        grams = [[_grams(one) for one in each] for each in references]
        self._seen = Counter(gram for each in grams for gram in set().union(*each))
        self._images = math.log(max(len(references), 1))
        self._references = [[self._weighed(one) for one in each] for each in grams]

    def __call__(self, image: int, words: Sequence[str]) -> float:
        """Return the score of a caption of an image, in [0, 10]."""
        vector, norms, length = self._weighed(_grams(words))
        total, references = 0.0, self._references[image]
        for other, other_norms, other_length in references:
            products = [0.0] * _N
            for gram, weight in vector.items():
                right = other.get(gram, 0.0)
                products[len(gram) - 1] += min(weight, right) * right
            near = math.exp(-((length - other_length) ** 2) / (2 * _SIGMA**2))
            scales = (ours * theirs for ours, theirs in zip(norms, other_norms))
            total += near * sum(product / scale for product, scale in zip(products, scales) if scale > 0)
        return _CIDER * total / _N / max(len(references), 1)

    def _weighed(self, grams: Grams) -> tuple[dict[tuple[str, ...], float], list[float], int]:
        """Return the weight of each n-gram, the norm for each n, and the length compared, counted in 2-grams."""
        seen, images = self._seen, self._images
        vector = {gram: count * (images - math.log(max(1, seen[gram]))) for gram, count in grams.items()}
        squares = [0.0] * _N
        for gram, weight in vector.items():
            squares[len(gram) - 1] += weight**2
        return vector, [math.sqrt(each) for each in squares], sum(n for gram, n in grams.items() if len(gram) == 2)


def cider_d(written: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]) -> np.ndarray:
    """Return the :class:`CiderD` of each of N captions, (N,), in [0, 10].

    Frequencies are those of these references, so a score depends on what it is computed with.

    Examples
    --------
    >>> right = [["a", "red", "ball", "flies"], ["two", "cats", "sleep", "here"]]
    >>> cider_d(right, [[each] for each in right]).tolist()
    [10.0, 10.0]
    """
    metric = CiderD(references)
    return np.array([metric(image, words) for image, words in enumerate(written)])


def _grams(words: Sequence[str]) -> Grams:
    return Counter(tuple(words[i : i + n]) for n in range(1, _N + 1) for i in range(len(words) - n + 1))


def _common_subsequence(ours: Sequence[str], theirs: Sequence[str]) -> int:
    row = [0] * (len(theirs) + 1)
    for mine in ours:
        diagonal = 0
        for j, yours in enumerate(theirs, start=1):
            diagonal, row[j] = row[j], diagonal + 1 if mine == yours else max(row[j], row[j - 1])
    return row[-1]


def _streams(references: Sequence[Sequence[Sequence[str]]]) -> list[list[Sequence[str]]]:
    """Return the first reference of every caption, then the second ones; where there is none, the first again."""
    most = max(map(len, references))
    return [[each[i] if i < len(each) else each[0] for each in references] for i in range(most)]


# What captions earn that a captioner draws in training: their scores against those of people --------------------------


class CaptionReward:
    """A weighted sum of CIDEr-D, in [0, 10], and of BLEU-4 in [0, 1], each caption against all of its image.

    A caption is short, and most have no run of four words that is right: BLEU counts one more n-gram, and one more that
    is right, of two to four words (Lin & Och 2004).

    Parameters
    ----------
    references : sequence of sequence of str
        The captions of each image.
    vocabulary : Vocabulary
        What turns the numbers of captions into text.
    cider, bleu : float
        The weights.
    """

    def __init__(
        self, references: Sequence[Sequence[str]], vocabulary: Vocabulary, cider: float = 1.0, bleu: float = 0.0
    ) -> None:
        from sacrebleu.metrics.bleu import BLEU

        words = [[caption_words(one) for one in each] for each in references]
        self._vocabulary, self._weights = vocabulary, (cider, bleu)
        self._references = [[" ".join(one) for one in each] for each in words]
        self._cider = CiderD(words) if cider else None
        self._bleu = BLEU(tokenize="none", force=True, effective_order=True, smooth_method="add-k", smooth_value=1)

    def __call__(self, written: Tensor, rows: Tensor) -> Tensor:
        """Return what captions (I · K, T) of the images in these rows (I,) earn, (I, K)."""
        images, earned = rows.tolist(), []
        for place, numbers in enumerate(written.tolist()):
            image = images[place * len(images) // len(written)]
            earned.append(self._earned(image, caption_words(self._vocabulary.decode(numbers[: numbers.index(END)]))))
        return torch.tensor(earned).view(len(images), -1)

    def _earned(self, image: int, words: Sequence[str]) -> float:
        (cider, bleu), earned = self._weights, 0.0
        if self._cider is not None:
            earned += cider * self._cider(image, words)
        if bleu:
            earned += bleu / 100 * self._bleu.sentence_score(" ".join(words), self._references[image]).score
        return earned
