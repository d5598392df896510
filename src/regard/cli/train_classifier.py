"""``regard train classifier``: texts with labels in, a folder with a model out."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from regard.cli.messages import Console, report_errors
from regard.cli.runs import (
    carry_out,
    gather_changes,
    read_language_options,
    show_language_options,
    training_changes,
)
from regard.language.classification_options import ClassificationOptions
from regard.language.fine_tuning import FineTuning

TASK = "classifier"


def run(
    *, out: Path, resume: bool, options: Path | None, given: dict[str, Any], settings: list[str], show_options: bool
) -> None:
    """Train, or go on with a run; arguments as those of :func:`regard.cli.train.run`."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    with report_errors("train"):
        changes = gather_changes(given, settings, out=out, resume=resume, show_options=show_options)
        if resume:
            tuning = FineTuning.resumed(out, training_changes(changes, options), console.print)
        else:
            chosen = ClassificationOptions.from_table(read_language_options(TASK, options, changes))
            if show_options:
                show_language_options(chosen, hidden=("masked_head",))
                return
            tuning = FineTuning(chosen, out, console.print)
        data = tuning.options.data
        piped = " < the same lines" if "-" in (data.data, data.valid) else ""
        carry_out(console, tuning, TASK, resume, piped=piped)
        where, text = shlex.quote(str(out)), '"a text<TAB>and another"' if data.pairs else '"some text"'
        tuning.say(f"The model is in {out}. Now try:  regard classify --model {where} {'--pairs ' * data.pairs}{text}")
