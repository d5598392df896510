"""Learning from rewards: draws that follow the model, and the gradient of what they earn on average."""

from __future__ import annotations

import itertools

import pytest
import torch
from tabled import Tabled
from torch import Tensor

from regard_lab.data.batches import Batch
from regard_lab.models import RecurrentConfig, RecurrentEncoderDecoder
from regard_lab.models.base import END, PAD
from regard_lab.tasks.captioning.training import PolicyGradientObjective, draw_targets

SOURCE, LENGTHS = torch.tensor([[3, 4], [5, 0]]), torch.tensor([2, 1])


def test_draws_follow_the_model() -> None:
    for temperature in (1.0, 0.5):
        model = Tabled(targets=4, seed=3, spread=1.0)
        torch.manual_seed(0)
        drawn = draw_targets(model, SOURCE[:1], LENGTHS[:1], 20_000, 2, temperature)
        assert drawn.shape == (20_000, 2)
        logits = model.table[(3 + 4) % 7, PAD, END].detach() / temperature
        logits[PAD] = -torch.inf
        seen = torch.bincount(drawn[:, 0], minlength=4).double() / len(drawn)
        torch.testing.assert_close(seen, logits.softmax(0), rtol=0, atol=0.015)
        assert (drawn[:, 1] == torch.where(drawn[:, 0] == END, PAD, END)).all(), "all end, and nothing follows"


def test_draws_are_those_of_the_generator() -> None:
    model = Tabled(targets=9)
    torch.manual_seed(4)
    first = draw_targets(model, SOURCE, LENGTHS, 5, 8)
    torch.manual_seed(4)
    assert torch.equal(draw_targets(model, SOURCE, LENGTHS, 5, 8), first)
    assert not torch.equal(draw_targets(model, SOURCE, LENGTHS, 5, 8), first)
    ends = (first == END).int().argmax(1)
    assert ((first == END).sum(1) == 1).all()
    assert all((row[end + 1 :] == PAD).all() for row, end in zip(first, ends))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_gradient_is_that_of_the_mean_reward(temperature: float) -> None:
    """Over many draws it is what differentiating the sum over all targets gives."""
    model = Tabled(targets=4, seed=1, spread=1.0).train()
    worth = {(END,): 0.5, (2, END): 3.0, (3, END): -1.0}

    def reward(written: Tensor, rows: Tensor) -> Tensor:
        assert rows.tolist() == [7]
        numbers = [tuple(n for n in row if n != PAD) for row in written.tolist()]
        return torch.tensor([[worth[each] for each in numbers]])

    torch.manual_seed(0)
    objective = PolicyGradientObjective(reward, 40_000, 2, temperature)
    # Padding is never drawn, and its logit is of no account.
    model.table.data[..., PAD] = -50.0
    batch = Batch(SOURCE[:1], LENGTHS[:1], torch.tensor([[2, END]]), torch.tensor([7]))
    loss = objective.loss(model, batch)
    (found,) = torch.autograd.grad(loss.value, model.table)
    place = (3 + 4) % 7
    share = (model.table[place, PAD, END] / temperature).softmax(0)
    expected = sum(share[target[0]] * earned for target, earned in worth.items())
    (wanted,) = torch.autograd.grad(-expected, model.table)
    # The loss is the mean over symbols, of which a draw has one or two.
    symbols = loss.count / 40_000
    torch.testing.assert_close(found[place, PAD, END] * symbols, wanted[place, PAD, END], rtol=0, atol=0.03)
    assert loss.shown == pytest.approx(-float(expected.detach()), abs=0.05)
    assert model.training


@pytest.mark.slow
def test_what_earns_more_gets_likelier() -> None:
    torch.manual_seed(0)
    model = RecurrentEncoderDecoder(RecurrentConfig(9, 8, embedding=8, encoder=8, decoder=16)).train()

    def reward(written: Tensor, rows: Tensor) -> Tensor:
        return (written == 5).sum(1).float().view(2, -1) - (written == 6).sum(1).float().view(2, -1)

    objective, batch = (
        PolicyGradientObjective(reward, 8, 6),
        Batch(SOURCE, LENGTHS, torch.tensor([[2, END]] * 2), torch.arange(2)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    shown = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = objective.loss(model, batch)
        loss.value.backward()
        optimizer.step()
        shown.append(loss.shown)
    assert sum(shown[-5:]) / 5 < -3.5, "of 5 symbols before the end"


@pytest.mark.parametrize("hard", ["none", "reinforce", "gumbel"])
def test_the_likelihood_of_targets_stands_beside_it(hard: str) -> None:
    torch.manual_seed(0)
    model = RecurrentEncoderDecoder(RecurrentConfig(9, 8, embedding=8, encoder=8, decoder=8, hard=hard)).train()
    target = torch.tensor([[2, END, PAD], [3, 4, END]])
    batch = Batch(SOURCE, LENGTHS, target, torch.arange(2))
    for likelihood, weights in itertools.product((0.0, 1.0), (0.0, 1.0)):
        torch.manual_seed(1)
        objective = PolicyGradientObjective(
            lambda written, rows, weights=weights: weights * torch.randn(2, 3), 3, 6, likelihood=likelihood
        )
        loss = objective.loss(model, batch)
        gradient = torch.autograd.grad(loss.value, model.output.weight, allow_unused=True)[0]
        learns = bool(likelihood or weights)
        assert (gradient is not None and bool(gradient.any())) == learns
