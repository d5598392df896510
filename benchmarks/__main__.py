"""Command line: ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import benchmarks.cases  # noqa: F401  (fills the registry)
from benchmarks import bench, report
from benchmarks.machine import ROOT, facts
from benchmarks.measure import FLOOR, limits
from benchmarks.registry import CASES

ROUNDS, QUICK_ROUNDS = 7, 2


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    made = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    made.add_argument("--case", action="append", choices=list(CASES), help="run this case alone (repeatable)")
    made.add_argument("--list", action="store_true", help="list the cases and their contenders, and run nothing")
    made.add_argument("--name", default="", help="report name after the processor (with --case)")
    made.add_argument("--rounds", type=int, help=f"rounds of A B A B (default {ROUNDS})")
    made.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    made.add_argument(
        "--out",
        type=Path,
        help="where to write (default benchmarks/results; nowhere with --quick, or --case without --name)",
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and write. Return 1 where regard itself was wrong or failed."""
    asked = list(sys.argv[1:] if argv is None else argv)
    options = parser().parse_args(asked)
    if options.rounds is not None and options.rounds < 1:
        parser().error(f"--rounds must be at least 1, got {options.rounds}")
    cases = [case for name, case in CASES.items() if not options.case or name in options.case]
    if options.list:
        for case in cases:
            print(f"{case.name:16} {case.title}\n{'':16} {', '.join(case.contenders)}")
        return 0
    began, where = time.monotonic(), facts()
    where["command"] = f"`{shlex.join(['python', '-m', 'benchmarks', *asked])}`"
    where["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    floor = FLOOR / 20 if options.quick else FLOOR
    findings = []
    for case in cases:
        machine = limits(256, 8, 3) if options.quick else limits()
        case = case.shrunk() if options.quick else case
        findings.append(bench.run(case, machine, rounds=rounds, floor=floor, say=_say))
    where["took"] = f"{(time.monotonic() - began) / 60:.1f} minutes, {rounds} rounds"
    where["name"] = options.name
    alone = (options.case and not options.name) or options.quick
    folder = options.out or (None if alone else ROOT / "benchmarks" / "results")
    if folder is None:
        print(report.markdown(findings, where, {}))
    else:
        for path in report.write(findings, where, folder):
            print(path)
    rows = [row for finding in findings for table in finding.tables for row in table.rows]
    bad = [row for row in rows if row.contender.startswith("regard") and row.status in ("wrong", "failed")]
    return 1 if bad else 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
