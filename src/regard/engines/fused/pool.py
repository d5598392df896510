"""Running tasks on threads: those of torch's own OpenMP team where it can be found, else a pool of Python's.

A thread of torch's team spins for some milliseconds after each of torch's operations. Threads of our own would share
a core with it and lose what they were to win; its own threads are awake already.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from regard.engines.fused import library

Task = Callable[[], None]

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_forked = False


def _begin_anew() -> None:
    """Forget, in a forked child, the parent's threads: they do not exist there, and its lock may be held."""
    global _lock, _pool, _forked
    _lock, _pool, _forked = threading.Lock(), None, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def run(tasks: Sequence[Task]) -> None:
    """Run tasks on ``torch.get_num_threads()`` threads, the caller's among them; the first error is raised.

    An error or a keyboard interrupt lets the tasks that have begun come to their end, since they write to memory
    that is about to be freed, and begins no other.
    """
    if len(tasks) == 1:
        tasks[0]()
        return
    remaining = list(reversed(tasks))
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while remaining:
                try:
                    task = remaining.pop()
                except IndexError:  # another thread took the last one
                    return
                task()
        except BaseException as error:
            remaining.clear()
            errors.append(error)

    threads = min(torch.get_num_threads(), len(tasks))
    if threads < 2:
        work()
    else:
        team = None if _forked else _team()  # a team does not survive a fork
        if team is None:
            _on_pool(work, threads, remaining, errors)
        else:
            _on_team(team, work, threads, errors)
    if errors:
        raise errors[0]


#: Tasks per thread for items of unequal cost, so that no thread waits long for another.
_TASKS = 4


def split(part: Callable[[int, int], None], count: int, tasks: int) -> None:
    """Run ``part(first, last)`` on so many parts of a range of ``count`` items."""
    run([partial(part, count * i // tasks, count * (i + 1) // tasks) for i in range(tasks)])


def shared(part: Callable[[int, int], None], count: int, most: int | None = None) -> None:
    """Let threads run ``part(first, last)`` on parts of a range of so many items: at most ``most``, one per thread.

    By default there are several parts per thread, for items of unequal cost.
    """
    tasks = count if most is None else min(most, count)
    threads = torch.get_num_threads() if tasks > 1 else 1
    split(part, count, min(tasks, threads * _TASKS if most is None else threads) if threads > 1 else 1)


_Body = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
_OldBody = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _on_team(team: Any, work: Task, threads: int, errors: list[BaseException]) -> None:
    def body(*_: int | None) -> None:
        try:
            work()
        except BaseException as error:  # an interrupt between two statements of work()
            errors.append(error)

    if team.__name__ == _PARALLEL_FOR:
        team(0, threads, 1, _Body(body), None)
    else:
        team(_OldBody(body), None, threads, 0)


def run_job(job: int, threads: int) -> None:
    """Let so many threads work on a job of the compiled kernels (csrc/team.cpp), which has this address.

    Nothing interrupts it. Without a team, the caller does all the work.
    """
    alone, in_range = _workers()
    team = None if _forked else _team()
    if team is None:
        alone(job)
    elif team.__name__ == _PARALLEL_FOR:
        team(0, threads, 1, in_range, job)
    else:
        team(alone, job, threads, 0)


@cache
def _workers() -> tuple[Any, Any]:
    """Return what the threads of a team run: its OpenMP library's, and torch's."""
    alone, in_range = library.workers()
    return _OldBody(alone), _Body(in_range)


#: Functions that run another on all threads of torch's team: torch's own (2.10 and later), and its OpenMP library's.
_PARALLEL_FOR, _GOMP = "torch_parallel_for", "GOMP_parallel"


@cache
def _team() -> Any:
    """Return a function that runs another on all threads of torch's team, or None."""
    name = {"darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}.get(sys.platform, "libtorch_cpu.so")
    with suppress(OSError, AttributeError):
        function = getattr(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)), _PARALLEL_FOR)
        function.argtypes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, _Body, ctypes.c_void_p)
        function.restype = ctypes.c_int32
        return function
    with suppress(OSError, AttributeError, TypeError):  # TypeError: Windows has no library of the process
        function = getattr(ctypes.CDLL(None), _GOMP)
        function.argtypes = (_OldBody, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        function.restype = None
        return function
    return None


def _on_pool(work: Task, threads: int, remaining: list[Task], errors: list[BaseException]) -> None:
    global _pool  # noqa: PLW0603 (made at the first use, one for the process)
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max(os.cpu_count() or 1, 1), thread_name_prefix="regard")
        pool = _pool
    helpers: list[Future[None]] = []
    try:
        helpers += (pool.submit(work) for _ in range(threads - 1))
        work()
    except KeyboardInterrupt as error:  # between two statements
        remaining.clear()
        errors.append(error)
    while True:
        try:
            wait(helpers)
            return
        except KeyboardInterrupt as error:
            remaining.clear()
            errors.append(error)
