"""The Triton kernels of gated recurrences in Triton's interpreter, and which calls go to them."""

import os
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from regard.nn import gated_recurrence
from regard.nn.linear import gpu, kernels


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton has no packages for this platform")
@pytest.mark.slow
def test_the_kernels_are_right_in_the_interpreter(request):
    file = Path(__file__).with_name("interpreted_recurrences.py")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(file)]
    command += ["--usual"] * request.config.getoption("--usual")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:]


def normal(*size):
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


def test_calls_on_the_cpu_do_not_go_to_a_gpu():
    query = normal(1, 2, 9, 4)
    assert not gpu.applies(query, query, query, None, None)


def test_our_kernels_run_on_measured_devices_alone(monkeypatch):
    class Elsewhere:  # of a tensor on a CUDA device, what the choice reads
        is_cuda, dtype, device, shape = True, torch.float32, torch.device("cuda"), (1, 2, 9, 4)
        numel = staticmethod(lambda: 72)

    monkeypatch.setattr(gpu, "_is_installed", lambda package: package == "triton")
    monkeypatch.setattr(gpu, "is_traced", lambda tensor: False)
    assert not gpu.applies(Elsewhere, Elsewhere, Elsewhere, None, None)
    monkeypatch.setenv("REGARD_UNMEASURED", "1")
    assert gpu.applies(Elsewhere, Elsewhere, Elsewhere, None, None)
    assert not gpu.applies(Elsewhere, Elsewhere, Elsewhere, None, torch.ones(2, 4))


# flash-linear-attention, played by the formula in its layout ----------------------------------------------------------


def played(groups, gated, delta):
    """Return a function with the arguments of the library's kernels, by a loop over the steps."""

    def run(q, k, v, g=None, beta=None, *, scale, initial_state, output_final_state):
        assert output_final_state and all(t.is_contiguous() for t in (q, k, v))
        assert gated or g is None
        assert groups or q.shape[2] == v.shape[2]
        gates = {"log_decay": g, "rate": beta}
        heads = {name: None if t is None else t.transpose(1, 2).float() for name, t in gates.items()}
        rows = (t.transpose(1, 2).float() for t in (q, k, v))
        output, end = gated_recurrence(
            *rows, **heads, delta=delta, scale=scale, state=initial_state, return_state=True, form="recurrent"
        )
        return output.transpose(1, 2).to(q.dtype), end

    return run


@pytest.fixture
def library(monkeypatch):
    """Let calls on the CPU go to a library that is played."""
    names = {
        "kda": ("chunk_kda", True, True, True),
        "gated_delta_rule": ("chunk_gated_delta_rule", True, True, True),
        "delta_rule": ("chunk_delta_rule", False, False, True),
        "gla": ("chunk_gla", False, True, False),
        "simple_gla": ("chunk_simple_gla", False, True, False),
    }
    called = []
    for package in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    for name, (function, *about) in names.items():
        module = types.ModuleType(f"fla.ops.{name}")
        run = played(*about)
        setattr(module, function, lambda *a, run=run, name=name, **k: called.append(name) or run(*a, **k))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(gpu, "_is_installed", lambda _: True)
    monkeypatch.setattr(kernels, "applies", lambda *_: False)  # those of the CPU, where these tensors are
    monkeypatch.setattr(gpu, "applies", lambda query, *_: query.dtype in (torch.float16, torch.bfloat16))
    return called


CALLS = {
    "kda": {"log_decay": -normal(2, 4, 9, 8).exp(), "rate": normal(2, 4, 9).sigmoid(), "delta": True},
    "gated_delta_rule": {"log_decay": -normal(2, 4, 9).exp(), "rate": normal(2, 4, 9).sigmoid(), "delta": True},
    "delta_rule": {"rate": normal(2, 4, 9).sigmoid(), "delta": True},
    "gla": {"log_decay": -normal(2, 4, 9, 8).exp()},
    "simple_gla": {"log_decay": -normal(2, 4, 9).exp(), "rate": normal(2, 4, 9).sigmoid()},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("groups", [2, 4])
def test_calls_in_16_bits_go_to_the_library(name, groups, library):
    query, key, value = normal(2, groups, 9, 8), normal(2, groups, 9, 8) / 3, normal(2, 4, 9, 5)
    state = normal(2, 4, 8, 5)
    narrow = [t.bfloat16().requires_grad_() for t in (query, key, value)]
    output, end = gated_recurrence(*narrow, **CALLS[name], state=state, return_state=True)
    assert library == [name] and output.dtype == torch.bfloat16
    wide = [t.detach().double().requires_grad_() for t in narrow]
    options = {key: each.double() if isinstance(each, torch.Tensor) else each for key, each in CALLS[name].items()}
    right, right_end = gated_recurrence(*wide, **options, state=state.double(), return_state=True)
    assert torch.allclose(output.double(), right, rtol=1e-2, atol=1e-3)
    assert torch.allclose(end.double(), right_end, rtol=1e-2, atol=1e-3)
    ours, theirs = (
        torch.autograd.grad(each.sum(), x, allow_unused=True) for each, x in ((end, narrow), (right_end, wide))
    )
    for got, expected in zip(ours[1:], theirs[1:]):
        assert torch.allclose(got.double(), expected, rtol=1e-2, atol=2e-2)


def test_second_derivatives_through_the_library_are_those_of_the_formula(library):
    query, key, value = (normal(1, 2, 9, 4) / 2 for _ in range(3))
    narrow = value.bfloat16().requires_grad_()
    _, end = gated_recurrence(query.bfloat16(), key.bfloat16(), narrow, return_state=True)
    (first,) = torch.autograd.grad(end.square().sum(), narrow, create_graph=True)
    (second,) = torch.autograd.grad(first.float().square().sum(), narrow)
    assert library and second.abs().sum() > 0


def test_documents_and_float32_do_not_go_to_the_library(library):
    query = normal(1, 2, 9, 4)
    gated_recurrence(query, query, query)
    assert not library and not gpu._library_covers(
        gpu.Steps(*(query.bfloat16() for _ in range(3)), resets=torch.zeros(1, 9, dtype=torch.bool))
    )
