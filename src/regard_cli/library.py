"""The commands of the library itself."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from regard.scores.kernels import kernels
from regard_cli.messages import Command, report_errors

app = typer.Typer()

_command = partial(app.command, cls=Command)


@_command()
def catalogue(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[WORD]...", help="Show what has one of these in name or source.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
) -> None:
    """List every mechanism: formula, source, learned parts, engines, cost."""
    from regard_cli.catalogue import run

    run(names or [], as_json=as_json, markdown=markdown)


@_command()
def regress(
    data: Annotated[str, typer.Argument(metavar="DATA", help="CSV or Parquet, with a row of names; - reads stdin.")],
    target: Annotated[str, typer.Option(help="Column to predict: numbers, or text for a classification.")],
    features: Annotated[
        str | None, typer.Option(help="Columns to predict from, separated by commas; all others by default.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="Column that says how often each row counts.")] = None,
    kernel: Annotated[str, typer.Option(help=f"{', '.join(kernels())} or constant.")] = "gaussian",
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
    method: Annotated[str, typer.Option(help="auto (fastest), exact, tiles, or nufft (errors below --rtol).")] = "auto",
    rtol: Annotated[float | None, typer.Option(help="Error of nufft beside the target's deviation; 1e-6.")] = None,
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
    with report_errors("regard[regress]"):
        from regard_cli.regress import run

    run(
        data=data, target=target, features=features, weights=weights, kernel=kernel, bandwidth=bandwidth,
        order=order, empty=empty, method=method, rtol=rtol, predict=predict, out=out, std=std, quantiles=quantiles,
        plot=plot, as_json=as_json,
    )  # fmt: skip


@_command(epilog="Records are kept by regard look --out, and by Record.save.")
def view(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="A record, or two to compare.")],
    port: Annotated[int, typer.Option(help="Serve at this port; 0 takes a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser", "-b", help="Open it in the browser.")] = False,
    batch: Annotated[int, typer.Option(help="Which sequence of a batch.")] = 0,
) -> None:
    """Show what a model attends to on a page, on this machine alone."""
    from regard_cli.view import run

    run(files, port=port, browser=browser, batch=batch)


@_command()
def warmup(
    every: Annotated[bool, typer.Option("--all", help="Also for float64.")] = False,
) -> None:
    """Compile the CPU kernels now, so that no first call has to wait for them."""
    from regard_cli.warmup import run

    run(every=every)
