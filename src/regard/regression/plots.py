"""Plots of an estimator: its predictions, its weights, and its error over bandwidths."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from regard._utils.constraints import Integer, Number, count
from regard._utils.errors import described, rejected
from regard.regression._base import KernelEstimator
from regard.regression._training import ExtrapolationWarning, as_array
from regard.regression.classifier import NadarayaWatsonClassifier

#: The most training points drawn, and the queries of a heat map.
POINTS, QUERIES = 2000, 100
#: The most classes with a colour of their own, and categories of a feature.
CLASSES, CATEGORIES = 10, 20
#: The height of all ticks of training points below a classifier's curves, and of one class.
STRIP, ROW = 0.2, 0.04
#: The kinds of features whose values stand side by side.
DISCRETE = ("categorical", "ordered")
#: The days of the years 2 to 9998, since 1970.
YEARS = (-718_000, 2_932_000)
#: The default multiples of the bandwidth for a curve of errors.
FACTORS = np.geomspace(0.1, 10, 25)


def plot_fit(
    estimator: Any,
    ax: Any = None,
    *,
    feature: int | str = 0,
    output: int = 0,
    band: bool = True,
    confidence: float | None = None,
    points: bool = True,
    grid: int = 200,
) -> Any:
    """Draw predictions over one feature, with the others held at typical values.

    The curve is dotted beyond the reach of the training data, for example in a gap between points. Of many classes or
    categories, the most frequent are drawn, and the rest is counted.

    Parameters
    ----------
    estimator : NadarayaWatsonRegressor or NadarayaWatsonClassifier
        A fitted estimator. For a classifier, the probability of each class is drawn.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.
    feature : int or str, default 0
        Index or name of the feature. The others are held at the median of the training data, an angular one at the
        mean direction, a categorical one at the most frequent category, an ordered one at its median category.
    output : int, default 0
        Which target of a regressor with several.
    band : bool, default True
        Whether to show two standard deviations of the targets on each side of a regressor's prediction; with gaps where
        there is none.
    confidence : float in (0, 1), optional
        The coverage of confidence bands of a regressor's mean to show, such as 0.95: those of
        :meth:`NadarayaWatsonRegressor.predict_band`, in another colour.
    points : bool, default True
        Whether to show the training points, at most 2,000 at random; for a classifier as ticks, with a row for each
        class. With several features, a regressor's are partial residuals: what is predicted at a point's value of the
        feature, with the others held, plus the residual of the point.
    grid : int, default 200
        The number of queries between the smallest and the largest value. A categorical or ordered feature has one per
        category.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ValueError
        If an argument is invalid, or with ``empty="raise"`` a query lies beyond the kernel's reach.
    sklearn.exceptions.NotFittedError
        If the estimator is not fitted.

    Examples
    --------
    >>> import numpy as np
    >>> from regard.regression import NadarayaWatsonRegressor, plot_fit
    >>> X = np.linspace(0, 6, 50)[:, None]
    >>> ax = plot_fit(NadarayaWatsonRegressor().fit(X, np.sin(X[:, 0])))
    >>> ax.get_xlabel(), ax.get_ylabel()
    ('x0', 'y')
    """
    place = _checked("plot_fit", estimator, ax, feature)
    Integer(ge=2)("plot_fit", "grid", grid)
    classifies = isinstance(estimator, NadarayaWatsonClassifier)
    several = 1 if classifies else estimator._targets().shape[1]
    if count("plot_fit", "output", output) >= several:
        raise rejected("plot_fit", "output", f"be below the number of targets that are drawn, {several}", output)
    if confidence is not None:
        if classifies:
            raise rejected("plot_fit", "confidence", "be None for a classifier", confidence)
        Number(gt=0, lt=1)("plot_fit", "confidence", confidence)
    X = _line(estimator, place, grid)
    x, seen = X[:, place], estimator._X[:, place]
    with _quiet():
        beyond = np.asarray(estimator.extrapolates(X))
        if classifies:
            mean, deviation = estimator.predict_proba(X), None
        elif band:
            mean, deviation = (_column(each, output) for each in estimator.predict(X, return_std=True))
        else:
            mean, deviation = _column(estimator.predict(X), output), None
        limits = None if confidence is None else estimator.predict_band(X, confidence).reshape(len(X), -1, 2)[:, output]
    ax = _axes(ax)
    style = "o" if estimator._features.kinds[place][0] in DISCRETE else "-"
    rows = np.arange(len(seen))
    if len(rows) > POINTS:
        rows = np.sort(np.random.default_rng(0).choice(rows, POINTS, replace=False))
    if style == "o":  # categories stand side by side
        rows, values = rows[np.isin(seen[rows], x)], x
        order = np.argsort(values)
        seen = order[np.searchsorted(values[order], seen).clip(max=len(values) - 1)]
        x = np.arange(len(values))
    if classifies:
        _draw_classes(ax, estimator, x, mean, style, beyond, seen, rows if points else rows[:0])
    else:
        if points:
            _draw_points(ax, estimator, place, output, seen, rows)
        if deviation is not None:
            _draw_deviation(ax, x, mean, deviation, style)
        if limits is not None and confidence is not None:
            _draw_limits(ax, x, limits, style, f"{100 * confidence:.4g} % band of the mean")
        _curve(ax, x, mean, style, beyond, "extrapolated", color="C0", label="prediction", zorder=3)
        ax.legend(frameon=False)
    name = _name(estimator, place)
    if style == "o":
        _name_categories(ax, estimator, place, x, values)
        if (count_all := len(_categories(estimator, place)[0])) > len(values):
            name += f" (the {len(values)} most frequent of {count_all:,})"
    elif place in estimator._columns.dates:
        label_dates(ax)
    if estimator.n_features_in_ > 1:
        ax.set_title(held(estimator, place), fontsize="small", color="0.3")
    y = "probability" if classifies else "y" if estimator._y.ndim == 1 else f"y{output}"
    ax.set(xlabel=name, ylabel=y)
    return ax


def _draw_points(ax: Any, estimator: Any, place: int, output: int, seen: np.ndarray, rows: np.ndarray) -> None:
    """Draw training points of a regressor with one feature; partial residuals with several."""
    several = estimator.n_features_in_ > 1
    shown = _partial_residuals(estimator, place, rows, output) if several else estimator._targets()[rows, output]
    label = "partial residuals" if several else "training points"
    ax.plot(seen[rows], shown, ".", color="0.6", label=label, zorder=1)


def _draw_deviation(ax: Any, x: np.ndarray, mean: np.ndarray, deviation: np.ndarray, style: str) -> None:
    """Draw two standard deviations of the targets: an area, or error bars for categories."""
    label = "± 2 standard deviations"
    if style == "o":
        ax.errorbar(x, mean, 2 * deviation, label=label, fmt="none", color="C0", capsize=4, zorder=2)
    else:
        ax.fill_between(x, mean - 2 * deviation, mean + 2 * deviation, color="C0", alpha=0.2, linewidth=0, label=label)


def _name_categories(ax: Any, estimator: Any, place: int, x: np.ndarray, values: np.ndarray) -> None:
    """Label the ticks of a categorical or ordered feature."""
    decoded = [estimator._columns.decode(place, value) for value in values]
    decoded = ["missing" if each is None else each for each in decoded]
    texts = [each if isinstance(each, str) else f"{each:.3g}" for each in decoded]
    turned = {"rotation": 45, "ha": "right"} if sum(map(len, texts)) > 30 else {}
    ax.set_xticks(x, texts, **turned)


def _draw_limits(ax: Any, x: np.ndarray, limits: np.ndarray, style: str, label: str) -> None:
    """Draw confidence bands (n, 2) of the mean: an area with edges, or thick bars for categories."""
    low, high = limits.T
    if style == "o":
        ax.vlines(x, low, high, color="C1", linewidth=5, alpha=0.9, label=label, zorder=2.5)
    else:
        ax.fill_between(x, low, high, color="C1", alpha=0.45, linewidth=0, label=label, zorder=2)


def _draw_classes(
    ax: Any, estimator: Any, x: np.ndarray, mean: np.ndarray, style: str, beyond: np.ndarray, seen: np.ndarray,
    rows: np.ndarray,
) -> None:  # fmt: skip
    """Draw the probability of each class, and ticks for the training points; of many classes in colour the frequent."""
    classes = estimator.classes_
    frequent = np.bincount(estimator._y, minlength=len(classes)).argsort(kind="stable")[::-1]
    coloured = np.sort(frequent[: CLASSES if len(classes) <= CLASSES else CLASSES - 1])
    height = min(ROW, STRIP / len(classes))
    rest = len(classes) - len(coloured)
    for code, (label, share) in enumerate(zip(classes, mean.T)):
        options: dict[str, Any] = {"label": str(label), "color": f"C{int(np.searchsorted(coloured, code))}"}
        if code not in coloured:
            options = {"label": f"{rest:,} others" if rest else "_", "color": "0.8", "zorder": 1}
            rest = 0
        line = _curve(ax, x, share, style, beyond, **options)
        own = seen[rows[estimator._y[rows] == code]]
        if len(own):
            ax.plot(own, np.full(len(own), -height * (code + 1)), "|", color=line.get_color(), markersize=5)
    handles, labels = ax.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: labels[i].endswith(" others"))  # the rest last
    options = {"framealpha": 0.8, "edgecolor": "none"} if len(classes) > CLASSES else {"frameon": False}
    ax.legend([handles[i] for i in order], [labels[i] for i in order], title="class", **options)


def _partial_residuals(estimator: Any, place: int, rows: np.ndarray, output: int) -> np.ndarray:
    """Return the prediction at the feature's values of these rows, with the others held, plus their residuals."""
    own = estimator._X[rows]
    others = np.tile(_held(estimator), (len(rows), 1)).astype(own.dtype)
    others[:, place] = own[:, place]
    with _quiet():
        at, mean = (_column(estimator.predict(each), output) for each in (others, own))
    return np.asarray(at + estimator._targets()[rows, output] - mean)


def held(estimator: Any, place: int | None = None) -> str:
    """Return where the features are held that a plot does not vary."""
    kinds = {kind for i, (kind, _) in enumerate(estimator._features.kinds) if i != place}
    names = {
        "median": {"euclidean", "ordered", "haversine", "longitude"},
        "mean direction": {"angular"},
        "most frequent category": {"categorical"},
    }
    return "others held at their " + " or ".join(name for name, those in names.items() if kinds & those)


def label_dates(ax: Any) -> None:
    """Write days since 1970 on the horizontal axis as dates, with times where they are needed."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    low, high = ax.get_xlim()
    if low < YEARS[0] or high > YEARS[1]:  # years that matplotlib's dates lack
        ax.xaxis.set_major_formatter(lambda days, _: str(np.datetime64(round(days), "D")))
        return
    locator = AutoDateLocator(minticks=4, maxticks=8)
    ax.xaxis.set_major_locator(locator)
    ax.xaxis.set_major_formatter(ConciseDateFormatter(locator))


def plot_weights(estimator: Any, X: Any = None, ax: Any = None, *, feature: int | str = 0) -> Any:
    """Draw the weight of each training point in each prediction as a heat map.

    Rows are queries and columns training points, both sorted by one feature. Weights of a local line or parabola may
    be negative, which are drawn in another colour. The colour range covers the largest weights of 90 % of the queries;
    a pointed colour bar shows that some exceed it.

    Parameters
    ----------
    estimator : NadarayaWatsonRegressor or NadarayaWatsonClassifier
        A fitted estimator.
    X : array-like (n, n_features), optional
        Queries; by default 100 over the feature, with the others held as in :func:`plot_fit`. Memory grows with
        n × n_train.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.
    feature : int or str, default 0
        Index or name of the feature.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ValueError
        If an argument is wrong.
    sklearn.exceptions.NotFittedError
        If the estimator is not fitted.

    Examples
    --------
    >>> from regard.regression import NadarayaWatsonRegressor, plot_weights
    >>> model = NadarayaWatsonRegressor().fit([[2.0], [0.0], [1.0]], [4.0, 0.0, 1.0])
    >>> plot_weights(model).images[0].get_array().shape
    (100, 3)
    """
    place = _checked("plot_weights", estimator, ax, feature)
    if X is None:
        X = _line(estimator, place, QUERIES)
        with _quiet():
            weights = np.asarray(estimator.weights(X))
    else:
        weights = np.asarray(as_array(estimator.weights(X)))
    at = np.asarray(as_array(X))[:, place].astype(np.float64)
    seen = estimator._X[:, place]
    down, across = at.argsort(kind="stable"), seen.argsort(kind="stable")
    picture = weights[:, estimator._rows][np.ix_(down, across)]
    ax = _axes(ax)
    heaviest = np.abs(picture[~np.isnan(picture).any(1)]).max(1)
    # A few queries at an edge may depend on single points; without the quantile all others would look pale.
    top = float(np.quantile(heaviest, 0.9)) if len(heaviest) else 1.0
    signed = bool((picture < -1e-6 * top).any())
    beyond = ("both" if signed else "max") if (heaviest > top).any() else "neither"
    image = ax.imshow(
        picture,
        aspect="auto",
        cmap="RdBu_r" if signed else "Blues",
        vmin=-top if signed else 0.0,
        vmax=top,
        extent=(0, len(across), len(down), 0),
    )
    ax.figure.colorbar(image, ax=ax, label="weight", extend=beyond)
    name = _name(estimator, place)
    ax.set(xlabel=f"training point, by {name}", ylabel=f"query, by {name}")
    for axis, values in ((ax.xaxis, seen[across]), (ax.yaxis, at[down])):
        ticks = np.unique(np.linspace(0, len(values) - 1, 6).round().astype(int))
        axis.set_ticks(ticks + 0.5, [f"{values[i]:.3g}" for i in ticks])
    return ax


def plot_loo(estimator: Any, ax: Any = None, *, factors: Any = None) -> Any:
    """Draw the leave-one-out error over the bandwidth.

    Parameters
    ----------
    estimator : NadarayaWatsonRegressor or NadarayaWatsonClassifier
        A fitted estimator.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.
    factors : array-like (m,), optional
        The multiples of the bandwidth at which to compute the error, with n² pairs each; by default 25 from 0.1 to 10.

    Returns
    -------
    matplotlib.axes.Axes
        The x axis is the bandwidth in the feature's units, or with several features the multiple of the estimator's
        bandwidth. Dots are bandwidths tried by "loo" and "learned" that are such multiples.

    Raises
    ------
    ValueError
        If an argument is wrong.
    sklearn.exceptions.NotFittedError
        If the estimator is not fitted.

    Examples
    --------
    >>> import numpy as np
    >>> from regard.regression import NadarayaWatsonRegressor, plot_loo
    >>> X = np.linspace(0, 6, 50)[:, None]
    >>> ax = plot_loo(NadarayaWatsonRegressor(bandwidth="loo").fit(X, np.sin(X[:, 0])))
    >>> ax.get_xlabel(), ax.get_xscale()
    ('bandwidth of x0', 'log')
    """
    _checked("plot_loo", estimator, ax, 0)
    if estimator.n_neighbors is not None:
        expected = "have one bandwidth; loo_curve_ has the errors over n_neighbors"
        raise rejected("plot_loo", "estimator", expected, f"n_neighbors={estimator.n_neighbors!r}")
    times = FACTORS if factors is None else _factors(factors)
    errors = np.array([estimator.loo_error(factor * estimator.bandwidth_) for factor in times])
    single = estimator.n_features_in_ == 1
    unit = float(estimator.bandwidth_[0]) if single else 1.0
    ax = _axes(ax)
    ax.plot(unit * times, errors, color="C0", label="leave-one-out error", zorder=1)
    if (curve := getattr(estimator, "loo_curve_", None)) is not None:
        ratio = curve.bandwidths / estimator.bandwidth_
        on_line = (ratio.max(1) <= ratio.min(1) * (1 + 1e-6)) & (ratio[:, 0] >= times[0]) & (ratio[:, 0] <= times[-1])
        ax.plot(unit * ratio[on_line, 0], curve.errors[on_line], ".", color="C1", label="tried by the fit", zorder=2)
    label = f"bandwidth {unit:.3g}" if single else "the estimator's bandwidth"
    ax.axvline(unit, color="0.4", linestyle="--", label=label, zorder=0)
    error = "Brier score" if isinstance(estimator, NadarayaWatsonClassifier) else "mean squared error"
    what = f"bandwidth of {_name(estimator, 0)}" if single else "bandwidth, as a multiple of the estimator's"
    ax.set(xscale="log", xlabel=what, ylabel=f"leave-one-out {error}")
    ax.legend(edgecolor="none", framealpha=1.0)  # opaque, because it may overlap the bandwidth's line
    return ax


def _checked(function: str, estimator: Any, ax: Any, feature: int | str) -> int:
    """Check the arguments and return the index of the feature."""
    if isinstance(estimator, type) or not isinstance(estimator, KernelEstimator):
        expected = "be a NadarayaWatsonRegressor or a NadarayaWatsonClassifier"
        raise rejected(function, "estimator", expected, described(estimator), TypeError)
    check_is_fitted(estimator)
    if ax is not None and not hasattr(ax, "add_artist"):
        raise rejected(function, "ax", "be a matplotlib Axes or None", described(ax), TypeError)
    names = list(getattr(estimator, "feature_names_in_", []))
    if isinstance(feature, str):
        if feature not in names:
            raise rejected(function, "feature", "name a feature that X had", repr(feature))
        return names.index(feature)
    if count(function, "feature", feature) >= estimator.n_features_in_:
        raise rejected(function, "feature", f"be below the number of features, {estimator.n_features_in_}", feature)
    return int(feature)


def _factors(factors: Any) -> np.ndarray:
    expected = "be positive numbers"
    try:
        times = np.atleast_1d(np.asarray(as_array(factors), dtype=np.float64))
    except (TypeError, ValueError):
        raise rejected("plot_loo", "factors", expected, described(factors), TypeError) from None
    if times.ndim != 1 or not len(times) or not (np.isfinite(times) & (times > 0)).all():
        raise rejected("plot_loo", "factors", expected, factors)
    return np.sort(times)


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots()[1]


def _name(estimator: Any, place: int) -> str:
    names = getattr(estimator, "feature_names_in_", None)
    return f"x{place}" if names is None else str(names[place])


def _line(estimator: Any, place: int, count: int) -> np.ndarray:
    """Return queries (n, n_features) that vary one feature."""
    seen = estimator._X
    if estimator._features.kinds[place][0] in DISCRETE:
        values, counts = _categories(estimator, place)
        values = values[np.sort(counts.argsort(kind="stable")[::-1][:CATEGORIES])]
    else:
        values = np.linspace(np.nanmin(seen[:, place]), np.nanmax(seen[:, place]), count)
    X = np.tile(_held(estimator), (len(values), 1)).astype(seen.dtype)
    X[:, place] = values
    return X


def _categories(estimator: Any, place: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of a discrete feature in the training data, ascending, and how often each occurs."""
    column = estimator._X[:, place]
    if estimator._features.kinds[place][0] == "ordered":
        column = column[~np.isnan(column)]
    return np.unique(column, return_counts=True)


def _held(estimator: Any) -> list[float]:
    """Return a typical value of each feature (n_features,)."""
    return [_usual(kind, column) for kind, column in zip(estimator._features.kinds, estimator._X.T)]


def _usual(kind: tuple[str, float], column: np.ndarray) -> float:
    name, period = kind
    if name == "categorical":
        values, counts = np.unique(column, return_counts=True)
        return float(values[counts.argmax()])
    if name == "angular":
        turn = 2 * np.pi / period
        return float(np.angle(np.nanmean(np.exp(1j * turn * column))) / turn % period)
    if name == "ordered":  # nothing lies between two categories
        return float(np.nanquantile(column, 0.5, method="lower"))
    return float(np.nanmedian(column))


def _curve(
    ax: Any, x: np.ndarray, y: np.ndarray, style: str, beyond: np.ndarray, dotted: str = "_", **options: Any
) -> Any:
    """Draw a curve, or a point for each category; faint and dotted beyond the training data."""
    (line,) = ax.plot(x, np.where(beyond, np.nan, y), style, **options)
    if beyond.any():
        # Extend the dotted part to the ends of the solid one.
        near = beyond if style == "o" else beyond | np.r_[beyond[1:], False] | np.r_[False, beyond[:-1]]
        faint = {"color": line.get_color(), "alpha": 0.5, "zorder": line.get_zorder(), "label": dotted}
        ax.plot(x, np.where(near, y, np.nan), "o" if style == "o" else ":", **faint)
    return line


def _column(found: Any, output: int) -> np.ndarray:
    found = np.asarray(found)
    return found if found.ndim == 1 else found[:, output]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings about missing feature names and extrapolation, which plots cause on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExtrapolationWarning)
        warnings.filterwarnings("ignore", message="X does not have valid feature names")
        yield
