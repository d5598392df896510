"""A model of masked tokens with its tokenizer, as a folder holds them: texts with masks in, tokens for each mask out.

Dimensions: B batch, L tokens, M masks, N vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from regard._utils.errors import rejected
from regard_lab.data.batches import length_batches
from regard_lab.models import EncoderLM
from regard_lab.models.hugging_face.hosted import HostedMaskedLM
from regard_lab.tasks.folders import check_tokenizer, load_with_tokenizer
from regard_lab.text.ragged import Ragged
from regard_lab.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Candidate:
    """A token that may stand at a mask.

    Attributes
    ----------
    token : str
        As pictures show it: ``▁`` is a space.
    number : int
        Of the token.
    probability : float
        Among all tokens of the model.
    """

    token: str
    number: int
    probability: float


@dataclass(frozen=True)
class FilledText:
    """What may stand at the masks of a text.

    Attributes
    ----------
    text : str
    masks : tuple of tuple of Candidate
        Of each mask in turn, the likeliest first.
    filled : str
        The text with the likeliest token at each mask, decoded by the tokenizer.
    """

    text: str
    masks: tuple[tuple[Candidate, ...], ...]
    filled: str


class MaskFiller:
    """A model that names masked tokens, with its tokenizer.

    Parameters
    ----------
    model : EncoderLM or HostedMaskedLM
    tokenizer : Tokenizer
    function : str
        What error messages begin with.

    Raises
    ------
    ValueError
        If the model has no head that scores tokens, or the tokenizer no mask, or more tokens than the model.

    Examples
    --------
    >>> from regard_lab.models import EncoderLMConfig
    >>> tokenizer = Tokenizer.learn([], kind="bytes", specials=("end", "pad", "mask", "cls", "sep"))
    >>> filler = MaskFiller(EncoderLM(EncoderLMConfig(261, width=16, layers=1)).eval(), tokenizer)
    >>> (filled,) = filler.fill(["to be <|mask|>r not"], top=3)
    >>> [len(candidates) for candidates in filled.masks]
    [3]
    """

    def __init__(self, model: EncoderLM | HostedMaskedLM, tokenizer: Tokenizer, function: str = "MaskFiller") -> None:
        if isinstance(model, EncoderLM) and model.masked_head is None:
            expected = "have a head that names masked tokens: a folder of ...ForMaskedLM has one"
            raise rejected(function, "model", expected, "an encoder without one")
        if tokenizer.mask is None:
            expected = "have a tokenizer with a mask, which tokenizer_config.json calls mask_token"
            raise rejected(function, "model", expected, f"a {tokenizer!r} without one")
        check_tokenizer(model, tokenizer, function, "model")
        self.model, self.tokenizer, self.function = model, tokenizer, function
        self._mask = tokenizer.mask

    @classmethod
    def load(cls, folder: str | Path, function: str = "load") -> Self:
        """Return the model and the tokenizer in a folder, of ours or of Hugging Face.

        Raises
        ------
        ModelFileError, ValueError
            If there is no such model, its files are damaged, or it names no masked tokens.
        """
        what = "a model that names masked tokens, such as BERT"
        kinds: tuple[type[EncoderLM | HostedMaskedLM], ...] = (EncoderLM, HostedMaskedLM)
        return cls(*load_with_tokenizer(folder, kinds, what, function, torch.float32), function)

    @property
    def mask(self) -> str:
        """How texts spell the mask, such as ``[MASK]``."""
        return self.tokenizer.decode([self._mask], specials=True)

    @torch.no_grad()
    def fill(
        self, texts: Sequence[str], *, top: int = 5, batch: int = 128, names: Sequence[str] | None = None
    ) -> list[FilledText]:
        """Return the likeliest tokens for each mask of each text, as transformers' fill-mask pipeline finds them.

        Names of special tokens in a text, such as ``[MASK]`` and ``[SEP]``, are read as these tokens. Each mask is
        filled by itself: what stands at the others stays masked.

        Parameters
        ----------
        texts : sequence of str
            Each with one mask at least.
        top : int, default 5
            Tokens for each mask.
        batch : int, default 128
            Texts at once.
        names : sequence of str, optional
            What errors call the texts.

        Raises
        ------
        ValueError
            If a text has no mask, or more tokens than the model has positions; or ``top`` or ``batch`` is below 1.
        """
        for name, value in (("top", top), ("batch", batch)):
            if value < 1:
                raise rejected(self.function, name, "be at least 1", value)
        tokens = self._read(texts, names or [f"text {i}" for i in range(len(texts))])
        made: list[FilledText | None] = [None] * len(texts)
        device = next(self.model.parameters()).device
        alike = isinstance(self.model, HostedMaskedLM)
        for rows in length_batches(tokens.lengths.tolist(), batch, alike=alike):
            numbers, lengths = tokens.padded(np.array(rows))
            keep = torch.arange(numbers.shape[1]) < lengths[:, None]
            at = (numbers == self._mask) & keep
            given = None if bool(keep.all()) else keep.to(device)
            shares = self._logits(numbers.to(device), given, at.to(device)).float().softmax(-1).cpu()  # (M, N)
            found = iter(self._candidates(shares, top))
            for row, masks in zip(rows, at.sum(1).tolist()):
                made[row] = self._filled(texts[row], tokens[row], tuple(next(found) for _ in range(masks)))
        return [each for each in made if each is not None]

    def _read(self, texts: Sequence[str], names: Sequence[str]) -> Ragged:
        """Return the tokens of texts, each of which has a mask and fits the model."""
        tokens, config = self.tokenizer.encode_all(texts, specials=True, parse_specials=True), self.model.config
        for row, name in enumerate(names):
            if self._mask not in tokens[row]:
                got = f"none in {texts[row][:60]!r}"
                raise rejected(self.function, name, f"have the model's mask, {self.mask}, where a word is missing", got)
            if config.positions == "learned" and len(tokens[row]) > config.longest:
                expected = f"have at most {config.longest:,} tokens, the positions of the model"
                raise rejected(self.function, name, expected, f"{len(tokens[row]):,}")
        return tokens

    def _logits(self, numbers: Tensor, keep: Tensor | None, at: Tensor) -> Tensor:
        """Return the logits (M, N) of all tokens at the masks."""
        if isinstance(self.model, HostedMaskedLM):
            return self.model(numbers, keep=keep)[at]
        return self.model.logits(self.model(numbers, keep=keep)[at])

    def _candidates(self, shares: Tensor, top: int) -> list[tuple[Candidate, ...]]:
        """Return the likeliest tokens by the probabilities (M, N) of all: of those that the tokenizer can write."""
        best = shares[:, : len(self.tokenizer)].topk(min(top, len(self.tokenizer)))
        return [
            tuple(map(Candidate, self.tokenizer.tokens(numbers), numbers, probabilities))
            for numbers, probabilities in zip(best.indices.tolist(), best.values.tolist())
        ]

    def _filled(self, text: str, numbers: np.ndarray, masks: tuple[tuple[Candidate, ...], ...]) -> FilledText:
        numbers = numbers.copy()
        numbers[numbers == self._mask] = [candidates[0].number for candidates in masks]
        return FilledText(text, masks, self.tokenizer.decode(numbers))
