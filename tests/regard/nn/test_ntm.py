"""Content addressing and the Neural Turing Machine: how heads find their place, what they leave alone, and copying."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bits_loss

from regard.nn.memory.addressing import ContentAddressing, content_weights
from regard.nn.memory.ntm import (
    NeuralTuringMachine,
    NTMReadHead,
    NTMWriteHead,
    circular_shift,
    sharpened,
    written,
)

F64 = torch.float64
NAN = float("nan")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def machine(**options: Any) -> NeuralTuringMachine:
    torch.manual_seed(0)
    return NeuralTuringMachine(3, 2, 8, 6, 4, dtype=F64, **options)


def head(kind: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(5, 4, dtype=F64, **options)


def tell(layer: Any, **told: float) -> Any:
    """Make the heads of a layer emit these numbers, whatever the control vector."""
    places = {"strength": 0, "gate": 1, "shift": 2, "power": 3 + 2 * layer.shift}
    bias = torch.zeros(layer.heads, sum(layer.parts), dtype=F64)
    bias[:, : layer.width] = 1.0
    for name, number in told.items():
        if name == "by":  # all of the shift by this distance
            bias[:, layer.width + places["shift"] + layer.shift + int(number)] = 1e4
        else:
            bias[:, layer.width + places[name]] = number
    nn.init.zeros_(layer.emit.weight)
    layer.emit.bias.data = bias.flatten()
    return layer


# Addressing by content


def test_content_weights_are_the_softmax_of_cosines() -> None:
    key, memory, strength = normal(2, 3, 4), normal(2, 5, 4, seed=1), normal(2, 3, seed=2).exp()
    k, m, s = key.numpy(), memory.numpy(), strength.numpy()
    lengths = np.linalg.norm(k, axis=-1)[..., None] * np.linalg.norm(m, axis=-1)[:, None]
    powers = np.exp(s[..., None] * np.einsum("bhe,bne->bhn", k, m) / lengths)
    right = powers / powers.sum(-1, keepdims=True)
    np.testing.assert_allclose(content_weights(key, memory, strength), right, rtol=1e-12)


def test_a_row_of_zeros_has_cosine_0_and_gradient_0() -> None:
    memory = torch.tensor([[[2.0, 0.0], [0.0, 0.0], [0.0, 5.0]]], dtype=F64, requires_grad=True)
    weights = content_weights(torch.tensor([[[3.0, 0.0]]], dtype=F64), memory, torch.tensor([[2.0]], dtype=F64))
    torch.testing.assert_close(weights, torch.softmax(torch.tensor([[[2.0, 0.0, 0.0]]], dtype=F64), -1))
    weights[..., 2].sum().backward()
    assert memory.grad is not None and memory.grad.isfinite().all()
    assert (memory.grad[0, 1] == 0).all() and (memory.grad[0, 2] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_rows_too_small_to_have_a_direction_count_as_zero_and_give_finite_gradients(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    memory = torch.tensor([[[tiny / 8, 0.0], [tiny * 8, 0.0], [1.0, 1.0]]], dtype=dtype, requires_grad=True)
    weights = content_weights(torch.ones(1, 1, 2, dtype=dtype), memory, torch.ones(1, 1, dtype=dtype))
    torch.testing.assert_close(weights, torch.softmax(torch.tensor([[[0.0, 0.0, 1.0]]], dtype=dtype), -1))
    weights[..., 0].sum().backward()
    assert memory.grad is not None and memory.grad.isfinite().all()


def test_a_memory_of_zeros_is_read_evenly() -> None:
    reads, weights = head(ContentAddressing, heads=2)(normal(3, 5), torch.zeros(3, 4, 4, dtype=F64))
    assert torch.equal(reads, torch.zeros_like(reads))
    torch.testing.assert_close(weights, torch.full((3, 2, 4), 0.25, dtype=F64))


def test_content_addressing_sees_only_the_rows_there_are() -> None:
    layer, control, memory = head(ContentAddressing), normal(2, 5), normal(2, 4, 4, seed=1)
    memory[0, 2:] = NAN
    memory.requires_grad_()
    reads, weights = layer(control, memory, torch.tensor([2, 0]))
    right, _ = layer(control[:1], memory[:1, :2])
    torch.testing.assert_close(reads[:1], right)
    assert (weights[0, :, 2:] == 0).all() and (weights[1] == 0).all() and (reads[1] == 0).all()
    (gradient,) = torch.autograd.grad(reads.sum(), memory)
    assert gradient.isfinite().all() and (gradient[0, 2:] == 0).all() and (gradient[1] == 0).all()


def test_content_addressing_is_its_functional_twin() -> None:
    layer, control, memory = head(ContentAddressing, heads=2), normal(2, 5), normal(2, 4, 4, seed=1)
    key, strength = layer.emit(control).unflatten(-1, (2, 5)).split([4, 1], -1)
    weights = content_weights(key, memory, 1 + nn.functional.softplus(strength).squeeze(-1))
    reads, found = layer(control, memory)
    torch.testing.assert_close(found, weights)
    torch.testing.assert_close(reads, weights @ memory)


# Shift and sharpening


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(rows=st.integers(1, 9), reach=st.integers(0, 3), seed=st.integers(0, 99))
def test_a_shift_is_a_circular_convolution(rows: int, reach: int, seed: int) -> None:
    weights, shift = normal(2, rows, seed=seed).softmax(-1), normal(2, 2 * reach + 1, seed=seed + 1).softmax(-1)
    right = np.zeros((2, rows))
    for b in range(2):
        for j in range(rows):
            for d in range(-reach, reach + 1):
                right[b, (j + d) % rows] += float(weights[b, j] * shift[b, d + reach])
    found = circular_shift(weights, shift)
    np.testing.assert_allclose(found, right, rtol=1e-12)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, dtype=F64))


def test_a_whole_shift_moves_around_the_end() -> None:
    weights = torch.eye(4)
    forward, back = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([1.0, 0.0, 0.0])
    assert torch.equal(circular_shift(weights, forward.expand(4, 3)), weights.roll(1, -1))
    assert torch.equal(circular_shift(weights, back.expand(4, 3)), weights.roll(-1, -1))


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(rows=st.integers(1, 9), power=st.floats(1, 60), seed=st.integers(0, 99))
def test_sharpening_is_a_power_that_sums_to_1(rows: int, power: float, seed: int) -> None:
    weights = (normal(rows, seed=seed) * 3).softmax(-1)
    right = weights.numpy() ** power / (weights.numpy() ** power).sum()
    np.testing.assert_allclose(sharpened(weights, torch.tensor(power, dtype=F64)), right, rtol=1e-9, atol=1e-300)


def test_sharpening_of_zeros_is_zero_and_of_large_powers_finite() -> None:
    weights = torch.zeros(2, 4, requires_grad=True)
    power = torch.tensor([1.0, 3.0], requires_grad=True)
    found = sharpened(weights, power)
    assert torch.equal(found, torch.zeros(2, 4))
    found.sum().backward()
    assert weights.grad is not None and weights.grad.isfinite().all()
    assert power.grad is not None and (power.grad == 0).all()
    even = torch.full((128,), 1 / 128, requires_grad=True)  # (1/128)^200 is 0 in float32
    found = sharpened(even, torch.tensor(200.0))
    torch.testing.assert_close(found, even)
    (gradient,) = torch.autograd.grad(found[0], even)
    assert gradient.isfinite().all() and gradient[0] > 0


@pytest.mark.slow
def test_gradients_of_addressing_are_right() -> None:
    layer = head(NTMReadHead, heads=2)
    ends = tuple(each.requires_grad_() for each in (normal(2, 5), normal(2, 6, 4), normal(2, 2, 6).softmax(-1)))
    assert torch.autograd.gradcheck(layer, ends)
    assert torch.autograd.gradgradcheck(lambda *each: layer(*each)[0], ends)


# Heads


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(scale=st.floats(0, 50), rows=st.integers(1, 8), seed=st.integers(0, 99))
def test_weights_stay_in_the_simplex(scale: float, rows: int, seed: int) -> None:
    layer = NTMReadHead(5, 4, heads=3)
    weights = None
    for step in range(4):
        control, memory = normal(2, 5, seed=seed + step).float() * scale, normal(2, rows, 4, seed=seed).float()
        _, weights = layer(control, memory, weights)
        assert (weights >= 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3))


def test_a_closed_gate_moves_the_old_weights_by_the_shift() -> None:
    memory, before = normal(1, 6, 4), torch.eye(6, dtype=F64)[5].view(1, 1, 6)
    layer = tell(head(NTMReadHead, shift=2), gate=-1e4, by=2, power=50.0)
    reads, weights = layer(normal(1, 5), memory, before)
    torch.testing.assert_close(weights[0, 0], torch.eye(6, dtype=F64)[1])
    torch.testing.assert_close(reads[0, 0], memory[0, 1])


def test_an_open_gate_finds_content_wherever_it_was_before() -> None:
    memory = torch.eye(4, dtype=F64).repeat(2, 1).unsqueeze(0)[:, :6].clone()
    memory[0, 3] = 1.0  # the row that is parallel to the key (1, 1, 1, 1)
    layer = tell(head(NTMReadHead), gate=1e4, by=0, strength=100.0)
    _, weights = layer(normal(1, 5), memory, torch.eye(6, dtype=F64)[0].view(1, 1, 6))
    torch.testing.assert_close(weights[0, 0], torch.eye(6, dtype=F64)[3])


def test_heads_without_a_past_start_on_row_0() -> None:
    layer = tell(head(NTMReadHead, heads=2), gate=-1e4, by=0)
    _, weights = layer(normal(3, 5), normal(3, 6, 4))
    torch.testing.assert_close(weights, torch.eye(6, dtype=F64)[0].expand(3, 2, 6))


def test_writing_erases_then_adds_and_makes_a_new_tensor() -> None:
    memory, weights = normal(1, 3, 2), torch.tensor([[[1.0, 0.0, 0.5], [1.0, 0.0, 0.0]]], dtype=F64)
    erase = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]], dtype=F64)
    add = torch.tensor([[[10.0, 20.0], [1.0, 2.0]]], dtype=F64)
    kept = memory.clone()
    new = written(memory, weights, erase, add)
    m = memory[0]
    rows = [[11.0, m[0, 1] * 0.5 + 22], [m[1, 0], m[1, 1]], [m[2, 0] * 0.5 + 5, m[2, 1] + 10]]
    torch.testing.assert_close(new[0], torch.tensor(rows, dtype=F64))
    torch.testing.assert_close(new, written(memory, weights.flip(1), erase.flip(1), add.flip(1)))
    assert torch.equal(memory, kept)


# The machine


def test_weights_load_into_a_machine_with_more_rows() -> None:
    small, large = machine(), NeuralTuringMachine(3, 2, 8, 20, 4, dtype=F64)
    large.load_state_dict(small.state_dict())
    assert large(normal(2, 3, 3))[1].memory.shape == (2, 20, 4)


# Errors


NTM = NeuralTuringMachine
WRONG = [
    (ValueError, lambda: NTM(3, 2, 0), "NeuralTuringMachine: hidden_size must be an int of at least 1, got 0"),
    (TypeError, lambda: NTM(3, 2.0), "output_size must be an int of at least 1, got 2.0"),
    (ValueError, lambda: NTM(3, 2, write_heads=0), "NeuralTuringMachine: write_heads must be an int"),
    (ValueError, lambda: NTM(3, 2, shift=-1), "NeuralTuringMachine: shift must be an int of at least 0, got -1"),
    (ValueError, lambda: NTM(3, 2, controller="lstn"), r"controller must be one of .* \(did you mean 'lstm'\?\)"),
    (ValueError, lambda: machine()(normal(2, 3)), r"NeuralTuringMachine: inputs must have shape \(B, T, 3\), got"),
    (ValueError, lambda: machine()(normal(2, 3, 4)), r"inputs must have shape \(B, T, 3\), got \(2, 3, 4\)"),
    (TypeError, lambda: machine()([1.0]), r"inputs must be a float tensor \(B, T, 3\), got an object of type list"),
    (
        TypeError,
        lambda: machine()(normal(2, 3, 3), normal(2, 3)),
        "state must be of type NTMState, got a float64",
    ),
    (
        ValueError,
        lambda: machine()(normal(2, 3, 3), machine().initial_state(3)),
        r"state.memory must have shape \(2, 6, 4\), got \(3, 6, 4\)",
    ),
    (
        ValueError,
        lambda: machine()(normal(2, 3, 3), None, torch.tensor([3])),
        r"valid_lens must have shape \(2,\), got \(1,\)",
    ),
    (
        TypeError,
        lambda: machine()(normal(2, 3, 3), None, torch.ones(2)),
        r"valid_lens must be an integer tensor \(2,\), got a float32 tensor",
    ),
    (
        ValueError,
        lambda: head(NTMReadHead)(normal(2, 4), normal(2, 6, 4)),
        r"NTMReadHead: control must have shape \(2, 5\), got \(2, 4\)",
    ),
    (
        ValueError,
        lambda: head(NTMWriteHead)(normal(2, 5), normal(2, 6, 3)),
        r"NTMWriteHead: memory must have shape \(B, N, 4\), got \(2, 6, 3\)",
    ),
    (
        ValueError,
        lambda: head(NTMReadHead)(normal(2, 5), normal(2, 6, 4), normal(2, 6)),
        r"weights must have shape \(2, 1, 6\), got \(2, 6\)",
    ),
    (
        TypeError,
        lambda: head(ContentAddressing)(normal(2, 5), normal(2, 6, 4), torch.tensor([True, False])),
        "ContentAddressing: valid_lens must be an integer tensor",
    ),
    (
        ValueError,
        lambda: content_weights(normal(2, 1, 3), normal(2, 6, 4), normal(2, 1)),
        r"content_weights: key must have shape \(2, H, 4\), got \(2, 1, 3\)",
    ),
]


@pytest.mark.parametrize(("kind", "make", "message"), WRONG)
def test_errors_say_which_argument_and_why(kind: type[Exception], make: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


# It learns


def copying(length: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs (B, 2n + 1, 4), bits then an end sign then silence, and the bits (B, n, 3) to be repeated then."""
    bits = torch.randint(0, 2, (batch, length, 3), generator=generator).float()
    inputs = torch.zeros(batch, 2 * length + 1, 4)
    inputs[:, :length, :3] = bits
    inputs[:, length, 3] = 1
    return inputs, bits


def wrong_bits(layer: nn.Module, length: int, *, forget: bool = False) -> float:
    """Return which share of fresh sequences' bits comes back wrong; ``forget`` starts every step anew."""
    inputs, bits = copying(length, 500, torch.Generator().manual_seed(1234))
    with torch.no_grad():
        outputs = layer(inputs.reshape(-1, 1, 4))[0].view(500, -1, 3) if forget else layer(inputs)[0]
    return ((outputs[:, -length:] > 0) != (bits > 0)).float().mean().item()


@pytest.mark.campaign
def test_it_learns_to_copy() -> None:
    torch.manual_seed(0)
    # A feedforward controller keeps nothing from one step to the next: what comes back has been in the memory.
    layer = NeuralTuringMachine(4, 3, 32, memory_rows=8, memory_width=12, controller="feedforward")
    assert wrong_bits(layer, 4) > 0.4
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(layer.parameters(), 0.01)
    for step in range(350):
        length = step % 4 + 1
        inputs, bits = copying(length, 64, generator)
        loss = bits_loss(layer(inputs)[0][:, -length:], bits)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(layer.parameters(), 5.0)
        optimizer.step()
    for length in (1, 2, 3, 4):
        assert wrong_bits(layer, length) < 0.01
    assert wrong_bits(layer, 4, forget=True) > 0.4
