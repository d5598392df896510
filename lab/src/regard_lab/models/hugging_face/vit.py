"""Folders of the shapes of ViT and DeiT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from regard_lab.models.hugging_face.rules import (
    Described,
    Family,
    Rule,
    activation_read,
    activation_written,
    is_plain,
    same,
)
from regard_lab.models.vision_transformer import VisionTransformer, VisionTransformerConfig


def _read(described: Described, names: set[str]) -> VisionTransformerConfig:
    width, pooled = described["hidden_size"], "pooler.dense.weight" in names
    if pooled and (size := described["pooler_output_size"]) and size != width:
        raise ValueError(f"have pooler_output_size {width}, its hidden_size, got {size!r}")
    return VisionTransformerConfig(
        image=_side(described, "image_size"),
        channels=described["num_channels"],
        patch=_side(described, "patch_size"),
        width=width,
        layers=described["num_hidden_layers"],
        heads=described["num_attention_heads"],
        feedforward=described["intermediate_size"],
        distilled=described["model_type"] == "deit",
        pooled=pooled,
        norm_eps=described["layer_norm_eps"],
        activation=activation_read(described),
        qkv_bias=described["qkv_bias"],
        dropout=described["hidden_dropout_prob"],
        attention_dropout=described["attention_probs_dropout_prob"],
    )


def _side(described: Described, name: str) -> Any:
    """Return the side of a square, which configs may have as two numbers."""
    given = described[name]
    sides = given if isinstance(given, list) else [given]
    if len(set(map(str, sides))) != 1:
        raise ValueError(f"have a square {name}, got {given!r}")
    return sides[0]


def _write(config: VisionTransformerConfig) -> Described | None:
    shape = (config.stem, config.class_token, config.positions, config.pooling, config.window)
    if shape != (0, True, "learned", "first", 0) or not is_plain(config):
        return None
    kind, name = ("deit", "DeiT") if config.distilled else ("vit", "ViT")
    return {
        "model_type": kind,
        "architectures": [f"{name}Model"],
        "image_size": config.image,
        "num_channels": config.channels,
        "patch_size": config.patch,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.hidden,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": activation_written(config.activation),
        "qkv_bias": config.qkv_bias,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
    }


def _rules(config: VisionTransformerConfig) -> Iterator[Rule]:
    yield from same({"patches": "embeddings.patch_embeddings.projection", "norm": "layernorm"})
    yield from same({"pooler": "pooler.dense"})
    tokens = ("embeddings.cls_token", "embeddings.distillation_token")[: config.leading]
    yield Rule("tokens", tokens, (1,) * config.leading)
    yield Rule("positions", ("embeddings.position_embeddings",))
    for i in range(config.layers):
        ours, theirs = f"blocks.{i}", f"encoder.layer.{i}"
        for end in ("weight", "bias"):
            stacked = tuple(f"{theirs}.attention.attention.{name}.{end}" for name in ("query", "key", "value"))
            yield Rule(f"{ours}.attention.qkv.{end}", stacked, (config.width,) * 3)
        names = {"attention.out": "attention.output.dense", "attention_norm": "layernorm_before"}
        names |= {"feed_forward.up": "intermediate.dense", "feed_forward.down": "output.dense"}
        names |= {"feed_forward_norm": "layernorm_after"}
        yield from same({f"{ours}.{a}": f"{theirs}.{b}" for a, b in names.items()})


_IGNORED = ("embeddings.mask_token",)
VIT = Family(("vit",), "vit.", _read, _write, _rules, VisionTransformer, _IGNORED)
DEIT = Family(("deit",), "deit.", _read, _write, _rules, VisionTransformer, _IGNORED)
