"""``regard classify`` and ``regard evaluate`` of images: a label with its probability for each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice

import numpy as np
from torch import Tensor

from regard._utils.errors import fitting, rejected
from regard_cli.messages import echo, note
from regard_lab.data.images import ImageFileError, open_images, read_image
from regard_lab.data.labelled_images import read_labelled_images, reason, unreadable
from regard_lab.tasks.classification.image_classifier import PictureClassifier

#: Images that are read before the first is answered.
_AHEAD = 256


def classify(
    files: Sequence[str], classifier: PictureClassifier, *, data: str | None, top: int | None, batch: int, as_json: bool
) -> None:
    """Name the label of each image file, or of each in a folder or tar archive; say which could not be read.

    Raises
    ------
    ValueError
        If none could.
    """
    if not files and data is None:
        raise rejected("classify", "PHOTO", "be given: image files, or --data with a folder of them", "none")
    left_out: list[tuple[str, str]] = []
    images, count = _images(files, data, left_out, classifier), 0
    while block := list(islice(images, _AHEAD)):
        count += len(block)
        full = f"classify: images must fit in memory, got an allocation that failed; lower --batch (now {batch})."
        with fitting(full, MemoryError):
            probabilities = classifier.probabilities(np.stack([pixels for _, pixels in block]), batch=batch).tolist()
        for (name, _), shares in zip(block, probabilities):
            named = sorted(zip(classifier.labels, shares), key=lambda each: -each[1])
            best = named[: top or (len(named) if as_json else 1)]
            if as_json:
                listed = {label: round(share, 6) for label, share in best}
                echo(json.dumps({"image": name, "label": best[0][0], "probabilities": listed}, ensure_ascii=False))
            else:
                cells = [f"{label}\t{share:.4f}" for label, share in best]
                echo("\t".join([name] * (len(files) != 1) + cells))
    for line in unreadable(left_out):
        note(line)
    if not count:
        raise rejected("classify", data or "PHOTO", "have images that can be read", "none", ImageFileError)


def _images(
    files: Sequence[str], data: str | None, left_out: list[tuple[str, str]], classifier: PictureClassifier
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each image's name and pixels; what cannot be read goes to ``left_out``."""
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
                yield name, classifier.preprocessing.fit(pixels)


def evaluate(
    data: str, classifier: PictureClassifier, *, batch: int, precision: str
) -> tuple[tuple[str, ...], np.ndarray, Tensor]:
    """Return the labels of a classifier, those of images by their numbers, and probabilities (N, K)."""
    images = read_labelled_images(data, classifier.preprocessing, function="evaluate")
    for line in images.report():
        note(line)
    true = images.numbers(classifier.labels, "evaluate")
    probabilities = classifier.probabilities(images.pixels, batch=batch, precision=precision)
    return classifier.labels, true, probabilities
