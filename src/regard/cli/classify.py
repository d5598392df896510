"""``regard classify``: lines or images in, a label with its probability for each out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from regard._errors import rejected
from regard._memory import fitting
from regard.cli import classify_images
from regard.cli.messages import echo, note, report_errors
from regard.data.files import display_name
from regard.data.pairs import read_lines
from regard.language.classifier import TextClassifier
from regard.models import ImageClassifier, load
from regard.models.folders import ModelFileError
from regard.vision.image_classifier import PictureClassifier

#: Lines that are read before the first is answered, where standard input is no terminal.
_AHEAD = 1024
#: What a line in is: its text, and the second one.
_Line = tuple[str, str | None]


def run(
    texts: Sequence[str], *, model: Path, data: str | None, pairs: bool, top: int | None, batch: int, as_json: bool
) -> None:
    """Name the label of each text, of each line of a file or of standard input, or of each image."""
    with report_errors("translate"):
        if texts and list(texts) != ["-"] and data is not None:
            raise rejected("classify", "--data", "be left out where texts are given", repr(data))
        if not model.is_dir():
            got = f"a file, {model}" if model.exists() else f"no such folder, {model}"
            raise rejected("classify", "model", "be the folder of a classifier", got, ModelFileError)
        loaded = load(model, dtype=torch.float32)
        if isinstance(loaded, ImageClassifier):
            if pairs:
                raise rejected("classify", "--pairs", "be left out for a classifier of images", True)
            pictures = PictureClassifier.load(model, "classify", loaded)
            classify_images.classify(texts, pictures, data=data, top=top, batch=batch, as_json=as_json)
            return
        classifier = TextClassifier.load(model, "classify", loaded)
        source = data if data is not None else "-" if not texts or list(texts) == ["-"] else None
        typed = source == "-" and sys.stdin.isatty()
        if typed:
            note("regard: type a line, and Return; Ctrl-D ends")
        lines: Iterable[str] = texts if source is None else read_lines(source, "classify")
        rows = _split(lines, pairs, "TEXT" if source is None else display_name(source), source is not None)
        count = cut = 0
        while block := list(islice(rows, 1 if typed else _AHEAD)):
            count, cut = count + len(block), cut + _answer(classifier, block, top, batch, as_json)
        if cut:
            note(f"regard: {cut:,} of {count:,} texts were cut to {classifier.length:,} tokens")


def _split(lines: Iterable[str], pairs: bool, name: str, numbered: bool) -> Iterator[_Line]:
    """Yield the text or the two texts of each line."""
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        cells = [each.strip() for each in text.split("\t")]
        if not pairs or not text:
            yield text, None
        elif len(cells) == 2 and all(cells):
            yield cells[0], cells[1]
        else:
            where = f"{name}, line {number:,}" if numbered else name
            raise rejected("classify", where, "have two texts with a tab between them", repr(text[:60]))


def _answer(classifier: TextClassifier, block: list[_Line], top: int | None, batch: int, as_json: bool) -> int:
    """Print the labels of some lines, an empty line for an empty one; return how many were cut."""
    given = [row for row in block if row[0]]
    others = [row[1] or "" for row in given] if any(row[1] is not None for row in given) else None
    full = f"classify: lines must fit in memory, got an allocation that failed; lower --batch (now {batch})."
    with fitting(full, MemoryError):
        inputs = classifier.read([row[0] for row in given], others)
        probabilities = iter(classifier.probabilities(inputs, batch=batch).tolist())
    for text, other in block:
        named = sorted(zip(classifier.labels, next(probabilities)), key=lambda each: -each[1]) if text else []
        best = named[: top or (len(named) if as_json else 1)]
        if as_json:
            record: dict[str, Any] = {"text": text} | ({} if other is None else {"other": other})
            record |= {"label": best[0][0] if best else None, "probabilities": {name: round(p, 6) for name, p in best}}
            echo(json.dumps(record, ensure_ascii=False))
        else:
            echo("\t".join(f"{name}\t{p:.4f}" for name, p in best))
    return int(inputs.cut.sum())
