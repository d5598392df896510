"""Families whose inputs the sweep over all families does not know: the record has every matrix that they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from regard.inspect import capture

SIZES: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = SIZES | {"vocab_size": 60}


def _tokens() -> dict[str, Tensor]:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": torch.randint(3, 50, (2, 9)), "attention_mask": mask}


def _lilt() -> tuple[nn.Module, dict[str, Tensor]]:
    corner = torch.randint(0, 20, (2, 9, 2))
    config = hf.LiltConfig(**TEXT, channel_shrink_ratio=2, max_2d_position_embeddings=64)
    return hf.LiltModel(config), _tokens() | {"bbox": torch.cat([corner, corner + 5], -1)}


def _bros() -> tuple[nn.Module, dict[str, Tensor]]:
    return hf.BrosModel(hf.BrosConfig(**TEXT | {"hidden_size": 64})), _tokens() | {"bbox": torch.rand(2, 9, 8)}


def _lxmert() -> tuple[nn.Module, dict[str, Tensor]]:
    few = {name: TEXT[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    model = hf.LxmertModel(hf.LxmertConfig(**few, l_layers=1, x_layers=1, r_layers=1, visual_feat_dim=16))
    return model, _tokens() | {"visual_feats": torch.randn(2, 5, 16), "visual_pos": torch.rand(2, 5, 4)}


def _mgp_str() -> tuple[nn.Module, dict[str, Tensor]]:
    few = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = hf.MgpstrConfig(**few, image_size=[32, 32], patch_size=8)
    return hf.MgpstrModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def _perceiver() -> tuple[nn.Module, dict[str, Tensor]]:
    config = hf.PerceiverConfig(
        num_latents=6, d_latents=16, d_model=16, num_blocks=1, num_self_attends_per_block=2,
        num_self_attention_heads=2, num_cross_attention_heads=2,
    )  # fmt: skip
    return hf.PerceiverModel(config), {"inputs": torch.randn(2, 9, 16)}


def _vitpose() -> tuple[nn.Module, dict[str, Tensor]]:
    seeing = hf.VitPoseBackboneConfig(**SIZES, image_size=[32, 32], patch_size=[8, 8], num_experts=1, out_indices=[2])
    model = hf.VitPoseForPoseEstimation(hf.VitPoseConfig(backbone_config=seeing, scale_factor=2))
    return model, {"pixel_values": torch.randn(2, 3, 32, 32)}


def _seggpt() -> tuple[nn.Module, dict[str, Tensor]]:
    few = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = hf.SegGptConfig(
        **few, image_size=[32, 16], patch_size=8, merge_index=0, intermediate_hidden_state_indices=[1], mlp_dim=16,
        pretrain_image_size=32,
    )  # fmt: skip
    names = ("pixel_values", "prompt_pixel_values", "prompt_masks")
    return hf.SegGptModel(config), {name: torch.randn(1, 3, 16, 16) for name in names}


def _donut() -> tuple[nn.Module, dict[str, Tensor]]:
    config = hf.DonutSwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    return hf.DonutSwinModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def _vits() -> tuple[nn.Module, dict[str, Tensor]]:
    config = hf.VitsConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, vocab_size=60, flow_size=32,
        spectrogram_bins=9, upsample_initial_channel=32, upsample_rates=[2], upsample_kernel_sizes=[4],
        resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 1, 1]], prior_encoder_num_flows=2,
        posterior_encoder_num_wavenet_layers=2, wavenet_dilation_rate=1,
    )  # fmt: skip
    return hf.VitsModel(config), _tokens()


def _fastspeech() -> tuple[nn.Module, dict[str, Tensor]]:
    predictors = {f"{name}_predictor_channels": 8 for name in ("duration", "energy", "pitch")}
    config = hf.FastSpeech2ConformerConfig(
        hidden_size=24, vocab_size=60, num_mel_bins=8, encoder_num_attention_heads=2, encoder_layers=2,
        encoder_linear_units=24, decoder_num_attention_heads=2, decoder_layers=2, decoder_linear_units=24,
        speech_decoder_postnet_layers=2, speech_decoder_postnet_units=8, speech_decoder_postnet_kernel=3, **predictors,
    )  # fmt: skip
    return hf.FastSpeech2ConformerModel(config), {"input_ids": torch.randint(3, 50, (1, 9))}


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [each for part in value for each in flat(part)] if isinstance(value, tuple | list) else []


@pytest.mark.parametrize(
    "make", [_lilt, _bros, _lxmert, _mgp_str, _perceiver, _vitpose, _seggpt, _donut, _vits, _fastspeech]
)
@torch.no_grad()
def test_every_matrix_is_recorded(make: Callable[[], tuple[nn.Module, dict[str, Tensor]]]) -> None:
    torch.manual_seed(0)
    model, given = make()
    model.eval().set_attn_implementation("eager")
    with capture(model) as record:
        output = model(**given, output_attentions=True, return_dict=True)
    expected = [each for name, value in output.items() if "attentions" in name for each in flat(value)]
    matrices = [run.weights() for run in record]
    assert expected and record.coverage.complete
    for each in expected:
        same = [other.reshape(-1) for other in matrices if other.numel() == each.numel()]
        assert min(float((each.reshape(-1) - other).abs().max()) for other in same) < 1e-5
