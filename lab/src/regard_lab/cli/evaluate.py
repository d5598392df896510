"""``regard evaluate``: the scores of a model on test data, one function per task."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard._utils.errors import rejected
from regard._utils.files import naming, write_out
from regard_cli.messages import note
from regard_lab.cli.align import require_attention
from regard_lab.cli.kinds import require_kind
from regard_lab.cli.translate import folder_of
from regard_lab.cli.translate import load as load_translator
from regard_lab.data.captions import read_captions, with_images
from regard_lab.data.documents import read_documents
from regard_lab.data.images import ImageFileError, Images, open_images
from regard_lab.data.labelled import read_labelled, read_labelled_images
from regard_lab.data.pairs import read_pairs
from regard_lab.generation.predictions import Prediction, PredictionOptions, report_truncated
from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.models import DecoderLM, EncoderLM, ImageClassifier, SequenceClassifier
from regard_lab.models import load as load_model
from regard_lab.models.hugging_face.hosted import (
    HostedClassifier,
    HostedImageClassifier,
    HostedMaskedLM,
    HostedWriter,
)
from regard_lab.tasks.captioning.captioner import Captioner
from regard_lab.tasks.captioning.encoders import Features
from regard_lab.tasks.captioning.metrics import caption_scores
from regard_lab.tasks.classification.classifiers import ImageClassificationPipeline, TextClassifier
from regard_lab.tasks.classification.training import classification_metrics
from regard_lab.tasks.folders import check_tokenizer
from regard_lab.tasks.language.evaluation import score_text
from regard_lab.tasks.translation.alignment.attention import strongest_links, symmetrize_attention, word_attention
from regard_lab.tasks.translation.alignment.links import Agreement, read_pair_links
from regard_lab.tasks.translation.metrics import bleu, chrf, tokenized_bleu
from regard_lab.tasks.translation.tasks import get_task
from regard_lab.text.tokenizer import Tokenizer
from regard_lab.text.unknown import UnknownCharacters
from regard_lab.text.words import find_words, split_at_spaces

# Pairs of lines -------------------------------------------------------------------------------------------------------


def evaluate_pairs(
    task: str, data: str, targets: str | None, folder: Path, options: PredictionOptions, *, tokenized: bool,
    out: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the scores of a model's predictions, each against all references of its source.

    ``folder`` may be the name of an included model; ``tokenized`` adds BLEU of the words that spaces separate.
    """
    require_kind("evaluate", folder, f"{task} model")
    model = SequenceModel.load(folder_of(folder))
    trained = str(model.about.get("task", "translation"))
    if trained != task:
        raise rejected("evaluate", "model", f"be a {task} model", f"a {trained} model, {folder}")
    pairs = read_pairs(data, targets, max_length=None, words=None)
    for line in pairs.report():
        note(line)
    references = pairs.references()
    began = time.monotonic()
    predictions = model.predict(references, options)
    seconds = time.monotonic() - began
    for line in report_truncated(predictions):
        note(line)
    texts, listed = [each.text for each in predictions], list(references.values())
    report: dict[str, Any] = {"sources": len(listed), "references": len(pairs), "seconds": round(seconds, 2)}
    if get_task(task).metric == "bleu":
        report |= _bleu(texts, listed, lowercase=model.target.lowercase, tokenized=tokenized)
    else:
        report |= {name: round(value, 3) for name, value in get_task(task).scores(texts, listed).items()}
    if out is not None:
        with naming(out):
            out.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return report


def _bleu(texts: list[str], references: list[list[str]], *, lowercase: bool, tokenized: bool) -> dict[str, float]:
    """Return BLEU and chrF, named with their signatures; a lowercase model is scored on lowercase text."""
    metrics = (bleu, chrf, *((tokenized_bleu,) if tokenized else ()))
    scores = [metric(texts, references, lowercase=lowercase) for metric in metrics]
    return {f"{each.name}|{each.signature}": round(each.value, 2) for each in scores}


# Word alignments ------------------------------------------------------------------------------------------------------


#: The symmetrization methods to score.
_METHODS = ("intersection", "grow-diag-final-and")


def evaluate_alignment(
    data: str, targets: str | None, model: Path, links: str, *, back: Path | None, tokenized: bool
) -> dict[str, Any]:
    """Compare gold links with the strongest attention weights, and with links extracted from posterior attention."""
    if links == "-" and "-" in (data, targets):
        raise rejected("evaluate", "--links", "be a file if standard input holds the pairs", "-")
    other = None if back is None else require_attention(load_translator(back, "evaluate"), "--back")
    translator = require_attention(load_translator(model, "evaluate"), "--model")
    pairs = read_pairs(data, targets, max_length=None, words=None, duplicates=True)
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
    backward = [None] * len(forward) if other is None else word_attention(other, *reversed(sides), cut=cut)
    for method in _METHODS:
        ways[method] = [symmetrize_attention(ours, theirs, method) for ours, theirs in zip(forward, backward)]
    report: dict[str, Any] = {"pairs": len(pairs)}
    for name, each in ways.items():
        agreement = Agreement.of(each, gold)
        report |= {
            f"{what}|{name}": round(100 * getattr(agreement, what), 2) for what in ("precision", "recall", "aer")
        }
    return report


# Text -----------------------------------------------------------------------------------------------------------------


def evaluate_language_model(
    data: str, folder: Path, *, per: str, length: int | None, stride: int | None, batch: int, precision: str
) -> dict[str, Any]:
    """Return the scores of the language model in a folder on the documents of a file or folder."""
    began = time.monotonic()
    require_kind("evaluate", folder, "language model", "masked language model")
    model = load_model(folder, dtype=torch.float32)
    if not isinstance(model, DecoderLM | EncoderLM | HostedWriter | HostedMaskedLM):
        raise rejected("evaluate", "model", "be a language model", f"{type(model).__name__} in {folder}")
    tokenizer = Tokenizer.load(folder)
    check_tokenizer(model, tokenizer, "evaluate", str(folder))
    scores = score_text(
        model, tokenizer, read_documents(data, per=per, function="evaluate"), length=length, stride=stride,
        batch=batch, precision=precision, function="evaluate",
    )  # fmt: skip
    if scores.unknown:
        note(f"regard: {scores.unknown}")
    return scores.report() | {"seconds": round(time.monotonic() - began, 2)}


# Labels of texts or images --------------------------------------------------------------------------------------------


#: The classifier's labels, the N true label ids, and the predicted probabilities (N, number of labels).
_Labelled = tuple[tuple[str, ...], np.ndarray, torch.Tensor]


def evaluate_classifier(
    data: str, folder: Path, *, pairs: bool, batch: int, precision: str, out: Path | None
) -> dict[str, Any]:
    """Return the metrics of the classifier in a folder on labelled data; write the predicted labels to ``out``."""
    began = time.monotonic()
    require_kind("evaluate", folder, "text classifier", "image classifier")
    model = load_model(folder, dtype=torch.float32)
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


# Captions -------------------------------------------------------------------------------------------------------------


#: Batch size, in images.
_TOGETHER = 128


def evaluate_captioner(
    data: str, images: str, folder: Path, options: PredictionOptions, *, features: str | None, out: Path | None
) -> dict[str, Any]:
    """Return the scores of the captioner in a folder, on lines of image, tab, caption."""
    require_kind("evaluate", folder, "captioner")
    captioner = Captioner.load(folder)
    with open_images(images, "evaluate") as found:
        pairs = read_captions(data)
        for line in pairs.report():
            note(line)
        pairs, lines = with_images(pairs, found)
        for line in lines:
            note(line)
        references = pairs.references()
        began = time.monotonic()
        written = _written(captioner, found, list(references), options, features)
        seconds = time.monotonic() - began
    if lost := len(references) - len(written):
        note(f"skipped, cannot be read: {lost:,} of {len(references):,} images")
    if not written:
        raise ValueError(f"evaluate: none of the {len(references):,} images in {images} can be read.")
    listed = [references[each.source] for each in written]
    if out is not None:
        with naming(out):
            out.write_text("".join(f"{each.source}\t{each.text}\n" for each in written), encoding="utf-8")
    report: dict[str, Any] = {"images": len(written), "references": sum(map(len, listed))}
    report |= {"seconds": round(seconds, 2), "beams": options.search.beams}
    scores = caption_scores([each.text for each in written], listed)
    del scores["bleu"]
    names = {"chrf": "chrF2", "rouge": "ROUGE-L", "cider": "CIDEr-D"}
    return report | {names.get(name, name.upper().replace("BLEU", "BLEU-")): round(v, 2) for name, v in scores.items()}


def _written(
    captioner: Captioner, images: Images, names: list[str], options: PredictionOptions, features: str | None
) -> list[Prediction]:
    """Return the captions of the images that can be read."""
    kept = None if features is None else Features.load(features, captioner.encoder)
    known = _rows(kept, names) if kept is not None else {}
    made: list[Prediction] = []
    grids: list[torch.Tensor] = []
    some: list[str] = []
    for number, name in enumerate(names, start=1):
        grid = _grid(captioner, images, name) if kept is None else torch.from_numpy(kept.values[known[name]])
        if grid is not None:
            grids.append(grid.float())
            some.append(name)
        if some and (len(some) == _TOGETHER or number == len(names)):
            made += captioner.caption(torch.stack(grids), some, options)
            grids, some = [], []
    return made


def _rows(features: Features, names: list[str]) -> dict[str, int]:
    rows = {name: row for row, name in enumerate(features.names)}
    missing = [name for name in names if name not in rows]
    if missing:
        got = f"none for {len(missing):,}, the first {missing[0]!r}"
        raise rejected("evaluate", str(features.path), "have features for all images", got)
    return rows


def _grid(captioner: Captioner, images: Images, name: str) -> torch.Tensor | None:
    try:
        pixels = images.read(name, side=captioner.encoder.side, function="evaluate")
    except ImageFileError as error:
        note(f"regard: {error}")
        return None
    return captioner.features([captioner.read(pixels)])[0]
