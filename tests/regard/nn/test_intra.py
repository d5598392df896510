"""Intra-attention: carried tapes, padding, what it tells, and a task of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard import AuxRequest
from regard.nn.memory.intra import IntraAttention, IntraState

F64 = torch.float64
NAN = float("nan")


def layer_and_input(**options: Any) -> tuple[IntraAttention, Tensor]:
    torch.manual_seed(0)
    return IntraAttention(3, 4, 5, dtype=F64, **options), torch.randn(2, 6, 3, dtype=F64)


def test_a_sequence_in_pieces_is_the_sequence() -> None:
    layer, x = layer_and_input()
    whole, end = layer(x)
    state, parts = None, []
    for piece in x.split((1, 3, 2), 1):
        part, state = layer(piece, state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert state is not None
    for a, b in zip(state, end):
        torch.testing.assert_close(a, b)


def test_padding_leaves_no_trace_even_in_what_is_carried() -> None:
    layer, x = layer_and_input()
    lengths = torch.tensor([2, 4])
    garbage = torch.where((torch.arange(4) < lengths.unsqueeze(1)).unsqueeze(-1), x[:, :4], NAN)
    first, state = layer(garbage, None, lengths)
    assert not first[0, 2:].any()
    rest, _ = layer(x[:, 4:], state)
    for b, n in enumerate(lengths.tolist()):
        alone, _ = layer(torch.cat([x[b : b + 1, :n], x[b : b + 1, 4:]], 1))
        torch.testing.assert_close(torch.cat([first[b, :n], rest[b]]), alone[0])


def test_gradients_of_garbage() -> None:
    layer, x = layer_and_input()
    x = x.clone()
    x[0, 3:] = NAN
    x.requires_grad_()
    hidden, _ = layer(x, None, torch.tensor([3, 6]))
    slopes = torch.autograd.grad(hidden.square().sum(), [x, *layer.parameters()])
    assert all(slope.isfinite().all() for slope in slopes)
    assert not slopes[0][0, 3:].any() and slopes[0][0, :3].any()


def test_weights_look_back_only_and_sum_to_one() -> None:
    layer, x = layer_and_input()
    hidden, _, aux = layer(x, None, torch.tensor([4, 6]), return_aux=AuxRequest(weights=True))
    assert aux.weights.shape == (2, 6, 6) and not aux.weights.triu().any()
    total = aux.weights.sum(-1)
    torch.testing.assert_close(total[1, 1:], torch.ones(5, dtype=F64))
    assert not total[:, 0].any() and not total[0, 4:].any()
    assert torch.equal(hidden, layer(x, None, torch.tensor([4, 6]))[0])


def test_everything_that_can_be_told_agrees_with_the_weights() -> None:
    layer, x = layer_and_input()
    start = layer(x[:, :2], None, torch.tensor([1, 2]))[1]
    asked = AuxRequest(lse=True, max=True, entropy=True, topk=3, received=True, weights=True, scores=True)
    _, _, aux = layer(x[:, 2:], start, torch.tensor([4, 3]), return_aux=asked)
    weights = aux.weights
    assert weights.shape == aux.scores.shape == (2, 4, 6)
    assert not weights[0, :, 1].any(), "the slot that was padding"
    lse = torch.logsumexp(aux.scores, -1)
    torch.testing.assert_close(aux.lse, lse)
    torch.testing.assert_close(aux.max, aux.scores.amax(-1))
    torch.testing.assert_close(
        torch.where(lse.isneginf().unsqueeze(-1), 0.0, (aux.scores - lse.unsqueeze(-1)).exp()), weights
    )
    torch.testing.assert_close(aux.entropy, -torch.special.xlogy(weights, weights).sum(-1))
    torch.testing.assert_close(aux.received, weights.sum(1))
    torch.testing.assert_close(aux.topk.weights, weights.topk(3, -1).values)
    seen = aux.topk.indices >= 0
    torch.testing.assert_close(weights.gather(-1, aux.topk.indices.clamp(min=0))[seen], aux.topk.weights[seen])
    assert torch.equal(seen.sum(-1), (weights > 0).sum(-1).clamp(max=3))


def test_no_steps_and_no_sequences() -> None:
    layer, x = layer_and_input()
    hidden, state, aux = layer(x[:, :0], return_aux=AuxRequest(weights=True, topk=2))
    assert hidden.shape == (2, 0, 4) and state.cell.shape == (2, 0, 4)
    assert aux.weights.shape == (2, 0, 0) and aux.topk.indices.shape == (2, 0, 2)
    assert layer(x[:0])[0].shape == (0, 6, 4)
    torch.testing.assert_close(layer(x, state)[0], layer(x)[0])


def test_an_empty_sequence_in_a_batch() -> None:
    layer, x = layer_and_input()
    hidden, state = layer(x, None, torch.tensor([0, 6]))
    assert not hidden[0].any() and not state.real[0].any() and not state.summary[0].any()
    torch.testing.assert_close(hidden[1:], layer(x[1:])[0])


def test_the_gradient_is_right() -> None:
    layer, x = layer_and_input()
    x = x[:, :3].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: layer(x, None, torch.tensor([3, 2]))[0], (x,))


def test_dropout_in_training_only() -> None:
    layer, x = layer_and_input(dropout=1.0)
    _, state = layer(x)
    assert not state.summary.any()
    assert layer.eval()(x)[1].summary.any()


@pytest.mark.slow
def test_it_remembers_a_symbol_across_noise() -> None:
    """After four steps of noise, the last step is to tell which of three symbols came first."""
    torch.manual_seed(0)
    layer, read = IntraAttention(4, 12), torch.nn.Linear(12, 3)
    optimizer = torch.optim.Adam([*layer.parameters(), *read.parameters()], lr=0.02)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        symbol = torch.randint(3, (size,))
        noise = torch.eye(3)[torch.randint(3, (size, 5))]
        flag = torch.zeros(size, 5, 1)
        flag[:, 0] = 1
        noise[:, 0] = torch.eye(3)[symbol]
        return torch.cat([noise, flag], -1), symbol

    for _ in range(120):
        x, symbol = batch(64)
        loss = torch.nn.functional.cross_entropy(read(layer(x)[0][:, -1]), symbol)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, symbol = batch(300)
    assert (read(layer(x)[0][:, -1]).argmax(-1) == symbol).float().mean() > 0.97


def test_errors() -> None:
    layer, x = layer_and_input()
    with pytest.raises(ValueError, match=r"IntraAttention: x must have shape \(B, N, 3\), got \(2, 6, 2\)\."):
        layer(x[..., :2])
    with pytest.raises(ValueError, match=r"IntraAttention: valid_lens must have shape \(2,\), got \(3,\)"):
        layer(x, None, torch.ones(3, dtype=torch.long))
    with pytest.raises(
        TypeError, match="IntraAttention: state must be an IntraState or None, got an object of type tuple"
    ):
        layer(x, (x, x))  # type: ignore[arg-type]
    _, state = layer(x[:1])
    with pytest.raises(
        ValueError, match=r"state must have tensors of shapes \(\(2, 6, 4\), \(2, 6, 4\), \(2, 4\), \(2, 6\)\)"
    ):
        layer(x, state)
    with pytest.raises(TypeError, match="IntraAttention: bias must be a bool, got 0"):
        IntraAttention(3, 4, bias=0)  # type: ignore[arg-type]
    assert "attention_size=5, bias=False" in repr(layer_and_input(bias=False)[0])
    assert isinstance(state, IntraState)
