"""Kernels of a distance that is not one of coordinates alone: codes of categories differ or do not."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.scores import Score
from regard.scores.kernels import Distance, Radial

#: The logarithm by which the weight of a key is less that misses what the query has.
LITTLE = math.log(100)


class MixedScore(Score):
    """A kernel of a distance in which codes count as equal or not, and missing values as unknown.

    A pair of different codes is one apart, whatever the codes are: the squared distance in bandwidths is
    ``u² = Σ ((q − k) / h)² + Σ [q ≠ k] / h²``, the Manhattan distance ``u = Σ |q − k| / h + Σ [q ≠ k] / h``, and the
    score log K(u). Corners one apart from each other, each with an axis of its own, give the same.

    A feature that the query misses does not count. A key that misses one which the query has says nothing of how the
    target depends on it. It has a hundredth of the weight that it has on average, if values are normal with standard
    deviation σ, so that it matters only where few others are near: a Gaussian is multiplied by ``(1 + 2σ² / h²)^-½``
    / 100, which adds to u², and a Laplacian by ``erfcx(σ / h) / 100``. Beyond a compact kernel, it has none.

    Parameters
    ----------
    kernel : Distance
        The kernel, with a width of 1.
    width : Tensor (C,)
        The unit of each coordinate.
    codes : tuple of int
        The coordinates that are codes.
    gaps : tuple of (tuple of int, int, float)
        The coordinates of each feature that may be missing, that which is 1 where it is, and σ.
    """

    can_return_neg_inf = True

    def __init__(
        self,
        kernel: Distance,
        width: Tensor,
        codes: tuple[int, ...],
        gaps: tuple[tuple[tuple[int, ...], int, float], ...] = (),
    ) -> None:
        self.kernel, self.width, self.codes, self.gaps = kernel, width, codes, gaps

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        total: Tensor | float = 0.0
        handled = {axis for own, flag, _ in self.gaps for axis in (*own, flag)}
        for axis in range(query.shape[-1]):
            if axis not in handled:
                total = total + self._apart(axis, query, key)
        for own, flag, scale in self.gaps:
            gone, lost = query[..., flag].unsqueeze(-1) > 0, key[..., flag].unsqueeze(-2) > 0
            apart = sum(self._apart(axis, query, key) for axis in own)
            ratio = scale / self.width[flag]
            unknown = -torch.special.erfcx(ratio).log() if self.kernel.manhattan else torch.log1p(2 * ratio.square())
            unknown = unknown + LITTLE * (1 if self.kernel.manhattan else 2)
            total = total + torch.where(gone, 0.0, torch.where(lost, unknown, apart))
        return log_weight(self.kernel, total + query.new_zeros(()))

    def _apart(self, axis: int, query: Tensor, key: Tensor) -> Tensor:
        """Return what a coordinate adds to the squared or Manhattan distance of each pair."""
        # Contiguous columns are faster to read.
        q, k = query[..., axis].contiguous().unsqueeze(-1), key[..., axis].contiguous().unsqueeze(-2)
        width = self.width[axis]
        if axis in self.codes:
            unit = width.reciprocal() if self.kernel.manhattan else width.reciprocal().square()
            return torch.where(q == k, 0.0, unit)
        gap = (q - k) / width
        return gap.abs() if self.kernel.manhattan else gap.square()

    def pair_size(self, width: int) -> int:  # noqa: ARG002
        return 4

    def pair_flops(self, width: int) -> int:
        return 4 * width


def log_weight(kernel: Distance, square: Tensor) -> Tensor:
    """Return the logarithm of a kernel at squared distances in bandwidths, or Manhattan distances if it is of those."""
    if isinstance(kernel, Radial):
        return kernel.log_weight(square)
    return kernel.compare(square[..., None, None], torch.zeros_like(square)[..., None, None])[..., 0, 0]
