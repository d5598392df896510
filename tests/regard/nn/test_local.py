"""Local attention: windows, predicted centers, and the Gaussian of the paper against the renormalized one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard import AuxRequest
from regard.nn.heads.local import LocalAttention

F64 = torch.float64
WEIGHTS = AuxRequest(weights=True)


def layer_and_ends(**options: Any) -> tuple[LocalAttention, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = LocalAttention(4, 2, 6, dtype=F64, **options)
    return layer, torch.randn(2, 7, 4, dtype=F64), torch.randn(2, 9, 6, dtype=F64)


def test_the_monotonic_window_is_around_the_own_position() -> None:
    layer, query, key = layer_and_ends(mode="monotonic")
    _, aux = layer(query, key, return_aux=WEIGHTS)
    near = (torch.arange(9) - torch.arange(7).unsqueeze(1)).abs() <= 2
    assert torch.equal(aux.weights > 0, near.expand(2, 7, 9))
    torch.testing.assert_close(aux.weights.sum(-1), torch.ones(2, 7, dtype=F64))
    assert layer.w_p is None and "v_p" not in layer.state_dict()


def test_a_decoder_gives_its_position_step_by_step() -> None:
    layer, query, key = layer_and_ends(mode="monotonic")
    whole = layer(query, key)
    for t in range(7):
        at = torch.full((2, 1), t)
        torch.testing.assert_close(layer(query[:, t : t + 1], key, positions=at), whole[:, t : t + 1])


def test_a_position_between_two_keys() -> None:
    layer, query, key = layer_and_ends(mode="monotonic")
    _, aux = layer(query[:, :1], key, positions=torch.tensor([3.5]), return_aux=WEIGHTS)
    assert (aux.weights[0, 0] > 0).nonzero().flatten().tolist() == [2, 3, 4, 5]


def test_a_window_beyond_the_sequence_reads_zeros() -> None:
    layer, query, key = layer_and_ends(mode="monotonic")
    output, aux = layer(query, key, valid_lens=torch.tensor([3, 9]), return_aux=WEIGHTS)
    assert not output[0, 5:].any() and not aux.weights[0, 5:].any() and output[0, 4].any() and output[1].all()


def test_predicted_centers_lie_in_the_real_sequence() -> None:
    layer, query, key = layer_and_ends()
    with torch.no_grad():
        layer.v_p.mul_(100)
    lengths = torch.tensor([3, 9])
    center = layer.predict(query, lengths.unsqueeze(1))
    assert bool((center >= 0).all() and (center <= lengths.unsqueeze(1)).all()) and center[1].max() > 3
    _, aux = layer(query, key, valid_lens=lengths, return_aux=WEIGHTS)
    assert not aux.weights[0, :, 3:].any()
    near = (torch.arange(9) - center.unsqueeze(-1)).abs() <= 2
    assert torch.equal(aux.weights > 0, near & (torch.arange(9) < lengths.view(2, 1, 1)))


def test_lengths_per_query() -> None:
    layer, query, key = layer_and_ends()
    lengths = torch.arange(14).view(2, 7).clamp(max=9)
    whole = layer(query, key, valid_lens=lengths)
    for b in range(2):
        for t in range(7):
            n = int(lengths[b, t])
            alone = layer(query[b : b + 1, t : t + 1], key[b : b + 1, :n]) if n else torch.zeros(1, 1, 6, dtype=F64)
            torch.testing.assert_close(whole[b, t], alone[0, 0])


def test_the_papers_gaussian_comes_after_the_softmax() -> None:
    layer, query, key = layer_and_ends()
    other, _, _ = layer_and_ends(renormalize=True)
    _, paper = layer(query, key, return_aux=WEIGHTS)
    _, renormalized = other(query, key, return_aux=WEIGHTS)
    total = paper.weights.sum(-1, keepdim=True)
    assert bool((total < 1).all() and (total > 0).all())
    torch.testing.assert_close(renormalized.weights, paper.weights / total)


@pytest.mark.parametrize("renormalize", [False, True])
def test_the_center_learns_through_the_gaussian(renormalize: bool) -> None:
    """Inside a window that stays as it is, the output is smooth in the center, and its gradient is right."""
    layer, query, key = layer_and_ends(renormalize=renormalize)
    query, key = query[:1, :2], key[:1]
    assert torch.autograd.gradcheck(
        lambda w_p, v_p: torch.func.functional_call(layer, {"w_p": w_p, "v_p": v_p}, (query, key)),
        (layer.w_p, layer.v_p),
    )


def test_it_learns_where_to_look() -> None:
    torch.manual_seed(0)
    layer = LocalAttention(2, 6, score="dot")
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    query, key = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.zeros(1, 12, 2)
    value = torch.eye(12)[None]
    for _ in range(200):
        output = layer(query, key, value)
        optimizer.zero_grad()
        (output[0, 0, 4:5].sum() + output[0, 1, 7:8].sum()).neg().backward()
        optimizer.step()
    torch.testing.assert_close(layer.predict(query, 12).detach(), torch.tensor([[4.0, 7.0]]), atol=0.3, rtol=0)


def test_padding_with_garbage_in_training() -> None:
    layer, query, key = layer_and_ends()
    lengths = torch.tensor([3, 5])

    def gradients(garbage: float) -> list[Tensor]:
        value = torch.where(torch.arange(9).view(1, 9, 1) < lengths.view(2, 1, 1), key, garbage)
        output = layer(query, value, value, lengths)
        return [output, *torch.autograd.grad(output.square().sum(), list(layer.parameters()))]

    for a, b in zip(gradients(float("nan")), gradients(0.0)):
        assert torch.equal(a, b)


def test_half_precision_counts_far_positions() -> None:
    layer = LocalAttention(4, 1, mode="monotonic", dtype=torch.bfloat16)
    x = torch.randn(1, 400, 4).bfloat16()
    _, aux = layer(x, return_aux=WEIGHTS)
    assert (aux.weights[0, 389] > 0).nonzero().flatten().tolist() == [388, 389, 390]
    predictive = LocalAttention(4, 1, dtype=torch.bfloat16)
    assert predictive.predict(x, 400).dtype == torch.float32 and predictive(x).dtype == torch.bfloat16


def test_masks_and_causality() -> None:
    layer, query, key = layer_and_ends(mode="monotonic")
    _, aux = layer(query, key, is_causal=True, return_aux=WEIGHTS)
    assert not aux.weights.triu(1).any()
    seen = torch.arange(9).expand(2, 7, 9) % 2 == 0
    _, aux = layer(query, key, attn_mask=seen, return_aux=WEIGHTS)
    assert not aux.weights[~seen].any() and aux.weights[:, :, ::2].any()


def test_dropout_in_training_only() -> None:
    layer, query, key = layer_and_ends(dropout=1.0)
    assert not layer(query, key).any() and layer.eval()(query, key).any()


def test_it_prints() -> None:
    assert "window=2, mode='predictive', renormalize=True" in repr(layer_and_ends(renormalize=True)[0])


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"window": 0}, ValueError, r"LocalAttention: window must be an int of at least 1, got 0\."),
        ({"window": 2.0}, TypeError, r"LocalAttention: window must be an int of at least 1, got 2\.0\."),
        (
            {"mode": "local-p"},
            ValueError,
            r"LocalAttention: mode must be one of 'monotonic', 'predictive', got 'local-p'",
        ),
        ({"score": "additive"}, ValueError, r"LocalAttention: score must be one of 'concat', 'dot', 'general'"),
        ({"score": "dot", "key_size": 6}, ValueError, r"key_size must be query_size 4 for score 'dot', got 6\."),
        ({"renormalize": 1}, TypeError, r"LocalAttention: renormalize must be a bool, got 1\."),
    ],
)
def test_constructor_errors(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        LocalAttention(4, **{"window": 2, **options})


def test_call_errors() -> None:
    layer, query, key = layer_and_ends()
    with pytest.raises(
        ValueError,
        match=r"LocalAttention: positions must have shape \(L,\) = \(7,\) or \(B, L\) = \(2, 7\), got \(3,\)",
    ):
        layer(query, key, positions=torch.zeros(3))
    with pytest.raises(TypeError, match="positions must be a tensor of numbers"):
        layer(query, key, positions=[0] * 7)
    with pytest.raises(TypeError, match="valid_lens must be an integer tensor"):
        layer(query, key, valid_lens=torch.ones(2))
    with pytest.raises(ValueError, match=r"LocalAttention.predict: mode must be 'predictive', got 'monotonic'"):
        LocalAttention(4, 2, mode="monotonic").predict(query, 3)
