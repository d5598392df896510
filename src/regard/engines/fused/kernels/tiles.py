"""What both passes share: which tiles of keys a block of rows sees, and the scores of a tile.

A family gives three functions: ``pack`` brings a tile of keys into scratch memory, if a block of rows can be in reach
of it, ``compare`` writes the scores of four queries and these keys (or, where ``direct``, their weights), ``pull``
takes the gradient of scores back to rows.

Work items are blocks of queries of one head. For a block, tiles of keys pass by.
"""

from __future__ import annotations

import math

from numba import njit

from regard.engines.fused.kernels.arguments import CHUNK, GROUP, PAD, ROW, F
from regard.engines.fused.kernels.basics import FAST, add_rows, address, at, number, pack_rows


@njit(**FAST)
def padded(count):
    """Return ``count`` rounded up to a whole number of vectors."""
    return (count + PAD - 1) // PAD * PAD


@njit(**FAST)
def tiles_in(start, stop, tile):
    """Return how many tiles a range of keys has; a range with a step that is not constant could raise."""
    return (stop - start + tile - 1) // tile


@njit(**FAST)
def kv_head(a, head):
    """Return the flat key head of a flat query head."""
    H, G = a[F.H], a[F.G]
    return head // H * G + head % H // (H // G)


@njit(**FAST)
def bounds(a, head, first, last):
    """Return the keys that any of the rows ``first`` to ``last`` (inclusive) may see: start and stop."""
    if a[F.start] == 0:
        return 0, a[F.S]
    lo, hi = address(a[F.start], a), address(a[F.stop], a)
    base = head // a[F.H] * a[F.interval_b] + head % a[F.H] * a[F.interval_h]
    step = a[F.interval_r]
    start, stop = a[F.S], 0
    for row in range(first, last + 1):
        if lo[base + row * step] < hi[base + row * step]:
            start = min(start, lo[base + row * step])
            stop = max(stop, hi[base + row * step])
    start, stop = max(start, 0), min(stop, a[F.S])  # whatever the intervals hold, no key is read that is not there
    return start, max(start, stop)


@njit(**FAST)
def segment(a, head, r0, r1, index):
    """Return start, stop and column of ``added`` of one range of keys of a block."""
    if a[F.segment_count] == 0:
        start, stop = bounds(a, head, r0, r1 - 1)
        return start, stop, start if a[F.has_added] != 0 else -1
    segments = at(address(a[F.segments], a), 3 * index)
    return max(segments[0], 0), min(segments[1], a[F.S]), segments[2]


@njit(**FAST)
def group_range(a, head, first, last, t0, n):
    """Return which keys of a tile a group of rows may see; the first is at the start of a vector."""
    start, stop = bounds(a, head, first, last)
    j0, j1 = max(start - t0, 0) // PAD * PAD, min(stop - t0, n)
    return j0, j1


@njit(**FAST)
def hide(a, x, head, row, t0, j0, j1, s, added_col, hidden):
    """Replace the score of every pair of a row that may not meet by ``hidden``, and add the bias to the others.

    The tile's keys begin at ``t0``; scores ``j0 ≤ j < j1`` of it are meant.
    """
    if a[F.start] != 0:
        base = head // a[F.H] * a[F.interval_b] + head % a[F.H] * a[F.interval_h] + row * a[F.interval_r]
        lo, hi = address(a[F.start], a)[base] - t0, address(a[F.stop], a)[base] - t0
        for j in range(j0, min(j1, lo)):
            s[j] = hidden
        for j in range(max(j0, hi), j1):
            s[j] = hidden
    if a[F.has_added] != 0 and added_col >= 0:
        b, h = head // a[F.H], head % a[F.H]
        offset = a[F.added_at] + b * a[F.added_b] + h * a[F.added_h] + row * a[F.added_r] + added_col
        added = at(address(a[F.added], x), offset)
        masked = -number(math.inf, x)
        for j in range(j0, j1):
            s[j] = hidden if added[j] == masked else s[j] + added[j]


@njit(**FAST)
def pack_lanes(source, source_row, rows, width, target, height):
    """Pack rows as chunks of lanes: chunk by chunk, ``height`` rows each."""
    for c in range(0, width, CHUNK):
        lanes = min(CHUNK, width - c)
        pack_rows(at(source, c), source_row, rows, lanes, at(target, c // CHUNK * height * CHUNK), CHUNK, padded(lanes))


@njit(**FAST)
def unpack_lanes(source, height, rows, width, target, target_row):
    """Copy chunks of lanes to an array of whole rows."""
    for c in range(0, width, CHUNK):
        lanes = min(CHUNK, width - c)
        pack_rows(at(source, c // CHUNK * height * CHUNK), CHUNK, rows, lanes, at(target, c), target_row, lanes)


@njit(**FAST)
def add_lanes(source, height, rows, width, target, target_row):
    """Add chunks of lanes to an array of whole rows."""
    for c in range(0, width, CHUNK):
        lanes = min(CHUNK, width - c)
        add_rows(at(source, c // CHUNK * height * CHUNK), CHUNK, rows, lanes, at(target, c), target_row)


def scores_of_tiles(compare):
    """Return the function that writes the scores of a family's tiles, what is hidden being hidden."""

    @njit(**FAST)
    def tile_scores(a, x, head, r0, r1, g, t0, n, added_col, k, s):
        """Write the scores of a group of rows; return the range of keys they are of, empty if none is in reach."""
        row, last = r0 + g * GROUP, r1 - 1
        j0, j1 = group_range(a, head, row, min(row + GROUP - 1, last), t0, n)
        if j1 <= j0:
            return 0, 0
        if not compare(a, x, head, row, last, t0, j0, padded(j1 - j0), k, s):
            return 0, 0
        hidden = number(0.0, x) if a[F.direct] != 0 else -number(math.inf, x)
        if a[F.start] != 0 or a[F.has_added] != 0:
            for i in range(GROUP):
                hide(a, x, head, min(row + i, last), t0, j0, j1, at(s, i * ROW), added_col, hidden)
        return j0, j1

    return tile_scores
