"""A classifier of tokens with its tokenizer, as a folder holds them: texts in, a label for each token out.

Dimensions: L tokens, C labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from regard_lab.data.batches import length_batches
from regard_lab.models import TokenClassifier
from regard_lab.models.hugging_face.hosted import HostedTokenClassifier
from regard_lab.tasks.classification.text_classifier import input_layout, readable_length
from regard_lab.tasks.language.folders import check_tokenizer, load_with_tokenizer
from regard_lab.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class LabelledTokens:
    """The tokens of a text with their labels.

    Attributes
    ----------
    text : str
    tokens : tuple of L str
        As pictures show them: ``▁`` is a space.
    spans : tuple of L (int, int)
        Which characters of the text each token stands for: the first, and the one behind the last.
    probabilities : Tensor (L, C)
    cut : bool
        Whether the text has more tokens, which were not read.
    """

    text: str
    tokens: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    probabilities: Tensor
    cut: bool


class TokenLabeller:
    """A classifier of tokens, with its tokenizer.

    Parameters
    ----------
    model : TokenClassifier or HostedTokenClassifier
    tokenizer : Tokenizer

    Raises
    ------
    ValueError
        If the tokenizer has more tokens than the model.

    Examples
    --------
    >>> from regard_lab.models import EncoderLM, EncoderLMConfig
    >>> tokenizer = Tokenizer.learn([], kind="bytes", specials=("end", "pad", "cls", "sep"))
    >>> model = TokenClassifier(EncoderLM(EncoderLMConfig(260, width=16, layers=1)), ["other", "name"])
    >>> (labelled,) = TokenLabeller(model.eval(), tokenizer).label(["né"])
    >>> labelled.spans, labelled.probabilities.shape
    (((0, 1), (1, 2), (1, 2)), torch.Size([3, 2]))
    """

    def __init__(self, model: TokenClassifier | HostedTokenClassifier, tokenizer: Tokenizer) -> None:
        trunk = model.model if isinstance(model, TokenClassifier) else model
        check_tokenizer(trunk, tokenizer, "TokenLabeller", "tokenizer")
        self.model, self.tokenizer = model, tokenizer
        self.length = readable_length(trunk, tokenizer.longest or trunk.config.longest)
        self._layout = input_layout(trunk, tokenizer)

    @classmethod
    def load(cls, folder: str | Path, function: str = "load", model: nn.Module | None = None) -> Self:
        """Return the classifier in a folder, of ours or of Hugging Face; ``model`` is the one in it, if loaded before.

        Raises
        ------
        ModelFileError, ValueError
            If there is none, or it is damaged.
        """
        kinds: tuple[type[TokenClassifier | HostedTokenClassifier], ...] = (TokenClassifier, HostedTokenClassifier)
        return cls(*load_with_tokenizer(folder, kinds, "a classifier of tokens", function, torch.float32, model))

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the C labels."""
        return self.model.labels

    @torch.no_grad()
    def label(self, texts: Sequence[str], *, batch: int = 128) -> list[LabelledTokens]:
        """Return the labels of the tokens of each text, without the special ones around it.

        Parameters
        ----------
        texts : sequence of str
        batch : int, default 128
            Texts at once.
        """
        inputs = self._layout.read(self.tokenizer, texts, length=self.length)
        before, around = len(self._layout.begin), len(self._layout.begin) + len(self._layout.end)
        device = next(self.model.parameters()).device
        made: list[LabelledTokens | None] = [None] * len(texts)
        alike = isinstance(self.model, HostedTokenClassifier)
        for rows in length_batches(inputs.tokens.lengths.tolist(), batch, alike=alike):
            numbers, lengths = inputs.tokens.padded(np.array(rows))
            keep = torch.arange(numbers.shape[1]) < lengths[:, None]
            logits = self.model(numbers.to(device), keep=None if bool(keep.all()) else keep.to(device))
            for row, shares in zip(rows, logits.float().softmax(-1).cpu()):
                spans = self.tokenizer.spans(texts[row])[: len(inputs.tokens[row]) - around]
                read = slice(before, before + len(spans))
                tokens = tuple(self.tokenizer.tokens(inputs.tokens[row][read]))
                made[row] = LabelledTokens(texts[row], tokens, tuple(spans), shares[read], bool(inputs.cut[row]))
        return [each for each in made if each is not None]
