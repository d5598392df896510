"""Products of inference: equal rows once, oneDNN where it can; the same numbers as torch's linear layers and cells."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.models import RecurrentConfig, RecurrentEncoderDecoder, _products
from regard.models._products import cell_step, linear, shared_linear


def _error(made: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> float:
    """Return the largest distance from the product in float64."""
    exact = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
    return (made.double() - exact).abs().max().item()


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    width=st.integers(1, 70),
    count=st.integers(1, 300),
    biased=st.booleans(),
    turned=st.booleans(),
)
def test_products_are_within_the_error_of_torchs(shape, width, count, biased, turned) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(*size, generator=generator) for size in ((*shape, width), (count, width)))
    bias = torch.randn(count, generator=generator) if biased else None
    if turned:  # no longer contiguous
        rows = rows.transpose(0, -2).contiguous().transpose(0, -2) if len(shape) > 1 else rows
        weight = weight.T.contiguous().T
    with torch.no_grad():
        made = linear(rows, weight, bias)
    assert made.shape == (*shape, count)
    # Where torch happens to err little: four units of the sum of the terms' sizes, of which any order may err by n.
    size = (rows.abs() @ weight.abs().T).max().item() + (0 if bias is None else bias.abs().max().item())
    budget = max(
        4 * _error(F.linear(rows, weight, bias), rows, weight, bias), 4 * torch.finfo(torch.float32).eps * size
    )
    assert _error(made, rows, weight, bias) <= budget


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
def test_gradients_and_other_types_go_through_torch(dtype) -> None:
    torch.manual_seed(0)
    rows, weight, bias = torch.randn(3, 5, dtype=dtype), torch.randn(4, 5, dtype=dtype), torch.randn(4, dtype=dtype)
    weight.requires_grad_(True)
    assert linear(rows, weight, bias).requires_grad
    with torch.no_grad():
        made = linear(rows, weight, bias)
    assert made.dtype == dtype
    torch.testing.assert_close(made, F.linear(rows, weight, bias).detach())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert linear(rows.float(), weight.float(), bias.float()).dtype == torch.bfloat16
    assert linear(rows.float()[:0], weight.float(), bias.float()).shape == (0, 4)


def test_float32_goes_to_onednn_where_torch_has_it(monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(_products, "_ONEDNN", lambda *given: calls.append(given) or "made")
    rows, weight = torch.randn(3, 5), torch.randn(4, 5)
    with torch.no_grad():
        assert linear(rows, weight) == "made"
        assert linear(rows.double(), weight.double()).shape == (3, 4)
    assert linear(rows, weight).shape == (3, 4) and len(calls) == 1


@settings(derandomize=True, deadline=None, max_examples=30)
@given(alike=st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_equal_rows_are_computed_once(alike) -> None:
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(10, 6, generator=generator, dtype=torch.float64)
    weight, bias = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((8, 6), (8,)))
    numbers = torch.tensor(alike)
    with mock.patch.object(_products, "linear", wraps=linear) as product:
        made = shared_linear(table[numbers], weight, bias, numbers)
    torch.testing.assert_close(made, F.linear(table[numbers], weight, bias))
    (called,) = product.call_args_list
    assert len(called.args[0]) == len(set(alike))


def test_dropout_that_is_left_on_draws_for_every_beam() -> None:
    config = RecurrentConfig(sources=9, targets=9, encoder=8, decoder=8, dropout=0.5)
    model = RecurrentEncoderDecoder(config).eval()
    model.dropout.train()
    torch.manual_seed(0)
    with torch.no_grad():
        memory = model.encode(torch.tensor([[2, 3]]), torch.tensor([2]))
        _, state = model.step(torch.full((1, 6), 1), memory, model.start(memory, 6))
    assert len(state.hidden[0].unique(dim=0)) > 1, "all beams got one draw"


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
@pytest.mark.parametrize("shared", [False, True])
def test_cells_step_as_torchs_do(kind, shared) -> None:
    torch.manual_seed(0)
    layer = kind(6, 5).double()
    numbers = torch.tensor([3, 0, 3, 2, 0, 0]) if shared else torch.arange(6)
    rows, hidden, cell = (torch.randn(6, width, dtype=torch.float64)[numbers] for width in (6, 5, 5))
    state = (hidden, cell) if kind is torch.nn.LSTM else (hidden,)
    weights = layer.all_weights[0]
    expected = cell_step(rows, state, weights, (None, None))  # with gradients: torch's own
    with torch.no_grad():
        made = cell_step(rows, state, weights, (numbers, numbers) if shared else (None, None))
    assert len(made) == len(state) == len(expected)
    assert all(part.requires_grad for part in expected)
    for part, other in zip(made, expected):
        torch.testing.assert_close(part, other.detach())
