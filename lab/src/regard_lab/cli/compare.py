"""``regard compare``: train attention mechanisms on the same data, steps and seed; print a table, draw a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.table import Table

from regard._utils.errors import rejected, unknown_name
from regard_cli.messages import Console, fail, report_errors, require, sentence
from regard_lab.cli.flags import parse_setting
from regard_lab.cli.runs import change_options, read_options
from regard_lab.cli.train import options_table
from regard_lab.models.registry import MODELS
from regard_lab.models.resnet import ATTENTIONS
from regard_lab.tasks.classification.image_options import IMAGE_MODELS, TASK, ImageClassificationOptions
from regard_lab.tasks.classification.training import ImageTraining
from regard_lab.tasks.translation.options import ExperimentOptions
from regard_lab.tasks.translation.tasks import get_task
from regard_lab.tasks.translation.training import Experiment
from regard_lab.training.comparison import ComparedRun, compare, picture
from regard_lab.training.options import RunOptions

#: Returns a variant's options from its name, an options file and changes.
_Table = Callable[[str, Path | None, dict[str, Any]], dict[str, Any]]
#: Decimals of scores, which range from 0 to 100, or from 0 to 1.
_DECIMALS = {"tokens": 2, "images": 4}


def run(
    task: str, attention: str, *, out: Path, options: Path | None, given: dict[str, Any], settings: list[str]
) -> None:
    """Train a model for each name in the comma-separated ``attention``; "transformer" is also a name."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    with report_errors("regard-lab[train]"):
        require("matplotlib")
        metric = "accuracy" if task == TASK else get_task(task).metric
        names = [name.strip() for name in attention.split(",") if name.strip()]
        if len(names) < 2:
            raise rejected("compare", "attention", "name at least two mechanisms, separated by commas", repr(attention))
        if len(set(names)) != len(names):
            raise rejected("compare", "--attention", "name each mechanism once", repr(attention))
        changes = {**given, **dict(parse_setting(each) for each in settings)}
        for place in ("kind", "attention", "model.attention", "model.score"):
            if place in changes:
                raise rejected("compare", place, "be left out: --attention sets it", changes[place])
        if task == TASK:
            variants = _variants(names, ImageClassificationOptions, IMAGE_MODELS, _image_table, options, changes)
        else:

            def table(name: str, options: Path | None, changes: dict[str, Any]) -> dict[str, Any]:
                own = {"kind": "transformer"} if name == "transformer" else {"attention": name}
                return options_table(task, options, {**changes, **own})

            variants = _variants(names, ExperimentOptions, MODELS, table, options, changes)
            if any(each.data.data == "-" for each in variants.values()):
                raise rejected("compare", "--data", "be a file, because each run reads it again", "standard input")
        from regard_lab.training.options import TrainingError

        kind: Any = ImageTraining if task == TASK else Experiment
        try:
            runs = compare(kind, variants, out, lambda each: console.print(_summary(each, metric)), console.print)
        except TrainingError as error:
            raise fail(sentence(error)) from None
        console.print()
        console.print(_table(runs))
        console.print(f"\nPicture: {picture(runs, metric, out / 'compared.png')}")


def _variants(
    names: list[str],
    kind: type[RunOptions],
    models: dict[str, tuple[type[Any], type[Any]]],
    table_of: _Table,
    options: Path | None,
    changes: dict[str, Any],
) -> dict[str, Any]:
    """Return the options of each variant; each takes the model options that its kind of model has."""
    variants: dict[str, Any] = {}
    asked: set[str] = set()
    known: set[str] = set()
    for name in names:
        table = table_of(name, options, changes)
        fields_of = {each.name for each in fields(models[table["kind"]][0])}
        fields_of -= {"sources", "targets", "channels", "image"}
        if isinstance(table.get("model"), dict):
            asked.update(table["model"])
            table["model"] = {key: value for key, value in table["model"].items() if key in fields_of}
        known |= fields_of
        variants[name] = kind.from_table(table)
    for each in asked:
        if each not in known:
            raise unknown_name("compare", f"model.{each}", each, known)
    return variants


def _image_table(name: str, options: Path | None, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a residual network with this attention, or of a vision transformer."""
    table = read_options(TASK, options)
    change_options(table, changes, options)
    if name == "transformer":
        return table | {"kind": name}
    if name not in ATTENTIONS:
        raise unknown_name("compare", "--attention", name, {*ATTENTIONS, "transformer"})
    table["kind"] = "resnet"
    model = table.setdefault("model", {})
    if isinstance(model, dict):
        model["attention"] = name
    return table


def _summary(each: ComparedRun, metric: str) -> str:
    return f"{each.name}: {metric} {each.scores[metric]:.4g} after {each.steps:,} steps, {each.seconds:.0f} seconds"


def _table(runs: list[ComparedRun]) -> Table:
    unit = runs[0].unit
    table = Table(box=None, pad_edge=False)
    table.add_column("attention")
    for heading in (*runs[0].scores, "parameters", f"{unit}/s", "memory (MB)"):
        table.add_column(heading, justify="right")
    for each in runs:
        scores = (f"{value:.{_DECIMALS[unit]}f}" for value in each.scores.values())
        table.add_row(each.name, *scores, f"{each.parameters:,}", f"{each.per_second:,.0f}", f"{each.memory:,.0f}")
    return table
