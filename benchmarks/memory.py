"""Peak extra memory of one call in a fresh child process, from the kernel's high-water mark."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Elsewhere
from benchmarks.registry import CASES, MissingError, Point

#: A fresh process is warmed up at this size, where the point is not smaller: threads start, kernels load.
WARM = 512
#: The allocator returns blocks of at least this size to the system, so that a call cannot reuse earlier memory.
BLOCK = 1 << 16
TIMEOUT = 600.0


class ChildError(Exception):
    """A child process did not answer with a number; the message says why."""


def peak_extra(call: Callable[[], object]) -> int:
    """Return the peak memory of a call in this process beyond that before it, in bytes."""
    if isinstance(call, Elsewhere):
        call()
        return call.peak
    gc.collect()
    _trim()
    if not reset():
        return _sampled(call)
    before = status("VmRSS")
    result = call()
    peak = status("VmHWM")
    del result
    return max(peak - before, 0)


def reset() -> bool:
    """Have this process's high-water mark start again from here; return whether that can be done."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def of_contender(case: str, point: Point, contender: str) -> int:
    """Return a contender's peak extra memory in bytes, measured in a fresh process."""
    return fresh(_contender, case, point, contender, torch.get_num_threads())


def fresh(function: Callable[..., int], *arguments: Any) -> int:
    """Return ``function(*arguments)`` of a fresh process. Raises :class:`ChildError` where that yields none."""
    # A fork server has torch imported but has started no thread: a child is fresh and costs no import.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.cases"])
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        if not mine.poll(TIMEOUT):
            raise ChildError(f"no answer within {TIMEOUT:.0f} s")
        answer = mine.recv()
    except EOFError:
        process.join()
        raise ChildError(f"the process ended with code {process.exitcode}") from None
    finally:
        if process.is_alive():
            process.join(1)
            process.kill()
        process.join()
        mine.close()
    if isinstance(answer, str):
        raise ChildError(answer)
    return answer


def _answer(pipe: Connection, function: Callable[..., int], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send(function(*arguments))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    pipe.close()


def _contender(case_name: str, point: Point, name: str, threads: int) -> int:
    import benchmarks.cases  # noqa: F401  (fills the registry)

    torch.set_num_threads(threads)
    keep_nothing()
    case = CASES[case_name]
    contender = case.contenders[name]
    if contender.compiles:
        call = contender.prepare(case.work(point, name))
        call()
    else:
        small = replace(point, size=min(point.size, max(case.quick, WARM)))
        contender.prepare(case.work(small, name))()
        call = contender.prepare(case.work(point, name))
    return peak_extra(call)


def status(field: str) -> int:
    """Return a field of this process's status in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise MissingError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024


def _libc() -> Any:
    return ctypes.CDLL(None)


def keep_nothing() -> None:
    """Have glibc return every large block to the system at once (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD)."""
    try:
        for option in (-3, -1):
            _libc().mallopt(option, BLOCK)
    except (AttributeError, OSError):  # another C library: what it keeps is not counted twice
        return


def _trim() -> None:
    try:
        _libc().malloc_trim(0)
    except (AttributeError, OSError):
        return


def _sampled(call: Callable[[], object]) -> int:
    """Watch the resident size from a thread, where the high-water mark cannot be set back."""
    page, statm = os.sysconf("SC_PAGE_SIZE"), Path("/proc/self/statm")

    def resident() -> int:
        return int(statm.read_text().split()[1]) * page

    before = peak = resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, resident())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = call()
    peak = max(peak, resident())
    done.set()
    watcher.join()
    del result
    return peak - before
