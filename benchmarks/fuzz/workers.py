"""Cases in a process of its own, its memory measured and bounded, which is replaced where it dies or is silent."""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.fuzz.cases import Cases, Outcome

#: Seconds without an answer that are a hang, and bytes that no case may reach, where it is stopped.
SILENT, MOST, STOPPED = 120.0, 2 << 30, 4 << 30
RIGHT = ("accepted", "refused")


def worker(folder: Path, pipe: Connection) -> None:
    """Answer numbers with what came of the cases, and the most memory that each took."""
    import torch

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (STOPPED, STOPPED))  # so that the machine survives
    cases = Cases(folder)
    cases.warm()
    pipe.send(None)
    while (number := pipe.recv()) is not None:
        _forget_peak()
        outcome = cases.run(number)
        pipe.send((outcome, _peak()))


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    """Return the most bytes that were resident since the peak was forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def outcomes(numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield what came of each case."""
    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(numbers))
    while waiting:
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs = context.Pipe()
            process = context.Process(target=worker, args=(Path(folder), theirs), daemon=True)
            process.start()
            theirs.close()
            number = 0  # before the first
            try:
                ours.recv()
                while waiting:
                    number, began = waiting.pop(), time.monotonic()
                    ours.send(number)
                    if not ours.poll(SILENT):
                        yield asdict(Outcome(number, "?", "hang")) | {"bytes": 0, "seconds": SILENT}
                        break
                    outcome, peak = ours.recv()
                    if peak > MOST and outcome.verdict in RIGHT:
                        outcome = Outcome(number, outcome.kind, "memory", f"{peak:,} bytes; {outcome.told}")
                    yield asdict(outcome) | {"bytes": peak, "seconds": round(time.monotonic() - began, 3)}
            except EOFError:
                process.join()
                if not number:
                    raise
                yield asdict(Outcome(number, "?", "dead", f"exit code {process.exitcode}")) | {
                    "bytes": 0,
                    "seconds": 0,
                }
            finally:
                process.kill()
                process.join()
