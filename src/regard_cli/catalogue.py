"""``regard catalogue``: print every mechanism as a table, JSON or Markdown."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from rich.table import Table

from regard import Catalogue, catalogue
from regard._catalogue import COLUMNS, HEADINGS
from regard_cli.messages import Console, echo, fail


def run(names: Sequence[str], *, as_json: bool, markdown: bool) -> None:
    """Print the rows whose name or source contains one of the words; all rows if there are none."""
    if as_json and markdown:
        raise fail("catalogue: --json must not be given together with --markdown.")
    rows = catalogue()
    if names:
        wanted = [name.lower() for name in names]
        rows = Catalogue([row for row in rows if any(w in f"{row.name} {row.source}".lower() for w in wanted)])
        if not rows:
            raise fail(f"catalogue: no mechanism or source contains {' or '.join(map(repr, names))}.")
    if as_json:
        echo(rows.json())
    elif markdown:
        echo(rows.markdown())
    else:
        _show(rows)


def _show(rows: Catalogue) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # some terminals lack letters in formulas
    console = Console(highlight=False, markup=False)  # brackets in formulas are not markup
    for module, heading in HEADINGS.items():
        some = [row for row in rows.table() if row["module"] == module]
        if not some:
            continue
        table = Table(title=f"{heading} ({module})", title_justify="left", box=None, pad_edge=False, show_edge=False)
        for column in COLUMNS:
            table.add_column(column, overflow="fold", no_wrap=column == "name")
        for row in some:
            table.add_row(*(row[column] for column in COLUMNS))
        console.print(table)
        console.print()
