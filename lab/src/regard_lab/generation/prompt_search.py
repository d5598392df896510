"""Beam search with decoder-only models.

Dimensions: B prompts, K beams, N vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from regard._utils.constraints import size
from regard._utils.errors import described, rejected
from regard_lab.generation.beam_search import Hypothesis, SearchOptions, search
from regard_lab.generation.continuous_batching import evaluating
from regard_lab.generation.generation import Prompts, StepwiseDecoder
from regard_lab.generation.requests import checked_prompt, positions_left
from regard_lab.models import DecoderLM
from regard_lab.models.base import END
from regard_lab.models.hugging_face.hosted import HostedWriter
from regard_lab.models.slot_cache import Slots

#: Offset of token ids in beam search, which uses the ids below for padding and the end mark.
FIRST = 2


@torch.inference_mode()
def search_prompts(
    model: DecoderLM | HostedWriter,
    prompts: Prompts,
    end: Sequence[int] = (),
    *,
    beams: int = 5,
    n_best: int = 1,
    max_new_tokens: int = 128,
    length_penalty: float = 0.6,
    no_repeat: int = 0,
) -> list[list[Hypothesis]]:
    """Return the best continuations of each prompt by beam search, best first.

    Parameters
    ----------
    model : DecoderLM or HostedWriter
    prompts : sequence of sequences of int
    end : sequence of int
        Tokens that end a continuation; none by default.
    beams, n_best, length_penalty, no_repeat : as in :class:`~regard_lab.generation.beam_search.SearchOptions`
    max_new_tokens : int, default 128
        Maximum length of a continuation; ending there does not change its score.

    Returns
    -------
    list of list of Hypothesis
        ``numbers`` are token ids, without the end token.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid, or if a prompt and its continuation exceed the number of learned positions.

    Examples
    --------
    >>> from regard_lab.models import DecoderLM, DecoderLMConfig
    >>> model = DecoderLM(DecoderLMConfig(50, width=16, layers=2))
    >>> (best,) = search_prompts(model, [[3, 1, 4]], end=[0], beams=3, n_best=2, max_new_tokens=5)
    >>> len(best), best[0].normalized >= best[1].normalized
    (2, True)
    """
    if not isinstance(model, DecoderLM | HostedWriter):
        raise rejected("search_prompts", "model", "be a DecoderLM", described(model), TypeError)
    writes_apart = isinstance(model, HostedWriter) and model.is_pair
    most = size("search_prompts", "max_new_tokens", max_new_tokens)
    tokens = [checked_prompt(prompt, model.config, "search_prompts") for prompt in prompts]
    wrong = next((token for token in end if not 0 <= token < model.config.vocabulary), None)
    if wrong is not None:
        raise rejected("search_prompts", "end", f"hold tokens from 0 to {model.config.vocabulary - 1:,}", wrong)
    for each in tokens:
        if not writes_apart and positions_left(model.config, each, most) < most:
            expected = f"leave room for {most} of the model's {model.config.max_length:,} positions"
            raise rejected("search_prompts", "prompt", expected, f"{len(each)} tokens")
    options = SearchOptions(
        beams=beams, n_best=n_best, length_penalty=length_penalty, no_repeat=no_repeat, ratio=0.0, extra=most
    )
    device = next(model.parameters()).device
    lengths = torch.tensor([len(each) for each in tokens], dtype=torch.int64, device=device)
    rows = [torch.tensor(each, device=device) for each in tokens]
    source = nn.utils.rnn.pad_sequence(rows, batch_first=True) if rows else lengths[:, None]
    with evaluating(model):
        if isinstance(model, HostedWriter):
            steps = StepwiseDecoder(model, list(end), most)
            found = [search(steps, row[None], length[None], options)[0] for row, length in zip(rows, lengths)]
        else:
            found = search(PromptDecoder(model, list(end), most), source, lengths, options)
    return [
        [Hypothesis(tuple(number - FIRST for number in each.numbers), each.score, each.normalized) for each in best]
        for best in found
    ]


@dataclass(frozen=True)
class Prompt:
    """The last tokens of the prompts, which the first step processes."""

    last: Tensor

    def select(self, rows: Tensor) -> Self:
        """Return the prompts at these rows."""
        return type(self)(self.last[rows])


@dataclass
class PromptState:
    """The caches of all beams, and the number of generated tokens."""

    slots: Slots
    caches: list[Any]
    written: int = 0

    def select(self, rows: Tensor) -> PromptState:
        """Return the beams at these rows; rows may repeat."""
        self.slots.lengths = [self.slots.lengths[row] for row in rows.tolist()]
        for cache in self.caches:
            cache.reorder(rows)
        return self


class PromptDecoder:
    """Adapts a decoder-only model to beam search; symbol ``token + 2`` stands for a token.

    Parameters
    ----------
    model : DecoderLM
    end : list of int
        Tokens that count as the search's end mark.
    most : int
        Number of tokens after which every beam ends at no cost.
    """

    def __init__(self, model: DecoderLM, end: list[int], most: int) -> None:
        self.model, self.end, self.most = model, end, most
        self._started: PromptState | None = None

    @property
    def symbols(self) -> int:
        """The number of symbols."""
        return self.model.config.vocabulary + FIRST

    def encode(self, source: Tensor, lengths: Tensor) -> Prompt:
        """Prefill the prompts without their last tokens."""
        model = self.model
        window = {"window": model.config.window, "sinks": model.config.sinks} if model.slides else {}
        slots = Slots(**window, device=source.device)  # type: ignore[arg-type]
        state = PromptState(slots, model.slot_caches(slots))
        for row, length in enumerate(lengths.tolist()):
            if length > 1:
                caches = model.caches(sliding=True)
                model.features(source[row : row + 1, : length - 1], caches=caches)
                for slot, cache in zip(state.caches, caches):
                    slot.load(row, *cache.sequence(0))
            slots.lengths.append(length - 1)
        self._started = state
        return Prompt(source.gather(1, lengths[:, None] - 1)[:, 0])

    def start(self, memory: Prompt, beams: int) -> PromptState:
        """Return the state of K beams of each prompt."""
        assert self._started is not None
        rows = torch.arange(len(memory.last), device=memory.last.device)
        return self._started if beams == 1 else self._started.select(rows.repeat_interleave(beams))

    def advance(self, last: Tensor, memory: Prompt, state: PromptState) -> tuple[Tensor, PromptState]:
        """Return the features (B, K, E) after the symbols ``last`` (B, K), and the new state."""
        B, K = last.shape
        state.written += 1
        if state.written > self.most:  # only the end mark is allowed
            return self.model.embedding.weight.new_zeros(B, K, self.model.config.width), state
        # Unused beams have symbols below FIRST: give them any token.
        read = (last - FIRST).clamp(min=0) if state.written > 1 else memory.last[:, None].expand(B, K)
        rows = self.model.features(read.reshape(-1, 1), caches=state.caches)
        state.slots.finish()
        return rows.view(B, K, -1), state

    def logits(self, rows: Tensor, state: PromptState) -> Tensor:
        """Return the logits (B, K, N + 2) of features (B, K, E) from this state."""
        N = self.model.config.vocabulary
        logits = rows.new_full((*rows.shape[:2], N + FIRST), -torch.inf)
        if state.written > self.most:
            logits[..., END] = 0.0
            return logits
        own = self.model.logits(rows.flatten(0, 1)).view(*rows.shape[:2], N)
        logits[..., FIRST:] = own
        if self.end:
            logits[..., END] = own[..., self.end].logsumexp(-1)
            logits[..., [FIRST + token for token in self.end]] = -torch.inf
        return logits
