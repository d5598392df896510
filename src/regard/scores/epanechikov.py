"""Epanechikov: weight falls with the square of the distance, to nothing at the width."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from regard._catalogue import mechanism
from regard.scores.base import register
from regard.scores.distance import Compact


@register("epanechikov")
@mechanism(
    formula="log max(0, 1 − ‖q − k‖² / σ²)",
    sources=("epanechikov1969",),
    learned="σ, or one for each feature",
    cost="O(L·S·E)",
)
class Epanechikov(Compact):
    """Epanechikov's kernel as a log-weight, ``log max(0, 1 − ‖q − k‖² / σ²)`` (Epanechikov 1969).

    Some texts print the linear kernel under this name: that is :class:`Triangular`.

    Parameters
    ----------
    width : float or Tensor of shape () or (E,), default 1.0
        The distance σ at which the weight reaches zero, one for all features or one for each; a tensor gets gradients.

    Examples
    --------
    >>> import torch
    >>> Epanechikov(2.0).compare(torch.tensor([[0.0]]), torch.tensor([[0.0], [1.0], [2.0]])).exp()
    tensor([[1.0000, 0.7500, 0.0000]])
    """

    @staticmethod
    def log_profile(u: Any) -> Any:
        return np.log(1 - u * u)

    @staticmethod
    def variance(features: int) -> float:
        return 1 / (features + 4)

    def lost(self, square: Tensor) -> Tensor:
        return square
