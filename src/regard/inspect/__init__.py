"""Looking at attention: alignments drawn in the terminal, as a picture, and as a page."""

from regard.inspect.alignment import Alignment, draw, legend
from regard.inspect.page import render_html, save_html
from regard.inspect.plots import plot_alignment, render_png, save_png

__all__ = [
    "Alignment",
    "draw",
    "legend",
    "plot_alignment",
    "render_html",
    "render_png",
    "save_html",
    "save_png",
]
