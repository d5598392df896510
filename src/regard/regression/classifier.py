"""Classification by weighted votes."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted

from regard._utils.constraints import Number
from regard._utils.errors import described, rejected
from regard.regression._base import KernelEstimator
from regard.regression._training import all_or_nothing, as_array, like_input


class NadarayaWatsonClassifier(ClassifierMixin, KernelEstimator):
    r"""Classification by kernel-weighted votes, ``P(c | x) = Σ_{i: y_i = c} K((x − x_i) / h) / Σ_j K((x − x_j) / h)``.

    Nadaraya–Watson regression (Nadaraya 1964; Watson 1964) on an indicator of each class: attention whose values are
    labels.

    Parameters
    ----------
    kernel, bandwidth, metric, missing, max_iter, tol, subsample, cv
        As in :class:`NadarayaWatsonRegressor`; the leave-one-out error is the Brier score.
    random_state, method, rtol, engine, device, dtype, verbose
        As in :class:`NadarayaWatsonRegressor`.
    n_neighbors : int or "loo", optional
        As in :class:`NadarayaWatsonRegressor`: bandwidths that adapt to the distance of the k-th nearest point.
    empty : {"nearest", "mean", "nan", "raise"}, default "nearest"
        What to predict for a query where every kernel weight is 0: the class of the nearest training point (with a
        warning that counts such queries), the class frequencies of the training data, NaN probabilities, or an error.

    class_weight : dict, "balanced" or None, default None
        Multiplies the weight of each row by that of its class: by label (1 for others), or with "balanced" by
        ``n / (n_classes · n_c)`` for a class of n_c rows, so that all classes have the same total weight. Votes are
        those of such a ``sample_weight``, but weights then count no repetitions: searches leave out a row as a whole,
        and "scott" and "silverman" count rows. ``predict_proba`` no longer estimates the frequencies of classes.

    Attributes
    ----------
    classes_ : ndarray (n_classes,)
    bandwidth_, n_neighbors_, loo_error_, loo_curve_, far_rows_, n_iter_, n_features_in_, feature_names_in_
        As in :class:`NadarayaWatsonRegressor`.

    Examples
    --------
    >>> from regard.regression import NadarayaWatsonClassifier
    >>> model = NadarayaWatsonClassifier(bandwidth=1.0).fit([[0.0], [1.0], [5.0]], ["a", "a", "b"])
    >>> model.predict([[0.5], [4.0]])
    array(['a', 'b'], dtype='<U1')
    >>> model.predict_proba([[0.5]]).round(3)
    array([[1., 0.]])
    """

    class_weight: Any

    def __init__(
        self,
        kernel: Any = "gaussian",
        bandwidth: Any = "scott",
        *,
        n_neighbors: Any = None,
        metric: Any = "euclidean",
        missing: str = "error",
        empty: str = "nearest",
        max_iter: int = 200,
        tol: float = 1e-5,
        subsample: int | None = None,
        cv: Any = None,
        class_weight: Any = None,
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
        y : array-like (n,)
            Labels.
        sample_weight : array-like (n,), optional
            How often each point counts; points of weight 0 are ignored.

        Returns
        -------
        NadarayaWatsonClassifier
        """
        self._validate_parameters()
        X, y = self._validate_data(X, y)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        self._store_points(X, codes, self._weighed(codes, sample_weight))
        return self._prepare()

    @all_or_nothing
    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Append training data.

        Parameters
        ----------
        X : array-like (n, n_features)
        y : array-like (n,)
        classes : array-like (n_classes,), optional
            All classes of all calls; needed if the first call does not contain each of them.
        sample_weight : array-like (n,), optional

        Returns
        -------
        NadarayaWatsonClassifier
        """
        self._validate_parameters()
        if isinstance(self.class_weight, str):
            expected = "be a dict for partial_fit, which sees a part of the rows (compute_class_weight() makes one)"
            raise rejected(type(self).__name__, "class_weight", expected, repr(self.class_weight))
        first = not hasattr(self, "_X")
        X, y = self._validate_data(X, y, reset=first)
        check_classification_targets(y)
        labels = np.unique(y if classes is None else as_array(classes)) if first else self.classes_
        if not first and classes is not None and not np.array_equal(np.unique(classes), labels):
            raise rejected(type(self).__name__, "classes", f"be those of the first call, {labels}", classes)
        codes = np.searchsorted(labels, y).clip(max=len(labels) - 1)
        if unknown := np.unique(y[labels[codes] != y]).tolist():
            raise rejected(type(self).__name__, "y", f"be labels of the first call, {labels}", unknown)
        self.classes_ = labels
        (self._store_points if first else self._append_points)(X, codes, self._weighed(codes, sample_weight))
        return self._prepare(rechoose=False)

    def predict_proba(self, X: Any) -> Any:
        """Return the probability of each class.

        Parameters
        ----------
        X : array-like (n, n_features)

        Returns
        -------
        ndarray (n, n_classes)
            In the order of ``classes_``; each row sums to 1.
        """
        shares = np.maximum(self._estimate(X)[0], 0.0)
        return like_input(X, shares / shares.sum(1, keepdims=True))

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each row.

        Parameters
        ----------
        X : array-like (n, n_features)

        Returns
        -------
        ndarray (n,)

        Raises
        ------
        ValueError
            With ``empty="nan"``, if a query has no probabilities.
        """
        shares = self._estimate(X)[0]
        if unreached := int(np.isnan(shares).any(1).sum()):
            expected = "lie within the kernel's reach (empty='nan' gives no label beyond it)"
            raise rejected(type(self).__name__, "X", expected, f"{unreached} of {len(shares)} queries beyond it")
        return self.classes_[shares.argmax(1)]

    def loo_predict_proba(self) -> np.ndarray:
        """Return leave-one-out class probabilities of the training points, (n, n_classes).

        Rows of weight 0 are NaN.
        """
        check_is_fitted(self)
        found = np.full((self._count, len(self.classes_)), np.nan, dtype=self._result_dtype())
        shares = np.maximum(self._left_out_averages(), 0.0)
        found[self._rows] = shares / shares.sum(1, keepdims=True)
        return found

    def cross_val_predict_proba(self) -> np.ndarray:
        """Return class probabilities of the training points by folds, with the bandwidth chosen within each.

        As :meth:`NadarayaWatsonRegressor.cross_val_predict`. NaN for rows of weight 0 or in no fold.

        Returns
        -------
        ndarray (n, n_classes)
        """
        check_is_fitted(self)
        found = np.full((self._count, len(self.classes_)), np.nan, dtype=self._result_dtype())
        shares = np.maximum(self._nested_averages(), 0.0)
        found[self._rows] = shares / shares.sum(1, keepdims=True)
        return found

    def _fit_points(self, other: KernelEstimator, rows: np.ndarray) -> None:
        self.classes_ = other.classes_
        super()._fit_points(other, rows)

    def loo_predict(self) -> np.ndarray:
        """Return the leave-one-out class of each training point, (n,).

        Rows of weight 0 get the most frequent class.
        """
        shares = self.loo_predict_proba()
        return self.classes_[np.where(np.isnan(shares).any(1, keepdims=True), self._center, shares).argmax(1)]

    def _validate_parameters(self) -> str:
        name = super()._validate_parameters()
        if isinstance(self.bandwidth, str) and self.bandwidth == "aicc":
            expected = "be 'loo' or another way for classes: AICc is of normal errors"
            raise rejected(name, "bandwidth", expected, repr(self.bandwidth))
        given = self.class_weight
        if not (given is None or isinstance(given, dict) or given == "balanced"):
            raise rejected(
                name, "class_weight", "be None, 'balanced' or a dict of labels and weights", described(given)
            )
        return name

    @property
    def _weighs_classes(self) -> bool:
        return self.class_weight is not None

    def _weighed(self, codes: np.ndarray, sample_weight: Any) -> Any:
        """Return the weight of each row (n,) times that of its class, or None if all are 1."""
        if self.class_weight is None:
            return sample_weight
        name, given = type(self).__name__, self.class_weight
        if isinstance(given, dict):
            labels = self.classes_.tolist()
            unknown = [label for label in given if label not in labels]
            # All labels having a weight, others may be those of another fold.
            if unknown and not set(labels) <= set(given):
                raise rejected(name, "class_weight", f"have labels of y, {labels}", unknown)
            for label, weight in given.items():
                Number(ge=0)(name, f"class_weight[{label!r}]", weight)
            factor = np.array([given.get(label, 1.0) for label in labels], dtype=np.float64)[codes]
        else:
            factor = compute_sample_weight(given, codes)
        return factor * _check_sample_weight(as_array(sample_weight), codes, dtype=np.float64)

    def _targets(self) -> np.ndarray:
        return np.eye(len(self.classes_))[self._y]

    def _display_target(self, row: int) -> Any:
        return self.classes_[self._y[row]]
