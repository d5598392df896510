"""Kernels of a distance that is not one of coordinates alone: codes of categories differ or do not."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.scores import Score
from regard.scores.kernels import Distance, Radial


class MixedScore(Score):
    """A kernel of numbers and codes: a pair of different codes is one apart, whatever the codes are.

    With the squares ``u² = Σ ((q − k) / h)² + Σ [q ≠ k] / h²`` the score is log K(u); with the Manhattan distance
    ``u = Σ |q − k| / h + Σ [q ≠ k] / h``. Corners one apart from each other, each with an
    axis of its own, give the same.

    Parameters
    ----------
    kernel : Distance
        The kernel, with a width of 1.
    width : Tensor (C,)
        The unit of each coordinate.
    codes : tuple of int
        The coordinates that are codes.
    """

    can_return_neg_inf = True

    def __init__(self, kernel: Distance, width: Tensor, codes: tuple[int, ...]) -> None:
        self.kernel, self.width, self.codes = kernel, width, codes

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        total: Tensor | float = 0.0
        for axis in range(query.shape[-1]):
            # Contiguous columns are faster to read.
            q, k = query[..., axis].contiguous().unsqueeze(-1), key[..., axis].contiguous().unsqueeze(-2)
            width = self.width[axis]
            if axis in self.codes:
                unit = width.reciprocal() if self.kernel.manhattan else width.reciprocal().square()
                total = total + torch.where(q == k, 0.0, unit)
            else:
                gap = (q - k) / width
                total = total + (gap.abs() if self.kernel.manhattan else gap.square())
        return log_weight(self.kernel, total + query.new_zeros(()))

    def pair_size(self, width: int) -> int:  # noqa: ARG002
        return 4

    def pair_flops(self, width: int) -> int:
        return 4 * width


def log_weight(kernel: Distance, square: Tensor) -> Tensor:
    """Return the logarithm of a kernel at squared distances in bandwidths, or Manhattan distances if it is of those."""
    if isinstance(kernel, Radial):
        return kernel.log_weight(square)
    return kernel.compare(square[..., None, None], torch.zeros_like(square)[..., None, None])[..., 0, 0]
