"""Vision models that stand in for those of timm, which need not be installed: what they see is not attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    PretrainedConfig,
    PreTrainedModel,
    ResNetConfig,
    TimmBackboneConfig,
    TimmWrapperConfig,
    ViTConfig,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.gemma3n import Gemma3nVisionConfig


def without_timm(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a vision model that needs no timm."""
    if isinstance(config, TimmBackboneConfig):
        return ResNetConfig(out_indices=config.out_indices)
    return ViTConfig() if type(config) is TimmWrapperConfig else config


class PyramidConfig(PretrainedConfig):
    """The configuration of :class:`PyramidModel`."""

    model_type = "pyramid"


class PyramidModel(PreTrainedModel):
    """Convolutions, of which each halves the sides of an image, but the first, which quarters them."""

    config_class = PyramidConfig
    widths = (16, 16, 32, 64)

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        before = (3, *self.widths)
        self.stages = nn.ModuleList(
            nn.Conv2d(before[i], width, (side := 2 if i else 4), side) for i, width in enumerate(self.widths)
        )

    def forward(self, pixel_values: Tensor, **_: Any) -> BaseModelOutput:
        """Return the features (B, C, H, W) of each stage."""
        maps: list[Tensor] = []
        for stage in self.stages:
            maps.append(stage(maps[-1] if maps else pixel_values))
        return BaseModelOutput(last_hidden_state=maps)


class Gemma3nPyramidModel(PyramidModel):
    """The same in place of the vision model of Gemma 3n."""

    config_class = Gemma3nVisionConfig


def register() -> None:
    """Let transformers make these models."""
    AutoConfig.register("pyramid", PyramidConfig, exist_ok=True)
    AutoModel.register(PyramidConfig, PyramidModel, exist_ok=True)
    AutoModel.register(Gemma3nVisionConfig, Gemma3nPyramidModel, exist_ok=True)
