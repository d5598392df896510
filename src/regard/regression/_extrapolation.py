"""Detect extrapolation: queries that lie too far from every training point."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard import masks
from regard._errors import RegardWarning
from regard.regression._kernel_smoother import Estimate, Smoother

#: Where training points lie further apart: how many of them have a nearer neighbour, and how much further a query is.
USUAL, FURTHER = 0.95, math.sqrt(2)
#: No bandwidth counts as wider than this share of the one that has its feature's spread.
WIDEST = 1 / 3
#: Training points whose nearest neighbours are looked for.
LOOKED_AT = 512


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
    def of(cls, smoother: Smoother, bandwidth: np.ndarray, spread: np.ndarray) -> DataSupport:
        """Return the reach of the training points; ``spread`` (n_features,) is the bandwidth as wide as a feature."""
        kernel = smoother.kernel
        narrow = np.minimum(np.inf if kernel.flat else bandwidth, WIDEST * spread)
        least = -kernel.radius if kernel.form.manhattan else -(kernel.radius**2) / 2
        found = cls(narrow, not kernel.flat and bool((bandwidth <= narrow).all()), least)
        if found._weights_suffice(smoother) or len(smoother.key) < 2:
            return found
        rows = torch.linspace(0, len(smoother.key) - 1, min(LOOKED_AT, len(smoother.key)), dtype=torch.float64).long()
        rows = rows.to(smoother.key.device)
        apart = float(found._closeness(smoother, smoother.key[rows], rows).double().quantile(1 - USUAL))
        times = FURTHER if kernel.form.manhattan else FURTHER**2
        return cls(narrow, found.as_given, min(least, times * apart))

    def extrapolates(self, smoother: Smoother, query: Tensor, found: Estimate) -> Tensor:
        """Return whether queries (L, C), of which this much was found, lie beyond it (L,)."""
        nowhere = ~found.reached | smoother.features.unseen(query)
        if self._weights_suffice(smoother):
            return nowhere
        closeness = found.peak if self.as_given else None
        if closeness is None:
            closeness = self._closeness(smoother, query)
        return (closeness < self.least) | nowhere

    def _weights_suffice(self, smoother: Smoother) -> bool:
        """Return whether it is enough to know which queries have a point of any weight."""
        return self.as_given and smoother.kernel.form.compact

    def _closeness(self, smoother: Smoother, query: Tensor, own: Tensor | None = None) -> Tensor:
        """Return how near the nearest point is, but for each query's ``own`` (L,), in the unit of ``least``."""
        narrow = torch.from_numpy(self.narrow).to(query)
        parts = [query.new_zeros(0)]
        for rows in torch.arange(len(query), device=query.device).split(smoother.rows_at_once):
            parts.append(
                smoother.closeness(query[rows], narrow, None if own is None else masks.leave_one_out(own[rows]))
            )
        return torch.cat(parts)
