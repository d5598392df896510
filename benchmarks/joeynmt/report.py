"""What was found, in words and numbers."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.joeynmt.shapes import SHAPES
from benchmarks.machine import slug

#: How many times JoeyNMT's rate regard's is to be.
TARGETS = {"training": 2.0, "translation": 4.0}
LEGEND = """\
Contenders had the same batches in the same order, took turns (A B A B …) as processes of their own that stayed alive,
and had as many threads of torch. *rate* is that of the median round; *speed* is JoeyNMT's median time in float32 over
the contender's, with the smallest and largest ratio within a round. A first round of each did not count.

Training is each side's own loop: JoeyNMT's `TrainManager.train_and_validate` and the training loop of regard_lab (on
Lightning), with batches given ready-made, label smoothing 0.1, gradients clipped to norm 1, and AdamW. Tokens are those
of both sides that are no padding, targets with their end mark. Of the two, regard draws dropout also for the recurrent
encoder's states and the attentional vectors, and has an output bias; JoeyNMT starts the decoder's cells, too, from the
bridge, and counts correct symbols.

Translation is JoeyNMT's `search` as its `predict` calls it, and regard's `search`: sentences from long to short, 64 at
a time, 5 beams, length penalty 0.6, at most 1.5 times as many symbols as the longest source of a batch has (JoeyNMT's
default). Both had the same parameters, which regard learned first, and were timed only when their log-probabilities and
gradients agreed. The better a model, the earlier a search knows that it is done. *same* is the share of sentences that
are written as by JoeyNMT in float32: the searches differ in when they end, as JoeyNMT's goes on until each place of the
beam has ended once.

bfloat16 is that of matrix products, by autocast: regard's default in training where the processor multiplies it.
JoeyNMT's configuration switches its `fp16` off on a CPU; here its code was handed torch's autocast in spite of that.
"""


def markdown(tables: list[dict[str, Any]]) -> str:
    """Return the report."""
    machines = [table["machine"] for table in tables]
    machine = {name: value for name, value in machines[0].items() if all(each.get(name) == value for each in machines)}
    rows = [f"| {name} | {value} |" for name, value in machine.items()]
    out = [f"# Beside JoeyNMT on {machine['CPU']}", "", "| | |", "| --- | --- |", *rows, "", LEGEND]
    out += [
        "## Targets", "",
        "| | target | float32 | bfloat16 on both sides | bfloat16, over JoeyNMT in float32 | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    out += [_target(table) for table in tables]
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


def _target(table: dict[str, Any]) -> str:
    """Return how the target is met with equal precision, and by regard in bfloat16, in which it trains by default."""
    seconds, wanted = {row["contender"]: row["seconds"] for row in table["rows"]}, TARGETS[table["task"]]
    pairs = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"))
    found = [_ratio(seconds, f"regard, {ours}", f"JoeyNMT, {theirs}") for ours, theirs in pairs]
    cells = ["–" if each is None else f"{each:.2f}×" for each in found]
    plain, _, lower = (each is not None and each >= wanted for each in found)
    way = "the default, bfloat16" if table["task"] == "training" else "`--precision bfloat16`"
    told = "met" if plain else "**missed** with equal precision" + (f"; reached by {way}" if lower else "")
    return f"| {table['task']}, {table['shape']} | {wanted:g}× | {' | '.join(cells)} | {told} |"


def _ratio(seconds: dict[str, list[float]], ours: str, theirs: str) -> float | None:
    """Return how many times as fast the one is as the other, by their median rounds."""
    if not {ours, theirs} <= seconds.keys():
        return None
    return statistics.median(seconds[theirs]) / statistics.median(seconds[ours])


def _training(table: dict[str, Any]) -> list[str]:
    full = table["tokens"] / table["places"]
    out = [f"{table['batches']} batches a round, {table['tokens']:,} tokens, {full:.0%} of their places.", ""]
    out += ["| contender | parameters | tokens/s | speed |", "| --- | ---: | ---: | ---: |"]
    return out + [
        f"| {row['contender']} | {row['parameters']:,} | {_rate(row)} | {_speed(row)} |" for row in table["rows"]
    ]


def _translation(table: dict[str, Any]) -> list[str]:
    agreed = f"log-probabilities within {table['difference']:.0e}, norms of gradients within {table['gradient']:.0e}"
    out = [f"{table['sentences']:,} sentences a round. The same parameters gave {agreed}.", ""]
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
