"""What the training commands share: options from flags and files, the console, and the run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import typer

from regard._utils.errors import rejected
from regard_cli.app import INTERRUPTED
from regard_cli.messages import LOST, WRONG, Console, echo, fail, sentence
from regard_lab.cli.flags import parse_setting
from regard_lab.data.toml import read_toml
from regard_lab.models.folders import OPTIONS
from regard_lab.training.options import RunOptions

# Shared by the training commands: options from a file, from flags and from ``--set``, and the run ---------------------


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
        from regard_lab.cli.training_display import TrainingDisplay

        model, ended = run.train(resume=resume, callbacks=[TrainingDisplay(console, run.options.training)])
    except (TrainingError, MisconfigurationException) as error:
        raise fail(sentence(error), LOST if isinstance(error, LostProcessError) else WRONG) from None
    except KeyboardInterrupt:  # after the last step
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
