"""Test the laws on a hundred thousand random cases, and write a report.

    python -m benchmarks.campaign [--cases 100000] [--guarded 10000] [--seed 0] [--workers N] [--out DIR]

Worker processes with one thread each judge the cases. A journal keeps each result, so the same command resumes after an
interruption. A second campaign runs the compiled kernels on guarded memory, where an access past the end of an array
kills the process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.machine import ROOT, facts
from regard.testing import campaign
from regard.testing.campaign import Plan, Tally


def document(tallies: dict[str, Tally], machine: dict[str, str]) -> str:
    """Return the report."""
    lines = ["# The laws over generated cases", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in machine.items()]
    for title, tally in tallies.items():
        hours = sum(tally.seconds.values()) / 3600
        lines += [
            "",
            f"## {title}",
            "",
            f"{tally.total():,} cases, **{len(tally.broken)} wrong**, {hours:.1f} hours of",
        ]
        lines[-1] += " one core."
        lines += ["", "```", tally.table(), "```"]
        lines += [f"\n```\n{found.reason}\n```" for found in tally.broken]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both campaigns, write the report; return 1 if a law is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--guarded", type=int, default=10_000, help="cases of engine fused on guarded memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--journals", type=Path, default=ROOT / "build" / "campaign", help="folder of journals")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the report")
    given = parser.parse_args(arguments)
    os.environ["REGARD_FLEX"] = "uncompiled"  # for the processes: engine flex would compile every kind of case first
    machine = facts()
    plans = {
        "All engines": (given.cases, Plan(given.seed)),
        "Compiled kernels on guarded memory": (given.guarded, Plan(given.seed, engines=("fused",), guard=True)),
    }
    tallies = {
        title: campaign.run(cases, plan, given.workers, given.journals / f"{'guarded' if plan.guard else 'all'}.jsonl")
        for title, (cases, plan) in plans.items()
    }
    machine["code"] = f"checksum {campaign.code()} of the modules that a case runs through"
    options = f"--cases {given.cases} --guarded {given.guarded} --seed {given.seed}"
    machine["command"] = f"`python -m benchmarks.campaign {options}`"
    machine["date"] = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "campaign.md"
    path.write_text(document(tallies, machine), encoding="utf-8")
    counts = {title: {" / ".join(key): n for key, n in sorted(t.counts.items())} for title, t in tallies.items()}
    text = json.dumps({"machine": machine, "counts": counts}, indent=1, ensure_ascii=False)
    path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    print(path)
    return 1 if any(tally.broken for tally in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
