"""How good captions are, where their words look, and how fast captioners learn.

    python -m benchmarks.captioning --data DIR [--runs build/captions] [--only soft hard] [features] [speed] [scores]
                                    [looks] [baselines]

DIR holds Flickr8k's published split (train, valid, test.tsv.gz) and images.tar. Captioners that are not in --runs yet
are trained first, by the commands that the report shows; a run that was stopped goes on. Results are kept in
benchmarks/results/captioning.json until the same is measured again, and captioning.md shows all of them.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.machine import ROOT, facts
from benchmarks.report import ratio
from benchmarks.show_attend_tell import ShowAttendTell, step
from benchmarks.where_looked import Look, looks_of
from regard_lab.data import CaptionBatches, FeatureGrids, open_images, read_captions, resize_image
from regard_lab.generation import PredictionOptions, SearchOptions
from regard_lab.models import RecurrentCaptioner, RecurrentCaptionerConfig
from regard_lab.tasks.captioning import (
    EFFICIENTNETS,
    CaptionAttention,
    Captioner,
    Features,
    caption_scores,
    caption_words,
    efficientnet_file,
    open_encoder,
    save_captions,
    word_weights,
    write_features,
)
from regard_lab.training import Seq2SeqObjective

RESULTS = ROOT / "benchmarks" / "results" / "captioning.json"


class Model(NamedTuple):
    """What a recipe trains: its title, the model to start from, and the BLEU-4 below which the exit code is 1."""

    title: str
    start: str = ""
    least: float = 0.0


MODELS = {
    "soft": Model("soft attention"),
    "soft-rewards": Model("soft attention, from scores", "soft", 22.0),
    "hard": Model("hard attention", "soft"),
    "hard-rewards": Model("hard attention, from scores", "hard", 22.0),
    "transformer": Model("Transformer decoder"),
    "transformer-rewards": Model("Transformer decoder, from scores", "transformer", 23.0),
}
#: The search that validation chose among 3, 5 and 8 beams and penalties of 0.6, 1 and 1.4.
SEARCH = SearchOptions(beams=5, length_penalty=1.0, max_length=40)
#: Captions whose words are looked at, rounds of a timing, and steps of a round.
LOOKED, ROUNDS, STEPS = 50, 5, 3


class Bench:
    """What the measurements share: data, features and results.

    Parameters
    ----------
    data, runs : Path
    only : sequence of str
        Of :data:`MODELS`.
    """

    def __init__(self, data: Path, runs: Path, only: Sequence[str] = tuple(MODELS)) -> None:
        self.data, self.runs, self.only = data, runs, only
        self.features = runs / "flickr8k.features"
        self.results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}

    def keep(self, name: str, value: Any) -> None:
        """Keep a result, and write all of them."""
        self.results[name] = value
        self.results["machine"] = facts() | {"date": datetime.date.today().isoformat()}
        RESULTS.write_text(json.dumps(self.results, indent=1, ensure_ascii=False) + "\n")
        RESULTS.with_suffix(".md").write_text(report(self.results))

    def command(self, name: str) -> list[str]:
        """Return the command that trains a captioner."""
        words = ["regard", "train", "captioner", "--data", "train.tsv.gz", "--valid", "valid.tsv.gz"]
        words += ["--images", "images.tar", "--features", self.features.name]
        words += ["--options", f"recipes/captions-{name}.toml", "--out", f"captions-{name}"]
        start = MODELS[name].start
        return [*words, "--start", f"captions-{start}"] if start else words

    def model(self, name: str) -> Captioner:
        """Return a captioner, which is trained where it is not there."""
        folder = self.runs / f"captions-{name}"
        if not (folder / "config.json").exists():
            start = MODELS[name].start
            if start:
                self.model(start)
            files = {each: str(self.data / each) for each in ("train.tsv.gz", "valid.tsv.gz", "images.tar")}
            files |= {f"recipes/captions-{name}.toml": str(ROOT / "recipes" / f"captions-{name}.toml")}
            files |= {
                each: str(self.runs / each) for each in (self.features.name, f"captions-{name}", f"captions-{start}")
            }
            words = [files.get(word, word) for word in self.command(name)[1:]]
            resumed = [*words[:2], "--out", str(folder), "--resume"] if (folder / "checkpoints").exists() else words
            subprocess.run([sys.executable, "-m", "regard_cli", *resumed], check=True)
        return Captioner.load(folder)

    def split(self, name: str) -> dict[str, list[str]]:
        """Return the captions of each image of a split, as people wrote them."""
        captions: dict[str, list[str]] = {}
        with gzip.open(self.data / f"{name}.tsv.gz", "rt", encoding="utf-8") as lines:
            for line in lines:
                image, text = line.rstrip("\n").split("\t")
                captions.setdefault(image, []).append(text)
        return captions

    def grids(self, captioner: Captioner, names: list[str]) -> torch.Tensor:
        """Return the features of images."""
        kept = Features.load(self.features, captioner.encoder)
        at = {name: row for row, name in enumerate(kept.names)}
        return torch.from_numpy(kept.values[[at[name] for name in names]])


def features(bench: Bench) -> None:
    """Time the features of all images by the smallest encoder."""
    encoder = open_encoder(EFFICIENTNETS[0])
    path = bench.runs / f"{encoder.kind}.features"
    bench.runs.mkdir(parents=True, exist_ok=True)
    with open_images(bench.data / "images.tar") as images:
        began, used = time.monotonic(), time.process_time()
        write_features(path, images, images.names, encoder)
        wall, processor = time.monotonic() - began, time.process_time() - used
    numbers = {"images": len(images), "seconds": round(wall, 1), "processor seconds": round(processor, 1)}
    bench.keep("features", numbers | {"MB": round(path.stat().st_size / 1e6)})


def speed(bench: Bench) -> None:
    """Time training against a plain implementation, on the same batches of the same features, on one core.

    Seconds are the processor's: others may be at work.
    """
    torch.set_num_threads(1)
    captioner = bench.model("soft")
    encoder, vocabulary = captioner.encoder, captioner.vocabulary
    kept = Features.load(bench.features, encoder)
    pairs = read_captions(str(bench.data / "train.tsv.gz"), words=17)
    number = {name: row for row, name in enumerate(dict.fromkeys(pairs.sources))}
    at = {name: row for row, name in enumerate(kept.names)}
    grids = FeatureGrids(kept.values, np.array([at[name] for name in number]), kept.rows, kept.cols)
    owners = np.array([number[name] for name in pairs.sources])
    batches = CaptionBatches(grids, vocabulary.encode_all(pairs.targets), owners, size=16, each=5)
    size = len(vocabulary)
    config: dict[str, Any] = {
        "decoder": 256,
        "states": 384,
        "dropout": 0.3,
        "glimpse": False,
        "places": encoder.rows * encoder.cols,
    }
    ours = RecurrentCaptioner(RecurrentCaptionerConfig(encoder.width, size, **config)).train()
    plain = ShowAttendTell(encoder.width, size, 256, 256, 256).train()
    objective = Seq2SeqObjective(1.0, 0.1, guided="attention", coverage=0.5)
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-3, fused=True) for each in (ours, plain)]

    def learn(batch: Any) -> None:
        optimizers[0].zero_grad()
        objective.loss(ours, batch).value.backward()
        torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
        optimizers[0].step()

    taken: dict[str, list[float]] = {"ours": [], "plain": []}
    for turn in range(ROUNDS + 1):
        some = [batches.batch(turn * STEPS + each) for each in range(STEPS)]
        runs: dict[str, Callable[[Any], Any]] = {"ours": learn, "plain": lambda each: step(plain, optimizers[1], each)}
        for name, run in runs.items():
            began = time.process_time()
            for batch in some:
                run(batch)
            if turn:  # the first warms up
                taken[name].append((time.process_time() - began) / STEPS)
    middle = {name: statistics.median(each) for name, each in taken.items()}
    ratios = [other / mine for mine, other in zip(taken["ours"], taken["plain"])]
    bench.keep("speed", {
        "images a second": {name: round(16 / each, 1) for name, each in middle.items()},
        "ratio": round(statistics.median(ratios), 2), "ratios": [round(each, 2) for each in sorted(ratios)],
    })  # fmt: skip


def scored(written: list[str], references: list[list[str]]) -> dict[str, float]:
    """Return all scores, METEOR among them where there is Java."""
    scores = caption_scores(written, references)
    del scores["bleu"]
    try:
        from pycocoevalcap.meteor.meteor import Meteor

        ours = {i: [" ".join(caption_words(text))] for i, text in enumerate(written)}
        theirs = {i: [" ".join(caption_words(text)) for text in each] for i, each in enumerate(references)}
        scores["meteor"] = 100 * Meteor().compute_score(theirs, ours)[0]
    except (ImportError, OSError) as error:
        print(f"METEOR is left out: {error}", file=sys.stderr)
    scores["words"] = statistics.mean(len(caption_words(text)) for text in written)
    return {name: round(value, 2) for name, value in scores.items()}


def scores(bench: Bench) -> None:
    """Score the captions that beam search writes for the test images."""
    test = bench.split("test")
    for name in bench.only:
        captioner = bench.model(name)
        grids = bench.grids(captioner, list(test))
        written = captioner.caption(grids, list(test), PredictionOptions(SEARCH))
        found = scored([each.text for each in written], list(test.values()))
        about = captioner.about["training"]
        parameters = sum(each.numel() for each in captioner.model.parameters())
        bench.keep(f"scores {name}", {
            "scores": found, "parameters": parameters, "steps": about["steps"],
            "minutes": round(about["seconds"] / 60, 1), "seed": about["seed"],
            "command": shlex.join(bench.command(name)),
            "search": f"{SEARCH.beams} beams, length penalty {SEARCH.length_penalty:g}",
        })  # fmt: skip


def baselines(bench: Bench) -> None:
    """Score what people wrote against the other four captions, and captions of random images."""
    test = bench.split("test")
    human = [texts[0] for texts in test.values()]
    bench.keep("scores human", {"scores": scored(human, [texts[1:] for texts in test.values()])})
    others = [text for texts in bench.split("train").values() for text in texts]
    drawn = random.Random(0).sample(others, len(test))
    bench.keep("scores random", {"scores": scored(drawn, list(test.values()))})


def looks(bench: Bench) -> None:
    """Judge where colour and object words look, in captions of test images; draw the ten worst of soft attention."""
    test = list(bench.split("test"))
    random.Random(0).shuffle(test)
    with open_images(bench.data / "images.tar") as images:
        for name in bench.only:
            captioner = bench.model(name)
            classifier = torch.load(efficientnet_file(captioner.encoder.kind), weights_only=True)["_fc.weight"]
            grids = bench.grids(captioner, test)
            found: list[Look] = []
            drawn: dict[str, CaptionAttention] = {}
            for row, (image, grid) in enumerate(zip(test, grids)):
                (made,) = captioner.caption(grid[None], [image], PredictionOptions(SEARCH, alignment=True))
                if not made.words or made.alignment is None:
                    continue
                pixels = resize_image(images.read(image), captioner.encoder.side)
                some = looks_of(captioner, made, grid, pixels, classifier, row)
                found += some
                if some:
                    words = tuple(each.text for each in made.words)
                    shape = (captioner.encoder.rows, captioner.encoder.cols)
                    drawn[image] = CaptionAttention(
                        pixels, words, word_weights(made), shape, made.text, name.startswith("hard")
                    )
                if len(drawn) == LOOKED:
                    break
            worst = sorted(found, key=lambda each: each.on_it - each.mean)[:10]
            shown = [_titled(drawn[each.image], each) for each in worst]
            save_captions(shown, bench.runs / f"worst-{name}.png", dpi=70)
            bench.keep(f"looks {name}", judged(found) | {"worst": [asdict(each) for each in worst]})


def _titled(drawn: CaptionAttention, look: Look) -> CaptionAttention:
    title = f"{look.word}: {look.on_it:.2f}, mean word {look.mean:.2f} — {drawn.title}"
    return CaptionAttention(drawn.image, drawn.words, drawn.weights, drawn.grid, title, drawn.sharp)


def judged(found: list[Look]) -> dict[str, Any]:
    """Return the means of looks, by kind."""
    made: dict[str, Any] = {"captions": len({each.image for each in found})}
    for kind in ("colour", "object"):
        some = [each for each in found if each.kind == kind]
        if some:
            made[kind] = {
                "words": len(some),
                "on it": round(statistics.mean(each.on_it for each in some), 3),
                "mean word": round(statistics.mean(each.mean for each in some), 3),
                "more than the mean word": round(statistics.mean(each.on_it > each.mean for each in some), 3),
                "falls without attended": round(statistics.mean(each.attended for each in some), 3),
                "falls without others": round(statistics.mean(each.others for each in some), 3),
            }
    return made


COLUMNS = {"bleu1": "BLEU-1", "bleu2": "BLEU-2", "bleu3": "BLEU-3", "bleu4": "BLEU-4", "meteor": "METEOR",
           "rouge": "ROUGE-L", "cider": "CIDEr-D", "chrf": "chrF2", "words": "words"}  # fmt: skip


def table(results: dict[str, Any]) -> str:
    """Return the table of scores."""
    lines = ["| captions by | " + " | ".join(COLUMNS.values()) + " |", "| --- |" + " ---: |" * len(COLUMNS)]
    rows = {name: model.title for name, model in MODELS.items()}
    rows |= {"human": "a person, against the other four", "random": "random captions of other images"}
    for name, title in rows.items():
        if f"scores {name}" in results:
            found = results[f"scores {name}"]["scores"]
            lines.append(f"| {title} | {' | '.join(str(found.get(each, '–')) for each in COLUMNS)} |")
    return "\n".join(lines)


def good(results: dict[str, Any]) -> bool:
    """Return whether captioners are as good as they were before."""
    found = {name: results[f"scores {name}"]["scores"] for name in MODELS if f"scores {name}" in results}
    return all(scores["bleu4"] >= MODELS[name].least for name, scores in found.items())


def looked(results: dict[str, Any]) -> str:
    """Return the table of where words looked."""
    lines = ["| model | words | count | attention on the named thing | mean word | words above the mean | "
             "drop in log p without attended places | without others |", "| --- | --- |" + " ---: |" * 6]  # fmt: skip
    for name, model in MODELS.items():
        for kind in ("colour", "object"):
            each = results.get(f"looks {name}", {}).get(kind)
            if each:
                lines.append(f"| {model.title} | {kind} | {each['words']} | {each['on it']:.3f} | "
                             f"{each['mean word']:.3f} | "
                             f"{each['more than the mean word']:.0%} | {each['falls without attended']:.2f} | "
                             f"{each['falls without others']:.2f} |")  # fmt: skip
    return "\n".join(lines)


def costs(results: dict[str, Any]) -> str:
    """Return what features and training cost."""
    lines = []
    if each := results.get("features"):
        used = f"{each['seconds']:g} s ({each['processor seconds']:g} CPU seconds)"
        name = "EfficientNet-Lite0's features"
        lines.append(f"- {name} of {each['images']:,} images: {used}, {each['MB']:,} MB.")
    if each := results.get("speed"):
        rates, ratios = each["images a second"], each["ratios"]
        lines.append(
            f"- Training, 16 images with five captions each: {rates['ours']:g} images/s on one core, "
            f"{ratio(each['ratio'])} than the {rates['plain']:g} images/s of a plain PyTorch implementation of Xu 2015 "
            f"on the same features (rounds from {ratios[0]:g} to {ratios[-1]:g})."
        )
    for name, model in MODELS.items():
        if each := results.get(f"scores {name}"):
            lines.append(
                f"- {model.title}: {each['parameters']:,} parameters, {each['steps']:,} steps in "
                f"{each['minutes']:g} minutes on a busy machine, seed {each['seed']}, "
                f"{each['search']}: `{each['command']}`"
            )
    return "\n".join(lines)


def goodness(results: dict[str, Any]) -> str:
    """Return the scores, and what features and training cost."""
    machine = results["machine"]
    where = f"{machine['CPU']}, {machine['cores']} cores; {machine['date']}."
    return "\n\n".join([table(results), costs(results), where])


def report(results: dict[str, Any]) -> str:
    """Return the report in Markdown."""
    return "\n\n".join(["# Captions of Flickr8k's test images", goodness(results), looked(results)]) + "\n"


JOBS = {"features": features, "speed": speed, "scores": scores, "looks": looks, "baselines": baselines}


def main() -> int:
    """Run the given jobs, all by default; return 1 where a captioner is worse than before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "flickr8k")
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "captions")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), help="captioners, all by default")
    parser.add_argument("jobs", nargs="*", choices=[*JOBS, []], metavar="JOB", help=", ".join(JOBS))
    given = parser.parse_args()
    bench = Bench(given.data, given.runs, given.only)
    for name in given.jobs or JOBS:
        JOBS[name](bench)
    print(report(bench.results))
    return int(not good(bench.results))


if __name__ == "__main__":
    sys.exit(main())
