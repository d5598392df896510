"""An alignment: which input symbols each output symbol looked at, and its drawing in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._errors import rejected, shape

#: Shades from no weight to all of it. A weight takes the nearest.
SHADES = " ░▒▓█"
ASCII_SHADES = " .:*#"


@dataclass(frozen=True)
class Alignment:
    """The attention weights of one decoded sequence, with the symbols they connect.

    Attributes
    ----------
    source : tuple of str
        The S symbols that were read: letters.
    target : tuple of str
        The L symbols that were written: phonemes.
    weights : Tensor (L, S)
        How much of each output symbol's attention went to each input symbol; between 0 and 1.
    title : str
        What the pictures are headed with.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    weights: Tensor
    title: str = ""

    def __post_init__(self) -> None:
        expected = (len(self.target), len(self.source))
        if tuple(self.weights.shape) != expected:
            raise rejected("Alignment", "weights", f"be of shape {expected} (target, source)", shape(self.weights))
        if not bool(torch.isfinite(self.weights).all()):
            raise rejected("Alignment", "weights", "be finite", "nan or inf")

    def rows(self) -> list[list[float]]:
        """Return the weights as nested lists of numbers in [0, 1]."""
        return self.weights.detach().to("cpu", torch.float64).clamp(0, 1).tolist()


def draw(alignment: Alignment, *, width: int = 80, ascii_only: bool = False) -> str:
    """Draw an alignment with characters: input symbols across, output symbols down, a shade for each weight.

    Parameters
    ----------
    alignment : Alignment
    width : int
        Columns to keep within; cells shrink from three columns to one to fit. A longer input overflows.
    ascii_only : bool
        Use ``. : * #`` where block characters cannot be printed.

    Returns
    -------
    str
        Lines without trailing blanks, and no colour codes.

    Examples
    --------
    >>> print(draw(Alignment(("o", "x"), ("AA", "K", "S"), torch.tensor([[1, 0], [0, 1.0], [0.3, 0.7]]))))
         o  x
    AA   ██
    K       ██
    S    ░░ ▓▓
    """
    shades = ASCII_SHADES if ascii_only else SHADES
    label = max((len(symbol) for symbol in alignment.target), default=0) + 2
    cell = max(1, min(3, (width - label) // max(1, len(alignment.source))))
    ink = max(1, cell - 1)
    lines = [" " * label + "".join(_fit(symbol, ink, cell) for symbol in alignment.source)]
    for symbol, row in zip(alignment.target, alignment.rows()):
        cells = [_fit(shades[round(weight * (len(shades) - 1))] * ink, ink, cell) for weight in row]
        lines.append(symbol.ljust(label) + "".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def legend(*, ascii_only: bool = False) -> str:
    """Return one line that says what the shades mean.

    Examples
    --------
    >>> legend(ascii_only=True)
    'attention: . 25%  : 50%  * 75%  # 100%'
    """
    shades = ASCII_SHADES if ascii_only else SHADES
    steps = [f"{shade} {round(100 * i / (len(shades) - 1))}%" for i, shade in enumerate(shades) if i]
    return "attention: " + "  ".join(steps)


def _fit(symbol: str, ink: int, cell: int) -> str:
    return symbol[:ink].center(ink).ljust(cell)


def drawable(alignments: Sequence[Alignment], function: str) -> list[Alignment]:
    """Return the alignments as a list, or raise ValueError if there are none or one read nothing."""
    if not alignments:
        raise rejected(function, "alignments", "have at least one alignment", "none")
    for alignment in alignments:
        if not alignment.source:
            raise rejected(function, "alignments", "have source symbols", f"{alignment.title!r}, which has none")
    return list(alignments)
