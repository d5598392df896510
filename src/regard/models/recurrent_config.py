"""The config of a recurrent encoder–decoder, and presets by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regard.models._parts import Config
from regard.models.attending import DRAWS, PLAIN, SCOPES, SCORES

CELLS = ("lstm", "gru")
WIRINGS = ("after", "before", "encoder")


@dataclass(frozen=True)
class RecurrentConfig(Config):
    """Everything that a :class:`~regard.models.RecurrentEncoderDecoder` is built from.

    Attributes
    ----------
    sources, targets : int
        Size of the vocabularies that are read and written, padding and end mark included.
    embedding, encoder, decoder, features : int
        Widths of the embeddings, of the encoder in each direction, of the decoder, and of the attention.
    dropout : float
        Share zeroed in training of embeddings, of what passes between layers, of states, and of features, in [0, 1).
    cell : {"lstm", "gru"}
    encoder_layers, decoder_layers : int
    bidirectional : bool
        Whether the source is read in both directions.
    attention : str
        The score, one of :data:`regard.models.attending.SCORES`; or "none": the decoder sees the encoder's last state
        alone (Sutskever 2014, arXiv 1409.3215).
    projections : bool
        Project queries, keys and values to ``features`` before a score that learns no projection, such as "dot".
    scope : {"global", "local-m", "local-p"}
        Attend to all states; or to a window, around the query's own position or a predicted one (Luong 2015).
    window : int
        D, how many states on each side of a local window's centre.
    hard : {"none", "gumbel", "reinforce"}
        Read one state: drawn in training, the best in evaluation (Xu 2015, arXiv 1502.03044). The draw is learned by a
        straight-through gradient, or by :meth:`~regard.models.RecurrentEncoderDecoder.surrogate`.
    wiring : {"after", "before", "encoder"}
        What attends: the decoder's state after its step (Luong 2015), the one before, whose context then enters the
        step (Bahdanau 2014), or the encoder's own states, to each other, a row for each step of the decoder.
    input_feeding : bool
        Give the features of a step to the next one (Luong 2015); for wiring "after".
    longest : int
        The longest source that attention "location" can read.
    tied : {"none", "target", "all"}
        Whether the target embedding also scores the vocabulary (Press & Wolf 2017, arXiv 1608.05859); with "all" it is
        the source embedding, too, of one vocabulary for both, and what is read is multiplied by √embedding (Vaswani
        2017).
    """

    embedding: int = 128
    encoder: int = 128
    decoder: int = 256
    features: int = 128
    dropout: float = 0.0
    cell: str = "lstm"
    encoder_layers: int = 1
    decoder_layers: int = 1
    bidirectional: bool = True
    attention: str = "additive"
    projections: bool = False
    scope: str = "global"
    window: int = 10
    hard: str = "none"
    wiring: str = "after"
    input_feeding: bool = False
    longest: int = 64
    tied: str = "none"

    def __post_init__(self) -> None:
        self.whole("sources", "targets", "embedding", "encoder", "decoder", "features")
        self.whole("window", "longest")
        self.layers("encoder_layers", "decoder_layers")
        self.share("dropout")
        self.flag("bidirectional", "projections", "input_feeding")
        self.ties(self.tied)
        known = {"cell": CELLS, "attention": (*SCORES, "none"), "scope": SCOPES, "hard": DRAWS}
        for name, names in {**known, "wiring": WIRINGS}.items():
            self.one_of(name, names)
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
