"""Progress of training in a terminal: a bar with speed and time left, and a line for each validation."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Callback, Trainer
from rich.progress import BarColumn, Progress, TextColumn

from regard_cli.messages import Console
from regard_lab.training.objectives import Examples
from regard_lab.training.options import TrainingOptions

#: Steps between two readings of the loss, which is averaged over about ten; lines printed for a run without validation.
_EVERY, _LINES = 5, 10


class TrainingDisplay(Callback):
    """Shows steps, loss, tokens per second and time left, and what each validation found.

    Parameters
    ----------
    console : Console
        Without a terminal there is no bar, only lines: for each validation, or a few where there is none.
    options : TrainingOptions
    pairs : str, optional
        Name of the pairs, such as "words", to count them instead of tokens.
    """

    def __init__(self, console: Console, options: TrainingOptions, pairs: str = "") -> None:
        self._console, self._options, self._pairs = console, options, pairs
        self._count, self._first, self._before, self._shown, self._loss = 0, 0, 0.0, 0, math.nan
        self._bars: Progress | None = None
        self._lines = False

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        """Start the bar."""
        self._options = module.options  # some depend on the data
        self._count, self._first, self._before = 0, trainer.global_step, module.seconds()
        if self._first and trainer.is_global_zero:
            self._console.print(f"resuming after step {self._first:,}")
        moves = self._console.is_terminal and not self._console.is_dumb_terminal  # a bar needs a cursor that moves
        self._lines = trainer.is_global_zero and not (moves or trainer.enable_validation)
        self._shown = int(_LINES * self._options.progress(self._first, self._before))
        if moves and trainer.is_global_zero:
            steps = "" if self._options.seconds else f" of {self._options.steps:,}"
            columns = (
                TextColumn(f"step {{task.fields[step]:,}}{steps}"),
                BarColumn(),
                TextColumn("{task.fields[state]}"),
            )
            self._bars = Progress(*columns, console=self._console, transient=True)
            self._bars.start()
            self._task = self._bars.add_task("", total=1.0, step=self._first, state="")

    def on_train_batch_end(
        self,
        trainer: Trainer,
        module: Any,
        outputs: Any,  # noqa: ARG002
        batch: Examples,
        number: int,  # noqa: ARG002
    ) -> None:
        """Count examples or tokens, and update the bar."""
        self._count += batch.examples if self._pairs else batch.count
        if trainer.global_step % _EVERY == 0:
            self._loss = module.loss if math.isnan(self._loss) else self._loss + 0.1 * (module.loss - self._loss)
            if self._bars is not None:
                done = self._options.progress(trainer.global_step, module.seconds())
                self._bars.update(
                    self._task, completed=done, step=trainer.global_step, state=self._state(trainer, module)
                )
        self._line(trainer, module)

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        """Print the metrics."""
        if not trainer.is_global_zero or trainer.sanity_checking:
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("valid_")}
        line = "  ".join(f"{name.removeprefix('valid_')} {value:.4g}" for name, value in metrics.items())
        line += f"  no better than guessing by frequency, {module.guess:.4g}" if module.at_frequency_baseline else ""
        self._console.print(f"step {trainer.global_step:,}  {line}  ({self._state(trainer, module)})")

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        """Remove the bar."""
        self._line(trainer, module)
        self._stop()

    def on_exception(self, *_: Any) -> None:
        """Remove the bar before an error message is printed."""
        self._stop()

    def _line(self, trainer: Trainer, module: Any) -> None:
        """Print a line from time to time if there is neither a bar nor validation."""
        if not self._lines:
            return
        done = min(self._options.progress(trainer.global_step, module.seconds()), 1.0)
        if int(done * _LINES) > self._shown:
            self._shown = int(done * _LINES)
            self._console.print(f"training {done:4.0%}  {self._state(trainer, module)}")

    def _stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _state(self, trainer: Trainer, module: Any) -> str:
        seconds = module.seconds()
        used = max(seconds - self._before, 1e-9)
        left = used / max(trainer.global_step - self._first, 1) * max(self._options.steps - trainer.global_step, 0)
        if self._options.seconds:
            left = min(left, max(self._options.seconds - seconds, 0.0))
        loss = "" if math.isnan(self._loss) else f"loss {self._loss:.3f}, "
        return f"{loss}{self._count / used:,.0f} {self._pairs or self._options.unit}/s, {_clock(left)} left"


def _clock(seconds: float) -> str:
    """Return a duration as h:mm:ss or m:ss.

    Examples
    --------
    >>> _clock(3725), _clock(59.6)
    ('1:02:05', '1:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
