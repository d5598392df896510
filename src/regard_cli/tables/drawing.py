"""The picture of ``regard regress``: what is predicted over each feature."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np

from regard._utils.files import naming
from regard_cli.tables import Column, Fitted

#: Features that get a panel, and inches of one.
_PANELS, _WIDTH, _HEIGHT = 6, 4.6, 3.6
#: Categories whose names fit below an axis, and letters of one.
_NAMED, _LETTERS = 20, 14


def draw(fitted: Fitted, path: Path) -> str:
    """Draw the predictions over each feature, the others held where most rows lie, and return what that shows.

    Parameters
    ----------
    fitted : Fitted
    path : Path
        Its ending says the format.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    from matplotlib.figure import Figure

    from regard.regression import plot_fit

    estimator = copy(fitted.estimator).set_params(verbose=0)  # no bar for each panel
    features = fitted.prepared.columns[:_PANELS]
    across = math.ceil(len(features) / math.ceil(len(features) / 3))
    down = math.ceil(len(features) / across)
    width, height = (6.4, 4.8) if len(features) == 1 else (across * _WIDTH, down * _HEIGHT + 0.4)
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for i, (column, ax) in enumerate(zip(features, panels)):
        plot_fit(estimator, ax=ax, feature=i)
        _label(ax, column, fitted)
    if len(features) > 1:
        _one_legend(figure, panels[: len(features)])
    for ax in panels[len(features) :]:
        ax.set_axis_off()
    with naming(path):
        figure.savefig(path, dpi=144)
    what = f"the probability of each {fitted.name}" if fitted.classifies else f"{fitted.name} as predicted"
    if len(features) == 1:
        return f"{what} over {features[0].name}"
    some = f"the first {_PANELS} features" if len(features) < len(fitted.prepared.columns) else "each feature"
    return f"{what} over {some}, the others held at their median or most frequent category"


def _label(ax: Any, column: Column, fitted: Fitted) -> None:
    """Write names on the axes: the target's, and categories and dates instead of their numbers."""
    ax.set_ylabel(f"probability of {fitted.name}" if fitted.classifies else fitted.name)
    if column.kind == "category" and len(column.categories) <= _NAMED:
        names = [each if len(each) <= _LETTERS else each[: _LETTERS - 1] + "…" for each in column.categories]
        ax.set_xlim(-0.5, len(names) - 0.5)
        long = sum(map(len, names)) > 30
        ax.set_xticks(range(len(names)), names, rotation=45 if long else 0, ha="right" if long else "center")
    elif column.kind == "date":
        ax.xaxis.set_major_formatter(_date(column.origin))
        ax.tick_params(axis="x", rotation=30)


def _one_legend(figure: Any, panels: Any) -> None:
    """Put one legend above all panels instead of one into each."""
    entries: dict[str, Any] = {}
    for ax in panels:
        handles, labels = ax.get_legend_handles_labels()
        entries = dict(zip(labels, handles)) | entries
        if (legend := ax.get_legend()) is not None:
            legend.remove()
    figure.legend(entries.values(), entries, loc="outside upper center", ncols=min(len(entries), 6), frameon=False)


def _date(origin: float) -> Callable[[float, int], str]:
    """Return what writes days since ``origin`` (itself in days since 1970) as a date."""
    return lambda days, _: str(np.datetime64(round(origin + days), "D"))
