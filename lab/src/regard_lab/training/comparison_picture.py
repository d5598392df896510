"""Compare training runs in a picture: the metric over the steps, and the speed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from regard._utils.files import naming

if TYPE_CHECKING:
    from regard_lab.training.comparison import ComparedRun


def picture(runs: list[ComparedRun], metric: str, path: str | Path) -> Path:
    """Draw the metric over the steps, and the speed, and write a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    quality, speed = figure.subplots(1, 2, width_ratios=(3, 2))
    for each in runs:
        if each.curve:
            quality.plot(*zip(*each.curve), marker=".", label=each.name)
    quality.set(xlabel="step", ylabel=f"{metric} of a validation{' (greedy)' * (runs[0].unit == 'tokens')}")
    quality.legend(frameon=False)
    colors = [f"C{i}" for i in range(len(runs))]
    speed.barh([each.name for each in runs], [each.per_second for each in runs], color=colors)
    speed.invert_yaxis()
    speed.set(xlabel=f"{runs[0].unit} per second in training")
    for axes in (quality, speed):
        axes.spines[["top", "right"]].set_visible(False)
    with naming(path):
        figure.savefig(path, dpi=130, format="png")
    return Path(path)
