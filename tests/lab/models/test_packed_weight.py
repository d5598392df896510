"""Products with packed matrices are those with the matrices they were made of."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples
from torch import Tensor

from regard_lab.models.packed_weight import PackedWeight, can_pack

SIZES = st.sampled_from([1, 2, 3, 7, 16, 33, 130])


@st.composite
def products(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows of any layout, a matrix and perhaps a bias."""
    N, E = draw(SIZES), draw(SIZES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    scale = draw(st.sampled_from([1e-4, 1.0, 1e4]))
    weight = scale * torch.randn(N, E, generator=generator)
    weight = weight.t().contiguous().t() if draw(st.booleans()) else weight
    shape = draw(st.lists(st.integers(0, 4), min_size=0, max_size=3))
    rows = torch.randn(*shape, E, generator=generator)
    kind = draw(st.sampled_from(["contiguous", "strided", "broadcast"]))
    if kind == "strided":
        rows = torch.randn(*shape, 2 * E, generator=generator)[..., ::2]
    elif kind == "broadcast":
        rows = rows[..., :1].expand(*shape, E)
    return rows, weight, torch.randn(N, generator=generator) if draw(st.booleans()) else None


def bound(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """How far float32 may lie from the exact product: a rounding of each of the terms."""
    most = rows.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    return (weight.shape[1] + 2) * torch.finfo(torch.float32).eps * most


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(products())
@torch.no_grad()
def test_products_are_those_of_the_matrix(case: tuple[Tensor, Tensor, Tensor | None]) -> None:
    rows, weight, bias = case
    exact = F.linear(rows.double(), weight.double(), None if bias is None else bias.double())
    made = F.linear(rows, PackedWeight.of(weight), bias)
    assert made.shape == exact.shape and made.dtype == torch.float32
    assert bool(((made.double() - exact).abs() <= bound(*case)).all())


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(products(), st.data())
@torch.no_grad()
def test_some_rows_are_a_matrix_of_their_own(case: tuple[Tensor, Tensor, Tensor | None], data: st.DataObject) -> None:
    rows, weight, bias = case
    packed, N = PackedWeight.of(weight), len(weight)
    cut = data.draw(st.integers(1, N))
    for place in (slice(0, cut), slice(cut, N)):
        if place.start < place.stop:
            exact, part_bias = weight[place], None if bias is None else bias[place]
            made = F.linear(rows, packed[place], part_bias)
            wanted = F.linear(rows.double(), exact.double(), None if part_bias is None else part_bias.double())
            assert bool(((made.double() - wanted).abs() <= bound(rows, exact, part_bias)).all())
            assert packed[place] is packed[place], "it is laid out once"
            torch.testing.assert_close(packed[place].unpacked(), exact, rtol=0, atol=0)
    if cut < N:
        assert all(
            part is packed[place] for part, place in zip(packed.split([cut, N - cut]), [slice(cut), slice(cut, N)])
        )


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(products())
@torch.no_grad()
def test_in_int8_products_are_near(case: tuple[Tensor, Tensor, Tensor | None]) -> None:
    rows, weight, bias = case
    made = F.linear(rows, PackedWeight.of(weight, int8=True), bias)
    exact = F.linear(rows.double(), weight.double(), None if bias is None else bias.double())
    assert made.shape == exact.shape
    if rows.numel():
        # A weight is off by half of its row's 127th, a factor by half a step of 127 between all least and greatest.
        low, high = min(float(rows.min()), 0.0), max(float(rows.max()), 0.0)
        step, scale = (high - low) / 127, weight.double().abs().amax(1) / 127
        off = scale / 2 * (rows.double().abs() + step).sum(-1, keepdim=True) + step * weight.double().abs().sum(1)
        assert bool(((made.double() - exact).abs() <= off * (1 + 1e-5) + bound(*case)).all())


@torch.no_grad()
def test_biases_change_with_the_calls() -> None:
    weight, rows = torch.randn(5, 8), torch.randn(3, 8)
    packed = PackedWeight.of(weight, int8=True)
    plain = F.linear(rows, packed)
    for bias in (torch.ones(5), torch.arange(5.0), None):
        torch.testing.assert_close(F.linear(rows, packed, bias), plain if bias is None else plain + bias)


def test_what_it_tells_and_what_it_refuses() -> None:
    weight = torch.randn(5, 8)
    for int8 in (False, True):
        packed = PackedWeight.of(weight, int8=int8)
        assert (packed.shape, packed.dtype, packed.device, len(packed)) == ((5, 8), torch.float32, weight.device, 5)
        assert copy.deepcopy(packed) is packed and packed.is_int8 is int8
        assert repr(packed) == f"PackedWeight((5, 8), {'int8' if int8 else 'float32'})"
        for act in (lambda p=packed: torch.add(p, 1), lambda p=packed: p.sum(), lambda p=packed: pickle.dumps(p)):
            with pytest.raises(TypeError, match="a packed weight is for products with rows alone, not for "):
                act()
        with pytest.raises(RuntimeError, match="is for decoding, without gradients"):
            F.linear(torch.randn(2, 8, requires_grad=True), packed)
    torch.testing.assert_close(PackedWeight.of(weight).unpacked(), weight, rtol=0, atol=0)
    assert can_pack(weight)
    for other in (weight.double(), weight.bfloat16(), weight[0], PackedWeight.of(weight), weight[:0]):
        assert not can_pack(other)
