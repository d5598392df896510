"""The configs of captioners, and presets by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from regard._utils.options import option, redeclared
from regard_lab.models._parts import DEEPEST, LARGEST, size
from regard_lab.models.recurrent_config import RecurrentDecoderConfig
from regard_lab.models.transformer_config import TransformerConfig


@dataclass(frozen=True)
class RecurrentCaptionerConfig(RecurrentDecoderConfig):
    """Everything that a :class:`~regard_lab.models.captioner.RecurrentCaptioner` is built from.

    ``sources`` is the width F of the features that are read.
    """

    function: ClassVar[str] = "RecurrentCaptionerConfig"
    #: Nothing recurrent reads.
    encoder_layers: ClassVar[int] = 0
    embedding: int = redeclared(RecurrentDecoderConfig, "embedding", 256)
    decoder: int = redeclared(RecurrentDecoderConfig, "decoder", 512)
    features: int = redeclared(RecurrentDecoderConfig, "features", 256)
    dropout: float = redeclared(RecurrentDecoderConfig, "dropout", 0.4)
    tied: str = redeclared(RecurrentDecoderConfig, "tied", "target")
    states: int = size(512, "width E that features are projected to")
    places: int = size(49, "S, places of the grid")
    #: Xu 2015, arXiv 1502.03044.
    gate: bool = option(True, "multiply what is read by a gate of the decoder's state, β")
    #: Lu 2017, arXiv 1612.01887.
    glimpse: bool = option(True, "give the mean of all places to every step")
    entropy: float = option(0.01, "of hard attention by REINFORCE: weight of the entropy of its draws", least=0)

    def check(self) -> None:
        """Raise where fields contradict each other."""
        super().check()
        if self.wiring == "encoder":
            raise self.refused("wiring", "be 'after' or 'before' for images", repr(self.wiring))
        if self.attention == "location" and self.longest < self.places:
            raise self.refused("longest", f"be at least places, {self.places}", self.longest)
        if self.tied == "all":
            raise self.refused("tied", "be 'none' or 'target' for images", repr(self.tied))
        if self.gate and self.attention == "none":
            raise self.refused("gate", "be False where attention is 'none'", True)

    @classmethod
    def presets(cls) -> Mapping[str, Mapping[str, Any]]:
        return RECURRENT


@dataclass(frozen=True)
class TransformerCaptionerConfig(TransformerConfig):
    """Everything that a :class:`~regard_lab.models.captioner.TransformerCaptioner` is built from.

    ``sources`` is the width F of the features that are read.
    """

    function: ClassVar[str] = "TransformerCaptionerConfig"
    encoder_layers: int = option(1, "layers of self-attention between the places", least=0, most=DEEPEST)
    decoder_layers: int = size(3, "layers of the decoder", DEEPEST)
    width: int = redeclared(TransformerConfig, "width", 256)
    heads: int = redeclared(TransformerConfig, "heads", 4)
    feedforward: int = redeclared(TransformerConfig, "feedforward", 1024)
    dropout: float = redeclared(TransformerConfig, "dropout", 0.3)
    norm: str = redeclared(TransformerConfig, "norm", "pre")
    places: int = size(49, "S, places of the grid", LARGEST)

    def check(self) -> None:
        """Raise where fields contradict each other."""
        super().check()
        if self.tied == "all":
            raise self.refused("tied", "be 'none' or 'target' for images", repr(self.tied))
        if self.score == "location" and self.longest < self.places:
            raise self.refused("longest", f"be at least places, {self.places}", self.longest)

    @classmethod
    def presets(cls) -> Mapping[str, Mapping[str, Any]]:
        return TRANSFORMER


RECURRENT: dict[str, dict[str, Any]] = {
    "base": {},
    "small": {"embedding": 128, "decoder": 256, "features": 128, "states": 256},
    # Features of 14 × 14 × 512 are read as they are: the projection is nearly none.
    "xu2015": {"embedding": 512, "decoder": 1024, "features": 512, "dropout": 0.5, "wiring": "before"}
    | {"glimpse": False},
}
TRANSFORMER: dict[str, dict[str, Any]] = {
    "base": {},
    "small": {"width": 128, "feedforward": 512, "decoder_layers": 2},
}
