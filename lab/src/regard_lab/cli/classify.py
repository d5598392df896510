"""``regard classify``: lines or images in, a label with its probability for each out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from regard._utils.errors import fitting, rejected
from regard_cli.messages import echo, note, report_errors
from regard_lab.cli.lines import Lines, one_source
from regard_lab.models import ImageClassifier, TokenClassifier, load
from regard_lab.models.folders import ModelFileError
from regard_lab.models.hugging_face.hosted import HostedImageClassifier, HostedTokenClassifier
from regard_lab.tasks.classification.image_classifier import PictureClassifier
from regard_lab.tasks.classification.text_classifier import TextClassifier
from regard_lab.tasks.classification.token_labeller import TokenLabeller

#: What a line in is: its text, and the second one.
_Line = tuple[str, str | None]


def run(
    texts: Sequence[str], *, model: Path, data: str | None, pairs: bool, top: int | None, batch: int, as_json: bool
) -> None:
    """Name the label of each text, of each line of a file or of standard input, of their tokens, or of each image."""
    with report_errors("regard-lab"):
        one_source("classify", texts, data)
        if not model.is_dir():
            got = f"a file, {model}" if model.exists() else f"no such folder, {model}"
            raise rejected("classify", "model", "be the folder of a classifier", got, ModelFileError)
        loaded = load(model, dtype=torch.float32)
        if isinstance(loaded, ImageClassifier | HostedImageClassifier):
            if pairs:
                raise rejected("classify", "--pairs", "be left out for a classifier of images", True)
            pictures = PictureClassifier.load(model, "classify", loaded)
            classify_pictures(texts, pictures, data=data, top=top, batch=batch, as_json=as_json)
            return
        if isinstance(loaded, TokenClassifier | HostedTokenClassifier):
            if pairs:
                raise rejected("classify", "--pairs", "be left out for a classifier of tokens", True)
            labeller = TokenLabeller.load(model, "classify", loaded)
            lines = Lines.of("classify", texts, data)
            classify_tokens(lines, labeller, top=top, batch=batch, as_json=as_json)
            return
        classifier = TextClassifier.load(model, "classify", loaded)
        lines = Lines.of("classify", texts, data)
        count = cut = 0
        for block in lines.blocks():
            rows = [_split(text, lines.where(number)) if pairs and text else (text, None) for number, text in block]
            count, cut = count + len(rows), cut + _answer(classifier, rows, top, batch, as_json)
        if cut:
            note(f"regard: {cut:,} of {count:,} texts were cut to {classifier.length:,} tokens")


def _split(text: str, where: str) -> _Line:
    """Return the two texts of a line."""
    cells = [each.strip() for each in text.split("\t")]
    if len(cells) != 2 or not all(cells):
        raise rejected("classify", where, "have two texts with a tab between them", repr(text[:60]))
    return cells[0], cells[1]


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
