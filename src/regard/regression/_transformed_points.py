"""Estimates from sums that a Fourier transform gives, each with a bound on its error.

Errors are in units of ``|ŷ − ȳ| + σ`` of each target, with the mean ȳ and the standard deviation σ of all targets.
A sum's error is absolute: where the weights of all points sum to little, a ratio of sums means nothing, and its bound
says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.regression._error_bounds import Bounds, Squared
from regard.regression._fourier_sums import MARGIN, FourierSums, Power, Series
from regard.regression._kernel_smoother import Averages, Estimate, Smoother, symmetric

#: Numbers that are held of the sums at some of the queries.
HELD = 1 << 25


@dataclass
class TransformedPoints:
    """Points that are transformed for one bandwidth.

    Attributes
    ----------
    width : ndarray (C,)
        A bandwidth for each coordinate.
    eps : float
        The error that transforms are asked for.
    """

    width: np.ndarray
    eps: float
    _sums: dict[str, FourierSums] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """What is held."""
        return sum(each.bytes for each in self._sums.values())

    def transform(self, smoother: Smoother, kind: str = "mean") -> FourierSums:
        """Return sums of a kind: of weights and targets, of squares of targets, or of squared weights."""
        if kind not in self._sums:
            unit, key = self._unit(kind), smoother.key.numpy()
            series = Series(key.min(0) / unit, key.max(0) / unit, self.eps)
            points = [key[:, axis] / unit[axis] for axis in range(len(unit))]
            self._sums[kind] = FourierSums(series, points, _columns(kind, smoother))
        return self._sums[kind]

    def _unit(self, kind: str) -> np.ndarray:
        """Return the bandwidth of a kind of sums: the square of a Gaussian is a narrower one."""
        return self.width / math.sqrt(2) if kind == "repeated" else self.width

    def estimate(
        self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None = None, spread: bool = False
    ) -> tuple[Estimate, Tensor]:
        """Return the estimate at queries (L, C), each without its ``own`` point (L,), and a bound on its error (L,).

        The estimate is differentiable with respect to the bandwidth. The bound is infinite where nothing is known.
        """
        size = max(1, HELD // (len(self._powers(smoother)) * (1 + smoother.target.shape[1])))
        parts = [
            self._estimate(smoother, query[rows], bandwidth, None if own is None else own[rows], spread)
            for rows in torch.arange(len(query)).split(size)
        ]
        return Estimate.cat([part for part, _ in parts]), torch.cat([bound for _, bound in parts])

    def _powers(self, smoother: Smoother) -> list[Power]:
        """Return the exponents of u whose sums are needed: none, and with a line each one, and each two."""
        C = len(self.width) if smoother.order else 0
        axes = np.eye(len(self.width), dtype=int)
        first, second = np.triu_indices(C)
        return [tuple(row.tolist()) for row in (0 * axes[0], *axes[:C], *(axes[first] + axes[second]))]

    def _estimate(
        self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None, spread: bool
    ) -> tuple[Estimate, Tensor]:
        powers, scale = self._powers(smoother), deviations(smoother)
        sums, errors = self._read("mean", smoother, query, bandwidth, own, powers)
        reached = sums[0, 0] > 0
        total, doubt = torch.where(reached, sums[0, 0], 1.0), errors[0, 0]
        averages = sums / total
        # Where the sum may be 0, a bound is no number, and not used.
        rest = (total - doubt).clamp(min=torch.finfo(total.dtype).tiny).detach()
        errors = (errors[..., None] + averages.detach().abs() * doubt) / rest
        C = len(self.width) if smoother.order else 0
        bounds = Bounds(total.detach(), doubt, *_moments(averages.detach(), errors, C))
        step = self._steps(smoother.coordinate_bandwidth(bandwidth), len(powers))
        found = self._averages(smoother, query, reached, averages * step, scale)
        relative = bounds.of_mean() / (1 + (averages[1:, 0].T.detach()).abs())
        if spread:
            square, square_error = self._read("squares", smoother, query, bandwidth, own, powers[:1])
            square = (square[:, 0] / total).T
            square_error = (square_error.T + square * doubt) / rest[:, None]
            squared, repeated = self._squared(smoother, query, bandwidth, own, powers, total, doubt / rest)
            found = replace(found, squares=square * scale.square(), repeated=(repeated * step[..., 0]))
        estimate = smoother.finish(found)
        if estimate.variance is not None:
            wrong = bounds.of_deviation(square, square_error, squared)
            relative = torch.maximum(relative, wrong / (1 + estimate.variance.nan_to_num(0.0).sqrt() / scale))
        known = bounds.known & reached & self._inside(query) & relative.isfinite().all(1)
        return estimate, torch.where(known, relative.amax(1), torch.inf)

    def _averages(
        self, smoother: Smoother, query: Tensor, reached: Tensor, averages: Tensor, scale: Tensor
    ) -> Averages:
        """Return averages (1 + M, powers, L) about queries, in the coordinates' units, as an estimate has them."""
        C = len(self.width) if smoother.order else 0
        cross = (averages[1:, 1 : 1 + C] * scale[:, None, None]).permute(2, 1, 0).flatten(1)
        moments = torch.cat([averages[0, 1:].T, cross], 1)
        origin = query[:, smoother.features.sloped_coordinates]
        mean = torch.where(reached[:, None], averages[1:, 0].T * scale, 0.0)
        return Averages(query, origin, reached[:, None], mean, moments)

    def _steps(self, width: Tensor, count: int) -> Tensor:
        """Return the units of 1, each coordinate, and each two, of which ``count`` are wanted (count, 1)."""
        first, second = torch.triu_indices(len(width), len(width))
        return torch.cat([torch.ones_like(width[:1]), width, width[first] * width[second]])[:count, None]

    def _inside(self, query: Tensor) -> Tensor:
        """Return which queries lie where the series is right (L,)."""
        series = self._sums["mean"].series
        at = query.numpy() / self.width
        return torch.from_numpy(((at >= series.low - MARGIN) & (at <= series.high + MARGIN)).all(1))

    def _read(
        self,
        kind: str,
        smoother: Smoother,
        query: Tensor,
        bandwidth: Tensor,
        own: Tensor | None,
        powers: Sequence[Power],
    ) -> tuple[Tensor, Tensor]:
        """Return sums (R, powers, L), with u in bandwidths, and the largest error of each (R, powers)."""
        sums, unit = self.transform(smoother, kind), self._unit(kind)
        low, high = sums.series.low - MARGIN, sums.series.high + MARGIN
        at = (query.numpy() / unit).clip(low, high).T  # beyond, what comes is not used
        found: Tensor = _Sums.apply(smoother.coordinate_bandwidth(bandwidth), sums, list(at), tuple(powers))
        if own is not None:
            # The point's own term: K(0) is 1, and u is 0.
            term = torch.from_numpy(np.stack(_columns(kind, smoother, own)))
            found = torch.cat([found[:, :1] - term[:, None], found[:, 1:]], 1)
        return found, torch.from_numpy(sums.errors(powers))

    def _squared(
        self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None, powers: Sequence[Power],
        total: Tensor, doubt: Tensor,
    ) -> tuple[Squared, Tensor]:  # fmt: skip
        """Return sums by squared weights with their errors, in bandwidths, and the sums alone (L, powers)."""
        sums, errors = self._read("repeated", smoother, query, bandwidth, own, powers)
        narrower = torch.tensor([2 ** (-sum(power) / 2) for power in powers]).to(sums)[:, None]
        sums = narrower * sums[0] / total.square()
        # The total may be smaller by a share ``doubt``.
        errors = narrower * errors[0, :, None] / total.square() * (1 + doubt) ** 2
        errors = errors + sums.abs() * ((1 + doubt) ** 2 - 1)
        C = len(self.width) if smoother.order else 0
        level, center, square = (each.T for each in sums.split([1, C, len(powers) - 1 - C]))
        level_error, center_error, square_error = (each.T for each in errors.split([1, C, len(powers) - 1 - C]))
        squared = Squared(
            level[:, 0], level_error[:, 0], center, center_error, symmetric(square, C), symmetric(square_error, C)
        )
        return squared, sums.T


class _Sums(torch.autograd.Function):
    """Moments about queries, with u in bandwidths, differentiable with respect to a bandwidth for each coordinate."""

    @staticmethod
    def forward(
        ctx: Any, width: Tensor, sums: FourierSums, query: list[np.ndarray], powers: tuple[Power, ...]
    ) -> Tensor:
        found = torch.from_numpy(sums.at(query, powers))
        if width.requires_grad:
            ctx.sums, ctx.query, ctx.powers = sums, query, powers
            ctx.save_for_backward(width, found)
        return found

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        (width, found), (slope,) = ctx.saved_tensors, gradient
        total = torch.zeros_like(width)
        for axis in range(len(width)):
            # ∂/∂log h of u^b K(u) is (u² − b) u^b K(u).
            higher = [tuple(b + 2 * (i == axis) for i, b in enumerate(power)) for power in ctx.powers]
            own = torch.tensor([power[axis] for power in ctx.powers]).to(width)[:, None]
            change = torch.from_numpy(ctx.sums.at(ctx.query, higher)) - own * found
            total[axis] = (slope * change).sum() / width[axis]
        return total, None, None, None


def deviations(smoother: Smoother) -> Tensor:
    """Return the standard deviation of each target (M,); 1 where it is 0."""
    weight = smoother.point_weights()
    variance = (weight * smoother.target.square()).sum(0) / weight.sum()
    return torch.where(variance > 0, variance, 1.0).sqrt()


def _columns(kind: str, smoother: Smoother, rows: Tensor | None = None) -> list[np.ndarray]:
    """Return what is summed up: of all points, or of some."""
    weight, target = smoother.point_weights()[:, 0], smoother.target / deviations(smoother)
    if rows is not None:
        weight, target = weight[rows], target[rows]
    if kind == "repeated":
        return [weight.square().numpy()]
    if kind == "squares":
        return [(weight * column.square()).numpy() for column in target.T]
    return [weight.numpy(), *((weight * column).numpy() for column in target.T)]


def _moments(averages: Tensor, errors: Tensor, C: int) -> tuple[Tensor, ...]:
    """Return averages (1 + M, powers, L) and their errors in turn: of y, u, u uᵀ and u yᵀ."""
    parts: list[Tensor] = []
    for name in ("target", "center", "square", "cross"):
        for each in (averages, errors):
            if name == "target":
                parts.append(each[1:, 0].T)
            elif name == "center":
                parts.append(each[0, 1 : 1 + C].T)
            elif name == "square":
                parts.append(symmetric(each[0, 1 + C :].T, C))
            else:
                parts.append(each[1:, 1 : 1 + C].permute(2, 1, 0))
    return tuple(parts)
