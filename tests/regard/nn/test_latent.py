"""Multi-head latent attention: transformers' layer with the same weights, and steps through a cache of latents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import AuxRequest, masks
from regard.nn import KVCache, MultiheadLatentAttention, Rotary

SIZES: dict[str, Any] = {"latent_dim": 12, "head_dim": 8, "value_dim": 6, "rotary": Rotary(4, interleaved=True)}


def built(dtype: torch.dtype = torch.float64, **settings: Any) -> MultiheadLatentAttention:
    torch.manual_seed(0)
    return MultiheadLatentAttention(16, 4, **{**SIZES, **settings}).to(dtype).eval()


def rows(L: int = 9, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, L, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def copied(ours: torch.nn.Module, theirs: torch.nn.Module, low_rank: bool) -> None:
    """Copy the weights of a layer of transformers."""
    names = {"latent": "kv_a_proj_with_mqa", "latent_norm": "kv_a_layernorm", "key_value": "kv_b_proj", "out": "o_proj"}
    names |= {"query_latent": "q_a_proj", "query_norm": "q_a_layernorm", "query": "q_b_proj"} if low_rank else {}
    names |= {} if low_rank else {"query": "q_proj"}
    for mine, other in names.items():
        getattr(ours, mine).load_state_dict(getattr(theirs, other).state_dict())


YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.3,
    "original_max_position_embeddings": 4,
}  # fmt: skip


@pytest.mark.parametrize("rank", [None, 10])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("yarn", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_transformers(rank: int | None, interleaved: bool, yarn: bool, bias: bool) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    config = DeepseekV3Config(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=rank, kv_lora_rank=12,
        qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, rope_interleave=interleaved, attention_bias=bias,
        rope_parameters=YARN if yarn else {"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=32,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(2)
    layer, turning = theirs.DeepseekV3Attention(config, 0).double(), theirs.DeepseekV3RotaryEmbedding(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    scale = theirs.yarn_get_mscale(YARN["factor"], YARN["mscale_all_dim"]) if yarn else 1.0
    ours = built(query_latent_dim=rank, rotary=Rotary(4, interleaved=interleaved), mscale=scale, bias=bias)
    copied(ours, layer, rank is not None)
    x, places = rows(), torch.arange(9).unsqueeze(0)
    cos, sin = turning(x, places)
    hidden = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    right, weights = layer(x, (cos, sin), hidden)
    rotation = cos[0, :, :2].double(), sin[0, :, :2].double()
    found, aux = ours(x, masks.causal(), rotation=rotation, return_aux=AuxRequest(weights=True))
    # Eager attention computes its softmax in float32.
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(aux.weights, weights, rtol=1e-6, atol=1e-6)
    if not yarn:  # its own angles, which transformers computes in float32
        torch.testing.assert_close(ours(x, is_causal=True), right, rtol=1e-5, atol=1e-5)


def test_scale_correction_of_longcat() -> None:
    from transformers import LongcatFlashConfig
    from transformers.models.longcat_flash import modeling_longcat_flash as theirs

    config = LongcatFlashConfig(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=10, kv_lora_rank=12,
        qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, head_dim=4, max_position_embeddings=32,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(2)
    layer, turning = theirs.LongcatFlashMLA(config, 0).double(), theirs.LongcatFlashRotaryEmbedding(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ours = built(query_latent_dim=10, scale_latents=True, eps=layer.kv_a_layernorm.variance_epsilon)
    copied(ours, layer, low_rank=True)
    x = rows()
    cos, sin = turning(x, torch.arange(9).unsqueeze(0))
    hidden = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    right, _ = layer(x, (cos, sin), hidden)
    found = ours(x, masks.causal(), rotation=(cos[0, :, :2].double(), sin[0, :, :2].double()))
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"query_latent_dim": 10, "mscale": 1.2}, {"rotary": None}])
@pytest.mark.parametrize("split", [(1,) * 9, (4, 1, 4), (9,)])
def test_steps_are_the_whole(settings: dict[str, Any], split: tuple[int, ...]) -> None:
    layer, x, cache = built(**settings), rows(), KVCache()
    whole = layer(x, masks.causal())
    with torch.no_grad():
        steps = [layer(part, masks.causal(align="lower_right"), cache=cache) for part in x.split(split, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)
    width = 12 + (4 if layer.rotary else 0)
    assert cache.key.shape == (2, 1, 9, width) and cache.value.numel() == 0


def test_both_ways_agree_with_gradients_and_aux() -> None:
    """Absorbed or not: outputs, gradients to every weight, and the fields that a call returns."""
    layer, x = built(query_latent_dim=10), rows()
    answers = []
    for absorbs in (False, True):
        layer.zero_grad()
        layer._absorbs = lambda L, S, absorbs=absorbs: absorbs  # type: ignore[method-assign]
        found, aux = layer(x, masks.causal(), return_aux=AuxRequest(lse=True, weights=True))
        found.square().sum().backward()
        answers.append([found, aux.lse, aux.weights, *(p.grad.clone() for p in layer.parameters())])
    for one, other in zip(*answers):
        torch.testing.assert_close(one, other)


def test_a_step_is_absorbed_and_a_pass_is_not() -> None:
    """By the number of multiplications at DeepSeek-V3's sizes."""
    layer = MultiheadLatentAttention(
        64, 2, latent_dim=512, head_dim=128, rotary=Rotary(64), device="meta", dtype=torch.float32
    )
    assert layer._absorbs(1, 4096) and layer._absorbs(100, 4096)
    assert not layer._absorbs(4096, 4096) and not layer._absorbs(400, 4096)


def test_padding_of_a_step() -> None:
    """Sequences of different lengths that are padded on the left decode as each alone."""
    layer, x, pad = built(), rows(7), 3
    padded = torch.cat((torch.full((1, pad, 16), 7.0, dtype=torch.float64), x[1:, : 7 - pad]), 1)
    real = torch.arange(7) >= pad
    cache = KVCache()
    with torch.no_grad():
        layer(padded[:, :-1], masks.causal(align="lower_right") & masks.key_padding(real[None, :-1]), cache=cache)
        found = layer(padded[:, -1:], real[None, None, None], cache=cache)
    shifted = [t[pad:] for t in layer.rotary.rotation(torch.arange(7), torch.float64)]  # type: ignore[union-attr]
    right = layer(x[1:, : 7 - pad], masks.causal(), rotation=tuple(shifted))
    torch.testing.assert_close(found, right[:, -1:])
    with torch.no_grad():
        nothing = layer(padded[:, -1:], torch.zeros(1, 1, 1, 8, dtype=torch.bool), cache=cache)
    assert torch.equal(nothing, torch.zeros_like(nothing))


def test_caches_truncate_reorder_and_slide() -> None:
    layer, x = built(), rows()
    cache, window = KVCache(capacity=9), KVCache(window=4)
    with torch.no_grad():
        for part in x.split(1, 1):
            layer(part, cache=cache)
            last = layer(part, cache=window)
        torch.testing.assert_close(last, layer(x, masks.window(3, 0) & masks.causal())[:, -1:])
        cache.truncate(8)
        cache.reorder(torch.tensor([1, 1]))
        found = layer(x[[1, 1], 8:], cache=cache)
        torch.testing.assert_close(found, layer(x, masks.causal())[[1, 1], 8:])
        with pytest.raises(ValueError, match="attn_mask"):
            layer(x[:, :1], torch.ones(5, 5, dtype=torch.bool), cache=(fresh := KVCache()))
    assert len(fresh) == 0


def test_gradcheck() -> None:
    layer = built(query_latent_dim=10)
    x = rows(4).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: layer(t, masks.causal()), (x,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(dtype: torch.dtype) -> None:
    layer, x = built(torch.float32), rows(dtype=torch.float32)
    right = layer(x, masks.causal())
    narrow, cache = layer.to(dtype), KVCache()
    with torch.no_grad():
        steps = [narrow(part.to(dtype), cache=cache) for part in x.split(1, 1)]
    for found in (narrow(x.to(dtype), masks.causal()), torch.cat(steps, 1)):
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), right, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"latent_dim": 0}, "MultiheadLatentAttention: latent_dim must be an int of at least 1, got 0"),
        ({"rotary_dim": 6}, "MultiheadLatentAttention: rotary_dim must be the width of rotary, 4, got 6"),
        ({"mscale": -1.0}, "MultiheadLatentAttention: mscale must be a positive finite number, got -1.0"),
        ({"dropout": 2.0}, "MultiheadLatentAttention: dropout must be a probability in"),
    ],
)
def test_bad_settings(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence[:50]):
        built(**settings)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"x must have shape \(B, L, 16\), got \(2, 9, 5\)"):
        built()(rows()[..., :5])


def test_it_is_in_the_catalogue() -> None:
    assert "2405.04434" in regard.cite(MultiheadLatentAttention)
