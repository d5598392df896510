"""Pictures of captions: an image for each word, bright where the word looked.

Dimensions: W words, S places of the grid, A attention maps.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard._utils.errors import rejected
from regard._utils.files import naming
from regard.inspect._record.texts import Patches
from regard.inspect._view.plots import Alignment, checked_format, fonts, plot_image
from regard_lab.generation.predictions import Prediction

#: Size of an image in inches, images per row, and letters of a heading that fit above a row.
_SIDE, _ACROSS, _LETTERS = 1.6, 8, 14
#: Inches above an image for its word, per line of a heading, and above a heading.
_WORD, _LINE, _ABOVE = 0.34, 0.19, 0.25
#: JPEG quality of images in a page.
_QUALITY = 90


@dataclass(frozen=True)
class CaptionAttention:
    """A caption with the image, and where each of its words looked.

    Attributes
    ----------
    image : ndarray (X, X, 3) of uint8
        As much of it as the encoder read.
    words : tuple of str
    weights : Tensor (W, S)
    grid : (int, int)
        Rows and columns of places.
    title : str
    sharp : bool
        Whether single places are read, as hard attention does: they are drawn as they are.
    """

    image: np.ndarray
    words: tuple[str, ...]
    weights: Tensor
    grid: tuple[int, int]
    title: str = ""
    sharp: bool = False

    def alignment(self) -> Alignment:
        """Return it as the inspector's page shows it, with the map drawn on the image."""
        import PIL.Image

        file = io.BytesIO()
        PIL.Image.fromarray(self.image).save(file, "JPEG", quality=_QUALITY)
        rows, cols = self.grid
        places = tuple(f"{row + 1}·{col + 1}" for row in range(rows) for col in range(cols))
        return Alignment(places, self.words, self.weights, self.title, Patches(file.getvalue(), rows, cols))


def word_weights(prediction: Prediction) -> Tensor:
    """Return the attention (W, S) of each word: the mean of its tokens, by the aligning map or the mean of all."""
    assert prediction.alignment is not None
    known = prediction.aligning
    weights = prediction.alignment.mean(0) if known is None else prediction.alignment[prediction.maps.index(known)]
    rows = [weights[each.tokens.start : each.tokens.stop].mean(0) for each in prediction.words]
    return torch.stack(rows) if rows else weights[:0]


def save_captions(captions: Sequence[CaptionAttention], path: str | Path, *, dpi: int = 110) -> Path:
    """Draw captions word by word and write them to a picture: PNG, SVG or PDF, as its name ends.

    Those of one image stand one above the other. The first panel of each is the image itself.

    Raises
    ------
    ValueError
        If there is nothing to draw, or the name ends in something else.
    OSError
        If the file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path = Path(path)
    kind = checked_format(path, "save_captions")
    if not captions or not all(each.words for each in captions):
        raise rejected("save_captions", "captions", "have words", "none")
    across = min(_ACROSS, max(len(each.words) + 1 for each in captions))
    lines = [math.ceil((len(each.words) + 1) / across) for each in captions]
    titles = [textwrap.wrap(each.title, _LETTERS * across) for each in captions]
    heads = [_ABOVE + _LINE * len(each) if each else 0.0 for each in titles]
    height = sum(heads) + sum(lines) * (_SIDE + _WORD) + 0.1
    width = across * (_SIDE + 0.08) + 0.1
    file = io.BytesIO()
    with rc_context({"font.family": fonts()}):
        figure = Figure(figsize=(width, height), facecolor="white")
        FigureCanvasAgg(figure)
        top = 0.0
        for each, head, down, title in zip(captions, heads, lines, titles):
            figure.text(0.1 / width, 1 - (top + _ABOVE) / height, "\n".join(title).replace("$", r"\$"),
                        fontsize=10, fontweight="bold", va="top")  # fmt: skip
            top += head
            for number in range(len(each.words) + 1):
                row, col = divmod(number, across)
                left = 0.1 + col * (_SIDE + 0.08)
                bottom = height - top - (row + 1) * (_SIDE + _WORD)
                panel = figure.add_axes((left / width, bottom / height, _SIDE / width, _SIDE / height))
                _draw(panel, each, number)
            top += down * (_SIDE + _WORD)
        figure.savefig(file, dpi=dpi, format=kind)
    with naming(path):
        path.write_bytes(file.getvalue())
    return path


def _draw(panel: Any, caption: CaptionAttention, number: int) -> None:
    """Draw the image, and for numbers above 0 where a word looked."""
    if number:
        plot_image(caption.weights[number - 1], caption.image, caption.grid, panel, smooth=not caption.sharp)
        panel.set_title(caption.words[number - 1].replace("$", r"\$"), fontsize=9, pad=4)
    else:
        panel.imshow(caption.image)
        panel.set_axis_off()
