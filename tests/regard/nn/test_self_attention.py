"""Self-attention of language models, beside torch's multi-head attention and in narrow types."""

from __future__ import annotations

import pytest
import torch

from regard import AuxRequest, masks
from regard.nn import KVCache, MultiheadAttention, Rotary, SelfAttention


@pytest.mark.parametrize("causal", [False, True])
def test_it_is_multi_head_attention(causal: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = SelfAttention(24, 4).double(), MultiheadAttention(24, 4, batch_first=True).double()
    assert theirs.in_proj_weight is not None
    ours.load_state_dict(
        {
            "qkv.weight": theirs.in_proj_weight, "qkv.bias": torch.randn(72).double(),
            "out.weight": theirs.out_proj.weight, "out.bias": theirs.out_proj.bias,
        }
    )  # fmt: skip
    assert theirs.in_proj_bias is not None
    theirs.in_proj_bias.data.copy_(ours.qkv.bias)
    x = torch.randn(2, 7, 24).double()
    expected, _ = theirs(x, x, x, need_weights=False, is_causal=causal)
    torch.testing.assert_close(ours(x, masks.causal() if causal else None), expected)
    torch.testing.assert_close(ours(x, is_causal=causal), expected)


@pytest.mark.parametrize("request_aux", [None, AuxRequest(lse=True)])
def test_narrow_types_are_learned_from_in_float32(request_aux: AuxRequest | None) -> None:
    torch.manual_seed(0)
    layer = SelfAttention(32, 2, num_kv_heads=1, rotary=Rotary(16))
    x = torch.randn(2, 9, 32)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = layer(x, masks.causal(), return_aux=request_aux)
    narrow = narrow if request_aux is None else narrow[0]
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), layer(x, masks.causal()), rtol=0.05, atol=0.02)
    narrow.float().square().sum().backward()
    assert layer.qkv.weight.grad is not None and layer.qkv.weight.grad.dtype == torch.float32
    half = layer.bfloat16()
    assert half(x.bfloat16(), masks.causal()).dtype == torch.bfloat16


def test_a_call_that_failed_has_not_been() -> None:
    layer, cache, x = SelfAttention(8, 2).eval(), KVCache(), torch.randn(1, 3, 8)
    with torch.no_grad():
        layer(x, masks.causal(), cache=cache)
        with pytest.raises(ValueError, match="attn_mask"):
            layer(x, torch.ones(5, 5, dtype=torch.bool), cache=cache)
    assert len(cache) == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_heads": 3}, "num_heads must divide embed_dim 8"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads must divide num_heads 4"),
        ({"num_heads": 0}, "num_heads must be"),
        ({"num_heads": 2, "dropout": 1.5}, "dropout must be"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SelfAttention(8, **arguments)


def test_a_mask_by_head_is_no_padding_of_a_first_step() -> None:
    layer, x = SelfAttention(8, 4, num_kv_heads=2).eval(), torch.randn(1, 1, 8)
    by_head = torch.tensor([True, False, True, True]).view(4, 1, 1)
    torch.testing.assert_close(layer(x, by_head), layer(x, by_head.unsqueeze(0)))
    with pytest.raises(ValueError, match=r"attn_mask must have shape \(L, S\)"):
        layer(x, by_head[:2])


def test_a_mask_does_not_cover_a_prefix_that_sequences_share() -> None:
    torch.manual_seed(0)
    layer, x, y = SelfAttention(12, 2).double(), torch.randn(1, 9, 12).double(), torch.randn(2, 3, 12).double()
    mask = torch.rand(2, 1, 3, 3) > 0.4
    alone, shared = KVCache(), KVCache()
    layer(x.expand(2, -1, -1), cache=alone)
    shared.prefix = (alone.key[:1].clone(), alone.value[:1].clone())
    expected = layer(y, torch.nn.functional.pad(mask, (9, 0), value=True), cache=alone)
    torch.testing.assert_close(layer(y, mask, cache=shared), expected)
