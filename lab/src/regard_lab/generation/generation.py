"""Text generation with language models: greedy decoding and sampling for a list of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from regard._utils.errors import rejected
from regard_lab.generation.continuous_batching import AttentionRequest, Batcher
from regard_lab.generation.requests import (
    Decoder,
    Request,
    StopRules,
    Stops,
    Token,
    TokenAttention,
    checked_prompt,
    positions_left,
)
from regard_lab.generation.sampling import GenerationOptions, drawn, probabilities, processed
from regard_lab.models import DecoderLM
from regard_lab.models.base import END
from regard_lab.models.hugging_face.hosted import HostedWriter, Writing

# Models run by transformers: one request after another, one token at a time -------------------------------------------


#: Offset of token ids in beam search, which uses the ids below for padding and the end mark.
FIRST = 2


@torch.inference_mode()
def write(
    model: HostedWriter,
    requests: Sequence[Request],
    *,
    log_probabilities: bool = False,
    attention: AttentionRequest | None = None,
) -> Iterator[Token]:
    """Yield the tokens of requests as they are generated, one request after another."""
    if attention is not None and attention.topk:
        raise rejected("generate", "attention.topk", "be 0 for a model that runs in transformers", attention.topk)
    for request in requests:
        writing, ended = model.begin(request.prompt), False
        while not ended:
            for token in request.take(_next(writing, request, log_probabilities, attention)):
                ended = token.end is not None
                yield token


def _next(writing: Writing, request: Request, log_probability: bool, attention: AttentionRequest | None) -> Token:
    """Return the next token of a request."""
    options = request.options.sampling
    logits, weights = writing.logits(weights=attention is not None)
    logits = logits.float()
    if options.is_greedy:
        number = int(processed(logits, options, writing.tokens).argmax())
    else:
        chances = probabilities(logits, options, writing.tokens)
        number = int(drawn(chances, torch.tensor(request.draws.next())))
    writing.tokens.append(number)
    attended = None
    if attention is not None and weights is not None:
        attended = TokenAttention(_joined(weights, len(writing.tokens) - 1, attention.average))
    own = float(logits.log_softmax(-1)[number]) if log_probability else None
    return Token(request.number, number, None, own, attended)


def _joined(weights: tuple[Tensor, ...], length: int, average: bool) -> Tensor:
    """Stack the layers' weights (H, S) to (A, H, S), or average them to (S,); keys dropped from a cache get 0."""
    rows = [torch.nn.functional.pad(each.float(), (length - each.shape[-1], 0)) for each in weights]
    if average:
        return torch.stack([each.mean(0) for each in rows]).mean(0)
    return torch.stack(rows)


@dataclass
class _Beams:
    """The decoder's input tokens for each beam, and the number of steps."""

    tokens: list[list[int]]
    steps: int = 0

    def select(self, rows: Tensor) -> _Beams:
        """Return the beams at these rows; rows may repeat."""
        return _Beams([self.tokens[row] for row in rows.tolist()], self.steps)


@dataclass(frozen=True)
class _Begun:
    """The prompt of a search."""

    writing: Writing

    def select(self, rows: Tensor) -> Self:  # noqa: ARG002 - there is one
        """Return itself."""
        return self


class StepwiseDecoder:
    """Adapts a transformers model to beam search, for one prompt; symbol ``token + 2`` stands for a token.

    Each step recomputes the beams from their tokens, because transformers' caches cannot be reordered here.

    Parameters
    ----------
    model : HostedWriter
    end : list of int
        Tokens that count as the search's end mark.
    most : int
        Number of tokens after which every beam ends at no cost.
    """

    def __init__(self, model: HostedWriter, end: list[int], most: int) -> None:
        self.model, self.end, self.most = model, end, most

    @property
    def symbols(self) -> int:
        """The number of symbols."""
        return self.model.config.vocabulary + FIRST

    def encode(self, source: Tensor, lengths: Tensor) -> _Begun:  # noqa: ARG002
        """Process the prompt."""
        return _Begun(self.model.begin(source[0].tolist()))

    def start(self, memory: _Begun, beams: int) -> _Beams:
        """Return the state of K beams."""
        return _Beams([list(memory.writing.tokens) for _ in range(beams)])

    def advance(self, last: Tensor, memory: _Begun, state: _Beams) -> tuple[Tensor, _Beams]:
        """Return the logits (1, K, N) after the symbols ``last`` (1, K), and the new state."""
        steps, tokens = state.steps + 1, state.tokens
        if steps > self.most:  # only the end mark is allowed
            return torch.zeros(1, len(tokens), self.symbols - FIRST), _Beams(tokens, steps)
        if steps > 1:  # unused beams have symbols below FIRST: give them any token
            tokens = [[*each, max(symbol - FIRST, 0)] for each, symbol in zip(tokens, last[0].tolist())]
        rows = memory.writing.together(tokens).float()
        return rows[None, :, : self.symbols - FIRST], _Beams(tokens, steps)

    def logits(self, rows: Tensor, state: _Beams) -> Tensor:
        """Return the logits (1, K, N + 2) of the next symbols."""
        logits = rows.new_full((*rows.shape[:2], self.symbols), -torch.inf)
        if state.steps > self.most:
            logits[..., END] = 0.0
            return logits
        logits[..., FIRST : FIRST + rows.shape[-1]] = rows
        if self.end:
            logits[..., END] = rows[..., self.end].logsumexp(-1)
            logits[..., [FIRST + token for token in self.end]] = -torch.inf
        return logits


# Generation: token by token, or all at once ---------------------------------------------------------------------------


#: The shortest common prefix of all prompts, in tokens, to process and cache only once.
SHARED = 64

Prompts = Sequence[Sequence[int] | Tensor]


@dataclass
class Generated:
    """The tokens generated for a prompt.

    Attributes
    ----------
    numbers : list of int
        The new tokens, without the stop token or stop sequence, and up to the token in which a stop text begins.
    end : str
        Why generation ended: ``"stop"`` or ``"length"``.
    log_probabilities : list of float
        The model's log-probability of each token, if requested; otherwise empty.
    attended : list of TokenAttention
        The attention of each token, if requested; otherwise empty.
    text : str
        The text up to the stop text, if a decoder is given; otherwise empty.
    """

    numbers: list[int] = field(default_factory=list)
    end: str = ""
    log_probabilities: list[float] = field(default_factory=list)
    attended: list[TokenAttention] = field(default_factory=list)
    text: str = ""

    def take(self, token: Token) -> None:
        """Append a generated token."""
        self.end, self.text = token.end or self.end, self.text + token.text
        if token.token is None:
            return
        self.numbers.append(token.token)
        if token.log_probability is not None:
            self.log_probabilities.append(token.log_probability)
        if token.attended is not None:
            self.attended.append(token.attended)


def stream(
    model: DecoderLM | HostedWriter,
    prompts: Prompts,
    options: GenerationOptions | None = None,
    stop: Stops = (),
    *,
    slots: int = 32,
    chunk: int | None = None,
    log_probabilities: bool = False,
    attention: AttentionRequest | None = None,
    decoder: Decoder | None = None,
) -> Iterator[Token]:
    """Yield tokens as they are generated, each with the number of its request.

    Request ``i · samples + k`` is sample k of prompt i. The output of a request does not depend on the others. You can
    close the iterator early.

    Parameters
    ----------
    model : DecoderLM or HostedWriter
        A model that runs in transformers processes one request after another.
    prompts : sequence of sequences of int
    options : GenerationOptions, optional
    stop : sequence of int, str or sequences of int
        Stop tokens, texts and sequences of tokens; they are not returned, and tokens that may begin one are held back.
    slots : int, default 32
        The most requests that are active at once.
    chunk : int, optional
        The most prompt tokens to process between two steps; by default, prompts are processed whole.
    log_probabilities : bool, default False
        Return the model's log-probability of each token.
    attention : AttentionRequest, optional
        Return the attention of each token to earlier tokens.
    decoder : callable, optional
        Return the text of each token: called with a request's prompt, it returns an incremental decoder, as
        ``tokenizer.decode_stream`` does. Stop texts need it; they are found wherever the borders of tokens are.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid, or a prompt is longer than the number of learned positions; before generation.

    Examples
    --------
    >>> from regard_lab.models import DecoderLM, DecoderLMConfig
    >>> model = DecoderLM(DecoderLMConfig(50, width=16, layers=2))
    >>> steps = list(stream(model, [[3, 1], [4]], GenerationOptions(max_new_tokens=2)))
    >>> [token.request for token in steps], steps[-1].end
    ([0, 1, 0, 1], 'length')
    """
    options = GenerationOptions() if options is None else options
    if isinstance(model, HostedWriter):
        answers = decoder is not None and model.is_pair  # its output does not continue the prompt
        made = _requests(model, prompts, options, StopRules.of(stop, (lambda _: decoder(())) if answers else decoder))
        return write(model, made, log_probabilities=log_probabilities, attention=attention)
    batcher = Batcher(
        model,
        slots,
        chunk=chunk,
        prefix=_shared_prefix(model, [checked_prompt(prompt, model.config) for prompt in prompts], options),
        log_probabilities=log_probabilities,
        attention=attention,
        decoder=decoder,
    )
    for prompt in prompts:
        for sample in range(options.samples):
            batcher.add(prompt, options, stop, sample=sample)
    return (token for step in batcher for token in step)


def generate(
    model: DecoderLM | HostedWriter,
    prompts: Prompts,
    options: GenerationOptions | None = None,
    stop: Stops = (),
    *,
    slots: int = 32,
    chunk: int | None = None,
    log_probabilities: bool = False,
    attention: AttentionRequest | None = None,
    decoder: Decoder | None = None,
) -> list[Generated]:
    """Return the tokens generated for each prompt; several samples of a prompt follow each other.

    Parameters
    ----------
    model, prompts, options, stop, slots, chunk, log_probabilities, attention, decoder : as in :func:`stream`

    Examples
    --------
    >>> from regard_lab.models import DecoderLM, DecoderLMConfig
    >>> model = DecoderLM(DecoderLMConfig(50, width=16, layers=2))
    >>> both = generate(model, [[3, 1], [4]], GenerationOptions(max_new_tokens=3), log_probabilities=True)
    >>> [len(each.numbers) for each in both], [len(each.log_probabilities) for each in both]
    ([3, 3], [3, 3])
    """
    options = GenerationOptions() if options is None else options
    written = [Generated() for _ in range(len(prompts) * options.samples)]
    more = {"slots": slots, "chunk": chunk, "log_probabilities": log_probabilities, "attention": attention}
    for token in stream(model, prompts, options, stop, decoder=decoder, **more):  # type: ignore[arg-type]
        written[token.request].take(token)
    return written


def _requests(model: HostedWriter, prompts: Prompts, options: GenerationOptions, stops: StopRules) -> list[Request]:
    """Return the requests for a model that processes them one by one."""
    made = []
    for i, prompt in enumerate(prompts):
        numbers = checked_prompt(prompt, model.config)
        most = (
            options.max_new_tokens if model.is_pair else positions_left(model.config, numbers, options.max_new_tokens)
        )
        for sample in range(options.samples):
            made.append(Request(i * options.samples + sample, numbers, options, stops, sample, most))
    return made


def _shared_prefix(model: DecoderLM, prompts: list[list[int]], options: GenerationOptions) -> list[int]:
    """Return the common prefix of all prompts, if it is long enough to share."""
    if not model.keeps_all or model.config.positions == "alibi" or len(prompts) * options.samples < 2:
        return []
    first, last = min(prompts), max(prompts)  # the prefix that these share is common to all
    most = min(map(len, prompts)) - 1
    shared = next((i for i in range(most) if first[i] != last[i]), most)
    return first[:shared] if shared >= SHARED else []
