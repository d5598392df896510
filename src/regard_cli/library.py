"""The library's commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from regard.scores.kernels import kernels
from regard_cli.messages import Command, JsonOutput, json_option, report_errors

app = typer.Typer()

_command = partial(app.command, cls=Command)


@_command()
def catalogue(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORD]...", help="Only mechanisms with a word in name, source, title or group."),
    ] = None,
    as_json: Annotated[str | None, json_option("JSON")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
) -> None:
    """List every mechanism with formula, source, learned parts, engines, cost and cache."""
    from regard_cli.catalogue import run

    run(names or [], json=JsonOutput(as_json), markdown=markdown)


# Options of a command in groups: dataclasses whose fields are options -------------------------------------------------


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the fields of its dataclass parameters as options, in the same order.

    A field's annotation and default are what they would be of a parameter.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Size:
    ...     height: int
    ...     width: int = 1
    >>> @grouped
    ... def show(name: str, size: Size) -> None:
    ...     print(name, size)
    >>> list(inspect.signature(show).parameters)
    ['name', 'height', 'width']
    >>> show(name="box", height=2)
    box Size(height=2, width=1)
    """
    signature = inspect.signature(command, eval_str=True)
    kinds: dict[str, Any] = {
        name: each.annotation for name, each in signature.parameters.items() if is_dataclass(each.annotation)
    }
    parameters: list[inspect.Parameter] = []
    for name, each in signature.parameters.items():
        parameters += _options(kinds[name]) if name in kinds else [each.replace(kind=inspect.Parameter.KEYWORD_ONLY)]

    def run(**given: Any) -> None:
        groups = {
            name: kind(**{each.name: given.pop(each.name) for each in fields(kind) if each.name in given})
            for name, kind in kinds.items()
        }
        command(**given, **groups)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    return run


def _options(kind: Any) -> list[inspect.Parameter]:
    """Return the fields of a dataclass as parameters."""
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each.default is MISSING else each.default,
            annotation=hints[each.name],
        )
        for each in fields(kind)
    ]


# Options of regress --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Columns:
    """Roles and kinds of the table's columns."""

    features: Annotated[
        str | None, typer.Option(help="Columns to predict from, separated by commas; all others by default.")
    ] = None
    ignore: Annotated[str | None, typer.Option(help="Columns to leave out, separated by commas.")] = None
    weights: Annotated[
        str | None, typer.Option(help="Column of row weights; whole numbers count repetitions of a row.")
    ] = None
    categorical: Annotated[
        str | None, typer.Option(help="Columns of numbers to treat as unordered categories, separated by commas.")
    ] = None
    angular: Annotated[
        str | None,
        typer.Option(help="Columns of angles in radians, or with a period: hour:24,month:12."),
    ] = None
    ordered: Annotated[
        str | None,
        typer.Option(help="Columns of ordered categories: numbers, or texts in order: stars,size:small<medium<large."),
    ] = None
    haversine: Annotated[
        str | None, typer.Option(help="Columns of latitude and longitude in degrees: lat,lon. Distances are in km.")
    ] = None
    keep_missing: Annotated[
        bool,
        typer.Option(
            "--keep-missing", help="Use rows that miss features: a missing category is one, a missing number any."
        ),
    ] = False
    classify: Annotated[bool, typer.Option("--classify", help="Treat a target of numbers as classes.")] = False
    class_weight: Annotated[
        str | None,
        typer.Option(help="Weights of classes: balanced (all have the same), or by name such as yes:5,no:1."),
    ] = None


@dataclass(frozen=True)
class Cells:
    """How cells are parsed."""

    decimal: Annotated[str | None, typer.Option(help="Decimal mark, where cells leave a choice.")] = None
    thousands: Annotated[
        str | None, typer.Option(help="Mark of thousands where cells leave a choice: . or , or ' or a space.")
    ] = None
    day_first: Annotated[
        bool | None,
        typer.Option("--day-first/--month-first", help="Order in dates such as 1/2/2024 where cells leave a choice."),
    ] = None
    missing: Annotated[
        str | None, typer.Option(help="More texts that mean a missing value, separated by commas: 999,unknown.")
    ] = None
    encoding: Annotated[str | None, typer.Option(help="Encoding of CSV, such as latin-1; UTF-8 by default.")] = None


@dataclass(frozen=True)
class Fit:
    """How to fit the rows."""

    kernel: Annotated[str, typer.Option(help=f"Kernel: {', '.join(kernels())} or constant.")] = "gaussian"
    bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Kernel bandwidth: loo (the default, least leave-one-out error), learned (one for each feature), aicc "
            "(least corrected Akaike criterion), scott, silverman, a number, or a number for each feature such as "
            "0.5,2."
        ),
    ] = None
    neighbors: Annotated[
        str | None,
        typer.Option(
            help="Adapt the bandwidth to the density of rows: at each row the distance to so many nearest ones, or loo "
            "to choose their number; --bandwidth then only scales the features."
        ),
    ] = None
    order: Annotated[
        int,
        typer.Option(help="0 averages, 1 fits a line around each row, 2 a parabola in up to 3 features.", min=0, max=2),
    ] = 0
    cv: Annotated[
        int | None,
        typer.Option(
            help="Leave out so many blocks of consecutive rows instead of single rows: for time series.", min=2
        ),
    ] = None
    empty: Annotated[
        str, typer.Option(help="Prediction for rows out of the kernel's reach: nearest, mean, nan or raise.")
    ] = "nearest"
    method: Annotated[
        str, typer.Option(help="Algorithm: auto (fastest), exact, tiles, or nufft (errors below --rtol).")
    ] = "auto"
    rtol: Annotated[float | None, typer.Option(help="Largest relative error of nufft; 1e-6 by default.")] = None


@dataclass(frozen=True)
class Output:
    """What to predict, and the output files."""

    predict: Annotated[str | None, typer.Option(help="Table with the rows to predict; DATA by default.")] = None
    out: Annotated[
        str | None, typer.Option(help="Output file for rows and predictions: .csv, .tsv, .parquet; - for stdout.")
    ] = None
    std: Annotated[
        bool, typer.Option("--std", help="Add the standard deviation of the target about each prediction.")
    ] = False
    band: Annotated[
        float | None,
        typer.Option(help="Add, and draw, pointwise confidence bands of the mean with this coverage, such as 0.95."),
    ] = None
    quantiles: Annotated[str | None, typer.Option(help="Add quantiles of the target such as 0.05,0.5,0.95.")] = None
    slopes: Annotated[
        bool, typer.Option("--slopes", help="Add how much the prediction rises with a unit of each feature.")
    ] = False
    plot: Annotated[Path | None, typer.Option(help="Output file for a plot of the fit: .png, .svg, .pdf, ...")] = None
    as_json: Annotated[str | None, json_option("JSON")] = None


# Commands -------------------------------------------------------------------------------------------------------------


@_command()
@grouped
def regress(
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="CSV (plain, .gz, .zip) or Parquet with a header; - for stdin.")
    ],
    target: Annotated[str, typer.Option(help="Column to predict: numbers, or text for classification.")],
    columns: Columns,
    cells: Cells,
    fit: Fit,
    output: Output,
) -> None:
    """Predict a table column from the others by kernel regression, and report the accuracy."""
    with report_errors("regard[regress]"):
        from regard_cli.regress import run

    run(data=data, target=target, **vars(columns), **vars(cells), **vars(fit), **vars(output))


@_command(epilog="regard look --out and Record.save write records.")
def view(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="One record, or two to compare.")],
    port: Annotated[int, typer.Option(help="Port to serve on; 0 picks a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser", "-b", help="Open the page in a browser.")] = False,
    batch: Annotated[int, typer.Option(help="Index of the sequence in the batch.")] = 0,
) -> None:
    """Show recorded attention on a local web page."""
    from regard_cli.view import run

    run(files, port=port, browser=browser, batch=batch)
