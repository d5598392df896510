"""How well a table's rows are predicted by what was learned without them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from regard_cli.tables.columns import encode
from regard_cli.tables.reading import Table
from regard_cli.tables.regression import Added, Fitted, fit

#: Leaving out each row in turn compares all pairs of rows: up to so many it is worth the wait (a quarter of a minute).
_ROWS = 100_000
#: How many rows are held out instead.
_HELD = 10_000


@dataclass(frozen=True)
class Quality:
    """How well rows are predicted that were not learned from.

    Attributes
    ----------
    rows : int
        The rows that were predicted.
    lost : int
        The rows that should have been, but lie beyond the reach of every other.
    error : float
        Root mean square error; of a classification, the share of wrong labels.
    simple : float
        The same of what is predicted without a feature: the mean of the rows learned from (without the row itself), or
        their most frequent class.
    r2 : float
        The coefficient of determination on these very rows, ``1 − Σ w (y − ŷ)² / Σ w (y − ȳ)²`` with their own mean ȳ,
        as :func:`sklearn.metrics.r2_score` has it; NaN of a classification, and where the rows have one target.
    exact : bool
        Whether each row was predicted from all the others, rather than some from the rest.
    """

    rows: int
    error: float
    simple: float
    r2: float = math.nan
    exact: bool = True
    lost: int = 0


def quality_of(fitted: Fitted, *, exact: bool = False) -> Quality:
    """Return how well the rows of the table are predicted that was learned from.

    Parameters
    ----------
    fitted : Fitted
    exact : bool, default False
        Leave out each row in turn however many there are. By default rows of a large table are held out instead, with
        the bandwidth as it was found.
    """
    prepared, learned = fitted.prepared, fitted.learned
    count = int(learned.sum())
    w = np.ones(count) if prepared.weight is None else prepared.weight[learned]
    y = prepared.y[learned]
    if exact or count <= _ROWS:
        return _compared(fitted, fitted.left_out, y, w, _without_features(y, w, fitted.classifies))
    held = np.zeros(count, bool)
    held[np.random.default_rng(0).choice(count, _HELD, replace=False)] = True
    rest = learned.copy()
    rest[np.flatnonzero(learned)[held]] = False
    # A row may lie beyond reach only because its neighbours are held out too: no reason to refuse.
    empty = "nan" if fitted.estimator.empty == "raise" else fitted.estimator.empty
    listed = dict(zip((column.name for column in prepared.columns), fitted.estimator.bandwidth_))
    bandwidth = [float(listed.get(name, 1.0)) for name in prepared.listed]
    order = getattr(fitted.estimator, "order", 0)
    same = {name: getattr(fitted.estimator, name) for name in ("kernel", "method", "rtol")}
    without = fit(prepared, bandwidth=bandwidth, order=order, empty=empty, rows=rest, **same)
    simple = np.full(_HELD, _simplest(y[~held], w[~held], fitted.classifies))
    rows = np.flatnonzero(learned)[held]
    return _compared(fitted, without.raw(prepared.X[rows]), y[held], w[held], simple, exact=False)


def quality_on(fitted: Fitted, table: Table, added: Added) -> Quality | None:
    """Return how well the rows of another table were predicted, or None if it does not tell the target of any."""
    if fitted.name not in table.frame.columns:
        return None
    try:
        truth = encode(fitted.prepared.target, table).values
    except ValueError:  # something else stands there, such as what is to be predicted
        return None
    known = added.predicted & ~np.isnan(truth)
    if not known.any():
        return None
    prepared, learned = fitted.prepared, fitted.learned
    w = np.ones(int(learned.sum())) if prepared.weight is None else prepared.weight[learned]
    simple = _simplest(prepared.y[learned], w, fitted.classifies)
    mine = added.columns[f"{fitted.name}_predicted"][known]
    if fitted.classifies:
        codes = {each: code for code, each in enumerate(fitted.classes)}
        mine = np.array([codes.get(each, np.nan) for each in mine], np.float64)
    count = int(known.sum())
    return _errors(fitted.classifies, mine, truth[known], np.ones(count), np.full(count, simple))


def _compared(
    fitted: Fitted, raw: np.ndarray, y: np.ndarray, w: np.ndarray, simple: np.ndarray, exact: bool = True
) -> Quality:
    mine = np.where(np.isnan(raw).any(1), np.nan, np.nan_to_num(raw).argmax(1)) if fitted.classifies else raw
    return _errors(fitted.classifies, mine, y, w, simple, exact)


def _errors(
    classifies: bool, mine: np.ndarray, y: np.ndarray, w: np.ndarray, simple: np.ndarray, exact: bool = True
) -> Quality:
    there = ~np.isnan(mine)
    if not there.any():
        return Quality(0, math.nan, math.nan, exact=exact, lost=len(mine))

    def error(values: np.ndarray) -> float:
        if classifies:
            return float(np.average(values[there] != y[there], weights=w[there]))
        return float(np.sqrt(np.average((values[there] - y[there]) ** 2, weights=w[there])))

    r2 = math.nan if classifies else _r2(mine[there], y[there], w[there])
    return Quality(int(there.sum()), error(mine), error(simple), r2, exact, int((~there).sum()))


def _r2(mine: np.ndarray, y: np.ndarray, w: np.ndarray) -> float:
    from sklearn.metrics import r2_score

    return float(r2_score(y, mine, sample_weight=w)) if np.ptp(y) > 0 else math.nan


def _simplest(y: np.ndarray, w: np.ndarray, classifies: bool) -> float:
    return float(np.bincount(y.astype(int), w).argmax() if classifies else np.average(y, weights=w))


def _without_features(y: np.ndarray, w: np.ndarray, classifies: bool) -> np.ndarray:
    """Return what is predicted where no feature counts: the mean of the other rows, or the most frequent class."""
    if classifies:  # of all rows: with classes of one size, that of the others would never be right
        return np.full(len(y), _simplest(y, w, classifies))
    center = np.average(y, weights=w)
    return center - w * (y - center) / (w.sum() - w)
