"""Attention by positions alone: what the sequence holds has no influence on the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard
from regard import AuxRequest
from regard.nn.heads.synthesizer import FactorizedPositionalAttention, PositionalAttention

F64 = torch.float64
WEIGHTS = AuxRequest(weights=True)
both = pytest.mark.parametrize("make", [PositionalAttention, FactorizedPositionalAttention])


@both
def test_weights_do_not_depend_on_what_the_sequence_holds(make: Any) -> None:
    torch.manual_seed(0)
    layer = make(8, dtype=F64)
    found = [layer(torch.randn(3, 6, 2, dtype=F64), return_aux=WEIGHTS)[1].weights for _ in range(2)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0][0], found[0][2])
    assert found[0].shape == (3, 6, 6)
    torch.testing.assert_close(found[0].sum(-1), torch.ones(3, 6, dtype=F64))


@both
def test_shorter_sequences_use_the_first_positions(make: Any) -> None:
    torch.manual_seed(0)
    layer, x = make(8, dtype=F64), torch.randn(2, 8, 3, dtype=F64)
    cut = layer(x, torch.tensor([5, 5]))
    torch.testing.assert_close(layer(x[:, :5]), cut[:, :5])


@both
def test_lengths_per_position_and_empty_rows(make: Any) -> None:
    torch.manual_seed(0)
    layer, x = make(4, dtype=F64), torch.randn(2, 4, 3, dtype=F64)
    lengths = torch.tensor([[1, 2, 3, 4], [0, 4, 0, 1]])
    output, aux = layer(x, lengths, return_aux=WEIGHTS)
    assert torch.equal(aux.weights > 0, torch.arange(4) < lengths.unsqueeze(-1))
    assert not output[1, 0].any() and torch.equal(output[0, 0], x[0, 0])


@both
def test_causality(make: Any) -> None:
    torch.manual_seed(0)
    layer = make(5, dtype=F64)
    x = torch.randn(1, 5, 3, dtype=F64, requires_grad=True)
    (slope,) = torch.autograd.grad(layer(x, is_causal=True)[0, 2].sum(), x)
    assert slope[0, :3].all() and not slope[0, 3:].any()


@both
def test_a_mask_for_each_sequence(make: Any) -> None:
    torch.manual_seed(0)
    layer, seen = make(5), torch.rand(2, 5, 5) < 0.5
    _, aux = layer(torch.randn(2, 5, 3), attn_mask=seen, return_aux=WEIGHTS)
    assert torch.equal(aux.weights > 0, seen)


@both
def test_other_normalizers_and_dropout(make: Any) -> None:
    torch.manual_seed(0)
    layer = make(6, dropout=1.0, normalizer="sparsemax")
    x = torch.randn(1, 6, 3)
    assert not layer(x).any() and layer.eval()(x).any()
    assert "normalizer='sparsemax'" in repr(layer) and "dropout=1.0" in repr(layer)


@both
def test_it_learns_a_permutation(make: Any) -> None:
    torch.manual_seed(0)
    layer, order = make(6), torch.tensor([3, 0, 5, 1, 4, 2])
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(200):
        x = torch.randn(16, 6, 4)
        loss = (layer(x) - x[:, order]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.05


def test_a_product_of_factors_is_the_matrix() -> None:
    torch.manual_seed(0)
    thin, full, x = (
        FactorizedPositionalAttention(7, 2, dtype=F64),
        PositionalAttention(7, dtype=F64),
        torch.randn(2, 6, 3, dtype=F64),
    )
    full.load_state_dict({"weight": thin.rows @ thin.columns.T})
    torch.testing.assert_close(thin(x), full(x))
    assert (thin.rows @ thin.columns.T).detach().std() < 3 / 7**0.5


def test_the_factorized_scores_are_never_held_all_at_once() -> None:
    layer = FactorizedPositionalAttention(64, 4)
    plan = regard.explain(layer.rows[None, None], layer.columns[None, None], torch.randn(1, 1, 64, 8), score="dot")
    assert not plan.cost.grows


@both
def test_errors(make: Any) -> None:
    name, layer = make.__name__, make(5)
    with pytest.raises(ValueError, match=rf"{name}: value must have at most 5 rows \(max_length\), got 6\."):
        layer(torch.randn(2, 6, 3))
    with pytest.raises(ValueError, match=rf"{name}: value must have shape \(B, N, E\), got \(6, 3\)\."):
        layer(torch.randn(6, 3))
    with pytest.raises(ValueError, match=rf"{name}: max_length must be an int of at least 1, got 0\."):
        make(0)
    with pytest.raises(ValueError, match="rank must be an int of at least 1, got -1"):
        FactorizedPositionalAttention(5, -1)
