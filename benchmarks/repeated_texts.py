"""How many test texts of the classification tasks stand in their training data too, and what accuracy is without them.

    python -m benchmarks.repeated_texts [--imdb DIR] [--tasks DIR] [--out DIR]

Texts are compared as they are but for case, signs and spaces. Which answers to the repeated texts were right is not
stored: the accuracy without them lies between the two bounds, where all of them, or none, were right.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT

RESULTS = ROOT / "benchmarks" / "results"
#: Of each task: its test file, and the files of texts that models learn from, with their labels or without.
FILES = {
    "imdb": (
        "imdb",
        "test.tsv.gz",
        {"with labels": ("train.tsv.gz", "valid.tsv.gz"), "without": ("unlabelled.txt.gz",)},
    ),
    "sst2": ("tasks", "sst2.test.tsv.gz", {"with labels": ("sst2.train.tsv.gz", "sst2.valid.tsv.gz")}),
    "trec": ("tasks", "trec.test.tsv.gz", {"with labels": ("trec.train.tsv.gz",)}),
}


def plain(text: str) -> str:
    """Return the words of a text.

    Examples
    --------
    >>> plain("Where is  Modesto , California ?")
    'where is modesto california'
    """
    return " ".join(re.findall(r"\w+", text.lower()))


def texts(path: Path) -> list[str]:
    """Return the texts of a file, which a tab may separate from labels."""
    return [plain(line.split("\t")[0]) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]


def bounds(accuracy: float, count: int, repeated: int) -> tuple[float, float]:
    """Return the least and the greatest accuracy without the repeated texts.

    Examples
    --------
    >>> bounds(0.9, 100, 10)
    (0.8888888888888888, 1.0)
    """
    right = accuracy * count
    return max(right - repeated, 0.0) / (count - repeated), min(right / (count - repeated), 1.0)


def main(given: Sequence[str] | None = None) -> int:
    """Count, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = ROOT.parent / "shared" / "data"
    parser.add_argument("--imdb", type=Path, default=data / "imdb")
    parser.add_argument("--tasks", type=Path, default=data / "classification")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(given)
    rows: list[dict[str, Any]] = json.loads((RESULTS / "encoders.json").read_text(encoding="utf-8"))["rows"]
    lines = [
        "| task | test texts | of them in training texts | accuracy, best model | without them |",
        "| --- | ---: | --- | ---: | --- |",
    ]
    for task, (folder, test, learned) in FILES.items():
        place: Path = getattr(chosen, folder)
        tested = texts(place / test)
        found = {
            how: {each for name in names for each in texts(place / name)} & set(tested)
            for how, names in learned.items()
        }
        counts = {how: sum(text in some for text in tested) for how, some in found.items()}
        repeated = sum(any(text in some for some in found.values()) for text in tested)
        means: dict[tuple[str, str], list[float]] = {}
        for row in rows:
            if row["task"] == task:
                means.setdefault((row["model"], row["start"]), []).append(row["accuracy"])
        best = max(statistics.mean(each) for each in means.values())
        least, most = bounds(best, len(tested), repeated)
        where = ", ".join(f"{count:,} {how}" for how, count in counts.items())
        lines.append(f"| {task} | {len(tested):,} | {where} | {best:.1%} | {least:.1%} to {most:.1%} |")
    said = (__doc__ or "").split("\n\n", 2)[2].strip()
    report = "\n".join(["# Test texts that stand in training data", "", said, "", *lines, ""])
    (chosen.out / "repeated-texts.md").write_text(report, encoding="utf-8")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
