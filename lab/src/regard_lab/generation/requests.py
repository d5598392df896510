"""Requests for generated text: their prompts, tokens and text, and where they stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from numbers import Integral
from typing import Any, Protocol, Self

from torch import Tensor

from regard._utils.errors import described, rejected
from regard_lab.generation.sampling import Draws, GenerationOptions
from regard_lab.models import DecoderLMConfig
from regard_lab.models.hugging_face.hosted import HostedConfig

#: Stop tokens, stop texts and stop sequences of tokens.
Stops = Sequence[int | str | Sequence[int]]


class TextStream(Protocol):
    """An incremental decoder, such as ``Tokenizer.decode_stream()`` returns."""

    def push(self, number: int) -> str:
        """Add a token, and return the text that is now final."""

    def close(self) -> str:
        """Return the remaining text."""


#: Returns the incremental decoder of a request, given its prompt.
Decoder = Callable[[Sequence[int]], TextStream]


@dataclass(frozen=True)
class StopRules:
    """Where requests stop, and how their tokens become text.

    Attributes
    ----------
    sequences : tuple of tuple of int
        Sequences of tokens.
    texts : tuple of str
        Texts, wherever the borders of tokens are.
    decoder : callable or None
        Without one, requests have no text.
    """

    sequences: tuple[tuple[int, ...], ...] = ()
    texts: tuple[str, ...] = ()
    decoder: Decoder | None = None

    @classmethod
    def of(cls, stops: Any, decoder: Decoder | None, function: str = "generate") -> Self:
        """Return the rules for these stop tokens, texts and sequences; raise if they are invalid."""
        if isinstance(stops, (str, bytes, Integral)):
            expected = "be a list of tokens, texts or lists of tokens"
            raise rejected(function, "stop", expected, described(stops), TypeError)
        texts = tuple(each for each in stops if isinstance(each, str))
        if texts and decoder is None:
            raise rejected(function, "stop", "hold tokens unless a decoder is given", repr(texts[0]))
        tokens = (each for each in stops if not isinstance(each, str))
        made = [
            (int(each),) if isinstance(each, Integral) else tuple(_numbers(each, function, "stop")) for each in tokens
        ]
        if not all((*made, *texts)):
            raise rejected(function, "stop", "not be empty", repr("") if "" in texts else "[]")
        return cls(tuple(made), texts, decoder)


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
        None if generation ended at a stop token, stop text or stop sequence, which is not returned.
    end : str or None
        The reason why this is the last token: ``"stop"`` or ``"length"``; None for other tokens.
    log_probability : float or None
        The model's log-probability in nats, before temperature and other sampling options; if requested.
    attended : TokenAttention or None
        If requested.
    text : str
        The text that is final with this token, if a decoder is given. The text of all tokens ends exactly before a stop
        text, and the tokens end before the one in which the stop text begins.
    """

    request: int
    token: int | None
    end: str | None = None
    log_probability: float | None = None
    attended: TokenAttention | None = None
    text: str = ""


class Request:
    """A prompt with the tokens generated so far.

    Parameters
    ----------
    number : int
    prompt : list of int
    options : GenerationOptions
    stops : StopRules
    sample : int
        Index of the sample of this prompt.
    most : int
        Maximum number of new tokens.
    """

    def __init__(
        self, number: int, prompt: list[int], options: GenerationOptions, stops: StopRules, sample: int, most: int
    ) -> None:
        self.number, self.prompt, self.options, self.most = number, prompt, options, most
        self.written: list[int] = []
        self.draws = Draws(options.sampling.seed, prompt, sample)
        self._sequences = stops.sequences
        self._held: list[Token] = []
        self._text = None if stops.decoder is None else _Text(stops.decoder(prompt), stops.texts)

    @property
    def last(self) -> int:
        """The next input token."""
        return self.written[-1] if self.written else self.prompt[-1]

    def take(self, token: Token) -> list[Token]:
        """Append a token and return those that can be shown; what may begin a stop text or sequence is held back.

        Parameters
        ----------
        token : Token
            Without an end or text.
        """
        shown = self._before_sequences(token)
        return shown if self._text is None else self._text.take(shown)

    def _before_sequences(self, token: Token) -> list[Token]:
        """Append a token and return those that no stop sequence can contain."""
        assert token.token is not None
        self.written.append(token.token)
        self._held.append(token)
        held = tuple(each.token for each in self._held)
        ended = next((stop for stop in self._sequences if held[-len(stop) :] == stop), None)
        if ended is not None:
            return [*self._held[: len(held) - len(ended)], Token(self.number, None, "stop")]
        if len(self.written) >= self.most:
            *shown, last = self._held
            return [*shown, replace(last, end="length")]
        count = len(held) - _begun(held, self._sequences)
        shown, self._held = self._held[:count], self._held[count:]
        return shown


class _Text:
    """The text of a request, up to its first stop text.

    Tokens are held back until their text is final and no stop text can begin in it.
    """

    def __init__(self, stream: TextStream, stops: tuple[str, ...]) -> None:
        self._stream, self._stops = stream, stops
        self._held: list[Token] = []

    def take(self, tokens: Sequence[Token]) -> list[Token]:
        """Append tokens and return those that can be shown, with their text."""
        shown: list[Token] = []
        for token in tokens:
            text = "" if token.token is None else self._stream.push(token.token)
            self._held.append(replace(token, text=text + self._stream.close() if token.end else text))
            text = "".join(each.text for each in self._held)
            found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
            if found:
                _, end = min(found)  # the stop text that is complete first
                last = self._released(end)
                begin = sum(len(each.text) for each in last)
                return [*shown, *last, Token(token.request, None, "stop", text=text[begin:end])]
            shown += self._held if token.end else self._released(len(text) - _begun(text, self._stops))
        return shown

    def _released(self, end: int) -> list[Token]:
        """Return the held tokens whose text lies before a place in the text of all; hold the others."""
        places = enumerate(zip(self._held, accumulate(len(each.text) for each in self._held)), start=1)
        count = max((i for i, (each, place) in places if each.text and place <= end), default=0)
        released, self._held = self._held[:count], self._held[count:]
        return released


def _begun(written: str | tuple[Any, ...], stops: Sequence[str] | Sequence[tuple[Any, ...]]) -> int:
    """Return the length of the longest end of what is written that begins a stop text or sequence."""
    lengths = ((stop, n) for stop in stops for n in range(1, min(len(stop), len(written) + 1)))
    return max((n for stop, n in lengths if written[-n:] == stop[:n]), default=0)


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
    if config.positions == "learned" and len(tokens) > config.max_length:
        raise rejected(
            function, "prompt", f"have at most {config.max_length:,} tokens, the model's maximum length", len(tokens)
        )
    return tokens


def positions_left(config: DecoderLMConfig | HostedConfig, prompt: Sequence[int], wanted: int) -> int:
    """Return the maximum number of new tokens; the last one is never an input, so it needs no position."""
    return min(wanted, config.max_length - len(prompt) + 1) if config.positions == "learned" else wanted


def _numbers(given: Any, function: str, argument: str) -> list[int]:
    if isinstance(given, Tensor) and given.dim() == 1 and not given.is_floating_point():
        return [int(token) for token in given.tolist()]
    listed = None if isinstance(given, (str, bytes, Tensor)) else list(given) if hasattr(given, "__iter__") else None
    if listed is None or not all(isinstance(each, Integral) and not isinstance(each, bool) for each in listed):
        raise rejected(function, argument, "be a list of token ids", described(given), TypeError)
    return [int(token) for token in listed]
