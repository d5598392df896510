"""The decoder-only language model: predicts each token from the ones before it (Radford 2019; Touvron 2023).

Dimensions: B batch, L new tokens, S keys (cached ones plus L new ones), E hidden size, H heads, N vocabulary size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import and_
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from regard import masks
from regard._utils.errors import described, rejected, unknown_name
from regard.engines.aux import Aux, AuxRequest
from regard.masks import Mask, MaskLike
from regard.nn import KeysValues, KVCache, LinearCache
from regard.nn.linear.self_attention import FEATURE_MAPS
from regard_lab._options import option
from regard_lab.models.attending import LARGEST, size, vocabulary_scores
from regard_lab.models.experts import ROUTERS, Experts
from regard_lab.models.language_blocks import (
    Block,
    BlockStack,
    LanguageConfig,
    PositionEmbedding,
    draw,
    embedded,
    norm,
    rotary,
)
from regard_lab.models.mixers import MIXERS, Mixer, kinds_of, meta
from regard_lab.models.pooling import OF_DECODERS, pooled
from regard_lab.models.slot_cache import LinearSlotCache, SlotCache, Slots

__all__ = ["PRESETS", "DecoderLM", "DecoderLMConfig"]


class Masks(NamedTuple):
    """The masks of layers with a state, of those with scores, and of those that see their own chunk alone."""

    state: MaskLike | None
    scores: MaskLike | None
    chunk: MaskLike | None = None


@dataclass(frozen=True)
class DecoderLMConfig(LanguageConfig):
    """Everything that a :class:`~regard_lab.models.DecoderLM` is built from."""

    function = "DecoderLMConfig"
    #: Beltagy 2020, arXiv 2004.05150; Jiang 2023, arXiv 2310.06825.
    window: int | None = size(None, "tokens that each one sees, itself included; all by default", 1 << 24)
    #: Xiao 2023, arXiv 2309.17453.
    sinks: int = option(0, "first tokens that each one sees beside its window", ge=0)
    #: Llama 4, 2025: iRoPE.
    rotary_layers: str = option("rotary", "which layers have rotary positions, if the model has: 'rotary' or 'none', "
                                "repeated in this order, with commas between them")  # fmt: skip
    chunk: int | None = size(None, "positions of a chunk; layers with rotary positions then see their own chunk alone "
                             "(Llama 4)", 1 << 24)  # fmt: skip
    attention: str = option("softmax", f"kinds of attention of the layers, repeated in this order, with commas between "
                            f"them: {', '.join(MIXERS)}", short="Kinds of attention of the layers, repeated in this "
                            "order, with commas between them.")  # fmt: skip
    #: Brandon 2024, arXiv 2405.12981; Sun 2024, arXiv 2405.05254.
    share_keys_values: str = option("1", "consecutive softmax layers that share the keys and values of the first of "
                                    "them; or for each layer, with commas, the layer whose it reads, from 0",
                                    short="Consecutive softmax layers that share keys and values.")  # fmt: skip
    #: Katharopoulos 2020, arXiv 2006.16236.
    feature_map: str = option("none", "of queries and keys in linear attention, whose weights are products of "
                              "features, as all softmax layers then are", choices=("none", *FEATURE_MAPS))  # fmt: skip
    #: DeepSeek-AI 2024, arXiv 2405.04434.
    latent_width: int | None = size(None, "width of a latent in mla; four heads by default")
    latent_query_width: int | None = size(None, "width of a latent that queries of mla and mfa are made of; "
                                          "none in mla by default, that of a head in mfa")  # fmt: skip
    latent_shared_width: int = option(0, "width of the key that heads of mla share; with rotary positions that of a "
                                      "head", ge=0, le=LARGEST)  # fmt: skip
    value_width: int | None = size(None, "width of a head's values in mla; head_width by default")
    recurrent_heads: int | None = size(None, "heads of values in layers with a state; heads by default")
    recurrent_key_heads: int | None = size(
        None, "heads of keys in gated-delta and comba, groups in mamba2 (1 by default)"
    )
    recurrent_key_width: int | None = size(None, "width of a key in layers with a state")
    recurrent_value_width: int | None = size(None, "width of a value in layers with a state")
    recurrent_eps: float = option(1e-5, "added to the variance in the output norm of layers with a state", gt=0)
    convolution: int = size(4, "steps that the short convolution of path and of layers with a state reads", 1 << 10)
    #: Siems 2025, arXiv 2502.10297.
    delta_steps: int = size(2, "keys and values that a token writes in gated-delta-product", 1 << 8)
    #: Zhang 2025, arXiv 2501.06425.
    query_rank: int = size(6, "products that queries of tpa are sums of", 1 << 10)
    key_rank: int = size(2, "products that keys, and values, of tpa are sums of", 1 << 10)
    #: DeepSeek-AI 2025, arXiv 2512.02556.
    keys_chosen: int = size(2048, "keys that a query of dsa sees", 1 << 24)
    index_heads: int = size(4, "heads of the indexer that chooses keys in dsa")
    index_width: int | None = size(None, "width of such a head; that of an attention's head by default")
    block: int = size(
        64, "keys of a block in moba and nsa, and of windows, segments and chunks in lact and titans", 1 << 20
    )
    blocks_chosen: int = size(4, "blocks that a query of moba or nsa sees, its own included; 3 or more in nsa", 1 << 20)
    #: Grazzi 2024, arXiv 2411.12537.
    negative_eigenvalues: bool = option(False, "whether rates of gated-delta and gated-delta-product are up to 2")
    experts: int = option(0, "experts of the feed-forward networks, of which a token passes a few; 0 for none",
                          ge=0, le=1 << 12)  # fmt: skip
    experts_chosen: int = size(2, "experts that a token passes", 1 << 12)
    expert_width: int | None = size(None, "hidden width of an expert; feedforward by default")
    expert_layers: str = option("experts", "kinds of feed-forward networks of the layers with experts in the config, "
                                "'experts' or 'dense', repeated in this order, with commas between them")  # fmt: skip
    shared_width: int = option(0, "hidden width of an expert that all tokens pass; 0 for none", ge=0, le=1 << 20)
    shared_gate: bool = option(False, "whether the shared expert has a gate")
    router: str = option("softmax", "how scores of experts become weights", choices=ROUTERS)
    router_normalized: bool = option(True, "whether the weights of a token's experts sum to 1")
    router_scale: float = option(1.0, "factor of these weights", gt=0)
    softmax_norm: str = option("before", "where norms of softmax layers are: of what attention and feed-forward "
                               "network read, or of what they add (OLMo 2)", choices=("before", "added"))  # fmt: skip

    pooling: str = option("last", "what stands for a sequence: its last row, which knows all, or of each feature the "
                          "mean or the largest", choices=OF_DECODERS)  # fmt: skip

    def __post_init__(self) -> None:
        if isinstance(self.attention, list | tuple) and all(isinstance(each, str) for each in self.attention):
            object.__setattr__(self, "attention", ",".join(self.attention))
        shared: Any = self.share_keys_values
        shared = [shared] if type(shared) is int else shared
        if isinstance(shared, list | tuple) and all(type(each) is int for each in shared):
            object.__setattr__(self, "share_keys_values", ",".join(map(str, shared)))
        super().__post_init__()

    def check(self) -> None:
        super().check()
        if self.sinks and self.window is None:
            raise self.refused("sinks", "be 0 without a window", self.sinks)
        names = self.attention.split(",")
        for name in names:
            if name not in MIXERS:
                raise unknown_name(type(self).__name__, "attention", name, MIXERS)
        if len(names) > self.layers:
            raise self.refused("attention", f"name at most one kind for each of {self.layers} layers", self.attention)
        mixers = [MIXERS[kind] for kind in set(self.kinds)]
        self._check_usual(mixers)
        self._check_positions(mixers)
        self._check_experts()
        self._check_shared()
        self._check_turning(mixers)
        for i, kind in enumerate(self.kinds):
            if kind not in self.kinds[:i] and (kind != "softmax" or self.positions == "disentangled"):
                meta(self, kind, i)  # raises where its sizes contradict each other

    def _check_usual(self, mixers: Sequence[Mixer]) -> None:
        """Raise unless fields that no layer heeds have their usual values."""
        one_of_mla = bool({"mla", "dsa"} & set(self.kinds))
        usual: dict[str, Any] = {}
        if all(each.state for each in mixers) or any(each.causal for each in mixers):
            usual["window"] = None
        if not any(each.scores for each in mixers):
            usual |= {"score": "scaled_dot", "normalizer": "softmax", "qk_norm": "none", "output_gate": False}
            usual |= {} if one_of_mla else {"attention_dropout": 0.0}
        for name, value in usual.items():
            if getattr(self, name) != value:
                what = "linear attention" if self.feature_map != "none" else f"attention {self.attention!r}"
                raise self.refused(name, f"be {value!r} in {what}, which has none", getattr(self, name))
        if one_of_mla and self.positions == "rotary" and self.latent_shared_width not in (0, self.head):
            expected = f"be 0 with rotary positions, where it is a head's, {self.head}"
            raise self.refused("latent_shared_width", expected, self.latent_shared_width)

    def _check_positions(self, mixers: Sequence[Mixer]) -> None:
        """Raise unless some layer has these positions, and none contradicts them."""
        states, shown = all(each.state for each in mixers), repr(self.positions)
        if self.positions == "alibi" and (owner := next((each for each in mixers if each.causal), None)):
            raise self.refused("positions", f"be others with {owner.text}, which makes its mask itself", shown)
        turned = self.positions == "rotary" and not any(each.rotary for each in mixers)
        if turned or (self.positions == "alibi" and states):
            what = "linear attention, which has no scores" if states else f"attention {self.attention!r}"
            raise self.refused("positions", f"be 'learned', 'sinusoidal' or 'none' in {what}", shown)
        if self.positions == "disentangled" and not any(each.scores for each in mixers):
            raise self.refused("positions", f"be others unless a layer is of kind {_named(scores=True)}", shown)
        whole = ("rotary", 1.0, self.head * self.heads)
        if "retention" in self.kinds and (self.positions, self.rotary_fraction, self.width) != whole:
            expected = "be 'rotary' with retention, whose heads all of width E/H turn as a whole"
            raise self.refused("positions", expected, shown)

    def _check_experts(self) -> None:
        """Raise unless the mixtures of experts can be made."""
        if not self.experts:
            return
        if self.experts_chosen > self.experts:
            raise self.refused("experts_chosen", f"be at most experts, {self.experts}", self.experts_chosen)
        if (self.activation, self.gated) != ("silu", True):
            raise self.refused("experts", "be 0 unless activation is 'silu' and gated is True", self.experts)
        if wrong := set(self.expert_layers.split(",")) - {"experts", "dense"}:
            raise self.refused("expert_layers", "name 'experts' and 'dense'", repr(min(wrong)))

    def _check_turning(self, mixers: Sequence[Mixer]) -> None:
        """Raise unless the layers that rotate, and see their chunk alone, can."""
        if wrong := set(self.rotary_layers.split(",")) - {"rotary", "none"}:
            raise self.refused("rotary_layers", "name 'rotary' and 'none'", repr(min(wrong)))
        if self.positions != "rotary" and (self.chunk is not None or self.rotary_layers != "rotary"):
            name = "rotary_layers" if self.chunk is None else "chunk"
            raise self.refused(name, "be left out unless positions is 'rotary'", repr(getattr(self, name)))
        others = any(not each.scores for each in mixers)
        if self.rotary_layers != "rotary" and others:
            expected = f"be 'rotary' unless all layers are of kind {_named(scores=True)}"
            raise self.refused("rotary_layers", expected, repr(self.rotary_layers))
        if self.chunk is not None and (self.window is not None or others):
            expected = f"be left out with a window, or with layers other than {_named(scores=True)}"
            raise self.refused("chunk", expected, self.chunk)

    @property
    def turning(self) -> tuple[bool, ...]:
        """Whether each layer has rotary positions, if it takes any."""
        found = kinds_of(self.rotary_layers, self.layers)
        return tuple(self.positions == "rotary" and each == "rotary" for each in found)

    def _check_shared(self) -> None:
        """Raise unless the layers that share keys and values can."""
        given = self.share_keys_values.split(",")
        if not all(each.isascii() and each.isdigit() for each in given) or given == ["0"]:
            raise self.refused("share_keys_values", "be a number of layers, or the indices of layers", repr(given))
        if len(given) not in (1, self.layers):
            expected = f"be one number, or one for each of {self.layers} layers"
            raise self.refused("share_keys_values", expected, repr(self.share_keys_values))
        for i, source in enumerate(self.sources):
            if source > i or self.sources[source] != source:
                expected = f"name for layer {i} itself or an earlier layer with keys of its own"
                raise self.refused("share_keys_values", expected, source)
            if source != i and not (MIXERS[self.kinds[i]].shares and MIXERS[self.kinds[source]].shares):
                expected = f"be '1' unless layers that share are of kind {_named(shares=True)} (layer {i})"
                raise self.refused("share_keys_values", expected, repr(self.share_keys_values))

    @cached_property
    def sources(self) -> Sequence[int]:
        """The layer whose keys and values each layer reads, itself if they are its own."""
        given = tuple(map(int, self.share_keys_values.split(",")))
        if len(given) == self.layers > 1:
            return given
        found: list[int] = []
        for i, kind in enumerate(self.kinds):  # a run of layers of one kind begins with keys of its own
            first = found[-1] if found and MIXERS[kind].shares and self.kinds[i - 1] == kind else i
            found.append(first if i - first < given[0] else i)
        return tuple(found)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kind of attention of each layer."""
        found = kinds_of(self.attention, self.layers)
        return found if self.feature_map == "none" else tuple("linear" if kind == "softmax" else kind for kind in found)

    @property
    def sparse(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        found = kinds_of(self.expert_layers, self.layers)
        return tuple(self.experts > 0 and kind == "experts" for kind in found)

    @property
    def recurrent(self) -> bool:
        """Whether a layer has a state in place of keys and values, whose cache does not separate steps."""
        return any(MIXERS[kind].state for kind in self.kinds)

    @classmethod
    def presets(cls) -> Mapping[str, Mapping[str, Any]]:
        return PRESETS


def _named(**wanted: bool) -> str:
    """Return the kinds of attention with these attributes."""
    found = [kind for kind, mixer in MIXERS.items() if all(getattr(mixer, name) == on for name, on in wanted.items())]
    return " or ".join((", ".join(found[:-1]), found[-1]))


_GPT2: dict[str, Any] = {"vocabulary": 50257, "activation": "gelu_tanh", "max_length": 1024}
_LLAMA: dict[str, Any] = {"positions": "rotary", "norm": "rms", "activation": "silu", "gated": True, "bias": False}
_LLAMA |= {"tied": False, "vocabulary": 32000, "max_length": 4096}
_MODERN: dict[str, Any] = {"vocabulary": 8000, "positions": "rotary", "norm": "rms", "activation": "silu"}
_MODERN |= {"gated": True, "bias": False}
#: Presets by name; those named after a paper have its sizes.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _MODERN | {"width": 128, "layers": 4, "heads": 4},
    "small": _MODERN | {"width": 256, "layers": 6, "heads": 4},
    "base": _MODERN | {"width": 384, "layers": 6, "heads": 6, "dropout": 0.1},
    "gpt2": _GPT2 | {"width": 768, "layers": 12, "heads": 12},
    "gpt2-medium": _GPT2 | {"width": 1024, "layers": 24, "heads": 16},
    "gpt2-large": _GPT2 | {"width": 1280, "layers": 36, "heads": 20},
    "gpt2-xl": _GPT2 | {"width": 1600, "layers": 48, "heads": 25},
    "megatron-lm": _GPT2 | {"width": 3072, "layers": 72, "heads": 32},
    "turing-nlg": _GPT2 | {"width": 4256, "layers": 78, "heads": 28},
    "gpt3": _GPT2 | {"width": 12288, "layers": 96, "heads": 96, "max_length": 2048},
    "llama-7b": _LLAMA | {"width": 4096, "layers": 32, "heads": 32, "feedforward": 11008},
    "mistral-7b": _LLAMA
    | {"width": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "feedforward": 14336}
    | {"window": 4096, "max_length": 32768},
}


def experts(config: DecoderLMConfig) -> Experts:
    """Return the mixture of experts of a layer."""
    return Experts(
        config.width,
        config.expert_width or config.hidden,
        config.experts,
        config.experts_chosen,
        shared=config.shared_width,
        shared_gate=config.shared_gate,
        router=config.router,
        normalized=config.router_normalized,
        scale=config.router_scale,
    )


class DecoderLM(BlockStack):
    """A stack of causal self-attention and feed-forward blocks that computes next-token logits.

    ::

        x = embedding + position
        x ← x + MHA(N(x), N(x≤t))        x ← x + FFN(N(x))        once per layer
        logits = W N(x)

    The config selects a GPT-2 architecture (learned positions, layer norm, GELU), a Llama architecture (rotary
    positions, RMSNorm, SwiGLU, grouped-query attention) or a mix of both, with any score and normalizer. Positions may
    also be those of DeBERTa (:class:`regard.nn.DisentangledPositions`), with embeddings of each layer's own.

    Parameters
    ----------
    config : DecoderLMConfig

    Examples
    --------
    >>> import torch
    >>> config = DecoderLMConfig(50, width=16, layers=2, heads=4, kv_heads=2, positions="rotary")
    >>> model, tokens = DecoderLM(config).eval(), torch.tensor([[3, 1, 4, 1, 5]])
    >>> caches = model.caches()
    >>> first, rest = model(tokens[:, :3], caches=caches), model(tokens[:, 3:], caches=caches)
    >>> torch.allclose(torch.cat([first, rest], 1), model(tokens), atol=1e-5)
    True
    """

    config: DecoderLMConfig

    def __init__(self, config: DecoderLMConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = PositionEmbedding(config)
        self.dropout = nn.Dropout(config.dropout)
        self.mixers = [MIXERS[kind] for kind in config.kinds]
        places = [config.softmax_norm if mixer.scores else "before" for mixer in self.mixers]
        blocks = [
            Block(config, places[i], mixer.build(config, i), experts(config) if config.sparse[i] else None)
            for i, mixer in enumerate(self.mixers)
        ]
        #: Layers with keys and values of their own, or a state, in the order of caches.
        self.owners = [i for i, source in enumerate(config.sources) if source == i]
        self.blocks = nn.ModuleList(blocks)  # type: ignore[assignment]
        self.norm = norm(config)
        self.output = None if config.tied else nn.Linear(config.width, config.vocabulary, bias=False)
        self.rotary = rotary(config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialize the parameters as in GPT-2."""
        draw(self, self.blocks, self.config.layers)

    @property
    def projection(self) -> tuple[Tensor, Tensor | None]:
        """The output projection: its weight (N, E), and None because it has no bias."""
        return (self.embedding if self.output is None else self.output).weight, None

    def forward(
        self,
        tokens: Tensor,
        *,
        mask: MaskLike | None = None,
        positions: Tensor | None = None,
        caches: Sequence[KVCache | SlotCache | LinearCache] | None = None,
    ) -> Tensor:
        """Return the next-token logits (B, L, N).

        Parameters
        ----------
        tokens : Tensor (B, L) of int
        mask : Tensor (B, 1, L, S) of bool, Mask or callable, optional
            Additional attention mask, combined with the causal mask; True = may attend. For packed documents, pass
            ``masks.document(ids)``.
        positions : Tensor (L,) or (B, L) of int, optional
            Position of each token. By default tokens follow those in the caches, or take their place in the
            sequence-parallel context.
        caches : sequence of KVCache, optional
            Caches from :meth:`caches`; the call appends the keys and values of these tokens.

        Raises
        ------
        ValueError, TypeError
            If an argument is invalid, or there are more tokens than learned positions.
        """
        return self.logits(self.features(tokens, mask=mask, positions=positions, caches=caches))

    def features(
        self,
        tokens: Tensor,
        *,
        mask: MaskLike | None = None,
        positions: Tensor | None = None,
        caches: Sequence[KVCache | SlotCache | LinearCache] | None = None,
        aux: list[Aux] | None = None,
        return_aux: AuxRequest | None = None,
        losses: list[Tensor] | None = None,
        index_loss: Literal["selected", "all"] | None = None,
    ) -> Tensor:
        """Return the final hidden states (B, L, E), the input of :meth:`logits`; arguments as in :meth:`forward`.

        Parameters
        ----------
        aux : list of Aux, optional
            Receives the requested auxiliary outputs, one entry per layer.
        return_aux : AuxRequest, optional
            Auxiliary outputs to compute in each layer's attention.
        losses : list of Tensor, optional
            Receives the losses () of the indexers, one for each layer of kind dsa.
        index_loss : {"selected", "all"}, optional
            Which keys these losses cover: see :class:`regard.nn.DeepSeekSparseAttention`.
        """
        self._check(tokens, caches)
        cache = None if caches is None else caches[0]
        slots = cache.slots if isinstance(cache, (SlotCache, LinearSlotCache)) else None
        if slots is not None:
            slots.begin()
            at, seen = slots.positions, self._slot_masks(slots, mask)
        else:
            before = 0 if cache is None else len(cache)
            at = before + self._places(tokens) if positions is None else positions
            seen = self._masks(self._whole(tokens.shape[1]), before, mask, caches)
        x = self.dropout(self.positions(embedded(self.embedding, tokens), at))
        rotation = None if self.rotary is None else self.rotary.rotation(at, x.dtype)
        if return_aux is not None and (
            silent := next((each for each in self.mixers if each.causal or each.indexed), None)
        ):
            raise rejected("DecoderLM", "return_aux", f"be None with {silent.text}", return_aux)
        own = dict(zip(self.owners, [None] * len(self.owners) if caches is None else caches))
        shared: dict[int, KeysValues] = {}
        for i, (block, mixer, source) in enumerate(zip(self.blocks, self.mixers, self.config.sources)):
            turned = rotation if mixer.rotary and self.config.turning[i] else None
            if turned is not None and mixer.halved:
                turned = tuple(waves[..., ::2] for waves in turned)
            how = (self._seen(i, seen), turned, own.get(i), return_aux)
            loss = index_loss if mixer.indexed else None
            made = block(x, *how, shared.get(source), self.config.sources.count(i) > 1, loss)
            x = made.rows
            if made.keys is not None:
                shared[i] = made.keys
            if aux is not None and made.aux is not None:
                aux.append(made.aux)
            if losses is not None and made.loss is not None:
                losses.append(made.loss)
        return self.norm(x)

    def pool(self, rows: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Pool the hidden states (B, L, E) of each sequence into one vector (B, E), by the config's ``pooling``.

        ``attention_mask`` (B, L) is True for real tokens. Pad on the right only: causal attention never sees padding
        after a sequence, but would see padding before it.
        """
        return pooled(self.config.pooling, rows, attention_mask)

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits (..., N) for hidden states (..., E)."""
        head = self.embedding if self.output is None else self.output
        if type(head) in (nn.Embedding, nn.Linear):  # quantized layers have no plain weight
            return vocabulary_scores(features, head.weight)
        return head(features)

    def caches(self, capacity: int | None = None, *, sliding: bool = False) -> list[Any]:
        """Return an empty cache for each layer: :class:`KVCache`, or :class:`LinearCache` for a layer with a state.

        Layers that read the keys and values of another layer have none.

        Parameters
        ----------
        capacity : int, optional
            Number of tokens to allocate in advance.
        sliding : bool, default False
            If the config has a window, keep only the tokens inside it and the sinks. Use it without gradients.
        """
        kept: dict[str, Any] = {}
        if sliding and self.slides:
            kept = {"window": self.config.window, "sinks": self.config.sinks}
        return [LinearCache() if self.mixers[i].state else KVCache(capacity, **kept) for i in self.owners]

    def slot_caches(self, slots: Slots, prefixes: Sequence[tuple[Tensor, Tensor] | None] | None = None) -> list[Any]:
        """Return a cache for each layer that holds one sequence per slot.

        ``prefixes`` holds, for each layer, the keys and values of a prefix that all sequences share, or None.
        """
        prefixes = prefixes or [None] * len(self.owners)
        return [
            LinearSlotCache(slots) if self.mixers[i].state else SlotCache(slots, each)
            for i, each in zip(self.owners, prefixes)
        ]

    @property
    def keeps_all(self) -> bool:
        """Whether the cache stores every token separately: no sliding window and no layer with a state."""
        return not self.slides and not self.config.recurrent

    @property
    def slides(self) -> bool:
        """Whether a cache may drop tokens outside the window; not where a bias depends on distances."""
        return self.config.window is not None and self.config.positions not in ("alibi", "disentangled")

    def _slot_masks(self, slots: Slots, mask: MaskLike | None) -> Masks:
        """Return the masks for one new token in each of several sequences of different lengths."""
        if mask is not None:
            raise rejected("DecoderLM", "mask", "be None with caches of slots", type(mask).__name__)
        if all(mixer.state for mixer in self.mixers):
            return Masks(None, None)
        offset, chunk = slots.offsets + slots.prefix, None
        if self.config.chunk is not None:
            chunk = masks.causal(offset=offset) & masks.chunked(self.config.chunk, offset=offset)
        return Masks(None, self._slot_mask(slots), chunk)

    def _slot_mask(self, slots: Slots) -> MaskLike | None:
        config = self.config
        offset = slots.offsets + slots.prefix  # index of the new token among the keys
        if config.positions == "alibi":
            causal = masks.causal(offset=offset) & masks.alibi(config.heads, offset=offset)
            return causal if config.window is None else causal & self._window(offset=offset)
        if config.window is not None and not slots.slides:
            return masks.causal(offset=offset) & self._window(offset=offset)
        return slots.visible

    def _window(self, **where: Any) -> Mask:
        assert self.config.window is not None
        window = masks.window(self.config.window - 1, 0, **where)
        return window | masks.sinks(self.config.sinks) if self.config.sinks else window

    def _seen(self, layer: int, seen: Masks) -> MaskLike | None:
        """Return the mask that a layer takes."""
        mixer = self.mixers[layer]
        if not mixer.causal:
            chunked = self.config.chunk is not None and self.config.turning[layer]
            return seen.state if mixer.state else seen.chunk if chunked else seen.scores
        if seen.state is not None:
            expected = f"be None with {mixer.text}, which makes its mask itself: train on a stream (data.rows)"
            raise rejected("DecoderLM", "mask", expected, type(seen.state).__name__)
        return None

    def _masks(self, length: int, before: int, mask: MaskLike | None, caches: Sequence[Any] | None) -> Masks:
        """Return the masks for ``length`` new tokens after ``before`` cached ones."""
        given = None if mask is None else masks.as_mask(mask)
        scored = [place for place, i in enumerate(self.owners) if not self.mixers[i].state]
        if not scored:
            return Masks(given, None)
        mask = self._mask(length, before, given, None if caches is None else caches[scored[0]])
        if self.config.chunk is None:
            return Masks(given, mask)
        chunk: Mask = masks.chunked(self.config.chunk, align="lower_right" if before else None)
        return Masks(given, mask, chunk if mask is None else mask & chunk)

    def _mask(self, length: int, before: int, mask: Mask | None, cache: Any) -> Mask | None:
        """Return the mask of layers with scores: causal, ALiBi and window."""
        config = self.config
        if cache is not None and cache.most is not None and before + length > cache.most:
            if mask is not None:
                raise rejected("DecoderLM", "mask", "be None where a window is full", type(mask).__name__)
            before = cache.kept
            if length == 1:  # the cache holds exactly the visible tokens
                return None
        align = "lower_right" if before else None
        parts: list[Mask] = [] if mask is None else [mask]
        if config.positions == "alibi":
            parts.append(masks.alibi(config.heads, align=align))
        if length > 1:
            parts.append(masks.causal(align=align))
        if config.window is not None and before + length > config.window:
            parts.append(self._window(align=align))
        return reduce(and_, parts) if parts else None

    def _check(self, tokens: Tensor, caches: Sequence[KVCache | SlotCache | LinearCache] | None) -> None:
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point():
            raise rejected("DecoderLM", "tokens", "be an integer tensor (B, L)", described(tokens))
        if caches is not None and len(caches) != len(self.owners):
            expected = f"hold one KVCache for each of {len(self.owners)} layers with keys of their own"
            raise rejected("DecoderLM", "caches", expected, len(caches))
        if caches is not None and self.context is not None:
            raise rejected("DecoderLM", "caches", "be None if a context splits the sequence", len(caches))
