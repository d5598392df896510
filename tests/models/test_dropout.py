"""Dropout: how many, which, and what of the rest."""

from __future__ import annotations

import pytest
import torch

from regard.models._dropout import Dropout


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9, 0.99])
def test_the_share_is_right_and_entries_are_independent(p: float) -> None:
    torch.manual_seed(0)
    N = 401 * 999
    dropped = Dropout(p)(torch.ones(401, 999, dtype=torch.float64))
    gone = (dropped == 0).double()
    assert abs(float(gone.mean()) - p) < 4 * (p * (1 - p) / N) ** 0.5
    torch.testing.assert_close(dropped.max(), torch.tensor(1 / (1 - p), dtype=torch.float64))
    flat = gone.flatten() - gone.mean()
    for lag in (1, 2, 3, 4, 5, 999):  # numbers are cut into four
        assert abs(float((flat[lag:] * flat[:-lag]).mean())) / (p * (1 - p)) < 4 / N**0.5
    for place in range(4):
        assert abs(float(gone.flatten()[place::4].mean()) - p) < 4 * (4 * p * (1 - p) / N) ** 0.5


def test_a_seed_decides() -> None:
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(Dropout(0.5)(torch.ones(7, 3)))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_gradients_are_dropped_alike() -> None:
    x = torch.randn(5, 7, requires_grad=True)
    y = Dropout(0.5)(x)
    y.sum().backward()
    assert torch.equal(x.grad == 0, y == 0)
    assert torch.equal(x.grad[y != 0], torch.full_like(x.grad[y != 0], 2.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes_shapes_and_modes(dtype: torch.dtype) -> None:
    layer = Dropout(0.25)
    for shape in ((), (0, 3), (1,), (2, 3, 5)):
        x = torch.ones(shape, dtype=dtype)
        assert layer(x).dtype == dtype
        assert layer(x).shape == x.shape
    x = torch.ones(3)
    assert layer.eval()(x) is x
    assert Dropout(0.0)(x) is x
    assert repr(Dropout(0.25)) == "Dropout(p=0.25)"
