"""``regard train captioner``: train an image captioner."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

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
from regard_lab.tasks.captioning.options import CaptionOptions
from regard_lab.tasks.captioning.training import Captioning

TASK = "captioner"
_NAMES = {"rnn": "recurrent"}
#: Number of images between progress lines of the encoder.
_EVERY = 1000


def run(
    *, out: Path, resume: bool, options: Path | None, given: dict[str, Any], settings: list[str], show_options: bool
) -> None:
    """Train a captioner, or resume a run; arguments as in :func:`regard_lab.cli.train.run`."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)

    def progress(done: int, of: int) -> None:
        if done // _EVERY != (done - 4) // _EVERY:
            console.print(f"  {done // _EVERY * _EVERY:,} of {of:,} images")

    with report_errors("regard-lab[vision]"):
        changes = gather_changes(given, settings, out=out, resume=resume, show_options=show_options)
        if resume:
            captioning = Captioning.resumed(out, training_changes(changes, options), console.print)
        else:
            table = read_options(TASK, options)
            change_options(table, changes, options)
            if isinstance(table.get("kind"), str):
                table["kind"] = _NAMES.get(table["kind"], table["kind"])
            chosen = CaptionOptions.from_table(table)
            if show_options:
                echo(shown_options(chosen, chosen.unset_model_fields()), end="")
                return
            require_kind("train", chosen.start, "captioner")
            captioning = Captioning(chosen, out, console.print)
        captioning.progress = progress
        piped = " < the same lines" if "-" in (captioning.options.data.data, captioning.options.data.valid) else ""
        run_training(console, captioning, TASK, resume, piped=piped)
        where = shlex.quote(str(out))
        captioning.say(
            f"The model is in {out}. Now try:  regard caption photo.jpg --model {where} --plot attention.png"
        )
