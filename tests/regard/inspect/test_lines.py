"""Calls with ``order=1``, whose weights are those of lines and may be negative, are recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import AuxRequest, LocalLinear, masks
from regard.inspect import Record, ablate, capture


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("order", [1, LocalLinear(0.1), LocalLinear(solver="cg", steps=3)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"score": "gaussian", "attn_mask": masks.window(3, 3)}])
def test_the_weights_are_those_of_the_call(order: Any, options: dict[str, Any], tmp_path: Path) -> None:
    q, k, v = drawn(3, 2, 2, 9, 4).float().unbind()
    with capture() as record:
        together = regard.attention(q, k, v, order=order, **options)
    alone, aux = regard.attention(q, k, v, order=order, return_aux=AuxRequest(weights=True), **options)
    assert torch.equal(alone, together) and record.coverage.complete
    run = record[0]
    torch.testing.assert_close(run.weights(), aux.weights)
    torch.testing.assert_close(run.weights() @ v, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run.weights(rows=slice(4, 7)), aux.weights[:, :, 4:7])
    torch.testing.assert_close(run.received(), aux.weights.sum(2))
    assert bool((run.weights() < 0).any()) and float(run.entropy().min()) >= 0
    assert torch.equal(run.topk(2).weights, aux.weights.topk(2).values.clamp(min=0)) or "attn_mask" in options
    again = Record.load(record.save(tmp_path / "lines.regard"))
    assert torch.equal(again[0].weights(), run.weights()) and repr(again[0].calls[0].order) == repr(order)
    assert "signed" in str(record.to_html())
    with pytest.raises(ValueError, match="lse: record must hold weights of order 0, got order 1 in ''"):
        run.lse()


def test_by_least_squares_in_float64() -> None:
    """A weight is the output for the value that is 1 at its key alone: the line through weighted points, solved."""
    q, k = drawn(2, 1, 1, 7, 2).unbind()
    with capture() as record:
        regard.attention(q.float(), k.float(), k.float(), order=LocalLinear(1e-3))
    w = (q @ k.mT / 2**0.5).softmax(-1)[0, 0]
    for i in range(7):
        apart = k[0, 0] - q[0, 0, i]
        points = torch.cat((torch.ones(7, 1, dtype=torch.float64), apart), 1)
        ridge = (
            torch.diag(torch.tensor([0.0, 1, 1], dtype=torch.float64)) * 1e-3 / 2 * (w[i] * apart.square().sum(1)).sum()
        )
        line = torch.linalg.solve(points.mT @ (w[i][:, None] * points) + ridge, points.mT * w[i])
        torch.testing.assert_close(record[0].weights()[0, 0, i].double(), line[0], rtol=1e-4, atol=1e-4)


class Lines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = regard.nn.SelfAttention(16, 4, order=1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.attention(x)
        return found


def test_a_layer_and_its_ablation() -> None:
    torch.manual_seed(0)
    model, x = Lines().eval(), torch.randn(1, 6, 16)
    with torch.no_grad(), capture(model) as record:
        before = model(x)
    assert record.layers == ("attention",) and record.coverage.complete
    with torch.no_grad(), ablate(model, "attention", head=[1]), capture(model) as without:
        after = model(x)
    assert not torch.equal(before, after) and not without[0].weights(head=1).any()
    torch.testing.assert_close(without[0].weights(head=0), record[0].weights(head=0))


def test_summaries_of_lines() -> None:
    q, k, v = drawn(3, 1, 2, 9, 4).float().unbind()
    with capture() as whole:
        regard.attention(q, k, v, order=1)
    with capture(keep="summaries", topk=3) as summary:
        regard.attention(q, k, v, order=1)
    torch.testing.assert_close(summary[0].received(), whole[0].received())
    torch.testing.assert_close(summary[0].topk(3).weights, whole[0].topk(3).weights)
