"""Kernel regression of a table: learn from its rows, and predict these or others as new columns."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._utils.errors import rejected
from regard_cli.tables.columns import Coded, encode
from regard_cli.tables.preparation import Prepared
from regard_cli.tables.reading import Table

if TYPE_CHECKING:
    from pandas import DataFrame

#: Pairs of rows that one look at a bandwidth compares at most, and rows that it leaves out at least.
_PAIRS, _LEAST = 5 * 10**8, 2000
#: Rows over which a slope is averaged.
_SLOPES = 200


@dataclass(frozen=True)
class Added:
    """Columns of predictions beside a table.

    Attributes
    ----------
    columns : dict of str to ndarray (N,)
        NaN, or None for a label, where a row could not be predicted.
    predicted : ndarray (N,), bool
        The rows that miss no feature.
    missing : dict of str to int
        How many rows miss each feature, where any does.
    extrapolated : int
        How many rows lie beyond the reach of the rows that were learned from.
    """

    columns: dict[str, np.ndarray]
    predicted: np.ndarray
    missing: dict[str, int] = field(default_factory=dict)
    extrapolated: int = 0

    @property
    def lost(self) -> int:
        """How many rows miss no feature and yet have no prediction."""
        first = next(iter(self.columns.values()))[self.predicted]
        return sum(each is None or each != each for each in first.tolist())


@dataclass(frozen=True)
class Fitted:
    """A regression, or for a target of text a classification, learned from a table.

    Attributes
    ----------
    prepared : Prepared
    learned : ndarray (N,), bool
        The rows that were learned from: those that miss nothing and whose weight is not 0.
    estimator : NadarayaWatsonRegressor or NadarayaWatsonClassifier
    subsample : int or None
        How many rows, drawn at random, were left out to compare bandwidths; None for all.
    """

    prepared: Prepared
    learned: np.ndarray
    estimator: Any
    subsample: int | None

    @property
    def name(self) -> str:
        """The target's name."""
        return self.prepared.target.name

    @property
    def classifies(self) -> bool:
        """Whether the target is text."""
        return self.prepared.target.kind == "category"

    @cached_property
    def left_out(self) -> np.ndarray:
        """The prediction (rows,) of each row learned from by all the others; for classes, shares (rows, classes)."""
        return self._by_class(self.estimator.loo_predict_proba()) if self.classifies else self.estimator.loo_predict()

    @property
    def classes(self) -> tuple[str, ...]:
        """The texts of the target, in the order of their codes."""
        return self.prepared.target.categories

    def of_the_others(self) -> Added:
        """Return the predictions of the table's own rows, each from all the others."""
        prepared = self.prepared
        complete = ~np.isnan(prepared.X).any(1)
        raw = np.full((len(complete), *self.left_out.shape[1:]), np.nan)
        raw[self.learned] = self.left_out
        rest = complete & ~self.learned  # of these the target is missing, or the weight is missing or 0
        raw[rest] = self.raw(prepared.X[rest])
        missing = {c.name: int(np.isnan(prepared.X[:, i]).sum()) for i, c in enumerate(prepared.columns)}
        return Added(self._named(raw), complete, {name: count for name, count in missing.items() if count})

    def predict(self, coded: Mapping[str, Coded], *, std: bool = False, quantiles: Sequence[float] = ()) -> Added:
        """Return the predictions of rows that :func:`code` made ready, with what else is asked for."""
        X = np.stack([coded[column.name].values for column in self.prepared.columns], 1)
        complete = ~np.isnan(X).any(1)
        raw = self.raw(X[complete])
        found = self._named(raw)
        rows = as_frame(self.prepared, X[complete])
        beyond = np.asarray(self.estimator.extrapolates(rows)) if len(rows) else np.empty(0, bool)
        if std:
            found[f"{self.name}_std"] = self.estimator.predict(rows, return_std=True)[1] if len(rows) else raw
        if quantiles:
            values = np.empty((0, len(quantiles)))
            if len(rows):
                values = self.estimator.predict_quantiles(rows, quantiles=tuple(quantiles))
            found |= {f"{self.name}_q{each:g}": values[:, i] for i, each in enumerate(quantiles)}
        found[f"{self.name}_extrapolated"] = beyond.astype(object)
        columns = {}
        for name, values in found.items():
            columns[name] = np.full(len(X), None if values.dtype == object else np.nan, values.dtype)
            columns[name][complete] = values
        missing = {name: int(np.isnan(each.values).sum()) for name, each in coded.items()}
        missing = {name: count for name, count in missing.items() if count}
        return Added(columns, complete, missing, int(beyond.sum()))

    def slope(self, feature: int) -> float:
        """Return by how much predictions rise with a unit of a feature, on average over rows learned from."""
        from regard.regression import ExtrapolationWarning

        X = self.prepared.X[self.learned]
        step = np.zeros(X.shape[1])
        step[feature] = X[:, feature].std() / 2
        X = X[np.linspace(0, len(X) - 1, min(_SLOPES, len(X))).astype(int)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExtrapolationWarning)
            rise = self.raw(X + step) - self.raw(X - step)
        return float(np.nanmean(rise) / (2 * step[feature]))

    def raw(self, X: np.ndarray) -> np.ndarray:
        """Return predictions (n,) at features (n, n_features); for classes, shares (n, classes)."""
        if not len(X):
            return np.empty((0, len(self.classes))) if self.classifies else np.empty(0)
        rows = as_frame(self.prepared, X)
        if not self.classifies:
            return np.asarray(self.estimator.predict(rows))
        return self._by_class(self.estimator.predict_proba(rows))

    def _by_class(self, shares: np.ndarray) -> np.ndarray:
        """Return shares of the estimator's classes as shares of the target's: one may have no row left."""
        found = np.where(np.isnan(shares[:, :1]), np.nan, np.zeros((len(shares), len(self.classes))))
        place = {each: code for code, each in enumerate(self.classes)}
        found[:, [place[str(each)] for each in self.estimator.classes_]] = shares
        return found

    def _named(self, raw: np.ndarray) -> dict[str, np.ndarray]:
        """Return predictions, or shares (n, classes), as columns."""
        names = added_names(self.prepared)
        if not self.classifies:
            return {names[0]: raw}
        known = ~np.isnan(raw).any(1)
        labels = np.full(len(raw), None, object)
        labels[known] = np.array(self.classes, object)[raw[known].argmax(1)]
        return {names[0]: labels, **dict(zip(names[1:], raw.T))}


def added_names(
    prepared: Prepared, *, std: bool = False, quantiles: Sequence[float] = (), new: bool = False
) -> list[str]:
    """Return the names of the columns that predictions add to a table, its own or a ``new`` one."""
    target = prepared.target
    shares = [f"{target.name}_probability_{each}" for each in target.categories]
    quantile = [f"{target.name}_q{each:g}" for each in quantiles]
    beyond = [f"{target.name}_extrapolated"]
    return [f"{target.name}_predicted", *shares, *[f"{target.name}_std"][: int(std)], *quantile, *beyond[: int(new)]]


def code(prepared: Prepared, table: Table) -> dict[str, Coded]:
    """Return the features of another table as numbers, as they were when they were learned from.

    Raises
    ------
    ValueError
        If it lacks a feature, or one is not what it was.
    """
    return {column.name: encode(column, table) for column in prepared.columns}


def fit(
    prepared: Prepared,
    *,
    kernel: str = "gaussian",
    bandwidth: str | Sequence[float] = "loo",
    order: int = 0,
    empty: str = "nearest",
    method: str = "auto",
    rtol: float | None = None,
    rows: np.ndarray | None = None,
    verbose: int = 0,
) -> Fitted:
    """Learn from a table.

    Parameters
    ----------
    prepared : Prepared
    kernel, empty, method : str
    rtol : float, optional
        As :class:`~regard.regression.NadarayaWatsonRegressor` takes them.
    bandwidth : str or sequence of float
        The name of a way to choose it, one number for all features, or one for each feature that was listed.
    order : int
        0 or 1; of no effect for a classification.
    rows : ndarray (N,), bool, optional
        Learn from these alone.
    verbose : int
        1 for progress bars.

    Returns
    -------
    Fitted

    Raises
    ------
    ValueError
        If there are more or fewer bandwidths than features, or the estimator refuses.

    Examples
    --------
    >>> import pandas as pd
    >>> from regard_cli.tables.preparation import prepare
    >>> table = Table("a.csv", pd.DataFrame({"x": ["0", "1", "2"], "y": ["0", "1", "4"]}), "CSV")
    >>> fitted = fit(prepare(table, "y"), bandwidth=[0.5])
    >>> fitted.of_the_others().columns["y_predicted"].round(3)
    array([1.007, 2.   , 0.998])
    """
    from regard.regression import NadarayaWatsonClassifier, NadarayaWatsonRegressor

    learned = prepared.used if prepared.weight is None else prepared.used & (np.nan_to_num(prepared.weight) > 0)
    learned = learned if rows is None else learned & rows
    count = int(learned.sum())
    most = max(_LEAST, _PAIRS // count)
    subsample = most if most < count and bandwidth in ("loo", "learned") else None
    options: dict[str, Any] = {
        "kernel": kernel, "bandwidth": kept_bandwidth(prepared, bandwidth), "metric": prepared.metric, "empty": empty,
        "method": method, "rtol": rtol, "subsample": subsample, "random_state": 0, "verbose": verbose,
    }  # fmt: skip
    y: Any = prepared.y[learned]
    if prepared.target.kind == "category":
        estimator: Any = NadarayaWatsonClassifier(**options)
        y = np.array(prepared.target.categories)[y.astype(int)]
    else:
        estimator = NadarayaWatsonRegressor(order=order, **options)
    weight = None if prepared.weight is None else prepared.weight[learned]
    estimator.fit(as_frame(prepared, prepared.X[learned]), y, sample_weight=weight)
    return Fitted(prepared, learned, estimator, subsample)


def as_frame(prepared: Prepared, X: np.ndarray) -> DataFrame:
    """Return features with the names of their columns."""
    import pandas as pd

    return pd.DataFrame(X, columns=[column.name for column in prepared.columns])


def kept_bandwidth(prepared: Prepared, bandwidth: str | Sequence[float]) -> Any:
    """Return a bandwidth as the estimator takes it: without the numbers for columns that were left out.

    Raises
    ------
    ValueError
        If there are more or fewer numbers than features were listed.
    """
    if isinstance(bandwidth, str):
        return bandwidth
    if len(bandwidth) == 1:
        return bandwidth[0]
    if len(bandwidth) != len(prepared.listed):
        names = ", ".join(prepared.listed)
        expected = f"be one number, or one for each of {len(prepared.listed)} features ({names})"
        raise rejected("regress", "bandwidth", expected, f"{len(bandwidth)} numbers")
    kept = {column.name for column in prepared.columns}
    return [width for name, width in zip(prepared.listed, bandwidth) if name in kept]
