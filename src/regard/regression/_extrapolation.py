"""Detect extrapolation: queries that lie too far from every training point."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from regard._errors import RegardWarning
from regard.regression._evaluator import FEW_PAIRS, Evaluator
from regard.regression._kernel_smoother import Estimate, Smoother

#: Where training points lie further apart: how many of them have a nearer neighbour, and how much further a query is.
USUAL, FURTHER = 0.95, math.sqrt(2)
#: No bandwidth counts as wider than this share of the one that has its feature's spread.
WIDEST = 1 / 3
#: Training points whose nearest neighbours are looked for.
LOOKED_AT = 512
#: Points among which their neighbours are looked for first.
SOME = 1 << 14
#: Cells that may be held.
CELLS = 1 << 28


class ExtrapolationWarning(RegardWarning):
    """Some of the rows to predict at lie beyond the training data."""


@dataclass(frozen=True)
class DataSupport:
    """The region in which predictions rest on training points.

    A query is beyond reach if the nearest training point lies further than the kernel's radius, in bandwidths: that is
    where the weight is 1 % of that at no distance, or 0 for a kernel that ends there. No bandwidth counts as wider than
    a third of its feature's spread: however wide, nothing is known of where no point lies. And where training points
    themselves lie further apart, as with many features, a query must lie √2 times as far as 95 % of them do from their
    nearest neighbour. A category that no training point has is always beyond.

    Attributes
    ----------
    narrow : ndarray (n_features,)
        The bandwidths that count.
    as_given : bool
        Whether these are all those of the kernel.
    least : float
        Where a query is beyond: minus half the square of a distance, or minus a Manhattan distance.
    """

    narrow: np.ndarray
    as_given: bool
    least: float

    @classmethod
    def of(cls, smoother: Smoother, bandwidth: np.ndarray, spread: np.ndarray, evaluator: Evaluator) -> DataSupport:
        """Return the reach of the training points; ``spread`` (n_features,) is the bandwidth as wide as a feature."""
        kernel = smoother.kernel
        narrow = np.minimum(np.inf if kernel.flat else bandwidth, WIDEST * spread)
        least = -kernel.radius if kernel.form.manhattan else -(kernel.radius**2) / 2
        found = cls(narrow, not kernel.flat and bool((bandwidth <= narrow).all()), least)
        if found._weights_suffice(smoother) or len(smoother.key) < 2:
            return found
        rows = torch.linspace(0, len(smoother.key) - 1, min(LOOKED_AT, len(smoother.key)), dtype=torch.float64).long()
        rows = rows.to(smoother.key.device)
        times = FURTHER if kernel.form.manhattan else FURTHER**2
        unit = torch.from_numpy(narrow).to(smoother.key)
        if len(smoother.key) > SOME + LOOKED_AT:
            # If their nearest neighbours among some of the points are near enough, so are those among all.
            some = torch.linspace(0, len(smoother.key) - 1, SOME + LOOKED_AT, dtype=torch.float64).long()
            some = some.to(rows.device)[~torch.isin(some.to(rows.device), rows)]
            sample = replace(smoother, key=smoother.key[some], target=smoother.target[some], weight=None)
            apart = float(sample.closeness(smoother.key[rows], unit).double().quantile(1 - USUAL))
            if times * apart >= least:
                return found
        apart = float(evaluator.closeness(smoother, smoother.key[rows], unit, rows).double().quantile(1 - USUAL))
        return cls(narrow, found.as_given, min(least, times * apart))

    def extrapolates(self, smoother: Smoother, query: Tensor, found: Estimate, evaluator: Evaluator) -> Tensor:
        """Return whether queries (L, C), of which this much was found, lie beyond it (L,)."""
        nowhere = ~found.reached | smoother.features.unseen(query)
        if self._weights_suffice(smoother):
            return nowhere
        if self.as_given and found.peak is not None:
            return (found.peak < self.least) | nowhere
        narrow = torch.from_numpy(self.narrow).to(query)
        # Few queries lie in a cell that has no point, and these alone are compared with points.
        far = torch.nonzero(~self._shares_cell(smoother, query))[:, 0]
        near = evaluator.closeness(smoother, query[far], narrow) >= self.least
        return nowhere.index_put((far,), ~near | nowhere[far])

    def _weights_suffice(self, smoother: Smoother) -> bool:
        """Return whether it is enough to know which queries have a point of any weight."""
        return self.as_given and smoother.kernel.form.compact

    def _shares_cell(self, smoother: Smoother, query: Tensor) -> Tensor:
        """Return which queries are in a cell with a point, where all are near enough to each other (L,).

        Of many queries and many points alone: none elsewhere.
        """
        C, N = query.shape[1], len(smoother.key)
        if float(len(query)) * N <= FEW_PAIRS:
            return torch.zeros(len(query), dtype=torch.bool, device=query.device)
        narrow = smoother.coordinate_bandwidth(torch.from_numpy(self.narrow).to(query))
        manhattan = smoother.kernel.form.manhattan
        # A little smaller than it may be, so that rounding counts nobody in.
        edge = narrow * ((-self.least / C if manhattan else math.sqrt(-2 * self.least / C)) * (1 - 1e-6))
        low, high = smoother.key.amin(0), smoother.key.amax(0)
        sizes = ((high - low) / edge).double().floor() + 1
        if not float(sizes.prod()) <= CELLS:
            return torch.zeros(len(query), dtype=torch.bool, device=query.device)
        step = torch.cat([sizes[1:].flip(0).cumprod(0).flip(0), torch.ones_like(sizes[:1])]).long()
        taken = torch.zeros(int(sizes.prod()), dtype=torch.bool, device=query.device)
        taken[self._cells(smoother.key, low, edge, step)] = True
        inside = ((query >= low) & (query <= high)).all(1)
        return inside & taken[self._cells(torch.minimum(torch.maximum(query, low), high), low, edge, step)]

    @staticmethod
    def _cells(points: Tensor, low: Tensor, edge: Tensor, step: Tensor) -> Tensor:
        """Return the cell of each point (N,)."""
        found = torch.zeros(len(points), dtype=torch.long, device=points.device)
        for axis in range(points.shape[1]):
            found += ((points[:, axis] - low[axis]) / edge[axis]).long() * step[axis]
        return found
