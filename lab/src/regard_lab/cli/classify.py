"""``regard classify``: label texts, tokens or images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard._utils.errors import fitting, rejected
from regard_cli.messages import JsonOutput, echo, note, report_errors, require_writable
from regard_lab.cli.kinds import require_kind
from regard_lab.cli.lines import Lines, one_source
from regard_lab.data.images import ImageFileError, open_images, read_image
from regard_lab.data.labelled import reason, unreadable
from regard_lab.models import ImageClassifier, TokenClassifier, load
from regard_lab.models.folders import ModelFileError
from regard_lab.models.hugging_face.hosted import HostedImageClassifier, HostedTokenClassifier
from regard_lab.tasks.classification.classifiers import (
    ImageClassificationPipeline,
    LabelledTokens,
    TextClassifier,
    TokenLabeller,
)
from regard_lab.text.unknown import UnknownCharacters

#: A line's text, and its second text if lines are pairs.
_Line = tuple[str, str | None]


def run(
    texts: Sequence[str], *, model: Path, data: str | None, pairs: bool, top: int | None, batch: int, json: JsonOutput
) -> None:
    """Label texts, lines of a file or of standard input, their tokens, or images."""
    with report_errors("regard-lab"), json:
        require_writable(json.file)
        one_source("classify", texts, data)
        require_kind("classify", model, "text classifier", "token classifier", "image classifier")
        if not model.is_dir():
            got = f"a file, {model}" if model.exists() else f"no such folder, {model}"
            raise rejected("classify", "model", "be the folder of a classifier", got, ModelFileError)
        loaded = load(model, dtype=torch.float32)
        if isinstance(loaded, ImageClassifier | HostedImageClassifier):
            if pairs:
                raise rejected("classify", "--pairs", "be left out for an image classifier", True)
            pictures = ImageClassificationPipeline.load(model, "classify", loaded)
            classify_pictures(texts, pictures, data=data, top=top, batch=batch, json=json)
            return
        if isinstance(loaded, TokenClassifier | HostedTokenClassifier):
            if pairs:
                raise rejected("classify", "--pairs", "be left out for a token classifier", True)
            labeller = TokenLabeller.load(model, "classify", loaded)
            lines = Lines.of("classify", texts, data)
            classify_tokens(lines, labeller, top=top, batch=batch, json=json)
            return
        classifier = TextClassifier.load(model, "classify", loaded)
        lines = Lines.of("classify", texts, data)
        count, cut, unknown = 0, 0, UnknownCharacters()
        for block in lines.blocks():
            rows = [_split(text, lines.where(number)) if pairs and text else (text, None) for number, text in block]
            count, cut = count + len(rows), cut + _answer(classifier, rows, top, batch, json)
            unknown += UnknownCharacters.of(classifier.tokenizer, (text for row in rows for text in row if text))
        if cut:
            note(f"regard: truncated {cut:,} of {count:,} texts to {classifier.length:,} tokens")
        if unknown:
            note(f"regard: {unknown}")


def _split(text: str, where: str) -> _Line:
    """Return the two texts of a line."""
    cells = [each.strip() for each in text.split("\t")]
    if len(cells) != 2 or not all(cells):
        raise rejected("classify", where, "have two texts separated by a tab", repr(text[:60]))
    return cells[0], cells[1]


def _answer(classifier: TextClassifier, block: list[_Line], top: int | None, batch: int, json: JsonOutput) -> int:
    """Print the labels of lines, an empty line for an empty line; return how many were truncated."""
    given = [row for row in block if row[0]]
    others = [row[1] or "" for row in given] if any(row[1] is not None for row in given) else None
    full = f"classify: out of memory: lower --batch (now {batch})."
    with fitting(full, MemoryError):
        inputs = classifier.read([row[0] for row in given], others)
        probabilities = iter(classifier.probabilities(inputs, batch=batch).tolist())
    for text, other in block:
        named = sorted(zip(classifier.labels, next(probabilities)), key=lambda each: -each[1]) if text else []
        if json.wanted:
            record: dict[str, Any] = {"text": text} | ({} if other is None else {"other": other})
            record |= {"label": named[0][0] if named else None}
            json.add(record | {"probabilities": {name: round(p, 6) for name, p in named[:top]}})
        if not json.alone:
            echo("\t".join(f"{name}\t{p:.4f}" for name, p in named[: top or 1]))
    return int(inputs.cut.sum())


# Images ---------------------------------------------------------------------------------------------------------------


#: Number of images to read at a time.
_AHEAD = 256


def classify_pictures(
    files: Sequence[str],
    classifier: ImageClassificationPipeline,
    *,
    data: str | None,
    top: int | None,
    batch: int,
    json: JsonOutput,
) -> None:
    """Label image files, or the images in a folder or tar archive; report those that cannot be read.

    Raises
    ------
    ValueError
        If no image can be read.
    """
    if not files and data is None:
        raise ValueError("classify: name image files, or pass --data with a folder or tar archive of images.")
    left_out: list[tuple[str, str]] = []
    images, count = _images(files, data, left_out, classifier), 0
    while block := list(islice(images, _AHEAD)):
        count += len(block)
        with fitting(f"classify: out of memory: lower --batch (now {batch}).", MemoryError):
            probabilities = classifier.probabilities(np.stack([pixels for _, pixels in block]), batch=batch).tolist()
        for (name, _), shares in zip(block, probabilities):
            named = sorted(zip(classifier.labels, shares), key=lambda each: -each[1])
            listed = {label: round(share, 6) for label, share in named[:top]}
            json.add({"image": name, "label": named[0][0], "probabilities": listed})
            if not json.alone:
                cells = [f"{label}\t{share:.4f}" for label, share in named[: top or 1]]
                echo("\t".join([name] * (len(files) != 1) + cells))
    for line in unreadable(left_out):
        note(line)
    if not count:
        raise ImageFileError(
            f"classify: none of the images in {data} can be read."
            if data
            else "classify: none of the images can be read."
        )


def _images(
    files: Sequence[str], data: str | None, left_out: list[tuple[str, str]], classifier: ImageClassificationPipeline
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each image's name and pixels; append unreadable images to ``left_out``."""
    how = {"side": classifier.preprocessing.side, "function": "classify"}
    with ExitStack() as stack:
        read: Callable[..., np.ndarray] = read_image
        if data is not None:
            found = stack.enter_context(open_images(data, "classify"))
            files, read = found.names, found.read
        for name in files:
            try:
                pixels = read(name, **how)
            except ImageFileError as error:
                if len(files) == 1:
                    raise
                left_out.append((name, reason(error)))
            else:
                yield name, classifier.preprocessing.transform(pixels)


# Tokens ---------------------------------------------------------------------------------------------------------------


def classify_tokens(lines: Lines, labeller: TokenLabeller, *, top: int | None, batch: int, json: JsonOutput) -> None:
    """Print one line per token and an empty line after each text, as in CoNLL files; or one line of JSON per text."""
    full = f"classify: out of memory: lower --batch (now {batch})."
    count, cut, unknown = 0, 0, UnknownCharacters()
    for block in lines.blocks():
        with fitting(full, MemoryError):
            found = labeller.label([text for _, text in block], batch=batch)
        for each in found:
            _show(each, labeller.labels, top, json)
        count, cut = count + len(found), cut + sum(each.cut for each in found)
        unknown += UnknownCharacters.of(labeller.tokenizer, (text for _, text in block))
    if cut:
        note(f"regard: truncated {cut:,} of {count:,} texts to {labeller.length:,} tokens")
    if unknown:
        note(f"regard: {unknown}")


def _show(found: LabelledTokens, labels: tuple[str, ...], top: int | None, json: JsonOutput) -> None:
    named = [sorted(zip(labels, shares), key=lambda each: -each[1]) for shares in found.probabilities.tolist()]
    if json.wanted:
        tokens = [
            {"token": token, "start": start, "end": end, "label": each[0][0],
             "probabilities": {label: round(share, 6) for label, share in each[:top]}}
            for token, (start, end), each in zip(found.tokens, found.spans, named)
        ]  # fmt: skip
        json.add({"text": found.text, "tokens": tokens})
    if json.alone:
        return
    for token, each in zip(found.tokens, named):
        echo("\t".join([token, *(f"{label}\t{share:.4f}" for label, share in each[: top or 1])]))
    echo()
