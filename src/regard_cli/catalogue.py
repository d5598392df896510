"""``regard catalogue``: print every mechanism as a table, JSON or Markdown."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from rich.table import Table

from regard import Catalogue, catalogue
from regard._catalogue import COLUMNS
from regard._utils.mechanism import GROUPS, Mechanism
from regard_cli.messages import Console, JsonOutput, echo, fail, report_errors, require_writable

#: Columns of a terminal that are needed to show all columns of the table.
_WIDE = 120


def run(names: Sequence[str], *, json: JsonOutput, markdown: bool) -> None:
    """Print the rows whose name, source, title or group contains one of the words; all rows if there are none."""
    if json.alone and markdown:
        raise fail("catalogue: --json must not be given together with --markdown.")
    rows = catalogue()
    if names:
        wanted = [name.lower() for name in names]
        rows = Catalogue([row for row in rows if any(word in _searched(row) for word in wanted)])
        if not rows:
            raise fail(f"catalogue: no name, source or title contains {' or '.join(map(repr, names))}.")
    with report_errors(), json:
        require_writable(json.file)
        json.add_text(rows.json())
    if json.alone:
        return
    if markdown:
        echo(rows.markdown())
    else:
        _show(rows)


def _searched(row: Mechanism) -> str:
    titles = " ".join(each.fields["title"] for each in row.references)
    return f"{row.name} {row.source} {titles} {GROUPS[row.group]}".lower()


def _show(rows: Catalogue) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # some terminals lack letters in formulas
    console = Console(highlight=False, markup=False)  # brackets in formulas are not markup
    for heading in GROUPS.values():
        some = [row for row in rows.table() if row["group"] == heading]
        if not some:
            continue
        table = Table(title=heading, title_justify="left", box=None, pad_edge=False, show_edge=False)
        shown = [column for column in COLUMNS if any(row[column] for row in some)]
        if console.width < _WIDE:
            shown = [column for column in shown if column not in ("causal", "cache")]
        for column in shown:
            table.add_column(column, overflow="fold", no_wrap=column == "name")
        for row in some:
            table.add_row(*(row[column] for column in shown))
        console.print(table)
        console.print()
