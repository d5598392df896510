"""The ``regard caption`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from regard_cli.messages import Command, report_errors
from regard_lab.cli.flags import with_flags
from regard_lab.generation.predictions import PredictionOptions

describe = typer.Typer()


@describe.command(cls=Command)
@with_flags(
    PredictionOptions, "search.beams", "search.n_best", "search.length_penalty", "search.no_repeat", "search.sample",
    "search.temperature", "search.top_k", "search.top_p", "search.seed",
    short={"search.n_best": "Show this many captions, each after its score."},
)  # fmt: skip
def caption(
    images: Annotated[list[str], typer.Argument(metavar="IMAGE...", help="Image files; - reads one from stdin.")],
    model: Annotated[list[Path], typer.Option(help="Folder of a captioner; repeat it to compare several.")],
    given: dict[str, Any],
    attention: Annotated[
        Path | None, typer.Option(help="Draw where each word attended to this file: .png, .svg, .pdf.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the attention to this self-contained HTML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per image, with attention.")] = False,
) -> None:
    """Caption images and show where each word attended."""
    from regard_lab.cli.caption import run

    with report_errors("regard-lab[vision]"):
        options = PredictionOptions.from_dotted(given)
    run(images, models=model, options=options, attention=attention, html=html, as_json=as_json)
