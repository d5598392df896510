"""Machines with a memory: their steps, their state and padding, whichever rules address the memory."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.nn.memory.dnc import DifferentiableNeuralComputer, DNCState
from regard.nn.memory.ntm import NeuralTuringMachine, NTMState

F64 = torch.float64
NAN = float("nan")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def turing(**options: Any) -> NeuralTuringMachine:
    torch.manual_seed(0)
    return NeuralTuringMachine(3, 2, 8, 6, 4, read_heads=2, write_heads=2, dtype=F64, **options)


def computer(**options: Any) -> DifferentiableNeuralComputer:
    torch.manual_seed(0)
    return DifferentiableNeuralComputer(3, 2, 8, 6, 4, 2, dtype=F64, **options)


every_machine = pytest.mark.parametrize("machine", [turing, computer])


@every_machine
def test_steps_in_one_call_and_one_by_one_are_the_same(machine: Any) -> None:
    layer, inputs = machine(), normal(2, 5, 3)
    outputs, end, maps = layer(inputs, return_maps=True)
    state, steps = None, []
    for t in range(5):
        output, state = layer(inputs[:, t : t + 1], state)
        steps.append(output)
        torch.testing.assert_close(maps.read[:, t], state.read_weights)
        torch.testing.assert_close(maps.write[:, t], state.write_weights.view(maps.write[:, t].shape))
    torch.testing.assert_close(torch.cat(steps, 1), outputs)
    for a, b in zip(state, end):
        torch.testing.assert_close(a, b)


@every_machine
@pytest.mark.parametrize("controller", ["lstm", "feedforward"])
def test_padding_changes_neither_outputs_nor_state_nor_gradients(machine: Any, controller: str) -> None:
    layer, inputs, ends = machine(controller=controller), normal(3, 5, 3), [5, 2, 0]
    inputs[1, 2:], inputs[2] = NAN, torch.inf
    inputs.requires_grad_()
    outputs, state, maps = layer(inputs, None, torch.tensor(ends), return_maps=True)
    for b, end in enumerate(ends):
        right, last = layer(inputs[b : b + 1, :end])
        torch.testing.assert_close(outputs[b : b + 1, :end], right)
        assert (outputs[b, end:] == 0).all() and (maps.read[b, end:] == 0).all() and (maps.write[b, end:] == 0).all()
        for whole, alone in zip(state, last):
            torch.testing.assert_close(whole[b : b + 1], alone)
    sum(each.square().sum() for each in (outputs, *state)).backward()
    assert inputs.grad is not None and (inputs.grad[1, 2:] == 0).all() and (inputs.grad[2] == 0).all()
    assert (inputs.grad[0] != 0).any() and inputs.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize(("machine", "kind"), [(turing, NTMState), (computer, DNCState)])
def test_a_state_can_be_cut_and_saved(machine: Any, kind: Any) -> None:
    layer, inputs = machine(), normal(2, 4, 3).requires_grad_()
    _, state = layer(inputs[:, :2])
    cut = state.detach()
    assert isinstance(cut, kind) and not any(each.requires_grad for each in cut)
    file = io.BytesIO()
    torch.save(cut._asdict(), file)
    loaded = kind(**torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    outputs, _ = layer(inputs[:, 2:], loaded)
    torch.testing.assert_close(outputs, layer(inputs)[0][:, 2:])
    (gradient,) = torch.autograd.grad(outputs.sum(), inputs)
    assert (gradient[:, :2] == 0).all() and (gradient[:, 2:] != 0).any()


@pytest.mark.parametrize(
    ("machine", "writers", "last"), [(turing, 2, ("memory", (0, 6, 4))), (computer, 1, ("links", (0, 6, 6)))]
)
def test_sequences_and_batches_may_be_empty(machine: Any, writers: int, last: tuple[str, tuple[int, ...]]) -> None:
    layer = machine()
    outputs, state, maps = layer(normal(2, 0, 3), return_maps=True)
    assert outputs.shape == (2, 0, 2) and maps.read.shape == (2, 0, 2, 6) and maps.write.shape == (2, 0, writers, 6)
    assert all(torch.equal(a, b) for a, b in zip(state, layer.initial_state(2)))
    outputs, state = layer(normal(0, 3, 3))
    assert outputs.shape == (0, 3, 2) and getattr(state, last[0]).shape == last[1]
