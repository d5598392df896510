"""Normalizers against other algorithms for the same weights."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from regard import normalizers
from regard.normalizers import Argmax, Entmax, Entmax15, Gumbel, Sampled, Sigmoid, Softmax, Sparsemax
from regard.normalizers import entmax as threshold
from regard.normalizers.base import TABLE
from regard.testing import formulas

PLAIN = [Softmax(), Sparsemax(), Entmax15(), Entmax(1.3), Entmax(1.9), Entmax(3.0), Sigmoid(), Argmax()]
CONVEX = [n for n in PLAIN if n.convex]
THRESHOLDS = [Sparsemax(), Entmax15(), Entmax(1.1), Entmax(1.7), Entmax(2.0), Entmax(4.0)]

finite = st.floats(-50, 50, width=32)
rows = st.lists(st.one_of(finite, finite, st.just(-math.inf)), min_size=1, max_size=12)


def by_other_means(normalizer, row):
    if isinstance(normalizer, (Entmax, Entmax15)):
        return formulas.entmax(row, normalizer.alpha)
    return formulas.NORMALIZER_FORMULAS[type(normalizer)].weigh(row, normalizer)


@pytest.mark.parametrize("normalizer", PLAIN, ids=repr)
def test_weights_by_other_means(normalizer):
    @settings(max_examples=examples(60), deadline=None, derandomize=True, database=None)
    @given(rows)
    def same(row):
        found = normalizer.weights(torch.tensor([row], dtype=torch.float64)).numpy()
        expected = by_other_means(normalizer, np.array([row], dtype=np.longdouble))
        # A sparse weight near 0 is [α−1 · (s − t)]^(1/(α−1)): a rounding ε of s moves it by up to ε^(1/(α−1)).
        power = min(1.0, 1 / (getattr(normalizer, "alpha", 2.0) - 1))
        size = max((abs(x) for x in row if math.isfinite(x)), default=1.0)
        assert np.abs(found - expected).max() <= (8 * np.finfo(float).eps * (1 + size)) ** power

    same()


@pytest.mark.parametrize("normalizer", CONVEX, ids=repr)
def test_weights_lie_on_the_simplex(normalizer):
    @settings(max_examples=examples(40), deadline=None, derandomize=True, database=None)
    @given(rows)
    def convex(row):
        weights = normalizer.weights(torch.tensor([row], dtype=torch.float64))[0]
        some = any(math.isfinite(x) for x in row)
        assert (weights >= 0).all()
        assert weights.sum().item() == pytest.approx(
            float(some), abs=1e-7 if getattr(normalizer, "alpha", 1) > 2 else 1e-12
        )
        assert all(w == 0 for w, x in zip(weights.tolist(), row) if x == -math.inf)

    convex()


def test_entmax_between_its_neighbours():
    scores = torch.randn(20, 9, dtype=torch.float64)
    torch.testing.assert_close(Entmax(2.0).weights(scores), Sparsemax().weights(scores))
    torch.testing.assert_close(Entmax(1.5).weights(scores), Entmax15().weights(scores))
    torch.testing.assert_close(Entmax(1.0001).weights(scores), Softmax().weights(scores), rtol=1e-3, atol=1e-4)


def test_by_hand():
    row = torch.tensor([[1.0, 0.5, -1.0]], dtype=torch.float64)
    assert Sparsemax().weights(row).tolist() == [[0.75, 0.25, 0.0]]
    assert Sparsemax().weights(torch.tensor([[3.0, 1.0, 0.0]])).tolist() == [[1.0, 0.0, 0.0]]
    # entmax-1.5 of (a, −a): with p = (t + a/2)² and q = (t − a/2)², p + q = 1 gives t² = (1 − a²/2)/2.
    a = 0.5
    t = math.sqrt((1 - a * a / 2) / 2)
    expected = [(t + a / 2) ** 2, (t - a / 2) ** 2]
    assert Entmax15().weights(torch.tensor([[a, -a]], dtype=torch.float64))[0].tolist() == pytest.approx(expected)
    assert Sigmoid().weights(torch.tensor([[math.log(3.0)]]))[0, 0].item() == pytest.approx(0.75)
    assert Argmax().weights(torch.tensor([[1.0, 7.0, 7.0]])).tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("normalizer", PLAIN, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_large_and_empty_rows(normalizer, dtype):
    top = torch.finfo(dtype).max
    scores = torch.tensor(
        [[top, 0.0, -top], [-top, -top, -math.inf], [-math.inf] * 3, [1e4, 1e4 - 1, 0.0]], dtype=dtype
    )
    scores.requires_grad_(not isinstance(normalizer, Argmax))
    weights = normalizer.weights(scores)
    assert weights.isfinite().all() and (weights[2] == 0).all()
    if normalizer.convex:
        torch.testing.assert_close(weights.sum(-1), torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=dtype))
        assert weights[0, 0] == 1
    if scores.requires_grad:
        (gradient,) = torch.autograd.grad(weights.sum(), scores)
        assert gradient.isfinite().all() and (gradient[2] == 0).all()


@pytest.mark.parametrize("normalizer", PLAIN, ids=repr)
def test_nothing_to_weigh(normalizer):
    assert normalizer.weights(torch.zeros(2, 3, 0)).shape == (2, 3, 0)


@pytest.mark.parametrize("normalizer", [Softmax(), Sigmoid(), *THRESHOLDS], ids=repr)
def test_derivatives(normalizer):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(normalizer.weights, scores)
    if getattr(normalizer, "alpha", 0) <= 2:
        assert torch.autograd.gradgradcheck(normalizer.weights, scores)
    assert torch.autograd.gradcheck(normalizer.weights, scores, check_forward_ad=True, check_backward_ad=False)


@pytest.mark.parametrize("normalizer", [n for n in PLAIN if n.streams], ids=repr)
def test_streamed_weights_are_the_weights(normalizer):
    scores = torch.randn(2, 3, 4, 10, dtype=torch.float64)
    scores[0, 0, 0] = -math.inf
    scores[..., 3:6] = -math.inf
    parts = [scores[..., :3], scores[..., 3:6], scores[..., 6:]]
    spans = [torch.arange(3), torch.arange(3, 6), torch.arange(6, 10)]

    def sweep(visit):
        for part, kv_idx in zip(parts, spans):
            visit(part, kv_idx)

    statistic = normalizer.statistic(sweep, scores.new_zeros(2, 3, 4, 1))
    weights = torch.cat([normalizer.tile_weights(part, statistic, kv_idx) for part, kv_idx in zip(parts, spans)], -1)
    torch.testing.assert_close(weights, normalizer.weights(scores), rtol=1e-12, atol=1e-13)


ALPHAS = (1.05, 1.3, 1.5, 1.8, 2.0, 3.0, 8.0)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("keys", [7, 1000])
def test_thresholds_are_as_good_as_the_dtype(alpha, keys):
    generator = torch.Generator().manual_seed(0)
    for size in (0.01, 1.0, 30.0):
        scores = size * torch.randn(6, keys, generator=generator)
        scores[0] = scores[0, 0]  # all alike
        scores[1, 1:] = -math.inf
        found = Entmax(alpha).weights(scores).double().numpy()
        right = formulas.entmax(scores.numpy().astype(np.longdouble), alpha)
        # (α−1)(s − t) has a relative error ε, which the power multiplies; α > 2 feels how well float64 holds t.
        near = 8 * (1 + 1 / (alpha - 1)) * np.finfo(np.float32).eps * right
        least = (64 * np.finfo(float).eps * (1 + abs(scores[:, :1].numpy()))) ** (1 / (alpha - 1)) if alpha > 2 else 0.0
        assert (np.abs(found - right) <= near + least + 1e-7 * right.max(-1, keepdims=True)).all(), (size, alpha)


@pytest.mark.parametrize("normalizer", [Sparsemax(), Entmax15(), Entmax(1.3), Entmax(8.0)], ids=repr)
def test_no_search_goes_over_all_keys_again_and_again(normalizer, monkeypatch):
    visited = []
    plain = threshold._sums

    def counted(rows, t, alpha):
        visited.append(rows.numel())
        return plain(rows, t, alpha)

    monkeypatch.setattr(threshold, "_sums", counted)
    for size in (0.3, 1.0, 10.0):
        visited.clear()
        scores = size * torch.randn(64, 2048, generator=torch.Generator().manual_seed(0))
        normalizer.weights(scores)
        assert sum(visited) <= 8 * scores.numel()


@pytest.mark.parametrize("normalizer", [*PLAIN, Gumbel(), Sampled()], ids=repr)
def test_nan_shows_and_stays_in_its_row(normalizer):
    scores = torch.zeros(3, 100).requires_grad_()
    spoiled = scores + torch.where(torch.arange(300).view(3, 100) == 150, math.nan, 0.0)
    weights = normalizer.weights(spoiled)
    assert weights[1, 50].isnan() and weights[[0, 2]].isfinite().all()
    assert normalizer.row_normalized is False or weights[1].isnan().all()


def test_every_registered_normalizer_is_tested_here():
    for cls in set(TABLE.values()) - {type(n) for n in PLAIN} - {normalizers.Gumbel, normalizers.Sampled}:
        assert ">>>" in (cls.__doc__ or ""), f"{cls.__name__}: an example in its docstring, or a row of PLAIN"
