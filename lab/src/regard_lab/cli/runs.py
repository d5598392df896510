"""What the training commands share: options from flags and files, the console, and the run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import typer
from lightning.pytorch import Callback, Trainer
from rich.progress import BarColumn, Progress, TextColumn

from regard._utils.errors import rejected
from regard_cli.app import INTERRUPTED
from regard_cli.messages import LOST, WRONG, Console, echo, fail, sentence
from regard_lab.cli.flags import parse_setting
from regard_lab.data.toml import read_toml
from regard_lab.models.folders import OPTIONS
from regard_lab.training.objectives import Examples
from regard_lab.training.options import RunOptions, TrainingOptions

# How training goes, in a terminal: a bar with the rate and the time left, and a line for each validation --------------


#: Steps between two looks at the loss, of which about the last ten count, and the lines of a run without validation.
_EVERY, _LINES = 5, 10


class TrainingDisplay(Callback):
    """Shows steps, loss, tokens per second and time left, and what each validation found.

    Parameters
    ----------
    console : Console
        Without a terminal there is no bar, only lines: for each validation, or a few where there is none.
    options : TrainingOptions
    pairs : str, optional
        What pairs are called, such as "words", if they are to be counted rather than tokens.
    """

    def __init__(self, console: Console, options: TrainingOptions, pairs: str = "") -> None:
        self._console, self._options, self._pairs = console, options, pairs
        self._count, self._first, self._before, self._shown, self._loss = 0, 0, 0.0, 0, math.nan
        self._bars: Progress | None = None
        self._lines = False

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        """Start the bar."""
        self._options = module.options  # some are found in the data
        self._count, self._first, self._before = 0, trainer.global_step, module.seconds()
        if self._first and trainer.is_global_zero:
            self._console.print(f"going on after step {self._first:,}")
        self._lines = trainer.is_global_zero and not (self._console.is_terminal or trainer.enable_validation)
        self._shown = int(_LINES * self._options.progress(self._first, self._before))
        if self._console.is_terminal and trainer.is_global_zero:
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
        """Count; move the bar."""
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
        """Take the bar away."""
        self._line(trainer, module)
        self._stop()

    def on_exception(self, *_: Any) -> None:
        """Take the bar away before anybody explains."""
        self._stop()

    def _line(self, trainer: Trainer, module: Any) -> None:
        """Print a line now and then where there is neither a bar nor a validation."""
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
    """Return a time as a clock shows it.

    Examples
    --------
    >>> _clock(3725), _clock(59.6)
    ('1:02:05', '1:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# What the commands that train share: options from a file, from flags and from ``--set``, and a run carried out --------


class Run(Protocol):
    """A run in a folder, of whatever task."""

    folder: Path
    say: Callable[[str], None]

    @property
    def options(self) -> RunOptions:
        """What it is asked for."""

    def train(self, *, resume: bool = ..., callbacks: Any = ...) -> tuple[Any, Any]:
        """Train, and return the model and how training ended."""


def read_options(task: str, options: Path | None) -> dict[str, Any]:
    """Return the table of an options file, whose task must be this one; an empty table without a file."""
    table: dict[str, Any] = read_toml(options) if options is not None else {}
    if table.setdefault("task", task) != task:
        raise rejected("train", f"task in {options}", f"be {task!r}, as the command says", repr(table["task"]))
    return table


def change_options(table: dict[str, Any], changes: dict[str, Any], options: Path | None) -> None:
    """Put values into a table of options at places such as ``training.clip``."""
    for where, value in changes.items():
        *sections, name = where.split(".")
        if len(sections) > 1:
            raise rejected("train", "--set", "be NAME=VALUE or SECTION.NAME=VALUE, such as training.clip=0.5", where)
        inner = table
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise rejected("train", f"{section} in {options}", "be a table", repr(inner))
        inner[name] = value


def training_changes(changes: dict[str, Any], options: Path | None) -> dict[str, Any]:
    """Return the changes as options of training, or raise where something else is to change in a run that goes on."""
    if options is not None:
        raise rejected("train", "--options", f"be left out with --resume, which has its own in {OPTIONS}", str(options))
    others = [where for where in changes if not where.startswith("training.")]
    if others:
        expected = "be left out with --resume: the run goes on as it began"
        raise rejected("train", others[0], expected, changes[others[0]])
    return {where.removeprefix("training."): value for where, value in changes.items()}


def gather_changes(
    given: dict[str, Any], settings: list[str], *, out: Path, resume: bool, show_options: bool
) -> dict[str, Any]:
    """Return what flags and ``--set`` say, by places such as ``training.clip``; ``--set`` goes before flags."""
    if resume and show_options:
        raise rejected("train", "--show-options", f"be left out with --resume; they are in {out / OPTIONS}", "both")
    flags = {name: value for name, value in given.items() if value not in (None, [])}
    return flags | dict(parse_setting(each) for each in settings)


def read_model_options(task: str, options: Path | None, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the table of options of a run: of a file, with the changes."""
    table = read_options(task, options)
    if isinstance(table.get("tokenizer"), str):
        table["tokenizer"] = {"kind": table["tokenizer"]}
    change_options(table, changes, options)
    return table


def show_model_options(chosen: Any, config: Callable[[], Any], *, fixed: Collection[str] = ()) -> None:
    """Print all options of a run, and what else the config of its model has but the fields that the data decides."""
    hidden = {*fixed, *chosen.model}
    rest = {} if chosen.start else asdict(config())
    echo(shown_options(chosen, {k: v for k, v in rest.items() if k not in hidden and v is not None}), end="")


def shown_options(options: RunOptions, rest: dict[str, Any]) -> str:
    """Return all options as TOML, with what they mean; ``rest`` are the fields of the model that are not set."""
    import tomli_w

    declared, section, lines = dict(options.declared()), "", []
    for line in tomli_w.dumps(options.to_table()).splitlines():
        section = f"{line.strip('[]')}." if line.startswith("[") else section
        entry = declared.get(section + line.partition(" = ")[0])
        if entry is not None:
            text, choices = entry.metadata["text"], entry.metadata["choices"]
            listed = "" if all(each in text for each in choices) else f": {', '.join(choices)}"
            line = f"{line:<32}  # {text}{listed}"
        lines.append(line)
    rested = [f"# {each}" for each in tomli_w.dumps(rest).splitlines()]
    return "\n".join([*lines, "", "# What else [model] may have, as it is now:", *rested]) + "\n"


def run_training(console: Console, run: Run, task: str, resume: bool, *, piped: str = "") -> tuple[Any, Any]:
    """Train with a display, and return the model and how training ended; say how to go on where it was interrupted.

    Parameters
    ----------
    console : Console
    run : Run
    task : str
        As the command line calls it.
    resume : bool
    piped : str, optional
        What must stand behind the command that goes on.
    """
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from regard_lab.training.checkpoints import CHECKPOINTS, LAST
    from regard_lab.training.options import TrainingError
    from regard_lab.training.processes import LostProcessError

    on = f"Go on with:  regard train {task} --out {shlex.quote(str(run.folder))} --resume{piped}"
    try:
        model, ended = run.train(resume=resume, callbacks=[TrainingDisplay(console, run.options.training)])
    except (TrainingError, MisconfigurationException) as error:
        raise fail(sentence(error), LOST if isinstance(error, LostProcessError) else WRONG) from None
    except KeyboardInterrupt:  # between the steps and the end
        if not (run.folder / CHECKPOINTS / LAST).exists():
            raise
        run.say(f"Stopped. {on}")
        raise typer.Exit(INTERRUPTED) from None
    if ended.reason == "interrupt":
        run.say(f"Stopped after step {ended.steps:,}; the model is written at the end. {on}")
        raise typer.Exit(INTERRUPTED)
    training = run.options.training
    why = {"steps": "all steps are done", "seconds": "the time is up", "patience": "nothing better was found"}
    best = "" if math.isnan(ended.best) else f"; best {training.metric} {ended.best:.4g}"
    run.say(f"Ended after step {ended.steps:,}: {why[ended.reason]}{best}.")
    if ended.at_frequency_baseline:
        run.say(
            "It has learned no more than how often each symbol is written. Go on with --resume and more --steps or "
            f"--seconds; if that changes nothing, begin anew with a lower --learning-rate (now "
            f"{training.learning_rate:g})."
        )
    return model, ended
