"""``regard warmup``: compile the CPU kernels ahead of time."""

from __future__ import annotations

import time
from contextlib import closing
from itertools import product

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from regard.engines.fused import compiler as kernel_cache
from regard.engines.fused.compiler import KERNELS
from regard.engines.fused.warmup import Target, compile_ahead
from regard_cli.messages import Console, fail


def run(*, every: bool) -> None:
    """Compile all kernels for float32, and with ``every`` also for float64."""
    folder = kernel_cache.folder()
    if folder is None:
        raise fail("warmup: the cache folder is not writable; set REGARD_CACHE_DIR to another folder.")
    dtypes = (torch.float32, torch.float64) if every else (torch.float32,)
    wanted = [Target(name, dtype) for dtype, name in product(dtypes, KERNELS.names())]
    missing = [each for each in wanted if not KERNELS.is_cached(each.name, each.dtype)]
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{len(wanted) - len(missing)} of {len(wanted)} kernels are already compiled in {folder}.")
    if not missing:
        return
    began, failed = time.monotonic(), []
    columns = TextColumn("compiling kernels"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with (
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars,
        closing(compile_ahead(missing)) as compiled,
    ):
        bar = bars.add_task(f"0 of {len(missing)}", total=len(missing))
        for count, (target, good) in enumerate(compiled, 1):
            failed += [] if good else [str(target)]
            bars.update(bar, completed=count, description=f"{count} of {len(missing)}")
            if good and not console.is_terminal:
                console.print(f"compiled {target} ({count} of {len(missing)})")
    if failed:
        raise fail(f"warmup: {len(failed)} of {len(missing)} kernels could not be compiled: {', '.join(failed)}.")
    console.print(f"Compiled {len(missing)} kernels in {time.monotonic() - began:.0f} seconds.")
