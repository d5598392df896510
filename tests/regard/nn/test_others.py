"""Graph attention, AFT, channel, pooling and criss-cross layers: laws, masks and bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import AuxRequest, masks
from regard.nn import (
    AgentAttention,
    AttentionFree,
    CoordinateAttention,
    CrissCrossAttention,
    CrossCovarianceAttention,
    EfficientAttention,
    ExternalAttention,
    GatedAttentionPooling,
    GlobalContext,
    GraphAttention,
    PointTransformerAttention,
)

F64 = torch.float64


def numbers(*shape: int, seed: int = 1, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Graphs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_lists_of_neighbours_are_edges(version: Any) -> None:
    torch.manual_seed(0)
    layer, nodes = GraphAttention(6, 4, 2, version=version, dtype=F64), numbers(2, 5, 6)
    neighbours = torch.tensor([[1, 4], [0, -1], [3, 1], [-1, -1], [2, 0]])
    edges = torch.zeros(5, 5, dtype=torch.bool)
    for i, near in enumerate(neighbours.tolist()):
        for j in near:
            edges[i, j] |= j >= 0
    right = layer(nodes, edges)
    torch.testing.assert_close(layer(nodes, neighbours), right, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer(nodes, neighbours.expand(2, 5, 2).int()), right, rtol=1e-12, atol=1e-12)
    masked = layer(nodes, masks.selected(neighbours.expand(2, 1, 5, 2)))
    torch.testing.assert_close(masked, right, rtol=1e-12, atol=1e-12)
    lengths = torch.tensor([5, 3])
    torch.testing.assert_close(layer(nodes, neighbours, lengths), layer(nodes, edges, lengths), rtol=1e-12, atol=1e-12)
    _, aux = layer(nodes, neighbours, return_aux=AuxRequest(weights=True))
    assert aux.weights.shape == (10, 2, 1, 3)
    assert layer(nodes[:, :1], torch.zeros(1, 0, dtype=torch.long)).shape == (2, 1, 8)


def test_permuting_the_nodes_permutes_the_outputs() -> None:
    torch.manual_seed(0)
    layer, nodes, order = GraphAttention(6, 4, 2, dtype=F64), numbers(1, 5, 6), torch.tensor([3, 0, 4, 1, 2])
    edges = numbers(5, 5, seed=3) > 0
    found = layer(nodes[:, order], edges[order][:, order])
    torch.testing.assert_close(found, layer(nodes, edges)[:, order], rtol=1e-12, atol=1e-12)


def test_version_1_ranks_neighbours_alike_for_all_nodes() -> None:
    torch.manual_seed(0)
    nodes = numbers(1, 40, 6)
    _, aux = GraphAttention(6, 4, version=1, dtype=F64)(nodes, return_aux=AuxRequest(weights=True))
    best = aux.weights[0, 0].argmax(-1)
    assert (best == best[0]).all()
    _, aux = GraphAttention(6, 16, dtype=F64)(nodes, return_aux=AuxRequest(weights=True))
    best = aux.weights[0, 0].argmax(-1)
    assert not (best == best[0]).all()


@pytest.mark.parametrize("version", [1, 2])
def test_gradients_of_graphs(version: Any) -> None:
    torch.manual_seed(0)
    layer, edges = GraphAttention(3, 2, 2, version=version, self_loops=False, dtype=F64), numbers(4, 4, seed=3) > 0
    assert torch.autograd.gradcheck(lambda x: layer(x, edges), (numbers(1, 4, 3).requires_grad_(),))


# AFT ------------------------------------------------------------------------------------------------------------------


def test_a_window_of_one_keeps_the_bias_of_a_row_with_itself() -> None:
    torch.manual_seed(0)
    whole = AttentionFree(4, 8, rank=3, dtype=F64)
    local = AttentionFree(4, 8, rank=3, window=1, dtype=F64)
    local.load_state_dict(whole.state_dict())
    x = numbers(2, 1, 4)
    torch.testing.assert_close(local(x), whole(x))
    assert not torch.allclose(local._biases(5), whole._biases(5))
    assert local._biases(5).count_nonzero() == 5


def test_aft_sees_no_later_row() -> None:
    layer, x = AttentionFree(4, 8, rank=3, dtype=F64), numbers(1, 8, 4).requires_grad_()
    (grad,) = torch.autograd.grad(layer(x, is_causal=True)[:, :5].square().sum(), x)
    assert not grad[:, 5:].any() and grad[:, :5].any()


# Linear in length -----------------------------------------------------------------------------------------------------


def test_weights_of_efficient_attention_sum_to_one() -> None:
    torch.manual_seed(0)
    layer = EfficientAttention(6, 2, dtype=F64)
    nn.init.zeros_(layer.v_proj.weight)
    nn.init.ones_(layer.v_proj.bias)
    found = layer(numbers(2, 5, 6), torch.tensor([5, 3]))
    torch.testing.assert_close(found, layer.out_proj(torch.ones(2, 5, 6, dtype=F64)))


def test_weights_of_external_attention_sum_to_one_and_stay_finite() -> None:
    torch.manual_seed(0)
    _, weights = ExternalAttention(6, 4)(1e4 * numbers(2, 5, 6, dtype=torch.float32), return_weights=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 5))


def test_channels_read_channels() -> None:
    torch.manual_seed(0)
    layer = CrossCovarianceAttention(6, 2, dtype=F64)
    _, aux = layer(numbers(2, 50, 6), return_aux=AuxRequest(weights=True))
    assert aux.weights.shape == (2, 2, 3, 3)
    torch.testing.assert_close(aux.weights.sum(-1), torch.ones(2, 2, 3, dtype=F64))


def test_two_rounds_reach_every_pixel() -> None:
    torch.manual_seed(0)
    for rounds, reached in ((1, 5 + 4 - 1), (2, 20)):
        layer = CrissCrossAttention(4, rounds=rounds, dtype=F64)
        nn.init.ones_(layer.gamma)
        x = numbers(1, 4, 5, 4).requires_grad_()
        (grad,) = torch.autograd.grad(layer(x)[0, :, 2, 1].sum(), x)
        assert int(grad.abs().sum(1).count_nonzero()) == reached


def test_points_may_be_moved_and_permuted() -> None:
    torch.manual_seed(0)
    layer, x, places = PointTransformerAttention(6, 4, dtype=F64), numbers(2, 9, 6), numbers(2, 9, 3, seed=2)
    found, order = layer(x, places), torch.randperm(9)
    torch.testing.assert_close(layer(x, places + 5), found, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(layer(x[:, order], places[:, order]), found[:, order], rtol=1e-12, atol=1e-12)


def test_gradients_of_points() -> None:
    torch.manual_seed(0)
    layer = PointTransformerAttention(3, 3, dtype=F64)
    inputs = numbers(1, 5, 3).requires_grad_(), numbers(1, 5, 3, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, p: layer(x, p, torch.tensor([4])), inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_points_of_sixteen_bits_and_no_points(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, x, places = (
        PointTransformerAttention(4, 3, dtype=dtype),
        numbers(2, 6, 4).to(dtype),
        numbers(2, 6, 3).to(dtype),
    )
    found = layer(x, places)
    assert layer(x[:, :0], places[:, :0]).shape == (2, 0, 4) and layer(x[:0], places[:0]).shape == (0, 6, 4)
    right = layer.double()(x.double(), places.double())
    assert found.dtype == dtype and (found - right).abs().max() <= 20 * torch.finfo(dtype).eps * right.abs().max()


# Gradients, 16 bits, no rows, bad input -------------------------------------------------------------------------------

BUILT: dict[str, Callable[..., Any]] = {
    "agents": lambda **where: AgentAttention(4, 2, num_agents=3, conv_size=3, **where),
    "aft": lambda **where: AttentionFree(4, 8, rank=3, **where),
    "channels": lambda **where: CrossCovarianceAttention(4, 2, **where),
    "efficient": lambda **where: EfficientAttention(4, 2, **where),
    "external": lambda **where: ExternalAttention(4, 3, **where),
    "pooling": lambda **where: GatedAttentionPooling(4, 3, 2, **where),
    "graph": lambda **where: GraphAttention(4, 3, 2, **where),
}
IMAGES: dict[str, Callable[..., Any]] = {
    "criss-cross": lambda **where: CrissCrossAttention(4, **where),
    "coordinate": lambda **where: CoordinateAttention(4, **where),
    "context": lambda **where: GlobalContext(4, 2, **where),
}


@pytest.mark.parametrize("name", [*BUILT, *IMAGES])
def test_gradients(name: str) -> None:
    torch.manual_seed(0)
    layer = (BUILT | IMAGES)[name](dtype=F64).eval()
    for parameter in layer.parameters():
        if not parameter.any():
            nn.init.normal_(parameter)
    x = numbers(*((2, 5, 4) if name in BUILT else (1, 4, 2, 3))).requires_grad_()
    assert torch.autograd.gradcheck(layer, (x,))


@pytest.mark.parametrize("name", [*BUILT, *IMAGES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = (BUILT | IMAGES)[name](dtype=dtype).eval()
    x = numbers(*((2, 5, 4) if name in BUILT else (1, 4, 2, 3))).to(dtype)
    found = layer(x)
    right = layer.double()(x.double())
    assert found.dtype == dtype and (found - right).abs().max() <= 20 * torch.finfo(dtype).eps * right.abs().max()


@pytest.mark.parametrize("name", list(BUILT))
@pytest.mark.parametrize("sizes", [(0, 5), (2, 0)])
def test_no_sequences_and_no_rows(name: str, sizes: tuple[int, int]) -> None:
    found = BUILT[name]()(torch.randn(*sizes, 4))
    assert found.shape[0] == sizes[0] and found.isfinite().all()


def rows(*shape: int) -> Tensor:
    return torch.zeros(shape)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "version": (lambda: GraphAttention(4, 2, version=3), ValueError, "version must be one of 1, 2, got 3"),  # type: ignore[arg-type]
    "edges": (lambda: GraphAttention(4, 2)(rows(1, 3, 4), rows(2, 2).bool()), ValueError, "mask"),
    "neighbours": (
        lambda: GraphAttention(4, 2)(rows(1, 3, 4), torch.tensor([[0], [3], [-1]])),
        ValueError,
        "edges must hold nodes from 0 to 2, and -1 for none, got -1 to 3",
    ),
    "lists": (
        lambda: GraphAttention(4, 2)(rows(1, 3, 4), torch.zeros(2, 2, dtype=torch.long)),
        ValueError,
        r"edges must have shape \(3, K\) or \(1, 3, K\), got \(2, 2\)",
    ),
    "positions": (
        lambda: PointTransformerAttention(4)(rows(1, 3, 4), rows(1, 3, 2)),
        ValueError,
        r"positions must have shape \(1, 3, 3\), got \(1, 3, 2\)",
    ),
    "longer": (lambda: AttentionFree(4, 2)(rows(1, 3, 4)), ValueError, "x must have at most max_length 2 rows, got 3"),
    "max_length": (
        lambda: AttentionFree(4),
        ValueError,
        r"max_length must be given with position biases \(or pass rank=0\)",
    ),
    "window": (lambda: AttentionFree(4, rank=0, window=2), ValueError, "window must be None with rank=0, got 2"),
    "heads": (lambda: EfficientAttention(4, 3), ValueError, "num_heads must divide embed_dim 4, got 3"),
    "rows": (lambda: ExternalAttention(4)(rows(1, 3, 5)), ValueError, r"x must have shape \(B, N, 4\)"),
    "channels": (lambda: CoordinateAttention(4)(rows(1, 3, 2, 2)), ValueError, r"x must have shape \(B, 4, H, W\)"),
    "gated": (lambda: GatedAttentionPooling(4, 3, gated=1), TypeError, "gated must be a bool, got 1"),  # type: ignore[arg-type]
    "rounds": (lambda: CrissCrossAttention(4, rounds=0), ValueError, "rounds must be an int of at least 1, got 0"),
    "reduction": (lambda: GlobalContext(4, 0), ValueError, "reduction must be an int of at least 1, got 0"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_bad_input(case: str) -> None:
    call, kind, text = WRONG[case]
    with pytest.raises(kind, match=text):
        call()
