"""Softmax with a sink: its definition by a key without a value, its gradients, what it rejects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import AuxRequest, masks
from regard.normalizers import SoftmaxSink

ENGINES = ("reference", "streaming", "sdpa", "fused")
REQUEST = AuxRequest(lse=True, max=True, entropy=True, topk=3, received=True)


def inputs(dtype: torch.dtype = torch.float32, L: int = 70, S: int = 75) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, L, 8), (2, 2, S, 8), (2, 2, S, 8)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def with_a_key_without_value(query: Tensor, key: Tensor, value: Tensor, sink: Tensor, visible: Tensor) -> Tensor:
    """Return softmax over the keys and one more, whose score is the sink's and whose value is 0."""
    key, value = (t.repeat_interleave(2, 1) for t in (key, value))
    scores = (query @ key.mT / 8**0.5).masked_fill(~visible, -torch.inf)
    sink = sink.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1] @ value


MASKS: dict[str, tuple[Any, Tensor]] = {
    "none": (None, torch.ones(1, 75, dtype=torch.bool)),
    "causal": (masks.causal(offset=0), torch.ones(70, 75, dtype=torch.bool).tril()),
    "padding": (masks.padding(torch.tensor([60, 0])), torch.arange(75) < torch.tensor([60, 0]).view(2, 1, 1, 1)),
    "dense": ((torch.arange(75) % 3 > 0)[None], torch.arange(75) % 3 > 0),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mask", MASKS)
def test_a_sink_is_a_key_without_a_value(mask: str, engine: str) -> None:
    leaves, sink = inputs(), torch.tensor([0.5, -2.0, 3.0, 30.0], requires_grad=True)
    wide, wide_sink = [t.detach().double().requires_grad_() for t in leaves], sink.detach().double().requires_grad_()
    given, visible = MASKS[mask]
    output = regard.attention(*leaves, given, normalizer=SoftmaxSink(sink), engine=engine, enable_gqa=True)
    right = with_a_key_without_value(*wide, wide_sink, visible)
    torch.testing.assert_close(output.double(), right, rtol=1e-4, atol=1e-6)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(output, [*leaves, sink], upstream)
    for a, b in zip(found, torch.autograd.grad(right, [*wide, wide_sink], upstream.double())):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_only_the_sink_wants_a_gradient(engine: str) -> None:
    leaves, sink = [t.detach() for t in inputs()], torch.zeros((), requires_grad=True)
    output = regard.attention(*leaves, normalizer=SoftmaxSink(sink), engine=engine, enable_gqa=True)
    (found,) = torch.autograd.grad(output.sum(), sink)
    each = torch.zeros(4, requires_grad=True)
    right = with_a_key_without_value(*leaves, each, torch.ones(1, 75, dtype=torch.bool))
    torch.testing.assert_close(found, torch.autograd.grad(right.sum(), each)[0].sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_auxiliary_outputs_agree_with_the_reference(engine: str) -> None:
    leaves, sink = [t.detach() for t in inputs()], torch.tensor([0.0, 90.0, -90.0, 2.0])
    named: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "return_aux": REQUEST}
    found, right = (
        regard.attention(*leaves, normalizer=SoftmaxSink(sink), engine=each, **named) for each in (engine, "reference")
    )
    plain = regard.attention(*leaves, **named)[1]
    torch.testing.assert_close(found[0], right[0], rtol=1e-4, atol=1e-5)
    for name in ("lse", "max", "entropy", "received"):
        torch.testing.assert_close(getattr(found[1], name), getattr(right[1], name), rtol=1e-4, atol=1e-5)
    assert torch.equal(found[1].topk.indices, right[1].topk.indices)
    torch.testing.assert_close(found[1].topk.weights, right[1].topk.weights, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1].lse, plain.lse, rtol=1e-4, atol=1e-5)  # without the sink


@pytest.mark.parametrize("engine", ENGINES)
def test_extremes(engine: str) -> None:
    leaves = [t.detach() for t in inputs()]
    named: dict[str, Any] = {"attn_mask": masks.padding(torch.tensor([60, 0])), "enable_gqa": True, "engine": engine}
    none = regard.attention(*leaves, **named, normalizer=SoftmaxSink(-torch.inf))
    torch.testing.assert_close(none, regard.attention(*leaves, **named))
    assert (regard.attention(*leaves, **named, normalizer=SoftmaxSink(1e30)) == 0).all()
    some = regard.attention(*leaves, **named, normalizer="softmax_sink")
    assert (some[1] == 0).all()
    assert (some[0] != 0).any(-1).all()


def test_what_it_rejects() -> None:
    with pytest.raises(
        ValueError, match=r"SoftmaxSink: sink must be a number, or a floating-point tensor of one logit"
    ):
        SoftmaxSink(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"SoftmaxSink: sink must be less than infinity, got inf"):
        SoftmaxSink(float("inf"))
    with pytest.raises(TypeError, match=r"SoftmaxSink: sink must be a number or a tensor, got"):
        SoftmaxSink("0")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"SoftmaxSink: sink must have one logit, or one for each of query's 4 heads"):
        regard.attention(*inputs(), normalizer=SoftmaxSink(torch.zeros(3)), enable_gqa=True)
