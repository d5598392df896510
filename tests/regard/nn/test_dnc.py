"""The Differentiable Neural Computer: allocation, links, what its heads leave alone, and recalling associations."""

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

from regard.nn.memory.dnc import DifferentiableNeuralComputer, DNCReadHead, DNCWriteHead, allocation, linked

F64 = torch.float64
NAN = float("nan")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def machine(**options: Any) -> DifferentiableNeuralComputer:
    torch.manual_seed(0)
    return DifferentiableNeuralComputer(3, 2, 8, 6, 4, 2, dtype=F64, **options)


def tell(layer: Any, **told: Any) -> Any:
    """Make a head emit these numbers, whatever the control vector; the key is (1, 1, ...)."""
    E = layer.width
    writes = {"strength": E, "erase": E + 1, "vector": 2 * E + 1, "free": 3 * E + 1, "allocate": -2, "write": -1}
    places = (
        writes if isinstance(layer, DNCWriteHead) else {"strength": E, "back": E + 1, "content": E + 2, "on": E + 3}
    )
    heads = getattr(layer, "heads", 1)
    bias = torch.zeros(heads, sum(layer.parts), dtype=F64)
    bias[:, :E] = 1.0
    for name, numbers in told.items():
        for i, number in enumerate(numbers if isinstance(numbers, list) else [numbers]):
            bias[:, places[name] + i] = number
    nn.init.zeros_(layer.emit.weight)
    layer.emit.bias.data = bias.flatten()
    return layer


def head(kind: Any, *sizes: int) -> Any:
    torch.manual_seed(0)
    return kind(5, 4, *sizes, dtype=F64)


def one(row: int, rows: int = 6) -> Tensor:
    return torch.eye(rows, dtype=F64)[row]


# Allocation


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(rows=st.integers(1, 9), seed=st.integers(0, 99), zeros=st.integers(0, 3))
def test_allocation_is_the_formula(rows: int, seed: int, zeros: int) -> None:
    usage = normal(2, rows, seed=seed).sigmoid()
    usage[:, :zeros] = 0
    found = allocation(usage)
    for u, a in zip(usage.numpy(), found.numpy()):
        order = np.argsort(u, kind="stable")
        for j, row in enumerate(order):
            np.testing.assert_allclose(a[row], (1 - u[row]) * np.prod(u[order[:j]]), rtol=1e-12)
    assert (found >= 0).all()
    torch.testing.assert_close(found.sum(-1), 1 - usage.prod(-1))


def test_allocation_of_a_full_memory_is_nothing_and_of_a_fresh_one_its_first_row() -> None:
    assert torch.equal(allocation(torch.ones(5)), torch.zeros(5))
    assert torch.equal(allocation(torch.zeros(5)), torch.eye(5)[0])
    assert allocation(torch.zeros(2, 0)).shape == (2, 0)


def test_the_gradient_of_allocation_is_right_where_rows_are_free() -> None:
    usage = torch.tensor([0.7, 0.0, 0.3, 0.9], dtype=F64)
    (found,) = torch.autograd.functional.jacobian(allocation, (usage,))
    right = torch.zeros(4, 4, dtype=F64)
    for column in range(4):  # one-sided: usage is not below 0; the order does not change
        moved = usage.clone()
        moved[column] += 1e-7
        right[:, column] = (allocation(moved) - allocation(usage)) / 1e-7
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


# Links


def test_links_are_the_formula_and_tell_the_order_of_writing() -> None:
    links, precedence = torch.zeros(1, 4, 4, dtype=F64), torch.zeros(1, 4, dtype=F64)
    for row in (2, 0, 3):
        links, precedence = linked(links, precedence, one(row, 4).unsqueeze(0))
    right = torch.zeros(4, 4, dtype=F64)
    right[0, 2] = right[3, 0] = 1
    assert torch.equal(links[0], right) and torch.equal(precedence[0], one(3, 4))
    links, precedence = linked(links, precedence, one(0, 4).unsqueeze(0))  # written again: now after row 3
    right = torch.zeros(4, 4, dtype=F64)
    right[0, 3] = 1
    assert torch.equal(links[0], right) and torch.equal(precedence[0], one(0, 4))


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(rows=st.integers(1, 6), steps=st.integers(1, 6), seed=st.integers(0, 99), share=st.floats(0, 1))
def test_links_and_precedence_stay_below_1(rows: int, steps: int, seed: int, share: float) -> None:
    links, precedence = torch.zeros(2, rows, rows), torch.zeros(2, rows)
    for step in range(steps):
        weights = (normal(2, rows, seed=seed + step) * 5).softmax(-1).float() * share
        links, precedence = linked(links, precedence, weights)
    assert (links >= 0).all() and (links.diagonal(dim1=1, dim2=2) == 0).all() and (precedence >= 0).all()
    assert (
        (links.sum(1) <= 1 + 1e-5).all() and (links.sum(2) <= 1 + 1e-5).all() and (precedence.sum(1) <= 1 + 1e-5).all()
    )


# Heads


def test_the_write_head_takes_free_rows_and_frees_what_was_read() -> None:
    layer = tell(head(DNCWriteHead, 1), free=1e4, allocate=1e4, write=1e4, erase=[1e4] * 4, vector=[1.0, 2.0, 3.0, 4.0])
    memory, control = normal(1, 6, 4), normal(1, 5)
    usage = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0, 1.0]], dtype=F64)
    new, _, weights = layer(control, memory, usage)
    torch.testing.assert_close(weights[0], one(4))
    torch.testing.assert_close(new[0, 4], torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64))
    torch.testing.assert_close(new[0, :4], memory[0, :4])
    # What it wrote is in use from then on; a row that was read is free, if its gate is open.
    _, usage, weights = layer(control, new, usage, weights, one(1).view(1, 1, 6))
    torch.testing.assert_close(usage[0], torch.ones(6, dtype=F64) - one(1))
    torch.testing.assert_close(weights[0], one(1))


def test_the_write_head_finds_content_and_a_closed_gate_writes_nothing() -> None:
    memory, control = normal(1, 6, 4), normal(1, 5)
    memory[0, 2] = 7.0  # parallel to the key
    _, _, weights = tell(head(DNCWriteHead), allocate=-1e4, write=1e4, strength=1e3)(control, memory)
    torch.testing.assert_close(weights[0], one(2))
    new, _, weights = tell(head(DNCWriteHead), write=-1e4)(control, memory)
    assert torch.equal(weights, torch.zeros(1, 6, dtype=F64)) and torch.equal(new, memory)


@pytest.mark.parametrize(("mode", "row"), [("back", 2), ("content", 5), ("on", 3)])
def test_the_read_head_follows_the_order_of_writing_both_ways_or_finds_content(mode: str, row: int) -> None:
    memory, links, precedence = normal(1, 6, 4), torch.zeros(1, 6, 6, dtype=F64), torch.zeros(1, 6, dtype=F64)
    memory[0, 5] = 7.0
    for each in (2, 0, 3):
        links, precedence = linked(links, precedence, one(each).unsqueeze(0))
    layer = tell(head(DNCReadHead), strength=1e3, **{mode: 1e4})
    reads, weights = layer(normal(1, 5), memory, one(0).view(1, 1, 6), links)
    torch.testing.assert_close(weights[0, 0], one(row))
    torch.testing.assert_close(reads[0, 0], memory[0, row])


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(scale=st.floats(0, 50), rows=st.integers(1, 8), seed=st.integers(0, 99))
def test_weights_stay_in_the_simplex_and_usage_in_the_unit_interval(scale: float, rows: int, seed: int) -> None:
    torch.manual_seed(seed)
    layer = DifferentiableNeuralComputer(3, 2, 8, rows, 4, 2)
    _, state, maps = layer(normal(2, 6, 3, seed=seed).float() * scale, return_maps=True)
    for weights in maps:
        assert (weights >= 0).all() and (weights.sum(-1) <= 1 + 1e-5).all()
    assert (state.usage >= 0).all() and (state.usage <= 1).all()


@pytest.mark.slow
def test_gradients_of_both_heads_are_right() -> None:
    writer, reader = head(DNCWriteHead, 2), head(DNCReadHead, 2)
    control, memory = normal(2, 5).requires_grad_(), normal(2, 6, 4, seed=1).requires_grad_()
    usage, weights = normal(2, 6, seed=2).sigmoid().requires_grad_(), normal(2, 6, seed=3).softmax(-1).requires_grad_()
    before = normal(2, 2, 6, seed=4).softmax(-1).requires_grad_()
    assert torch.autograd.gradcheck(writer, (control, memory, usage, weights, before))
    links = (normal(2, 6, 6, seed=5).softmax(-1) / 6).requires_grad_()
    assert torch.autograd.gradcheck(reader, (control, memory, before, links))


# The machine


def test_a_fresh_memory_of_zeros_has_finite_gradients() -> None:
    layer = machine()
    layer(torch.zeros(2, 4, 3, dtype=F64))[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


DNC = DifferentiableNeuralComputer
WRONG = [
    (ValueError, lambda: DNC(3, 0), "DifferentiableNeuralComputer: output_size must be an int of at least 1, got 0"),
    (TypeError, lambda: DNC(3, 2, memory_rows="6"), "memory_rows must be an int of at least 1, got '6'"),
    (ValueError, lambda: DNC(3, 2, controller="gru"), "controller must be one of 'feedforward', 'lstm', got 'gru'"),
    (ValueError, lambda: machine()(normal(2, 3, 4)), r"inputs must have shape \(B, T, 3\), got \(2, 3, 4\)"),
    (TypeError, lambda: machine()(normal(2, 3, 3), 3), "state must be of type DNCState, got 3"),
    (
        ValueError,
        lambda: machine()(normal(2, 3, 3), machine().initial_state(1)),
        r"state.memory must have shape \(2, 6, 4\), got \(1, 6, 4\)",
    ),
    (
        ValueError,
        lambda: machine()(normal(2, 3, 3), None, torch.tensor([[3, 3]])),
        r"valid_lens must have shape \(2,\), got \(1, 2\)",
    ),
    (
        ValueError,
        lambda: head(DNCWriteHead)(normal(2, 5), normal(2, 6, 4), normal(2, 5)),
        r"DNCWriteHead: usage must have shape \(2, 6\), got \(2, 5\)",
    ),
    (
        ValueError,
        lambda: head(DNCWriteHead)(normal(2, 5), normal(2, 6, 4), None, None, normal(2, 2, 6)),
        r"read_weights must have shape \(2, 1, 6\), got \(2, 2, 6\)",
    ),
    (
        ValueError,
        lambda: head(DNCReadHead)(normal(2, 5), normal(2, 6, 4), None, normal(2, 6, 5)),
        r"DNCReadHead: links must have shape \(2, 6, 6\), got \(2, 6, 5\)",
    ),
    (
        ValueError,
        lambda: head(DNCReadHead)(normal(3, 5), normal(2, 6, 4)),
        r"control must have shape \(2, 5\), got \(3, 5\)",
    ),
]


@pytest.mark.parametrize(("kind", "make", "message"), WRONG)
def test_errors_say_which_argument_and_why(kind: type[Exception], make: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


# It learns


def associations(pairs: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs (B, n + 1, 8): pairs of a key and a value of 3 bits, then one of the keys; and its value (B, 3).

    Keys are one-hot of 4, all different; a further input says that an answer is wanted.
    """
    keys = torch.rand(batch, 4, generator=generator).argsort(-1)[:, :pairs]
    values = torch.randint(0, 2, (batch, pairs, 3), generator=generator).float()
    asked = torch.randint(0, pairs, (batch,), generator=generator)
    every = torch.arange(batch)
    inputs = torch.zeros(batch, pairs + 1, 8)
    inputs[:, :pairs, :4] = nn.functional.one_hot(keys, 4).float()
    inputs[:, :pairs, 4:7] = values
    inputs[:, pairs, :4] = nn.functional.one_hot(keys[every, asked], 4).float()
    inputs[:, pairs, 7] = 1
    return inputs, values[every, asked]


def wrong_bits(layer: nn.Module, pairs: int, *, forget: bool = False) -> float:
    """Return which share of the answers' bits is wrong on fresh lists; ``forget`` starts every step anew."""
    inputs, values = associations(pairs, 500, torch.Generator().manual_seed(1234))
    with torch.no_grad():
        outputs = layer(inputs[:, -1:] if forget else inputs)[0]
    return ((outputs[:, -1] > 0) != (values > 0)).float().mean().item()


@pytest.mark.campaign
def test_it_learns_to_recall_associations() -> None:
    torch.manual_seed(0)
    # A feedforward controller keeps nothing from one step to the next: what comes back has been in the memory.
    layer = DifferentiableNeuralComputer(8, 3, 32, memory_rows=6, memory_width=12, controller="feedforward")
    assert wrong_bits(layer, 3) > 0.4
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(layer.parameters(), 0.01)
    for step in range(300):
        inputs, values = associations(step % 3 + 1, 64, generator)
        loss = bits_loss(layer(inputs)[0][:, -1], values)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(layer.parameters(), 5.0)
        optimizer.step()
    for pairs in (1, 2, 3, 4):  # of four there was none in training
        assert wrong_bits(layer, pairs) < 0.02
    assert wrong_bits(layer, 3, forget=True) > 0.4
