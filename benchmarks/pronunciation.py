"""Measure pronunciation on a split in files: phoneme and word error rate after a budget of training.

    python benchmarks/pronunciation.py --data DIR [--seconds 160] [--seed 0] [--beams 4] [--out FILE]

DIR holds train.tsv.gz and test.tsv.gz (or without .gz): a word, a tab, and phonemes separated by spaces; a word with
several pronunciations stands on several lines. Without --data, the split is the one that `regard demo` uses.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import torch
from rich.console import Console

from regard_lab.cli.training_display import TrainingDisplay
from regard_lab.data import Pairs, read_pairs
from regard_lab.tasks.pronunciation import RECIPE, Pronouncer, load_dictionary, pairs_of, split_dictionary


def read_split(folder: Path, name: str) -> Pairs:
    """Return the words of DIR/name.tsv.gz or DIR/name.tsv with their pronunciations."""
    packed, plain = folder / f"{name}.tsv.gz", folder / f"{name}.tsv"
    return read_pairs(packed if packed.exists() else plain)


def measure(learn: Pairs, test: Pairs, *, seconds: float, seed: int, beams: int) -> dict[str, object]:
    """Train for this many seconds, and return the scores."""
    pronouncer = Pronouncer.untrained(learn, seed=seed)
    options = RECIPE.with_changes({"seconds": seconds, "seed": seed})
    ended = pronouncer.learn(learn, options, callbacks=[TrainingDisplay(Console(), options, "words")])
    began = time.monotonic()
    rates, _ = pronouncer.evaluate(test, beams=beams)
    return {
        "phoneme_error_rate": round(rates.symbol, 2),
        "word_error_rate": round(rates.sequence, 2),
        "test_words": rates.sequences,
        "train_words": len(set(learn.sources)),
        "training_seconds": round(ended.seconds, 1),
        "words_per_second": round(ended.pairs / ended.seconds),
        "steps": ended.steps,
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
        learn, test = (pairs_of(entries) for entries in split_dictionary(load_dictionary()))
    else:
        learn, test = read_split(options.data, "train"), read_split(options.data, "test")
    result = measure(learn, test, seconds=options.seconds, seed=options.seed, beams=options.beams)
    text = json.dumps(result, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
