"""Run cases: check results, then measure time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks import memory
from benchmarks.check import Checker, Error
from benchmarks.measure import Limits, Ratio, Timing, interleaved, ratio
from benchmarks.registry import Call, Case, Contender, Goal, MissingError, Point

Say = Callable[[str], None]
LIMIT_NAMES = {"flops": "sgemm rate", "bytes": "copy bandwidth", "": "limit"}


@dataclass
class Row:
    """What one contender did at one point.

    ``status`` is ``"ok"``, ``"missing"`` (cannot run here), ``"failed"`` (raised) or ``"wrong"``; ``reason`` says why.
    Only what is ``"ok"`` was timed. ``flops`` and ``bytes`` are what its work comes to, ``engine`` what regard chose.
    """

    contender: str
    flops: float = 0.0
    bytes: float = 0.0
    engine: str = ""
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
    rows: list[Row]

    def row(self, contender: str) -> Row | None:
        """Return a contender's row where it ran and was right."""
        return next((row for row in self.rows if row.contender == contender and row.status == "ok"), None)


@dataclass
class Verdict:
    """A goal and its outcome; ``measured`` is None if nothing could be measured.

    ``share`` of the physical limit, where the goal may be met by that.
    """

    goal: Goal
    measured: float | None
    met: bool
    share: float | None = None


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
    verdicts = [_verdict(case, goal, tables, limits) for goal in case.goals]
    return Finding(case, limits, tables, verdicts, time.monotonic() - began)


def _point(case: Case, point: Point, rounds: int, floor: float, say: Say) -> Table:
    ours = Checker(case.build(point), case.tolerance)
    rows, calls, earlier = [], {}, {}
    for name, contender in case.at(point).items():
        checker = ours if contender.build is None else Checker(contender.build(point), case.tolerance)
        row, call = _checked(name, contender, checker)
        rows.append(row)
        if call is not None:
            calls[name], earlier[name] = call, checker.seconds
        if row.status != "ok":
            say(f"  {name}: {row.status}: {row.reason}")
    table = Table(point, ours.share, rows)
    del ours, checker
    once = {name: Timing((earlier[name],), 1) for name in calls if case.contenders[name].once}
    timings = once | interleaved(
        {name: call for name, call in calls.items() if name not in once}, rounds, floor, earlier
    )
    base = timings.get(case.baseline)
    for row in rows:
        row.timing = timings.get(row.contender)
        if row.timing and base:
            row.speed = ratio(base, row.timing)
            say(f"  {row.contender}: {row.timing.median * 1e3:,.4g} ms, {row.speed.value:.2f} × {case.baseline}")
        elif row.timing:
            say(f"  {row.contender}: {row.timing.median * 1e3:,.4g} ms")
    return table


def _checked(name: str, contender: Contender, checker: Checker) -> tuple[Row, Call | None]:
    work = checker.work
    row = Row(name, checker.flops, checker.bytes)
    try:
        engine = contender.engine(work) if contender.engine else ""
        row.engine = engine if engine not in name else ""
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
    if case.contenders[row.contender].once:
        row.peak_reason = "not measured"
        return
    try:
        row.peak = memory.of_contender(case.name, point, row.contender)
    except memory.ChildError as error:
        row.peak_reason = str(error)


def share(case: Case, limits: Limits, row: Row) -> float | None:
    """Return the share of the physical limit that a row reached; None where there is none."""
    if row.timing is None or not case.bound:
        return None
    needed, possible = (row.flops, limits.flops) if case.bound == "flops" else (row.bytes, limits.bytes)
    return needed / row.timing.median / possible


def _verdict(case: Case, goal: Goal, tables: list[Table], limits: Limits) -> Verdict:
    against = goal.against or case.baseline
    key = (goal.size, goal.backward, goal.variant)
    table = next((t for t in tables if (t.point.size, t.point.backward, t.point.variant) == key), None)
    row, base = (None, None) if table is None else (table.row(goal.contender), table.row(against))
    measured: float | None = None
    if goal.kind == "memory":
        measured = None if row is None or row.peak is None else row.peak / 1e6
        return Verdict(goal, measured, measured is not None and measured < goal.limit)
    if goal.kind == "seconds":
        measured = row.timing.median if row and row.timing else None
    elif row and base and row.timing and base.timing:
        ours, theirs = row.timing.median, base.timing.median
        measured = {
            "time": ours / theirs,
            "speed": theirs / ours,
            "overhead": (ours - theirs) * 1e6,
            "backward": (ours - theirs) / theirs,
        }[goal.kind]
    met = measured is not None and (measured >= goal.limit if goal.kind == "speed" else measured <= goal.limit)
    reached = share(case, limits, row) if row and goal.share is not None else None
    met = met or (reached is not None and goal.share is not None and reached >= goal.share)
    return Verdict(goal, measured, met, reached)
