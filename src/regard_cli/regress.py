"""``regard regress``: a table in, what predicts its target and how well, predictions out."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from regard._utils.errors import RegardWarning, rejected
from regard_cli import regress_report as report
from regard_cli import tables
from regard_cli.messages import Console, report_errors, require
from regard_cli.regress_options import Options
from regard_cli.tables import Added, Fitted, Prepared, Table, fit
from regard_cli.tables.drawing import draw

if TYPE_CHECKING:
    from pandas import DataFrame

#: What installs the packages that this needs.
EXTRA = "regard[regress]"
#: Predictions that are shown where none are written.
_SHOWN = 10


def run(**options: Any) -> None:
    """Learn, say how well, predict, write and draw as asked. What is wrong ends it before anything is written."""
    asked = Options(**options)
    with report_errors(EXTRA):
        for package in ("pandas", "sklearn"):
            require(package)
        asked.check()
        table = tables.read(asked.data, least=2)
        prepared = tables.prepare(table, asked.target, asked.names, asked.weights)
        new = None if asked.predict is None else tables.read(asked.predict)
        coded = {} if new is None else tables.code(prepared, new)
        _check_together(asked, prepared, table if new is None else new)
    say = _Speaker(asked)
    say(report.of_table(prepared))
    with report_errors(EXTRA), _noting(say):
        fitted = fit(
            prepared,
            kernel=asked.kernel,
            bandwidth=asked.widths,
            order=asked.order,
            empty=asked.empty,
            method=asked.method,
            rtol=asked.rtol,
            verbose=int(sys.stderr.isatty()),
        )
    say(report.of_fit(fitted, asked.widths))
    own = new is None and asked.out is not None
    with report_errors(EXTRA), _noting(say), _waiting("Predicting rows that were left out..."):
        quality = tables.quality_of(fitted, exact=own)
    say(report.of_quality(quality, fitted))
    say.record = report.record(fitted, asked.widths, quality)
    if new is not None:
        with report_errors(EXTRA), _noting(None):  # the report counts what is extrapolated
            added = fitted.predict(coded, std=asked.std, quantiles=asked.shares)
        say([""])
        say(report.of_prediction(added, coded, fitted, new.name))
        if (there := tables.quality_on(fitted, new, added)) is not None:
            say(report.of_quality(there, fitted, new.name))
            say.record["quality_of_predictions"] = report.quality_record(there, fitted)
        _hand_out(asked, say, fitted, new, added)
    elif own:
        with report_errors(EXTRA), _noting(say):
            added = fitted.of_the_others()
        if added.lost != quality.lost:  # these were reported already
            say(report.of_lost(added, fitted))
        _hand_out(asked, say, fitted, table, added)
    if asked.plot is not None:
        with report_errors(EXTRA), _noting(None):
            drawn = draw(fitted, asked.plot)
        say([f"Drew {drawn}: {asked.plot}"])
        say.record["plot"] = str(asked.plot)
    say.done()


class _Speaker:
    """Prints lines as they come, or one record at the end; beside predictions on stdout it speaks on stderr."""

    def __init__(self, asked: Options) -> None:
        self.record: dict[str, Any] = {}
        self._as_json = asked.as_json
        self._stream = sys.stderr if asked.out == "-" else sys.stdout
        self._notes: list[str] = []

    def __call__(self, lines: Iterable[str]) -> None:
        if self._as_json:
            return
        for line in lines:
            encoding = self._stream.encoding or "ascii"
            print(report.printable(line).encode(encoding, "replace").decode(encoding), file=self._stream)
        self._stream.flush()

    def note(self, text: str) -> None:
        """Say something once that a warning said."""
        if text not in self._notes:
            self._notes.append(text)
            self([f"Note: {text}"])

    def done(self) -> None:
        """Print the record, if that is what was asked for."""
        if self._as_json:
            print(json.dumps(report.plain(self.record | {"notes": self._notes})))


@contextmanager
def _waiting(text: str) -> Iterator[None]:
    """Show in a terminal that something goes on."""
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(text):
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
            say.note(text.replace("empty=", "--empty "))


def _check_together(asked: Options, prepared: Prepared, table: Table) -> None:
    """Raise if options do not go with what the tables turned out to be."""
    tables.kept_bandwidth(prepared, asked.widths)
    if prepared.target.kind == "category":
        for option, given in (("--order 1", asked.order), ("--std", asked.std), ("--quantiles", asked.shares)):
            if given:
                got = f"text in {prepared.target.name!r}"
                raise rejected("regress", option, "come with a target of numbers", got)
    if asked.out is None:
        return
    new = asked.predict is not None
    for name in tables.added_names(prepared, std=asked.std, quantiles=asked.shares, new=new):
        if name in table.frame.columns:
            raise rejected("regress", table.name, f"have no column {name!r}, which predictions add", "one")


def _hand_out(asked: Options, say: _Speaker, fitted: Fitted, table: Table, added: Added) -> None:
    """Write the rows with their predictions; or put them into the record, or show the first of them."""
    say.record["rows_not_predicted"] = {"missing": int((~added.predicted).sum()), "beyond_reach": added.lost}
    if asked.predict is not None:
        say.record["rows_extrapolated"] = added.extrapolated
    names = ", ".join(each if len(each) <= 40 else each[:39] + "…" for each in list(added.columns)[:8])
    more = f" and {len(added.columns) - 8:,} more" if len(added.columns) > 8 else ""
    if asked.out is not None:
        is_parquet = asked.out.lower().endswith(".parquet")
        frame = _with(tables.typed(table) if is_parquet else table.frame, added)
        with report_errors(EXTRA) if asked.out != "-" else nullcontext():  # a pipe that closes is nobody's error
            tables.write(frame, asked.out)
        where = "standard output" if asked.out == "-" else asked.out
        say([f"Wrote the rows of {table.name} with {names}{more}: {where}"])
        say.record["predictions"] = {"file": asked.out, "rows": len(frame), "columns": list(added.columns)}
        return
    if asked.as_json:
        values = {name: values.tolist() for name, values in added.columns.items()}
        say.record["predictions"] = [dict(zip(values, row)) for row in zip(*values.values())]
        return
    shown = table.frame[[column.name for column in fitted.prepared.columns]].head(_SHOWN)
    listing = _with(shown, added)
    if fitted.classifies:
        listing = listing.fillna({f"{fitted.name}_predicted": ""}).round(4)
    lines = listing.to_string(index=False, na_rep="", max_colwidth=20, float_format=report.number).splitlines()
    say(["", *(line.rstrip() for line in lines)])
    whole = f"all {len(table.frame):,} rows" if len(table.frame) > len(shown) else "them"
    say(["", f"--out predictions.csv writes {whole}."])


def _with(frame: DataFrame, added: Added) -> DataFrame:
    """Return rows of a table with their predictions beside them."""
    import pandas as pd

    columns = {name: values[: len(frame)] for name, values in added.columns.items()}
    return pd.concat([frame.reset_index(drop=True), pd.DataFrame(columns)], axis=1)
