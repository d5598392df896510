"""The shape of a model: what is learned, what multiplies each token, and where attention looks.

Every count of the planner is read off this one description, which is made of a config without building the model.

Dimensions: E width, H query heads, G key-value heads, D width of a head, F hidden width, N vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any, Literal

import torch
from torch import nn

from regard import LocalLinear
from regard._utils.errors import described, rejected
from regard.nn import (
    TTTMLP,
    LinearCache,
    MesaNet,
    RecurrentAttention,
    TitansMAC,
    TitansMAG,
    TitansMAL,
    TitansMemory,
    TTTLinear,
)
from regard_lab.models.attending import scorer
from regard_lab.models.decoder_lm import DecoderLMConfig
from regard_lab.models.encoder_lm import EncoderLMConfig
from regard_lab.models.language_blocks import LanguageConfig
from regard_lab.models.mixers import MIXERS, meta
from regard_lab.models.transformer import TransformerConfig

#: Parts of a model, in the order of tables.
PARTS = ("embeddings", "attention", "feed-forward", "norms", "head")

Multiplies = Literal["nothing", "tokens", "sequences"]


@dataclass(frozen=True)
class Weight:
    """An array of learned numbers.

    Attributes
    ----------
    part : str
        One of :data:`PARTS`.
    sizes : tuple of int
        Rows and columns of a matrix, or the length of a vector.
    multiplies : {"nothing", "tokens", "sequences"}
        Whether the row of every token is multiplied by it, or one row of each sequence.
    stored : bool
        False where the numbers are those of another array, as those of tied embeddings are.
    """

    part: str
    sizes: tuple[int, ...]
    multiplies: Multiplies = "nothing"
    stored: bool = True

    @property
    def parameters(self) -> int:
        """How many numbers it adds to the model."""
        return math.prod(self.sizes) if self.stored else 0

    @property
    def flops(self) -> int:
        """Operations of one row's product with it: a multiplication and an addition for each number."""
        return 0 if self.multiplies == "nothing" else 2 * math.prod(self.sizes)


@dataclass(frozen=True)
class AttentionShape:
    """One attention of a layer: its heads, and which keys a query sees.

    Attributes
    ----------
    heads, kv_heads, head_width : int
        H, G and D.
    causal : bool
        Whether keys after the query are hidden.
    window : int, optional
        How many keys a query sees, its own included.
    sinks : int
        First keys that all later queries attend to, in addition to their window.
    rotary : bool
        Whether turned copies of queries and keys are kept for the backward pass.
    linear : bool
        Whether keys and values are summed to a matrix (D, V) for each head, in place of scores.
    value_width : int, optional
        V; D by default.
    state : int
        Numbers that the cache of such a sum keeps of a sequence, however long.
    steps : int
        Keys and values that a token adds to it.
    shares : bool
        Whether keys and values are those of an earlier layer, which projects and caches them.
    cached, kept : int, optional
        Numbers of each token that a cache keeps, 2·G·D by default, and about how many the backward pass needs.
    block, chosen : int, optional
        Keys of a block, and how many blocks a query sees, its own included.
    means : int, optional
        Keys of a block where the mean of each one that has ended stands for its keys.
    pair, token : int
        Operations of each pair and head, and of each token, beside those that D, V and the weights of the layer tell.
    cut_heads, cut_tokens : bool
        Whether devices can share its heads, or the tokens of a sequence.
    also : tuple of AttentionShape
        What else compares these queries with keys, to choose some of them or to add what it reads. Of these only the
        operations are counted.
    """

    heads: int
    kv_heads: int
    head_width: int
    causal: bool = False
    window: int | None = None
    sinks: int = 0
    rotary: bool = False
    linear: bool = False
    value_width: int | None = None
    state: int = 0
    steps: int = 1
    shares: bool = False
    cached: int | None = None
    kept: int | None = None
    block: int | None = None
    chosen: int = 0
    means: int | None = None
    pair: int = 0
    token: int = 0
    cut_heads: bool = True
    cut_tokens: bool = True
    also: tuple[AttentionShape, ...] = ()

    @property
    def values(self) -> int:
        """Width V of a value."""
        return self.head_width if self.value_width is None else self.value_width

    @property
    def numbers(self) -> int:
        """How many numbers of each token a cache keeps."""
        return 2 * self.kv_heads * self.head_width if self.cached is None else self.cached


@dataclass(frozen=True)
class Layer:
    """One layer: its weights, its attentions, and its feed-forward network of width F.

    Attributes
    ----------
    width, hidden : int
        E and F.
    weights : tuple of Weight
    attentions : tuple of AttentionShape
        That to the sequence itself, and in decoders that read another one, that to it.
    kept_hidden : int
        How many rows of width F the feed-forward network keeps for the backward pass: what enters the nonlinearity and
        what leaves it (one and the same of ReLU), and with a gate two more.
    statistics : int
        Numbers that a norm keeps for each row: its mean and deviation, or the latter alone.
    dropout, attention_dropout : bool
        Whether what a layer adds, and attention weights, are dropped in training.
    """

    width: int
    hidden: int
    weights: tuple[Weight, ...]
    attentions: tuple[AttentionShape, ...]
    kept_hidden: int = 2
    statistics: int = 2
    dropout: bool = False
    attention_dropout: bool = False


@dataclass(frozen=True)
class Stack:
    """Layers of one kind, one after the other; ``shared`` ones have the parameters of one."""

    layer: Layer
    depth: int
    shared: bool = False

    @property
    def parameters(self) -> int:
        """How many numbers all layers have."""
        return sum(each.parameters for each in self.layer.weights) * (1 if self.shared else self.depth)


@dataclass(frozen=True)
class Shape:
    """What a model is made of.

    Attributes
    ----------
    name : str
    width, vocabulary : int
        E and N, of what is predicted.
    max_length : int
        Tokens of the longest sequence that it was made for.
    stacks : tuple of Stack
        One, or those of an encoder and a decoder.
    rest : tuple of Weight
        What is outside the layers: embeddings, norms, and what makes logits.
    positions : bool
        Whether positions are learned, so that no sequence may be longer.
    """

    name: str
    width: int
    vocabulary: int
    max_length: int
    stacks: tuple[Stack, ...]
    rest: tuple[Weight, ...]
    positions: bool = False

    @property
    def depth(self) -> int:
        """Layers of all stacks."""
        return sum(stack.depth for stack in self.stacks)

    @property
    def parameters(self) -> int:
        """How many numbers are learned."""
        return sum(stack.parameters for stack in self.stacks) + sum(each.parameters for each in self.rest)


@singledispatch
def shape_of(config: object, name: str = "model") -> Shape:  # noqa: ARG001
    """Return the shape of the model that a config describes.

    Parameters
    ----------
    config : DecoderLMConfig, EncoderLMConfig or TransformerConfig
    name : str, default "model"

    Raises
    ------
    TypeError
        If the planner knows no such models.

    Examples
    --------
    >>> shape_of(DecoderLMConfig.preset("gpt2")).parameters
    124439808
    """
    expected = "be the config of a DecoderLM, an EncoderLM or a TransformerEncoderDecoder"
    raise rejected("shape_of", "config", expected, described(config), TypeError)


@shape_of.register
def _decoder(config: DecoderLMConfig, name: str = "model") -> Shape:
    E, N = config.width, config.vocabulary
    if config.chunk is not None or config.rotary_layers != "rotary":
        raise rejected(
            "plan", "chunk", "be left out: layers that differ in their positions are not planned", config.chunk
        )
    shares = (source != i for i, source in enumerate(config.sources))
    counts = Counter(zip(config.kinds, config.sparse, shares))
    stacks = tuple(Stack(_decoder_layer(config, *kind), count) for kind, count in counts.items())
    rest = [Weight("embeddings", (N, E)), *_positions(config, config.max_length, E), *_norm(config, E)]
    rest.append(Weight("head", (N, E), "tokens", stored=not config.tied))
    return Shape(name, E, N, config.max_length, stacks, tuple(rest), config.positions == "learned")


#: Kinds whose operations are not counted: their networks learn by orthogonal steps.
_UNCOUNTED = ("atlas", "lact")


def _decoder_layer(config: DecoderLMConfig, kind: str, sparse: bool, shares: bool) -> Layer:
    """Return the layer of a decoder with this kind of attention, perhaps experts, and perhaps another layer's keys."""
    D = config.head
    if kind in _UNCOUNTED:
        expected = f"be none of {', '.join(_UNCOUNTED)}, whose operations are not counted"
        raise rejected("plan", "attention", expected, repr(kind))
    if MIXERS[kind].scores or kind == "linear":
        state = config.heads * D * (D + 1)
        seen: dict[str, Any] = {"causal": True, "window": config.window, "sinks": config.sinks}
        seen |= {"linear": True, "state": state} if kind == "linear" else {"shares": shares}
        rows = 2 * (config.heads + config.groups) * D
        seen |= {} if kind in ("softmax", "laser") else {"cut_tokens": False}
        if kind == "order1":  # sums of products of positions, and a system of equations for each query
            seen |= {"pair": LocalLinear().pair_flops(D), "token": config.heads * D**3 // 3}
            seen["kept"] = rows + config.heads * (D + 1) * (D + 2) // 2
        elif kind == "laser":  # exponentials of values, and logarithms of what is read
            seen["kept"] = 3 * rows
        return _language_layer(config, replace(_attention(config), **seen), sparse=sparse)
    layer = meta(config, kind, config.kinds.index(kind))
    attention = _recurrence(config, layer) if isinstance(layer, RecurrentAttention) else _keyed(config, kind, layer)
    names = [name for name, each in layer.named_modules() if isinstance(each, nn.Linear)]
    weights = []
    for name, each in layer.named_parameters():
        multiplies = name.rpartition(".")[0] in names and each.dim() == 2
        weights.append(Weight("attention", tuple(each.shape), "tokens" if multiplies else "nothing"))
    return _language_layer(config, attention, weights, sparse)


def _recurrence(config: DecoderLMConfig, layer: RecurrentAttention) -> AttentionShape:
    with torch.device("meta"):
        cache = LinearCache()
        layer(torch.empty(1, 1, config.width), cache=cache)
    held: Any = cache.state
    state = sum(each.nbytes for each in held) // torch.float32.itemsize
    if isinstance(layer, TTTLinear | TTTMLP | TitansMemory | _TitansNear):
        return _network(config, layer, state)
    _, *heads, K, V = held.matrix.shape
    H = math.prod(heads)  # a level of a log-linear layer is a head of its recurrence
    seen: dict[str, Any] = {"causal": True, "linear": True, "value_width": V, "state": state, "steps": layer.num_steps}
    seen |= {"cut_heads": False, "cut_tokens": False}
    # Features, what convolutions and norms read, and what the recurrence needs: fitted to what torch keeps.
    seen["kept"] = round(3.7 * (_made(layer) - config.width + H * V * layer.num_steps))
    if isinstance(layer, MesaNet):  # a factorization of a matrix (D, D) for each head, and two triangular systems
        seen["token"] = H * (K**3 // 3 + 2 * K**2)
    return AttentionShape(H, H, K, **seen)


#: Titans with attention.
_TitansNear = TitansMAC | TitansMAG | TitansMAL


def _network(config: DecoderLMConfig, layer: Any, state: int) -> AttentionShape:
    """Return the shape of a layer whose state is a network, of whose numbers each head has one matrix (K, V)."""
    H, V, E = layer.num_heads, layer.head_dim, config.width
    sizes = [tuple(each.shape[1:]) for each in layer.initial]
    numbers = sum(K * V for K, V in sizes)
    momentum = not isinstance(layer, TTTLinear | TTTMLP)
    together = layer.block_size
    if together == 1:
        together = min(_STEPWISE, layer.segment) if isinstance(layer, TitansMAC) else _STEPWISE
    # Beside a product with each number to write and one to read: the network's outputs, and gradients but of its keys.
    token = 2 * (2 * numbers - math.prod(sizes[0])) + (4 * numbers if momentum else 0)
    token += sum(2 * together * (K + V) for K, V in sizes)  # what the steps of a block write and read
    if layer.block_size == 1:  # and a triangular system
        token += together * (4 * V + 2 * V + V)
    token *= H
    # Networks at the start of blocks, for gradients and for reads, rows of hidden layers, and pairs of steps in a
    # block: fitted to what torch keeps.
    hidden = sum(K for K, _ in sizes[1:])
    kept = round(3.7 * (_made(layer) - E + H * V)) + (4 if momentum else 2) * H * numbers // together
    kept += H * (16 * hidden + 6 * V + (11 if momentum else 6) * together)
    also: tuple[AttentionShape, ...] = ()
    if isinstance(layer, _TitansNear):
        near = AttentionShape(H, H, V, causal=True)
        if isinstance(layer, TitansMAC):  # to the segment and to what was recalled for it
            also = (replace(near, block=layer.segment, chosen=1),) * 2
            token += 2 * 2 * 3 * E * E  # two of its projections are of two rows
        else:
            also = (replace(near, window=layer.window),)
        token += 4 * H * layer.num_persistent * V
    seen: dict[str, Any] = {"causal": True, "linear": True, "cut_heads": False, "cut_tokens": False, "also": also}
    return AttentionShape(H, H, numbers // V, value_width=V, state=state, token=token, kept=kept, **seen)


#: Steps that a network of one matrix learns together.
_STEPWISE = 32


def _made(layer: nn.Module) -> int:
    """Return how many numbers of each token the linear layers make."""
    return sum(each.out_features for each in layer.modules() if isinstance(each, nn.Linear))


#: Tokens of a block of reflections.
_PATH = 128


def _keyed(config: DecoderLMConfig, kind: str, layer: Any) -> AttentionShape:
    """Return the attention of a layer that keeps keys of its own kind."""
    H, D, V = config.heads, config.head, layer.value_dim if kind in ("mla", "dsa") else config.head
    grouped = ("differential", "fox", "gta", "moba", "nsa", "path", "path-fox")
    G = config.groups if kind in grouped else 1 if kind == "mfa" else H
    width = D + layer.rotary_dim if kind in ("mla", "dsa") else D
    seen: dict[str, Any] = {"causal": True, "rotary": config.positions == "rotary", "value_width": V}
    seen |= {"cut_heads": kind == "moba", "cut_tokens": kind == "differential"}
    seen["kept"] = kept = _made(layer) - config.width + H * V
    # Chosen keys are kept as lists, of each head and in several forms; the factors are fitted to what torch keeps.
    listed = 5 * H * (config.keys_chosen if kind == "dsa" else config.block * config.blocks_chosen)
    if kind == "differential":
        seen |= {"value_width": 2 * D, "cached": 2 * G * D}
    elif kind == "fox":
        seen |= {"cached": 2 * G * D + H, "kept": 2 * kept}
    elif kind in ("path", "path-fox"):  # reflections turn queries, block by block
        seen |= {"cached": (3 * D + 1) * G + (H if kind == "path-fox" else 0), "pair": 6 * D + 2 * _PATH}
        seen |= {"rotary": False, "kept": 3 * kept}
        seen["kept"] += 6 * H * config.max_length if config.max_length <= _PATH else 0  # more are computed again
    elif kind == "gta":
        seen["cached"] = G * D + D // 2
    elif kind == "tpa":  # of products of factors for heads and for columns
        ranks = config.query_rank + 2 * config.key_rank
        seen |= {"cached": 2 * config.key_rank * (H + D), "token": 2 * ranks * H * D}
    elif kind == "moba":
        choice = AttentionShape(H, G, D, causal=True, means=config.block, value_width=0)
        seen |= {"block": config.block, "chosen": config.blocks_chosen, "also": (choice,), "kept": 2 * kept + listed}
    elif kind == "nsa":
        means = AttentionShape(H, G, D, causal=True, means=config.block)
        near = AttentionShape(H, G, D, causal=True, window=layer.window)
        seen |= {"block": config.block, "chosen": config.blocks_chosen, "kept": 3 * kept + listed}
        seen["also"] = (means, replace(means, value_width=0), near)
    elif kind in ("mla", "dsa"):
        seen["cached"] = layer.latent_dim + layer.rotary_dim
        if kind == "dsa":
            index = layer.indexer
            choice = AttentionShape(index.num_heads, 1, index.head_dim, causal=True, value_width=0)
            seen |= {"window": config.keys_chosen, "also": (choice,), "cached": seen["cached"] + index.head_dim}
            seen["kept"] = 2 * kept + listed
    return AttentionShape(H, G, width, **seen)


@shape_of.register
def _encoder(config: EncoderLMConfig, name: str = "model") -> Shape:
    E, W, N = config.width, config.embedded, config.vocabulary
    rest = [Weight("embeddings", (N, W)), *_positions(config, config.max_length + config.first_position, W)]
    rest += [Weight("embeddings", (config.segments, W))] if config.segments else []
    rest += _norm(config, E if config.norm_first else W)
    rest += linear("embeddings", W, E, True) if W != E else []
    rest += linear("head", E, E, True, "sequences") if config.pooled else []
    if config.masked_head:  # Devlin 2018: a layer, a norm, and the embedding with a bias
        rest += [*linear("head", E, W, True), *_norm(config, W)]
        rest += [Weight("head", (N, W), "tokens", stored=not config.tied), Weight("head", (N,))]
    stacks = (Stack(_language_layer(config, _attention(config)), config.layers, config.shared),)
    return Shape(name, E, N, config.max_length, stacks, tuple(rest), config.positions == "learned")


@shape_of.register
def _encoder_decoder(config: TransformerConfig, name: str = "model") -> Shape:
    E = config.width
    G, D = config.kv_heads or config.heads, config.width // config.heads
    to_itself = AttentionShape(config.heads, G, D, rotary=config.positions == "rotary")
    one = [*linear("attention", E, E + 2 * G * D, True), *linear("attention", E, E, True)]
    one += _scorer(config.score, D, config.max_length)
    norm = [Weight("norms", (2, E))]
    rest = [Weight("embeddings", (config.targets, E))]
    rest += [] if config.tied == "all" else [Weight("embeddings", (config.sources, E))]
    rest += 2 * [Weight("embeddings", (config.max_length, E))] if config.positions == "learned" else []
    rest += 2 * norm if config.norm == "pre" else []
    rest += [Weight("head", (config.targets, E), "tokens", stored=config.tied == "none")]
    rest += [Weight("head", (config.targets,))]
    hidden = _feed_forward(E, config.feedforward, False, True)
    kept: dict[str, Any] = {"kept_hidden": _kept_hidden(config.activation, False), "dropout": config.dropout > 0}
    kept["attention_dropout"] = config.attention_dropout > 0

    def stack(depth: int, attentions: tuple[AttentionShape, ...]) -> Stack:
        count = len(attentions)
        weights = (*count * one, *hidden, *(count + 1) * norm)
        return Stack(Layer(E, config.feedforward, weights, attentions, **kept), depth)

    stacks = (
        stack(config.encoder_layers, (to_itself,)),
        stack(config.decoder_layers, (replace(to_itself, causal=True), to_itself)),
    )
    return Shape(name, E, config.targets, config.max_length, stacks, tuple(rest), config.positions == "learned")


def linear(part: str, inputs: int, outputs: int, bias: bool, multiplies: Multiplies = "tokens") -> list[Weight]:
    """Return the weights of a linear layer."""
    return [Weight(part, (outputs, inputs), multiplies), *([Weight(part, (outputs,))] if bias else [])]


def _attention(config: LanguageConfig) -> AttentionShape:
    # Devices that share heads would need other slopes of ALiBi, and parts of what all heads learn together.
    together = config.qk_norm != "none" or config.output_gate or _scorer(config.score, config.head, config.max_length)
    cuts: dict[str, Any] = {
        "cut_heads": not together and config.positions not in ("alibi", "disentangled"),
        "cut_tokens": config.positions != "disentangled",
    }
    return AttentionShape(config.heads, config.groups, config.head, rotary=config.positions == "rotary", **cuts)


def _language_layer(
    config: LanguageConfig, attention: AttentionShape, weights: Iterable[Weight] | None = None, sparse: bool = False
) -> Layer:
    """Return the layer of a language model: one attention, a feed-forward network and norms.

    The weights of the attention are those of softmax or linear attention by default.
    """
    E, H, G, D = config.width, config.heads, config.groups, config.head
    if weights is None:
        bias = config.bias if config.qkv_bias is None else config.qkv_bias
        weights = linear("attention", E, (H if attention.shares else H + 2 * G) * D, bias)
        weights += linear("attention", H * D, E, config.bias if config.out_bias is None else config.out_bias)
        if not attention.linear:
            weights += _scorer(config.score, D, config.max_length)
            with torch.device("meta"):
                distances = config.distances
            if distances is not None:  # their products are not counted
                weights += [Weight("attention", tuple(each.shape)) for each in distances.parameters()]
            weights += linear("attention", E, H * D, bias) if config.output_gate else []
            of_keys = [] if attention.shares else [G]
            if config.qk_norm == "head":
                weights += [each for _ in (H, *of_keys) for each in _norm(config, D)]
            elif config.qk_norm == "all":
                weights += [Weight("norms", (heads * D,)) for heads in (H, *of_keys)]
    weights = [*weights, *_norm(config, E)]
    if sparse:
        assert isinstance(config, DecoderLMConfig)
        weights += [*_experts(config), *_norm(config, E)]
    elif config.hidden:
        weights += [*_feed_forward(E, config.hidden, config.gated, config.bias), *_norm(config, E)]
    dropped = config.dropout > 0, config.attention_dropout > 0
    kept = _kept_hidden(config.activation, config.gated)
    return Layer(E, config.hidden, tuple(weights), (attention,), kept, 2 if config.norm == "layer" else 1, *dropped)


def _feed_forward(width: int, hidden: int, gated: bool, bias: bool) -> list[Weight]:
    up = linear("feed-forward", width, hidden, bias)
    return [*up, *(up if gated else []), *linear("feed-forward", hidden, width, bias)]


def _experts(config: DecoderLMConfig) -> list[Weight]:
    """Return the weights of a mixture of experts; a token is multiplied by those of the chosen ones alone."""
    E, F, S = config.width, config.expert_width or config.hidden, config.shared_width
    weights = [Weight("feed-forward", (config.experts, 3 * F, E))]
    weights.append(Weight("feed-forward", (config.experts_chosen * 3 * F, E), "tokens", stored=False))
    weights += linear("feed-forward", E, config.experts, False)
    weights += _feed_forward(E, S, True, False) if S else []
    return [*weights, *(linear("feed-forward", E, 1, False) if S and config.shared_gate else [])]


def _kept_hidden(activation: str, gated: bool) -> int:
    return (1 if activation == "relu" else 2) + 2 * gated


def _norm(config: LanguageConfig, width: int) -> list[Weight]:
    return [Weight("norms", (2, width) if config.norm == "layer" else (width,))]


def _positions(config: LanguageConfig, rows: int, width: int) -> list[Weight]:
    return [Weight("embeddings", (rows, width))] if config.positions == "learned" else []


def _scorer(score: str, width: int, max_length: int) -> list[Weight]:
    """Return what a score learns; its products, if there are any, are not counted."""
    if score == "scaled_dot":
        return []
    with torch.device("meta"):
        return [Weight("attention", tuple(each.shape)) for each in scorer(score, width, max_length).parameters()]
