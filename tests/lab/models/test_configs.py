"""Configs: what they refuse and how they say it, and the presets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regard_lab.models import (
    RecurrentConfig,
    RecurrentEncoderDecoder,
    TransformerConfig,
    TransformerEncoderDecoder,
    attending,
    recurrent,
    transformer,
)

SIZE = "must be an int from 1 to 65,536, got"
LAYERS = "must be an int from 1 to 100, got"
BOOL = "must be a bool, got"
SHARE = "dropout must be a number in [0, 1), got"
PLAIN = ", ".join(map(repr, attending.PLAIN))
SCORES = ", ".join(map(repr, sorted(attending.SCORES)))
WITH_NONE = ", ".join(map(repr, sorted([*attending.SCORES, "none"])))
RECURRENT: list[tuple[dict[str, Any], str]] = [
    ({"sources": 0}, f"sources {SIZE} 0."),
    ({"targets": "9"}, f"targets {SIZE} '9'."),
    ({"decoder": 2.0}, f"decoder {SIZE} 2.0."),
    ({"encoder": True}, f"encoder {SIZE} True."),
    ({"features": 1 << 20}, f"features {SIZE} 1048576."),
    ({"embedding": -1}, f"embedding {SIZE} -1."),
    ({"encoder_layers": 0}, f"encoder_layers {LAYERS} 0."),
    ({"decoder_layers": None}, f"decoder_layers {LAYERS} None."),
    ({"encoder_layers": 101}, f"encoder_layers {LAYERS} 101."),
    ({"window": 0}, f"window {SIZE} 0."),
    ({"max_length": 0}, f"max_length {SIZE} 0."),
    *[({"dropout": value}, f"{SHARE} {value!r}.") for value in (1.0, -0.1, float("nan"))],
    *[({"dropout": value}, f"{SHARE} {value!r}.") for value in ("0", True)],
    ({"bidirectional": 1}, f"bidirectional {BOOL} 1."),
    ({"projections": "yes"}, f"projections {BOOL} 'yes'."),
    ({"input_feeding": None}, f"input_feeding {BOOL} None."),
    ({"tied": True}, "tied must be one of 'all', 'none', 'target', got True."),
    ({"tied": "all"}, "targets must be sources 12 where tied is 'all', got 9."),
    ({"cell": "LSTM"}, "cell must be one of 'gru', 'lstm', got 'LSTM'."),
    ({"cell": 1}, "cell must be one of 'gru', 'lstm', got 1."),
    (
        {"attention": "aditive"},
        f"attention must be one of {WITH_NONE}, got 'aditive' (did you mean 'additive'?).",
    ),
    ({"scope": "local"}, "scope must be one of 'global', 'local-m', 'local-p', got 'local' (did you mean 'local-p'?)."),
    ({"hard": "x"}, "hard must be one of 'gumbel', 'none', 'reinforce', got 'x'."),
    ({"wiring": "x"}, "wiring must be one of 'after', 'before', 'encoder', got 'x'."),
    ({"projections": True}, f"attention must be one of {PLAIN} where projections is True, got 'additive'."),
    (
        {"projections": True, "attention": "none"},
        f"attention must be one of {PLAIN} where projections is True, got 'none'.",
    ),
    ({"hard": "gumbel", "scope": "local-m"}, "scope must be 'global' where hard is 'gumbel', got 'local-m'."),
    ({"input_feeding": True, "wiring": "before"}, "wiring must be 'after' where input_feeding is True, got 'before'."),
    ({"attention": "none", "scope": "local-p"}, "scope must be 'global' where attention is 'none', got 'local-p'."),
    ({"attention": "none", "hard": "gumbel"}, "hard must be 'none' where attention is 'none', got 'gumbel'."),
    ({"attention": "none", "wiring": "encoder"}, "wiring must be 'after' where attention is 'none', got 'encoder'."),
    ({"attention": "none", "input_feeding": True}, "input_feeding must be False where attention is 'none', got True."),
]
TRANSFORMER: list[tuple[dict[str, Any], str]] = [
    ({"width": 0}, f"width {SIZE} 0."),
    ({"feedforward": 1.5}, f"feedforward {SIZE} 1.5."),
    ({"dropout": 1}, f"{SHARE} 1."),
    ({"attention_dropout": -1.0}, f"attention_{SHARE} -1.0."),
    ({"activation_dropout": 1.0}, f"activation_{SHARE} 1.0."),
    ({"heads": 7}, "heads must divide width 512, got 7."),
    ({"kv_heads": 3}, "kv_heads must divide heads 8, got 3."),
    ({"kv_heads": 0}, f"kv_heads {SIZE} 0."),
    (
        {"width": 24, "positions": "rotary"},
        "width must be an even number for each head where positions is 'rotary', got 24 over 8.",
    ),
    ({"tied": "all"}, "targets must be sources 12 where tied is 'all', got 9."),
    ({"tied": True}, "tied must be one of 'all', 'none', 'target', got True."),
    ({"norm": "first"}, "norm must be one of 'post', 'pre', got 'first'."),
    ({"activation": "swish"}, "activation must be one of 'gelu', 'relu', got 'swish'."),
    ({"positions": "none"}, "positions must be one of 'learned', 'rotary', 'sinusoidal', got 'none'."),
    (
        {"normalizer": "argmax"},
        "normalizer must be one of 'entmax', 'entmax15', 'sigmoid', 'softmax', 'sparsemax', got 'argmax' "
        "(did you mean 'sparsemax'?).",
    ),
    (
        {"score": "boxcar"},
        f"score must be one of {SCORES}, got 'boxcar' (did you mean 'concat'?).",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), RECURRENT, ids=str)
def test_recurrent_configs_are_checked(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        RecurrentConfig(**{"sources": 12, "targets": 9, **wrong})
    assert str(caught.value) == f"RecurrentConfig: {message}"


@pytest.mark.parametrize(("wrong", "message"), TRANSFORMER, ids=str)
def test_transformer_configs_are_checked(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        TransformerConfig(**{"sources": 12, "targets": 9, **wrong})
    assert str(caught.value) == f"TransformerConfig: {message}"


@pytest.mark.parametrize("name", recurrent.PRESETS)
def test_recurrent_presets_make_models(name: str) -> None:
    config = RecurrentConfig.preset(name, 12, 9)
    with torch.device("meta"):
        model = RecurrentEncoderDecoder(config)
    assert model.decoder.hidden_size == config.decoder == recurrent.PRESETS[name]["decoder"]


@pytest.mark.parametrize("name", transformer.PRESETS)
def test_transformer_presets_make_models(name: str) -> None:
    config = TransformerConfig.preset(name, 12, 12, tied="all")
    with torch.device("meta"):
        model = TransformerEncoderDecoder(config)
    assert len(model.maps) == config.decoder_layers * config.heads
    assert config.tied == "all"


@pytest.mark.slow
def test_presets_have_the_papers_sizes() -> None:
    base = TransformerEncoderDecoder(TransformerConfig.preset("vaswani2017-base", 10, 10, tied="all"))
    # 44 million in the layers, 19 in 37,000 shared symbols; the paper's Table 3 says 65.
    assert round((sum(p.numel() for p in base.parameters()) + (37000 - 10) * 513) / 1e6) == 63
    config = RecurrentConfig.preset("luong2015", 50000, 50000)
    assert (config.embedding, config.decoder, config.decoder_layers, config.window) == (1000, 1000, 4, 10)


def test_unknown_presets_are_refused() -> None:
    with pytest.raises(ValueError) as caught:
        RecurrentConfig.preset("smal", 12, 9)
    known = "'bahdanau2014', 'base', 'luong2015', 'small', 'sutskever2014'"
    assert str(caught.value) == f"RecurrentConfig: preset must be one of {known}, got 'smal' (did you mean 'small'?)."
