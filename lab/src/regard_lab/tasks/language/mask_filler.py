"""Fill masks in texts with a masked language model from a model folder.

Dimensions: B batch, L tokens, M masks, N vocabulary size.
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
    """A predicted token for a mask.

    Attributes
    ----------
    token : str
        For display: ``▁`` is a space.
    number : int
        The token id.
    probability : float
        Softmax probability over the model's vocabulary.
    """

    token: str
    number: int
    probability: float


@dataclass(frozen=True)
class FilledText:
    """Predicted tokens for the masks of a text.

    Attributes
    ----------
    text : str
    masks : tuple of tuple of Candidate
        For each mask in order, the most likely candidate first.
    filled : str
        The decoded text with the most likely token at each mask.
    """

    text: str
    masks: tuple[tuple[Candidate, ...], ...]
    filled: str


class MaskFiller:
    """A masked language model with its tokenizer.

    Parameters
    ----------
    model : EncoderLM or HostedMaskedLM
    tokenizer : Tokenizer
    function : str
        Prefix of error messages.

    Raises
    ------
    ValueError
        If the model has no masked-language-model head, or if the tokenizer has no mask token or more tokens than the
        model.

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
            expected = "have a masked-language-model head, as ...ForMaskedLM folders have"
            raise rejected(function, "model", expected, "an encoder without one")
        if tokenizer.mask is None:
            expected = "have a tokenizer with a mask_token in tokenizer_config.json"
            raise rejected(function, "model", expected, f"a {tokenizer!r} without one")
        check_tokenizer(model, tokenizer, function, "model")
        self.model, self.tokenizer, self.function = model, tokenizer, function
        self._mask = tokenizer.mask

    @classmethod
    def load(cls, folder: str | Path, function: str = "load") -> Self:
        """Load the model and tokenizer from a regard or Hugging Face folder.

        Raises
        ------
        ModelFileError, ValueError
            If there is no such model, its files are damaged, or it is not a masked language model.
        """
        what = "a masked language model, such as BERT"
        kinds: tuple[type[EncoderLM | HostedMaskedLM], ...] = (EncoderLM, HostedMaskedLM)
        return cls(*load_with_tokenizer(folder, kinds, what, function, torch.float32), function)

    @property
    def mask(self) -> str:
        """The mask token as text, such as ``[MASK]``."""
        return self.tokenizer.decode([self._mask], specials=True)

    @torch.no_grad()
    def fill(
        self, texts: Sequence[str], *, top: int = 5, batch: int = 128, names: Sequence[str] | None = None
    ) -> list[FilledText]:
        """Return the most likely tokens for each mask, with the same results as transformers' fill-mask pipeline.

        Special tokens in a text, such as ``[MASK]`` and ``[SEP]``, are parsed. Each mask is predicted independently:
        the other masks stay masked.

        Parameters
        ----------
        texts : sequence of str
            Each with at least one mask.
        top : int, default 5
            Candidates per mask.
        batch : int, default 128
            Batch size, in texts.
        names : sequence of str, optional
            Names of the texts in error messages.

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
            real = torch.arange(numbers.shape[1]) < lengths[:, None]
            at = (numbers == self._mask) & real
            attention_mask = None if bool(real.all()) else real.to(device)
            shares = self._logits(numbers.to(device), attention_mask, at.to(device)).float().softmax(-1).cpu()  # (M, N)
            found = iter(self._candidates(shares, top))
            for row, masks in zip(rows, at.sum(1).tolist()):
                made[row] = self._filled(texts[row], tokens[row], tuple(next(found) for _ in range(masks)))
        return [each for each in made if each is not None]

    def _read(self, texts: Sequence[str], names: Sequence[str]) -> Ragged:
        """Tokenize texts; raise if one has no mask or is too long for the model."""
        tokens, config = self.tokenizer.encode_all(texts, specials=True, parse_specials=True), self.model.config
        for row, name in enumerate(names):
            if self._mask not in tokens[row]:
                got = f"none in {texts[row][:60]!r}"
                raise rejected(self.function, name, f"have the model's mask, {self.mask}, where a word is missing", got)
            if config.positions == "learned" and len(tokens[row]) > config.max_length:
                expected = f"have at most {config.max_length:,} tokens, the positions of the model"
                raise rejected(self.function, name, expected, f"{len(tokens[row]):,}")
        return tokens

    def _logits(self, numbers: Tensor, attention_mask: Tensor | None, at: Tensor) -> Tensor:
        """Return the logits (M, N) at the masks."""
        if isinstance(self.model, HostedMaskedLM):
            return self.model(numbers, attention_mask=attention_mask)[at]
        return self.model.logits(self.model(numbers, attention_mask=attention_mask)[at])

    def _candidates(self, shares: Tensor, top: int) -> list[tuple[Candidate, ...]]:
        """Return the most likely tokens by their probabilities (M, N), among those in the tokenizer."""
        best = shares[:, : len(self.tokenizer)].topk(min(top, len(self.tokenizer)))
        return [
            tuple(map(Candidate, self.tokenizer.tokens(numbers), numbers, probabilities))
            for numbers, probabilities in zip(best.indices.tolist(), best.values.tolist())
        ]

    def _filled(self, text: str, numbers: np.ndarray, masks: tuple[tuple[Candidate, ...], ...]) -> FilledText:
        numbers = numbers.copy()
        numbers[numbers == self._mask] = [candidates[0].number for candidates in masks]
        return FilledText(text, masks, self.tokenizer.decode(numbers))
