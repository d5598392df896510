"""Triangular: weight falls linearly with distance, to nothing at the width."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._catalogue import mechanism
from regard.scores.base import register
from regard.scores.distance import Radial


@register("triangular")
@mechanism(
    formula="log max(0, 1 − ‖q − k‖ / σ)",
    learned="σ, or one for each feature",
    cost="O(L·S·E)",
)
class Triangular(Radial):
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

    excludes = True

    def log_weight(self, square: Tensor) -> Tensor:
        inside = square < 1
        # Both guards keep infinite slopes (of the root at 0, of the log at 1) out of the gradient.
        moved = inside & (square > 0)
        distance = torch.where(moved, torch.where(moved, square, 0.25).sqrt(), 0.0 * square)
        return torch.where(inside, torch.log1p(-torch.where(inside, distance, 0.0)), -torch.inf)

    @classmethod
    def sample(cls, query_width: int, key_width: int, keys: int, generator: torch.Generator) -> Triangular:  # noqa: ARG003
        return cls(2.5 * max(query_width, 1) ** 0.5)
