"""The vision transformer: attention over image patches (Dosovitskiy 2020), optionally after a convolutional stem.

Dimensions: B batch, C channels, H and W pixels, P patches, T leading tokens, L = T + P tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import masks
from regard._utils.constraints import floats
from regard._utils.errors import rejected, shape, unknown_name
from regard.engines.aux import Aux, AuxRequest
from regard.masks import Mask
from regard.nn import SinusoidalPositions
from regard.nn.transformer import ACTIVATIONS
from regard_lab._options import Options, option
from regard_lab.models.attending import DEEPEST, SCORES, share, size
from regard_lab.models.efficientnet import channels_last
from regard_lab.models.encoder_lm import EncoderLMConfig
from regard_lab.models.language_blocks import STD, Block, draw, norm
from regard_lab.models.mixers import softmax
from regard_lab.models.transformer import NORMALIZERS

__all__ = ["PRESETS", "VisionTransformer", "VisionTransformerConfig"]

POSITIONS, POOLINGS = ("learned", "sinusoidal", "none"), ("first", "mean", "attention")
#: Maximum image side in pixels.
_SIDE = 1 << 14


@dataclass(frozen=True)
class VisionTransformerConfig(Options):
    """Everything that a :class:`VisionTransformer` is built from."""

    function = "VisionTransformerConfig"
    image: int = size(224, "side of the images that the model was made for, in pixels", _SIDE)
    channels: int = size(3, "channels C of an image")
    stem: int = option(0, "stages of convolutions before the patches, each of which halves both sides", ge=0, le=8)
    stem_width: int = size(32, "features of the first stage, which double from stage to stage")
    stem_layers: int = size(2, "convolutions of a stage behind the first, which has one", DEEPEST)
    patch: int = size(16, "side of a patch of what the stem has left")
    width: int = size(192, "width E of the rows")
    layers: int = size(12, "blocks, one after the other", 2 * DEEPEST)
    heads: int = size(3, "heads H, which divide E")
    feedforward: int | None = size(None, "width F of the hidden layers; 4·E by default", 1 << 20)
    class_token: bool = option(True, "whether a learned row stands before the patches")
    #: Touvron 2020, arXiv 2012.12877.
    distilled: bool = option(False, "whether another one does, for what a teacher says")
    positions: str = option("learned", "what tells positions: a row for each, or waves of rows and columns",
                            choices=POSITIONS)  # fmt: skip
    #: The last pooling: Hassani 2021, arXiv 2104.05704.
    pooling: str = option("first", "what stands for an image: the class token, the mean of the patches, or their mean "
                          "by learned weights", choices=POOLINGS)  # fmt: skip
    pooled: bool = option(False, "whether what stands for an image goes through another layer")
    window: int = option(0, "rows and columns to each side that a patch sees; 0 for all", ge=0, le=_SIDE)
    norm_eps: float = option(1e-6, "added to the variance", gt=0)
    activation: str = option("gelu", "of the hidden layers", choices=tuple(ACTIVATIONS))
    qkv_bias: bool = option(True, "whether queries, keys and values have a bias")
    score: str = option("scaled_dot", "how queries and keys compare within a head", choices=SCORES)
    normalizer: str = option("softmax", "of the scores", choices=NORMALIZERS)
    dropout: float = share(0.0, "share zeroed of embeddings and of what each block adds")
    attention_dropout: float = share(0.0, "share zeroed of attention weights")

    def check(self) -> None:
        """Raise where fields contradict each other."""
        if self.width % self.heads:
            raise self.refused("heads", f"divide width {self.width}", self.heads)
        if not self.grid:
            expected = f"be at least {self.patch << self.stem} for a patch of {self.patch} after {self.stem} stages"
            raise self.refused("image", expected, self.image)
        if self.pooling == "first" and not self.class_token:
            raise self.refused("pooling", "be 'mean' or 'attention' without a class token", "'first'")
        if self.distilled and not self.class_token:
            raise self.refused("distilled", "be False without a class token", True)
        if self.positions == "sinusoidal" and self.width % 4:
            raise self.refused("width", "be a multiple of 4 for waves of rows and columns", self.width)

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
    def grid(self) -> int:
        """How many patches there are along a side."""
        return (self.image >> self.stem) // self.patch

    @property
    def leading(self) -> int:
        """How many rows T stand before the patches."""
        return int(self.class_token) + int(self.distilled)

    @property
    def max_length(self) -> int:
        """How many rows L there are, of an image of the usual size."""
        return self.leading + self.grid**2

    @property
    def hidden(self) -> int:
        """Width F of the hidden layers."""
        return self.block.hidden

    @property
    def block(self) -> EncoderLMConfig:
        """The sizes and parts of a block, as those of an encoder of text."""
        names = ["width", "layers", "heads", "feedforward", "max_length", "norm_eps", "activation", "qkv_bias", "score"]
        names += ["normalizer", "dropout", "attention_dropout"]
        return EncoderLMConfig(vocabulary=1, norm_first=True, **{name: getattr(self, name) for name in names})

    def refused(self, name: str, expected: str, got: object) -> Exception:
        """Return the error to raise for a field."""
        return rejected(type(self).__name__, name, expected, got)


_VIT: dict[str, Any] = {"norm_eps": 1e-12}
_COMPACT: dict[str, Any] = {"stem": 2, "patch": 1, "class_token": False, "pooling": "attention", "image": 32}
#: Presets by name: those of papers (Dosovitskiy 2020; Touvron 2020), and compact convolutional ones (Hassani 2021).
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _COMPACT | {"width": 96, "layers": 2, "heads": 3, "feedforward": 192, "stem_width": 32},
    "small": _COMPACT | {"width": 128, "layers": 3, "heads": 4, "feedforward": 256, "stem_width": 48},
    "base": _COMPACT | {"width": 256, "layers": 7, "heads": 4, "feedforward": 512, "stem_width": 64},
    "vit-tiny": _VIT | {"width": 192, "layers": 12, "heads": 3},
    "vit-small": _VIT | {"width": 384, "layers": 12, "heads": 6},
    "vit-base": _VIT | {"width": 768, "layers": 12, "heads": 12},
    "vit-large": _VIT | {"width": 1024, "layers": 24, "heads": 16},
    "deit-tiny": _VIT | {"width": 192, "layers": 12, "heads": 3, "distilled": True},
    "deit-base": _VIT | {"width": 768, "layers": 12, "heads": 12, "distilled": True},
}


class VisionTransformer(nn.Module):
    """Patches of an image as rows of a Transformer, with or without convolutions before them.

    ::

        x = [class token; patches of stem(image)] + positions
        x ← x + MHA(N(x))        x ← x + FFN(N(x))        as many times as there are layers
        rows = N(x)

    Without a stem this is ViT (Dosovitskiy 2020, arXiv 2010.11929) or, with two leading tokens, DeiT (Touvron 2020,
    arXiv 2012.12877); with one, the compact convolutional transformer (Hassani 2021, arXiv 2104.05704). Images of
    another size than the config's have learned positions interpolated by cubic splines.

    Parameters
    ----------
    config : VisionTransformerConfig

    Examples
    --------
    >>> model = VisionTransformer(VisionTransformerConfig(image=8, patch=4, width=16, layers=1, heads=2)).eval()
    >>> rows = model(torch.randn(2, 3, 8, 8))
    >>> rows.shape, model.pool(rows).shape
    (torch.Size([2, 5, 16]), torch.Size([2, 16]))
    """

    def __init__(self, config: VisionTransformerConfig) -> None:
        super().__init__()
        self.config = config
        E, T = config.width, config.leading
        self.stem = nn.Sequential(*_stages(config))
        channels_last(self.stem)
        features = config.stem_width << (config.stem - 1) if config.stem else config.channels
        self.patches = nn.Conv2d(features, E, config.patch, config.patch)
        self.tokens = nn.Parameter(torch.empty(T, 1, E)) if T else None
        learned = config.positions == "learned"
        self.positions = nn.Parameter(torch.empty(1, config.max_length, E)) if learned else None
        self.waves = SinusoidalPositions(E // 2) if config.positions == "sinusoidal" else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config.block, "before", softmax(config.block)) for _ in range(config.layers))
        self.norm = norm(config.block)
        self.pooler = nn.Linear(E, E) if config.pooled else None
        self.weigh = nn.Linear(E, 1) if config.pooling == "attention" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialize the parameters: convolutions by He's rule, the rest with standard deviation 0.02."""
        draw(self, self.blocks, self.config.layers)  # type: ignore[arg-type]
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu" if module.bias is None else "linear")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
        for each in (self.tokens, self.positions):
            if each is not None:
                nn.init.normal_(each, std=STD)

    def forward(self, images: Tensor, *, return_aux: AuxRequest | None = None, aux: list[Aux] | None = None) -> Tensor:
        """Return the hidden states (B, L, E): leading tokens first, then patches in row-major order.

        Parameters
        ----------
        images : Tensor (B, C, H, W) of float
            Normalized as in training.
        return_aux : AuxRequest, optional
            Auxiliary outputs to compute in each layer's attention.
        aux : list of Aux, optional
            Receives the requested auxiliary outputs, one entry per layer.

        Raises
        ------
        ValueError, TypeError
            If ``images`` has the wrong type or shape, or is smaller than a patch.
        """
        config = self.config
        floats(self, "images", images, "B", config.channels, "H", "W")
        least = config.patch << config.stem
        if min(images.shape[2:]) < least:
            raise rejected("VisionTransformer", "images", f"have at least {least} pixels a side", shape(images))
        found = self.patches(self.stem(images))  # (B, E, h, w)
        grid = found.shape[2], found.shape[3]
        x = found.flatten(2).transpose(1, 2)
        if self.tokens is not None:
            x = torch.cat([self.tokens.transpose(0, 1).expand(len(x), -1, -1), x], 1)
        x = self.dropout(self._placed(x, grid))
        mask = self._window(grid, x.device)
        for block in self.blocks:
            x, found, *_ = block(x, mask, None, None, return_aux)
            if aux is not None and found is not None:
                aux.append(found)
        return self.norm(x)

    def pool(self, rows: Tensor) -> Tensor:
        """Pool the hidden states (B, L, E) of each image into one vector (B, E), by the config's ``pooling``."""
        patches = rows[:, self.config.leading :]
        if self.weigh is not None:
            row = (self.weigh(patches).softmax(1) * patches).sum(1)
        else:
            row = rows[:, 0] if self.config.pooling == "first" else patches.mean(1)
        return row if self.pooler is None else torch.tanh(self.pooler(row))

    def _placed(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return hidden states (B, L, E) with position embeddings added."""
        if self.positions is not None:
            return x + self._learned(self.positions, grid)
        if self.waves is None:
            return x
        rows, columns = (self.waves.waves(torch.arange(n, device=x.device)) for n in grid)
        waves = torch.cat([rows[:, None].expand(-1, grid[1], -1), columns[None].expand(grid[0], -1, -1)], -1)
        placed = x[:, self.config.leading :] + waves.flatten(0, 1).to(x.dtype)
        return torch.cat([x[:, : self.config.leading], placed], 1)

    def _learned(self, positions: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return learned position embeddings (1, L, E), interpolated to a grid of patches."""
        side, T = self.config.grid, self.config.leading
        if grid == (side, side):
            return positions
        square = positions[:, T:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
        spread = F.interpolate(square, grid, mode="bicubic", align_corners=False)
        return torch.cat([positions[:, :T], spread.flatten(2).transpose(1, 2)], 1)

    def _window(self, grid: tuple[int, int], device: torch.device) -> Mask | None:
        """Return a mask that limits patches to nearby patches and leading tokens; None if the window covers all."""
        near = self.config.window
        if not near or near >= max(grid) - 1:
            return None
        row, column = (each.flatten() for each in torch.meshgrid(*map(torch.arange, grid), indexing="ij"))
        seen = ((row[:, None] - row).abs() <= near) & ((column[:, None] - column).abs() <= near)
        T = self.config.leading
        return masks.as_mask(F.pad(seen, (T, 0, T, 0), value=True).to(device))


def _stages(config: VisionTransformerConfig) -> list[nn.Module]:
    """Return the convolutional stem: convolutions with batch norm, and 2 × 2 max pooling after each stage."""
    made: list[nn.Module] = []
    features = config.channels
    for stage in range(config.stem):
        wide = config.stem_width << stage
        for _ in range(config.stem_layers if stage else 1):
            made += [nn.Conv2d(features, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide), nn.ReLU(inplace=True)]
            features = wide
        made.append(nn.MaxPool2d(2))
    return made
