"""A small residual network whose blocks may hold any of the image mechanisms of :mod:`regard.nn`.

Dimensions: B batch, C channels of an image, H and W pixels, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.constraints import floats
from regard._utils.errors import rejected, shape, unknown_name
from regard.nn import (
    CBAM,
    ECA,
    ChannelAttention,
    MultiheadConvAttention,
    NonLocalBlock,
    SelfAttention2d,
    SpatialAttention,
    SqueezeExcitation,
)
from regard_lab._options import Options, option
from regard_lab.models.attending import DEEPEST, size

__all__ = ["ATTENTIONS", "PRESETS", "ResNet", "ResNetConfig"]

#: Functions by name that build a block's attention from the number of features and the config.
ATTENTIONS: Mapping[str, Callable[[int, ResNetConfig], nn.Module]] = {
    "none": lambda features, config: nn.Identity(),  # noqa: ARG005
    "se": lambda features, config: SqueezeExcitation(features, config.reduction),
    "eca": lambda features, config: ECA(features),  # noqa: ARG005
    "channel": lambda features, config: ChannelAttention(features, config.reduction),
    "spatial": lambda features, config: SpatialAttention(),  # noqa: ARG005
    "cbam": lambda features, config: CBAM(features, config.reduction),
    "nonlocal": lambda features, config: NonLocalBlock(features, pool=config.pool),
    "self": lambda features, config: SelfAttention2d(features, pool=config.pool),
    "conv": lambda features, config: MultiheadConvAttention(features, (1, 3, 5), config.reduction),
}


@dataclass(frozen=True)
class ResNetConfig(Options):
    """Everything that a :class:`ResNet` is built from."""

    function = "ResNetConfig"
    channels: int = size(3, "channels C of an image")
    features: int = size(16, "features of the first stage, which double from stage to stage")
    stages: int = option(3, "stages; all but the first halve both sides", ge=1, le=6)
    layers: int = size(2, "blocks of a stage", DEEPEST)
    expansion: float = option(1.0, "features between a block's two convolutions for each that leaves it", gt=0,
                              le=64)  # fmt: skip
    stem: int = option(0, "times that both sides are halved before the first stage", ge=0, le=4)
    attention: str = option("none", "what each block holds", choices=tuple(ATTENTIONS))
    attention_from: int = option(1, "the first stage whose blocks hold it, counted from 1", ge=1, le=6)
    reduction: int = size(8, "features for each hidden one, in what squeezes them", 1 << 10)
    pool: int = size(2, "side of the windows whose largest places stand for keys and values, of nonlocal and self", 64)

    def check(self) -> None:
        """Raise where fields contradict each other."""
        if self.attention != "none" and self.attention_from > self.stages:
            expected = f"be at most stages, {self.stages}"
            raise rejected(self.function, "attention_from", expected, self.attention_from)

    @classmethod
    def presets(cls) -> Mapping[str, Mapping[str, Any]]:
        """Return the named settings."""
        return PRESETS

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return the config of this name, with other fields in place of the preset's."""
        if name not in PRESETS:
            raise unknown_name(cls.__name__, "preset", str(name), PRESETS)
        return cls(**{**PRESETS[name], **changes})

    @property
    def width(self) -> int:
        """How many features F stand for an image."""
        return self.features << (self.stages - 1)


#: Presets by name: "tiny" and "small" for images of about 32 pixels, "base" for about 64, "large" for photographs.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"features": 16, "stages": 3, "layers": 1},
    "small": {"features": 32, "stages": 3, "layers": 1},
    "base": {"features": 32, "stages": 4, "layers": 2},
    "large": {"features": 64, "stages": 4, "layers": 2, "stem": 2},
}


class ResNet(nn.Module):
    """Residual blocks of two convolutions, with attention where a block's branch ends (He 2016, arXiv 1512.03385).

    ::

        F(x) = A(N(conv(ReLU(N(conv(x))))))        x ← ReLU(S(x) + F(x))

    N is a batch norm, A one of :data:`ATTENTIONS` (a gate over channels or places, or a read of all places, which is
    the identity at first), S the identity or, where features or sides change, a convolution of one pixel.

    Parameters
    ----------
    config : ResNetConfig

    Examples
    --------
    >>> import torch
    >>> model = ResNet(ResNetConfig(features=8, layers=1, attention="cbam")).eval()
    >>> places = model(torch.randn(2, 3, 32, 32))
    >>> places.shape, model.pool(places).shape
    (torch.Size([2, 32, 8, 8]), torch.Size([2, 32]))
    """

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        stem: list[nn.Module] = [*_convolution(config.channels, config.features, 3 if not config.stem else 7,
                                               2 if config.stem else 1), nn.ReLU(inplace=True)]  # fmt: skip
        stem += [nn.MaxPool2d(3, 2, 1) for _ in range(config.stem - 1)]
        self.stem = nn.Sequential(*stem)
        blocks: list[nn.Module] = []
        before = config.features
        for stage in range(config.stages):
            features = config.features << stage
            held = config.attention if stage + 1 >= config.attention_from else "none"
            for layer in range(config.layers):
                stride = 2 if stage and not layer else 1
                blocks.append(ResidualBlock(before, features, stride, held, config))
                before = features
        self.blocks = nn.Sequential(*blocks)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw convolutions by He's rule, and mechanisms as they do."""
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
        for block in self.blocks:
            assert isinstance(block, ResidualBlock)
            block.reset_parameters()
        nn.init.kaiming_normal_(self.stem[0].weight, nonlinearity="relu")  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        """Return the features of places, (B, F, h, w), of images.

        Parameters
        ----------
        images : Tensor (B, C, H, W) of float
            Normalized as in training.

        Raises
        ------
        ValueError, TypeError
            If ``images`` is something else, or has no pixel.
        """
        floats(self, "images", images, "B", self.config.channels, "H", "W")
        if not min(images.shape[2:]):
            raise rejected("ResNet", "images", "have at least 1 pixel a side", shape(images))
        found: Tensor = self.blocks(self.stem(images))
        return found

    def pool(self, places: Tensor) -> Tensor:
        """Return what stands for each image, (B, F): the mean over its places (B, F, h, w)."""
        return places.mean((2, 3))


class ResidualBlock(nn.Module):
    """Two convolutions and attention, added to what enters them.

    Parameters
    ----------
    before, features : int
        That enter, and that leave.
    stride : int
    attention : str
        One of :data:`ATTENTIONS`.
    config : ResNetConfig
    """

    def __init__(self, before: int, features: int, stride: int, attention: str, config: ResNetConfig) -> None:
        super().__init__()
        hidden = max(1, round(features * config.expansion))
        self.first = nn.Sequential(*_convolution(before, hidden, 3, stride))
        self.second = nn.Sequential(*_convolution(hidden, features, 3, 1))
        self.attention = ATTENTIONS[attention](features, config)
        self.stride = stride
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != features:
            self.shortcut = nn.Sequential(*_convolution(before, features, 1, 1))

    def reset_parameters(self) -> None:
        """Draw the convolutions by He's rule and the attention as it does."""
        for part in (self.first, self.second, self.shortcut):
            if isinstance(part, nn.Sequential):
                nn.init.kaiming_normal_(part[0].weight, nonlinearity="relu")  # type: ignore[arg-type]
        reset: Any = getattr(self.attention, "reset_parameters", None)
        if reset is not None:
            reset()

    def forward(self, x: Tensor) -> Tensor:
        """Return places (B, F, h, w) of places (B, ·, H, W)."""
        added: Tensor = self.attention(self.second(F.relu(self.first(x), inplace=True)))
        # Not a strided 1 × 1 convolution: in its backward pass, torch 2.13 writes past the end of its memory if the
        # input has few channels and is channels-last, like images that were read from files.
        return F.relu(self.shortcut(x[:, :, :: self.stride, :: self.stride]) + added)


def _convolution(before: int, features: int, kernel: int, stride: int) -> tuple[nn.Module, nn.Module]:
    """Return a convolution that keeps the sides but for its stride, and its batch norm."""
    return (
        nn.Conv2d(before, features, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(features),
    )
