"""Captioners: a decoder that attends to a grid of image features, with its config and presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard_lab._options import option, redeclared
from regard_lab.models.attending import DEEPEST, LARGEST, size
from regard_lab.models.recurrent import Memory, RecurrentDecoder, RecurrentDecoderConfig
from regard_lab.models.transformer import TransformerConfig, TransformerSequenceDecoder

# The configs of captioners, and presets by name -----------------------------------------------------------------------


@dataclass(frozen=True)
class RecurrentCaptionerConfig(RecurrentDecoderConfig):
    """Everything that a :class:`~regard_lab.models.captioner.RecurrentCaptioner` is built from.

    ``sources`` is the width F of the features that are read.
    """

    function: ClassVar[str] = "RecurrentCaptionerConfig"
    #: There is no recurrent encoder.
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
    entropy: float = option(0.01, "of hard attention by REINFORCE: weight of the entropy of its draws", ge=0)

    def check(self) -> None:
        """Raise where fields contradict each other."""
        super().check()
        if self.wiring == "encoder":
            raise self.refused("wiring", "be 'after' or 'before' for images", repr(self.wiring))
        if self.attention == "location" and self.max_length < self.places:
            raise self.refused("max_length", f"be at least places, {self.places}", self.max_length)
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
    encoder_layers: int = option(1, "layers of self-attention between the places", ge=0, le=DEEPEST)
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
        if self.score == "location" and self.max_length < self.places:
            raise self.refused("max_length", f"be at least places, {self.places}", self.max_length)

    @classmethod
    def presets(cls) -> Mapping[str, Mapping[str, Any]]:
        return TRANSFORMER


RECURRENT: dict[str, dict[str, Any]] = {
    "base": {},
    "small": {"embedding": 128, "decoder": 256, "features": 128, "states": 256},
    # Features of 14 × 14 × 512 need hardly any projection.
    "xu2015": {"embedding": 512, "decoder": 1024, "features": 512, "dropout": 0.5, "wiring": "before"}
    | {"glimpse": False},
}
TRANSFORMER: dict[str, dict[str, Any]] = {
    "base": {},
    "small": {"width": 128, "feedforward": 512, "decoder_layers": 2},
}


# Captioners: decoders that attend to a grid of features of an image ---------------------------------------------------
# Dimensions: I images, S places of the grid, F features of a place, E width of the rows that are attended to.


class Grid(nn.Module):
    """Make rows of an image's features: normalized projections, each with a learned row of its place.

    Parameters
    ----------
    features, width, places : int
        F, E and S.

    Attributes
    ----------
    network : Module, optional
        What makes features of pixels, where it is learned with the captioner.
    """

    def __init__(self, features: int, width: int, places: int) -> None:
        super().__init__()
        self.network: nn.Module | None = None
        self.project = nn.Linear(features, width)
        self.norm = nn.LayerNorm(width)
        self.places = nn.Parameter(torch.empty(places, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projection as torch does, and places with variance 1/E."""
        self.project.reset_parameters()
        self.norm.reset_parameters()
        nn.init.normal_(self.places, std=self.places.shape[1] ** -0.5)

    def forward(self, source: Tensor) -> Tensor:
        """Return rows (I, S, E) of features (I, S, F), or of pixels (I, X, X, 3) of uint8."""
        if source.dtype == torch.uint8:
            assert self.network is not None
            source = self.network(source)
        rows: Tensor = self.norm(self.project(source.to(self.places.dtype)))
        return rows + self.places


class RecurrentCaptioner(RecurrentDecoder):
    """A recurrent decoder that looks at an image, softly or at one place (Xu 2015, arXiv 1502.03044).

    Parameters
    ----------
    config : RecurrentCaptionerConfig

    Examples
    --------
    >>> model = RecurrentCaptioner(RecurrentCaptionerConfig(sources=12, targets=41, places=9))
    >>> grid, lengths = torch.zeros(2, 9, 12), torch.tensor([9, 9])
    >>> captions = torch.tensor([[1, 7, 8], [1, 7, 0], [1, 5, 6], [1, 9, 9]])  # two of each image
    >>> model(grid, lengths, captions).shape
    torch.Size([4, 3, 41])
    """

    config: RecurrentCaptionerConfig

    def __init__(self, config: RecurrentCaptionerConfig) -> None:
        E = config.states
        super().__init__(config, E, glimpse=E * config.glimpse, gate=config.gate, entropy=config.entropy)
        self.grid = Grid(config.sources, E, config.places)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters, those of the grid as those of the decoder."""
        super().reset_parameters()
        self.grid.reset_parameters()

    def _encode(self, source: Tensor, lengths: Tensor, weights: bool = False) -> Memory:
        states = self.grid(source)
        mean = states.mean(1)
        glimpse = self.dropout(mean) if self.config.glimpse else None
        return self._remember(states, mean, lengths, glimpse, weights)


class TransformerCaptioner(TransformerSequenceDecoder):
    """A Transformer decoder that looks at an image.

    Parameters
    ----------
    config : TransformerCaptionerConfig

    Examples
    --------
    >>> model = TransformerCaptioner(TransformerCaptionerConfig(sources=12, targets=41, places=9, width=16))
    >>> model(torch.zeros(2, 9, 12), torch.tensor([9, 9]), torch.tensor([[1, 7, 8], [1, 7, 0]])).shape
    torch.Size([2, 3, 41])
    """

    config: TransformerCaptionerConfig

    def __init__(self, config: TransformerCaptionerConfig) -> None:
        super().__init__(config)
        self.grid = Grid(config.sources, config.width, config.places)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters, those of the grid as those of the decoder."""
        super().reset_parameters()
        self.grid.reset_parameters()

    def _enter(self, source: Tensor, lengths: Tensor | None) -> Tensor:  # noqa: ARG002
        rows: Tensor = self.dropout(self.grid(source))
        return rows


#: Models by name, each with its config.
CAPTIONERS: dict[str, tuple[type[Any], type[Any]]] = {
    "recurrent": (RecurrentCaptionerConfig, RecurrentCaptioner),
    "transformer": (TransformerCaptionerConfig, TransformerCaptioner),
}
