"""Positions in the rows: decoding agrees with the whole, rotary scores are relative, precision, dropout, errors."""

# ruff: noqa: E501 (messages are read best whole)

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from regard.nn.positions.encodings import LearnedPositions, SinusoidalPositions
from regard.nn.positions.rotary import Rotary

F64 = torch.float64
B, H, L, D = 2, 3, 7, 8


def rows(*shape: int, dtype: torch.dtype = F64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


ADDED: list[nn.Module] = [SinusoidalPositions(D), SinusoidalPositions(D - 1), LearnedPositions(40, D, dtype=F64)]
TURNED: list[nn.Module] = [Rotary(D), Rotary(D, interleaved=True), Rotary(D, fraction=0.5), Rotary(D, 50.0)]


def call(layer: nn.Module) -> Tensor:
    """Return rows of the layer's width, the length last but one."""
    return rows(B, H, L, D) if isinstance(layer, Rotary) else rows(B, L, layer.embed_dim)


@pytest.mark.parametrize("layer", ADDED + TURNED, ids=repr)
def test_one_row_at_a_time_is_as_all_at_once(layer: nn.Module) -> None:
    x = call(layer)
    whole = layer(x, 5)
    steps = [layer(x.narrow(-2, i, 1), 5 + i) for i in range(L)]
    assert torch.equal(torch.cat(steps, -2), whole)


@pytest.mark.parametrize("layer", ADDED + TURNED, ids=repr)
def test_an_offset_may_be_a_tensor_for_all_or_for_each(layer: nn.Module) -> None:
    x = call(layer)
    assert torch.equal(layer(x, torch.tensor(3)), layer(x, 3))
    each = layer(x, torch.tensor([9, 0], dtype=torch.int32))
    assert torch.equal(each, torch.cat((layer(x[:1], 9), layer(x[1:]))))


@pytest.mark.parametrize("layer", ADDED + TURNED, ids=repr)
def test_no_rows_and_no_sequences(layer: nn.Module) -> None:
    x = call(layer)
    assert layer(x[..., :0, :]).shape == x[..., :0, :].shape
    assert layer(x[:0]).shape == x[:0].shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layer", [*ADDED[:2], *TURNED], ids=repr)
def test_far_positions_keep_their_precision(layer: nn.Module, dtype: torch.dtype) -> None:
    x = call(layer).to(dtype)
    found, right = layer(x, 1_000_000), layer(x.double(), 1_000_000)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), right, rtol=torch.finfo(dtype).eps, atol=4e-7)


def test_sinusoids_by_hand() -> None:
    table = SinusoidalPositions(5, base=16.0).encoding(3, dtype=F64)
    for p in range(3):
        right = [wave(p / 16 ** (2 * i / 5)) for i in range(3) for wave in (math.sin, math.cos)][:5]
        torch.testing.assert_close(table[p], torch.tensor(right, dtype=F64))


def test_the_encoding_is_what_is_added() -> None:
    layer = SinusoidalPositions(D)
    assert layer.encoding(4).shape == (4, D) and layer.encoding(4).dtype == torch.get_default_dtype()
    offset = torch.tensor([2, 30])
    assert torch.equal(layer(torch.zeros(B, 4, D, dtype=F64), offset), layer.encoding(4, offset, dtype=F64))
    assert layer.encoding(4, 6, device="meta").is_meta


def test_a_shift_of_sinusoids_is_a_turn() -> None:
    """What the paper chose them for: the encoding of p + n is linear in that of p."""
    layer = SinusoidalPositions(D)
    near, far = layer.encoding(L, dtype=F64), layer.encoding(L, 11, dtype=F64)
    rotary = Rotary(D, interleaved=True)
    swapped = near.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)  # (cos, sin): a point at the angle
    right = far.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    turned = torch.cat([rotary(swapped[None, None, i : i + 1], 11) for i in range(L)], 2)[0, 0]
    torch.testing.assert_close(turned, right)


@pytest.mark.parametrize("layer", ADDED, ids=repr)
def test_dropout_obeys_training(layer: nn.Module) -> None:
    layer = type(layer)(*([40] if isinstance(layer, LearnedPositions) else []), layer.embed_dim, 0.5)
    x = torch.ones(B, L, layer.embed_dim)
    assert torch.equal(layer.eval()(x), layer(x))
    torch.manual_seed(0)
    dropped = layer.train()(x)
    assert (dropped == 0).any()
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * layer.eval()(x)[kept])


def test_learned_rows_get_the_gradients_of_their_positions() -> None:
    layer = LearnedPositions(10, 4, dtype=F64)
    layer(rows(B, 3, 4), 6).sum().backward()
    assert layer.weight.grad is not None
    counts = torch.tensor([0, 0, 0, 0, 0, 0, 2, 2, 2, 0], dtype=F64)
    assert torch.equal(layer.weight.grad, counts[:, None].expand(10, 4))


def test_learned_rows_load_from_an_embedding() -> None:
    embedding, layer = nn.Embedding(10, 4), LearnedPositions(10, 4)
    layer.load_state_dict(embedding.state_dict())
    assert torch.equal(layer(torch.zeros(1, 10, 4))[0], embedding.weight)


@pytest.mark.parametrize("layer", TURNED, ids=repr)
def test_rotary_scores_depend_on_the_distance_alone(layer: Rotary) -> None:
    q, k = rows(1, 1, 1, D), rows(1, 1, 1, D, seed=1)
    near = (layer(q, 2) * layer(k, 9)).sum()
    far = (layer(q, 1002) * layer(k, 1009)).sum()
    torch.testing.assert_close(near, far, rtol=1e-9, atol=1e-9)
    assert not torch.isclose(near, (layer(q, 2) * layer(k, 10)).sum(), rtol=1e-4)
    assert torch.equal(layer(q), q)
    torch.testing.assert_close(layer(q, -7).norm(), q.norm())


def test_rotary_by_a_matrix() -> None:
    x, p = rows(1, 1, 1, 6), 5
    for interleaved in (False, True):
        matrix = torch.eye(8, dtype=F64)[:6, :6]
        for i in range(3):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 3)
            angle = p * 10000 ** (-2 * i / 6)
            matrix[a, a] = matrix[b, b] = math.cos(angle)
            matrix[b, a], matrix[a, b] = math.sin(angle), -math.sin(angle)
        found = Rotary(6, interleaved=interleaved)(x, p)
        torch.testing.assert_close(found.squeeze(), matrix @ x.squeeze())


def test_the_two_conventions_are_one_with_columns_permuted() -> None:
    x, order = rows(B, H, L, D), torch.arange(D).view(2, -1).T.flatten()  # 0, D/2, 1, D/2 + 1, ...
    apart, pairs = Rotary(D)(x, 3), Rotary(D, interleaved=True)(x[..., order], 3)
    assert torch.equal(apart[..., order], pairs)


def test_a_fraction_leaves_the_rest_alone() -> None:
    x = rows(B, H, L, D)
    found = Rotary(D, fraction=0.5)(x, 3)
    assert torch.equal(found[..., 4:], x[..., 4:])
    assert torch.equal(found[..., :4], Rotary(4)(x[..., :4], 3))
    assert [Rotary(80, fraction=0.4).turned, Rotary(100, fraction=0.58).turned] == [32, 58]


def test_rotary_does_not_mix_rows() -> None:
    x = rows(B, H, L, D)
    broken = x.clone()
    broken[:, :, 4] = math.nan
    found = Rotary(D)(broken)
    assert torch.equal(found[:, :, :4], Rotary(D)(x)[:, :, :4]) and found[:, :, 4].isnan().all()


@pytest.mark.campaign
@pytest.mark.slow
def test_rotary_compiles_once_for_all_sizes() -> None:
    layer = Rotary(D)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for sequences, length in ((2, 7), (3, 5), (4, 9)):
        x, offset = rows(sequences, H, length, D), torch.arange(sequences)
        assert torch.equal(compiled(x, offset), layer(x, offset))


def test_they_print() -> None:
    assert [repr(layer) for layer in ADDED + TURNED] == [
        "SinusoidalPositions(8)",
        "SinusoidalPositions(7)",
        "LearnedPositions(40, 8)",
        "Rotary(8)",
        "Rotary(8, interleaved=True)",
        "Rotary(8, fraction=0.5)",
        "Rotary(8, base=50)",
    ]


X, Q = torch.zeros(2, 3, 8), torch.zeros(2, 3, 5, 8)
PLACE = "must be an int, or an integer tensor () or (B,), got"

# fmt: off
WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: SinusoidalPositions(0), ValueError, "SinusoidalPositions: embed_dim must be an int of at least 1, got 0."),
    (lambda: SinusoidalPositions(8, 1.5), ValueError, "SinusoidalPositions: dropout must be a probability in [0, 1], got 1.5."),
    (lambda: SinusoidalPositions(8, base=0), ValueError, "SinusoidalPositions: base must be a positive finite number, got 0."),
    (lambda: Rotary(8, math.inf), ValueError, "Rotary: base must be a positive finite number, got inf."),
    (lambda: Rotary(8, "1"), TypeError, "Rotary: base must be a positive finite number, got '1'."),
    (lambda: SinusoidalPositions(8)(X.int()), TypeError, "SinusoidalPositions: x must be a float tensor (B, N, 8), got an int32 tensor of shape (2, 3, 8)."),
    (lambda: SinusoidalPositions(4)(X), ValueError, "SinusoidalPositions: x must have shape (B, N, 4), got (2, 3, 8)."),
    (lambda: SinusoidalPositions(8)(X, 1.0), TypeError, "SinusoidalPositions: offset must be an int, got 1.0."),
    (lambda: SinusoidalPositions(8)(X, torch.ones(2)), TypeError, f"SinusoidalPositions: offset {PLACE} a float32 tensor of shape (2,)."),
    (lambda: SinusoidalPositions(8).encoding(-1), ValueError, "SinusoidalPositions: length must be an int of at least 0, got -1."),
    (lambda: LearnedPositions(9, 8)(X, torch.tensor([0, 0, 0])), ValueError, "LearnedPositions: offset must have one entry per sequence (2), got (3,)."),
    (lambda: LearnedPositions(9, 8)(X, 7), ValueError, "LearnedPositions: offset must keep positions in [0, 9), got 7 (3 rows)."),
    (lambda: LearnedPositions(9, 8)(X, -1), ValueError, "LearnedPositions: offset must keep positions in [0, 9), got -1 (3 rows)."),
    (lambda: LearnedPositions(9, 8)(X, torch.tensor([0, 8])), ValueError, "LearnedPositions: offset must keep positions in [0, 9), got 8 (3 rows)."),
    (lambda: Rotary(7), ValueError, "Rotary: head_dim must be even and at least 2, got 7."),
    (lambda: Rotary(8, fraction=0.4), ValueError, "Rotary: head_dim · fraction must be even and at least 2, got 3."),
    (lambda: Rotary(8, fraction=1.5), ValueError, "Rotary: fraction must be a number in (0, 1], got 1.5."),
    (lambda: Rotary(8, interleaved=1), TypeError, "Rotary: interleaved must be a bool, got 1."),
    (lambda: Rotary(8)(X), ValueError, "Rotary: x must have shape (B, H, L, 8), got (2, 3, 8)."),
    (lambda: Rotary(8)(None), TypeError, "Rotary: x must be a float tensor (B, H, L, 8), got None."),
]
# fmt: on


@pytest.mark.parametrize(("wrong", "kind", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_wrong_arguments(wrong: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as raised:
        wrong()
    assert str(raised.value) == message
