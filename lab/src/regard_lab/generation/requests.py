"""What a language model is asked to write, and what it has written so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

from torch import Tensor

from regard._utils.errors import described, rejected
from regard._utils.options import Options, option, section
from regard_lab.generation.sampling import Draws, SamplingOptions
from regard_lab.models import DecoderLMConfig
from regard_lab.models.hugging_face.hosted import HostedConfig

#: Tokens, or runs of tokens, at which writing ends.
Stops = Sequence[int | Sequence[int]]


@dataclass(frozen=True)
class GenerationOptions(Options):
    """How to continue prompts."""

    function: ClassVar[str] = "generate"
    max_new_tokens: int = option(128, "tokens that are written at most", least=1, flag="--max-new-tokens")
    #: Sample k of a prompt is the same however many others are drawn.
    samples: int = option(1, "continuations that are drawn of each prompt", least=1, most=10_000, flag="--samples")
    sampling: SamplingOptions = section(SamplingOptions, "how the next token is chosen")

    def check(self) -> None:
        """Raise where options contradict each other."""
        if self.samples > 1 and self.sampling.is_greedy:
            raise rejected("generate", "samples", "be 1 where temperature is 0", self.samples)


@dataclass(frozen=True)
class Attended:
    """The earlier tokens that a token was written from.

    Attributes
    ----------
    weights : Tensor (S,) or (A, H, S); or (k,) or (A, H, k) of the largest alone
        Attention to the S tokens before it: the mean over A layers and H heads, or each.
    indices : Tensor like ``weights``, or None
        Which tokens those are, where the largest alone are told; −1 for none.
    """

    weights: Tensor
    indices: Tensor | None = None


@dataclass(frozen=True)
class Token:
    """A token that was written for a request.

    Attributes
    ----------
    request : int
        The request's number.
    token : int or None
        None where writing ended by what is not shown: a stop token, or the end of a stop sequence.
    end : str or None
        With the last one, why it is the last: ``"stop"`` or ``"length"``.
    log_probability : float or None
        What the model itself gave it, in nats, before temperature and the rest; where that was asked for.
    attended : Attended or None
        Where that was asked for.
    """

    request: int
    token: int | None
    end: str | None = None
    log_probability: float | None = None
    attended: Attended | None = None


class Request:
    """A prompt with what has been written for it.

    Parameters
    ----------
    number : int
    prompt : list of int
    options : GenerationOptions
    stops : tuple of tuple of int
    sample : int
        Which sample of this prompt it is.
    most : int
        Tokens that are written at most.
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
        """The token that is read next."""
        return self.written[-1] if self.written else self.prompt[-1]

    def take(self, token: Token) -> list[Token]:
        """Write a token and return what can be shown: no token that may be part of a stop sequence is.

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
        """Return how many of the last tokens may be the beginning of a stop sequence."""
        longest = 0
        for stop in self.stops:
            for count in range(min(len(stop) - 1, len(self.written)), longest, -1):
                if tuple(self.written[-count:]) == stop[:count]:
                    longest = count
                    break
        return longest


def checked_prompt(prompt: Any, config: DecoderLMConfig | HostedConfig, function: str = "generate") -> list[int]:
    """Return a prompt as a list, or raise.

    Raises
    ------
    TypeError, ValueError
        If it is empty, holds something that is no token, or is longer than the model's positions.
    """
    tokens = _numbers(prompt, function, "prompt")
    if not tokens:
        raise rejected(function, "prompt", "have at least 1 token", "none")
    wrong = next((token for token in tokens if not 0 <= token < config.vocabulary), None)
    if wrong is not None:
        raise rejected(function, "prompt", f"hold tokens from 0 to {config.vocabulary - 1:,}", wrong)
    if config.positions == "learned" and len(tokens) > config.longest:
        raise rejected(
            function, "prompt", f"have at most {config.longest:,} tokens, the model's positions", len(tokens)
        )
    return tokens


def checked_stops(stops: Any, function: str = "generate") -> tuple[tuple[int, ...], ...]:
    """Return stop tokens and stop sequences, all as sequences, or raise."""
    if isinstance(stops, (str, bytes, Integral)):
        raise rejected(function, "stop", "be a list of tokens and of lists of tokens", described(stops), TypeError)
    made = [(int(each),) if isinstance(each, Integral) else tuple(_numbers(each, function, "stop")) for each in stops]
    if not all(made):
        raise rejected(function, "stop", "hold no empty sequence", "one")
    return tuple(made)


def positions_left(config: DecoderLMConfig | HostedConfig, prompt: Sequence[int], wanted: int) -> int:
    """Return how many tokens can be written at most: the last is not read, so it needs no position."""
    return min(wanted, config.longest - len(prompt) + 1) if config.positions == "learned" else wanted


def _numbers(given: Any, function: str, argument: str) -> list[int]:
    if isinstance(given, Tensor) and given.dim() == 1 and not given.is_floating_point():
        return [int(token) for token in given.tolist()]
    listed = None if isinstance(given, (str, bytes, Tensor)) else list(given) if hasattr(given, "__iter__") else None
    if listed is None or not all(isinstance(each, Integral) and not isinstance(each, bool) for each in listed):
        raise rejected(function, argument, "be a list of token numbers", described(given), TypeError)
    return [int(token) for token in listed]
