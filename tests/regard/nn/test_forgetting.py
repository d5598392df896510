"""Forgetting attention: the mask in every engine, its precision and gradients; the layer; and QK-clip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import AuxRequest, masks
from regard.nn import (
    ForgettingAttention,
    KVCache,
    MultiheadAttention,
    MultiheadLatentAttention,
    Rotary,
    SelfAttention,
    qk_clip_,
)

ENGINES = ("reference", "streaming", "sdpa", "fused")


def given(L: int = 70, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(2, 3, L, n, generator=generator, dtype=torch.float64) for n in (8, 8, 5)]
    gates = F.logsigmoid(2 * torch.randn(2, 3, L, generator=generator, dtype=torch.float64))
    return [t.to(dtype) for t in (*made, gates)]


def formula(query: Tensor, key: Tensor, value: Tensor, log_gates: Tensor) -> Tensor:
    """Return forgetting attention as flash-linear-attention's naive form has it, a sum of gates for each pair."""
    L = query.shape[2]
    bias = torch.full((*log_gates.shape, L), -torch.inf, dtype=log_gates.dtype)
    for t in range(L):
        for j in range(t + 1):
            bias[..., t, j] = log_gates[..., j + 1 : t + 1].sum(-1)
    return (query @ key.mT / query.shape[-1] ** 0.5 + bias).softmax(-1) @ value


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "sdpa"])  # it has no gradient to a bias
def test_the_formula_and_its_gradients(engine: Any) -> None:
    ours, theirs = ([t.requires_grad_() for t in given()] for _ in range(2))
    found = regard.attention(*ours[:3], masks.causal() & masks.forgetting(ours[3]), engine=engine)
    right = formula(*theirs)
    torch.testing.assert_close(found, right)
    weight = torch.randn(right.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    gradients = zip(torch.autograd.grad(found, ours, weight), torch.autograd.grad(right, theirs, weight))
    for one, other in gradients:
        torch.testing.assert_close(one, other)


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("engine", ENGINES)
def test_long_sums_lose_nothing(engine: Any) -> None:
    """Sums reach −400,000, where a step of float32 is 0.03: the result is as good as with short ones."""
    query, key, value, gates = given(300, torch.float32)
    gates = gates.clone()
    gates[..., :100] = -4000.0
    mask = masks.causal() & masks.forgetting(gates)
    right = formula(*(t.double() for t in (query, key, value, gates)))
    found = regard.attention(query, key, value, mask, engine=engine)
    assert (found - right).abs().max() < 2e-6


def test_shapes_offsets_and_queries_outside() -> None:
    gates = given()[3]
    index = torch.zeros((), dtype=torch.long), torch.ones((), dtype=torch.long)
    bias = masks.forgetting(gates[0], offset=67).bias(*index, torch.arange(5)[:, None], torch.arange(70))
    assert bias is not None
    torch.testing.assert_close(bias[2], bias[4])  # after the last key
    torch.testing.assert_close(bias[1, 66], gates[0, 1, 67:69].sum())
    shared = masks.forgetting(gates[0, 0]).bind(masks.Extent(2, 3, 70, 70), "cpu")
    assert shared(0, 0, 3, 5)
    step = masks.forgetting(gates, align="lower_right").bind(masks.Extent(2, 3, 1, 70), "cpu")
    found = step.bias(*index, torch.zeros(1, 1, dtype=torch.long), torch.arange(70))
    assert found is not None
    torch.testing.assert_close(found[0, 10], gates[0, 1, 11:].sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(dtype: torch.dtype) -> None:
    query, key, value, gates = given(dtype=dtype)
    found = regard.attention(query, key, value, masks.causal() & masks.forgetting(gates))
    right = formula(*(t.double() for t in (query, key, value, gates)))
    torch.testing.assert_close(found.double(), right, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("gates", "error", "sentence"),
    [
        (torch.zeros(3).long(), TypeError, "masks.forgetting: log_gates must be a float tensor"),
        (torch.zeros(()), ValueError, r"masks.forgetting: log_gates must be a float tensor .*, got \(\)"),
        (torch.tensor([-1.0, 0.5]), ValueError, r"numbers that are at most 0, got 0\.5"),
        (torch.tensor([-torch.inf, 0.0]), ValueError, r"finite numbers that are at most 0, got -inf"),
        (torch.zeros(3, 6), ValueError, r"have shape \(B or 1, H or 1, S\) with \(B, H, S\) = \(1, 2, 5\)"),
    ],
)
def test_bad_gates(gates: Tensor, error: type[Exception], sentence: str) -> None:
    rows = torch.randn(1, 2, 5, 4)
    with pytest.raises(error, match=sentence):
        regard.attention(rows, rows, rows, masks.causal() & masks.forgetting(gates))


def layer(dtype: torch.dtype = torch.float64, **settings: Any) -> ForgettingAttention:
    torch.manual_seed(0)
    return ForgettingAttention(16, 4, **{"num_kv_heads": 2, "gate_bias": 1.0, **settings}).to(dtype).eval()


@pytest.mark.parametrize("split", [(1,) * 9, (4, 1, 4)])
@pytest.mark.parametrize("rotary", [None, Rotary(4)])
def test_steps_are_the_whole(split: tuple[int, ...], rotary: Rotary | None) -> None:
    made, cache = layer(rotary=rotary), KVCache()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    with torch.no_grad():
        steps = [made(part, cache=cache) for part in x.split(split, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), made(x))
    assert cache.key.shape == (2, 2, 9, 4 + 2)


def test_open_gates_forget_nothing() -> None:
    made = layer(gate_bias=60.0)
    plain = SelfAttention(16, 4, num_kv_heads=2, bias=False).double()
    plain.load_state_dict({name: t for name, t in made.state_dict().items() if not name.startswith("gate")})
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    torch.testing.assert_close(made(x), plain(x, masks.causal()))


# QK-clip --------------------------------------------------------------------------------------------------------------


def largest(made: Any, x: Tensor) -> Tensor:
    top = made(x, masks.causal(), return_aux=AuxRequest(max=True))[1].max
    return top.amax((0, 2))


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_clipped_scores(groups: int, bias: bool) -> None:
    """Scores of heads above the threshold come down to it; others, and values, stay the same."""
    torch.manual_seed(0)
    made = SelfAttention(16, 4, num_kv_heads=groups, bias=bias, rotary=Rotary(4)).double()
    x = 8 * torch.randn(2, 9, 16, dtype=torch.float64)
    before, values = largest(made, x), made.qkv.weight[-made.rows[2] :].clone()  # type: ignore[index]
    threshold = float(before.median())
    gamma = qk_clip_(made, before, threshold)
    torch.testing.assert_close(largest(made, x), before.clamp(max=threshold))
    torch.testing.assert_close(gamma, (threshold / before).clamp(max=1.0))
    assert torch.equal(made.qkv.weight[-made.rows[2] :], values)  # type: ignore[index]


def test_clipped_scores_of_latent_attention() -> None:
    torch.manual_seed(0)
    made = MultiheadLatentAttention(
        16, 4, latent_dim=12, head_dim=8, value_dim=6, rotary=Rotary(4, interleaved=True), query_latent_dim=10
    ).double()
    torch.nn.init.normal_(made.query.weight, std=2.0)
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    before = largest(made, x)
    threshold = float(before.median())
    qk_clip_(made, before, threshold)
    torch.testing.assert_close(largest(made, x), before.clamp(max=threshold))


def test_what_cannot_be_clipped() -> None:
    with pytest.raises(TypeError, match="qk_clip_: layer must be a SelfAttention or MultiheadLatentAttention"):
        qk_clip_(MultiheadAttention(8, 2), torch.ones(2))
    split = SelfAttention(8, 2)
    split.split_projection()
    with pytest.raises(TypeError, match="qk_clip_: layer must project queries and keys by linear layers, got Split"):
        qk_clip_(split, torch.ones(2))
    with pytest.raises(ValueError, match=r"qk_clip_: max_scores must have shape \(2,\), got \(3,\)"):
        qk_clip_(SelfAttention(8, 2), torch.ones(3))
    with pytest.raises(ValueError, match="qk_clip_: threshold must be a positive finite number, got 0"):
        qk_clip_(SelfAttention(8, 2), torch.ones(2), 0)
