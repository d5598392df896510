"""Damaged files through the loaders. python -m benchmarks.fuzz [--cases 20000] [--first 1] [--folder DIR] [--fresh]

Every case is drawn from its number alone, and runs through the command that would load it, in a worker process whose
memory is measured and bounded; a worker that dies or is silent for a minute is replaced. What came of each case is kept
in the folder, so that a campaign goes on where it was stopped. `python -m benchmarks.fuzz.cases 17` runs one again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.fuzz.cases import KINDS
from benchmarks.fuzz.workers import MOST, RIGHT, SILENT, outcomes
from benchmarks.machine import ROOT, facts, slug


def document(found: list[dict[str, Any]], machine: dict[str, str]) -> str:
    """Return the report."""
    counts = Counter((each["kind"], each["verdict"]) for each in found)
    wrong = [each for each in found if each["verdict"] not in RIGHT]
    lines = [f"# Damaged files through the loaders, on {machine['CPU']}", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in machine.items()]
    lines += [
        "",
        f"{len(found):,} cases, each drawn from its number: model folders, tables, pairs and options files with bytes, "
        "values, tensors, encodings or claimed sizes changed, through the command that loads them. Right is what "
        "loads, or is refused with exit code 2 and a sentence without control characters.",
        "",
        f"- Wrong (a traceback, a hang of {SILENT:.0f} seconds, a dead process, more than {MOST / 1e9:.1f} GB, no "
        f"sentence, control characters): **{len(wrong)}**.",
        f"- The most memory that a case took: {max(each['bytes'] for each in found) / 1e9:.2f} GB.",
        f"- The longest case: {max(each['seconds'] for each in found):.1f} seconds.",
        "",
        "| | cases | accepted | refused | different sentences | wrong |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind in KINDS:
        accepted, refused = (counts[kind, verdict] for verdict in RIGHT)
        of_kind = [each for each in found if each["kind"] == kind]
        # What follows "got" differs from case to case.
        messages = {each["told"].partition(" must ")[2].partition(", got")[0] for each in of_kind} - {""}
        lines.append(
            f"| {kind} | {len(of_kind):,} | {accepted:,} | {refused:,} | {len(messages):,} | "
            f"{len(of_kind) - accepted - refused} |"
        )
    lines += ["", *(f"- {each['number']}: {each['verdict']}: {each['told'][-300:]!r}" for each in wrong[:40])]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Parse, run what is not done yet, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=1, help="number of the first case")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "fuzz", help="keeps what came of the cases")
    parser.add_argument("--fresh", action="store_true", help="begin anew")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the report")
    given = parser.parse_args()
    kept = given.folder / "outcomes.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    if given.fresh:
        kept.unlink(missing_ok=True)
    found = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {each["number"] for each in found}
    numbers = [number for number in range(given.first, given.first + given.cases) if number not in done]
    machine = facts()
    with kept.open("a") as file:
        for each in outcomes(numbers):
            found.append(each)
            file.write(json.dumps(each) + "\n")
            file.flush()
            if each["verdict"] not in RIGHT:
                print(f"{each['number']}: {each['verdict']}: {each['told'][-1500:]}", flush=True)
            if each["number"] % 1000 == 0:
                print(f"{len(found):,} cases", flush=True)
    machine["command"] = f"`python -m benchmarks.fuzz --cases {given.cases} --first {given.first}`"
    machine["date"] = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    machine["took"] = f"{sum(each['seconds'] for each in found) / 60:.1f} minutes"
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"{slug(machine['CPU'])}-fuzz.md"
    found.sort(key=lambda each: each["number"])
    path.write_text(document(found, machine), encoding="utf-8")
    print(path)
    if any(each["verdict"] not in RIGHT for each in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
