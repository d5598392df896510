"""The config of a Transformer encoder–decoder, and presets by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regard.models._parts import Config
from regard.models.attending import SCORES

NORMS, POSITIONS = ("post", "pre"), ("sinusoidal", "learned", "rotary")
ACTIVATIONS, NORMALIZERS = ("relu", "gelu"), ("softmax", "sparsemax", "entmax15", "entmax", "sigmoid")


@dataclass(frozen=True)
class TransformerConfig(Config):
    """Everything that a :class:`~regard.models.TransformerEncoderDecoder` is built from.

    Attributes
    ----------
    sources, targets : int
        Size of the vocabularies that are read and written, padding and end mark included.
    width, heads, feedforward : int
        Width E of the rows, number of heads, which divides it, and width of the hidden layer between attentions.
    kv_heads : int or None
        Heads of keys and values, which divide the others (Shazeer 2019, Ainslie 2023); None is as many.
    encoder_layers, decoder_layers : int
    dropout : float
        Share zeroed in training of embeddings and of what each block adds, in [0, 1), as in Vaswani 2017.
    attention_dropout, activation_dropout : float
        Share zeroed in training of attention weights, and of the features between a block's two layers, in [0, 1).
    activation : {"relu", "gelu"}
    norm : {"post", "pre"}
        Whether sums are normalized (Vaswani 2017), or what enters a block (Xiong 2020, arXiv 2002.04745).
    score : str
        How queries and keys compare within a head, one of :data:`regard.models.attending.SCORES`.
    normalizer : {"softmax", "sparsemax", "entmax15", "entmax", "sigmoid"}
    positions : {"sinusoidal", "learned", "rotary"}
        What tells positions: waves or learned rows that are added to the embeddings, or turned queries and keys.
    longest : int
        How many positions "learned" ones and the score "location" know.
    tied : {"none", "target", "all"}
        Whether the target embedding also scores the vocabulary (Press & Wolf 2017, arXiv 1608.05859); and whether it
        is the source embedding, too, which takes one vocabulary for both.
    """

    width: int = 512
    heads: int = 8
    kv_heads: int | None = None
    encoder_layers: int = 6
    decoder_layers: int = 6
    feedforward: int = 2048
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation: str = "relu"
    norm: str = "post"
    score: str = "scaled_dot"
    normalizer: str = "softmax"
    positions: str = "sinusoidal"
    longest: int = 1024
    tied: str = "target"

    def __post_init__(self) -> None:
        self.whole("sources", "targets", "width", "heads", "feedforward", "longest")
        self.layers("encoder_layers", "decoder_layers")
        self.share("dropout", "attention_dropout", "activation_dropout")
        for name, known in {"activation": ACTIVATIONS, "norm": NORMS, "score": SCORES}.items():
            self.one_of(name, known)
        for name, known in {"normalizer": NORMALIZERS, "positions": POSITIONS}.items():
            self.one_of(name, known)
        if self.width % self.heads:
            raise self.refused("heads", f"divide width {self.width}", self.heads)
        if self.kv_heads is not None:
            self.whole("kv_heads")
            if self.heads % self.kv_heads:
                raise self.refused("kv_heads", f"divide heads {self.heads}", self.kv_heads)
        if self.positions == "rotary" and self.width // self.heads % 2:
            got = f"{self.width} over {self.heads}"
            raise self.refused("width", "be an even number for each head where positions is 'rotary'", got)
        self.ties(self.tied)

    @classmethod
    def presets(cls) -> Mapping[str, Mapping[str, Any]]:
        return PRESETS


#: Settings by name; those of papers have the papers' sizes. Where source and target share one vocabulary, as in
#: Vaswani 2017, add ``tied="all"``.
PRESETS: dict[str, dict[str, Any]] = {
    "small": {"width": 256, "heads": 4, "encoder_layers": 3, "decoder_layers": 3, "feedforward": 1024, "norm": "pre"},
    "base": {"width": 384, "heads": 6, "encoder_layers": 4, "decoder_layers": 4, "feedforward": 1536, "norm": "pre"}
    | {"dropout": 0.2},
    "multi30k": {"width": 128, "heads": 4, "encoder_layers": 4, "decoder_layers": 4, "feedforward": 256}
    | {"dropout": 0.3},
    "vaswani2017-base": {"width": 512, "heads": 8, "feedforward": 2048, "dropout": 0.1},
    "vaswani2017-big": {"width": 1024, "heads": 16, "feedforward": 4096, "dropout": 0.3},
}
