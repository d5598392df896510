"""The config of a Transformer encoder–decoder, and presets by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from regard._utils.options import option
from regard_lab.models._parts import DEEPEST, TIES, Config, share, size
from regard_lab.models.attending import SCORES

NORMS, POSITIONS = ("post", "pre"), ("sinusoidal", "learned", "rotary")
ACTIVATIONS, NORMALIZERS = ("relu", "gelu"), ("softmax", "sparsemax", "entmax15", "entmax", "sigmoid")


@dataclass(frozen=True)
class TransformerConfig(Config):
    """Everything that a :class:`~regard_lab.models.TransformerEncoderDecoder` is built from."""

    function: ClassVar[str] = "TransformerConfig"
    width: int = size(512, "width E of the rows")
    heads: int = size(8, "number of heads, which divides the width")
    #: Shazeer 2019, Ainslie 2023.
    kv_heads: int | None = size(None, "heads of keys and values, which divide the others; as many by default")
    encoder_layers: int = size(6, "layers of the encoder", DEEPEST)
    decoder_layers: int = size(6, "layers of the decoder", DEEPEST)
    feedforward: int = size(2048, "width of the hidden layer between attentions")
    dropout: float = share(0.1, "share zeroed of embeddings and of what each block adds (Vaswani 2017)")
    attention_dropout: float = share(0.0, "share zeroed of attention weights")
    activation_dropout: float = share(0.0, "share zeroed of the features between a block's two layers")
    activation: str = option("relu", "of the hidden layer", known=ACTIVATIONS)
    #: Sums (Vaswani 2017), or what enters a block (Xiong 2020, arXiv 2002.04745).
    norm: str = option("post", "what is normalized", known=NORMS)
    score: str = option("scaled_dot", "how queries and keys compare within a head", known=SCORES)
    normalizer: str = option("softmax", "of the scores", known=NORMALIZERS)
    #: Waves or learned rows that are added to the embeddings, or turned queries and keys.
    positions: str = option("sinusoidal", "what tells positions", known=POSITIONS)
    longest: int = size(1024, "positions that learned ones and the score 'location' know")
    #: Press & Wolf 2017, arXiv 1608.05859; with "all" it is the source embedding, too, of one vocabulary for both.
    tied: str = option("target", "whether the target embedding also scores the vocabulary", known=TIES)

    def check(self) -> None:
        """Raise where fields contradict each other."""
        self.check_tied(self.tied)
        if self.width % self.heads:
            raise self.refused("heads", f"divide width {self.width}", self.heads)
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise self.refused("kv_heads", f"divide heads {self.heads}", self.kv_heads)
        if self.positions == "rotary" and self.width // self.heads % 2:
            got = f"{self.width} over {self.heads}"
            raise self.refused("width", "be an even number for each head where positions is 'rotary'", got)

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
