"""Boxcar: every key within reach counts the same."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._catalogue import mechanism
from regard.scores.base import register
from regard.scores.distance import Radial


@register("boxcar")
@mechanism(
    formula="0 if ‖q − k‖ ≤ σ, else −∞",
    cost="O(L·S·E)",
)
class Boxcar(Radial):
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

    excludes = True

    def log_weight(self, square: Tensor) -> Tensor:
        # 0·square keeps the graph, so that asking for a gradient answers zero.
        return torch.where(square <= 1, 0.0 * square, -torch.inf)

    @classmethod
    def sample(cls, query_width: int, key_width: int, keys: int, generator: torch.Generator) -> Boxcar:  # noqa: ARG003
        return cls(1.7 * max(query_width, 1) ** 0.5)
