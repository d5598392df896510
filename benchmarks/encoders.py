"""What pretraining gives a small encoder: labels of texts, with and without it.

    python -m benchmarks.encoders --imdb FOLDER --tasks FOLDER [--seeds 3] [--only sst2 trec imdb]

--imdb is the Large Movie Review Dataset (train, valid, test.tsv.gz, unlabelled.txt.gz), --tasks a folder of sst2 and
trec in the same form: a text, a tab, a label. A model learns from the reviews to learn from and those without labels,
from masked tokens (``recipes/imdb-encoder.toml``), in ``build/``, where it goes on where it was stopped; each task is
then learned from there and from random numbers, with the same settings and several seeds. What is told is the accuracy
on the test lines, its mean and how far seeds are apart.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import statistics
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import ROOT, facts
from regard.data.labelled import read_labelled
from regard.data.toml import read_toml
from regard.language.classification_options import ClassificationOptions
from regard.language.fine_tuning import FineTuning
from regard.language.options import LanguageOptions
from regard.language.pretraining import Pretraining
from regard.models import EncoderLM, load

RECIPE = ROOT / "recipes/imdb-encoder.toml"
RESULTS = ROOT / "benchmarks/results/encoders.json"
#: Settings of short texts.
SHORT: dict[str, Any] = {
    "data": {"length": 64},
    "model": {"dropout": 0.1},
    "training": {"epochs": 3.0, "learning_rate": 5e-4, "threads": 1},
}
#: Of each task: its name, settings of all models, and what was published (Kim 2014; Turc 2019; Wang 2012).
TASKS: dict[str, tuple[str, dict[str, Any], str]] = {
    "sst2": ("SST-2, whole sentences", SHORT, "BERT-Mini 85.9, Kim's CNN 83.5 to 87.0"),
    "trec": ("TREC, six labels", SHORT | {"training": SHORT["training"] | {"epochs": 6.0}}, "Kim's CNN 92.8"),
    "imdb": ("IMDB", {"model": SHORT["model"], "training": SHORT["training"]}, "NB-SVM 91.2"),
}


def pretrain(imdb: Path, folder: Path) -> None:
    """Train the encoder by its recipe, or go on."""
    text = folder.with_suffix(".txt")
    if not text.exists():
        text.parent.mkdir(parents=True, exist_ok=True)
        with text.open("w", encoding="utf-8") as file:
            file.writelines(f"{each}\n" for each in read_labelled(imdb / "train.tsv.gz").texts)
            file.write(gzip.decompress((imdb / "unlabelled.txt.gz").read_bytes()).decode())
    if (folder / "checkpoints/last.ckpt").exists():
        if not (folder / "config.json").exists():
            Pretraining.resumed(folder, {}).train(resume=True)
    else:
        table = read_toml(RECIPE)
        table["data"] |= {"data": [str(text)]}
        Pretraining(LanguageOptions.from_table(table), folder).train()


def tuned(task: str, data: Path, start: Path, seed: int, with_start: bool) -> dict[str, Any]:
    """Return what a classifier reaches on a task, begun with the encoder or with random numbers of its shape."""
    valid, changes = data / f"{task}.valid.tsv.gz", json.loads(json.dumps(TASKS[task][1]))
    if task == "imdb":
        files = {"data": str(data / "train.tsv.gz"), "valid": str(data / "valid.tsv.gz")}
        test = data / "test.tsv.gz"
    else:
        files = {"data": str(data / f"{task}.train.tsv.gz")} | ({"valid": str(valid)} if valid.exists() else {})
        test = data / f"{task}.test.tsv.gz"
    encoder = load(start)
    assert isinstance(encoder, EncoderLM)
    changes["data"] = changes.get("data", {}) | files
    changes["training"] = changes.get("training", {}) | {"seed": seed}
    if with_start:
        changes["start"] = str(start)
    else:
        fields = asdict(encoder.config) | changes.get("model", {})
        changes["model"] = {k: v for k, v in fields.items() if v is not None and k not in ("vocabulary", "masked_head")}
        changes["tokenizer"] = {"kind": str(start)}
    folder = ROOT / "build/encoders" / f"{task}-{'pretrained' if with_start else 'random'}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    classifier, ended = FineTuning(ClassificationOptions.from_table(changes), folder).train()
    lines = read_labelled(test)
    named = classifier.probabilities(classifier.read(lines.texts)).argmax(1)
    right = named == torch.from_numpy(lines.numbers(list(classifier.labels)))
    row = {"task": task, "pretrained": with_start, "seed": seed, "accuracy": float(right.double().mean())}
    return row | {"minutes": ended.seconds / 60}


def report(result: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    assert __doc__ is not None
    lines = ["# What pretraining gives a small encoder", "", __doc__.partition("\n\n")[2].partition("\n\n")[2].strip()]
    lines += ["", result["encoder"], "", "| task | pretrained | from random numbers | published of others |"]
    lines += ["| --- | --- | --- | --- |"]
    for task, (name, _, published) in TASKS.items():
        cells = []
        for with_start in (True, False):
            found = [row for row in result["rows"] if (row["task"], row["pretrained"]) == (task, with_start)]
            accuracies = [100 * row["accuracy"] for row in found]
            if not found:
                cells.append("not run")
                continue
            apart = f", {min(accuracies):.1f} to {max(accuracies):.1f}" if len(found) > 1 else ""
            minutes = statistics.median(row["minutes"] for row in found)
            seeds = f"{len(found)} seed{'s' * (len(found) > 1)}"
            cells.append(f"**{statistics.mean(accuracies):.1f} %** ({seeds}{apart}; {minutes:.0f} min each)")
        lines.append(f"| {name} | {' | '.join(cells)} | {published} |")
    machine = result["machine"]
    return "\n".join([*lines, "", f"{machine['CPU']}, {machine['cores']} cores, {result['date']}"]) + "\n"


def main(arguments: list[str]) -> None:
    """Pretrain, fine-tune, and write the report."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--imdb", type=Path, required=True)
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    start = ROOT / "build" / RECIPE.stem
    pretrain(given.imdb, start)
    rows = json.loads(given.out.read_text(encoding="utf-8"))["rows"] if given.out.exists() else []
    steps = Pretraining.resumed(start, {}, lambda _: None).options
    encoder = load(start)
    size = sum(each.numel() for each in encoder.parameters())
    told = f"{encoder.config.layers} layers × {encoder.config.width}, {size / 1e6:.1f} M parameters; masked tokens"
    result = {"encoder": f"{told} for {steps.training.seconds / 60:.0f} minutes.", "machine": facts()}
    for seed in range(1, given.seeds + 1):
        for task in given.only:
            for with_start in (True, False):
                made = (task, with_start, seed)
                rows = [each for each in rows if (each["task"], each["pretrained"], each["seed"]) != made]
                rows.append(tuned(task, given.imdb if task == "imdb" else given.tasks, start, seed, with_start))
                result |= {"rows": rows, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
                given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
                given.out.with_suffix(".md").write_text(report(result), encoding="utf-8")
    print(report(result))


if __name__ == "__main__":
    main(sys.argv[1:])
