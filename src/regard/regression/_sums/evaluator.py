"""The choice of the method that computes the sums, and its run."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard import masks, scores
from regard._utils.errors import available_memory, rejected
from regard.regression._sums.fourier import (
    AXES,
    COARSEST,
    FINEST,
    Series,
    TransformedPoints,
    has_finufft,
    require_finufft,
)
from regard.regression._sums.near import BLOCK, LOOK_PAIRS, NEAR, TILE, TOGETHER, Neighbours, Tiles, unit_of
from regard.regression._sums.smoother import Estimate, Report, Smoother

# What ran and why, and how long each method should take ---------------------------------------------------------------


#: The ways to sum up over training points.
METHODS = ("auto", "exact", "nufft", "tiles")


@dataclass(frozen=True)
class Plan:
    """How the last estimates were made; ``print`` says it in sentences.

    Attributes
    ----------
    method : {"exact", "nufft", "tiles"}
        All pairs; a Fourier transform; exact sums over the tiles of points that are near enough to count.
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
    seconds : dict of str to float
        How long each method should take, of those that could run.
    by_tree : bool
        With "tiles", whether a tree finds the points that are near each query, instead.
    """

    method: str
    reason: str
    queries: int
    by_tiles: int = 0
    bound: float = 0.0
    rtol: float = 0.0
    memory: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    by_tree: bool = False

    def __str__(self) -> str:
        lines = [f"{self.method}, {self.queries:,} queries: {self.reason}."]
        if self.by_tree:
            lines.append("Each query lies far from the others, so a tree finds the points near it.")
        if self.method == "nufft":
            lines.append(
                f"Errors are at most {self.bound:.1e} (rtol {self.rtol:g}) times |ŷ − ȳ| + σ of the targets; "
                f"{self.by_tiles:,} queries, where weights sum to too little for that, were summed up exactly."
            )
            lines.append(f"The transforms take about {self.memory / 1e6:,.0f} MB.")
        if self.seconds:
            each = ", ".join(f"{name} {value:.2g} s" for name, value in sorted(self.seconds.items()))
            lines.append(f"Predicted: {each}.")
        return "\n".join(lines)


@dataclass(frozen=True)
class Task:
    """What is to be summed up, as costs depend on it.

    Attributes
    ----------
    points, queries, features, targets : int
    columns : int
        Values that are averaged exactly.
    transforms : tuple of int
        Complex transforms of the points, and of the queries.
    compact : bool
    """

    points: int
    queries: int
    features: int
    columns: int
    transforms: tuple[int, int]
    compact: bool = False

    def exact(self) -> float:
        """Return the seconds of comparing all pairs."""
        pairs = float(self.points) * self.queries
        rates = _costs()["exact"]["compact" if self.compact else "all"]
        return _product(rates, (1.0, pairs, pairs * self.features, pairs * self.columns))

    def nufft(self, series: Series, held: bool) -> float:
        """Return the seconds of transforming points, unless they are ``held``, and queries."""
        width = math.log(1 / series.eps) / (math.pi * math.sqrt(0.5)) + 2
        grid = series.size * 2**self.features
        seconds = _product(_costs()["around"][str(self.features)], (1.0, series.size * sum(self.transforms)))
        for way, count, times in zip(("forth", "back"), (self.points, self.queries), self.transforms):
            if way == "forth" and held:
                continue
            rates = _costs()[way][str(self.features)]
            spread = count * width**self.features
            seconds += _product(rates, (1.0, count, times * spread, times * grid * math.log2(max(grid, 2.0))))
        return seconds

    def tiles(self, share: float, together: float, sorted_: bool, sharing: int = 1) -> float:
        """Return the seconds where a query needs a share of the points, and so many are together.

        Looks are shared by so many bandwidths.
        """
        # Those together need what any of them does.
        apart = (together / max(self.queries, 1)) ** (1 / self.features)
        share = (share ** (1 / self.features) + min(apart, 1.0)) ** self.features if together > 1 else share
        calls = max(1.0, self.queries / together)
        rates = _costs()["tiles"]
        pairs = calls * max(together, BLOCK) * min(share, 1.0) * self.points
        order = 0.0 if sorted_ else rates[0] * self.points
        looks = order + calls * (rates[1] + rates[2] * self.points)
        return looks / sharing + rates[3] * pairs

    def neighbours(self, share: float, held: bool, sharing: int = 1) -> float:
        """Return the seconds where a tree finds the share of the points that a query needs, for so many bandwidths."""
        point, call, query, found, pair = _costs()["neighbours"]
        pairs = self.queries * min(share, 1.0) * self.points
        tree = 0.0 if held else point * self.points
        # All that share compare the pairs of the widest, on average about twice as many as they would.
        return (tree + call + query * self.queries) / sharing + (found + pair * min(sharing, 2)) * pairs


@cache
def _costs() -> dict:  # type: ignore[type-arg]
    """Return the seconds of each term, by rates that ``python -m benchmarks.regression_costs`` fits."""
    return dict(json.loads(files("regard.regression").joinpath("costs.json").read_text(encoding="utf-8"))["rates"])


def _product(rates: list[float], amounts: tuple[float, ...]) -> float:
    return sum(rate * amount for rate, amount in zip(rates, amounts))


# Estimates by the method that is asked for, or the cheapest: all pairs, exact tiles, or a transform with a bound ------


#: Points up to which "auto" compares all pairs, and pairs.
FEW, FEW_PAIRS = 1 << 11, 1 << 22
#: Points and queries that a look at the weights takes.
LOOK, LOOKERS = 2048, 128
#: The bound of a mean over what transforms are asked for, where all weights are the same; of lines; of deviations.
MAGNIFIED, BY_LINES, BY_DEVIATIONS = 30.0, 10.0, 30.0
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
        self._transformed: dict[bytes, TransformedPoints] = {}
        self._trees: dict[bytes, Neighbours | None] = {}
        self._looks: dict[bytes, PilotStatistics] = {}

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

    def _neighbours(self, smoother: Smoother, bandwidth: Tensor) -> Neighbours | None:
        """Return the points in a tree, which is made once for all multiples of a bandwidth."""
        place = unit_of(smoother, bandwidth).tobytes()
        if place not in self._trees:
            self._trees = {place: Neighbours.of(smoother, bandwidth)}
        return self._trees[place]

    # Estimates.

    def estimate(
        self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None = None, *,
        spread: bool = False, peak: bool = False, report: Report = lambda *_: None, plan: Plan | None = None,
    ) -> Estimate:  # fmt: skip
        """Return the estimate at queries (L, C), each without its ``own`` point (L,) if that is given.

        The peak comes with ``peak`` from all but the transform. Differentiable with respect to the bandwidth.
        """
        self.plan = plan = plan or self.choose(smoother, len(query), bandwidth, spread)
        if plan.method == "exact":
            return self._exact(smoother, query, bandwidth, own, spread, peak, report)
        if plan.method == "tiles":
            near = self._neighbours(smoother, bandwidth) if plan.by_tree else None
            if near is not None:
                return near.estimate(smoother, query, bandwidth, own, report, spread=spread, peak=peak)
            return self.tiles(smoother).estimate(smoother, query, bandwidth, own, report, spread=spread, peak=peak)
        transformed = self._transform(smoother, bandwidth, spread)
        found, bound = transformed.estimate(smoother, query, bandwidth, own, spread)
        lost = torch.nonzero(~(bound <= self.rtol))[:, 0]
        held = bound[bound <= self.rtol]
        self.plan = replace(plan, by_tiles=len(lost), bound=float(held.max()) if len(held) else 0.0)
        report(len(held), "")
        if not len(lost):
            return found
        rest_own = None if own is None else own[lost]
        if len(lost) <= TILE:  # fewer pairs than putting points in order takes
            rest = self._exact(smoother, query[lost], bandwidth, rest_own, spread, False, report, torch.float64)
        else:
            rest = self.tiles(smoother).estimate(smoother, query[lost], bandwidth, rest_own, report, spread=spread)
        return found.replaced(lost, rest)

    def _exact(
        self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None, spread: bool, peak: bool,
        report: Report, dtype: torch.dtype | None = None,
    ) -> Estimate:  # fmt: skip
        """Return the estimate by all pairs."""
        dtype = dtype or (torch.float64 if smoother.order else self.dtype)
        smoother, query, bandwidth = smoother.to(dtype), query.to(dtype), bandwidth.to(dtype)
        parts = []
        for rows in torch.arange(len(query), device=query.device).split(smoother.rows_at_once):
            mask = None if own is None else masks.leave_one_out(own[rows])
            parts.append(smoother.estimate(query[rows], bandwidth, mask, spread=spread, peak=peak))
            report(len(rows), "")
        return Estimate.cat(parts) if parts else smoother.estimate(query, bandwidth, spread=spread, peak=peak)

    def nearest(self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None = None) -> Tensor:
        """Return the nearest point of each query (L,) but its ``own``; −1 where there is none."""
        if self._few(smoother, len(query)):
            return smoother.nearest(query, bandwidth, None if own is None else masks.leave_one_out(own))
        return self.tiles(smoother).nearest(smoother, query, bandwidth, own)

    def closeness(self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None = None) -> Tensor:
        """Return how near the nearest point of each query is, as :meth:`Smoother.closeness` does (L,)."""
        if self._few(smoother, len(query)):
            parts = [query.new_zeros(0)]
            for rows in torch.arange(len(query), device=query.device).split(smoother.rows_at_once):
                mask = None if own is None else masks.leave_one_out(own[rows])
                parts.append(smoother.closeness(query[rows], bandwidth, mask))
            return torch.cat(parts)
        return self.tiles(smoother).closeness(smoother, query, bandwidth, own)

    def _few(self, smoother: Smoother, count: int) -> bool:
        """Return whether all pairs are compared for a nearest point."""
        pairs = float(count) * len(smoother.key)
        return self.method == "exact" or smoother.key.device.type != "cpu" or pairs <= FEW_PAIRS

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
        """Transform the points where "nufft" is asked for, so that predictions find them."""
        if self.method == "nufft":
            self.plan = self.choose(smoother, 0, bandwidth, False)
            if self.plan.method == "nufft":
                self._transform(smoother, bandwidth, False)

    # The choice.

    def choose(self, smoother: Smoother, count: int, bandwidth: Tensor, spread: bool = False, sharing: int = 1) -> Plan:
        """Return the plan for so many queries: the method, why, and what each would cost.

        Tiles are looked at once for so many bandwidths that are ``sharing`` them.
        """
        pairs = float(count) * len(smoother.key)
        if self.method == "exact":
            return Plan("exact", "method='exact'", count)
        if self.method == "auto" and (len(smoother.key) <= FEW or pairs <= FEW_PAIRS):
            return Plan("exact", "all pairs are few", count)
        task = _task(smoother, count, spread)
        seconds = {} if self.method != "auto" else {"exact": task.exact()}
        cannot_tile, by_tree = _cannot_tile(smoother), False
        if not cannot_tile and self.method != "nufft":
            look = self._look(smoother, bandwidth)
            seconds["tiles"] = task.tiles(look.share, look.together(count), self._tiles is not None, sharing)
            tree = task.neighbours(look.needed, unit_of(smoother, bandwidth).tobytes() in self._trees, sharing)
            by_tree, seconds["tiles"] = tree < seconds["tiles"], min(tree, seconds["tiles"])
        if self.method == "tiles":
            if cannot_tile:
                return Plan("exact", cannot_tile, count)
            return Plan("tiles", "method='tiles'", count, seconds=seconds, by_tree=by_tree)
        cannot, series = _cannot_transform(smoother), None
        if not cannot:
            series = self._series(smoother, bandwidth, spread)
            memory = _memory(task, series)
            most = available_memory()
            if not math.isfinite(memory) or (most is not None and memory > MEMORY_SHARE * most):
                cannot = f"a grid of {series.size:.2g} frequencies would take {memory / 1e9:.3g} GB"
        if cannot:
            if self.method == "nufft":
                return Plan("exact" if cannot_tile else "tiles", f"no transform: {cannot}", count)
        else:
            assert series is not None
            held = self._held(smoother, bandwidth, series.eps)
            seconds["nufft"] = task.nufft(series, held)
            if self.method == "auto":
                lost = replace(task, queries=round(count * self._look(smoother, bandwidth).lost(series.eps, self.rtol)))
                seconds["nufft"] += lost.exact()
        best = min(seconds, key=lambda name: seconds[name])
        why = "it should be the fastest" + (f"; no transform: {cannot}" if cannot and best != "nufft" else "")
        if self.method == "nufft":
            why = "method='nufft'"
        if best != "nufft" or series is None:
            return Plan(best, why, count, seconds=seconds, by_tree=by_tree and best == "tiles")
        return Plan("nufft", why, count, 0, 0.0, self.rtol, round(_memory(task, series)), seconds)

    def _held(self, smoother: Smoother, bandwidth: Tensor, eps: float) -> bool:
        found = self._transformed.get(smoother.coordinate_bandwidth(bandwidth.detach()).numpy().tobytes())
        return found is not None and found.eps <= eps

    def _eps(self, smoother: Smoother, bandwidth: Tensor, spread: bool) -> float:
        """Return what transforms are asked for, a power of ten, so that few queries' bounds exceed rtol."""
        least = self._look(smoother, bandwidth).least / MAGNIFIED
        least = least / (BY_LINES if smoother.order else 1.0) / (BY_DEVIATIONS if spread else 1.0)
        return float(min(max(10.0 ** math.floor(math.log10(self.rtol * least)), FINEST), COARSEST))

    def _series(self, smoother: Smoother, bandwidth: Tensor, spread: bool) -> Series:
        unit = smoother.coordinate_bandwidth(bandwidth.detach()).numpy()
        unit = unit / math.sqrt(2) if spread else unit
        low, high = smoother.key.amin(0).numpy() / unit, smoother.key.amax(0).numpy() / unit
        return Series(low, high, self._eps(smoother, bandwidth, spread))

    def _look(self, smoother: Smoother, bandwidth: Tensor) -> PilotStatistics:
        place = bandwidth.detach().numpy().tobytes()
        if place not in self._looks:
            self._looks = {place: PilotStatistics.at(smoother, bandwidth.detach())}
        return self._looks[place]


@dataclass(frozen=True)
class PilotStatistics:
    """What some of the points say of all of them.

    Attributes
    ----------
    weights : ndarray (LOOKERS,)
        What share of the weight of all points some points see, smallest first.
    share : float
        The share of points that a point's exact sum needs.
    needed : float
        The same, where those alone are found that it needs.
    near : float
        The share of points in one cell of those that look at tiles together.
    points : int
        All of them.
    """

    weights: np.ndarray
    share: float
    needed: float
    near: float
    points: int

    @classmethod
    def at(cls, smoother: Smoother, bandwidth: Tensor) -> PilotStatistics:
        """Look at points of a smoother."""
        N = len(smoother.key)
        keys = torch.linspace(0, N - 1, min(N, LOOK), dtype=torch.float64).long()
        own = torch.linspace(0, len(keys) - 1, min(LOOKERS, len(keys)), dtype=torch.float64).long()
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
        near = float((gap.numpy() <= NEAR / 2).all(-1).mean())
        share = float(needed.mean())
        by_itself = max(share - 1 / len(keys), 0.0) + 1 / N  # the nearest of all is nearer than that of some
        return cls(np.sort(seen + alone), share + 4 * TILE / N, by_itself, max(near, TILE / N), N)

    @property
    def least(self) -> float:
        """The smallest share of the weight that any of the points sees, itself included."""
        return float(self.weights[0])

    def lost(self, eps: float, rtol: float) -> float:
        """Return the share of points whose sum is too small for this rtol."""
        return float((self.weights * rtol < eps * MAGNIFIED).mean())

    def together(self, count: int) -> float:
        """Return how many of so many queries look at tiles together."""
        return float(min(TOGETHER, max(1.0, count * self.near, (LOOK_PAIRS * count / self.points) ** 0.5)))


def _task(smoother: Smoother, count: int, spread: bool) -> Task:
    """Return what sums at so many queries take."""
    C, M = smoother.key.shape[1], smoother.target.shape[1]
    moments = C + C * (C + 1) // 2 if smoother.order else 0
    columns = 1 + M * (1 + spread) + moments + (C * M if smoother.order else 0)
    pairs = -(-(1 + M) // 2)
    forth = pairs + ((M + 1) // 2 + 2 if spread else 0)
    back = pairs * (1 + moments) + ((M + 1) // 2 + 2 * (1 + moments) if spread else 0)
    return Task(len(smoother.key), count, C, columns, (forth, back), smoother.kernel.form.compact)


def _memory(task: Task, series: Series) -> float:
    """Return the bytes that transforms take: coordinates, their order, strengths and grids."""
    each = 8.0 * (task.features + 1) + 16
    return each * max(task.points, task.queries) + 16 * series.size * (task.transforms[0] + 2 + 2.0**task.features)


def _cannot_transform(smoother: Smoother) -> str:
    """Return why no transform can sum up, or nothing."""
    C = smoother.key.shape[1]
    if smoother.kernel.form is not scores.Gaussian:
        return "the kernel is not the Gaussian"
    if smoother.key.device.type != "cpu":
        return "it runs on the CPU"
    if not 1 <= C <= AXES:
        return f"points have {C} coordinates, more than {AXES}"
    if smoother.order and not smoother.features.is_plain:
        return "lines along angles and categories are summed up exactly"
    return "" if has_finufft() else "finufft is missing (pip install 'regard[nufft]')"


def _cannot_tile(smoother: Smoother) -> str:
    """Return why far tiles cannot be left out, or nothing."""
    if smoother.key.device.type != "cpu":
        return "tiles are of the CPU"
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
    """Return the rtol asked for, by default 1e-6; raise where the dtype cannot hold it."""
    least = ROUNDINGS * torch.finfo(dtype).eps
    if rtol is None:
        return 1e-6
    if not least <= rtol < 1:
        kind = str(dtype).removeprefix("torch.")
        raise rejected(name, "rtol", f"be at least {least:.1g}, what {kind} can hold, and below 1", rtol)
    return float(rtol)
