"""The base class of the estimators: predictions, weights and explanations at queries."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.base import clone
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from regard._utils.constraints import size
from regard._utils.errors import RegardWarning, rejected
from regard.regression._bandwidth import CorrectedAIC, LeaveOneOut, progress
from regard.regression._features import ColumnEncoder
from regard.regression._sums.evaluator import Plan
from regard.regression._sums.smoother import Estimate, Smoother
from regard.regression._training import (
    ExtrapolationWarning,
    TrainingPoints,
    as_array,
    as_tensor,
    like_input,
    validate_bandwidth,
    warn_once_a_caller,
)

# The training points that made a prediction, with their weights -------------------------------------------------------


class AttendedPoints(NamedTuple):
    """The training points with the most weight in each prediction.

    Attributes
    ----------
    weights : ndarray (n, k)
        Largest first; 0 where there are fewer points.
    indices : ndarray (n, k)
        Rows of the training data; −1 where there are fewer points.
    """

    weights: Any
    indices: Any


@dataclass(frozen=True)
class Explanation:
    """A prediction and the training points behind it; ``print`` shows a table.

    Attributes
    ----------
    prediction : object
        A number, an array or a label.
    rows : list of dict
        For each point, the most important first: ``index`` (row of the training data), ``weight``, ``target``,
        ``distance`` (in bandwidths) and its features by name.
    share : float
        The share of these points in the total weight (of absolute values if some are negative).
    effective : float
        The effective number of points, ``1 / Σ α²`` of the kernel's weights.
    """

    prediction: Any
    rows: list[dict[str, Any]]
    share: float
    effective: float

    def to_frame(self) -> Any:
        """Return the rows as a pandas DataFrame."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def __str__(self) -> str:
        head = (
            f"prediction {_short(self.prediction)}; these {len(self.rows)} points have {self.share:.1%} of the weight; "
            f"effectively {self.effective:.3g} points"
        )
        if not self.rows:
            return head
        cells = [list(self.rows[0])] + [[_short(value) for value in row.values()] for row in self.rows]
        sizes = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        return "\n".join([head, *("  ".join(cell.rjust(size) for cell, size in zip(line, sizes)) for line in cells)])

    __repr__ = __str__


def _short(value: Any) -> str:
    if isinstance(value, (float, np.floating)):
        return f"{value:.4g}"
    if isinstance(value, np.ndarray):
        return "[" + " ".join(_short(each) for each in value.ravel()) + "]"
    return str(value)


class Prediction(NamedTuple):
    """Averages at L queries, and how they spread; NaN where that is unknown.

    Attributes
    ----------
    mean : ndarray (L, M)
    deviation : ndarray (L, M) or None
        The standard deviation of the targets.
    error : ndarray (L, M) or None
        The standard error of the mean.
    freedom : ndarray (L,) or None
        The degrees of freedom of the standard deviation.
    """

    mean: np.ndarray
    deviation: np.ndarray | None = None
    error: np.ndarray | None = None
    freedom: np.ndarray | None = None


#: Rows up to which nested cross-validation has 10 folds.
SMALL = 1000


# Base of the estimators: predictions, weights and explanations at queries ---------------------------------------------


class KernelEstimator(TrainingPoints):
    """An estimator that weights its training data by a kernel; subclasses define the targets and predictions."""

    def _display_target(self, row: int) -> Any:
        """Return the target of a training row as passed to ``fit``."""
        raise NotImplementedError

    def predict(self, X: Any) -> Any:
        """Return the predictions."""
        raise NotImplementedError

    def _query(self, X: Any, smoother: Smoother) -> Tensor:
        X = validate_data(
            self, self._encoded(X), reset=False, dtype=[np.float64, np.float32], ensure_all_finite="allow-nan"
        )
        self._check_values(X)
        return as_tensor(self._features.coordinates(X)).to(smoother.key)

    @torch.no_grad()
    def _estimate(self, X: Any, spread: bool = False) -> Prediction:
        """Return the averages, with ``spread`` also how the targets spread about them."""
        check_is_fitted(self)
        smoother = self._smoother(double=True)
        query, bandwidth = self._query(X, smoother), self._bandwidth(smoother)
        found = self._evaluate(smoother, query, bandwidth, spread=spread)
        beyond = self._check_reach(smoother, query, bandwidth, found)
        mean = found.mean.double().cpu().numpy() + self._center
        unreached = ~found.reached
        if bool(unreached.any()):
            fallback = self._fallback_predictions(smoother, query[unreached], bandwidth, len(query))
            mean[unreached.cpu().numpy()] = fallback
        mean = mean.astype(self._result_dtype())
        if found.variance is None or found.noise is None or found.freedom is None:
            return Prediction(mean)
        deviation = torch.where(beyond[:, None], torch.nan, found.variance.sqrt())
        error = deviation * found.noise.clamp(min=0).sqrt()[:, None]
        spread_of_data, spread_of_mean = (
            each.cpu().numpy().astype(self._result_dtype()) for each in (deviation, error)
        )
        return Prediction(mean, spread_of_data, spread_of_mean, found.freedom.double().cpu().numpy())

    def _evaluate(
        self, smoother: Smoother, query: Tensor, bandwidth: Tensor, *, spread: bool = False, slope: bool = False
    ) -> Estimate:
        """Return the estimate at queries (L, C) by the chosen method."""
        peak = smoother.kernel.form is smoother.kernel.distance_score
        with progress(self.verbose, "predicting", len(query)) as report:
            return self._evaluator.estimate(
                smoother, query, bandwidth, spread=spread, peak=peak, slope=slope, report=report
            )

    @property
    def plan_(self) -> Plan | None:
        """How the last predictions were computed: method, reason, error bound, memory; None before the first."""
        check_is_fitted(self)
        return self._evaluator.plan

    def _result_dtype(self) -> np.dtype:
        return np.dtype(str(self._dtype).removeprefix("torch."))

    def _check_reach(self, smoother: Smoother, query: Tensor, bandwidth: Tensor, found: Estimate) -> Tensor:
        """Return which queries lie beyond the training data, and warn of them, or raise as ``empty`` says."""
        unreached = ~found.reached
        if self.empty == "raise" and bool(unreached.any()):
            self._fallback_predictions(smoother, query[unreached], bandwidth, len(query))
        beyond = self._support.extrapolates(smoother, query, found, self._evaluator)
        self._warn_of_extrapolation(beyond, unreached)
        return beyond

    def _warn_of_extrapolation(self, beyond: Tensor, unreached: Tensor) -> None:
        """Warn with the number of queries beyond the training data, except those that ``empty`` handles."""
        nearest = int(unreached.sum()) if self.empty == "nearest" else 0
        count = int(beyond.sum() - unreached.sum()) + nearest
        if not count:
            return
        text = f"{count} of {len(beyond)} queries lie beyond the reach of the training data and are extrapolated"
        if nearest:
            text += f"; {nearest} of them get the target of the nearest training point (empty= sets another fallback)"
        text += ". extrapolates(X) says which."
        warn_once_a_caller(f"{type(self).__name__}: {text}", ExtrapolationWarning)

    @torch.no_grad()
    def extrapolates(self, X: Any) -> Any:
        """Return which rows lie beyond the reach of the training data, so that predictions there are extrapolated.

        A row lies beyond if its nearest training point is further away than the kernel reaches: the support of a
        compact kernel; for others, the distance at which the weight falls to 1 % (3 bandwidths for the Gaussian). For
        this purpose a bandwidth counts as at most a third of its feature's standard deviation, because a wide kernel
        adds no information in a region without data. If training points are themselves further apart, as with many
        features, a row must lie √2 times as far as 95 % of them do from their nearest neighbour. A row with a category
        that is not in the training data is always beyond.

        Parameters
        ----------
        X : array-like (n, n_features)

        Returns
        -------
        ndarray (n,), bool

        Examples
        --------
        >>> from regard.regression import NadarayaWatsonRegressor
        >>> model = NadarayaWatsonRegressor(bandwidth=0.5).fit([[0.0], [0.5], [1.0]], [0.0, 0.5, 1.0])
        >>> model.extrapolates([[0.7], [1.2], [10.0]])
        array([False, False,  True])
        """
        check_is_fitted(self)
        smoother = replace(self._smoother(double=True), order=0)
        query, bandwidth = self._query(X, smoother), self._bandwidth(smoother)
        plan = self._evaluator.choose(smoother, len(query), bandwidth)
        if plan.method != "nufft":  # NUFFT has already transformed all targets
            smoother = replace(smoother, target=smoother.target[:, :1])
        peak = smoother.kernel.form is smoother.kernel.distance_score
        found = self._evaluator.estimate(smoother, query, bandwidth, peak=peak, plan=plan)
        beyond = self._support.extrapolates(smoother, query, found, self._evaluator)
        return like_input(X, beyond.cpu().numpy())

    def _fallback_predictions(self, smoother: Smoother, query: Tensor, bandwidth: Tensor, count: int) -> np.ndarray:
        """Return the predictions for queries without any training point in reach, ``count`` being all queries."""
        if self.empty == "raise":
            got = f"{len(query)} of {count} queries beyond the reach of every training point"
            raise rejected(type(self).__name__, "X", "lie within the kernel's reach (empty='raise')", got)
        if self.empty == "nan":
            return np.full((len(query), len(self._center)), np.nan)
        if self.empty == "mean":
            return np.broadcast_to(self._center, (len(query), len(self._center)))
        nearest = self._evaluator.nearest(smoother, query, bandwidth).cpu().numpy()
        return np.where((nearest >= 0)[:, None], self._targets()[nearest], self._center)

    @torch.no_grad()
    def attention(self, X: Any, topk: int = 10) -> AttendedPoints:
        """Return the training points with the largest weights in each prediction.

        Parameters
        ----------
        X : array-like (n, n_features)
        topk : int, default 10
            The number of points, at most that of the training data.

        Returns
        -------
        AttendedPoints
            ``weights`` (n, topk) and ``indices`` (n, topk), rows of the training data in the order of ``fit`` and
            ``partial_fit``, padded with weight 0 and index −1. A query without any point in reach has only padding (NaN
            with ``empty="nan"``; with "nearest" the nearest point has weight 1). With ``order=1`` or 2 weights may be
            negative; those largest in absolute value come first.
        """
        check_is_fitted(self)
        k = min(size(self, "topk", topk), len(self._X))
        smoother = self._smoother()
        query, bandwidth = self._query(X, smoother), self._bandwidth(smoother)
        at = self._evaluator.with_own_widths(smoother, query, bandwidth)
        if self._order:
            parts = []
            for effective in smoother.effective_weights(at, bandwidth):
                index = effective.abs().topk(k).indices
                parts.append((effective.gather(1, index), index))
            weights, indices = (torch.cat(each) for each in zip(*parts)) if parts else (query[:, :0], query[:, :0])
            indices = torch.where(weights == 0, -1, indices)
        else:
            weights, indices = smoother.top_k(at, bandwidth, k)
            indices = torch.where(weights > 0, indices, -1)
        unreached = (indices < 0).all(1)
        if bool(unreached.any()) and self.empty == "nearest":
            indices[unreached, 0], weights[unreached, 0] = smoother.nearest(query[unreached], bandwidth), 1.0
        elif self.empty == "nan":
            weights[unreached] = torch.nan
        elif self.empty == "raise" and bool(unreached.any()):
            self._fallback_predictions(smoother, query[unreached], bandwidth, len(query))
        places = indices.cpu().numpy()
        own = np.where(places < 0, -1, self._rows[places])
        return AttendedPoints(like_input(X, weights.cpu().numpy()), like_input(X, own))

    @torch.no_grad()
    def weights(self, X: Any) -> Any:
        """Return the weight of every training point in each prediction.

        Parameters
        ----------
        X : array-like (n, n_features)

        Returns
        -------
        ndarray (n, n_train)
            For all rows passed to ``fit`` and ``partial_fit``, in their order; each row sums to 1. ``weights(X) @ y``
            are the predictions. The matrix is materialized; :meth:`attention` needs less memory.
        """
        check_is_fitted(self)
        smoother = self._smoother()
        query, bandwidth = self._query(X, smoother), self._bandwidth(smoother)
        found = np.zeros((len(query), self._count), dtype=self._result_dtype())
        done = 0
        own = self._evaluator.with_own_widths(smoother, query, bandwidth)
        for effective in smoother.effective_weights(own, bandwidth):
            found[done : done + len(effective), self._rows] = effective.cpu().numpy()
            done += len(effective)
        unreached = ~found.any(1)
        if unreached.any():
            far = query[torch.from_numpy(unreached).to(query.device)]
            found[unreached] = self._fallback_weights(smoother, far, bandwidth, len(query))
        return like_input(X, found)

    def _fallback_weights(self, smoother: Smoother, query: Tensor, bandwidth: Tensor, count: int) -> np.ndarray:
        found = np.zeros((len(query), self._count))
        if self.empty == "raise":
            self._fallback_predictions(smoother, query, bandwidth, count)
        elif self.empty == "nan":
            found[:] = np.nan
        elif self.empty == "mean":
            found[:, self._rows] = 1.0 if self._weight is None else self._weight
            found /= found.sum(1, keepdims=True)
        elif self.empty == "nearest":
            found[np.arange(len(query)), self._rows[smoother.nearest(query, bandwidth).cpu().numpy()]] = 1.0
        return found

    def explain(self, x: Any, topk: int = 10) -> Explanation:
        """Return the training points with the largest weights in one prediction, as a small table.

        Parameters
        ----------
        x : array-like (n_features,) or (1, n_features)
        topk : int, default 10

        Returns
        -------
        Explanation
        """
        check_is_fitted(self)
        if hasattr(x, "to_frame"):
            x = x.to_frame().T.infer_objects()  # a row of a pandas frame
        one = x if getattr(x, "ndim", None) == 2 else np.atleast_2d(np.asarray(as_array(x)))
        if len(one) != 1:
            raise rejected(type(self).__name__, "x", "be one row", f"{len(one)} rows")
        found = self.attention(one, topk)
        with torch.no_grad():
            smoother = self._smoother()
            query, bandwidth = self._query(one, smoother), self._bandwidth(smoother)
            own = self._evaluator.with_own_widths(smoother, query, bandwidth)
            effective = 1 / float(smoother.concentration(own, bandwidth)[0])
            total = float(np.abs(np.asarray(self.weights(one))).sum())
        names = getattr(self, "feature_names_in_", [f"x{i}" for i in range(self.n_features_in_)])
        distances = smoother.distances(own, bandwidth)[0].tolist()
        rows = []
        for weight, index in zip(np.asarray(found.weights)[0], np.asarray(found.indices)[0]):
            if index >= 0:
                place = int(np.searchsorted(self._rows, index))
                values = [self._columns.decode(i, value) for i, value in enumerate(self._X[place].tolist())]
                features = {_column_name(name): value for name, value in zip(names, values)}
                target = self._display_target(place)
                row = {"index": int(index), "weight": float(weight), "target": target, "distance": distances[place]}
                rows.append(row | features)
        share = float(np.abs(np.asarray(found.weights)).sum()) / total if total > 0 else 0.0
        return Explanation(self.predict(one)[0], rows, share, effective)

    @torch.no_grad()
    def _left_out_averages(self) -> np.ndarray:
        """Return leave-one-out averages of the stored points (n, M)."""
        smoother, evaluator, order = self._points_to_leave_out()
        found = LeaveOneOut(smoother, self.empty == "nearest", evaluator).predictions(self._bandwidth(smoother))
        self._evaluator.plan = evaluator.plan
        first = np.unique(order.cpu().numpy(), return_index=True)[1]  # repetitions have one prediction
        found = found.at(torch.from_numpy(first).to(found.mean.device))
        mean = found.mean.double().cpu().numpy() + self._center
        unreached = int((~found.reached).sum())
        if unreached and self.empty == "raise":
            name, what = type(self).__name__, f"{unreached} of {len(mean)} without a neighbour in reach"
            raise ValueError(f"{name}: training points must lie within each other's reach (empty='raise'), got {what}.")
        if unreached and self.empty == "nan":
            mean[(~found.reached).cpu().numpy()] = np.nan
        return mean

    def _nested_averages(self) -> np.ndarray:
        """Return averages of the stored points (n, M) by estimators that were fitted without them, search included.

        Cross-validation by the folds of ``cv``, or by 10 random folds (5 above 1,000 rows): the least error that a
        search finds is too small an estimate of the error on new rows (Varma and Simon 2006), those of folds that had
        no part in it are not. Folds search with the other folds where ``cv`` is given. NaN for points in no fold.
        """
        from sklearn.model_selection import KFold, check_cv  # slow to import, with rich

        # Places of all rows passed to fit; those of weight 0 are not stored.
        if self.cv is None:
            folds = KFold(min(10 if len(self._X) <= SMALL else 5, len(self._X)), shuffle=True, random_state=0)
            splits = list(folds.split(self._X))
        else:
            splits = [tuple(np.flatnonzero(np.isin(self._rows, each)) for each in both)
                      for both in check_cv(self.cv).split(np.arange(self._count))]  # fmt: skip
        found = np.full((len(self._X), len(self._center)), np.nan)
        for i, (rest, fold) in enumerate(splits):
            if len(rest) < 3 or not len(fold):
                continue
            model = clone(self).set_params(verbose=0)
            model.metric = self._features.metric
            if self.cv is not None:
                others = [
                    tuple(np.flatnonzero(np.isin(rest, each)) for each in both)
                    for j, both in enumerate(splits)
                    if j != i
                ]
                model.cv = [both for both in others if len(both[0]) and len(both[1])] or None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RegardWarning)  # each was shown by the fit to all rows
                model._fit_points(self, rest)
                found[fold] = model._estimate(self._X[fold])[0]
        return found

    def _fit_points(self, other: KernelEstimator, rows: np.ndarray) -> None:
        """Fit to some of the stored points of another estimator, whose fit gave all advice."""
        self._columns = ColumnEncoder()
        self.n_features_in_: int = other._X.shape[1]
        weight = None if other._weight is None else other._weight[rows]
        self._store_points(other._X[rows], other._y[rows], weight)
        self._prepare(advise=False)

    def effective_dof(self, bandwidth: Any = None) -> float:
        """Return the effective degrees of freedom, ``tr S`` of the smoother matrix S in ``ŷ = S y``.

        They play the part of the number of parameters: 1 for a wide bandwidth, or with ``order=1`` the number of
        coefficients of a line; up to the number of different rows for a narrow one.

        Parameters
        ----------
        bandwidth : float or array-like (n_features,), optional
            That of the fit by default.

        Returns
        -------
        float
            With ``subsample``, an estimate by that many random rows.

        Examples
        --------
        >>> import numpy as np
        >>> from regard.regression import NadarayaWatsonRegressor
        >>> X = np.linspace(0, 6, 50)[:, None]
        >>> model = NadarayaWatsonRegressor(order=1).fit(X, np.sin(X[:, 0]))
        >>> [round(model.effective_dof(h), 2) for h in (0.1, 1.0, 100.0)]
        [25.41, 3.82, 2.0]
        """
        return self._corrected_aic(bandwidth)[0]

    def _corrected_aic(self, bandwidth: Any) -> tuple[float, float]:
        """Return the effective degrees of freedom and the AICc at a bandwidth, that of the fit by default."""
        check_is_fitted(self)
        given = self._given_bandwidth(bandwidth)
        smoother, evaluator, _ = self._points_to_leave_out()
        rows = self._subsample(None, len(smoother.key), self.subsample)
        found = CorrectedAIC(smoother, evaluator, rows).evaluate(as_tensor(given))
        self._evaluator.plan = evaluator.plan
        return found

    def _given_bandwidth(self, bandwidth: Any) -> np.ndarray:
        """Return a bandwidth for each feature, that of the fit by default."""
        name = type(self).__name__
        given = self.bandwidth_ if bandwidth is None else validate_bandwidth(name, bandwidth, self.n_features_in_)
        if isinstance(given, str):
            raise rejected(name, "bandwidth", "be a number, or one for each feature", repr(given))
        return given

    @torch.no_grad()
    def loo_error(self, bandwidth: Any = None) -> float:
        """Return the leave-one-out mean squared error.

        Parameters
        ----------
        bandwidth : float or array-like (n_features,), optional
            That of the fit by default.

        Returns
        -------
        float
            The mean over points (weighted) and outputs; for a classifier, the mean over classes of the squared error of
            the probabilities. A point without any other in reach is predicted by its nearest neighbour with
            ``empty="nearest"``, otherwise by the mean of the others.
        """
        check_is_fitted(self)
        given = self._given_bandwidth(bandwidth)
        smoother, evaluator, _ = self._points_to_leave_out()
        error = LeaveOneOut(smoother, self.empty == "nearest", evaluator).error(as_tensor(given))
        self._evaluator.plan = evaluator.plan
        return float(error)


def _column_name(name: str) -> str:
    """Return a feature's column name in an explanation, distinct from the fixed columns."""
    return f"feature {name}" if name in ("index", "weight", "target", "distance") else str(name)
