"""The choice of the method that computes the sums, and its run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard import masks, scores
from regard._utils.errors import available_memory, rejected
from regard.engines.fused import library
from regard.engines.fused.families import KINDS
from regard.regression._sums.fourier import (
    AXES,
    COARSEST,
    FINEST,
    Series,
    TransformedPoints,
    has_finufft,
    require_finufft,
)
from regard.regression._sums.near import TILE, Neighbours, Tiles, unit_of
from regard.regression._sums.smoother import Estimate, Report, Smoother, column_range
from regard.regression._sums.table import Table, tabulates

# What ran and why, and how long each method should take ---------------------------------------------------------------


#: The ways to sum up over training points.
METHODS = ("auto", "exact", "nufft", "tiles")


@dataclass(frozen=True)
class Plan:
    """How the last estimates were made; ``print`` says it in sentences.

    Attributes
    ----------
    method : {"exact", "nufft", "tiles", "table"}
        All pairs; a Fourier transform; exact sums over the tiles of points that are near enough to count; exact sums of
        categories, looked up.
    reason : str
    queries : int
    by_tiles : int
        How many of them the transform's bound did not hold for, so that they went to exact tiles.
    bound : float
        The largest bound on the error of the others, beside ``|ŷ − ȳ| + σ`` of the targets; 0 where all is exact.
    rtol : float
        What the bound may be.
    memory : int
        Bytes that the transforms take while they run, by estimate.
    by_tree : bool
        With "tiles", whether a tree finds the points that are near each query, instead.
    share : float
        With "exact", the share of the points that a query meets: those in reach, where the others are skipped.
    """

    method: str
    reason: str
    queries: int
    by_tiles: int = 0
    bound: float = 0.0
    rtol: float = 0.0
    memory: int = 0
    by_tree: bool = False
    share: float = 1.0

    def __str__(self) -> str:
        lines = [f"{self.method}, {self.queries:,} queries: {self.reason}."]
        if self.by_tree:
            lines.append("A tree finds the points that each query needs.")
        if self.method == "nufft":
            lines.append(
                f"Errors are at most {self.bound:.1e} (rtol {self.rtol:g}) times |ŷ − ȳ| + σ of the targets; "
                f"{self.by_tiles:,} queries, where weights sum to too little for that, were summed up exactly."
            )
            lines.append(f"The transforms take about {self.memory / 1e6:,.0f} MB.")
        return "\n".join(lines)


# Estimates by the requested method, or the cheapest: all pairs, exact tiles, or a transform with a bound --------------


#: Points up to which "auto" compares all pairs, and pairs.
FEW, FEW_PAIRS = 1 << 11, 1 << 22
# By times of each method on seventy settings, 10,000 to 2,000,000 points in one to ten dimensions:
#: Pairs that take as long as one frequency of a transform.
PAIRS_OF_FREQUENCY = 1000
#: Pairs that take as long as counting a point, or looking up a query, for one set of categorical features.
PAIRS_OF_LOOKUP = 16
#: The share of points that a query may need for a tree to find them, and points from which that is worth it.
TREE_SHARE, TREE_POINTS = 0.002, 20_000
#: All pairs of a compact kernel skip what is out of reach, so that a tree gains only among so many points of which a
#: query needs so few.
TREE_POINTS_COMPACT, TREE_NEEDED_COMPACT = 1_000_000, 32
#: The most coordinates in which a tree finds neighbours faster than comparing all pairs does: a point of 50,000 takes
#: 0.15, 0.8, 2.2, 12 and 340 ns in 4, 6, 8, 12 and 26 coordinates by a tree, and 2 to 8 ns by pairs.
TREE_AXES = 6
#: The share of points that a parabola may need for a tree to find them: pairs have moments about their own query, which
#: other methods take about many origins where bandwidths are narrow.
PARABOLA_SHARE = 0.1
#: The same for bandwidths by neighbours, without and with a compiled kernel for all pairs (a point takes 0.3 µs by a
#: tree, and 5 ns by a compiled kernel); and how many bandwidths the Gaussian and the Laplacian reach.
NEIGHBOURS_SHARE, NEIGHBOURS_SHARE_COMPILED, REACH, REACH_MANHATTAN = 0.1, 0.005, 10.0, 50.0
#: By how much such a bandwidth exceeds the distance of the last point, where rounding decides whether it counts.
EDGE = 1e-9
#: Along each axis, the share of points that a query may need for tiles of them, and axes: with more, tiles are wide.
TILES_SHARE, TILES_AXES = 0.25, 2
#: Sizes of the sample of points, as keys and as queries, from which :class:`PilotStatistics` estimates shares.
PILOT_KEYS, PILOT_QUERIES = 2048, 128
#: The bound of a mean over what transforms are asked for, where all weights are the same; of lines; of deviations.
MAGNIFIED, BY_LINES, BY_DEVIATIONS = 30.0, 10.0, 30.0
#: How many times less weight a query has one bandwidth beyond a corner of the points than at the corner.
BEYOND = 10.0
#: Roundings of a dtype below which no rtol can be.
ROUNDINGS = 8
#: Share of the memory that is available which a transform may take.
MEMORY_SHARE = 0.5


class Evaluator:
    """Make estimates of one set of points by one method.

    Parameters
    ----------
    name : str
        The estimator's, for errors.
    method : {"auto", "exact", "nufft", "tiles"}
    rtol : float
    dtype : torch.dtype
        What all pairs are compared in.
    """

    def __init__(self, name: str, method: str, rtol: float, dtype: torch.dtype) -> None:
        self.name, self.method, self.rtol, self.dtype = name, method, rtol, dtype
        self.plan: Plan | None = None
        self._forget()

    def _forget(self) -> None:
        self._tiles: Tiles | None = None
        self._table: Table | None = None
        self._transformed: dict[bytes, TransformedPoints] = {}
        self._trees: dict[bytes, Neighbours | None] = {}
        self._pilots: dict[bytes, PilotStatistics] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def needs_double(self, count: int) -> bool:
        """Return whether points may have to be in float64."""
        return self.method in ("nufft", "tiles") or (self.method == "auto" and count > FEW)

    def tiles(self, smoother: Smoother) -> Tiles:
        """Return the points in tiles, which are made once."""
        if self._tiles is None:
            self._tiles = Tiles.of(smoother.key)
        return self._tiles

    def table(self, smoother: Smoother) -> Table:
        """Return the points counted by category, which is done once."""
        if self._table is None:
            self._table = Table.of(smoother)
        return self._table

    def _neighbours(self, smoother: Smoother, bandwidth: Tensor) -> Neighbours | None:
        """Return the points in a tree, which is made once for all multiples of a bandwidth."""
        place = unit_of(smoother, bandwidth).tobytes()
        if place not in self._trees:
            kept = list(self._trees.items())[-1:]  # the bandwidths of predictions and of extrapolation alternate
            self._trees = dict(kept) | {place: Neighbours.of(smoother, bandwidth)}
        return self._trees[place]

    # Estimates.

    def estimate(
        self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None = None, *,
        spread: bool = False, peak: bool = False, leverage: bool = False, slope: bool = False,
        report: Report = lambda *_: None,
        plan: Plan | None = None,
    ) -> Estimate:  # fmt: skip
        """Return the estimate at queries (L, C), each without its ``own`` point (L,) if that is given.

        The peak comes with ``peak`` from all but the transform, and no transform has the slopes. Differentiable with
        respect to the bandwidth.
        """
        self.plan = plan = plan or self.choose(smoother, len(query), bandwidth, spread, slope)
        query = self.with_own_widths(smoother, query, bandwidth, own)
        wanted = {"spread": spread, "leverage": leverage}
        exactly = {**wanted, "peak": peak, "slope": slope}
        if plan.method == "exact":
            return self._exact(smoother, query, bandwidth, own, report, None, plan.share, **exactly)
        if plan.method == "table":
            report(len(query), "")
            return self.table(smoother).estimate(smoother, query, bandwidth, own, peak=peak, **wanted)
        if plan.method == "tiles":
            near = self._neighbours(smoother, bandwidth) if plan.by_tree else None
            if near is not None:
                return near.estimate(smoother, query, bandwidth, own, report, **exactly)
            return self.tiles(smoother).estimate(smoother, query, bandwidth, own, report, **exactly)
        transformed = self._transform(smoother, bandwidth, spread)
        found, bound = transformed.estimate(smoother, query, bandwidth, own, **wanted)
        beyond = torch.nonzero(~(bound <= self.rtol))[:, 0]
        can_tilt = not (smoother.order or bandwidth.requires_grad or leverage or (spread and smoother.repetition))
        if own is None and can_tilt and len(beyond):
            for rows, part, limit in transformed.tilted(smoother, query[beyond], bandwidth, spread, self.rtol):
                some = limit <= self.rtol
                found = found.replaced(beyond[rows[some]], part.at(torch.nonzero(some)[:, 0]))
                bound = bound.index_put((beyond[rows[some]],), limit[some])
            beyond = torch.nonzero(~(bound <= self.rtol))[:, 0]
        held = bound[bound <= self.rtol]
        self.plan = replace(plan, by_tiles=len(beyond), bound=float(held.max()) if len(held) else 0.0)
        report(len(held), "")
        if not len(beyond):
            return found
        rest_own = None if own is None else own[beyond]
        if len(beyond) <= TILE:  # fewer pairs than putting points in order takes
            rest = self._exact(smoother, query[beyond], bandwidth, rest_own, report, torch.float64, 1.0, **wanted)
        else:
            rest = self.tiles(smoother).estimate(
                smoother, query[beyond], bandwidth, rest_own, report, rtol=self.rtol, **wanted
            )
        return found.replaced(beyond, rest)

    def _exact(
        self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None, report: Report,
        dtype: torch.dtype | None, share: float, **wanted: bool,
    ) -> Estimate:  # fmt: skip
        """Return the estimate by all pairs; a share of them counts."""
        dtype = dtype or (torch.float64 if smoother.order or smoother.neighbours else self.dtype)
        smoother, query, bandwidth = smoother.to(dtype), query.to(dtype), bandwidth.to(dtype)
        parts = []
        for rows in torch.arange(len(query), device=query.device).split(smoother.rows_at_once(share)):
            mask = None if own is None else masks.leave_one_out(own[rows])
            parts.append(smoother.estimate(query[rows], bandwidth, mask, **wanted))
            report(len(rows), "")
        return Estimate.cat(parts) if parts else smoother.estimate(query, bandwidth, None, **wanted)

    def with_own_widths(
        self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None = None
    ) -> Tensor:
        """Return queries (L, C) with a column for the factor of their bandwidth, if that is one of neighbours."""
        if not smoother.neighbours:
            return query
        near = self._neighbours(smoother, bandwidth)
        if near is None:
            raise rejected(self.name, "X", "have distances that float64 can hold, for n_neighbors", "larger ones")
        width = smoother.coordinate_bandwidth(bandwidth.detach()).numpy() / near.unit
        factor = torch.from_numpy(near.distance(smoother, query, own) / width[0])
        if not smoother.kernel.form.smooth:  # the boxcar, at whose edge the k-th point lies
            factor = factor * (1 + EDGE)
        return torch.cat([query, factor[:, None].to(query)], 1)

    def nearest(self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None = None) -> Tensor:
        """Return the nearest point of each query (L,) but its ``own``; −1 where there is none."""
        near = self._searchable(smoother, len(query), bandwidth)
        if near is None:
            return smoother.nearest(query, bandwidth, None if own is None else masks.leave_one_out(own))
        return torch.from_numpy(near.nearest(smoother, query, own)[1])

    def closeness(
        self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None = None, *, whole: bool = True
    ) -> Tensor:
        """Return how near the nearest point of each query is, as :meth:`Smoother.closeness` does (L,).

        A tree of the ``whole`` of the points is kept for later calls.
        """
        if whole and self._uses_table(smoother, len(query)):
            return self.table(smoother).closeness(smoother, query, bandwidth, own)
        near = self._searchable(smoother, len(query), bandwidth, whole)
        if near is not None:
            width = float((smoother.coordinate_bandwidth(bandwidth).numpy() / near.unit)[0])
            distance = torch.from_numpy(near.nearest(smoother, query, own)[0] / width)
            return -distance if smoother.kernel.form.manhattan else -distance.square() / 2
        parts = [query.new_zeros(0)]
        for rows in torch.arange(len(query), device=query.device).split(smoother.rows_at_once()):
            mask = None if own is None else masks.leave_one_out(own[rows])
            parts.append(smoother.closeness(query[rows], bandwidth, mask))
        return torch.cat(parts)

    def _searchable(self, smoother: Smoother, count: int, bandwidth: Tensor, whole: bool = True) -> Neighbours | None:
        """Return the points in a tree where that finds nearest points faster than comparing all pairs."""
        (_N, C), pairs = smoother.key.shape, float(count) * len(smoother.key)
        if (
            not smoother.features.is_metric
            or self.method == "exact"
            or smoother.key.device.type != "cpu"
            or pairs <= FEW_PAIRS
            or C > TREE_AXES
        ):
            return None
        return self._neighbours(smoother, bandwidth) if whole else Neighbours.of(smoother, bandwidth)

    def _transform(self, smoother: Smoother, bandwidth: Tensor, spread: bool) -> TransformedPoints:
        """Return the points transformed, once for each bandwidth; those of another bandwidth are let go."""
        width = smoother.coordinate_bandwidth(bandwidth.detach()).numpy()
        eps, place = self._eps(smoother, bandwidth, spread), width.tobytes()
        found = self._transformed.get(place)
        if found is None or found.eps > eps:
            found = TransformedPoints(width, eps)
            self._transformed = {place: found}
        found.transform(smoother)
        return found

    def prepare(self, smoother: Smoother, bandwidth: Tensor) -> None:
        """Transform the points in advance if ``method`` is "nufft", for later predictions."""
        if self.method == "nufft":
            self.plan = self.choose(smoother, 0, bandwidth, False)
            if self.plan.method == "nufft":
                self._transform(smoother, bandwidth, False)

    # The choice.

    def choose(
        self, smoother: Smoother, count: int, bandwidth: Tensor, spread: bool = False, slope: bool = False
    ) -> Plan:
        """Return the plan for so many queries: the method, and why."""
        plan = self._choose(smoother, count, bandwidth, spread, slope)
        # All pairs of a compact kernel skip points out of reach, but each call sorts the points.
        skips = smoother.kernel.form.compact and smoother.features.is_metric
        if plan.method == "exact" and skips and count > smoother.rows_at_once():
            share = smoother.neighbours / len(smoother.key) or self._pilot(smoother, bandwidth).needed
            return replace(plan, share=min(share, 1.0))
        return plan

    def _choose(self, smoother: Smoother, count: int, bandwidth: Tensor, spread: bool, slope: bool) -> Plan:
        N, C = smoother.key.shape
        pairs = float(count) * N
        if self.method == "exact":
            return Plan("exact", "method='exact'", count)
        cannot_tile = _cannot_tile(smoother)
        if smoother.neighbours:
            few = not cannot_tile and C <= TREE_AXES and _reaches_few(smoother)
            why = f"queries need {'few' if few else 'many'} of the points for bandwidths from n_neighbors"
            return Plan("tiles" if few else "exact", why, count, by_tree=few)
        if self._uses_table(smoother, count):
            return Plan("table", "all features are categorical, and rows are counted by category", count)
        if smoother.order == 2 and not cannot_tile and self._pilot(smoother, bandwidth).needed < PARABOLA_SHARE:
            return Plan("tiles", "a parabola needs few of the points", count, by_tree=True)
        if self.method == "auto" and (N <= FEW or pairs <= FEW_PAIRS):
            return Plan("exact", "all pairs are few", count)
        if self.method == "tiles":
            if cannot_tile:
                return Plan("exact", cannot_tile, count)
            by_tree = C <= TREE_AXES and self._pilot(smoother, bandwidth).by_tree
            return Plan("tiles", "method='tiles'", count, by_tree=by_tree)
        cannot, series, memory = _cannot_transform(smoother), None, 0.0
        cannot = cannot or ("slopes are summed up exactly" if slope else "")
        if not cannot:
            series = self._series(smoother, bandwidth, spread)
            memory, most = _memory(smoother, count, spread, series), available_memory()
            if not math.isfinite(memory) or (most is not None and memory > MEMORY_SHARE * most):
                cannot = f"a grid of {series.size:.2g} frequencies would take {memory / 1e9:.3g} GB"
        if self.method == "nufft" and cannot:
            return Plan("exact" if cannot_tile else "tiles", f"no transform: {cannot}", count)
        but = f"; no transform: {cannot}" if cannot else ""
        if cannot and cannot_tile:
            return Plan("exact", f"{cannot_tile}{but}", count)
        if cannot and max(TREE_AXES, TILES_AXES) < C:  # whatever a pilot sample would say, which takes long
            return Plan("exact", f"points have many coordinates{but}", count)
        pilot = self._pilot(smoother, bandwidth)
        if series is not None and not cannot:
            # Queries whose sums are too small for its bound are summed up exactly.
            saved = pairs * (1 - pilot.share_beyond(series.eps, self.rtol))
            why = "method='nufft'" if self.method == "nufft" else "a transform has few frequencies beside all pairs"
            if self.method == "nufft" or saved > PAIRS_OF_FREQUENCY * series.size:
                return Plan("nufft", why, count, rtol=self.rtol, memory=round(memory))
        if not cannot_tile:
            compact = smoother.kernel.form.compact
            few = not compact or pilot.needed * N < TREE_NEEDED_COMPACT
            if pilot.by_tree and few and C <= TREE_AXES and (TREE_POINTS_COMPACT if compact else TREE_POINTS) <= N:
                return Plan("tiles", f"queries need few of the points{but}", count, by_tree=True)
            if not pilot.by_tree and not compact and C <= TILES_AXES and pilot.share < TILES_SHARE**C:
                return Plan("tiles", f"queries need some of the points{but}", count)
        return Plan("exact", f"queries need many of the points, or these are few{but}", count)

    def _uses_table(self, smoother: Smoother, count: int) -> bool:
        """Return whether sums of categories are looked up."""
        N, lookups = len(smoother.key), 2.0 ** len(smoother.features.kinds) * (len(smoother.key) + count)
        return self.method == "auto" and tabulates(smoother) and PAIRS_OF_LOOKUP * lookups < float(count) * N

    def _eps(self, smoother: Smoother, bandwidth: Tensor, spread: bool) -> float:
        """Return what transforms are asked for, a power of ten, so that few queries' bounds exceed rtol."""
        least = self._pilot(smoother, bandwidth).least / MAGNIFIED / BEYOND
        least = least / (BY_LINES if smoother.order else 1.0) / (BY_DEVIATIONS if spread else 1.0)
        return float(min(max(10.0 ** math.floor(math.log10(self.rtol * least)), FINEST), COARSEST))

    def _series(self, smoother: Smoother, bandwidth: Tensor, spread: bool) -> Series:
        unit = smoother.coordinate_bandwidth(bandwidth.detach()).numpy()
        unit = unit / math.sqrt(2) if spread else unit
        low, high = (each.numpy() / unit for each in column_range(smoother.key))
        return Series(low, high, self._eps(smoother, bandwidth, spread))

    def _pilot(self, smoother: Smoother, bandwidth: Tensor) -> PilotStatistics:
        place = bandwidth.detach().numpy().tobytes()
        if place not in self._pilots:
            self._pilots = {place: PilotStatistics.at(smoother, bandwidth.detach())}
        return self._pilots[place]


@dataclass(frozen=True)
class PilotStatistics:
    """How the weights of a query spread over the points, estimated from a sample of the points.

    Attributes
    ----------
    weights : ndarray (PILOT_QUERIES,)
        The sum of each sampled query's weights as a share of the largest that is possible, in ascending order.
    share : float
        The share of points in tiles that matter to a query's sum.
    needed : float
        The share of points that matter to a query's sum.
    """

    weights: np.ndarray
    share: float
    needed: float

    @classmethod
    def at(cls, smoother: Smoother, bandwidth: Tensor) -> PilotStatistics:
        """Estimate them from a sample of a smoother's points."""
        N = len(smoother.key)
        keys = torch.linspace(0, N - 1, min(N, PILOT_KEYS), dtype=torch.float64).long()
        own = torch.linspace(0, len(keys) - 1, min(PILOT_QUERIES, len(keys)), dtype=torch.float64).long()
        gap = (smoother.key[keys[own]][:, None] - smoother.key[keys]).abs() / smoother.coordinate_bandwidth(bandwidth)
        form = smoother.kernel.form
        distance = (gap.sum(-1) if form.manhattan else gap.square().sum(-1).sqrt()).numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.where((distance <= 1) | (not form.compact), form.log_profile(distance), -np.inf)
        weight = smoother.point_weights()[keys, 0].numpy()
        itself = np.arange(len(own)), own.numpy()
        alone = weight[itself[1]] / weight.sum() * len(keys) / N
        logs[itself] = -np.inf
        seen = (np.exp(logs) * weight).sum(1) / weight.sum()
        # As many tiles as there are, each of which may weigh a little.
        needed = (logs > logs.max(1, keepdims=True) - 60 * math.log(2) - math.log(max(N, 2))).mean(1)
        share = float(needed.mean())
        by_itself = max(share - 1 / len(keys), 0.0) + 1 / N  # the nearest of all is nearer than that of some
        return cls(np.sort(seen + alone), share + 4 * TILE / N, by_itself)

    @property
    def least(self) -> float:
        """The smallest sum of weights of a sampled query, as a share of the largest that is possible."""
        return float(self.weights[0])

    def share_beyond(self, eps: float, rtol: float) -> float:
        """Return the share of queries whose sum is too small for the transform's bound at this rtol."""
        return float((self.weights * rtol < eps * MAGNIFIED).mean())

    @property
    def by_tree(self) -> bool:
        """Whether a tree should find the points that a query needs, rather than tiles."""
        return self.needed < TREE_SHARE


def _reaches_few(smoother: Smoother) -> bool:
    """Return whether bandwidths by neighbours reach so few points that a tree should find them."""
    form, N, k = smoother.kernel.form, len(smoother.key), smoother.neighbours
    # With a parabola, all pairs are compared in many calls, one for each group of queries.
    compiled = form in KINDS and library.problem() is None and smoother.order < 2
    if form.compact and compiled:
        return N >= TREE_POINTS_COMPACT and k < TREE_NEEDED_COMPACT
    reach = 1.0 if form.compact else REACH_MANHATTAN if form.manhattan else REACH
    share = NEIGHBOURS_SHARE_COMPILED if compiled else NEIGHBOURS_SHARE
    return k * float(reach) ** smoother.key.shape[1] < share * N


def _memory(smoother: Smoother, count: int, spread: bool, series: Series) -> float:
    """Return the bytes that transforms take: coordinates, their order, strengths and grids."""
    (N, C), M = smoother.key.shape, smoother.target.shape[1]
    columns = -(-(1 + M) // 2) + ((M + 1) // 2 + 2 if spread else 0)
    return (8.0 * (C + 1) + 16) * max(N, count) + 16 * series.size * (columns + 2 + 2.0**C)


def _cannot_transform(smoother: Smoother) -> str:
    """Return why no transform can sum up, or nothing."""
    C = smoother.key.shape[1]
    if smoother.kernel.form is not scores.Gaussian:
        return "the kernel is not the Gaussian"
    if smoother.key.device.type != "cpu":
        return "it runs on the CPU"
    if not smoother.features.is_metric:
        return "categories are compared by code" if smoother.features.coded else "values may be missing"
    if not 1 <= C <= AXES:
        return f"points have {C} coordinates, more than {AXES}"
    if smoother.order == 2:
        return "parabolas are summed up exactly"
    if smoother.order and not smoother.features.is_plain:
        return "lines along angles and categories are summed up exactly"
    return "" if has_finufft() else "finufft is missing (pip install 'regard[nufft]')"


def _cannot_tile(smoother: Smoother) -> str:
    """Return why far tiles cannot be left out, or nothing."""
    if smoother.key.device.type != "cpu":
        return "tiles are of the CPU"
    if not smoother.features.is_metric:
        return "categories are compared by code" if smoother.features.coded else "values may be missing"
    if smoother.kernel.flat or not smoother.kernel.known:
        return "the kernel is not known to fall with the distance"
    return ""


def validate_method(name: str, method: str, kernel: str | Any) -> None:
    """Raise where a method cannot be that of a kernel."""
    if method == "nufft":
        if kernel != "gaussian":
            raise rejected(name, "method", "be 'auto', 'exact' or 'tiles' for a kernel but the Gaussian", repr(method))
        require_finufft()


def resolve_rtol(name: str, rtol: float | None, dtype: torch.dtype) -> float:
    """Return the requested rtol, by default 1e-6; raise if the dtype cannot hold it."""
    least = ROUNDINGS * torch.finfo(dtype).eps
    if rtol is None:
        return 1e-6
    if not least <= rtol < 1:
        kind = str(dtype).removeprefix("torch.")
        raise rejected(name, "rtol", f"be at least {least:.1g}, what {kind} can hold, and below 1", rtol)
    return float(rtol)
