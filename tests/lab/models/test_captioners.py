"""Captioners: Xu's formulas in float64, several captions of one image, and decoding step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard_lab.generation.beam_search import SearchOptions, search
from regard_lab.models.captioner import (
    CAPTIONERS,
    RecurrentCaptioner,
    RecurrentCaptionerConfig,
    TransformerCaptioner,
    TransformerCaptionerConfig,
)
from regard_lab.training.objectives import coverage_loss

F64 = torch.float64
SMALL = {"embedding": 6, "decoder": 7, "features": 8, "states": 10, "places": 9, "dropout": 0.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "soft": ("recurrent", {}),
    "before": ("recurrent", {"wiring": "before"}),
    "gru": ("recurrent", {"cell": "gru", "gate": False, "decoder_layers": 2}),
    "no glimpse": ("recurrent", {"glimpse": False, "attention": "general"}),
    "feeding": ("recurrent", {"input_feeding": True}),
    "local-m": ("recurrent", {"scope": "local-m", "window": 2}),
    "location": ("recurrent", {"attention": "location"}),
    "none": ("recurrent", {"attention": "none", "gate": False}),
    "reinforce": ("recurrent", {"hard": "reinforce"}),
    "reinforce before": ("recurrent", {"hard": "reinforce", "wiring": "before"}),
    "gumbel": ("recurrent", {"hard": "gumbel"}),
    "transformer": ("transformer", {"width": 8, "heads": 2, "feedforward": 12, "decoder_layers": 2}),
    "no encoder": ("transformer", {"width": 8, "heads": 2, "feedforward": 12, "encoder_layers": 0, "norm": "post"}),
}


def made(name: str, **changes: Any) -> Any:
    kind, fields = CASES[name]
    config, model = CAPTIONERS[kind]
    torch.manual_seed(0)
    small = SMALL if kind == "recurrent" else {"places": 9, "dropout": 0.0}
    built = model(config(5, 11, **{**small, **fields, **changes})).double().eval()
    for parameter in built.parameters():  # so that nothing is 0, as outputs begin
        torch.nn.init.normal_(parameter, std=0.5)
    return built


def batch(captions: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    target = torch.randint(2, 11, (3 * captions, 6))
    target[:, 0] = 1
    return torch.randn(3, 9, 5, dtype=F64), torch.full((3,), 9), target


def test_soft_attention_is_xus_with_a_gate_and_a_glimpse() -> None:
    model = made("soft")
    source, lengths, target = batch()
    grid = model.grid.norm(model.grid.project(source)) + model.grid.places  # (B, S, E)
    hidden, cell = torch.tanh(model.bridge(grid.mean(1))), torch.zeros(3, 7, dtype=F64)
    features, maps = [], []
    for symbols in target.T:
        entering = torch.cat([model.target_embedding(symbols), grid.mean(1)], -1)
        hidden, cell = torch.lstm_cell(entering, (hidden, cell), *model.decoder.all_weights[0])
        attending = model.attending
        scores = torch.tanh(attending.query(hidden)[:, None] + attending.key(grid)) @ attending.layer.w_v
        weights = scores.softmax(-1)
        beta = torch.sigmoid(hidden @ model.gate.weight[0] + model.gate.bias)
        context = beta[:, None] * (weights[..., None] * grid).sum(1)
        features.append(torch.tanh(model.combine(torch.cat([hidden, context], -1))))
        maps.append(weights)
    ours, attention = model.features_and_attention(source, lengths, target, name="attention")
    torch.testing.assert_close(ours, torch.stack(features, 1))
    torch.testing.assert_close(attention, torch.stack(maps, 1))


@pytest.mark.parametrize("name", CASES)
def test_captions_of_one_image_are_as_those_of_copies_of_it(name: str) -> None:
    model = made(name)
    source, lengths, target = batch(4)
    copies = source.repeat_interleave(4, 0), lengths.repeat_interleave(4)
    torch.testing.assert_close(model(source, lengths, target), model(*copies, target))
    torch.testing.assert_close(model.align(source, lengths, target), model.align(*copies, target))
    sampled = model.features(source, lengths, target, 0.5)  # which steps through
    assert sampled.shape == model.features(source, lengths, target).shape


@pytest.mark.parametrize("name", CASES)
def test_step_by_step_is_the_whole(name: str) -> None:
    model = made(name)
    source, lengths, target = batch()
    memory = model.encode(source, lengths)
    state, logits = model.start(memory, 1), []
    for step in range(target.shape[1]):
        made_, state = model.step(target[:, step : step + 1], memory, state)
        logits.append(made_)
    torch.testing.assert_close(torch.cat(logits, 1), model(source, lengths, target))


@pytest.mark.parametrize("name", ["soft", "gumbel", "transformer"])
def test_a_search_writes_what_is_likeliest(name: str) -> None:
    model = made(name).float()
    source, lengths, _ = batch()
    options = SearchOptions(beams=4, n_best=2, max_length=7)
    together = search(model, source.float(), lengths, options)
    for grid, both in zip(source.float(), together):
        assert both[0].normalized >= both[1].normalized
        (alone,) = search(model, grid[None], lengths[:1], options)
        assert [each.numbers for each in alone] == [each.numbers for each in both]
    drawn = search(model, source.float(), lengths, SearchOptions(sample=True, seed=3, max_length=7))
    again = search(model, source[:1].float(), lengths[:1], SearchOptions(sample=True, seed=3, max_length=7))
    assert drawn[0][0].numbers == again[0][0].numbers, "a draw is settled by the image and the seed"


@pytest.mark.parametrize("name", ["soft", "gru", "transformer"])
def test_padding_is_left_out_of_the_recurrence_without_a_trace(name: str) -> None:
    model = made(name)
    source, lengths, target = batch(4)
    real = torch.arange(12) % 6 + 1
    padded = torch.where(torch.arange(6) < real[:, None], target, 0)
    ours = model.features(source, lengths, padded)
    for row, count in enumerate(real.tolist()):
        alone = model.features(source[row // 4, None], lengths[:1], target[row, None, :count])
        torch.testing.assert_close(ours[row, :count], alone[0])


def test_rewards_of_padding_do_not_count() -> None:
    results = []
    for behind in (0, 5):
        model = made("reinforce").train()
        source, lengths, target = batch()
        target[:, 4:] = behind
        torch.manual_seed(7)
        model.features(source, lengths, target)
        reward = torch.full((3, 6), -2.0, dtype=F64)
        reward[:, 4:] = 99.0 * behind
        torch.manual_seed(7)
        model.surrogate(reward, torch.arange(6).expand(3, 6) < 4)
        results.append(float(model.attending.layer.baseline))
    assert results == [-2.0, -2.0]
    with pytest.raises(ValueError, match=r"surrogate: real must be a bool tensor \(3, 6\), got a float32 tensor"):
        model.features(source, lengths, target)
        model.surrogate(reward, torch.ones(3, 6))


def test_the_surrogate_moves_what_draws_for_several_captions() -> None:
    model = made("reinforce").train()
    source, lengths, target = batch(2)
    features = model.features(source, lengths, target)
    (features.sum() * 0 + model.surrogate(-torch.rand(6, 6, dtype=F64), target > 0)).backward()
    assert model.attending.query.weight.grad.abs().sum() > 0


def test_coverage_is_the_formula() -> None:
    torch.manual_seed(0)
    weights = torch.rand(4, 5, 6, dtype=F64).softmax(-1)
    real = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)
    wanted = []
    for row, count in ((0, 5), (1, 2), (3, 1)):
        received = [sum(float(weights[row, t, s]) for t in range(count)) for s in range(6)]
        wanted.append(sum((1 - each) ** 2 for each in received) / 6)
    torch.testing.assert_close(float(coverage_loss(weights, real)), sum(wanted) / 3, rtol=1e-6, atol=0)
    assert float(coverage_loss(weights[:0], real[:0])) == 0


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (RecurrentCaptionerConfig, {"wiring": "encoder"}, "wiring must be 'after' or 'before' for images"),
        (RecurrentCaptionerConfig, {"tied": "all", "targets": 5}, "tied must be 'none' or 'target' for images"),
        (RecurrentCaptionerConfig, {"attention": "none"}, "gate must be False where attention is 'none'"),
        (RecurrentCaptionerConfig, {"attention": "location", "places": 99}, "max_length must be at least places, 99"),
        (TransformerCaptionerConfig, {"tied": "all", "targets": 5}, "tied must be 'none' or 'target' for images"),
        (TransformerCaptionerConfig, {"score": "location", "max_length": 9}, "max_length must be at least places, 49"),
    ],
)
def test_what_contradicts_itself(config: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**{"sources": 5, "targets": 11, **fields})


def test_presets() -> None:
    for kind, names in (("recurrent", {"base", "small", "xu2015"}), ("transformer", {"base", "small"})):
        config, _ = CAPTIONERS[kind]
        assert set(config.presets()) == names
        assert all(config.preset(name, 8, 9, places=4).places == 4 for name in names)
    assert isinstance(TransformerCaptioner(TransformerCaptionerConfig(8, 9, places=4)), TransformerCaptioner)
    assert RecurrentCaptioner(RecurrentCaptionerConfig(8, 9, places=4)).maps == ("attention",)
