"""Looking at attention: what any model attends to, recorded; alignments in the terminal, as a picture, as a page."""

from regard.inspect.alignment import Alignment, draw, legend
from regard.inspect.capture import capture
from regard.inspect.coverage import Coverage, Unrecorded
from regard.inspect.difference import difference
from regard.inspect.figures import plot_heads, plot_image
from regard.inspect.flow import flow
from regard.inspect.intervention import ablate, patch
from regard.inspect.layer_record import AttentionRecord, LayerRecord
from regard.inspect.page import render_html, save_html
from regard.inspect.plots import plot_attention, render_png, save_plot
from regard.inspect.record import Record
from regard.inspect.rollout import average, rollout
from regard.inspect.summary import AttentionSummary
from regard.inspect.texts import Patches, Text
from regard.inspect.words import merge_tokens, words_of

__all__ = [
    "Alignment",
    "AttentionRecord",
    "AttentionSummary",
    "Coverage",
    "LayerRecord",
    "Patches",
    "Record",
    "Text",
    "Unrecorded",
    "ablate",
    "average",
    "capture",
    "difference",
    "draw",
    "flow",
    "legend",
    "merge_tokens",
    "patch",
    "plot_attention",
    "plot_heads",
    "plot_image",
    "render_html",
    "render_png",
    "rollout",
    "save_html",
    "save_plot",
    "words_of",
]
