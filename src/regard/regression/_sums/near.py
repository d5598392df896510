"""Exact sums over nearby training points, found by tiles or by a tree.

A tile is skipped if the total weight of its points is below a rounding error of the other tiles' weight, by bounds on
the distances to its bounding box. In float64 the sums therefore equal those over all points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard import masks
from regard.engines.fused.morton import morton_order
from regard.regression._sums.smoother import Estimate, Pairs, Report, Smoother

# Exact sums by tiles of points along a space-filling curve, skipping far tiles ----------------------------------------


#: The points of a tile, the most queries of a group, and the queries for which a group costs as much at least.
TILE, TOGETHER, BLOCK = 256, 128, 64
#: Queries of a group lie within this many bandwidths along each axis; selecting tiles costs as much as this many pairs.
NEAR, LOOK_PAIRS = 2.0, 1_000_000
#: The largest share of the weight to skip: far below rounding, because a local line magnifies it.
NOTHING = 2.0**-60


@dataclass(frozen=True)
class Tiles:
    """Points along a curve, in tiles of neighbours.

    Attributes
    ----------
    order : Tensor (N,)
        The points' rows, tile after tile.
    low, high : ndarray (tiles, C)
        The box around each tile.
    """

    order: Tensor
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, key: Tensor) -> Tiles:
        """Return the tiles of points (N, C)."""
        order = morton_order(key[None, None], key[None, None])[1][0, 0]
        rows = key[order].numpy()
        starts = np.arange(0, len(rows), TILE)
        return cls(order, np.minimum.reduceat(rows, starts), np.maximum.reduceat(rows, starts))

    @cached_property
    def places(self) -> Tensor:
        """The position of each row along the curve (N,)."""
        places = torch.empty_like(self.order)
        places[self.order] = torch.arange(len(self.order))
        return places

    @cached_property
    def extent(self) -> np.ndarray:
        """The median size of a tile along each axis (C,)."""
        return np.median(self.high - self.low, axis=0)

    def estimate(
        self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None, report: Report,
        *, spread: bool = False, peak: bool = False,
    ) -> Estimate:  # fmt: skip
        """Return the estimate at queries (L, C), each without its ``own`` point (L,) if given.

        Several bandwidths (W, n_features), which must be multiples of one, share the selection of tiles; results then
        have a leading dimension W.
        """
        parts, rows = [], []
        ordered = _at(smoother, self.order)  # contiguous tiles are faster to read
        for some, seen in self._selections(smoother, query, bandwidth):
            mask = None
            if own is not None:
                mask = masks.leave_one_out(_place_among(self.places[own[some]], seen))
            parts.append(_at(ordered, seen).estimate(query[some], bandwidth, mask, spread=spread, peak=peak))
            rows.append(some)
            report(len(some), "")
        if not parts:
            return smoother.estimate(query, bandwidth, spread=spread, peak=peak)
        return Estimate.cat(parts).at(torch.cat(rows).argsort())

    def closeness(self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None) -> Tensor:
        """Return the same as :meth:`Smoother.closeness` (L,), from the tiles that may contain the nearest point."""
        found = query.new_zeros(len(query))
        ordered = _at(smoother, self.order)  # contiguous tiles are faster to read
        for some, seen in self._selections(smoother, query, bandwidth, nearest=True):
            mask = None if own is None else masks.leave_one_out(_place_among(self.places[own[some]], seen))
            found[some] = _at(ordered, seen).closeness(query[some], bandwidth, mask)
        return found

    def nearest(self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None) -> Tensor:
        """Return the same as :meth:`Smoother.nearest` (L,), from the tiles that may contain the nearest point."""
        found = torch.full((len(query),), -1, dtype=torch.long)
        ordered = _at(smoother, self.order)  # contiguous tiles are faster to read
        for some, seen in self._selections(smoother, query, bandwidth, nearest=True):
            mask = None if own is None else masks.leave_one_out(_place_among(self.places[own[some]], seen))
            place = _at(ordered, seen).nearest(query[some], bandwidth, mask)
            found[some] = torch.where(place < 0, -1, self.order[seen][place.clamp(min=0)])
        return found

    def _selections(
        self, smoother: Smoother, query: Tensor, bandwidth: Tensor, nearest: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield groups of nearby queries (l,), and the positions of all points that they need (n,)."""
        widths = np.atleast_2d(smoother.coordinate_bandwidth(bandwidth.detach()).numpy())
        width = widths.max(0)
        weight = _sums(smoother, self.order)
        for some in self._groups(query, width):
            rows = query[some].numpy()
            near, far = _distances(smoother, rows.min(0), rows.max(0), self.low, self.high, width)
            # Keep the second nearest tile too, in case the nearest contains only the query's own point.
            kept = near <= np.partition(far, min(1, len(far) - 1))[min(1, len(far) - 1)]
            if not nearest:
                for times in (width / widths)[:, 0]:
                    kept |= _matters(smoother, near * times, far * times, weight)
            tiles = torch.from_numpy(np.flatnonzero(kept))
            seen = (tiles[:, None] * TILE + torch.arange(TILE)).flatten()
            yield some, seen[seen < len(self.order)]

    def _groups(self, query: Tensor, width: np.ndarray) -> Iterator[Tensor]:
        """Yield groups of queries in the same grid cell, of limited size."""
        if not len(query):
            return
        # Few queries may form a group although they are further apart, if the extra pairs cost less than a selection.
        together = (LOOK_PAIRS * len(query) / len(self.order)) ** 0.5
        span = self.high.max(0) - self.low.min(0)
        edge = span * min(together / max(len(query), 1), 1.0) ** (1 / len(width))
        cells = np.floor(query.numpy() / np.maximum(np.maximum(NEAR * width, self.extent), edge))
        # Sort along a space-filling curve within a cell, so that the queries of a group are close together.
        order = morton_order(query[None, None], query[None, None])[0][0, 0].numpy()
        order = order[np.lexsort(cells[order].T)]
        cells = cells[order]
        ends = np.flatnonzero((cells[1:] != cells[:-1]).any(1)) + 1
        for group in np.split(order, ends):
            yield from torch.from_numpy(group).split(TOGETHER)


def _at(smoother: Smoother, rows: Tensor) -> Smoother:
    """Return a smoother with a subset of the points."""
    weight = None if smoother.weight is None else smoother.weight[rows]
    return replace(smoother, key=smoother.key[rows], target=smoother.target[rows], weight=weight)


def _place_among(places: Tensor, seen: Tensor) -> Tensor:
    """Return the index of each place in the sorted tensor ``seen``; −1 if absent."""
    found = torch.searchsorted(seen, places).clamp(max=len(seen) - 1)
    return torch.where(seen[found] == places, found, -1)


def lightest_and_heaviest(smoother: Smoother) -> tuple[np.ndarray, np.ndarray]:
    """Return the logarithm of each point's weight, and of an upper bound on its terms in any sum (N,)."""
    weight = smoother.point_weights()[:, 0].numpy()
    target = smoother.target.numpy()
    size = 1 + (np.abs(target) / np.maximum(np.abs(target).mean(0), np.finfo(float).tiny)).max(1, initial=0.0) ** 2
    return np.log(weight), np.log(weight * size)


def _sums(smoother: Smoother, order: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the logarithms of a lower and an upper bound on each tile's weight (tiles,).

    The lower bound is the lightest point, because a query's own point may be left out; the upper bound is the sum of
    the upper bounds of all points.
    """
    light, heavy = (each[order.numpy()] for each in lightest_and_heaviest(smoother))
    starts = np.arange(0, len(light), TILE)
    lightest = np.minimum.reduceat(light, starts)
    if len(light) - starts[-1] == 1:
        lightest[-1] = -np.inf
    return lightest, np.logaddexp.reduceat(heavy, starts)


def _distances(
    smoother: Smoother, least: np.ndarray, most: np.ndarray, low: np.ndarray, high: np.ndarray, width: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and largest distance in bandwidths between points of one box and points of other boxes."""
    near = np.maximum(np.maximum(low - most, least - high), 0.0) / width
    far = np.maximum(high - least, most - low) / width
    if smoother.kernel.form.manhattan:
        return near.sum(1), far.sum(1)
    # Scale so that no square overflows.
    unit = max(1.0, float(far.max(initial=0.0)) * 1e-150)
    near, far = near / unit, far / unit
    return unit * np.sqrt((near**2).sum(1)), unit * np.sqrt((far**2).sum(1))


def _matters(
    smoother: Smoother, near: np.ndarray, far: np.ndarray, weight: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Return which tiles may contribute more than a rounding error to the sum (tiles,), bool."""
    form = smoother.kernel.form
    lightest, heaviest = weight
    near = near * (1 - 1e-12)  # allow for rounding
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        least = np.where((far <= 1) | (not form.compact), form.log_profile(far), -np.inf) + lightest
        most = np.where((near <= 1) | (not form.compact), form.log_profile(near), -np.inf) + heaviest
        if smoother.order:
            most = most + 4 * np.log1p(far)
        at_least = least.max()
        if not at_least > -np.inf:
            return most > -np.inf
        return most > at_least + math.log(NOTHING / len(near))


# Exact sums over the neighbours of each query from a tree, for few queries or few neighbours --------------------------
# All points beyond a radius are skipped if together they weigh less than a rounding error of the nearest one.


#: The most pairs of a query and a point held at once.
HELD = 1 << 21


@dataclass(frozen=True)
class Neighbours:
    """Points in a tree.

    Attributes
    ----------
    tree : scipy.spatial.cKDTree
        A tree of coordinates divided by ``unit``.
    unit : ndarray (C,)
        The unit of distance along each coordinate; all bandwidths are multiples of it.
    """

    tree: Any
    unit: np.ndarray

    @classmethod
    def of(cls, smoother: Smoother, bandwidth: Tensor) -> Neighbours | None:
        """Return the points of a smoother, for multiples of a bandwidth; None if distances overflow."""
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
        """Return the estimate at queries (L, C), each without its ``own`` point (L,) if given.

        Several bandwidths (W, n_features), which must be multiples of one, share the search; results then have a
        leading dimension W.
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
        """Return the number of points within radii (L,) of queries (L, C)."""
        at, p = query.numpy() / self.unit, _norm(smoother)
        return np.asarray(self.tree.query_ball_point(at, radii, p, return_length=True))

    def _pairs(self, smoother: Smoother, query: Tensor, radii: np.ndarray, own: Tensor | None) -> Pairs:
        """Return the points within radii (L,) of queries, except their own."""
        lists = self.tree.query_ball_point(query.numpy() / self.unit, radii, _norm(smoother), return_sorted=False)
        counts = torch.tensor([len(each) for each in lists], dtype=torch.int64)
        points = torch.from_numpy(np.concatenate([np.asarray(each, np.int64) for each in lists] or [np.zeros(0, int)]))
        rows = torch.arange(len(query)).repeat_interleave(counts)
        if own is not None:
            others = points != own[rows]
            points, rows = points[others], rows[others]
        return Pairs(rows, points, len(query))

    def _radii(self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None) -> np.ndarray:
        """Return the radius beyond which points are negligible (L,), in units, for all bandwidths."""
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
        return np.where(np.isfinite(nearest), found * (1 + 1e-12), 0.0)  # allow for rounding


def unit_of(smoother: Smoother, bandwidth: Tensor) -> np.ndarray:
    """Return the unit that a bandwidth is a multiple of (C,)."""
    width = smoother.coordinate_bandwidth(bandwidth.detach()).reshape(-1, smoother.key.shape[1])[0].numpy()
    unit: np.ndarray = width / width.max()
    return unit


def _norm(smoother: Smoother) -> float:
    return 1.0 if smoother.kernel.form.manhattan else 2.0


def _radius(smoother: Smoother, nearest: np.ndarray, most: float) -> np.ndarray:
    """Return the radius in bandwidths beyond which points are negligible, given the nearest distance (L,).

    All points beyond it together weigh ``exp(−most)`` times as much as the nearest one.
    """
    if smoother.kernel.form.compact:
        return np.ones_like(nearest)
    found = nearest
    # A line magnifies by the distance to the fourth power.
    for _ in range(16 if smoother.order else 1):
        decay = most + (4 * np.log1p(found) if smoother.order else 0.0)
        found = nearest + decay if smoother.kernel.form.manhattan else np.hypot(nearest, np.sqrt(2 * decay))
    return found
