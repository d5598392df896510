"""Training points as estimators keep them: parameters checked, a bandwidth chosen, extrapolation noticed."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import wraps
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, validate_data
from torch import Tensor

from regard._utils.constraints import Integer, Number, OneOf, size
from regard._utils.errors import RegardWarning, described, rejected
from regard.engines.fused.morton import morton_order
from regard.regression._bandwidth import LOOK, LeaveOneOut, learn_bandwidths, rule_of_thumb, search_bandwidth
from regard.regression._features import CATEGORICAL, ColumnEncoder, Features, kinds_of
from regard.regression._sums.evaluator import FEW_PAIRS, METHODS, Evaluator, resolve_rtol, validate_method
from regard.regression._sums.smoother import Estimate, Kernel, Smoother, resolve_kernel

# Validate parameters when they are used, and convert arrays of NumPy, pandas and torch --------------------------------


EMPTY = ("nan", "nearest", "mean", "raise")
RULES = ("scott", "silverman")
CHOSEN = ("loo", "learned")


def as_array(X: Any) -> Any:
    """Return a tensor's numbers as a NumPy array, and everything else as it is."""
    if isinstance(X, Tensor):
        X = X.detach().cpu()
        return X.float().numpy() if X.dtype == torch.bfloat16 else X.numpy()
    return X


def as_tensor(array: np.ndarray) -> Tensor:
    """Return an array as a tensor, without a copy where nobody forbids to write to it."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def resolve_device(function: str, device: Any) -> torch.device:
    """Return the device asked for, the CPU by default; raise where there is none of this name here."""
    expected = "be the name of a device that torch has here, such as 'cpu' or 'cuda'"
    try:
        found = torch.device("cpu" if device is None else device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, ValueError):
        raise rejected(function, "device", expected, described(device)) from None
    return found


def like_input(X: Any, array: np.ndarray) -> Any:
    """Return an array as a tensor on the device of X where that is a tensor, and as it is elsewhere."""
    return torch.from_numpy(array).to(X.device) if isinstance(X, Tensor) else array


def resolve_dtype(function: str, dtype: Any, X: np.ndarray) -> torch.dtype:
    """Return the dtype to calculate in: the one asked for, or that of X."""
    if dtype is None:
        return torch.float32 if X.dtype == np.float32 else torch.float64
    expected = "be 'float32', 'float64' or None"
    if not isinstance(dtype, torch.dtype):
        try:
            dtype = getattr(torch, np.dtype(dtype).name, None)
        except TypeError:
            raise rejected(function, "dtype", expected, described(dtype)) from None
    if dtype not in (torch.float32, torch.float64):
        raise rejected(function, "dtype", expected, str(dtype))
    return dtype


def validate_bandwidth(function: str, bandwidth: Any, width: int) -> np.ndarray | str:
    """Return a bandwidth for each of ``width`` features, or the name of the way to choose it; else raise."""
    ways = (*RULES, *CHOSEN)
    expected = f"be a positive number, {width} of them, or one of {', '.join(map(repr, ways))}"
    if isinstance(bandwidth, str):
        if bandwidth not in ways:
            near = "".join(f" (did you mean {each!r}?)" for each in get_close_matches(bandwidth, ways, 1))
            raise rejected(function, "bandwidth", expected, f"{bandwidth!r}{near}")
        return bandwidth
    try:
        found = np.asarray(as_array(bandwidth))
        given = found.astype(np.float64)
    except (TypeError, ValueError):
        raise rejected(function, "bandwidth", expected, described(bandwidth), TypeError) from None
    if given.shape not in ((), (1,), (width,)):
        raise rejected(function, "bandwidth", expected, f"an array of shape {given.shape}")
    if found.dtype.kind not in "iuf" or _has_bool(bandwidth) or not (np.isfinite(given) & (given > 0)).all():
        raise rejected(function, "bandwidth", expected, bandwidth)
    return np.full(width, given) if given.ndim == 0 else np.broadcast_to(given, (width,)).copy()


def _has_bool(bandwidth: Any) -> bool:
    each = bandwidth if isinstance(bandwidth, (list, tuple)) else (bandwidth,)
    return any(isinstance(one, (bool, np.bool_)) for one in each)


# Detect extrapolation: queries that lie too far from every training point ---------------------------------------------


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


# Keep the parameters and training points of an estimator, and choose its bandwidth ------------------------------------


class TrainingPoints(BaseEstimator):
    """An estimator that keeps its training data and chooses a bandwidth; subclasses say what the targets are."""

    def __init__(
        self,
        kernel: Any,
        bandwidth: Any,
        metric: Any,
        empty: str,
        max_iter: int,
        tol: float,
        subsample: int | None,
        random_state: Any,
        method: str,
        rtol: float | None,
        engine: Any,
        device: Any,
        dtype: Any,
        verbose: int,
    ) -> None:
        self.kernel = kernel
        self.bandwidth = bandwidth
        self.metric = metric
        self.empty = empty
        self.max_iter = max_iter
        self.tol = tol
        self.subsample = subsample
        self.random_state = random_state
        self.method = method
        self.rtol = rtol
        self.engine = engine
        self.device = device
        self.dtype = dtype
        self.verbose = verbose

    _columns: ColumnEncoder

    # A subclass defines these.

    @property
    def _order(self) -> int:
        return 0

    def _targets(self) -> np.ndarray:
        """Return what is averaged (n, M), float64."""
        raise NotImplementedError

    # Training data.

    def _validate_parameters(self) -> str:
        """Check the parameters that need no data, and return the estimator's name."""
        name = type(self).__name__
        resolve_kernel(name, self.kernel)
        resolve_device(name, self.device)
        OneOf(EMPTY)(name, "empty", self.empty)
        size(name, "max_iter", self.max_iter)
        Number(ge=0)(name, "tol", self.tol)
        if self.subsample is not None:
            Integer(ge=2)(name, "subsample", self.subsample)
        OneOf(METHODS)(name, "method", self.method)
        if self.rtol is not None:
            Number(gt=0, lt=1)(name, "rtol", self.rtol)
        validate_method(name, self.method, self.kernel)
        return name

    def _store_points(self, X: np.ndarray, y: np.ndarray, sample_weight: Any) -> None:
        """Store points; those of weight 0 are left out."""
        rows = np.arange(len(X))
        weight = None
        if sample_weight is not None:
            weight = _check_sample_weight(as_array(sample_weight), X, dtype=np.float64, ensure_non_negative=True)
            rows = np.flatnonzero(weight > 0)
            weight = None if (weight[rows] == 1).all() else weight[rows]
        self._X, self._y, self._weight, self._rows = X[rows], y[rows], weight, rows
        self._count = len(X)

    def _append_points(self, X: np.ndarray, y: np.ndarray, sample_weight: Any) -> None:
        """Add points to those that are there."""
        before = self._X, self._y, self._weight, self._rows, self._count
        self._store_points(X, y, sample_weight)
        old_X, old_y, old_weight, old_rows, old_count = before
        if old_weight is not None or self._weight is not None:
            weights = [np.ones(len(X)) if w is None else w for X, w in ((old_X, old_weight), (self._X, self._weight))]
            self._weight = np.concatenate(weights)
        self._X, self._y = np.concatenate([old_X, self._X]), np.concatenate([old_y, self._y])
        self._rows = np.concatenate([old_rows, old_count + self._rows])
        self._count += old_count

    def _validate_data(self, X: Any, y: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return X and y as arrays."""
        self._columns = ColumnEncoder.fit(X, None if options.get("reset", True) else self._columns)
        X, y = self._columns.transform(as_array(X)), as_array(y)
        return validate_data(self, X, y, dtype=[np.float64, np.float32], **options)

    def _prepare(self, rechoose: bool = True) -> Self:
        """Make coordinates of the points kept, and choose the bandwidth unless a costly one is to stay."""
        name = self._validate_parameters()
        kernel = resolve_kernel(name, self.kernel)
        kinds = kinds_of(name, self.metric, self.n_features_in_, getattr(self, "feature_names_in_", None))
        # Codes have no order.
        kinds = tuple(CATEGORICAL if i in self._columns.categories else kind for i, kind in enumerate(kinds))
        self._features = Features.of(name, kinds, self._X, kernel.form.manhattan)
        self._dtype = resolve_dtype(name, self.dtype, self._X)
        self._evaluator = self._new_evaluator(name)
        self._center = np.average(self._targets(), axis=0, weights=self._weight)
        asked = validate_bandwidth(name, self.bandwidth, self.n_features_in_)
        self._residuals: np.ndarray | None = None
        self._left_out: np.ndarray | None = None
        for stale in ("loo_error_", "loo_curve_"):
            self.__dict__.pop(stale, None)
        coordinates = self._features.coordinates(self._X)
        unit = self._features.spread(coordinates, self._weight) * kernel.canonical_factor(coordinates.shape[1])
        if isinstance(asked, str):
            if rechoose or asked in RULES or not hasattr(self, "bandwidth_"):
                self._select_bandwidth(name, kernel, asked, unit)
        else:
            self.bandwidth_ = asked
            self.n_iter_ = 1
        with torch.no_grad():
            smoother = self._smoother(double=True)
            self._support = DataSupport.of(smoother, self.bandwidth_, unit, self._evaluator)
            self._evaluator.prepare(smoother, self._bandwidth(smoother))
        plan = self._evaluator.plan
        if self.method == "nufft" and plan is not None and plan.method != "nufft":
            text = f"{name}: {plan.reason}, so sums are {plan.method} although method='nufft'. plan_ says more."
            warnings.warn(text, RegardWarning, stacklevel=caller_stacklevel())
        return self

    def _new_evaluator(self, name: str) -> Evaluator:
        return Evaluator(name, self.method, resolve_rtol(name, self.rtol, self._dtype), self._dtype)

    def _points_to_leave_out(self) -> tuple[Smoother, Evaluator]:
        """Return the points in the order in which all pairs of them are compared fastest, and who evaluates them."""
        name = type(self).__name__
        if resolve_kernel(name, self.kernel).form.compact:
            return self._smoother(in_order=True, double=True), self._new_evaluator(name)
        return self._smoother(double=True), self._evaluator

    def _select_bandwidth(self, name: str, kernel: Kernel, way: str, unit: np.ndarray) -> None:
        if way == "learned" and not kernel.learnable:
            expected = "be fixed, by rule or 'loo' where the kernel's weights do not change smoothly with it"
            raise rejected(name, "bandwidth", expected, f"'learned' with kernel={self.kernel!r}")
        self.n_iter_ = 1
        if way in RULES and math.isinf(kernel.form.variance(len(unit))):
            expected = "be fixed, 'loo' or 'learned' where the kernel has no variance by which to scale a rule"
            raise rejected(name, "bandwidth", expected, f"{way!r} with kernel={self.kernel!r}")
        if way in RULES:
            # A weight counts repetitions, as elsewhere in scikit-learn.
            size = float(len(self._X) if self._weight is None else self._weight.sum())
            if self._weight is not None and size < len(self._X) and (self._weight < 1).all():
                warnings.warn(
                    f"{name}: sample_weight counts repetitions, and sums to {size:.3g} for {len(self._X)} rows; "
                    f"bandwidth={way!r} is chosen for so few. Give weights that average 1, or another bandwidth.",
                    RegardWarning,
                    stacklevel=caller_stacklevel(),
                )
            self.bandwidth_ = unit * rule_of_thumb(way, max(size, 1.0), self.n_features_in_)
            return
        if len(self._X) < 2:
            raise rejected(name, "X", f"have at least 2 rows for bandwidth={way!r}", "n_samples = 1")
        smoother, evaluator = self._points_to_leave_out()
        rows = self._subsample(len(self._X), self.subsample)
        nearest = self.empty == "nearest"
        loo = LeaveOneOut(smoother, nearest, evaluator, rows)
        some = self._subsample(len(self._X), LOOK) if rows is None else None
        look = None if some is None else LeaveOneOut(smoother, nearest, evaluator, some)
        begin, self.loo_curve_ = search_bandwidth(loo, look, torch.from_numpy(unit), self.verbose)
        if way == "learned":
            begin, self.n_iter_, self.loo_curve_ = learn_bandwidths(
                loo, begin.to(smoother.key), self.max_iter, self.tol, self.verbose
            )
        self.bandwidth_ = begin.double().cpu().numpy()
        self.loo_error_ = float(self.loo_curve_.errors.min())

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "bandwidth_")

    def _subsample(self, count: int, most: int | None) -> Tensor | None:
        """Return at most so many rows, drawn at random; None for all."""
        if most is None or most >= count:
            return None
        drawn = check_random_state(self.random_state).choice(count, most, replace=False)
        return torch.from_numpy(np.sort(drawn)).to(self._device())

    def _device(self) -> torch.device:
        return resolve_device(type(self).__name__, self.device)

    def _bandwidth(self, smoother: Smoother) -> Tensor:
        return as_tensor(self.bandwidth_).to(smoother.key)

    def _smoother(self, in_order: bool = False, double: bool = False) -> Smoother:
        """Return the points on the device.

        For kernels of short reach ``in_order``, so that neighbours are together; in float64 with ``double``, where
        another method than "exact" may run.
        """
        kernel = resolve_kernel(type(self).__name__, self.kernel)
        order = self._order
        # Sums of products cancel too much for float32.
        place = self._device()
        double = double and place.type == "cpu" and self._evaluator.needs_double(len(self._X))
        dtype = torch.float64 if order or double else self._dtype
        key = as_tensor(self._features.coordinates(self._X)).to(place, dtype)
        target = as_tensor(self._targets() - self._center).to(place, dtype)
        weight = None if self._weight is None else as_tensor(self._weight / self._weight.max()).to(place, dtype)
        if in_order:
            along = curve_order(key)
            key, target = key[along], target[along]
            weight = None if weight is None else weight[along]
        return Smoother(self._features, kernel, key, target, weight, order, self.engine)


def all_or_nothing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Method decorator: what raises, a keyboard interrupt included, leaves the estimator as it was."""

    @wraps(method)
    def guarded(self: TrainingPoints, *arguments: Any, **options: Any) -> Any:
        before = self.__dict__.copy()
        try:
            with torch.inference_mode(False):
                return method(self, *arguments, **options)
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    return guarded


def caller_stacklevel() -> int:
    """Return the level of the caller's caller that is no code of this package, nor of what stands around it."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("regard", "torch"):
        frame, level = frame.f_back, level + 1
    return level


def curve_order(key: Tensor) -> Tensor:
    """Return the places of points (N, C) along a curve on which neighbours are together."""
    return morton_order(key[None, None], key[None, None])[1][0, 0]
