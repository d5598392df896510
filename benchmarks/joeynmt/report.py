"""What was found, in words and numbers."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.joeynmt.shapes import SHAPES
from benchmarks.machine import slug
from benchmarks.report import ratio

LEGEND = """\
Contenders get the same batches in the same order and the same number of torch threads. They take turns (A B A B …),
each in its own long-lived process; a first round is not counted. *speed* is JoeyNMT's median time in float32 over the
contender's, with the smallest and largest ratio within a round.

Training runs each side's own loop: JoeyNMT's `TrainManager.train_and_validate` and the training loop of regard_lab (on
Lightning), with prepared batches, label smoothing 0.1, gradients clipped to norm 1, and AdamW. Tokens are counted on
both sides without padding, with the end-of-sentence token on the decoder side. regard also applies dropout to the
recurrent encoder's states and the attentional vectors, and has an output bias; JoeyNMT also initializes the decoder's
cells from the bridge, and counts correct symbols.

Translation compares JoeyNMT's `search`, as its `predict` calls it, with regard's `search`: sentences from long to
short, 64 at a time, beam size 5, length penalty 0.6, at most 1.5 times as many symbols as the longest source in the
batch (JoeyNMT's default). Both use the same parameters, trained by regard, and are timed only if their
log-probabilities and gradients agree. Better models finish a search sooner. *same* is the share of sentences identical
to JoeyNMT's in float32; JoeyNMT stops later, once every place of the beam has finished.

bfloat16 means matrix products under autocast, regard's default in training on CPUs that support it. JoeyNMT's
configuration disables `fp16` on a CPU; here its code runs under torch's autocast anyway.
"""


def markdown(tables: list[dict[str, Any]]) -> str:
    """Return the report."""
    machines = [table["machine"] for table in tables]
    machine = {name: value for name, value in machines[0].items() if all(each.get(name) == value for each in machines)}
    rows = [f"| {name} | {value} |" for name, value in machine.items()]
    out = [f"# Translation: regard and JoeyNMT on {machine['CPU']}", "", "| | |", "| --- | --- |", *rows, "", LEGEND]
    out += [
        "## Summary", "",
        "| regard against JoeyNMT | both float32 | both bfloat16 | bfloat16 against float32 |",
        "| --- | ---: | ---: | ---: |",
    ]  # fmt: skip
    out += [_summary(table) for table in tables]
    for table in tables:
        out += ["", f"## {table['task'].capitalize()}, {table['shape']}", "", f"{SHAPES[table['shape']].title}.", ""]
        own = [f"{name}: {value}" for name, value in table["machine"].items() if name not in machine]
        out += [f"{'; '.join(own)}.", ""] if own else []
        out += [*_training(table)] if table["task"] == "training" else [*_translation(table)]
    return "\n".join(out) + "\n"


def _speed(row: dict[str, Any]) -> str:
    speed = row["speed"]
    return f"{speed['value']:.2f} ({speed['low']:.2f}–{speed['high']:.2f})"


def _rate(row: dict[str, Any]) -> str:
    rate = row["units"] / statistics.median(row["seconds"])
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _summary(table: dict[str, Any]) -> str:
    """Return the speed with equal precision, and of regard in bfloat16, in which it trains by default."""
    seconds = {row["contender"]: row["seconds"] for row in table["rows"]}
    pairs = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"))
    found = [_ratio(seconds, f"regard, {ours}", f"JoeyNMT, {theirs}") for ours, theirs in pairs]
    cells = ["–" if each is None else ratio(each) for each in found]
    return f"| {table['task']}, {table['shape']} | {' | '.join(cells)} |"


def _ratio(seconds: dict[str, list[float]], ours: str, theirs: str) -> float | None:
    """Return how many times as fast the one is as the other, by their median rounds."""
    if not {ours, theirs} <= seconds.keys():
        return None
    return statistics.median(seconds[theirs]) / statistics.median(seconds[ours])


def _training(table: dict[str, Any]) -> list[str]:
    full = table["tokens"] / table["places"]
    out = [f"{table['batches']} batches per round, {table['tokens']:,} tokens, {1 - full:.0%} padding.", ""]
    out += ["| contender | parameters | tokens/s | speed |", "| --- | ---: | ---: | ---: |"]
    return out + [
        f"| {row['contender']} | {row['parameters']:,} | {_rate(row)} | {_speed(row)} |" for row in table["rows"]
    ]


def _translation(table: dict[str, Any]) -> list[str]:
    agreed = f"log-probabilities within {table['difference']:.0e}, gradient norms within {table['gradient']:.0e}"
    out = [f"{table['sentences']:,} sentences per round. The two sides agree: {agreed}.", ""]
    out += ["| contender | sentences/s | speed | BLEU | same | symbols |"]
    out += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for row in table["rows"]:
        cells = [_rate(row), _speed(row), f"{row['bleu']:.2f}", f"{row['same']:.1%}"]
        out.append(f"| {row['contender']} | {' | '.join(cells)} | {table['lengths'][row['contender']]:.1f} |")
    return out


def write(table: dict[str, Any], folder: Path) -> list[Path]:
    """Write the report and the numbers with this table in place of an older one like it, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{slug(table['machine']['CPU'])}-joeynmt"
    text, raw = folder / f"{stem}.md", folder / f"{stem}.json"
    known = json.loads(raw.read_text(encoding="utf-8"))["tables"] if raw.exists() else []
    tables = {(each["task"], each["shape"]): each for each in (*known, table)}
    found = sorted(tables.values(), key=lambda each: (each["task"], list(SHAPES).index(each["shape"])))
    text.write_text(markdown(found), encoding="utf-8")
    raw.write_text(json.dumps({"tables": found}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return [text, raw]
