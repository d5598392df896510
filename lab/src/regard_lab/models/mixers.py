"""The kinds of attention that a layer of a decoder may have.

A kind is one entry of :data:`MIXERS`: how its layer is built from the config, and what the layer needs. A layer is
called as :class:`regard.nn.SelfAttention` is, ``layer(x, mask, rotation=…, cache=…, return_aux=…)``; its last
projection is called ``out``, and it has ``reset_parameters``, and the attribute ``context`` if it heeds or refuses one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.nn import (
    HGRN2,
    TTTMLP,
    Atlas,
    Comba,
    CrossLayerAttention,
    DeepSeekSparseAttention,
    DeltaNet,
    DifferentialAttention,
    ForgettingAttention,
    GatedDeltaNet,
    GatedLinearAttention,
    GatedSlotAttention,
    GroupedTiedAttention,
    KimiDeltaAttention,
    LaCT,
    LaserAttention,
    LightningAttention,
    LinearSelfAttention,
    LogLinearGatedDeltaNet,
    LogLinearMamba2,
    Mamba,
    Mamba2,
    MesaNet,
    MixtureOfBlockAttention,
    MultiheadLatentAttention,
    MultiMatrixFactorizationAttention,
    NativeSparseAttention,
    PathAttention,
    Retention,
    RWKV6Attention,
    RWKV7Attention,
    SelfAttention,
    TensorProductAttention,
    TitansMAC,
    TitansMAG,
    TitansMAL,
    TitansMemory,
    TTTLinear,
)
from regard_lab.models.attending import scorer
from regard_lab.models.language_blocks import LanguageConfig, norm, rotary

if TYPE_CHECKING:
    from regard_lab.models.decoder_lm import DecoderLMConfig


@dataclass(frozen=True)
class Mixer:
    """One kind of attention.

    Attributes
    ----------
    build : callable
        ``build(config, layer)`` returns the module for the layer of this index.
    text : str
        What it is, for help.
    state : bool
        Whether its cache is a state of constant size, :class:`regard.nn.LinearCache`, that does not separate steps. It
        is then causal by construction, and of masks it takes documents and padding alone.
    rotary : bool
        Whether it takes the model's rotary positions.
    halved : bool
        Whether these turn half of a head, by every other angle.
    scores : bool
        Whether the config's score, normalizer, window and dropout of weights are its own.
    shares : bool
        Whether such a layer may read the keys and values of another one, or be read by it.
    causal : bool
        Whether it has scores and makes its causal mask itself. It then takes no other mask, and returns no aux.
    indexed : bool
        Whether an indexer chooses keys, which learns from a loss of its own. It returns no aux.
    """

    build: Callable[[DecoderLMConfig, int], nn.Module]
    text: str
    state: bool = True
    rotary: bool = False
    halved: bool = False
    scores: bool = False
    shares: bool = False
    causal: bool = False
    indexed: bool = False


def softmax(
    config: LanguageConfig, layer: int = 0, order: int = 0, kind: type[SelfAttention] = SelfAttention
) -> SelfAttention:
    """Return self-attention with the config's score and normalizer, and its norms and gate."""
    shares = config.sources[layer] != layer  # the keys and values of another layer
    made = (CrossLayerAttention if shares else kind)(
        config.width,
        config.heads,
        **_projections(config),
        dropout=config.attention_dropout,
        # None also means scaled dot product, and uses torch's kernel if possible.
        score=None if config.score == "scaled_dot" else scorer(config.score, config.head, config.max_length),
        normalizer=config.normalizer,
        rotary=rotary(config) if config.turning[layer] else None,
        disentangled=config.distances,
        order=order,
        qk_norm=None if config.qk_norm == "none" else "rms",
        output_gate="channel" if config.output_gate else None,
    )
    for name, count in (("query", config.heads),) if shares else (("query", config.heads), ("key", config.groups)):
        if config.qk_norm == "head":
            setattr(made.qk_norm, name, norm(config, config.head))
        elif config.qk_norm == "all":
            setattr(made.qk_norm, name, AllHeadsNorm(count * config.head, eps=config.norm_eps))
    return made


class AllHeadsNorm(nn.RMSNorm):
    """An RMSNorm over the columns of all heads (B, H, L, D) together, as OLMo 2 has it for queries and keys."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed heads (B, H, L, D)."""
        merged = super().forward(x.transpose(1, 2).flatten(2))
        return merged.unflatten(-1, (x.shape[1], -1)).transpose(1, 2)


def _projections(config: LanguageConfig) -> dict[str, Any]:
    return {
        "num_kv_heads": config.groups,
        "head_dim": config.head,
        "bias": config.bias if config.qkv_bias is None else config.qkv_bias,
        "out_bias": config.bias if config.out_bias is None else config.out_bias,
    }


def _latents(config: DecoderLMConfig) -> dict[str, Any]:
    turning = rotary(config)
    return {
        "latent_dim": config.latent_width or 4 * config.head,
        "head_dim": config.head,
        "value_dim": config.value_width,
        "rotary": turning,
        "rotary_dim": config.latent_shared_width if turning is None else config.head,
        "query_latent_dim": config.latent_query_width,
        "bias": config.bias if config.qkv_bias is None else config.qkv_bias,
        "dropout": config.attention_dropout,
    }


def _latent(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    return MultiheadLatentAttention(config.width, config.heads, **_latents(config))


def _indexed(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    return DeepSeekSparseAttention(
        config.width,
        config.heads,
        index_heads=config.index_heads,
        index_dim=config.index_width or config.head,
        topk=config.keys_chosen,
        **_latents(config),
    )


def _linear(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    name = "elu" if config.feature_map == "none" else config.feature_map
    return LinearSelfAttention(config.width, config.heads, **_projections(config), feature_map=name)


def _grouped_keys(config: DecoderLMConfig) -> dict[str, Any]:
    return {
        "num_key_heads": config.recurrent_key_heads,
        "key_dim": config.recurrent_key_width,
        "value_dim": config.recurrent_value_width,
        "conv_size": config.convolution,
        "norm_eps": config.recurrent_eps,
    }


def _gated(config: DecoderLMConfig) -> dict[str, Any]:
    return {**_grouped_keys(config), "negative_eigenvalues": config.negative_eigenvalues}


def _gated_delta(config: DecoderLMConfig, layer: int, num_steps: int = 1) -> nn.Module:  # noqa: ARG001
    return GatedDeltaNet(config.width, config.recurrent_heads or config.heads, num_steps=num_steps, **_gated(config))


def _comba(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    return Comba(config.width, config.recurrent_heads or config.heads, **_grouped_keys(config))


def _delta_product(config: DecoderLMConfig, layer: int) -> nn.Module:
    return _gated_delta(config, layer, config.delta_steps)


def _leveled_delta(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    heads = config.recurrent_heads or config.heads
    return LogLinearGatedDeltaNet(config.width, heads, max_len=config.max_length, **_gated(config))


def _kimi_delta(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    return KimiDeltaAttention(
        config.width,
        config.recurrent_heads or config.heads,
        head_dim=config.recurrent_key_width,
        conv_size=config.convolution,
        norm_eps=config.recurrent_eps,
    )


def _delta(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    return DeltaNet(
        config.width,
        config.recurrent_heads or config.heads,
        key_dim=config.recurrent_key_width,
        value_dim=config.recurrent_value_width,
        conv_size=config.convolution,
        norm_eps=config.recurrent_eps,
    )


def _states(config: DecoderLMConfig) -> dict[str, Any]:
    return {
        "head_dim": config.recurrent_value_width,
        "state_dim": config.recurrent_key_width or 128,
        "num_groups": config.recurrent_key_heads or 1,
        "conv_size": config.convolution,
        "bias": config.bias,
        "norm_eps": config.recurrent_eps,
    }


def _mamba2(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    return Mamba2(config.width, config.recurrent_heads or config.heads, **_states(config))


def _leveled_mamba2(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    heads = config.recurrent_heads or config.heads
    return LogLinearMamba2(config.width, heads, max_len=config.max_length, **_states(config))


def _mamba(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    state = config.recurrent_key_width or 16
    return Mamba(config.width, state_dim=state, conv_size=config.convolution, bias=config.bias)


def _mesa(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    return MesaNet(
        config.width,
        config.recurrent_heads or config.heads,
        head_dim=config.recurrent_key_width,
        conv_size=config.convolution,
        norm_eps=config.recurrent_eps,
    )


def _ttt(config: DecoderLMConfig, layer: int, kind: type[TTTLinear | TTTMLP] = TTTLinear) -> nn.Module:  # noqa: ARG001
    heads, width = config.recurrent_heads or config.heads, config.recurrent_key_width
    return kind(config.width, heads, head_dim=width, conv_size=config.convolution)


def _titans(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    heads, width = config.recurrent_heads or config.heads, config.recurrent_key_width
    how: dict[str, Any] = {"conv_size": config.convolution, "norm_eps": config.recurrent_eps}
    return TitansMemory(config.width, heads, head_dim=width, **how)


def _titans_near(config: DecoderLMConfig, layer: int, kind: type[TitansMAG | TitansMAL]) -> nn.Module:  # noqa: ARG001
    how: dict[str, Any] = {"conv_size": config.convolution, "norm_eps": config.recurrent_eps}
    return kind(config.width, config.heads, window=config.block, **how)


def _titans_context(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    return TitansMAC(config.width, config.heads, segment=config.block, norm_eps=config.recurrent_eps)


def _lact(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    sizes: dict[str, Any] = {"num_memories": config.recurrent_heads, "chunk_size": config.block, "window": config.block}
    return LaCT(config.width, config.heads, norm_eps=config.recurrent_eps, **sizes)


def _atlas(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    how: dict[str, Any] = {"key_dim": config.recurrent_key_width, "value_dim": config.recurrent_value_width}
    how |= {"conv_size": config.convolution}
    return Atlas(config.width, config.recurrent_heads or config.heads, norm_eps=config.recurrent_eps, **how)


def _slots(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    how: dict[str, Any] = {"key_dim": config.recurrent_key_width, "value_dim": config.recurrent_value_width}
    heads = config.recurrent_heads or config.heads
    return GatedSlotAttention(config.width, heads, norm_eps=config.recurrent_eps, **how)


def _retention(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    return Retention(config.width, config.heads, norm_eps=config.recurrent_eps)


def _gated_linear(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    return GatedLinearAttention(config.width, config.recurrent_heads or config.heads, norm_eps=config.recurrent_eps)


def _rwkv6(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    return RWKV6Attention(config.width, config.recurrent_heads or config.heads, norm_eps=config.recurrent_eps)


def _rwkv7(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    return RWKV7Attention(config.width, config.recurrent_heads or config.heads, norm_eps=config.recurrent_eps)


def _hgrn2(config: DecoderLMConfig, layer: int) -> nn.Module:
    # The paper learns bounds that grow with the layer, from 0 to almost 1; here they grow evenly.
    bound = layer / config.layers
    heads = config.recurrent_heads or config.heads
    return HGRN2(config.width, heads, lower_bound=bound, norm_eps=config.recurrent_eps)


def _lightning(config: DecoderLMConfig, layer: int) -> nn.Module:
    slope = 1 - layer / max(config.layers - 1, 1) + 1e-5
    heads, width = config.recurrent_heads or config.heads, config.recurrent_key_width
    return LightningAttention(config.width, heads, head_dim=width, slope=slope, norm_eps=config.recurrent_eps)


def _headed(config: DecoderLMConfig) -> dict[str, Any]:
    bias = config.bias if config.qkv_bias is None else config.qkv_bias
    return {"head_dim": config.head, "bias": bias}


def _grouped(config: DecoderLMConfig) -> dict[str, Any]:
    return {**_headed(config), "num_kv_heads": config.groups, "rotary": rotary(config)}


def _differential(config: DecoderLMConfig, layer: int) -> nn.Module:
    return DifferentialAttention(config.width, config.heads, depth=layer, **_grouped(config))


def _forgetting(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    return ForgettingAttention(config.width, config.heads, **_grouped(config))


def _tied(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    half = rotary(config, config.head // 2)
    return GroupedTiedAttention(config.width, config.heads, **{**_grouped(config), "rotary": half})


def _factorized(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    rank, turning = config.latent_query_width, rotary(config)
    options = _headed(config)
    return MultiMatrixFactorizationAttention(config.width, config.heads, query_rank=rank, rotary=turning, **options)


def _tensor_product(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    ranks: dict[str, Any] = {
        "query_rank": config.query_rank,
        "key_rank": config.key_rank,
        "value_rank": config.key_rank,
    }
    return TensorProductAttention(config.width, config.heads, rotary=rotary(config), **ranks, **_headed(config))


def _path(config: DecoderLMConfig, layer: int, forget: bool = False) -> nn.Module:  # noqa: ARG001
    options = {**_headed(config), "num_kv_heads": config.groups, "conv_size": config.convolution}
    return PathAttention(config.width, config.heads, forget=forget, **options)


def _block_mixture(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    sizes: dict[str, Any] = {"block_size": config.block, "topk": config.blocks_chosen}
    return MixtureOfBlockAttention(config.width, config.heads, **sizes, **_grouped(config))


def _native_sparse(config: DecoderLMConfig, layer: int) -> nn.Module:  # noqa: ARG001
    sizes: dict[str, Any] = {"block_size": config.block, "num_blocks": config.blocks_chosen, "window": 2 * config.block}
    return NativeSparseAttention(config.width, config.heads, **sizes, **_grouped(config))


#: Every kind by the name that configs use.
MIXERS: Mapping[str, Mixer] = {
    "softmax": Mixer(softmax, "the config's score and normalizer", state=False, rotary=True, scores=True, shares=True),
    "linear": Mixer(_linear, "linear attention with feature_map"),
    "atlas": Mixer(_atlas, "ATLAS"),
    "comba": Mixer(_comba, "Comba"),
    "delta": Mixer(_delta, "DeltaNet"),
    "differential": Mixer(_differential, "differential attention", state=False, rotary=True),
    "dsa": Mixer(_indexed, "DeepSeek sparse attention (DSA)", state=False, rotary=True, indexed=True),
    "fox": Mixer(_forgetting, "forgetting attention (FoX)", state=False, rotary=True, causal=True),
    "gated-delta": Mixer(_gated_delta, "Gated DeltaNet"),
    "gated-delta-product": Mixer(_delta_product, "Gated DeltaProduct"),
    "gated-linear": Mixer(_gated_linear, "gated linear attention (GLA)"),
    "gsa": Mixer(_slots, "gated slot attention (GSA)"),
    "gta": Mixer(_tied, "grouped-tied attention (GTA)", state=False, rotary=True, halved=True, causal=True),
    "hgrn2": Mixer(_hgrn2, "HGRN2"),
    "kimi-delta": Mixer(_kimi_delta, "Kimi Delta Attention"),
    "lact": Mixer(_lact, "large-chunk test-time training (LaCT)"),
    "laser": Mixer(partial(softmax, kind=LaserAttention), "LASER", state=False, rotary=True, scores=True),
    "lightning": Mixer(_lightning, "lightning attention"),
    "log-linear-gated-delta": Mixer(_leveled_delta, "log-linear Gated DeltaNet"),
    "log-linear-mamba2": Mixer(_leveled_mamba2, "log-linear Mamba-2"),
    "mamba": Mixer(_mamba, "Mamba"),
    "mamba2": Mixer(_mamba2, "Mamba-2"),
    "mesa": Mixer(_mesa, "MesaNet"),
    "mfa": Mixer(_factorized, "multi-matrix factorization attention (MFA)", state=False, rotary=True, causal=True),
    "mla": Mixer(_latent, "multi-head latent attention (MLA)", state=False, rotary=True),
    "moba": Mixer(_block_mixture, "mixture of block attention (MoBA)", state=False, rotary=True, causal=True),
    "nsa": Mixer(_native_sparse, "native sparse attention (NSA)", state=False, rotary=True, causal=True),
    "order1": Mixer(
        partial(softmax, order=1), "local linear attention", state=False, rotary=True, scores=True, shares=True
    ),
    "path": Mixer(_path, "PaTH attention", state=False, causal=True),
    "path-fox": Mixer(partial(_path, forget=True), "PaTH attention that forgets (PaTH-FoX)", state=False, causal=True),
    "retention": Mixer(_retention, "retention (RetNet)", rotary=True),
    "rwkv6": Mixer(_rwkv6, "RWKV-6's time mixing"),
    "rwkv7": Mixer(_rwkv7, "RWKV-7's time mixing, without value residuals"),
    "titans": Mixer(_titans, "Titans' neural memory"),
    "titans-mac": Mixer(_titans_context, "Titans with memory as context (MAC)"),
    "titans-mag": Mixer(partial(_titans_near, kind=TitansMAG), "Titans with memory as a gate (MAG)"),
    "titans-mal": Mixer(partial(_titans_near, kind=TitansMAL), "Titans with memory as a layer (MAL)"),
    "tpa": Mixer(_tensor_product, "tensor product attention (TPA)", state=False, rotary=True, causal=True),
    "ttt": Mixer(_ttt, "TTT-Linear"),
    "ttt-mlp": Mixer(partial(_ttt, kind=TTTMLP), "TTT-MLP"),
}


def kinds_of(pattern: str, layers: int) -> tuple[str, ...]:
    """Return the kind of each layer: the names of a pattern, over and over.

    Examples
    --------
    >>> kinds_of("gated-delta,gated-delta,softmax", 5)
    ('gated-delta', 'gated-delta', 'softmax', 'gated-delta', 'gated-delta')
    """
    names = pattern.split(",")
    return tuple(names[i % len(names)] for i in range(layers))


def pattern_of(kinds: list[str] | tuple[str, ...]) -> str:
    """Return the shortest pattern of the kinds of layers.

    Examples
    --------
    >>> pattern_of(["delta", "softmax", "delta", "softmax"]), pattern_of(["mamba2"] * 3)
    ('delta,softmax', 'mamba2')
    """
    names = list(kinds)
    period = next(n for n in range(1, len(names) + 1) if all(a == b for a, b in zip(names, names[n:])))
    return ",".join(names[:period])


def meta(config: DecoderLMConfig, kind: str, layer: int = 0) -> nn.Module:
    """Return a layer on the meta device, to read its sizes."""
    with torch.device("meta"):
        return MIXERS[kind].build(config, layer)
