"""The progress of training: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars

from regard.tasks.training import Progress

_LINES = 10


class TrainingDisplay:
    """Shows every step of training; a context manager, whose ``update`` is training's ``report``.

    Parameters
    ----------
    console : Console
    seconds : float
        The budget, for the time that is left.
    """

    def __init__(self, console: Console, seconds: float) -> None:
        self.seconds = seconds
        self._console = console
        self._shown = 0
        self._bars: Bars | None = None
        if console.is_terminal:
            columns = TextColumn("training"), BarColumn(bar_width=None), TextColumn("{task.fields[state]}")
            self._bars = Bars(*columns, console=console, expand=True, refresh_per_second=4)
            self._task = self._bars.add_task("", total=1.0, state="starting")

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def update(self, progress: Progress) -> None:
        """Show where training stands."""
        if self._bars is not None:
            self._bars.update(self._task, completed=progress.fraction, state=self._state(progress))
        elif int(progress.fraction * _LINES) > self._shown:
            self._shown = int(progress.fraction * _LINES)
            self._console.print(f"training {progress.fraction:4.0%}  {self._state(progress)}", highlight=False)

    def _state(self, progress: Progress) -> str:
        left = max(0, round(self.seconds - progress.seconds))
        return f"loss {progress.loss:.3f}  {progress.rate:,.0f} words/s  {left // 60}:{left % 60:02d} left"
