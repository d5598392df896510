"""What language models learn: tiny shakespeare by its characters, with the minutes that it took.

    python -m benchmarks.language_models --data SHAKESPEARE [--recipe recipes/shakespeare.toml] [--out FILE]

SHAKESPEARE is the text of 1,115,394 characters (gzip or not): nine tenths to train on, the rest to validate. Losses are
the mean cross-entropy per character in nats, on rows cut as in training, and on windows where every character sees at
least half a row of context. nanoGPT's published losses are on the same split. Runs are kept in ``build/`` and resume
there.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import ROOT, facts
from regard_lab.data.packing import StreamBatches, TokenShards
from regard_lab.models import DecoderLM, load
from regard_lab.tasks.language.options import LanguageOptions
from regard_lab.tasks.language.pretraining import VALID, NextTokens, Pretraining

#: Published in nanoGPT's README for its own settings: nats per character on the same split, and parameters.
NANOGPT = {"nanoGPT, CPU settings": (1.88, "0.80 M"), "nanoGPT, GPU settings": (1.4697, "10.65 M")}
RESULTS = ROOT / "benchmarks/results/language-models.json"


@torch.inference_mode()
def windowed(folder: Path, length: int) -> float:
    """Return the loss of every character, each seeing at least half a row before it."""
    model = load(folder)
    assert isinstance(model, DecoderLM)
    batches = StreamBatches(TokenShards.open(folder / VALID), length=length, rows=32)
    objective = NextTokens(separate=False)
    total, count = sum(objective.validation(model, batch) for batch in batches.once(length // 2)).tolist()
    return total / count


def learn(recipe: Path, data: Path, folder: Path) -> dict[str, Any]:
    """Train with a recipe or resume; return the results."""
    from regard_lab.data.toml import read_toml

    text = folder.with_suffix(".txt")
    if not text.exists():
        text.parent.mkdir(parents=True, exist_ok=True)
        raw = data.read_bytes()
        text.write_bytes(gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw)
    resume = (folder / "checkpoints/last.ckpt").exists()
    if resume:
        run = Pretraining.resumed(folder, {})
    else:
        table = read_toml(recipe)
        table["data"] |= {"data": [str(text)]}
        run = Pretraining(LanguageOptions.from_table(table), folder)
    model, ended = run.train(resume=resume)
    parameters = sum(each.numel() for each in model.parameters())
    row = {"recipe": recipe.name, "loss": ended.best, "windows": windowed(folder, run.options.data.length)}
    row |= {"minutes": ended.seconds / 60, "steps": ended.steps, "parameters": parameters}
    row |= {"width": model.config.width, "layers": model.config.layers, "length": run.options.data.length}
    return row | {"date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": facts()}


def report(rows: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    assert __doc__ is not None
    lines = ["# What language models learn", "", __doc__.partition("\n\n")[2].partition("\n\n")[2].strip(), ""]
    lines += ["| model | parameters | minutes | loss | in windows |", "| --- | ---: | ---: | ---: | ---: |"]
    for row in rows:
        shape = f"{row['layers']} layers × {row['width']}, rows of {row['length']} (`{row['recipe']}`)"
        counts = f"{row['parameters'] / 1e6:.2f} M | {row['minutes']:.0f}"
        lines.append(f"| {shape} | {counts} | **{row['loss']:.4f}** | {row['windows']:.4f} |")
    lines += [f"| {name} | {size} | | {loss} | |" for name, (loss, size) in NANOGPT.items()]
    machines = {
        f"{row['recipe']}: {row['machine']['CPU']}, {row['machine']['cores']} cores, {row['date']}" for row in rows
    }
    return "\n".join([*lines, "", *sorted(machines)]) + "\n"


def main(arguments: list[str]) -> None:
    """Train, evaluate, and write the report."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes/shakespeare.toml")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    row = learn(given.recipe, given.data, ROOT / "build" / given.recipe.stem)
    rows = json.loads(given.out.read_text(encoding="utf-8"))["runs"] if given.out.exists() else []
    rows = [each for each in rows if each["recipe"] != row["recipe"]] + [row]
    given.out.write_text(json.dumps({"runs": rows}, indent=1) + "\n", encoding="utf-8")
    given.out.with_suffix(".md").write_text(report(rows), encoding="utf-8")
    print(report(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
