"""Shared by the training commands: options from flags and files, and the run itself."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import typer

from regard._utils.errors import rejected
from regard_cli.app import INTERRUPTED
from regard_cli.messages import LOST, WRONG, Console, fail, sentence
from regard_lab._options import read_toml
from regard_lab.cli.flags import parse_setting
from regard_lab.models.folders import OPTIONS
from regard_lab.training.options import RunOptions


class Run(Protocol):
    """A training run of any task, in a folder."""

    folder: Path
    say: Callable[[str], None]

    @property
    def options(self) -> RunOptions:
        """Its options."""

    def train(self, *, resume: bool = ..., callbacks: Any = ...) -> tuple[Any, Any]:
        """Train, and return the model and how training ended."""


@dataclass(frozen=True)
class TrainingCall:
    """What a training command was called with.

    Attributes
    ----------
    out : Path
        Folder of the run.
    resume, show_options : bool
    options : Path or None
        Options file.
    given : dict
        The flags used, by places such as ``"training.steps"``. Flags override the file.
    settings : list of str
        ``NAME=VALUE`` of ``--set``; they override flags.
    """

    out: Path
    resume: bool
    show_options: bool
    options: Path | None
    given: dict[str, Any]
    settings: list[str]

    def changes(self) -> dict[str, Any]:
        """Return what flags and ``--set`` say, by places such as ``training.clip``."""
        if self.resume and self.show_options:
            expected = f"be left out with --resume; they are in {self.out / OPTIONS}"
            raise rejected("train", "--show-options", expected, "both")
        flags = {name: value for name, value in self.given.items() if value not in (None, [])}
        return flags | dict(parse_setting(each) for each in self.settings)

    def training_changes(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Return the changes as training options, or raise if something else would change in a resumed run."""
        if self.options is not None:
            expected = f"be left out with --resume, which has its own in {OPTIONS}"
            raise rejected("train", "--options", expected, str(self.options))
        for where, value in changes.items():
            if not where.startswith("training."):
                raise rejected("train", where, "be left out with --resume: a resumed run keeps its options", value)
        return {where.removeprefix("training."): value for where, value in changes.items()}


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


def read_model_options(task: str, options: Path | None, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the table of options of a run: of a file, with the changes."""
    table = read_options(task, options)
    if isinstance(table.get("tokenizer"), str):
        table["tokenizer"] = {"kind": table["tokenizer"]}
    change_options(table, changes, options)
    return table


def shown_options(options: RunOptions, rest: dict[str, Any]) -> str:
    """Return all options as commented TOML; ``rest`` are the model's fields that are not set."""
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
    """Train with a progress display, and return the model and the result; say how to resume an interrupted run.

    Parameters
    ----------
    console : Console
    run : Run
    task : str
        As the command line calls it.
    resume : bool
    piped : str, optional
        End of the command that resumes the run, such as `` < pairs.tsv``.
    """
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from regard_lab.training.checkpoints import CHECKPOINTS, LAST
    from regard_lab.training.loop import LostProcessError
    from regard_lab.training.options import TrainingError

    on = f"Resume with:  regard train {task} --out {shlex.quote(str(run.folder))} --resume{piped}"
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
            "It has learned no more than how often each symbol is written. Continue with --resume and more --steps or "
            f"--seconds; if that changes nothing, begin anew with a lower --learning-rate (now "
            f"{training.learning_rate:g})."
        )
    return model, ended
