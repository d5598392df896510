"""``regard evaluate``: how good a model's output is, against what people wrote."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from regard._errors import rejected
from regard._writing import naming
from regard.cli.messages import echo, explained, note, require_writable
from regard.cli.translate import load
from regard.tasks.evaluation import bleu, chrf, tokenized_bleu
from regard.tasks.kinds import task_of
from regard.tasks.pairs import read_pairs
from regard.tasks.written import WritingOptions, cut


def run(
    data: str, targets: str | None, *, model: Path, options: WritingOptions, tokenized: bool, out: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Write for every source, and score against all its targets."""
    with explained("train"):
        require_writable(out)
        writer = load(model)
        task = task_of(str(writer.about.get("task", "translation")))
        if tokenized and task.metric != "bleu":
            raise rejected("evaluate", "--tokenized", f"be left out for {task.name}, which BLEU does not score", "it")
        pairs = read_pairs(data, targets, longest=None, words=None)
        for line in pairs.report():
            note(line)
        references = pairs.references()
        began = time.monotonic()
        answers = writer.write(references, options)
        seconds = time.monotonic() - began
        for line in cut(answers):
            note(line)
        written = [each.text for each in answers]
        listed = list(references.values())
        found: dict[str, Any] = {"sources": len(listed), "references": len(pairs), "seconds": round(seconds, 2)}
        if task.metric == "bleu":
            # What a model cannot write does not count against it; the signature says so.
            lower = writer.target.lowercase
            metrics = (bleu, chrf, *((tokenized_bleu,) if tokenized else ()))
            scores = [metric(written, listed, lowercase=lower) for metric in metrics]
            found |= {f"{each.name}|{each.signature}": round(each.value, 2) for each in scores}
        else:
            found |= {name: round(value, 3) for name, value in task.scores(written, listed).items()}
        if out is not None:
            with naming(out):
                out.write_text("".join(f"{text}\n" for text in written), encoding="utf-8")
    if as_json:
        echo(json.dumps(found))
        return
    for name, value in found.items():
        echo(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}")
