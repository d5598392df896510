"""A pool of threads for kernels, which run without the GIL."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def _forget() -> None:
    """Begin anew in a forked child: the parent's threads do not exist there, and its lock may be held."""
    global _lock, _pool
    _lock, _pool = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _threads() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max(os.cpu_count() or 1, 1), thread_name_prefix="regard")
        return _pool


def run(tasks: Sequence[Callable[[], None]]) -> None:
    """Run tasks on ``torch.get_num_threads()`` threads, the caller's among them; the first error is raised.

    An error or a keyboard interrupt lets the tasks that have begun come to their end, since they write to memory
    that is about to be freed, and begins no other.
    """
    helpers = min(torch.get_num_threads(), len(tasks)) - 1
    if helpers < 1:
        for task in tasks:
            task()
        return
    remaining = list(reversed(tasks))  # pop() of a list is atomic

    def work() -> None:
        while remaining:
            try:
                task = remaining.pop()
            except IndexError:
                return
            try:
                task()
            except BaseException:
                remaining.clear()
                raise

    futures = [_threads().submit(work) for _ in range(helpers)]
    try:
        work()
    finally:
        remaining.clear() if futures is None else None
        _join(futures, remaining)
    for future in futures:
        future.result()


def _join(futures: list, remaining: list) -> None:  # type: ignore[type-arg]
    """Wait for the other threads; an interrupt meanwhile is raised after they have stopped."""
    interrupt: BaseException | None = None
    while True:
        try:
            wait(futures)
            break
        except KeyboardInterrupt as error:
            interrupt = error
            remaining.clear()
    if interrupt is not None:
        raise interrupt
