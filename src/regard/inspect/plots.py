"""Alignments as a picture file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.inspect.alignment import Alignment, drawable

# All lengths in inches. Every cell has the same size, whatever the word, so that panels can be compared.
_CELL, _SIDE, _TOP, _GAP, _WIDEST = 0.36, 0.55, 0.75, 0.45, 13.0
_BAR_WIDTH, _BAR_HEIGHT, _FOOT = 2.4, 0.14, 0.75


def save_png(alignments: Sequence[Alignment], path: str | Path, *, dpi: int = 144) -> Path:
    """Draw alignments as heat maps and write them as a PNG file.

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

    places = _places(drawable(alignments, "save_png"))
    width = max(place.left + place.width for place in places) + _GAP
    height = max(place.top + place.height for place in places) + _FOOT
    figure = Figure(figsize=(max(width, _SIDE + _BAR_WIDTH + _GAP), height), facecolor="white")
    FigureCanvasAgg(figure)
    images = [_heat_map(_axes(figure, place), place.alignment) for place in places]
    foot = _Place(places[0].alignment, _SIDE, height - _FOOT + 0.28, _BAR_WIDTH, _BAR_HEIGHT)
    bar = figure.colorbar(images[0], cax=_axes(figure, foot), orientation="horizontal", ticks=[0, 0.5, 1])
    bar.ax.set_xticklabels(["0", "attention weight", "1"], fontsize=9)
    bar.ax.tick_params(length=0)
    bar.outline.set_edgecolor("0.75")
    path = Path(path)
    figure.savefig(path, dpi=dpi, format="png")
    return path


@dataclass(frozen=True)
class _Place:
    """Where a heat map goes, in inches from the figure's upper left corner."""

    alignment: Alignment
    left: float
    top: float
    width: float
    height: float


def _places(alignments: list[Alignment]) -> list[_Place]:
    """Set the panels in lines, like words on a page."""
    places: list[_Place] = []
    left, top, lowest = _SIDE, _TOP, 0.0
    for alignment in alignments:
        width, height = len(alignment.source) * _CELL, max(1, len(alignment.target)) * _CELL
        room = max(width, len(alignment.title) * 0.1)  # a long title over a short word
        if places and left + room > _WIDEST:
            left, top = _SIDE, lowest + _GAP + _TOP
        places.append(_Place(alignment, left, top, width, height))
        left, lowest = left + room + _GAP + _SIDE, max(lowest, top + height)
    return places


def _axes(figure: Any, place: _Place) -> Any:
    width, height = figure.get_size_inches()
    bottom = height - place.top - place.height
    return figure.add_axes((place.left / width, bottom / height, place.width / width, place.height / height))


def _heat_map(panel: Any, alignment: Alignment) -> Any:
    columns, rows = range(len(alignment.source)), range(len(alignment.target))
    cells = alignment.rows() or [[0.0] * len(alignment.source)]  # nothing was written: one blank row
    image = panel.imshow(cells, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    panel.set_xticks(columns, [_plain(symbol) for symbol in alignment.source], fontsize=12)
    panel.set_yticks(rows, [_plain(symbol) for symbol in alignment.target], fontsize=10)
    panel.set_xticks([x + 0.5 for x in columns[:-1]], minor=True)
    panel.set_yticks([y + 0.5 for y in rows[:-1]], minor=True)
    panel.xaxis.tick_top()
    panel.tick_params(which="both", length=0, top=False)
    panel.grid(which="minor", color="0.88", linewidth=0.6)
    for spine in panel.spines.values():
        spine.set_color("0.75")
    if alignment.title:
        panel.set_title(_plain(alignment.title), fontsize=11, pad=8, loc="left", fontweight="bold")
    return image


def _plain(text: str) -> str:
    """Keep matplotlib from reading mathematics between dollar signs."""
    return text.replace("$", r"\$")
