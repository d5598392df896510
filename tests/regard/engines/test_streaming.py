"""Engine streaming: the borders of tiles, dropout that is drawn twice alike, and tensors that nobody declared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_calls import check, inputs, normal, oracle, run
from torch import Tensor, nn

import regard
from regard import masks, scores
from regard.engines import streaming as module
from regard.normalizers import Entmax
from regard.normalizers.base import TABLE as NORMALIZERS

B, H, L, S = 2, 4, 23, 29
TILES = [(1, 1), (1, 4), (600, 4), (1, 32)]  # of 1x1, 4x4, 8x8, and all in one

ADDITIVE = scores.Additive(normal(6), normal(6, 8), normal(6, 8))


def bent(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.where((q_idx + kv_idx) % 7 == 0, -torch.inf, score - 0.1 * (q_idx - kv_idx).abs() + 0.2 * h + b)


CALLS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "causal": {"is_causal": True},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": -1.1},
    "additive": {"score": ADDITIVE},
    "gaussian": {"score": "gaussian"},
    "boxcar": {"score": scores.Boxcar(3.5)},
    "laplacian": {"score": "laplacian"},
    "epanechnikov": {"score": scores.Epanechnikov(4.5)},
    "score_mod": {"score": bent},
    "sparsemax": {"normalizer": "sparsemax"},
    "entmax": {"normalizer": Entmax(1.3)},
    "sigmoid": {"normalizer": "sigmoid", "attn_mask": masks.causal("lower_right")},
    "argmax": {"normalizer": "argmax"},
    "padding": {"attn_mask": masks.padding(torch.tensor([29, 3]))},
    "empty rows": {"attn_mask": masks.padding(torch.tensor([0, 12])), "normalizer": "entmax15"},
    "alibi": {"attn_mask": masks.alibi(normal(H).abs(), align="upper_left") & masks.causal("upper_left")},
    "bias": {"attn_mask": normal(H, L, S).masked_fill(normal(L, S) > 1, -torch.inf)},
}


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("call", CALLS)
def test_borders_of_tiles(call: str, small_tiles: Callable[..., None]) -> None:
    leaves = inputs(B, H, H, L, S)
    right = oracle(leaves, **CALLS[call])
    for size, side in TILES[2 if "normalizer" in CALLS[call] else 0 :]:
        small_tiles(size, side)
        check(run(leaves, **CALLS[call], engine="streaming"), right, 5e-5)


@pytest.mark.parametrize("call", ["softmax", "causal", "sparsemax", "bias", "additive"])
def test_grouped_queries(call: str, small_tiles: Callable[..., None]) -> None:
    small_tiles()
    leaves = inputs(B, H, 2, L, S)
    named = {**CALLS[call], "enable_gqa": True}
    check(run(leaves, **named, engine="streaming"), oracle(leaves, **named), 5e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_accumulate_in_float32(dtype: torch.dtype, small_tiles: Callable[..., None]) -> None:
    small_tiles()
    value = torch.ones(1, 1, 3000, 1, dtype=dtype)
    zeros = torch.zeros(1, 1, 3000, 4, dtype=dtype)
    output = regard.attention(zeros[:, :, :1], zeros, value, score="constant", engine="streaming")
    assert output.dtype == dtype
    assert output.item() == 1  # a sum in a narrow dtype stops growing at 256 or 2048
    leaves = inputs(B, H, H, L, S, dtype=dtype)
    found = run(leaves, engine="streaming")
    assert {t.dtype for t in found} == {dtype}
    check(found, oracle(leaves), 1.5e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize(
    "part",
    [
        lambda t: {"score": scores.Additive(t[0], t[1:9].T, t[9:17].T)},
        lambda t: {"score": scores.General(t[:8])},
        lambda t: {"score": scores.Gaussian(t[0].abs() + 0.5)},
        lambda t: {"score": scores.Cosine(t[0, :1].exp())},
        lambda t: {"attn_mask": t[:, :1].expand(L, S)},
        lambda t: {"attn_mask": masks.alibi(t[:4, 0].abs(), align="upper_left"), "normalizer": "sparsemax"},
        lambda t: {"attn_mask": masks.dense(t[:4, None, :1]) & masks.sinks(20), "score": scores.General(t[4:12])},
    ],
)
def test_gradients_to_what_parts_hold(
    part: Callable[[Tensor], dict[str, Any]], small_tiles: Callable[..., None]
) -> None:
    small_tiles()
    parameter, leaves = normal(L, 8, seed=4).requires_grad_(), inputs(B, H, H, L, S)
    found = run(leaves, [parameter], **part(parameter), engine="streaming")
    right = oracle(leaves, [parameter], **part(parameter))
    assert right[4].abs().sum() > 0 or "attn_mask" in part(parameter)  # (a bias shared by a row has no gradient)
    check(found, right, 1e-4)


@pytest.mark.parametrize("normalizer", ["softmax", "sparsemax", "sigmoid"])
def test_gradients_to_what_a_function_captures(normalizer: str, small_tiles: Callable[..., None]) -> None:
    table = normal(L, S, seed=4).requires_grad_()
    gate = nn.Linear(1, 1)

    def captured(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return gate(score.unsqueeze(-1).to(gate.weight.dtype)).squeeze(-1).to(score.dtype) + table[q_idx, kv_idx]

    leaves, extra = inputs(B, H, H, L, S), [table, *gate.parameters()]
    named = {"score": captured, "normalizer": normalizer}
    right = oracle(leaves, extra, **named)
    assert right[4].abs().sum() > 0
    for size, side in TILES[1:]:
        small_tiles(size, side)
        check(run(leaves, extra, **named, engine="streaming"), right, 1e-4)


def test_a_captured_tensor_gets_its_gradient_where_query_wants_none(small_tiles: Callable[..., None]) -> None:
    small_tiles()
    slope = torch.tensor(0.3, requires_grad=True)
    query, key, value = (t.detach() for t in inputs(B, H, H, L, S))
    output = regard.attention(
        query, key, value, score=lambda s, b, h, i, j: s - slope * (i - j).abs(), engine="streaming"
    )
    (found,) = torch.autograd.grad(output.square().sum(), slope)
    whole = regard.attention(
        query, key, value, score=lambda s, b, h, i, j: s - slope * (i - j).abs(), engine="reference"
    )
    torch.testing.assert_close(found, torch.autograd.grad(whole.square().sum(), slope)[0], rtol=1e-4, atol=1e-4)


def only(index: int, leaves: list[Tensor]) -> list[Tensor]:
    return [t.detach().requires_grad_(i == index) for i, t in enumerate(leaves)]


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("engine", ["streaming", "sdpa"])
def test_one_gradient_alone_is_the_same(
    engine: str, index: int, small_tiles: Callable[..., None], small_strips: Callable[..., None]
) -> None:
    small_tiles()
    small_strips()
    leaves = inputs(B, H, H, L, S)
    right = run(leaves, engine=engine, attn_mask=masks.sinks(13))
    some = only(index, leaves)
    output = regard.attention(*some, masks.sinks(13), engine=engine)
    (found,) = torch.autograd.grad(output, some[index], normal(*output.shape, seed=7))
    assert torch.equal(found, right[1 + index])


# Dropout --------------------------------------------------------------------------------------------------------------


def drawn(leaves: list[Tensor], **named: Any) -> Tensor:
    torch.manual_seed(11)
    return regard.attention(*leaves, None, 0.4, engine="streaming", **named)


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("normalizer", [name for name, kind in NORMALIZERS.items() if kind.streams and kind.smooth])
def test_backward_draws_what_forward_drew(normalizer: str, small_tiles: Callable[..., None]) -> None:
    small_tiles()
    leaves = [t.detach().requires_grad_() for t in inputs(1, 2, 2, 9, 10, 3, 2, dtype=torch.float64)]
    assert torch.equal(drawn(leaves, normalizer=normalizer), drawn(leaves, normalizer=normalizer))
    assert not torch.equal(drawn(leaves), regard.attention(*leaves, engine="streaming"))
    # Finite differences, with the same seed in each evaluation.
    torch.autograd.gradcheck(lambda *args: drawn(list(args), normalizer=normalizer), leaves, fast_mode=True)
    torch.autograd.gradgradcheck(lambda *args: drawn(list(args), normalizer=normalizer), leaves, fast_mode=True)


def test_every_weight_is_dropped_by_itself(small_tiles: Callable[..., None]) -> None:
    small_tiles()
    value = torch.eye(64).expand(2, 3, 64, 64).contiguous()
    zeros = torch.zeros(2, 3, 64, 4, requires_grad=True)
    torch.manual_seed(0)
    weights = regard.attention(zeros, zeros, value, None, 0.4, engine="streaming") * 64
    assert ((weights == 0) | ((weights - 1 / 0.6).abs() < 1e-5)).all()
    kept = (weights > 0).flatten(0, 1).double()  # (6, 64, 64)
    assert abs(kept.mean() - 0.6) < 0.01
    # No two heads, rows, columns or tiles share a draw: 64 weights agree by chance with probability 0.52^64.
    lines = torch.cat((kept.flatten(0, 1), kept.mT.flatten(0, 1)))
    assert len(torch.unique(lines, dim=0)) == len(lines)
    tiles = kept.unflatten(2, (16, 4)).unflatten(1, (16, 4)).transpose(2, 3).flatten(3).flatten(0, 2)
    assert len(torch.unique(tiles, dim=0)) > 0.9 * len(tiles)


def test_dropout_takes_its_seed_from_torch_and_moves_it_on() -> None:
    leaves = inputs(1, 2, 2, 300, 300)

    def twice() -> tuple[Tensor, Tensor]:
        return tuple(regard.attention(*leaves, None, 0.5, normalizer="sparsemax") for _ in range(2))  # type: ignore[return-value]

    torch.manual_seed(5)
    first, second = twice()
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    again = twice()
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])
    state = torch.get_rng_state()
    regard.attention(*leaves, None, 0.0, normalizer="sparsemax").sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


# Derivatives of derivatives -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["softmax", "additive", "sparsemax", "score_mod", "gaussian"])
def test_second_derivatives_cross_tiles(call: str, small_tiles: Callable[..., None]) -> None:
    small_tiles()
    leaves = inputs(1, 2, 2, 6, 7, 8, 2, dtype=torch.float64)
    named = dict(CALLS[call])
    if call == "additive":
        named["score"] = scores.Additive(*(t.double() for t in ADDITIVE.tensors()))
    torch.autograd.gradgradcheck(
        lambda *args: regard.attention(*args, **named, engine="streaming"), leaves, fast_mode=True
    )


@pytest.mark.parametrize("named", [{}, {"is_causal": True}, {"attn_mask": masks.window(3, 0)}, {"score": "cosine"}])
def test_an_engine_without_second_derivatives_names_those_that_have(named: dict[str, Any]) -> None:
    query = normal(1, 2, 9, 4).requires_grad_()
    for engine in ("sdpa", "fused"):
        output = regard.attention(query, query, query, **named, engine=engine)
        with pytest.raises(
            RuntimeError, match=rf"engine '{engine}' has no second derivative .*'streaming' or .*'reference'"
        ):
            torch.autograd.grad(output.sum(), query, create_graph=True)
        torch.autograd.grad(output.sum(), query)  # the first is still to be had


@pytest.mark.parametrize("named", [{}, {"is_causal": True}, {"score": "gaussian"}, {"normalizer": "entmax15"}])
def test_forward_mode_goes_through_auto(named: dict[str, Any], small_tiles: Callable[..., None]) -> None:
    small_tiles()
    leaves = tuple(t.detach() for t in inputs(1, 2, 2, 9, 10, 4, 3, dtype=torch.float64))
    tangents = tuple(normal(*t.shape, seed=9, dtype=torch.float64) for t in leaves)

    def call(*args: Tensor) -> Tensor:
        return regard.attention(*args, **named)

    output, tangent = torch.func.jvp(call, leaves, tangents)
    torch.testing.assert_close(output, call(*leaves))
    step = 1e-6
    ahead, behind = (call(*(t + s * d for t, d in zip(leaves, tangents))) for s in (step, -step))
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-6)


def test_forward_mode_names_engines_that_can() -> None:
    query = normal(1, 2, 9, 4)
    with pytest.raises(ValueError, match=r"no forward-mode derivative .engines 'streaming' and 'reference' have"):
        torch.func.jvp(lambda t: regard.attention(t, t, t, engine="sdpa"), (query,), (query,))


def test_the_forward_pass_computes_each_visible_tile_once(
    monkeypatch: pytest.MonkeyPatch, small_tiles: Callable[..., None]
) -> None:
    small_tiles()
    seen: list[tuple[int, int]] = []
    plain = module.Tiles.scores

    def counted(self: Any, row: int, col: int, *rest: Any) -> Tensor:
        seen.append((row, col))
        return plain(self, row, col, *rest)

    monkeypatch.setattr(module.Tiles, "scores", counted)
    query = normal(1, 2, 16, 4)
    with torch.no_grad():
        regard.attention(query, query, query, is_causal=True, engine="streaming")
    assert sorted(seen) == [(row, col) for row in range(4) for col in range(row + 1)]
