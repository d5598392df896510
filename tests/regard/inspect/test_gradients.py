"""Gradients in weights are those that autograd finds where a softmax is written out, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hugging_face_models import DECODERS, made, tokens
from pairwise import across
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import regard
from regard import masks
from regard.inspect import Record, capture
from regard.integrations.transformers import register


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def explicit(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, softcap: float | None, upstream: Tensor
) -> tuple[Tensor, Tensor]:
    """Weights, and a loss's gradients in them, by autograd through the formula."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    weights = (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).softmax(-1).requires_grad_()
    ((weights @ value) * upstream).sum().backward()
    assert weights.grad is not None
    return weights.detach(), weights.grad


@across(
    {"engine": ["auto", "reference", "streaming"], "softcap": [None, 1.5], "hidden": [False, True], "groups": [1, 2, 4]}
)
def test_gradients_in_weights(groups: int, hidden: bool, softcap: float | None, engine: str) -> None:
    query, key, value = drawn(2, 4, 5, 8), drawn(2, groups, 7, 8, seed=1), drawn(2, groups, 7, 3, seed=2)
    upstream, seen = drawn(2, 4, 5, 3, seed=3), masks.window(2, 1, offset=2) if hidden else None
    behind = torch.arange(7) - torch.arange(5)[:, None] - 2
    marks = (behind >= -2) & (behind <= 1) if hidden else None
    with capture(gradients=True) as record:
        leaves = [each.clone().requires_grad_() for each in (query, key, value)]
        output = regard.attention(*leaves, seen, softcap=softcap, enable_gqa=groups < 4, engine=engine)
    (output * upstream).sum().backward()
    weights, expected = explicit(query, key, value, marks, softcap, upstream)
    found = record[0].gradients()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((record[0].weights() * found).double(), weights * expected, rtol=1e-5, atol=1e-5)
    part = record[0].gradients(batch=1, head=2, rows=slice(1, 4), cols=3)
    torch.testing.assert_close(part.double(), expected[1, 2, 1:4, 3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "regard"])
@pytest.mark.parametrize("name", ["gpt2", "llama, grouped", "gemma 2, softcap", "gpt-oss, sinks"])
def test_layers_of_hugging_face(name: str, implementation: str) -> None:
    """The weights that the eager attention returns hold their gradients themselves."""
    model, given = made(DECODERS[name]()), tokens()
    eager = model(given, output_attentions=True, use_cache=False, labels=given)
    for each in eager.attentions:
        each.retain_grad()
    eager.loss.backward()
    if name in ("gemma 2, softcap", "gpt-oss, sinks") and implementation == "sdpa":
        return  # transformers has no other
    model.set_attn_implementation(implementation)
    found = []
    for _ in range(2):
        model.zero_grad()
        with capture(model, gradients=bool(found)) as record:
            model(given, use_cache=False, labels=given).loss.backward()
        found.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
    assert all(map(torch.equal, *found))
    for run, each in zip(record, eager.attentions, strict=True):
        seen = each.detach() > 0
        assert float((run.gradients() - each.grad)[seen].abs().max()) < 2e-5 * float(each.grad.abs().max())


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_torchs_layer(needed: bool, batched: bool) -> None:
    torch.manual_seed(0)
    attend = nn.MultiheadAttention(8, 2).double()
    x, upstream = drawn(5, 3, 8), drawn(5, 3, 8, seed=1)
    if not batched:
        x, upstream = x[:, 0], upstream[:, 0]
    before = {}
    for recorded in (False, True):
        attend.zero_grad()
        with capture(attend, gradients=recorded) as record:
            output = attend(x, x, x, need_weights=needed)[0]
            (output * upstream).sum().backward()
        before[recorded] = [each.grad.clone() for each in attend.parameters()]
    assert all(map(torch.equal, before[False], before[True]))
    query, key, value = (
        rows.reshape(5, -1, 2, 4).permute(1, 2, 0, 3)
        for rows in F.linear(x, attend.in_proj_weight, attend.in_proj_bias).detach().chunk(3, -1)
    )
    read = (upstream @ attend.out_proj.weight.detach()).reshape(5, -1, 2, 4).permute(1, 2, 0, 3)
    _, expected = explicit(query, key, value, None, None, read)
    torch.testing.assert_close(record[0].gradients().double(), expected, rtol=1e-5, atol=1e-5)


def test_the_latest_backward_pass_counts_and_files_hold_it(tmp_path: Path) -> None:
    query, value = drawn(1, 2, 5, 8).requires_grad_(), drawn(1, 2, 5, 3, seed=1)
    with capture(gradients=True) as record:
        output = F.scaled_dot_product_attention(query, query, value)
    found = []
    for factor in (1.0, 3.0):
        (factor * output).sum().backward(retain_graph=True)
        found.append(record[0].gradients())
    torch.testing.assert_close(found[1], 3 * found[0])
    read = Record.load(record.save(tmp_path / "run.regard"))
    assert torch.equal(read[0].gradients(), found[1])
    assert record.nbytes > 2 * query.nbytes / 2


def test_rows_that_come_one_by_one() -> None:
    query, key, value = drawn(1, 2, 4, 8), drawn(1, 2, 4, 8, seed=1), drawn(1, 2, 4, 3, seed=2).requires_grad_()
    upstream = drawn(1, 2, 4, 3, seed=3)
    with capture(gradients=True) as record:
        for i in range(4):
            parts = query[:, :, i : i + 1], key[:, :, : i + 1], value[:, :, : i + 1]
            (F.scaled_dot_product_attention(*parts) * upstream[:, :, i : i + 1]).sum().backward()
    seen = torch.ones(4, 4, dtype=torch.bool).tril()
    _, expected = explicit(query, key, value.detach(), seen, None, upstream)
    assert len(record.runs(0)) == 1
    torch.testing.assert_close(record[0].gradients().double(), expected * seen, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("call", [lambda q: F.scaled_dot_product_attention(q, q, q), lambda q: checkpoint(
    lambda each: F.scaled_dot_product_attention(each, each, each), q, use_reentrant=False)])  # fmt: skip
def test_checkpoints(call: Callable[[Tensor], Tensor]) -> None:
    query = drawn(1, 2, 5, 8).requires_grad_()
    with capture(gradients=True) as record:
        call(query).sum().backward()
    _, expected = explicit(*(query.detach(),) * 3, None, None, torch.ones(1, 2, 5, 8, dtype=torch.float64))
    torch.testing.assert_close(record[0].gradients().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("given", [{}, {"gradients": True}])
def test_where_there_are_none(given: dict[str, Any]) -> None:
    query = drawn(1, 2, 5, 8)
    with capture(**given) as record:
        F.scaled_dot_product_attention(query, query, query)
    with pytest.raises(ValueError, match=r"gradients: record must be captured with gradients=True and with"):
        record[0].gradients()
    with capture(gradients=True) as record:
        F.scaled_dot_product_attention(query.requires_grad_(), query, query)
    with pytest.raises(ValueError, match="gradients: record must be of a run with a backward pass"):
        record[0].gradients()
    with (
        pytest.raises(ValueError, match="capture: gradients must be False with keep='summaries'"),
        capture(keep="summaries", gradients=True),
    ):
        pass
