"""``regard evaluate`` for models of pairs of lines: translation, pronunciation and other tasks of :data:`TASKS`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from regard._utils.errors import rejected
from regard._utils.files import naming
from regard_cli.messages import note
from regard_lab.cli.kinds import require_kind
from regard_lab.cli.translate import folder_of
from regard_lab.data.pairs import read_pairs
from regard_lab.generation.predictions import PredictionOptions, report_truncated
from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.tasks.translation.metrics import bleu, chrf, tokenized_bleu
from regard_lab.tasks.translation.tasks import get_task


def evaluate(
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
