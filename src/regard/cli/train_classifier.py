"""``regard train classifier``: texts with labels in, a folder with a model out."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from regard._errors import rejected
from regard.cli.messages import Console, echo, report_errors
from regard.cli.runs import carry_out, change_options, read_options, shown_options, training_changes
from regard.cli.settings import parse_setting
from regard.language.classification_options import ClassificationOptions
from regard.language.fine_tuning import FineTuning
from regard.models.folders import OPTIONS

TASK = "classifier"


def run(
    *, out: Path, resume: bool, options: Path | None, given: dict[str, Any], settings: list[str], show_options: bool
) -> None:
    """Train, or go on with a run; arguments as those of :func:`regard.cli.train.run`."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    with report_errors("train"):
        changes = {name: value for name, value in given.items() if value is not None}
        changes |= dict(parse_setting(each) for each in settings)
        if resume and show_options:
            raise rejected("train", "--show-options", f"be left out with --resume; they are in {out / OPTIONS}", "both")
        if resume:
            tuning = FineTuning.resumed(out, training_changes(changes, options), console.print)
        else:
            table = read_options(TASK, options)
            if isinstance(table.get("tokenizer"), str):
                table["tokenizer"] = {"kind": table["tokenizer"]}
            change_options(table, changes, options)
            chosen = ClassificationOptions.from_table(table)
            if show_options:
                fixed = {"vocabulary", "masked_head", *chosen.model}
                rest = {} if chosen.start else asdict(chosen.model_config(1000))
                echo(shown_options(chosen, {k: v for k, v in rest.items() if k not in fixed and v is not None}), end="")
                return
            tuning = FineTuning(chosen, out, console.print)
        data = tuning.options.data
        piped = " < the same lines" if "-" in (data.data, data.valid) else ""
        carry_out(console, tuning, TASK, resume, piped=piped)
        where, text = shlex.quote(str(out)), '"a text<TAB>and another"' if data.pairs else '"some text"'
        tuning.say(f"The model is in {out}. Now try:  regard classify --model {where} {'--pairs ' * data.pairs}{text}")
