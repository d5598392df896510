"""Second derivatives through torch.func, and the log-sum-exp's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import AuxRequest, masks, scores


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("score", ["laplacian", "triangular", "epanechnikov", "gaussian", "scaled_dot", "additive"])
def test_a_gradient_of_a_gradient_is_never_0_in_silence(score: str) -> None:
    made: Any = scores.Additive(normal(4, seed=5)) if score == "additive" else score
    key, value = 0.2 * normal(1, 1, 5, 4, seed=1), normal(1, 1, 5, 4, seed=2)

    def slope(engine: str) -> Any:
        def total(t: Tensor) -> Tensor:
            return (regard.attention(t[None, None], key, value, score=made, engine=engine) + 1).square().sum()

        return lambda t: torch.func.grad(total)(t).square().sum()

    point = 0.3 * normal(3, 4)
    right = torch.func.grad(slope("reference"))(point)
    assert right.abs().max() > 1e-3
    torch.testing.assert_close(torch.func.grad(slope("auto"))(point), right)
    for engine in ("fused", "sdpa") if score in ("gaussian", "scaled_dot") else ("fused",):
        if engine == "sdpa" and score == "gaussian":
            continue  # not in float64
        with pytest.raises(RuntimeError, match=r"has no second derivative .*engine='streaming' or engine='reference'"):
            torch.func.grad(slope(engine))(point)
        with pytest.raises(RuntimeError, match="has no second derivative"):
            torch.func.vmap(torch.func.grad(slope(engine)))(torch.stack([point, point]))


@pytest.mark.parametrize("engine", ["auto", "sdpa", "fused", "streaming", "reference"])
@pytest.mark.parametrize(
    "named",
    [{}, {"attn_mask": masks.causal(align="lower_right")}, {"attn_mask": masks.padding(torch.tensor([0, 4]))}],
    ids=["plain", "causal", "empty rows"],
)
def test_two_outputs_over_different_keys_merge_differentiably(engine: str, named: dict[str, Any]) -> None:
    query, key, value = (normal(2, 2, n, 4, seed=n).requires_grad_() for n in (5, 9, 9))
    split = 4 if "attn_mask" not in named else 9
    right, whole = regard.attention(query, key, value, engine=engine, return_aux=AuxRequest(lse="grad"), **named)
    if split == 9:
        assert whole.lse is not None
        seen = whole.lse.isfinite()
        aux_scores = regard.attention(
            query, key, value, engine="reference", return_aux=AuxRequest(scores=True), **named
        )
        assert aux_scores[1].scores is not None
        expected = torch.logsumexp(aux_scores[1].scores, -1)
        for a, b in zip(
            *(torch.autograd.grad(lse[seen].sin().sum(), (query, key)) for lse in (whole.lse, expected)), strict=True
        ):
            torch.testing.assert_close(a, b)
        return
    parts = [
        regard.attention(query, key[:, :, keys], value[:, :, keys], engine=engine, return_aux=AuxRequest(lse="grad"))
        for keys in (slice(split), slice(split, 9))
    ]
    lse = torch.stack([aux.lse for _, aux in parts if aux.lse is not None])
    merged = (torch.softmax(lse, 0).unsqueeze(-1) * torch.stack([output for output, _ in parts])).sum(0)
    torch.testing.assert_close(merged, right)
    for a, b in zip(*(torch.autograd.grad(o.sin().sum(), (query, key, value)) for o in (merged, right)), strict=True):
        torch.testing.assert_close(a, b)


def test_lse_is_true_false_or_grad() -> None:
    with pytest.raises(ValueError, match="AuxRequest: lse must be a bool or 'grad', got 'gradient'"):
        AuxRequest(lse="gradient")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="AuxRequest: lse must be a bool or 'grad', got 1"):
        AuxRequest(lse=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["auto", "sdpa", "fused", "streaming"])
def test_a_gradient_of_lse_to_rows_with_gaps(engine: str) -> None:
    query, key, value = (normal(3, 2, n, 8, seed=n)[..., ::2].requires_grad_() for n in (6, 13, 13))
    _, aux = regard.attention(query, key, value, engine=engine, return_aux=AuxRequest(lse="grad"))
    assert aux.lse is not None
    right = torch.logsumexp(query @ key.mT / 2, -1)
    for a, b in zip(*(torch.autograd.grad(lse.sin().sum(), (query, key)) for lse in (aux.lse, right)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("engine", "score"), [("fused", "laplacian"), ("sdpa", "dot")])
def test_a_dispatch_mode_hides_no_error(engine: str, score: str) -> None:
    query, key, value = (normal(1, 1, n, 4, seed=n).requires_grad_() for n in (5, 9, 9))
    with FlopCounterMode(display=False):
        output = regard.attention(query, key, value, score=score, engine=engine)
        with pytest.raises(RuntimeError, match="has no second derivative"):
            torch.autograd.grad(output.sin().sum(), query, create_graph=True)
