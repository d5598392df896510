"""Scores on examples worked out by hand, and their gradients."""

import math

import numpy as np
import pytest
import torch

import regard
from regard import scores
from regard.scores.base import TABLE
from regard.scores.kernels import kernels
from regard.testing import FORMULAS
from regard.testing.formulas import attributes

INF = math.inf


def compared(score, query, key):
    """Return the scores of one head, (L, S), from (L, E) and (S, E) lists, in float64."""
    query, key = (torch.as_tensor(rows, dtype=torch.float64)[None, None] for rows in (query, key))
    score = score.map_tensors(lambda t: t.double())
    return score.compare(*score.project(query, key))[0, 0]


def attended(score, query, key, value, **options):
    """Return the output of one head, (L, V), from lists."""
    rows = (torch.as_tensor(r, dtype=torch.float64) for r in (query, key, value))
    return regard.attention(*rows, score=score, **options)


#: The first worked example of the catalogue.
QUERY = [[1.0, -1.0, 2.0]]
KEYS = [[2.0, 1.0, -2.0], [1.0, 2.0, -1.0], [3.0, -2.0, 0.0]]
VALUES = [[2.0, 3.0], [1.0, 2.0], [3.0, 1.0]]


def test_worked_example_1():
    assert compared(scores.Dot(), QUERY, KEYS).tolist() == [[-3.0, -3.0, 5.0]]
    weights = [math.exp(-8), math.exp(-8), 1.0]
    expected = [sum(w * v[i] for w, v in zip(weights, VALUES)) / sum(weights) for i in range(2)]
    assert attended("dot", QUERY, KEYS, VALUES)[0].tolist() == pytest.approx(expected, rel=1e-14)
    assert attended("dot", QUERY, KEYS, VALUES, normalizer="argmax").tolist() == [VALUES[2]]


def test_worked_example_2():
    tokens = torch.tensor([[1.0, 0, 1], [0, 2, 1], [1, 0, 1], [0, 2, 1]])
    w_k = torch.tensor([[0.0, 1, 0, 1], [0, 1, 1, 1], [1, 0, 0, 0]])
    w_q = torch.tensor([[1.0, 1, 0, 0], [0, 0, 0, 1], [1, 0, 1, 1]])
    w_v = torch.tensor([[0.0, 0, 1, 1], [2, 3, 0, 1]])
    output = regard.attention((w_q @ tokens).T, (w_k @ tokens).T, (w_v @ tokens).T, score="dot").T
    expected = torch.tensor([[1.9366, 2.0000, 1.9997], [6.6831, 7.9640, 7.7599]])
    torch.testing.assert_close(output, expected, rtol=0, atol=5e-5)


#: Each score, a query (2,), some keys, and the scores by hand.
BY_HAND = [
    (scores.Dot(), [1, 2], [[3, 4], [-1, 0]], [11, -1]),
    (scores.ScaledDot(), [1, 2], [[3, 4], [-1, 0]], [11, -1]),  # its 1/√E is a scale
    (scores.General(torch.tensor([[0.0, 1.0], [2.0, 0.0]])), [1, 2], [[3, 4], [-1, 0]], [16, -4]),
    (
        scores.Additive(torch.tensor([2.0, 1.0]), torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, -1.0]])),
        [1, 2], [[3, 4], [-1, 2]],
        [2 * math.tanh(4) + math.tanh(-2), 0.0],
    ),
    (scores.Additive(torch.tensor([1.0, 3.0])), [1, 2], [[-1, 0]], [3 * math.tanh(2)]),
    (
        scores.Concat(torch.tensor([1.0, -1.0]), torch.tensor([[1.0, 0, 0, 1], [0, 1, 2, 0]])),
        [1, 2], [[3, 4], [-1, 0]],
        [math.tanh(5) - math.tanh(8), math.tanh(1)],
    ),
    (scores.Location(torch.tensor([[1.0, 0], [0, 2], [5, 5]])), [1, 2], [[9, 9], [7, 7]], [1, 4]),
    (scores.Cosine(), [3, 4], [[30, 40], [-4, 3], [-3, -4], [0, 0]], [1, 0, -1, 0]),
    (scores.Cosine(0.5), [3, 4], [[4, 3]], [2 * 24 / 25]),
    (scores.Gaussian(2.0), [1, 2], [[1, 2], [4, 6], [1, 4]], [0, -25 / 8, -0.5]),
    (scores.Gaussian(torch.tensor([1.0, 2.0])), [1, 2], [[2, 2], [1, 6]], [-0.5, -2]),
    (scores.Laplacian(2.0), [1, 2], [[1, 2], [4, 6], [1, 0]], [0, -7 / 2, -1]),
    (scores.Laplacian(torch.tensor([1.0, 2.0])), [1, 2], [[2, 2], [0, 6]], [-1, -3]),
    (scores.Boxcar(2.0), [1, 2], [[1, 4], [3, 2], [3, 3], [1, 2]], [0, 0, -INF, 0]),
    (scores.Triangular(4.0), [1, 2], [[1, 2], [1, 5], [1, 6], [5, 6]], [0, math.log(1 / 4), -INF, -INF]),
    (scores.Epanechnikov(4.0), [1, 2], [[1, 2], [1, 4], [1, 6]], [0, math.log(3 / 4), -INF]),
    (scores.Constant(), [1, 2], [[3, 4], [-1, 0]], [0, 0]),
    (scores.ScoreMod(lambda score, b, h, q, k: score, scores.Dot()), [1, 2], [[3, 4]], [11]),
]  # fmt: skip


@pytest.mark.parametrize(("score", "query", "keys", "expected"), BY_HAND, ids=[repr(row[0]) for row in BY_HAND])
def test_by_hand(score, query, keys, expected):
    assert compared(score, [query], keys)[0].tolist() == pytest.approx(expected, rel=1e-14, abs=1e-14)


@pytest.mark.parametrize(("score", "query", "keys", "expected"), BY_HAND, ids=[repr(row[0]) for row in BY_HAND])
def test_the_oracles_formula_by_hand(score, query, keys, expected):
    formula = FORMULAS.get(type(score))
    if formula is None:
        pytest.skip("a ScoreMod has its base's formula")
    inside = attributes(score, lambda t: t.double().numpy())
    found = formula(np.array([query], dtype=float), np.array(keys, dtype=float), inside)
    assert found[0].tolist() == pytest.approx(expected, rel=1e-14, abs=1e-14)


def test_every_registered_score_is_tested_by_hand():
    by_hand = {type(row[0]) for row in BY_HAND}
    for cls in set(TABLE.values()) - by_hand:
        assert ">>>" in (cls.__doc__ or ""), f"{cls.__name__}: an example in its docstring, or a row of BY_HAND"


def test_the_oracle_has_formulas_of_its_own():
    assert {type(row[0]) for row in BY_HAND} | set(kernels().values()) <= {*FORMULAS, scores.ScoreMod}


def test_default_scales():
    assert scores.ScaledDot().default_scale(64) == 0.125
    assert all(row[0].default_scale(64) == 1.0 for row in BY_HAND if not isinstance(row[0], (scores.ScaledDot)))
    assert scores.ScoreMod(lambda score, b, h, q, k: score).default_scale(64) == 0.125


def test_additive_and_concat_are_the_same_score():
    w_v, w_q, w_k = torch.randn(5), torch.randn(5, 3), torch.randn(5, 2)
    query, key = torch.randn(4, 3), torch.randn(6, 2)
    additive = compared(scores.Additive(w_v, w_q, w_k), query, key)
    concat = compared(scores.Concat(w_v, torch.cat((w_q, w_k), 1)), query, key)
    torch.testing.assert_close(additive, concat)


def test_per_head_parameters_are_each_heads_own():
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    weight = torch.randn(2, 4, 4)
    both = regard.attention(query, key, key, score=scores.General(weight), engine="reference")
    for h in range(2):
        one = regard.attention(
            query[:, h : h + 1], key[:, h : h + 1], key[:, h : h + 1], score=scores.General(weight[h])
        )
        torch.testing.assert_close(both[:, h : h + 1], one)


@pytest.mark.parametrize("engine", ["reference", "streaming", "sdpa"])
def test_cosine_of_a_zero_vector_is_zero_with_zero_gradient(engine):
    query = torch.tensor([[0.0, 0.0], [1.0, 0.0]], requires_grad=True)
    key = torch.tensor([[0.0, 0.0], [2.0, 0.0]], requires_grad=True)
    value = torch.tensor([[1.0], [3.0]])
    output = regard.attention(query, key, value, score="cosine", engine=engine)
    assert output[0].item() == pytest.approx(2.0, rel=1e-6)
    assert output[1].item() == pytest.approx((1 + 3 * math.e) / (1 + math.e), rel=1e-6)
    output.sum().backward()
    assert (query.grad[0] == 0).all() and (key.grad[0] == 0).all() and query.grad.isfinite().all()


def test_cosine_does_not_overflow():
    large = torch.tensor([[1e30, 1e30]])
    assert compared(scores.Cosine(), large.tolist(), [[1e-30, 1e-30]]).item() == pytest.approx(1.0)
    assert scores.Cosine().project(large, large)[0].isfinite().all()


def test_a_score_mod_may_hold_tensors_that_learn():
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(2, generator=generator, dtype=torch.float64, requires_grad=True)
    query = torch.randn(1, 2, 40, 4, generator=generator, dtype=torch.float64)
    found = []
    for engine in ("reference", "streaming"):
        output = regard.attention(query, query, query, score=lambda s, b, h, q, k: s * bias[h].exp(), engine=engine)
        found.append(torch.autograd.grad(output.square().sum(), bias)[0])
    assert found[0].abs().min() > 0
    torch.testing.assert_close(*found)
