"""``regard train classifier``: train a classifier of texts or images."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard._utils.errors import rejected
from regard_cli.messages import Console, report_errors
from regard_lab.cli.kinds import TEXTS, require_kind
from regard_lab.cli.runs import gather_changes, read_model_options, run_training, show_model_options, training_changes
from regard_lab.data.toml import read_toml
from regard_lab.models.folders import OPTIONS
from regard_lab.tasks.classification.image_options import TASK as IMAGES
from regard_lab.tasks.classification.text_options import ClassificationOptions
from regard_lab.tasks.classification.training import ClassificationRun, FineTuning, ImageTraining

TASK = "classifier"


@dataclass(frozen=True)
class Kind:
    """A kind of training data for classifiers.

    Attributes
    ----------
    run : type of ClassificationRun
    config : callable
        Maps options to the model's config.
    fixed : set of str
        Config fields that the data determines.
    try_out : callable
        Maps options to the end of an example command for the trained model.
    starts : tuple of str
        Kinds of models to begin with.
    """

    run: type[ClassificationRun[Any, Any, Any]]
    config: Callable[[Any], Any]
    fixed: frozenset[str]
    try_out: Callable[[Any], str]
    starts: tuple[str, ...]


def _texts(options: ClassificationOptions) -> str:
    return '--pairs "a text<TAB>and another"' if options.data.pairs else '"some text"'


#: Kinds by the options' task.
KINDS = {
    TASK: Kind(
        FineTuning,
        lambda options: options.model_config(1000),
        frozenset({"vocabulary", "masked_head"}),
        _texts,
        TEXTS,
    ),
    IMAGES: Kind(
        ImageTraining,
        lambda options: options.model_config(),
        frozenset({"channels", "image"}),
        lambda _: "photo.jpg",
        ("image classifier", "image model"),
    ),
}


def run(
    *, out: Path, resume: bool, options: Path | None, given: dict[str, Any], settings: list[str], show_options: bool
) -> None:
    """Train a classifier, or resume a run; arguments as in :func:`regard_lab.cli.train.run`."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    with report_errors("regard-lab[train]"):
        changes = gather_changes(given, settings, out=out, resume=resume, show_options=show_options)
        task = _task(out if resume else None, options, changes)
        kind = KINDS[task]
        if resume:
            run = kind.run.resumed(out, training_changes(changes, options), console.print)
        else:
            chosen = kind.run.kind.from_table(read_model_options(task, options, changes))
            if show_options:
                show_model_options(chosen, lambda: kind.config(chosen), fixed=kind.fixed)
                return
            require_kind("train", chosen.start, *kind.starts)
            run = kind.run(chosen, out, console.print)
        piped = " < the same lines" if "-" in run.sources() else ""
        run_training(console, run, TASK, resume, piped=piped)
        where = shlex.quote(str(out))
        run.say(f"The model is in {out}. Now try:  regard classify --model {where} {kind.try_out(run.options)}")


def _task(folder: Path | None, options: Path | None, changes: dict[str, Any]) -> str:
    """Return a key of :data:`KINDS`: from the run's folder, the options file, or ``--images``."""
    path = options if folder is None else folder / OPTIONS
    table = read_toml(path) if path is not None and path.is_file() else {}
    named = table.get("task")
    if named in KINDS:
        task: str = named
        if folder is None and task == TASK and "data.images" in changes:
            raise rejected("train", f"task in {options}", f"be {IMAGES!r} with --images", repr(task))
        return task
    data = table.get("data")
    return IMAGES if "data.images" in changes or (isinstance(data, dict) and "images" in data) else TASK
