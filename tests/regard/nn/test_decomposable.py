"""Decomposable attention: laws of its three steps, padding, and a small task."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard import AuxRequest
from regard.nn.heads.decomposable import DecomposableAttention

F64 = torch.float64


def layer_and_pair() -> tuple[DecomposableAttention, Tensor, Tensor]:
    torch.manual_seed(0)
    return DecomposableAttention(4, 6, 3, dtype=F64), torch.randn(2, 5, 4, dtype=F64), torch.randn(2, 7, 4, dtype=F64)


def test_the_order_of_words_has_no_influence() -> None:
    layer, a, b = layer_and_pair()
    torch.testing.assert_close(layer(a[:, torch.randperm(5)], b[:, torch.randperm(7)]), layer(a, b))


def test_each_pair_is_judged_by_itself_and_padding_is_nothing() -> None:
    layer, a, b = layer_and_pair()
    a_lens, b_lens = torch.tensor([5, 2]), torch.tensor([1, 7])
    found = layer(a, b, a_lens, b_lens)
    for i in range(2):
        alone = layer(a[i : i + 1, : a_lens[i]], b[i : i + 1, : b_lens[i]])
        torch.testing.assert_close(found[i], alone[0])


def test_garbage_in_padding_reaches_no_gradient_to_inputs() -> None:
    layer, a, b = layer_and_pair()
    lengths = torch.tensor([3, 1])
    hidden = torch.arange(5) >= lengths.unsqueeze(1)
    a = a.masked_fill(hidden.unsqueeze(-1), float("nan")).requires_grad_()
    logits = layer(a, b, lengths)
    (slope,) = torch.autograd.grad(logits.square().sum(), a)
    assert logits.isfinite().all() and slope.isfinite().all()
    assert not slope[hidden].any() and slope[~hidden].any()


def test_empty_sentences() -> None:
    layer, a, b = layer_and_pair()
    none = torch.zeros(2, dtype=torch.long)
    assert torch.equal(layer(a, b, none, none)[0], layer(a * 7, b - 1, none, none)[1])
    torch.testing.assert_close(layer(a[:, :0], b), layer(a, b, none))
    logits, (to_b, to_a) = layer(a, b, None, none, return_aux=AuxRequest(weights=True))
    assert logits.isfinite().all() and not to_b.weights.any() and to_a.weights.any()


def test_the_alignments_are_told_and_change_nothing() -> None:
    layer, a, b = layer_and_pair()
    lengths = torch.tensor([4, 7])
    logits, (to_b, to_a) = layer(a, b, None, lengths, return_aux=AuxRequest(weights=True, entropy=True))
    assert torch.equal(logits, layer(a, b, None, lengths))
    scores = layer.attend(a) @ layer.attend(b).mT
    torch.testing.assert_close(to_b.weights[0, :, :4], scores[0, :, :4].softmax(-1))
    torch.testing.assert_close(to_a.weights[1], scores[1].T.softmax(-1))
    assert not to_b.weights[0, :, 4:].any() and to_b.entropy.shape == (2, 5) and to_a.entropy.shape == (2, 7)


@pytest.mark.slow
def test_it_learns_whether_a_word_of_one_sentence_is_missing_in_the_other() -> None:
    torch.manual_seed(0)
    words = torch.randn(8, 8)
    layer = DecomposableAttention(8, 32, 2)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.003)

    def batch(size: int) -> tuple[Tensor, Tensor, Tensor]:
        a = torch.stack([torch.randperm(8)[:3] for _ in range(size)])
        b = a[:, torch.randperm(3)].clone()
        missing = torch.rand(size) < 0.5
        stranger = torch.stack([next(w for w in torch.randperm(8) if w not in row) for row in a])
        b[missing, 1] = stranger[missing]
        return words[a], words[b], missing.long()

    for _ in range(200):
        a, b, label = batch(64)
        loss = torch.nn.functional.cross_entropy(layer(a, b), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    a, b, label = batch(300)
    assert (layer(a, b).argmax(-1) == label).float().mean() > 0.95


def test_dropout_in_training_only() -> None:
    torch.manual_seed(0)
    layer, (_, a, b) = DecomposableAttention(4, 6, 3, 0.5, dtype=F64), layer_and_pair()
    assert not torch.equal(layer(a, b), layer(a, b))
    layer.eval()
    assert torch.equal(layer(a, b), layer(a, b))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            {"a": torch.zeros(2, 5, 3)},
            ValueError,
            r"DecomposableAttention: a must have shape \(B, N, 4\), got \(2, 5, 3\)\.",
        ),
        ({"b": torch.zeros(3, 5, 4)}, ValueError, r"DecomposableAttention: b must have a's batch size 2, got 3"),
        ({"a_lens": torch.zeros(2)}, TypeError, r"a_lens must be an integer tensor \(2,\), got a float32"),
        ({"b_lens": torch.tensor([1])}, ValueError, r"b_lens must have shape \(2,\), got \(1,\)"),
        ({"a_lens": torch.tensor([True, False])}, TypeError, r"a_lens must be an integer tensor"),
    ],
)
def test_call_errors(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    layer = DecomposableAttention(4, 6, 3)
    with pytest.raises(kind, match=message):
        layer(**{"a": torch.zeros(2, 5, 4), "b": torch.zeros(2, 7, 4), **change})


def test_constructor_errors() -> None:
    with pytest.raises(ValueError, match=r"DecomposableAttention: classes must be an int of at least 1, got 0\."):
        DecomposableAttention(4, 6, 0)
    with pytest.raises(TypeError, match=r"DecomposableAttention: hidden_size must be an int of at least 1, got None\."):
        DecomposableAttention(4, None, 2)  # type: ignore[arg-type]
