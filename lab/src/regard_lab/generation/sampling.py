"""Draw tokens from logits: temperature, top-k, nucleus, least probability, repetition penalty, and seeds.

Dimensions: ... any, N vocabulary.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard._utils.errors import rejected
from regard._utils.options import Options, option


@dataclass(frozen=True)
class SamplingOptions(Options):
    """How the next token is chosen.

    The options apply in the order in which they stand here, which is that of Hugging Face's logits processors; the
    repetition penalty comes first.
    """

    function: ClassVar[str] = "sampling"
    #: What is drawn for a request is settled by its tokens and the seed, whatever else is in the batch.
    temperature: float = option(0.0, "0 takes the likeliest; below 1 likelier, above 1 freer", least=0,
                                flag="--temperature")  # fmt: skip
    top_k: int = option(0, "draw from so many; 0 for all", least=0, flag="--top-k")
    #: Holtzman et al. 2020, arXiv 1904.09751.
    top_p: float = option(1.0, "draw from what has this probability together", above=0, most=1, flag="--top-p")
    #: Nguyen et al. 2024, arXiv 2407.01082.
    min_p: float = option(0.0, "leave out what has less than this share of the greatest probability", least=0, most=1,
                          flag="--min-p")  # fmt: skip
    #: Keskar et al. 2019, arXiv 1909.05858.
    repetition_penalty: float = option(1.0, "above 1 makes tokens less likely that have come before", above=0,
                                       flag="--repetition-penalty")  # fmt: skip
    seed: int = option(0, "of what is drawn", least=0, flag="--seed")

    def check(self) -> None:
        """Raise where an option has no effect."""
        if not self.temperature:
            for name in ("top_k", "top_p", "min_p", "seed"):
                if (value := getattr(self, name)) != (default := getattr(SamplingOptions, name)):
                    raise rejected("sampling", name, f"be {default} where temperature is 0", value)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return not self.temperature


GREEDY = SamplingOptions()


def processed(logits: Tensor, options: SamplingOptions, before: Sequence[int] | Tensor = ()) -> Tensor:
    """Return the logits whose softmax is drawn from; what may not come is −inf.

    Parameters
    ----------
    logits : Tensor (..., N)
    options : SamplingOptions
        At temperature 0, the repetition penalty alone applies.
    before : sequence of int, or Tensor (T,) or (..., T) of int
        The tokens so far, of all rows or of each, which the repetition penalty is for.

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
    """Return logits of which those of earlier tokens are divided by the penalty, or multiplied where below 0."""
    index = torch.as_tensor(before, dtype=torch.int64, device=logits.device).expand(*logits.shape[:-1], -1)
    if not index.shape[-1]:
        return logits
    chosen = logits.gather(-1, index)
    return logits.scatter(-1, index, torch.where(chosen < 0, chosen * penalty, chosen / penalty))


def _nucleus(logits: Tensor, share: float) -> Tensor:
    """Return logits without the least likely tokens that have at most 1 − share together."""
    ascending, order = logits.sort(dim=-1)
    rest = ascending.softmax(-1).cumsum(-1) <= 1 - share
    rest[..., -1] = False
    return logits.masked_fill(torch.zeros_like(rest).scatter(-1, order, rest), -torch.inf)


def probabilities(logits: Tensor, options: SamplingOptions, before: Sequence[int] | Tensor = ()) -> Tensor:
    """Return the probabilities (..., N) that a token is drawn with, in float64; of a greedy choice, 1 and 0.

    Parameters
    ----------
    logits, options, before : as in :func:`processed`
    """
    logits = processed(logits, options, before)
    if options.is_greedy:
        return torch.zeros_like(logits, dtype=torch.float64).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    return logits.double().softmax(-1)


def drawn(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return tokens (...) drawn with probabilities that go as weights (..., N), by numbers (...) uniform in [0, 1).

    Examples
    --------
    >>> drawn(torch.tensor([0.25, 0.0, 0.75]), torch.tensor(0.3))
    tensor(2)
    """
    below = weights.double().cumsum(-1)
    place = torch.searchsorted(below, uniform.double()[..., None] * below[..., -1:], right=True)[..., 0]
    # Rounding may lead behind the last token that has any weight.
    last = (below >= below[..., -1:]).int().argmax(-1)
    return torch.minimum(place, last)


class Draws:
    """Numbers uniform in [0, 1) that a request's tokens, the seed and the sample's number settle.

    Parameters
    ----------
    seed : int
    tokens : sequence of int
        The request's.
    sample : int, default 0
        Which sample of the same request it is.

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
