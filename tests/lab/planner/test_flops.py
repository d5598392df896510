"""Operations: those that torch's counter finds, and pairs that the mask shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples
from torch.utils.flop_counter import FlopCounterMode

from regard import masks
from regard_lab.models.decoder_lm import DecoderLM, DecoderLMConfig
from regard_lab.planner import AttentionShape, executed_flops, forward_flops, shape_of, training_flops, visible_pairs

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {"positions": "rotary", "norm": "rms", "gated": True, "activation": "silu", "bias": False, "kv_heads": 2},
    "untied": {"tied": False, "head_width": 4},
}
B, L = 2, 48
#: Kinds whose products all see every earlier key.
DENSE = ("differential", "fox", "gta", "laser", "mfa", "mla", "tpa")


@pytest.mark.parametrize("kind", DENSE)
def test_torchs_counter_agrees_on_other_kinds(kind: str) -> None:
    config = DecoderLMConfig(101, width=32, layers=2, heads=4, kv_heads=2, positions="rotary", attention=kind)
    shape, model = shape_of(config), DecoderLM(config)
    for module in model.modules():
        if hasattr(module, "engine"):
            module.engine = "reference"
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(B, L, dtype=torch.long))
    once, attention = forward_flops(shape, L), shape.stacks[0].layer.attentions[0]
    own, share = 2 * attention.token, L * L / visible_pairs(L, attention)
    assert counter.get_total_flops() == pytest.approx(B * L * (once.total + (share - 1) * (once.attention - own)))


@pytest.mark.parametrize("kind", ["titans", "ttt", "ttt-mlp"])
def test_torchs_counter_agrees_on_networks_that_learn(kind: str) -> None:
    config = DecoderLMConfig(50, width=64, layers=1, heads=4, positions="none", attention=kind)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        DecoderLM(config)(torch.zeros(B, 64, dtype=torch.long))
    # What moves a momentum from one block to the next is not counted.
    assert counter.get_total_flops() == pytest.approx(B * 64 * forward_flops(shape_of(config), 64).total, rel=0.005)


@pytest.mark.parametrize("size", [1, 3, 4, 11, 20])
def test_pairs_of_blocks(size: int) -> None:
    for keys, chosen in ((4, 1), (4, 3), (3, 9), (30, 2)):
        seen = [i % keys + 1 + keys * min(chosen - 1, i // keys) for i in range(size)]
        assert visible_pairs(size, AttentionShape(1, 1, 8, causal=True, block=keys, chosen=chosen)) == sum(seen)
        ended = [(i + 1) // keys for i in range(size)]
        assert visible_pairs(size, AttentionShape(1, 1, 8, causal=True, means=keys)) == sum(ended)


@pytest.mark.parametrize("name", CONFIGS)
def test_torchs_counter_agrees(name: str) -> None:
    """torch counts all pairs, whatever the mask; what is left are the same products."""
    config = DecoderLMConfig(101, width=32, layers=3, heads=4, max_length=64, **CONFIGS[name])
    shape, model = shape_of(config), DecoderLM(config)
    tokens = torch.randint(101, (B, L), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as forward:
        logits = model(tokens)
    with FlopCounterMode(display=False) as backward:
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    once = forward_flops(shape, L)
    share = L * L / visible_pairs(L, shape.stacks[0].layer.attentions[0])
    assert forward.get_total_flops() == pytest.approx(B * L * (once.layers + once.head + share * once.attention))
    done = executed_flops(shape, L)
    both = forward.get_total_flops() + backward.get_total_flops()
    assert both == pytest.approx(B * L * (done.layers + done.head + share * done.attention))


@settings(max_examples=examples(80), deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4), st.none() | st.integers(1, 12), st.integers(0, 5),
    st.booleans(),
)  # fmt: skip
def test_pairs_are_those_that_the_mask_shows(
    documents: list[int], window: int | None, sinks: int, causal: bool
) -> None:
    length = sum(documents)
    ids = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    mask = masks.document(ids)
    if causal:
        mask = mask & masks.causal()
        if window is not None:
            mask = mask & (masks.window(window - 1, 0) | masks.sinks(sinks) if sinks else masks.window(window - 1, 0))
    shown = mask.draw(length).count("█") - 1  # one stands in the legend
    attention = AttentionShape(1, 1, 1, causal=causal, window=window, sinks=sinks if window is not None else 0)
    assert visible_pairs(length, attention, documents) == shown


def test_documents_fill_the_sequence() -> None:
    with pytest.raises(ValueError, match="visible_pairs: documents must have 10 tokens together, got 9"):
        visible_pairs(10, AttentionShape(1, 1, 1), [4, 5])


def test_training_asks_for_three_times_the_forward_pass_and_executes_more() -> None:
    shape = shape_of(DecoderLMConfig.preset("gpt2"))
    once, asked = forward_flops(shape), training_flops(shape)
    assert asked.total == pytest.approx(3 * once.total)
    assert executed_flops(shape, keeps_scores=True).total == pytest.approx(asked.total)
    assert executed_flops(shape).total == pytest.approx(asked.total + once.scores)
    again = executed_flops(shape, recompute=True).total
    assert again == pytest.approx(executed_flops(shape).total + once.layers + once.attention)


def test_six_operations_for_each_parameter_are_nearly_all() -> None:
    shape = shape_of(DecoderLMConfig.preset("gpt3"))
    assert training_flops(shape).total == pytest.approx(6 * shape.parameters, rel=0.02)


def test_a_window_bounds_attention() -> None:
    config = {"positions": "rotary", "layers": 2, "width": 64, "heads": 2}
    shape = shape_of(DecoderLMConfig(100, window=16, sinks=2, max_length=4096, **config))
    long, longer = (forward_flops(shape, each).scores for each in (2048, 4096))
    assert long < longer < 2 * 2 * 64 * 18
