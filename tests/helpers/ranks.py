"""Run a function in several processes that form a group."""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: Seconds after which a group gives up waiting, and after which nobody waits for the processes.
PATIENCE, LIMIT = 60, 240

#: Processes fork from one that has imported what takes seconds, more than most of them then run.
CONTEXT = mp.get_context("forkserver" if sys.platform == "linux" else "spawn")
CONTEXT.set_forkserver_preload(["pytest", "torch.distributed.tensor", "regard_lab.training.loop"])


def _main(rank: int, size: int, store: str, patience: float, function: Callable[..., Any], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=patience)
    )
    try:
        results.put((rank, function(rank), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def run(function: Callable[[int], Any], size: int, patience: float = PATIENCE, answers: int | None = None) -> list[Any]:
    """Return what the function returned on each rank; of as many ``answers``, where some ranks will die."""
    results = CONTEXT.SimpleQueue()
    found: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, str(Path(folder) / "store"), patience, function, results)
        processes = [CONTEXT.Process(target=_main, args=(rank, *arguments), daemon=True) for rank in range(size)]
        for process in processes:
            process.start()
        try:
            while len(found) < (size if answers is None else answers):
                if not results._reader.poll(LIMIT):
                    raise TimeoutError(f"only ranks {sorted(found)} of {size} answered")
                rank, found[rank], error = results.get()
                assert error is None, f"rank {rank}: {error}"
        finally:
            for process in processes:
                process.join(5 if len(found) == size else 0)
                if process.is_alive():
                    process.kill()
                    process.join()
    return [found.get(rank) for rank in range(size)]
