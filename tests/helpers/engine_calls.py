"""What the engines' tests share: seeded inputs, and a comparison with float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import regard


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return seeded normal numbers, the same in every dtype but for rounding."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(
    B: int = 2,
    H: int = 4,
    G: int = 4,
    L: int = 23,
    S: int = 29,
    E: int = 8,
    V: int = 5,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Return query, key and value that want gradients."""
    sizes = (B, H, L, E), (B, G, S, E), (B, G, S, V)
    return [normal(*size, seed=i, dtype=dtype).requires_grad_() for i, size in enumerate(sizes)]


def run(leaves: list[Tensor], extra: list[Tensor] = [], **named: Any) -> list[Tensor]:  # noqa: B006
    """Return the output and the gradients to query, key, value and what else is given."""
    output = regard.attention(*leaves, **named)
    upstream = normal(*output.shape, seed=7, dtype=output.dtype)
    return [output.detach(), *torch.autograd.grad(output, [*leaves, *extra], upstream, materialize_grads=True)]


def check(found: list[Tensor], right: list[Tensor], tolerance: float = 2e-5) -> None:
    """Compare with float64 answers, relative to the largest number in each tensor."""
    assert len(found) == len(right)
    for name, a, b in zip(("output", "d query", "d key", "d value", *map(str, range(9))), found, right):
        assert a.shape == b.shape, name
        size = max(1.0, float(b.abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(
            a.double(), b.double(), rtol=0, atol=tolerance * size, msg=lambda m, n=name: f"{n}: {m}"
        )


def oracle(leaves: list[Tensor], extra: list[Tensor] = [], **named: Any) -> list[Tensor]:  # noqa: B006
    """Return the same as :func:`run`, calculated in float64 by the reference."""
    wide = [t.detach().double().requires_grad_() for t in leaves]
    return run(wide, extra, **{**named, "engine": "reference"})


def check_threads(results: Callable[[], list[Tensor]]) -> None:
    """Hold that two threads compute what one does but for rounding, and the same bits twice."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = results()
        torch.set_num_threads(2)
        together, again = results(), results()
    finally:
        torch.set_num_threads(before)
    for one, two, three in zip(alone, together, again, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
        assert torch.equal(two, three)
