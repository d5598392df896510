"""Triangular: weight falls linearly with distance, to nothing at the width."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard._catalogue import mechanism
from regard.scores.base import register
from regard.scores.distance import Compact


@register("triangular")
@mechanism(
    formula="log max(0, 1 − ‖q − k‖ / σ)",
    learned="σ, or one for each feature",
    cost="O(L·S·E)",
)
class Triangular(Compact):
    """Triangular kernel as a log-weight, ``log max(0, 1 − ‖q − k‖ / σ)``.

    Some texts print this kernel under the name of Epanechikov, whose own is quadratic: :class:`Epanechikov`.

    Parameters
    ----------
    width : float or Tensor of shape () or (E,), default 1.0
        The distance σ at which the weight reaches zero, one for all features or one for each; a tensor gets gradients.

    Examples
    --------
    >>> import torch
    >>> Triangular(2.0).compare(torch.tensor([[0.0]]), torch.tensor([[0.0], [1.0], [2.0]])).exp()
    tensor([[1.0000, 0.5000, 0.0000]])
    """

    @staticmethod
    def log_profile(u: Any) -> Any:
        return np.log(1 - u)

    @staticmethod
    def variance(features: int) -> float:
        return (features + 1) / ((features + 2) * (features + 3))

    def lost(self, square: Tensor) -> Tensor:
        moved = square > 0  # the root has an infinite slope at 0
        return torch.where(moved, torch.where(moved, square, 0.25).sqrt(), 0.0 * square)
