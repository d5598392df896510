"""``regard train`` for pairs of lines: translation, pronunciation and span corruption."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from regard._utils.errors import described, rejected, unknown_name
from regard_cli.messages import Console, echo, report_errors
from regard_lab.cli.kinds import require_kind
from regard_lab.cli.runs import (
    change_options,
    gather_changes,
    read_options,
    run_training,
    shown_options,
    training_changes,
)
from regard_lab.cli.translate import folder_of
from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.models.attending import SCORES
from regard_lab.tasks.translation.options import ExperimentOptions
from regard_lab.tasks.translation.tasks import TASKS, get_task
from regard_lab.tasks.translation.training import Experiment, inherit_options

#: Values of ``--attention`` that are not scores, with the recurrent model's settings that they stand for.
SHORT: dict[str, dict[str, Any]] = {
    "local": {"attention": "general", "scope": "local-p"},
    "hard": {"attention": "additive", "hard": "gumbel", "scope": "global"},
    # Overrides what a preset sets.
    "none": {"attention": "none", "hard": "none", "scope": "global", "wiring": "after", "input_feeding": False},
}
#: Learning rates of presets that train faster with another value than the default.
RATES = {("recurrent", "small"): 4e-3}
MODEL_NAMES = {"rnn": "recurrent", "recurrent": "recurrent", "transformer": "transformer"}


def run(
    task: str,
    *,
    out: Path,
    resume: bool,
    options: Path | None,
    given: dict[str, Any],
    settings: list[str],
    show_options: bool,
) -> None:
    """Train a model, or resume a run.

    ``given`` holds the flags used, keyed by option name, such as ``"training.steps"``. Flags override the options
    file, and ``settings`` override flags.
    """
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    with report_errors("regard-lab[train]"):
        get_task(task)
        changes = gather_changes(given, settings, out=out, resume=resume, show_options=show_options)
        if resume:
            experiment = Experiment.resumed(out, training_changes(changes, options), console.print)
            if experiment.options.task != task:
                raise rejected(
                    "train", "task", f"be {experiment.options.task!r} to resume the run in {out}", repr(task)
                )
        else:
            chosen = ExperimentOptions.from_table(with_tuned_rate(options_table(task, options, changes)))
            if show_options:
                echo(shown_options(chosen, Experiment(chosen, out).options.unset_model_fields()), end="")
                return
            experiment = Experiment(chosen, out, console.print)
            chosen.check_model()
        _train(console, experiment, resume)


def _train(console: Console, experiment: Experiment, resume: bool) -> None:
    task, out = experiment.options.task, experiment.folder
    piped = " < the same pairs" if experiment.options.data.data == "-" else ""
    translator, ended = run_training(console, experiment, task, resume, piped=piped)
    if ended.best == 0 and not ended.at_frequency_baseline and experiment.options.training.metric == "bleu":
        experiment.say(
            "BLEU is 0 because no 4-gram matches. Select checkpoints by chrF instead: --set training.metric=chrf."
        )
    if experiment.task.hides:
        start = shlex.quote(str(out))
        experiment.say(f"The model is in {out}. Now try:  regard train translation --data pairs.tsv --start {start}")
        return
    word, example = ("pronounce", "someword") if task == "pronunciation" else ("translate", '"some text"')
    shown = "--alignment " * bool(translator.model.maps)
    experiment.say(f"The model is in {out}. Now try:  regard {word} --model {shlex.quote(str(out))} {shown}{example}")


def options_table(task: str, options: Path | None, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the file with the changes applied."""
    table = read_options(task, options)
    own = table.get("model")
    _one_attention(f"in {options}", "attention" in table, own if isinstance(own, dict) else {}, "model.")
    _one_attention("with --attention", "attention" in changes, changes, "")
    if changes.keys() & {"model.attention", "model.score"}:
        table.pop("attention", None)  # the file's value
    if "attention" in changes and isinstance(own, dict):
        for name in ("attention", "score", "scope", "hard"):  # fields that --attention sets
            own.pop(name, None)
    change_options(table, changes, options)
    for name in ("kind", "preset", "attention", "start"):
        if not isinstance(table.get(name, ""), str):
            raise rejected("train", name, "be a string", described(table[name]), TypeError)
    start = table.get("start", "")
    require_kind("train", start, *(f"{name} model" for name in TASKS))
    folder = folder_of(Path(start)) if start else None
    model = None if folder is None else SequenceModel.load(folder)
    table["kind"] = _kind(table.get("kind", get_task(task).kind if model is None else model.kind))
    _attention(table)
    if model is not None:
        table = inherit_options(table, model) | {"start": str(folder)}
    training = table.setdefault("training", {})
    if not isinstance(training, dict):
        raise rejected("train", "training", "be a table of options", repr(training))
    training.setdefault("metric", get_task(task).metric)
    return table


def with_tuned_rate(table: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the preset's learning rate, if it has one and the options set none."""
    rate = RATES.get((table["kind"], str(table.get("preset", ExperimentOptions.preset))))
    own = {} if rate is None or table.get("start") else {"learning_rate": rate}
    return table | {"training": own | table["training"]}


def _kind(name: str) -> str:
    if name not in MODEL_NAMES:
        raise unknown_name("train", "model", str(name), MODEL_NAMES)
    return MODEL_NAMES[name]


def _one_attention(where: str, given: bool, others: dict[str, Any], prefix: str) -> None:
    """Raise if both ``attention`` and the field that it stands for are given."""
    for name in ("model.attention", "model.score"):
        if given and name.removeprefix(prefix) in others:
            raise rejected("train", name, f"be left out {where}", repr(others[name.removeprefix(prefix)]))


def _attention(table: dict[str, Any]) -> None:
    """Move the value of ``--attention`` to the fields of the model's config."""
    name = table.pop("attention", None)
    if name is None:
        return
    model = table.setdefault("model", {})
    if not isinstance(model, dict):
        raise rejected("train", "model", "be a table of options", repr(model))
    transformer = table["kind"] == "transformer"
    if name in SHORT and transformer:
        raise rejected("train", "attention", "be a score for a Transformer", repr(name))
    if name in MODEL_NAMES:
        raise rejected("train", "attention", "be a score; choose the kind of model with --model", repr(name))
    if name not in (known := {*SCORES, *(() if transformer else SHORT)}):
        raise unknown_name("train", "attention", name, known)
    if transformer:
        model["score"] = name
    else:
        for field, value in SHORT.get(name, {"attention": name}).items():
            model.setdefault(field, value)
