"""Folders of the shapes of Llama, Mistral and Qwen2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from regard.models.decoder_lm import DecoderLM, DecoderLMConfig
from regard.models.hugging_face.rules import (
    Described,
    Family,
    Rule,
    activation_read,
    activation_written,
    is_plain,
    same,
)

#: The kinds of rotary scaling that our models know.
_SCALINGS = ("default", "linear", "llama3")


def _read(described: Described, names: set[str]) -> DecoderLMConfig:  # noqa: ARG001
    kind = described["model_type"]
    heads = described["num_attention_heads"]
    biased = bool(described.get("attention_bias", False)) if kind == "llama" else kind == "qwen2"
    return DecoderLMConfig(
        vocabulary=described["vocab_size"],
        width=described["hidden_size"],
        layers=described["num_hidden_layers"],
        heads=heads,
        kv_heads=described.get("num_key_value_heads") or heads,
        head_width=described.get("head_dim") or None,
        feedforward=described["intermediate_size"],
        longest=described.get("max_position_embeddings", 2048),
        positions="rotary",
        **_rotary(described),
        norm="rms",
        norm_eps=described.get("rms_norm_eps", 1e-6),
        activation=activation_read(described.get("hidden_act", "silu")),
        gated=True,
        bias=bool(described.get("mlp_bias", False)),
        qkv_bias=biased,
        out_bias=biased and kind == "llama",
        tied=bool(described.get("tie_word_embeddings", False)),
        window=_window(described),
        attention_dropout=described.get("attention_dropout", 0.0),
    )


def _rotary(described: Described) -> dict[str, Any]:
    """Return our fields of rotary positions; older configs have them in two fields."""
    given = described.get("rope_parameters") or described.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ValueError(f"have a table of rope_parameters, got {given!r}")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _SCALINGS:
        raise ValueError(f"have a rope_type of {', '.join(_SCALINGS)}, got {kind!r}")
    fields: dict[str, Any] = {"rotary_base": given.get("rope_theta", described.get("rope_theta", 10000.0))}
    fields["rotary_fraction"] = given.get("partial_rotary_factor", described.get("partial_rotary_factor", 1.0))
    if kind != "default":
        fields["rotary_factor"] = given["factor"]
    if kind == "llama3":
        fields["rotary_original"] = given["original_max_position_embeddings"]
        fields |= {"rotary_low": given["low_freq_factor"], "rotary_high": given["high_freq_factor"]}
    return fields


def _window(described: Described) -> int | None:
    """Return how many tokens each one sees, if all layers agree."""
    window = described.get("sliding_window")
    if described["model_type"] == "llama" or window is None:
        return None
    if described["model_type"] == "mistral":
        return int(window)
    if not described.get("use_sliding_window", False):
        return None
    kinds = set(described.get("layer_types") or ["sliding_attention"])
    if described.get("layer_types") is None and described.get("max_window_layers", 0):
        kinds.add("full_attention")
    if len(kinds) > 1:
        raise ValueError("have one kind of attention in all layers, got windows in some")
    return int(window) if kinds == {"sliding_attention"} else None


def _write(config: DecoderLMConfig) -> Described | None:
    shape = (config.positions, config.norm, config.gated, config.sinks)
    if shape != ("rotary", "rms", True, 0) or not is_plain(config) or config.linear:
        return None
    if config.dropout or config.pooling != "last":
        return None
    qkv, out = (config.bias if given is None else given for given in (config.qkv_bias, config.out_bias))
    if qkv and not out and not config.bias and config.head * config.heads == config.width:
        kind: Described = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
        kind |= {"use_sliding_window": config.window is not None, "sliding_window": config.window}
        kind |= {"max_window_layers": 0}
    elif config.window is not None and not (qkv or out or config.bias):
        kind = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": config.window}
        kind |= {"head_dim": config.head}
    elif config.window is None and qkv == out:
        kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": qkv}
        kind |= {"mlp_bias": config.bias, "head_dim": config.head}
    else:
        return None
    rotary: Described = {"rope_type": "default", "rope_theta": config.rotary_base}
    if config.rotary_fraction != 1:
        return None
    if config.rotary_factor != 1:
        rotary |= {"rope_type": "linear", "factor": config.rotary_factor}
    if config.rotary_original is not None and config.rotary_factor != 1:
        rotary |= {"rope_type": "llama3", "original_max_position_embeddings": config.rotary_original}
        rotary |= {"low_freq_factor": config.rotary_low, "high_freq_factor": config.rotary_high}
    return kind | {
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.groups,
        "intermediate_size": config.hidden,
        "max_position_embeddings": config.longest,
        "rope_parameters": rotary,
        "rope_theta": config.rotary_base,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": activation_written(config.activation),
        "tie_word_embeddings": config.tied,
        "attention_dropout": config.attention_dropout,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _rules(config: DecoderLMConfig) -> Iterator[Rule]:
    yield from same({"embedding": "embed_tokens", "norm": "norm", "output": "/lm_head"}, ["weight"])
    rows = (config.heads * config.head, config.groups * config.head, config.groups * config.head)
    for i in range(config.layers):
        ours, theirs = f"blocks.{i}", f"layers.{i}"
        norms = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
        yield from same({f"{ours}.{a}": f"{theirs}.{b}" for a, b in norms.items()}, ["weight"])
        for end in ("weight", "bias"):
            stacked = tuple(f"{theirs}.self_attn.{name}_proj.{end}" for name in "qkv")
            yield Rule(f"{ours}.attention.qkv.{end}", stacked, rows)
        matrices = {"attention.out": "self_attn.o_proj", "feed_forward.gate": "mlp.gate_proj"}
        matrices |= {"feed_forward.up": "mlp.up_proj", "feed_forward.down": "mlp.down_proj"}
        yield from same({f"{ours}.{a}": f"{theirs}.{b}" for a, b in matrices.items()})


LLAMA = Family(("llama", "mistral", "qwen2"), "model.", _read, _write, _rules, DecoderLM, (".rotary_emb.inv_freq",))
