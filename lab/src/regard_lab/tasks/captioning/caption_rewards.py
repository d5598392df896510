"""What captions earn that a captioner draws in training: their scores against those of people."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard_lab.models.base import END
from regard_lab.tasks.captioning.caption_metrics import CiderD, caption_words
from regard_lab.text.vocabulary import Vocabulary


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
