"""Looking at attention: what any model attends to, recorded; alignments in the terminal, as a picture, as a page."""

from regard.inspect.alignment import Alignment, draw, legend
from regard.inspect.capture import capture
from regard.inspect.page import render_html, save_html
from regard.inspect.plots import plot_alignment, render_png, save_png
from regard.inspect.record import AttentionRecord, Record
from regard.inspect.texts import Patches, Text

__all__ = [
    "Alignment",
    "AttentionRecord",
    "Patches",
    "Record",
    "Text",
    "capture",
    "draw",
    "legend",
    "plot_alignment",
    "render_html",
    "render_png",
    "save_html",
    "save_png",
]
