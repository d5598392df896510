"""Exact sums over the points near enough to each query, which a tree finds: for few queries, or where few are near.

A point is left out where all of those further away together weigh less than a rounding of what the nearest one weighs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.regression._kernel_smoother import Estimate, Report, Smoother
from regard.regression._pairs import Pairs
from regard.regression._tiles import NOTHING, lightest_and_heaviest

#: Pairs of a query and a point that are held at one time.
HELD = 1 << 21


@dataclass(frozen=True)
class Neighbours:
    """Points in a tree.

    Attributes
    ----------
    tree : scipy.spatial.cKDTree
        Of coordinates in ``unit``.
    unit : ndarray (C,)
        What distances are measured in along each coordinate: all bandwidths are multiples of it.
    """

    tree: Any
    unit: np.ndarray

    @classmethod
    def of(cls, smoother: Smoother, bandwidth: Tensor) -> Neighbours | None:
        """Return the points of a smoother, for multiples of a bandwidth; None where they are too far apart for it."""
        from scipy.spatial import cKDTree

        unit = unit_of(smoother, bandwidth)
        with np.errstate(all="ignore"):
            key = smoother.key.numpy() / unit
            span = np.square(key.max(0) - key.min(0)).sum()
        return cls(cKDTree(key, balanced_tree=False, compact_nodes=False), unit) if np.isfinite(span) else None

    def estimate(
        self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None, report: Report,
        *, spread: bool = False, peak: bool = False,
    ) -> Estimate:  # fmt: skip
        """Return the estimate at queries (L, C), each without its ``own`` point (L,) if that is given.

        Several bandwidths (W, n_features), multiples of one, share the search; what is returned begins with W.
        """
        parts = []
        radii, widths = self._radii(smoother, query, bandwidth, own), max(1, bandwidth.shape[:-1].numel())
        ends = np.cumsum(self.counts(smoother, query, radii)) * (widths + 1) // HELD
        cuts = np.flatnonzero(np.diff(ends)) + 1
        for rows in np.split(np.arange(len(query)), cuts):
            pairs = self._pairs(smoother, query[rows], radii[rows], None if own is None else own[rows])
            parts.append(smoother.estimate(query[rows], bandwidth, pairs, spread=spread, peak=peak))
            report(len(rows), "")
        return Estimate.cat(parts)

    def counts(self, smoother: Smoother, query: Tensor, radii: np.ndarray) -> np.ndarray:
        """Return how many points lie within radii (L,) of queries (L, C)."""
        at, p = query.numpy() / self.unit, _norm(smoother)
        return np.asarray(self.tree.query_ball_point(at, radii, p, return_length=True))

    def _pairs(self, smoother: Smoother, query: Tensor, radii: np.ndarray, own: Tensor | None) -> Pairs:
        """Return the points within radii (L,) of queries, but for their own."""
        lists = self.tree.query_ball_point(query.numpy() / self.unit, radii, _norm(smoother), return_sorted=False)
        counts = torch.tensor([len(each) for each in lists], dtype=torch.int64)
        points = torch.from_numpy(np.concatenate([np.asarray(each, np.int64) for each in lists] or [np.zeros(0, int)]))
        rows = torch.arange(len(query)).repeat_interleave(counts)
        if own is not None:
            others = points != own[rows]
            points, rows = points[others], rows[others]
        return Pairs(rows, points, len(query))

    def _radii(self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None) -> np.ndarray:
        """Return how far points matter (L,), in units, for any of the bandwidths."""
        distance, point = self.tree.query(query.numpy() / self.unit, k=2, p=_norm(smoother))
        nearest = (
            distance[:, 0] if own is None else np.where(point[:, 0] == own.numpy(), distance[:, 1], distance[:, 0])
        )
        lightest, heaviest = lightest_and_heaviest(smoother)
        most = float(heaviest.max() - lightest.min()) - math.log(NOTHING / len(smoother.key))
        widths = np.atleast_2d(smoother.coordinate_bandwidth(bandwidth.detach()).numpy())
        found = np.zeros(len(query))
        for width in (widths / self.unit)[:, 0]:
            found = np.maximum(found, width * _radius(smoother, nearest / width, most))
        return np.where(np.isfinite(nearest), found * (1 + 1e-12), 0.0)  # rounding excludes nothing


def unit_of(smoother: Smoother, bandwidth: Tensor) -> np.ndarray:
    """Return the unit that a bandwidth is a multiple of (C,)."""
    width = smoother.coordinate_bandwidth(bandwidth.detach()).reshape(-1, smoother.key.shape[1])[0].numpy()
    unit: np.ndarray = width / width.max()
    return unit


def _norm(smoother: Smoother) -> float:
    return 1.0 if smoother.kernel.form.manhattan else 2.0


def _radius(smoother: Smoother, nearest: np.ndarray, most: float) -> np.ndarray:
    """Return how many bandwidths away points matter where the nearest is so many away (L,).

    Those further away are ``exp(most)`` times lighter than it, all together.
    """
    if smoother.kernel.form.compact:
        return np.ones_like(nearest)
    found = nearest
    # A line magnifies by the distance to the fourth power.
    for _ in range(16 if smoother.order else 1):
        lost = most + (4 * np.log1p(found) if smoother.order else 0.0)
        found = nearest + lost if smoother.kernel.form.manhattan else np.hypot(nearest, np.sqrt(2 * lost))
    return found
