"""Boxcar: every key within reach counts the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard._catalogue import mechanism
from regard.scores.base import register
from regard.scores.distance import Compact


@register("boxcar")
@mechanism(
    formula="0 if ‖q − k‖ ≤ σ, else −∞",
    cost="O(L·S·E)",
)
class Boxcar(Compact):
    """Boxcar kernel as a log-weight: ``0`` where ``‖q − k‖ ≤ σ``, else ``−inf``.

    Parameters
    ----------
    width : float or Tensor of shape () or (E,), default 1.0
        The radius σ, one for all features or one for each. Weights are piecewise constant in it, in queries and
        in keys: the gradient to all three is zero.

    Examples
    --------
    >>> import torch
    >>> Boxcar(1.0).compare(torch.tensor([[0.0]]), torch.tensor([[0.5], [1.0], [1.5]]))
    tensor([[0., 0., -inf]])
    """

    smooth = False
    typical = 1.7

    @staticmethod
    def log_profile(u: Any) -> Any:
        return 0 * u

    @staticmethod
    def variance(features: int) -> float:
        return 1 / (features + 2)

    def lost(self, square: Tensor) -> Tensor:
        return 0.0 * square

    def log_weight(self, square: Tensor) -> Tensor:
        # The rim counts, and 0·square keeps the graph, so that asking for a gradient answers zero.
        return torch.where(square <= 1, self.lost(square), -torch.inf)
