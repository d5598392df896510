"""What some configurations need beside the rules of :mod:`~benchmarks.families.tiny_configs`, by class."""

from __future__ import annotations

from typing import Any

#: The memory of models that follow objects in videos; the width of its keys is fixed.
MEMORY: dict[str, Any] = {
    "memory_attention_hidden_size": 128,
    "memory_encoder_hidden_size": 128,
    "memory_encoder_output_channels": 64,
    "memory_fuser_embed_dim": 128,
    "mask_downsampler_embed_dim": 128,
}
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
    "EsmFold2AtomEncoderConfig": {"num_spatial_rope_pairs_per_axis": 1, "num_uid_rope_pairs": 1},
    "EsmFold2Config": {"single_inputs_size": 99},
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
    # Vision, sound, time series.
    "Ernie4_5_VLMoeTextConfig": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": [48, 48],
        "mlp_layer_types": ["dense", "sparse"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0, "mrope_section": [1, 1, 2]},
    },
    "ChameleonConfig": {"vocabulary_map": {"<image>": 98, "IMGIMGAZ": 60}},
    "ChameleonVQVAEConfig": {
        "base_channels": 32,
        "channel_multiplier": [1, 1],
        "latent_channels": 32,
        "resolution": 32,
    },
    "ConditionalDetrConfig": {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "DetrConfig": {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "EfficientLoFTRConfig": {"fine_matching_slice_dim": 4, "num_attention_heads": 8, "out_features": [8, 8, 16, 32], "stage_num_blocks": [1, 1, 1, 1]},
    "HGNetV2Config": {
        "stem_channels": [3, 16, 16],
        "stage_in_channels": [16, 16, 32, 64],
        "stage_mid_channels": [16, 16, 16, 16],
        "stage_out_channels": [16, 32, 64, 64],
        "hidden_sizes": [16, 32, 64, 64],
        "stage_numb_of_layers": [1, 1, 1, 1],
    },
    "LayoutLMv3Config": {"coordinate_size": 6, "shape_size": 4, "input_size": 32},
    "LightGlueConfig": {},
    "MuseGlimmerAssistantConfig": {"target_layer_ids": [1, 2], "layer_types": ["sliding_attention", "full_attention"]},
    "NeuCodecConfig": {"quantization_dim": 64},
    "Pix2StructTextConfig": {"initializer_range": 0.05},
    "PPDocLayoutV2ReadingOrderConfig": {"vocab_size": 8},
    "PPDocLayoutV2Config": {
        "class_thresholds": [0.1, 0.1],
        "class_order": [0, 1],
        "encoder_in_channels": [32, 64, 64],
        "decoder_in_channels": [32, 32, 32],
    },
    "PPDocLayoutV3Config": {
        "x4_feat_dim": 16,
        "encoder_in_channels": [32, 64, 64],
        "decoder_in_channels": [32, 32, 32],
    },
    "Sam2VideoMaskDecoderConfig": {"hidden_size": 128},
    "Sam2VideoPromptEncoderConfig": {"hidden_size": 128, "image_size": 64, "patch_size": 16},
    "Sam2VideoConfig": {"image_size": 64, "memory_attention_rope_feat_sizes": [4, 4]} | MEMORY,
    "Sam3TrackerVideoMaskDecoderConfig": {"hidden_size": 128},
    "Sam3TrackerVideoPromptEncoderConfig": {"hidden_size": 128},
    "Sam3TrackerVideoConfig": {
        "image_size": 32,
        "vision_config": {
            "model_type": "sam3_vision_model",
            "fpn_hidden_size": 128,
            "backbone_config": {
                "model_type": "sam3_vit_model",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_attention_heads": 4,
                "num_hidden_layers": 2,
                "image_size": 32,
                "pretrain_image_size": 32,
                "patch_size": 8,
                "window_size": 2,
                "global_attn_indexes": [1],
            },
        },
    }
    | MEMORY,
    "Sam3VisionConfig": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    "Sam2HieraDetConfig": {
        "hidden_size": 16,
        "image_size": [64, 64],
        "blocks_per_stage": [1, 1, 2, 1],
        "embed_dim_per_stage": [16, 32, 64, 128],
        "num_attention_heads_per_stage": [1, 2, 4, 8],
        "window_size_per_stage": [4, 2, 4, 2],
        "global_attention_blocks": [3],
    },
    "Sam2VisionConfig": {
        "backbone_channel_list": [128, 64, 32, 16],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        "fpn_hidden_size": 128,
    },
    "Sam2MaskDecoderConfig": {"hidden_size": 128},
    "Sam2PromptEncoderConfig": {"hidden_size": 128, "image_size": 64, "patch_size": 16},
    "Sapiens2Config": {"num_key_value_heads_per_layer": [4, 2], "head_config": {
        "upsample_out_channels": [16, 16], "conv_out_channels": [16], "use_pixel_shuffle": False,
    }},
    "TimesFmConfig": {"context_length": 64, "horizon_length": 16},
    "TimesFm2_5Config": {"context_length": 64, "horizon_length": 16, "output_quantile_len": 16},
    "SuperPointConfig": {"keypoint_decoder_dim": 65},
    "Xcodec2Config": {"quantization_dim": 64},
    # Fields that have no default, or one that is smaller than what the rules go by.
    "EsmcConfig": {"vocab_size": 99},
    "MobileBertConfig": {"embedding_size": 16, "intra_bottleneck_size": 32},
    "XmodConfig": {"default_language": "en_XX"},
}
