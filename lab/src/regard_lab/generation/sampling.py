"""Generation options, and sampling of tokens from logits.

Dimensions: ... any, N vocabulary size.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard_lab._options import Options, option, section


@dataclass(frozen=True)
class SamplingOptions(Options):
    """How the next token is chosen.

    The options apply in the order in which they stand here, which is that of Hugging Face's logits processors; the
    repetition penalty comes first.
    """

    function: ClassVar[str] = "sampling"
    #: Samples depend only on the request's tokens and the seed, not on the batch.
    temperature: float = option(
        0.0,
        "0 (default) takes the most likely token; below 1, text is more likely; above 1, more varied",
        ge=0,
        flag="--temperature",
    )
    top_k: int = option(0, "sample from this many most likely tokens; 0 for all", ge=0, flag="--top-k")
    #: Holtzman et al. 2020, arXiv 1904.09751.
    top_p: float = option(
        1.0, "sample from the most likely tokens that together have this probability", gt=0, le=1, flag="--top-p"
    )
    #: Nguyen et al. 2024, arXiv 2407.01082.
    min_p: float = option(0.0, "leave out tokens with less than this share of the highest probability", ge=0, le=1,
                          flag="--min-p")  # fmt: skip
    #: Keskar et al. 2019, arXiv 1909.05858.
    repetition_penalty: float = option(1.0, "above 1, tokens that occurred before become less likely", gt=0,
                                       flag="--repetition-penalty")  # fmt: skip
    seed: int = option(0, "random seed", ge=0, flag="--seed")

    def check(self) -> None:
        """Raise where an option has no effect."""
        if not self.temperature:
            for name in ("top_k", "top_p", "min_p", "seed"):
                self.require_effect(name, "at temperature 0", "temperature")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return not self.temperature


def processed(logits: Tensor, options: SamplingOptions, before: Sequence[int] | Tensor = ()) -> Tensor:
    """Apply the sampling options to logits; excluded tokens get −inf.

    Parameters
    ----------
    logits : Tensor (..., N)
    options : SamplingOptions
        At temperature 0, only the repetition penalty applies.
    before : sequence of int, or Tensor (T,) or (..., T) of int
        Earlier tokens, shared by all rows or per row, for the repetition penalty.

    Examples
    --------
    >>> processed(torch.tensor([1.0, 3.0, 2.0]), SamplingOptions(temperature=0.5, top_k=2))
    tensor([-inf, 6., 4.])
    """
    if options.repetition_penalty != 1:
        logits = _penalized(logits, options.repetition_penalty, before)
    if options.is_greedy:
        return logits
    logits = logits / options.temperature
    if 0 < options.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(options.top_k).values[..., -1:], -torch.inf)
    if options.top_p < 1:
        logits = _nucleus(logits, options.top_p)
    if options.min_p:
        probabilities = logits.softmax(-1)
        few = probabilities < options.min_p * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(few, -torch.inf)
    return logits


def _penalized(logits: Tensor, penalty: float, before: Sequence[int] | Tensor) -> Tensor:
    """Divide the positive logits of earlier tokens by the penalty, and multiply the negative ones by it."""
    index = torch.as_tensor(before, dtype=torch.int64, device=logits.device).expand(*logits.shape[:-1], -1)
    if not index.shape[-1]:
        return logits
    chosen = logits.gather(-1, index)
    return logits.scatter(-1, index, torch.where(chosen < 0, chosen * penalty, chosen / penalty))


def _nucleus(logits: Tensor, share: float) -> Tensor:
    """Exclude the least likely tokens whose total probability is at most 1 − share."""
    ascending, order = logits.sort(dim=-1)
    rest = ascending.softmax(-1).cumsum(-1) <= 1 - share
    rest[..., -1] = False
    return logits.masked_fill(torch.zeros_like(rest).scatter(-1, order, rest), -torch.inf)


def probabilities(logits: Tensor, options: SamplingOptions, before: Sequence[int] | Tensor = ()) -> Tensor:
    """Return the sampling probabilities (..., N) in float64; one-hot for greedy decoding.

    Parameters
    ----------
    logits, options, before : as in :func:`processed`
    """
    logits = processed(logits, options, before)
    if options.is_greedy:
        return torch.zeros_like(logits, dtype=torch.float64).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    return logits.double().softmax(-1)


def drawn(weights: Tensor, uniform: Tensor) -> Tensor:
    """Sample tokens (...) in proportion to weights (..., N), from uniform random numbers (...) in [0, 1).

    Examples
    --------
    >>> drawn(torch.tensor([0.25, 0.0, 0.75]), torch.tensor(0.3))
    tensor(2)
    """
    below = weights.double().cumsum(-1)
    place = torch.searchsorted(below, uniform.double()[..., None] * below[..., -1:], right=True)[..., 0]
    # Rounding may point past the last token with a positive weight.
    last = (below >= below[..., -1:]).int().argmax(-1)
    return torch.minimum(place, last)


class Draws:
    """Uniform random numbers in [0, 1), determined by a request's tokens, the seed and the sample index.

    Parameters
    ----------
    seed : int
    tokens : sequence of int
        The request's prompt.
    sample : int, default 0
        Index of the sample of this request.

    Examples
    --------
    >>> Draws(0, [3, 1]).next() == Draws(0, [3, 1]).next() != Draws(1, [3, 1]).next()
    True
    """

    def __init__(self, seed: int, tokens: Sequence[int], sample: int = 0) -> None:
        digest = hashlib.blake2b(repr((seed, sample, list(tokens))).encode(), digest_size=8).digest()
        self._random = random.Random(int.from_bytes(digest, "little"))

    def next(self) -> float:
        """Return the next number."""
        return self._random.random()


@dataclass(frozen=True)
class GenerationOptions(Options):
    """How to continue prompts."""

    function: ClassVar[str] = "generate"
    max_new_tokens: int = option(128, "most tokens to generate", ge=1, flag="--max-new-tokens")
    #: Sample k of a prompt does not depend on the number of samples.
    samples: int = option(1, "continuations to sample per prompt", ge=1, le=10_000, flag="--samples")
    sampling: SamplingOptions = section(SamplingOptions, "how the next token is chosen")

    def check(self) -> None:
        """Raise where an option has no effect."""
        if self.sampling.is_greedy:
            self.require_effect("samples", "at temperature 0", "sampling.temperature")
