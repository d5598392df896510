"""How weights become shades: as they are, beside the largest of their row, or by their logarithm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._errors import unknown_name

#: The scales, and what a colour bar says of each.
SCALES = {"absolute": "attention weight", "row": "share of its row's largest", "log": "attention weight"}
#: Decades that the logarithmic scale shows.
DECADES = 4


def scaled(weights: Tensor, scale: str, function: str) -> Tensor:
    """Return how far along a scale weights (L, S) are: in [0, 1], or in [−1, 1] where they have signs.

    On the scale "absolute" that is the weight itself; on "row" its share of the largest of its row; on "log" it is 0
    for 10⁻⁴ and less, and 1 for 1, with even steps of the logarithm between. Of rows that rest on a sink, the first
    and the second show hardly anything else, and the third all of it.
    """
    if scale not in SCALES:
        raise unknown_name(function, "scale", scale, SCALES)
    size = weights.abs()
    if scale == "row":
        size = size / size.amax(-1, keepdim=True).clamp_min(1e-30) if size.numel() else size
    elif scale == "log":
        size = 1 + size.clamp_min(10.0**-DECADES).log10() / DECADES
    return size.clamp(0, 1) * weights.sign()


def pooled(weights: Tensor, most: int) -> tuple[Tensor, int]:
    """Return the largest weights of blocks, so that no side has more than ``most``, and the side of a block."""
    block = max(-(-max(weights.shape) // most), 1)
    if block == 1:
        return weights, 1
    pads = (0, -weights.shape[1] % block, 0, -weights.shape[0] % block)
    tiles = F.pad(weights, pads).unflatten(1, (-1, block)).unflatten(0, (-1, block)).transpose(1, 2).flatten(2)
    largest = tiles.abs().argmax(-1, keepdim=True)
    return tiles.gather(-1, largest).squeeze(-1), block


def as_shown(weights: Tensor) -> Tensor:
    """Return weights as pictures take them."""
    return weights.detach().to("cpu", torch.float64)
