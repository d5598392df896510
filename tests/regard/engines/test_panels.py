"""Products with matrices in panels, and layers of a Transformer as one kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from regard.engines.fused import library
from regard.engines.fused.panels import LANES, Panels

SIZES = st.sampled_from([1, 2, 31, 32, 33, 64, 130, 257])


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(R=st.integers(1, 20), N=SIZES, E=SIZES, seed=st.integers(0, 99), biased=st.booleans(), int8=st.booleans())
def test_products_are_those_of_the_matrix(R: int, N: int, E: int, seed: int, biased: bool, int8: bool) -> None:
    rows, weight, bias = drawn(seed, R, 2 * E)[:, ::2], drawn(seed + 1, N, E), drawn(seed + 2, N) if biased else None
    panels = Panels.of(weight, int8=int8)
    dense = panels.dense()
    if not int8:
        assert torch.equal(dense, weight)
    assert bool(((dense - weight).abs() <= weight.abs().amax(1, keepdim=True) / 127 * 0.501 * int8).all())
    wanted = rows.double() @ dense.double().T + (0 if bias is None else bias.double())
    terms = rows.double().abs() @ dense.double().abs().T + (0 if bias is None else bias.double().abs())
    budget = (E + 4) * torch.finfo(torch.float32).eps * terms
    if int8:  # a row is rounded to 15 bits and a sign, or fewer where sums would overflow
        step = rows.abs().amax(1, keepdim=True).double() / min(32767, 2**31 // (127 * (E + 1)) - 1)
        budget = budget + 0.51 * step * dense.double().abs().sum(1)
    assert bool(((panels.product(rows, bias).double() - wanted).abs() <= budget).all())


@pytest.mark.parametrize("int8", [False, True])
def test_sums_of_the_largest_numbers_do_not_overflow(int8: bool) -> None:
    E = 4096
    made = Panels.of(torch.ones(3, E), int8=int8).product(torch.full((2, E), -3.0), None)
    torch.testing.assert_close(made, torch.full((2, 3), -3.0 * E))


@pytest.mark.parametrize("int8", [False, True])
def test_rows_of_a_matrix_share_its_memory_where_a_panel_begins(int8: bool) -> None:
    panels = Panels.of(drawn(0, 100, 7), int8=int8)
    for start, stop in ((0, 5), (32, 100), (64, 70), (3, 40)):
        part = panels.rows(start, stop)
        torch.testing.assert_close(part.dense(), panels.dense()[start:stop], rtol=1e-6, atol=0)
        shared = part.weights.untyped_storage().data_ptr() == panels.weights.untyped_storage().data_ptr()
        assert shared is (start % LANES == 0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("int8", [False, True])
def test_a_row_that_is_not_finite_stays_so_and_leaves_the_others(value: float, int8: bool) -> None:
    rows, panels = drawn(1, 7, 9), Panels.of(drawn(0, 40, 9).abs() + 0.1, int8=int8)
    before = panels.product(rows, None)
    rows[3, 8] = value
    after = panels.product(rows, None)
    assert not after[3].isfinite().any()
    kept = torch.arange(7) != 3
    assert torch.equal(after[kept], before[kept])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("R", [1, 64])
def test_threads_share_the_work(R: int, int8: bool) -> None:
    rows, panels, before = drawn(1, R, 256), Panels.of(drawn(0, 5000, 256), int8=int8), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(panels.product(rows, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("int8", [False, True])
def test_without_the_library_torch_multiplies(monkeypatch: pytest.MonkeyPatch, int8: bool) -> None:
    rows, panels, bias = drawn(1, 3, 9), Panels.of(drawn(0, 40, 9), int8=int8), drawn(2, 40)
    made = panels.product(rows, bias)
    monkeypatch.setattr(library, "_PROBLEM", "it is missing")
    torch.testing.assert_close(panels.product(rows, bias), made, rtol=1e-3, atol=1e-3)
