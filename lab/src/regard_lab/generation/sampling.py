"""Generation options, and sampling of tokens from logits.

Dimensions: ... any, N vocabulary size.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard._utils.errors import described, rejected
from regard_lab._options import Options, option, section
from regard_lab.models import DecoderLMConfig
from regard_lab.models.hugging_face.hosted import HostedConfig

# Sampling: temperature, top-k, top-p (nucleus), min-p, repetition penalty and seeds -----------------------------------


@dataclass(frozen=True)
class SamplingOptions(Options):
    """How the next token is chosen.

    The options apply in the order in which they stand here, which is that of Hugging Face's logits processors; the
    repetition penalty comes first.
    """

    function: ClassVar[str] = "sampling"
    #: What is drawn for a request is settled by its tokens and the seed, whatever else is in the batch.
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
                if (value := getattr(self, name)) != (default := getattr(SamplingOptions, name)):
                    raise rejected("sampling", name, f"be {default} where temperature is 0", value)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return not self.temperature


GREEDY = SamplingOptions()


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


# Requests and their tokens --------------------------------------------------------------------------------------------


#: Stop tokens and stop sequences.
Stops = Sequence[int | Sequence[int]]


@dataclass(frozen=True)
class GenerationOptions(Options):
    """How to continue prompts."""

    function: ClassVar[str] = "generate"
    max_new_tokens: int = option(128, "most tokens to generate", ge=1, flag="--max-new-tokens")
    #: Sample k of a prompt is the same however many others are drawn.
    samples: int = option(1, "continuations to sample per prompt", ge=1, le=10_000, flag="--samples")
    sampling: SamplingOptions = section(SamplingOptions, "how the next token is chosen")

    def check(self) -> None:
        """Raise where options contradict each other."""
        if self.samples > 1 and self.sampling.is_greedy:
            raise rejected("generate", "samples", "be 1 where temperature is 0", self.samples)


@dataclass(frozen=True)
class TokenAttention:
    """The attention of a generated token to earlier tokens.

    Attributes
    ----------
    weights : Tensor (S,) or (A, H, S); (k,) or (A, H, k) with top-k
        Attention weights on the S earlier tokens: the mean over A layers and H heads, or of each head.
    indices : Tensor like ``weights``, or None
        With top-k, the indices of the tokens; −1 for none.
    """

    weights: Tensor
    indices: Tensor | None = None


@dataclass(frozen=True)
class Token:
    """A generated token.

    Attributes
    ----------
    request : int
        The request's number.
    token : int or None
        None if generation ended at a stop token or stop sequence, which is not returned.
    end : str or None
        The reason why this is the last token: ``"stop"`` or ``"length"``; None for other tokens.
    log_probability : float or None
        The model's log-probability in nats, before temperature and other sampling options; if requested.
    attended : TokenAttention or None
        If requested.
    """

    request: int
    token: int | None
    end: str | None = None
    log_probability: float | None = None
    attended: TokenAttention | None = None


class Request:
    """A prompt with the tokens generated so far.

    Parameters
    ----------
    number : int
    prompt : list of int
    options : GenerationOptions
    stops : tuple of tuple of int
    sample : int
        Index of the sample of this prompt.
    most : int
        Maximum number of new tokens.
    """

    def __init__(
        self,
        number: int,
        prompt: list[int],
        options: GenerationOptions,
        stops: tuple[tuple[int, ...], ...],
        sample: int,
        most: int,
    ) -> None:
        self.number, self.prompt, self.options, self.stops, self.most = number, prompt, options, stops, most
        self.written: list[int] = []
        self.draws = Draws(options.sampling.seed, prompt, sample)
        self._held: list[Token] = []

    @property
    def last(self) -> int:
        """The next input token."""
        return self.written[-1] if self.written else self.prompt[-1]

    def take(self, token: Token) -> list[Token]:
        """Append a token and return those that can be shown; tokens that may begin a stop sequence are held back.

        Parameters
        ----------
        token : Token
            Without an end.
        """
        assert token.token is not None
        self.written.append(token.token)
        self._held.append(token)
        ended = next((stop for stop in self.stops if tuple(self.written[-len(stop) :]) == stop), None)
        if ended is not None:
            shown = self._held[: len(self._held) - len(ended)]
            return [*shown, Token(self.number, None, "stop")]
        if len(self.written) >= self.most:
            *shown, last = self._held
            return [*shown, Token(last.request, last.token, "length", last.log_probability, last.attended)]
        count = len(self._held) - self._beginnings()
        shown, self._held = self._held[:count], self._held[count:]
        return shown

    def _beginnings(self) -> int:
        """Return how many of the last tokens may begin a stop sequence."""
        longest = 0
        for stop in self.stops:
            for count in range(min(len(stop) - 1, len(self.written)), longest, -1):
                if tuple(self.written[-count:]) == stop[:count]:
                    longest = count
                    break
        return longest


def checked_prompt(prompt: Any, config: DecoderLMConfig | HostedConfig, function: str = "generate") -> list[int]:
    """Return a prompt as a list.

    Raises
    ------
    TypeError, ValueError
        If it is empty, holds an invalid token, or is longer than the number of learned positions.
    """
    tokens = _numbers(prompt, function, "prompt")
    if not tokens:
        raise rejected(function, "prompt", "have at least 1 token", "none")
    wrong = next((token for token in tokens if not 0 <= token < config.vocabulary), None)
    if wrong is not None:
        raise rejected(function, "prompt", f"hold tokens from 0 to {config.vocabulary - 1:,}", wrong)
    if config.positions == "learned" and len(tokens) > config.longest:
        raise rejected(
            function, "prompt", f"have at most {config.longest:,} tokens, the model's maximum length", len(tokens)
        )
    return tokens


def checked_stops(stops: Any, function: str = "generate") -> tuple[tuple[int, ...], ...]:
    """Return stop tokens and stop sequences, all as sequences; raise if they are invalid."""
    if isinstance(stops, (str, bytes, Integral)):
        raise rejected(function, "stop", "be a list of tokens or lists of tokens", described(stops), TypeError)
    made = [(int(each),) if isinstance(each, Integral) else tuple(_numbers(each, function, "stop")) for each in stops]
    if not all(made):
        raise rejected(function, "stop", "not contain empty sequences", "one")
    return tuple(made)


def positions_left(config: DecoderLMConfig | HostedConfig, prompt: Sequence[int], wanted: int) -> int:
    """Return the maximum number of new tokens; the last one is never an input, so it needs no position."""
    return min(wanted, config.longest - len(prompt) + 1) if config.positions == "learned" else wanted


def _numbers(given: Any, function: str, argument: str) -> list[int]:
    if isinstance(given, Tensor) and given.dim() == 1 and not given.is_floating_point():
        return [int(token) for token in given.tolist()]
    listed = None if isinstance(given, (str, bytes, Tensor)) else list(given) if hasattr(given, "__iter__") else None
    if listed is None or not all(isinstance(each, Integral) and not isinstance(each, bool) for each in listed):
        raise rejected(function, argument, "be a list of token ids", described(given), TypeError)
    return [int(token) for token in listed]
