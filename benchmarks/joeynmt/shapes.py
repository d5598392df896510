"""The shapes of models, as each side configures them, and the mapping between their symbols."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

#: JoeyNMT's numbers of its special symbols: unknown, padding, start mark, end mark. Other orders it does not take.
UNKNOWN, PAD, START, END = range(4)
SMOOTHING, CLIP, DECAY, BETAS, RATE = 0.1, 1.0, 0.01, (0.9, 0.98), 1e-3


@dataclass(frozen=True)
class Shape:
    """A model of both sides.

    Attributes
    ----------
    title : str
    kind : {"recurrent", "transformer"}
    ours : dict
        Fields of regard's config.
    """

    title: str
    kind: str
    ours: dict[str, Any]

    def theirs(self, symbols: int, copied: bool) -> dict[str, Any]:
        """Return JoeyNMT's options for the model.

        Where weights are ``copied`` from regard, the recurrent decoder starts at zeros, as JoeyNMT else starts cells
        unlike regard; and the Transformer's logits have a matrix of their own, as JoeyNMT's start mark is another
        symbol than its end mark, whose embedding is what starts regard's decoder. Shapes and work are the same.
        """
        made = _recurrent(self.ours, copied) if self.kind == "recurrent" else _transformer(self.ours, copied)
        return {"model": made, "symbols": symbols}


def _recurrent(ours: dict[str, Any], copied: bool) -> dict[str, Any]:
    dropout = {"dropout": ours["dropout"]}
    embeddings = {"embedding_dim": ours["embedding"], **dropout}
    encoder = {"type": "recurrent", "rnn_type": "lstm", "embeddings": embeddings, "hidden_size": ours["encoder"]}
    encoder |= {"bidirectional": True, "num_layers": 1, **dropout}
    decoder = {"type": "recurrent", "rnn_type": "lstm", "embeddings": embeddings, "hidden_size": ours["decoder"]}
    decoder |= {"num_layers": 1, **dropout, "hidden_dropout": ours["dropout"], "attention": "bahdanau"}
    decoder |= {"input_feeding": ours["input_feeding"], "init_hidden": "zero" if copied else "bridge"}
    return {"encoder": encoder, "decoder": decoder}


def _transformer(ours: dict[str, Any], copied: bool) -> dict[str, Any]:
    embeddings = {"embedding_dim": ours["width"], "scale": True, "dropout": ours["dropout"]}
    part = {"type": "transformer", "num_heads": ours["heads"], "embeddings": embeddings, "hidden_size": ours["width"]}
    part |= {"ff_size": ours["feedforward"], "dropout": ours["dropout"], "layer_norm": ours["norm"]}
    encoder, decoder = (part | {"num_layers": ours[f"{name}_layers"]} for name in ("encoder", "decoder"))
    return {"encoder": encoder, "decoder": decoder, "tied_embeddings": True, "tied_softmax": not copied}


_RECURRENT = {"embedding": 256, "encoder": 256, "decoder": 512, "features": 512, "dropout": 0.2, "wiring": "after"}
SHAPES = {
    "recurrent": Shape(
        "Recurrent: embedding 256, bidirectional LSTM of 256 each way, decoder LSTM of 512, additive attention of 512 "
        "features to the new state, no input feeding; dropout 0.2",
        "recurrent",
        _RECURRENT | {"input_feeding": False},
    ),
    "recurrent-fed": Shape(
        "The same with input feeding, JoeyNMT's default: the attentional vector of a step enters the next",
        "recurrent",
        _RECURRENT | {"input_feeding": True},
    ),
    "transformer": Shape(
        "Transformer: width 256, 4 heads, 3 + 3 layers, feedforward 1024, pre-norm, encoder, decoder and output "
        "embeddings one matrix; dropout 0.1 everywhere, of attention weights and hidden features, too",
        "transformer",
        {"width": 256, "heads": 4, "encoder_layers": 3, "decoder_layers": 3, "feedforward": 1024}
        | {"norm": "pre", "tied": "all", "dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1},
    ),
}


def numbers(size: int) -> np.ndarray:
    """Return JoeyNMT's number of each of regard's symbols, (size,).

    JoeyNMT has a start mark in addition to the end mark. It replaces regard's last symbol, which occurs in no text, so
    both sides have the same number of symbols.
    """
    found = np.arange(size) + 1
    found[0], found[1], found[2], found[size - 1] = PAD, END, UNKNOWN, START
    return found
