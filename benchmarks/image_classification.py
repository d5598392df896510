"""How well small classifiers of images do on Fashion-MNIST, and whether attention helps a residual network.

    python -m benchmarks.image_classification [--data /usr/share/datasets/fashion-mnist] [--only transformer networks]
                                              [--attention se] [--seeds 3]

--data has the four files of Fashion-MNIST, as installed by Debian's package dataset-fashion-mnist. A compact
convolutional transformer is trained with ``recipes/fashion-mnist-transformer.toml``. Small residual networks are
trained with ``recipes/fashion-mnist-networks.toml`` and several seeds, with attention and without; without, blocks are
wider, so that both have as many parameters. Runs are kept in ``build/image-classification`` and resume there. Accuracy
is on the 10,000 test images. The transformer averages its probabilities for an image and its mirror image.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import ROOT, facts
from regard_lab.data import read_labelled_images, read_toml
from regard_lab.models import ResNet, ResNetConfig
from regard_lab.tasks.classification import (
    ImageClassificationOptions,
    ImageClassificationPipeline,
    ImageTraining,
    classification_metrics,
)

RUNS, RESULTS = ROOT / "build/image-classification", ROOT / "benchmarks/results/image-classification.json"
LEARN, TEST = "train-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte.gz"
#: Accuracy of the transformer in % below which the exit code is 1, and its parameters at most.
LEAST, MOST = 94.5, 500_000


def trained(recipe: str, name: str, data: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Train a classifier or resume its training, and return its accuracy."""
    folder = RUNS / name
    if (folder / "checkpoints/last.ckpt").exists():
        classifier, ended = ImageTraining.resumed(folder, {}).train(resume=True)
    else:
        table = read_toml(ROOT / f"recipes/{recipe}.toml")
        for section, values in changes.items():
            table[section] = (table.get(section, {}) | values) if isinstance(values, dict) else values
        table.setdefault("data", {})["images"] = str(data / LEARN)
        classifier, ended = ImageTraining(ImageClassificationOptions.from_table(table), folder).train()
    found = {"name": name, "recipe": recipe, "steps": ended.steps, "minutes": ended.seconds / 60}
    return found | scores(classifier, data)


def scores(classifier: ImageClassificationPipeline, data: Path) -> dict[str, Any]:
    """Return how well a classifier names the test images, and how large it is."""
    images = read_labelled_images(data / TEST, classifier.preprocessing)
    true, K = images.numbers(classifier.labels), len(classifier.labels)
    named = classifier.probabilities(images.pixels).argmax(1).numpy()
    measures = classification_metrics(np.bincount(K * true + named, minlength=K * K).reshape(K, K), classifier.labels)
    count = sum(each.numel() for each in classifier.model.parameters())
    found = {"accuracy": measures["accuracy"], "f1": measures["f1"], "parameters": count}
    if classifier.preprocessing.flip_test:
        plain = ImageClassificationPipeline(classifier.model, replace(classifier.preprocessing, flip_test=False))
        found["plain"] = float((plain.probabilities(images.pixels).argmax(1).numpy() == true).mean())
    return found


def widened(attention: str) -> dict[str, Any]:
    """Return the fields of a network without attention that has as many parameters, most nearly, as one with it."""
    table = read_toml(ROOT / "recipes/fashion-mnist-networks.toml")
    config = ResNetConfig.preset(table["preset"], **{"channels": 1} | table.get("model", {}))

    def size(changed: ResNetConfig) -> int:
        return sum(each.numel() for each in ResNet(changed).parameters())

    wanted = size(replace(config, attention=attention))
    steps = [round(1 + i / 256, 4) for i in range(128)]
    best = min(steps, key=lambda each: abs(size(replace(config, expansion=each)) - wanted))
    return {"attention": "none", "expansion": best}


def summary(result: dict[str, Any]) -> str:
    """Return the results as tables of Markdown."""
    rows = list(result["rows"].values())
    lines: list[str] = []
    if row := result["rows"].get("transformer"):
        lines += ["| compact convolutional transformer | |", "| --- | ---: |"]
        lines += [f"| test accuracy | **{100 * row['accuracy']:.2f} %** |"]
        lines += [f"| test accuracy without mirror images | {100 * row['plain']:.2f} % |"]
        lines += [f"| macro F1 | {100 * row['f1']:.2f} % |"]
        lines += [f"| parameters | {row['parameters']:,} |"]
        lines += [f"| training | {row['steps']:,} steps, {row['minutes']:.0f} minutes |", ""]
    networks = [row for row in rows if row["recipe"] == "fashion-mnist-networks"]
    if networks:
        lines += _networks(networks)
    machine = result["machine"]
    lines += [f"{machine['CPU']} ({machine['vector instructions']}), one thread of a busy machine, {result['date']}."]
    return "\n".join(lines)


def _networks(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of networks with attention and without, and their difference seed by seed."""
    seeds = sorted({row["seed"] for row in rows})
    lines = [
        f"| residual network, test accuracy | parameters | {' | '.join(f'seed {seed}' for seed in seeds)} | mean |"
    ]
    lines += ["| --- | ---: |" + " ---: |" * (len(seeds) + 1)]
    kinds = list(dict.fromkeys(row["attention"] for row in rows))
    found = {(row["attention"], row["seed"]): row for row in rows}
    for kind in kinds:
        own = [found.get((kind, seed)) for seed in seeds]
        cells = ["not run" if each is None else f"{100 * each['accuracy']:.2f} %" for each in own]
        done = [100 * each["accuracy"] for each in own if each is not None]
        size = next(each["parameters"] for each in own if each is not None)
        name = f"{kind}, wider blocks" if kind == "none" else kind
        lines += [f"| {name} | {size:,} | {' | '.join(cells)} | {statistics.mean(done):.2f} % |"]
    for kind in kinds:
        pairs = [(found.get((kind, seed)), found.get(("none", seed))) for seed in seeds]
        apart = [100 * (a["accuracy"] - b["accuracy"]) for a, b in pairs if a is not None and b is not None]
        if kind != "none" and apart:
            spread = f", from {min(apart):+.2f} to {max(apart):+.2f}" if len(apart) > 1 else ""
            deviation = f", standard deviation {statistics.stdev(apart):.2f}" if len(apart) > 1 else ""
            mean = round(statistics.mean(apart), 2) + 0.0
            lines += ["", f"{kind} − none, seed by seed: {mean:+.2f} points{spread}{deviation}.", ""]
    return lines


def report(result: dict[str, Any]) -> str:
    """Return the results as a page of Markdown."""
    assert __doc__ is not None
    rest = __doc__.partition("\n\n")[2].partition("\n\n")[2].strip()
    return f"# Fashion-MNIST\n\n{rest}\n\n{summary(result)}\n"


def good(result: dict[str, Any]) -> bool:
    """Return whether the transformer is as accurate and as small as it was before."""
    row = result["rows"].get("transformer")
    return row is None or (100 * row["accuracy"] >= LEAST and row["parameters"] <= MOST)


def write(out: Path, row: dict[str, Any]) -> None:
    """Put a row into the results, in place of one of its name."""
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"rows": {}}
    result["rows"][row["name"]] = row
    result |= {"machine": facts(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(report(result), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Train, score, and write the report; return 1 where the transformer is worse than before."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--only", nargs="+", choices=["transformer", "networks"], default=["transformer", "networks"])
    parser.add_argument("--attention", nargs="+", default=["se"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    if "transformer" in given.only:
        write(given.out, trained("fashion-mnist-transformer", "transformer", given.data, {}))
    for seed in range(1, given.seeds + 1) if "networks" in given.only else ():
        for attention in (*given.attention, "none"):
            model = widened(given.attention[0]) if attention == "none" else {"attention": attention}
            changes = {"model": model, "training": {"seed": seed}}
            row = trained("fashion-mnist-networks", f"{attention}-{seed}", given.data, changes)
            write(given.out, row | {"attention": attention, "seed": seed})
    print(given.out.with_suffix(".md").read_text(encoding="utf-8"))
    return int(not good(json.loads(given.out.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
