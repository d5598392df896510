"""Keep the parameters and training points of an estimator, and choose its bandwidth."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, validate_data
from torch import Tensor

from regard._constraints import Integer, Interval, Options, size
from regard._errors import RegardWarning, rejected
from regard.engines.fused.morton import morton_order
from regard.regression import _bandwidth_selection, _validation
from regard.regression._bandwidth_selection import LeaveOneOut
from regard.regression._column_encoder import ColumnEncoder
from regard.regression._evaluator import Evaluator, resolve_rtol, validate_method
from regard.regression._extrapolation import DataSupport
from regard.regression._features import CATEGORICAL, Features, kinds_of
from regard.regression._kernel_smoother import Smoother
from regard.regression._kernels import Kernel, resolve_kernel
from regard.regression._plan import METHODS


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
        _validation.resolve_device(name, self.device)
        Options(_validation.EMPTY)(name, "empty", self.empty)
        size(name, "max_iter", self.max_iter)
        Interval(0, math.inf, "[)")(name, "tol", self.tol)
        if self.subsample is not None:
            Integer(2)(name, "subsample", self.subsample)
        Options(METHODS)(name, "method", self.method)
        if self.rtol is not None:
            Interval(0, 1, "()")(name, "rtol", self.rtol)
        validate_method(name, self.method, self.kernel)
        return name

    def _store_points(self, X: np.ndarray, y: np.ndarray, sample_weight: Any) -> None:
        """Store points; those of weight 0 are left out."""
        rows = np.arange(len(X))
        weight = None
        if sample_weight is not None:
            weight = _check_sample_weight(
                _validation.as_array(sample_weight), X, dtype=np.float64, ensure_non_negative=True
            )
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
        X, y = self._columns.transform(_validation.as_array(X)), _validation.as_array(y)
        return validate_data(self, X, y, dtype=[np.float64, np.float32], **options)

    def _prepare(self, rechoose: bool = True) -> Self:
        """Make coordinates of the points kept, and choose the bandwidth unless a costly one is to stay."""
        name = self._validate_parameters()
        kernel = resolve_kernel(name, self.kernel)
        kinds = kinds_of(name, self.metric, self.n_features_in_, getattr(self, "feature_names_in_", None))
        # Codes have no order.
        kinds = tuple(CATEGORICAL if i in self._columns.categories else kind for i, kind in enumerate(kinds))
        self._features = Features.of(name, kinds, self._X, kernel.form.manhattan)
        self._dtype = _validation.resolve_dtype(name, self.dtype, self._X)
        self._evaluator = self._new_evaluator(name)
        self._center = np.average(self._targets(), axis=0, weights=self._weight)
        asked = _validation.validate_bandwidth(name, self.bandwidth, self.n_features_in_)
        self._residuals: np.ndarray | None = None
        self._left_out: np.ndarray | None = None
        for stale in ("loo_error_", "loo_curve_"):
            self.__dict__.pop(stale, None)
        coordinates = self._features.coordinates(self._X)
        unit = self._features.spread(coordinates, self._weight) * kernel.canonical_factor(coordinates.shape[1])
        if isinstance(asked, str):
            if rechoose or asked in _validation.RULES or not hasattr(self, "bandwidth_"):
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
        if way in _validation.RULES:
            # A weight counts repetitions, as elsewhere in scikit-learn.
            size = float(len(self._X) if self._weight is None else self._weight.sum())
            if self._weight is not None and size < len(self._X) and (self._weight < 1).all():
                warnings.warn(
                    f"{name}: sample_weight counts repetitions, and sums to {size:.3g} for {len(self._X)} rows; "
                    f"bandwidth={way!r} is chosen for so few. Give weights that average 1, or another bandwidth.",
                    RegardWarning,
                    stacklevel=caller_stacklevel(),
                )
            self.bandwidth_ = unit * _bandwidth_selection.rule_of_thumb(way, max(size, 1.0), self.n_features_in_)
            return
        if len(self._X) < 2:
            raise rejected(name, "X", f"have at least 2 rows for bandwidth={way!r}", "n_samples = 1")
        smoother, evaluator = self._points_to_leave_out()
        rows = self._subsample(len(self._X), self.subsample)
        nearest = self.empty == "nearest"
        loo = LeaveOneOut(smoother, nearest, evaluator, rows)
        some = self._subsample(len(self._X), _bandwidth_selection.LOOK) if rows is None else None
        look = None if some is None else LeaveOneOut(smoother, nearest, evaluator, some)
        begin, self.loo_curve_ = _bandwidth_selection.search_bandwidth(loo, look, torch.from_numpy(unit), self.verbose)
        if way == "learned":
            begin, self.n_iter_, self.loo_curve_ = _bandwidth_selection.learn_bandwidths(
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
        return _validation.resolve_device(type(self).__name__, self.device)

    def _bandwidth(self, smoother: Smoother) -> Tensor:
        return _validation.as_tensor(self.bandwidth_).to(smoother.key)

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
        key = _validation.as_tensor(self._features.coordinates(self._X)).to(place, dtype)
        target = _validation.as_tensor(self._targets() - self._center).to(place, dtype)
        weight = (
            None if self._weight is None else _validation.as_tensor(self._weight / self._weight.max()).to(place, dtype)
        )
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
