"""The ``regard look`` command."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from regard_cli.messages import Command

inspector = typer.Typer()
_command = partial(inspector.command, cls=Command)


@_command(epilog="MODEL is a Hugging Face or regard folder, or FILE.py:FUNCTION, which returns a model and its inputs.")
def look(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, or a function that returns a model.")],
    text: Annotated[str | None, typer.Option(help="Input text.")] = None,
    image: Annotated[Path | None, typer.Option(help="Input image, instead of --text.")] = None,
    target: Annotated[str | None, typer.Option(help="Target text of an encoder–decoder.")] = None,
    browser: Annotated[bool, typer.Option("--browser", "-b", help="Open the inspector in the browser.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the inspector to this HTML file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Save the record to this file, for regard view.")] = None,
    layer: Annotated[int | None, typer.Option(help="Draw the attention of this layer.")] = None,
    head: Annotated[int | None, typer.Option(help="Draw this head instead of the mean over heads.")] = None,
    scale: Annotated[str, typer.Option(help="Color scale: absolute, row or log.")] = "absolute",
    plot: Annotated[Path | None, typer.Option(help="Draw it to this file: .png, .svg, .pdf.")] = None,
) -> None:
    """Show what a model attends to in a text or an image."""
    from regard_lab.cli.look import run

    run(
        model, text=text, image=image, target=target, layer=layer, head=head, plot=plot, scale=scale, html=html,
        out=out, browser=browser,
    )  # fmt: skip
