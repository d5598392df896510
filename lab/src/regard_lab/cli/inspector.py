"""The command that shows what a model attends to."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from regard_cli.messages import Command

inspector = typer.Typer()
_command = partial(inspector.command, cls=Command)


@_command(
    epilog="MODEL is a folder of Hugging Face or of ours, or FILE.py:FUNCTION, which returns a model and its inputs."
)
def look(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or a function that makes a model.")],
    text: Annotated[str | None, typer.Option(help="What the model reads.")] = None,
    image: Annotated[Path | None, typer.Option(help="The picture that it sees instead.")] = None,
    target: Annotated[str | None, typer.Option(help="What an encoder–decoder is to have written.")] = None,
    browser: Annotated[bool, typer.Option("--browser", "-b", help="Show all of it in the browser.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write all of it to this page.")] = None,
    out: Annotated[Path | None, typer.Option(help="Keep the record in this file, for regard view.")] = None,
    layer: Annotated[int | None, typer.Option(help="Draw what this layer attends to.")] = None,
    head: Annotated[int | None, typer.Option(help="One head of it, rather than their mean.")] = None,
    scale: Annotated[str, typer.Option(help="What shades stand for: absolute, row or log.")] = "absolute",
    plot: Annotated[Path | None, typer.Option(help="Draw that to this picture: .png, .svg, .pdf.")] = None,
) -> None:
    """Show what a model attends to in a text or an image."""
    from regard_lab.cli.look import run

    run(
        model, text=text, image=image, target=target, layer=layer, head=head, plot=plot, scale=scale, html=html,
        out=out, browser=browser,
    )  # fmt: skip
