"""An alignment: which input symbols each output symbol looked at, and its drawing in the terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard._errors import described, rejected, shape
from regard.inspect.scales import DECADES, as_shown, pooled, scaled
from regard.inspect.texts import Patches

#: Shades from no weight to all of it. A weight takes the nearest; what is below nothing, in a difference, the second.
SHADES, BELOW = " ░▒▓█", " -=≡≣"
ASCII_SHADES, ASCII_BELOW = " .:*#", " -=%@"
#: Symbols along the longer side that a drawing has at most.
_LONGEST = 400


@dataclass(frozen=True)
class Alignment:
    """The attention weights of one decoded sequence, with the symbols they connect.

    ``print`` draws it with characters; a notebook shows it as a picture.

    Attributes
    ----------
    source : tuple of str
        The S symbols that were read, such as letters or words.
    target : tuple of str
        The L symbols that were written, such as phonemes or words.
    weights : Tensor (L, S)
        How much of each output symbol's attention went to each input symbol, between 0 and 1; or differences of these,
        between −1 and 1.
    title : str
        What the pictures are headed with.
    patches : Patches, optional
        The image whose patches the input symbols are; the page draws weights on it.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    weights: Tensor
    title: str = ""
    patches: Patches | None = None

    def __post_init__(self) -> None:
        expected = (len(self.target), len(self.source))
        if not isinstance(self.weights, Tensor):
            raise rejected("Alignment", "weights", "be a tensor (target, source)", described(self.weights), TypeError)
        if tuple(self.weights.shape) != expected:
            raise rejected("Alignment", "weights", f"be of shape {expected} (target, source)", shape(self.weights))
        if not bool(torch.isfinite(self.weights).all()):
            raise rejected("Alignment", "weights", "be finite", "nan or inf")

    def __str__(self) -> str:
        drawn = draw(self)
        return f"{self.title}\n{drawn}" if self.title else drawn

    def _repr_png_(self) -> bytes | None:
        # None makes a notebook show the text instead: without matplotlib, or where nothing was read.
        try:
            from regard.inspect.plots import render_png

            return render_png([self], dpi=96)
        except (ImportError, ValueError):
            return None

    def of_words(self) -> bool:
        """Return whether what was read is too long to stand side by side over narrow columns."""
        return any(columns(symbol) > 2 for symbol in self.source)

    @property
    def is_signed(self) -> bool:
        """Whether weights have signs, as differences do."""
        return bool((self.weights < 0).any())

    def pooled(self, most: int) -> tuple[Alignment, int]:
        """Return the largest weights of blocks, named by their first symbols, and the side of a block."""
        weights, block = pooled(as_shown(self.weights), most)
        return replace(self, source=self.source[::block], target=self.target[::block], weights=weights), block


def draw(alignment: Alignment, *, width: int = 80, ascii_only: bool = False, scale: str = "absolute") -> str:
    """Draw an alignment with characters: input symbols across, output symbols down, a shade for each weight.

    Letters stand over their columns. Words are set one below the other, each at the top of a line that leads down to
    its column; what does not fit the width goes on below.

    Parameters
    ----------
    alignment : Alignment
    width : int
        Columns to keep within; cells shrink from three columns to two, or to one for letters.
    ascii_only : bool
        Use ``. : * #`` where block characters cannot be printed.
    scale : {"absolute", "row", "log"}
        What shades stand for: weights, shares of the largest of their row, or logarithms from 0.0001 to 1.

    Returns
    -------
    str
        Lines without trailing blanks, and no colour codes. Of a difference, what is below nothing has other shades. Of
        more than 400 symbols, cells are the largest of blocks, and a line says so.

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
    alignment, block = alignment.pooled(_LONGEST)
    shades, below = (ASCII_SHADES, ASCII_BELOW) if ascii_only else (SHADES, BELOW)
    label = max((columns(symbol) for symbol in alignment.target), default=0) + 2
    label = min(label, max(width // 3, 6))
    widest = max(map(columns, alignment.source), default=0)
    words, least = alignment.of_words(), min(2, max(1, widest))
    cell = max(least, min(3, (width - label) // max(1, len(alignment.source))))
    ink = max(1, cell - 1)
    rows = scaled(as_shown(alignment.weights), scale, "draw").tolist()
    blocks = [] if block == 1 else [f"Each cell is the largest of {block} × {block} weights."]
    for span in _spans(alignment.source, cell, max(1, width - label)):
        shown = alignment.source[span.start : span.stop]
        if words:
            lines = _stairs(shown, label, cell, width - label, "|" if ascii_only else "│")
        else:
            lines = [" " * label + "".join(padded(symbol.center(ink), cell) for symbol in shown)]
        for symbol, row in zip(alignment.target, rows):
            steps = (round(weight * (len(shades) - 1)) for weight in row[span.start : span.stop])
            marks = (shades[step] if step >= 0 else below[-step] for step in steps)
            lines.append(
                padded(clipped(symbol, label - 2), label) + "".join(padded(mark * ink, cell) for mark in marks)
            )
        blocks.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(blocks)


def _spans(source: Sequence[str], cell: int, room: int) -> list[range]:
    """Return which symbols stand side by side: as many as fit into so many columns."""
    count = max(1, room // cell)
    return [range(at, min(at + count, len(source))) for at in range(0, len(source), count)] or [range(0)]


def _stairs(source: Sequence[str], label: int, cell: int, room: int, bar: str) -> list[str]:
    """Return a line for each word, which stands where its column begins, with a bar for each column before it."""
    bars = [" " * label + padded(bar, cell) * i for i in range(len(source))]
    return [bars[i] + clipped(symbol, max(room - i * cell, 1)) for i, symbol in enumerate(source)]


def legend(*, ascii_only: bool = False, scale: str = "absolute", is_signed: bool = False) -> str:
    """Return one line that says what the shades of a scale mean.

    Examples
    --------
    >>> legend(ascii_only=True)
    'attention: . 25%  : 50%  * 75%  # 100%'
    >>> legend(scale="log", is_signed=True)
    'attention: ░ 0.001  ▒ 0.01  ▓ 0.1  █ 1; less: - = ≡ ≣'
    """
    shades, below = (ASCII_SHADES, ASCII_BELOW) if ascii_only else (SHADES, BELOW)
    last = len(shades) - 1
    steps = [f"{10.0 ** (DECADES * (i / last - 1)):g}" if scale == "log" else f"{100 * i // last}%" for i in range(5)]
    told = "  ".join(f"{shade} {step}" for shade, step in zip(shades[1:], steps[1:]))
    less = f"; less: {' '.join(below[1:])}" if is_signed else ""
    return f"attention{' beside the largest of its row' if scale == 'row' else ''}: {told}{less}"


def columns(text: str) -> int:
    r"""Return how many columns of a terminal a text takes: two for wide characters, none for combining ones.

    Examples
    --------
    >>> columns("né"), columns("ne\u0301"), columns("猫")
    (2, 2, 2)
    """
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    bare = sum(unicodedata.category(character) in ("Mn", "Me", "Cf") for character in text)
    return len(text) + wide - bare


def padded(text: str, room: int) -> str:
    """Return a text with blanks behind it, as wide as the room."""
    return text + " " * (room - columns(text))


def clipped(text: str, room: int) -> str:
    """Return a text no wider than the room, with a mark where it was cut."""
    if columns(text) <= room:
        return text
    while text and columns(text) > room - 1:
        text = text[:-1]
    return text + "~"


def drawable(alignments: Sequence[Alignment], function: str) -> list[Alignment]:
    """Return the alignments as a list, or raise ValueError if there are none or one read nothing."""
    if not alignments:
        raise rejected(function, "alignments", "have at least one alignment", "none")
    for alignment in alignments:
        if not alignment.source:
            raise rejected(function, "alignments", "have source symbols", f"{alignment.title!r}, which has none")
    return list(alignments)
