"""The Transformer encoder–decoder, its config and presets included."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import AuxRequest
from regard._utils.errors import rejected
from regard.engines.fused.layers import Layers
from regard.nn import (
    LearnedPositions,
    MultiheadAttention,
    Rotary,
    SinusoidalPositions,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
)
from regard.nn._base import zero_padding
from regard.nn.positions.encodings import wide
from regard_lab._options import option
from regard_lab.models.attending import (
    DEEPEST,
    SCORES,
    TIES,
    Config,
    Output,
    check_probability,
    find_map,
    scheduled_sampling,
    scorer,
    share,
    size,
)
from regard_lab.models.base import END, PAD, EncoderDecoder
from regard_lab.models.beam_cache import (
    BeamCache,
    KeyRows,
    can_attend_packed,
    cross_attention,
    packed_self_attention,
    project_memory,
    self_attention_step,
)
from regard_lab.models.packed_layers import packed_layers, run_sequences, run_step
from regard_lab.models.packed_weight import PackedWeight, can_pack

# The config of a Transformer encoder–decoder, and presets by name -----------------------------------------------------


NORMS, POSITIONS = ("post", "pre"), ("sinusoidal", "learned", "rotary")
ACTIVATIONS, NORMALIZERS = ("relu", "gelu"), ("softmax", "sparsemax", "entmax15", "entmax", "sigmoid")


@dataclass(frozen=True)
class TransformerConfig(Config):
    """Everything that a :class:`~regard_lab.models.TransformerEncoderDecoder` is built from."""

    function: ClassVar[str] = "TransformerConfig"
    width: int = size(512, "width E of the rows")
    heads: int = size(8, "number of heads, which divides the width")
    #: Shazeer 2019, Ainslie 2023.
    kv_heads: int | None = size(None, "heads of keys and values, which divide the others; as many by default")
    encoder_layers: int = size(6, "layers of the encoder", DEEPEST)
    decoder_layers: int = size(6, "layers of the decoder", DEEPEST)
    feedforward: int = size(2048, "width of the hidden layer between attentions")
    dropout: float = share(0.1, "share zeroed of embeddings and of what each block adds (Vaswani 2017)")
    attention_dropout: float = share(0.0, "share zeroed of attention weights")
    activation_dropout: float = share(0.0, "share zeroed of the features between a block's two layers")
    activation: str = option("relu", "of the hidden layer", choices=ACTIVATIONS)
    #: After a block's residual sum (Vaswani 2017), or before the block (Xiong 2020, arXiv 2002.04745).
    norm: str = option("post", "what is normalized", choices=NORMS)
    score: str = option("scaled_dot", "how queries and keys compare within a head", choices=SCORES)
    normalizer: str = option("softmax", "of the scores", choices=NORMALIZERS)
    #: Sinusoids or learned rows added to the embeddings, or rotated queries and keys.
    positions: str = option("sinusoidal", "what tells positions", choices=POSITIONS)
    max_length: int = size(1024, "positions that learned ones and the score 'location' know")
    #: Chen 2020, arXiv 2004.14837: the step that reads a word knows it, the step that writes it has to guess.
    alignment: str = option("", "head, as in 'layer 2 head 1', whose weights at the step that reads a word align it")
    #: Press & Wolf 2017, arXiv 1608.05859. With "all", source and target share a vocabulary and the embedding.
    tied: str = option("target", "whether the target embedding also scores the vocabulary", choices=TIES)

    def check(self) -> None:
        """Raise where fields contradict each other."""
        self.check_tied(self.tied)
        if self.width % self.heads:
            raise self.refused("heads", f"divide width {self.width}", self.heads)
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise self.refused("kv_heads", f"divide heads {self.heads}", self.kv_heads)
        if self.positions == "rotary" and self.width // self.heads % 2:
            got = f"{self.width} over {self.heads}"
            raise self.refused("width", "be an even number for each head where positions is 'rotary'", got)
        if self.alignment and self.alignment not in self.heads_by_name:
            raise self.refused("alignment", f"be one of {', '.join(self.heads_by_name)}", self.alignment)

    @property
    def heads_by_name(self) -> tuple[str, ...]:
        """The decoder's heads, as the attention maps of a model call them."""
        layers, heads = range(1, self.decoder_layers + 1), range(1, self.heads + 1)
        return tuple(f"layer {layer} head {head}" for layer in layers for head in heads)

    @classmethod
    def presets(cls) -> Mapping[str, Mapping[str, Any]]:
        return PRESETS


#: Presets by name; those named after papers have the papers' sizes. Where source and target share one vocabulary, as in
#: Vaswani 2017, add ``tied="all"``.
PRESETS: dict[str, dict[str, Any]] = {
    "small": {"width": 256, "heads": 4, "encoder_layers": 3, "decoder_layers": 3, "feedforward": 1024, "norm": "pre"},
    "base": {"width": 384, "heads": 6, "encoder_layers": 4, "decoder_layers": 4, "feedforward": 1536, "norm": "pre"}
    | {"dropout": 0.2},
    "multi30k": {"width": 128, "heads": 4, "encoder_layers": 4, "decoder_layers": 4, "feedforward": 256}
    | {"dropout": 0.3},
    "vaswani2017-base": {"width": 512, "heads": 8, "feedforward": 2048, "dropout": 0.1},
    "vaswani2017-big": {"width": 1024, "heads": 16, "feedforward": 4096, "dropout": 0.3},
}


# The decoder half of a Transformer: writes a sequence for whatever rows it attends to ---------------------------------
# Dimensions: B sequences, I sources, S rows of a source, T target steps, K beams, L rows of a call (T or 1), E width, H
# heads, N target vocabulary.


#: The name of the map of the head ``config.alignment``, one step later.
ALIGNMENT = "alignment"
#: Number of sources of similar lengths to encode at once.
_ALIKE = 16
#: Number of steps to compute positions for at once.
_STEPS = 64


@dataclass(frozen=True)
class Memory:
    """The encoder's output for B sources.

    Attributes
    ----------
    layers : tuple of KeyRows
        Each decoder layer's keys and values of the encoder output.
    """

    layers: tuple[KeyRows, ...]

    def select(self, rows: Tensor) -> Memory:
        """Return these rows in this order."""
        return Memory(tuple(each.select(rows) for each in self.layers))


@dataclass(frozen=True)
class State:
    """The decoder state for R rows: sequences or beams.

    Attributes
    ----------
    caches : tuple of BeamCache
        Keys and values of earlier steps, for each layer, or one for all layers of the kernel. They may also hold later
        steps, appended by a state derived from this one.
    time : int
        Number of steps so far.
    rows : Tensor (R,), optional
        Indices of this state's rows in the caches; None for all.
    weight : Tensor (N, E), optional
        The packed output projection.
    waves : Tensor (steps, E), optional
        Precomputed sinusoidal positions.
    kernel : Layers, optional
        The decoder as one kernel.
    """

    caches: tuple[BeamCache, ...]
    time: int = 0
    rows: Tensor | None = None
    weight: Tensor | None = None
    waves: Tensor | None = None
    kernel: Layers | None = None

    def select(self, rows: Tensor) -> State:
        """Return these rows in this order."""
        return replace(self, rows=rows if self.rows is None else self.rows[rows])

    def continued(self) -> tuple[BeamCache, ...]:
        """Return copies of the caches for these rows, to append the next step; the state does not change."""
        twins = tuple(copy.copy(each) for each in self.caches)
        for each in twins:
            each.truncate(self.time)
            if self.rows is not None:
                each.reorder(self.rows)
        return twins


class TransformerSequenceDecoder(EncoderDecoder):
    """A Transformer decoder with self-attention and cross-attention to encoder states (Vaswani 2017).

    ::

        y = √E · embedding + position
        layer    y ← y + MHA(y, y≤t, y≤t)    y ← y + MHA(y, x, x)    y ← y + W₂ φ(W₁ y)
        logits = W y + b

    Layer norms follow the residual sums (norm "post"), or precede each block, with one more at the end ("pre"). Encoder
    and decoder use the layers of :mod:`regard.nn`; the encoder may have any number of layers, including none.

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
            return LearnedPositions(self.config.max_length, E)
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
            # None also means scaled dot product, and uses torch's kernel if possible.
            score=None if config.score == "scaled_dot" else scorer(config.score, head, config.max_length),
            normalizer=config.normalizer,
            rotary=Rotary(head) if config.positions == "rotary" else None,
        )
        layer.dropout = nn.Dropout(config.activation_dropout)
        for child in layer.children():
            if isinstance(child, MultiheadAttention):
                child.dropout = config.attention_dropout
        return layer

    def reset_parameters(self) -> None:
        """Reinitialize the parameters: matrices by Glorot's rule, embeddings and positions with variance 1/E."""
        for module in (*self.encoder, *self.decoder, self.encoder_norm, self.decoder_norm, self.output):
            if isinstance(module, TransformerEncoderLayer | TransformerDecoderLayer | nn.LayerNorm | Output):
                module.reset_parameters()
        for parameter in (*self.encoder.parameters(), *self.decoder.parameters()):
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        for each in (self.target_embedding, self.target_positions):
            self._draw_rows(each)

    def _draw_rows(self, rows: nn.Module | None) -> None:
        """Reinitialize embeddings or learned positions."""
        if isinstance(rows, nn.Embedding | LearnedPositions):
            nn.init.normal_(rows.weight, std=self.config.width**-0.5)

    @abstractmethod
    def _enter(self, source: Tensor, lengths: Tensor | None) -> Tensor:
        """Return the encoder's input embeddings (I, S, E); with lengths, padding is set to finite values."""

    def _read(self, source: Tensor, lengths: Tensor, padding: Tensor) -> Tensor:
        """Return the encoder states (I, S, E); ``padding`` (I, S) masks padding."""
        x = self._enter(source, lengths)
        for layer in self.encoder:
            x = layer(x, src_key_padding_mask=padding)
        rows: Tensor = self.encoder_norm(x)
        return rows

    @property
    def maps(self) -> tuple[str, ...]:
        """The attention of each head, and ``"alignment"`` if ``config.alignment`` names a head.

        That map has for each word the head's weights at the next step, which reads the word. The last word, and an end
        mark, have no next step in ``target``: theirs are the weights of the step that writes them.
        """
        heads = self.config.heads_by_name
        return (*heads, ALIGNMENT) if self.config.alignment else heads

    def encode(self, source: Tensor, lengths: Tensor) -> Memory:
        rows = self._read_rows(source, lengths)
        first, *others = self._decoder_layers
        projected = project_memory(first.multihead_attn, rows, lengths)
        return Memory((projected, *(project_memory(each.multihead_attn, rows, projected) for each in others)))

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
            features, state = self.advance(last, memory, state)  # (B, 1, E)
            steps.append(features)
            last = target[:, t : t + 1]  # (B, 1); none after the last step
            last = scheduled_sampling(last, self.logits(features.detach()), share) if last.numel() else last
        return torch.cat(steps, 1)

    def features_and_attention(
        self, source: Tensor, lengths: Tensor, target: Tensor, teacher_forcing: float = 1.0, *, name: str
    ) -> tuple[Tensor, Tensor]:
        find_map(self, name)
        head_name = self.config.alignment if name == ALIGNMENT else name
        layer, head = divmod(self.config.heads_by_name.index(head_name), self.config.heads)
        if check_probability(self, teacher_forcing) < 1:
            raise rejected(type(self).__name__, "teacher_forcing", "be 1 with guided attention", teacher_forcing)
        maps: list[Tensor] = []
        features = self._write(source, lengths, target, maps, (layer,))
        weights = maps[0][:, head]
        return features, _one_step_later(weights, target) if name == ALIGNMENT else weights

    def start(self, memory: Memory, beams: int) -> State:  # noqa: ARG002
        weight, _ = self.projection
        packs = can_pack(weight) and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        kernel = packed_layers(self._decoder_layers, self.decoder_norm)
        caches = tuple(BeamCache() for _ in (self.decoder if kernel is None else range(1)))
        return State(caches, weight=PackedWeight.of(weight) if packs else None, kernel=kernel)

    def logits(self, features: Tensor, state: State | None = None) -> Tensor:
        weight, bias = self.projection
        return F.linear(features, weight if state is None or state.weight is None else state.weight, bias)

    def align(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        maps: list[Tensor] = []
        self._write(source, lengths, target, maps, range(self.config.decoder_layers))
        weights = torch.cat(maps, 1)  # (B, layers · H, T, S)
        if not self.config.alignment:
            return weights
        head = weights[:, self.config.heads_by_name.index(self.config.alignment)]
        return torch.cat([weights, _one_step_later(head, target)[:, None]], 1)

    def advance(self, last: Tensor, memory: Memory, state: State) -> tuple[Tensor, State]:
        caches = state.continued()
        x, waves = self._embed_step(last.flatten(), state)  # (R, E)
        if state.kernel is not None:
            run_step(state.kernel, x, caches[0], memory.layers)
        else:
            for layer, own, other in zip(self._decoder_layers, caches, memory.layers):
                x = layer._step(x, 1, partial(self_attention_step, layer.self_attn, cache=own))
                x = layer._step(x, 2, partial(cross_attention, layer.multihead_attn, rows=other))
                x = layer._step(x, 3, layer._feed_forward)
            x = self.decoder_norm(x)
        x = x.view(*last.shape, -1)  # (B, K, E)
        return x, State(caches, state.time + 1, None, state.weight, waves, state.kernel)

    @property
    def _decoder_layers(self) -> list[TransformerDecoderLayer]:
        return [each for each in self.decoder if isinstance(each, TransformerDecoderLayer)]

    def _read_rows(self, source: Tensor, lengths: Tensor) -> Tensor:
        """Return the encoder states (N, E) of all sources, concatenated without padding."""
        behind = _behind(source, lengths)
        layers = [each for each in self.encoder if isinstance(each, TransformerEncoderLayer)]
        kernel = packed_layers(layers, self.encoder_norm)
        if kernel is not None:
            x = self._enter(source, None)[~behind]
            run_sequences(kernel, x, lengths)
            return x
        if not all(can_attend_packed(each.self_attn, self.target_embedding.weight) for each in layers):
            padding = torch.zeros(behind.shape, device=behind.device).masked_fill_(behind, -torch.inf)
            return self._read_alike(source, lengths, padding)[~behind]
        x = self._enter(source, None)[~behind]
        which = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        for layer in layers:
            x = layer._step(x, 1, lambda y, layer=layer: packed_self_attention(layer.self_attn, y, lengths, which))
            x = layer._step(x, 2, layer._feed_forward)
        return self.encoder_norm(x)

    def _read_alike(self, source: Tensor, lengths: Tensor, padding: Tensor) -> Tensor:
        """Run :meth:`_read` on small groups of sources of similar lengths, which reduces padding on a CPU."""
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
        """Return decoder hidden states (B, T, E); append the attention (B, H, T, S) of ``layers`` to ``maps``."""
        behind, (B, T), E = _behind(source, lengths), target.shape, self.config.width
        states = self._read(source, lengths, behind)
        x = self._embed(target, self.target_embedding, self.target_positions, 0)  # (B, T, E)
        for number, layer in enumerate(self.decoder):

            def look(y: Tensor, layer: nn.Module = layer, asked: bool = number in layers) -> Tensor:
                request = AuxRequest(weights=True) if asked else None
                # Several targets of a source are further queries to the same keys.
                made, aux = self._attend(layer, y.view(len(states), -1, E), states, behind, return_aux=request)
                if asked:
                    weights = aux.weights.unflatten(2, (-1, T))  # (I, H, B / I, T, S)
                    maps.append(weights.transpose(1, 2).flatten(0, 1))
                return made.view(B, T, E)

            assert isinstance(layer, TransformerDecoderLayer)
            x = layer._step(x, 1, partial(_causally, layer.self_attn))
            x = layer._step(x, 2, look)
            x = layer._step(x, 3, layer._feed_forward)
        return self.decoder_norm(x)

    def _embed(
        self, symbols: Tensor, embedding: nn.Embedding, positions: nn.Module | None, offset: int, lengths: Any = None
    ) -> Tensor:
        """Return the embeddings (B, L, E) of symbols (B, L), with positions starting at ``offset``."""
        rows = zero_padding(embedding(symbols), lengths) * math.sqrt(self.config.width)
        return self.dropout(rows if positions is None else positions(rows, offset))

    def _embed_step(self, symbols: Tensor, state: State) -> tuple[Tensor, Tensor | None]:
        """Return the embeddings (R, E) of a step's symbols (R,), and the cached sinusoidal positions."""
        positions, waves = self.target_positions, state.waves
        if not isinstance(positions, SinusoidalPositions):
            return self._embed(symbols[:, None], self.target_embedding, positions, state.time)[:, 0], None
        rows = self.target_embedding(symbols)
        if waves is None or state.time >= len(waves):
            waves = positions.encoding(2 * state.time + _STEPS, device=rows.device, dtype=wide(rows.dtype))
        made = torch.add(waves[state.time], rows, alpha=math.sqrt(self.config.width))
        made = made if made.dtype == rows.dtype else made.to(rows.dtype)
        return self.dropout(made) if self.training else made, waves

    def _attend(self, layer: nn.Module, query: Tensor, states: Tensor, padding: Tensor, **options: Any) -> Any:
        """Return the cross-attention output for queries (B, L, E), and requested auxiliary outputs."""
        assert isinstance(layer, TransformerDecoderLayer)
        return layer.multihead_attn(query, states, states, key_padding_mask=padding, need_weights=False, **options)


def _causally(layer: MultiheadAttention, x: Tensor) -> Tensor:
    """Return the causal self-attention output (B, T, E)."""
    made: Tensor = layer(x, x, x, need_weights=False, is_causal=True)[0]
    return made


def _one_step_later(weights: Tensor, target: Tensor) -> Tensor:
    """Return for each step the weights (B, T, S) of the next one, which reads its word; its own if nothing follows."""
    following = target[:, 1:, None]
    later = torch.where((following == PAD) | (following == END), weights[:, :-1], weights[:, 1:])
    return torch.cat([later, weights[:, -1:]], 1)


def _behind(source: Tensor, lengths: Tensor) -> Tensor:
    """Return the padding mask (B, S): True for padding."""
    return torch.arange(source.shape[1], device=source.device) >= lengths[:, None]


# The Transformer encoder–decoder --------------------------------------------------------------------------------------
# Dimensions: B batch, S source steps, E hidden size.


__all__ = ["PRESETS", "Memory", "State", "TransformerConfig", "TransformerEncoderDecoder"]


class TransformerEncoderDecoder(TransformerSequenceDecoder):
    """The Transformer encoder–decoder (Vaswani 2017).

    ::

        x = √E · embedding + position
        encoder layer    x ← x + MHA(x, x, x)        x ← x + W₂ φ(W₁ x)

    The decoder is :class:`TransformerSequenceDecoder`. Padding does not change the output.

    Parameters
    ----------
    config : TransformerConfig

    Examples
    --------
    >>> import torch
    >>> config = TransformerConfig(sources=30, targets=41, width=16, heads=4, feedforward=32)
    >>> model = TransformerEncoderDecoder(config)
    >>> source, lengths = torch.tensor([[2, 3, 4], [5, 6, 0]]), torch.tensor([3, 2])
    >>> model(source, lengths, target=torch.tensor([[1, 7, 8, 9], [1, 7, 0, 0]])).shape
    torch.Size([2, 4, 41])
    >>> model.maps[:2]
    ('layer 1 head 1', 'layer 1 head 2')
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.source_embedding = None if config.tied == "all" else nn.Embedding(config.sources, config.width)
        self.source_positions = self._positions()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialize the parameters; source embeddings like target embeddings."""
        super().reset_parameters()
        self._draw_rows(self.source_embedding)
        self._draw_rows(self.source_positions)

    def _enter(self, source: Tensor, lengths: Tensor | None) -> Tensor:
        embedding = self.target_embedding if self.source_embedding is None else self.source_embedding
        return self._embed(source, embedding, self.source_positions, 0, lengths)
