"""Text of models that another library computes: one request after another, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from regard._utils.errors import rejected
from regard_lab.generation.continuous_batching import AttentionRequest
from regard_lab.generation.requests import Attended, Request, Token
from regard_lab.generation.sampling import drawn, probabilities, processed
from regard_lab.models.base import END
from regard_lab.models.hugging_face.hosted import HostedWriter, Writing

#: A search numbers symbols from here on; those before are its own padding and end mark.
FIRST = 2


@torch.inference_mode()
def write(
    model: HostedWriter,
    requests: Sequence[Request],
    *,
    log_probabilities: bool = False,
    attention: AttentionRequest | None = None,
) -> Iterator[Token]:
    """Yield the tokens of requests as they are written, one request after another."""
    if attention is not None and attention.topk:
        raise rejected("generate", "attention.topk", "be 0 for a model that transformers computes", attention.topk)
    for request in requests:
        writing, ended = model.begin(request.prompt), False
        while not ended:
            for token in request.take(_next(writing, request, log_probabilities, attention)):
                ended = token.end is not None
                yield token


def _next(writing: Writing, request: Request, told: bool, attention: AttentionRequest | None) -> Token:
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
        attended = Attended(_joined(weights, len(writing.tokens) - 1, attention.average))
    own = float(logits.log_softmax(-1)[number]) if told else None
    return Token(request.number, number, None, own, attended)


def _joined(weights: tuple[Tensor, ...], length: int, average: bool) -> Tensor:
    """Return layers' weights (H, S) as (A, H, S), or their mean (S,); those of keys that a cache forgot are 0."""
    rows = [torch.nn.functional.pad(each.float(), (length - each.shape[-1], 0)) for each in weights]
    if average:
        return torch.stack([each.mean(0) for each in rows]).mean(0)
    return torch.stack(rows)


@dataclass
class _Beams:
    """The tokens that the decoder has read for each beam, and how many steps there were."""

    tokens: list[list[int]]
    steps: int = 0

    def select(self, rows: Tensor) -> _Beams:
        """Make these rows go on, which may be named more than once."""
        return _Beams([self.tokens[row] for row in rows.tolist()], self.steps)


@dataclass(frozen=True)
class _Begun:
    """The one prompt of a search."""

    writing: Writing

    def select(self, rows: Tensor) -> Self:  # noqa: ARG002 - there is one
        """Return the same."""
        return self


class StepwiseDecoder:
    """A writer as a search steps through it, with one prompt; symbol ``token + 2`` stands for a token.

    Each step reads the beams anew: no cache of transformers' is rearranged.

    Parameters
    ----------
    model : HostedWriter
    end : list of int
        Tokens that the search's end mark stands for.
    most : int
        Tokens after which every beam ends, at no cost.
    """

    def __init__(self, model: HostedWriter, end: list[int], most: int) -> None:
        self.model, self.end, self.most = model, end, most

    @property
    def symbols(self) -> int:
        """How many symbols there are."""
        return self.model.config.vocabulary + FIRST

    def encode(self, source: Tensor, lengths: Tensor) -> _Begun:  # noqa: ARG002
        """Read the prompt."""
        return _Begun(self.model.begin(source[0].tolist()))

    def start(self, memory: _Begun, beams: int) -> _Beams:
        """Return the state of K beams."""
        return _Beams([list(memory.writing.tokens) for _ in range(beams)])

    def advance(self, last: Tensor, memory: _Begun, state: _Beams) -> tuple[Tensor, _Beams]:
        """Return the logits (1, K, N) after the symbols ``last`` (1, K), and the state after them."""
        steps, tokens = state.steps + 1, state.tokens
        if steps > self.most:  # there is nothing but the end
            return torch.zeros(1, len(tokens), self.symbols - FIRST), _Beams(tokens, steps)
        if steps > 1:  # where there are more beams than continuations, a beam that is none reads some token, too
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
