"""Draw alignments as text in a terminal and as pictures."""

from __future__ import annotations

import io
import math
import textwrap
import unicodedata
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard._utils.errors import described, rejected, shape, unknown_name
from regard._utils.files import naming
from regard.inspect._record.head_summary import visible_counts
from regard.inspect._record.layer_record import LayerRecord
from regard.inspect._record.recording import Recording
from regard.inspect._record.texts import Patches

# An alignment: how much each output symbol attends to each input symbol, and its drawing in the terminal --------------


#: Shades from weight 0 to weight 1, and those for negative differences. A weight takes the nearest shade.
SHADES, BELOW = " ░▒▓█", " -=≡≣"
ASCII_SHADES, ASCII_BELOW = " .:*#", " -=%@"
#: The most symbols along the longer side of a drawing.
_LABEL = 400


@dataclass(frozen=True)
class Alignment:
    """The attention weights of one decoded sequence, with the symbols they connect.

    ``print`` draws it with characters; a notebook shows it as a picture.

    Attributes
    ----------
    source : tuple of str
        The S input symbols, such as letters or words.
    target : tuple of str
        The L output symbols, such as phonemes or words.
    weights : Tensor (L, S)
        The attention of each output symbol to each input symbol, between 0 and 1; or differences, between −1 and 1.
    title : str
        The heading of pictures.
    patches : Patches, optional
        The image whose patches the input symbols are; the page draws weights over it.
    visible : Tensor (L,) of int, optional
        How many input symbols each output symbol can attend to. With it, the default scale of drawings is "even".
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    weights: Tensor
    title: str = ""
    patches: Patches | None = None
    visible: Tensor | None = None

    def __post_init__(self) -> None:
        expected = (len(self.target), len(self.source))
        if not isinstance(self.weights, Tensor):
            raise rejected("Alignment", "weights", "be a tensor (target, source)", described(self.weights), TypeError)
        if tuple(self.weights.shape) != expected:
            raise rejected("Alignment", "weights", f"be of shape {expected} (target, source)", shape(self.weights))
        if not bool(torch.isfinite(self.weights).all()):
            raise rejected("Alignment", "weights", "be finite", "nan or inf")
        if self.visible is not None and tuple(self.visible.shape) != expected[:1]:
            raise rejected("Alignment", "visible", f"be of shape {expected[:1]} (target,)", shape(self.visible))

    def __str__(self) -> str:
        drawn = draw(self)
        return f"{self.title}\n{drawn}" if self.title else drawn

    def _repr_png_(self) -> bytes | None:
        # None makes a notebook show the text instead: without matplotlib, or without input symbols.
        try:
            return render_png([self], dpi=96)
        except (ImportError, ValueError):
            return None

    def of_words(self) -> bool:
        """Return whether input symbols are too wide for narrow columns."""
        return any(columns(symbol) > 2 for symbol in self.source)

    @property
    def is_signed(self) -> bool:
        """Whether some weights are negative, as in a difference."""
        return bool((self.weights < 0).any())

    def pooled(self, most: int) -> tuple[Alignment, int]:
        """Return the largest weights of blocks, labelled by their first symbols, and the side of a block."""
        weights, block = pooled(as_shown(self.weights), most)
        visible = None if self.visible is None else self.visible[::block]
        source, target = self.source[::block], self.target[::block]
        return replace(self, source=source, target=target, weights=weights, visible=visible), block

    def scale_or(self, scale: str | None) -> str:
        """Return a scale, by default "even" if it is known how many symbols are visible, else "absolute"."""
        return scale or ("absolute" if self.visible is None else "even")


def draw(alignment: Alignment, *, width: int = 80, ascii_only: bool = False, scale: str | None = None) -> str:
    """Draw an alignment with characters: input symbols across, output symbols down, a shade for each weight.

    Letters label their columns directly. Words are stacked, each joined to its column by a vertical line. Columns that
    exceed the width continue in another block below.

    Parameters
    ----------
    alignment : Alignment
    width : int
        The width of the terminal in columns; cells shrink from three columns to two, or to one for letters.
    ascii_only : bool
        Use ``. : * #`` instead of block characters.
    scale : {"even", "absolute", "row", "log"}, optional
        What shades show: weights compared with an even split over the visible keys, weights, weights relative to the
        largest of their row, or logarithms from 0.0001 to 1; by default "even" if the alignment says how many keys are
        visible, else "absolute".

    Returns
    -------
    str
        Lines without trailing blanks or colour codes. Negative differences have other shades. Beyond 400 symbols, each
        cell is the largest weight of a block, and the first line says so.

    Examples
    --------
    >>> print(draw(Alignment(("o", "x"), ("AA", "K", "S"), torch.tensor([[1, 0], [0, 1.0], [0.3, 0.7]]))))
         o  x
    AA   ██
    K       ██
    S    ░░ ▓▓
    >>> print(draw(Alignment(("I", "know", "."), ("je", "sais", "."), torch.eye(3))))
          I
          │  know
          │  │  .
    je    ██
    sais     ██
    .           ██
    """
    alignment, block = alignment.pooled(_LABEL)
    shades, below = (ASCII_SHADES, ASCII_BELOW) if ascii_only else (SHADES, BELOW)
    label = max((columns(symbol) for symbol in alignment.target), default=0) + 2
    label = min(label, max(width // 3, 6))
    widest = max(map(columns, alignment.source), default=0)
    words, least = alignment.of_words(), min(2, max(1, widest))
    cell = max(least, min(3, (width - label) // max(1, len(alignment.source))))
    ink = max(1, cell - 1)
    scale = alignment.scale_or(scale)
    rows = scaled(as_shown(alignment.weights), scale, "draw", alignment.visible).tolist()
    blocks = [] if block == 1 else [f"Each cell is the largest of {block} × {block} weights."]
    for span in _spans(alignment.source, cell, max(1, width - label)):
        shown = alignment.source[span.start : span.stop]
        if words:
            lines = _stairs(shown, label, cell, width - label, "|" if ascii_only else "│")
        else:
            lines = [" " * label + "".join(padded(symbol.center(ink), cell) for symbol in shown)]
        for symbol, row in zip(alignment.target, rows):
            steps = (_step(along, scale) for along in row[span.start : span.stop])
            marks = (shades[step] if step >= 0 else below[-step] for step in steps)
            lines.append(
                padded(clipped(symbol, label - 2), label) + "".join(padded(mark * ink, cell) for mark in marks)
            )
        blocks.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(blocks)


def _step(along: float, scale: str) -> int:
    """Return the nearest shade to a position on a scale; an even share has the first."""
    last = len(SHADES) - 1
    return max(round(last * along), 1) if scale == "even" and along >= EVEN / 2 else round(last * along)


def _spans(source: Sequence[str], cell: int, room: int) -> list[range]:
    """Split symbols into ranges that fit the room side by side."""
    count = max(1, room // cell)
    return [range(at, min(at + count, len(source))) for at in range(0, len(source), count)] or [range(0)]


def _stairs(source: Sequence[str], label: int, cell: int, room: int, bar: str) -> list[str]:
    """Return a line for each word, placed at its column, with a bar for each column before it."""
    bars = [" " * label + padded(bar, cell) * i for i in range(len(source))]
    return [bars[i] + clipped(symbol, max(room - i * cell, 1)) for i, symbol in enumerate(source)]


def legend(*, ascii_only: bool = False, scale: str = "absolute", is_signed: bool = False) -> str:
    """Return a line that explains the shades of a scale.

    Examples
    --------
    >>> legend(ascii_only=True)
    'attention: . 25%  : 50%  * 75%  # 100%'
    >>> legend(scale="log", is_signed=True)
    'attention: ░ 0.001  ▒ 0.01  ▓ 0.1  █ 1; less: - = ≡ ≣'
    >>> legend(scale="even")
    'attention: ░ an even share of the visible keys  ▒ ▓ more  █ all'
    """
    shades, below = (ASCII_SHADES, ASCII_BELOW) if ascii_only else (SHADES, BELOW)
    if scale == "even" and not is_signed:
        _, even, *more, most = list(shades)
        return f"attention: {even} an even share of the visible keys  {' '.join(more)} more  {most} all"
    last = len(shades) - 1
    steps = [f"{10.0 ** (DECADES * (i / last - 1)):g}" if scale == "log" else f"{100 * i // last}%" for i in range(5)]
    entries = "  ".join(f"{shade} {step}" for shade, step in zip(shades[1:], steps[1:]))
    less = f"; less: {' '.join(below[1:])}" if is_signed else ""
    return f"attention{' relative to the largest of its row' if scale == 'row' else ''}: {entries}{less}"


def columns(text: str) -> int:
    r"""Return the width of a text in terminal columns: two for wide characters, none for combining ones.

    Examples
    --------
    >>> columns("né"), columns("ne\u0301"), columns("猫")
    (2, 2, 2)
    """
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    bare = sum(unicodedata.category(character) in ("Mn", "Me", "Cf") for character in text)
    return len(text) + wide - bare


def padded(text: str, room: int) -> str:
    """Return a text padded with blanks to the room."""
    return text + " " * (room - columns(text))


def clipped(text: str, room: int) -> str:
    """Return a text cut to the room, with ``~`` at the cut."""
    if columns(text) <= room:
        return text
    while text and columns(text) > room - 1:
        text = text[:-1]
    return text + "~"


def drawable(alignments: Sequence[Alignment], function: str) -> list[Alignment]:
    """Return the alignments as a list; raise ValueError if there are none or one has no source symbols."""
    if not alignments:
        raise rejected(function, "alignments", "have at least one alignment", "none")
    for alignment in alignments:
        if not alignment.source:
            raise rejected(function, "alignments", "have source symbols", f"{alignment.title!r}, which has none")
    return list(alignments)


# Scales from weights to shades: absolute, relative to the largest of the row, or logarithmic --------------------------


#: The scales, and their labels on a colour bar.
SCALES = {
    "even": "weight, compared with an even split",
    "absolute": "attention weight",
    "row": "relative to row maximum",
    "log": "attention weight",
}
#: The decades of the logarithmic scale.
DECADES = 4
#: Where an even share is on the scale "even", and the least position of any weight but zero (viewer/src/colors.ts).
EVEN, LEAST = 0.1, 0.035


def scaled(weights: Tensor, scale: str, function: str, visible: Tensor | None = None) -> Tensor:
    """Return the position of weights (L, S) on a scale, in [0, 1], or in [−1, 1] for signed weights.

    "even" compares a weight w with an even split over the n keys that its query sees (``visible``): with t = w · n, it
    is ``0.1 + 0.9 · log t / log n`` for t > 1 and ``0.1 · √t`` below, so a uniform row is pale and a sharp one dark at
    any length; the page has the same scale. Signed weights are on a scale of √|w| instead. "absolute" is the weight
    itself, "row" the weight divided by the largest of its row, and "log" is logarithmic from 0 at 10⁻⁴ and below to 1
    at weight 1. In rows dominated by a sink, "absolute" and "row" show little but the sink.
    """
    if scale not in SCALES:
        raise unknown_name(function, "scale", scale, SCALES)
    size = weights.abs()
    if scale == "even":
        size = size.sqrt() if bool((weights < 0).any()) else _against_even(size, visible)
    elif scale == "row":
        size = size / size.amax(-1, keepdim=True).clamp_min(1e-30) if size.numel() else size
    elif scale == "log":
        size = 1 + size.clamp_min(10.0**-DECADES).log10() / DECADES
    return size.clamp(0, 1) * weights.sign()


def _against_even(weights: Tensor, visible: Tensor | None) -> Tensor:
    """Return positions on the scale "even"; a key is visible if it has weight, unless a row has a single one."""
    if visible is None:
        some = (weights > 0).sum(-1)
        visible = torch.where(some > 1, some, weights.shape[-1])
    n = visible.to(weights)[..., None]
    times = weights * n
    above = EVEN + (1 - EVEN) * times.clamp_min(1).log() / n.clamp_min(2).log()
    found = torch.where((times > 1) & (n > 1), above, EVEN * times.clamp(0, 1).sqrt())
    return torch.where(weights > 0, found.clamp_min(LEAST), 0.0)


def pooled(weights: Tensor, most: int) -> tuple[Tensor, int]:
    """Return the largest weights of blocks, at most ``most`` along a side, and the side of a block."""
    block = max(-(-max(weights.shape) // most), 1)
    if block == 1:
        return weights, 1
    pads = (0, -weights.shape[1] % block, 0, -weights.shape[0] % block)
    tiles = F.pad(weights, pads).unflatten(1, (-1, block)).unflatten(0, (-1, block)).transpose(1, 2).flatten(2)
    largest = tiles.abs().argmax(-1, keepdim=True)
    return tiles.gather(-1, largest).squeeze(-1), block


def as_shown(weights: Tensor) -> Tensor:
    """Return weights on the CPU in float64 for drawing."""
    return weights.detach().to("cpu", torch.float64)


# Alignments as pictures: in a file, or on the axes of a figure --------------------------------------------------------


# All lengths are in inches. Every cell has the same size, so that panels can be compared; all cells shrink if a
# sequence would make the picture longer than _LONGEST.
_CELL, _SIDE, _TOP, _GAP, _WIDEST, _LONGEST = 0.36, 0.55, 0.75, 0.45, 13.0, 40.0
_BAR_WIDTH, _BAR_HEIGHT, _FOOT = 2.4, 0.14, 0.95
#: The smallest cells that each have a label, and that are separated by lines; and the smallest font size in points.
_READABLE, _LINED, _LEAST = 0.1, 0.05, 6.0
#: The most cells drawn along a side.
_MOST = 2000
#: Palettes whose lightness is monotonic for every kind of colour vision, from one end or from the middle.
SEQUENTIAL, DIVERGING = "Blues", "PuOr"
FORMATS = ("png", "svg", "pdf")
#: The width of a character, and the height of the column labels above a panel.
_LETTER, _HEAD = 0.09, 0.38
#: The most dots along a side of a picture.
_DOTS = (1 << 16) - 1
#: Fonts for scripts that matplotlib's default font lacks.
_SCRIPTS = (
    "Noto Sans CJK JP", "Noto Sans CJK SC", "Source Han Sans", "WenQuanYi Zen Hei", "Hiragino Sans", "PingFang SC",
    "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Noto Sans Thai", "Noto Sans Devanagari", "Arial Unicode MS",
)  # fmt: skip


def save_plot(alignments: Sequence[Alignment], path: str | Path, *, scale: str | None = None, dpi: int = 144) -> Path:
    """Draw alignments as heat maps and write them to a picture, PNG, SVG or PDF by its suffix.

    Input symbols run across the top (words rotated) and output symbols down the side; a darker cell means more
    attention from the output symbol to the input symbol. For differences, two colours show the sign. Needs matplotlib,
    but no display.

    Parameters
    ----------
    alignments : sequence of Alignment
    path : str or Path
        The file to write; its folder must exist.
    scale : {"even", "absolute", "row", "log"}, optional
        What colours show: weights compared with an even split over the visible keys, weights, weights relative to the
        largest of their row, or logarithms from 0.0001 to 1; by default "even" if the alignment says how many keys are
        visible, else "absolute".
    dpi : int
        Dots per inch.

    Raises
    ------
    ValueError
        If there is nothing to draw, the picture would be too large, or the suffix is none of these.
    OSError
        If the file cannot be written.
    """
    path = Path(path)
    picture = _rendered(alignments, dpi, scale, checked_format(path, "save_plot"), "save_plot")
    with naming(path):
        path.write_bytes(picture)
    return path


def checked_format(path: Path, function: str) -> str:
    """Return the format of a picture from the suffix of its path."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise rejected(function, "path", f"end in {', '.join(f'.{each}' for each in FORMATS)}", repr(path.name))
    return kind


def render_png(alignments: Sequence[Alignment], *, scale: str | None = None, dpi: int = 144) -> bytes:
    """Return the picture that :func:`save_plot` writes, as PNG.

    Raises
    ------
    ValueError
        If there is nothing to draw, or the picture would be too large.
    """
    return _rendered(alignments, dpi, scale, "png", "render_png")


def plot_attention(alignment: Alignment, ax: Any = None, *, scale: str | None = None) -> Any:
    """Draw an alignment as a heat map on the axes of a matplotlib figure.

    Input symbols run across the top and output symbols down the side, as in :func:`save_plot`. Cells are square; labels
    shrink with them, and some are omitted when space is short. Colours range from 0 to 1, or from −1 to 1 for
    differences; pass ``ax.images[0]`` to a colour bar. Beyond 2,000 symbols, each cell is the largest weight of a
    block.

    Parameters
    ----------
    alignment : Alignment
    ax : matplotlib.axes.Axes, optional
        Where to draw; by default a new figure, sized to its cells.
    scale : {"even", "absolute", "row", "log"}, optional
        What colours show: weights compared with an even split over the visible keys, weights, weights relative to the
        largest of their row, or logarithms from 0.0001 to 1; by default "even" if the alignment says how many keys are
        visible, else "absolute".

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
        _heat_map(ax, alignment, cell, alignment.scale_or(scale))
    return ax


def _rendered(alignments: Sequence[Alignment], dpi: int, scale: str | None, kind: str, function: str) -> bytes:
    from matplotlib import rc_context

    shown, written = drawable(alignments, function), io.BytesIO()
    with rc_context({"font.family": fonts()}), warnings.catch_warnings():
        # A character that no font has is drawn as a box.
        warnings.filterwarnings("ignore", r"Glyph .* missing from")
        figure = _figure(shown, shown[0].scale_or(scale))
        dots = [int(side * dpi) for side in figure.get_size_inches()]
        if max(dots) > _DOTS:
            got = f"{dots[0]} × {dots[1]} dots for {len(shown)} alignments"
            raise rejected(function, "alignments", f"fit a picture of at most {_DOTS} dots a side", got)
        figure.savefig(written, dpi=dpi, format=kind)
    return written.getvalue()


def fonts() -> list[str]:
    """Return matplotlib's default font, followed by installed fonts for other scripts."""
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
    # One colour bar for all panels: that of differences, if there are any.
    image = next((each for each in images if each.norm.vmin < 0), images[0])
    foot = _Place(places[0].alignment, _SIDE, height - _FOOT + 0.28, _BAR_WIDTH, _BAR_HEIGHT)
    color_bar(figure, image, scale, cax=_axes(figure, foot), orientation="horizontal")
    return figure


def color_bar(figure: Any, image: Any, scale: str, **place: Any) -> Any:
    """Draw the colour bar of a scale."""
    signed = image.norm.vmin < 0
    ticks, names = ([-1, 0, 1], ["-1", "difference", "1"]) if signed else ([0, 0.5, 1], ["0", SCALES[scale], "1"])
    if scale == "even" and signed:
        names[1] = "difference (square root)"
    elif scale == "even":
        ticks, names = [EVEN, 1], ["an even share", "all on one key"]
    elif scale == "log":
        names = ["-1", "difference (log)", "1"] if signed else [f"≤ {10.0**-DECADES:g}", f"{SCALES[scale]} (log)", "1"]
    bar = figure.colorbar(image, ticks=ticks, **place)
    across = place.get("orientation") == "horizontal"
    (bar.ax.set_xticklabels if across else bar.ax.set_yticklabels)(names, fontsize=9)
    bar.ax.tick_params(length=3 if scale == "even" and not signed else 0)
    bar.outline.set_edgecolor("0.75")
    if scale == "even" and not signed:
        bar.set_label(SCALES[scale], fontsize=9)
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
    """Arrange panels in lines, like words on a page."""
    places: list[_Place] = []
    line: list[_Place] = []
    right, below = 0.0, 0.0
    for alignment in alignments:
        width, height = len(alignment.source) * cell, max(1, len(alignment.target)) * cell
        side = max(_SIDE, 0.2 + _LETTER * max(map(columns, alignment.target), default=0) * cell / _CELL)
        room = max(width, 0.1 * max(map(columns, _title(alignment, width)), default=0))  # a title may be wider
        if line and right + side + room > _WIDEST:
            places += _level(line)
            right, below = 0.0, max(place.top + place.height for place in places[-len(line) :]) + _GAP
            line = []
        line.append(_Place(alignment, right + side, below + _top(alignment, cell), width, height, room))
        right += side + room + _GAP
    return places + _level(line)


def _level(line: list[_Place]) -> list[_Place]:
    """Align the upper edges of the panels of one line."""
    top = max(place.top for place in line)
    return [replace(place, top=top) for place in line]


def _top(alignment: Alignment, cell: float) -> float:
    """Return the room above a panel for its column labels and title."""
    top = _TOP + 0.18 * max(0, len(_title(alignment, len(alignment.source) * cell)) - 1)
    if not alignment.of_words():
        return top
    return top - _HEAD + 0.15 + _LETTER * max(map(columns, alignment.source)) * cell / _CELL


def _title(alignment: Alignment, width: float) -> list[str]:
    """Return the lines of a title over a panel of this width, at most three."""
    across = max(40, int(width / 0.1))
    return textwrap.wrap(alignment.title, across, max_lines=3, placeholder=" ...")


def _axes(figure: Any, place: _Place) -> Any:
    width, height = figure.get_size_inches()
    bottom = height - place.top - place.height
    return figure.add_axes((place.left / width, bottom / height, place.width / width, place.height / height))


def _heat_map(panel: Any, alignment: Alignment, cell: float, scale: str) -> Any:
    S, L = len(alignment.source), max(1, len(alignment.target))
    image = shades(panel, alignment.weights, scale, (S, L), alignment.visible)
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


def shades(panel: Any, weights: Tensor, scale: str, size: tuple[int, int], visible: Tensor | None = None) -> Any:
    """Draw weights (L, S) as colours, one axis unit per symbol."""
    across, down = size
    values, block = pooled(as_shown(weights), _MOST)
    counts = None if visible is None else visible[::block]
    cells = scaled(values, scale, "plot", counts).numpy() if values.numel() else np.zeros((down, across))
    least, palette = (-1, DIVERGING) if (weights < 0).any() else (0, SEQUENTIAL)
    right, bottom = cells.shape[1] * block - 0.5, cells.shape[0] * block - 0.5
    image = panel.imshow(
        cells, cmap=palette, vmin=least, vmax=1, interpolation="nearest", extent=(-0.5, right, bottom, -0.5)
    )
    panel.set(xlim=(-0.5, across - 0.5), ylim=(down - 0.5, -0.5))
    return image


def _plain(text: str) -> str:
    """Escape dollar signs, which start mathematics in matplotlib."""
    return text.replace("$", r"\$")


# Pictures of many heads, and of attention over an image ---------------------------------------------------------------
# Dimensions: H heads, L queries, S keys.


#: The side of a small matrix in inches, and the most cells along it.
_PANEL, _CELLS = 1.25, 160
ORDERS = ("number", "entropy")


def plot_heads(
    heads: Recording | LayerRecord | Tensor, *, batch: int = 0, scale: str = "even", order: str = "number",
    figure: Any = None,
) -> Any:  # fmt: skip
    """Draw the matrices of many heads as a grid, with a row for each layer of a record, or the heads of one layer.

    Each is labelled with its layer, its head and the mean entropy of its rows in nats; a record's title is above.

    Parameters
    ----------
    heads : Record, LayerRecord or Tensor (H, L, S)
    batch : int
        Which sequence of a record's batch.
    scale : {"even", "absolute", "row", "log"}
        What colours show: weights compared with an even split over the visible keys, weights, weights relative to the
        largest of their row, or logarithms from 0.0001 to 1.
    order : {"number", "entropy"}
        "entropy" sorts the heads of all layers from the lowest entropy to the highest.
    figure : matplotlib.figure.Figure, optional
        Where to draw; a new one by default.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ValueError
        If there is nothing to draw.

    Examples
    --------
    >>> import torch
    >>> figure = plot_heads(torch.rand(6, 5, 5).softmax(-1), order="entropy")
    >>> len(figure.axes)  # six heads, and the colour bar
    7
    """
    from matplotlib import pyplot, rc_context

    if order not in ORDERS:
        raise unknown_name("plot_heads", "order", order, ORDERS)
    found, across = _heads(heads, batch)
    if not found:
        raise rejected("plot_heads", "heads", "have at least one", "none")
    spread = [float(torch.special.entr(weights.abs()).sum(-1).mean()) for _, weights, _ in found]
    if order == "entropy":
        ranks = sorted(range(len(found)), key=spread.__getitem__)
        found, spread = [found[i] for i in ranks], [spread[i] for i in ranks]
    down = math.ceil(len(found) / across)
    with rc_context({"font.family": fonts()}):
        if figure is None:
            size = (across * _PANEL + 2.0, down * (_PANEL + 0.2) + 0.2)
            figure = pyplot.figure(figsize=size, layout="constrained")
        panels = figure.subplots(down, across, squeeze=False)
        for panel in panels.flat:
            panel.set_axis_off()
        for panel, (name, weights, visible), entropy in zip(panels.flat, found, spread):
            panel.set_axis_on()
            small, block = pooled(weights, _CELLS)
            counts = None if visible is None else visible[::block]
            image = shades(panel, small, scale, (small.shape[1], small.shape[0]), counts)
            panel.set(xticks=[], yticks=[])
            panel.set_title(f"{name}  {entropy:.2f}", fontsize=7, pad=2)
            for spine in panel.spines.values():
                spine.set_color("0.75")
        if isinstance(heads, Recording) and heads.title:
            figure.suptitle(_plain(heads.title), fontsize=10)
        color_bar(figure, image, scale, ax=list(panels.flat), fraction=0.02, aspect=20, shrink=0.5, anchor=(0.0, 1.0))
    return figure


def _heads(heads: Recording | LayerRecord | Tensor, batch: int) -> tuple[list[tuple[str, Tensor, Tensor | None]], int]:
    """Return heads with their labels and the number of keys that each query sees, and the columns of the grid."""
    if isinstance(heads, Recording):
        rows = [(run.weights(batch=batch), visible_counts(run, batch)) for run in heads]
        found = [
            (f"{layer}·{head}", as_shown(each), visible)
            for layer, (row, visible) in zip(heads.labels, rows)
            for head, each in enumerate(row)
        ]
        return found, max((len(row) for row, _ in rows), default=1)
    weights = heads.weights(batch=batch) if isinstance(heads, LayerRecord) else heads
    visible = visible_counts(heads, batch) if isinstance(heads, LayerRecord) else None
    if not isinstance(weights, Tensor) or weights.dim() != 3:
        got = described(heads) if not isinstance(weights, Tensor) else f"{weights.dim()} dimensions"
        raise rejected("plot_heads", "heads", "be a record, or a tensor (H, L, S)", got, TypeError)
    found = [(str(head), as_shown(each), visible) for head, each in enumerate(weights)]
    return found, math.ceil(math.sqrt(len(weights)))


def plot_image(
    weights: Tensor, image: Any, grid: tuple[int, int], ax: Any = None, *, scale: str = "row", smooth: bool = False
) -> Any:
    """Draw attention over an image: patches with little weight are darkened.

    Parameters
    ----------
    weights : Tensor (rows · cols,)
        The weights of the patches, without other tokens: from a vision transformer, a rollout, or a word of a caption.
    image : array (height, width, 3), or PIL image
    grid : (int, int)
        Rows and columns of patches.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.
    scale : {"absolute", "row", "log"}
        What brightness shows: weights, weights relative to the largest, or logarithms from 0.0001 to 1.
    smooth : bool, default False
        Interpolate between patches.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ValueError
        If the number of weights differs from the number of patches.

    Examples
    --------
    >>> import torch
    >>> ax = plot_image(torch.eye(4)[1], torch.ones(8, 8, 3).numpy(), (2, 2))
    >>> ax.images[1].get_alpha().round(1).tolist()  # the opacity of black: none over the second patch
    [[0.8, 0.0], [0.8, 0.8]]
    """
    import numpy as np
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap

    rows, cols = grid
    if not isinstance(weights, Tensor) or weights.numel() != rows * cols:
        got = f"{weights.numel()}" if isinstance(weights, Tensor) else described(weights)
        raise rejected("plot_image", "weights", f"be a tensor of {rows * cols}, one weight for each patch", got)
    picture = np.asarray(image)
    if picture.ndim not in (2, 3):
        raise rejected("plot_image", "image", "have a height, a width and colours", f"{picture.ndim} dimensions")
    along = scaled(as_shown(weights).reshape(1, -1), scale, "plot_image").abs().reshape(rows, cols).numpy()
    if ax is None:
        ax = pyplot.figure(figsize=(4, 4 * picture.shape[0] / picture.shape[1]), layout="constrained").add_subplot()
    height, width = picture.shape[:2]
    extent = (0, width, height, 0)
    ax.imshow(picture, extent=extent, cmap="gray" if picture.ndim == 2 else None)
    dark = 0.8 * (1 - along)
    if smooth:
        enlarged = torch.nn.functional.interpolate(
            torch.from_numpy(dark)[None, None], scale_factor=16, mode="bicubic", align_corners=False
        )
        dark = enlarged[0, 0].clamp(0, 0.8).numpy()
    ax.imshow(np.zeros_like(dark), cmap=ListedColormap(["black"]), alpha=dark, extent=extent, interpolation="nearest")
    ax.set_axis_off()
    return ax
