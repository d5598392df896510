"""The chunked loss against the definition, written out in float64."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from regard_lab.training import objectives as losses
from regard_lab.training.objectives import cross_entropy


def made(seed: int, B: int = 3, T: int = 5, P: int = 4, N: int = 7, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(B, T, P, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(N, P, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(N, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return features, weight, bias, torch.randint(0, N, (B, T), generator=generator)


def written_out(features, weight, bias, target, smoothing, scale=1.0):
    logs = (features.double() @ weight.double().t() + bias.double()).log_softmax(-1)
    picked = logs.gather(-1, target[..., None])[..., 0]
    real = (target != 0).double()
    loss = -(((1 - smoothing) * picked + smoothing * logs.mean(-1)) * real * scale).sum() / real.sum().clamp(min=1)
    return loss, picked * real


@settings(derandomize=True, deadline=None)
@given(
    st.integers(0, 99), st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.integers(2, 9),
    st.sampled_from([0.0, 0.1, 0.7]), st.sampled_from([1, 8, 20, 1 << 20]), st.sampled_from([1, 3, 32]),
)  # fmt: skip
def test_loss_and_gradients_are_the_definition(seed, B, T, P, N, smoothing, at_once, grain):
    *parts, target = made(seed, B, T, P, N)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(losses._LOGITS, "cpu", at_once)
        patched.setattr(losses, "_GRAIN", grain)
        loss, likely = cross_entropy(parts[0], (parts[1], parts[2]), target, smoothing)
    want, want_likely = written_out(*parts, target, smoothing)
    torch.testing.assert_close((loss, likely), (want, want_likely))
    assert not likely.requires_grad
    got = torch.autograd.grad(3 * loss, parts)
    torch.testing.assert_close(got, torch.autograd.grad(3 * want, parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_those_of_torch(dtype):
    """Within one and a half times the error of what torch makes of all logits at once, in the same precision."""
    *parts, target = made(0, 8, 40, 32, 500, torch.float32)
    target = target.clamp(min=1)
    want = torch.autograd.grad(written_out(*parts, target, 0.1)[0], parts)
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        loss, _ = cross_entropy(parts[0], (parts[1], parts[2]), target, 0.1)
        logits = F.linear(*parts)
    got = torch.autograd.grad(loss, parts)
    usual = torch.autograd.grad(
        F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), label_smoothing=0.1), parts
    )
    for ours, torchs, right in zip(got, usual, want):
        assert ours.dtype == torch.float32
        assert (ours - right).norm() <= 1.5 * (torchs - right).norm()


def test_all_padding_costs_nothing():
    features, weight, bias, target = made(0)
    loss, likely = cross_entropy(features, (weight, bias), torch.zeros_like(target), 0.1)
    loss.backward()
    assert float(loss.detach()) == 0
    assert not likely.any()
    assert features.grad is not None
    assert not features.grad.any()


def test_without_gradients_none_are_taken(monkeypatch):
    features, weight, bias, target = made(0)
    products = []
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda *both: products.append(both))
    with torch.no_grad():
        loss, _ = cross_entropy(features, (weight, bias), target)
    assert not products
    assert loss.isfinite()


def test_shapes_and_smoothing_are_checked():
    features, weight, bias, target = made(0)
    with pytest.raises(ValueError, match=r"cross_entropy: target must have the shape \(3, 5\) .* got \(3, 4\)"):
        cross_entropy(features, (weight, bias), target[:, 1:])
    with pytest.raises(ValueError, match=r"cross_entropy: features must have width 3, .* got \(3, 5, 4\)"):
        cross_entropy(features, (weight[:, :3], bias), target)
    for smoothing in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"cross_entropy: smoothing must be in \[0, 1\)"):
            cross_entropy(features, (weight, bias), target, smoothing)


def test_a_second_derivative_is_refused():
    features, weight, bias, target = made(0)
    loss, _ = cross_entropy(features, (weight, bias), target, 0.1)
    with pytest.raises(RuntimeError, match="cross_entropy: create_graph must be False"):
        torch.autograd.grad(loss, features, create_graph=True)


def test_an_impossible_symbol_costs_infinitely_much():
    features, weight, bias, target = made(0)
    with torch.no_grad():
        bias[3] = -torch.inf
        loss, _ = cross_entropy(features, (weight, bias), torch.full_like(target, 3))
    assert float(loss) == torch.inf


def test_float64_stays_so_under_autocast():
    *parts, target = made(0)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = cross_entropy(parts[0], (parts[1], parts[2]), target, 0.1)
    torch.testing.assert_close(loss, written_out(*parts, target, 0.1)[0])


@pytest.mark.slow
def test_products_have_few_shapes():
    """However many symbols are real: oneDNN would keep a kernel for each shape."""

    class Products(TorchDispatchMode):
        shapes: ClassVar[set[tuple[int, ...]]] = set()

        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            if function is torch.ops.aten.mm.default:
                self.shapes.add((*arguments[0].shape, *arguments[1].shape))
            return function(*arguments, **(named or {}))

    features, weight, bias, target = made(0, 8, 40, 32, 500)
    with Products():
        for real in range(1, 321):
            some = torch.zeros_like(target).flatten()
            some[:real] = 7
            cross_entropy(features, (weight, bias), some.view_as(target), 0.1)
    assert 0 < len(Products.shapes) <= 3 * 320 / 32


@pytest.mark.slow
@settings(derandomize=True, deadline=None)
@given(st.integers(0, 99), st.sampled_from([0.0, 0.3]), st.sampled_from([1, 20, 1 << 20]))
def test_symbols_count_by_their_weights(seed, smoothing, at_once):
    *parts, target = made(seed)
    scale = torch.randn(target.shape, generator=torch.Generator().manual_seed(seed))
    scale[0, 0] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(losses._LOGITS, "cpu", at_once)
        features, weight, bias = parts
        loss, likely = cross_entropy(features, (weight, bias), target, smoothing, weight=scale)
        found = torch.autograd.grad(loss, parts)
    expected, logs = written_out(*parts, target, smoothing, scale.double())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(likely, logs.detach())
    for ours, theirs in zip(found, torch.autograd.grad(expected, parts)):
        torch.testing.assert_close(ours, theirs)


def test_weights_are_one_for_each_symbol():
    *parts, target = made(0)
    with pytest.raises(
        ValueError, match=r"cross_entropy: weight must have the shape \(3, 5\) of the target, got \(3,\)"
    ):
        cross_entropy(parts[0], tuple(parts[1:]), target, weight=torch.ones(3))
