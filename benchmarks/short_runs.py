"""Short training runs: do they all learn, and what do five minutes reach?

    python -m benchmarks.short_runs --data TATOEBA [--only first|seeds] [--seeds 20] [--steps 60 300 1200]
                                    [--batch-tokens 512] [--seconds 300] [--results DIR]

``first``: a translator of 30,000 pairs, as a new user trains it: `regard train --preset small --seconds 300`, then
`regard evaluate translation` on sentences that it never saw. It takes all cores; let the machine do nothing else.

``seeds``: runs of 60, 300 and 1,200 steps with both kinds of model and 20 seeds, one after the other, on one thread. Of
each the loss of the last validation is compared with that of guessing symbols by their frequency: a run that is not
better by :data:`LEAST` nats is dead. Batches are small, so that all of them can be afforded; every option but the batch
is the preset's, the warm-up too.

Every run that is done is written down, and not made again: a campaign that was stopped goes on. DIR/<cpu>-short-runs.md
is the report. The exit code is 1 if something fell short.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import ROOT, facts, slug
from regard_lab.cli.train import options_table, with_tuned_rate
from regard_lab.tasks.translation import Experiment, ExperimentOptions

PAIRS, SEED = 30_000, 0
KINDS = ("recurrent", "transformer")
#: By so many nats the loss must be lower than that of guessing by frequency: after 60 steps by as much as
#: `regard train` itself takes for learning, after more steps by more.
LEAST = {60: 0.1, 300: 0.5, 1200: 1.0}
#: BLEU after five minutes below which the exit code is 1.
LEAST_BLEU = 15.0
#: Sources that are held out to validate a run of the campaign.
_HELD_OUT = 300


@dataclass(frozen=True)
class Run:
    """What a run of the campaign came to.

    Attributes
    ----------
    kind : str
    steps, seed, batch_tokens : int
    loss, guess : float
        Of the validation at its end, and of guessing by frequency, in nats for a symbol.
    seconds : float
    """

    kind: str
    steps: int
    seed: int
    batch_tokens: int
    loss: float
    guess: float
    seconds: float

    @property
    def key(self) -> tuple[str, int, int, int]:
        """A name that identifies the run."""
        return self.kind, self.steps, self.seed, self.batch_tokens

    @property
    def learned(self) -> bool:
        """Whether it is better than guessing by as much as so many steps must bring; NaN is not."""
        least = max((nats for steps, nats in LEAST.items() if steps <= self.steps), default=0.0)
        return self.loss <= self.guess - least


def drawn(folder: Path, into: Path) -> Path:
    """Write 30,000 pairs, drawn once and for all, and return their file."""
    with gzip.open(folder / "en-fr.train.tsv.gz", "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()
    path = into / "pairs.tsv"
    chosen = random.Random(SEED).sample(lines, PAIRS)
    path.write_text("".join(f"{line}\n" for line in chosen), encoding="utf-8")
    return path


def learn(pairs: Path, kind: str, steps: int, seed: int, batch_tokens: int) -> Run:
    """Train a model of the small preset with its defaults, and return how it ended."""
    changes = {
        "kind": kind, "preset": "small", "data.data": str(pairs), "data.held_out": _HELD_OUT, "training.steps": steps,
        "training.seed": seed, "training.batch_tokens": batch_tokens, "training.validate_every": steps,
        "training.validate_most": 1, "training.keep": 1,
    }  # fmt: skip
    options = ExperimentOptions.from_table(with_tuned_rate(options_table("translation", None, changes)))
    seen = _watcher()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment(options, Path(folder) / "run", lambda _: None)
        experiment.train(callbacks=[seen])
    if math.isnan(seen.guess):
        raise SystemExit("short_runs: a run was stopped before its validation; what was done before is kept.")
    passed = round(time.monotonic() - began, 1)
    return Run(kind, steps, seed, batch_tokens, round(seen.loss, 4), round(seen.guess, 4), passed)


def _watcher() -> Any:
    from lightning.pytorch import Callback

    class Watcher(Callback):
        """Keeps what the last validation found."""

        loss, guess = float("nan"), float("nan")

        def on_validation_end(self, trainer: Any, module: Any) -> None:  # noqa: ARG002
            self.loss, self.guess = module.valid_loss, module.guess

    return Watcher()


def first_run(pairs: Path, folder: Path, seconds: float, work: Path) -> dict[str, Any]:
    """Train with the command like a new user, and return its reports and its scores on new sentences."""
    out = work / "model"
    options = ["--data", str(pairs), "--preset", "small", "--seconds", f"{seconds:g}", "--out", str(out)]
    load = os.getloadavg()[0]
    said = _command("train", "translation", *options)
    test = folder / "en-fr.test.tsv.gz"
    scores = json.loads(_command("evaluate", "translation", str(test), "--model", str(out), "--json"))
    about = json.loads((out / "config.json").read_text(encoding="utf-8"))["about"]["training"]
    bleu = next(value for name, value in scores.items() if name.lower().startswith("bleu"))
    validations = [line for line in said.splitlines() if line.startswith("step ")]
    return {
        "asked_seconds": seconds, "steps": about["steps"], "seconds": about["seconds"], "threads": about["threads"],
        "bleu": bleu, "sources": scores["sources"], "validations": validations, "load": round(load, 2),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }  # fmt: skip


def _command(*arguments: str) -> str:
    command = [sys.executable, "-m", "regard_cli", *arguments]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"regard {arguments[0]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def rows(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line of the table for each kind and number of steps."""
    for kind, steps, tokens in sorted({(run.kind, run.steps, run.batch_tokens) for run in runs}):
        some = [run for run in runs if (run.kind, run.steps, run.batch_tokens) == (kind, steps, tokens)]
        below = [run.guess - run.loss for run in some]
        dead = sum(not run.learned for run in some)
        least = max((nats for most, nats in LEAST.items() if most <= steps), default=0.0)
        cells = (
            kind, f"{steps:,}", f"{tokens:,}", len(some), f"{statistics.median(run.loss for run in some):.2f}",
            f"{max(run.loss for run in some):.2f}", f"{min(below):.2f}", f"{least:g}",
            f"**{dead}**" if dead else "0", f"{statistics.median(run.seconds for run in some):.0f}",
        )  # fmt: skip
        yield f"| {' | '.join(map(str, cells))} |"


def markdown(found: dict[str, Any], runs: Sequence[Run], wanted: int) -> str:
    """Return the report."""
    lines = ["# Short training runs", ""]
    first = found.get("first")
    if first:
        lines += [
            f"`regard train translation --preset small --seconds {first['asked_seconds']:g}` on {PAIRS:,} pairs of "
            f"Tatoeba, English to French: {first['steps']:,} steps on {first['threads']} threads in "
            f"{first['seconds']:.0f} seconds. BLEU **{first['bleu']:.1f}** on {first['sources']:,} held-out sentences. "
            f"{first['date']}; load average {first['load']} before.",
            "", "```", *first["validations"], "```", "",
        ]  # fmt: skip
    dead = sum(not run.learned for run in runs)
    lines += [] if not runs else [
        f"{len(runs)} of {wanted} runs on {PAIRS:,} pairs with preset small and small batches; {dead} dead. *gain* is "
        "how far the loss of the last validation is below that of guessing symbols by frequency, in nats per symbol. A "
        "run is dead if its gain is below *margin*.", "",
        "| model | steps | tokens per batch | runs | median loss | worst loss | smallest gain | margin | dead | "
        "seconds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", *rows(runs), "",
    ]  # fmt: skip
    lines += [
        "| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in found["machine"].items()),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def report(found: dict[str, Any]) -> str:
    """Return the report of a finished campaign from its numbers."""
    runs = [Run(**each) for each in found["runs"]]
    return markdown(found, runs, len(runs))


class Report:
    """Results so far, in a JSON file for resuming and a Markdown report."""

    def __init__(self, folder: Path, machine: dict[str, str], wanted: int) -> None:
        self._path = folder / f"{slug(machine['CPU'])}-short-runs.json"
        self._found: dict[str, Any] = {"runs": []}
        if self._path.exists():
            self._found = json.loads(self._path.read_text(encoding="utf-8"))
        self._found["machine"] = machine
        self._wanted = wanted
        self.runs = [Run(**each) for each in self._found["runs"]]

    def add(self, run: Run | None = None, first: dict[str, Any] | None = None) -> None:
        """Write down one thing more."""
        self.runs += [] if run is None else [run]
        self._found["runs"] = [asdict(each) for each in self.runs]
        if first is not None:
            self._found["first"] = first
        self._found["machine"]["date"] = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(self._path)
        text = markdown(self._found, self.runs, max(self._wanted, len(self.runs)))
        self._path.with_suffix(".md").write_text(text, encoding="utf-8")


def main(given: Sequence[str] | None = None) -> int:
    """Run the missing runs, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "tatoeba")
    parser.add_argument("--only", choices=("first", "seeds"))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, nargs="+", default=list(LEAST))
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=300.0, help="of the training of `first`")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    chosen = parser.parse_args(given)
    wanted = list(product(range(chosen.seeds), sorted(chosen.steps), KINDS))
    kept = Report(chosen.results, facts(), len(wanted))
    good = True
    with tempfile.TemporaryDirectory() as work:
        pairs = drawn(chosen.data, Path(work))
        if chosen.only != "seeds":
            first = first_run(pairs, chosen.data, chosen.seconds, Path(work))
            kept.add(first=first)
            good = first["bleu"] >= LEAST_BLEU
            print(f"BLEU {first['bleu']} after {first['steps']:,} steps", flush=True)
        if chosen.only != "first":
            torch.set_num_threads(1)
            for seed, steps, kind in wanted:
                if (kind, steps, seed, chosen.batch_tokens) in {run.key for run in kept.runs}:
                    continue
                run = learn(pairs, kind, steps, seed, chosen.batch_tokens)
                kept.add(run)
                state = "learned" if run.learned else "DEAD"
                print(
                    f"{kind} {steps:,} steps, seed {seed}: {run.loss} of {run.guess}, {state}, {run.seconds} s",
                    flush=True,
                )
    return 0 if good and all(run.learned for run in kept.runs) else 1


if __name__ == "__main__":
    sys.exit(main())
