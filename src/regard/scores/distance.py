"""What the kernel scores share: a distance measured in units of a width."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from regard._errors import NUMBERS, described, rejected, shape
from regard.scores.base import Score


def checked_width(width: float | Tensor, function: str, argument: str) -> float | Tensor:
    """Return a width that is a positive number, or a tensor of one element or one per feature; else raise."""
    if isinstance(width, Tensor):
        if width.dim() > 1 or not width.is_floating_point():
            raise rejected(function, argument, "be a float tensor of shape () or (E,)", described(width))
        return width
    if isinstance(width, bool) or not isinstance(width, NUMBERS):
        raise rejected(function, argument, "be a positive number or a tensor", described(width), TypeError)
    if not 0 < width < math.inf:
        raise rejected(function, argument, "be a positive finite number", width)
    return width if type(width) is int else float(width)  # NumPy's numbers, too


class Distance(Score):
    """A score that depends on ``(q − k) / width`` alone.

    Parameters
    ----------
    width : float or Tensor of shape () or (E,), default 1.0
        The unit of distance, one for all features or one for each.
    """

    #: What the constructor calls the width.
    unit: ClassVar[str] = "width"

    def __init__(self, width: float | Tensor = 1.0) -> None:
        self.width = checked_width(width, type(self).__name__, self.unit)

    def __repr__(self) -> str:
        return super().__repr__().replace("(width=", f"({self.unit}=")

    def check(self, query: Tensor, key: Tensor) -> None:  # noqa: ARG002
        width = self.width
        if isinstance(width, Tensor) and width.dim() == 1 and width.shape[0] not in (1, query.shape[-1]):
            expected = f"have shape () or ({query.shape[-1]},), query's head width"
            raise rejected("attention", f"score {type(self).__name__}'s {self.unit}", expected, shape(width))

    def difference(self, query: Tensor, key: Tensor) -> Tensor:
        """Return ``(q − k) / width`` of every pair, (..., l, s, E)."""
        # The difference comes first: it is exact for near neighbours, which q/width − k/width is not.
        return (query.unsqueeze(-2) - key.unsqueeze(-3)) / self.width

    def pair_size(self, width: int) -> int:
        return 2 * width

    def pair_flops(self, width: int) -> int:
        return 4 * width


class Radial(Distance):
    """A score that depends on ``‖(q − k) / width‖`` alone; a subclass defines :meth:`log_weight`."""

    @abstractmethod
    def log_weight(self, square: Tensor) -> Tensor:
        """Return the score at squared distance ``square``, in units of the width."""

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        difference = self.difference(query, key)
        return self.log_weight((difference * difference).sum(-1))
