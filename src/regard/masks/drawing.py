"""Drawings of masks: text for terminals, SVG for notebooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from regard.masks.base import Extent, Mask

#: Maximum number of queries and keys that are drawn pair by pair; larger masks are drawn as tiles.
ROWS, COLUMNS = 48, 96
#: Maximum number of pairs for which mixed tiles are evaluated.
PAIRS = 1 << 22

_HIDDEN, _TILES, _SHADES = "·", "·▒█", "·░▒▓█"


@dataclass(frozen=True)
class Picture:
    """A drawn mask.

    Attributes
    ----------
    title : str
        The mask as code.
    note : str
        The sizes and the legend.
    signs : str
        One sign per level, from hidden to fully visible.
    levels : list of list of int
        For each row (queries) and column (keys), an index into ``signs``.
    block : int
        Number of queries and keys per cell.
    """

    title: str
    note: str
    signs: str
    levels: list[list[int]]
    block: int


def picture(mask: Mask, bound: Mask, extent: Extent, b: int, h: int) -> Picture:
    """Return the picture of a mask bound to an extent; see :meth:`Mask.draw`."""
    L, S = extent.L, extent.S
    block = 1 if L <= ROWS and S <= COLUMNS else max(-(-L // ROWS), -(-S // COLUMNS))
    draw = _pairs if block == 1 else _tiles
    signs, levels, legend = draw(bound, extent, block, b, h)
    note = f"{L} queries ↓, {S} keys →; {legend}"
    if extent.B > 1:
        note += f"; sequence {b} of {extent.B}"
    if extent.H > 1:
        note += f"; head {h} of {extent.H}"
    return Picture(repr(mask), note, signs, levels.tolist(), block)


def _pairs(mask: Mask, extent: Extent, block: int, b: int, h: int) -> tuple[str, Tensor, str]:  # noqa: ARG001
    device = mask._device()
    index = [torch.tensor(b, device=device), torch.tensor(h, device=device)]
    index += [torch.arange(extent.L, device=device)[:, None], torch.arange(extent.S, device=device)]
    seen = mask(*index)
    bias = mask.bias(index[0], index[1], index[2], index[3])
    if bias is None or not seen.any():
        return "·█", seen.long(), "█ visible, · not"
    bias = bias.detach().double().expand(seen.shape)
    least, greatest = bias[seen].min().item() + 0.0, bias[seen].max().item() + 0.0  # + 0.0: no "-0"
    if least == greatest:
        return "·█", seen.long(), f"█ visible with bias {greatest:.4g}, · not"
    shade = 1 + ((bias - least) / (greatest - least) * 4).nan_to_num(0).long().clamp(0, 3)
    return _SHADES, shade * seen, f"visible with bias from █ {greatest:.4g} down to ░ {least:.4g}, · not"


def _tiles(mask: Mask, extent: Extent, block: int, b: int, h: int) -> tuple[str, Tensor, str]:
    exact = extent.L * extent.S * extent.B * extent.H <= PAIRS
    states = mask.tiles(extent, block, block, exact=exact)
    states = states[b % states.shape[0], h % states.shape[1]].long()
    mixed = "mixed" if exact or mask.bounds_are_exact else "mixed or unknown"
    return _TILES, states, f"a cell is {block}×{block} pairs: █ full, ▒ {mixed}, · empty"


def _ticks(columns: int, block: int) -> list[tuple[int, str]]:
    """Return the labels of columns, spaced so that they do not touch."""
    widest = len(str(max(columns - 1, 0) * block))
    step = next(step for step in (5, 10, 20, 40) if step > widest)
    return [(column, str(column * block)) for column in range(0, columns, step)]


def as_text(picture: Picture) -> str:
    """Return the picture as text: a title, a note, a row of key numbers, then a row per query."""
    labels = [str(row * picture.block) for row in range(len(picture.levels))]
    margin = max([len(label) for label in labels], default=1) + 1
    header = " " * margin
    for column, label in _ticks(len(picture.levels[0]) if picture.levels else 0, picture.block):
        header = header.ljust(margin + column) + label
    lines = [picture.title, picture.note, header.rstrip()]
    for label, row in zip(labels, picture.levels):
        lines.append(f"{label:>{margin - 1}} " + "".join([picture.signs[level] for level in row]))
    return "\n".join(lines)


def as_html(picture: Picture) -> str:
    """Return the picture as an HTML figure with an SVG, in the page's text colour so that it fits any theme."""
    rows, columns = len(picture.levels), len(picture.levels[0]) if picture.levels else 0
    cell = max(4, min(14, 640 // max(rows, columns, 1)))
    left, top = 10 + 7 * len(str(max(rows - 1, 0) * picture.block)), 16
    number = 'font-size="10" fill-opacity="0.65"'
    drawn = []
    for level in range(len(picture.signs)):
        # Hidden cells are faint rather than blank, so that the grid shows.
        ink = 0.08 + 0.82 * level / (len(picture.signs) - 1)
        path = "".join(
            [
                f"M{x} {y}h.9v.9h-.9z"
                for y, row in enumerate(picture.levels)
                for x, here in enumerate(row)
                if here == level
            ]
        )
        if path:
            drawn.append(f'<path fill-opacity="{ink:.2f}" d="{path}"/>')
    keys = [
        f'<text x="{left + x * cell}" y="{top - 5}" {number}>{label}</text>'
        for x, label in _ticks(columns, picture.block)
    ]
    queries = [
        f'<text x="{left - 5}" y="{top + y * cell + min(cell, 10)}" text-anchor="end" {number}>{label}</text>'
        for y, label in _ticks(rows, picture.block)
    ]
    from html import escape  # slow to import

    title, note = escape(picture.title), escape(picture.note)
    width, height = left + columns * cell + 30, top + rows * cell + 2
    return (
        '<figure style="margin:0.5em 0;font-family:sans-serif;font-size:12px">'
        f'<figcaption style="margin-bottom:6px"><code>{title}</code><br/>'
        f'<span style="opacity:0.75">{note}</span></figcaption>'
        f'<svg role="img" aria-label="{title}: {note}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" fill="currentColor" font-family="sans-serif">'
        f"{''.join(keys)}{''.join(queries)}"
        f'<g transform="translate({left} {top}) scale({cell})">{"".join(drawn)}</g></svg></figure>'
    )
