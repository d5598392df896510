"""Columns as coordinates of one distance: numbers, angles, categories, and frames as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, timedelta
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard._utils.errors import described, rejected

# Columns of frames that are no numbers: dates and time spans become days, text and categories become codes ------------


_DAY = np.timedelta64(1, "D")


@dataclass(frozen=True)
class ColumnEncoder:
    """Encode the columns of a frame of pandas or polars as numbers, as the training data had them.

    Attributes
    ----------
    categories : dict of int to list
        By the place of the column, the values in the order of their codes.
    dates : dict of int to bool
        By the place of a column of dates, whether these have a time zone.
    spans : tuple of int
        The places of columns of time spans.
    ordered : tuple of int
        The places of columns of ordered categories.
    """

    categories: dict[int, list[Any]] = field(default_factory=dict)
    dates: dict[int, bool] = field(default_factory=dict)
    spans: tuple[int, ...] = ()
    ordered: tuple[int, ...] = ()

    @classmethod
    def fit(cls, X: Any, before: ColumnEncoder | None = None) -> ColumnEncoder:
        """Return the categories of training data; those of data ``before`` keep their codes."""
        known = {} if before is None else {place: list(values) for place, values in before.categories.items()}
        dates: dict[int, bool] = {}
        spans, ordered = [], []
        for place, column in _columns(X):
            if place in known or (_is_categorical(column) and before is None):
                if before is not None and place in before.ordered:
                    continue  # a new category has no place among the others
                values = known.setdefault(place, [])
                if getattr(column.dtype, "ordered", False):
                    ordered.append(place)
                is_listed = type(column.dtype).__name__ == "CategoricalDtype" and not values
                seen = set(values)
                for value in column.cat.categories if is_listed else column.unique():
                    if _is_there(value) and value not in seen:
                        values.append(value)
            elif (time := _times(column)) is not None:
                if time.dtype.kind == "M":
                    dates[place] = _has_zone(column)
                else:
                    spans.append(place)
        if before is not None:
            return cls(known, before.dates, before.spans, before.ordered)
        return cls(known, dates, tuple(spans), tuple(ordered))

    def transform(self, function: str, X: Any) -> Any:
        """Return X with numbers for times in days (of dates, since 1970) and for categories.

        A category that is not known gets a new code, and a missing one NaN.

        Raises
        ------
        ValueError
            If a column holds dates, time spans or text, and the training data had something else there, such as dates
            with a time zone; or an ordered category that these had not.
        """
        if not _is_frame(X):
            return _days(X) if isinstance(X, np.ndarray) and X.dtype.kind in "mM" else X
        coded: dict[int, np.ndarray] = {}
        for place, column in _columns(X):
            if place in self.categories:
                coded[place] = self._codes(place, column)
                new = coded[place] == len(self.categories[place])
                if place in self.ordered and new.any():
                    got = repr(next(each for each, is_new in zip(column, new) if is_new))
                    raise rejected(function, f"column {column.name!r} of X", "hold the ordered categories of fit", got)
                continue
            time = _times(column)
            was = "dates" if place in self.dates else "time spans" if place in self.spans else "numbers"
            got = "text" if time is None and _is_categorical(column) else "numbers"
            got = got if time is None else "dates" if time.dtype.kind == "M" else "time spans"
            dated = time is not None and was == got == "dates" and not np.isnat(time).all()
            if dated and self.dates[place] != _has_zone(column):
                both = ["dates with a time zone", "dates without a time zone"]
                was, got = both if self.dates[place] else reversed(both)
            if was != got:
                raise rejected(function, f"column {column.name!r} of X", f"hold {was}, as in fit", got)
            if time is not None:
                coded[place] = _days(time)
        return _with_columns(X, coded) if coded else X

    def _codes(self, place: int, column: Any) -> np.ndarray:
        codes = {value: float(code) for code, value in enumerate(self.categories[place])}
        values = list(column)
        return np.array([codes.get(each, float(len(codes))) if _is_there(each) else np.nan for each in values])

    def decode(self, place: int, value: float) -> Any:
        """Return a value of a column as it was before it became a number."""
        if place in self.dates:
            return np.datetime64(round(value * 86400), "s")
        values = self.categories.get(place)
        if values is None:
            return value
        return values[int(value)] if value == value else None


def _is_frame(X: Any) -> bool:
    """Return whether X is a frame of pandas, polars or a library like them."""
    return hasattr(X, "columns") and (hasattr(X, "iloc") or hasattr(X, "to_series"))


def _columns(X: Any) -> Iterator[tuple[int, Any]]:
    """Yield the place of each column of a frame, and the column."""
    if _is_frame(X):
        for place in range(X.shape[1]):
            yield place, X.iloc[:, place] if hasattr(X, "iloc") else X.to_series(place)


def _with_columns(X: Any, coded: dict[int, np.ndarray]) -> Any:
    """Return a frame with these columns in the places of others."""
    if not hasattr(X, "iloc"):
        return X.with_columns([type(X.to_series(place))(X.columns[place], each) for place, each in coded.items()])
    found = X.copy()
    for place, values in coded.items():
        found.isetitem(place, values)
    return found


def _is_categorical(column: Any) -> bool:
    """Return whether a column holds text or categories."""
    kind = getattr(column.dtype, "kind", None)  # NumPy's and pandas'
    if kind is None:
        return str(column.dtype).startswith(("String", "Categorical", "Enum"))  # polars'
    if type(column.dtype).__name__ == "CategoricalDtype":
        return True
    return kind not in "biufcMm" and any(isinstance(each, str) for each in column)


def _has_zone(column: Any) -> bool:
    """Return whether the dates of a column have a time zone."""
    dtype = getattr(column.dtype, "pyarrow_dtype", column.dtype)
    if getattr(dtype, "kind", None) == "O":
        return any(getattr(each, "tzinfo", None) is not None for each in column)
    return getattr(dtype, "tz", None) is not None or getattr(dtype, "time_zone", None) is not None


def _times(column: Any) -> np.ndarray | None:
    """Return a column of dates or time spans as such an array of NumPy, or None if it is something else."""
    kind = getattr(column.dtype, "kind", None)
    if kind is None:
        dtype = str(column.dtype)
        return column.to_numpy() if dtype.startswith(("Date", "Duration")) else None
    if kind in "mM":
        name = "datetime64" if kind == "M" else "timedelta64"
        return column.to_numpy(f"{name}[us]", na_value=getattr(np, name)("NaT"))
    if hasattr(column, "dt") and hasattr(column.dt, "start_time"):  # periods
        return column.dt.start_time.to_numpy("datetime64[us]")
    if kind == "O":
        there = [each for each in column if _is_there(each)]
        for name, kinds in (("datetime64[us]", date), ("timedelta64[us]", timedelta)):
            if there and all(isinstance(each, kinds) for each in there):
                return np.array([_universal(each) if _is_there(each) else None for each in column], dtype=name)
    return None


def _universal(time: Any) -> Any:
    """Return a date without its time zone, in UTC, or a time span as it is."""
    return time if getattr(time, "tzinfo", None) is None else time.astimezone(UTC).replace(tzinfo=None)


def _is_there(value: Any) -> bool:
    return value is not None and type(value).__name__ != "NAType" and bool(value == value)  # as NaN and NaT do not


def _days(times: np.ndarray) -> np.ndarray:
    """Return dates as days since 1970, and time spans as days; NaN where there is none."""
    return (times - np.datetime64(0, "D") if times.dtype.kind == "M" else times) / _DAY


# ColumnEncoder as coordinates: each kind of feature becomes one or more, so that one kernel measures them all ---------


#: A feature's kind, and for an angular one the length of its circle, for an ordered one its values in order or None,
#: for a latitude the place of its longitude, and the reverse.
Kind = tuple[str, Any]
CATEGORICAL: Kind = ("categorical", None)
#: Kilometres of the mean radius of the Earth (IUGG), which makes distances on the sphere as those of scikit-learn's
#: haversine_distances times this.
EARTH = 6371.0088

_EXPECTED = (
    "be 'euclidean', 'angular', 'categorical', 'ordered' or ('angular', period), one for all features or one for each"
)
_PAIR = "be 'haversine' of two features, as in {('latitude', 'longitude'): 'haversine'}"


def kinds_of(function: str, metric: Any, width: int, names: Sequence[str] | None) -> tuple[Kind, ...]:
    """Return the kind of each of ``width`` features, or raise."""
    if isinstance(metric, np.ndarray):
        metric = metric.tolist()
    if isinstance(metric, Mapping):
        kinds: list[Kind] = [("euclidean", None)] * width
        for name, value in metric.items():
            if isinstance(name, tuple) or value == "haversine":
                if not isinstance(name, tuple) or len(name) != 2 or value != "haversine":
                    raise rejected(function, "metric", _PAIR, repr({name: value}))
                latitude, longitude = (_place(function, each, width, names) for each in name)
                if latitude == longitude or {kinds[latitude][0], kinds[longitude][0]} != {"euclidean"}:
                    raise rejected(function, "metric", "name each feature once", repr(name))
                kinds[latitude], kinds[longitude] = ("haversine", longitude), ("longitude", latitude)
                continue
            kinds[_place(function, name, width, names)] = _kind(function, value)
        return tuple(kinds)
    if isinstance(metric, str) or (isinstance(metric, tuple) and len(metric) == 2 and metric[0] == "angular"
                                   and not isinstance(metric[1], str)):  # fmt: skip
        return (_kind(function, metric),) * width
    if not isinstance(metric, Sequence) or len(metric) != width:
        came = f"{len(metric)} of them for {width} features" if isinstance(metric, Sequence) else described(metric)
        raise rejected(function, "metric", _EXPECTED, came)
    return tuple(_kind(function, value) for value in metric)


def _place(function: str, name: Any, width: int, names: Sequence[str] | None) -> int:
    if isinstance(name, str):
        if names is None or name not in names:
            raise rejected(function, "metric", "name features that X has", repr(name))
        return list(names).index(name)
    if isinstance(name, bool) or not isinstance(name, (int, np.integer)) or not 0 <= name < width:
        raise rejected(function, "metric", f"name features by name or index below {width}", described(name))
    return int(name)


def _kind(function: str, value: Any) -> Kind:
    if isinstance(value, str) and value in ("euclidean", "angular", "categorical", "ordered"):
        return value, 2 * math.pi if value == "angular" else None
    if value == "haversine":
        raise rejected(function, "metric", _PAIR, repr(value))
    if isinstance(value, tuple) and len(value) == 2 and value[0] == "ordered" and isinstance(value[1], np.ndarray):
        return value  # as fitted
    if isinstance(value, (tuple, list)) and len(value) == 2 and value[0] == "angular":
        period = value[1]
        if isinstance(period, Real) and not isinstance(period, bool) and 0 < float(period) < math.inf:
            return "angular", float(period)
    raise rejected(function, "metric", _EXPECTED, repr(value))


#: With numbers, up to this many categories are corners, which trees and transforms can use; more are codes.
CORNERS = 100


def check_values(function: str, kinds: tuple[Kind, ...], X: np.ndarray, names: Sequence[str], missing: str) -> None:
    """Raise if a number in X (n, n_features) is missing and must not be, or is no latitude where it should be."""
    for (kind, _), name, column in zip(kinds, names, X.T):
        if kind == "categorical":
            continue
        gone = np.isnan(column)
        if missing == "error" and gone.any():
            expected = "hold no missing values unless the feature is categorical (missing='marginal' allows them)"
            raise rejected(function, "X", expected, f"NaN in {int(gone.sum()):,} rows of {name}: Input X contains NaN")
        if kind == "haversine" and (np.abs(column[~gone]) > 90).any():
            raise rejected(
                function, f"latitude {name}", "lie between -90 and 90 degrees", f"{column[np.abs(column) > 90][0]:g}"
            )


@dataclass(frozen=True)
class Features:
    """Map features to coordinates in which distances are Euclidean (or Manhattan, as the kernel has it).

    A number is a coordinate. An angle is a point on a circle of its period, so that near angles lie as far apart as
    they differ, and with the Gaussian the kernel is von Mises'. A latitude and its longitude, in degrees, are a point
    on the sphere of the Earth in kilometres: distances are chords, and with the Gaussian the kernel is Fisher's. A
    chord is shorter than the arc d by d³ / 24R², 0.1 % at 1,000 km. An ordered category is its rank, so that the
    Laplacian is the kernel of Wang and van Ryzin (1981). Categories lie one apart from each other, and one apart from
    whatever was not in the training data: as corners, each with an axis of its own, or, if they are many or all
    features are categorical, as codes on one axis, of which :class:`~regard.regression._sums.mixed.MixedScore` counts
    whether they differ. Both give the same distances.

    Attributes
    ----------
    kinds : tuple
    center : ndarray (n_features,)
        What is taken from numbers, so that little is lost in sums of products.
    categories : dict of int to ndarray
        Those of each categorical feature.
    manhattan : bool
        Whether distances are sums of absolute differences.
    coded : tuple of int
        The categorical features whose categories are codes.
    gapped : tuple of int
        The features whose value may be missing. One more coordinate of each is 1 where it is, the others are 0 there.
    scale : tuple of float
        The standard deviation of each feature, which a missing value is compared by.
    owner : ndarray (C,)
        The feature that each coordinate belongs to.
    """

    kinds: tuple[Kind, ...]
    center: np.ndarray
    categories: dict[int, np.ndarray] = field(default_factory=dict)
    manhattan: bool = False
    coded: tuple[int, ...] = ()
    gapped: tuple[int, ...] = ()
    scale: tuple[float, ...] = ()
    owner: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        counts = [
            (1 if place in self.coded else size) + (place in self.gapped) for place, size in enumerate(self._sizes)
        ]
        object.__setattr__(self, "owner", np.repeat(np.arange(len(counts)), counts))

    @classmethod
    def of(cls, function: str, kinds: tuple[Kind, ...], X: np.ndarray, manhattan: bool, gaps: bool = False) -> Features:
        """Return the coordinates that training data X (n, n_features) give; with ``gaps``, numbers may be missing."""
        for turned in ("angular", "haversine"):
            if manhattan and any(kind == turned for kind, _ in kinds):
                what = "circle" if turned == "angular" else "sphere"
                came = f"{turned!r} with a kernel of the Manhattan distance, which changes when a {what} is turned"
                raise rejected(function, "metric", "be 'euclidean' or 'categorical'", came)
        if (empty := np.isnan(X).all(0) & [kind != "categorical" for kind, _ in kinds]).any():
            raise rejected(function, "X", "have a value in each column", f"none in column {int(empty.argmax())}")
        kinds = tuple(
            (kind, np.unique(column[~np.isnan(column)])) if kind == "ordered" and more is None else (kind, more)
            for (kind, more), column in zip(kinds, X.T)
        )
        categories = {place: np.unique(X[:, place]) for place, (kind, _) in enumerate(kinds) if kind == "categorical"}
        few = len(categories) < len(kinds) and sum(map(len, categories.values())) <= CORNERS
        # A median, which a few points far away do not move.
        numbers = [place for place, (kind, _) in enumerate(kinds) if kind == "euclidean"]
        center = np.zeros(len(kinds))
        center[numbers] = (np.nanmedian if gaps else np.median)(X[:, numbers].astype(np.float64), 0)
        gapped = [place for place, (kind, _) in enumerate(kinds) if kind not in ("categorical", "longitude")]
        return cls(kinds, center, categories, manhattan, () if few else tuple(categories), tuple(gapped) * gaps)

    @property
    def metric(self) -> dict[Any, Any]:
        """The metric from which the same kinds follow."""
        pairs: dict[Any, Any] = {
            (place, more): kind for place, (kind, more) in enumerate(self.kinds) if kind == "haversine"
        }
        return pairs | {
            place: (kind, more) if kind in ("angular", "ordered") else kind
            for place, (kind, more) in enumerate(self.kinds)
            if kind not in ("haversine", "longitude")
        }

    @property
    def partners(self) -> dict[int, int]:
        """The place of the longitude of each latitude; both have one bandwidth."""
        return {place: more for place, (kind, more) in enumerate(self.kinds) if kind == "haversine"}

    @property
    def _sizes(self) -> list[int]:
        """The number of axes that each feature spans, with one for each category."""
        sizes = {"euclidean": 1, "angular": 2, "ordered": 1, "haversine": 3, "longitude": 0}
        return [
            len(self.categories[place]) if kind == "categorical" else sizes[kind]
            for place, (kind, _) in enumerate(self.kinds)
        ]

    @property
    def dimensions(self) -> int:
        """The number of axes that points span; codes are fewer coordinates."""
        return sum(self._sizes)

    @property
    def is_plain(self) -> bool:
        """True where all features are numbers, and none is missing."""
        return not self.gapped and all(kind == "euclidean" for kind, _ in self.kinds)

    @property
    def is_table(self) -> bool:
        """True where all features are codes, so that rows can be counted by category."""
        return len(self.coded) == len(self.kinds)

    @cached_property
    def code_coordinates(self) -> tuple[int, ...]:
        """The coordinates that are codes."""
        return tuple(np.flatnonzero(np.isin(self.owner, self.coded)).tolist())

    @cached_property
    def gaps(self) -> tuple[tuple[tuple[int, ...], int, float], ...]:
        """Of each feature that may be missing: its coordinates, that which says so, and its standard deviation."""
        found = []
        for place in self.gapped:
            *own, flag = np.flatnonzero(self.owner == place).tolist()
            found.append((tuple(own), flag, self.scale[place] if self.scale else 1.0))
        return tuple(found)

    @property
    def is_metric(self) -> bool:
        """Whether distances are those of coordinates; otherwise pairs need a :class:`MixedScore`."""
        return not self.coded and not self.gapped

    def coordinates(self, X: np.ndarray) -> np.ndarray:
        """Return the coordinates (n, C) of rows (n, n_features), float64."""
        X = X.astype(np.float64, copy=False)
        if self.is_plain:
            return X - self.center
        return np.concatenate([self._coordinates(place, X) for place in range(len(self.kinds))], 1)

    def _coordinates(self, place: int, X: np.ndarray) -> np.ndarray:
        found = self._values(place, X)
        if place not in self.gapped:
            return found
        gone = np.isnan(found).any(1, keepdims=True)
        return np.concatenate([np.where(gone, 0.0, found), gone], 1)

    def _values(self, place: int, X: np.ndarray) -> np.ndarray:
        (kind, period), column = self.kinds[place], X[:, place]
        if kind == "euclidean":
            return (column - self.center[place])[:, None]
        if kind == "ordered":
            # Between two values the rank is between theirs; beyond all it is one further.
            rank = np.interp(column, period, np.arange(len(period)))
            return (rank - (column < period[0]) + (column > period[-1]))[:, None]
        if kind == "longitude":
            return np.empty((len(X), 0))
        if kind == "haversine":
            north, east = np.deg2rad(column), np.deg2rad(X[:, period])
            return EARTH * np.stack([np.cos(north) * np.cos(east), np.cos(north) * np.sin(east), np.sin(north)], 1)
        if kind == "angular":
            angle = column * (2 * math.pi / period)
            return period / (2 * math.pi) * np.stack([np.cos(angle), np.sin(angle)], 1)
        known = self.categories[place]
        code = np.searchsorted(known, column).clip(max=len(known) - 1)
        code[(known[code] != column) & ~(np.isnan(known[code]) & np.isnan(column))] = -1
        if place in self.coded:
            return code.astype(np.float64)[:, None]
        c = len(known)
        elsewhere = -0.5 / c if self.manhattan else _equidistant(c)
        corners = np.where(np.arange(c) == code[:, None], self._corner, 0.0)
        corners[code < 0] = elsewhere
        return corners

    @property
    def _corner(self) -> float:
        """The coordinate of a category along its own axis."""
        return 0.5 if self.manhattan else math.sqrt(0.5)

    def unseen(self, query: Tensor) -> Tensor:
        """Return whether queries (L, C) have a category that no training point has (L,)."""
        found = torch.zeros(len(query), dtype=torch.bool, device=query.device)
        for place in self.categories:
            own = query[:, np.flatnonzero(self.owner == place)]
            # On one axis a category's own coordinate; one that is not known has the same on all.
            known = own >= 0 if place in self.coded else (own - self._corner).abs() < 1e-3
            found |= known.sum(1) != 1
        for place, (kind, values) in enumerate(self.kinds):
            if kind == "ordered":
                rank = query[:, int(np.flatnonzero(self.owner == place)[0])]
                found |= (rank < -1e-3) | (rank > len(values) - 1 + 1e-3)
        return found

    def spread(self, Z: np.ndarray, weight: np.ndarray | None) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Return the standard deviation of each feature (n_features,), 1 where it is 0, and rows left out of it.

        Of coordinates Z (n, C); of categories, that of corners. Values so far from all others that they would hide the
        spread of these are left out: at most 1 % of the points, or one, without which the standard deviation is a third
        or less, and further than ten of these from the median. Their rows come by feature.
        """
        mean = np.average(Z, axis=0, weights=weight)
        variance = np.average((Z - mean) ** 2, axis=0, weights=weight)
        for axis in self.code_coordinates:
            counts = np.bincount(Z[:, axis].astype(np.int64), weight)
            mean[axis], variance[axis] = 0.0, self._corner**2 * (1 - ((counts / counts.sum()) ** 2).sum())
        for own, flag, _ in self.gaps:
            rows = np.flatnonzero(Z[:, flag] == 0)
            some = None if weight is None else weight[rows]
            for axis in own:
                mean[axis] = np.average(Z[rows, axis], weights=some)
                variance[axis] = np.average((Z[rows, axis] - mean[axis]) ** 2, weights=some)
            mean[flag] = variance[flag] = 0.0
        total = np.bincount(self.owner, variance, minlength=len(self.kinds))
        # A constant feature has a rounding's variance.
        largest = np.bincount(self.owner, mean**2, minlength=len(self.kinds))
        found = np.where(total > 1e-24 * (largest + self.center**2), np.sqrt(total), 1.0)
        far: dict[int, np.ndarray] = {}
        for axis, place in enumerate(self.owner):
            if self.kinds[place][0] != "euclidean" or not _may_hide(Z[:, axis] - mean[axis], variance[axis]):
                continue
            there = np.arange(len(Z)) if self.is_plain else np.flatnonzero(~self._gone(int(place), Z))
            some = None if weight is None else weight[there]
            if len(rows := _far_rows(Z[there, axis], some)):
                rest = np.delete(there, rows)
                found[place] = _deviation(Z[rest, axis], None if weight is None else weight[rest])
                far[int(place)] = np.sort(there[rows])
        for latitude, longitude in self.partners.items():
            found[longitude] = found[latitude]
        return found, far

    def _gone(self, place: int, Z: np.ndarray) -> np.ndarray:
        """Return where a feature is missing (n,)."""
        if place not in self.gapped:
            return np.zeros(len(Z), dtype=bool)
        return Z[:, self.gaps[self.gapped.index(place)][1]] == 1

    @cached_property
    def sloped(self) -> list[int]:
        """The features that a line has slopes along: numbers, angles and places, but no categories."""
        along = ("euclidean", "angular", "haversine")
        return [place for place, (kind, _) in enumerate(self.kinds) if kind in along]

    @cached_property
    def sloped_coordinates(self) -> list[int]:
        """The coordinates of these features."""
        flags = [flag for _, flag, _ in self.gaps]
        return [axis for axis in np.flatnonzero(np.isin(self.owner, self.sloped)).tolist() if axis not in flags]

    @property
    def directions(self) -> int:
        """The number of directions along which a line has slopes: one for each of these, but two for a place."""
        return len(self.sloped) + len(self.partners)

    def slopes(self, query: Tensor, along: Tensor) -> Tensor:
        """Return slopes by a unit of each feature (L, n_features, M) from those ``along`` the tangents (L, P, M).

        Those of a place are by degrees. NaN for categories, and for what a query misses.
        """
        found = along.new_full((len(query), len(self.kinds), along.shape[2]), torch.nan)
        degree, i = EARTH * math.pi / 180, 0
        for place in self.sloped:
            if place in self.partners:
                at = query[:, np.flatnonzero(self.owner == place)[:2]]  # the equator's plane
                found[:, self.partners[place]] = along[:, i] * (degree / EARTH * at.norm(dim=1, keepdim=True))
                found[:, place] = along[:, i + 1] * degree
                i += 1
            else:
                found[:, place] = along[:, i]
            i += 1
        for place, (_, flag, _) in zip(self.gapped, self.gaps):
            lost = query[:, flag] > 0
            for each in {place, self.partners.get(place, place)}:
                found[lost, each] = torch.nan
        return found

    def tangents(self, query: Tensor) -> Tensor:
        """Return what makes differences of sloped coordinates linear terms at queries (L, C): (L or 1, P, Z).

        A number's difference is one, an angle's is the step along its circle; a place's are the kilometres to the east
        and to the north.
        """
        if self.is_plain:
            return torch.eye(query.shape[1]).to(query)[None]
        rows = query.new_zeros(len(query), self.directions, len(self.sloped_coordinates))
        i = column = 0
        for place in self.sloped:
            kind, period = self.kinds[place]
            if kind == "haversine":
                first = self.sloped_coordinates[column]
                up = query[:, first : first + 3] / EARTH
                level = torch.stack([-up[:, 1], up[:, 0], torch.zeros_like(up[:, 0])], 1)
                size = level.norm(dim=1, keepdim=True)
                pole = torch.tensor([0.0, 1.0, 0.0]).to(up)  # every direction is one to the east there
                east = torch.where(size > 1e-12, level / size.clamp(min=1e-12), pole)
                rows[:, i, column : column + 3] = east
                rows[:, i + 1, column : column + 3] = torch.linalg.cross(up, east)
                i, column = i + 1, column + 3
            elif kind == "angular":
                turn, first = 2 * math.pi / period, self.sloped_coordinates[column]
                rows[:, i, column], rows[:, i, column + 1] = -turn * query[:, first + 1], turn * query[:, first]
                column += 2
            else:
                rows[:, i, column] = 1.0
                column += 1
            i += 1
        return rows


#: A feature's values may lie far from all others in this share of the rows, and how many times their spread.
FEW, HIDDEN, FAR = 0.01, 3.0, 10.0


def _may_hide(gap: np.ndarray, variance: float) -> bool:
    """Return whether few values may be what makes a standard deviation HIDDEN times that of the others.

    These then hold ``1 − 1/HIDDEN²`` of the sum of squares, and one of them its part.
    """
    most = max(gap.max(), -gap.min()) ** 2
    return bool(most >= (1 - HIDDEN**-2) * min(1 / FEW, len(gap)) * variance > 0)


def _far_rows(values: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    """Return the rows of values that lie far from all others, if these are few; none otherwise."""
    weight = np.ones(len(values)) if weight is None else weight
    gap = np.abs(values - np.median(values))
    order = gap.argsort()[::-1]
    count = max(1, int(np.searchsorted(np.cumsum(weight[order]), FEW * weight.sum(), "right")))
    rest = order[count:]
    spread = _deviation(values[rest], weight[rest])
    if not 0 < spread * HIDDEN <= _deviation(values, weight):
        return order[:0]
    return order[:count][gap[order[:count]] > FAR * spread]


def _deviation(values: np.ndarray, weight: np.ndarray | None) -> float:
    mean = np.average(values, weights=weight)
    return float(np.sqrt(np.average((values - mean) ** 2, weights=weight)))


def _equidistant(c: int) -> float:
    """Return t such that (t, …, t) lies one apart from the c corners (√½, 0, …), …."""
    return (math.sqrt(2) + math.sqrt(2 + 2 * c)) / (2 * c)
