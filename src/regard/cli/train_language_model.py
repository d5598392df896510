"""``regard train language-model``: text in, a folder with a model out."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from regard._errors import rejected
from regard.cli.messages import Console, echo, report_errors
from regard.cli.runs import carry_out, change_options, read_options, shown_options, training_changes
from regard.cli.settings import parse_setting
from regard.language.options import LanguageOptions
from regard.language.pretraining import Pretraining
from regard.models.folders import OPTIONS

TASK = "language-model"


def run(
    *, out: Path, resume: bool, options: Path | None, given: dict[str, Any], settings: list[str], show_options: bool
) -> None:
    """Train, or go on with a run; arguments as those of :func:`regard.cli.train.run`."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    with report_errors("train"):
        changes = {name: value for name, value in given.items() if value not in (None, [])}
        changes |= dict(parse_setting(each) for each in settings)
        if resume and show_options:
            raise rejected("train", "--show-options", f"be left out with --resume; they are in {out / OPTIONS}", "both")
        if resume:
            pretraining = Pretraining.resumed(out, training_changes(changes, options), console.print)
        else:
            table = read_options(TASK, options)
            if isinstance(table.get("tokenizer"), str):
                table["tokenizer"] = {"kind": table["tokenizer"]}
            change_options(table, changes, options)
            chosen = LanguageOptions.from_table(table)
            if show_options:
                fixed = {"vocabulary", *chosen.model}
                rest = {} if chosen.start else asdict(chosen.model_config(1000))
                echo(shown_options(chosen, {k: v for k, v in rest.items() if k not in fixed and v is not None}), end="")
                return
            pretraining = Pretraining(chosen, out, console.print)
        piped = " < the same text" if "-" in pretraining.options.data.data else ""
        carry_out(console, pretraining, TASK, resume, piped=piped)
        where = shlex.quote(str(out))
        if pretraining.options.masked:
            pretraining.say(
                f"The model is in {out}. Now try:  regard train classifier --data labelled.tsv --start {where}"
            )
        else:
            pretraining.say(f'The model is in {out}. Now try:  regard generate --model {where} "Once upon"')
