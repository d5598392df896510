"""``regard evaluate``: score a model on test data."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard._utils.errors import rejected
from regard._utils.files import naming
from regard_cli.messages import JsonOutput, echo, note, report_errors, require_writable
from regard_lab.cli import evaluate_captions, evaluate_language
from regard_lab.cli.align import require_attention
from regard_lab.cli.evaluate_language import TextReading
from regard_lab.cli.kinds import require_kind
from regard_lab.cli.translate import folder_of, load
from regard_lab.data.pairs import read_pairs
from regard_lab.generation.beam_search import SearchOptions
from regard_lab.generation.predictions import PredictionOptions, report_truncated
from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.models.stored_models import is_model_folder
from regard_lab.tasks.captioning.captioner import is_captioner
from regard_lab.tasks.translation.alignment.attention import strongest_links, symmetrize_attention, word_attention
from regard_lab.tasks.translation.alignment.links import Agreement, read_pair_links
from regard_lab.tasks.translation.metrics import bleu, chrf, tokenized_bleu
from regard_lab.tasks.translation.tasks import get_task
from regard_lab.text.words import find_words, split_at_spaces

#: The kinds of models that are evaluated.
EVALUATED = ("translation model", "pronunciation model", "captioner", "language model", "masked language model",
             "text classifier", "image classifier")  # fmt: skip
#: The symmetrization methods to score.
_METHODS = ("intersection", "grow-diag-final-and")


def run(
    data: str, targets: str | None, *, model: Path, options: PredictionOptions, tokenized: bool, out: Path | None,
    json: JsonOutput, links: str | None, back: Path | None, reading: TextReading, images: str | None = None,
    features: str | None = None,
) -> None:  # fmt: skip
    """Score the model in a folder by its kind.

    A translation model translates every source and is scored against all its references; with ``links``, its attention
    on the given targets is scored against gold word alignments.
    """
    with report_errors("regard-lab[train]"), json:
        require_writable(json.file)
        folder = folder_of(model)
        require_kind("evaluate", model, *EVALUATED)
        pairs_alone: dict[str, object] = {"--targets": targets, "--links": links, "--back": back}
        if is_captioner(folder):
            reading.leave_out("a captioner", "per", "length", "stride", "pairs")
            _leave_out("a translator", pairs_alone)
            require_writable(out)
            report = evaluate_captions.evaluate(data, images, folder, options, features=features, out=out)
            return _print_report(report, json)
        _leave_out("a captioner", {"--images": images, "--features": features})
        if is_model_folder(folder):
            search = None if options.search == SearchOptions() else "--beams or --length-penalty"
            _leave_out("a translator", {**pairs_alone, "--tokenized": tokenized or None, "the search": search})
            require_writable(out)
            batch, precision = options.batch, options.precision
            report = evaluate_language.evaluate(data, folder, reading, batch=batch, precision=precision, out=out)
            return _print_report(report, json)
        reading.leave_out("a translator", "per", "length", "stride", "pairs")
        if links is not None:
            report = _links_report(data, targets, model, links, back, out, tokenized)
        elif back is not None:
            raise ValueError("evaluate: --back requires --links.")
        else:
            require_writable(out)
            report = _translations_report(data, targets, SequenceModel.load(folder), options, out, tokenized)
        return _print_report(report, json)


def _leave_out(kind: str, given: Mapping[str, object]) -> None:
    """Raise if an option is given that applies only to models of this ``kind``."""
    for name, value in given.items():
        if value is not None:
            raise rejected("evaluate", name, f"be left out unless the model is {kind}", value)


def _translations_report(
    data: str, targets: str | None, translator: SequenceModel, options: PredictionOptions, out: Path | None,
    tokenized: bool,
) -> dict[str, Any]:  # fmt: skip
    """Score the model's translations against all references of each source."""
    task = get_task(str(translator.about.get("task", "translation")))
    if tokenized and task.metric != "bleu":
        raise rejected("evaluate", "--tokenized", f"be left out for {task.name}, which BLEU does not score", True)
    pairs = read_pairs(data, targets, longest=None, words=None)
    for line in pairs.report():
        note(line)
    references = pairs.references()
    began = time.monotonic()
    answers = translator.predict(references, options)
    seconds = time.monotonic() - began
    for line in report_truncated(answers):
        note(line)
    predictions = [each.text for each in answers]
    listed = list(references.values())
    report: dict[str, Any] = {"sources": len(listed), "references": len(pairs), "seconds": round(seconds, 2)}
    if task.metric == "bleu":
        # A lowercase model is scored on lowercase text; the signature says so.
        lower = translator.target.lowercase
        metrics = (bleu, chrf, *((tokenized_bleu,) if tokenized else ()))
        scores = [metric(predictions, listed, lowercase=lower) for metric in metrics]
        report |= {f"{each.name}|{each.signature}": round(each.value, 2) for each in scores}
    else:
        report |= {name: round(value, 3) for name, value in task.scores(predictions, listed).items()}
    if out is not None:
        with naming(out):
            out.write_text("".join(f"{text}\n" for text in predictions), encoding="utf-8")
    return report


def _links_report(
    data: str, targets: str | None, model: Path, links: str, back: Path | None, out: Path | None, tokenized: bool
) -> dict[str, Any]:
    """Score a model's attention on the given targets against word alignments in a file."""
    if out is not None:
        raise rejected("evaluate", "--out", "be left out with --links: the model generates nothing", str(out))
    if links == "-" and "-" in (data, targets):
        raise rejected("evaluate", "--links", "be a file if standard input holds the pairs", "-")
    other = None if back is None else require_attention(load(back, "evaluate"), "--back")
    return _agreement(data, targets, require_attention(load(model, "evaluate"), "--model"), links, other, tokenized)


def _agreement(
    data: str, targets: str | None, translator: SequenceModel, links: str, back: SequenceModel | None, tokenized: bool
) -> dict[str, Any]:
    """Compare gold links with the strongest attention weights, and with links extracted from posterior attention."""
    pairs = read_pairs(data, targets, longest=None, words=None, duplicates=True)
    for line in pairs.report():
        note(line)
    cut = split_at_spaces if tokenized else find_words
    gold = read_pair_links(links, pairs, cut)
    sides = pairs.sources, pairs.targets
    ways = {
        "attention": [
            strongest_links(weights) for weights in word_attention(translator, *sides, cut=cut, posterior=False)
        ]
    }
    forward = word_attention(translator, *sides, cut=cut)
    if without := sum(each is None for each in forward):
        note(f"too long to align: {without:,} pairs; their gold links count as missed")
    backward = [None] * len(forward) if back is None else word_attention(back, *reversed(sides), cut=cut)
    for method in _METHODS:
        ways[method] = [symmetrize_attention(ours, theirs, method) for ours, theirs in zip(forward, backward)]
    report: dict[str, Any] = {"pairs": len(pairs)}
    for name, each in ways.items():
        agreement = Agreement.of(each, gold)
        report |= {
            f"{what}|{name}": round(100 * getattr(agreement, what), 2) for what in ("precision", "recall", "aer")
        }
    return report


def _print_report(report: dict[str, Any], json: JsonOutput) -> None:
    json.add(report)
    for name, value in () if json.alone else report.items():
        echo(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}")
