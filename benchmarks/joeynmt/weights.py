"""Regard's parameters by JoeyNMT's names, for models of the same function."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from benchmarks.joeynmt.shapes import END, START, numbers

Arrays = dict[str, np.ndarray]


def theirs(kind: str, ours: Mapping[str, np.ndarray]) -> Arrays:
    """Return JoeyNMT's parameters for regard's, of a model whose output bias and first states are zero."""
    return _recurrent(ours) if kind == "recurrent" else _transformer(ours)


def _symbols(matrix: np.ndarray, *, read: bool) -> np.ndarray:
    """Return rows of symbols in JoeyNMT's order; where they are ``read``, its start mark has the end mark's row."""
    found = np.empty_like(matrix)
    found[numbers(len(matrix))] = matrix
    if read:
        found[START] = found[END]
    return found


def _linear(
    ours: Mapping[str, np.ndarray], name: str, their: str, parts: tuple[str, ...] = ("weight", "bias")
) -> Arrays:
    return {f"{their}.{part}": ours[f"{name}.{part}"] for part in parts}


def _recurrent(ours: Mapping[str, np.ndarray]) -> Arrays:
    found = {
        "src_embed.lut.weight": _symbols(ours["source_embedding.weight"], read=True),
        "trg_embed.lut.weight": _symbols(ours["target_embedding.weight"], read=True),
        "decoder.output_layer.weight": _symbols(ours["output.weight"], read=False),
        "decoder.attention.key_layer.weight": ours["attending.key.weight"],
        "decoder.attention.query_layer.weight": ours["attending.query.weight"],
        "decoder.attention.energy_layer.weight": ours["attending.layer.w_v"][None],
    }
    for part in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
        found[f"encoder.rnn.{part}"] = ours[f"onward.0.{part}"]
        found[f"encoder.rnn.{part}_reverse"] = ours[f"backward.0.{part}"]
        found[f"decoder.rnn.{part}"] = ours[f"decoder.{part}"]
    return found | _linear(ours, "combine", "decoder.att_vector_layer")


def _transformer(ours: Mapping[str, np.ndarray]) -> Arrays:
    embedding = ours["target_embedding.weight"]
    found = {
        "src_embed.lut.weight": _symbols(embedding, read=True),
        "trg_embed.lut.weight": _symbols(embedding, read=True),
        "decoder.output_layer.weight": _symbols(embedding, read=False),
    }
    blocks = {
        "encoder": ({"self_attn": "src_src_att"}, {"norm1": "layer_norm"}),
        "decoder": (
            {"self_attn": "trg_trg_att", "multihead_attn": "src_trg_att"},
            {"norm1": "x_layer_norm", "norm2": "dec_layer_norm"},
        ),
    }
    for stack, (attentions, norms) in blocks.items():
        layers = {name.split(".")[1] for name in ours if name.startswith(f"{stack}.")}
        for layer in sorted(layers, key=int):
            own, their = f"{stack}.{layer}", f"{stack}.layers.{layer}"
            for name, other in attentions.items():
                for part in ("weight", "bias"):
                    packed = np.split(ours[f"{own}.{name}.in_proj_{part}"], 3)
                    found |= {f"{their}.{other}.{x}_layer.{part}": each for x, each in zip("qkv", packed)}
                found |= _linear(ours, f"{own}.{name}.out_proj", f"{their}.{other}.output_layer")
            last = f"norm{len(norms) + 1}"
            for name, other in (norms | {last: "feed_forward.layer_norm"}).items():
                found |= _linear(ours, f"{own}.{name}", f"{their}.{other}")
            for name, place in (("linear1", 0), ("linear2", 3)):
                found |= _linear(ours, f"{own}.{name}", f"{their}.feed_forward.pwff_layer.{place}")
        found |= _linear(ours, f"{stack}_norm", f"{stack}.layer_norm")
    return found
