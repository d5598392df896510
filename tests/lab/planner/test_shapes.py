"""Counted parameters are those of the model that is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples
from torch import nn

from regard_lab.models.attending import SCORES
from regard_lab.models.decoder_lm import DecoderLM, DecoderLMConfig
from regard_lab.models.encoder_lm import PRESETS as ENCODERS
from regard_lab.models.encoder_lm import EncoderLM, EncoderLMConfig
from regard_lab.models.transformer import TransformerConfig, TransformerEncoderDecoder
from regard_lab.planner import parameters_by_part, parameters_without_embeddings, shape_of


def built(model: type[nn.Module], config: object) -> int:
    with torch.device("meta"):
        return sum(each.numel() for each in model(config).parameters())


def check(model: type[nn.Module], config: Any) -> None:
    shape = shape_of(config, "this")
    assert shape.parameters == built(model, config)
    assert sum(parameters_by_part(shape).values()) == shape.parameters
    assert shape.name == "this" and shape.width == config.width


@pytest.mark.parametrize("name", DecoderLMConfig.presets())
def test_presets_of_decoders(name: str) -> None:
    check(DecoderLM, DecoderLMConfig.preset(name))


@pytest.mark.parametrize("tied", ["none", "target", "all"])
@pytest.mark.parametrize("name", TransformerConfig.presets())
def test_presets_of_encoder_decoders(name: str, tied: str) -> None:
    check(TransformerEncoderDecoder, TransformerConfig.preset(name, 300, 300 if tied == "all" else 200, tied=tied))


@st.composite
def language(draw: Any) -> dict[str, Any]:
    """Return settings that every config of a language model takes."""
    G, group, D = draw(st.integers(1, 3)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 4))
    fields = {"vocabulary": st.integers(1, 99), "width": st.integers(1, 40), "layers": st.integers(1, 4)}
    fields |= {"max_length": st.integers(1, 50), "feedforward": st.none() | st.integers(1, 90)}
    fields |= {each: st.booleans() for each in ("gated", "bias", "tied")}
    fields |= {each: st.none() | st.booleans() for each in ("qkv_bias", "out_bias")}
    fields |= {"positions": st.sampled_from(["learned", "rotary", "alibi", "sinusoidal", "none"])}
    fields |= {"norm": st.sampled_from(["layer", "rms"]), "score": st.sampled_from(sorted(SCORES))}
    made = {"heads": G * group, "kv_heads": G, "head_width": D} | draw(st.fixed_dictionaries(fields))
    if made["positions"] == "sinusoidal":
        made["width"] *= 2
    return made


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(language())
def test_random_decoders(fields: dict[str, Any]) -> None:
    check(DecoderLM, DecoderLMConfig(**fields))


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_random_encoder_decoders(data: Any) -> None:
    G, group, D = (data.draw(st.integers(1, 3)) for _ in range(3))
    fields = {
        "encoder_layers": st.integers(1, 3), "decoder_layers": st.integers(1, 3), "feedforward": st.integers(1, 50),
        "norm": st.sampled_from(["pre", "post"]), "positions": st.sampled_from(["sinusoidal", "learned", "rotary"]),
        "tied": st.sampled_from(["none", "target", "all"]), "score": st.sampled_from(sorted(SCORES)),
        "max_length": st.integers(1, 40),
    }  # fmt: skip
    made = {each: data.draw(strategy) for each, strategy in fields.items()}
    targets = 12 if made["tied"] == "all" else 9
    config = TransformerConfig(12, targets, width=2 * G * group * D, heads=G * group, kv_heads=G, **made)
    check(TransformerEncoderDecoder, config)


#: As the released checkpoints have them, without what makes logits: google-research/bert issue 1225 has the first.
@pytest.mark.parametrize(("name", "count"), [("bert-base", 109_482_240), ("bert-large", 335_141_888)])
def test_encoders_have_the_counts_of_released_checkpoints(name: str, count: int) -> None:
    assert shape_of(EncoderLMConfig.preset(name, masked_head=False)).parameters == count


@settings(max_examples=examples(30), deadline=None)
@given(language(), st.integers(0, 3), st.none() | st.integers(1, 20), st.tuples(*[st.booleans()] * 4))
def test_random_encoders(fields: dict[str, Any], segments: int, width: int | None, flags: tuple[bool, ...]) -> None:
    if fields["positions"] == "sinusoidal" and width is not None:
        width *= 2
    names = ("norm_first", "shared", "pooled", "masked_head")
    fields |= {"segments": segments, "embedding_width": width, **dict(zip(names, flags))}
    check(EncoderLM, EncoderLMConfig(**fields))


@pytest.mark.parametrize("name", ENCODERS)
def test_presets_of_encoders(name: str) -> None:
    check(EncoderLM, EncoderLMConfig.preset(name))


def test_shared_layers_count_once() -> None:
    config = EncoderLMConfig.preset("bert-base", shared=True)
    one, twelve = (shape_of(EncoderLMConfig.preset("bert-base", layers=each)) for each in (1, 12))
    shared = shape_of(config)
    assert shared.parameters == one.parameters and shared.depth == twelve.depth


@pytest.mark.parametrize("norm", ["none", "head", "all"])
def test_layers_that_share_keys_have_queries_alone(norm: Any) -> None:
    shared: dict[str, Any] = {"kv_heads": 2, "share_keys_values": "0,0,0,3", "qk_norm": norm}
    check(DecoderLM, DecoderLMConfig(9, width=16, heads=4, layers=4, **shared))
    shared |= {"share_keys_values": "2", "attention": "softmax,softmax,linear"}
    check(DecoderLM, DecoderLMConfig(9, width=16, heads=4, layers=6, **shared))


def test_without_embeddings() -> None:
    shape = shape_of(DecoderLMConfig.preset("gpt2"))
    assert parameters_without_embeddings(shape) == shape.parameters - (50257 + 1024) * 768


def test_what_the_planner_does_not_know() -> None:
    with pytest.raises(TypeError, match=r"shape_of: config must be the config of a DecoderLM, .*, got 3"):
        shape_of(3)
