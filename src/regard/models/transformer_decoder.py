"""The decoder half of a Transformer: writes a sequence for whatever rows it attends to.

Dimensions: B sequences, I sources, S rows of a source, T target steps, K beams, L rows of a call (T or 1), E width, H
heads, N target vocabulary.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import AuxRequest
from regard._errors import rejected
from regard.models._parts import Output, check_probability, find_map, scheduled_sampling
from regard.models.attending import scorer
from regard.models.base import EncoderDecoder, project
from regard.models.transformer_config import TransformerConfig
from regard.nn import (
    BeamCache,
    KVCache,
    LearnedPositions,
    MultiheadAttention,
    Rotary,
    SinusoidalPositions,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
)
from regard.nn._base import cleared
from regard.nn.beam_cache import continued
from regard.nn.packed_weight import PackedWeight, can_pack

#: Sources that are read at once, of similar lengths.
_ALIKE = 16


@dataclass(frozen=True)
class Memory:
    """The encoder's output for B sources.

    Attributes
    ----------
    padding : Tensor (B, S)
        −inf for steps that are padding, else 0: a matrix is what torch's kernel takes for few queries.
    caches : tuple of KVCache
        The keys and values that each layer of the decoder makes of the encoder's rows, projected once.
    """

    padding: Tensor
    caches: tuple[KVCache, ...]

    def select(self, rows: Tensor) -> Memory:
        """Return these rows in this order."""
        return Memory(self.padding.index_select(0, rows), tuple(_rows(each, rows) for each in self.caches))


@dataclass(frozen=True)
class State:
    """Where the decoder stands, for R rows: sequences, or their beams.

    Attributes
    ----------
    caches : tuple of BeamCache or KVCache
        The keys and values of the steps so far, for each layer. They may hold later steps, too: those of a state that
        was made of this one.
    time : int
        How many steps have been made.
    rows : Tensor (R,), optional
        Which rows of the caches these are; None for all.
    weight : Tensor (N, E), optional
        The matrix that scores the vocabulary, laid out for the processor.
    """

    caches: tuple[BeamCache | KVCache, ...]
    time: int = 0
    rows: Tensor | None = None
    weight: Tensor | None = None

    def select(self, rows: Tensor) -> State:
        """Return these rows in this order."""
        return replace(self, rows=rows if self.rows is None else self.rows[rows])

    def continued(self, sequences: int) -> tuple[BeamCache | KVCache, ...]:
        """Return the caches of these rows, the beams of so many sequences, to which the next step may be appended."""
        return tuple(
            continued(each, self.time, self.rows, sequences)
            if isinstance(each, BeamCache)
            else _first(each, self.time)
            if self.rows is None
            else _rows(_first(each, self.time), self.rows)
            for each in self.caches
        )


class TransformerSequenceDecoder(EncoderDecoder):
    """A stack of self-attention and attention to rows of whatever was read (Vaswani 2017).

    ::

        y = √E · embedding + position
        layer    y ← y + MHA(y, y≤t, y≤t)    y ← y + MHA(y, x, x)    y ← y + W₂ φ(W₁ y)
        logits = W y + b

    with layer norms of the sums (norm "post"), or of what enters each block and of the stack's end ("pre"). Layers are
    those of :mod:`regard.nn`, and so are those of the encoder, of which there may be any number.

    Parameters
    ----------
    config : TransformerConfig
    """

    config: TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        E = config.width
        self.target_embedding = nn.Embedding(config.targets, E)
        self.target_positions = self._positions()
        self.encoder = nn.ModuleList([self._layer(TransformerEncoderLayer) for _ in range(config.encoder_layers)])
        self.decoder = nn.ModuleList([self._layer(TransformerDecoderLayer) for _ in range(config.decoder_layers)])
        self.encoder_norm = nn.LayerNorm(E) if config.norm == "pre" else nn.Identity()
        self.decoder_norm = nn.LayerNorm(E) if config.norm == "pre" else nn.Identity()
        self.output = Output(E, config.targets, config.tied != "none")
        self.dropout = nn.Dropout(config.dropout)

    def _positions(self) -> nn.Module | None:
        E = self.config.width
        if self.config.positions == "learned":
            return LearnedPositions(self.config.longest, E)
        return SinusoidalPositions(E) if self.config.positions == "sinusoidal" else None

    def _layer(self, kind: Callable[..., nn.Module]) -> nn.Module:
        config, head = self.config, self.config.width // self.config.heads
        layer = kind(
            config.width,
            config.heads,
            config.feedforward,
            config.dropout,
            config.activation,
            batch_first=True,
            norm_first=config.norm == "pre",
            num_kv_heads=config.kv_heads,
            # None is the scaled dot product, too, in torch's own kernel where that can be had.
            score=None if config.score == "scaled_dot" else scorer(config.score, head, config.longest),
            normalizer=config.normalizer,
            rotary=Rotary(head) if config.positions == "rotary" else None,
        )
        layer.dropout = nn.Dropout(config.activation_dropout)
        for child in layer.children():
            if isinstance(child, MultiheadAttention):
                child.dropout = config.attention_dropout
        return layer

    def reset_parameters(self) -> None:
        """Draw new parameters: matrices by Glorot's rule, embeddings and learned positions with variance 1/E."""
        for module in (*self.encoder, *self.decoder, self.encoder_norm, self.decoder_norm, self.output):
            if isinstance(module, TransformerEncoderLayer | TransformerDecoderLayer | nn.LayerNorm | Output):
                module.reset_parameters()
        for parameter in (*self.encoder.parameters(), *self.decoder.parameters()):
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        for each in (self.target_embedding, self.target_positions):
            self._draw_rows(each)

    def _draw_rows(self, rows: nn.Module | None) -> None:
        """Draw embeddings, or learned positions."""
        if isinstance(rows, nn.Embedding | LearnedPositions):
            nn.init.normal_(rows.weight, std=self.config.width**-0.5)

    @abstractmethod
    def _read(self, source: Tensor, lengths: Tensor, padding: Tensor) -> Tensor:
        """Return the rows (I, S, E) that are attended to; ``padding`` (I, S) hides what is padding."""

    def _through(self, x: Tensor, padding: Tensor) -> Tensor:
        """Return what the encoder's layers make of rows (I, S, E)."""
        for layer in self.encoder:
            x = layer(x, src_key_padding_mask=padding)
        rows: Tensor = self.encoder_norm(x)
        return rows

    @property
    def maps(self) -> tuple[str, ...]:
        layers, heads = range(1, self.config.decoder_layers + 1), range(1, self.config.heads + 1)
        return tuple(f"layer {layer} head {head}" for layer in layers for head in heads)

    def encode(self, source: Tensor, lengths: Tensor) -> Memory:
        behind = _behind(source, lengths)
        padding = torch.zeros(behind.shape, device=behind.device).masked_fill_(behind, -torch.inf)
        states, caches = self._read_alike(source, lengths, padding), []
        for layer in self.decoder:
            caches.append(KVCache())
            # No query asks; the keys and values go into the cache.
            self._attend(layer, states[:, :0], states, padding, cache=caches[-1])
        return Memory(padding, tuple(caches))

    @property
    def projection(self) -> tuple[Tensor, Tensor]:
        return self.output.projection(self.target_embedding)

    def features(self, source: Tensor, lengths: Tensor, target: Tensor, teacher_forcing: float = 1.0) -> Tensor:
        share = check_probability(self, teacher_forcing)
        if share == 1:
            return self._write(source, lengths, target, [])
        memory = self.encode(source, lengths)
        if len(target) > len(lengths):
            rows = torch.arange(len(lengths), device=lengths.device)
            memory = memory.select(rows.repeat_interleave(len(target) // len(lengths)))
        state, last, steps = self.start(memory, 1), target[:, :1], []
        for t in range(1, target.shape[1] + 1):
            features, state = self._advance(last, memory, state)  # (B, 1, E)
            steps.append(features)
            last = target[:, t : t + 1]  # (B, 1); none after the last step
            last = scheduled_sampling(last, self.logits(features.detach()), share) if last.numel() else last
        return torch.cat(steps, 1)

    def features_and_attention(
        self, source: Tensor, lengths: Tensor, target: Tensor, teacher_forcing: float = 1.0, *, name: str
    ) -> tuple[Tensor, Tensor]:
        layer, head = divmod(find_map(self, name), self.config.heads)
        if check_probability(self, teacher_forcing) < 1:
            raise rejected(type(self).__name__, "teacher_forcing", "be 1 where attention is guided", teacher_forcing)
        maps: list[Tensor] = []
        features = self._write(source, lengths, target, maps, (layer,))
        return features, maps[0][:, head]

    def start(self, memory: Memory, beams: int) -> State:  # noqa: ARG002
        # Where a score goes by the places of keys, each row has its own.
        kind = KVCache if self.config.score == "location" else BeamCache
        weight, _ = self.projection
        packs = can_pack(weight) and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        return State(tuple(kind() for _ in self.decoder), weight=PackedWeight.of(weight) if packs else None)

    def step(self, last: Tensor, memory: Memory, state: State, out: Tensor | None = None) -> tuple[Tensor, State]:
        features, state = self._advance(last, memory, state)
        weight, bias = self.projection
        return project(features, weight if state.weight is None else state.weight, bias, out), state

    def align(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        maps: list[Tensor] = []
        self._write(source, lengths, target, maps, range(self.config.decoder_layers))
        return torch.cat(maps, 1)  # (B, layers · H, T, S)

    def _advance(self, last: Tensor, memory: Memory, state: State) -> tuple[Tensor, State]:
        """Return the rows (B, K, E) after the symbols ``last`` (B, K), and the state after them."""
        B, K = last.shape
        caches = state.continued(B)
        x = self._embed(last.reshape(B * K, 1), self.target_embedding, self.target_positions, state.time)  # (B·K, 1, E)
        padding = memory.padding[:, None, None]
        for layer, own, other in zip(self.decoder, caches, memory.caches):

            def read(y: Tensor, layer: nn.Module = layer, other: KVCache = other) -> Tensor:
                assert isinstance(layer, TransformerDecoderLayer)
                beams = y.view(B, K, -1)  # beams of a sequence are so many queries to one memory
                return layer.multihead_attn.read(beams, other, padding).view(B * K, 1, -1)

            x = self._decode(layer, x, read, own)
        x = self.decoder_norm(x).view(B, K, -1)  # (B, K, E)
        return x, replace(state, caches=caches, time=state.time + 1, rows=None)

    def _read_alike(self, source: Tensor, lengths: Tensor, padding: Tensor) -> Tensor:
        """Return :meth:`_read`, for few sources of similar lengths at a time: a processor reads the less padding."""
        order = lengths.argsort()
        parts = []
        for rows in order.split(_ALIKE if source.device.type == "cpu" else len(order)):
            steps = int(lengths[rows].max())
            states = self._read(source[rows, :steps], lengths[rows], padding[rows, :steps])
            parts.append(F.pad(states, (0, 0, 0, source.shape[1] - steps)))
        return torch.cat(parts)[order.argsort()]

    def _write(
        self, source: Tensor, lengths: Tensor, target: Tensor, maps: list[Tensor], layers: Container[int] = ()
    ) -> Tensor:
        """Return the decoder's rows (B, T, E); the weights (B, H, T, S) of layers ``told`` go to ``maps``."""
        behind, (B, T), E = _behind(source, lengths), target.shape, self.config.width
        states = self._read(source, lengths, behind)
        x = self._embed(target, self.target_embedding, self.target_positions, 0)  # (B, T, E)
        for number, layer in enumerate(self.decoder):

            def read(y: Tensor, layer: nn.Module = layer, asked: bool = number in layers) -> Tensor:
                request = AuxRequest(weights=True) if asked else None
                # The targets of a source are so many more queries to its rows.
                made, aux = self._attend(layer, y.view(len(states), -1, E), states, behind, return_aux=request)
                if asked:
                    weights = aux.weights.unflatten(2, (-1, T))  # (I, H, B / I, T, S)
                    maps.append(weights.transpose(1, 2).flatten(0, 1))
                return made.view(B, T, E)

            x = self._decode(layer, x, read, None)
        return self.decoder_norm(x)

    def _embed(
        self, symbols: Tensor, embedding: nn.Embedding, positions: nn.Module | None, offset: int, lengths: Any = None
    ) -> Tensor:
        """Return the rows (B, L, E) of symbols (B, L), the first of which stands at ``offset``."""
        rows = cleared(embedding(symbols), lengths) * math.sqrt(self.config.width)
        return self.dropout(rows if positions is None else positions(rows, offset))

    def _decode(self, layer: nn.Module, x: Tensor, read: Callable[[Tensor], Tensor], cache: Any) -> Tensor:
        """Return what a layer makes of rows (B, L, E), where ``read`` is its attention to the source."""
        assert isinstance(layer, TransformerDecoderLayer)
        own: dict[str, Any] = {"need_weights": False, "is_causal": True, "cache": cache}
        x = layer._step(x, 1, lambda y: layer.self_attn(y, y, y, **own)[0])
        x = layer._step(x, 2, read)
        return layer._step(x, 3, layer._feed_forward)

    def _attend(self, layer: nn.Module, query: Tensor, states: Tensor, padding: Tensor, **options: Any) -> Any:
        """Return what rows (B, L, E) read of the source through a layer's attention, and what else is asked."""
        assert isinstance(layer, TransformerDecoderLayer)
        return layer.multihead_attn(query, states, states, key_padding_mask=padding, need_weights=False, **options)


def _behind(source: Tensor, lengths: Tensor) -> Tensor:
    """Return which steps of sources (B, S) are padding."""
    return torch.arange(source.shape[1], device=source.device) >= lengths[:, None]


def _rows(cache: KVCache, rows: Tensor) -> KVCache:
    """Return a cache of these rows in this order."""
    twin = copy.copy(cache)
    twin.reorder(rows)
    return twin


def _first(cache: KVCache, time: int) -> KVCache:
    """Return the cache of the first steps: itself where it has no others, else a copy, as the others are in use."""
    if len(cache) == time:
        return cache
    twin = copy.copy(cache)
    twin.truncate(time)
    return _rows(twin, torch.arange(len(cache.key), device=cache.key.device))
