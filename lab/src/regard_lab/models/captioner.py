"""Captioners: decoders that attend to a grid of features of an image.

Dimensions: I images, S places of the grid, F features of a place, E width of the rows that are attended to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard_lab.models.captioner_config import RecurrentCaptionerConfig, TransformerCaptionerConfig
from regard_lab.models.recurrent_decoder import RecurrentDecoder
from regard_lab.models.recurrent_state import Memory
from regard_lab.models.transformer_decoder import TransformerSequenceDecoder


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


#: By name, each with its config.
CAPTIONERS: dict[str, tuple[type[Any], type[Any]]] = {
    "recurrent": (RecurrentCaptionerConfig, RecurrentCaptioner),
    "transformer": (TransformerCaptionerConfig, TransformerCaptioner),
}
