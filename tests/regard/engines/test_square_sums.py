"""Sums of squares of tensors: upper bounds of products, and not finite where an element is not."""

from __future__ import annotations

import math

import pytest
import torch

from regard.engines.dense import square_sum

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 30.0])
def test_a_sum_of_squares_is_never_too_small(dtype: torch.dtype, scale: float) -> None:
    for seed in range(20):
        rows = torch.randn(37, 64, generator=torch.Generator().manual_seed(seed)).mul(scale).to(dtype)
        for some in (rows, rows.mT, rows[:, ::3], rows[:1].expand(5, 64)):
            exact = math.fsum(number * number for number in some.double().flatten().tolist())
            # The bound of a sum in any order, n · eps: BLAS sums in an order of its own on each processor.
            rounding = some.numel() * torch.finfo(torch.float32 if dtype.itemsize < 8 else dtype).eps
            assert exact * (1 - rounding) <= square_sum(some) <= exact * 1.02


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_sum_of_squares_is_not_finite_where_an_element_is_not(dtype: torch.dtype, wrong: float) -> None:
    rows = torch.ones(9, 70, dtype=dtype)
    rows[4, 33] = wrong
    assert not math.isfinite(square_sum(rows))
