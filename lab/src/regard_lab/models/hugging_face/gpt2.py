"""Folders of the shape of GPT-2."""

from __future__ import annotations

from collections.abc import Iterator

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


def _read(described: Described, names: set[str]) -> DecoderLMConfig:  # noqa: ARG001
    return DecoderLMConfig(
        vocabulary=described["vocab_size"],
        width=described["n_embd"],
        layers=described["n_layer"],
        heads=described["n_head"],
        feedforward=described["n_inner"],
        max_length=described["n_positions"],
        positions="learned",
        norm_eps=described["layer_norm_epsilon"],
        activation=activation_read(described, "activation_function"),
        tied=described["tie_word_embeddings"],
        dropout=described["resid_pdrop"],
        attention_dropout=described["attn_pdrop"],
    )


def _write(config: DecoderLMConfig) -> Described | None:
    shape = (config.positions, config.norm, config.gated, config.window, config.groups, config.head * config.heads)
    if shape != ("learned", "layer", False, None, config.heads, config.width) or not is_plain(config):
        return None
    if config.pooling != "last" or not (config.bias and config.qkv_bias is not False and config.out_bias is not False):
        return None
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocabulary,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.hidden,
        "n_positions": config.max_length,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": activation_written(config.activation),
        "tie_word_embeddings": config.tied,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _rules(config: DecoderLMConfig) -> Iterator[Rule]:
    yield from same({"embedding": "wte", "positions.learned": "wpe", "output": "/lm_head"}, ["weight"])
    yield from same({"norm": "ln_f"})
    for i in range(config.layers):
        ours, theirs = f"blocks.{i}", f"h.{i}"
        yield from same({f"{ours}.attention_norm": f"{theirs}.ln_1", f"{ours}.feed_forward_norm": f"{theirs}.ln_2"})
        matrices = {
            f"{ours}.attention.qkv": f"{theirs}.attn.c_attn",
            f"{ours}.attention.out": f"{theirs}.attn.c_proj",
            f"{ours}.feed_forward.up": f"{theirs}.mlp.c_fc",
            f"{ours}.feed_forward.down": f"{theirs}.mlp.c_proj",
        }
        yield from same(matrices, ["weight"], transposed=True)
        yield from same(matrices, ["bias"])


GPT2 = Family(("gpt2",), "transformer.", _read, _write, _rules, DecoderLM, (".attn.bias", ".attn.masked_bias"))
