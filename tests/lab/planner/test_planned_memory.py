"""Memory: the published formulas, and what a training step of a small model keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from regard._call.plan import clear_plans
from regard_lab.models.decoder_lm import DecoderLM, DecoderLMConfig
from regard_lab.models.mixers import MIXERS
from regard_lab.planner import (
    Layout,
    Recipe,
    activation_memory,
    cache_memory,
    layer_activations,
    logit_memory,
    shape_of,
    training_memory,
)
from regard_lab.planner.shapes import _UNCOUNTED

GPT3 = shape_of(DecoderLMConfig.preset("gpt3"))


@pytest.mark.parametrize(
    ("precision", "optimizer", "each"),
    [
        ("mixed", "adamw", 16), ("mixed-float32-gradients", "adamw", 18), ("autocast", "adamw", 18),
        ("float32", "adamw", 16), ("mixed", "momentum", 12), ("float32", "sgd", 8),
    ],
)  # fmt: skip
def test_bytes_for_each_parameter(precision: str, optimizer: str, each: int) -> None:
    memory = training_memory(GPT3, Recipe(2048, precision, optimizer))
    assert memory.weights + memory.gradients + memory.optimizer == each * GPT3.parameters


def test_activations_of_a_layer_are_those_of_korthikanti() -> None:
    """34·s·b·h + 5·a·s²·b bytes, the statistics of norms left out (arXiv 2205.05198, equation 1)."""
    config = DecoderLMConfig(9, width=128, heads=8, layers=1, dropout=0.1, attention_dropout=0.1)
    kept = layer_activations(shape_of(config).stacks[0].layer, Recipe(256, keeps_scores=True))
    assert kept - 4 * 2 * 2 == 34 * 128 + 5 * 8 * 256
    streamed = layer_activations(shape_of(config).stacks[0].layer, Recipe(256))
    assert streamed - 4 * 2 * 2 == 34 * 128 + 4 * 8, "a number for each head instead of a row of weights"


def kept_bytes(config: DecoderLMConfig, batch: int, length: int) -> int:
    """Return the bytes that torch keeps between forward and backward, each storage once, without parameters."""
    model, tokens = DecoderLM(config), torch.zeros(batch, length, dtype=torch.long)
    seen = {each.untyped_storage().data_ptr(): 0 for each in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = model.features(tokens), model  # storages must not be used anew while they are counted
        return sum(seen.values()) + 0 * len(kept)


@pytest.mark.parametrize("width", [64, 256])
def test_linear_attention_keeps_what_was_counted(width: int) -> None:
    config = DecoderLMConfig(50, width=width, layers=2, heads=4, max_length=256, feature_map="elu")
    told = activation_memory(shape_of(config), Recipe(256, "float32"), Layout(micro_batch=3))
    assert kept_bytes(config, 3, 256) == pytest.approx(told, rel=0.1)


def test_the_cache_of_linear_attention_is_of_one_size() -> None:
    config = DecoderLMConfig(50, width=64, layers=2, heads=4, feature_map="elu")
    model, shape = DecoderLM(config).eval(), shape_of(config)
    for length in (1, 100):
        caches = model.caches()
        with torch.no_grad():
            model(torch.zeros(1, length, dtype=torch.long), caches=caches)
        assert sum(each.nbytes for cache in caches for each in cache.state) == cache_memory(shape, length)


@pytest.mark.parametrize("kind", sorted(MIXERS))
def test_every_kind_is_planned_or_refused(kind: str) -> None:
    sizes: dict[str, Any] = {"width": 64, "layers": 1, "heads": 4, "kv_heads": 2, "max_length": 128}
    sizes |= {"block": 16, "blocks_chosen": 3, "keys_chosen": 32}
    positions = "rotary" if MIXERS[kind].rotary else "none"
    config = DecoderLMConfig(50, attention=kind, positions=positions, **sizes)
    if kind in _UNCOUNTED:
        with pytest.raises(ValueError, match=f"plan: attention must be none of .*, got '{kind}'"):
            shape_of(config)
        return
    model, shape = DecoderLM(config).eval(), shape_of(config)
    assert shape.parameters == sum(each.numel() for each in model.parameters())
    caches: list[Any] = model.caches()
    with torch.no_grad():
        model(torch.zeros(1, 40, dtype=torch.long), caches=caches)
    kept = [each.state if MIXERS[kind].state else (each.key, each.value) for each in caches]
    assert cache_memory(shape, 40, 4) == sum(each.nbytes for cache in kept for each in cache)
    told = activation_memory(shape, Recipe(128, "float32"), Layout(micro_batch=3))
    assert kept_bytes(config, 3, 128) == pytest.approx(told, rel=0.7)


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("layers", [1, 3])
def test_activations_are_what_torch_keeps(layers: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Plans are for accelerators, where torch's own attention runs; the compiled CPU kernels keep their output twice.
    monkeypatch.setattr("regard._call.plan.estimated_seconds", lambda *_: {})
    clear_plans()
    config = DecoderLMConfig(50, width=width, layers=layers, heads=4, max_length=128)
    recipe, layout = Recipe(128, "float32"), Layout(micro_batch=3)
    told = activation_memory(shape_of(config), recipe, layout)
    # The rows that logits are made of are kept by what comes next; positions are counted once.
    rows, positions = 3 * 128 * width * 4, (3 - 1) * 0 + 128 * 8
    assert kept_bytes(config, 3, 128) == told - rows + positions
    clear_plans()


def test_layers_that_run_again_keep_their_input() -> None:
    recipe = Recipe(2048)
    whole, again = (activation_memory(GPT3, recipe, Layout(recompute=each)) for each in (False, True))
    rows = 2048 * 2 * GPT3.width
    working = layer_activations(GPT3.stacks[0].layer, recipe) * 2048
    assert again == pytest.approx(rows * (GPT3.depth + 2) + working, rel=1e-3)
    assert again < whole / 10


def test_shards() -> None:
    recipe = Recipe(2048)
    alone = training_memory(GPT3, recipe)
    first = training_memory(GPT3, recipe, Layout(data=64, sharding="optimizer"))
    full = training_memory(GPT3, recipe, Layout(data=64, sharding="all"))
    assert first.optimizer == alone.optimizer / 64 and first.weights == alone.weights
    assert full.weights == alone.weights / 64 and full.gradients == alone.gradients / 64 and full.gathered > 0
    pieces = training_memory(GPT3, recipe, Layout(tensor=8))
    assert pieces.total == pytest.approx(alone.total / 8, rel=0.02)


def test_a_pipeline_keeps_as_many_activations_as_one_device() -> None:
    recipe = Recipe(2048)
    one, sixteen = (training_memory(GPT3, recipe, Layout(pipeline=each)) for each in (1, 16))
    assert sixteen.activations == one.activations
    assert sixteen.weights < one.weights / 14


def test_logits_in_chunks() -> None:
    whole, chunks = Recipe(2048, chunk=None), Recipe(2048)
    layout = Layout(micro_batch=8)
    assert logit_memory(GPT3, whole, layout) == 8 * 2048 * 50257 * 14
    assert logit_memory(GPT3, chunks, layout) < logit_memory(GPT3, whole, layout) / 5


def test_a_cache_is_what_the_models_caches_hold() -> None:
    config = DecoderLMConfig(50, width=48, layers=3, heads=6, kv_heads=2, positions="rotary", max_length=64)
    model = DecoderLM(config).eval()
    caches = model.caches()
    with torch.no_grad():
        model(torch.zeros(2, 40, dtype=torch.long), caches=caches)
    held = sum(each.key.nbytes + each.value.nbytes for each in caches)
    assert cache_memory(shape_of(config), 2 * 40, 4) == held
