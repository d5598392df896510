"""How errors of sums become errors of an estimate.

Coordinates are in bandwidths about each query, and targets in units of their own standard deviation. Terms of first
order and their products are added up and doubled, which covers what is of higher order while relative errors stay below
1/8.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

#: Relative errors up to which a bound holds, and what a spread must be beside the largest for a line to have a slope.
SMALL, STEEP = 1 / 8, 1e-8
#: Degrees of freedom, as a share, below which nothing is said of a deviation.
LEAST_FREEDOM = 1e-6


@dataclass(frozen=True)
class Bounds:
    """Averages at L queries with what each may be wrong by.

    Attributes
    ----------
    total : Tensor (L,)
        The sum of weights.
    error : Tensor ()
        What it may be wrong by.
    target, target_error : Tensor (L, M)
        Averages of targets y.
    center, center_error : Tensor (L, C)
        Of coordinates u; without a line C is 0, here and below.
    square, square_error : Tensor (L, C, C)
        Of u uᵀ.
    cross, cross_error : Tensor (L, C, M)
        Of u yᵀ.
    """

    total: Tensor
    error: Tensor
    target: Tensor
    target_error: Tensor
    center: Tensor
    center_error: Tensor
    square: Tensor
    square_error: Tensor
    cross: Tensor
    cross_error: Tensor

    @cached_property
    def known(self) -> Tensor:
        """Whether anything is known of a query (L,)."""
        known = self.error <= SMALL * self.total
        if self.center.shape[1]:
            values = torch.linalg.eigvalsh(self._covariance)
            least = torch.maximum(self._covariance_error.flatten(1).norm(dim=1) / SMALL, STEEP * values[:, -1])
            known = known & (values[:, 0] > least)
        return known

    @cached_property
    def _covariance(self) -> Tensor:
        return self.square - _outer(self.center, self.center)

    @cached_property
    def _covariance_error(self) -> Tensor:
        g, e = self.center.abs(), self.center_error
        return self.square_error + _outer(g, e) + _outer(e, g) + _outer(e, e)

    @cached_property
    def _inverse(self) -> Tensor:
        eye = torch.eye(self.center.shape[1]).to(self.center)
        return torch.linalg.inv(torch.where(self.known[:, None, None], self._covariance, eye))

    @cached_property
    def _cross_error(self) -> Tensor:
        g, y = self.center.abs(), self.target.abs()
        return (
            self.cross_error + _outer(g, self.target_error) + _outer(self.center_error, y)
            + _outer(self.center_error, self.target_error)
        )  # fmt: skip

    @cached_property
    def _slope(self) -> Tensor:
        """The slopes of the line (L, C, M)."""
        return self._inverse @ (self.cross - _outer(self.center, self.target))

    @cached_property
    def _push(self) -> Tensor:
        """What errors of the covariances do to the slopes' equations (L, C, M)."""
        return self._cross_error + self._covariance_error @ self._slope.abs()

    def of_mean(self) -> Tensor:
        """Return what the prediction may be wrong by (L, M)."""
        lever = (self._inverse @ self.center[..., None]).abs() + self._inverse.abs() @ self.center_error[..., None]
        first = self.target_error + (self.center_error[..., None] * self._slope.abs()).sum(1)
        return 2 * (first + (lever * self._push).sum(1))

    def of_deviation(self, square: Tensor, square_error: Tensor, repeated: Squared) -> Tensor:
        """Return what the standard deviation may be wrong by (L, M), infinite where nothing is known of it.

        Given averages of y² (L, M), their errors, and sums by squared weights.
        """
        explained = (self._slope * (self.cross - _outer(self.center, self.target))).sum(1)
        variance = square - self.target.square() - explained
        freedom, freedom_error = self._freedom(repeated)
        wrong = self._variance_error(square_error) / variance + (freedom_error / freedom)[:, None]
        known = (variance > 0) & (wrong <= 0.5) & (freedom > LEAST_FREEDOM)[:, None]
        return torch.where(known, (variance / freedom[:, None]).clamp(min=0).sqrt() * wrong, torch.inf)

    def _variance_error(self, square_error: Tensor) -> Tensor:
        level = square_error + (2 * self.target.abs() + self.target_error) * self.target_error
        line = (2 * self._slope.abs() + self._inverse.abs() @ self._push) * self._push
        return 2 * (level + line.sum(1))

    def _freedom(self, by: Squared) -> tuple[Tensor, Tensor]:
        """Return the degrees of freedom as a share (L,), and what they may be wrong by."""
        if not self.center.shape[1]:
            return 1 - by.level, 2 * by.level_error
        g, d = self.center, self.center_error
        cross = _outer(by.center, g)
        cross_error = _outer(by.center.abs(), d) + _outer(by.center_error, g.abs())
        level, level_error = by.level[:, None, None], by.level_error[:, None, None]
        about = by.square - cross - cross.mT + level * _outer(g, g)
        error = by.square_error + cross_error + cross_error.mT
        error = error + level_error * _outer(g.abs(), g.abs()) + 2 * level * _outer(g.abs(), d)
        inverse = self._inverse
        trace_error = (inverse.abs() * error).sum((1, 2))
        trace_error = trace_error + ((inverse @ about @ inverse).abs() * self._covariance_error).sum((1, 2))
        return 1 - by.level - (inverse * about).sum((1, 2)), 2 * (by.level_error + trace_error)


@dataclass(frozen=True)
class Squared:
    """Sums of 1 (L,), u (L, C) and u uᵀ (L, C, C) by squares of weights that sum to 1, with their errors."""

    level: Tensor
    level_error: Tensor
    center: Tensor
    center_error: Tensor
    square: Tensor
    square_error: Tensor


def _outer(one: Tensor, other: Tensor) -> Tensor:
    return one.unsqueeze(-1) * other.unsqueeze(-2)
