"""Hard attention: what it reads, how it draws, and that its surrogate is the gradient of the expected reward."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import AuxRequest
from regard.nn.heads.stochastic import HardAttention
from regard.normalizers import one_hot as draws

F64 = torch.float64
NAN = float("nan")


def layer_and_ends(**options: Any) -> tuple[HardAttention, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = HardAttention(4, 6, 5, dtype=F64, **options)
    return layer, torch.randn(2, 3, 4, dtype=F64), torch.randn(2, 5, 6, dtype=F64), torch.randn(2, 5, 2, dtype=F64)


def chosen(output: Tensor, value: Tensor) -> Tensor:
    """Return which value each query read (B, L); exactly one, or the sum is not 1."""
    hits = (output.unsqueeze(2) == value.unsqueeze(1)).all(-1)
    assert bool((hits.sum(-1) == 1).all())
    return hits.int().argmax(-1)


def test_evaluation_takes_the_best_and_is_deterministic() -> None:
    layer, query, key, value = layer_and_ends()
    layer.eval()
    output, aux = layer(query, key, value, return_aux=AuxRequest(scores=True))
    assert torch.equal(chosen(output, value), aux.scores.argmax(-1))
    assert torch.equal(layer(query, key, value), output)


@pytest.mark.parametrize("estimator", ["reinforce", "gumbel"])
def test_training_draws_from_the_softmax(estimator: str) -> None:
    layer, query, key, _ = layer_and_ends(estimator=estimator)
    many = 20000
    index = torch.arange(5, dtype=F64).view(1, 5, 1).expand(many, 5, 1)
    with torch.no_grad():
        output, aux = layer(
            query[:1, :1].expand(many, 1, 4), key[:1].expand(many, 5, 6), index, return_aux=AuxRequest(scores=True)
        )
    shares = torch.bincount(output.flatten().round().long(), minlength=5) / many
    torch.testing.assert_close(shares.to(F64), aux.scores[0, 0].softmax(-1), atol=0.015, rtol=0)
    assert not layer._draws, "nothing is kept where no gradients are"


def test_every_draw_reads_one_visible_key() -> None:
    layer, query, key, value = layer_and_ends()
    lengths = torch.tensor([2, 4])
    for _ in range(20):
        index = chosen(layer(query, key, value, lengths), value)
        assert bool((index < lengths.unsqueeze(1)).all())


def test_asking_changes_nothing_and_the_weights_are_the_draw() -> None:
    layer, query, key, value = layer_and_ends()
    torch.manual_seed(1)
    plain = layer(query, key, value)
    torch.manual_seed(1)
    output, aux = layer(query, key, value, return_aux=AuxRequest(weights=True, entropy=True))
    assert torch.equal(plain, output)
    assert torch.equal(aux.weights.argmax(-1), chosen(output, value)) and torch.equal(
        aux.weights.sum(-1), torch.ones(2, 3).to(F64)
    )
    assert aux.scores is None and aux.entropy.shape == (2, 3)


def expected_gradient(layer: HardAttention, query: Tensor, key: Tensor, reward: Tensor) -> tuple[Tensor, Tensor]:
    """Return E[reward] of one query over keys, by summing over all choices, and its gradient to w_q."""
    score = torch.tanh(query @ layer.scorer.w_q.T + key @ layer.scorer.w_k.T) @ layer.scorer.w_v
    mean = (score.softmax(-1) * reward).sum()
    return mean, torch.autograd.grad(mean, layer.scorer.w_q)[0]


def test_the_surrogate_has_the_gradient_of_the_expectation_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every choice is made once, by one sequence of the batch each, and weighed by its probability."""
    layer, query, key, value = layer_and_ends()
    reward = torch.tensor([0.3, -1.0, 2.0, 0.0, 5.0], dtype=F64)
    _, right = expected_gradient(layer, query[0, 0], key[0], reward)
    monkeypatch.setattr(draws, "gumbel_like", lambda scores: 1e9 * torch.eye(5, dtype=F64).view(5, 1, 1, 5))
    output, aux = layer(
        query[:1, :1].expand(5, 1, 4),
        key[:1].expand(5, 5, 6),
        value[:1].expand(5, 5, 2),
        return_aux=AuxRequest(scores=True),
    )
    assert torch.equal(chosen(output, value[:1].expand(5, 5, 2)).flatten(), torch.arange(5))
    probability = aux.scores[:, 0].softmax(-1).diagonal().detach()
    loss = layer.surrogate(5 * probability * reward)  # 5, as the loss is a mean
    found = torch.autograd.grad(loss, layer.scorer.w_q)[0]
    torch.testing.assert_close(found, -right, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_the_surrogate_has_that_gradient_on_average_whatever_the_baseline() -> None:
    layer, query, key, value = layer_and_ends()
    reward = torch.tensor([0.3, -1.0, 2.0, 0.0, 5.0], dtype=F64)
    _, right = expected_gradient(layer, query[0, 0], key[0], reward)
    many = 200_000
    for baseline in (0.0, 1.5):
        layer.baseline.fill_(baseline)
        torch.manual_seed(2)
        output = layer(query[:1, :1].expand(many, 1, 4), key[:1].expand(many, 5, 6), value[:1].expand(many, 5, 2))
        index = chosen(output, value[:1].expand(many, 5, 2)).flatten()
        found = torch.autograd.grad(layer.surrogate(reward[index]), layer.scorer.w_q)[0]
        torch.testing.assert_close(found, -right, rtol=0, atol=0.02 * float(right.abs().max()) + 0.003)


def test_the_entropy_bonus_has_the_entropys_gradient() -> None:
    layer, query, key, value = layer_and_ends(entropy=0.7)
    lengths = torch.tensor([[3, 5, 0], [2, 1, 4]])
    _, aux = layer(query, key, value, lengths, return_aux=AuxRequest(entropy=True, scores=True))
    weights = torch.where(aux.scores.isneginf(), 0.0, aux.scores.exp())
    p = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    right = -0.7 * -torch.where(p > 0, p * p.clamp(min=1e-300).log(), 0.0).sum((1, 2)).mean()
    want = torch.autograd.grad(right, layer.scorer.w_k, retain_graph=True)[0]
    found = layer.surrogate(torch.zeros(2, dtype=F64))
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(torch.autograd.grad(found, layer.scorer.w_k)[0], want)


def test_it_learns_what_is_found_only_by_sampling() -> None:
    """A reward of 1 for reading the key whose mark the query asks for; the value read has no gradient to scores."""
    torch.manual_seed(0)
    layer = HardAttention(6, score="general", entropy=0.01)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    partner = torch.randperm(6)  # the key that answers each query

    def batch(size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        marks = torch.stack([torch.randperm(6) for _ in range(size)])  # which mark each key bears
        wanted = torch.randint(6, (size, 1))
        place = (marks == partner[wanted]).int().argmax(-1)
        return torch.eye(6)[wanted], torch.eye(6)[marks], torch.arange(6.0).view(1, 6, 1).expand(size, 6, 1), place

    for _ in range(150):
        query, key, value, place = batch(64)
        read = layer(query, key, value)[:, 0, 0]
        assert not read.requires_grad, "only the surrogate teaches"
        right = read == place
        optimizer.zero_grad()
        layer.surrogate(right.float()).backward()
        optimizer.step()
    query, key, value, place = batch(500)
    assert (layer.eval()(query, key, value)[:, 0, 0] == place).float().mean() > 0.99
    assert float(layer.baseline) > 0.8


def test_the_baseline_is_a_mean_first_and_a_moving_average_then() -> None:
    layer, query, key, value = layer_and_ends(momentum=0.5)
    for reward, right in ((4.0, 4.0), (2.0, 3.0), (1.0, 2.0), (0.0, 1.0)):  # shares 1, 1/2, 1/2, 1/2
        layer(query, key, value)
        layer.surrogate(torch.full((2,), reward, dtype=F64))
        assert float(layer.baseline) == right
    assert int(layer.state_dict()["rewards"]) == 4 and float(layer.state_dict()["baseline"]) == 1.0


def test_rewards_per_choice_follow_the_order_of_calls() -> None:
    layer, query, key, value = layer_and_ends()
    kept = []
    for t in range(3):
        _, aux = layer(query[:, t : t + 1], key, value, return_aux=AuxRequest(scores=True, weights=True))
        kept.append((aux.scores.log_softmax(-1) * aux.weights).sum(-1))
    reward = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=F64)
    right = -(reward * torch.cat(kept, 1)).sum(1).mean()
    torch.testing.assert_close(layer.surrogate(reward), right)


def test_a_query_that_sees_nothing_has_no_part() -> None:
    layer, query, key, value = layer_and_ends()
    query[1, 2] = NAN
    key[1] = NAN
    lengths = torch.tensor([[3, 5, 2], [0, 0, 0]])
    output = layer(query, key, value, lengths)
    assert torch.equal(output[1], torch.zeros(3, 2, dtype=F64))
    loss = layer.surrogate(torch.tensor([[1.0, 1.0, 1.0], [9.0, NAN, 9.0]], dtype=F64))
    assert loss.isfinite() and float(layer.baseline) == 1.0


def test_gumbel_has_gradients_of_its_own() -> None:
    layer, query, key, value = layer_and_ends(estimator="gumbel", temperature=0.5)
    layer(query, key, value).square().sum().backward()
    assert bool(layer.scorer.w_q.grad.any()) and layer.scorer.w_q.grad.isfinite().all()
    with pytest.raises(RuntimeError, match="estimator='gumbel'"):
        layer.surrogate(torch.ones(2))


def test_dropout_in_training_only() -> None:
    layer, query, key, value = layer_and_ends(dropout=1.0)
    assert not layer(query, key, value).any()
    assert layer.eval()(query, key, value).any()


def test_copies_and_files_leave_draws_behind() -> None:
    layer, query, key, value = layer_and_ends()
    layer(query, key, value)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other._draws == [] and len(layer._draws) == 1
        torch.manual_seed(4)
        right = layer(query, key, value)
        torch.manual_seed(4)
        assert torch.equal(other(query, key, value), right)
        layer._draws.pop()
    layer.forget()
    with pytest.raises(RuntimeError):
        layer.surrogate(torch.ones(2))


@pytest.mark.campaign
@pytest.mark.slow
def test_compiled_training() -> None:
    layer, query, key, value = layer_and_ends()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.manual_seed(6)
    found = compiled(query, key, value)
    loss = layer.surrogate(torch.ones(2, dtype=F64))
    layer.baseline.zero_()
    torch.manual_seed(6)
    assert torch.equal(found, layer(query, key, value))
    right = layer.surrogate(torch.ones(2, dtype=F64))
    torch.testing.assert_close(loss, right)
    for a, b in zip(
        torch.autograd.grad(loss, list(layer.parameters())), torch.autograd.grad(right, list(layer.parameters()))
    ):
        torch.testing.assert_close(a, b)


def test_masks() -> None:
    layer, query, key, value = layer_and_ends()
    for _ in range(10):
        assert bool((chosen(layer(query, key, value, is_causal=True), value) <= torch.arange(3)).all())
        seen = torch.tensor([False, False, True, False, False]).expand(2, 3, 5)
        assert bool((chosen(layer(query, key, value, attn_mask=seen), value) == 2).all())


def test_it_is_cited_with_its_score() -> None:
    layer, *_ = layer_and_ends()
    assert all(key in regard.cite(layer) for key in ("xu2015", "williams1992", "bahdanau2014"))
    assert "AdditiveAttention" in repr(layer) and "momentum=0.9" in repr(layer)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"score": "cosine"}, ValueError, r"HardAttention: score must be one of 'additive', .*, got 'cosine'"),
        ({"score": None}, TypeError, r"HardAttention: score must be one of .*, got None"),
        ({"estimator": "reinforced"}, ValueError, r"got 'reinforced' \(did you mean 'reinforce'\?\)"),
        ({"entropy": -1}, ValueError, r"HardAttention: entropy must be a finite number of at least 0, got -1\."),
        ({"temperature": 0}, ValueError, r"temperature must be a positive finite number, got 0\."),
        ({"momentum": 2}, ValueError, r"HardAttention: momentum must be a probability in \[0, 1\], got 2\."),
        ({"hidden_size": 0}, ValueError, r"HardAttention: hidden_size must be an int of at least 1, got 0\."),
        ({"score": "dot", "key_size": 3}, ValueError, r"key_size must be query_size 4 for score 'dot', got 3\."),
    ],
)
def test_constructor_errors(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        HardAttention(4, **options)


def test_surrogate_errors() -> None:
    layer, query, key, value = layer_and_ends()
    with pytest.raises(RuntimeError, match=r"HardAttention.surrogate: there are no draws"):
        layer.surrogate(torch.ones(2))
    layer(query, key, value)
    with pytest.raises(ValueError, match=r"reward must have shape \(2,\) or \(2, 3\), got \(3,\)"):
        layer.surrogate(torch.ones(3))
    with pytest.raises(TypeError, match="got an int64 tensor"):
        layer.surrogate(torch.ones(2).long())
    assert layer.surrogate(torch.ones(2)).isfinite(), "a refused reward leaves the draws"
