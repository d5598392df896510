"""Draws: as often as softmax says, and their surrogate gradients."""

import math

import pytest
import torch

import regard
from regard.normalizers import Gumbel, Sampled, Softmax

DRAWS = 20_000
#: The chance that a correct sampler fails a test of frequencies.
CHANCE = 1e-9


def upper_bound(degrees):
    """Return what a χ² of so many degrees of freedom exceeds with at most CHANCE (Laurent & Massart 2000, lemma 1)."""
    x = math.log(1 / CHANCE)
    return degrees + 2 * math.sqrt(degrees * x) + 2 * x


@pytest.mark.parametrize("normalizer", [Gumbel(), Gumbel(0.3), Sampled()], ids=repr)
def test_frequencies_are_those_of_softmax(normalizer):
    torch.manual_seed(0)
    scores = torch.tensor([0.0, 1.0, -1.0, 2.0, -math.inf, 0.5])
    drawn = normalizer.weights(scores.expand(DRAWS, 1, -1)).detach().round().sum((0, 1)).double()
    expected = DRAWS * scores.double().softmax(-1)
    assert drawn.sum() == DRAWS and drawn[4] == 0
    visible = expected > 0
    chi = ((drawn - expected)[visible].square() / expected[visible]).sum().item()
    assert chi < upper_bound(int(visible.sum()) - 1)


@pytest.mark.parametrize("normalizer", [Gumbel(), Sampled()], ids=repr)
def test_rows_are_drawn_independently(normalizer):
    torch.manual_seed(1)
    drawn = normalizer.weights(torch.zeros(DRAWS, 2, 2)).detach().round()[..., 0]
    table = torch.stack([(drawn[:, 0] == i) & (drawn[:, 1] == j) for i in (0, 1) for j in (0, 1)]).sum(1).double()
    chi = ((table - DRAWS / 4).square() / (DRAWS / 4)).sum().item()
    assert chi < upper_bound(3)


def test_the_gradient_of_gumbel_is_that_of_the_noisy_softmax():
    scores = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(5)
    weights = Gumbel(0.5).weights(scores)
    u = torch.randn_like(weights)
    (found,) = torch.autograd.grad((weights * u).sum(), scores)
    torch.manual_seed(5)
    from regard.normalizers.one_hot import gumbel_like

    noise = gumbel_like(scores.detach())
    twin = scores.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad((Softmax().weights((twin + noise) / 0.5) * u).sum(), twin)
    torch.testing.assert_close(found, expected)
    assert ((weights == 0) | ((weights - 1).abs() < 1e-12)).all()


def test_log_probability_is_that_of_the_draw():
    torch.manual_seed(2)
    scores = torch.randn(5, 6, 4, requires_grad=True)
    hidden = scores.masked_fill(torch.rand(5, 6, 4) < 0.3, -math.inf)
    hidden = torch.where(torch.arange(6).view(6, 1) == 0, torch.tensor(-math.inf), hidden)  # empty rows, too
    weights = Sampled().weights(hidden)
    told = Sampled.log_probability(hidden, weights)
    expected = torch.where(weights > 0, hidden.log_softmax(-1), 0.0).nansum(-1)
    torch.testing.assert_close(told, expected)
    assert (told[:, 0] == 0).all()
    (gradient,) = torch.autograd.grad(told.sum(), scores)
    some = (weights > 0).any(-1, keepdim=True)
    by_hand = torch.where(some & (hidden > -math.inf), weights - hidden.softmax(-1).nan_to_num(), 0.0)
    torch.testing.assert_close(gradient, by_hand)


@pytest.mark.parametrize("normalizer", ["gumbel", "sampled"])
def test_attention_draws_one_value_and_obeys_the_seed(normalizer):
    query, key = torch.randn(1, 2, 7, 4), torch.randn(1, 2, 5, 4)
    value = torch.arange(5.0).view(1, 1, 5, 1).expand(1, 2, 5, 1)
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        outputs.append(regard.attention(query, key, value, normalizer=normalizer, is_causal=True))
    assert torch.equal(*outputs)
    assert (outputs[0] == outputs[0].round()).all()
    assert (outputs[0].squeeze(-1) <= torch.arange(7.0)).all()
