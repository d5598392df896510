"""Alignments as pictures: a file, or an axis of a figure of one's own."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regard._errors import described, rejected
from regard._writing import naming
from regard.inspect.alignment import Alignment, columns, drawable

# All lengths in inches. Every cell has the same size, whatever the word, so that panels can be compared; all are
# smaller where a sequence is so long that the picture would be larger than _LONGEST.
_CELL, _SIDE, _TOP, _GAP, _WIDEST, _LONGEST = 0.36, 0.55, 0.75, 0.45, 13.0, 40.0
_BAR_WIDTH, _BAR_HEIGHT, _FOOT = 2.4, 0.14, 0.75
#: The width of a column of text, and how far down from the panel's head the labels of columns reach.
_LETTER, _HEAD = 0.09, 0.38
#: Dots that a picture may have on a side.
_DOTS = (1 << 16) - 1
#: Fonts with the scripts that matplotlib's own lacks.
_SCRIPTS = (
    "Noto Sans CJK JP", "Noto Sans CJK SC", "Source Han Sans", "WenQuanYi Zen Hei", "Hiragino Sans", "PingFang SC",
    "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Noto Sans Thai", "Noto Sans Devanagari", "Arial Unicode MS",
)  # fmt: skip


def save_png(alignments: Sequence[Alignment], path: str | Path, *, dpi: int = 144) -> Path:
    """Draw alignments as heat maps and write them as a PNG file.

    Input symbols run across the top, words turned on their side, and output symbols down the side; the darker a cell,
    the more of the output symbol's attention went to that input symbol. Needs matplotlib; draws without a display.

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
        If there is nothing to draw, or too much for a picture.
    OSError
        If the file cannot be written.
    """
    path = Path(path)
    picture = _png(alignments, dpi, "save_png")
    with naming(path):
        path.write_bytes(picture)
    return path


def render_png(alignments: Sequence[Alignment], *, dpi: int = 144) -> bytes:
    """Return the picture that :func:`save_png` writes.

    Raises
    ------
    ValueError
        If there is nothing to draw, or too much for a picture.
    """
    return _png(alignments, dpi, "render_png")


def plot_alignment(alignment: Alignment, ax: Any = None) -> Any:
    """Draw an alignment as a heat map on an axis of a matplotlib figure.

    Input symbols run across the top and output symbols down the side, as :func:`save_png` draws them. Cells are
    square, and their labels shrink with them. All axes have one scale, from 0 to 1; ``ax.images[0]`` is what a colour
    bar takes.

    Parameters
    ----------
    alignment : Alignment
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default, as large as its cells need.

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
    >>> from regard.inspect import Alignment, plot_alignment
    >>> ax = plot_alignment(Alignment(("I", "know"), ("je", "sais"), torch.eye(2), "I know"))
    >>> [label.get_text() for label in ax.get_yticklabels()]
    ['je', 'sais']
    """
    from matplotlib import pyplot, rc_context

    if ax is not None and not hasattr(ax, "add_artist"):
        raise rejected("plot_alignment", "ax", "be a matplotlib Axes or None", described(ax), TypeError)
    shown = drawable([alignment], "plot_alignment")
    with rc_context({"font.family": _fonts()}):
        if ax is None:
            cell = _cell(shown)
            (place,) = _places(shown, cell)
            figure = pyplot.figure(figsize=(place.left + place.room + _GAP, place.top + place.height + _GAP))
            ax = _axes(figure, place)
        else:
            inches = ax.get_window_extent().transformed(ax.figure.dpi_scale_trans.inverted())
            cell = min(_CELL, inches.width / len(alignment.source), inches.height / max(1, len(alignment.target)))
        _heat_map(ax, alignment, cell)
    return ax


def _png(alignments: Sequence[Alignment], dpi: int, function: str) -> bytes:
    from matplotlib import rc_context

    shown, written = drawable(alignments, function), io.BytesIO()
    with rc_context({"font.family": _fonts()}), warnings.catch_warnings():
        # What no font has is a box in the picture.
        warnings.filterwarnings("ignore", r"Glyph .* missing from")
        figure = _figure(shown)
        dots = [int(side * dpi) for side in figure.get_size_inches()]
        if max(dots) > _DOTS:
            got = f"{dots[0]} × {dots[1]} dots for {len(shown)} alignments"
            raise rejected(function, "alignments", f"fit a picture of at most {_DOTS} dots a side", got)
        figure.savefig(written, dpi=dpi, format="png")
    return written.getvalue()


def _fonts() -> list[str]:
    """Return the usual font, and behind it those of other scripts that are installed."""
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return ["DejaVu Sans", *(name for name in _SCRIPTS if name in installed)]


def _figure(shown: list[Alignment]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cell = _cell(shown)
    places = _places(shown, cell)
    width = max(place.left + place.room for place in places) + _GAP
    height = max(place.top + place.height for place in places) + _FOOT
    figure = Figure(figsize=(max(width, _SIDE + _BAR_WIDTH + _GAP), height), facecolor="white")
    FigureCanvasAgg(figure)
    images = [_heat_map(_axes(figure, place), place.alignment, cell) for place in places]
    foot = _Place(places[0].alignment, _SIDE, height - _FOOT + 0.28, _BAR_WIDTH, _BAR_HEIGHT)
    bar = figure.colorbar(images[0], cax=_axes(figure, foot), orientation="horizontal", ticks=[0, 0.5, 1])
    bar.ax.set_xticklabels(["0", "attention weight", "1"], fontsize=9)
    bar.ax.tick_params(length=0)
    bar.outline.set_edgecolor("0.75")
    return figure


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


def _heat_map(panel: Any, alignment: Alignment, cell: float) -> Any:
    scale, width = cell / _CELL, len(alignment.source) * cell
    across, down = range(len(alignment.source)), range(len(alignment.target))
    cells = alignment.rows() or [[0.0] * len(alignment.source)]  # nothing was written: one blank row
    image = panel.imshow(cells, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    turned: dict[str, Any] = (
        {"fontsize": 10 * scale, "rotation": 90} if alignment.of_words() else {"fontsize": 12 * scale}
    )
    panel.set_xticks(across, [_plain(symbol) for symbol in alignment.source], **turned)
    panel.set_yticks(down, [_plain(symbol) for symbol in alignment.target], fontsize=10 * scale)
    panel.set_xticks([x + 0.5 for x in across[:-1]], minor=True)
    panel.set_yticks([y + 0.5 for y in down[:-1]], minor=True)
    panel.xaxis.tick_top()
    panel.tick_params(which="both", length=0, top=False)
    panel.grid(which="minor", color="0.88", linewidth=0.6)
    for spine in panel.spines.values():
        spine.set_color("0.75")
    if alignment.title:
        title = "\n".join(_title(alignment, width))
        panel.set_title(_plain(title), fontsize=11, pad=8, loc="left", fontweight="bold")
    return image


def _plain(text: str) -> str:
    """Keep matplotlib from reading mathematics between dollar signs."""
    return text.replace("$", r"\$")
