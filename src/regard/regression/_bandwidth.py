"""Bandwidths: rules of thumb, leave-one-out search, screening of features, and gradient descent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from regard import masks
from regard.regression._sums.evaluator import Evaluator, Plan
from regard.regression._sums.smoother import Estimate, Smoother

# Progress bars --------------------------------------------------------------------------------------------------------


@contextmanager
def progress(verbose: int, what: str, total: int | None) -> Iterator[Callable[[int, str], None]]:
    """Show a progress bar while the block runs; yield a function that takes the steps done and a short note."""
    if not verbose:
        yield _silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
               TextColumn("{task.fields[note]}"))  # fmt: skip
    # Use text in notebooks too: without ipywidgets, rich warns at each step.
    with Progress(*columns, console=Console(stderr=True, force_jupyter=False)) as bars:
        task = bars.add_task(what, total=total, note="")

        def advance(steps: int, note: str = "") -> None:
            bars.update(task, advance=steps)
            if note:
                bars.update(task, note=note)

        yield advance


def _silent(steps: int, note: str = "") -> None:
    """Ignore progress."""


# Select a bandwidth: by rules of thumb, or by the least leave-one-out error, searched or learned by gradient ----------


#: Bandwidths per factor of ten on the coarse grid, and the most points to leave out on it.
STEPS, COARSE = 5, 2048
#: The widest bandwidth, in spreads of the data.
WIDEST = 10.0
#: The relative precision of a number of neighbours.
FINER = 0.02
#: The number of minima of the coarse grid to refine, and the relative precision of the result.
REFINED, EXACT = 3, 1e-3
#: Two minima on a subsample are both refined if the error between them is higher by this factor.
DEEP = 1.01
#: The factor by which each round shortens the step; the second is for compact kernels, whose error is not smooth.
CLOSER, CLOSER_JUMPY = 8, 2
#: Errors that differ by less than this share of the largest are equal: rounding.
EQUAL = 1e-12
#: How many bandwidths share one pass over the tiles.
SHARING = 4
#: The most points predicted by tiles per backward pass.
GRAPH = 1 << 14
#: The largest factor between the initial and a learned bandwidth, and spreads at which a feature no longer counts.
FAR = 1e3
#: The standard deviation of the logarithm of learned bandwidths about where they begin, before the data are seen: by
#: nested cross-validation of ten tables.
PRIOR = 0.25
#: The relative precision of a common factor of bandwidths, and how far it may be from the expected one, as a factor.
ROUGH, RESCALED = 0.02, 3.0


@dataclass(frozen=True)
class Curve:
    """The error, or criterion, at several bandwidths: sorted after a search, in order of iterations after learning.

    Attributes
    ----------
    bandwidths : ndarray (m, n_features)
    errors : ndarray (m,)
    n_neighbors : ndarray (m,) or None
        The numbers of neighbours that a search tried, ascending; ``bandwidths`` are then the scales of the features.
    """

    bandwidths: np.ndarray
    errors: np.ndarray
    n_neighbors: np.ndarray | None = None


def rule_of_thumb(rule: str, count: float, width: int) -> float:
    """Return the bandwidth of a rule of thumb for ``count`` points with ``width`` features, in spreads of the data.

    Scott's: ``n^(−1/(d+4))``; Silverman's: ``(n (d+2) / 4)^(−1/(d+4))``.

    Examples
    --------
    >>> round(rule_of_thumb("scott", 1000, 1), 4), round(rule_of_thumb("silverman", 1000, 1), 4)
    (0.2512, 0.2661)
    """
    base = count if rule == "scott" else count * (width + 2) / 4
    return base ** (-1 / (width + 4))


#: The points to predict from, and those to predict.
Split = tuple[Tensor, Tensor]


class LeaveOneOut:
    """Leave-one-out cross-validation: the error of predicting each point from all the others.

    Parameters
    ----------
    smoother : Smoother
    nearest : bool
        Predict a point without any other in reach by its nearest neighbour's target instead of the mean of the others.
    evaluator : Evaluator
        Chooses the method for the smoother's points.
    rows : Tensor (R,), int64, optional
        The points to leave out, one at a time; all by default.
    """

    def __init__(self, smoother: Smoother, nearest: bool, evaluator: Evaluator, rows: Tensor | None = None) -> None:
        self._double, self.nearest, self.evaluator = smoother, nearest, evaluator
        # The dtype for sums over all pairs.
        wide = smoother.order or smoother.neighbours
        self.smoother = smoother = smoother if wide else smoother.to(evaluator.dtype)
        self.rows = torch.arange(len(smoother.key), device=smoother.key.device) if rows is None else rows
        # The mask for all points at once holds no tensor, so engines can reuse its plan in later calls.
        self._every = masks.leave_one_out() if rows is None and len(self.rows) <= smoother.rows_at_once() else None
        weight = smoother.point_weights()
        self._share = weight[self.rows, 0] / weight[self.rows, 0].sum()

    def predict(self, bandwidth: Tensor, rows: Tensor, plan: Plan) -> Estimate:
        """Return leave-one-out predictions of points ``rows`` (r,) for a bandwidth per feature (n_features,).

        Points without any other in reach are marked in ``reached`` and get a fallback. Several bandwidths
        (W, n_features) must be multiples of one; results then have a leading dimension W.
        """
        query = self.smoother.key[rows]
        if plan.method == "exact" and not self.smoother.neighbours:
            self.evaluator.plan = plan
            mask = masks.leave_one_out(rows) if self._every is None else self._every
            found = self.smoother.estimate(query, bandwidth.to(query.dtype), mask)
        else:
            own, width = self._double.key[rows], bandwidth.to(self._double.key.dtype)
            found = self.evaluator.estimate(self._double, own, width, rows, plan=plan)
            found = replace(found, mean=found.mean.to(query.dtype))
        unreached = ~found.reached
        if not bool(unreached.any()):
            return found
        some = unreached.reshape(-1, len(rows)).any(0)
        target, own = self.smoother.target, rows[some]
        fallback = torch.zeros_like(target[rows])
        if self.nearest:
            unit = bandwidth.detach().reshape(-1, bandwidth.shape[-1])[0]
            near = self.evaluator.nearest(self._double, self._double.key[own], unit.to(self._double.key), own)
            fallback[some] = torch.where((near >= 0)[:, None], target[near.clamp(min=0)], 0.0)
        else:
            weight = self.smoother.point_weights()
            rest = (weight.sum() - weight[own]).clamp(min=torch.finfo(weight.dtype).tiny)
            fallback[some] = ((weight * target).sum(0) - weight[own] * target[own]) / rest
        return Estimate(torch.where(unreached[..., None], fallback, found.mean), found.reached)

    @property
    def count(self) -> int:
        """How many points are predicted."""
        return len(self.rows)

    def _plan(self, bandwidth: Tensor) -> Plan:
        """Return how all rows are to be predicted."""
        return self.evaluator.choose(self._double, len(self.rows), bandwidth.detach().to(self._double.key))

    def _parts(self, bandwidth: Tensor, plan: Plan) -> int:
        """Return how many rows to predict at once."""
        if plan.method == "exact":
            return self.smoother.rows_at_once(plan.share)
        return GRAPH if plan.method in ("tiles", "table") and bandwidth.requires_grad else len(self.rows)

    def predictions(self, bandwidth: Tensor) -> Estimate:
        """Return the predictions of all rows."""
        plan = self._plan(bandwidth)
        parts = self.rows.split(self._parts(bandwidth, plan))
        return Estimate.cat([self.predict(bandwidth, rows, plan) for rows in parts])

    def error(self, bandwidth: Tensor, plan: Plan | None = None) -> Tensor:
        """Return the mean squared error, weighted by point; differentiable with respect to the bandwidth.

        For several bandwidths (W, n_features), which must be multiples of one and share a plan, it has shape (W,).
        """
        plan = plan or self._plan(bandwidth)
        total = bandwidth.new_zeros(bandwidth.shape[:-1])
        size = self._parts(bandwidth, plan)
        for rows, share in zip(self.rows.split(size), self._share.split(size)):
            squares = (self.predict(bandwidth, rows, plan).mean - self.smoother.target[rows]).square().mean(-1)
            part = (squares * share).sum(-1)
            if part.requires_grad and len(rows) < len(self.rows):
                # One part's graph at a time.
                (slope,) = torch.autograd.grad(part, bandwidth)
                part = part.detach() + (slope * (bandwidth - bandwidth.detach())).sum()
            total = total + part
        return total

    @torch.no_grad()
    def errors(self, bandwidths: Tensor) -> Iterator[float]:
        """Yield the error of each of several bandwidths (W, n_features), which must be multiples of one.

        Adjacent bandwidths share calls if there are few points, and passes over tiles.
        """
        together = {
            "exact": max(1, self.smoother.rows_at_once() // len(self.smoother.key)),
            "tiles": SHARING,
            "nufft": 1,
            "table": 1,
        }
        if self.smoother.order == 2:  # the narrowest of them sets the number of groups for the moments of a parabola
            together["exact"] = 1
        planned = [(self._plan(each), each) for each in bandwidths.to(self.smoother.key)]
        for method, some in groupby(planned, key=lambda each: each[0].method):
            group = list(some)
            for i in range(0, len(group), together[method]):
                part = group[i : i + together[method]]
                widths = torch.stack([each for _, each in part])
                yield from self.error(widths if len(part) > 1 else widths[0], part[-1][0]).reshape(-1).tolist()


class HeldOut:
    """Cross-validation by folds: the error of predicting the points of each fold from those of the others.

    Parameters
    ----------
    smoother : Smoother
    splits : sequence of (Tensor, Tensor)
        The points to predict from, and those to predict.
    nearest : bool
        As for :class:`LeaveOneOut`.
    evaluators : sequence of Evaluator
        One for each split.
    """

    def __init__(
        self, smoother: Smoother, splits: Sequence[Split], nearest: bool, evaluators: Sequence[Evaluator]
    ) -> None:
        self.smoother, self.splits, self.nearest = smoother, splits, nearest
        self._folds = [(smoother.at(rest), smoother.at(fold)) for rest, fold in splits]
        self._evaluators = evaluators
        total = sum(float(fold.point_weights().sum()) for _, fold in self._folds)
        self._shares = [fold.point_weights()[:, 0] / total for _, fold in self._folds]

    @property
    def count(self) -> int:
        """How many points are predicted."""
        return sum(len(fold) for _, fold in self.splits)

    def error(self, bandwidth: Tensor) -> Tensor:
        """Return the mean squared error, weighted by point; differentiable with respect to the bandwidth."""
        total = bandwidth.new_zeros(())
        for (rest, fold), share, evaluator in zip(self._folds, self._shares, self._evaluators):
            width = bandwidth.to(rest.key)
            found = evaluator.estimate(rest, fold.key, width)
            mean, unreached = found.mean.to(fold.target), ~found.reached
            if bool(unreached.any()):
                weight = rest.point_weights()
                other = ((weight * rest.target).sum(0) / weight.sum()).expand_as(mean)
                if self.nearest:
                    near = evaluator.nearest(rest, fold.key[unreached], width.detach())
                    other = other.index_put((torch.nonzero(unreached)[:, 0],), rest.target[near])
                mean = torch.where(unreached[:, None], other, mean)
            total = total + ((mean - fold.target).square().mean(-1) * share).sum()
        return total

    @torch.no_grad()
    def errors(self, bandwidths: Tensor) -> Iterator[float]:
        """Yield the error of each of several bandwidths (W, n_features)."""
        for bandwidth in bandwidths:
            yield float(self.error(bandwidth))


class CorrectedAIC:
    """The corrected Akaike criterion of Hurvich, Simonoff and Tsai (1998), and the degrees of freedom that it counts.

    Parameters
    ----------
    smoother : Smoother
    evaluator : Evaluator
        Chooses the method for the smoother's points.
    rows : Tensor (R,), int64, optional
        The points by which to estimate the sums over all points; all by default.
    """

    def __init__(self, smoother: Smoother, evaluator: Evaluator, rows: Tensor | None = None) -> None:
        self.smoother, self.evaluator = smoother, evaluator
        self.rows = torch.arange(len(smoother.key), device=smoother.key.device) if rows is None else rows
        weight = smoother.point_weights()[:, 0].double()
        self._weight, self._count = weight[self.rows], len(smoother.key) / len(self.rows)
        # The number of points, with their repetitions.
        self.count = float(weight.sum()) / smoother.repetition if smoother.repetition else float(len(smoother.key))
        mean = (weight @ smoother.target.double()) / weight.sum()
        variance = weight @ (smoother.target - mean).double().square() / weight.sum()
        self._least = (EQUAL * variance).clamp(min=torch.finfo(torch.float64).tiny)

    @torch.no_grad()
    def evaluate(self, bandwidth: Tensor) -> tuple[float, float]:
        """Return the effective degrees of freedom and the criterion.

        The former are the trace of the matrix S of ``ŷ = S y``. The latter is ``log σ̂² + 1 + 2 (tr S + 1) / (n − tr S −
        2)`` with the mean squared residual σ̂², on average over targets; it is infinite where ``tr S ≥ n − 2``.
        """
        own = self.rows
        found = self.evaluator.estimate(
            self.smoother, self.smoother.key[own], bandwidth.to(self.smoother.key), leverage=True
        )
        assert found.leverage is not None
        trace = float(self._weight @ found.leverage.double()) * self._count
        left = self.count - trace - 2
        if left <= 0 or not bool(found.reached.all()):
            return trace, math.inf
        squares = (found.mean.double() - self.smoother.target[own].double()).square()
        variance = (self._weight @ squares) / self._weight.sum()
        # Smaller residuals are rounding.
        return trace, float(torch.maximum(variance, self._least).log().mean()) + 1 + 2 * (trace + 1) / left

    def errors(self, bandwidths: Tensor) -> Iterator[float]:
        """Yield the criterion of each of several bandwidths (W, n_features)."""
        for bandwidth in bandwidths:
            yield self.evaluate(bandwidth)[1]


@dataclass
class ParabolaSearch:
    """Minimize a function of an integer by parabolas through three places at a time.

    Attributes
    ----------
    low, high : int
        The minimum lies between them.
    center, step : int
        The next places are ``center`` and those a ``step`` away on both sides; a step of 0 ends the search.
    closer : int
        The factor by which the step shrinks once the vertex lies among the places.
    """

    low: int
    high: int
    center: int
    step: int
    closer: int

    @property
    def places(self) -> list[int]:
        """The places to evaluate next."""
        return [min(max(self.center + way * self.step, self.low), self.high) for way in (-1, 0, 1)]

    def advance(self, value: dict[int, float]) -> None:
        """Move to the vertex of the parabola through the places, and shorten the step if it lies among them."""
        left, middle, right = self.places
        vertex = min((middle, left, right), key=lambda place: value[place])
        inside = vertex == middle
        fall, rise = value[middle] - value[left], value[right] - value[middle]
        before, after = middle - left, right - middle
        bend = before * rise - after * fall
        if 0 < bend < math.inf:
            vertex = middle - round((before**2 * rise + after**2 * fall) / (2 * bend))
            inside = left < vertex < right
        if inside:
            self.step //= self.closer
        elif vertex < middle:
            self.high = middle
        else:
            self.low = middle
        self.center = min(max(vertex, self.low), self.high)


def search_bandwidth(
    loo: LeaveOneOut | HeldOut | CorrectedAIC, coarse: LeaveOneOut | CorrectedAIC | None, unit: Tensor, narrow: float,
    verbose: int,
) -> tuple[Tensor, Curve, bool]:  # fmt: skip
    """Return the multiple of ``unit`` (n_features,) with the least error, all errors, and whether it is the narrowest.

    The error may have several minima, so a coarse logarithmic grid from ``narrow`` on comes first, evaluated by
    ``coarse`` (which leaves out fewer points) if given. The lowest few minima on the grid are then refined in parallel.
    Of bandwidths with equal errors, the widest is returned.
    """
    intervals = max(8, round(STEPS * math.log10(WIDEST / narrow)))
    spacing = round(math.log(WIDEST / narrow) / intervals / EXACT)
    grid = range(0, (intervals + 1) * spacing, spacing)
    closer = CLOSER_JUMPY if loo.smoother.kernel.form.compact else CLOSER

    def bandwidths(places: list[int]) -> Tensor:
        """Return the bandwidths this many steps of ``EXACT`` wider than the narrowest."""
        return narrow * torch.exp(EXACT * torch.tensor(places).to(unit))[:, None] * unit

    seen: dict[int, float] = {}
    first = seen if coarse is None else {}
    with progress(verbose, "bandwidth", None) as report:

        def measure(by: LeaveOneOut | HeldOut | CorrectedAIC, errors: dict[int, float], places: Iterable[int]) -> None:
            new = sorted(set(places) - errors.keys())
            for place, error in zip(new, by.errors(bandwidths(new))):
                errors[place] = error
                report(1, f"error {min(errors.values()):.4g}")

        measure(coarse or loo, first, grid)
        padded = [math.inf, *(first[place] for place in grid), math.inf]
        minima = [i for i in range(len(grid)) if padded[i] >= padded[i + 1] <= padded[i + 2]]
        # The minimum on a subsample may differ from that on all points, so the search may move further.
        reach = 1 if coarse is None else intervals
        starts: list[int] = []
        for i in sorted(minima, key=lambda i: (padded[i + 1], -i)):
            between = [padded[min(i, other) + 1 : max(i, other) + 2] for other in starts]
            if coarse is None or all(max(each) > DEEP * padded[i + 1] for each in between):
                starts.append(i)
        searches = [
            ParabolaSearch(grid[max(i - reach, 0)], grid[min(i + reach, intervals)], grid[i], spacing, closer)
            for i in starts[:REFINED]
        ]
        for search in searches:
            search.advance(first)
        while any(search.step for search in searches):
            measure(loo, seen, [place for search in searches for place in search.places])
            for search in searches:
                search.advance(seen)
        measure(loo, seen, [search.center for search in searches])
    places = sorted(seen)
    curve = Curve(bandwidths(places).cpu().numpy(), np.array([seen[place] for place in places]))
    best = widest_of_least(curve.errors)
    return torch.from_numpy(curve.bandwidths[best]), curve, places[best] <= 1


def search_neighbours(
    error: Callable[[int], float], least: int, most: int, verbose: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of neighbours tried, ascending, and their errors, from ``least`` to ``most``.

    On a logarithmic grid, and then by parabolas about its least few minima.
    """
    steps = np.arange(int(np.log(most / least) / FINER) + 1)
    numbers = np.unique(np.append(np.round(least * np.exp(FINER * steps)), most)).astype(int)
    last = len(numbers) - 1
    spacing = max(1, round(math.log(10) / FINER / (2 * STEPS)))
    grid = sorted({*range(0, last + 1, spacing), last})
    seen: dict[int, float] = {}
    with progress(verbose, "neighbours", None) as report:

        def measure(places: Iterable[int]) -> None:
            for place in sorted(set(places) - seen.keys()):
                seen[place] = error(int(numbers[place]))
                report(1, f"error {min(seen.values()):.4g}")

        measure(grid)
        padded = [math.inf, *(seen[place] for place in grid), math.inf]
        minima = [i for i in range(len(grid)) if padded[i] >= padded[i + 1] <= padded[i + 2]]
        minima = sorted(minima, key=lambda i: (padded[i + 1], -i))[:REFINED]
        searches = [
            ParabolaSearch(grid[max(i - 1, 0)], grid[min(i + 1, len(grid) - 1)], grid[i], spacing // 2, CLOSER_JUMPY)
            for i in minima
        ]
        while any(search.step for search in searches):
            measure(place for search in searches for place in search.places)
            for search in searches:
                search.advance(seen)
        measure(search.center for search in searches)
    places = sorted(seen)
    return numbers[places], np.array([seen[place] for place in places])


#: Multiples of a common bandwidth at which a screened feature is tried again.
READMITTED = (1.0, 2.0, 4.0)


def widest_of_least(errors: np.ndarray) -> int:
    """Return the last place of an error that is the least but for rounding."""
    rounding = EQUAL * float(np.abs(errors[np.isfinite(errors)]).max(initial=0.0))
    return int(np.flatnonzero(errors <= errors.min() + rounding)[-1])


@torch.no_grad()
def screen_features(loo: LeaveOneOut | HeldOut, width: Tensor, unit: Tensor, verbose: int) -> Tensor:
    """Return bandwidths (n_features,) that are so wide for irrelevant features that these no longer count.

    A feature is irrelevant if the error without it is not higher. All features are tried once alone, then together in
    ascending order of that error; the last one stays.
    """
    wide, found = FAR * unit.to(width), width.clone()

    features = np.unique(loo.smoother.features.owner).tolist()  # a longitude goes with its latitude

    def error_without(places: list[int]) -> float:
        some = found.clone()
        some[places] = wide[places]
        error = float(loo.error(some))
        report(1, f"error {error:.4g}")
        return error

    if len(features) == 1:
        return found
    with progress(verbose, "features", 2 * len(features)) as report:
        least = error_without([])
        alone = {place: error_without([place]) for place in features}
        dropped: list[int] = []
        for place in sorted(alone, key=lambda each: alone[each]):
            error = error_without([place]) if dropped else alone[place]
            if error <= least and len(dropped) < len(features) - 1:
                least, found[place] = error, wide[place]
                dropped.append(place)
    return found


@torch.no_grad()
def readmit_features(loo: LeaveOneOut | HeldOut, width: Tensor, begin: Tensor, verbose: int) -> Tensor:
    """Return learned bandwidths (n_features,) with those of screened features that count after all.

    What a feature adds shows only once the others have bandwidths of their own. It counts again if that lowers the
    logarithm of the error by more than 2 / n, the price of a parameter in Akaike's criterion. ``begin`` are the
    bandwidths before screening.
    """
    found, least = width.clone(), float(loo.error(width))
    features = np.unique(loo.smoother.features.owner).tolist()
    screened = [place for place in features if float(width[place] / begin[place]) > FAR / 10]
    with progress(verbose, "features", len(READMITTED) * len(screened)) as report:
        for place in screened:
            for factor in READMITTED:
                some = found.clone()
                some[place] = factor * begin[place]
                error = float(loo.error(some))
                report(1, f"error {error:.4g}")
                if error < least * math.exp(-2 / loo.count):
                    least, found = error, some
    return found


def learn_bandwidths(
    loo: LeaveOneOut | HeldOut, begin: Tensor, max_iter: int, tol: float, verbose: int
) -> tuple[Tensor, int, Curve]:
    """Return a bandwidth for each feature by gradient descent (L-BFGS) on the leave-one-out error.

    The fewer points are predicted, the less are bandwidths h moved from where they begin, h₀: what is minimized is
    ``log error + Σ_j log²(h_j / h₀_j) / (n τ²)``, as if ``log h`` had a normal prior with standard deviation τ
    (:data:`PRIOR`) and residuals a normal distribution. It stops when an iteration reduces this by less than ``tol``,
    or after ``max_iter`` iterations. Returns the best bandwidths, the number of iterations, and the error of each step.
    """
    unit = float(loo.error(begin)) or 1.0  # L-BFGS compares improvements with 1
    best = (0.0, begin)
    trace = [(begin.double().cpu().numpy(), unit)]
    origin = begin.log()

    def step(logs: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal best
        log_width = torch.from_numpy(logs).to(begin).requires_grad_()
        error = loo.error(log_width.exp())
        moved = (log_width - origin).square().sum() / (loo.count * PRIOR**2)
        goal = (error / unit + EQUAL).log() + moved
        (slope,) = torch.autograd.grad(goal, log_width)
        value = float(goal.detach())
        trace.append((np.exp(logs), float(error.detach())))
        if value < best[0]:
            best = (value, log_width.detach().exp())
        return value, torch.nan_to_num(slope).double().cpu().numpy()

    start = origin.double().cpu().numpy()
    bounds = [(at - np.log(FAR), at + np.log(FAR)) for at in start]
    with progress(verbose, "bandwidths", max_iter) as report, torch.enable_grad():
        found = minimize(
            step, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": max_iter, "ftol": tol},
            callback=lambda _: report(1, f"error {trace[-1][1]:.4g}"),
        )  # fmt: skip
    curve = Curve(np.stack([widths for widths, _ in trace]), np.array([error for _, error in trace]))
    return best[1], max(int(found.nit), 1), curve


def rescale_bandwidths(loo: LeaveOneOut | HeldOut, begin: Tensor, factor: float, verbose: int) -> tuple[Tensor, Curve]:
    """Return the multiple of bandwidths (n_features,) with the least error near an expected factor, and all errors."""
    near = round(math.log(factor) / ROUGH)
    reach = round(math.log(RESCALED) / ROUGH)
    search = ParabolaSearch(near - reach, near + reach, near, reach // 2, CLOSER)
    seen: dict[int, float] = {}

    def multiples(places: list[int]) -> Tensor:
        return torch.exp(ROUGH * torch.tensor(places).to(begin))[:, None] * begin

    with progress(verbose, "bandwidth", None) as report:
        while search.step:
            new = sorted(set(search.places) - seen.keys())
            for place, error in zip(new, loo.errors(multiples(new))):
                seen[place] = error
                report(1, f"error {min(seen.values()):.4g}")
            search.advance(seen)
    places = sorted(seen)
    curve = Curve(multiples(places).double().cpu().numpy(), np.array([seen[place] for place in places]))
    return multiples(places)[widest_of_least(curve.errors)], curve
