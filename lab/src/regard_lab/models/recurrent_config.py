"""The config of a recurrent encoder–decoder, and presets by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from regard._utils.options import option
from regard_lab.models._parts import DEEPEST, TIES, Config, share, size
from regard_lab.models.attending import DRAWS, PLAIN, SCOPES, SCORES

CELLS = ("lstm", "gru")
WIRINGS = ("after", "before", "encoder")


@dataclass(frozen=True)
class RecurrentDecoderConfig(Config):
    """What a :class:`~regard_lab.models.recurrent_decoder.RecurrentDecoder` is built from, whatever it attends to."""

    function: ClassVar[str] = "RecurrentDecoderConfig"
    embedding: int = size(128, "width of the embeddings")
    decoder: int = size(256, "width of the decoder")
    features: int = size(128, "width of the attention")
    dropout: float = share(0.0, "share zeroed of embeddings, between layers, of states, and of features")
    cell: str = option("lstm", "of recurrent layers", known=CELLS)
    decoder_layers: int = size(1, "layers of the decoder", DEEPEST)
    #: With "none" the decoder sees a summary of what was read alone (Sutskever 2014, arXiv 1409.3215).
    attention: str = option("additive", "the score", known=(*SCORES, "none"))
    projections: bool = option(False, "project queries, keys and values to features before a score that learns none")
    #: Around the query's own position, or a predicted one (Luong 2015).
    scope: str = option("global", "attend to all states or to a window", known=SCOPES)
    window: int = size(10, "D, states on each side of a local window's centre")
    #: Drawn in training, the best in evaluation (Xu 2015, arXiv 1502.03044). The draw is learned by a straight-through
    #: gradient, or by :meth:`~regard_lab.models.recurrent_decoder.RecurrentDecoder.surrogate`.
    hard: str = option("none", "read one state", known=DRAWS)
    #: The decoder's state after its step (Luong 2015), the one before, whose context then enters the step (Bahdanau
    #: 2014), or the encoder's own states, to each other, a row for each step of the decoder.
    wiring: str = option("after", "which state attends", known=WIRINGS)
    input_feeding: bool = option(False, "give the features of a step to the next one (Luong 2015)")
    longest: int = size(64, "the longest source that attention 'location' can read")
    #: Press & Wolf 2017, arXiv 1608.05859; with "all" it is the source embedding, too, of one vocabulary for both, and
    #: what is read is multiplied by √embedding (Vaswani 2017).
    tied: str = option("none", "whether the target embedding also scores the vocabulary", known=TIES)

    def check(self) -> None:
        """Raise where fields contradict each other."""
        self.check_tied(self.tied)
        if self.projections and self.attention not in PLAIN:
            scores = ", ".join(map(repr, PLAIN))
            raise self.refused("attention", f"be one of {scores} where projections is True", repr(self.attention))
        if self.hard != "none" and self.scope != "global":
            raise self.refused("scope", f"be 'global' where hard is {self.hard!r}", repr(self.scope))
        if self.input_feeding and self.wiring != "after":
            raise self.refused("wiring", "be 'after' where input_feeding is True", repr(self.wiring))
        plain = {"scope": "global", "hard": "none", "wiring": "after", "input_feeding": False}
        for name, value in plain.items() if self.attention == "none" else ():
            if getattr(self, name) != value:
                raise self.refused(name, f"be {value!r} where attention is 'none'", repr(getattr(self, name)))


@dataclass(frozen=True)
class RecurrentConfig(RecurrentDecoderConfig):
    """Everything that a :class:`~regard_lab.models.RecurrentEncoderDecoder` is built from."""

    function: ClassVar[str] = "RecurrentConfig"
    encoder: int = size(128, "width of the encoder in each direction")
    encoder_layers: int = size(1, "layers of the encoder", DEEPEST)
    bidirectional: bool = option(True, "read the source in both directions")

    @classmethod
    def presets(cls) -> Mapping[str, Mapping[str, Any]]:
        return PRESETS


#: Settings by name. Those of papers have the papers' sizes; what else the papers did, such as maxout, they do not.
PRESETS: dict[str, dict[str, Any]] = {
    "small": {"embedding": 128, "encoder": 128, "decoder": 256, "features": 128},
    "base": {"embedding": 256, "encoder": 256, "decoder": 512, "features": 256, "dropout": 0.3},
    "sutskever2014": {"embedding": 1000, "encoder": 1000, "decoder": 1000, "encoder_layers": 4, "decoder_layers": 4}
    | {"bidirectional": False, "attention": "none"},
    "bahdanau2014": {"embedding": 620, "encoder": 1000, "decoder": 1000, "features": 1000, "cell": "gru"}
    | {"wiring": "before"},
    "luong2015": {"embedding": 1000, "encoder": 1000, "decoder": 1000, "encoder_layers": 4, "decoder_layers": 4}
    | {"bidirectional": False, "attention": "general", "scope": "local-p", "window": 10, "input_feeding": True}
    | {"dropout": 0.2},
}
