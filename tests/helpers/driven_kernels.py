"""Kernels that run in another program, ``csrc/driver.cpp``: emulated, or on threads that ThreadSanitizer watches.

``python -m pytest -p driven_kernels`` runs any tests so, if ``REGARD_DRIVER`` holds the driver's command without its
last argument. With ``REGARD_DRIVER_THREADS``, all calls of a pass are given to so many threads at once.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from regard.engines.fused import decoding, families, library, pool, run
from regard.engines.fused.arguments import FIELDS
from regard.engines.fused.kernel_call import PLACES, KernelCall

#: Bytes of an integer, and of a word.
WORD = 8


@dataclass
class Call:
    """A call of a kernel.

    Attributes
    ----------
    name : str
    reals : list of float
    scratch, scratch_place : int
        Bytes of scratch memory, and which argument is its address, −1 for none.
    arguments : list of int
    sizes : dict of int to int
        Bytes of the memory that an argument is the address of.
    """

    name: str
    reals: list[float]
    scratch: int
    scratch_place: int
    arguments: list[int]
    sizes: dict[int, int]


@dataclass
class Batch:
    """Calls, and what their memory held before the first of them."""

    calls: list[Call] = field(default_factory=list)
    memory: dict[int, bytes] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)

    def add(self, call: Call, *alive: Any) -> None:
        """Add a call that is about to run; keep its arrays alive, so that no address comes up twice."""
        self.calls.append(call)
        self.alive += alive
        for place, size in call.sizes.items():
            address = call.arguments[place]
            known = self.memory.get(address, b"")
            self.memory[address] = known + ctypes.string_at(address + len(known), max(size - len(known), 0))

    def written(self) -> bytes:
        """Return the batch as the driver reads it."""
        index = {address: i for i, address in enumerate(self.memory)}
        blocks = list(self.memory.values())
        parts = [words(len(blocks), *map(len, blocks)), *(each.ljust(padded(len(each)), b"\0") for each in blocks)]
        parts.append(words(len(self.calls)))
        for call in self.calls:
            parts.append(struct.pack("<48s3d", call.name.encode(), *call.reals))
            parts.append(words(call.scratch, call.scratch_place, len(call.arguments)))
            for place, value in enumerate(call.arguments):
                parts.append(words(index[value] if place in call.sizes else -1, value))
        return b"".join(parts)


def words(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def extent(tensor: Tensor) -> int:
    """Return the bytes from the first number of a tensor to the last, with those between them."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def padded(size: int) -> int:
    return -(-size // WORD) * WORD


class Driver:
    """The program; ``command`` is its command line without the number of threads."""

    def __init__(self, command: Sequence[str], threads: int = 1) -> None:
        self.process = subprocess.Popen([*command, str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.threads, self.count = threads, 0

    def run(self, batch: Batch) -> None:
        """Run the calls, and put the memory after them where it belongs."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.count += len(batch.calls)
        try:
            self.process.stdin.write(batch.written())
            self.process.stdin.flush()
        except BrokenPipeError:
            self.close()
        for address, before in batch.memory.items():
            after = self.process.stdout.read(padded(len(before)))
            if len(after) < len(before):
                self.close()
            ctypes.memmove(address, after, len(before))

    def close(self) -> None:
        """End the program; raise RuntimeError if it failed."""
        self.process.stdin.close()  # type: ignore[union-attr]
        if (code := self.process.wait()) != 0:
            raise RuntimeError(f"the driver of the kernels ended with code {code}.")


@contextmanager
def driven(driver: Driver) -> Iterator[None]:
    """Run all kernels in the driver in a ``with`` block.

    A driver of several threads gets the calls of all tasks at once, small ones too. These calls run in this process
    before that, since a task may go on with their results.
    """
    lock, together = RLock(), list[Batch]()
    load, execute = library.load, KernelCall.__call__

    def give(call: Call, here: Callable[[], None], *alive: Any) -> None:
        with lock:
            if together:
                together[-1].add(call, *alive)
                here()
                return
            batch = Batch()
            batch.add(call)
            driver.run(batch)

    def run_call(
        call: KernelCall,
        arrays: Mapping[str, Tensor | None],
        numbers: Mapping[str, int],
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        arguments = call.filled(arrays, numbers, sizes).tolist()
        tensors = {name: t for name, t in {**call.arrays, **arrays}.items() if t is not None and t.numel() > 0}
        scratch, item = call.sizes["scratch_numbers"], call.dtype.itemsize
        made = Call(
            f"{call.name.replace('.', '_')}_{str(call.stored or call.dtype).removeprefix('torch.')}",
            list(call.reals),
            scratch * item,
            PLACES["scratch"],
            arguments,
            {PLACES[name]: extent(tensor) for name, tensor in tensors.items()},
        )
        assert len(arguments) == len(FIELDS)
        give(made, lambda: execute(call, arrays, numbers, sizes), *tensors.values())

    def loaded(name: str, dtype: torch.dtype) -> library.Function:
        function = load(name, dtype)
        describe = {"decoding.read_rows": rows_read, "decoding.log_sums": sums_logged}.get(name)
        if describe is None:
            return function
        full = f"{name.replace('.', '_')}_{str(dtype).removeprefix('torch.')}"
        return lambda *given: give(describe(full, dtype.itemsize, *given), lambda: function(*given))

    def run_tasks(tasks: Sequence[pool.Task]) -> None:
        with lock:
            together.append(Batch())
            try:
                for task in tasks:
                    task()
                driver.run(together[-1])
            finally:
                together.pop()

    with patch.object(KernelCall, "__call__", run_call), patch.object(library, "load", loaded):
        if driver.threads == 1:
            yield
            return
        with (
            patch.object(pool, "run", run_tasks),
            patch.object(run, "ALONE", 0),
            patch.object(run, "ALONE_BACKWARD", 0),
            patch.object(run, "SHARE", 1),
            patch.object(families, "PREPARED", 1),
            patch.object(decoding, "_WORTH", 1),
        ):
            yield


def integers(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


def rows_read(name: str, item: int, *given: Any) -> Call:
    """Describe a call of ``decoding.read_rows``."""
    arguments = [0 if i == 14 else each for i, each in enumerate(given)]
    _, q_row, _, _, kv_row, which, table, T, counts, first, last, H, G, D, scale, _, out_row, _ = given
    named = integers(which, last)
    seen = integers(counts, max(named, default=-1) + 1)
    rows = [row for w in named[first:] for row in integers(table + w * T * WORD, seen[w])]
    keys = max(rows, default=-1) * kv_row + G * D if rows else 0
    numbers = {0: (last - 1) * q_row + H * D, 2: keys, 3: keys, 15: (last - 1) * out_row + H * D}
    sizes = {place: count * item for place, count in numbers.items() if count > 0}
    sizes |= {5: last * WORD, 6: len(seen) * T * WORD, 8: len(seen) * WORD}
    return Call(name, [scale, 0.0, 0.0], H * (T + 16) * item, 17, arguments, sizes)


def sums_logged(name: str, item: int, *given: Any) -> Call:
    """Describe a call of ``decoding.log_sums``."""
    _, row, _, last, N, length, _, hidden, _, _ = given
    numbers = {0: (last - 1) * row + N, 8: last, 9: last * -(-N // length)}
    sizes = {place: count * item for place, count in numbers.items()} | ({6: hidden * WORD} if hidden else {})
    return Call(name, [0.0] * 3, 0, -1, list(given), sizes)


@pytest.fixture(autouse=True, scope="session")
def _driven_kernels() -> Iterator[None]:
    command = os.environ.get("REGARD_DRIVER")
    if not command:
        yield
        return
    driver = Driver(shlex.split(command), int(os.environ.get("REGARD_DRIVER_THREADS", "1")))
    with driven(driver):
        yield
    driver.close()
    assert driver.count > 0
