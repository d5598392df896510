"""Looking at attention: alignments drawn in the terminal, as a picture, and as a page."""

from regard.inspect.alignment import Alignment, draw, legend
from regard.inspect.page import render_html, save_html
from regard.inspect.plots import save_png

__all__ = ["Alignment", "draw", "legend", "render_html", "save_html", "save_png"]
