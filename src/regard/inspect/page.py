"""The page on which a record, or alignments, are looked at: one file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path

from regard._errors import rejected
from regard._writing import write_out
from regard.inspect.alignment import Alignment, drawable
from regard.inspect.page_data import PageData, page_data
from regard.inspect.record import Record

#: What is said below every page.
HONEST = (
    "A weight says how much of a value entered a sum, not why a model answers as it does: "
    "test what a picture suggests, by regard.inspect.ablate."
)
#: Characters of a page that a browser is asked to read in one piece.
_LONGEST = 400 << 20


def render_html(
    shown: Record | Sequence[Record] | Sequence[Alignment], *, heading: str = "", note: str = "", batch: int = 0
) -> str:
    """Return a page that shows attention, in one piece that needs no network.

    It holds queries and keys, or weights, and computes what is looked at: any part of a matrix of any size. All texts
    are data: nothing of them is run, and the page asks nobody for anything.

    Parameters
    ----------
    shown : Record, or sequence of Record or of Alignment
        Of two records, heads stand beside each other.
    heading, note : str
        The page's title, and a sentence at its foot, before the one on what weights explain.
    batch : int
        Which sequence of a record's batch.

    Returns
    -------
    str

    Raises
    ------
    ValueError
        If there is nothing to show, or it is too large for one file (``regard view`` shows it piece by piece).

    Examples
    --------
    >>> import torch
    >>> page = render_html([Alignment(("<",), ("K",), torch.ones(1, 1))])
    >>> "u003c" in page, "src=" in page, "connect-src" in page
    (True, False, False)
    """
    data = describe_page(shown, heading=heading, note=note, batch=batch)
    made: dict[int, str] = {}
    total = 0
    for number, block in enumerate(data.blocks):
        made[number] = base64.b64encode(block()).decode()
        total += len(made[number])
        if total > _LONGEST:
            raise rejected("page", "record", f"fit {_LONGEST >> 20} MB of a file (regard view reads more)", "more")
    blocks = "\n".join(
        f'<script type="text/plain" id="block-{number}">{each}</script>' for number, each in made.items()
    )
    return document(data, blocks)


def save_html(
    shown: Record | Sequence[Record] | Sequence[Alignment], path: str | Path, *, heading: str = "", note: str = "",
    batch: int = 0,
) -> Path:  # fmt: skip
    """Write :func:`render_html` to a file.

    Raises
    ------
    ValueError
        If there is nothing to show, or too much for one file.
    OSError
        If the file cannot be written.
    """
    write_out(Path(path), render_html(shown, heading=heading, note=note, batch=batch).encode())
    return Path(path)


def describe_page(
    shown: Record | Sequence[Record] | Sequence[Alignment], *, heading: str = "", note: str = "", batch: int = 0
) -> PageData:
    """Return what the page is given of what it shows."""
    if isinstance(shown, Record):
        shown = [shown]
    if all(isinstance(each, Alignment) for each in shown):
        shown = drawable(shown, "page")  # type: ignore[arg-type]
        title = "Alignments"
    else:
        title = " and ".join(each.title for each in shown if each.title) or "Attention"
    return page_data(shown, title=heading or title, note=f"{note} {HONEST}".strip(), batch=batch)


def document(data: PageData, blocks: str = "", *, served: bool = False) -> str:
    """Return the page's HTML, with blocks in it, or asking its server for them."""
    script, style = (bundled(name) for name in ("page.js", "page.css"))
    # Nothing runs but this very script, and nobody is asked but who is named here.
    rules = f"default-src 'none'; script-src {_digest(script)}; style-src 'unsafe-inline'; img-src data: blob:"
    rules += "; base-uri 'none'; form-action 'none'" + ("; connect-src 'self'" if served else "")
    description = data.described | {"blocks": "served" if served else "inside"}
    described = json.dumps(description, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{rules}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(data.described['title'])}</title>\n"
        f"<style>html, body, #app {{ height: 100%; margin: 0; }}\n{style}</style>\n</head>\n<body>\n"
        f'<div id="app"></div>\n<noscript>This page computes what it shows; it needs JavaScript.</noscript>\n'
        f'<script type="application/json" id="page">{described}</script>\n{blocks}\n<script>{script}</script>\n'
        f"</body>\n</html>\n"
    )


@cache
def bundled(name: str) -> str:
    """Return a file that ``viewer/`` builds."""
    text = files("regard.inspect").joinpath("bundle", name).read_text(encoding="utf-8").strip()
    assert "</script" not in text.lower()
    return text


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
