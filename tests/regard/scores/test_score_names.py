"""Scores by name, and what is said where a score does not fit."""

import numpy as np
import pytest
import torch

import regard
from regard import nn, normalizers, scores
from regard.scores.base import TABLE

DRAW = torch.Generator().manual_seed(0)
Q, K = torch.randn(1, 2, 3, 4, generator=DRAW), torch.randn(1, 2, 5, 4, generator=DRAW)


@pytest.mark.parametrize("name", [n for n in TABLE if n not in ("additive", "concat", "general", "location")])
def test_a_name_is_the_score_with_its_defaults(name):
    named = regard.attention(Q, K, K, score=name)
    torch.testing.assert_close(named, regard.attention(Q, K, K, score=TABLE[name]()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("typo", "meant"), [("gausian", "gaussian"), ("scaled-dot", "scaled_dot"), ("Cosine", "cosine")]
)
def test_a_typo_is_told_what_it_may_mean(typo, meant):
    known = ", ".join(repr(name) for name in sorted(TABLE))
    with pytest.raises(ValueError) as error:
        regard.attention(Q, K, K, score=typo)
    assert str(error.value) == f"attention: score must be one of {known}, got {typo!r} (did you mean {meant!r}?)."


def called(key=K, score=None):
    return lambda: regard.attention(Q, key, K, score=score)


NARROW = "key must have query's head width 4, got 3 (query (1, 2, 3, 4), key (1, 2, 5, 3))."
TOO_SHORT = "score Location's weight must have at least one row for each of 5 keys and query's width 4, got (4, 4)."
#: What is called, and the message behind the function's name.
MISFITS = [
    (called(K[..., :3]), NARROW),
    (called(K[..., :3], "gaussian"), NARROW),
    (called(score=scores.Location(torch.ones(4, 4))), TOO_SHORT),
    (
        called(score=scores.Concat(torch.ones(3), torch.ones(3, 7))),
        "score Concat's weight must have 4 + 4 columns, the widths of query and key, got (3, 7).",
    ),
    (
        called(score=scores.Additive(torch.ones(3), None, torch.ones(3, 4))),
        "query must have w_v's 3 features (no w_q given), got 4 (query (1, 2, 3, 4)).",
    ),
    (
        called(score=scores.General(torch.ones(3, 4, 4))),
        "score General's weight must have shape (4, 4) or (2, 4, 4), got (3, 4, 4).",
    ),
    (
        called(score=scores.Triangular(torch.ones(3))),
        "score Triangular's width must have shape () or (4,), query's head width, got (3,).",
    ),
]


@pytest.mark.parametrize(("call", "message"), MISFITS, ids=range(len(MISFITS)))
def test_a_misfit_is_told(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == f"attention: {message}"


def test_scores_of_mixed_widths():
    wide = torch.randn(1, 2, 5, 6)
    mixing = [
        scores.General(torch.randn(4, 6)),
        scores.Concat(torch.randn(3), torch.randn(3, 10)),
        scores.Additive(torch.randn(3), torch.randn(3, 4), torch.randn(3, 6)),
        scores.Location(torch.randn(9, 4)),
        "constant",
    ]
    for score in mixing:
        assert regard.attention(Q, wide, K, score=score).shape == (1, 2, 3, 4)


@pytest.mark.parametrize(
    "make",
    [
        scores.Boxcar,
        scores.Cosine,
        scores.Gaussian,
        normalizers.Entmax,
        normalizers.Gumbel,
        nn.CosineAttention,
        lambda value: nn.KernelAttention(width=value),
        lambda value: nn.RelativePositions(4, 3, scale=value),
        lambda value: nn.DotProductAttention(value / 4),
        lambda value: nn.Rotary(4, base=value),
        lambda value: nn.HardAttention(4, 4, 4, entropy=value),
    ],
)
def test_numbers_of_numpy_are_numbers(make):
    # A bandwidth that an estimator chose is a number of NumPy, in the dtype of its data.
    plain = repr(make(2.0))
    for kind in (np.float32, np.float64, np.int64):
        assert repr(make(kind(2))) in (plain, plain.replace("2.0", "2"))
