"""What some configurations need beside the rules of :mod:`~benchmarks.families.tiny_configs`, by class."""

from __future__ import annotations

from typing import Any

#: A class that is named here is made by its constructor, which then derives the fields that depend on others.
SETTINGS: dict[str, dict[str, Any]] = {
    # Attention in some layers, and state spaces in others or beside it.
    "BambaConfig": {"attn_layer_indices": [1]},
    "FalconH1Config": {"mamba_d_ssm": 32},
    "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "NemotronHConfig": {"n_groups": 2},
    "ZambaConfig": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "Zamba2Config": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    # Layers of several kinds, shared or repeated layers, heads of several sizes.
    "DbrxAttentionConfig": {"rope_theta": 10_000.0, "clip_qkv": 2.0, "kv_n_heads": 2},
    "DoryConfig": {
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "Dots3NoteTextConfig": {
        "num_hidden_layers": 3,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "head_dim": 16,
        "shared_experts_intermediate_size": 48,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "EmbeddingGemma2TextConfig": {
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
    },
    "Gemma3nTextConfig": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "HrmTextConfig": {"num_hidden_layers": 1},
    "Mistral4Config": {},
    "NeoMMEConfig": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "head_dim": 16,
        "per_layer_config": {1: {"sliding_window": 6}, 2: {"sliding_window": None}},
    },
    # Fields that have no default, or one that is smaller than what the rules go by.
    "EsmcConfig": {"vocab_size": 99},
    "MobileBertConfig": {"embedding_size": 16, "intra_bottleneck_size": 32},
    "XmodConfig": {"default_language": "en_XX"},
}
