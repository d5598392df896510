"""``regard regress``: a table in, what predicts its target and how well, predictions out."""

from __future__ import annotations

import csv
import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from regard._utils.constraints import Number
from regard._utils.errors import RegardWarning, rejected, unknown_name
from regard.regression._sums.evaluator import METHODS
from regard.regression._sums.smoother import resolve_kernel
from regard.regression._training import CURVED, fewest_neighbors
from regard.scores.kernels import kernels
from regard_cli import regress_report as report
from regard_cli import tables
from regard_cli.cells import DECIMALS, THOUSANDS
from regard_cli.messages import Console, JsonOutput, echo, report_errors, require, require_writable
from regard_cli.printing import printable
from regard_cli.regress_model import (
    Fitted,
    Predictions,
    Prepared,
    complexity,
    features_of,
    fit,
    kept_bandwidth,
    prediction_columns,
    prepare,
    quality,
)
from regard_cli.tables import Table

#: What installs the packages that this needs.
EXTRA = "regard[regress]"
KERNELS = (*kernels(), "constant")
WAYS = ("loo", "learned", "aicc", "scott", "silverman")
EMPTY = ("nearest", "mean", "nan", "raise")
#: Predictions that are shown where none are written.
_SHOWN = 10


def run(**options: Any) -> None:
    """Fit, report the accuracy, predict, write and plot. Errors are raised before anything is written."""
    asked = SimpleNamespace(**options)
    asked.json = JsonOutput(asked.as_json)
    with report_errors(EXTRA):
        for package in ("pandas", "sklearn"):
            require(package)
        _check(asked)
        table = tables.read(asked.data, least=2, options=asked.cells)
        prepared = prepare(
            table, asked.target, asked.names, asked.weights, ignore=asked.ignored, categorical=asked.unordered,
            angular=asked.periods, ordered=asked.ranks, haversine=asked.place, allow_missing=asked.keep_missing,
            classify=asked.classify,
        )  # fmt: skip
        new = None if asked.predict is None else features_of(prepared, tables.read(asked.predict, options=asked.cells))
        _check_together(asked, prepared, table if new is None else new.table)
    say = _Speaker(asked)
    say(report.of_table(prepared))
    with report_errors(EXTRA), _noting(say):
        fitted = fit(
            prepared, kernel=asked.kernel, bandwidth=asked.widths, n_neighbors=asked.count, order=asked.order,
            cv=asked.cv, empty=asked.empty, method=asked.method, rtol=asked.rtol, verbose=int(sys.stderr.isatty()),
            class_weight=asked.class_weights,
        )  # fmt: skip
    with report_errors(EXTRA), _noting(say), _waiting("Counting degrees of freedom..."):
        size = complexity(fitted)
    say(report.of_fit(fitted, asked.widths, size))
    own = new is None and asked.out is not None
    with report_errors(EXTRA), _noting(say), _waiting("Predicting rows that were left out..."):
        found = quality(fitted, exact=own)
    say(report.of_quality(found, fitted))
    say.record = report.record(fitted, asked.widths, size, found)
    if new is not None:
        with report_errors(EXTRA), _noting(None):  # the report counts what is extrapolated
            predictions = fitted.predict(
                new, std=asked.std, band=asked.band, quantiles=asked.shares, slopes=asked.slopes
            )
        say(["", *report.of_prediction(predictions, new, fitted)])
        if predictions.quality is not None:
            say(report.of_quality(predictions.quality, fitted, new.table.name))
            say.record["quality_of_predictions"] = report.quality_record(predictions.quality, fitted)
        _hand_out(asked, say, fitted, new.table, predictions)
    elif own:
        with report_errors(EXTRA), _noting(say):
            predictions = fitted.predict_own_rows()
        if predictions.out_of_reach != found.out_of_reach:  # these were reported already
            say(report.of_rows_out_of_reach(predictions, fitted))
        _hand_out(asked, say, fitted, table, predictions)
    if asked.plot is not None:
        with report_errors(EXTRA), _noting(None):
            drawn = report.draw(fitted, asked.plot, asked.band)
        say([f"Drew {drawn}: {asked.plot}"])
        say.record["plot"] = str(asked.plot)
    with report_errors(EXTRA), asked.json:
        asked.json.add(report.plain(say.record | {"notes": say.notes}))


class _Speaker:
    """Prints lines, unless JSON is printed at the end; on stderr if predictions go to stdout."""

    def __init__(self, asked: SimpleNamespace) -> None:
        self.record: dict[str, Any] = {}
        self.notes: list[str] = []
        self._silent, self._stream = asked.json.alone, sys.stderr if asked.out == "-" else sys.stdout

    def __call__(self, lines: Iterable[str]) -> None:
        for line in () if self._silent else lines:
            encoding = self._stream.encoding or "ascii"
            print(printable(line).encode(encoding, "replace").decode(encoding), file=self._stream)
        self._stream.flush()

    def note(self, text: str) -> None:
        """Print each warning once."""
        if text not in self.notes:
            self.notes.append(text)
            self([f"Note: {text}"])


@contextmanager
def _waiting(text: str) -> Iterator[None]:
    """Show a progress line in a terminal."""
    with Console(stderr=True).status(text) if sys.stderr.isatty() else nullcontext():
        yield


@contextmanager
def _noting(say: _Speaker | None) -> Iterator[None]:
    """Turn the library's warnings into notes, or suppress them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RegardWarning)
        yield
    for each in caught:
        if not issubclass(each.category, RegardWarning):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        elif say is not None:
            text = str(each.message).partition(": ")[2].removesuffix(" extrapolates(X) says which.")
            text = text.replace("bandwidth='loo'", "--bandwidth loo").replace("bandwidth= ", "--bandwidth ")
            say.note(text.replace("empty=", "--empty ").replace("cv=10", "--cv 10").replace("cv=", "--cv"))


def _hand_out(asked: SimpleNamespace, say: _Speaker, fitted: Fitted, table: Table, predictions: Predictions) -> None:
    """Write the rows with their predictions, add them to the record, or print the first ones."""
    import pandas as pd

    say.record["rows_not_predicted"] = {
        "missing": int((~predictions.predicted).sum()),
        "beyond_reach": predictions.out_of_reach,
    }
    if asked.predict is not None:
        say.record["rows_extrapolated"] = predictions.extrapolated
    names, rows = list(predictions.frame.columns), table.frame.reset_index(drop=True)
    if asked.out is not None:
        is_parquet = asked.out.lower().endswith(".parquet")
        rows = pd.concat([table.typed() if is_parquet else table.plain(), predictions.frame], axis=1)
        if asked.out == "-":
            echo(rows.to_csv(index=False, lineterminator="\n"), end="")
        else:
            with report_errors(EXTRA):
                tables.write(rows, asked.out)
        where = "standard output" if asked.out == "-" else asked.out
        say([f"Wrote the rows of {table.name} with {report.names(names)}: {where}"])
        say.record["predictions"] = {"file": asked.out, "rows": len(rows), "columns": names}
        return
    if asked.json.wanted:
        say.record["predictions"] = predictions.frame.to_dict("records")
    if not asked.json.alone:
        shown = rows[[column.name for column in fitted.prepared.columns]].head(_SHOWN)
        listing = pd.concat([shown, predictions.frame.head(_SHOWN)], axis=1)
        listing = listing.round(4) if fitted.classifies else listing
        lines = listing.to_string(index=False, na_rep="", max_colwidth=20, float_format=report.number).splitlines()
        whole = f"all {len(rows):,} rows" if len(rows) > len(shown) else "them"
        say(["", *(line.rstrip() for line in lines), "", f"--out predictions.csv writes {whole}."])


# Options, checked before any file is read -----------------------------------------------------------------------------


def _check(asked: SimpleNamespace) -> None:
    """Check the options, alone and in combination, and parse lists of names and numbers.

    Adds ``names``, the features or None for all; ``ignored``, ``unordered`` and ``periods``, columns to leave out, to
    treat as categories and as angles; ``ranks`` and ``place``, those of ordered categories, and of a latitude and a
    longitude; ``cells``, how cells are read; ``widths``, the bandwidth as a word or numbers; ``shares``, the quantiles
    in ascending order; ``class_weights``, a word or the weight of each class.
    """
    _check_columns(asked)
    asked.cells = _options_of_cells(asked)
    asked.count = None if asked.neighbors is None else _check_neighbors(asked)
    _check_fit(asked)
    _check_output(asked)


def _check_columns(asked: SimpleNamespace) -> None:
    """Check the options that name columns, and split them."""
    for option, given, name in (("--features", asked.features, "names"), ("--ignore", asked.ignore, "ignored"),
                                ("--categorical", asked.categorical, "unordered")):  # fmt: skip
        setattr(asked, name, None if given is None else _split(given))
        if given is not None and not any(getattr(asked, name)):
            raise rejected("regress", option, "name columns, separated by commas", "''")
    asked.ignored, asked.unordered = asked.ignored or [], asked.unordered or []
    asked.periods = {} if asked.angular is None else _periods(asked.angular)
    asked.class_weights = None if asked.class_weight is None else _weights_of_classes(asked.class_weight)
    asked.ranks = {} if asked.ordered is None else _ranks(asked.ordered)
    asked.place = [] if asked.haversine is None else _split(asked.haversine)
    if asked.haversine is not None and (len(set(asked.place)) != 2 or len(asked.place) != 2):
        expected = "name a column of latitudes and one of longitudes, such as lat,lon"
        raise rejected("regress", "--haversine", expected, repr(asked.haversine))
    for option, given in (("--angular", asked.periods), ("--haversine", asked.place)):
        if given and asked.kernel in kernels() and kernels()[asked.kernel].manhattan:
            raise rejected("regress", option, "come with another kernel", f"--kernel {asked.kernel}")


def _check_fit(asked: SimpleNamespace) -> None:
    """Check kernel, bandwidth, algorithm and quantiles."""
    if asked.bandwidth is None:
        asked.bandwidth = "loo" if asked.count is None else "scott"
    asked.widths = asked.bandwidth
    if asked.bandwidth not in WAYS:
        if not (widths := _numbers(asked.bandwidth)):
            raise unknown_name("regress", "--bandwidth (where it is no number)", asked.bandwidth, WAYS)
        if not all(0 < each < math.inf for each in widths):
            raise rejected("regress", "--bandwidth", "be above 0 and finite", asked.bandwidth)
        asked.widths = widths
    asked.shares = [] if asked.quantiles is None else sorted(set(_numbers(asked.quantiles)))
    if asked.quantiles is not None and not (asked.shares and all(0 <= each <= 1 for each in asked.shares)):
        raise rejected(
            "regress", "--quantiles", "be numbers between 0 and 1, separated by commas", asked.quantiles or "''"
        )
    for option, value, known in (
        ("--kernel", asked.kernel, KERNELS), ("--empty", asked.empty, EMPTY), ("--method", asked.method, METHODS)
    ):  # fmt: skip
        if value not in known:
            raise unknown_name("regress", option, value, known)
    if asked.method == "nufft":
        if asked.kernel != "gaussian":
            raise rejected("regress", "--method", "be another", f"'nufft' with --kernel {asked.kernel}")
        require("finufft")
    if asked.cv is not None and asked.widths not in ("loo", "learned") and asked.count != "loo":
        raise rejected("regress", "--cv", "come with --bandwidth loo or learned, which choose one", asked.bandwidth)
    if asked.band is not None:
        Number(gt=0, lt=1)("regress", "--band", asked.band)
    if asked.rtol is not None:
        Number(gt=0, lt=1)("regress", "--rtol", asked.rtol)
    if asked.widths == "learned" and (asked.kernel == "constant" or not kernels()[asked.kernel].smooth):
        got = f"'learned' with --kernel {asked.kernel}, whose weights do not change smoothly with it"
        raise rejected("regress", "--bandwidth", "be another", got)


def _check_output(asked: SimpleNamespace) -> None:
    """Check what is to be predicted, and the files that are written."""
    for wrong, option, expected, got in (
        (asked.std and asked.predict is None, "--std", "come with --predict", "none"),
        (asked.shares and asked.predict is None, "--quantiles", "come with --predict", "none"),
        (asked.band is not None and asked.predict is None and (asked.plot is None or asked.out is not None),
         "--band", "come with --predict, or with --plot and no --out",
         "none" if asked.plot is None else "--out alone"),
        (asked.slopes and asked.predict is None, "--slopes", "come with --predict, which may be DATA itself", "none"),
        (asked.slopes and not asked.order and (asked.kernel == "constant" or not kernels()[asked.kernel].smooth),
         "--slopes", "come with --order 1, or a kernel whose weights change smoothly", f"--kernel {asked.kernel}"),
        (asked.data == asked.predict == "-", "--predict", "be a file when the data come from standard input", "-"),
        (asked.out == "-" and asked.json.alone, "--out", "be a file with --json, which prints too", "-"),
    ):  # fmt: skip
        if wrong:
            raise rejected("regress", option, expected, got)
    if asked.out not in (None, "-"):
        _check_place("--out", Path(asked.out), tables.SUFFIXES)
        if asked.out.lower().endswith(".parquet"):
            require("pyarrow")
    require_writable(asked.json.file)
    if asked.plot is not None:
        require("matplotlib")
        from matplotlib.backend_bases import FigureCanvasBase

        _check_place("--plot", asked.plot, sorted(f".{each}" for each in FigureCanvasBase.get_supported_filetypes()))
    # Unlike Path.resolve, this takes links that lead in a circle.
    read = [os.path.realpath(each) for each in (asked.data, asked.predict) if each not in (None, "-")]
    for option, path in (("--out", asked.out), ("--plot", asked.plot), ("--json", asked.json.file)):
        if path not in (None, "-") and os.path.realpath(path) in read:
            raise rejected("regress", option, "be another file than those that are read", str(path))


def _check_neighbors(asked: SimpleNamespace) -> int | str:
    """Return the number of neighbours, or "loo"; raise if another option does not go with it."""
    for wrong, option, expected, got in (
        (asked.bandwidth in ("loo", "learned", "aicc"), "--bandwidth", "be scott, silverman or numbers with "
         "--neighbors, which chooses the width: it only scales the features", asked.bandwidth),
        (asked.kernel == "constant", "--kernel", "be another with --neighbors", asked.kernel),
        (asked.method == "nufft", "--method", "be another with --neighbors", asked.method),
        (asked.keep_missing, "--keep-missing", "come without --neighbors, which needs all distances", "both"),
        (asked.slopes and not asked.order, "--slopes", "come with --order 1 or 2 where --neighbors is given", "0"),
    ):  # fmt: skip
        if wrong:
            raise rejected("regress", option, expected, got)
    if asked.neighbors == "loo":
        return "loo"
    least = fewest_neighbors(resolve_kernel("regress", asked.kernel)) if asked.kernel in KERNELS else 1
    if not asked.neighbors.isdecimal() or int(asked.neighbors) < least:
        expected = f"be loo or a whole number of at least {least}" + f" with --kernel {asked.kernel}" * (least > 1)
        raise rejected("regress", "--neighbors", expected, repr(asked.neighbors))
    return int(asked.neighbors)


def _options_of_cells(asked: SimpleNamespace) -> tables.Options:
    for option, value, known in (
        ("--decimal", asked.decimal, DECIMALS), ("--thousands", asked.thousands, THOUSANDS)
    ):  # fmt: skip
        if value is not None and value not in known:
            raise rejected("regress", option, f"be one of {', '.join(map(repr, known))}", repr(value))
    if asked.decimal is not None and asked.decimal == asked.thousands:
        raise rejected("regress", "--thousands", "be another mark than --decimal", repr(asked.thousands))
    if asked.encoding is not None:
        try:
            "".encode(asked.encoding)
        except (LookupError, ValueError, TypeError):
            expected = "be an encoding that Python knows, such as latin-1, cp1252 or utf-16"
            raise rejected("regress", "--encoding", expected, repr(asked.encoding)) from None
    missing = () if asked.missing is None else tuple(_split(asked.missing))
    return tables.Options(asked.decimal, asked.thousands, asked.day_first, missing, asked.encoding)


def _periods(text: str) -> dict[str, float]:
    """Return the period of each column in ``wind,hour:24``; a full turn in radians if there is none."""
    found: dict[str, float] = {}
    for each in _split(text):
        name, _, period = each.rpartition(":")
        try:
            found[name or each] = float(period) if name else 2 * math.pi
        except ValueError:
            found[each] = 2 * math.pi  # a name with a colon
    for name, length in found.items():
        if not 0 < length < math.inf:
            raise rejected("regress", "--angular", "have periods above 0", f"{length:g} for {name!r}")
    if not any(found):
        raise rejected("regress", "--angular", "name columns, separated by commas", "''")
    return found


def _weights_of_classes(text: str) -> dict[str, float] | str:
    """Return the weight of each class in ``yes:5,no:1``, or "balanced"."""
    if text == "balanced":
        return text
    found: dict[str, float] = {}
    for each in _split(text):
        name, _, weight = each.rpartition(":")
        try:
            found[name] = float(weight)
        except ValueError:
            found[name] = math.nan
        if not name or not 0 <= found[name] < math.inf:
            expected = "be balanced, or names of classes with weights of at least 0, such as yes:5,no:1"
            raise rejected("regress", "--class-weight", expected, repr(text))
    return found


def _ranks(text: str) -> dict[str, list[str]]:
    """Return the ordered texts of each column in ``stars,size:small<medium<large``; none for a column of numbers."""
    found: dict[str, list[str]] = {}
    for each in _split(text):
        name, colon, order = each.rpartition(":")
        levels = [level.strip() for level in order.split("<")]
        found[name if colon and len(levels) > 1 else each] = levels if colon and len(levels) > 1 else []
    if not any(found):
        raise rejected("regress", "--ordered", "name columns, separated by commas", repr(text))
    for name, levels in found.items():
        if len(set(levels)) < len(levels) or "" in levels:
            raise rejected("regress", "--ordered", "name each category once", f"{'<'.join(levels)!r} for {name!r}")
    return found


def _check_place(subject: str, path: Path, endings: Sequence[str]) -> None:
    """Raise early if a file cannot be written, not after all the work."""
    if not path.name.lower().endswith(tuple(endings)):
        raise rejected("regress", subject, f"end in one of {', '.join(endings)}", str(path))
    if not path.parent.is_dir():
        raise rejected("regress", subject, "be in a folder that exists", f"{path.parent}, which does not")
    if path.is_dir():
        raise rejected("regress", subject, "be a file", f"{path}, a folder")


def _check_together(asked: SimpleNamespace, prepared: Prepared, table: Table) -> None:
    """Raise if options contradict the content of the tables."""
    kept_bandwidth(prepared, asked.widths)
    if asked.class_weights is not None and not prepared.classifies:
        got = f"numbers in {prepared.target.name!r}"
        raise rejected("regress", "--class-weight", "come with a target of text, or --classify", got)
    if isinstance(asked.class_weights, dict):
        for name in asked.class_weights:
            if name not in prepared.target.categories:
                raise unknown_name("regress", "--class-weight", name, prepared.target.categories)
    numeric = len(prepared.numeric)
    if asked.order == 2 and numeric > CURVED:
        expected = f"have at most {CURVED} features of numbers or dates for --order 2, which --features can choose"
        raise rejected("regress", prepared.table.name, expected, numeric)
    if isinstance(asked.count, int) and asked.count > (rows := int(prepared.learned.sum())):
        raise rejected("regress", "--neighbors", f"be at most the {rows:,} rows to learn from", asked.count)
    if asked.slopes and not numeric:
        raise rejected("regress", "--slopes", "come with features of numbers or dates", "none")
    if prepared.classifies:
        options = {
            f"--order {asked.order}": asked.order,
            "--std": asked.std,
            "--quantiles": asked.shares,
            "--slopes": asked.slopes,
            "--band": asked.band,
            "--bandwidth aicc": asked.widths == "aicc",
        }
        for option, given in options.items():
            if given:
                got = f"text in {prepared.target.name!r}"
                raise rejected("regress", option, "come with a target of numbers", got)
    new = asked.predict is not None
    added = prediction_columns(
        prepared, std=asked.std, band=asked.band is not None, quantiles=asked.shares, slopes=asked.slopes, new=new
    )
    for name in added if asked.out is not None else ():
        if name in table.frame.columns:
            raise rejected("regress", table.name, f"have no column {name!r}, which predictions add", "one")


def _split(text: str) -> list[str]:
    """Return the items between commas; names with commas may be quoted."""
    try:
        return [each.strip() for each in next(csv.reader([text], skipinitialspace=True), [])]
    except csv.Error:
        raise rejected("regress", "a list", "stand in one line, separated by commas", repr(text)) from None


def _numbers(text: str) -> list[float]:
    """Return the numbers between commas; none if an item is not a number."""
    try:
        return [float(each) for each in _split(text)]
    except ValueError:
        return []
