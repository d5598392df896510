"""A progress bar for whoever asked for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(verbose: int, what: str, total: int | None) -> Iterator[Callable[[int, str], None]]:
    """Show a bar while the block runs; what it yields is called with steps done and a word about how it stands."""
    if not verbose:
        yield _silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
               TextColumn("{task.fields[note]}"))  # fmt: skip
    # As text in notebooks, too: for a widget rich needs ipywidgets, and without it warns at each step.
    with Progress(*columns, console=Console(stderr=True, force_jupyter=False)) as bars:
        task = bars.add_task(what, total=total, note="")

        def advance(steps: int, note: str = "") -> None:
            bars.update(task, advance=steps)
            if note:
                bars.update(task, note=note)

        yield advance


def _silent(steps: int, note: str = "") -> None:
    """Tell nobody."""
