"""Folders of the shapes of BERT, RoBERTa and ALBERT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from regard_lab.models.encoder_lm import EncoderLM, EncoderLMConfig
from regard_lab.models.hugging_face.rules import (
    BrokenConfigError,
    Described,
    Family,
    Rule,
    activation_read,
    activation_written,
    is_plain,
    same,
)

_EMBEDDINGS = {"embedding": "word_embeddings", "positions.learned": "position_embeddings"}
_EMBEDDINGS |= {"segments": "token_type_embeddings"}


def _common(described: Described) -> dict[str, Any]:
    if not described["type_vocab_size"]:
        raise BrokenConfigError(f"have a type_vocab_size of at least 1, got {described['type_vocab_size']!r}")
    return {
        "vocabulary": described["vocab_size"],
        "width": described["hidden_size"],
        "layers": described["num_hidden_layers"],
        "heads": described["num_attention_heads"],
        "feedforward": described["intermediate_size"],
        "max_length": described["max_position_embeddings"],
        "positions": "learned",
        "activation": activation_read(described),
        "norm_eps": described["layer_norm_eps"],
        "segments": described["type_vocab_size"],
        "tied": described["tie_word_embeddings"],
        "dropout": described["hidden_dropout_prob"],
        "attention_dropout": described["attention_probs_dropout_prob"],
    }


def _read_bert(described: Described, names: set[str]) -> EncoderLMConfig:
    return EncoderLMConfig(
        **_common(described),
        pooled="pooler.dense.weight" in names,
        masked_head="/cls.predictions.transform.dense.weight" in names,
    )


def _read_roberta(described: Described, names: set[str]) -> EncoderLMConfig:
    pad = described["pad_token_id"]
    if not isinstance(pad, int) or isinstance(pad, bool) or pad < 0:
        expected = "have a pad_token_id of at least 0, behind which RoBERTa's positions begin (usually 1)"
        raise BrokenConfigError(f"{expected}, got {pad!r}")
    first, common = pad + 1, _common(described)
    masked = "/lm_head.dense.weight" in names
    if masked and common["activation"] != "gelu":
        # The head of transformers' RoBERTa has GELU whatever its config says; ours has the activation of the blocks.
        raise ValueError(f"have hidden_act 'gelu' where a head names masked tokens, got {described['hidden_act']!r}")
    return EncoderLMConfig(
        **{**common, "max_length": common["max_length"] - first},
        # The first layer of the head of a classifier is a pooler by another name.
        pooled=bool({"pooler.dense.weight", "/classifier.dense.weight"} & names),
        masked_head=masked,
        first_position=first,
        skip_padding=True,
    )


def _read_albert(described: Described, names: set[str]) -> EncoderLMConfig:
    if described["embedding_size"] == described["hidden_size"]:
        got = f"{described['embedding_size']!r}, which transformers projects to the same width"
        raise ValueError(f"have an embedding_size other than hidden_size, got {got}")
    return EncoderLMConfig(
        **_common(described),
        embedding_width=described["embedding_size"],
        shared=True,
        pooled="pooler.weight" in names,
        masked_head="/predictions.dense.weight" in names,
    )


def _write(config: EncoderLMConfig) -> Described | None:
    shape = (config.positions, config.norm, config.norm_first, config.gated, config.groups, config.head * config.heads)
    if shape != ("learned", "layer", False, False, config.heads, config.width) or not is_plain(config):
        return None
    if not (config.bias and config.qkv_bias is not False and config.out_bias is not False and config.segments):
        return None
    if config.pooling != "first" or not config.layers:
        return None
    kind = "roberta" if config.skip_padding else "albert" if config.shared else "bert"
    if (config.shared and config.skip_padding) or bool(config.first_position) != config.skip_padding:
        return None
    if (config.embedded != config.width) and kind != "albert":
        return None
    if kind == "albert" and config.embedded == config.width:
        return None  # theirs projects embeddings also to the same width
    if kind == "roberta" and config.masked_head and config.activation != "gelu":
        return None
    names = {"bert": "Bert", "roberta": "Roberta", "albert": "Albert"}
    described: Described = {
        "model_type": kind,
        "architectures": [f"{names[kind]}{'ForMaskedLM' if config.masked_head else 'Model'}"],
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.hidden,
        "max_position_embeddings": config.max_length + config.first_position,
        "layer_norm_eps": config.norm_eps,
        "type_vocab_size": config.segments,
        "tie_word_embeddings": config.tied,
        "hidden_act": activation_written(config.activation),
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
    }
    if kind == "albert":
        described |= {"embedding_size": config.embedded, "num_hidden_groups": 1, "inner_group_num": 1}
    if kind == "roberta":
        described |= {"pad_token_id": config.first_position - 1, "bos_token_id": None, "eos_token_id": None}
    return described


def _head_rules(config: EncoderLMConfig, head: str, dense: str, norm: str) -> Iterator[Rule]:
    """Yield the rules of a masked-token head by the names of its parts."""
    yield from same({"masked_head.dense": f"/{head}.{dense}", "masked_head.norm": f"/{head}.{norm}"})
    # The bias stands twice in a file; where the matrix is not tied, neither are they, and the last one counts.
    yield Rule("masked_head.bias", (f"/{head}.bias" if config.tied else f"/{head}.decoder.bias",))
    yield Rule("masked_head.weight", (f"/{head}.decoder.weight",))


def _rules(config: EncoderLMConfig) -> Iterator[Rule]:
    """Yield what BERT and RoBERTa share."""
    yield from same({ours: f"embeddings.{theirs}" for ours, theirs in _EMBEDDINGS.items()}, ["weight"])
    yield from same({"embedding_norm": "embeddings.LayerNorm", "pooler": "pooler.dense"})
    for i in range(config.layers):
        ours, theirs = f"blocks.{i}", f"encoder.layer.{i}"
        for end in ("weight", "bias"):
            stacked = tuple(f"{theirs}.attention.self.{name}.{end}" for name in ("query", "key", "value"))
            yield Rule(f"{ours}.attention.qkv.{end}", stacked, (config.width,) * 3)
        names = {"attention.out": "attention.output.dense", "attention_norm": "attention.output.LayerNorm"}
        names |= {"feed_forward.up": "intermediate.dense", "feed_forward.down": "output.dense"}
        names |= {"feed_forward_norm": "output.LayerNorm"}
        yield from same({f"{ours}.{a}": f"{theirs}.{b}" for a, b in names.items()})


def _bert_rules(config: EncoderLMConfig) -> Iterator[Rule]:
    yield from _rules(config)
    yield from _head_rules(config, "cls.predictions", "transform.dense", "transform.LayerNorm")


def _roberta_rules(config: EncoderLMConfig) -> Iterator[Rule]:
    yield from _rules(config)
    yield from _head_rules(config, "lm_head", "dense", "layer_norm")


def _albert_rules(config: EncoderLMConfig) -> Iterator[Rule]:
    yield from same({ours: f"embeddings.{theirs}" for ours, theirs in _EMBEDDINGS.items()}, ["weight"])
    yield from same({"embedding_norm": "embeddings.LayerNorm", "pooler": "pooler"})
    yield from same({"widen": "encoder.embedding_hidden_mapping_in"})
    yield from _head_rules(config, "predictions", "dense", "LayerNorm")
    theirs = "encoder.albert_layer_groups.0.albert_layers.0"
    for end in ("weight", "bias"):
        stacked = tuple(f"{theirs}.attention.{name}.{end}" for name in ("query", "key", "value"))
        yield Rule(f"blocks.0.attention.qkv.{end}", stacked, (config.width,) * 3)
    names = {"attention.out": "attention.dense", "attention_norm": "attention.LayerNorm"}
    names |= {"feed_forward.up": "ffn", "feed_forward.down": "ffn_output"}
    names |= {"feed_forward_norm": "full_layer_layer_norm"}
    yield from same({f"blocks.0.{a}": f"{theirs}.{b}" for a, b in names.items()})


_IGNORED = (
    "embeddings.position_ids", "embeddings.token_type_ids", "seq_relationship.weight", "seq_relationship.bias",
    "sop_classifier.classifier.weight", "sop_classifier.classifier.bias", "predictions.bias", "lm_head.bias",
    "decoder.bias",
)  # fmt: skip
BERT = Family(("bert",), "bert.", _read_bert, _write, _bert_rules, EncoderLM, _IGNORED)
ROBERTA = Family(
    ("roberta", "xlm-roberta", "camembert"), "roberta.", _read_roberta, _write, _roberta_rules, EncoderLM, _IGNORED
)
ALBERT = Family(("albert",), "albert.", _read_albert, _write, _albert_rules, EncoderLM, _IGNORED)
