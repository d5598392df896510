"""Kernels that run in another program, ``csrc/driver.cpp``: emulated, or watched by sanitizers.

``python -m pytest -p driven_kernels`` runs any tests so, if ``REGARD_DRIVER`` holds the driver's command without its
last argument. With ``REGARD_DRIVER_THREADS``, all calls of a pass are given to so many threads at once.
"""

from __future__ import annotations

import ctypes
import math
import os
import shlex
import struct
import subprocess
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from regard._call import plan
from regard.engines.fused import decoding, families, layers, library, lines, panels, pool, prepared, run
from regard.engines.fused.arguments import FIELDS, REALS, RECORDS
from regard.engines.fused.kernel_call import PLACES
from regard.nn.linear import gated, kernels

#: Bytes of an integer, and of a word.
WORD = 8


class Memory:
    """Where the process has memory that kernels were given: the last that was known of each byte."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.sizes: dict[int, int] = {}

    def add(self, start: int, size: int) -> None:
        """Add a block; those that it overlaps were freed."""
        if 0 in (start, size) or self.sizes.get(start) == size:  # tensors without numbers, or without memory
            return
        first = bisect_right(self.starts, start)
        if first and self.starts[first - 1] + self.sizes[self.starts[first - 1]] > start:
            first -= 1
        last = first
        while last < len(self.starts) and self.starts[last] < start + size:
            del self.sizes[self.starts[last]]
            last += 1
        del self.starts[first:last]
        insort(self.starts, start)
        self.sizes[start] = size

    def find(self, address: int) -> int | None:
        """Return the start of the block in which an address lies, or which ends there; None if there is none."""
        i = bisect_right(self.starts, address)
        if i == 0 or address > self.starts[i - 1] + self.sizes[self.starts[i - 1]]:
            return None
        return self.starts[i - 1]


@dataclass
class Batch:
    """Calls, and what their memory held before the first of them.

    Attributes
    ----------
    blocks : dict of int to bytes
        By the number of a block.
    places : dict of int to int
        The number of the block that was at an address, for those that a kernel may write to.
    addresses : list of bytes
        Where in the blocks addresses are.
    calls : list of bytes
    alive : list
        What must not be freed, so that no address comes up twice.
    task : int
        The task that calls belong to now: those of one follow each other.
    """

    blocks: dict[int, bytes] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    addresses: list[bytes] = field(default_factory=list)
    calls: list[bytes] = field(default_factory=list)
    alive: list[Any] = field(default_factory=list)
    task: int = 0

    def add(self, name: str, types: str, given: Sequence[Any], memory: Memory, records: dict[int, int]) -> None:
        """Add a call that is about to run; ``records`` are the sizes in words, by address, of what holds addresses."""
        own = {start: self._new(start, count * WORD) for start, count in records.items()}

        def place(value: int) -> tuple[int, int]:
            """Return the number of a block and a byte in it; −1 and the value if it is no address."""
            if value in own:
                return own[value], 0
            found = memory.find(value)
            if found is None:
                return -1, value
            if found not in self.places:
                self.places[found] = self._new(found, memory.sizes[found])
            return self.places[found], value - found

        for start, number in own.items():
            for i, value in enumerate(integers(start, records[start])):
                block, at = place(value)
                if block >= 0:
                    self.addresses.append(words(number, i * WORD, block, at))
        whole = [(kind, 0 if value is None else value) for kind, value in zip(types, given) if kind != "r"]
        parts = [struct.pack("<48s", name.encode()), words(self.task, len(whole))]
        for kind, value in whole:
            found = place(value) if kind == "p" else (-1, value)
            if kind == "p" and value and found[0] < 0:
                raise RuntimeError(f"{name} is given an address of memory that nobody knows.")
            parts.append(words(*found))
        reals = [value for kind, value in zip(types, given) if kind == "r"]
        self.calls.append(b"".join([*parts, words(len(reals)), struct.pack(f"<{len(reals)}d", *reals)]))

    def _new(self, start: int, size: int) -> int:
        self.blocks[len(self.blocks)] = ctypes.string_at(start, size)
        return len(self.blocks) - 1

    def written(self) -> bytes:
        """Return the batch as the driver reads it."""
        contents = self.blocks.values()
        return b"".join(
            [
                words(len(contents), *map(len, contents)),
                *(each.ljust(padded(len(each)), b"\0") for each in contents),
                words(len(self.addresses)),
                *self.addresses,
                words(len(self.calls)),
                *self.calls,
            ]
        )


def words(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def integers(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


def padded(size: int) -> int:
    return -(-size // WORD) * WORD


def described(name: str, given: Sequence[Any], item: int) -> tuple[dict[int, int], dict[int, int]]:
    """Return the memory of a call that no tensor holds: sizes in bytes, and in words of what holds addresses."""
    family, _, kind = name.partition(".")
    first = given[0]
    if name not in library.SIGNATURES:
        return {given[1]: REALS * item, integers(first, len(FIELDS))[PLACES["flawed"]]: WORD}, {first: len(FIELDS)}
    if name == "decoding.largest_sums":
        return {given[-1]: WORD}, {}
    if family == "lines" and kind != "sizes":
        return {}, {first: len(RECORDS["lines"])}
    if family == "recurrence":
        record = dict(zip(RECORDS["recurrence"], integers(first, len(RECORDS["recurrence"]))))
        plain = {record["wrong"]: 2 * WORD}
        if kind == "step":
            plain[given[4]] = padded((3 * record["K"] + 2 * record["V"]) * item)
        return plain, {first: len(record)}
    if family == "layers":
        record = dict(zip(RECORDS["stack"], integers(first, len(RECORDS["stack"]))))
        return {}, {first: len(record), record["layers"]: record["count"] * len(RECORDS["layer"])}
    return {}, {}


class Driver:
    """The program; ``command`` is its command line without the number of threads."""

    def __init__(self, command: Sequence[str], threads: int = 1) -> None:
        self.process = subprocess.Popen([*command, str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.threads, self.count = threads, 0
        self.names: set[str] = set()

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
        addresses = {number: address for address, number in batch.places.items()}
        for number, before in batch.blocks.items():
            after = self.process.stdout.read(padded(len(before)))
            if len(after) < padded(len(before)):
                self.close()
            if number in addresses:
                ctypes.memmove(addresses[number], after, len(before))

    def close(self) -> None:
        """End the program; raise RuntimeError if it failed."""
        self.process.stdin.close()  # type: ignore[union-attr]
        if (code := self.process.wait()) != 0:
            raise RuntimeError(f"the driver of the kernels ended with code {code}.")


@contextmanager
def driven(driver: Driver) -> Iterator[None]:
    """Run all kernels in the driver in a ``with`` block.

    A driver of several threads gets all tasks at once, small ones too. These calls run in this process
    before that, since a task may go on with their results.
    """
    lock, together, memory, active = RLock(), list[Batch](), Memory(), [True]
    load, address_of = library.load, Tensor.data_ptr

    def data_ptr(tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        with lock:
            memory.add(storage.data_ptr(), storage.nbytes())
            if together:
                together[-1].alive.append(storage)
        return address_of(tensor)

    def loaded(name: str, dtype: torch.dtype) -> library.Function:
        function, types = load(name, dtype), library.SIGNATURES.get(name, "pp")
        symbol = f"{name.replace('.', '_')}_{str(dtype).removeprefix('torch.')}"
        item = 8 if dtype == torch.float64 else 4

        def call(*given: Any) -> None:
            if not active:  # a plan outlived the block
                return function(*given)
            with lock:
                driver.names.add(name)
                batch = together[-1] if together else Batch()
                plain, records = described(name, given, item)
                for start, size in plain.items():
                    memory.add(start, size)
                batch.add(symbol, types, given, memory, records)
                if together:
                    function(*given)
                else:
                    driver.run(batch)
            return None

        return call

    def run_tasks(tasks: Sequence[pool.Task]) -> None:
        with lock:
            together.append(Batch())
            try:
                for together[-1].task, task in enumerate(tasks):
                    task()
                driver.run(together[-1])
            finally:
                together.pop()

    @contextmanager
    def lent(scratch: run.Scratch) -> Iterator[int]:
        """Lend memory that no other task has, of NaN."""
        size = -(-scratch.size * scratch.dtype.itemsize // 64) * 64
        buffer = torch.full((size,), 0xFF, dtype=torch.uint8, device="cpu")
        yield buffer.data_ptr()

    plan.clear_plans()
    with (
        patch.dict(gated._PLANS, clear=True),
        patch.object(library, "load", loaded),
        patch.object(Tensor, "data_ptr", data_ptr),
        patch.object(run.Scratch, "lent", lent),
        patch.object(lines, "_sizes", lines._sizes.__wrapped__),
        patch.object(families, "_preparation", families._preparation.__wrapped__),
        patch.object(prepared, "WORTH", math.inf),  # threads call the kernels of this process
    ):
        try:
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
                patch.object(panels, "_WORTH", 1),
                patch.object(layers, "_WORTH", 1),
                patch.object(kernels, "_WORTH", 1),
            ):
                yield
        finally:
            active.clear()


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
