"""The Triton kernels of gated recurrences, interpreted on the CPU, against a loop over the steps in float64.

Run in a process of its own with TRITON_INTERPRET=1, by test_recurrence_kernels.py: Triton reads it when it is imported.
"""

from itertools import product

import pytest
import torch

from regard.nn.linear import gpu
from regard.nn.linear.recurrence import _formula, _recurrent
from regard.nn.linear.steps import Steps

DECAYS = ("none", "head", "channels")


def new(*size, seed):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def made(B=1, H=2, G=2, L=37, K=8, V=5, decay="head", delta=True, rate=True, low=0.1, own_query=False, seed=0):
    """Return steps in float32, with keys of norm 1."""
    key = torch.nn.functional.normalize(new(B, G, L, K, seed=seed + 1), dim=-1)
    shape = {"none": None, "head": (B, H, L, 1), "channels": (B, H, L, K)}[decay]
    return Steps(
        new(B, H if own_query else G, L, K, seed=seed),
        key,
        new(B, H, L, V, seed=seed + 2),
        None if shape is None else -low * new(*shape, seed=seed + 3).exp(),
        new(B, H, L, 1, seed=seed + 4).sigmoid() * 1.5 if rate else None,
        delta=delta,
        scale=K**-0.5,
    )


def results(run, steps, state, dtype):
    """Return output, end and the gradients to all inputs, in float64."""
    tensors = [*steps[:5], state]
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in tensors]
    output, end = run(steps._replace(**dict(zip(Steps._fields[:5], leaves))), leaves[-1])
    given = [new(*t.shape, seed=9 + i).to(t.dtype) for i, t in enumerate((output, end))]
    found = torch.autograd.grad((output, end), [t for t in leaves if t is not None], given)
    return [output.detach().double(), end.detach().double(), *(each.double() for each in found)]


def loop(steps, state):
    if state is None:
        state = steps.key.new_zeros(*steps.value.shape[:2], steps.key.shape[-1], steps.value.shape[-1])
    return _recurrent(steps, state)


def kernels(steps, state):
    return gpu.run(steps, state, _formula)


def agree(steps, state=None, tolerance=2e-5):
    for i, (got, right) in enumerate(zip(results(kernels, steps, state, torch.float32), results(loop, steps, state, torch.float64))):
        assert got.shape == right.shape
        off = float((got - right).abs().max() / right.abs().max().clamp(min=1e-3))
        assert off <= tolerance, f"result {i} is off by {off:.3g}"


@pytest.mark.parametrize(("decay", "delta"), list(product(DECAYS, (False, True))))
def test_outputs_and_gradients(decay, delta):
    agree(made(decay=decay, delta=delta))
    agree(made(decay=decay, delta=delta, H=4, G=2, own_query=delta, L=70, rate=delta), new(1, 4, 8, 5, seed=7))


@pytest.mark.parametrize("L", [5, 15, 16, 17, 31, 32, 33, 64])
def test_any_length(L):
    agree(made(L=L, K=3, V=2))
    agree(made(L=L, K=3, V=2, decay="channels", B=2))
