"""Pairs of lines for training: reading, filtering with counts of skipped lines, and splitting by source."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, zip_longest
from pathlib import Path

from regard._utils.errors import rejected
from regard._utils.files import DAMAGED, display_name, not_text, open_file
from regard_lab.data.documents import read_documents
from regard_lab.data.plausibility import names_columns, shuffled_rows
from regard_lab.text.words import normalize

#: Maximum line length in bytes; a file with longer lines is not text.
_LONGEST_LINE = 1 << 20
_EMPTY = "skipped, one side is empty"
_DUPLICATE = "skipped, duplicate pairs"
_REPEATED = "skipped, duplicate texts"
_COPY = "both sides are the same"
_HEADER = "looks like a header row, read as a pair"
_FURTHER = "extra columns ignored"


@dataclass(frozen=True)
class Count:
    """The number of lines that were skipped or changed, or look wrong, for one reason.

    Attributes
    ----------
    what : str
        For example ``"skipped, one side is empty"``.
    count : int
    line : int
        The first such line, counted from 1.
    """

    what: str
    count: int
    line: int


@dataclass(frozen=True)
class Pairs:
    """Source texts with their targets.

    Attributes
    ----------
    sources, targets : list of str
        Of equal length; a source with several targets appears several times.
    name : str
        Where they come from.
    lines : int
        Number of lines read.
    counts : tuple of Count
        Skipped, changed and suspicious lines.
    places : list of int, optional
        The line number of each pair, counted from 0.

    Examples
    --------
    >>> pairs = Pairs(["Run!", "Run!"], ["Cours !", "Courez !"])
    >>> pairs.references()
    {'Run!': ['Cours !', 'Courez !']}
    """

    sources: list[str]
    targets: list[str]
    name: str = "pairs"
    lines: int = 0
    counts: tuple[Count, ...] = field(default=())
    places: list[int] | None = None

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.targets):
            got = f"{len(self.targets)} for {len(self.sources)} sources"
            raise rejected("Pairs", "targets", "have one entry per source", got)

    def __len__(self) -> int:
        return len(self.sources)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return zip(self.sources, self.targets)

    def references(self) -> dict[str, list[str]]:
        """Return each distinct source, in order, with its distinct targets."""
        references: dict[str, dict[str, None]] = {}
        for source, target in self:
            references.setdefault(source, {})[target] = None
        return {source: list(targets) for source, targets in references.items()}

    def checksum(self) -> str:
        """Return a checksum of the pairs, which depends on their order."""
        return hashlib.blake2b("\n".join(f"{s}\t{t}" for s, t in self).encode(), digest_size=16).hexdigest()

    def take(self, rows: Sequence[int], what: str) -> Pairs:
        """Return the pairs at these rows."""
        sources, targets = [self.sources[row] for row in rows], [self.targets[row] for row in rows]
        places = None if self.places is None else [self.places[row] for row in rows]
        return Pairs(sources, targets, f"{self.name} ({what})", self.lines, places=places)

    def place(self, row: int) -> str:
        """Return the file and line of a pair, for messages."""
        return f"{self.name}, {f'row {row + 1:,}' if self.places is None else f'line {self.places[row] + 1:,}'}"

    def shuffled(self) -> list[str]:
        """Return a line about targets that look shuffled against their sources, if any."""
        rows = shuffled_rows(self.sources, self.targets)
        if rows is None:
            return []
        where = f"in {self.name}" if len(rows) == len(self) else f"from {self.place(rows[0])} on"
        fit = "they fit their sources no better than in random order"
        return [f"the targets look shuffled {where}: by length and shared words, {fit}"]

    def report(self) -> list[str]:
        """Return a line that summarizes the pairs, and one for each reason why lines were skipped or look wrong."""
        what = "texts" if self.sources is self.targets else "pairs"
        read = f"{self.name}: {len(self):,} {what}" + (f" of {self.lines:,} lines" if self.lines else "")
        return [read, *(f"{each.what}: {each.count:,} (first in line {each.line:,})" for each in self.counts)]


def read_pairs(
    source: str | Path,
    target: str | Path | None = None,
    *,
    max_length: int | None = 1000,
    words: int | None = 200,
    lowercase: bool = False,
    duplicates: bool = False,
    copies: bool = True,
) -> Pairs:
    """Read pairs from a file with two tab-separated columns, or from two parallel files.

    Text is UTF-8, with or without a byte order mark, and is normalized with :func:`normalize`. Files may be
    gzip-compressed, whatever their names. Columns after the second are ignored. The result counts pairs that are
    skipped or look wrong.

    Parameters
    ----------
    source : str or Path
        ``"-"`` is standard input.
    target : str or Path, optional
        The second of two files.
    max_length, words : int or None
        The most characters and space-separated words on a side; None for no limit.
    lowercase : bool, default False
    duplicates : bool, default False
        Keep pairs that are identical to an earlier one.
    copies : bool, default True
        Keep pairs whose sides are identical.

    Returns
    -------
    Pairs

    Raises
    ------
    ValueError
        If a file is missing, a folder, unreadable, empty, binary, truncated or not UTF-8, has a line with one column,
        if two files have different numbers of lines, or if no pair is left. The message names the file and line.
    """
    for limit, value in (("max_length", max_length), ("words", words)):
        if value is not None and value < 1:
            raise rejected("read_pairs", limit, "be at least 1 or None", value)
    if target is not None and str(source) == str(target) == "-":
        raise rejected("read_pairs", "target", "be another file than source", "standard input for both")
    name = display_name(source) if target is None else f"{display_name(source)}, {display_name(target)}"
    seen: set[tuple[str, str]] = set()
    copy = _COPY if copies else f"skipped, {_COPY}"
    tally = Tally(_EMPTY, _too_long(max_length, words), _DUPLICATE, copy, _FURTHER, _HEADER)
    sources: list[str] = []
    targets: list[str] = []
    places: list[int] = []
    number = 0
    rows = _columns(source, tally) if target is None else _side_by_side(source, target)
    for number, (left, right) in enumerate(rows, start=1):
        pair = ours, theirs = normalize(left, lowercase), normalize(right, lowercase)
        if not (ours and theirs):
            tally.add(_EMPTY, number)
        elif _exceeds(ours, max_length, words) or _exceeds(theirs, max_length, words):
            tally.add(_too_long(max_length, words), number)
        elif not copies and ours == theirs:
            tally.add(copy, number)
        elif not duplicates and pair in seen:
            tally.add(_DUPLICATE, number)
        else:
            sources.append(ours)
            targets.append(theirs)
            places.append(number - 1)
            if ours == theirs:
                tally.add(copy, number)
            if number == 1 and names_columns(pair):
                tally.add(_HEADER, number)
            if not duplicates:
                seen.add(pair)
    if not number:
        raise rejected("read_pairs", name, "have lines", "an empty file")
    pairs = Pairs(sources, targets, name, number, tally.counts(), places)
    if not pairs:
        raise ValueError(f"read_pairs: {name} has no usable pairs: {'; '.join(pairs.report()[1:])}.")
    return pairs


def read_texts(path: str | Path, *, words: int = 200, lowercase: bool = False, duplicates: bool = False) -> Pairs:
    """Read lines of text for span corruption, as pairs of equal sides.

    Parameters
    ----------
    path : str or Path
        A file or folder, as in :func:`~regard_lab.data.documents.read_documents`; ``"-"`` is standard input.
    words : int, default 200
        The most words of a text; longer lines are split.
    lowercase : bool, default False
    duplicates : bool, default False
        Keep texts that are identical to an earlier one.

    Raises
    ------
    ValueError
        As :func:`~regard_lab.data.documents.read_documents`.
    """
    tally, seen, number = Tally(_REPEATED), set[str](), 0
    found: list[str] = []
    for number, line in enumerate(read_documents(path, per="line", function="train"), start=1):
        parts = normalize(line, lowercase).split()
        for first in range(0, len(parts), words):
            text = " ".join(parts[first : first + words])
            if text in seen:
                tally.add(_REPEATED, number)
                continue
            found.append(text)
            if not duplicates:
                seen.add(text)
    return Pairs(found, found, display_name(path), number, tally.counts())


def split_pairs(pairs: Pairs, held_out: float | int, *, seed: int = 0) -> tuple[Pairs, Pairs]:
    """Split pairs into a training set and a held-out set without common sources.

    The split depends only on the sources' text and the seed (through a checksum), not on the order of lines.

    Parameters
    ----------
    pairs : Pairs
    held_out : float or int
        The share in (0, 1), or the number, of distinct sources to hold out with all their targets.
    seed : int

    Returns
    -------
    (Pairs, Pairs)
        Training set and held-out set, both in the order of ``pairs``.

    Raises
    ------
    ValueError
        If either set would be empty.

    Examples
    --------
    >>> learn, held = split_pairs(Pairs(["a", "b", "a", "c"], ["A", "B", "Á", "C"]), 1)
    >>> len(learn) + len(held), set(learn.sources) & set(held.sources)
    (4, set())
    """
    unique = dict.fromkeys(pairs.sources)
    if len(unique) < 2:
        raise ValueError(
            "split_pairs: there are no two different sources, so none can be held out: add pairs, or pass --valid."
        )
    if isinstance(held_out, float):
        if not 0 < held_out < 1:
            raise rejected("split_pairs", "held_out", "be in (0, 1), or a whole number of sources", held_out)
        held_out = min(max(round(held_out * len(unique)), 1), len(unique) - 1)
    elif not 1 <= held_out < len(unique):
        raise rejected("split_pairs", "held_out", f"be from 1 to {len(unique) - 1}, fewer than the sources", held_out)
    salt = str(seed).encode()

    def place(source: str) -> tuple[bytes, str]:
        return hashlib.blake2b(source.encode(), digest_size=8, key=salt).digest(), source

    held = set(sorted(unique, key=place)[:held_out])
    rows: tuple[list[int], list[int]] = [], []
    for row, source in enumerate(pairs.sources):
        rows[source in held].append(row)
    return pairs.take(rows[False], "training"), pairs.take(rows[True], "held out")


class Tally:
    """Counts skipped, changed and suspicious lines by reason, and remembers the first of each."""

    def __init__(self, *kinds: str) -> None:
        self._found: dict[str, list[int]] = {kind: [0, 0] for kind in kinds}

    def add(self, what: str, line: int) -> None:
        entry = self._found[what]
        entry[0] += 1
        entry[1] = entry[1] or line

    def counts(self) -> tuple[Count, ...]:
        return tuple(Count(what, count, line) for what, (count, line) in self._found.items() if count)


def _exceeds(text: str, max_length: int | None, words: int | None) -> bool:
    if max_length is not None and len(text) > max_length:
        return True
    return words is not None and len(text) > 2 * words - 1 and text.count(" ") >= words


def _too_long(max_length: int | None, words: int | None) -> str:
    limits = ((max_length, "characters"), (words, "words"))
    return "skipped, one side has more than " + " or ".join(f"{n} {what}" for n, what in limits if n is not None)


def _columns(path: str | Path, tally: Tally) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(read_lines(path), start=1):
        cells = line.split("\t", 2)
        if len(cells) == 2:
            yield cells[0], cells[1]
        elif len(cells) == 3:
            tally.add(_FURTHER, number)
            yield cells[0], cells[1]
        elif not line.strip():
            yield "", ""
        else:
            where = f"{display_name(path)}, line {number}"
            raise rejected("read_pairs", where, "have two columns separated by a tab", f"one: {_brief(line)}")


def _side_by_side(source: str | Path, target: str | Path) -> Iterator[tuple[str, str]]:
    lengths = [0, 0]
    for left, right in zip_longest(read_lines(source), read_lines(target)):
        lengths[0] += left is not None
        lengths[1] += right is not None
        if left is not None and right is not None:
            yield left, right
    if lengths[0] != lengths[1]:
        expected = f"have as many lines as {display_name(source)} ({lengths[0]})"
        raise rejected("read_pairs", display_name(target), expected, lengths[1])


def read_lines(path: str | Path, function: str = "read_pairs") -> Iterator[str]:
    """Yield the lines of a file; only line feeds end lines, so that two files stay parallel.

    Parameters
    ----------
    path : str or Path
        ``"-"`` is standard input.
    function : str
        Prefix of error messages.

    Raises
    ------
    ValueError
        As in :func:`read_pairs` for one file.
    """
    name = display_name(path)
    with open_file(path, function) as file:
        for number in count(1):
            try:
                raw = file.readline(_LONGEST_LINE)
            except DAMAGED:
                cut = f"one that is cut short or damaged after line {number - 1}"
                raise rejected(function, name, "be a whole gzip file", cut) from None
            if not raw:
                return
            if len(raw) == _LONGEST_LINE and not raw.endswith(b"\n"):
                where = f"{name}, line {number}"
                raise rejected(function, where, f"have fewer than {_LONGEST_LINE:,} bytes", "more")
            if number == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            try:
                line = raw.decode()
            except UnicodeDecodeError as error:
                raise not_text(function, name, number, raw, error) from None
            if "\0" in line:
                raise not_text(function, name, number, raw)
            yield line


def _brief(text: str) -> str:
    shown = repr(text.strip())
    return shown if len(shown) <= 60 else shown[:57] + "..."
