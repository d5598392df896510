"""Alignments as a picture file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.inspect.alignment import Alignment, titled

_INCH_PER_CELL = 0.36
_COLUMNS = 3


def save_png(alignments: Sequence[Alignment], path: str | Path, *, dpi: int = 144) -> Path:
    """Draw alignments as heat maps, three in a row, and write them as a PNG file.

    Input symbols run across the top, output symbols down the side; the darker a cell, the more of the output
    symbol's attention went to that input symbol. Needs matplotlib; draws without a display.

    Parameters
    ----------
    alignments : sequence of Alignment
    path : str or Path
        The file to write; its folder must exist.
    dpi : int
        Dots per inch.

    Returns
    -------
    Path

    Raises
    ------
    ValueError
        If there is nothing to draw.
    OSError
        If the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = titled(alignments, "save_png")
    columns = min(_COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    wide = max(len(a.source) for a in shown) * _INCH_PER_CELL + 0.9
    high = max(len(a.target) for a in shown) * _INCH_PER_CELL + 1.1
    figure = Figure(figsize=(columns * wide + 0.9, rows * high), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    image = None
    for panel, alignment in zip(panels, shown):
        image = _heat_map(panel, alignment)
    for panel in panels[len(shown) :]:
        panel.axis("off")
    bar = figure.colorbar(image, ax=panels, fraction=0.03, aspect=30, ticks=[0, 0.5, 1])
    bar.ax.set_yticklabels(["0", "½", "1"])
    bar.set_label("attention weight")
    bar.outline.set_visible(False)
    path = Path(path)
    figure.savefig(path, dpi=dpi, format="png")
    return path


def _heat_map(panel: Any, alignment: Alignment) -> Any:
    image = panel.imshow(alignment.rows(), cmap="Blues", vmin=0, vmax=1, aspect="equal", interpolation="nearest")
    panel.set_xticks(range(len(alignment.source)), alignment.source, fontsize=13)
    panel.set_yticks(range(len(alignment.target)), alignment.target, fontsize=11)
    panel.xaxis.tick_top()
    panel.tick_params(length=0)
    panel.set_xticks([x - 0.5 for x in range(len(alignment.source) + 1)], minor=True)
    panel.set_yticks([y - 0.5 for y in range(len(alignment.target) + 1)], minor=True)
    panel.grid(which="minor", color="0.88", linewidth=0.6)
    panel.tick_params(which="minor", length=0)
    for spine in panel.spines.values():
        spine.set_color("0.75")
    if alignment.title:
        panel.set_title(_plain(alignment.title), fontsize=12, pad=8)
    return image


def _plain(text: str) -> str:
    """Keep matplotlib from reading mathematics between dollar signs."""
    return text.replace("$", r"\$")
