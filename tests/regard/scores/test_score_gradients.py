"""Gradients to learned widths and temperatures, against derivatives worked out by hand."""

import math

import pytest
import torch

import regard
from regard import scores
from regard.scores.kernels import kernels

ENGINES = ["reference", "streaming", "sdpa"]
DTYPES = {"reference": torch.float64, "streaming": torch.float64, "sdpa": torch.float32}


def kernel_regression(kernel, slope, engine):
    """Return (output, its derivative to σ) of one query at 0 over four keys: by ``attention``, and by hand.

    ``kernel(u)`` is the weight at distance u·σ; ``slope(u)`` is d log kernel / d σ · σ.
    """
    dtype = DTYPES[engine]
    sigma = 1.5
    keys, values = [0.2, 0.5, -0.9, 1.2], [1.0, -2.0, 3.0, 0.5]
    weights = [kernel(abs(k) / sigma) for k in keys]
    total = sum(weights)
    mean = sum(w * v for w, v in zip(weights, values)) / total
    change = sum(w * slope(abs(k) / sigma) / sigma * (v - mean) for k, w, v in zip(keys, weights, values)) / total
    width = torch.tensor(sigma, dtype=dtype, requires_grad=True)
    rows = (
        torch.zeros(1, 1),
        torch.tensor(keys, dtype=torch.float64)[:, None],
        torch.tensor(values, dtype=torch.float64)[:, None],
    )
    query, key, value = (r.to(dtype) for r in rows)
    return (query, key, value, width), (mean, change)


KERNELS = {
    "gaussian": (scores.Gaussian, lambda u: math.exp(-u * u / 2), lambda u: u * u),
    "laplacian": (scores.Laplacian, lambda u: math.exp(-u), lambda u: u),
    "triangular": (scores.Triangular, lambda u: 1 - u, lambda u: u / (1 - u)),
    "epanechnikov": (scores.Epanechnikov, lambda u: 1 - u * u, lambda u: 2 * u * u / (1 - u * u)),
    "boxcar": (scores.Boxcar, lambda u: 1.0, lambda u: 0.0),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", KERNELS)
def test_width(name, engine):
    cls, kernel, slope = KERNELS[name]
    if engine == "sdpa" and name != "gaussian":
        pytest.skip("not a dot product")
    (query, key, value, width), (mean, change) = kernel_regression(kernel, slope, engine)
    output = regard.attention(query, key, value, score=cls(width), engine=engine)
    output.sum().backward()
    accuracy = 100 * torch.finfo(query.dtype).eps
    assert output.item() == pytest.approx(mean, rel=accuracy)
    assert width.grad.item() == pytest.approx(change, rel=accuracy, abs=accuracy)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_width_per_feature(engine):
    dtype = DTYPES[engine]
    width = torch.tensor([0.5, 2.0, 1.0], dtype=dtype, requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(5, 3, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))
    output = regard.attention(query, key, value, score=scores.Gaussian(width), engine=engine)
    (found,) = torch.autograd.grad(output.sum(), width)
    apart = (query[:, None] - key[None]).double()
    weights = (-0.5 * (apart / width.double()).square().sum(-1)).softmax(-1).detach()
    d_scores = weights * (value.double().sum(-1) - (weights @ value.double()).sum(-1, keepdim=True))
    expected = (d_scores[..., None] * apart.square()).sum((0, 1)) / width.detach().double() ** 3
    torch.testing.assert_close(found.double(), expected, rtol=100 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("engine", ["reference", "streaming", "fused"])
def test_a_width_per_feature_of_the_manhattan_distance(engine):
    width = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64, requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    key[2, 1] = query[1, 1]  # neither moves the distance in this feature
    query.requires_grad_()
    output = regard.attention(query, key, value, score=scores.Laplacian(width), engine=engine)
    found, found_query = torch.autograd.grad(output.sum(), (width, query))
    apart, w = (query[:, None] - key[None]).detach(), width.detach()
    weights = (-(apart / w).abs().sum(-1)).softmax(-1)
    d_scores = (weights * (value.sum(-1) - (weights @ value).sum(-1, keepdim=True)))[..., None]
    torch.testing.assert_close(found, (d_scores * apart.abs()).sum((0, 1)) / w**2, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(found_query, -(d_scores * apart.sign()).sum(1) / w, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_temperature(engine):
    temperature = torch.tensor([0.7], requires_grad=True)
    query, key = torch.tensor([[3.0, 4.0]]), torch.tensor([[4.0, 3.0], [-4.0, 3.0]])
    cosines, values = torch.tensor([0.96, 0.0]), torch.tensor([[1.0], [0.0]])
    output = regard.attention(query, key, values, score=scores.Cosine(temperature), engine=engine)
    output.sum().backward()
    weight = (cosines / 0.7).softmax(0)[0].item()
    assert output.item() == pytest.approx(weight, rel=1e-6)
    assert temperature.grad.item() == pytest.approx(-weight * (1 - weight) * 0.96 / 0.49, rel=1e-5)


def test_a_query_on_a_key_has_no_gradient_to_the_distance():
    query = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    for cls in kernels().values():
        output = regard.attention(
            query, torch.zeros(2, 2).double(), torch.tensor([[1.0], [2.0]]).double(), score=cls(3.0)
        )
        (gradient,) = torch.autograd.grad(output.sum(), query)
        assert (gradient == 0).all(), cls
