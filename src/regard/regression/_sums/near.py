"""Sums over nearby training points, found by tiles or by a tree.

Tiles are skipped if together they weigh less than a rounding error of the others, by bounds on the distances to their
bounding boxes. In float64 the sums therefore equal those over all points; with a tolerance, which skips more, their
error is at most that tolerance times ``|ŷ − ȳ| + σ`` of the targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard import masks, scores
from regard.engines.fused.morton import morton_order
from regard.regression._sums.smoother import Estimate, Pairs, Report, Smoother, column_range
from regard.scores import Gaussian, Laplacian

# Exact sums by tiles of points along a space-filling curve, skipping far tiles ----------------------------------------


#: The points of a tile, the most queries of a group, and the queries for which a group costs as much at least.
TILE, TOGETHER, BLOCK = 256, 128, 64
#: Queries of a group lie within this many bandwidths along each axis; selecting tiles costs as much as this many pairs.
NEAR, LOOK_PAIRS = 2.0, 1_000_000
#: The largest share of the weight to skip: far below rounding, because a local line magnifies it.
NOTHING = 2.0**-60
#: The least and the largest distance, in bandwidths, of the search for a kernel's reach, and its number of halvings.
_CLOSEST, _FARTHEST, _HALVINGS = 1e-150, 1e150, 60


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
        *, spread: bool = False, peak: bool = False, leverage: bool = False, slope: bool = False, rtol: float = 0.0,
    ) -> Estimate:  # fmt: skip
        """Return the estimate at queries (L, C), each without its ``own`` point (L,) if given.

        Several bandwidths (W, n_features), which must be multiples of one, share the selection of tiles; results then
        have a leading dimension W. With ``rtol``, averages may be off by that times ``|ŷ − ȳ| + σ``, for which fewer
        tiles suffice; local polynomials, variances, leverages and slopes, which magnify errors, are always exact.
        """
        parts, rows = [], []
        ordered = smoother.at(self.order)  # contiguous tiles are faster to read
        share = NOTHING if smoother.order or spread or leverage or slope else max(NOTHING, rtol / 2)
        wanted = {"spread": spread, "peak": peak, "leverage": leverage, "slope": slope}
        for some, seen in self._selections(smoother, query, bandwidth, share):
            mask = None
            if own is not None:
                mask = masks.leave_one_out(_place_among(self.places[own[some]], seen))
            parts.append(ordered.at(seen).estimate(query[some], bandwidth, mask, **wanted))
            rows.append(some)
            report(len(some), "")
        if not parts:
            return smoother.estimate(query, bandwidth, None, **wanted)
        return Estimate.cat(parts).at(torch.cat(rows).argsort())

    def _selections(
        self, smoother: Smoother, query: Tensor, bandwidth: Tensor, share: float
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield groups of nearby queries (l,), and the positions of all points that they need (n,).

        Skipped points weigh at most a ``share`` of the others.
        """
        widths = np.atleast_2d(smoother.coordinate_bandwidth(bandwidth.detach()).numpy())
        width = widths.max(0)
        weight = _sums(smoother, self.order, exact=share <= NOTHING)
        for some in self._groups(query, width):
            rows = query[some].numpy()
            box = rows.min(0), rows.max(0)
            near, far = _distances(smoother, *box, self.low, self.high, width)
            relative = None if smoother.kernel.form.manhattan else self._relative_squares(box, near, far, width)
            # Keep the second nearest tile too, in case the nearest contains only the query's own point.
            closest, furthest = (near, far) if relative is None else relative
            kept = closest <= np.partition(furthest, min(1, len(far) - 1))[min(1, len(far) - 1)]
            for times in (width / widths)[:, 0]:
                least, most = _log_weights(smoother, near * times, far * times)
                if relative is not None and smoother.kernel.form is scores.Gaussian:
                    least, most = -relative[1] * (times**2 / 2), -relative[0] * (times**2 / 2)
                most = most + 4 * smoother.order * np.log1p(far * times)  # by how much a polynomial magnifies
                kept |= _matters(least + weight[0], most + weight[1], share)
            tiles = torch.from_numpy(np.flatnonzero(kept))
            seen = (tiles[:, None] * TILE + torch.arange(TILE)).flatten()
            yield some, seen[seen < len(self.order)]

    def _relative_squares(
        self, box: tuple[np.ndarray, np.ndarray], near: np.ndarray, far: np.ndarray, width: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return bounds on squared distances of queries in a box from each tile, relative to those from one point x*.

        ``|q − x|² − |q − x*|²`` is linear in q along each axis, so that corners bound it. Unlike the distances
        themselves, these bounds hardly depend on how far apart the queries are. None if squares overflow.
        """
        nearest = int((near + far).argmin())
        center = (self.low[nearest] + self.high[nearest]) / 2
        closest, furthest = np.full_like(self.low, np.inf), np.full_like(self.low, -np.inf)
        with np.errstate(over="ignore", invalid="ignore"):
            for corner in box:
                reference = ((corner - center) / width) ** 2
                gap = np.maximum(np.maximum(self.low - corner, corner - self.high), 0.0) / width
                closest = np.minimum(closest, gap**2 - reference)
                end = np.maximum(np.abs(self.low - corner), np.abs(self.high - corner)) / width
                furthest = np.maximum(furthest, end**2 - reference)
            rounding = 1e-12 * near**2  # far tiles do not matter, whatever the rounding of their squares
            found = closest.sum(1) - rounding, furthest.sum(1) + 1e-12 * far**2
        return found if np.isfinite(found[1]).all() and np.isfinite(found[0]).all() else None

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


def _sums(smoother: Smoother, order: Tensor, exact: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the logarithms of a lower and an upper bound on each tile's terms in a sum (tiles,).

    The lower bound is its weight without the heaviest point, because a query's own point may be left out. The upper
    bound is the sum of the bounds of all points: of any term, or unless ``exact`` of ``w max(1, |y| / σ)``. By this a
    mean ŷ is off by at most ``(Σ w |y| + |ŷ| Σ w) / Σ w ≤ share · (σ + |ŷ|)``, with sums over skipped points above the
    line and over all below it, and targets y relative to their mean.
    """
    light, heavy = lightest_and_heaviest(smoother)
    if not exact:
        heavy = light + np.log((smoother.target.abs() / smoother.deviations).numpy().max(1, initial=1.0))
    light, heavy = light[order.numpy()], heavy[order.numpy()]
    starts = np.arange(0, len(light), TILE)
    weight, heaviest = np.exp(light), np.maximum.reduceat(light, starts)
    rest = np.add.reduceat(weight, starts) - np.exp(heaviest)
    counts = np.diff(np.append(starts, len(light)))
    with np.errstate(divide="ignore"):
        # Rounding may leave less than the lightest points weigh.
        lightest = np.minimum.reduceat(light, starts) + np.log(counts - 1.0)
        return np.maximum(np.log(np.maximum(rest, 0.0)) - 1e-9, lightest), np.logaddexp.reduceat(heavy, starts)


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


def _log_weights(smoother: Smoother, near: np.ndarray, far: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds on the logarithm of the kernel at distances between ``near`` and ``far`` (tiles,)."""
    form = smoother.kernel.form
    near = near * (1 - 1e-12)  # allow for rounding
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        least, most = (
            np.where((each <= 1) | (not form.compact), form.log_profile(each), -np.inf) for each in (far, near)
        )
    return least, most


def _matters(least: np.ndarray, most: np.ndarray, share: float) -> np.ndarray:
    """Return which tiles may together contribute more than a share of the sum (tiles,), given bounds on each."""
    total = np.logaddexp.reduce(least)
    if not total > -np.inf:
        found: np.ndarray = most > -np.inf
        return found
    order = most.argsort()
    skipped = np.logaddexp.accumulate(most[order]) <= total + math.log(share)
    found = np.ones(len(most), dtype=bool)
    found[order[skipped]] = False
    return found


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
            low, high = column_range(smoother.key)
            span = np.square((high - low).numpy() / unit).sum()
        return cls(cKDTree(key, balanced_tree=False, compact_nodes=False), unit) if np.isfinite(span) else None

    def estimate(
        self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None, report: Report,
        **wanted: bool,
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
            parts.append(smoother.estimate(query[rows], bandwidth, pairs, **wanted))
            report(len(rows), "")
        return Estimate.cat(parts)

    def nearest(self, smoother: Smoother, query: Tensor, own: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the distance to the nearest point of each query but its ``own``, in units, and that point (L,).

        The distance is infinite, and the point −1, where there is none.
        """
        distance, point = self.tree.query(query[:, : len(self.unit)].numpy() / self.unit, k=2, p=_norm(smoother))
        rank = np.zeros(len(query), int) if own is None else (point[:, 0] == own.numpy()).astype(int)
        distance, point = (np.take_along_axis(each, rank[:, None], 1)[:, 0] for each in (distance, point))
        return distance, np.where(np.isfinite(distance), point, -1)

    def distance(self, smoother: Smoother, query: Tensor, own: Tensor | None) -> np.ndarray:
        """Return the distance to the k-th nearest point of each query but its ``own``, in units (L,).

        k is the smoother's ``neighbours``. Where points are repeated, each repetition counts. If the distance is 0, it
        is that to the nearest point elsewhere, and 1 if there is none.
        """
        at, p, N = query.numpy() / self.unit, _norm(smoother), len(smoother.key)
        weight = smoother.point_weights()[:, 0].numpy()
        counts = np.round(weight / smoother.repetition) if smoother.repetition else np.ones(N)
        # A query's own point is as near as any, so that without it all others move up by one.
        k = min(smoother.neighbours + (own is not None), N)
        parts = [np.zeros(0)]
        for rows in np.array_split(np.arange(len(at)), -(-len(at) * k // HELD)) if len(at) else ():
            if (counts == 1).all():
                parts.append(self.tree.query(at[rows], k=[k], p=p)[0][:, 0])
                continue
            distance, point = self.tree.query(at[rows], k=np.arange(1, k + 1), p=p)
            count = counts[point]
            if own is not None:
                count[point == own[rows].numpy()[:, None]] = 0.0
            enough = count.cumsum(1) >= min(smoother.neighbours, counts.sum())
            last = np.where(enough.any(1), enough.argmax(1), k - 1)
            parts.append(np.take_along_axis(distance, last[:, None], 1)[:, 0])
        found = np.concatenate(parts)
        while k < N and (zero := np.flatnonzero(found == 0)).size:
            k = min(2 * k, N)
            distance = self.tree.query(at[zero], k=np.arange(1, k + 1), p=p)[0]
            found[zero] = np.where(distance > 0, distance, np.inf).min(1)
            found[np.isinf(found)] = 0.0
        return np.where(found > 0, found, 1.0)

    def counts(self, smoother: Smoother, query: Tensor, radii: np.ndarray) -> np.ndarray:
        """Return the number of points within radii (L,) of queries (L, C)."""
        at, p = query[:, : len(self.unit)].numpy() / self.unit, _norm(smoother)
        return np.asarray(self.tree.query_ball_point(at, radii, p, return_length=True))

    def _pairs(self, smoother: Smoother, query: Tensor, radii: np.ndarray, own: Tensor | None) -> Pairs:
        """Return the points within radii (L,) of queries, except their own."""
        at = query[:, : len(self.unit)].numpy() / self.unit
        lists = self.tree.query_ball_point(at, radii, _norm(smoother), return_sorted=False)
        counts = torch.tensor([len(each) for each in lists], dtype=torch.int64)
        points = torch.from_numpy(np.concatenate([np.asarray(each, np.int64) for each in lists] or [np.zeros(0, int)]))
        rows = torch.arange(len(query)).repeat_interleave(counts)
        if own is not None:
            others = points != own[rows]
            points, rows = points[others], rows[others]
        return Pairs(rows, points, len(query))

    def _radii(self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None) -> np.ndarray:
        """Return the radius beyond which points are negligible (L,), in units, for all bandwidths."""
        nearest, _ = self.nearest(smoother, query, own)
        lightest, heaviest = lightest_and_heaviest(smoother)
        most = float(heaviest.max() - lightest.min()) - math.log(NOTHING / len(smoother.key))
        widths = np.atleast_2d(smoother.coordinate_bandwidth(bandwidth.detach()).numpy())
        found = np.zeros(len(query))
        times = query[:, len(self.unit) :].numpy().T if smoother.neighbours else np.ones((1, 1))
        for width in (widths / self.unit)[:, 0, None] * times:
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

    All points beyond it together weigh ``exp(−most)`` times as much as the nearest one. It is infinite for a kernel
    whose weights never fall so far.
    """
    form, order = smoother.kernel.form, smoother.order
    if form.compact:
        return np.ones_like(nearest)
    if form not in (Gaussian, Laplacian):
        return _reach(form.log_profile, nearest, most, order)
    found = nearest
    # A line magnifies by the distance to the fourth power, a parabola to the eighth.
    for _ in range(16 if order else 1):
        decay = most + 4 * order * np.log1p(found)
        found = nearest + decay if form is Laplacian else np.hypot(nearest, np.sqrt(2 * decay))
    return found


def _reach(profile: Callable[[Any], Any], nearest: np.ndarray, most: float, order: int) -> np.ndarray:
    """Return :func:`_radius` of any kernel, by bisection of its falling logarithm ``profile``."""
    low, high = np.log(np.maximum(nearest, _CLOSEST)), np.full_like(nearest, np.log(_FARTHEST))

    def is_beyond(log_radius: np.ndarray) -> np.ndarray:
        radius = np.exp(log_radius)
        with np.errstate(all="ignore"):
            beyond: np.ndarray = profile(nearest) - profile(radius) >= most + 4 * order * np.log1p(radius)
        return beyond

    reached = is_beyond(high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        beyond = is_beyond(middle)
        low, high = np.where(beyond, low, middle), np.where(beyond, middle, high)
    return np.where(reached, np.exp(high), np.inf)
