"""What pretraining gives a small language model: labels of texts, with and without it.

    python -m benchmarks.encoders --imdb FOLDER --tasks FOLDER [--recipe imdb-decoder] [--seeds 3]
                                  [--only sst2 trec imdb] [--starts random pretrained imdb]

--imdb is the Large Movie Review Dataset (train, valid, test.tsv.gz, unlabelled.txt.gz), --tasks a folder with sst2 and
trec in the same format: text, tab, label. A model is pretrained on the training and the unlabelled reviews by a recipe:
masked tokens (``recipes/imdb-encoder.toml``), next tokens (``recipes/imdb-decoder.toml``), skip-gram, which trains the
embedding only (``recipes/imdb-vectors.toml``), or skip-gram followed by next tokens in both directions
(``recipes/imdb-both-ways.toml``). Runs are kept in ``build/`` and resume there. Task lines have spaces before
punctuation and inside words such as "did n't", unlike the reviews; these spaces are removed (the first two recipes were
measured before that). Each task is then trained from random weights, from the pretrained model, and from the pretrained
model after fine-tuning on the reviews' labels, with the same settings and several seeds. With the last two recipes,
convolutional filters over windows of tokens score the labels, and the last one keeps its blocks frozen; with the first
two, the maximum over rows does. With the last recipe, IMDB settings were chosen on 5,000 held-out reviews, and the
labels then learned from 99 in 100 of these and the other 20,000 (the published numbers use all 25,000); with the
earlier recipes, from 20,000. Accuracies are on the test lines: mean and range over seeds.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shutil
import statistics
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import ROOT, facts
from regard_lab.data import read_labelled, read_toml
from regard_lab.models import DecoderLM, EncoderLM, load
from regard_lab.tasks.classification import ClassificationOptions, FineTuning
from regard_lab.tasks.language import LanguageOptions, Pretraining
from regard_lab.training import is_bfloat16

RECIPES = {
    "imdb-encoder": "masked tokens",
    "imdb-decoder": "next tokens",
    "imdb-vectors": "skip-gram",
    "imdb-both-ways": "next tokens, both ways",
}
#: What a task is learned from, and its heading.
STARTS = {"random": "random weights", "pretrained": "pretrained", "imdb": "pretrained, then review labels"}
RESULTS = ROOT / "benchmarks/results/encoders.json"
#: What stands apart in the lines of tasks, and together in other texts.
_APART = ((r" (n't|'(?:s|re|ve|ll|d|m)\b|[.,;:!?%)\]])", r"\1"), (r"([(\[$]) ", r"\1"), (r"(``|'') ?", '"'))
#: Settings of short texts.
SHORT: dict[str, Any] = {
    "data": {"length": 64},
    "model": {"dropout": 0.1, "pooling": "max"},
    "training": {"epochs": 3.0, "learning_rate": 5e-4, "threads": 1},
}
#: The name of each task, the settings of all models, and published scores (Kim 2014; Turc 2019; Wang 2012).
TASKS: dict[str, tuple[str, dict[str, Any], str]] = {
    "sst2": ("SST-2, whole sentences", SHORT, "BERT-Mini 85.9, Kim's CNN 82.7 to 88.1"),
    "trec": ("TREC, six labels", SHORT | {"training": SHORT["training"] | {"epochs": 6.0}}, "Kim's CNN 91.2 to 93.6"),
    "imdb": (
        "IMDB",
        SHORT | {"data": {"length": 512}, "training": SHORT["training"] | {"epochs": 2.0}},
        "NB-SVM 91.2",
    ),
}
#: The filters of Kim 2014.
KIM: dict[str, Any] = {"filters": 100, "window": 5, "narrowest": 3, "means": False}
#: More settings for models of a recipe: convolution filters read word vectors without context.
BESIDE: dict[str, dict[str, dict[str, dict[str, Any]]]] = {
    "imdb-vectors": {
        "sst2": {"head": {"filters": 128}, "training": {"epochs": 5.0}},
        "trec": {
            "head": {"filters": 128},
            "training": {"epochs": 8.0, "learning_rate": 1e-3},
            "data": {"held_out": 0.05},
        },
        "imdb": {"head": {"filters": 128}, "training": {"epochs": 3.0}, "data": {"length": 1024}},
    },
    "imdb-both-ways": {
        "sst2": {"head": {"filters": 128, "both_ways": True}, "training": {"epochs": 5.0, "adversarial": 0.015}},
        "trec": {
            "head": KIM | {"both_ways": True},
            # Validated once, after 12 epochs of 104 batches: too few lines to choose the best epoch.
            "training": {
                "epochs": 12.0,
                "learning_rate": 1e-3,
                "batch_examples": 50,
                "adversarial": 0.015,
                "validate_every": 1248,
            },
            "data": {"held_out": 0.05},
        },
        "imdb": {
            # The model was pretrained on rows of 256 tokens, and has not learned to look farther back.
            "model": {"dropout": 0.0, "window": 256},
            "head": {"filters": 128, "both_ways": True, "dropout": 0.2},
            # Validated once, after two epochs of 774 batches.
            "training": {"epochs": 2.0, "learning_rate": 1e-3, "validate_every": 1548},
            "data": {"length": 1024, "held_out": 0.01},
        },
    },
}
#: What of a pretrained model learns, by its recipe, where it is not all: blocks that have learned language keep it.
TUNE = {"imdb-both-ways": "embedding"}


def settings(task: str, recipe: str) -> dict[str, Any]:
    """Return the settings of a task's classifiers on models of a recipe."""
    made: dict[str, Any] = json.loads(json.dumps(TASKS[task][1]))
    for section, values in BESIDE.get(recipe, {}).get(task, {}).items():
        made[section] = made.get(section, {}) | values
    if "head" in made:
        del made["model"]["pooling"]  # filters take the place of such a row
    return made


def pretrain(imdb: Path, folder: Path) -> None:
    """Train the model with the recipe named like the folder, or resume."""
    text = folder.with_name("imdb.txt")
    if not text.exists():
        text.parent.mkdir(parents=True, exist_ok=True)
        with text.open("w", encoding="utf-8") as file:
            file.writelines(f"{each}\n" for each in read_labelled(imdb / "train.tsv.gz").texts)
            file.write(gzip.decompress((imdb / "unlabelled.txt.gz").read_bytes()).decode())
    if (folder / "checkpoints/last.ckpt").exists():
        if not (folder / "config.json").exists():
            Pretraining.resumed(folder, {}).train(resume=True)
    else:
        table = read_toml(ROOT / f"recipes/{folder.name}.toml")
        table["data"] |= {"data": [str(text)]}
        Pretraining(LanguageOptions.from_table(table), folder).train()


def joined(source: Path, folder: Path) -> str:
    """Return the name of a file with the lines of another, in which words and marks stand as in other texts."""
    made = folder / source.name
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        text = gzip.decompress(source.read_bytes()).decode()
        for apart, together in _APART:
            text = re.sub(apart, together, text)
        made.write_bytes(gzip.compress(text.encode()))
    return str(made)


def together(sources: list[Path], made: Path) -> str:
    """Return the name of a file with the lines of several."""
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_bytes(b"".join(each.read_bytes() for each in sources))  # gzip reads members one after the other
    return str(made)


def tuned(task: str, data: Path, pretrained: Path, start: str, seed: int) -> dict[str, Any]:
    """Return the accuracy of a classifier on a task, initialized by one of STARTS."""
    valid, changes = data / f"{task}.valid.tsv.gz", settings(task, pretrained.name)
    folder = pretrained.with_name("tasks")
    if task == "imdb":
        files = {"data": str(data / "train.tsv.gz"), "valid": str(data / "valid.tsv.gz")}
        if "held_out" in changes["data"]:
            files = {"data": together([Path(each) for each in files.values()], folder / "imdb.tsv.gz")}
        test = data / "test.tsv.gz"
    else:
        files = {"data": joined(data / f"{task}.train.tsv.gz", folder)}
        files |= {"valid": joined(valid, folder)} if valid.exists() else {}
        test = Path(joined(data / f"{task}.test.tsv.gz", folder))
    changes["data"] |= files
    changes["training"]["seed"] = seed
    if start == "random":
        model = load(pretrained)
        assert isinstance(model, EncoderLM | DecoderLM)
        changes["kind"] = "encoder" if isinstance(model, EncoderLM) else "decoder"
        fields = asdict(model.config) | changes["model"]
        found = {"vocabulary", "masked_head"} | ({"pooling", "pooled"} if "head" in changes else set())
        changes["model"] = {k: v for k, v in fields.items() if v is not None and k not in found}
        changes["tokenizer"] = {"kind": str(pretrained)}
    else:
        changes["tune"] = TUNE.get(pretrained.name, "full")
        changes["start"] = str(pretrained if start == "pretrained" else place("imdb", pretrained, "pretrained", 1))
    folder = place(task, pretrained, start, seed)
    shutil.rmtree(folder, ignore_errors=True)
    classifier, ended = FineTuning(ClassificationOptions.from_table(changes), folder).train()
    lines = read_labelled(test)
    precision = "bfloat16" if is_bfloat16("auto") else "float32"  # as it was learned
    named = classifier.probabilities(classifier.read(lines.texts), precision=precision).argmax(1)
    right = named == torch.from_numpy(lines.numbers(list(classifier.labels)))
    found = {"model": pretrained.name, "task": task, "start": start, "seed": seed, "tokens": changes["data"]["length"]}
    return found | {"accuracy": float(right.double().mean()), "minutes": ended.seconds / 60}


def place(task: str, pretrained: Path, start: str, seed: int) -> Path:
    """Return the folder of a classifier."""
    return pretrained.with_name("encoders") / f"{pretrained.name}-{task}-{start}-{seed}"


def report(result: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    assert __doc__ is not None
    lines = ["# What pretraining gives a small language model", ""]
    lines += [__doc__.partition("\n\n")[2].partition("\n\n")[2].strip()]
    for recipe, facts_of in result["models"].items():
        lines += ["", f"## `recipes/{recipe}.toml`", "", facts_of["told"], ""]
        lines += [f"| task | {' | '.join(STARTS.values())} | published of others |", "| --- | --- | --- | --- | --- |"]
        for task, (name, _, published) in TASKS.items():
            cells = [_cell(result["rows"], recipe, task, start) for start in STARTS]
            lines.append(f"| {name} | {' | '.join(cells)} | {published} |")
        machine = facts_of["machine"]
        cores = f"{machine['cores']} core{'s' * (machine['cores'] != '1')}"
        processor = f"{machine['CPU']} ({machine['vector instructions']}), {cores}"
        lines += ["", f"{processor}, {facts_of['date']}"]
    return "\n".join(lines) + "\n"


def _cell(rows: list[dict[str, Any]], recipe: str, task: str, start: str) -> str:
    found = [row for row in rows if (row["model"], row["task"], row["start"]) == (recipe, task, start)]
    if not found:
        return "" if (task, start) == ("imdb", "imdb") else "not run"
    accuracies = [100 * row["accuracy"] for row in found]
    apart = f", {min(accuracies):.1f} to {max(accuracies):.1f}" if len(found) > 1 else ""
    minutes = statistics.median(row["minutes"] for row in found)
    seeds = f"{len(found)} seed{'s' * (len(found) > 1)}"
    most = max(row["tokens"] for row in found)
    return f"**{statistics.mean(accuracies):.1f} %** ({seeds}{apart}; at most {most} tokens; {minutes:.0f} min each)"


def described(recipe: str, folder: Path) -> dict[str, Any]:
    """Return a description of the pretrained model."""
    options, model = Pretraining.resumed(folder, {}, lambda _: None).options, load(folder)
    assert isinstance(model, EncoderLM | DecoderLM)
    size, ended = sum(each.numel() for each in model.parameters()), options.training.seconds / 60
    training = [f"{options.skip_gram.epochs} passes of skip-gram"] if options.skip_gram.epochs else []
    training += [f"{RECIPES[recipe]} for {ended:.0f} minutes"] if ended else []
    shape = f"{model.config.layers} layers × {model.config.width}, {size / 1e6:.1f} M parameters"
    description = f"{shape}; {', then '.join(training)}."
    return {"told": description, "machine": facts(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}


def main(arguments: list[str]) -> None:
    """Pretrain, fine-tune, and write the report."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--imdb", type=Path, required=True)
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--recipe", choices=list(RECIPES), default="imdb-decoder")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=["imdb", "sst2", "trec"])
    parser.add_argument("--starts", nargs="+", choices=list(STARTS), default=list(STARTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    pretrained = ROOT / "build" / given.recipe
    pretrain(given.imdb, pretrained)
    for seed in range(1, given.seeds + 1):
        for task in given.only:
            for start in given.starts:
                if task == start:
                    continue  # its labels again
                row = tuned(task, given.imdb if task == "imdb" else given.tasks, pretrained, start, seed)
                write(given.out, row, described(given.recipe, pretrained))
    print(given.out.with_suffix(".md").read_text(encoding="utf-8"))


def write(out: Path, row: dict[str, Any], model: dict[str, Any]) -> None:
    """Add a row and the description of its model to the results, replacing earlier ones."""
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"models": {}, "rows": []}
    keys = ("model", "task", "start", "seed")
    rows = [each for each in result["rows"] if any(each[key] != row[key] for key in keys)]
    result = {"models": result["models"] | {row["model"]: model}, "rows": [*rows, row]}
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(report(result), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
