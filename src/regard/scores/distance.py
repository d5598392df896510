"""Kernels of a distance: what they share, and what each states of itself, which everybody else reads here."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from regard._constraints import Interval, TensorOf
from regard._errors import rejected, shape
from regard.scores.base import TABLE, Score

_WIDTH = Interval(0, math.inf, "()", note=" or a tensor")


class Distance(Score):
    """A kernel K of the distance u = ‖(q − k) / width‖: the score is log K(u).

    A kernel is stated by its class alone: the layer, the estimators, the command line, the tests and the documentation
    find it in :func:`kernels` as soon as it is registered.

    Parameters
    ----------
    width : float or Tensor of shape () or (E,), default 1.0
        The unit of distance, one for all features or one for each.
    """

    #: What the constructor calls the width.
    unit: ClassVar[str] = "width"
    #: Whether the distance is the sum of absolute differences, instead of the Euclidean.
    manhattan: ClassVar[bool] = False
    #: Whether K(u) is 0 for u > 1.
    compact: ClassVar[bool] = False
    #: Whether the weights have a gradient to the width.
    smooth: ClassVar[bool] = True

    def __init__(self, width: float | Tensor = 1.0) -> None:
        if isinstance(width, Tensor):
            TensorOf((), ("E",))(self, self.unit, width)
        else:
            width = _WIDTH(self, self.unit, width)
        self.width = width

    @staticmethod
    def log_profile(u: Any) -> Any:
        """Return log K(u) of distances u ≥ 0 in NumPy; where the kernel is compact, of u ≤ 1 alone.

        It is what :meth:`compare` is judged by: the plain formula, analytic in u, without care for rounding.
        """
        raise NotImplementedError

    @staticmethod
    def variance(features: int) -> float:  # noqa: ARG004
        """Return the variance of K along one coordinate, as a density over so many, for a width of 1."""
        return 1.0

    @classmethod
    def profile(cls, u: Any) -> Any:
        """Return K(u) of distances u ≥ 0 as a NumPy array."""
        u = np.asarray(u, dtype=float)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where((u <= 1) | (not cls.compact), np.exp(cls.log_profile(u)), 0.0)

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


class Compact(Radial):
    """A kernel that is 0 beyond the width; a subclass defines :meth:`lost`."""

    excludes = True
    compact = True
    #: The width of a sample, in units of √E.
    typical: ClassVar[float] = 2.5

    @abstractmethod
    def lost(self, square: Tensor) -> Tensor:
        """Return 1 − K at squared distances below 1."""

    def log_weight(self, square: Tensor) -> Tensor:
        inside = square < 1  # both guards keep the logarithm's infinite slope at the rim out of the gradient
        return torch.where(inside, torch.log1p(-self.lost(torch.where(inside, square, 0.0))), -torch.inf)

    @classmethod
    def sample(cls, query_width: int, key_width: int, keys: int, generator: torch.Generator) -> Self:  # noqa: ARG003
        return cls(cls.typical * max(query_width, 1) ** 0.5)


def kernels() -> dict[str, type[Distance]]:
    """Return every registered kernel by its name."""
    return {name: cls for name, cls in TABLE.items() if issubclass(cls, Distance)}
