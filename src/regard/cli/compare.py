"""``regard compare``: several mechanisms on the same data, steps and seed, as a table and a picture."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.table import Table

from regard._errors import rejected, unknown_name
from regard.cli.messages import Console, fail, report_errors, require, sentence
from regard.cli.settings import parse_setting
from regard.cli.train import options_table
from regard.inspect.comparison import picture
from regard.models.registry import MODELS
from regard.translation.comparison import ComparedRun, compare
from regard.translation.options import ExperimentOptions
from regard.translation.tasks import get_task


def run(
    task: str, attention: str, *, out: Path, options: Path | None, given: dict[str, Any], settings: list[str]
) -> None:
    """Train a model for each name in ``attention``, separated by commas; "transformer" is one, too."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    with report_errors("train"):
        require("matplotlib")
        metric = get_task(task).metric
        names = [name.strip() for name in attention.split(",") if name.strip()]
        if len(names) < 2:
            raise rejected("compare", "attention", "name two mechanisms or more, separated by commas", repr(attention))
        if len(set(names)) != len(names):
            raise rejected("compare", "--attention", "name each mechanism once", repr(attention))
        changes = {**given, **dict(parse_setting(each) for each in settings)}
        for place in ("kind", "attention", "model.attention", "model.score"):
            if place in changes:
                raise rejected("compare", place, "be left to --attention, which names what is compared", changes[place])
        variants: dict[str, ExperimentOptions] = {}
        asked: set[str] = set()
        known: set[str] = set()
        for name in names:
            own = {"kind": "transformer"} if name == "transformer" else {"attention": name}
            table = options_table(task, options, {**changes, **own})
            fields_of = {each.name for each in fields(MODELS[table["kind"]][0])} - {"sources", "targets"}
            if isinstance(table.get("model"), dict):
                asked.update(table["model"])
                # What only Transformers have, or only recurrent models, holds for those.
                table["model"] = {key: value for key, value in table["model"].items() if key in fields_of}
            known |= fields_of
            variants[name] = ExperimentOptions.from_table(table)
            if variants[name].data.data == "-":
                raise rejected("compare", "--data", "be a file, which each of them reads", "standard input")
        for each in asked:
            if each not in known:
                raise unknown_name("compare", f"model.{each}", each, known)
        from regard.training.learner import TrainingError

        try:
            runs = compare(variants, out, lambda each: console.print(_told(each, metric)), console.print)
        except TrainingError as error:
            raise fail(sentence(error)) from None
        console.print()
        console.print(_table(runs))
        console.print(f"\nIn {picture(runs, metric, out / 'compared.png')} as a picture.")


def _told(each: ComparedRun, metric: str) -> str:
    return f"{each.name}: {metric} {each.scores[metric]:.4g} after {each.steps:,} steps, {each.seconds:.0f} seconds"


def _table(runs: list[ComparedRun]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("attention")
    for heading in (*runs[0].scores, "parameters", "tokens/s", "memory (MB)"):
        table.add_column(heading, justify="right")
    for each in runs:
        scores = (f"{value:.2f}" for value in each.scores.values())
        table.add_row(
            each.name, *scores, f"{each.parameters:,}", f"{each.tokens_per_second:,.0f}", f"{each.memory:,.0f}"
        )
    return table
