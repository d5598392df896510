"""``regard train``: how each task begins or resumes a run, and what it says at the end."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard._utils.errors import described, rejected, unknown_name
from regard_cli.messages import Console, echo, report_errors
from regard_lab._options import read_toml
from regard_lab.cli.kinds import TEXTS, require_kind
from regard_lab.cli.runs import (
    TrainingCall,
    change_options,
    read_model_options,
    read_options,
    run_training,
    shown_options,
)
from regard_lab.cli.translate import folder_of
from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.models.attending import SCORES
from regard_lab.models.folders import OPTIONS
from regard_lab.tasks.captioning.options import CaptionOptions
from regard_lab.tasks.captioning.training import Captioning
from regard_lab.tasks.classification.options import IMAGE_TASK, ClassificationOptions
from regard_lab.tasks.classification.training import ClassificationRun, FineTuning, ImageTraining
from regard_lab.tasks.language.options import LanguageOptions
from regard_lab.tasks.language.pretraining import Pretraining
from regard_lab.tasks.translation.options import ExperimentOptions
from regard_lab.tasks.translation.tasks import TASKS, get_task
from regard_lab.tasks.translation.training import Experiment, inherit_options
from regard_lab.training.options import RunOptions

CLASSIFIER, CAPTIONER, LANGUAGE_MODEL = "classifier", "captioner", "language-model"


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True, markup=False, emoji=False)


def _show(chosen: RunOptions, rest: dict[str, Any]) -> None:
    echo(shown_options(chosen, rest), end="")


# Pairs of lines: translation, pronunciation and span corruption -------------------------------------------------------


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


def train_on_pairs(task: str, call: TrainingCall) -> None:
    """Train an encoder–decoder on pairs of lines, or resume a run."""
    console = _console()
    with report_errors("regard-lab[train]"):
        get_task(task)
        changes, out = call.changes(), call.out
        if call.resume:
            experiment = Experiment.resumed(out, call.training_changes(changes), console.print)
            if experiment.options.task != task:
                raise rejected(
                    "train", "task", f"be {experiment.options.task!r} to resume the run in {out}", repr(task)
                )
        else:
            chosen = ExperimentOptions.from_table(with_tuned_rate(options_table(task, call.options, changes)))
            if call.show_options:
                _show(chosen, Experiment(chosen, out).options.unset_model_fields())
                return
            experiment = Experiment(chosen, out, console.print)
            chosen.check_model()
        _train(console, experiment, call.resume)


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


# Text -----------------------------------------------------------------------------------------------------------------


def train_language_model(call: TrainingCall) -> None:
    """Train a language model, or resume a run."""
    console = _console()
    with report_errors("regard-lab[train]"):
        changes = call.changes()
        if call.resume:
            run = Pretraining.resumed(call.out, call.training_changes(changes), console.print)
        else:
            chosen = LanguageOptions.from_table(read_model_options(LANGUAGE_MODEL, call.options, changes))
            if call.show_options:
                _show(chosen, {} if chosen.start else chosen.unset_model_fields())
                return
            require_kind("train", chosen.start, *(TEXTS[1:3] if chosen.masked else TEXTS[:1]))
            run = Pretraining(chosen, call.out, console.print)
        piped = " < the same text" if "-" in run.options.data.data else ""
        run_training(console, run, LANGUAGE_MODEL, call.resume, piped=piped)
        where = shlex.quote(str(call.out))
        use = f'regard generate --model {where} "Once upon"'
        if run.options.masked:
            use = f"regard train classifier --data labelled.tsv --start {where}"
        run.say(f"The model is in {call.out}. Now try:  {use}")


# Labels of texts or images --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of training data for classifiers.

    Attributes
    ----------
    run : type of ClassificationRun
    try_out : callable
        Maps options to the end of an example command for the trained model.
    starts : tuple of str
        Kinds of models to begin with.
    """

    run: type[ClassificationRun[Any, Any, Any]]
    try_out: Callable[[Any], str]
    starts: tuple[str, ...]


def _texts(options: ClassificationOptions) -> str:
    return '--pairs "a text<TAB>and another"' if options.data.pairs else '"some text"'


#: Kinds by the options' task.
KINDS = {
    CLASSIFIER: Kind(FineTuning, _texts, TEXTS),
    IMAGE_TASK: Kind(ImageTraining, lambda _: "photo.jpg", ("image classifier", "image model")),
}


def train_classifier(call: TrainingCall) -> None:
    """Train a classifier, or resume a run."""
    console = _console()
    with report_errors("regard-lab[train]"):
        changes = call.changes()
        task = _task(call.out if call.resume else None, call.options, changes)
        kind = KINDS[task]
        if call.resume:
            run = kind.run.resumed(call.out, call.training_changes(changes), console.print)
        else:
            chosen = kind.run.kind.from_table(read_model_options(task, call.options, changes))
            if call.show_options:
                _show(chosen, {} if chosen.start else chosen.unset_model_fields())
                return
            require_kind("train", chosen.start, *kind.starts)
            run = kind.run(chosen, call.out, console.print)
        piped = " < the same lines" if "-" in run.sources() else ""
        run_training(console, run, CLASSIFIER, call.resume, piped=piped)
        where = shlex.quote(str(call.out))
        run.say(f"The model is in {call.out}. Now try:  regard classify --model {where} {kind.try_out(run.options)}")


def _task(folder: Path | None, options: Path | None, changes: dict[str, Any]) -> str:
    """Return a key of :data:`KINDS`: from the run's folder, the options file, or ``--images``."""
    path = options if folder is None else folder / OPTIONS
    table = read_toml(path) if path is not None and path.is_file() else {}
    named = table.get("task")
    if named in KINDS:
        task: str = named
        if folder is None and task == CLASSIFIER and "data.images" in changes:
            raise rejected("train", f"task in {options}", f"be {IMAGE_TASK!r} with --images", repr(task))
        return task
    data = table.get("data")
    return IMAGE_TASK if "data.images" in changes or (isinstance(data, dict) and "images" in data) else CLASSIFIER


# Captions -------------------------------------------------------------------------------------------------------------


#: Number of images between progress lines of the encoder.
_EVERY = 1000


def train_captioner(call: TrainingCall) -> None:
    """Train an image captioner, or resume a run."""
    console = _console()

    def progress(done: int, of: int) -> None:
        if done // _EVERY != (done - 4) // _EVERY:
            console.print(f"  {done // _EVERY * _EVERY:,} of {of:,} images")

    with report_errors("regard-lab[vision]"):
        changes = call.changes()
        if call.resume:
            run = Captioning.resumed(call.out, call.training_changes(changes), console.print)
        else:
            table = read_options(CAPTIONER, call.options)
            change_options(table, changes, call.options)
            if table.get("kind") == "rnn":
                table["kind"] = "recurrent"
            chosen = CaptionOptions.from_table(table)
            if call.show_options:
                _show(chosen, chosen.unset_model_fields())
                return
            require_kind("train", chosen.start, "captioner")
            run = Captioning(chosen, call.out, console.print)
        run.progress = progress
        piped = " < the same lines" if "-" in (run.options.data.data, run.options.data.valid) else ""
        run_training(console, run, CAPTIONER, call.resume, piped=piped)
        use = f"regard caption photo.jpg --model {shlex.quote(str(call.out))} --plot attention.png"
        run.say(f"The model is in {call.out}. Now try:  {use}")


#: The tasks that do not learn from pairs of lines.
OTHERS: dict[str, Callable[[TrainingCall], None]] = {
    LANGUAGE_MODEL: train_language_model,
    CLASSIFIER: train_classifier,
    CAPTIONER: train_captioner,
}
