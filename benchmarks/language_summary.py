"""How good and how fast language models are: the table of docs/language-models.md, from benchmarks/results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.encoders import RECIPES, STARTS, TASKS
from benchmarks.language_models import NANOGPT
from benchmarks.machine import ROOT
from benchmarks.report import ratio

RESULTS = ROOT / "benchmarks/results"


class Line(NamedTuple):
    """One line of the table."""

    what: str
    result: str
    against: str


def table() -> str:
    """Return the table, in Markdown."""
    head = ["| what | regard | compared with |", "| --- | --- | --- |"]
    return "\n".join([*head, *(f"| {' | '.join(line)} |" for line in lines())])


def lines() -> Iterator[Line]:
    """Yield what was measured, in order."""
    published = "; ".join(f"{name} ({size} parameters): {loss}" for name, (loss, size) in NANOGPT.items())
    for run in _read("language-models")["runs"]:
        what = f"tiny shakespeare, {run['parameters'] / 1e6:.2f} M parameters, {run['minutes']:.0f} minutes of training"
        yield Line(f"{what}: nats per character", f"{run['loss']:.4f}", published)
    if (RESULTS / "encoders.json").exists():
        yield from _encoders(_read("encoders")["rows"])
    for row in _read("language-training")["found"]:
        yield Line(f"training, {row['case']}, {row['dtype']}", ratio(row["ratio"]), "plain torch")
    for row in _read("decoding")["rows"]:
        if row["contender"].startswith("regard, packed"):
            yield Line(f"decoding, {row['model']}, batch {row['batch']}", ratio(row["ratio"]), "transformers")
    for threads, both in _read("beam-search")["threads"].items():
        for how, rows in both.items():
            count = f"{rows['regard']['sentences']} sentences {how}"
            what = f"beam search of a translator, {count}, {threads} thread{'s' * (threads != '1')}, float32"
            yield Line(what, ratio(rows["regard"]["speed"]), "CTranslate2")


def _encoders(rows: list[dict[str, Any]]) -> Iterator[Line]:
    """Yield the best pretrained model of each task, and the best of all models without pretraining."""
    for task, (name, _, published) in TASKS.items():
        means: dict[tuple[str, str], float] = {}
        for model, start in {(row["model"], row["start"]) for row in rows if row["task"] == task}:
            found = [
                row["accuracy"] for row in rows if (row["model"], row["task"], row["start"]) == (model, task, start)
            ]
            means[model, start] = 100 * statistics.mean(found)
        learned = {each: mean for each, mean in means.items() if each[1] != "random"}
        if not learned:
            continue
        model, start = max(learned, key=lambda each: learned[each])
        plain = {each: mean for (each, how), mean in means.items() if how == "random"}
        best = max(plain, key=plain.__getitem__, default="")
        without = f"without pretraining: {plain[best]:.1f} % (`{best}`); " if best else ""
        result = f"{learned[model, start]:.1f} % ({RECIPES[model]}; {STARTS[start]})"
        yield Line(f"{name}: accuracy of a small pretrained model", result, f"{without}{published}")


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found
