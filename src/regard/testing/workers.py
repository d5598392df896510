"""Work that may kill or hang its process, done by processes that are replaced."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from torch import set_num_threads

#: Seconds between two looks for processes that hang.
_LOOK = 1.0


@dataclass(frozen=True)
class Failure:
    """Why there is no answer: the process "died", with ``exit_code`` (minus the signal), or "hung" and was ended."""

    what: str
    exit_code: int | None = None

    def __str__(self) -> str:
        """Return the failure as one would say it."""
        return f"the process {self.what}" + ("" if self.exit_code is None else f" with exit code {self.exit_code}")


@dataclass
class _Worker:
    """A process that answers, and the item that it is at."""

    process: Any
    pipe: Connection
    item: int = 0
    since: float = field(default_factory=time.monotonic)


def _answer(function: Callable[[int], Any], pipe: Connection) -> None:
    set_num_threads(1)
    with suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            pipe.send(function(pipe.recv()))


def answers(
    function: Callable[[int], Any], items: Iterable[int], workers: int = 1, patience: float = 900.0
) -> Iterator[tuple[int, Any]]:
    """Yield ``(item, function(item))`` as they come from so many processes; a :class:`Failure` where one died or hung.

    Parameters
    ----------
    function : callable
        Anything that can be pickled; each process runs it with one thread of torch.
    items : iterable of int
    workers : int
    patience : float
        Seconds after which a process that has not answered is ended.
    """
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
        while busy:
            for pipe in wait(list(busy), _LOOK):
                worker = busy.pop(pipe)  # type: ignore[call-overload]
                try:
                    answer = worker.pipe.recv()
                except (EOFError, ConnectionResetError):
                    worker.process.join()
                    yield worker.item, Failure("died", worker.process.exitcode)
                    employ(None)
                else:
                    yield worker.item, answer
                    employ(worker)
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
