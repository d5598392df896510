"""Folders of the shapes of Llama, Mistral and Qwen2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from regard_lab.models.decoder_lm import DecoderLM, DecoderLMConfig
from regard_lab.models.hugging_face.rules import (
    Described,
    Family,
    Rule,
    activation_read,
    activation_written,
    is_plain,
    same,
)

#: The supported kinds of rotary scaling, with their keys other than the kind and ``rope_theta``.
_SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}


def _read(described: Described, names: set[str]) -> DecoderLMConfig:  # noqa: ARG001
    kind, heads = described["model_type"], described["num_attention_heads"]
    biased = bool(described["attention_bias"]) if kind == "llama" else kind == "qwen2"
    groups = described["num_key_value_heads"]
    return DecoderLMConfig(
        vocabulary=described["vocab_size"],
        width=described["hidden_size"],
        layers=described["num_hidden_layers"],
        heads=heads,
        kv_heads=heads if groups is None else groups,
        head_width=described["head_dim"],
        feedforward=described["intermediate_size"],
        max_length=described["max_position_embeddings"],
        positions="rotary",
        **rotary_read(described),
        norm="rms",
        norm_eps=described["rms_norm_eps"],
        activation=activation_read(described),
        gated=True,
        bias=kind == "llama" and bool(described["mlp_bias"]),
        qkv_bias=biased,
        out_bias=biased and kind == "llama",
        tied=bool(described["tie_word_embeddings"]),
        window=_window(described),
        attention_dropout=described["attention_dropout"],
    )


def rotary_read(described: Described) -> dict[str, Any]:
    """Return the config fields for rotary positions, read as in transformers.

    If both are present, ``rope_scaling`` of older configs takes precedence over ``rope_parameters``.
    """
    given = described["rope_scaling"] or described["rope_parameters"] or {}
    if not isinstance(given, dict):
        raise ValueError(f"have a table of rope_parameters, got {given!r}")
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise ValueError(f"have a rope_type of {', '.join(_SCALINGS)}, got {kind!r}")
    # What another kind reads, this one does not.
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_SCALINGS["llama3"]}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"have rope_parameters that are known here, got {name!r}: {value!r}")
    fields: dict[str, Any] = {"rotary_base": given.get("rope_theta", described["rope_theta"])}
    if kind == "default":
        return fields
    share = given.get("partial_rotary_factor", described["partial_rotary_factor"])  # which default positions ignore
    if share is not None and share != 1:
        raise ValueError(f"have partial_rotary_factor 1.0 with a rope_type {kind!r}, got {share!r}")
    fields["rotary_factor"] = given["factor"]
    if kind == "llama3":
        original = given.get("original_max_position_embeddings", described["max_position_embeddings"])
        fields["rotary_original"] = original
        fields |= {"rotary_low": given["low_freq_factor"], "rotary_high": given["high_freq_factor"]}
    return fields


def _window(described: Described) -> int | None:
    """Return how many tokens each one sees, if all layers agree."""
    window: Any = described.get("sliding_window")
    if described["model_type"] == "qwen2":
        window = window if described["use_sliding_window"] else None
        first, layers = described["max_window_layers"], described["num_hidden_layers"]
        listed = described["layer_types"]
        if listed is None:
            within = [window is not None and i >= first for i in range(layers)]
        else:
            if not isinstance(listed, list) or len(listed) != layers:
                raise ValueError(f"have layer_types of {layers} layers, got {listed!r}")
            if wrong := [each for each in listed if each not in ("full_attention", "sliding_attention")]:
                raise ValueError(f"have layer_types full_attention and sliding_attention, got {wrong[0]!r}")
            within = [each == "sliding_attention" for each in listed]
        if any(within) and not all(within):
            raise ValueError("have one kind of attention in all layers, got windows in some")
        if within and all(within) and window is None:
            raise ValueError("have a sliding_window in use where layer_types name one, got none")
        window = window if all(within) else None
    return window


def _write(config: DecoderLMConfig) -> Described | None:
    shape = (config.positions, config.norm, config.gated, config.sinks)
    if shape != ("rotary", "rms", True, 0) or not is_plain(config):
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
        "max_position_embeddings": config.max_length,
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
