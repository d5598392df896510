"""``regard train language-model``: train a language model on text."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from regard_cli.messages import Console, report_errors
from regard_lab.cli.kinds import TEXTS, require_kind
from regard_lab.cli.runs import gather_changes, read_model_options, run_training, show_model_options, training_changes
from regard_lab.tasks.language.options import LanguageOptions
from regard_lab.tasks.language.pretraining import Pretraining

TASK = "language-model"


def run(
    *, out: Path, resume: bool, options: Path | None, given: dict[str, Any], settings: list[str], show_options: bool
) -> None:
    """Train a language model, or resume a run; arguments as in :func:`regard_lab.cli.train.run`."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    with report_errors("regard-lab[train]"):
        changes = gather_changes(given, settings, out=out, resume=resume, show_options=show_options)
        if resume:
            pretraining = Pretraining.resumed(out, training_changes(changes, options), console.print)
        else:
            chosen = LanguageOptions.from_table(read_model_options(TASK, options, changes))
            if show_options:
                show_model_options(chosen, lambda: chosen.model_config(1000), fixed={"vocabulary"})
                return
            require_kind("train", chosen.start, *(TEXTS[1:3] if chosen.masked else TEXTS[:1]))
            pretraining = Pretraining(chosen, out, console.print)
        piped = " < the same text" if "-" in pretraining.options.data.data else ""
        run_training(console, pretraining, TASK, resume, piped=piped)
        where = shlex.quote(str(out))
        if pretraining.options.masked:
            pretraining.say(
                f"The model is in {out}. Now try:  regard train classifier --data labelled.tsv --start {where}"
            )
        else:
            pretraining.say(f'The model is in {out}. Now try:  regard generate --model {where} "Once upon"')
