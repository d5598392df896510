"""Test the laws on many random cases in worker processes that may crash, with a journal to resume from."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

import regard
from regard import engines
from regard.engines import Engine
from regard.testing.case import Case, Recipe, kinds_in, mask_names, normalizer_names, score_names
from regard.testing.case_generator import CaseSampler, mask
from regard.testing.conformance import combinations, draw_for, judge
from regard.testing.guarded_memory import guarded_kernels
from regard.testing.laws import LAWS, Law

# Run work that may crash or hang in worker processes that are replaced ------------------------------------------------


#: Seconds between checks for hanging processes.
_POLL = 1.0


@dataclass(frozen=True)
class Failure:
    """The process "died", with ``exit_code`` (minus the signal number), or "hung" and was killed."""

    what: str
    exit_code: int | None = None

    def __str__(self) -> str:
        """Return a description of the failure."""
        return f"the process {self.what}" + ("" if self.exit_code is None else f" with exit code {self.exit_code}")


@dataclass
class _Worker:
    """A worker process and its current item."""

    process: Any
    pipe: Connection
    item: int = 0
    since: float = field(default_factory=time.monotonic)


def _answer(function: Callable[[int], Any], pipe: Connection) -> None:
    torch.set_num_threads(1)
    usable = True
    with suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while usable:
            found = function(pipe.recv())
            usable = _device_works()
            pipe.send((found, usable))


def _device_works() -> bool:
    """Whether a process can still use its GPU: not after a kernel that read or wrote what it must not."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def answers(
    function: Callable[[int], Any],
    items: Iterable[int],
    workers: int = 1,
    patience: float = 900.0,
    until: float = float("inf"),
) -> Iterator[tuple[int, Any]]:
    """Yield ``(item, function(item))`` from worker processes in order of completion; a :class:`Failure` for a crash.

    A process whose GPU is lost to a faulty kernel is replaced after its answer.

    Parameters
    ----------
    function : callable
        Must be picklable; each process runs it with one torch thread.
    items : iterable of int
        With one worker, the next is drawn when the previous answer was used.
    workers : int
        0 for this process, which does one item at least.
    patience : float
        Seconds after which a process without an answer is killed.
    until : float
        The time, of ``time.monotonic``, at which to stop, whatever is not done.
    """
    if not workers:
        for item in items:
            yield item, function(item)
            if time.monotonic() > until:
                return
        return
    context = multiprocessing.get_context("spawn")
    remaining, busy = iter(items), dict[Connection, _Worker]()

    def employ(worker: _Worker | None) -> None:
        for item in remaining:
            if worker is None:
                mine, theirs = context.Pipe()
                worker = _Worker(context.Process(target=_answer, args=(function, theirs), daemon=True), mine)
                worker.process.start()
                theirs.close()
            worker.item, worker.since = item, time.monotonic()
            worker.pipe.send(item)
            busy[worker.pipe] = worker
            return
        if worker is not None:
            _end(worker)

    try:
        for _ in range(workers):
            employ(None)
        while busy and time.monotonic() < until:
            for pipe in wait(list(busy), min(_POLL, max(until - time.monotonic(), 0.0))):
                worker = busy.pop(pipe)  # type: ignore[call-overload]
                try:
                    answer, usable = worker.pipe.recv()
                except (EOFError, ConnectionResetError):
                    worker.process.join()
                    yield worker.item, Failure("died", worker.process.exitcode)
                    employ(None)
                else:
                    yield worker.item, answer
                    if not usable:
                        _end(worker)
                    employ(worker if usable else None)
            for worker in [each for each in busy.values() if time.monotonic() - each.since > patience]:
                del busy[worker.pipe]
                _end(worker)
                yield worker.item, Failure("hung")
                employ(None)
    finally:
        for worker in busy.values():
            _end(worker)


def _end(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.join()
    worker.pipe.close()


# A campaign: the laws on thousands of random cases, with a journal to resume from -------------------------------------


#: How many failures to print in full.
PRINTED = 40
#: How many laws and engines to draw for one case before giving up.
_DRAWS = 200
#: Masks that are drawn before a kind is taken to be one that is never drawn.
_MASKS = 2000


@dataclass(frozen=True)
class Plan:
    """The parameters that determine every case of a campaign.

    Attributes
    ----------
    seed : int
    laws, engines : tuple of str
    guard : bool
        Whether compiled kernels run on guarded memory (:mod:`regard.testing.guarded_memory`).
    score, normalizer : str, optional
        The only ones in the cases; a score's variants, ``"gaussian/learned"``, are those of its name.
    mask : str, optional
        A kind of mask that is in every case's mask, unless the law brings its own.
    device : str
        Where the engines run.
    source : str, optional
        A Python file, or a module, that registers parts; every process imports it (:func:`import_parts`).
    """

    seed: int = 0
    laws: tuple[str, ...] = tuple(LAWS)
    engines: tuple[str, ...] = tuple(engines.TABLE)
    guard: bool = False
    score: str | None = None
    normalizer: str | None = None
    mask: str | None = None
    device: str = "cpu"
    source: str | None = None

    def among(self, engine: Engine) -> list[tuple[str, str, str]]:
        """Return the (score, normalizer, dtype) of which an engine's cases are drawn."""
        return [
            found
            for found in combinations(engine, self.device)
            if self.score in (None, found[0], found[0].split("/")[0]) and self.normalizer in (None, found[1])
        ]

    def case(self, index: int) -> tuple[Law, Engine, Case]:
        """Return the case with this number: the first draw to which its law applies."""
        dice = CaseSampler(hash((self.seed, index)))
        for _ in range(_DRAWS):
            name = random.Random(dice.seed()).choices(self.laws, [LAWS[law].share for law in self.laws])[0]
            engine = engines.TABLE[dice.pick(self.engines)]
            among = self.among(engine)
            case = draw_for(dice, LAWS[name], engine, among, self.recipe(dice), self.device) if among else None
            if case is not None:
                return LAWS[name], engine, case
        parts = [part for part in (self.score, self.normalizer, self.mask) if part is not None]
        of = f" with {', '.join(parts)}" if parts else ""
        raise ValueError(f"the laws {', '.join(self.laws)} concern no case of {', '.join(self.engines)}{of}")

    def recipe(self, dice: CaseSampler) -> Recipe | None:
        """Return a mask that has the plan's kind in it; None where any will do."""
        if self.mask is None:
            return None
        for _ in range(_MASKS):
            found = mask(dice, 2, True)
            if self.mask in kinds_in(found):
                return found
        return (self.mask,)  # a kind that only laws draw, without arguments


@dataclass(frozen=True)
class Entry:
    """The outcome of one case: as :class:`~regard.testing.Verdict` says, or "died" or "hung" with its process.

    ``parts`` are its score, its normalizer and the kinds of its mask.
    """

    index: int
    law: str
    engine: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0
    parts: tuple[str, ...] = ()

    @property
    def is_broken(self) -> bool:
        """True unless the law held or the engine refused the case."""
        return self.outcome not in ("held", "refused")


@cache
def import_parts(source: str) -> None:
    """Import a file (``parts.py``) or a module that registers parts, once in a process.

    Raises
    ------
    ModuleNotFoundError
        If there is no such file or module.
    """
    if not source.endswith(".py"):
        importlib.import_module(source)
        return
    path = Path(source)
    if not path.is_file():
        raise ModuleNotFoundError(f"there is no file {source}", name=source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, path
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def entry(plan: Plan, index: int) -> Entry:
    """Draw and judge one case."""
    if plan.source is not None:
        import_parts(plan.source)
    began = time.monotonic()
    law, engine, case = plan.case(index)
    with guarded_kernels() if plan.guard else nullcontext():
        verdict = judge(law, engine, case)
    reason = str(verdict) if verdict.outcome == "broken" else ""
    return Entry(index, law.name, engine.name, verdict.outcome, reason, time.monotonic() - began, parts_of(case))


def parts_of(case: Case) -> tuple[str, ...]:
    """Return what :class:`Entry` says of a case's parts."""
    masked = sorted(f"mask {kind}" for kind in kinds_in(case.mask))
    return f"score {case.score.split('/')[0]}", f"normalizer {case.normalizer}", *masked


def entries(
    plan: Plan, indices: Sequence[int], workers: int = 0, patience: float = 900.0, until: float = float("inf")
) -> Iterator[Entry]:
    """Yield the outcomes of cases, judged in this process or in worker processes, as :func:`answers` does."""
    for index, found in answers(partial(entry, plan), indices, workers, patience, until):
        if isinstance(found, Failure):
            law, engine, case = plan.case(index)
            reason = f"{law.name} / {engine.name}: {found}\n    judge({law.name!r}, {engine.name!r}, {case})"
            found = Entry(index, law.name, engine.name, found.what, reason, parts=parts_of(case))
        yield found


@dataclass
class Tally:
    """Counts of the outcomes so far."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    broken: list[Entry] = field(default_factory=list)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    parts: Counter[str] = field(default_factory=Counter)

    def add(self, found: Entry) -> None:
        """Count a case."""
        self.counts[found.law, found.engine, "broken" if found.is_broken else found.outcome] += 1
        self.seconds[found.law] += found.seconds
        if found.outcome != "refused":
            self.parts.update(found.parts)
        if found.is_broken:
            self.broken.append(found)

    def total(self) -> int:
        """Return the number of cases."""
        return sum(self.counts.values())

    def table(self) -> str:
        """Return a table of laws (rows) and engines (columns) with the counts of held, refused and broken cases."""
        names = sorted({engine for _, engine, _ in self.counts})
        lines = ["law".ljust(20) + "".join(name.rjust(18) for name in names) + "ms/case".rjust(10)]
        for law in LAWS:
            count = sum(n for (name, _, _), n in self.counts.items() if name == law)
            if count:
                cells = "".join(self._cell(law, name).rjust(18) for name in names)
                lines.append(law.ljust(20) + cells + f"{1e3 * self.seconds[law] / count:10.1f}")
        return "\n".join([*lines, "held (+ refused); ✗ broken"])

    def drawn(self) -> str:
        """Return how many cases each part was in, refusals apart: a line each for scores, normalizers and masks."""
        lines = []
        for kind in ("score", "normalizer", "mask"):
            counts = {part.split()[1]: count for part, count in self.parts.most_common() if part.startswith(kind)}
            lines.append(f"{kind}s drawn: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
        return "\n".join(lines)

    def _cell(self, law: str, engine: str) -> str:
        held, refused, broken = (self.counts[law, engine, outcome] for outcome in ("held", "refused", "broken"))
        cell = f"{held} (+{refused})" if refused else str(held)
        return f"{cell} ✗{broken}" if broken else cell


def code(source: str | None = None) -> str:
    """Return a checksum of the modules that cases run; a journal is valid for one version of them.

    ``source`` is the file that registers further parts.
    """
    root, found = Path(regard.__file__).parent, hashlib.sha256()
    for folder in ("", "engines", "masks", "normalizers", "scores", "testing"):
        paths = (root / folder).glob("*.py") if folder in ("", "testing") else (root / folder).rglob("*.py")
        for path in sorted(paths):
            found.update(path.read_bytes())
    if source is not None and source.endswith(".py"):
        found.update(Path(source).read_bytes())
    return found.hexdigest()[:16]


class Journal:
    """A file with a header and one line for each case, from which an interrupted campaign resumes.

    Raises
    ------
    ValueError
        If the file belongs to another plan or another version of the code.
    """

    def __init__(self, path: Path, plan: Plan) -> None:
        head = {"code": code(plan.source), **asdict(plan), "laws": list(plan.laws), "engines": list(plan.engines)}
        self.found: list[Entry] = []
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if lines:
            if json.loads(lines[0]) != head:
                raise ValueError(f"{path} belongs to another campaign or another version of the code. Delete it first.")
            self.found = [Entry(**json.loads(line)) for line in lines[1:] if line.endswith("}")]
        path.parent.mkdir(parents=True, exist_ok=True)
        # Rewrite the file, because its last line may be incomplete.
        temporary = path.with_suffix(".new")
        temporary.write_text(
            "".join(f"{json.dumps(each)}\n" for each in [head, *map(asdict, self.found)]), encoding="utf-8"
        )
        temporary.replace(path)
        self._file: Any = path.open("a", encoding="utf-8", buffering=1)

    def add(self, found: Entry) -> None:
        """Write the outcome of a case."""
        self._file.write(f"{json.dumps(asdict(found))}\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def run(cases: int, plan: Plan, workers: int = 0, journal: Path | None = None, progress: bool = True) -> Tally:
    """Judge the cases of a plan that its journal lacks; the same plan always draws the same cases."""
    tally, began = Tally(), time.monotonic()
    kept = None if journal is None else Journal(journal, plan)
    previous = [] if kept is None else [each for each in kept.found if each.index < cases]
    for each in previous:
        tally.add(each)
    done = {each.index for each in previous}
    try:
        for found in entries(plan, [index for index in range(cases) if index not in done], workers):
            tally.add(found)
            if kept is not None:
                kept.add(found)
            if found.is_broken and len(tally.broken) <= PRINTED:
                _print(progress, f"\r{found.reason}\n")
            if tally.total() % 100 == 0:
                rate = (tally.total() - len(previous)) / (time.monotonic() - began)
                _print(progress, f"\r{tally.total()} of {cases} cases, {rate:.0f}/s, {len(tally.broken)} broken ")
    finally:
        if kept is not None:
            kept.close()
    _print(progress, "\n")
    return tally


def _print(progress: bool, text: str) -> None:
    if progress:
        sys.stderr.write(text)
        sys.stderr.flush()


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of a campaign."""
    made = argparse.ArgumentParser(prog="python -m regard.testing", description="Test the laws of attention.")
    made.add_argument("--cases", type=int, default=2000, help="number of random cases (default: 2000)")
    made.add_argument("--seed", type=int, default=0, help="random seed; equal seeds draw equal cases (default: 0)")
    made.add_argument("--law", action="append", choices=list(LAWS), metavar="NAME", help="only this law; repeatable")
    made.add_argument("--engine", action="append", choices=list(engines.TABLE), metavar="NAME", help="only this engine")
    made.add_argument(
        "--import",
        dest="source",
        metavar="FILE_OR_MODULE",
        help="import parts of your own first: a .py file or a module",
    )
    made.add_argument("--score", choices=score_names(), metavar="NAME", help="only cases of this score")
    made.add_argument("--normalizer", choices=normalizer_names(), metavar="NAME", help="only cases of this normalizer")
    made.add_argument("--mask", choices=mask_names(), metavar="NAME", help="only cases with this kind of mask")
    made.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="worker processes; 0 runs in this process"
    )
    made.add_argument("--journal", type=Path, help="file of finished cases, from which the same command resumes")
    made.add_argument("--device", default="cpu", help="where the engines run, such as cuda (default: cpu)")
    made.add_argument("--guard", action="store_true", help="run compiled kernels on guarded memory")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign from the command line; return 1 if a law is broken."""
    first = argparse.ArgumentParser(add_help=False)  # what it imports are choices of the other options
    first.add_argument("--import", dest="source")
    source = first.parse_known_args(arguments)[0].source
    if source is not None:
        try:
            import_parts(source)
        except ModuleNotFoundError as error:
            if not f"{source}.".startswith(f"{error.name}."):  # a module that the file itself needs
                raise
            kind = "file" if source.endswith(".py") else "module"
            print(f"--import {source}: there is no such {kind}. Pass a .py file or a module's name.", file=sys.stderr)
            return 2
    given = parser().parse_args(arguments)
    try:
        torch.empty(1, device=given.device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        print(f"--device {given.device}: torch cannot use it here: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    began = time.monotonic()
    laws, among = tuple(given.law or LAWS), tuple(given.engine or engines.TABLE)
    plan = Plan(given.seed, laws, among, given.guard, given.score, given.normalizer, given.mask, given.device, source)
    try:
        tally = run(given.cases, plan, given.workers, given.journal)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(tally.table())
    print(tally.drawn())
    print(f"{tally.total()} cases in {time.monotonic() - began:.0f} s, {len(tally.broken)} broken")
    return 1 if tally.broken else 0
