"""The recurrent encoder–decoder: its formulas written out, its fast path, what else a source may not be."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from model_cases import LENGTHS, SOURCE, TARGET, made
from torch import Tensor

from regard_lab.models import RecurrentConfig, RecurrentEncoderDecoder


@torch.no_grad()
def states_of(model: RecurrentEncoderDecoder, source: Tensor) -> Tensor:
    """Return the states (S, E) of a one-layer encoder for one whole source (S,)."""
    embedded = model.source_embedding(source[None])
    onward, _ = model.onward[0](embedded)
    backward, _ = model.backward[0](embedded.flip(1))
    return torch.cat([onward, backward.flip(1)], -1)[0]


@torch.no_grad()
def test_attending_after_the_step_is_luongs_with_bahdanaus_score() -> None:
    model = made("rnn after additive")
    assert isinstance(model, RecurrentEncoderDecoder)
    states, attending = states_of(model, SOURCE[0]), model.attending
    start = torch.tanh(model.bridge(torch.cat([states[-1, :5], states[0, 5:]])))[None, None]
    hidden, _ = model.decoder(model.target_embedding(TARGET[:1]), (start, torch.zeros_like(start)))
    for t, h in enumerate(hidden[0]):
        scores = torch.stack(
            [attending.layer.w_v @ torch.tanh(attending.query.weight @ h + attending.key.weight @ m) for m in states]
        )
        weights = scores.softmax(0)
        features = torch.tanh(model.combine(torch.cat([h, weights @ states])))
        logits = model.output.weight @ features + model.output.bias
        torch.testing.assert_close(model.align(SOURCE[:1], LENGTHS[:1], TARGET[:1])[0, 0, t], weights)
        torch.testing.assert_close(model(SOURCE[:1], LENGTHS[:1], TARGET[:1])[0, t], logits)


@torch.no_grad()
def test_attending_before_the_step_feeds_the_context() -> None:
    model = made("rnn before gru")
    assert isinstance(model, RecurrentEncoderDecoder)
    states, attending = states_of(model, SOURCE[0]), model.attending
    hidden = torch.tanh(model.bridge(torch.cat([states[-1, :5], states[0, 5:]])))
    logits, weights = model(SOURCE[:1], LENGTHS[:1], TARGET[:1]), model.align(SOURCE[:1], LENGTHS[:1], TARGET[:1])
    for t, symbol in enumerate(TARGET[0]):
        query = attending.query.weight @ hidden
        shares = torch.stack(
            [attending.layer.w_v @ torch.tanh(query + attending.key.weight @ m) for m in states]
        ).softmax(0)
        entering = torch.cat([model.target_embedding(symbol), shares @ states])
        hidden = model.decoder(entering[None, None], hidden[None, None])[0][0, 0]
        features = torch.tanh(model.combine(torch.cat([hidden, shares @ states])))
        torch.testing.assert_close(weights[0, 0, t], shares)
        torch.testing.assert_close(logits[0, t], model.output.weight @ features + model.output.bias)


@torch.no_grad()
def test_input_feeding_is_luongs() -> None:
    model = made("rnn feeding")
    assert isinstance(model, RecurrentEncoderDecoder)
    states = states_of(model, SOURCE[0])
    start = torch.tanh(model.bridge(torch.cat([states[-1, :5], states[0, 5:]])))[None, None]
    state, features, logits = (start, torch.zeros_like(start)), torch.zeros(7).double(), []
    for symbol in TARGET[0]:
        entering = torch.cat([model.target_embedding(symbol), features])
        hidden, state = model.decoder(entering[None, None], state)
        weights = (states @ model.attending.key.weight.mT @ hidden[0, 0]).softmax(0)  # mᵀ W h
        features = torch.tanh(model.combine(torch.cat([hidden[0, 0], weights @ states])))
        logits.append(model.output.weight @ features + model.output.bias)
    torch.testing.assert_close(model(SOURCE[:1], LENGTHS[:1], TARGET[:1])[0], torch.stack(logits))


@torch.no_grad()
def test_the_encoders_states_attend_to_each_other() -> None:
    model = made("rnn encoder projected")
    assert isinstance(model, RecurrentEncoderDecoder)
    states, attending = states_of(model, SOURCE[0]), model.attending
    q, k, v = (states @ part.weight.mT for part in (attending.query, attending.key, attending.value))
    weights = (q @ k.mT).softmax(-1)
    torch.testing.assert_close(model.encode(SOURCE[:1], LENGTHS[:1]).values[0], weights @ v)
    rows = [*range(6), 5, 5]  # the target is longer than the source
    torch.testing.assert_close(model.align(SOURCE[:1], LENGTHS[:1], TARGET[:1])[0, 0], weights[rows])


@torch.no_grad()
def test_local_windows_stay_on_the_source() -> None:
    weights = made("rnn local-m").align(SOURCE, LENGTHS, TARGET)[:, 0]
    for row, length in enumerate(LENGTHS.tolist()):
        for t in range(8):
            centre = min(t, length - 1)
            seen = {s for s in range(6) if abs(s - centre) <= 1 and s < length}
            assert {s for s in range(6) if weights[row, t, s] > 0} == seen


@torch.no_grad()
def test_predicted_windows_are_luongs_renormalized() -> None:
    model = made("rnn local-p")
    assert isinstance(model, RecurrentEncoderDecoder)
    states, layer = states_of(model, SOURCE[0]), model.attending.layer
    start = torch.tanh(model.bridge(torch.cat([states[-1, :5], states[0, 5:]])))[None, None]
    hidden, _ = model.decoder(model.target_embedding(TARGET[:1]), (start, torch.zeros_like(start)))
    found = model.align(SOURCE[:1], LENGTHS[:1], TARGET[:1])[0, 0]
    for t, h in enumerate(hidden[0]):
        centre = 6 * torch.sigmoid(layer.v_p @ torch.tanh(layer.w_p @ h))
        inside = (torch.arange(6) - centre).abs() <= 2
        scores = (states @ model.attending.key.weight.mT @ h).masked_fill(~inside, -math.inf)
        damped = scores.softmax(0) * torch.exp(-((torch.arange(6) - centre) ** 2) / 2)
        torch.testing.assert_close(found[t], damped / damped.sum())


def test_hard_attention_is_drawn_in_training_and_chosen_after() -> None:
    model = made("rnn hard gumbel").train()
    drawn = torch.stack([model.align(SOURCE, LENGTHS, TARGET) for _ in range(30)])
    assert ((drawn - drawn.round()).abs() < 1e-12).all()
    assert drawn.mean(0).max() < 1, "not always the same"
    model.eval()
    assert torch.equal(model.align(SOURCE, LENGTHS, TARGET), model.align(SOURCE, LENGTHS, TARGET))


def test_the_surrogate_moves_what_draws() -> None:
    model = made("rnn hard reinforce").train()
    for _ in range(2):  # draws of the last call count
        logits = model(SOURCE, LENGTHS, TARGET)
    model.surrogate(torch.randn(logits.shape[:2]).double()).backward()
    assert model.attending.layer.scorer.w_v.grad.any()
    assert model.combine.weight.grad is None
    with pytest.raises(RuntimeError, match="there are no draws"):
        model.surrogate(torch.zeros(3))
    with pytest.raises(ValueError) as caught:
        made("rnn hard gumbel").surrogate(torch.zeros(3))
    expected = "RecurrentEncoderDecoder.surrogate: config.hard must be 'reinforce', got 'gumbel'."
    assert str(caught.value) == expected


def test_too_long_for_a_location_score() -> None:
    model = made("rnn after location")
    source = torch.ones(1, 11, dtype=torch.long)
    with pytest.raises(ValueError) as caught:
        model(source, torch.tensor([11]), TARGET[:1])
    expected = "RecurrentEncoderDecoder: source must have at most 10 symbols, the config's max_length, got 11."
    assert str(caught.value) == expected


def test_a_new_model_knows_nothing() -> None:
    for name in ("small", "base"):
        config = RecurrentConfig.preset(name, 12, 9)
        logits = RecurrentEncoderDecoder(config)(SOURCE, LENGTHS, TARGET)
        assert torch.equal(logits, torch.zeros_like(logits))


def test_whole_targets_take_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in ("rnn gru", "rnn encoder", "rnn no attention"):
        model = made(case)
        expected = model(SOURCE, LENGTHS, TARGET)
        monkeypatch.setattr(model, "_advance", None)  # one step
        torch.testing.assert_close(model(SOURCE, LENGTHS, TARGET), expected)


def test_no_attention_is_no_map() -> None:
    model = made("rnn no attention")
    assert model.maps == ()
    assert model.align(SOURCE, LENGTHS, TARGET).shape == (3, 0, 8, 6)
    assert made("rnn gru").maps == ("attention",)


@torch.no_grad()
def test_one_matrix_is_three_that_are_proportional() -> None:
    """What is read is √D times the rows that score the vocabulary."""
    one = made("rnn all tied")
    apart = RecurrentEncoderDecoder(dataclasses.replace(one.config, tied="target")).double().eval()
    E = one.target_embedding.weight
    state = {**one.state_dict(), "source_embedding.weight": E * math.sqrt(one.config.embedding)}
    apart.load_state_dict(state)
    apart.output.weight = torch.nn.Parameter(E)  # scores by E …
    apart.target_embedding.weight.mul_(math.sqrt(one.config.embedding))  # … and reads its multiple
    torch.testing.assert_close(apart(SOURCE, LENGTHS, TARGET), one(SOURCE, LENGTHS, TARGET))
    torch.testing.assert_close(apart.align(SOURCE, LENGTHS, TARGET), one.align(SOURCE, LENGTHS, TARGET))
