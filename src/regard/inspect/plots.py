"""Alignments as pictures: a file, or an axis of a figure of one's own."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from regard._errors import described, rejected
from regard._writing import naming
from regard.inspect.alignment import Alignment, columns, drawable
from regard.inspect.scales import DECADES, SCALES, as_shown, pooled, scaled

# All lengths in inches. Every cell has the same size, whatever the word, so that panels can be compared; all are
# smaller where a sequence is so long that the picture would be larger than _LONGEST.
_CELL, _SIDE, _TOP, _GAP, _WIDEST, _LONGEST = 0.36, 0.55, 0.75, 0.45, 13.0, 40.0
_BAR_WIDTH, _BAR_HEIGHT, _FOOT = 2.4, 0.14, 0.75
#: A cell's side from which each has its label, and from which lines part cells; and points of the least label.
_READABLE, _LINED, _LEAST = 0.1, 0.05, 6.0
#: Cells along a side that are drawn, at most.
_MOST = 2000
#: Palettes whose lightness goes one way for every kind of colour vision; and of what has signs, from the middle.
SEQUENTIAL, DIVERGING = "Blues", "PuOr"
FORMATS = ("png", "svg", "pdf")
#: The width of a column of text, and how far down from the panel's head the labels of columns reach.
_LETTER, _HEAD = 0.09, 0.38
#: Dots that a picture may have on a side.
_DOTS = (1 << 16) - 1
#: Fonts with the scripts that matplotlib's own lacks.
_SCRIPTS = (
    "Noto Sans CJK JP", "Noto Sans CJK SC", "Source Han Sans", "WenQuanYi Zen Hei", "Hiragino Sans", "PingFang SC",
    "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Noto Sans Thai", "Noto Sans Devanagari", "Arial Unicode MS",
)  # fmt: skip


def save_plot(alignments: Sequence[Alignment], path: str | Path, *, scale: str = "absolute", dpi: int = 144) -> Path:
    """Draw alignments as heat maps and write them to a picture: PNG, SVG or PDF, as its name ends.

    Input symbols run across the top, words turned on their side, and output symbols down the side; the darker a cell,
    the more of the output symbol's attention went to that input symbol. Of differences, two colours show the signs.
    Needs matplotlib; draws without a display.

    Parameters
    ----------
    alignments : sequence of Alignment
    path : str or Path
        The file to write; its folder must exist.
    scale : {"absolute", "row", "log"}
        What colours stand for: weights, shares of the largest of their row, or logarithms from 0.0001 to 1.
    dpi : int
        Dots per inch.

    Raises
    ------
    ValueError
        If there is nothing to draw, too much for a picture, or the name ends in something else.
    OSError
        If the file cannot be written.
    """
    path = Path(path)
    picture = _rendered(alignments, dpi, scale, checked_format(path, "save_plot"), "save_plot")
    with naming(path):
        path.write_bytes(picture)
    return path


def checked_format(path: Path, function: str) -> str:
    """Return what a picture is written as, by the end of its name."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise rejected(function, "path", f"end in {', '.join(f'.{each}' for each in FORMATS)}", repr(path.name))
    return kind


def render_png(alignments: Sequence[Alignment], *, scale: str = "absolute", dpi: int = 144) -> bytes:
    """Return the picture that :func:`save_plot` writes, as PNG.

    Raises
    ------
    ValueError
        If there is nothing to draw, or too much for a picture.
    """
    return _rendered(alignments, dpi, scale, "png", "render_png")


def plot_attention(alignment: Alignment, ax: Any = None, *, scale: str = "absolute") -> Any:
    """Draw an alignment as a heat map on an axis of a matplotlib figure.

    Input symbols run across the top and output symbols down the side, as :func:`save_plot` draws them. Cells are
    square, and their labels shrink with them, and are fewer where there is no room. All axes of a scale go from 0 to
    1, or, of differences, from −1 to 1; ``ax.images[0]`` is what a colour bar takes. Of more than 2,000 symbols, cells
    are the largest of blocks.

    Parameters
    ----------
    alignment : Alignment
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default, as large as its cells need.
    scale : {"absolute", "row", "log"}
        What colours stand for: weights, shares of the largest of their row, or logarithms from 0.0001 to 1.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ValueError
        If there is nothing to draw.

    Examples
    --------
    >>> import torch
    >>> from regard.inspect import Alignment, plot_attention
    >>> ax = plot_attention(Alignment(("I", "know"), ("je", "sais"), torch.eye(2), "I know"))
    >>> [label.get_text() for label in ax.get_yticklabels()]
    ['je', 'sais']
    """
    from matplotlib import pyplot, rc_context

    if ax is not None and not hasattr(ax, "add_artist"):
        raise rejected("plot_attention", "ax", "be a matplotlib Axes or None", described(ax), TypeError)
    shown = drawable([alignment], "plot_attention")
    with rc_context({"font.family": fonts()}):
        if ax is None:
            cell = _cell(shown)
            (place,) = _places(shown, cell)
            figure = pyplot.figure(figsize=(place.left + place.room + _GAP, place.top + place.height + _GAP))
            ax = _axes(figure, place)
        else:
            inches = ax.get_window_extent().transformed(ax.figure.dpi_scale_trans.inverted())
            cell = min(_CELL, inches.width / len(alignment.source), inches.height / max(1, len(alignment.target)))
        _heat_map(ax, alignment, cell, scale)
    return ax


def _rendered(alignments: Sequence[Alignment], dpi: int, scale: str, kind: str, function: str) -> bytes:
    from matplotlib import rc_context

    shown, written = drawable(alignments, function), io.BytesIO()
    with rc_context({"font.family": fonts()}), warnings.catch_warnings():
        # What no font has is a box in the picture.
        warnings.filterwarnings("ignore", r"Glyph .* missing from")
        figure = _figure(shown, scale)
        dots = [int(side * dpi) for side in figure.get_size_inches()]
        if max(dots) > _DOTS:
            got = f"{dots[0]} × {dots[1]} dots for {len(shown)} alignments"
            raise rejected(function, "alignments", f"fit a picture of at most {_DOTS} dots a side", got)
        figure.savefig(written, dpi=dpi, format=kind)
    return written.getvalue()


def fonts() -> list[str]:
    """Return the usual font, and behind it those of other scripts that are installed."""
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return ["DejaVu Sans", *(name for name in _SCRIPTS if name in installed)]


def _figure(shown: list[Alignment], scale: str) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cell = _cell(shown)
    places = _places(shown, cell)
    width = max(place.left + place.room for place in places) + _GAP
    height = max(place.top + place.height for place in places) + _FOOT
    figure = Figure(figsize=(max(width, _SIDE + _BAR_WIDTH + _GAP), height), facecolor="white")
    FigureCanvasAgg(figure)
    images = [_heat_map(_axes(figure, place), place.alignment, cell, scale) for place in places]
    # One bar for all: that of differences, if there are any.
    image = next((each for each in images if each.norm.vmin < 0), images[0])
    foot = _Place(places[0].alignment, _SIDE, height - _FOOT + 0.28, _BAR_WIDTH, _BAR_HEIGHT)
    color_bar(figure, image, scale, cax=_axes(figure, foot), orientation="horizontal")
    return figure


def color_bar(figure: Any, image: Any, scale: str, **place: Any) -> Any:
    """Draw what the colours of a scale stand for."""
    signed = image.norm.vmin < 0
    ticks, names = ([-1, 0, 1], ["-1", "difference", "1"]) if signed else ([0, 0.5, 1], ["0", SCALES[scale], "1"])
    if scale == "log":
        names = ["-1", "difference (log)", "1"] if signed else [f"≤ {10.0**-DECADES:g}", f"{SCALES[scale]} (log)", "1"]
    bar = figure.colorbar(image, ticks=ticks, **place)
    across = place.get("orientation") == "horizontal"
    (bar.ax.set_xticklabels if across else bar.ax.set_yticklabels)(names, fontsize=9)
    bar.ax.tick_params(length=0)
    bar.outline.set_edgecolor("0.75")
    return bar


def _cell(shown: list[Alignment]) -> float:
    """Return the side of a cell."""
    return min(_CELL, _LONGEST / max(max(len(each.source), len(each.target)) for each in shown))


@dataclass(frozen=True)
class _Place:
    """Where a heat map goes, in inches from the figure's upper left corner, and how wide it is with its title."""

    alignment: Alignment
    left: float
    top: float
    width: float
    height: float
    room: float = 0.0


def _places(alignments: list[Alignment], cell: float) -> list[_Place]:
    """Set the panels in lines, like words on a page."""
    places: list[_Place] = []
    line: list[_Place] = []
    right, below = 0.0, 0.0
    for alignment in alignments:
        width, height = len(alignment.source) * cell, max(1, len(alignment.target)) * cell
        side = max(_SIDE, 0.2 + _LETTER * max(map(columns, alignment.target), default=0) * cell / _CELL)
        room = max(width, 0.1 * max(map(columns, _title(alignment, width)), default=0))  # a long title, a short word
        if line and right + side + room > _WIDEST:
            places += _level(line)
            right, below = 0.0, max(place.top + place.height for place in places[-len(line) :]) + _GAP
            line = []
        line.append(_Place(alignment, right + side, below + _top(alignment, cell), width, height, room))
        right += side + room + _GAP
    return places + _level(line)


def _level(line: list[_Place]) -> list[_Place]:
    """Return panels of one line with their upper edges at one height."""
    top = max(place.top for place in line)
    return [replace(place, top=top) for place in line]


def _top(alignment: Alignment, cell: float) -> float:
    """Return how much room is needed above a panel: for its columns' labels, and its title."""
    top = _TOP + 0.18 * max(0, len(_title(alignment, len(alignment.source) * cell)) - 1)
    if not alignment.of_words():
        return top
    return top - _HEAD + 0.15 + _LETTER * max(map(columns, alignment.source)) * cell / _CELL


def _title(alignment: Alignment, width: float) -> list[str]:
    """Return the lines of a title over a panel of this width, three at most."""
    across = max(40, int(width / 0.1))
    return textwrap.wrap(alignment.title, across, max_lines=3, placeholder=" ...")


def _axes(figure: Any, place: _Place) -> Any:
    width, height = figure.get_size_inches()
    bottom = height - place.top - place.height
    return figure.add_axes((place.left / width, bottom / height, place.width / width, place.height / height))


def _heat_map(panel: Any, alignment: Alignment, cell: float, scale: str) -> Any:
    S, L = len(alignment.source), max(1, len(alignment.target))
    image = shades(panel, alignment.weights, scale, (S, L))
    for axis, symbols, size in ((panel.xaxis, alignment.source, 12.0), (panel.yaxis, alignment.target, 10.0)):
        turned = axis is panel.xaxis and alignment.of_words()
        every = max(1, math.ceil(_READABLE / cell))
        style: dict[str, Any] = {"fontsize": max((10 if turned else size) * cell / _CELL, _LEAST * min(1, every - 1))}
        at = range(0, len(symbols), every)
        axis.set_ticks(at, [_plain(symbols[i]) for i in at], **style | ({"rotation": 90} if turned else {}))
        if cell > _LINED:
            axis.set_ticks([i + 0.5 for i in range(len(symbols) - 1)], minor=True)
    panel.xaxis.tick_top()
    panel.tick_params(which="both", length=0, top=False)
    panel.grid(which="minor", color="0.88", linewidth=0.6)
    for spine in panel.spines.values():
        spine.set_color("0.75")
    if alignment.title:
        title = "\n".join(_title(alignment, S * cell))
        panel.set_title(_plain(title), fontsize=11, pad=8, loc="left", fontweight="bold")
    return image


def shades(panel: Any, weights: Tensor, scale: str, size: tuple[int, int]) -> Any:
    """Draw weights (L, S) as colours, one unit for each symbol."""
    across, down = size
    values, block = pooled(as_shown(weights), _MOST)
    cells = scaled(values, scale, "plot").numpy() if values.numel() else np.zeros((down, across))
    least, palette = (-1, DIVERGING) if (weights < 0).any() else (0, SEQUENTIAL)
    right, bottom = cells.shape[1] * block - 0.5, cells.shape[0] * block - 0.5
    image = panel.imshow(
        cells, cmap=palette, vmin=least, vmax=1, interpolation="nearest", extent=(-0.5, right, bottom, -0.5)
    )
    panel.set(xlim=(-0.5, across - 0.5), ylim=(down - 0.5, -0.5))
    return image


def _plain(text: str) -> str:
    """Keep matplotlib from reading mathematics between dollar signs."""
    return text.replace("$", r"\$")
