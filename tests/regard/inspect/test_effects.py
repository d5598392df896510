"""What a model answers without a head, against the same model with the head's values set to zero."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.inspect import head_effect

LABELS = ("cat", "dog", "fox")


class Small(nn.Module):
    """One layer of attention and three answers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


@pytest.fixture
def model() -> Small:
    return Small().eval()


def without_values(model: Small, head: int) -> Small:
    """The same model, whose head reads zeros: the oracle."""
    other = Small().eval()
    other.load_state_dict(model.state_dict())
    rows = slice(16 + 4 * head, 16 + 4 * (head + 1))
    with torch.no_grad():
        other.attention.in_proj_weight[rows] = 0
        other.attention.in_proj_bias[rows] = 0
    return other


@pytest.mark.parametrize("head", [0, 1])
@torch.no_grad()
def test_the_answer_is_that_of_a_model_whose_head_reads_zeros(model: Small, head: int) -> None:
    x = 5 * torch.randn(2, 6, 8)
    found = head_effect(model, lambda: model(x), "attention", head, names=LABELS.__getitem__, batch=1)
    before, after = (each(x)[1, -1].double().softmax(-1) for each in (model, without_values(model, head)))
    for kept, expected in ((found.before, before), (found.after, after)):
        assert dict(kept) == pytest.approx(dict(zip(LABELS, expected.tolist())), abs=1e-6)
        assert [share for _, share in kept] == sorted((share for _, share in kept), reverse=True)
    assert found.change == pytest.approx(float((before - after).abs().sum()) / 2, abs=1e-6)
    assert f'"{found.after[0][0]}"' in found.text and str(found) == found.text
    assert json.loads(json.dumps(found.as_dict()))["text"] == found.text


@torch.no_grad()
def test_outputs_without_names_change_by_their_size(model: Small) -> None:
    x = torch.randn(1, 6, 8)
    for wrap in (lambda out: out, lambda out: (out, None), lambda out: SimpleNamespace(last_hidden_state=out)):
        found = head_effect(model, lambda: wrap(model(x)), 0, 1)  # noqa: B023
        one, other = (each(x).double() for each in (model, without_values(model, 1)))
        assert found.change == pytest.approx(float((one - other).norm() / one.norm()), abs=1e-5)
        assert found.before == () and found.text.startswith("without this head the output changes by ")


def test_the_same_answer_is_said(model: Small) -> None:
    with torch.no_grad():
        model.head.bias[:] = torch.tensor([0.0, 50.0, 0.0])
    found = head_effect(model, lambda: model(torch.zeros(1, 2, 8)), 0, 0, names=LABELS.__getitem__)
    assert found.text == 'without this head the answer is still "dog" (1.00, not 1.00)'


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"layer": "nowhere"}, ValueError, r"the number or the name of 0 .attention., got 'nowhere'"),
        ({"head": 2}, ValueError, "ablate: head must be one or more numbers below 2, got 2"),
        ({"batch": 1}, ValueError, "head_effect: batch must be below 1, the batch size, got 1"),
        ({"run": lambda: 3}, TypeError, "head_effect: run must return a tensor or what has logits, got 3"),
        ({"run": None, "names": LABELS.__getitem__}, ValueError, r"run must return logits \(B, N\) or \(B, L, N\)"),
    ],
)
def test_what_is_wrong_is_said(model: Small, given: dict[str, Any], kind: type[Exception], message: str) -> None:
    whole = {"layer": 0, "head": 0} | given
    x = torch.zeros(1, 2, 8)
    run = whole.pop("run", lambda: model(x)) or (lambda: model(x)[None])
    with pytest.raises(kind, match=message):
        head_effect(model, run, **whole)
