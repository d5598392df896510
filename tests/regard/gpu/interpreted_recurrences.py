"""The Triton kernels of gated recurrences, interpreted on the CPU, against a loop over the steps in float64.

Run in a process of its own with TRITON_INTERPRET=1, by test_recurrence_kernels.py: Triton reads it when it is imported.
"""

from itertools import product

import interpreter
import pytest
import torch

from regard.nn import gated_recurrence
from regard.nn.linear import gpu
from regard.nn.linear import kernels as cpu_kernels
from regard.nn.linear.attention import linear_attention
from regard.nn.linear.recurrence import _formula, _recurrent
from regard.nn.linear.steps import Steps

DECAYS = ("none", "head", "channels")
interpreter.hasten()


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
    for i, (got, right) in enumerate(
        zip(results(kernels, steps, state, torch.float32), results(loop, steps, state, torch.float64))
    ):
        assert got.shape == right.shape
        off = float((got - right).abs().max() / right.abs().max().clamp(min=1e-3))
        assert off <= tolerance, f"result {i} is off by {off:.3g}"


@pytest.fixture(params=["exact", "tf32"])
def precision(request):
    """Blocks of either precision: interpreted, both multiply in float32."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if request.param == "tf32" else "ieee"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.campaign(keep=3)
@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize(("decay", "delta"), list(product(DECAYS, (False, True))))
def test_outputs_and_gradients(decay, delta):
    agree(made(decay=decay, delta=delta, L=19))
    state = new(1, 4, 8, 5, seed=7)
    agree(made(decay=decay, delta=delta, H=4, G=2, own_query=delta, L=35, rate=delta), state)


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("L", [5, 15, 16, 17, 31, 32, 33])
def test_any_length(L):
    agree(made(L=L, H=1, G=1, K=3, V=2, decay=DECAYS[L % 3]))


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("decay", ["channels", "head"])
def test_several_blocks_of_channels_and_values(decay):
    agree(made(H=1, G=1, L=18, K=70, V=20, decay=decay))


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", ["head", "channels"])
def test_decays_near_0_and_1_and_of_0(decay, delta):
    steps = made(H=1, G=1, L=20, decay=decay, delta=delta)
    extreme = steps.log_decay.clone()
    extreme[:, :, ::5], extreme[:, :, 1::5], extreme[:, :, 2::5] = -1e-7, -60.0, -2000.0
    agree(steps._replace(log_decay=extreme))
    forgotten = extreme.clone()
    forgotten[:, :, 7] = -torch.inf
    output, end = kernels(steps._replace(log_decay=forgotten), None)
    right, right_end = loop(steps._replace(log_decay=forgotten), None)
    assert torch.allclose(output, right, atol=1e-5) and torch.allclose(end, right_end, atol=1e-5)


@pytest.mark.campaign(keep=1)
@pytest.mark.usefixtures("precision")
def test_documents_start_anew():
    starts = torch.zeros(1, 20, dtype=torch.bool)
    starts[:, [3, 16]] = True
    agree(made(H=1, G=1, L=20)._replace(resets=starts), new(1, 1, 8, 5, seed=7))
    agree(made(H=1, G=1, L=20, decay="none")._replace(resets=starts))


def test_any_strides():
    steps = made(L=18)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in steps[:5]]
    agree(steps._replace(**dict(zip(Steps._fields[:5], turned))))
    apart = [torch.stack((t, t), -1)[..., 0] for t in steps[:5]]
    agree(steps._replace(**dict(zip(Steps._fields[:5], apart))))


def test_float16_is_summed_in_float32():
    steps = made(L=40, V=3)
    half = steps._replace(query=steps.query.half(), key=steps.key.half(), value=steps.value.half())
    wide = steps._replace(query=half.query.float(), key=half.key.float(), value=half.value.float())
    (output, end), (right, right_end) = kernels(half, None), loop(wide, None)
    assert output.dtype == torch.float16 and end.dtype == torch.float32
    # Interpreted, TF32 is float32: one rounding of the output remains.
    assert torch.allclose(output.float(), right, rtol=1e-3, atol=1e-4) and torch.allclose(end, right_end, atol=1e-4)


def test_one_gradient_alone_and_second_derivatives():
    steps = made(H=1, G=1, L=10)
    value = steps.value.clone().requires_grad_()
    output, end = kernels(steps._replace(value=value), None)
    (found,) = torch.autograd.grad(end.square().sum(), value, create_graph=True)
    right = torch.autograd.grad(loop(steps._replace(value=value), None)[1].square().sum(), value, create_graph=True)[0]
    assert torch.allclose(found, right, atol=1e-4)
    ours, theirs = (torch.autograd.grad(each.square().sum(), value)[0] for each in (found, right))
    assert torch.allclose(ours, theirs, atol=1e-3)
    assert torch.equal(output, kernels(steps, None)[0])


def test_a_call_goes_to_the_kernels(monkeypatch):
    ran = []
    monkeypatch.setattr(cpu_kernels, "applies", lambda *_: False)
    monkeypatch.setattr(gpu, "applies", lambda query, *_: query.dtype == torch.float32)
    run = gpu.run
    monkeypatch.setattr(gpu, "run", lambda *a: ran.append(1) or run(*a))
    query, key, value = (new(2, 2, 21, 4, seed=i) for i in range(3))
    lengths, runs = torch.tensor([21, 13]), torch.arange(21) // 9
    got, wide = (
        gated_recurrence(query.to(t), key.to(t) / 2, value.to(t), delta=True, valid_lens=lengths, documents=runs)
        for t in (torch.float32, torch.float64)
    )
    assert ran == [1] and torch.allclose(got.double(), wide, atol=1e-5)
    assert (got[1, :, 13:] == 0).all()
    ours, right = (
        linear_attention(query.to(t), key.to(t), value.to(t), is_causal=True) for t in (torch.float32, torch.float64)
    )
    assert ran == [1, 1] and torch.allclose(ours.double(), right, atol=1e-5)
