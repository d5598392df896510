"""``regard evaluate classifier``: compare predicted labels of texts or images with the true ones."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard._utils.errors import rejected
from regard._utils.files import write_out
from regard_cli.messages import note
from regard_lab.cli.kinds import require_kind
from regard_lab.data.labelled import read_labelled
from regard_lab.data.labelled_images import read_labelled_images
from regard_lab.models import ImageClassifier, SequenceClassifier, load
from regard_lab.models.hugging_face.hosted import HostedClassifier, HostedImageClassifier
from regard_lab.tasks.classification.images import ImageClassificationPipeline
from regard_lab.tasks.classification.texts import TextClassifier
from regard_lab.tasks.classification.training import classification_metrics
from regard_lab.text.unknown import UnknownCharacters

#: The classifier's labels, the N true label ids, and the predicted probabilities (N, number of labels).
_Labelled = tuple[tuple[str, ...], np.ndarray, torch.Tensor]


def evaluate(data: str, folder: Path, *, pairs: bool, batch: int, precision: str, out: Path | None) -> dict[str, Any]:
    """Return the metrics of the classifier in a folder on labelled data; write the predicted labels to ``out``."""
    began = time.monotonic()
    require_kind("evaluate", folder, "text classifier", "image classifier")
    model = load(folder, dtype=torch.float32)
    if not isinstance(model, SequenceClassifier | ImageClassifier | HostedClassifier | HostedImageClassifier):
        raise rejected("evaluate", "model", "be a classifier of texts or images", f"{type(model).__name__} in {folder}")
    if model.problem != "single_label":
        raise rejected("evaluate", "model", "be a single-label classifier", f"one of problem_type {model.problem}")
    if isinstance(model, ImageClassifier | HostedImageClassifier):
        if pairs:
            raise rejected("evaluate", "--pairs", "be left out for an image classifier", True)
        pictures = ImageClassificationPipeline.load(folder, "evaluate", model)
        found, what = _of_images(data, pictures, batch, precision), "images"
    else:
        found, what = _of_texts(data, TextClassifier.load(folder, "evaluate", model), pairs, batch, precision), "texts"
    return {what: len(found[1])} | _measured(*found, out) | {"seconds": round(time.monotonic() - began, 2)}


def _of_images(data: str, classifier: ImageClassificationPipeline, batch: int, precision: str) -> _Labelled:
    images = read_labelled_images(data, classifier.preprocessing, function="evaluate")
    for line in images.report():
        note(line)
    true = images.numbers(classifier.labels, "evaluate")
    return classifier.labels, true, classifier.probabilities(images.pixels, batch=batch, precision=precision)


def _of_texts(data: str, classifier: TextClassifier, pairs: bool, batch: int, precision: str) -> _Labelled:
    texts = read_labelled(data, pairs=pairs, function="evaluate")
    for line in texts.report():
        note(line)
    true = texts.numbers(classifier.labels, "evaluate")
    inputs = classifier.read(texts.texts, texts.others)
    if cut := int(inputs.cut.sum()):
        note(f"truncated {cut:,} of {len(texts):,} texts to {classifier.length:,} tokens")
    if unknown := UnknownCharacters.of(classifier.tokenizer, [*texts.texts, *(texts.others or ())]):
        note(f"regard: {unknown}")
    return classifier.labels, true, classifier.probabilities(inputs, batch=batch, precision=precision)


def _measured(
    labels: tuple[str, ...], true: np.ndarray, probabilities: torch.Tensor, out: Path | None
) -> dict[str, Any]:
    """Return the classification metrics, and write the predicted labels to ``out``."""
    predicted = probabilities.argmax(1).numpy()
    C = len(labels)
    confusion = np.bincount(C * true + predicted, minlength=C * C).reshape(C, C)
    cost = -probabilities[torch.arange(len(true)), torch.from_numpy(true)].double().clamp(min=1e-30).log().mean()
    if out is not None:
        write_out(out, "".join(f"{labels[number]}\n" for number in predicted).encode())
    measures = classification_metrics(confusion, labels)
    names = {"f1_positive": f"f1 of {labels[-1]!r}"}
    report: dict[str, Any] = {"loss": round(float(cost), 4)}
    return report | {names.get(name, name): round(value, 4) for name, value in measures.items()}
