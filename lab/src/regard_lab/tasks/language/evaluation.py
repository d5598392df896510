"""Evaluation of language models on text: loss, perplexity, bits per byte and per character."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from regard._utils.errors import rejected
from regard_lab.data.packing import LanguageBatches, PackedBatches, write_shards
from regard_lab.models import DecoderLM, EncoderLM
from regard_lab.models.hugging_face.hosted import HostedMaskedLM, HostedWriter
from regard_lab.tasks.language.pretraining import HostedMaskedTokens, HostedNextTokens, MaskedTokens, NextTokens
from regard_lab.text.tokenizer import Tokenizer
from regard_lab.text.unknown import UnknownCharacters
from regard_lab.training.objectives import Objective

#: Maximum default window in tokens, and number of tokens to process at once.
_WINDOW, _AT_ONCE = 1024, 1 << 14


@dataclass(frozen=True)
class TextScores:
    """The loss of a model on a text.

    Attributes
    ----------
    nats : float
        The sum over the targets.
    targets : int
        Tokens that were predicted; of a model of masked tokens, those that were masked.
    documents, characters, bytes : int
        Of the text, in UTF-8.
    whole : bool
        Whether all of the text was predicted, each token from those before it: only then are bits those of the text.
    unknown : UnknownCharacters
        Characters that the vocabulary cannot spell; a text that has some is not predicted as a whole.
    """

    nats: float
    targets: int
    documents: int
    characters: int
    bytes: int
    whole: bool = True
    unknown: UnknownCharacters = field(default_factory=UnknownCharacters)

    @property
    def loss(self) -> float:
        """The mean loss per token, in nats."""
        return self.nats / self.targets

    def report(self) -> dict[str, float | int]:
        """Return the measures by name.

        Examples
        --------
        >>> report = TextScores(nats=200 * math.log(2), targets=100, documents=1, characters=390, bytes=400).report()
        >>> report["loss"], report["perplexity"], report["bits_per_byte"]
        (1.3863, 4.0, 0.5)
        """
        bits = self.nats / math.log(2)
        report: dict[str, float | int] = {"documents": self.documents, "tokens": self.targets}
        report |= {"loss": round(self.loss, 4), "perplexity": round(math.exp(min(self.loss, 700.0)), 3)}
        if self.whole:
            report["bits_per_byte"] = round(bits / self.bytes, 4)
            report["bits_per_character"] = round(bits / self.characters, 4)
        return report


@torch.no_grad()
def score_text(
    model: DecoderLM | EncoderLM | HostedWriter | HostedMaskedLM,
    tokenizer: Tokenizer,
    documents: Iterable[str],
    *,
    length: int | None = None,
    stride: int | None = None,
    batch: int = 128,
    precision: str = "float32",
    function: str = "score_text",
) -> TextScores:
    """Return the loss of a model on documents, each by itself.

    A document longer than a window is read by one that moves on, and each token is predicted once, from at least
    ``length − stride`` tokens before it. A document begins with the tokenizer's begin token, if there is one, and its
    end is predicted, too. Of a model of masked tokens, 15 % of the tokens are masked, the same ones every time.

    Parameters
    ----------
    model : DecoderLM, EncoderLM, HostedWriter or HostedMaskedLM
        In evaluation mode.
    tokenizer : Tokenizer
    documents : iterable of str
    length : int, optional
        Tokens of a window; by default as many as the model was made for, 1024 at most.
    stride : int, optional
        Tokens that the window moves on by; half its length by default. Not of masked tokens.
    batch : int, default 128
        Windows at once, at most.
    precision : {"float32", "bfloat16"}
        Of matrix products.
    function : str
        What error messages begin with.

    Raises
    ------
    ValueError
        If an argument is out of its range, there is no text, or the model has no head that names masked tokens.

    Examples
    --------
    >>> from regard_lab.models import DecoderLMConfig
    >>> tokenizer = Tokenizer.learn([], kind="bytes")
    >>> model = DecoderLM(DecoderLMConfig(258, width=16, layers=1, max_length=8)).eval()
    >>> score_text(model, tokenizer, ["to be or not", "to be"], stride=4).targets  # 17 letters, 2 ends
    19
    """
    max_length = model.config.max_length
    length = min(max_length, _WINDOW) if length is None else length
    most = max_length if model.config.positions == "learned" else 1 << 20
    if not 2 <= length <= most:
        raise rejected(function, "length", f"be from 2 to {most:,}", length)
    forward = isinstance(model, DecoderLM | HostedWriter)
    if isinstance(model, HostedWriter) and model.is_pair:
        got = f"{type(model.module).__name__}, an encoder–decoder"
        raise rejected(function, "model", "be a decoder or a model of masked tokens", got)
    if not forward and stride is not None:
        raise rejected(function, "stride", "be left out for a model of masked tokens", stride)
    stride = max(length // 2, 1) if stride is None and forward else stride
    if stride is not None and not 1 <= stride <= length:
        raise rejected(function, "stride", f"be from 1 to {length:,}, the length of a window", stride)
    objective = _objective(model, tokenizer, function)
    sizes, unknown = [0, 0], UnknownCharacters()

    def counted() -> Iterator[str]:
        nonlocal unknown
        for text in documents:
            unknown += UnknownCharacters.of(tokenizer, [text])
            sizes[0], sizes[1] = sizes[0] + len(text), sizes[1] + len(text.encode())
            yield text

    device = next(model.parameters()).device
    with TemporaryDirectory(prefix="regard-") as folder:
        shards = write_shards(counted(), tokenizer, Path(folder))
        rows = max(1, min(batch, _AT_ONCE // length))
        batches: LanguageBatches = PackedBatches(shards, length=length, rows=rows, pad=tokenizer.pad or 0)
        sums = torch.zeros(2, dtype=torch.float64)
        for each in batches.once(stride):
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                sums += objective.validation(model, each.to(device)).cpu()
        count = len(shards)
        del batches, shards  # close the mapped files
    nats, targets = sums.tolist()
    whole = forward and tokenizer.begin is not None and tokenizer.keeps_spaces and not unknown
    return TextScores(nats, int(targets), count, sizes[0], sizes[1], whole, unknown)


def _objective(
    model: DecoderLM | EncoderLM | HostedWriter | HostedMaskedLM, tokenizer: Tokenizer, function: str
) -> Objective:
    if isinstance(model, DecoderLM):
        return NextTokens(separate=True)
    if isinstance(model, HostedWriter):
        return HostedNextTokens(separate=True)
    if isinstance(model, EncoderLM) and model.masked_head is None:
        raise rejected(function, "model", "have a head that names masked tokens, or be a classifier", "a bare encoder")
    if tokenizer.mask is None:
        raise rejected(function, "model", "have a tokenizer with a mask", repr(tokenizer))
    return HostedMaskedTokens(tokenizer) if isinstance(model, HostedMaskedLM) else MaskedTokens(tokenizer)
