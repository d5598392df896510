"""The Nadaraya–Watson regressor, with its quantiles and conformal intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor
from torch.nn.functional import pad

from regard import AuxRequest, attention
from regard._utils.constraints import Number, OneOf
from regard._utils.errors import rejected
from regard.regression._base import KernelEstimator
from regard.regression._sums.smoother import Smoother
from regard.regression._training import all_or_nothing, as_array, like_input

# Conformal prediction intervals: how far predictions missed the targets of points that they did not see ---------------


def half_width(residuals: np.ndarray, coverage: float, weight: np.ndarray | None = None) -> np.ndarray:
    """Return how far an interval reaches on both sides of a prediction (M,).

    The ``⌈(n + 1) coverage⌉``-th smallest of n absolute residuals (Lei et al. 2018); infinite where there are too few.
    A weight counts repetitions, and one more point stands at infinity.

    Parameters
    ----------
    residuals : ndarray (n, M)
        Absolute; NaN where a point had no prediction.
    coverage : float
    weight : ndarray (n,), optional

    Examples
    --------
    >>> half_width(np.arange(1.0, 10.0)[:, None], 0.8)
    array([8.])
    >>> half_width(np.ones((3, 1)), 0.8)
    array([inf])
    """
    found = []
    for column in residuals.T:
        known = ~np.isnan(column)
        counts = np.ones(int(known.sum())) if weight is None else weight[known]
        order = np.argsort(column[known])
        reached = np.cumsum(counts[order])
        # Rounding must not ask for one more.
        wanted = math.ceil((reached[-1] + 1) * coverage - 1e-9) if len(reached) else 1
        place = int(np.searchsorted(reached, wanted * (1 - 1e-12)))
        found.append(column[known][order][place] if place < len(order) else math.inf)
    return np.array(found)


# Quantiles of the targets around a query ------------------------------------------------------------------------------
# Without a line, shares of blocks of sorted targets first, then within one block; with one, targets move with it.


#: Shares of blocks, and weights within blocks, that are held at one time.
HELD = 1 << 20
#: Points of a block at least.
SIZE = 32
#: A share that is met but for so many roundings counts as met.
ROUNDINGS = 64


def local_quantiles(smoother: Smoother, query: Tensor, bandwidth: Tensor, target: Tensor, shares: Tensor) -> Tensor:
    """Return for each query the least targets up to which these shares of the weight lie.

    Parameters
    ----------
    smoother : Smoother
    query : Tensor (L, C)
    bandwidth : Tensor (n_features,)
    target : Tensor (N,)
        One for each of the smoother's points.
    shares : Tensor (q,)

    Returns
    -------
    Tensor (L, q)
        NaN where no point reaches.
    """
    score = smoother.kernel.score(smoother.coordinate_bandwidth(bandwidth))
    order = target.argsort()
    met = 1 - ROUNDINGS * torch.finfo(query.dtype).eps
    shares = shares.double()
    # Shares of blocks come from fused kernels; the weights within one are written out, which takes longer.
    size = min(len(order), max(SIZE, round(len(order) ** 0.5 / 4)))
    missing = -len(order) % size
    # Blocks of equal size: what fills the last one has no weight.
    weight = pad(smoother.point_weights()[order, 0], (0, missing)).view(-1, size, 1)
    order = pad(order, (0, missing), value=int(order[-1])).view(-1, size)
    key = smoother.key[order]
    parts = [query.new_zeros(0, len(shares))]
    for rows in query.split(max(1, HELD // max(len(order), size * len(shares)))):
        read, aux = attention(
            rows.expand(len(order), -1, -1)[:, None], key[:, None], weight[:, None], score=score,
            engine=smoother.engine, return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        assert aux.lse is not None
        logs = aux.lse[:, 0].T.double()  # (l, blocks)
        most = logs.amax(1, keepdim=True)
        reached = most > -torch.inf
        mass = (logs - torch.where(reached, most, 0.0)).exp() * read[:, 0, :, 0].T
        before = pad(mass.cumsum(1), (1, 0))
        # Of share 0, the first point that has any weight.
        wanted = (shares * before[:, -1:] * met).clamp(min=torch.finfo(mass.dtype).tiny)  # (l, q)
        block = torch.searchsorted(before[:, 1:].contiguous(), wanted).clamp(max=len(order) - 1)
        _, aux = attention(
            rows[:, None, None].expand(-1, len(shares), 1, -1), key[block], weight[block][..., :0], score=score,
            engine="reference", return_aux=AuxRequest(weights=True),
        )  # fmt: skip
        assert aux.weights is not None
        within = aux.weights[:, :, 0].double() * weight[block][..., 0]
        within = within / within.sum(2, keepdim=True).clamp(min=torch.finfo(within.dtype).tiny)
        share = before.gather(1, block)[..., None] + mass.gather(1, block)[..., None] * within.cumsum(2)
        place = torch.searchsorted(share.contiguous(), wanted[..., None])
        # The block's last point with a weight, where rounding leaves the sum below what is wanted.
        last = torch.where(within > 0, torch.arange(size, device=within.device), 0).amax(2, keepdim=True)
        found = target[order[block].gather(2, torch.minimum(place, last))[..., 0]]
        parts.append(torch.where(reached, found.to(query.dtype), torch.nan))
    return torch.cat(parts)


def local_linear_quantiles(smoother: Smoother, query: Tensor, bandwidth: Tensor, shares: Tensor) -> Tensor:
    """Return for each query the least targets, moved along its local line, up to which these shares of the weight lie.

    So the residuals about the line keep their weights and stand about the line's value at the query, which is their
    mean: the mean-corrected estimate of a conditional distribution of Hyndman, Bashtannyk and Grunwald (1996).

    Parameters
    ----------
    smoother : Smoother
    query : Tensor (L, C)
    bandwidth : Tensor (n_features,)
    shares : Tensor (q,)

    Returns
    -------
    Tensor (L, M, q)
        NaN where no point reaches.
    """
    parts = [query.new_zeros(0, smoother.target.shape[1], len(shares))]
    met = 1 - ROUNDINGS * torch.finfo(query.dtype).eps
    for weights, targets in smoother.shifted_targets(query, bandwidth):
        some = weights > 0
        values, order = torch.where(some, targets, torch.inf).sort(2)
        share = weights.expand_as(order).gather(2, order).cumsum(2)
        wanted = (shares * share[..., -1:] * met).clamp(min=torch.finfo(share.dtype).tiny)
        # The last point with a weight, where rounding leaves the sum below what is wanted.
        last = (some.sum(1) - 1).clamp(min=0)[:, None].expand(*share.shape[:2], 1)
        place = torch.minimum(torch.searchsorted(share, wanted), last)
        found = torch.where(some.any(1)[:, None], values.gather(2, place), torch.nan)
        parts.append(found.transpose(0, 1))
    return torch.cat(parts)


# Regression by weighted averages of targets ---------------------------------------------------------------------------


class NadarayaWatsonRegressor(MultiOutputMixin, RegressorMixin, KernelEstimator):
    r"""Kernel regression, ``ŷ(x) = Σ_i K((x − x_i) / h) y_i / Σ_j K((x − x_j) / h)`` (Nadaraya 1964; Watson 1964).

    It is attention without training: queries are the points to predict at, keys the inputs seen, values their
    targets. With ``order=1`` a line is fitted around each query instead (Stone 1977), which mends the bias at the
    edges. Nothing of the size of queries × training points is held.

    Parameters
    ----------
    kernel : str or callable, default "gaussian"
        Of u, the distance in bandwidths: the name of a score of a distance, whose exponential it is, such as "gaussian"
        ``exp(−u²/2)`` or "epanechikov" ``1 − u²`` where u < 1 (``regard catalogue`` has all formulas); "constant" is 1.
        A function takes a tensor of u and returns weights of its shape.
    bandwidth : float, array-like (n_features,), or str, default "scott"
        h in the units of the features, one for all or one for each; or how to choose it:

        - "scott", "silverman": ``σ_j n^(−1/(d+4))``, or ``σ_j (n (d+2)/4)^(−1/(d+4))``, of each feature's standard
          deviation σ_j, widened for kernels that are narrower than the Gaussian at the same h.
        - "loo": the multiple of ``σ_j`` with the least leave-one-out error, searched; n² pairs for each that is tried.
        - "learned": one for each feature, by gradient descent on the leave-one-out error. Irrelevant features get
          wide ones; with ``order=1`` so do those whose effect is a straight line.
    order : {0, 1}, default 0
        0 averages (local constant), 1 fits a line around each query (local linear).
    metric : str, tuple, list or dict, default "euclidean"
        How features differ, one for all, one for each, or by name or index: "euclidean"; "angular" (radians, or
        ``("angular", period)``) along a circle; "categorical": 1 between different values. Text and categories of a
        pandas frame are always categorical.
    empty : {"nearest", "mean", "nan", "raise"}, default "nearest"
        What a query gets that no training point gives any weight: the nearest one's target (with a warning that counts
        such queries), the mean target, NaN, or an error.
    max_iter : int, default 200
        Most iterations of "learned".
    tol : float, default 1e-5
        "learned" ends when an iteration gains less than this share of the error.
    subsample : int, optional
        "loo" and "learned" leave out so many points, drawn at random, instead of each.
    random_state : int, RandomState or None
        Draws the subsample.
    method : {"auto", "exact", "nufft", "tiles"}, default "auto"
        How the sums over training points are made:

        - "exact": all pairs of queries and points.
        - "tiles": the same sums without points whose weights round away, which are found by tiles of neighbours; worth
          it where a bandwidth reaches few of the points. In float64.
        - "nufft": for the Gaussian in up to three coordinates, a non-uniform Fourier transform of the points and back
          to the queries (``pip install 'regard[nufft]'``), in float64. Each query has a bound on its error; one whose
          bound exceeds ``rtol`` gets exact sums.
        - "auto": the one that should be fastest, by a rule of sizes. :attr:`plan_` says what ran, and why.
    rtol : float, optional
        The largest error of "nufft", in predictions and standard deviations, beside ``|ŷ − ȳ| + σ`` of each target,
        with the mean ȳ and the standard deviation σ of all training targets; 1e-6 by default. It bounds what is lost
        against exact sums; these have the rounding of their dtype.
    engine : str, default "auto"
        Of exact sums, as :func:`regard.attention` has it.
    device : str, optional
        Where to calculate; the CPU by default.
    dtype : {"float32", "float64"}, optional
        What to calculate in; X's own by default. A line (``order=1``) is always calculated in float64.
    verbose : int, default 0
        1 shows progress.

    Attributes
    ----------
    bandwidth_ : ndarray (n_features,)
    loo_error_ : float
        The least leave-one-out error; after "loo" and "learned".
    loo_curve_ : Curve
        ``bandwidths`` (m, n_features) and ``errors`` (m,) that were tried; after "loo" and "learned".
    n_iter_ : int
        Iterations of "learned"; 1 elsewhere.
    n_features_in_ : int
    feature_names_in_ : ndarray

    Notes
    -----
    NumPy arrays, pandas frames and torch tensors go in; predictions are tensors where X is one, else arrays. Dates
    count as days, also for a bandwidth in their unit.

    Rows beyond the training data are counted by an :class:`ExtrapolationWarning`, named by :meth:`extrapolates`, and
    have neither a standard deviation nor quantiles.

    ``sample_weight`` multiplies the kernel (the bias ``log w`` of a score); an integer weight is a repetition. So
    "scott" and "silverman" take the weights' sum for the number of points: give weights that average 1. What raises,
    or is interrupted, leaves the estimator as it was.

    Examples
    --------
    >>> import numpy as np
    >>> from regard.regression import NadarayaWatsonRegressor
    >>> X = np.linspace(0, 6, 50)[:, None]
    >>> model = NadarayaWatsonRegressor(bandwidth="loo", order=1).fit(X, np.sin(X[:, 0]))
    >>> model.predict([[1.5], [3.0]]).round(2)
    array([1.  , 0.14])
    """

    def __init__(
        self,
        kernel: Any = "gaussian",
        bandwidth: Any = "scott",
        *,
        order: int = 0,
        metric: Any = "euclidean",
        empty: str = "nearest",
        max_iter: int = 200,
        tol: float = 1e-5,
        subsample: int | None = None,
        random_state: Any = None,
        method: str = "auto",
        rtol: float | None = None,
        engine: Any = "auto",
        device: Any = None,
        dtype: Any = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            kernel,
            bandwidth,
            metric,
            empty,
            max_iter,
            tol,
            subsample,
            random_state,
            method,
            rtol,
            engine,
            device,
            dtype,
            verbose,
        )
        self.order = order

    @all_or_nothing
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Keep the training data and choose the bandwidth.

        Parameters
        ----------
        X : array-like (n, n_features)
        y : array-like (n,) or (n, n_outputs)
        sample_weight : array-like (n,), optional
            How often each point counts; points of weight 0 are left out.

        Returns
        -------
        NadarayaWatsonRegressor
        """
        self._validate_parameters()
        X, y = self._validate_data(X, y, multi_output=True, y_numeric=True)
        self._store_points(X, y.astype(np.float64, copy=False), sample_weight)
        return self._prepare()

    @all_or_nothing
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Append training data.

        A bandwidth by rule follows the data; one that was chosen by "loo" or "learned" stays as the first call chose
        it.

        Parameters
        ----------
        X : array-like (n, n_features)
        y : array-like (n,) or (n, n_outputs)
        sample_weight : array-like (n,), optional

        Returns
        -------
        NadarayaWatsonRegressor
        """
        if not hasattr(self, "_X"):
            return self.fit(X, y, sample_weight)
        self._validate_parameters()
        X, y = self._validate_data(X, y, multi_output=True, y_numeric=True, reset=False)
        if y.shape[1:] != self._y.shape[1:]:
            raise rejected("NadarayaWatsonRegressor", "y", f"have shape (n, *{self._y.shape[1:]})", y.shape)
        self._append_points(X, y.astype(np.float64, copy=False), sample_weight)
        return self._prepare(rechoose=False)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the predictions, and on request how far the targets scatter about them.

        Parameters
        ----------
        X : array-like (n, n_features)
        return_std : bool, default False

        Returns
        -------
        y : ndarray (n,) or (n, n_outputs)
        std : ndarray, same shape
            Only with ``return_std``: the standard deviation of the targets about the prediction,
            ``√(Σ α_i (y_i − ŷ)² / (1 − Σ α_i²))``; with ``order=1`` that about the local line, with the degrees of
            freedom that the line leaves (Fan and Gijbels 1996, section 4.3). NaN where it is not known: beyond the
            training data (:meth:`extrapolates`), and where no more points have weight than an average or a line goes
            through.

        Warns
        -----
        ExtrapolationWarning
            Once, with how many rows lie beyond the training data.
        """
        mean, deviation = self._estimate(X, spread=return_std)
        shown = self._restore_shape(X, mean)
        return shown if deviation is None else (shown, self._restore_shape(X, deviation))

    @torch.no_grad()
    def predict_quantiles(self, X: Any, quantiles: Sequence[float] = (0.05, 0.5, 0.95)) -> Any:
        """Return quantiles of the targets around each query, weighed by the kernel.

        With ``order=1`` each target is first moved along the line around the query, ``y_i − β(x) (x_i − x)``: the
        residuals about the line, set upon its value at the query (Hyndman, Bashtannyk and Grunwald 1996). Quantiles
        never cross, and their distribution has the prediction for its mean.

        Parameters
        ----------
        X : array-like (n, n_features)
        quantiles : sequence of float in [0, 1]

        Returns
        -------
        ndarray (n, q) or (n, n_outputs, q)
            For each quantile p the least target such that targets up to it have a share p of the weight. NaN where the
            targets' scatter is not known: beyond the training data (:meth:`extrapolates`), and where no more points
            have weight than an average or a line goes through.
        """
        check_is_fitted(self)
        try:
            shares = np.atleast_1d(np.asarray(quantiles, dtype=np.float64))
        except (TypeError, ValueError):
            shares = np.array([np.nan])
        if shares.ndim != 1 or not ((shares >= 0) & (shares <= 1)).all():
            raise rejected("NadarayaWatsonRegressor", "quantiles", "be numbers in [0, 1]", quantiles)
        smoother = self._smoother(double=True)
        query, bandwidth = self._query(X, smoother), self._bandwidth(smoother)
        found = self._evaluate(smoother, query, bandwidth, spread=True)
        assert found.variance is not None
        lost = ~found.reached
        if self.empty == "raise" and bool(lost.any()):
            self._fallback_predictions(smoother, query[lost], bandwidth, len(query))
        beyond = self._support.extrapolates(smoother, query, found, self._evaluator)
        self._warn_of_extrapolation(beyond, lost)
        smoother = self._smoother()
        query, bandwidth = query.to(smoother.key), bandwidth.to(smoother.key)
        wanted = torch.from_numpy(shares).to(query)
        if self._order:
            values = (
                local_linear_quantiles(smoother, query, bandwidth, wanted)
                + torch.from_numpy(self._center).to(query)[:, None]
            )
        else:
            columns = torch.from_numpy(self._targets()).to(query.device).T
            values = torch.stack([local_quantiles(smoother, query, bandwidth, column, wanted) for column in columns], 1)
        unknown = beyond | found.variance.isnan().any(1)
        result = torch.where(unknown[:, None, None], torch.nan, values).cpu().numpy()
        result = result.astype(self._result_dtype())
        return self._restore_shape(X, result)

    def calibrate(self, X: Any, y: Any) -> Self:
        """Keep how far predictions miss the targets of rows that were not fitted, for :meth:`predict_interval`.

        Parameters
        ----------
        X : array-like (n, n_features)
            None of these may be among the training data.
        y : array-like (n,) or (n, n_outputs)

        Returns
        -------
        NadarayaWatsonRegressor
        """
        check_is_fitted(self)
        predictions = np.asarray(as_array(self.predict(X)), dtype=np.float64)
        targets = np.asarray(as_array(y), dtype=np.float64)
        if targets.shape != predictions.shape:
            raise rejected("NadarayaWatsonRegressor", "y", f"have shape {predictions.shape}", targets.shape)
        if np.isnan(targets).any():
            raise rejected("NadarayaWatsonRegressor", "y", "hold no NaN", "one")
        self._residuals = np.abs(targets - predictions).reshape(len(targets), -1)
        return self

    def predict_interval(self, X: Any, coverage: float = 0.9) -> Any:
        """Return intervals that hold the targets of new rows with a probability of ``coverage``.

        They reach as far on both sides of a prediction as a share ``coverage`` of absolute residuals do: of the rows
        given to :meth:`calibrate` (split conformal; Lei et al. 2018), and then hold at least that share of new targets
        on average over data, whatever their distribution; without those, of each training point predicted from all the
        others, which uses all data and comes near that share, without a guarantee.

        Parameters
        ----------
        X : array-like (n, n_features)
            Rows drawn as the training data were: it is over such rows that the share is meant.
        coverage : float in (0, 1), default 0.9

        Returns
        -------
        ndarray (n, 2) or (n, n_outputs, 2)
            The lower and the upper end; infinite where there are too few residuals for this coverage.

        Examples
        --------
        >>> import numpy as np
        >>> from regard.regression import NadarayaWatsonRegressor
        >>> X = np.linspace(0, 6, 200)[:, None]
        >>> y = np.sin(X[:, 0]) + 0.1 * np.random.default_rng(0).standard_normal(200)
        >>> low, high = NadarayaWatsonRegressor(bandwidth="loo").fit(X, y).predict_interval([[3.0]]).T
        >>> bool(low < np.sin(3.0) < high)
        True
        """
        check_is_fitted(self)
        Number(gt=0, lt=1)("NadarayaWatsonRegressor", "coverage", coverage)
        residuals, weight = self._residuals, None
        if residuals is None:
            if self._left_out is None:
                self._left_out = np.abs(self._left_out_averages() - self._targets())
            residuals, weight = self._left_out, self._weight
        mean = self._estimate(X)[0].astype(np.float64)
        reach = half_width(residuals, float(coverage), weight)
        found = np.stack([mean - reach, mean + reach], -1).astype(self._result_dtype())
        return self._restore_shape(X, found)

    def loo_predict(self) -> np.ndarray:
        """Return the prediction of each training point from all the others, (n,) or (n, n_outputs).

        Rows of weight 0 are NaN. A point that no other reaches gets what ``empty`` says: its nearest neighbour's
        target, the mean of the others, NaN, or an error.
        """
        check_is_fitted(self)
        found = np.full((self._count, self._targets().shape[1]), np.nan, dtype=self._result_dtype())
        found[self._rows] = self._left_out_averages()
        return self._restore_shape(None, found)

    def _restore_shape(self, X: Any, found: np.ndarray) -> Any:
        """Return estimates (n, n_outputs, ...) on the device of X, without outputs where targets have none."""
        return like_input(X, found if self._y.ndim == 2 else found[:, 0])

    @property
    def _order(self) -> int:
        return int(self.order)

    def _validate_parameters(self) -> str:
        name = super()._validate_parameters()
        OneOf((0, 1))(name, "order", self.order)
        return name

    def _targets(self) -> np.ndarray:
        return self._y if self._y.ndim == 2 else self._y[:, None]

    def _display_target(self, row: int) -> Any:
        return self._y[row] if self._y.ndim == 2 else float(self._y[row])
