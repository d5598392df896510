"""Sums of Gaussians at scattered points by a non-uniform Fourier transform forth and back, with a bound on their error.

A Gaussian in units of its bandwidth, repeated along each axis with a period T, is a Fourier series with coefficients
``√(2π)/T exp(−κ²/2)`` at frequencies κ = 2πk/T. So ``Σ_i c_i K(q − x_i)`` is the transform of the points (type 1),
times these coefficients, transformed to the queries (type 2). ``u^b K(u)`` with u = x − q has the same series times a
polynomial in iκ, by ``u^(b+1) K = ∂_q (u^b K) + b u^(b−1) K``: moments about each query cost no further transform of
the points, and nothing cancels. Two real columns are the parts of a complex one.

The error of a sum is at most, with ε what the transform was asked for,

* ``Σ|c| · (4ε + ρ) · Σ_κ |coefficient|`` from type 1, since that of many points is no larger than the sum of theirs,
* ``(4ε₂ + ρ) · Σ_κ |coefficient · transform|`` from type 2, whose ε₂ may be larger since the transform is known here,
* ``Σ|c|`` times the coefficients beyond the last frequency and the kernel of the nearest images,

with ρ = 2⁻⁵² times the number of frequencies along the axes, for rounding. finufft's error at one point, weighed by
the coefficients, was measured as at most ε plus a seventh of ρ; tests/regression/test_fourier_sums.py holds it to this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

#: Coordinates that there may be.
AXES = 3
#: Bandwidths beyond the box of the points within which queries may lie.
MARGIN = 2.0
#: By how much the error may exceed what finufft is asked for, and the least and most that it is asked for.
SAFETY, FINEST, COARSEST = 4.0, 1e-14, 1e-7

#: Exponents of u along each axis.
Power = tuple[int, ...]


def require_finufft() -> None:
    """Raise ModuleNotFoundError where finufft is missing."""
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
        The error that the transforms are asked for.
    """

    low: np.ndarray
    high: np.ndarray
    eps: float

    @cached_property
    def reach(self) -> float:
        """Where the kernel, and its coefficients, may end; a little further than ε, for the moments."""
        return math.sqrt(-2 * math.log(self.eps)) + 0.5

    @cached_property
    def period(self) -> np.ndarray:
        """The period along each axis (C,), in bandwidths."""
        return self.high - self.low + MARGIN + self.reach

    @cached_property
    def size(self) -> float:
        """Number of frequencies; a float, since there may be too many to count."""
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
        """What is held."""
        return sum(each.nbytes for each in self._transforms)

    def at(self, query: Sequence[np.ndarray], powers: Sequence[Power]) -> np.ndarray:
        """Return ``Σ_i c_i u^power K(u)`` with u = x_i − q at queries, of each column and power (R, powers, L)."""
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
        """What the transform back may be asked for, so that it adds no more than the one forth."""
        level = (0,) * len(self.series.low)
        ratios = [
            norm * self.series.total(level) / max(self._size_back(i, level), np.finfo(float).tiny)
            for i, norm in enumerate(self._norms)
        ]
        return float(min(max(self.series.eps, self.series.eps * min(ratios, default=1.0)), COARSEST))

    def _size_back(self, i: int, power: Power) -> float:
        """Return the sum of the sizes of all numbers that are transformed back."""
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
