"""Measure pronunciation on a split in files: phoneme and word error rate after a budget of training.

    python benchmarks/pronunciation.py --data DIR [--seconds 160] [--seed 0] [--beams 4] [--out FILE]

DIR holds train.tsv.gz and test.tsv.gz (or without .gz): a word, a tab, and phonemes separated by spaces; a word with
several pronunciations stands on several lines. Without --data, the split is the one that `regard demo` uses.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import time
from pathlib import Path

import torch

from regard.tasks import Pronouncer
from regard.tasks.dictionary import Dictionary, load_dictionary, split
from regard.tasks.training import Progress, train


def read_split(folder: Path, name: str) -> Dictionary:
    """Return the words of DIR/name.tsv.gz or DIR/name.tsv with their pronunciations."""
    packed, plain = folder / f"{name}.tsv.gz", folder / f"{name}.tsv"
    entries: Dictionary = {}
    with gzip.open(packed, "rt", encoding="utf-8") if packed.exists() else plain.open(encoding="utf-8") as lines:
        for line in lines:
            word, _, spoken = line.rstrip("\n").partition("\t")
            entries.setdefault(word.lower(), []).append(tuple(spoken.split()))
    return entries


def measure(learn: Dictionary, test: Dictionary, *, seconds: float, seed: int, beams: int) -> dict[str, object]:
    """Train for this many seconds, and return what was reached."""
    torch.manual_seed(seed)
    pronouncer = Pronouncer.untrained(learn, seed=seed)
    shown = 0.0

    def report(progress: Progress) -> None:
        nonlocal shown
        if progress.seconds - shown >= 20:
            shown = progress.seconds
            print(f"{progress.seconds:5.0f} s  loss {progress.loss:.3f}  {progress.rate:,.0f} words/s", flush=True)

    progress = train(pronouncer.model, pronouncer.batches(learn, seed=seed), seconds=seconds, report=report)
    began = time.monotonic()
    rates, _ = pronouncer.evaluate(test, beams=beams)
    return {
        "phoneme_error_rate": round(rates.symbol, 2),
        "word_error_rate": round(rates.sequence, 2),
        "test_words": rates.sequences,
        "train_words": len(learn),
        "training_seconds": round(progress.seconds, 1),
        "words_per_second": round(progress.rate),
        "steps": progress.steps,
        "evaluation_seconds": round(time.monotonic() - began, 1),
        "beams": beams,
        "seed": seed,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with train and test files")
    parser.add_argument("--seconds", type=float, default=160.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--out", type=Path, help="also write the result to this JSON file")
    options = parser.parse_args()
    if options.data is None:
        learn, test = split(load_dictionary())
    else:
        learn, test = read_split(options.data, "train"), read_split(options.data, "test")
    result = measure(learn, test, seconds=options.seconds, seed=options.seed, beams=options.beams)
    text = json.dumps(result, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
