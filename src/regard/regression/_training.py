"""The training points of an estimator: parameter checks, bandwidth selection and extrapolation."""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import multiprocessing.util
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial, wraps
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, validate_data
from torch import Tensor

from regard import masks
from regard._utils.constraints import Integer, Number, OneOf, size
from regard._utils.errors import RegardWarning, described, rejected
from regard.engines.fused.morton import morton_order
from regard.regression._bandwidth import (
    COARSE,
    CorrectedAIC,
    Curve,
    HeldOut,
    LeaveOneOut,
    Split,
    learn_bandwidths,
    readmit_features,
    rescale_bandwidths,
    rule_of_thumb,
    screen_features,
    search_bandwidth,
    search_neighbours,
    widest_of_least,
)
from regard.regression._features import CATEGORICAL, CORNERS, ColumnEncoder, Features, Kind, check_values, kinds_of
from regard.regression._sums.evaluator import FEW_PAIRS, METHODS, Evaluator, resolve_rtol, validate_method
from regard.regression._sums.smoother import Estimate, Kernel, Smoother, column_range, resolve_kernel

# Validate parameters when they are used, and convert arrays of NumPy, pandas and torch --------------------------------


EMPTY = ("nan", "nearest", "mean", "raise")
RULES = ("scott", "silverman")
CHOSEN = ("loo", "learned", "aicc")
MISSING = ("error", "marginal")


def as_array(X: Any) -> Any:
    """Return a tensor as a NumPy array, and everything else unchanged."""
    if isinstance(X, Tensor):
        X = X.detach().cpu()
        return X.float().numpy() if X.dtype == torch.bfloat16 else X.numpy()
    return X


def as_tensor(array: np.ndarray) -> Tensor:
    """Return an array as a tensor, with a copy only if the array is read-only."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def resolve_device(function: str, device: Any) -> torch.device:
    """Return the requested device, the CPU by default; raise if it is not available."""
    expected = "be the name of an available torch device, such as 'cpu' or 'cuda'"
    try:
        found = torch.device("cpu" if device is None else device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, ValueError):
        raise rejected(function, "device", expected, described(device)) from None
    return found


def like_input(X: Any, array: np.ndarray) -> Any:
    """Return an array as a tensor on the device of X if X is a tensor, otherwise unchanged."""
    return torch.from_numpy(array).to(X.device) if isinstance(X, Tensor) else array


def resolve_dtype(function: str, dtype: Any, X: np.ndarray) -> torch.dtype:
    """Return the dtype for computations: the requested one, or that of X."""
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
    """Return a bandwidth for each of ``width`` features, or the name of a selection rule."""
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


#: For sparse data: this share of training points have a nearer neighbour, and a query must be further by this factor.
USUAL, FURTHER = 0.95, math.sqrt(2)
#: The widest bandwidth that counts, as a share of the feature's spread.
WIDEST = 1 / 3
#: How many training points to find nearest neighbours of.
PROBES = 512
#: The size of the subsample to search first.
SUBSAMPLE = 1 << 14
#: The narrowest bandwidth at which a search begins, as a share of Scott's rule.
LEAST = 1e-3
#: Weights up to this sum, or this many times the rows on average, become repetitions to leave out one at a time.
MOST_REPEATED, MANY_TIMES = 1 << 14, 4
#: Rows from which dependence is looked for, the factor between errors that shows it, and the share of the variance.
FEWEST_IN_SEQUENCE, DEPENDENT, NOTICEABLE = 50, 1.5, 0.03
#: The most features that a parabola is fitted to.
CURVED = 3
#: The most cells to allocate; the parts into which their edges are divided, where that makes no more than so many.
CELLS, PARTS, SMALL_CELLS = 1 << 28, (8, 4, 2, 1), 1 << 18


class ExtrapolationWarning(RegardWarning):
    """Some rows to predict lie beyond the training data."""


@dataclass(frozen=True)
class DataSupport:
    """The region in which predictions are supported by training points.

    A query lies beyond it if the nearest training point is further away than the kernel's radius in bandwidths: where
    the weight falls to 1 %, or to 0 for a compact kernel. A bandwidth counts as at most a third of its feature's
    spread, because a wide kernel adds no information in a region without data. If training points are themselves
    further apart, as with many features, a query must lie √2 times as far as 95 % of them do from their nearest
    neighbour. A category that is not in the training data is always beyond.

    Attributes
    ----------
    narrow : ndarray (n_features,)
        The bandwidths used here.
    as_given : bool
        Whether these are the bandwidths of the kernel.
    least : float
        The threshold: minus half the square of a distance, or minus a Manhattan distance.
    """

    narrow: np.ndarray
    as_given: bool
    least: float

    @classmethod
    def of(cls, smoother: Smoother, bandwidth: np.ndarray, spread: np.ndarray, evaluator: Evaluator) -> DataSupport:
        """Return the support of the training points; ``spread`` (n_features,) is the bandwidth equal to the spread."""
        kernel, everywhere = smoother.kernel, smoother.kernel.flat or bool(smoother.neighbours)
        narrow = np.minimum(np.inf if everywhere else bandwidth, WIDEST * spread)
        least = -kernel.radius if kernel.form.manhattan else -(kernel.radius**2) / 2
        found = cls(narrow, not everywhere and bool((bandwidth <= narrow).all()), least)
        if found._weights_suffice(smoother) or len(smoother.key) < 2:
            return found
        rows = torch.linspace(0, len(smoother.key) - 1, min(PROBES, len(smoother.key)), dtype=torch.float64).long()
        rows = rows.to(smoother.key.device)
        times = FURTHER if kernel.form.manhattan else FURTHER**2
        unit = torch.from_numpy(narrow).to(smoother.key)
        if len(smoother.key) > SUBSAMPLE + PROBES and not smoother.features.is_table:
            # If the nearest neighbours in a subsample are near enough, so are those among all points.
            some = torch.linspace(0, len(smoother.key) - 1, SUBSAMPLE + PROBES, dtype=torch.float64).long()
            some = some.to(rows.device)[~torch.isin(some.to(rows.device), rows)]
            sample = replace(smoother, key=smoother.key[some], target=smoother.target[some], weight=None)
            apart = float(sample.closeness(smoother.key[rows], unit).double().quantile(1 - USUAL))
            if times * apart >= least:
                return found
        apart = float(evaluator.closeness(smoother, smoother.key[rows], unit, rows).double().quantile(1 - USUAL))
        return cls(narrow, found.as_given, min(least, times * apart))

    def extrapolates(self, smoother: Smoother, query: Tensor, found: Estimate, evaluator: Evaluator) -> Tensor:
        """Return which queries (L, C) with these estimates lie beyond the support (L,)."""
        nowhere = ~found.reached | smoother.features.unseen(query)
        if self._weights_suffice(smoother):
            return nowhere
        if self.as_given and found.peak is not None:
            return (found.peak < self.least) | nowhere
        narrow = torch.from_numpy(self.narrow).to(query)
        far, points = torch.arange(len(query), device=query.device), smoother
        if float(len(query)) * len(smoother.key) > FEW_PAIRS:
            sure, far, some = self._by_cells(smoother, query)
            nowhere, points = nowhere | sure, points if some is None else smoother.at(some)
        near = evaluator.closeness(points, query[far], narrow, whole=points is smoother) >= self.least
        return nowhere.index_put((far,), ~near | nowhere[far])

    def _weights_suffice(self, smoother: Smoother) -> bool:
        """Return whether a query is supported exactly if any point has a weight."""
        return self.as_given and smoother.kernel.form.compact

    def _by_cells(self, smoother: Smoother, query: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return which queries certainly lie beyond (L,), the rows that are in doubt, and the points near those.

        The points are None where they are many. In a grid of cells so small that a query is supported if a point is in
        its cell or, as each is divided into parts, in one next to it, it lies beyond if no cell nearby has a point.
        """
        (L, C), device = query.shape, query.device
        nowhere, every = torch.zeros(L, dtype=torch.bool, device=device), torch.arange(L, device=device)
        if not smoother.features.is_metric:  # codes lie in no grid
            return nowhere, every, None
        narrow = smoother.coordinate_bandwidth(torch.from_numpy(self.narrow).to(query))
        manhattan = smoother.kernel.form.manhattan
        # Slightly smaller cells, so that rounding never marks an unsupported query.
        edge = narrow * ((-self.least / C if manhattan else math.sqrt(-2 * self.least / C)) * (1 - 1e-6))
        low, high = column_range(smoother.key)
        for parts in PARTS:  # smaller cells leave fewer queries in doubt, and need fewer points to decide
            reach = parts * C + 1 if manhattan else math.isqrt(parts * parts * C) + 1
            sizes = ((high - low) / (edge / parts)).double().floor() + 3 + 2 * reach
            if float(sizes.prod()) <= (CELLS if parts == 1 else SMALL_CELLS):
                break
        else:
            return nowhere, every, None
        edge = edge / parts
        shape = tuple(int(size) for size in sizes)
        own, places = (_cells(points, low, edge, reach + 1, shape) for points in (smoother.key, query))
        taken = np.zeros(shape, dtype=bool)
        taken.reshape(-1)[own] = True
        supported = _grown(taken, parts - 1).reshape(-1)[places]
        beyond = ~_grown(taken, reach).reshape(-1)[places]
        outside = torch.maximum(low - query, query - high).clamp(min=0) / narrow  # from the box of all points
        distance = outside.sum(1) if manhattan else outside.norm(dim=1)
        beyond |= (distance > (-self.least if manhattan else math.sqrt(-2 * self.least)) * (1 + 1e-6)).cpu().numpy()
        doubtful = np.flatnonzero(~supported & ~beyond)
        wanted = np.zeros(shape, dtype=bool)
        wanted.reshape(-1)[places[doubtful]] = True
        some = torch.from_numpy(np.flatnonzero(_grown(wanted, reach).reshape(-1)[own])).to(device)
        few = 2 * len(some) < len(own)  # otherwise, a tree of all points serves later calls too
        return torch.from_numpy(beyond).to(device), torch.from_numpy(doubtful).to(device), some if few else None


def _cells(points: Tensor, low: Tensor, edge: Tensor, margin: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the cell of each point in a grid with a margin around the box, to whose rim points outside count (N,)."""
    found = np.zeros(len(points), dtype=np.int64)
    for axis, cells in enumerate(shape):
        place = ((points[:, axis] - low[axis]) / edge[axis]).floor().clamp(-margin, cells - 1 - margin) + margin
        found = found * cells + place.long().cpu().numpy()
    return found


def _grown(cells: np.ndarray, steps: int) -> np.ndarray:
    """Return which cells of a grid lie within some steps of a marked one along each axis."""
    for axis in range(cells.ndim):
        for _ in range(steps):
            line = np.moveaxis(cells, axis, 0)
            wider = line.copy()
            wider[1:] |= line[:-1]
            wider[:-1] |= line[1:]
            cells = np.moveaxis(wider, 0, axis)
    return np.ascontiguousarray(cells)


# Keep the parameters and training points of an estimator, and choose its bandwidth ------------------------------------


class TrainingPoints(BaseEstimator):
    """An estimator that keeps its training data and chooses a bandwidth; subclasses define the targets."""

    kernel: Any
    bandwidth: Any
    n_neighbors: Any
    metric: Any
    missing: str
    empty: str
    max_iter: int
    tol: float
    subsample: int | None
    cv: Any
    random_state: Any
    method: str
    rtol: float | None
    engine: Any
    device: Any
    dtype: Any
    verbose: int
    _columns: ColumnEncoder

    def _store(self, arguments: dict[str, Any]) -> None:
        """Set an attribute for each argument of a constructor (its ``locals()``), unchecked, as scikit-learn does."""
        self.__dict__.update({name: value for name, value in arguments.items() if name != "self"})

    # A subclass defines these.

    @property
    def _order(self) -> int:
        return 0

    @property
    def _weighs_classes(self) -> bool:
        """Whether weights are also those of classes, and so count no repetitions."""
        return False

    def _targets(self) -> np.ndarray:
        """Return the targets to average (n, M), float64."""
        raise NotImplementedError

    # Training data.

    def _validate_parameters(self) -> str:
        """Check the parameters that need no data, and return the estimator's name."""
        name = type(self).__name__
        resolve_kernel(name, self.kernel)
        resolve_device(name, self.device)
        OneOf(EMPTY)(name, "empty", self.empty)
        OneOf(MISSING)(name, "missing", self.missing)
        size(name, "max_iter", self.max_iter)
        Number(ge=0)(name, "tol", self.tol)
        if self.subsample is not None:
            Integer(ge=2)(name, "subsample", self.subsample)
        if self.cv is not None and self.subsample is not None:
            raise rejected(name, "subsample", "be None with cv, which leaves out all rows", self.subsample)
        OneOf(METHODS)(name, "method", self.method)
        if self.rtol is not None:
            Number(gt=0, lt=1)(name, "rtol", self.rtol)
        validate_method(name, self.method, self.kernel)
        if self.n_neighbors is not None:
            self._validate_neighbors(name)
        return name

    def _validate_neighbors(self, name: str) -> None:
        """Check what goes with ``n_neighbors``."""
        kernel = resolve_kernel(name, self.kernel)
        if self.n_neighbors != "loo":
            if isinstance(self.n_neighbors, str):
                raise rejected(name, "n_neighbors", "be a whole number, 'loo' or None", repr(self.n_neighbors))
            Integer(ge=fewest_neighbors(kernel))(name, "n_neighbors", self.n_neighbors)
        if isinstance(self.bandwidth, str) and self.bandwidth in CHOSEN:
            expected = "be a rule or numbers with n_neighbors, which sets the width: they only scale the features"
            raise rejected(name, "bandwidth", expected, repr(self.bandwidth))
        if kernel.flat:
            raise rejected(name, "kernel", "have a bandwidth for n_neighbors", repr(self.kernel))
        if self.missing != "error":
            expected = "be 'error' with n_neighbors: the distance to a point that misses a value is unknown"
            raise rejected(name, "missing", expected, repr(self.missing))
        if self.method == "nufft":
            raise rejected(name, "method", "be another with n_neighbors: a transform has one bandwidth", "'nufft'")
        if resolve_device(name, self.device).type != "cpu":
            raise rejected(name, "device", "be 'cpu' with n_neighbors, whose trees are there", repr(self.device))

    def _store_points(self, X: np.ndarray, y: np.ndarray, sample_weight: Any) -> None:
        """Store the training points with a positive weight."""
        rows = np.arange(len(X))
        weight = None
        if sample_weight is not None:
            weight = _check_sample_weight(as_array(sample_weight), X, dtype=np.float64, ensure_non_negative=True)
            if not weight.any():  # newer versions of scikit-learn have refused these above, with this sentence
                raise ValueError("Sample weights must contain at least one non-zero number.")
            rows = np.flatnonzero(weight > 0)
            weight = None if (weight[rows] == 1).all() else weight[rows]
        self._X, self._y, self._weight, self._rows = X[rows], y[rows], weight, rows
        self._count = len(X)

    def _append_points(self, X: np.ndarray, y: np.ndarray, sample_weight: Any) -> None:
        """Add training points."""
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
        if isinstance(getattr(y, "dtype", None), np.dtype) and y.dtype.kind in "mM":
            got = "dates" if y.dtype.kind == "M" else "time spans"
            raise rejected(type(self).__name__, "y", "hold numbers or classes", got)
        reset = bool(options.get("reset", True))
        if self._is_table(X, reset=reset):
            self._columns = ColumnEncoder.fit(X, None if reset else self._columns)
        allowed = {"dtype": [np.float64, np.float32], "ensure_all_finite": "allow-nan"}
        X, y = validate_data(self, self._encoded(X), as_array(y), **allowed, **options)
        self._check_values(X)
        return X, y

    def _check_values(self, X: np.ndarray) -> None:
        """Raise if X (n, n_features) has values that its features cannot have."""
        check_values(type(self).__name__, self._kinds(), X, self._names(), self.missing)

    def _check_magnitudes(self, name: str) -> None:
        """Raise if sums of X, y or weights, or of their powers, would overflow, or their squares vanish."""
        way = "loo" if self.n_neighbors == "loo" else self.bandwidth if isinstance(self.bandwidth, str) else ""
        most_x = 1e75 if self._order == 2 else 1e150  # parabolas sum fourth powers
        # Searches sum squares of errors, lines products with X.
        most_y = 1e150 if way in CHOSEN or self._order else 1e300
        if self._dtype == torch.float32:
            most_y = 1e18 if way in ("loo", "learned") and not self._order else 1e37
        weight = np.zeros(0) if self._weight is None else self._weight
        held = (("X", self._X, most_x), ("y", self._targets(), most_y), ("sample_weight", weight, 1e300))
        for argument, values, most in held:
            largest = float(np.nanmax(np.abs(values), initial=0.0))
            if largest > most:
                expected = f"hold numbers up to {most:g}, as sums of larger ones overflow (use another unit)"
                raise rejected(name, argument, expected, f"{largest:.3g}")
        for argument, values, most in held[: 2 if way in CHOSEN else 1]:
            range_ = np.nanmax(values, 0, initial=-np.inf) - np.nanmin(values, 0, initial=np.inf)
            narrow = range_[(range_ > 0) & (range_ < 1 / most)]
            if narrow.size:
                expected = f"be constant or vary by {1 / most:g}, as smaller squares vanish (use another unit)"
                raise rejected(name, argument, expected, f"{narrow.min():.3g}")

    def _names(self) -> Any:
        return getattr(self, "feature_names_in_", [f"x{i}" for i in range(self.n_features_in_)])

    def _kinds(self) -> tuple[Kind, ...]:
        """Return the kind of each feature: that of the metric, unless a column of a frame is categorical."""
        name = type(self).__name__
        found = list(kinds_of(name, self.metric, self.n_features_in_, getattr(self, "feature_names_in_", None)))
        for place, values in self._columns.categories.items():
            kind = found[place][0]
            if kind == "ordered" and place not in self._columns.ordered:
                got = f"text in {self._names()[place]}"
                raise rejected(name, "metric 'ordered'", "be of numbers, or of an ordered Categorical of pandas", got)
            # Codes have no order.
            is_ordered = place in self._columns.ordered and kind != "categorical"
            found[place] = ("ordered", np.arange(float(len(values)))) if is_ordered else CATEGORICAL
        return tuple(found)

    def _is_table(self, X: Any, *, reset: bool = False) -> bool:
        """Return whether X may have two dimensions; raise if it is a frame with other columns than those of the fit."""
        if getattr(X, "ndim", 2) == 2 and hasattr(X, "columns"):
            validate_data(self, X, reset=reset, skip_check_array=True)
        return getattr(X, "ndim", 2) == 2

    def _encoded(self, X: Any) -> Any:
        """Return X with numbers for the dates and categories of a frame; scikit-learn says what else is wrong."""
        return self._columns.transform(type(self).__name__, as_array(X)) if self._is_table(X) else as_array(X)

    def _prepare(self, rechoose: bool = True, advise: bool = True) -> Self:
        """Compute coordinates of the stored points, and choose the bandwidth unless a searched one should stay.

        ``advise`` looks for rows that depend on each other after a search, which takes half as long again.
        """
        name = self._validate_parameters()
        kernel = resolve_kernel(name, self.kernel)
        gaps = self.missing == "marginal"
        self._features = Features.of(name, self._kinds(), self._X, kernel.form.manhattan, gaps)
        if self._order == 2 and (got := self._features.directions) > CURVED:
            expected = f"have at most {CURVED} numeric features for order=2 (order=1 takes any number)"
            raise rejected(name, "X", expected, got)
        if self.n_neighbors is not None and self._features.coded:
            count = sum(map(len, self._features.categories.values()))
            expected = f"have a feature that is no category, and at most {CORNERS} categories, for n_neighbors"
            raise rejected(name, "X", expected, f"{count:,} categories in {len(self._features.kinds)} features")
        self._dtype = resolve_dtype(name, self.dtype, self._X)
        self._check_magnitudes(name)
        self._evaluator = self._new_evaluator(name)
        self._center = np.average(self._targets(), axis=0, weights=self._weight)
        given = validate_bandwidth(name, self.bandwidth, self.n_features_in_)
        self._residuals: np.ndarray | None = None
        self._left_out: np.ndarray | None = None
        self._neighbors = 0  # for the smoothers of a search
        if self.n_neighbors is not None and self.n_neighbors != "loo" and self.n_neighbors > len(self._X):
            came = f"{self.n_neighbors} for n_samples = {len(self._X)}"
            raise rejected(name, "n_neighbors", "be at most the number of rows", came)
        for stale in ("loo_error_", "loo_curve_", "aicc_curve_"):
            self.__dict__.pop(stale, None)
        coordinates = self._features.coordinates(self._X)
        spread, far = self._features.spread(coordinates, self._weight)
        self._features = replace(self._features, scale=tuple(spread.tolist()))
        unit = spread * kernel.canonical_factor(self._features.dimensions)
        far_places = np.unique(np.concatenate([np.zeros(0, int), *far.values()]))
        self.far_rows_ = self._rows[far_places]
        if self.n_neighbors is not None:
            self.bandwidth_ = unit if isinstance(given, str) else given
            self.n_iter_ = 1
            if rechoose or self.n_neighbors != "loo" or not hasattr(self, "n_neighbors_"):
                self.n_neighbors_: int = self._select_neighbors(name, kernel)
            self._neighbors = self.n_neighbors_
        elif isinstance(given, str):
            if rechoose or given in RULES or not hasattr(self, "bandwidth_"):
                self._warn_of_far_rows(name, far)
                self._select_bandwidth(name, kernel, given, unit, advise)
        else:
            self.bandwidth_ = given
            self.n_iter_ = 1
        for latitude, longitude in self._features.partners.items():
            one, other = self.bandwidth_[latitude], self.bandwidth_[longitude]
            if not isinstance(given, str) and one != other:
                expected = "be the same for a latitude and its longitude, in kilometres"
                raise rejected(name, "bandwidth", expected, f"{one:g} and {other:g}")
            self.bandwidth_[longitude] = one
        with torch.no_grad():
            smoother = self._smoother(double=True)
            self._support = DataSupport.of(smoother, self.bandwidth_, unit, self._evaluator)
            self._evaluator.prepare(smoother, self._bandwidth(smoother))
        plan = self._evaluator.plan
        if self.method == "nufft" and plan is not None and plan.method != "nufft":
            text = f"{name}: {plan.reason}, so sums are {plan.method} despite method='nufft'. See plan_."
            warnings.warn(text, RegardWarning, stacklevel=caller_stacklevel())
        return self

    def _new_evaluator(self, name: str) -> Evaluator:
        return Evaluator(name, self.method, resolve_rtol(name, self.rtol, self._dtype), self._dtype)

    def _points_to_leave_out(self) -> tuple[Smoother, Evaluator, Tensor]:
        """Return the points in the fastest order for comparing all pairs, their evaluator, and their stored rows.

        Weights that count repetitions become repetitions, of which one is left out at a time.
        """
        name = type(self).__name__
        smoother, evaluator = self._smoother(double=True), self._evaluator
        order = torch.arange(len(self._X), device=smoother.key.device)
        if self._repeats and counts_repetitions(self._weight):
            order = order.repeat_interleave(torch.from_numpy(self._weight).long().to(order.device))
            smoother = replace(smoother.at(order), weight=None, repetition=0.0)
            evaluator = self._new_evaluator(name)
        if resolve_kernel(name, self.kernel).form.compact:
            along = curve_order(smoother.key)
            smoother, order, evaluator = smoother.at(along), order[along], self._new_evaluator(name)
        return smoother, evaluator, order

    def _select_bandwidth(self, name: str, kernel: Kernel, way: str, unit: np.ndarray, advise: bool) -> None:
        if way == "learned" and not kernel.learnable:
            expected = "be a number, a rule of thumb or 'loo' for a kernel without a gradient"
            raise rejected(name, "bandwidth", expected, f"'learned' with kernel={self.kernel!r}")
        self.n_iter_ = 1
        if way in RULES and math.isinf(kernel.form.variance(len(unit))):
            expected = "be fixed, 'loo' or 'learned' where the kernel has no variance by which to scale a rule"
            raise rejected(name, "bandwidth", expected, f"{way!r} with kernel={self.kernel!r}")
        if way in RULES:
            self.bandwidth_ = unit * self._rule_of_thumb(name, way)
            return
        if len(self._X) < 2:
            raise rejected(name, "X", f"have at least 2 rows for bandwidth={way!r}", "n_samples = 1")
        error, coarse, pilot = self._criteria(name, way)
        first, start = pilot or error, torch.from_numpy(unit)
        begin, curve, narrowest = search_bandwidth(
            first, None if pilot else coarse, start, self._narrowest(first.smoother, unit), self.verbose
        )
        if not np.isfinite(curve.errors).any():
            expected = "have at least 3 rows more than the degrees of freedom that the widest bandwidth takes"
            raise rejected(name, "X", expected, f"{len(error.smoother.key)} rows")
        if narrowest:
            blocks = "bandwidth='loo' with cv=" if way == "aicc" else "cv="
            text = (
                f"{name}: the least error is that of the narrowest bandwidth tried, at which a row is predicted by its "
                f"nearest neighbours alone. Rows that repeat or depend on each other cause this; {blocks} leaves out "
                "blocks of rows, and bandwidth= sets another."
            )
            warnings.warn(text, RegardWarning, stacklevel=caller_stacklevel())
        least = float(curve.errors.min())
        if way == "learned":
            assert not isinstance(first, CorrectedAIC)
            assert not isinstance(error, CorrectedAIC) and not isinstance(coarse, CorrectedAIC)
            begin, curve = self._learn_bandwidths(first, begin, start)
            if pilot is not None:
                factor = (len(first.smoother.key) / len(error.smoother.key)) ** (1 / (self.n_features_in_ + 4))
                begin, curve = rescale_bandwidths(coarse or error, begin, factor, self.verbose)
            with torch.no_grad():
                least = float(error.error(begin))
        self.bandwidth_ = begin.double().cpu().numpy()
        if way == "aicc":
            self.aicc_curve_ = curve
        else:
            self.loo_curve_, self.loo_error_ = curve, least
        if self.cv is None and advise:
            self._warn_of_dependence(name, begin)

    def _rule_of_thumb(self, name: str, way: str) -> float:
        """Return the bandwidth of a rule, in units."""
        # Weights count repetitions, as elsewhere in scikit-learn.
        counted = None if self._weighs_classes else self._weight
        size = float(len(self._X) if counted is None else counted.sum())
        if counted is not None and size < len(self._X) and (counted < 1).all():
            warnings.warn(
                f"{name}: sample_weight counts repetitions and sums to {size:.3g} for {len(self._X)} rows; "
                f"bandwidth={way!r} assumes that few points. Pass weights that average 1, or another bandwidth.",
                RegardWarning,
                stacklevel=caller_stacklevel(),
            )
        return rule_of_thumb(way, max(size, 1.0), self.n_features_in_)

    def _learn_bandwidths(self, error: LeaveOneOut | HeldOut, begin: Tensor, start: Tensor) -> tuple[Tensor, Curve]:
        """Return a bandwidth for each feature from gradients of an error, and its course; drop useless features."""
        screened = screen_features(error, begin.to(error.smoother.key), start, self.verbose)
        if bool((screened != begin).any()):  # in fewer dimensions, neighbours are closer
            screened, _ = rescale_bandwidths(error, screened, 1.0, self.verbose)
        before = begin.to(screened)
        begin, self.n_iter_, curve = learn_bandwidths(error, screened, self.max_iter, self.tol, self.verbose)
        again = readmit_features(error, begin, before, self.verbose)
        left = self.max_iter - self.n_iter_
        if bool((again != begin).any()) and left > 0:
            begin, more, curve = learn_bandwidths(error, again, left, self.tol, self.verbose)
            self.n_iter_ += more
            return begin, curve
        return again, curve

    def _criteria(
        self, name: str, way: str
    ) -> tuple[LeaveOneOut | HeldOut | CorrectedAIC, LeaveOneOut | CorrectedAIC | None, LeaveOneOut | HeldOut | None]:
        """Return what a search of the bandwidth minimizes, and two estimates of it where there are many points.

        The first estimate is by some of the points for a coarse grid, or None. The second is within some of the points,
        which learning compares with each other; otherwise None.
        """
        smoother, evaluator, order = self._points_to_leave_out()
        nearest = self.empty == "nearest"
        # Rows far from all others are predicted by none, whatever the bandwidth.
        close = torch.from_numpy(~np.isin(self._rows[order.cpu().numpy()], self.far_rows_)).to(order.device)
        kept = None if bool(close.all()) else torch.nonzero(close)[:, 0]
        if way == "aicc":
            if kept is not None:  # such rows would count as parameters
                smoother, evaluator = smoother.at(kept), self._new_evaluator(name)
            whole = CorrectedAIC(smoother, evaluator, self._subsample(None, len(smoother.key), self.subsample))
            some = self._subsample(None, len(smoother.key), COARSE) if self.subsample is None else None
            return whole, None if some is None else CorrectedAIC(smoother, evaluator, some), None
        some = self._subsample(kept, len(order), COARSE)
        error: LeaveOneOut | HeldOut
        coarse = None
        if self.cv is None:
            rows = self._subsample(kept, len(order), self.subsample)
            error = LeaveOneOut(smoother, nearest, evaluator, kept if rows is None else rows)
            if some is not None and rows is None:
                coarse = LeaveOneOut(smoother, nearest, evaluator, some)
        else:
            splits = self._splits(order, close)
            error = HeldOut(smoother, splits, nearest, [self._new_evaluator(name) for _ in splits])
        return error, coarse, None if way == "loo" or some is None else self._pilot(name, error, some)

    def _select_neighbors(self, name: str, kernel: Kernel) -> int:
        """Return the number of neighbours: as given, or that with the least leave-one-out error."""
        if self.n_neighbors != "loo":
            return int(self.n_neighbors)
        least = fewest_neighbors(kernel)
        if len(self._X) < least + 2:
            got = f"n_samples = {len(self._X)}"
            raise rejected(name, "X", f"have at least {least + 2} rows for n_neighbors='loo'", got)
        smoother, evaluator, order = self._points_to_leave_out()
        nearest, most = self.empty == "nearest", len(order) - 1
        unit = as_tensor(self.bandwidth_)
        close = torch.from_numpy(~np.isin(self._rows[order.cpu().numpy()], self.far_rows_))
        if self.cv is None:
            kept = None if bool(close.all()) else torch.nonzero(close)[:, 0]
            rows = self._subsample(kept, len(order), self.subsample or COARSE)
            rows = kept if rows is None else rows
        else:
            splits = self._splits(order, close)
            evaluators = [self._new_evaluator(name) for _ in splits]  # whose trees serve all numbers
            most = min(len(rest) for rest, _ in splits)

        def error(k: int) -> float:
            some = replace(smoother, neighbours=k)
            if self.cv is None:
                return float(LeaveOneOut(some, nearest, evaluator, rows).error(unit))
            return float(HeldOut(some, splits, nearest, evaluators).error(unit))

        with torch.no_grad():
            numbers, errors = search_neighbours(error, min(least, most), most, self.verbose)
        best = widest_of_least(errors)
        self.loo_curve_ = Curve(np.tile(self.bandwidth_, (len(numbers), 1)), errors, numbers)
        self.loo_error_ = float(errors[best])
        return int(numbers[best])

    def _pilot(self, name: str, error: LeaveOneOut | HeldOut, some: Tensor) -> LeaveOneOut | HeldOut:
        """Return the error within some of the points."""
        smoother = error.smoother.at(some)
        if isinstance(error, LeaveOneOut):
            return LeaveOneOut(smoother, error.nearest, self._new_evaluator(name))
        among = [tuple(torch.nonzero(torch.isin(some, each))[:, 0] for each in both) for both in error.splits]
        splits = [(rest, fold) for rest, fold in among if len(rest) and len(fold)]
        return HeldOut(smoother, splits, error.nearest, [self._new_evaluator(name) for _ in splits])

    def _narrowest(self, smoother: Smoother, unit: np.ndarray) -> float:
        """Return where a search begins, in units.

        At a quarter of Scott's bandwidth or of the distance of points on a grid, or of the lower quartile of distances
        between neighbours if that is less: clusters of points are narrower than all of them.
        """
        count, width = self._weight_of_all(), len(unit)
        rule = min(rule_of_thumb("scott", count, width), count ** (-1 / width))
        rows = torch.linspace(0, len(smoother.key) - 1, min(COARSE, len(smoother.key)), dtype=torch.float64).long()
        points = smoother.key[rows.to(smoother.key.device)].unique(dim=0)
        if len(points) < 2:
            return 0.25 * rule
        some = torch.linspace(0, len(points) - 1, min(PROBES, len(points)), dtype=torch.float64).long()
        sample = replace(smoother, key=points, target=points[:, :1], weight=None)
        mask = masks.leave_one_out(some.to(points.device))
        close = -2 * sample.closeness(points[some], torch.from_numpy(unit).to(points), mask).double()
        apart = close / 2 if smoother.kernel.form.manhattan else close.sqrt()
        # Of as many points, neighbours are closer than in a sample.
        apart = float(apart.quantile(0.25)) * (len(points) / max(len(smoother.key), 1)) ** (1 / width)
        return 0.25 * max(min(rule, apart), LEAST * rule)

    def _weight_of_all(self) -> float:
        """Return the number of points, counting repetitions."""
        return float(self._weight.sum()) if self._weight is not None and self._repeats else float(len(self._X))

    @property
    def _repeats(self) -> bool:
        """Whether weights are whole numbers, and so count repetitions in all respects."""
        return not self._weighs_classes and are_whole(self._weight)

    def _splits(self, order: Tensor, close: Tensor) -> list[Split]:
        """Return the folds of ``cv`` as places in an order of the stored points; far rows are not predicted."""
        from sklearn.model_selection import check_cv  # slow to import, with rich

        found = []
        for rest, fold in check_cv(self.cv).split(np.arange(self._count)):
            chosen = (
                torch.from_numpy(np.isin(self._rows[order.cpu().numpy()], each)).to(order.device)
                for each in (rest, fold)
            )
            some, held = (torch.nonzero(each)[:, 0] for each in chosen)
            held = held[close[held]]
            if len(some) and len(held):
                found.append((some, held))
        if not found:
            raise rejected(
                type(self).__name__, "cv", "leave some rows to predict from, and some to predict", repr(self.cv)
            )
        return found

    def _warn_of_far_rows(self, name: str, far: dict[int, np.ndarray]) -> None:
        """Name the rows that lie far from all others, as they have no part in the choice of a bandwidth."""
        names = getattr(self, "feature_names_in_", [f"x{i}" for i in range(self.n_features_in_)])
        for place, rows in far.items():
            which = ", ".join(f"{self._rows[row]:,} ({self._X[row, place]:g})" for row in rows[:3].tolist())
            which += f" and {len(rows) - 3:,} more" if len(rows) > 3 else ""
            text = (
                f"{name}: in {names[place]}, row{'s' * (len(rows) > 1)} {which}, counted from 0, "
                f"lie{'s' * (len(rows) == 1)} far from all others. "
                "The bandwidth is chosen without; check or remove them."
            )
            warnings.warn(text, RegardWarning, stacklevel=caller_stacklevel())

    def _warn_of_dependence(self, name: str, bandwidth: Tensor) -> None:
        """Warn if rows next to each other in the data predict each other much better than other rows do.

        Blocks of consecutive rows are left out together at several bandwidths, as in cross-validation of dependent data
        (Chu and Marron 1991; Burman, Chow and Nolan 1994). For independent rows it makes next to no difference.
        """
        count = min(len(self._X), COARSE)
        if count < FEWEST_IN_SEQUENCE:
            return
        blocks_by = "bandwidth='loo' with cv=10" if self.bandwidth == "aicc" else "cv=10"
        smoother = self._smoother(double=True).at(torch.arange(count, device=self._device()))
        rows = torch.arange(count, device=smoother.key.device)
        fold = (rows // max(5, count // 50)) % 5
        splits = [(torch.nonzero(fold != i)[:, 0], torch.nonzero(fold == i)[:, 0]) for i in range(5)]
        nearest, width = self.empty == "nearest", bandwidth.to(smoother.key)
        blocks = HeldOut(smoother, splits, nearest, [self._new_evaluator(name) for _ in splits])
        with torch.no_grad():
            alone = float(LeaveOneOut(smoother, nearest, self._new_evaluator(name)).error(width))
            together = min(blocks.errors(torch.stack([width * 2.0**i for i in range(5)])))
        weight = smoother.point_weights()
        mean = (weight * smoother.target).sum(0) / weight.sum()
        variance = float((weight * (smoother.target - mean).square()).sum(0).mean() / weight.sum())
        if together > DEPENDENT * alone and together - alone > NOTICEABLE * variance > 0:
            text = (
                f"{name}: rows depend on those next to them: left out one by one, R² is {1 - alone / variance:.3f}, in "
                f"blocks of consecutive rows {1 - together / variance:.3f}. Then the bandwidth is too narrow, and "
                f"errors of new rows are larger; {blocks_by} leaves out blocks."
            )
            warnings.warn(text, RegardWarning, stacklevel=caller_stacklevel())

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.missing == "marginal"
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "bandwidth_")

    def _subsample(self, kept: Tensor | None, count: int, most: int | None) -> Tensor | None:
        """Return a random sample of at most ``most`` of the places ``kept`` of ``count``; None for all."""
        count = count if kept is None else len(kept)
        if most is None or most >= count:
            return None
        drawn = torch.from_numpy(np.sort(check_random_state(self.random_state).choice(count, most, replace=False)))
        return drawn.to(self._device()) if kept is None else kept[drawn.to(kept.device)]

    def _device(self) -> torch.device:
        return resolve_device(type(self).__name__, self.device)

    def _bandwidth(self, smoother: Smoother) -> Tensor:
        return as_tensor(self.bandwidth_).to(smoother.key)

    def _smoother(self, double: bool = False) -> Smoother:
        """Return a smoother of the points on the device; ``double`` in float64 if a method but "exact" may run."""
        kernel = resolve_kernel(type(self).__name__, self.kernel)
        order = self._order
        # Local lines and some methods suffer from cancellation in float32.
        place = self._device()
        double = double and place.type == "cpu" and self._evaluator.needs_double(len(self._X))
        dtype = torch.float64 if order or double or self._neighbors else self._dtype
        key = as_tensor(self._features.coordinates(self._X)).to(place, dtype)
        target = as_tensor(self._targets() - self._center).to(place, dtype)
        weight = None if self._weight is None else as_tensor(self._weight / self._weight.max()).to(place, dtype)
        repetition = 1 / float(self._weight.max()) if self._weight is not None and self._repeats else 0.0
        return Smoother(self._features, kernel, key, target, weight, order, self.engine, repetition, self._neighbors)


def fewest_neighbors(kernel: Kernel) -> int:
    """Return the fewest neighbours that leave any point a weight, which is 0 at one bandwidth with some kernels."""
    return 2 if kernel.form.compact and kernel.form.smooth else 1


def counts_repetitions(weight: np.ndarray | None) -> bool:
    """Return whether positive weights (n,) stand for repetitions of rows that are left out one at a time.

    They are whole numbers whose sum is not too large. Otherwise a row is left out with all of its weight.
    """
    if weight is None or not are_whole(weight):
        return False
    return float(weight.sum()) <= max(MOST_REPEATED, MANY_TIMES * len(weight))


def are_whole(weight: np.ndarray | None) -> bool:
    """Return whether weights (n,) are whole numbers, of which those above 2**53 are so only for lack of digits."""
    return weight is not None and bool(((weight == np.round(weight)) & (weight < 2**53)).all())


def all_or_nothing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Method decorator: restore the estimator's state after any exception, including a keyboard interrupt."""

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
    """Return the stack level of the nearest caller outside this package and torch, for warnings."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("regard", "torch"):
        frame, level = frame.f_back, level + 1
    return level


#: The callers that were warned, by a hash of the lines that led to the call.
_warned: set[tuple[str, int]] = set()
#: When this process began to count, and how much later than its siblings it may have begun, in seconds.
_BEGAN, _LATER = time.time(), 600.0


def warn_once_a_caller(text: str, category: type[Warning]) -> None:
    """Warn, but by Python's default filter only the first time that the same lines of code lead here.

    Python compares texts, in which numbers differ, and forgets them in ``catch_warnings``, which scikit-learn enters
    for each fold. Worker processes of one parent, such as those of ``n_jobs``, count as one. Filters such as "always",
    "error" and "ignore" hold as usual.
    """
    level = caller_stacklevel()
    frame: FrameType | None = sys._getframe(level - 1)
    assert frame is not None
    if _action(text, category, str(frame.f_globals.get("__name__")), frame.f_lineno) == "default":
        lines = []
        while frame is not None:
            lines.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        caller = text.partition(":")[0], hash(tuple(lines))
        if caller in _warned:
            return
        _warned.add(caller)
        if multiprocessing.current_process().name != "MainProcess" and _sibling_warned(caller[0], lines):
            return
    warnings.warn(text, category, stacklevel=level)


def _sibling_warned(subject: str, lines: list[tuple[CodeType, int]]) -> bool:
    """Return whether another child of the parent process has warned from the same lines; if not, note that this has.

    The note is an empty file in the folder for temporary files until this process ends. One that is older than the
    siblings is left from a process that was killed.
    """
    where = [(code.co_filename, line) for code, line in lines]
    digest = hashlib.sha256(repr((subject, where)).encode()).hexdigest()[:16]
    note = Path(tempfile.gettempdir()) / f"regard-warned-{os.getppid()}-{digest}"
    try:
        try:
            note.touch(exist_ok=False)
        except FileExistsError:
            if note.stat().st_mtime > _BEGAN - _LATER:
                return True
            note.touch()
    except OSError:  # without such a folder, each process warns
        return False
    multiprocessing.util.Finalize(None, partial(note.unlink, missing_ok=True), exitpriority=0)
    return False


def _action(text: str, category: type[Warning], module: str, line: int) -> str:
    """Return the action of the first of Python's warning filters that matches."""
    for action, message, kind, where, number in warnings.filters:
        if (
            issubclass(category, kind)
            and (message is None or message.match(text))
            and (where is None or where.match(module))
            and number in (0, line)
        ):
            return action
    return "default"


def curve_order(key: Tensor) -> Tensor:
    """Return an order of points (N, C) along a space-filling curve, which keeps neighbours together."""
    return morton_order(key[None, None], key[None, None])[1][0, 0]
