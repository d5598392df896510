"""Trained classifiers of texts, tokens and images, with their preprocessing.

Dimensions: N texts, C labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from regard._utils.errors import in_section, rejected
from regard._utils.files import write_atomically
from regard_lab.data.batches import label_batch, length_batches
from regard_lab.data.images import PREPROCESSOR, ImageProcessor, Preprocessing
from regard_lab.models import (
    DecoderLM,
    EncoderLM,
    EncoderLMConfig,
    ImageClassifier,
    SequenceClassifier,
    TokenClassifier,
    load,
    save,
)
from regard_lab.models.folders import json_bytes
from regard_lab.models.hugging_face.hosted import Hosted, HostedClassifier, HostedImageClassifier, HostedTokenClassifier
from regard_lab.tasks.folders import check_tokenizer, load_with_tokenizer
from regard_lab.text.inputs import InputLayout, Inputs
from regard_lab.text.tokenizer import Tokenizer

# A classifier with its preprocessing, as a folder holds them ---------------------------------------------------------


class _Classifier:
    """A model that scores labels, with what prepares its inputs."""

    model: Any

    @classmethod
    def load(cls, folder: str | Path, function: str = "load", model: nn.Module | None = None) -> Self:
        """Load the classifier from a regard or Hugging Face folder.

        Parameters
        ----------
        folder : str or Path
        function : str
            What error messages begin with.
        model : Module, optional
            The model in it, where that was loaded before.

        Raises
        ------
        ValueError
            If there is none, or it is damaged, in one sentence.
        """
        return cls(*cls._loaded(folder, function, model))

    @classmethod
    def _loaded(cls, folder: str | Path, function: str, model: nn.Module | None) -> tuple[Any, ...]:
        """Return the arguments of the constructor."""
        raise NotImplementedError

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels."""
        labels: tuple[str, ...] = self.model.labels
        return labels


# A classifier with its tokenizer, as a folder holds them: texts in, probabilities of labels out -----------------------


#: Default maximum number of tokens of a text.
_LONGEST = 512


class TextClassifier(_Classifier):
    """A classifier of texts, or of pairs of texts.

    Parameters
    ----------
    model : SequenceClassifier or HostedClassifier
    tokenizer : Tokenizer
    length : int, optional
        Tokens that are read of a text at most, special ones included; by default as many as the tokenizer's folder
        says, or 512. A model that has learned positions reads no more than it has.

    Raises
    ------
    ValueError
        If the tokenizer has more tokens than the model.

    Examples
    --------
    >>> from regard_lab.models import EncoderLM, EncoderLMConfig
    >>> tokenizer = Tokenizer.learn([], kind="bytes", specials=("end", "pad", "cls", "sep"))
    >>> model = SequenceClassifier(EncoderLM(EncoderLMConfig(260, width=16)), ["bad", "good"])
    >>> classifier = TextClassifier(model.eval(), tokenizer)
    >>> classifier.probabilities(classifier.read(["a fine film", "dull"])).shape
    torch.Size([2, 2])
    """

    def __init__(
        self, model: SequenceClassifier | HostedClassifier, tokenizer: Tokenizer, length: int | None = None
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.length = readable_length(model.model, length or tokenizer.max_length or _LONGEST)
        check_tokenizer(model.model, tokenizer, "TextClassifier", "tokenizer")
        self._layout = input_layout(model.model, tokenizer)

    @classmethod
    def _loaded(cls, folder: str | Path, function: str, model: nn.Module | None) -> tuple[Any, ...]:
        what = "a classifier of texts"
        kinds: tuple[type[SequenceClassifier | HostedClassifier], ...] = (SequenceClassifier, HostedClassifier)
        return load_with_tokenizer(folder, kinds, what, function, torch.float32, model)

    def save(self, folder: str | Path) -> None:
        """Save the model and its tokenizer to a folder for :meth:`load` and, for some models, for transformers."""
        self.tokenizer.limited(self.length).save(folder)
        if isinstance(self.model, Hosted):
            raise rejected(
                "save", "model", "be one of ours, not one that transformers computes", type(self.model).__name__
            )
        save(self.model, folder)

    def read(self, texts: Sequence[str], others: Sequence[str] | None = None) -> Inputs:
        """Tokenize texts, or pairs of texts; the result's ``cut`` lists the truncated ones."""
        return self._layout.read(self.tokenizer, texts, others, length=self.length)

    @torch.no_grad()
    def probabilities(self, inputs: Inputs, *, batch: int = 128, precision: str = "float32") -> Tensor:
        """Return the probability of each label, (N, C), on the CPU; of a regression, the value of each.

        Parameters
        ----------
        inputs : Inputs
            What :meth:`read` returned.
        batch : int, default 128
            Texts at once.
        precision : {"float32", "bfloat16"}
            Of matrix products.
        """
        device = next(self.model.parameters()).device
        made, labels = torch.empty(len(inputs), len(self.labels)), np.zeros(len(inputs), np.int64)
        narrow = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")
        for rows in length_batches(inputs.tokens.lengths.tolist(), batch, alike=isinstance(self.model, Hosted)):
            read = label_batch(inputs, labels, np.array(rows)).to(device)
            with narrow:
                logits = read.logits(self.model)
            made[rows] = self.model.predictions(logits.float()).cpu()
        return made


def input_layout(model: EncoderLM | DecoderLM | Hosted, tokenizer: Tokenizer) -> InputLayout:
    """Return the special tokens around a model's texts, as the tokenizer's files define them."""
    return InputLayout.of(tokenizer, segments=0 if isinstance(model, DecoderLM) else model.config.segments)


def surrounded(model: EncoderLM | DecoderLM, tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer of a new classifier, with the special tokens around texts that the model was trained with.

    An encoder's puts cls and sep there, if it has them; any other begin and end, as language models are trained.
    """
    if isinstance(model, EncoderLM) and tokenizer.cls is not None and tokenizer.sep is not None:
        has_them = any(tokenizer.surroundings()[0])
        return tokenizer if has_them else tokenizer.surrounded(tokenizer.cls, tokenizer.sep, tokenizer.sep)
    begin, end = tokenizer.begin, tokenizer.end
    return tokenizer.surrounded(begin, begin if end is None else end, end)


def readable_length(model: EncoderLM | DecoderLM | Hosted, length: int) -> int:
    """Return how many of the requested number of tokens a model can read."""
    return min(length, model.config.max_length) if model.config.positions == "learned" else length


def bare(
    model: EncoderLM | DecoderLM, changes: Mapping[str, Any] | None = None, *, with_pooler: bool = True
) -> EncoderLM | DecoderLM:
    """Return a language model without its output layer, with the same parameters.

    An encoder of BERT's shape gets the layer that classifiers of that shape have behind the first row, if it has none;
    with ``with_pooler`` False there is none. ``changes`` are fields of its config that change no parameter, such as
    ``dropout``.
    """
    with in_section("model"):
        config = model.config.with_changes(dict(changes or {}))
    made: EncoderLM | DecoderLM
    if isinstance(config, EncoderLMConfig):
        pooled = with_pooler and (config.pooled or not config.norm_first)
        made = EncoderLM(replace(config, masked_head=False, tied=True, pooled=pooled))
    else:
        made = DecoderLM(replace(config, tied=True))
    missing, unexpected = made.load_state_dict(model.state_dict(), strict=False)
    assert all(name.startswith("pooler.") for name in missing), (config, missing)
    assert all(name.startswith(("masked_head.", "output.", "pooler.")) for name in unexpected), (config, unexpected)
    return made.train(model.training)


# A classifier of tokens with its tokenizer, as a folder holds them: texts in, a label for each token out --------------
# Dimensions: L tokens, C labels.


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


class TokenLabeller(_Classifier):
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
        self.length = readable_length(trunk, tokenizer.max_length or trunk.config.max_length)
        self._layout = input_layout(trunk, tokenizer)

    @classmethod
    def _loaded(cls, folder: str | Path, function: str, model: nn.Module | None) -> tuple[Any, ...]:
        kinds: tuple[type[TokenClassifier | HostedTokenClassifier], ...] = (TokenClassifier, HostedTokenClassifier)
        return load_with_tokenizer(folder, kinds, "a classifier of tokens", function, torch.float32, model)

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
            real = torch.arange(numbers.shape[1]) < lengths[:, None]
            logits = self.model(numbers.to(device), attention_mask=None if bool(real.all()) else real.to(device))
            for row, shares in zip(rows, logits.float().softmax(-1).cpu()):
                spans = self.tokenizer.spans(texts[row])[: len(inputs.tokens[row]) - around]
                read = slice(before, before + len(spans))
                tokens = tuple(self.tokenizer.tokens(inputs.tokens[row][read]))
                made[row] = LabelledTokens(texts[row], tokens, tuple(spans), shares[read], bool(inputs.cut[row]))
        return [each for each in made if each is not None]


# A classifier of images and how it reads them: pixels in, probabilities of labels out ---------------------------------
# Dimensions: N images, H and W pixels, C channels, K labels.


class ImageClassificationPipeline(_Classifier):
    """An image classifier with its preprocessing.

    Parameters
    ----------
    model : ImageClassifier or HostedImageClassifier
    preprocessing : Preprocessing or ImageProcessor

    Raises
    ------
    ValueError
        If the model has other channels than images are read with.

    Examples
    --------
    >>> from regard_lab.models import ResNet, ResNetConfig
    >>> model = ImageClassifier(ResNet(ResNetConfig(features=4, layers=1)), ["cat", "dog"]).eval()
    >>> classifier = ImageClassificationPipeline(model, Preprocessing(16, (16, 16)))
    >>> pixels = classifier.transform([np.zeros((20, 30, 3), np.uint8), np.zeros((9, 9, 3), np.uint8)])
    >>> classifier.probabilities(pixels).shape
    torch.Size([2, 2])
    """

    def __init__(
        self, model: ImageClassifier | HostedImageClassifier, preprocessing: Preprocessing | ImageProcessor
    ) -> None:
        self.model, self.preprocessing = model, preprocessing
        if isinstance(model, HostedImageClassifier):
            return
        channels = model.model.config.channels
        if channels != preprocessing.channels:
            expected = f"read images of {channels} channels, as its model"
            raise rejected("ImageClassificationPipeline", "preprocessing", expected, preprocessing.channels)

    @classmethod
    def _loaded(cls, folder: str | Path, function: str, model: nn.Module | None) -> tuple[Any, ...]:
        model = load(folder, dtype=torch.float32) if model is None else model
        if isinstance(model, HostedImageClassifier):
            return model, ImageProcessor.load(folder)
        if not isinstance(model, ImageClassifier):
            got = f"{type(model).__name__} in {folder}"
            raise rejected(function, "model", "be the folder of a classifier of images", got)
        return model, Preprocessing.load(folder)

    def save(self, folder: str | Path) -> None:
        """Save the model and its preprocessing to a folder for :meth:`load` and, for some models, for transformers."""
        if isinstance(self.model, HostedImageClassifier) or isinstance(self.preprocessing, ImageProcessor):
            got = type(self.model).__name__
            raise rejected("save", "model", "be one of ours, not one that transformers computes", got)
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_atomically(Path(folder) / PREPROCESSOR, json_bytes(self.preprocessing.described(), 1))
        save(self.model, folder)

    def transform(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """Return images (H, W, 3) of uint8, of any sizes, as arrays (N, h, w, C) of the model's size."""
        return np.stack([self.preprocessing.transform(each) for each in images])

    @torch.no_grad()
    def probabilities(self, pixels: np.ndarray, *, batch: int = 128, precision: str = "float32") -> Tensor:
        """Return the probability of each label, (N, K), on the CPU; of a regression, the value of each.

        Where the preprocessing says so, it is the mean of those of an image and of its mirror image.

        Parameters
        ----------
        pixels : ndarray (N, h, w, C)
            What :meth:`transform` returned.
        batch : int, default 128
            Images at once.
        precision : {"float32", "bfloat16"}
            Of matrix products.
        """
        device = next(self.model.parameters()).device
        made = torch.empty(len(pixels), len(self.labels))
        for begin in range(0, len(pixels), batch):
            part = torch.from_numpy(np.array(pixels[begin : begin + batch]))  # a copy: pixels may be read-only
            images = self.preprocessing.normalized(part).to(device)
            sides = [images, images.flip(-1)] if self.preprocessing.flip_test else [images]
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                shares = [self.model.predictions(self.model(side).float()) for side in sides]
            made[begin : begin + batch] = torch.stack(shares).mean(0).cpu()
        return made
