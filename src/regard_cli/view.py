"""``regard view``: serve the page of one or two records on this machine."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path

from regard._utils.errors import rejected
from regard.inspect import Record
from regard.inspect._view.page import describe_page
from regard.inspect._view.server import PageServer, Without
from regard_cli.messages import echo, note, report_errors


def run(files: Sequence[Path], *, port: int, browser: bool, batch: int) -> None:
    """Serve the page of records until a keyboard interrupt."""
    with report_errors():
        for file in files:
            if file.is_dir():
                expected = "be a record, which `regard look --out` writes"
                raise rejected("view", "FILE", expected, f"a folder, {file}")
        records = [Record.load(file) for file in files]
        for record, file in zip(records, files):
            record.title = record.title or file.stem
        serve(records, port=port, browser=browser, batch=batch)


def serve(
    records: Sequence[Record], *, port: int = 0, browser: bool = False, batch: int = 0, without: Without | None = None
) -> None:
    """Serve the page of records, and print its address; ``without`` answers without a head."""
    with PageServer(describe_page(records, batch=batch), port, without) as server:
        echo(server.address)
        note("regard: only this machine can open the page; press Ctrl-C to stop")
        if browser:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            note("regard: closed")
