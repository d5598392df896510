"""Positions in the scores: T5's buckets, gradients through every engine, decoding, composition, memory, errors."""

# ruff: noqa: E501 (messages are read best whole)

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairwise import across
from tests.regard.nn.layer_samples.positions import bucket
from torch import Tensor, nn

import regard
from regard import AuxRequest, masks
from regard.nn.positions.relative import AlibiBias, RelativeBias, RelativePositions

F64 = torch.float64
B, H, L, D = 2, 3, 7, 8


def rows(*shape: int, dtype: torch.dtype = F64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


SIZES = [
    (32, 128, True),
    (32, 128, False),
    (64, 256, True),
    (8, 20, True),
    (6, 50, True),
    (7, 31, False),
    (2, 2, False),
]


@pytest.mark.parametrize(("count", "reach", "bidirectional"), SIZES)
def test_buckets_are_those_of_the_definition(count: int, reach: int, bidirectional: bool) -> None:
    layer = RelativeBias(1, count, reach, bidirectional)
    side = count // 2 if bidirectional else count
    distances = range(-2 * reach, 2 * reach + 1)
    right = [bucket(distance, side, reach, bidirectional) for distance in distances]
    assert [layer.bucket(distance) for distance in distances] == right
    assert layer.buckets.tolist() == right[reach : 3 * reach + 1]
    assert right[0] == (side - 1), "all far keys before the query share the side's last bucket"
    assert right[-1] == (count - 1 if bidirectional else 0)


@pytest.mark.parametrize(("count", "reach", "bidirectional"), SIZES[:3])
def test_buckets_are_those_of_t5s_single_precision(count: int, reach: int, bidirectional: bool) -> None:
    """T5 takes logarithms in float32; at its own sizes that moves no distance over an edge, so its weights mean the same."""
    side = count // 2 if bidirectional else count
    n, exact = torch.arange(side // 2, 2 * reach), side // 2
    far = torch.log(n.float() / exact) / math.log(reach / exact) * (side - exact)
    right = (exact + far.to(torch.int64)).clamp(max=side - 1)
    layer = RelativeBias(1, count, reach, bidirectional)
    assert [layer.bucket(-distance) for distance in n.tolist()] == right.tolist()


def test_t5_weights_load() -> None:
    embedding, layer = nn.Embedding(32, H), RelativeBias(H)
    layer.load_state_dict(embedding.state_dict())
    q_idx, kv_idx = torch.arange(200)[:, None], torch.arange(200)
    bias = layer().bias(torch.zeros(1, 1, 1, 1).long(), torch.arange(H)[:, None, None], q_idx, kv_idx)
    right = [[layer.bucket(j - i) for j in range(200)] for i in range(0, 200, 50)]
    assert bias is not None and torch.equal(bias[:, ::50], embedding.weight[torch.tensor(right)].permute(2, 0, 1))


def test_a_layer_made_without_data_is_whole_after_reset() -> None:
    layer = RelativeBias(H, device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    assert torch.equal(layer.buckets, RelativeBias(H).buckets)


def biased(layer: nn.Module, query: Tensor, offset: Any = None, align: str | None = None) -> masks.Mask:
    """Return the mask that a layer makes, whether or not it asks for queries."""
    given = (query,) if isinstance(layer, RelativePositions) else ()
    return layer(*given, offset, align=align)


def biases() -> list[nn.Module]:
    torch.manual_seed(0)
    made: list[nn.Module] = [
        RelativeBias(H, 8, 5),
        RelativeBias(H, 8, 5, bidirectional=False),
        AlibiBias(H, learn=True),
    ]
    return [layer.to(F64) for layer in (*made, RelativePositions(D, 2), RelativePositions(D, 2, value_dim=D))]


every_bias = pytest.mark.parametrize("which", range(5), ids=lambda i: repr(biases()[i]))


@across({"length": [L, 150], "engine": ["reference", "streaming", "auto"], "which": range(5)})
def test_outputs_and_gradients_are_those_of_the_bias_written_out(which: int, engine: str, length: int) -> None:
    """Of 150 rows the streaming engine makes several tiles where they are not all seen, and its own backward pass."""

    def run(dense: bool) -> list[Tensor]:
        layer = biases()[which]
        q, k, v = (rows(B, H, length, D, seed=i).requires_grad_() for i in range(3))
        mask = biased(layer, q)
        if dense:
            b, h = torch.arange(B).view(-1, 1, 1, 1), torch.arange(H).view(-1, 1, 1)
            i, j = torch.arange(length).view(-1, 1), torch.arange(length)
            bias = mask.bind(masks.Extent(B, H, length, length), "cpu").bias(b, h, i, j)
            assert bias is not None
            bias = bias.masked_fill(j > i, -math.inf)
            output = torch.softmax(q @ k.mT / math.sqrt(D) + bias, -1) @ v
        else:
            output = regard.attention(q, k, v, masks.causal() & mask, engine=engine)
        (output * rows(*output.shape, seed=9)).sum().backward()
        tensors = [q, k, v, *(p for name, p in layer.named_parameters() if name != "value_weight")]
        assert all(t.grad is not None for t in tensors)
        assert all(bool(t.grad.any()) for t in tensors)
        return [output, *(t.grad for t in tensors)]

    for found, right in zip(run(False), run(True)):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-11)


@every_bias
def test_decoding_with_an_offset_is_as_all_at_once(which: int) -> None:
    layer, (q, k, v) = biases()[which], (rows(B, H, L, D, seed=i) for i in range(3))
    whole = regard.attention(q, k, v, masks.causal() & biased(layer, q))
    for i in range(L):
        row, seen = q[:, :, i : i + 1], (k[:, :, : i + 1], v[:, :, : i + 1])
        for mask in (
            biased(layer, row, i),
            biased(layer, row, None, "lower_right"),
            biased(layer, row, torch.tensor([i, i])),
        ):
            torch.testing.assert_close(regard.attention(row, *seen, mask)[:, :, 0], whole[:, :, i])


@every_bias
def test_it_composes(which: int) -> None:
    layer, q = biases()[which], rows(B, H, L, D)
    lengths = torch.tensor([3, 0])
    mask = masks.causal() & masks.padding(lengths) & biased(layer, q)
    poisoned = q.clone()
    poisoned[0, :, 3:] = poisoned[1] = math.nan
    output, aux = regard.attention(q, poisoned, poisoned, mask, return_aux=AuxRequest(weights=True))
    assert aux.weights is not None
    assert (aux.weights[0, :, :, 3:] == 0).all() and (aux.weights[1] == 0).all() and (output[1] == 0).all()
    torch.testing.assert_close(
        output[0],
        regard.attention(q[:1], q[:1, :, :3], q[:1, :, :3], biased(layer, q[:1], 0) & masks.causal(offset=0))[0],
    )
    with pytest.raises(TypeError, match="adds a bias"):
        _ = masks.causal() | biased(layer, q)


@every_bias
def test_several_keys_heads_share(which: int) -> None:
    """Grouped-query attention has a bias for each query head."""
    layer, q, k = biases()[which], rows(B, H, L, D), rows(B, 1, L, D, seed=1)
    found = regard.attention(q, k, k, biased(layer, q), enable_gqa=True)
    torch.testing.assert_close(found, regard.attention(q, *[k.expand_as(q)] * 2, biased(layer, q)))


def test_shaw_by_the_paper() -> None:
    """Keys and values with the rows of their distances added, query by query."""
    layer = RelativePositions(D, 2, value_dim=5).to(F64)
    q, k, v = rows(B, H, L, D), rows(B, H, 9, D, seed=1), rows(B, H, 9, 5, seed=2)
    output, aux = regard.attention(q, k, v, layer(q, 1), return_aux=AuxRequest(weights=True))
    assert aux.weights is not None and layer.value_weight is not None
    found = output + layer.values(aux.weights, 1)
    for i in range(L):
        gaps = (torch.arange(9) - i - 1).clamp(-2, 2) + 2
        row = regard.attention(q[:, :, i : i + 1], k + layer.key_weight[gaps], v + layer.value_weight[gaps])
        torch.testing.assert_close(found[:, :, i], row[:, :, 0])


def test_shaws_values_reach_the_scores() -> None:
    """Gradients of the second read flow through the weights into queries and keys."""
    layer = RelativePositions(D, 2, value_dim=D).to(F64)
    q, k = rows(1, 1, 4, D).requires_grad_(), rows(1, 1, 4, D, seed=1).requires_grad_()

    def read(q: Tensor, k: Tensor, *tables: Tensor) -> Tensor:
        named = dict(zip(("key_weight", "value_weight"), tables))
        return torch.func.functional_call(_Whole(layer), {f"layer.{name}": t for name, t in named.items()}, (q, k))

    assert layer.value_weight is not None
    assert torch.autograd.gradcheck(read, (q, k, layer.key_weight, layer.value_weight))


class _Whole(nn.Module):
    def __init__(self, layer: RelativePositions) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        output, aux = regard.attention(q, k, k, self.layer(q), return_aux=AuxRequest(weights=True))
        assert aux.weights is not None
        return output + self.layer.values(aux.weights)


def test_shaws_scale_is_the_attentions() -> None:
    layer, q = RelativePositions(D, 2, scale=1.0).to(F64), rows(B, H, L, D)
    found = regard.attention(q, q, q, layer(q), scale=1.0)
    half = RelativePositions(D, 2).to(F64)
    half.load_state_dict(layer.state_dict())
    torch.testing.assert_close(found, regard.attention(q * math.sqrt(D), q, q, half(q * math.sqrt(D))))


@every_bias
def test_no_matrix_of_queries_and_keys_is_made(which: int) -> None:
    layer, q = biases()[which], rows(1, H, 64, D)
    assert max(t.numel() for t in biased(layer, q).tensors()) <= max(H * 64 * 5, 11 * H)
    assert not regard.explain(q, q, q, biased(layer, q)).cost.grows


def test_alibi_has_the_papers_slopes() -> None:
    assert AlibiBias(8).slopes.tolist() == [2.0**-i for i in range(1, 9)]
    assert not list(AlibiBias(8).parameters()) and "slopes" in AlibiBias(8).state_dict()
    layer = AlibiBias(2, learn=True)
    assert [name for name, _ in layer.named_parameters()] == ["slopes"]
    q = rows(1, 2, 3, 4)
    aux = regard.attention(q * 0, q, q, layer(), return_aux=AuxRequest(scores=True))[1]
    gaps = (torch.arange(3)[:, None] - torch.arange(3)).abs()
    assert aux.scores is not None
    torch.testing.assert_close(aux.scores[0], -torch.tensor([1 / 16, 1 / 256], dtype=F64)[:, None, None] * gaps)


@pytest.mark.campaign
@pytest.mark.slow
def test_shaws_bias_compiles_for_all_sizes() -> None:
    layer = RelativePositions(D, 2).to(F64)

    def written(q: Tensor, offset: Tensor) -> Tensor:
        b, h, i = (torch.arange(n) for n in q.shape[:3])
        mask = layer(q, offset).bind(masks.Extent(*q.shape[:3], 9), "cpu")
        return mask.matrix(b.view(-1, 1, 1, 1), h.view(-1, 1, 1), i.view(-1, 1), torch.arange(9), F64)

    torch._dynamo.reset()
    compiled = torch.compile(written, fullgraph=True, backend="aot_eager", dynamic=True)
    for sequences, length in ((2, 7), (3, 5)):
        q, offset = rows(sequences, H, length, D), torch.arange(sequences)
        torch.testing.assert_close(compiled(q, offset), written(q, offset))


def test_they_print() -> None:
    assert [repr(layer) for layer in biases()] == [
        "RelativeBias(3, num_buckets=8, max_distance=5)",
        "RelativeBias(3, num_buckets=8, max_distance=5, bidirectional=False)",
        "AlibiBias(3, learn=True)",
        "RelativePositions(8, max_distance=2)",
        "RelativePositions(8, max_distance=2, value_dim=8)",
    ]
    mask = biased(biases()[-1], rows(1, 2, 3, D), 4)
    assert repr(mask) == "relative_positions(tensor[1, 2, 3, 5], offset=4)"


X, Q = torch.zeros(2, 3, 8), torch.zeros(2, 3, 5, 8)
PLACE = "must be an int, or an integer tensor () or (B,), got"

# fmt: off
WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: RelativeBias(0), ValueError, "RelativeBias: num_heads must be an int of at least 1, got 0."),
    (lambda: RelativeBias(1, 2), ValueError, "RelativeBias: num_buckets must be an int of at least 4, got 2."),
    (lambda: RelativeBias(1, 7), ValueError, "RelativeBias: num_buckets must be even if bidirectional, got 7."),
    (lambda: RelativeBias(1, 32, 8), ValueError, "RelativeBias: max_distance must be an int of at least 9, got 8."),
    (lambda: RelativeBias(1, bidirectional=None), TypeError, "RelativeBias: bidirectional must be a bool, got None."),
    (lambda: RelativeBias(1).bucket(0.5), TypeError, "RelativeBias.bucket: distance must be an int, got 0.5."),
    (lambda: RelativeBias(1)(align="left"), ValueError, "masks.relative: align must be 'upper_left', 'lower_right' or None, got 'left'."),
    (lambda: regard.attention(Q, Q, Q, RelativeBias(4)()), ValueError, "masks.relative: table must have one row per query head (3), got (4, 257)."),
    (lambda: RelativePositions(8, 0), ValueError, "RelativePositions: max_distance must be an int of at least 1, got 0."),
    (lambda: RelativePositions(8, 2, scale="1"), TypeError, "RelativePositions: scale must be a finite number or None, got '1'."),
    (lambda: RelativePositions(4, 2)(Q), ValueError, "RelativePositions: query must have shape (B, H, L, 4), got (2, 3, 5, 8)."),
    (lambda: RelativePositions(8, 2)(Q.int()), TypeError, "RelativePositions: query must be a float tensor (B, H, L, 8), got an int32 tensor of shape (2, 3, 5, 8)."),
    (lambda: RelativePositions(8, 2).values(Q), ValueError, "RelativePositions: value_dim must be given for values, got None."),
    (lambda: RelativePositions(8, 2, value_dim=4).values(X), ValueError, "RelativePositions: weights must have shape (B, H, L, S), got (2, 3, 8)."),
    (lambda: regard.attention(Q, Q, Q, RelativePositions(8, 2)(Q[:, :, 1:])), ValueError, "RelativePositions: query must be the query of the attention call, with B, H, L = (2, 3, 5), got (2, 3, 4)."),
    (lambda: AlibiBias(2, learn=1), TypeError, "AlibiBias: learn must be a bool, got 1."),
    (lambda: regard.attention(Q, Q, Q, AlibiBias(2)()), ValueError, "masks.alibi: slopes must have one entry per query head (3), got 2."),
]
# fmt: on


@pytest.mark.parametrize(("wrong", "kind", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_wrong_arguments(wrong: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as raised:
        wrong()
    assert str(raised.value) == message


def test_an_unstated_alignment_is_an_error() -> None:
    for layer in biases():
        with pytest.raises(ValueError, match="align must be given"):
            regard.attention(Q.double(), *[Q[:, :, :4].double()] * 2, biased(layer, Q.double()))
