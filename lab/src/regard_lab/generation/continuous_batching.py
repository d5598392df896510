"""Continuous batching: requests join and leave the batch at any step (Yu et al. 2022, Orca).

Dimensions: B active requests, R requests that join together, P prefix tokens, S tokens so far, N vocabulary size, A
layers, H heads.
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
from regard_lab.generation.sampling import GenerationOptions, SamplingOptions, drawn, probabilities, processed
from regard_lab.models import DecoderLM
from regard_lab.models.slot_cache import Slots

#: Maximum share of padding among the tokens of requests that join together.
_PADDING = 0.25


@dataclass(frozen=True)
class AttentionRequest:
    """Which attention weights to return with each generated token.

    Attributes
    ----------
    average : bool, default True
        Average over all layers and heads; otherwise return each head.
    topk : int, default 0
        Return only this many of the largest weights, with their token indices; 0 returns all weights.
    """

    average: bool = True
    topk: int = 0

    def __post_init__(self) -> None:
        count(self, "topk", self.topk)


@dataclass
class _Group:
    """Requests that join together; their prompts are padded and prefilled as one batch."""

    requests: list[Request]
    caches: list[Any]
    tokens: Tensor  # (R, T), T the longest prompt without its last token and without the prefix
    read: int = 0


class Batcher:
    """Continue many prompts at once; a request joins when a slot is free and leaves when it ends.

    The output of a request does not depend on the others: greedy decoding gives the same tokens as without batching,
    and the random numbers of sampling depend only on the prompt and the seed.

    Parameters
    ----------
    model : DecoderLM
    slots : int, default 8
        The most requests that are active at once.
    chunk : int, optional
        Chunked prefill: the most prompt tokens to process between two steps, so that active requests do not wait for a
        long prompt. By default, prompts are processed whole.
    prefix : sequence of int, optional
        Tokens that all prompts begin with. The model processes them once, and all requests share their keys and values.
    log_probabilities : bool, default False
        Return the log-probability of each token.
    attention : AttentionRequest, optional
        Attention weights to return with each token.
    decoder : callable, optional
        Return the text of each token: called with a request's prompt, it returns an incremental decoder, as
        ``tokenizer.decode_stream`` does. Stop texts need it.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

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
        decoder: Decoder | None = None,
    ) -> None:
        if not isinstance(model, DecoderLM):
            raise rejected("Batcher", "model", "be a DecoderLM", described(model), TypeError)
        if attention is not None and model.config.recurrent:
            expected = "be None for linear attention, which has no attention weights"
            raise rejected("generate", "attention", expected, described(attention))
        self.model, self.count = model, size(self, "slots", slots)
        self.chunk = None if chunk is None else Integer(ge=1, note=", or None")(self, "chunk", chunk)
        self.log_probabilities, self.attention, self.decoder = log_probabilities, attention, decoder
        self.device = next(model.parameters()).device
        self.waiting: deque[Request] = deque()
        self._group: _Group | None = None
        self._active: list[Request] = []
        self._number = 0
        self.prefix = checked_prompt(prefix, model.config, "Batcher") if len(prefix) else []
        if self.prefix and not model.keeps_all:
            expected = "be empty for a model with a window or linear attention"
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
        """Queue a request and return its number.

        Parameters
        ----------
        prompt : sequence of int
        options : GenerationOptions, optional
        stop : sequence of int, str or sequences of int
            Tokens, texts or sequences of tokens at which generation stops; they are not returned.
        sample : int, default 0
            Index of the sample: different values draw different tokens.
        """
        options = GenerationOptions() if options is None else options
        tokens = checked_prompt(prompt, self.model.config)
        if tokens[: len(self.prefix)] != self.prefix or len(tokens) == len(self.prefix):
            raise rejected("generate", "prompt", "begin with the prefix and be longer", f"{len(tokens)} tokens")
        most = positions_left(self.model.config, tokens, options.max_new_tokens)
        rules = StopRules.of(stop, self.decoder)
        self.waiting.append(Request(self._number, tokens, options, rules, sample, most))
        self._number += 1
        return self._number - 1

    @torch.inference_mode()
    def cancel(self, request: int) -> None:
        """Remove a request; does nothing if it has ended."""
        self.waiting = deque(each for each in self.waiting if each.number != request)
        for each in self._group.requests if self._group else ():
            each.most = 0 if each.number == request else each.most  # it leaves as soon as its group has joined
        self._leave([i for i, each in enumerate(self._active) if each.number == request])

    def __len__(self) -> int:
        """Return the number of unfinished requests."""
        return len(self.waiting) + len(self._active) + (len(self._group.requests) if self._group else 0)

    def __iter__(self) -> Iterator[list[Token]]:
        """Yield the tokens of each step, until no request is left."""
        while len(self):
            yield self.step()

    @torch.inference_mode()
    def step(self) -> list[Token]:
        """Prefill new prompts, generate one token for each active request, and return the tokens to show.

        Raises
        ------
        ValueError
            If the model returns NaN logits.
        """
        with evaluating(self.model):
            self._admit()
            return self._write() if self._active else []

    # Requests join

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
        """Prefill the next ``columns`` tokens of a group's prompts."""
        try:
            self.model.features(group.tokens[:, group.read : group.read + columns], caches=group.caches)
        except BaseException:  # discard the partial cache and queue the requests again
            self.waiting.extendleft(reversed(group.requests))
            self._group = None
            raise
        group.read += columns

    def _begin_group(self) -> bool:
        """Take waiting requests for the free slots, and return whether there are any."""
        taken: list[Request] = []
        while self.waiting and len(taken) < self.count - len(self._active):
            lengths = [len(each.prompt) for each in (*taken, self.waiting[0])]
            padding = 1 - sum(lengths) / (max(lengths) * len(lengths))
            # In a sliding window or a linear cache, padding would displace or mix with real tokens.
            if padding > (_PADDING if self.model.keeps_all else 0):
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
        """Move prefilled requests into slots; their last prompt token is processed in the next step."""
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
            return [None] * len(self.model.owners)
        caches = self.model.caches(len(self.prefix))
        with torch.inference_mode(), evaluating(self.model):
            self.model.features(torch.tensor([self.prefix], device=self.device), caches=caches)
        return [(cache.key, cache.value) for cache in caches]

    # Steps of generation

    def _write(self) -> list[Token]:
        active = self._active
        last = torch.tensor([[each.last] for each in active], device=self.device)
        aux: list[Aux] = []
        if self.attention is None:
            features = self.model.features(last, caches=self._caches)
        else:
            few = not self.attention.average and self.attention.topk and not self._slots.slides
            request = AuxRequest(topk=self.attention.topk) if few else AuxRequest(weights=True)
            features = self.model.features(last, caches=self._caches, aux=aux, return_aux=request)
        logits = self.model.logits(features[:, 0])
        chosen = choose(logits, active)
        gains = self._log_probabilities(logits, chosen)
        attended = [None] * len(active) if self.attention is None else self._attended(aux, self.attention)
        self._slots.finish()
        shown, gone = [], []
        for i, each in enumerate(active):
            tokens = each.take(Token(each.number, chosen[i], None, gains[i], attended[i]))
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

    def _attended(self, aux: list[Aux], request: AttentionRequest) -> list[Any]:
        """Return the attention of each active request in this step."""
        if aux[0].topk is not None:
            weights = torch.stack([each.topk.weights[:, :, 0] for each in aux if each.topk], 1)  # (B, A, H, k)
            indices = torch.stack([each.topk.indices[:, :, 0] for each in aux if each.topk], 1)
            return [TokenAttention(*pair) for pair in zip(weights.cpu(), indices.cpu())]
        stacked = [each.weights[:, :, 0] for each in aux if each.weights is not None]
        weights = torch.stack(stacked, 1).cpu()  # (B, A, H, S)
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
        """Free slots, and move the last active requests into them."""
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
        If there are NaN logits.
    """
    most, tokens = logits.max(-1)
    if bool(most.isnan().any()):
        raise rejected("generate", "model", "return logits without NaN", "nan")
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
    """Switch a model to evaluation mode inside the block."""
    if not model.training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()
