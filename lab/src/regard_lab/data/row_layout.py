"""Runs of tokens laid out in rows of a fixed length: by best fit, or as windows over documents."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Runs:
    """Runs of neighbouring tokens to read: where each begins, its length, how many first targets are left out, (C,)."""

    starts: np.ndarray
    lengths: np.ndarray
    skips: np.ndarray


@dataclass(frozen=True)
class Rows:
    """Runs in rows.

    Row r has the slots ``firsts[r]`` to ``firsts[r + 1]``; slot s begins at ``offsets[s]`` of its row and has run
    ``runs_of[s]``; rows come in this ``order``.
    """

    runs: Runs
    firsts: np.ndarray
    offsets: np.ndarray
    runs_of: np.ndarray
    order: np.ndarray


def best_fit(runs: Runs, length: int) -> Rows:
    """Return runs in rows, each put where it leaves the least room, the longest first.

    Runs of a length, and rows in which lengths follow each other alike, are counted, not gone through: this takes time
    for each different length (Krell 2021, arXiv 2107.02027).

    Examples
    --------
    >>> rows = best_fit(Runs(np.array([0, 9, 20, 30]), np.array([3, 7, 5, 2]), np.zeros(4, int)), 8)
    >>> [rows.runs.lengths[rows.runs_of[a:b]].tolist() for a, b in zip(rows.firsts, rows.firsts[1:])]
    [[5, 3], [7], [2]]
    """
    counts = np.bincount(runs.lengths, minlength=1)
    rows: dict[
        int, dict[tuple[int, ...], int]
    ] = {}  # by the room that is left: lengths in a row, and how many have them
    rooms: list[int] = []  # those there are, in order

    def add(room: int, pattern: tuple[int, ...], count: int) -> None:
        if room not in rows:
            rows[room] = {}
            insort(rooms, room)
        rows[room][pattern] = rows[room].get(pattern, 0) + count

    for size in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[size])
        while left:
            at = bisect_left(rooms, size)
            if at < len(rooms):
                room = rooms[at]
                pattern, count = rows[room].popitem()
                if not rows[room]:
                    del rows[room], rooms[at]
            else:
                room, pattern, count = length, (), -(-left // (length // size))
            each = room // size
            full = min(count, left // each)
            rest = left - full * each if full < count else 0  # of one more row
            if full:
                add(room - each * size, (*pattern, *(size,) * each), full)
            if rest:
                add(room - rest * size, (*pattern, *(size,) * rest), 1)
            if others := count - full - (rest > 0):
                add(room, pattern, others)
            left -= full * each + rest
    groups = [(np.array(pattern), count) for room in rooms for pattern, count in rows[room].items()]
    sizes = np.concatenate([np.tile(pattern, count) for pattern, count in groups])
    offsets = np.concatenate([np.tile(np.cumsum(pattern) - pattern, count) for pattern, count in groups])
    slots = np.concatenate([np.full(count, len(pattern)) for pattern, count in groups])
    runs_of = np.empty_like(sizes)
    runs_of[np.argsort(sizes, kind="stable")] = np.argsort(runs.lengths, kind="stable")
    return Rows(runs, np.concatenate([[0], np.cumsum(slots)]), offsets, runs_of, np.arange(len(slots)))


def windows(begins: np.ndarray, reads: np.ndarray, length: int, stride: int) -> Runs:
    """Return windows over documents, each of which leaves out the targets that those before it have.

    Parameters
    ----------
    begins, reads : ndarray (N,)
        Where each document begins, and how many of its tokens are read.
    length, stride : int
        Of a window, and from one to the next.

    Examples
    --------
    >>> runs = windows(np.array([100]), np.array([10]), 6, 3)
    >>> runs.starts.tolist(), runs.lengths.tolist(), runs.skips.tolist()
    ([100, 103, 104], [6, 6, 6], [0, 3, 5])
    """
    count = 1 + -(-np.maximum(reads - length, 0) // stride)
    number, whose = ranges(np.zeros_like(count), count)
    reads = reads[whose]
    ends = np.minimum(length + number * stride, reads)
    starts = np.maximum(ends - length, 0)
    before = np.where(number > 0, length + (number - 1) * stride, 0)
    return Runs(begins[whose] + starts, ends - starts, before - starts * (number > 0))


def ranges(firsts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of ranges one behind the other, and which range each is of.

    Examples
    --------
    >>> ranges(np.array([5, 0]), np.array([2, 3]))
    (array([5, 6, 0, 1, 2]), array([0, 0, 1, 1, 1]))
    """
    which = np.repeat(np.arange(len(counts)), counts)
    shift = firsts - (np.cumsum(counts) - counts)
    return np.arange(len(which)) + shift[which], which
