"""The parts of a benchmark: cases, the points at which they are measured, contenders and goals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from benchmarks.work import Work

#: A contender's result by name: ``output``, then ``d_query`` and so on, then auxiliary outputs.
Result = dict[str, Tensor]
Call = Callable[[], Result]


class MissingError(Exception):
    """A contender cannot run here; the message says why."""


@dataclass(frozen=True)
class Point:
    """One setting at which a case is measured.

    Attributes
    ----------
    size : int
        What the case calls its size; the horizontal axis of its plot.
    backward : bool
        Whether gradients to all inputs are calculated too.
    variant : str
        Which of a case's variants; most have one.
    only : tuple of str
        The contenders that run here; empty for all.
    rounds : int or None
        Fewer rounds than elsewhere, where a call takes many seconds.
    """

    size: int
    backward: bool = False
    variant: str = ""
    only: tuple[str, ...] = ()
    rounds: int | None = None

    @property
    def label(self) -> str:
        """What the report calls this point."""
        what = "forward + backward" if self.backward else "forward"
        return f"{self.size:,}, {what}" + (f", {self.variant}" if self.variant else "")


@dataclass(frozen=True)
class Contender:
    """A way to do a case's work.

    Attributes
    ----------
    prepare : callable
        ``prepare(work)`` returns the call to time, or raises :class:`MissingError`.
    compiles : bool
        Whether the first call at a size compiles: its memory is measured at the second.
    does : tuple of str
        The quantities it is asked for; empty for all.
    build : callable or None
        Where it is a yardstick that does other work than the case's: that work, against which it is checked.
    engine : callable or None
        ``engine(work)`` names the engine that regard chooses.
    once : bool
        Whether it is called once, because a call takes a minute or more: what its check took is its time, in every
        round, and its memory is not measured.
    """

    prepare: Callable[[Work], Call]
    compiles: bool = False
    does: tuple[str, ...] = ()
    build: Callable[[Point], Work] | None = None
    engine: Callable[[Work], str] | None = None
    once: bool = False


@dataclass(frozen=True)
class Goal:
    """A number that a contender should reach at a point.

    ``time``: at most ``limit`` times the time of ``against``. ``speed``: at least ``limit`` times its speed, or
    ``share`` of the physical limit where that is given. ``overhead``: at most ``limit`` µs more than it. ``backward``:
    what is beyond the time of ``against``, which is the forward pass alone, takes at most ``limit`` times that.
    ``seconds``: at most ``limit`` s. ``memory``: less than ``limit`` MB (10⁶ bytes) beyond the inputs.

    ``name`` is what the README's marks call it.
    """

    name: str
    kind: Literal["time", "speed", "overhead", "backward", "seconds", "memory"]
    limit: float
    size: int
    backward: bool = False
    contender: str = "regard"
    against: str = ""
    variant: str = ""
    share: float | None = None


@dataclass(frozen=True)
class Case:
    """Work, and those who do it.

    Attributes
    ----------
    name, title : str
    unit : str
        What ``Point.size`` counts.
    build : callable
        ``build(point)`` returns the seeded :class:`~benchmarks.work.Work`.
    contenders : mapping of str to Contender
        In the order in which they are timed.
    baseline : str
        The contender to which the others are compared.
    points : tuple of Point
    quick : int
        A size so small that every contender can run in no time.
    goals : tuple of Goal
    bound : str
        Which physical limit the work is compared to: ``"flops"``, ``"bytes"`` or ``""`` where neither means anything.
    tolerance : float
        An error up to this share of the largest reference value is never called wrong.
    notes : str
        What a reader of the table must know.
    """

    name: str
    title: str
    unit: str
    build: Callable[[Point], Work]
    contenders: Mapping[str, Contender]
    baseline: str
    points: tuple[Point, ...]
    quick: int
    goals: tuple[Goal, ...] = ()
    bound: Literal["flops", "bytes", ""] = "flops"
    tolerance: float = 1e-5
    notes: str = ""

    def __post_init__(self) -> None:
        named = {self.baseline, *(name for point in self.points for name in point.only)}
        named |= {name for goal in self.goals for name in (goal.contender, goal.against) if name}
        if unknown := named - set(self.contenders):
            raise ValueError(f"case {self.name}: no contender {sorted(unknown)}; there are {list(self.contenders)}")

    def at(self, point: Point) -> dict[str, Contender]:
        """Return the contenders that run at a point."""
        return {name: c for name, c in self.contenders.items() if not point.only or name in point.only}

    def work(self, point: Point, contender: str) -> Work:
        """Return the work of a contender at a point."""
        return (self.contenders[contender].build or self.build)(point)

    def shrunk(self) -> Case:
        """Return the same case at its quick size, for a check that everything runs."""
        points = {(p.backward, p.variant): replace(p, size=self.quick, only=(), rounds=None) for p in self.points}
        return replace(self, points=tuple(points.values()), goals=())


CASES: dict[str, Case] = {}


def register(case: Case) -> Case:
    """Put a case into the table."""
    if case.name in CASES:
        raise ValueError(f"case {case.name} is there already")
    goals = {goal.name for other in CASES.values() for goal in other.goals}
    if twice := [goal.name for goal in case.goals if goal.name in goals or goals.add(goal.name)]:
        raise ValueError(f"case {case.name}: there are goals {twice} already")
    CASES[case.name] = case
    return case
