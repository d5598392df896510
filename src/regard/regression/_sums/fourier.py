"""Sums of Gaussians by non-uniform Fourier transforms, with bounds on their errors.

Coordinates are in bandwidths relative to each query, and targets in units of their standard deviation. Bounds are twice
the sum of first-order terms and their products, which covers higher orders while relative errors stay below 1/8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.regression._sums.smoother import Averages, Estimate, Smoother, column_range, symmetric

# Propagate errors of sums to errors of an estimate --------------------------------------------------------------------


#: The largest relative error for which bounds hold, and the least spread, relative to the largest, to fit a slope.
SMALL, STEEP = 1 / 8, 1e-8
#: The least degrees of freedom, as a share, for which a standard deviation has a bound.
LEAST_FREEDOM = 1e-6


@dataclass(frozen=True)
class Bounds:
    """Averages at L queries with bounds on their errors.

    Attributes
    ----------
    total : Tensor (L,)
        The sum of weights.
    error : Tensor ()
        The bound on its error.
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
        """Whether the bounds hold for a query (L,)."""
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
        """The effect of covariance errors on the equations of the slopes (L, C, M)."""
        return self._cross_error + self._covariance_error @ self._slope.abs()

    def of_mean(self) -> Tensor:
        """Return the error bound of the prediction (L, M)."""
        lever = (self._inverse @ self.center[..., None]).abs() + self._inverse.abs() @ self.center_error[..., None]
        first = self.target_error + (self.center_error[..., None] * self._slope.abs()).sum(1)
        return 2 * (first + (lever * self._push).sum(1))

    def of_deviation(self, square: Tensor, square_error: Tensor, repeated: Squared) -> Tensor:
        """Return the error bound of the standard deviation (L, M), infinite where there is none.

        The arguments are averages of y² (L, M), their errors, and sums with squared weights.
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

    def of_noise(self, by: Squared) -> Tensor:
        """Return the error bound of the sum of squared effective weights (L,)."""
        if not self.center.shape[1]:
            return 2 * by.level_error
        away, away_error, g = self._away, self._away_error, self.center[..., None]
        about, about_error = self._about(by)
        first = (by.center - by.level[:, None] * self.center)[..., None]
        first_error = by.center_error + by.level_error[:, None] * g[..., 0].abs()
        first_error = (first_error + by.level[:, None] * self.center_error)[..., None]
        slope = 2 * (first.abs() + (about @ away).abs())
        error = by.level_error + (2 * away.abs() * first_error + slope * away_error).sum((1, 2))
        return 2 * (error + (away.abs() * (about_error @ away.abs())).sum((1, 2)))

    def of_leverage(self) -> Tensor:
        """Return the error bound of the leverage of a point at the query, relative to it (L,)."""
        wrong, away = self.error / self.total, self._away.abs()
        if self.center.shape[1]:
            error = (2 * away * self.center_error[..., None] + away * (self._covariance_error @ away)).sum((1, 2))
            wrong = wrong + error / (1 + (self._away[..., 0] * self.center).sum(1))
        return 2 * wrong

    @cached_property
    def _away(self) -> Tensor:
        """The mean of the points relative to the query, times the inverse of their covariance (L, C, 1)."""
        return self._inverse @ self.center[..., None]

    @cached_property
    def _away_error(self) -> Tensor:
        return self._inverse.abs() @ (self.center_error[..., None] + self._covariance_error @ self._away.abs())

    def _freedom(self, by: Squared) -> tuple[Tensor, Tensor]:
        """Return the degrees of freedom as a share (L,), and their error bound."""
        if not self.center.shape[1]:
            return 1 - by.level, 2 * by.level_error
        inverse, (about, error) = self._inverse, self._about(by)
        trace_error = (inverse.abs() * error).sum((1, 2))
        trace_error = trace_error + ((inverse @ about @ inverse).abs() * self._covariance_error).sum((1, 2))
        return 1 - by.level - (inverse * about).sum((1, 2)), 2 * (by.level_error + trace_error)

    def _about(self, by: Squared) -> tuple[Tensor, Tensor]:
        """Return the sum of u uᵀ about the mean with squared weights (L, C, C), and its error bound."""
        g, d = self.center, self.center_error
        cross = _outer(by.center, g)
        cross_error = _outer(by.center.abs(), d) + _outer(by.center_error, g.abs())
        level, level_error = by.level[:, None, None], by.level_error[:, None, None]
        about = by.square - cross - cross.mT + level * _outer(g, g)
        error = by.square_error + cross_error + cross_error.mT
        return about, error + level_error * _outer(g.abs(), g.abs()) + 2 * level * _outer(g.abs(), d)


@dataclass(frozen=True)
class Squared:
    """Sums of 1 (L,), u (L, C) and u uᵀ (L, C, C) with squared weights, with their errors; the weights sum to 1."""

    level: Tensor
    level_error: Tensor
    center: Tensor
    center_error: Tensor
    square: Tensor
    square_error: Tensor


def _outer(one: Tensor, other: Tensor) -> Tensor:
    return one.unsqueeze(-1) * other.unsqueeze(-2)


# Sums of Gaussians at scattered points by a non-uniform Fourier transform forth and back, with a bound on their error
# A Gaussian in units of its bandwidth, repeated along each axis with a period T, is a Fourier series with coefficients
# ``√(2π)/T exp(−κ²/2)`` at frequencies κ = 2πk/T. So ``Σ_i c_i K(q − x_i)`` is the transform of the points (type 1),
# times these coefficients, transformed to the queries (type 2). ``u^b K(u)`` with u = x − q has the same series times a
# polynomial in iκ, by ``u^(b+1) K = ∂_q (u^b K) + b u^(b−1) K``: moments about each query cost no further transform of
# the points, and nothing cancels. Two real columns are the parts of a complex one.
#
# With ε the requested error of the transform, the error of a sum is at most the sum of
#
# * ``Σ|c| · (4ε + ρ) · Σ_κ |coefficient|`` from type 1, since that of many points is no larger than the sum of theirs,
# * ``(4ε₂ + ρ) · Σ_κ |coefficient · transform|`` from type 2, whose ε₂ may be larger since the transform is known here,
# * ``Σ|c|`` times the coefficients beyond the last frequency and the kernel of the nearest images,
#
# with ρ = 2⁻⁵² times the number of frequencies along the axes, for rounding. finufft's error at one point, weighed by
# the coefficients, was measured as at most ε plus a seventh of ρ; tests/regard/regression/test_fourier_sums.py
# checks this.


#: The most coordinates.
AXES = 3
#: How far queries may lie outside the bounding box of the points, in bandwidths.
MARGIN = 2.0
#: The factor by which finufft may exceed the requested error, and the least and largest error to request.
SAFETY, FINEST, COARSEST = 4.0, 1e-14, 1e-7

#: Exponents of u along each axis.
Power = tuple[int, ...]


def require_finufft() -> None:
    """Raise ModuleNotFoundError if finufft is missing."""
    if not has_finufft():
        raise ModuleNotFoundError(
            "method='nufft' needs finufft, which is missing: pip install 'regard[nufft]'", name="finufft"
        )


def has_finufft() -> bool:
    """Return whether finufft is installed."""
    return find_spec("finufft") is not None


@dataclass(frozen=True)
class Series:
    """The Fourier series of the Gaussian on a box.

    Attributes
    ----------
    low, high : ndarray (C,)
        The box of the points, in bandwidths.
    eps : float
        The requested error of the transforms.
    """

    low: np.ndarray
    high: np.ndarray
    eps: float

    @cached_property
    def reach(self) -> float:
        """Where to truncate the kernel and its coefficients; slightly beyond ε, for the moments."""
        return math.sqrt(-2 * math.log(self.eps)) + 0.5

    @cached_property
    def period(self) -> np.ndarray:
        """The period along each axis (C,), in bandwidths."""
        return self.high - self.low + MARGIN + self.reach

    @cached_property
    def size(self) -> float:
        """The number of frequencies, as a float to avoid overflow."""
        return float(np.prod(2.0 * np.ceil(self.reach * self.period / (2 * math.pi)) + 1))

    @cached_property
    def modes(self) -> tuple[int, ...]:
        """The number of frequencies along each axis."""
        return tuple(2 * math.ceil(self.reach * period / (2 * math.pi)) + 1 for period in self.period.tolist())

    @property
    def bytes(self) -> float:
        """Memory of one transform's grids: frequencies, and twice as many places along each axis."""
        return 16 * self.size * (1 + 2.2 ** len(self.low))

    @property
    def rounding(self) -> float:
        """What rounding of coordinates adds to ε."""
        return float(np.finfo(np.float64).eps) * sum(self.modes)

    def angles(self, points: np.ndarray, axis: int) -> np.ndarray:
        """Return coordinates along an axis, in bandwidths, as angles."""
        middle = (self.high[axis] + self.low[axis]) / 2
        return np.ascontiguousarray((points - middle) * (2 * math.pi / self.period[axis]))

    def coefficients(self, axis: int, power: int) -> np.ndarray:
        """Return the coefficients of ``u^power K(u)`` along an axis (n,)."""
        n = self.modes[axis]
        return self._coefficients(axis, power, np.arange(-(n // 2), n // 2 + 1))

    def _coefficients(self, axis: int, power: int, k: np.ndarray) -> np.ndarray:
        frequency = k * (2 * math.pi / self.period[axis])
        before, now = np.zeros(len(k), complex), np.ones(len(k), complex)
        for b in range(power):
            before, now = now, 1j * frequency * now + b * before
        return now * (math.sqrt(2 * math.pi) / self.period[axis] * np.exp(-0.5 * frequency**2))

    def total(self, power: Power) -> float:
        """Return the sum of the sizes of all coefficients."""
        return float(np.prod([np.abs(self.coefficients(axis, b)).sum() for axis, b in enumerate(power)]))

    def cut(self, power: Power) -> float:
        """Return how far the series is from ``u^power K(u)`` at most: what is cut from it, and the nearest images."""
        tops, errors = [], []
        for axis, b in enumerate(power):
            last = self.modes[axis] // 2
            further = np.arange(last + 1, last + 2 + math.ceil(8 * self.period[axis] / (2 * math.pi)))
            beyond = 2 * np.abs(self._coefficients(axis, b, further)).sum()
            images = self.reach + self.period[axis] * np.arange(3)
            errors.append(beyond + 2 * (images**b * np.exp(-0.5 * images**2)).sum())
            tops.append(max(1.0, (b / math.e) ** (b / 2)) + errors[-1])
        return float(sum(error * np.prod(tops[:i] + tops[i + 1 :]) for i, error in enumerate(errors)))


class FourierSums:
    """Weighted sums of Gaussians about points that are transformed once.

    Parameters
    ----------
    series : Series
    points : sequence of C ndarrays (N,)
        Coordinates in bandwidths.
    columns : ndarray (R, N)
        Real weights.
    """

    def __init__(self, series: Series, points: Sequence[np.ndarray], columns: Sequence[np.ndarray]) -> None:
        self.series, self.count = series, len(columns)
        plan = _plan(1, series, series.eps)
        plan.setpts(*(series.angles(each, axis) for axis, each in enumerate(points)))
        transforms, norms = [], []
        for first in range(0, len(columns), 2):
            pair = columns[first : first + 2]
            strengths = np.empty(len(pair[0]), complex)
            strengths.real, strengths.imag = pair[0], pair[1] if len(pair) > 1 else 0.0
            norms.append(float(np.abs(strengths).sum()))
            transforms.append(plan.execute(strengths))
        self._transforms, self._norms = transforms, norms

    @property
    def bytes(self) -> int:
        """The memory of the transforms."""
        return sum(each.nbytes for each in self._transforms)

    def at(self, query: Sequence[np.ndarray], powers: Sequence[Power]) -> np.ndarray:
        """Return ``Σ_i c_i u^power K(u)`` with u = x_i − q at queries, for each column and power (R, powers, L)."""
        plan = _plan(2, self.series, self._eps_back)
        plan.setpts(*(self.series.angles(each, axis) for axis, each in enumerate(query)))
        found = np.empty((2 * len(self._transforms), len(powers), len(query[0])))
        for p, power in enumerate(powers):
            for i, transform in enumerate(self._transforms):
                grid = transform
                for axis, b in enumerate(power):
                    shape = [-1 if other == axis else 1 for other in range(len(power))]
                    grid = grid * self.series.coefficients(axis, b).reshape(shape)
                sums = plan.execute(grid)
                found[2 * i, p], found[2 * i + 1, p] = sums.real, sums.imag
        return found[: self.count]

    def errors(self, powers: Sequence[Power]) -> np.ndarray:
        """Return the largest error of these sums (R, powers)."""
        series = self.series
        found = np.empty((2 * len(self._transforms), len(powers)))
        for p, power in enumerate(powers):
            forth = (SAFETY * series.eps + series.rounding) * series.total(power) + series.cut(power)
            for i, norm in enumerate(self._norms):
                back = (SAFETY * self._eps_back + series.rounding) * self._size_back(i, power)
                found[2 * i : 2 * i + 2, p] = norm * forth + back
        return found[: self.count]

    @cached_property
    def _eps_back(self) -> float:
        """The error to request for the inverse transform, so that it adds no more than the forward one."""
        level = (0,) * len(self.series.low)
        ratios = [
            norm * self.series.total(level) / max(self._size_back(i, level), np.finfo(float).tiny)
            for i, norm in enumerate(self._norms)
        ]
        return float(min(max(self.series.eps, self.series.eps * min(ratios, default=1.0)), COARSEST))

    def _size_back(self, i: int, power: Power) -> float:
        """Return the sum of the absolute values of the inverse transform's input."""
        sizes = np.abs(self._transforms[i])
        for axis in reversed(range(len(power))):
            sizes = sizes @ np.abs(self.series.coefficients(axis, power[axis]))
        return float(sizes)


def _plan(kind: int, series: Series, eps: float) -> Any:
    import finufft

    return finufft.Plan(
        kind, series.modes, eps=eps, isign=-1 if kind == 1 else 1, nthreads=torch.get_num_threads(), dtype="complex128",
        showwarn=0,
    )  # fmt: skip


# Estimates from sums by Fourier transforms, each with a bound on its error --------------------------------------------
# Errors are in units of ``|ŷ − ȳ| + σ`` of each target, with the mean ȳ and the standard deviation σ of all targets.
# The error of a sum is absolute: if the total weight is small, a ratio of sums is meaningless and has no finite bound.


#: The most numbers held at once for a block of queries.
HELD = 1 << 25


@dataclass
class TransformedPoints:
    """Points transformed for one bandwidth.

    Attributes
    ----------
    width : ndarray (C,)
        A bandwidth for each coordinate.
    eps : float
        The requested error of the transforms.
    """

    width: np.ndarray
    eps: float
    _sums: dict[str, FourierSums] = field(default_factory=dict)
    _tilted: dict[bytes, TiltedPoints] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The memory of all transforms."""
        tilted = sum(each.transformed.bytes for each in self._tilted.values())
        return tilted + sum(each.bytes for each in self._sums.values())

    def tilted(
        self, smoother: Smoother, query: Tensor, bandwidth: Tensor, spread: bool, rtol: float
    ) -> Iterator[tuple[Tensor, Estimate, Tensor]]:
        """Yield rows of queries (L, C) beyond the bounding box of the points, their estimates, and error bounds.

        For a shift v in bandwidths, ``K(q − x) = c(q) exp(v·x) K(q − v − x)``: the mean at q is the mean at q − v of
        points with weights ``w exp(v·x)`` (exponential tilting; Daniels 1954, "Saddlepoint approximations in
        statistics"). With v from the box to the query, sums there are not small beside those weights, so that a bound
        holds. Queries of which fewer than :data:`TOGETHER` share a shift are left, and those of a line.
        """
        at, unit = query.numpy() / self.width, torch.from_numpy(self.width)
        low, high = (each.numpy() / self.width for each in column_range(smoother.key))
        away = at - at.clip(low, high)
        steps = np.sign(away) * np.floor(
            np.abs(away) / SHIFT + 0.75
        )  # where a series holds, rather inside than outside
        shifts, place, counts = np.unique(steps, axis=0, return_inverse=True, return_counts=True)
        chosen = np.flatnonzero((counts >= TOGETHER) & (np.abs(shifts).max(1) > 0))
        if any(shifts[i].tobytes() not in self._tilted for i in chosen):
            tilt = Tilt.of(smoother, self.width, low, high, rtol)
        for i in chosen:
            rows, shift, name = np.flatnonzero(place.ravel() == i), SHIFT * shifts[i], shifts[i].tobytes()
            if name not in self._tilted:
                self._tilted[name] = tilt.points(shift)
            there = query[rows] - torch.from_numpy(shift) * unit
            found, bound = self._tilted[name].estimate(there, bandwidth, spread)
            yield torch.from_numpy(rows), found, bound

    def transform(self, smoother: Smoother, kind: str = "mean") -> FourierSums:
        """Return sums of a kind: of weights and targets, of squares of targets, or of squared weights."""
        if kind not in self._sums:
            unit, key = self._unit(kind), smoother.key.numpy()
            low, high = (each.numpy() / unit for each in column_range(smoother.key))
            series = Series(low, high, self.eps)
            points = [key[:, axis] / unit[axis] for axis in range(len(unit))]
            self._sums[kind] = FourierSums(series, points, _columns(kind, smoother))
        return self._sums[kind]

    def _unit(self, kind: str) -> np.ndarray:
        """Return the bandwidth for a kind of sums: the square of a Gaussian is a narrower Gaussian."""
        return self.width / math.sqrt(2) if kind == "repeated" else self.width

    def estimate(
        self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None = None, spread: bool = False,
        leverage: bool = False,
    ) -> tuple[Estimate, Tensor]:  # fmt: skip
        """Return the estimate at queries (L, C), each without its ``own`` point (L,), and a bound on its error (L,).

        The estimate is differentiable with respect to the bandwidth. The bound is infinite where the method fails.
        """
        size = max(1, HELD // (len(self._powers(smoother)) * (1 + smoother.target.shape[1])))
        parts = [
            self._estimate(smoother, query[rows], bandwidth, None if own is None else own[rows], spread, leverage)
            for rows in torch.arange(len(query)).split(size)
        ]
        return Estimate.cat([part for part, _ in parts]), torch.cat([bound for _, bound in parts])

    def _powers(self, smoother: Smoother) -> list[Power]:
        """Return the exponents of u to sum: 0, and with a line those of each coordinate and of each product of two."""
        C = len(self.width) if smoother.order else 0
        axes = np.eye(len(self.width), dtype=int)
        first, second = np.triu_indices(C)
        return [tuple(row.tolist()) for row in (0 * axes[0], *axes[:C], *(axes[first] + axes[second]))]

    def _estimate(
        self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None, spread: bool, leverage: bool
    ) -> tuple[Estimate, Tensor]:
        powers, scale = self._powers(smoother), smoother.deviations
        sums, errors = self._read("mean", smoother, query, bandwidth, own, powers)
        reached = sums[0, 0] > 0
        total, doubt = torch.where(reached, sums[0, 0], 1.0), errors[0, 0]
        averages = sums / total
        # If the sum may be 0, the bound is not finite and not used.
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
        if leverage:
            found = replace(found, own=torch.where(reached, 1 / total, 0.0))
            relative = torch.maximum(relative, bounds.of_leverage()[:, None])
        estimate = smoother.finish(found)
        if estimate.variance is not None and estimate.noise is not None:
            wrong = bounds.of_deviation(square, square_error, squared)
            wrong = wrong / (1 + estimate.variance.nan_to_num(0.0).sqrt() / scale)
            noise = estimate.noise.clamp(min=torch.finfo(total.dtype).tiny)
            relative = torch.maximum(relative, wrong + (bounds.of_noise(squared) / noise / 2)[:, None])
        known = bounds.known & reached & self._inside(query) & relative.isfinite().all(1)
        return estimate, torch.where(known, relative.amax(1), torch.inf)

    def _averages(
        self, smoother: Smoother, query: Tensor, reached: Tensor, averages: Tensor, scale: Tensor
    ) -> Averages:
        """Convert averages (1 + M, powers, L) about queries, in the coordinates' units, to :class:`Averages`."""
        C = len(self.width) if smoother.order else 0
        cross = (averages[1:, 1 : 1 + C] * scale[:, None, None]).permute(2, 1, 0).flatten(1)
        moments = torch.cat([averages[0, 1:].T, cross], 1)
        origin = query[:, smoother.features.sloped_coordinates]
        mean = torch.where(reached[:, None], averages[1:, 0].T * scale, 0.0)
        return Averages(query, origin, reached[:, None], mean, moments)

    def _steps(self, width: Tensor, count: int) -> Tensor:
        """Return the first ``count`` units of 1, of each coordinate, and of each product of two (count, 1)."""
        first, second = torch.triu_indices(len(width), len(width))
        return torch.cat([torch.ones_like(width[:1]), width, width[first] * width[second]])[:count, None]

    def _inside(self, query: Tensor) -> Tensor:
        """Return which queries lie where the series is valid (L,)."""
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
        at = (query.numpy() / unit).clip(low, high).T  # results outside are not used
        found: Tensor = _Sums.apply(smoother.coordinate_bandwidth(bandwidth), sums, list(at), tuple(powers))
        if own is not None:
            # Subtract the point's own term: K(0) = 1 and u = 0.
            term = torch.from_numpy(np.stack(_columns(kind, smoother, own)))
            found = torch.cat([found[:, :1] - term[:, None], found[:, 1:]], 1)
        return found, torch.from_numpy(sums.errors(powers))

    def _squared(
        self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None, powers: Sequence[Power],
        total: Tensor, doubt: Tensor,
    ) -> tuple[Squared, Tensor]:  # fmt: skip
        """Return sums with squared weights and their errors, in bandwidths, and the sums alone (L, powers)."""
        sums, errors = self._read("repeated", smoother, query, bandwidth, own, powers)
        narrower = torch.tensor([2 ** (-sum(power) / 2) for power in powers], dtype=sums.dtype)[:, None]
        sums = narrower * sums[0] / total.square()
        # The total may be smaller by a relative error ``doubt``.
        errors = narrower * errors[0, :, None] / total.square() * (1 + doubt) ** 2
        errors = errors + sums.abs() * ((1 + doubt) ** 2 - 1)
        C = len(self.width) if smoother.order else 0
        level, center, square = (each.T for each in sums.split([1, C, len(powers) - 1 - C]))
        level_error, center_error, square_error = (each.T for each in errors.split([1, C, len(powers) - 1 - C]))
        squared = Squared(
            level[:, 0], level_error[:, 0], center, center_error, symmetric(square, C), symmetric(square_error, C)
        )
        return squared, sums.T


#: Shifts are multiples of this many bandwidths. The fewest queries that share one: making it takes as long as a few of
#: them by all pairs.
SHIFT, TOGETHER = 4.0, 64
#: The error to request of transforms of tilted points, as a share of rtol.
TILTED = 1e-5


@dataclass
class TiltedPoints:
    """Points with weights that grow exponentially towards one side of their bounding box, transformed.

    Attributes
    ----------
    smoother : Smoother
        The points with these weights, without those too light to matter.
    transformed : TransformedPoints
    looser : float
        The deviation of the targets by these weights, in terms of that by the points' own weights; at least 1.
    rounding : float
        What the rounding of exponents adds to errors.
    """

    smoother: Smoother
    transformed: TransformedPoints
    looser: float
    rounding: float

    def estimate(self, query: Tensor, bandwidth: Tensor, spread: bool) -> tuple[Estimate, Tensor]:
        """Return the estimate at shifted queries (L, C), and a bound on its error beside ``|ŷ − ȳ| + σ`` (L,)."""
        self.transformed.transform(self.smoother)
        found, bound = self.transformed.estimate(self.smoother, query, bandwidth, None, spread)
        return found, 2 * self.looser * bound + self.rounding


#: Points this much lighter than needed, as a logarithm, are looked at too, as the heaviest point may be lighter than 1.
LIGHTER = 3.0


@dataclass
class Tilt:
    """What the tilted points of several shifts have in common.

    Attributes
    ----------
    smoother : Smoother
    width : ndarray (C,)
        The bandwidth of each coordinate.
    columns : list of C Tensors (N,)
        Coordinates in bandwidths.
    low, high : ndarray (C,)
        The bounding box, in bandwidths.
    scale : Tensor (M,)
        The deviations of the targets.
    eps, least : float
        The error to request of transforms. The logarithm of a weight, beside the largest, so small that all points
        together would weigh less than a transform's error, in each sum.
    near : dict
        By axis and side of the box, the points that may count where weights grow towards it.
    """

    smoother: Smoother
    width: np.ndarray
    columns: list[Tensor]
    low: np.ndarray
    high: np.ndarray
    scale: Tensor
    eps: float
    least: float
    near: dict[tuple[int, bool], Tensor]

    @classmethod
    def of(cls, smoother: Smoother, width: np.ndarray, low: np.ndarray, high: np.ndarray, rtol: float) -> Tilt:
        """Return what is needed to tilt the points of a smoother."""
        columns = [smoother.key[:, axis] / each for axis, each in enumerate(width.tolist())]
        scale, eps = smoother.deviations, max(10.0 ** math.floor(math.log10(rtol * TILTED)), FINEST)
        size = (1 + float((torch.stack([column.abs().max() for column in smoother.target.T]) / scale).max())) ** 2
        return cls(smoother, width, columns, low, high, scale, eps, math.log(eps / size / 2 / len(smoother.key)), {})

    def points(self, shift: np.ndarray) -> TiltedPoints:
        """Return points with weights ``w exp(v·(x − corner))`` for a shift v in bandwidths.

        The corner of the box is the furthest along the shift.
        """
        axes, corner = np.flatnonzero(shift).tolist(), np.where(shift > 0, self.high, self.low)
        some = min((self._near(axis, bool(shift[axis] > 0)) for axis in axes), key=len)
        logs = self._logs(some, shift, corner)
        heaviest = float(logs.max()) if len(some) else -math.inf
        if heaviest < -LIGHTER:
            some = torch.arange(len(self.smoother.key))
            logs = self._logs(some, shift, corner)
            heaviest = float(logs.max())
        logs -= heaviest
        # Leave out as many of the lightest points as weigh less together than a transform's error.
        powers = np.bincount((-logs).clamp(max=-self.least).to(torch.int64).numpy())
        left = np.append(np.cumsum((powers * np.exp(-np.arange(len(powers), dtype=float)))[::-1])[::-1], 0.0)
        spared = math.exp(self.least) * len(self.smoother.key) * float(logs.exp().sum())
        first = int(np.argmax(left <= spared))  # the lightest powers of e, from this one on, are left out
        kept = logs > -first
        some, logs = some[kept], logs[kept]
        tilted = replace(
            self.smoother, key=self.smoother.key[some], target=self.smoother.target[some], weight=logs.exp()
        )
        rounding = 4 * float(np.finfo(np.float64).eps) * (1 - float(logs.min()))
        looser = float((tilted.deviations / self.scale).clamp(min=1.0).max())
        return TiltedPoints(tilted, TransformedPoints(self.width, self.eps), looser, rounding)

    def _near(self, axis: int, above: bool) -> Tensor:
        """Return the points that may weigh enough by this coordinate alone: all other factors are at most 1."""
        if (axis, above) not in self.near:
            reach, column = (LIGHTER - self.least) / SHIFT, self.columns[axis]
            close = column >= self.high[axis] - reach if above else column <= self.low[axis] + reach
            self.near[axis, above] = torch.nonzero(close)[:, 0]
        return self.near[axis, above]

    def _logs(self, some: Tensor, shift: np.ndarray, corner: np.ndarray) -> Tensor:
        """Return the logarithms of weights, at most 0."""
        weight = self.smoother.weight
        logs = torch.zeros(len(some), dtype=torch.float64) if weight is None else weight[some].log()
        for axis in np.flatnonzero(shift).tolist():
            logs = logs.add_(self.columns[axis][some] - corner[axis], alpha=shift[axis])
        return logs


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


def _columns(kind: str, smoother: Smoother, rows: Tensor | None = None) -> list[np.ndarray]:
    """Return the terms to sum, for all points or some."""
    weight, target = smoother.point_weights()[:, 0], smoother.target / smoother.deviations
    if kind == "repeated":
        squared = smoother.squared_weights()[:, 0]
        return [(squared if rows is None else squared[rows]).numpy()]
    if rows is not None:
        weight, target = weight[rows], target[rows]
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
