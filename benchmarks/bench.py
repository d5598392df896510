"""Run cases: check, time, weigh."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks import memory
from benchmarks.check import Checker, Error
from benchmarks.measure import Limits, Ratio, Timing, interleaved, ratio
from benchmarks.registry import Call, Case, Contender, Goal, MissingError, Point
from benchmarks.work import Work

Say = Callable[[str], None]


@dataclass
class Row:
    """What one contender did at one point.

    ``status`` is ``"ok"``, ``"missing"`` (cannot run here), ``"failed"`` (raised) or ``"wrong"``; ``reason`` says why.
    Only what is ``"ok"`` was timed.
    """

    contender: str
    status: str = "ok"
    reason: str = ""
    errors: dict[str, Error] = field(default_factory=dict)
    timing: Timing | None = None
    speed: Ratio | None = None
    peak: int | None = None
    peak_reason: str = ""

    @property
    def worst(self) -> tuple[str, Error] | None:
        """The quantity that is nearest to being wrong, or furthest beyond it."""
        if not self.errors:
            return None
        return max(self.errors.items(), key=lambda item: (item[1].wrong, item[1].found / (item[1].limit or 1.0)))


@dataclass
class Table:
    """A case at one point."""

    point: Point
    checked: str
    flops: float
    bytes: float
    rows: list[Row]

    def row(self, contender: str) -> Row | None:
        """Return a contender's row where it ran and was right."""
        return next((row for row in self.rows if row.contender == contender and row.status == "ok"), None)


@dataclass
class Verdict:
    """A goal, and what became of it: ``measured`` None where nothing could be measured."""

    goal: Goal
    text: str
    measured: float | None
    met: bool


@dataclass
class Finding:
    """A case's tables and verdicts, the machine's limits just before, and how long it took."""

    case: Case
    limits: Limits
    tables: list[Table]
    verdicts: list[Verdict]
    seconds: float


def run(case: Case, limits: Limits, *, rounds: int, floor: float, say: Say, weigh: bool = True) -> Finding:
    """Measure a case at all of its points."""
    began, tables = time.monotonic(), []
    for point in case.points:
        say(f"{case.name}: {point.label}")
        tables.append(_point(case, point, rounds if point.rounds is None else min(point.rounds, rounds), floor, say))
    for table in tables if weigh else []:
        for row in table.rows:
            if row.status == "ok":
                _weigh(case, table.point, row)
    verdicts = [_verdict(case, goal, tables) for goal in case.goals]
    return Finding(case, limits, tables, verdicts, time.monotonic() - began)


def _point(case: Case, point: Point, rounds: int, floor: float, say: Say) -> Table:
    work = case.build(point)
    checker = Checker(work, case.tolerance)
    rows, calls = [], {}
    for name, contender in case.at(point).items():
        row, call = _checked(name, contender, work, checker)
        rows.append(row)
        if call is not None:
            calls[name] = call
        if row.status != "ok":
            say(f"  {name}: {row.status}: {row.reason}")
    table = Table(point, checker.share, work.flops(), work.bytes(), rows)
    del checker
    timings = interleaved(calls, rounds, floor)
    base = timings.get(case.baseline)
    for row in rows:
        row.timing = timings.get(row.contender)
        if row.timing and base:
            row.speed = ratio(base, row.timing)
            say(f"  {row.contender}: {row.timing.median * 1e3:,.4g} ms, {row.speed.value:.2f} × {case.baseline}")
        elif row.timing:
            say(f"  {row.contender}: {row.timing.median * 1e3:,.4g} ms")
    return table


def _checked(name: str, contender: Contender, work: Work, checker: Checker) -> tuple[Row, Call | None]:
    row = Row(name)
    try:
        call = contender.prepare(work)
        row.errors = checker.errors(call, contender.does)
    except MissingError as error:
        row.status, row.reason = "missing", str(error)
    except Exception as error:
        row.status, row.reason = "failed", f"{type(error).__name__}: {error}"
    else:
        wrong = [
            f"{quantity} is off by {error.found:.2g} (at most {error.limit:.2g})"
            for quantity, error in row.errors.items()
            if error.wrong
        ]
        if not wrong:
            return row, call
        row.status, row.reason = "wrong", "; ".join(wrong)
    return row, None


def _weigh(case: Case, point: Point, row: Row) -> None:
    try:
        row.peak = memory.of_contender(case.name, point, row.contender)
    except memory.ChildError as error:
        row.peak_reason = str(error)


def _verdict(case: Case, goal: Goal, tables: list[Table]) -> Verdict:
    against = goal.against or case.baseline
    key = (goal.size, goal.backward, goal.variant)
    table = next((t for t in tables if (t.point.size, t.point.backward, t.point.variant) == key), None)
    row, base = (None, None) if table is None else (table.row(goal.contender), table.row(against))
    what = f"{goal.contender} at {Point(goal.size, goal.backward, goal.variant).label}"
    text = {
        "time": f"{what}: at most {goal.limit:g} × the time of {against}",
        "speed": f"{what}: at least {goal.limit:g} × the speed of {against}",
        "overhead": f"{what}: at most {goal.limit:g} µs more than {against}",
        "memory": f"{what}: less than {goal.limit:g} MB beyond the inputs",
    }[goal.kind]
    measured: float | None = None
    if goal.kind == "memory":
        measured = None if row is None or row.peak is None else row.peak / 1e6
        met = measured is not None and measured < goal.limit
    else:
        if row and base and row.timing and base.timing:
            ours, theirs = row.timing.median, base.timing.median
            measured = {"time": ours / theirs, "speed": theirs / ours, "overhead": (ours - theirs) * 1e6}[goal.kind]
        reached = measured is not None and (measured >= goal.limit if goal.kind == "speed" else measured <= goal.limit)
        met = bool(reached)
    return Verdict(goal, text, measured, met)
