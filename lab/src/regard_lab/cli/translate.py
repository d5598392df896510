"""``regard translate``: translate lines, and show the alignments as pictures or data."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from regard._utils.errors import rejected
from regard.inspect import draw, legend, save_html, save_plot
from regard_cli.messages import JsonOutput, ascii_only, echo, fail, note, report_errors, require_writable
from regard_lab import pretrained
from regard_lab.cli.kinds import find, require_kind, used_by
from regard_lab.data.pairs import read_lines
from regard_lab.generation.beam_search import SearchOptions
from regard_lab.generation.predictions import Prediction, PredictionOptions
from regard_lab.generation.quantization import pack_weights, quantize
from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.models.transformer import TransformerSequenceDecoder
from regard_lab.tasks.translation.alignment.maps import alignment as aligned
from regard_lab.tasks.translation.alignment.maps import record

#: Number of lines to read ahead if standard input is not a terminal.
_AHEAD = 1024


def run(
    texts: Sequence[str],
    *,
    references: Sequence[str],
    model: Path,
    options: PredictionOptions,
    int8: bool,
    alignment: bool,
    words: bool,
    plot: Path | None,
    html: Path | None,
    json: JsonOutput,
) -> None:
    """Translate each text, or each line of standard input if there are no texts.

    With references, align them instead of translating.
    """
    pictures = plot is not None or html is not None
    piped = not texts or list(texts) == ["-"]
    if piped and (pictures or references):
        raise fail("translate: --plot, --html and --given require texts as arguments.")
    if references and len(references) != len(texts):
        raise fail(f"translate: --given must be repeated once per text, {len(texts)} times, got {len(references)}.")
    if not all(each.strip() for each in references):
        raise fail("translate: --given must not be empty.")
    searched = options.search != SearchOptions(length_penalty=options.search.length_penalty)
    if references and (searched or options.precision != PredictionOptions.precision or not options.replace_unknown):
        unused = "--beams, --n-best, --no-repeat, --sample, --precision and --keep-unknown"
        raise fail(f"translate: --given cannot be combined with {unused}: nothing is generated.")
    if len(texts) > 1 and not any(" " in text for text in texts):
        note("regard: each argument is translated separately; put quotes around a sentence")
    with report_errors("regard-lab"), json:
        require_writable(html, json.file, picture=plot)
        translator = for_decoding(load(model, "translate"), options.precision, int8=int8)
        lines: Iterable[str] = read_lines("-", "translate") if piped else texts
        if piped and sys.stdin.isatty():
            note("regard: type a line and press Return; Ctrl-D ends")
        ahead = 1 if piped and sys.stdin.isatty() else _AHEAD
        kept = []
        predictions = (
            translator.align(texts, references, options)
            if references
            else translator.stream(lines, options, ahead=ahead)
        )
        for prediction in predictions:
            _show(prediction, alignment=alignment, words=words, json=json, n_best=options.search.n_best)
            if pictures:
                kept.append(prediction)
        if alignment and not json.alone and not piped:
            echo(legend(ascii_only=ascii_only()))
        _draw([each for each in kept if each.tokens], words=words, plot=plot, html=html)


def load(folder: Path, command: str) -> SequenceModel:
    """Load a translation model from its folder, or an included model by its name."""
    require_kind(command, folder, *used_by("translate"))
    return SequenceModel.load(folder_of(folder))


def for_decoding(translator: SequenceModel, precision: str, *, int8: bool) -> SequenceModel:
    """Return the model with weights packed for the CPU, or quantized to int8; may modify it in place."""
    if int8:
        if precision != PredictionOptions.precision:
            raise rejected("translate", "--precision", "be left out with --int8", precision)
        if not isinstance(translator.model, TransformerSequenceDecoder):
            raise rejected("translate", "--int8", "be used with a Transformer", f"a {translator.kind} model")
        return SequenceModel(
            quantize(translator.model), translator.source, translator.target, translator.about, translator.rewriting
        )
    if precision == PredictionOptions.precision:
        pack_weights(translator.model)
    return translator


def folder_of(folder: Path) -> Path:
    """Return a model's folder; included models are known by their names."""
    if (found := find(folder)).is_dir():
        return found
    if folder.exists():
        raise rejected("translate", "model", "be a model folder", f"a file, {folder}")
    known = ", ".join(pretrained.names())
    raise ValueError(
        f"there is no model at {folder}: train one with `regard train translation --data pairs.tsv --out {folder}`, or "
        f"use an included model: {known}."
    )


def _show(prediction: Prediction, *, alignment: bool, words: bool, json: JsonOutput, n_best: int) -> None:
    if json.wanted:
        json.add(record(prediction))
    if json.alone:
        return
    if prediction.note:
        note(f"regard: {prediction.note}: {prediction.source[:60]!r}")
    if not prediction.tokens and prediction.source.strip():
        note(f"regard: the output is empty for {prediction.source[:60]!r}")
    for each in (prediction, *prediction.alternatives):
        echo(f"{each.normalized:.4f}\t{each.text}" if n_best > 1 else each.text)
    if alignment and prediction.tokens:
        echo(f"\n{draw(aligned(prediction, words=words), ascii_only=ascii_only())}\n")


def _draw(predictions: Sequence[Prediction], *, words: bool, plot: Path | None, html: Path | None) -> None:
    if not predictions:
        for path in (plot, html):
            if path is not None:
                note(f"regard: the output is empty, so there is no picture: {path}")
        return
    drawn = [aligned(each, words=words) for each in predictions]
    if plot is not None:
        save_plot(drawn, plot)
    if html is not None:
        caption = "Columns are source words, rows target words. Darker cells mean more attention."
        save_html(drawn, html, heading="What each word attended to", note=caption)
