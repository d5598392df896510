"""What language models were asked to reach, beside what was measured: the table of docs/language-models.md.

Everything is read from benchmarks/results, as the commands named there wrote it; why a number falls short stands here.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.encoders import RECIPES, STARTS, TASKS
from benchmarks.machine import ROOT

RESULTS = ROOT / "benchmarks/results"
#: nanoGPT's losses on tiny shakespeare: what a small model is to beat in twenty minutes, and its own best.
_SHAKESPEARE = {"shakespeare.toml": 1.60, "shakespeare-long.toml": 1.4697}
_ENCODERS = {"sst2": 85.9, "trec": 93.0, "imdb": 91.5}
#: Why a goal is missed, by its name.
WHY = {
    "training": "copies of keys and values for attention's kernel cost what it gains",
    "decoding": "products of matrices take four fifths of a step in both",
    "beam-search": "products of matrices take three quarters of the time in both; small operations between them are "
    "called one by one here",
}


@dataclass(frozen=True)
class Goal:
    """One line of the table."""

    what: str
    asked: str
    reached: str
    met: bool
    why: str = ""

    def __str__(self) -> str:
        reached = self.reached if self.met else f"**{self.reached}** (missed: {self.why})"
        return f"| {self.what} | {self.asked} | {reached} |"


def table() -> str:
    """Return the table, in Markdown."""
    return "\n".join(["| what | asked | reached |", "| --- | --- | --- |", *map(str, goals())])


def goals() -> Iterator[Goal]:
    """Yield what was asked, in order, of what was measured."""
    for run in _read("language-models")["runs"]:
        most = _SHAKESPEARE[run["recipe"]]
        what = f"tiny shakespeare, {run['minutes']:.0f} minutes, {run['parameters'] / 1e6:.1f} M parameters: nats"
        yield Goal(what, f"≤ {most:g}", f"{run['loss']:.4f}", run["loss"] <= most)
    if (RESULTS / "encoders.json").exists():
        yield from _encoders(_read("encoders")["rows"])
    for row in _read("language-training")["found"]:
        least = 1.15 if row["case"] == "packed documents" else 1.0
        what = f"training, {row['case']}, {row['dtype']}: tokens a second beside plain torch"
        yield Goal(what, f"≥ {least:g}×", f"{row['ratio']:.2f}×", round(row["ratio"], 2) >= least, WHY["training"])
    ours = [row for row in _read("decoding")["rows"] if row["contender"].startswith("regard, packed")]
    for row in ours:
        what = f"decoding, {row['model']}, batch {row['batch']}: tokens a second beside transformers"
        yield Goal(what, "≥ 1.2×", f"{row['ratio']:.2f}×", row["ratio"] >= 1.2, WHY["decoding"])
    for threads, rows in _read("beam-search")["threads"].items():
        speed = rows["regard"]["speed"]
        what = (
            f"beam search of a translator, {threads} thread{'s' * (threads != '1')}, float32: speed beside CTranslate2"
        )
        yield Goal(what, "≥ 1×", f"{speed:.2f}×", speed >= 1, WHY["beam-search"])


def _encoders(rows: list[dict[str, Any]]) -> Iterator[Goal]:
    for task, (name, _, _) in TASKS.items():
        means: dict[tuple[str, str], float] = {}
        for model, start in {(row["model"], row["start"]) for row in rows if row["task"] == task}:
            found = [
                row["accuracy"] for row in rows if (row["model"], row["task"], row["start"]) == (model, task, start)
            ]
            means[model, start] = 100 * statistics.mean(found)
        learned = {each: mean for each, mean in means.items() if each[1] != "random"}
        what, asked = f"{name}: accuracy of a small pretrained model", f"≥ {_ENCODERS[task]:g} %"
        if not learned:
            yield Goal(what, asked, "not run", False, "it takes longest, and there was no time for it")
            continue
        model, start = max(learned, key=lambda each: learned[each])
        plain = f"{means[model, 'random']:.1f} %" if (model, "random") in means else "not run"
        reached = f"{learned[model, start]:.1f} % ({RECIPES[model]}, {STARTS[start]}); without pretraining {plain}"
        met = learned[model, start] >= _ENCODERS[task]
        yield Goal(what, asked, reached, met, "" if met else WHY[task])


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found
