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
from regard.scores.kernels import kernels
from regard_cli import regress_report as report
from regard_cli import tables
from regard_cli.cells import DECIMALS, THOUSANDS
from regard_cli.messages import Console, JsonOutput, echo, report_errors, require, require_writable
from regard_cli.printing import printable
from regard_cli.regress_model import Added, Fitted, Prepared, added_names, code, fit, kept_bandwidth, prepare, quality
from regard_cli.tables import Table

#: What installs the packages that this needs.
EXTRA = "regard[regress]"
KERNELS = (*kernels(), "constant")
WAYS = ("loo", "learned", "scott", "silverman")
EMPTY = ("nearest", "mean", "nan", "raise")
#: Predictions that are shown where none are written.
_SHOWN = 10


def run(**options: Any) -> None:
    """Learn, say how well, predict, write and draw. What is wrong ends it before anything is written."""
    asked = SimpleNamespace(**options)
    asked.json = JsonOutput(asked.as_json)
    with report_errors(EXTRA):
        for package in ("pandas", "sklearn"):
            require(package)
        _check(asked)
        table = tables.read(asked.data, least=2, options=asked.cells)
        prepared = prepare(
            table, asked.target, asked.names, asked.weights, ignore=asked.ignored, categorical=asked.unordered,
            angular=asked.periods, classify=asked.classify,
        )  # fmt: skip
        new = None if asked.predict is None else code(prepared, tables.read(asked.predict, options=asked.cells))
        _check_together(asked, prepared, table if new is None else new.table)
    say = _Speaker(asked)
    say(report.of_table(prepared))
    with report_errors(EXTRA), _noting(say):
        fitted = fit(
            prepared, kernel=asked.kernel, bandwidth=asked.widths, order=asked.order, cv=asked.cv, empty=asked.empty,
            method=asked.method, rtol=asked.rtol, verbose=int(sys.stderr.isatty()),
        )  # fmt: skip
    say(report.of_fit(fitted, asked.widths))
    own = new is None and asked.out is not None
    with report_errors(EXTRA), _noting(say), _waiting("Predicting rows that were left out..."):
        found = quality(fitted, exact=own)
    say(report.of_quality(found, fitted))
    say.record = report.record(fitted, asked.widths, found)
    if new is not None:
        with report_errors(EXTRA), _noting(None):  # the report counts what is extrapolated
            added = fitted.predict(new, std=asked.std, quantiles=asked.shares)
        say(["", *report.of_prediction(added, new, fitted)])
        if added.quality is not None:
            say(report.of_quality(added.quality, fitted, new.table.name))
            say.record["quality_of_predictions"] = report.quality_record(added.quality, fitted)
        _hand_out(asked, say, fitted, new.table, added)
    elif own:
        with report_errors(EXTRA), _noting(say):
            added = fitted.of_the_others()
        if added.lost != found.lost:  # these were reported already
            say(report.of_lost(added, fitted))
        _hand_out(asked, say, fitted, table, added)
    if asked.plot is not None:
        with report_errors(EXTRA), _noting(None):
            drawn = report.draw(fitted, asked.plot)
        say([f"Drew {drawn}: {asked.plot}"])
        say.record["plot"] = str(asked.plot)
    with report_errors(EXTRA), asked.json:
        asked.json.add(report.plain(say.record | {"notes": say.notes}))


class _Speaker:
    """Prints lines as they come, unless a record is printed at the end; on stderr where stdout takes predictions."""

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
        """Say once what a warning said."""
        if text not in self.notes:
            self.notes.append(text)
            self([f"Note: {text}"])


@contextmanager
def _waiting(text: str) -> Iterator[None]:
    """Show in a terminal that something is under way."""
    with Console(stderr=True).status(text) if sys.stderr.isatty() else nullcontext():
        yield


@contextmanager
def _noting(say: _Speaker | None) -> Iterator[None]:
    """Turn our own warnings into notes, or keep quiet about them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RegardWarning)
        yield
    for each in caught:
        if not issubclass(each.category, RegardWarning):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        elif say is not None:
            text = str(each.message).partition(": ")[2].removesuffix(" extrapolates(X) says which.")
            say.note(text.replace("empty=", "--empty ").replace("cv=10", "--cv 10").replace("cv=", "--cv"))


def _hand_out(asked: SimpleNamespace, say: _Speaker, fitted: Fitted, table: Table, added: Added) -> None:
    """Write the rows with their predictions; or put them into the record, or show the first of them."""
    import pandas as pd

    say.record["rows_not_predicted"] = {"missing": int((~added.predicted).sum()), "beyond_reach": added.lost}
    if asked.predict is not None:
        say.record["rows_extrapolated"] = added.extrapolated
    names, rows = list(added.frame.columns), table.frame.reset_index(drop=True)
    if asked.out is not None:
        is_parquet = asked.out.lower().endswith(".parquet")
        rows = pd.concat([table.typed() if is_parquet else table.plain(), added.frame], axis=1)
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
        say.record["predictions"] = added.frame.to_dict("records")
    if not asked.json.alone:
        shown = rows[[column.name for column in fitted.prepared.columns]].head(_SHOWN)
        listing = pd.concat([shown, added.frame.head(_SHOWN)], axis=1)
        listing = listing.round(4) if fitted.classifies else listing
        lines = listing.to_string(index=False, na_rep="", max_colwidth=20, float_format=report.number).splitlines()
        whole = f"all {len(rows):,} rows" if len(rows) > len(shown) else "them"
        say(["", *(line.rstrip() for line in lines), "", f"--out predictions.csv writes {whole}."])


# Options, checked before any file is read -----------------------------------------------------------------------------


def _check(asked: SimpleNamespace) -> None:
    """Raise ValueError if an option, or two of them together, cannot be; and say what lists of names and numbers are.

    Adds ``names``, the features or None for all; ``ignored``, ``unordered`` and ``periods``, columns to leave out, to
    treat as categories and as angles; ``cells``, how cells are read; ``widths``, the bandwidth as a word or numbers;
    ``shares``, the quantiles in ascending order.
    """
    for option, given, name in (("--features", asked.features, "names"), ("--ignore", asked.ignore, "ignored"),
                                ("--categorical", asked.categorical, "unordered")):  # fmt: skip
        setattr(asked, name, None if given is None else _split(given))
        if given is not None and not any(getattr(asked, name)):
            raise rejected("regress", option, "name columns, separated by commas", "''")
    asked.ignored, asked.unordered = asked.ignored or [], asked.unordered or []
    asked.periods = {} if asked.angular is None else _periods(asked.angular)
    if asked.periods and asked.kernel in kernels() and kernels()[asked.kernel].manhattan:
        raise rejected("regress", "--angular", "come with another kernel", f"--kernel {asked.kernel}")
    asked.cells = _options_of_cells(asked)
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
    if asked.cv is not None and asked.widths not in ("loo", "learned"):
        raise rejected("regress", "--cv", "come with --bandwidth loo or learned, which choose one", asked.bandwidth)
    if asked.rtol is not None:
        Number(gt=0, lt=1)("regress", "--rtol", asked.rtol)
    if asked.widths == "learned" and (asked.kernel == "constant" or not kernels()[asked.kernel].smooth):
        got = f"'learned' with --kernel {asked.kernel}, whose weights do not change smoothly with it"
        raise rejected("regress", "--bandwidth", "be another", got)
    for wrong, option, expected, got in (
        (asked.std and asked.predict is None, "--std", "come with --predict", "none"),
        (asked.shares and asked.predict is None, "--quantiles", "come with --predict", "none"),
        (asked.data == asked.predict == "-", "--predict", "be a file when the data come from standard input", "-"),
        (asked.out == "-" and asked.json.alone, "--out", "be a file with --json, which prints too", "-"),
    ):
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


def _check_place(subject: str, path: Path, endings: Sequence[str]) -> None:
    """Raise now, rather than when all the work is done, if a file cannot be written."""
    if not path.name.lower().endswith(tuple(endings)):
        raise rejected("regress", subject, f"end in one of {', '.join(endings)}", str(path))
    if not path.parent.is_dir():
        raise rejected("regress", subject, "be in a folder that exists", f"{path.parent}, which does not")
    if path.is_dir():
        raise rejected("regress", subject, "be a file", f"{path}, a folder")


def _check_together(asked: SimpleNamespace, prepared: Prepared, table: Table) -> None:
    """Raise if options do not go with what the tables turned out to be."""
    kept_bandwidth(prepared, asked.widths)
    if prepared.classifies:
        for option, given in (("--order 1", asked.order), ("--std", asked.std), ("--quantiles", asked.shares)):
            if given:
                got = f"text in {prepared.target.name!r}"
                raise rejected("regress", option, "come with a target of numbers", got)
    new = asked.predict is not None
    for name in added_names(prepared, std=asked.std, quantiles=asked.shares, new=new) if asked.out is not None else ():
        if name in table.frame.columns:
            raise rejected("regress", table.name, f"have no column {name!r}, which predictions add", "one")


def _split(text: str) -> list[str]:
    """Return what stands between commas, which may be quoted where a name has one."""
    try:
        return [each.strip() for each in next(csv.reader([text], skipinitialspace=True), [])]
    except csv.Error:
        raise rejected("regress", "a list", "stand in one line, separated by commas", repr(text)) from None


def _numbers(text: str) -> list[float]:
    """Return the numbers between commas, none if something else stands there."""
    try:
        return [float(each) for each in _split(text)]
    except ValueError:
        return []
