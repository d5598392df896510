"""Padding in every form of self-attention, and calls that fail: nothing may come of either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from regard import masks, nn

LENGTHS = torch.tensor([2, 4])
LAYERS = {
    "general": lambda: nn.GeneralAttention(8),
    "additive": lambda: nn.AdditiveAttention(8, 8, 4),
    "concat": lambda: nn.ConcatAttention(8, 8, 4),
    "location": lambda: nn.LocationAttention(8, 9),
    "cosine": lambda: nn.CosineAttention(2.0),
    "kernel": lambda: nn.KernelAttention(width=2.0),
    "hard": lambda: nn.HardAttention(8, estimator="gumbel"),
    "local": lambda: nn.LocalAttention(8, 2),
}


def padded() -> Tensor:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    x[torch.arange(5) >= LENGTHS[:, None]] = torch.nan
    return x


@pytest.mark.parametrize("form", ["alone", "thrice", "by query"])
@pytest.mark.parametrize("name", LAYERS)
def test_padded_queries_of_self_attention_leak_nothing(name: str, form: str) -> None:
    torch.manual_seed(0)
    layer, x = LAYERS[name](), padded()
    lengths = LENGTHS[:, None].expand(2, 5) if form == "by query" else LENGTHS
    output = layer(x, x, x, lengths) if form == "thrice" else layer(x, valid_lens=lengths)
    assert output.isfinite().all()
    output[0, :2].sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all()


def test_a_reinforced_choice_learns_nothing_of_padding() -> None:
    torch.manual_seed(0)
    layer = nn.HardAttention(8)
    layer(padded(), valid_lens=LENGTHS)
    layer.surrogate(torch.ones(2)).backward()
    for parameter in layer.scorer.parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all()


@pytest.mark.parametrize(
    "mask", [masks.padding(torch.tensor([3, 3])), masks.key_padding(torch.arange(5).expand(2, 5) < 3)], ids=str
)
def test_what_a_mask_object_hides_leaks_nothing_through_projections(mask: masks.Mask) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    query, key = torch.randn(2, 4, 8), torch.randn(2, 5, 8)
    key[:, 3:] = torch.nan
    output, _ = layer(query, key, key, attn_mask=mask)
    output.sum().backward()
    assert output.isfinite().all()
    assert layer.in_proj_weight.grad.isfinite().all()


@pytest.mark.parametrize(
    "make", [lambda: nn.GeneralAttention(8), lambda: nn.LocalAttention(8, 2)], ids=["all", "local"]
)
def test_torchs_causal_bias_is_a_mask_not_a_tensor(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    layer, query, key = make().eval(), torch.randn(2, 4, 8), torch.randn(2, 5, 8)
    found, want = (layer(query, key, attn_mask=m) for m in (causal_lower_right(4, 5), masks.causal("lower_right")))
    torch.testing.assert_close(found, want)


def test_lengths_beyond_the_keys_are_an_error() -> None:
    layer, x = nn.LocalAttention(8, 2).eval(), torch.randn(2, 5, 8)
    with pytest.raises(ValueError, match=r"lengths must be at most 5, the number of keys, got 100"):
        layer(x, valid_lens=torch.tensor([100, 4]))


@pytest.mark.parametrize("lengths", [torch.tensor([2]), torch.tensor([[1, 3]])])
def test_masked_softmax_of_one_sequence(lengths: Tensor) -> None:
    weights = nn.masked_softmax(torch.zeros(1, 2, 4), lengths)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2))
    assert (weights[0, 0, int(lengths.flatten()[0]) :] == 0).all()


@pytest.mark.parametrize("name", LAYERS)
def test_lengths_of_another_batch_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=r"valid_lens must have shape \(3,\) or \(3, 5\), got \(2,\)"):
        LAYERS[name]()(torch.randn(3, 5, 8), valid_lens=LENGTHS)


def test_a_call_that_failed_left_nothing_in_the_cache() -> None:
    layer, cache, x = nn.MultiheadAttention(8, 2, batch_first=True), nn.KVCache(), torch.randn(2, 3, 8)
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(ValueError):
                layer(x, x, x, cache=cache, attn_mask=masks.as_mask(torch.ones(7, 9, dtype=torch.bool)))
            assert len(cache) == 0
        layer(x, x, x, cache=cache, is_causal=True)
    assert len(cache) == 3
    with pytest.raises(ValueError, match=r"KVCache: length must be in \[0, 3\], got 4"):
        cache.truncate(4)


def test_nested_tensors_have_no_cache() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
    with pytest.raises(ValueError, match="query must be dense with a cache or return_aux"):
        layer(nested, nested, nested, cache=nn.KVCache())


def test_the_sharpness_of_a_cosine_is_positive() -> None:
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="CosineAttention: beta must be a positive finite number"):
            nn.CosineAttention(wrong)
    with pytest.raises(TypeError, match="CosineAttention: beta must be a positive finite number, got 'a'"):
        nn.CosineAttention("a")


def test_layers_do_not_share_a_cache() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    cache = nn.KVCache()
    with pytest.raises(ValueError, match="cache must hold a different KVCache for each layer"):
        model(torch.randn(1, 3, 8), is_causal=True, cache=[cache, cache])


def test_a_wrong_width_is_named_by_the_layer() -> None:
    with pytest.raises(ValueError, match=r"GeneralAttention: query must have shape \(B, N, 6\), got \(2, 5, 8\)"):
        nn.GeneralAttention(6)(torch.randn(2, 5, 8))
    with pytest.raises(ValueError, match=r"AdditiveAttention: key must have shape \(B, N, 3\), got \(2, 5, 8\)"):
        nn.AdditiveAttention(8, 3, 4)(torch.randn(2, 5, 8))
    with pytest.raises(TypeError, match="valid_lens must be an integer tensor"):
        nn.GeneralAttention(8)(torch.randn(2, 5, 8), valid_lens=torch.tensor([True, False]))
