"""Looking at attention: what any model attends to, recorded; alignments in the terminal, as a picture, as a page."""

from regard.inspect._capture.capture import capture
from regard.inspect._capture.effect import HeadEffect, head_effect
from regard.inspect._capture.interception import ablate, patch
from regard.inspect._capture.record import Record
from regard.inspect._record.comparison import ComparedLayer, compare_tokens
from regard.inspect._record.head_summary import HeadSummary, Measure, summarize_heads
from regard.inspect._record.inputs import input_texts
from regard.inspect._record.layer_record import AttentionRecord, LayerRecord
from regard.inspect._record.recording import Coverage, Unrecorded
from regard.inspect._record.rollout import average, difference, flow, rollout
from regard.inspect._record.summary import AttentionSummary
from regard.inspect._record.texts import Patches, Text, merge_tokens, words_of
from regard.inspect._record.windows import merge_windows
from regard.inspect._view.notebook import widget
from regard.inspect._view.page import render_html, save_html
from regard.inspect._view.plots import (
    Alignment,
    draw,
    legend,
    plot_attention,
    plot_heads,
    plot_image,
    render_png,
    save_plot,
)

__all__ = [
    "Alignment",
    "AttentionRecord",
    "AttentionSummary",
    "ComparedLayer",
    "Coverage",
    "HeadEffect",
    "HeadSummary",
    "LayerRecord",
    "Measure",
    "Patches",
    "Record",
    "Text",
    "Unrecorded",
    "ablate",
    "average",
    "capture",
    "compare_tokens",
    "difference",
    "draw",
    "flow",
    "head_effect",
    "input_texts",
    "legend",
    "merge_tokens",
    "merge_windows",
    "patch",
    "plot_attention",
    "plot_heads",
    "plot_image",
    "render_html",
    "render_png",
    "rollout",
    "save_html",
    "save_plot",
    "summarize_heads",
    "widget",
    "words_of",
]
