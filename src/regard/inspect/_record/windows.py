"""Attention within windows of an image, put back on the image.

Dimensions: B images, W windows of an image, H heads, M patches along the side of a window, P patches of an image.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._utils.errors import rejected, shape


def merge_windows(weights: Tensor, grid: tuple[int, int], shift: int = 0) -> Tensor:
    """Return the weights of windows as weights between all patches of an image, 0 where windows differ.

    Swin (Liu et al. 2021, arXiv 2103.14030) cuts an image into windows of M × M patches, row by row, and attends
    within each. Every second layer first moves the image up and left by ``shift`` patches, so that what leaves on one
    side comes back on the other. If M does not divide the sides, patches of padding are added at the right and bottom;
    their weights are dropped.

    Parameters
    ----------
    weights : Tensor (B·W, H, M², M²)
        The windows of each image are consecutive: ``record[layer].weights()``.
    grid : (int, int)
        Rows and columns of patches of the image, at this layer.
    shift : int
        The shift of the layer: ``shift_size`` of transformers' and timm's modules.

    Returns
    -------
    Tensor (B, H, P, P)
        P is rows · columns; each row is a map over the image.

    Raises
    ------
    ValueError
        If the weights are not those of square windows of whole images.

    Examples
    --------
    >>> import torch
    >>> from regard.inspect import merge_windows
    >>> uniform = torch.full((4, 1, 4, 4), 0.25)  # four windows of 2 × 2 patches
    >>> merge_windows(uniform, (4, 4))[0, 0, 0].view(4, 4)
    tensor([[0.2500, 0.2500, 0.0000, 0.0000],
            [0.2500, 0.2500, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.0000, 0.0000]])
    """
    rows, cols = grid
    M = math.isqrt(weights.shape[-1]) if weights.dim() == 4 else 0
    if M == 0 or weights.shape[2:] != (M * M, M * M):
        raise rejected("merge_windows", "weights", "be those of square windows (B·W, H, M², M²)", shape(weights))
    if min(rows, cols) < 1 or not 0 <= shift < M:
        raise rejected("merge_windows", "grid and shift", f"be at least 1, and a shift below {M}", f"{grid}, {shift}")
    down, across = -(-rows // M), -(-cols // M)
    if len(weights) % (down * across):
        expected = f"be the {down * across} windows of {rows} × {cols} patches, of each image"
        raise rejected("merge_windows", "weights", expected, f"{len(weights)} windows")
    B, H, P = len(weights) // (down * across), weights.shape[1], rows * cols
    # The number of the patch at each place of each window; P stands for all padding.
    number = torch.full((down * M, across * M), P, device=weights.device)
    number[:rows, :cols] = torch.arange(P, device=weights.device).view(rows, cols)
    number = number.roll((-shift, -shift), (0, 1))
    number = number.view(down, M, across, M).transpose(1, 2).reshape(down * across, M * M)
    whole = weights.new_zeros(B, H, P + 1, P + 1)
    windows = weights.view(B, down * across, H, M * M, M * M)
    for window, own in enumerate(number):
        kept = own < P
        patches = own[kept]
        whole[:, :, patches[:, None], patches] = windows[:, window][..., kept, :][..., kept]
    return whole[..., :P, :P]
