"""What is not finite, what overflows, and what hides it: single calls with the right values, beside the laws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks

ENGINES = ("auto", "sdpa", "fused", "streaming", "reference")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Q, K, V = (normal(1, 2, 16, 8, seed=seed) for seed in range(3))
MASKS: dict[str, Any] = {
    "window": masks.causal() & masks.window(30, 0),
    "document": masks.causal() & masks.document(torch.zeros(16, dtype=torch.long)),
    "prefix": masks.causal() | masks.prefix(4),
    "tensor": torch.ones(16, 16, dtype=torch.bool).tril(),
    "bias": torch.zeros(16, 16).masked_fill(~torch.ones(16, 16, dtype=torch.bool).tril(), -torch.inf),
    "function": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("wants_grad", [False, True])
def test_a_hidden_key_that_makes_scores_infinite_shows_in_no_row(engine: str, mask: str, wants_grad: bool) -> None:
    query, key = Q.clone(), K.clone()
    query[..., 0], query[..., -1, 0] = -1, 1
    key[..., 8, 0] = -torch.inf
    ends = [t.requires_grad_(wants_grad) for t in (query, key, V.clone())]
    output = regard.attention(*ends, MASKS[mask], engine=engine)
    hidden = slice(8)
    right = regard.attention(Q.clone().index_copy(-1, torch.tensor([0]), query.detach()[..., :1]), K, V, MASKS[mask])
    torch.testing.assert_close(output[:, :, hidden], right[:, :, hidden])
    if wants_grad:
        assert torch.autograd.grad(output[:, :, hidden].sum(), query)[0][:, :, hidden].isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mask", MASKS)
def test_a_hidden_product_that_overflows_shows_in_no_row(engine: str, mask: str) -> None:
    key = K.clone()
    key[..., 8, :] = 1e30
    output = regard.attention(Q * 1e10, key, V, MASKS[mask], engine=engine)
    right = regard.attention(Q * 1e10, K, V, MASKS[mask], engine="reference")
    torch.testing.assert_close(output[:, :, :8], right[:, :, :8])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_query_that_is_nan_and_sees_nothing_gives_zeros(engine: str) -> None:
    query, key, value = (t.repeat(2, 1, 1, 1) for t in (Q, K, V))
    query[0] = torch.nan
    ends = [t.requires_grad_() for t in (query, key, value)]
    output = regard.attention(*ends, masks.padding(torch.tensor([0, 6])), engine=engine)
    assert (output[0] == 0).all()
    assert output[1].isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(output.sum(), ends))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("keys", [1, 2, 5, 7, 8, 15, 16])
@pytest.mark.parametrize("width", [8, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_a_query_that_is_nan_gives_nan_however_few_keys_there_are(
    engine: str, keys: int, width: int, causal: bool
) -> None:
    query = Q.clone()
    query[..., 3, :] = torch.nan
    output = regard.attention(query, K[..., :keys, :], V[..., :keys, :width], is_causal=causal, engine=engine)
    assert output[..., 3, :].isnan().all()
    assert output[..., :3, :].isfinite().all()
    assert output[..., 4:, :].isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("keys", [1, 5, 16])
@pytest.mark.parametrize("mask", [None, masks.causal(align="upper_left"), "zeros"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_minus_infinity_are_zeros_and_of_nan_are_nan(
    engine: str, keys: int, mask: Any, dtype: torch.dtype
) -> None:
    query, key, value = Q.clone(), K[:, :, :keys].abs() + 1, V[:, :, :keys]
    query[:, :, :2, 1:] = 0
    query[:, :, :2, 0] = -torch.inf
    query[:, :, 1, 1] = torch.inf  # −inf + inf
    query[:, :, 2, 0] = torch.inf
    added = torch.zeros(16, keys, dtype=dtype) if mask == "zeros" else mask
    output = regard.attention(*(t.to(dtype) for t in (query, key, value)), added, engine=engine)
    assert not output[:, :, 0].any() and output[:, :, 1:3].isnan().all() and output[:, :, 3:].isfinite().all()
    # Zeros times infinite keys: none of the rows sees another key.
    output = regard.attention(*(t.to(dtype) for t in (Q * 0, key + torch.inf, value)), added, engine=engine)
    assert output.isnan().all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(5, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_large_values_do_not_overflow(engine: str, mask: Any, dtype: torch.dtype) -> None:
    large = 0.9 * torch.finfo(dtype).max
    value = (V.sign().to(dtype) * large).requires_grad_()
    output = regard.attention(Q.to(dtype), K.to(dtype), value, mask, engine=engine)
    right = regard.attention(Q.to(dtype), K.to(dtype), V.sign().to(dtype), mask, engine=engine)
    torch.testing.assert_close(output.double() / large, right.double(), rtol=0, atol=8 * torch.finfo(dtype).eps)
    assert torch.autograd.grad(output.sum(), value)[0].isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("number", [-1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("shape", [(16, 16), (2, 16, 16), (16, 1)])
def test_rows_of_a_large_negative_bias_have_the_gradient_of_a_mean(
    engine: str, number: float, shape: tuple[int, ...]
) -> None:
    value = V.clone().requires_grad_()
    bias = torch.full(shape, number)
    output = regard.attention(Q, K, value, bias, engine=engine)
    (gradient,) = torch.autograd.grad(output.sum(), value)
    torch.testing.assert_close(gradient, torch.ones_like(gradient))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("slopes", [torch.bfloat16, torch.float16, torch.float32])
def test_slopes_in_a_narrow_dtype_lose_nothing(engine: str, slopes: torch.dtype) -> None:
    numbers = torch.tensor([0.3, 0.7]).to(slopes)
    wide = [t.double() for t in (Q, K, V)]
    mask, right_mask = masks.alibi(numbers), masks.alibi(numbers.double())
    request = regard.AuxRequest(lse=True)
    right, right_aux = regard.attention(*wide, right_mask, engine="reference", return_aux=request)
    for ends, tolerance in (((Q, K, V), 2e-6), (wide, 1e-14)):
        output, aux = regard.attention(*ends, mask, engine=engine, return_aux=request)
        assert aux.lse is not None
        assert right_aux.lse is not None
        torch.testing.assert_close(output.double(), right, rtol=0, atol=tolerance)
        torch.testing.assert_close(aux.lse.double(), right_aux.lse, rtol=tolerance, atol=tolerance)
