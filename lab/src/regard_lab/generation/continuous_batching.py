"""Continuous batching: requests join and leave a batch while the others go on (Yu et al. 2022, Orca).

Dimensions: B requests that are being written, R of a group that joins, P tokens of a prefix, S tokens so far, N
vocabulary, A layers, H heads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard._utils.constraints import Integer, count, size
from regard._utils.errors import described, rejected
from regard.engines.aux import Aux, AuxRequest
from regard_lab.generation.sampling import (
    GenerationOptions,
    Request,
    SamplingOptions,
    Stops,
    Token,
    TokenAttention,
    checked_prompt,
    checked_stops,
    drawn,
    positions_left,
    probabilities,
    processed,
)
from regard_lab.models import DecoderLM
from regard_lab.models.slot_cache import Slots

#: Of the tokens of a group that joins, at most this share is padding.
_PADDING = 0.25


@dataclass(frozen=True)
class AttentionRequest:
    """What to tell of the attention that each token was written with.

    Attributes
    ----------
    average : bool, default True
        Over all layers and heads; otherwise each is told.
    topk : int, default 0
        Only so many of the largest weights, with the tokens they belong to; 0 for all weights.
    """

    average: bool = True
    topk: int = 0

    def __post_init__(self) -> None:
        count(self, "topk", self.topk)


@dataclass
class _Group:
    """Requests that join together: their prompts are read side by side, the shorter ones padded."""

    requests: list[Request]
    caches: list[Any]
    tokens: Tensor  # (R, T), T the longest prompt without its last token and without the prefix
    read: int = 0


class Batcher:
    """Continue many prompts at once; a request joins as soon as a slot is free, and leaves when it ends.

    What is written for a request does not depend on the others: a greedy one gets the tokens that it would get alone,
    a sampled one is drawn by numbers that its prompt and seed settle.

    Parameters
    ----------
    model : DecoderLM
    slots : int, default 8
        Requests that are written at a time.
    chunk : int, optional
        The most tokens of prompts that are read between two steps, so that what is being written does not wait for a
        long prompt; by default, prompts are read whole.
    prefix : sequence of int, optional
        Tokens that every prompt begins with. They are read once, and their keys and values are kept once.
    log_probabilities : bool, default False
    attention : AttentionRequest, optional
        What to tell with each token.

    Raises
    ------
    ValueError, TypeError
        If an argument is wrong.

    Examples
    --------
    >>> from regard_lab.models import DecoderLM, DecoderLMConfig
    >>> model = DecoderLM(DecoderLMConfig(50, width=16, layers=2))
    >>> batcher = Batcher(model, slots=2)
    >>> for prompt in ([3, 1, 4], [1, 5], [9, 2, 6, 5]):
    ...     _ = batcher.add(prompt, GenerationOptions(max_new_tokens=4))
    >>> written = [token for step in batcher for token in step]
    >>> [sum(token.request == request for token in written) for request in range(3)]
    [4, 4, 4]
    """

    def __init__(
        self,
        model: DecoderLM,
        slots: int = 8,
        *,
        chunk: int | None = None,
        prefix: Sequence[int] = (),
        log_probabilities: bool = False,
        attention: AttentionRequest | None = None,
    ) -> None:
        if not isinstance(model, DecoderLM):
            raise rejected("Batcher", "model", "be a DecoderLM", described(model), TypeError)
        if attention is not None and model.config.linear:
            expected = "be None where attention is linear, whose cache keeps sums and no keys"
            raise rejected("generate", "attention", expected, described(attention))
        self.model, self.count = model, size(self, "slots", slots)
        self.chunk = None if chunk is None else Integer(ge=1, note=", or None")(self, "chunk", chunk)
        self.log_probabilities, self.attention = log_probabilities, attention
        self.device = next(model.parameters()).device
        self.waiting: deque[Request] = deque()
        self._group: _Group | None = None
        self._active: list[Request] = []
        self._number = 0
        self.prefix = checked_prompt(prefix, model.config, "Batcher") if len(prefix) else []
        if self.prefix and not model.keeps_all:
            expected = "be empty where the model has a window or linear attention"
            raise rejected("Batcher", "prefix", expected, f"{len(self.prefix)} tokens")
        self._prefixes = self._read_prefix()
        window = {"window": model.config.window, "sinks": model.config.sinks} if model.slides else {}
        self._slots = Slots(**window, prefix=len(self.prefix), device=self.device)  # type: ignore[arg-type]
        self._caches = model.slot_caches(self._slots, self._prefixes)

    def add(
        self,
        prompt: Sequence[int] | Tensor,
        options: GenerationOptions | None = None,
        stop: Stops = (),
        *,
        sample: int = 0,
    ) -> int:
        """Let a request wait for a slot and return its number.

        Parameters
        ----------
        prompt : sequence of int
        options : GenerationOptions, optional
        stop : sequence of int or of sequences of int
            Tokens, and runs of tokens, at which writing ends; they are not shown.
        sample : int, default 0
            Another number draws other tokens.
        """
        options = GenerationOptions() if options is None else options
        tokens = checked_prompt(prompt, self.model.config)
        if tokens[: len(self.prefix)] != self.prefix or len(tokens) == len(self.prefix):
            raise rejected("generate", "prompt", "begin with the prefix and go on", f"{len(tokens)} tokens")
        most = positions_left(self.model.config, tokens, options.max_new_tokens)
        self.waiting.append(Request(self._number, tokens, options, checked_stops(stop), sample, most))
        self._number += 1
        return self._number - 1

    @torch.inference_mode()
    def cancel(self, request: int) -> None:
        """Forget a request; nothing where it has ended."""
        self.waiting = deque(each for each in self.waiting if each.number != request)
        for each in self._group.requests if self._group else ():
            each.most = 0 if each.number == request else each.most  # it leaves as soon as its group has joined
        self._leave([i for i, each in enumerate(self._active) if each.number == request])

    def __len__(self) -> int:
        """Return how many requests have not ended."""
        return len(self.waiting) + len(self._active) + (len(self._group.requests) if self._group else 0)

    def __iter__(self) -> Iterator[list[Token]]:
        """Yield what each step writes, until no request is left."""
        while len(self):
            yield self.step()

    @torch.inference_mode()
    def step(self) -> list[Token]:
        """Read what is due of new prompts, write one token for each request in a slot, and return what can be shown.

        Raises
        ------
        ValueError
            If the model gives logits that are no numbers.
        """
        with evaluating(self.model):
            self._admit()
            return self._write() if self._active else []

    # Joining

    def _admit(self) -> None:
        budget = self.chunk
        while True:
            if self._group is None and not self._begin_group():
                return
            group = self._group
            assert group is not None
            rows, left = group.tokens.shape[0], group.tokens.shape[1] - group.read
            stalls = budget is not None and bool(self._active)
            columns = min(left, max(1, budget // rows)) if stalls and budget is not None else left
            if columns:
                self._read(group, columns)
            if columns == left:
                self._join(group)
            if stalls and budget is not None and (budget := budget - columns * rows) <= 0:
                return

    def _read(self, group: _Group, columns: int) -> None:
        """Read the next tokens of the prompts of a group."""
        try:
            self.model.features(group.tokens[:, group.read : group.read + columns], caches=group.caches)
        except BaseException:  # what was read is lost: they wait again
            self.waiting.extendleft(reversed(group.requests))
            self._group = None
            raise
        group.read += columns

    def _begin_group(self) -> bool:
        """Take waiting requests for the slots that are free, and return whether there are any."""
        taken: list[Request] = []
        while self.waiting and len(taken) < self.count - len(self._active):
            lengths = [len(each.prompt) for each in (*taken, self.waiting[0])]
            padding = 1 - sum(lengths) / (max(lengths) * len(lengths))
            if padding > (
                _PADDING if self.model.keeps_all else 0
            ):  # padding would take places in a window, or be summed
                break
            taken.append(self.waiting.popleft())
        if not taken:
            return False
        parts = [torch.tensor(each.prompt[len(self.prefix) : -1], dtype=torch.int64) for each in taken]
        tokens = nn.utils.rnn.pad_sequence(parts, batch_first=True).to(self.device)
        capacity = len(self.prefix) + tokens.shape[1]
        caches = self.model.caches(capacity if capacity and self.model.keeps_all else None, sliding=True)
        for cache, prefix in zip(caches, self._prefixes):
            if prefix is not None:
                cache.append(*(each.expand(len(taken), -1, -1, -1) for each in prefix))
        self._group = _Group(taken, caches, tokens)
        return True

    def _join(self, group: _Group) -> None:
        """Put requests whose prompts are read, but for their last tokens, into slots."""
        P = len(self.prefix)
        for row, request in enumerate(group.requests):
            length = len(request.prompt) - 1 - P
            kept = self._slots.kept(length)
            if kept:
                for slots, cache in zip(self._caches, group.caches):
                    slots.load(len(self._active), *cache.sequence(row, P, P + kept))
            self._active.append(request)
            self._slots.lengths.append(length)
        self._group = None
        self._leave([i for i, each in enumerate(self._active) if each.most == 0])

    def _read_prefix(self) -> list[tuple[Tensor, Tensor] | None]:
        if not self.prefix:
            return [None] * len(self.model.blocks)
        caches = self.model.caches(len(self.prefix))
        with torch.inference_mode(), evaluating(self.model):
            self.model.features(torch.tensor([self.prefix], device=self.device), caches=caches)
        return [(cache.key, cache.value) for cache in caches]

    # Writing

    def _write(self) -> list[Token]:
        active = self._active
        last = torch.tensor([[each.last] for each in active], device=self.device)
        told: list[Aux] = []
        if self.attention is None:
            features = self.model.features(last, caches=self._caches)
        else:
            few = not self.attention.average and self.attention.topk and not self._slots.slides
            asked = AuxRequest(topk=self.attention.topk) if few else AuxRequest(weights=True)
            features = self.model.features(last, caches=self._caches, told=told, return_aux=asked)
        logits = self.model.logits(features[:, 0])
        chosen = choose(logits, active)
        gains = self._log_probabilities(logits, chosen)
        attended = [None] * len(active) if self.attention is None else self._attended(told, self.attention)
        self._slots.finish()
        shown, gone = [], []
        for i, request in enumerate(active):
            tokens = request.take(Token(request.number, chosen[i], None, gains[i], attended[i]))
            shown += tokens
            if tokens and tokens[-1].end:
                gone.append(i)
        self._leave(gone)
        return shown

    def _log_probabilities(self, logits: Tensor, chosen: list[int]) -> Sequence[float | None]:
        if not self.log_probabilities:
            return [None] * len(chosen)
        gains = logits.double().log_softmax(-1)
        picked: list[float] = gains.gather(1, torch.tensor(chosen, device=self.device)[:, None])[:, 0].tolist()
        return picked

    def _attended(self, told: list[Aux], request: AttentionRequest) -> list[Any]:
        """Return what each request's step attended to."""
        if told[0].topk is not None:
            weights = torch.stack([aux.topk.weights[:, :, 0] for aux in told if aux.topk], 1)  # (B, A, H, k)
            indices = torch.stack([aux.topk.indices[:, :, 0] for aux in told if aux.topk], 1)
            return [TokenAttention(*pair) for pair in zip(weights.cpu(), indices.cpu())]
        weights = torch.stack(
            [aux.weights[:, :, 0] for aux in told if aux.weights is not None], 1
        ).cpu()  # (B, A, H, S)
        weights = weights.mean((1, 2)) if request.average else weights
        found = []
        for i, length in enumerate(self._slots.lengths):
            steps, places = self._slots.columns(length + 1)
            made = weights.new_zeros(*weights.shape[1:-1], self._slots.prefix + length + 1)
            made[..., steps] = weights[i][..., places]
            if request.topk:
                most = made.topk(min(request.topk, made.shape[-1]))
                found.append(TokenAttention(most.values, most.indices))
            else:
                found.append(TokenAttention(made))
        return found

    def _leave(self, gone: list[int]) -> None:
        """Free slots: the last ones take their places."""
        for i in reversed(gone):
            last = len(self._active) - 1
            if i != last:
                for cache in self._caches:
                    cache.move(last, i)
                self._active[i], self._slots.lengths[i] = self._active[last], self._slots.lengths[last]
            self._active.pop()
            self._slots.lengths.pop()


def choose(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """Return the next token of each request, from logits (B, N).

    Raises
    ------
    ValueError
        If logits are no numbers.
    """
    most, tokens = logits.max(-1)
    if bool(most.isnan().any()):
        raise rejected("generate", "model", "give logits that are numbers", "nan")
    chosen: list[int] = tokens.tolist()
    alike: dict[SamplingOptions, list[int]] = {}
    for i, request in enumerate(requests):
        sampling = request.options.sampling
        if sampling.repetition_penalty != 1:
            before = [*request.prompt, *request.written]
            if sampling.is_greedy:
                chosen[i] = int(processed(logits[i], sampling, before).argmax())
            else:
                weights = probabilities(logits[i], sampling, before)
                chosen[i] = int(drawn(weights, torch.tensor(request.draws.next(), dtype=torch.float64)))
        elif not sampling.is_greedy:
            alike.setdefault(sampling, []).append(i)
    for sampling, rows in alike.items():
        weights = probabilities(logits if len(rows) == len(logits) else logits[rows], sampling)
        uniform = torch.tensor([requests[i].draws.next() for i in rows], dtype=torch.float64, device=logits.device)
        for i, token in zip(rows, drawn(weights, uniform).tolist()):
            chosen[i] = token
    return chosen


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode for a while, if it is not."""
    if not model.training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()
