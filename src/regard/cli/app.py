"""The commands of ``regard``."""

from __future__ import annotations

import math
import sys
import time
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.messages import explained, fail, interruptible

app = typer.Typer(
    help="Attention as one function, and what it can learn.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

MODEL = Path("regard-demo/model")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"regard {installed_version('regard')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options that stand before a command."""


@app.command()
def demo(
    context: typer.Context,
    seconds: Annotated[
        float,
        typer.Option(help="Train until so many seconds after the start; compiling and evaluation come on top.", min=1),
    ] = 170.0,
    out: Annotated[Path, typer.Option(help="Folder for the model and the pictures.")] = Path("regard-demo"),
    seed: Annotated[int, typer.Option(help="Seed of parameters, dropout and batches.", min=0, max=2**32 - 1)] = 0,
) -> None:
    """Learn to pronounce English words on this machine, and show how the attention aligns letters and sounds."""
    if not math.isfinite(seconds):
        raise fail(f"demo: --seconds must be finite, got {seconds}.")
    started = context.obj if isinstance(context.obj, float) else time.monotonic()
    with interruptible():
        from regard.cli.demo import run

        run(deadline=started + seconds, out=out, seed=seed)


@app.command()
def catalogue(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[WORD]...", help="Show what has one of these in name or source.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
) -> None:
    """List every mechanism: formula, source, learned parts, engines, cost."""
    with interruptible():
        from regard.cli.catalogue import run

        run(names or [], as_json=as_json, markdown=markdown)


@app.command()
def pronounce(
    words: Annotated[list[str], typer.Argument(metavar="WORD...", help="Words to pronounce; - reads them from stdin.")],
    model: Annotated[Path, typer.Option(help="Folder of a saved model.")] = MODEL,
    alignment: Annotated[bool, typer.Option("--alignment", help="Draw which letters each phoneme looked at.")] = False,
    png: Annotated[Path | None, typer.Option(help="Write the alignments to this PNG file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the alignments to this self-contained HTML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, alignment weights included.")] = False,
) -> None:
    """Pronounce words with a saved model, without training."""
    with interruptible():
        from regard.cli.pronounce import run

        with explained():
            if "-" in words:
                words = [word for given in words for word in (sys.stdin.read().split() if given == "-" else [given])]
        run(words, model=model, alignment=alignment, png=png, html=html, as_json=as_json)


@app.command()
def regress(
    data: Annotated[str, typer.Argument(metavar="DATA", help="CSV or Parquet, with a row of names; - reads stdin.")],
    target: Annotated[str, typer.Option(help="Column to predict: numbers, or text for a classification.")],
    features: Annotated[
        str | None, typer.Option(help="Columns to predict from, separated by commas; all others by default.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="Column that says how often each row counts.")] = None,
    kernel: Annotated[
        str, typer.Option(help="gaussian, boxcar, triangular, epanechikov, laplacian or constant.")
    ] = "gaussian",
    bandwidth: Annotated[
        str,
        typer.Option(
            help="How far apart rows still count: loo (least leave-one-out error), learned (one for each feature), "
            "scott, silverman, a number, or a number for each feature, as 0.5,2."
        ),
    ] = "loo",
    order: Annotated[int, typer.Option(help="0 averages, 1 fits a line around each row.", min=0, max=1)] = 0,
    empty: Annotated[
        str, typer.Option(help="What a row gets that is out of reach: nearest, mean, nan or raise.")
    ] = "nearest",
    predict: Annotated[str | None, typer.Option(help="Table whose rows to predict; by default those of DATA.")] = None,
    out: Annotated[
        str | None, typer.Option(help="Write rows and predictions here: .csv, .tsv, .parquet, or - for stdout.")
    ] = None,
    std: Annotated[
        bool, typer.Option("--std", help="Add the standard deviation of the target about each prediction.")
    ] = False,
    quantiles: Annotated[str | None, typer.Option(help="Add quantiles of the target, as 0.05,0.5,0.95.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the fit to this picture: .png, .svg, .pdf, ...")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict a column of a table from the others by kernel regression, and say how well that works."""
    with interruptible():
        from regard.cli.regress import run

        run(
            data=data, target=target, features=features, weights=weights, kernel=kernel, bandwidth=bandwidth,
            order=order, empty=empty, predict=predict, out=out, std=std, quantiles=quantiles, plot=plot,
            as_json=as_json,
        )  # fmt: skip
