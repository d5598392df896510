"""Compare regard with JoeyNMT: ``python -m benchmarks.joeynmt --joeynmt-python PYTHON --data FOLDER``.

Tokens a second of training and sentences a second of beam search, with the same shapes, batches and data. JoeyNMT needs
an environment of its own, whose Python is to be named: ``make joeynmt`` makes one. FOLDER holds Multi30k as gzip lines:
train.de.gz, train.en.gz, test_2016_flickr.de.gz and test_2016_flickr.en.gz.

Writes benchmarks/results/<processor>-joeynmt.md and .json, where each task and shape stays until it is measured again.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.joeynmt import compare, prepare, report
from benchmarks.joeynmt.shapes import SHAPES
from benchmarks.machine import ROOT, facts

TASKS = ("training", "translation")
_VERSIONS = "from importlib.metadata import version as v; print(v('joeynmt'), v('torch'))"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.joeynmt", description=(__doc__ or "").partition("\n")[0])
    python = ROOT / "build" / "joeynmt" / "bin" / "python"
    parser.add_argument("--joeynmt-python", type=Path, default=python, help="Python of JoeyNMT's environment")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "multi30k", help="Multi30k")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="batches per training round")
    parser.add_argument("--learn", type=int, default=1500, help="training steps before both translate")
    models = ROOT / "build" / "joeynmt-models"
    parser.add_argument("--models", type=Path, default=models, help="folder of trained models, which are reused")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of each side")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--precisions", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--quick", action="store_true", help="one short round as a smoke test, without numbers")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.steps, options.learn, options.models = 1, 2, min(options.learn, 20), None
    if "float32" not in options.precisions:
        parser.error("--precisions must have float32, which is what others are compared with")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare, compare and write."""
    options = parsed(arguments)
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {line}", file=sys.stderr, flush=True)

    torch.set_num_threads(options.threads)
    where = facts()
    versions = subprocess.run([options.joeynmt_python, "-c", _VERSIONS], check=True, capture_output=True, text=True)
    theirs, their_torch = versions.stdout.split()
    where = {name: value for name, value in where.items() if name not in ("pykeops", "statsmodels")}
    where |= {"JoeyNMT": f"{theirs}, with torch {their_torch}"}
    where["command"] = shlex.join(
        ["python", "-m", "benchmarks.joeynmt", *(sys.argv[1:] if arguments is None else arguments)]
    )
    data = prepare.Data.read(options.data, most=64 if options.quick else None)
    say(f"{len(data.batches):,} pairs, {len(data.vocabulary)} symbols, {len(data.order)} sentences to translate")
    contenders = tuple(each for each in compare.CONTENDERS if each.precision in options.precisions)
    paths: list[Path] = []
    with tempfile.TemporaryDirectory() as folder:
        settings = compare.Settings(
            options.joeynmt_python,
            Path(folder),
            options.models or Path(folder),
            options.threads,
            options.rounds,
            contenders,
            say,
        )
        for task in options.tasks:
            for shape in options.shapes:
                if task == "training":
                    table = compare.training(settings, shape, data, options.steps)
                else:
                    about = prepare.learned(settings.models / shape, shape, data, options.learn, say)
                    table = compare.translation(settings, shape, data) | {"learned": about}
                where["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
                paths = report.write({**table, "machine": dict(where)}, options.out)
    for path in paths:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
