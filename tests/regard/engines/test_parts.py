"""The gradient of a part of the keys, from the output and log-sum-exp of all of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from pairwise import across
from torch import Tensor

import regard
from regard import engines, masks, scores
from regard.engines.problem import Call, Problem

B, H, L, E = 2, 4, 200, 6
#: Where the keys are divided.
EDGES = (0, 70, 200)


def additive(dtype: torch.dtype) -> scores.Score:
    g = torch.Generator().manual_seed(5)
    w = [torch.randn(E, E, generator=g, dtype=dtype).requires_grad_() for _ in range(2)]
    return scores.Additive(torch.randn(E, generator=g, dtype=dtype).requires_grad_(), *w)


def wide_gaussian(dtype: torch.dtype) -> scores.Score:
    return scores.Gaussian(torch.full((E,), 1.5, dtype=dtype).requires_grad_())


def boxcar(dtype: torch.dtype) -> scores.Score:
    return scores.Epanechnikov(torch.full((E,), 4.0, dtype=dtype).requires_grad_())


CASES: list[tuple[str, Any]] = [
    ("sdpa", None),
    ("sdpa", lambda _: scores.Cosine()),
    ("fused", None),
    ("fused", additive),
    ("fused", wide_gaussian),
    ("fused", boxcar),
    ("streaming", None),
    ("streaming", additive),
]
lengths = torch.tensor([150, 0])
ids = torch.arange(L) // 60
MASKS: dict[str, Any] = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.window(40, 3),
    "padding": masks.padding(lengths),
    "documents": masks.document(ids) & masks.causal(),
    "matrix": torch.rand(H, L, L, generator=torch.Generator().manual_seed(3)) < 0.3,
    "alibi": masks.causal() & masks.alibi(H),
}


@pytest.mark.campaign(keep=28)
@across({"groups": [H, 2], ("engine", "score"): CASES, "name": MASKS})
def test_parts_add_up_to_the_whole(engine: str, score: Any, name: str, groups: int) -> None:
    g = torch.Generator().manual_seed(1)
    query = torch.randn(B, H, L, E, generator=g, dtype=torch.float64).requires_grad_()
    key, value = (torch.randn(B, groups, L, E, generator=g, dtype=torch.float64).requires_grad_() for _ in range(2))
    part = None if score is None else score(torch.float64)
    tensors = [query, key, value, *([] if part is None else [t for t in part.tensors() if t.requires_grad])]
    mask = MASKS[name]
    output, aux = regard.attention(
        query, key, value, mask, enable_gqa=True, score=part, return_aux=regard.AuxRequest(lse=True), engine="streaming"
    )
    assert aux.lse is not None
    grad = torch.randn(output.shape, generator=g, dtype=torch.float64)
    expected = torch.autograd.grad(output, tensors, grad)
    found = [torch.zeros_like(t) for t in tensors]
    whole = masks.Extent(B, H, L, L)
    bound = None if mask is None else masks.as_mask(mask).bind(whole, "cpu")
    ran = 0
    for first, stop in pairwise(EDGES):
        cut = None if bound is None else masks.submatrix(bound, whole, (0, L), (first, stop - first))
        problem = Problem.of(
            Call(query, key[:, :, first:stop], value[:, :, first:stop], cut, enable_gqa=True, score=part)
        )
        made = engines.TABLE[engine].partial_backward(problem, output.detach(), aux.lse)
        assert made is not None
        assert torch.equal(made, output)
        ran += 1
        for total, gradient in zip(found, torch.autograd.grad(made, tensors, grad, allow_unused=True)):
            if gradient is not None:
                total += gradient
    assert ran == len(EDGES) - 1
    for a, b in zip(found, expected):
        scale = float(b.abs().max()) + 1.0
        assert float((a - b).abs().max()) < 3e-14 * scale


def part(mask: Tensor | None, **named: Any) -> Any:
    q = torch.randn(1, 2, 20, 4, requires_grad=True)
    problem = Problem.of(Call(q, q, q, mask, normalizer=named.get("normalizer", "softmax")))
    return problem, torch.zeros(1, 2, 20, 4), torch.zeros(1, 2, 20)


def test_engines_say_what_they_cannot() -> None:
    assert engines.TABLE["reference"].partial_backward(*part(None)) is None
    assert engines.TABLE["streaming"].partial_backward(*part(None, normalizer="sparsemax")) is None
