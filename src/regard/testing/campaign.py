"""A campaign: the laws on thousands of drawn cases, a line of progress, and a table at the end."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from regard import engines
from regard.testing.conformance import Verdict, combinations, draw_for, judge
from regard.testing.draw import Dice
from regard.testing.laws import LAWS

#: Failures that are told in full.
TOLD = 40


@dataclass
class Tally:
    """What came of the cases so far."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    broken: list[Verdict] = field(default_factory=list)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, verdict: Verdict, seconds: float) -> None:
        """Count a verdict."""
        self.counts[verdict.law, verdict.engine, verdict.outcome] += 1
        self.seconds[verdict.law] += seconds
        if verdict.outcome == "broken":
            self.broken.append(verdict)

    def total(self) -> int:
        """Return how many cases there were."""
        return sum(self.counts.values())

    def table(self) -> str:
        """Return laws down, engines across: cases held (and broken), refusals apart."""
        names = sorted({engine for _, engine, _ in self.counts})
        lines = ["law".ljust(20) + "".join(name.rjust(18) for name in names) + "ms/case".rjust(10)]
        for law in LAWS:
            count = sum(n for (name, _, _), n in self.counts.items() if name == law)
            if count:
                cells = "".join(self._cell(law, name).rjust(18) for name in names)
                lines.append(law.ljust(20) + cells + f"{1e3 * self.seconds[law] / count:10.1f}")
        return "\n".join([*lines, "held (+ refused); ✗ broken"])

    def _cell(self, law: str, engine: str) -> str:
        held, refused, broken = (self.counts[law, engine, outcome] for outcome in ("held", "refused", "broken"))
        cell = f"{held} (+{refused})" if refused else str(held)
        return f"{cell} ✗{broken}" if broken else cell


def run(cases: int, seed: int, laws: Sequence[str], engine_names: Sequence[str], progress: bool = True) -> Tally:
    """Draw and judge cases; the same seed draws the same ones."""
    among = {name: combinations(engines.TABLE[name]) for name in engine_names}
    plan = random.Random(seed)
    tally, begun = Tally(), time.monotonic()
    for i in range(cases):
        law = LAWS[plan.choices(laws, [LAWS[name].share for name in laws])[0]]
        engine = engines.TABLE[plan.choice(engine_names)]
        started = time.monotonic()
        case = draw_for(Dice(hash((seed, i))), law, engine, among[engine.name])
        if case is None:
            continue  # nothing this law says concerns this engine
        verdict = judge(law, engine, case)
        tally.add(verdict, time.monotonic() - started)
        if verdict.outcome == "broken" and len(tally.broken) <= TOLD:
            _tell(progress, f"\r{verdict}\n")
        if i % 100 == 99:
            rate = (i + 1) / (time.monotonic() - begun)
            _tell(progress, f"\r{i + 1} of {cases} cases, {rate:.0f}/s, {len(tally.broken)} broken ")
    _tell(progress, "\n")
    return tally


def _tell(progress: bool, text: str) -> None:
    if progress:
        sys.stderr.write(text)
        sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign as told on the command line; return 1 if a law is broken."""
    parser = argparse.ArgumentParser(prog="python -m regard.testing", description="Test the laws of attention.")
    parser.add_argument("--cases", type=int, default=2000, help="how many to draw (default: 2000)")
    parser.add_argument("--seed", type=int, default=0, help="draws the same cases again (default: 0)")
    parser.add_argument("--law", action="append", choices=list(LAWS), metavar="NAME", help="only this law; repeatable")
    parser.add_argument(
        "--engine", action="append", choices=list(engines.TABLE), metavar="NAME", help="only this engine"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch; tiny problems gain nothing from more (default: 1)"
    )
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    begun = time.monotonic()
    tally = run(given.cases, given.seed, given.law or list(LAWS), given.engine or list(engines.TABLE))
    seconds = time.monotonic() - begun
    print(tally.table())
    print(f"{tally.total()} cases in {seconds:.0f} s, {len(tally.broken)} broken")
    return 1 if tally.broken else 0
