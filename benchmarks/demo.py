"""How long `regard demo` takes after installation: ``python -m benchmarks.demo [--rounds 5]``.

Each round is a process of its own, as a user starts it. The report is DIR/<cpu>-demo.md.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.machine import ROOT, facts, slug

#: Seconds beyond which the exit code is 1.
MOST = 20.0


def once() -> tuple[float, float]:
    """Run it, and return its seconds: by the clock, and of all cores together."""
    with tempfile.TemporaryDirectory() as out:
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        command = [sys.executable, "-m", "regard_cli", "demo", "--out", out]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        passed, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        if not (Path(out) / "alignments.png").exists():
            raise RuntimeError(f"the demo drew nothing:\n{done.stdout}")
    return passed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def markdown(rounds: Sequence[tuple[float, float]], machine: dict[str, str]) -> str:
    """Return the report."""
    clock, cores = zip(*rounds)
    lines = [
        "# Time of `regard demo`, after installation", "",
        f"`python -m benchmarks.demo --rounds {len(rounds)}`; one process per round, one after the other.", "",
        "| | median | slowest |", "| --- | ---: | ---: |",
        f"| wall-clock seconds | {statistics.median(clock):.1f} | {max(clock):.1f} |",
        f"| CPU seconds, all cores | {statistics.median(cores):.1f} | {max(cores):.1f} |", "",
        "| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in machine.items()),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main(given: Sequence[str] | None = None) -> int:
    """Measure, write the report, and return 1 where a round was too slow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args(given)
    machine = facts()
    once()  # what is read for the first time is not what a second start takes
    rounds = [once() for _ in range(arguments.rounds)]
    machine |= {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"}
    text = markdown(rounds, machine)
    (arguments.results / f"{slug(machine['CPU'])}-demo.md").write_text(text, encoding="utf-8")
    print(text)
    return int(max(clock for clock, _ in rounds) >= MOST)


if __name__ == "__main__":
    sys.exit(main())
