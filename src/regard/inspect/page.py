"""Alignments as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from regard._writing import naming
from regard.inspect.alignment import Alignment, drawable

_STYLE = """
:root { color-scheme: light dark; --paper: #fbfaf7; --ink: #1c2126; --soft: #667079; --line: #dcd9d1;
  --mark: #1d5fa8; --on: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15181c; --ink: #e7e9ec; --soft: #99a3ad; --line: #30363d; --mark: #6db3ff; --on: #0d1117; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 2rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 0 0 .75rem; overflow-wrap: anywhere; }
p { color: var(--soft); margin: 0 0 2rem; max-width: 44rem; }
main { display: flex; flex-wrap: wrap; gap: 2.5rem 3rem; align-items: flex-start; }
section { max-width: 100%; overflow-x: auto; }
table { border-collapse: separate; border-spacing: 2px; }
th { font-weight: 600; padding: 0 .25rem; border-radius: 3px; }
thead th { height: 2rem; min-width: 2.1rem; }
.words thead th { vertical-align: bottom; padding: .4rem 0; }
.words thead span { writing-mode: vertical-rl; transform: rotate(180deg); white-space: nowrap; }
tbody th { text-align: right; padding-right: .6rem; }
tbody td { position: relative; width: 2.1rem; height: 2.1rem; border-radius: 4px; text-align: center;
  outline: 1px solid var(--line); outline-offset: -1px; font-size: .72rem;
  background: color-mix(in srgb, var(--mark) calc(var(--w) * 100%), transparent); }
tbody td span { opacity: 0; }
tbody td:hover, tbody td:focus { outline: 2px solid var(--ink); }
tbody td:hover span, tbody td:focus span { opacity: 1; }
td.strong span { color: var(--on); }
.lit { background: var(--line); }
output { display: block; min-height: 1.5em; color: var(--soft); font-size: .9rem; }
"""

_SCRIPT = """
for (const table of document.querySelectorAll("table")) {
  const head = table.tHead.rows[0].cells, say = table.nextElementSibling;
  const light = (cell, on) => {
    const row = cell.parentNode.cells[0], column = head[cell.cellIndex];
    row.classList.toggle("lit", on); column.classList.toggle("lit", on);
    say.textContent = on ? `${row.textContent} attends to ${column.textContent}: ${cell.dataset.weight}` : "";
  };
  for (const cell of table.querySelectorAll("tbody td")) {
    for (const event of ["mouseenter", "focus"]) cell.addEventListener(event, () => light(cell, true));
    for (const event of ["mouseleave", "blur"]) cell.addEventListener(event, () => light(cell, false));
  }
}
"""


def render_html(alignments: Sequence[Alignment], *, heading: str = "Alignments", note: str = "") -> str:
    """Return alignments as one HTML page that needs no network: style and script are inside.

    Input symbols run across, words turned on their side, and output symbols down. Pointing at a cell (or reaching it
    with the tab key) shows its weight; without a script the number still shows in the cell. The page follows the
    reader's light or dark setting.
    All texts are escaped.

    Parameters
    ----------
    alignments : sequence of Alignment
    heading, note : str
        The page's title, and a sentence below it.

    Returns
    -------
    str

    Raises
    ------
    ValueError
        If there is nothing to draw.

    Examples
    --------
    >>> import torch
    >>> page = render_html([Alignment(("<",), ("K",), torch.ones(1, 1))])
    >>> "&lt;" in page, "http" in page
    (True, False)
    """
    body = "\n".join(_section(alignment) for alignment in drawable(alignments, "render_html"))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(heading)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(heading)}</h1>\n<p>{escape(note)}</p>\n"
        f"<main>\n{body}\n</main>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def save_html(
    alignments: Sequence[Alignment], path: str | Path, *, heading: str = "Alignments", note: str = ""
) -> Path:
    """Write :func:`render_html` to a file.

    Raises
    ------
    ValueError
        If there is nothing to draw.
    OSError
        If the file cannot be written.
    """
    path = Path(path)
    data = render_html(alignments, heading=heading, note=note).encode()
    with naming(path):
        path.write_bytes(data)
    return path


def _section(alignment: Alignment) -> str:
    head = "".join(f'<th scope="col"><span>{escape(symbol)}</span></th>' for symbol in alignment.source)
    kind = ' class="words"' if alignment.of_words() else ""
    rows = "\n".join(_row(symbol, row) for symbol, row in zip(alignment.target, alignment.rows()))
    return (
        f"<section>\n<h2>{escape(alignment.title)}</h2>\n<table{kind}>\n<thead><tr><td></td>{head}</tr></thead>\n"
        f"<tbody>\n{rows}\n</tbody>\n</table>\n<output></output>\n</section>"
    )


def _row(symbol: str, weights: list[float]) -> str:
    cells = "".join(_cell(weight) for weight in weights)
    return f'<tr><th scope="row">{escape(symbol)}</th>{cells}</tr>'


def _cell(weight: float) -> str:
    percent = f"{100 * weight:.0f}%"
    strong = ' class="strong"' if weight > 0.5 else ""
    return (
        f'<td{strong} style="--w:{weight:.3f}" data-weight="{100 * weight:.1f} %" tabindex="0">'
        f"<span>{percent.removesuffix('%')}</span></td>"
    )
