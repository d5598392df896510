"""``regard evaluate`` for language models and classifiers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard._utils.errors import rejected
from regard._utils.files import write_out
from regard_cli.messages import note
from regard_lab.cli.classify import evaluate_pictures
from regard_lab.data.documents import read_documents
from regard_lab.data.labelled import read_labelled
from regard_lab.models import DecoderLM, EncoderLM, ImageClassifier, SequenceClassifier, load
from regard_lab.models.hugging_face.hosted import (
    HostedClassifier,
    HostedImageClassifier,
    HostedMaskedLM,
    HostedWriter,
)
from regard_lab.tasks.classification.images import ImageClassificationPipeline
from regard_lab.tasks.classification.texts import TextClassifier
from regard_lab.tasks.classification.training import classification_metrics
from regard_lab.tasks.folders import check_tokenizer
from regard_lab.tasks.language.evaluation import score_text
from regard_lab.text.tokenizer import Tokenizer
from regard_lab.text.unknown import UnknownCharacters


@dataclass(frozen=True)
class TextReading:
    """Options for reading text; None if not given."""

    per: str | None = None
    length: int | None = None
    stride: int | None = None
    pairs: bool = False

    def leave_out(self, what: str, *names: str) -> None:
        """Raise if one of these options is given, which has no effect on this kind of model."""
        for name in names:
            if (value := getattr(self, name)) not in (None, False):
                raise rejected("evaluate", f"--{name}", f"be left out for {what}", value)


def evaluate(
    data: str, folder: Path, reading: TextReading, *, batch: int, precision: str, out: Path | None
) -> dict[str, Any]:
    """Return the metrics of the model in a folder on a file; write a classifier's predicted labels to ``out``."""
    began = time.monotonic()
    model = load(folder, dtype=torch.float32)
    if isinstance(model, SequenceClassifier | ImageClassifier | HostedClassifier | HostedImageClassifier):
        reading.leave_out("a classifier", "per", "length", "stride")
        if model.problem != "single_label":
            expected = "be a single-label classifier"
            raise rejected("evaluate", "model", expected, f"one of problem_type {model.problem}")
        if isinstance(model, ImageClassifier | HostedImageClassifier):
            reading.leave_out("an image classifier", "pairs")
            pictures = ImageClassificationPipeline.load(folder, "evaluate", model)
            found = evaluate_pictures(data, pictures, batch=batch, precision=precision)
            report = {"images": len(found[1])} | _named(*found, out)
        else:
            found = _labels(data, TextClassifier.load(folder, "evaluate", model), reading.pairs, batch, precision)
            report = {"texts": len(found[1])} | _named(*found, out)
    elif isinstance(model, DecoderLM | EncoderLM | HostedWriter | HostedMaskedLM):
        reading.leave_out("a language model", "pairs")
        if out is not None:
            raise rejected("evaluate", "--out", "be left out for a language model: it generates nothing", str(out))
        tokenizer = Tokenizer.load(folder)
        check_tokenizer(model, tokenizer, "evaluate", str(folder))
        documents = read_documents(data, per=reading.per or "file", function="evaluate")
        scores = score_text(
            model, tokenizer, documents, length=reading.length, stride=reading.stride, batch=batch,
            precision=precision, function="evaluate",
        )  # fmt: skip
        report = scores.report()
        if scores.unknown:
            note(f"regard: {scores.unknown}")
    else:
        got = f"{type(model).__name__} in {folder}"
        expected = "be a translation model, captioner, language model, or classifier of texts or images"
        raise rejected("evaluate", "model", expected, got)
    return report | {"seconds": round(time.monotonic() - began, 2)}


def _labels(
    data: str, classifier: TextClassifier, pairs: bool, batch: int, precision: str
) -> tuple[tuple[str, ...], np.ndarray, torch.Tensor]:
    """Return the classifier's labels, the texts' true label ids, and the predicted probabilities (N, C)."""
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


def _named(labels: tuple[str, ...], true: np.ndarray, probabilities: torch.Tensor, out: Path | None) -> dict[str, Any]:
    """Return the classification metrics, and write the predicted labels to ``out``."""
    named = probabilities.argmax(1).numpy()
    C = len(labels)
    confusion = np.bincount(C * true + named, minlength=C * C).reshape(C, C)
    cost = -probabilities[torch.arange(len(true)), torch.from_numpy(true)].double().clamp(min=1e-30).log().mean()
    if out is not None:
        write_out(out, "".join(f"{labels[number]}\n" for number in named).encode())
    measures = classification_metrics(confusion, labels)
    names = {"f1_positive": f"f1 of {labels[-1]!r}"}
    report: dict[str, Any] = {"loss": round(float(cost), 4)}
    return report | {names.get(name, name): round(value, 4) for name, value in measures.items()}
