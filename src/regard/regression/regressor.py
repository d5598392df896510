"""The Nadaraya–Watson regressor, with its quantiles and conformal intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from scipy.special import stdtrit
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor
from torch.nn.functional import pad

from regard import AuxRequest, attention
from regard._utils.constraints import Number, OneOf
from regard._utils.errors import rejected
from regard.regression._base import KernelEstimator
from regard.regression._sums.smoother import Smoother, resolve_kernel
from regard.regression._training import all_or_nothing, as_array, like_input

# Conformal prediction intervals from the residuals of held-out points -------------------------------------------------


def half_width(residuals: np.ndarray, coverage: float, weight: np.ndarray | None = None) -> np.ndarray:
    """Return half the width of prediction intervals (M,).

    This is the ``⌈(n + 1) coverage⌉``-th smallest of n absolute residuals (Lei et al. 2018), or infinity if n is too
    small. Weights count repetitions; one more point lies at infinity.

    Parameters
    ----------
    residuals : ndarray (n, M)
        Absolute residuals; NaN for points without a prediction.
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
        valid = ~np.isnan(column)
        counts = np.ones(int(valid.sum())) if weight is None else weight[valid]
        order = np.argsort(column[valid])
        cumulative = np.cumsum(counts[order])
        # The tolerance keeps rounding from requiring one residual more.
        wanted = math.ceil((cumulative[-1] + 1) * coverage - 1e-9) if len(cumulative) else 1
        place = int(np.searchsorted(cumulative, wanted * (1 - 1e-12)))
        found.append(column[valid][order][place] if place < len(order) else math.inf)
    return np.array(found)


# Quantiles of the targets around a query ------------------------------------------------------------------------------
# For local averages, first find the block of sorted targets, then the target in the block. For local lines, first
# shift the targets along the line.


#: The most block shares, and weights within blocks, held at once.
HELD = 1 << 20
#: The fewest points in a block.
SIZE = 32
#: The tolerance when comparing shares, in rounding errors.
ROUNDINGS = 64


def local_quantiles(smoother: Smoother, query: Tensor, bandwidth: Tensor, target: Tensor, shares: Tensor) -> Tensor:
    """Return weighted quantiles of the targets around each query: the least targets that reach these shares of weight.

    Parameters
    ----------
    smoother : Smoother
    query : Tensor (L, C)
    bandwidth : Tensor (n_features,)
    target : Tensor (N,)
        One target for each of the smoother's points.
    shares : Tensor (q,)

    Returns
    -------
    Tensor (L, q)
        NaN for a query without any point in reach.
    """
    score = smoother.score(query, smoother.coordinate_bandwidth(bandwidth))
    order = target.argsort()
    met = 1 - ROUNDINGS * torch.finfo(query.dtype).eps
    shares = shares.double()
    # Fused kernels compute the shares of blocks; weights within a block are materialized, which is slower.
    size = min(len(order), max(SIZE, round(len(order) ** 0.5 / 4)))
    missing = -len(order) % size
    # Blocks have equal size: points without weight pad the last one.
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
        # The clamp makes share 0 the first point with any weight.
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
        # If rounding leaves the sum below the wanted share, take the last point with a weight.
        last = torch.where(within > 0, torch.arange(size, device=within.device), 0).amax(2, keepdim=True)
        found = target[order[block].gather(2, torch.minimum(place, last))[..., 0]]
        parts.append(torch.where(reached, found.to(query.dtype), torch.nan))
    return torch.cat(parts)


def local_polynomial_quantiles(smoother: Smoother, query: Tensor, bandwidth: Tensor, shares: Tensor) -> Tensor:
    """Return weighted quantiles of the targets, shifted along the local line or parabola of each query.

    The residuals about the line keep their weights and are centered on the value of the line at the query, which is
    their mean: the mean-corrected conditional density estimate of Hyndman, Bashtannyk and Grunwald (1996).

    Parameters
    ----------
    smoother : Smoother
    query : Tensor (L, C)
    bandwidth : Tensor (n_features,)
    shares : Tensor (q,)

    Returns
    -------
    Tensor (L, M, q)
        NaN for a query without any point in reach.
    """
    parts = [query.new_zeros(0, smoother.target.shape[1], len(shares))]
    met = 1 - ROUNDINGS * torch.finfo(query.dtype).eps
    for weights, targets in smoother.shifted_targets(query, bandwidth):
        some = weights > 0
        values, order = torch.where(some, targets, torch.inf).sort(2)
        share = weights.expand_as(order).gather(2, order).cumsum(2)
        wanted = (shares * share[..., -1:] * met).clamp(min=torch.finfo(share.dtype).tiny)
        # If rounding leaves the sum below the wanted share, take the last point with a weight.
        last = (some.sum(1) - 1).clamp(min=0)[:, None].expand(*share.shape[:2], 1)
        place = torch.minimum(torch.searchsorted(share, wanted), last)
        found = torch.where(some.any(1)[:, None], values.gather(2, place), torch.nan)
        parts.append(found.transpose(0, 1))
    return torch.cat(parts)


# Regression by weighted averages of targets ---------------------------------------------------------------------------


class NadarayaWatsonRegressor(MultiOutputMixin, RegressorMixin, KernelEstimator):
    r"""Kernel regression, ``ŷ(x) = Σ_i K((x − x_i) / h) y_i / Σ_j K((x − x_j) / h)`` (Nadaraya 1964; Watson 1964).

    It is attention without trained weights: queries are the points to predict at, keys the training inputs, values
    their targets. With ``order=1`` it fits a line around each query instead (Stone 1977), which reduces the bias at
    the edges, and with ``order=2`` a parabola. Memory does not grow with queries × training points.

    Parameters
    ----------
    kernel : str or callable, default "gaussian"
        The kernel as a function of u, the distance in bandwidths. Either the name of a distance score, whose
        exponential is the kernel, such as "gaussian" ``exp(−u²/2)`` or "epanechnikov" ``1 − u²`` for u < 1 (``regard
        catalogue`` lists all formulas); or "constant", which is 1; or a function from a tensor of u to weights of the
        same shape.
    bandwidth : float, array-like (n_features,), or str, default "scott"
        h in the units of the features, one for all or one for each; or how to choose it:

        - "scott", "silverman": ``σ_j n^(−1/(d+4))`` or ``σ_j (n (d+2)/4)^(−1/(d+4))``, with the standard deviation σ_j
          of each feature, widened for kernels that are narrower than the Gaussian at the same h.
        - "loo": search the multiple of ``σ_j`` with the least leave-one-out error; each trial compares n² pairs.
        - "aicc": the same search for the least AICc (:meth:`aicc`), which varies less from sample to sample and chooses
          too narrow a bandwidth less often.
        - "learned": one for each feature, by gradient descent on the leave-one-out error, where "loo" ends. Features
          without which that error is not higher get bandwidths so wide that they no longer count; the others move the
          less, the fewer the rows. Above 2,048 rows that many random ones are compared with each other, and all rows
          decide a common factor. With ``order=1``, features with a linear effect get wide bandwidths, too.
    n_neighbors : int or "loo", optional
        Adapt the bandwidth to the density of the data: at each query, it is the distance to the k-th nearest training
        point (Stone 1977; the generalized nearest neighbours of R's np), as in LOESS. ``bandwidth`` then only scales
        the features, in which the distance is measured: by standard deviations with "scott" and "silverman", or by
        numbers. "loo" searches the k with the least leave-one-out error, on at most 2,048 random rows if ``subsample``
        does not say otherwise. "epanechnikov" and "triangular" give weight to the k − 1 nearest points, "boxcar" the
        same to all k, as KNeighborsRegressor. Not with missing values, nor with only or more than 100 categories.
    order : {0, 1, 2}, default 0
        0 averages (local constant), 1 fits a line around each query (local linear), 2 a parabola with all products of
        two features (local quadratic; Fan and Gijbels 1996), which follows peaks and valleys. 2 is for at most three
        features that are no categories. It needs wider bandwidths than 1, and more points.
    metric : str, tuple, list or dict, default "euclidean"
        How to measure the difference of feature values, one metric for all features, one for each, or by name or index:
        "euclidean"; "angular" (radians, or ``("angular", period)``) along a circle; "categorical": 1 between different
        values; "ordered": the difference of ranks, for ordered categories. Text and categorical columns of a pandas
        frame are always categorical, those of an ordered Categorical ordered unless "categorical" is given.
        ``{("lat", "lon"): "haversine"}`` makes a latitude and a longitude in degrees one point on the Earth, with
        one bandwidth in kilometres. Distances are chords: 0.1 % shorter than arcs at 1,000 km, 2.6 % at 5,000 km.
    missing : {"error", "marginal"}, default "error"
        What NaN is in a feature that is not categorical, where it is a category of its own: an error, or a value that
        could be any. A feature that a query misses does not count in its prediction. A training point that misses one
        which the query has weighs a hundredth of what points do on average (nothing with a compact kernel), so that
        those that have it decide; a line takes the median for it.
    empty : {"nearest", "mean", "nan", "raise"}, default "nearest"
        What to predict for a query where every kernel weight is 0: the target of the nearest training point (with a
        warning that counts such queries), the mean target, NaN, or an error.
    max_iter : int, default 200
        The most iterations of "learned".
    tol : float, default 1e-5
        "learned" stops when an iteration reduces the error by about less than this share.
    subsample : int, optional
        "loo", "learned" and "aicc" evaluate the error on this many random training points instead of all.
    cv : int, cross-validation splitter or iterable of splits, optional
        What "loo" and "learned" leave out together, as in scikit-learn; by default each row by itself. A number is that
        of blocks of consecutive rows: rows that depend on those before them, as in a time series, predict each other
        too well one by one. ``GroupKFold(...).split(X, y, groups)`` leaves out groups. "aicc" leaves out no rows.
    random_state : int, RandomState or None
        Seeds the subsample, and the rows that "learned" compares.
    method : {"auto", "exact", "nufft", "tiles"}, default "auto"
        How to compute the sums over training points:

        - "exact": all pairs of queries and points.
        - "tiles": the same sums without points whose weights are below rounding, by tiles of neighbouring points. It
          pays off if a bandwidth reaches few of the points. In float64.
        - "nufft": for the Gaussian in up to three coordinates, a non-uniform Fourier transform of the points and back
          to the queries (``pip install 'regard[nufft]'``), in float64. Each query has an error bound; a query whose
          bound exceeds ``rtol`` gets exact sums.
        - "auto": the one that should be fastest, by a rule of sizes. :attr:`plan_` says what ran, and why.
    rtol : float, optional
        The largest error of "nufft" in predictions and standard deviations, relative to ``|ŷ − ȳ| + σ`` of each target,
        with the mean ȳ and the standard deviation σ of all training targets; 1e-6 by default. It bounds the error
        against exact sums, which themselves have the rounding of their dtype.
    engine : str, default "auto"
        The engine for exact sums, as in :func:`regard.attention`.
    device : str, optional
        The device for computations; the CPU by default.
    dtype : {"float32", "float64"}, optional
        The dtype for computations; that of X by default. A line or parabola always uses float64.
    verbose : int, default 0
        1 shows progress.

    Attributes
    ----------
    bandwidth_ : ndarray (n_features,)
        With ``n_neighbors``, the scale of each feature.
    n_neighbors_ : int
        With ``n_neighbors``, k.
    loo_error_ : float
        The error of the bandwidth that the search chose, leaving out each row or, with ``cv``, each fold; after "loo"
        and "learned". New rows have larger errors, which :meth:`cross_val_predict` estimates.
    loo_curve_ : Curve
        The ``bandwidths`` (m, n_features) tried and their ``errors`` (m,); after "loo" and "learned". After "learned"
        from more than 2,048 rows, the multiples tried last, and their errors on that many rows. After
        ``n_neighbors="loo"`` also ``n_neighbors`` (m,).
    aicc_curve_ : Curve
        The bandwidths tried by "aicc", with their AICc as ``errors``.
    far_rows_ : ndarray
        Rows passed to ``fit`` with a value so far from all others that a search leaves them out.
    n_iter_ : int
        Iterations of "learned"; otherwise 1.
    n_features_in_ : int
    feature_names_in_ : ndarray

    Notes
    -----
    X may be a NumPy array, a pandas frame or a torch tensor; predictions are tensors if X is one, otherwise arrays.
    Dates count in days, and so does the bandwidth of a date.

    For rows beyond the training data, an :class:`ExtrapolationWarning` reports their number, :meth:`extrapolates` finds
    them, and standard deviations and quantiles are NaN.

    ``sample_weight`` multiplies the kernel (a bias ``log w`` of the score). If all weights are whole numbers, they
    count repetitions in every respect: standard deviations have as many points, and searches and leave-one-out
    predictions leave out one repetition at a time (all of a row where weights sum to over 16,384 and 4 times the rows).
    Other weights are importances: a row is left out with all of its weight. "scott" and "silverman" use the sum of
    weights as the number of points: pass weights that average 1.

    With ``n_neighbors``, a row whose weight counts repetitions counts as so many neighbours, otherwise as one. If k
    points coincide with a query, its bandwidth is the distance to the nearest other point.

    A standard deviation that a few far values make three times that of the others is replaced by theirs, with a warning
    that names the rows. With ``order=1``, far from the data one point has all the weight: then there is no line, and
    the prediction is the constant target of that point. Likewise, where the points with weight do not determine a
    parabola it is flat in that direction, which leaves a line, and where they do not determine a line a constant.

    If a call raises or is interrupted, the estimator keeps its state.

    Examples
    --------
    >>> import numpy as np
    >>> from regard.regression import NadarayaWatsonRegressor
    >>> X = np.linspace(0, 6, 50)[:, None]
    >>> model = NadarayaWatsonRegressor(bandwidth="loo", order=1).fit(X, np.sin(X[:, 0]))
    >>> model.predict([[1.5], [3.0]]).round(2)
    array([1.  , 0.14])
    """

    order: int

    def __init__(
        self,
        kernel: Any = "gaussian",
        bandwidth: Any = "scott",
        *,
        n_neighbors: Any = None,
        order: int = 0,
        metric: Any = "euclidean",
        missing: str = "error",
        empty: str = "nearest",
        max_iter: int = 200,
        tol: float = 1e-5,
        subsample: int | None = None,
        cv: Any = None,
        random_state: Any = None,
        method: str = "auto",
        rtol: float | None = None,
        engine: Any = "auto",
        device: Any = None,
        dtype: Any = None,
        verbose: int = 0,
    ) -> None:
        self._store(locals())

    @all_or_nothing
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Keep the training data and choose the bandwidth.

        Parameters
        ----------
        X : array-like (n, n_features)
        y : array-like (n,) or (n, n_outputs)
        sample_weight : array-like (n,), optional
            How often each point counts; points of weight 0 are ignored.

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

        A bandwidth from a rule of thumb is updated; one from "loo" or "learned" stays as the first call chose it.

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

    def predict(self, X: Any, return_std: bool = False, return_se: bool = False) -> Any:
        """Return the predictions, and optionally the standard deviation of targets and the standard error of means.

        Parameters
        ----------
        X : array-like (n, n_features)
        return_std, return_se : bool, default False

        Returns
        -------
        y : ndarray (n,) or (n, n_outputs)
        std : ndarray, same shape
            Only with ``return_std``: the standard deviation of the targets about the prediction,
            ``√(Σ α_i (y_i − ŷ)² / (1 − Σ α_i²))``; with ``order=1`` or 2 about the local polynomial, with its residual
            degrees of freedom (Fan and Gijbels 1996, section 4.3). NaN beyond the training data (:meth:`extrapolates`),
            and where too few points have weight to leave a degree of freedom.
        se : ndarray, same shape
            Only with ``return_se``, last: the standard error of the prediction, ``s √(Σ l_i²)`` for the standard
            deviation s of the targets and the effective weights l_i, of which the prediction is ``Σ l_i y_i``. It
            assumes independent errors and leaves out the bias; see :meth:`predict_band`. NaN as ``std`` is.

        Warns
        -----
        ExtrapolationWarning
            With the number of rows beyond the training data; by default once for each line of code that leads here.
        """
        found = self._estimate(X, spread=return_std or return_se)
        asked = [found.mean] + [found.deviation] * return_std + [found.error] * return_se
        shown = tuple(self._restore_shape(X, each) for each in asked if each is not None)
        return shown if len(shown) > 1 else shown[0]

    def predict_band(self, X: Any, coverage: float = 0.95) -> Any:
        """Return pointwise confidence bands of the mean, which say how well the curve itself is known.

        A band is ``ŷ ± t · se``, with the standard error of :meth:`predict` and the quantile t of Student's
        distribution with ``(1 − tr) / Σ α²`` degrees of freedom, those of the standard deviation. For normal errors
        and the kernel "boxcar" it is exact; for others an approximation. It is narrower than the interval of a new
        observation (:meth:`predict_interval`, :meth:`predict_quantiles`), by far if many points have weight.

        Each band covers the expectation of the estimator at its query, which is the regression function smoothed by the
        kernel. The difference to the function itself, the bias, is left out: it grows with the square of the bandwidth
        where the function bends, and with its slope at the edges if ``order=0``. At the bandwidth with the least error,
        which "loo" and "aicc" look for, the bias of peaks and valleys may be as large as the standard error, and bands
        miss them more often than they say. At half that bandwidth or less it is small, and bands are wider
        (undersmoothing: Hall 1992). For rows that depend on each other, bands are too narrow.

        Parameters
        ----------
        X : array-like (n, n_features)
        coverage : float in (0, 1), default 0.95
            The probability of each band by itself; that all of a curve lies within its bands is less likely.

        Returns
        -------
        ndarray (n, 2) or (n, n_outputs, 2)
            The lower and upper ends; NaN where the standard deviation is.

        References
        ----------
        Hall, P. (1992), "Effect of bias estimation on coverage accuracy of bootstrap confidence intervals for a
        probability density", Annals of Statistics 20; Wasserman, L. (2006), All of Nonparametric Statistics, 5.7.

        Examples
        --------
        >>> import numpy as np
        >>> from regard.regression import NadarayaWatsonRegressor
        >>> X = np.linspace(0, 6, 200)[:, None]
        >>> y = np.sin(X[:, 0]) + 0.3 * np.random.default_rng(0).standard_normal(200)
        >>> model = NadarayaWatsonRegressor(bandwidth=0.2, order=1).fit(X, y)
        >>> model.predict_band([[1.0], [3.0]]).round(2)
        array([[ 0.76,  0.95],
               [-0.03,  0.22]])
        """
        check_is_fitted(self)
        Number(gt=0, lt=1)("NadarayaWatsonRegressor", "coverage", coverage)
        found = self._estimate(X, spread=True)
        assert found.error is not None and found.freedom is not None
        reach = stdtrit(found.freedom, (1 + float(coverage)) / 2)[:, None] * found.error
        band = np.stack([found.mean - reach, found.mean + reach], -1).astype(self._result_dtype())
        return self._restore_shape(X, band)

    @torch.no_grad()
    def predict_gradient(self, X: Any) -> Any:
        """Return the slopes: by how much predictions rise with a unit of each feature.

        With ``order=1`` or 2 these are the linear coefficients of the local polynomial around each query, the usual
        estimate of the derivatives of the regression function (Fan and Gijbels 1996, section 3.1): their bias is less
        than that of the derivative of x ↦ ŷ(x), which also changes because the weights do. ``order=0`` has no other
        slope than that derivative, ``Σ α_i ∂log K_i/∂x (y_i − ŷ)``, which is biased towards 0 at the edges of the data.

        Parameters
        ----------
        X : array-like (n, n_features)

        Returns
        -------
        ndarray (n, n_features) or (n, n_features, n_outputs)
            In units of the target per unit of the feature; of a date, per day; of a place, per degree. NaN for a
            category, ordered or not, for a feature that the row misses, and where no two points with a weight differ so
            that they determine the slope, such as far from the data.

        Raises
        ------
        ValueError
            If all features are categories; and with ``order=0``, for a kernel whose weights do not change smoothly
            ("boxcar" and "constant"), and with ``n_neighbors``.

        Warns
        -----
        ExtrapolationWarning
            As :meth:`predict`.

        Examples
        --------
        >>> import numpy as np
        >>> from regard.regression import NadarayaWatsonRegressor
        >>> X = np.linspace(-1, 1, 101)[:, None]
        >>> model = NadarayaWatsonRegressor(bandwidth=0.1, order=2).fit(X, X[:, 0] ** 2)
        >>> model.predict_gradient([[-0.5], [0.0], [1.0]]).round(3) + 0.0
        array([[-1.],
               [ 0.],
               [ 2.]])
        """
        check_is_fitted(self)
        kernel = resolve_kernel(type(self).__name__, self.kernel)
        if not self._features.sloped:
            raise rejected(type(self).__name__, "X", "have a feature that is no category, for slopes", "none")
        if not self._order and not kernel.learnable:
            expected = "be 1 or 2 for slopes with a kernel whose weights do not change smoothly"
            raise rejected(type(self).__name__, "order", expected, f"0 with kernel={self.kernel!r}")
        if not self._order and self.n_neighbors is not None:
            expected = "be 1 or 2 for slopes with n_neighbors, whose bandwidths do not change smoothly"
            raise rejected(type(self).__name__, "order", expected, "0")
        smoother = self._smoother(double=True)
        query, bandwidth = self._query(X, smoother), self._bandwidth(smoother)
        found = self._evaluate(smoother, query, bandwidth, slope=True)
        assert found.slope is not None
        self._check_reach(smoother, query, bandwidth, found)
        by_feature = self._features.slopes(query, torch.where(found.reached[:, None, None], found.slope, torch.nan))
        slopes = by_feature.cpu().numpy().astype(self._result_dtype())
        return like_input(X, slopes if self._y.ndim == 2 else slopes[..., 0])

    @torch.no_grad()
    def predict_quantiles(self, X: Any, quantiles: Sequence[float] = (0.05, 0.5, 0.95)) -> Any:
        """Return quantiles of the targets around each query, weighed by the kernel.

        With ``order=1`` each target is first shifted along the line around the query, ``y_i − β(x) (x_i − x)``: the
        residuals about the line plus its value at the query (Hyndman, Bashtannyk and Grunwald 1996); with ``order=2``
        along the parabola. Quantiles never cross, and the mean of their distribution is the prediction.

        Parameters
        ----------
        X : array-like (n, n_features)
        quantiles : sequence of float in [0, 1]

        Returns
        -------
        ndarray (n, q) or (n, n_outputs, q)
            For each quantile p, the least target such that targets up to it have a share p of the weight. NaN beyond
            the training data (:meth:`extrapolates`), and where too few points have weight to leave a degree of freedom.
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
        beyond = self._check_reach(smoother, query, bandwidth, found)
        smoother = self._smoother()
        query, bandwidth = query.to(smoother.key), bandwidth.to(smoother.key)
        wanted = torch.from_numpy(shares).to(query)
        query = self._evaluator.with_own_widths(smoother, query, bandwidth)
        if self._order:
            values = (
                local_polynomial_quantiles(smoother, query, bandwidth, wanted)
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
        """Store the residuals of held-out rows for :meth:`predict_interval`.

        Parameters
        ----------
        X : array-like (n, n_features)
            Rows that are not in the training data.
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
        """Return conformal prediction intervals, which contain the targets of new rows with probability ``coverage``.

        Their half-width is the ``coverage`` quantile of absolute residuals. After :meth:`calibrate` these are the
        residuals of its held-out rows (split conformal; Lei et al. 2018), and the intervals contain at least this share
        of new targets on average, for any distribution. Otherwise all data are used, and intervals come close to this
        coverage, without a guarantee: with leave-one-out residuals, or with those of :meth:`cross_val_predict` after
        "learned" or with ``cv``, because a search leaves its own leave-one-out residuals too small. The first call then
        repeats the search for each fold.

        Parameters
        ----------
        X : array-like (n, n_features)
            Rows from the same distribution as the training data; the coverage is an average over such rows.
        coverage : float in (0, 1), default 0.9

        Returns
        -------
        ndarray (n, 2) or (n, n_outputs, 2)
            The lower and upper ends; infinite if there are too few residuals for this coverage.

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
                searched = isinstance(self.bandwidth, str) and (self.bandwidth == "learned" or self.cv is not None)
                averages = self._nested_averages() if searched else self._left_out_averages()
                self._left_out = np.abs(averages - self._targets())
            residuals, weight = self._left_out, self._weight
        mean = self._estimate(X)[0].astype(np.float64)
        reach = half_width(residuals, float(coverage), weight)
        found = np.stack([mean - reach, mean + reach], -1).astype(self._result_dtype())
        return self._restore_shape(X, found)

    def loo_predict(self) -> np.ndarray:
        """Return leave-one-out predictions of the training points, (n,) or (n, n_outputs).

        Rows of weight 0 are NaN. For a point without any other in reach, ``empty`` decides: the target of its nearest
        neighbour, the mean of the others, NaN, or an error.
        """
        check_is_fitted(self)
        found = np.full((self._count, self._targets().shape[1]), np.nan, dtype=self._result_dtype())
        found[self._rows] = self._left_out_averages()
        return self._restore_shape(None, found)

    def cross_val_predict(self) -> np.ndarray:
        """Return predictions of the training points by folds, with the bandwidth chosen within each.

        Each fold of ``cv``, or of 10 random ones (5 above 1,000 rows), is predicted by an estimator fitted to the rest.
        The least error that a search finds, ``loo_error_``, is too small for new rows, and the more so the more it
        chooses; the error of these predictions is not (nested cross-validation: Varma and Simon 2006). NaN for rows of
        weight 0 or in no fold.

        Returns
        -------
        ndarray (n,) or (n, n_outputs)

        Examples
        --------
        >>> import numpy as np
        >>> from regard.regression import NadarayaWatsonRegressor
        >>> rng = np.random.default_rng(1)
        >>> X, noise = rng.standard_normal((60, 5)), rng.standard_normal(60)
        >>> model = NadarayaWatsonRegressor(bandwidth="learned").fit(X, noise)
        >>> bool(model.loo_error_ < noise.var() < np.mean((model.cross_val_predict() - noise) ** 2))
        True
        """
        check_is_fitted(self)
        found = np.full((self._count, self._targets().shape[1]), np.nan, dtype=self._result_dtype())
        found[self._rows] = self._nested_averages()
        return self._restore_shape(None, found)

    def aicc(self, bandwidth: Any = None) -> float:
        """Return the corrected Akaike criterion of Hurvich, Simonoff and Tsai (1998); the least is the best.

        ``AICc = log σ̂² + 1 + 2 (tr S + 1) / (n − tr S − 2)``, with the mean squared residual σ̂² of the training points
        and the effective degrees of freedom tr S (:meth:`effective_dof`); of several outputs, the mean.

        Parameters
        ----------
        bandwidth : float or array-like (n_features,), optional
            That of the fit by default.

        Returns
        -------
        float
            Infinite if ``tr S ≥ n − 2``, or if ``empty`` would have to predict a training point. With ``subsample``, an
            estimate by that many random rows.

        Notes
        -----
        n counts repetitions where weights are whole numbers. A residual below 10⁻⁶ standard deviations of its target
        counts as that, so that of several perfect fits the one with the fewest degrees of freedom is the best.
        statsmodels' ``KernelReg`` (``aic_hurvich``) has the same formula, but always the trace for ``order=0``.

        References
        ----------
        Hurvich, C. M., Simonoff, J. S. and Tsai, C.-L. (1998), "Smoothing parameter selection in nonparametric
        regression using an improved Akaike information criterion", Journal of the Royal Statistical Society B 60.

        Examples
        --------
        >>> import numpy as np
        >>> from regard.regression import NadarayaWatsonRegressor
        >>> X = np.linspace(0, 6, 50)[:, None]
        >>> y = np.sin(X[:, 0]) + 0.1 * np.random.default_rng(0).standard_normal(50)
        >>> model = NadarayaWatsonRegressor(bandwidth="aicc", order=1).fit(X, y)
        >>> model.aicc() < model.aicc(2 * model.bandwidth_)
        True
        """
        return self._corrected_aic(bandwidth)[1]

    def _restore_shape(self, X: Any, found: np.ndarray) -> Any:
        """Return estimates (n, n_outputs, ...) on the device of X; drop the output axis for 1-D targets."""
        return like_input(X, found if self._y.ndim == 2 else found[:, 0])

    @property
    def _order(self) -> int:
        return int(self.order)

    def _validate_parameters(self) -> str:
        name = super()._validate_parameters()
        OneOf((0, 1, 2))(name, "order", self.order)
        return name

    def _targets(self) -> np.ndarray:
        return self._y if self._y.ndim == 2 else self._y[:, None]

    def _display_target(self, row: int) -> Any:
        return self._y[row] if self._y.ndim == 2 else float(self._y[row])
