"""Layers as one kernel are those that torch runs operation by operation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples
from torch import Tensor, nn

from regard._utils.tracing import observing_calls
from regard.engines.fused import library
from regard_lab.generation import SearchOptions, pack_weights, quantize, search
from regard_lab.models import TransformerConfig, TransformerEncoderDecoder
from regard_lab.models.packed_layers import obstacle, packed_layers


def translator(seed: int = 0, **changes: Any) -> TransformerEncoderDecoder:
    """A Transformer with random parameters."""
    sizes = {"sources": 40, "targets": 50, "width": 24, "heads": 3, "feedforward": 40}
    sizes |= {"encoder_layers": 2, "decoder_layers": 2}
    model = TransformerEncoderDecoder(TransformerConfig(**(sizes | changes))).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def sources(seed: int, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (count,), generator=generator)
    return torch.randint(3, 40, (count, int(lengths.max())), generator=generator), lengths


def steps(model: TransformerEncoderDecoder, source: Tensor, lengths: Tensor, beams: int, seed: int) -> list[Tensor]:
    """The logits of some steps, whose beams and sources are reordered in between."""
    generator, made = torch.Generator().manual_seed(seed), []
    memory = model.encode(source, lengths)
    state, B = model.start(memory, beams), len(lengths)
    for _ in range(20):
        last = torch.randint(3, 50, (B, beams), generator=generator)
        logits, following = model.step(last, memory, state)
        again, _ = model.step(last, memory, state)
        assert torch.equal(logits, again), "a state does not change"
        made.append(logits)
        kept = torch.randperm(B, generator=generator)[: max(B - (len(made) == 9), 1)]
        parent = torch.randint(beams, (len(kept), beams), generator=generator)
        memory, state, B = memory.select(kept), following.select((kept[:, None] * beams + parent).flatten()), len(kept)
    return made


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(
    norm=st.sampled_from(["pre", "post"]), heads=st.sampled_from([1, 3, 8]), width=st.sampled_from([24, 72]),
    layers=st.integers(1, 3), positions=st.sampled_from(["sinusoidal", "learned"]), count=st.integers(1, 5),
    beams=st.integers(1, 4), int8=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@torch.no_grad()
def test_the_kernel_agrees_with_torch(count: int, beams: int, int8: bool, seed: int, **changes: Any) -> None:
    changes["encoder_layers"] = changes["decoder_layers"] = changes.pop("layers")
    model, read = translator(seed, **changes), sources(seed, count)
    packed = quantize(model) if int8 else model
    if not int8:
        pack_weights(packed)
    assert packed.start(packed.encode(*read), 1).kernel is not None
    made = steps(packed, *read, beams, seed)
    with observing_calls():
        assert packed.start(packed.encode(*read), 1).kernel is None
        wanted = steps(packed, *read, beams, seed)
    for one, other in zip(made, wanted):
        # In int8, both round rows to 16 bits; a number near the middle of two steps may go either way.
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-2 if int8 else 2e-4)


@pytest.mark.parametrize("options", [{"beams": 1}, {"beams": 5, "n_best": 3}, {"beams": 3, "no_repeat": 2},
                                     {"beams": 3, "min_length": 6, "unknown": False}, {"sample": True, "n_best": 4},
                                     {"beams": 4, "max_length": 5, "length_penalty": 0.0}], ids=str)  # fmt: skip
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_translations_are_the_same(norm: str, options: dict[str, Any]) -> None:
    model, read = translator(3, norm=norm), sources(3, 6)
    packed = copy.deepcopy(model)
    pack_weights(packed)
    found = [search(each, *read, SearchOptions(**options)) for each in (model, packed)]
    numbers = [[[each.numbers for each in best] for best in every] for every in found]
    assert numbers[0] == numbers[1]
    for one, other in zip(*found):
        assert [each.score for each in one] == pytest.approx([each.score for each in other], rel=1e-4)


def test_threads_do_not_change_the_result() -> None:
    model, read, before = translator(width=256, heads=4, feedforward=512), sources(1, 40), torch.get_num_threads()
    pack_weights(model)
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            with torch.no_grad():
                found.append(steps(model, *read, 2, 1))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"positions": "rotary"}, "an attention is not"), ({"normalizer": "sparsemax"}, "an attention is not"),
     ({"score": "additive"}, "an attention is not"), ({"kv_heads": 1}, "an attention is not"),
     ({"activation": "gelu"}, "the activation is not ReLU")], ids=str,
)  # fmt: skip
@torch.no_grad()
def test_other_models_run_in_torch(changes: dict[str, Any], reason: str) -> None:
    model, read = translator(**changes), sources(0, 3)
    wanted = steps(model, *read, 2, 0)
    pack_weights(model)
    assert reason in (obstacle(model._decoder_layers) or "")
    for one, other in zip(steps(model, *read, 2, 0), wanted):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-4)


def test_what_keeps_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = translator()
    layers = model._decoder_layers
    with torch.no_grad():
        assert "pack_weights" in (obstacle(layers) or "")
        pack_weights(model)
        assert obstacle(layers) is None and obstacle([]) == "there are no layers"
        assert packed_layers(layers, model.decoder_norm) is not None
        with torch.autocast("cpu", torch.bfloat16):
            assert "autocast" in (obstacle(layers) or "")
        handle = layers[1].linear1.register_forward_hook(lambda *_: None)
        assert "hook" in (obstacle(layers) or "")
        handle.remove()
        model.train()
        assert "training" in (obstacle(layers) or "")
        model.eval()
        monkeypatch.setattr(library, "_PROBLEM", "it is missing")
        assert obstacle(layers) == "it is missing"
    monkeypatch.undo()
    assert obstacle(layers) == "gradients are enabled"
    with torch.no_grad():
        model.double()
        assert "float32" in (obstacle(layers) or "")


def test_an_inspector_that_comes_too_late_is_refused():
    model = translator()
    pack_weights(model)
    source, lengths = sources(0, 2)
    with torch.no_grad():
        memory = model.encode(source, lengths)
        state = model.start(memory, 1)
        with observing_calls(), pytest.raises(RuntimeError, match="inside its context"):
            model.step(torch.full((2, 1), 3), memory, state)
