"""Tiny configurations of model families, made from their defaults by what their fields are called."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import PretrainedConfig
from transformers.backbone_utils import BackboneConfigMixin

from benchmarks.families.settings import SETTINGS
from benchmarks.families.stand_ins import without_timm

VOCABULARY, WIDTH, HEADS, GROUPS, HEAD, LAYERS, IMAGE, PATCH = 99, 32, 4, 2, 8, 2, 32, 8

#: What fields are set to, by the first pattern that a name matches; None leaves it.
RULES: tuple[tuple[str, Any], ...] = (
    (r"(^|_)vocab_size$|^vocab_size_per_layer_input$|num_embeddings$", VOCABULARY),
    (r"^rotary_dim$", 4),
    (r"^(type_vocab_size|num_codebooks|num_quantizers|codebook_dim|spatial_merge_size|temporal_patch_size)$", None),
    (r"^(codebook_size|base_channels|latent_channels|upsample_groups)$", 32),
    (r"^encoder_hash_byte_group_vocab$", 64),
    (r"^(sliding_window|attention_window|attention_chunk_size|window_size|local_attention|max_window_layers)$", 4),
    (r"^(index_topk)$", 4),
    (r"^(index_head_dim)$", 16),
    (r"^(index_n_heads)$", 2),
    (r"^(index_block_size|index_topk_blocks|index_local_blocks)$", 2),
    (r"^(q_lora_rank|kv_lora_rank|o_lora_rank|lora_rank)$", 16),
    (r"^(qk_rope_head_dim|qk_nope_head_dim|v_head_dim)$", 8),
    (r"^qk_head_dim$", 16),
    (r"^(.*_)?(head_dim|head_size|d_kv|kv_channels|attention_head_size|head_hidden_size)$", HEAD),
    (r"^(global_head_dim)$", HEAD),
    (r"(key_value_heads|kv_heads|num_kv_heads|n_head_kv|num_key_value_heads)$", GROUPS),
    (r"(attention_heads|num_heads|n_heads?|heads)$", HEADS),
    (r"(intermediate_size|ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|feed_forward.*|ffw_size|expert_ffn.*)$", 48),
    (
        r"(hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_blocks|num_.*_layers|depth|.*_layers|num_hidden_groups)$",
        LAYERS,
    ),
    (
        r"^(first_k_dense_replace|moe_layer_start_index|num_dense_layers|num_kv_shared_layers|num_nextn_predict_layers)$",
        1,
    ),
    (r"(num_experts_per_tok|top_k_experts|moe_top_?k|num_selected_experts|top_k|moe_k|experts_top_k)$", 2),
    (r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_routed_experts)$", 4),
    (r"(n_group|topk_group|num_expert_group|n_shared_experts|num_shared_experts)$", 1),
    (r"^(hidden_size_per_layer_input)$", 8),
    (
        r"(hidden_size|d_model|embed_dim|n_embd|embedding_size|hidden_dim|projection_dim|width|proj_dim|dim|output_dim|embedding_dim|word_embed_proj_dim|projector_hidden_size|out_hidden_size|encoder_hidden_size|decoder_hidden_size|query_dim|memory_dim|hidden_channels|d_embed|mm_hidden_size)$",
        WIDTH,
    ),
    (
        r"(max_position_embeddings|n_positions|max_target_positions|max_source_positions|max_seq_len|max_length|n_ctx|max_sequence_length)$",
        128,
    ),
    (r"(^|_)image_size$|^img_size$", IMAGE),
    (r"(^|_)patch_size$", PATCH),
    (r"^(num_mel_bins|feature_size|num_mel_filters|n_mels)$", 16),
    (r"^(num_query_tokens|num_queries|num_latents|num_image_tokens|mm_tokens_per_image|num_learnable_queries)$", 4),
    (r"^(linear_.*_dim)$", HEAD),
    (r"^(mamba_.*heads|linear_.*heads)$", HEADS),
    (r"^(state_size|mamba_d_state|ssm_state_size)$", 8),
    (r"^(num_classes|num_labels)$", 3),
    (r"^prediction_length$", 8),
)
#: Fields without a default that a model needs.
UNSET = re.compile(
    r"^vocab_size$|^head_dim$|key_value_heads$|num_experts|top_k_experts|routed_experts$|shared_experts$|moe_intermediate_size$"
    r"|^prediction_length$|num_experts_per_tok$"
)
#: Configurations of models whose positions have three parts, which may have no field for them.
SECTIONS = re.compile(r"VL|O[Cc][Rr]|Omni|GlmImage|Glm4v")
COMPILED = [(re.compile(pattern), value) for pattern, value in RULES]


def tiny(cls: type[PretrainedConfig]) -> PretrainedConfig:
    """Return a tiny configuration of a class, whose attention heads, groups, windows and experts are small, too."""
    return shrunk(cls())


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """Make a configuration tiny, and those inside."""
    counter = iter(range(1, 60))
    config = without_timm(config)
    derived = type(config).__name__ in SETTINGS
    if derived:
        config = _from_settings(config)
    equal_heads = _heads_are_equal(config, vars(config))
    for name, value in sorted(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            if not derived:
                setattr(config, name, shrunk(value))
        elif name.startswith("_"):
            continue
        elif (
            re.search(r"(token_id|token_index|_token)$", name)
            and isinstance(value, int)
            and not isinstance(value, bool)
        ):
            setattr(config, name, next(counter))
        elif not derived:
            unset = value is None and UNSET.search(name)
            setattr(config, name, _by_name(name) if unset else _small(name, value, equal_heads))
    if not derived:
        _lists(config)
        _set_sections(config)
    _agree(config)
    return config


def _from_settings(config: PretrainedConfig) -> PretrainedConfig:
    """Return a configuration from its settings and small values of its other fields, from which it derives the rest."""
    cls = type(config)
    defaults = {field.name: field.default for field in fields(cls) if field.init}
    equal_heads = _heads_are_equal(config, defaults)
    small = {name: _small(name, value, equal_heads) for name, value in defaults.items()}
    given = {name: value for name, value in small.items() if value is not defaults[name]}
    given |= {name: shrunk(value) for name, value in vars(config).items() if isinstance(value, PretrainedConfig)}
    given |= SETTINGS[cls.__name__]
    if isinstance(config, BackboneConfigMixin) and hasattr(config, "depths"):  # of stages, whose number stays
        given["out_indices"] = config.out_indices
    return cls(**given)


def _small(name: str, value: Any, equal_heads: bool) -> Any:
    """Return the value of a field, or a smaller one of its rule."""
    found = _by_name(name)
    if found is None or isinstance(value, bool) or not isinstance(value, int) or value <= found:
        return value
    return HEADS if equal_heads and found == GROUPS else found


def _heads_are_equal(config: PretrainedConfig, values: Mapping[str, Any]) -> bool:
    """Whether queries and keys have as many heads as each other, as where keys are compressed."""
    names = (config.attribute_map.get(name, name) for name in ("num_attention_heads", "num_key_value_heads"))
    heads, groups = (values.get(name) for name in names)
    return heads is not None and heads == groups


def _by_name(name: str) -> int | None:
    return next((value for pattern, value in COMPILED if pattern.search(name)), None)


def _lists(config: PretrainedConfig) -> None:
    layers = next(
        (
            getattr(config, n)
            for n in ("num_hidden_layers", "n_layer", "num_layers")
            if isinstance(getattr(config, n, None), int)
        ),
        LAYERS,
    )
    for name, value in list(vars(config).items()):
        if not isinstance(value, (list, tuple)) or not value:
            continue
        if name in ("layer_types", "mlp_layer_types", "block_types", "layers_block_type", "layer_type_list"):
            kinds = list(dict.fromkeys(value))
            setattr(config, name, (kinds * layers)[:layers] if len(kinds) <= layers else kinds[:layers])
        elif name == "depths":
            setattr(config, name, [1] * len(value))
        elif name in ("hidden_sizes", "embed_dims", "embed_dim", "dims", "encoder_hidden_sizes") and all(
            isinstance(x, int) for x in value
        ):
            setattr(config, name, [16 * 2 ** min(i, 2) for i in range(len(value))])
        elif name in ("num_heads", "num_attention_heads", "encoder_num_heads") and all(
            isinstance(x, int) for x in value
        ):
            setattr(config, name, [2] * len(value))
        elif name == "attn_layer_indices":
            setattr(config, name, [1])
        elif name == "encoder_in_channels" and len(value) == 3:
            setattr(config, name, [32, 64, 64])  # the last of a backbone's hidden sizes
        elif name in ("channel_multiplier", "encoder_block_out_channels"):
            setattr(config, name, [1] * len(value))
        elif name == "decoder_in_channels":
            setattr(config, name, [WIDTH] * len(value))
        elif name in ("conv_dim",):
            setattr(config, name, [16] * len(value))


def _set_sections(config: PretrainedConfig) -> None:
    """Divide the angles of positions that have three parts."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(config, name, None)
        for each in [found, *found.values()] if isinstance(found, dict) else []:
            if isinstance(each, dict) and ("mrope_section" in each or SECTIONS.search(type(config).__name__)):
                half = int(HEAD * each.get("partial_rotary_factor", 1.0)) // 2
                each["mrope_section"] = [2, 1, 1] if half == 4 else [half - half // 2, half // 2, 0]


def _agree(config: PretrainedConfig) -> None:
    """Set what must fit other fields."""
    if hasattr(config, "vocab_size"):
        config.pad_token_id = 0
    if getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = 0
    for name, value in (("attn_layer_indices", [1]), ("attn_layer_period", 2), ("attn_layer_offset", 1)):
        if hasattr(config, name):
            setattr(config, name, value)
    if hasattr(config, "fullatt_block_indexes"):  # windows in pixels, in all other layers
        config.window_size, config.fullatt_block_indexes = 4 * PATCH, [1]
    if getattr(config, "context_length", 0) is None:
        config.context_length = 16
