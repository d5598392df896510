"""Labelled examples: reading labelled texts and pairs of texts, and stratified splits."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self, TypeVar

import numpy as np

from regard._utils.errors import rejected
from regard._utils.files import display_name
from regard_lab.data.pairs import Count, Tally, read_lines
from regard_lab.data.plausibility import is_header
from regard_lab.models.folders import brief

_EMPTY = "skipped, the text is empty"
_HEADER = "looks like a header row, read as a text and its label"
#: The most labels in a message.
_SHOWN = 8


class Labelled(ABC):
    """Base class of labelled examples.

    Attributes
    ----------
    labels : list of str
    name : str
        Where they come from.
    """

    #: The name of an example in messages.
    noun: ClassVar[str] = "example"
    labels: list[str]
    name: str

    def __len__(self) -> int:
        return len(self.labels)

    def names(self) -> list[str]:
        """Return the labels that occur, in order: of numbers if all are, else of the alphabet."""
        found = set(self.labels)
        numeric = all(each.isascii() and each.isdigit() for each in found)
        return sorted(found, key=lambda name: (int(name), name)) if numeric else sorted(found)

    def numbers(self, names: Sequence[str], function: str = "train") -> np.ndarray:
        """Return the number of each example's label, (N,), or raise for one that is not among the names."""
        number = {name: i for i, name in enumerate(names)}
        for row, label in enumerate(self.labels):
            if label not in number:
                expected = f"have a label among {shown_labels(names)}"
                raise rejected(function, self.place(row), expected, brief(label))
        return np.array([number[label] for label in self.labels], np.int64)

    def majority(self) -> tuple[str, float]:
        """Return the most frequent label, and its share."""
        label, count = Counter(self.labels).most_common(1)[0]
        return label, count / len(self)

    def summary(self) -> str:
        """Return how many examples and labels there are, and which is the most frequent."""
        label, share = self.majority()
        kinds = len(set(self.labels))
        count = f"{len(self):,} {self.noun}{'s' * (len(self) > 1)}, {kinds} label{'s' * (kinds > 1)}"
        return f"{self.name}: {count}; {share:.1%} are {brief(label)}"

    def contradictions(self) -> list[str]:
        """Return a line about equal examples with different labels, if any."""
        known: dict[str, str] = {}
        rows = [
            row
            for row, (key, label) in enumerate(zip(self.keys(), self.labels))
            if known.setdefault(key, label) != label
        ]
        return [f"one {self.noun} under two labels: {len(rows):,} (first in {self.place(rows[0])})"] if rows else []

    @abstractmethod
    def place(self, row: int) -> str:
        """Return what messages call the place that an example came from."""

    @abstractmethod
    def keys(self) -> list[str]:
        """Return a text for each example that equal ones share."""

    @abstractmethod
    def checksum(self) -> str:
        """Return a checksum of examples and labels in their order."""

    @abstractmethod
    def take(self, rows: Sequence[int], what: str) -> Self:
        """Return some of the examples."""

    @abstractmethod
    def report(self) -> list[str]:
        """Return what was read, and a line for each kind of example that was left out or looks wrong."""


@dataclass(frozen=True)
class LabelledTexts(Labelled):
    """Texts and their labels.

    Attributes
    ----------
    texts : list of str
    labels : list of str
        Of equal length.
    others : list of str or None
        The second text of each, where labels are of pairs.
    name : str
        Where they came from.
    lines : int
        How many lines were read.
    counts : tuple of Count
        What was left out, or looks wrong.
    places : list of int, optional
        The line of each, counted from 1.

    Examples
    --------
    >>> texts = LabelledTexts(["fine", "dull", "great"], ["good", "bad", "good"])
    >>> texts.names(), texts.numbers(["bad", "good"]).tolist(), len(texts)
    (['bad', 'good'], [1, 0, 1], 3)
    """

    texts: list[str]
    labels: list[str]
    others: list[str] | None = None
    name: str = "texts"
    lines: int = 0
    counts: tuple[Count, ...] = ()
    places: list[int] | None = None
    noun: ClassVar[str] = "text"

    def __post_init__(self) -> None:
        for what, each in (("labels", self.labels), ("others", self.others)):
            if each is not None and len(each) != len(self.texts):
                got = f"{len(each)} for {len(self.texts)} texts"
                raise rejected("LabelledTexts", what, "have one entry per text", got)

    def place(self, row: int) -> str:
        """Return the file and line of a text."""
        return self.name if self.places is None else f"{self.name}, line {self.places[row]:,}"

    def keys(self) -> list[str]:
        """Return each text, or for pairs both texts joined by a tab."""
        return [text if self.others is None else f"{text}\t{self.others[row]}" for row, text in enumerate(self.texts)]

    def checksum(self) -> str:
        """Return a checksum of texts and labels, which depends on their order."""
        digest = hashlib.blake2b(digest_size=16)
        for row, (text, label) in enumerate(zip(self.texts, self.labels)):
            other = "" if self.others is None else self.others[row]
            digest.update(f"{text}\t{other}\t{label}\n".encode())
        return digest.hexdigest()

    def take(self, rows: Sequence[int], what: str) -> Self:
        """Return the texts at these rows."""
        others = None if self.others is None else [self.others[row] for row in rows]
        places = None if self.places is None else [self.places[row] for row in rows]
        return replace(
            self, texts=[self.texts[row] for row in rows], labels=[self.labels[row] for row in rows],
            others=others, places=places, name=f"{self.name} ({what})", counts=(),
        )  # fmt: skip

    def report(self) -> list[str]:
        """Return a line that summarizes the texts, and one for each reason why lines were skipped or look wrong."""
        counts = [f"{each.what}: {each.count:,} (first in line {each.line:,})" for each in self.counts]
        return [self.summary(), *counts, *self.contradictions()]


def read_labelled(path: str | Path, *, pairs: bool = False, function: str = "read_labelled") -> LabelledTexts:
    r"""Read lines ``text TAB label``, or ``text TAB text TAB label``.

    Files are UTF-8, with or without a byte order mark, and may be gzip-compressed. Lines without a text are skipped
    and counted, and a first line that looks like a header is reported. White space around texts and labels is stripped.

    Parameters
    ----------
    path : str or Path
        ``"-"`` is standard input.
    pairs : bool, default False
        Whether a line has two texts.
    function : str
        Prefix of error messages.

    Raises
    ------
    ValueError
        If the file is missing, unreadable, empty, binary or not UTF-8, or if a line has the wrong number of columns or
        no label. The message names the file and line.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.tsv").write_text("fine\tgood\ndull\tbad\n")
    ...     read_labelled(Path(folder, "a.tsv")).labels
    ['good', 'bad']
    """
    name, wanted = display_name(path), 3 if pairs else 2
    columns = "text, text, label" if pairs else "text, label"
    made = LabelledTexts([], [], [] if pairs else None, name, places=[])
    tally, number = Tally(_EMPTY, _HEADER), 0
    assert made.places is not None
    for number, line in enumerate(read_lines(path, function), start=1):
        if not line.strip():
            tally.add(_EMPTY, number)
            continue
        cells = [cell.strip() for cell in line.rstrip("\r\n").split("\t")]
        where = f"{name}, line {number:,}"
        if len(cells) != wanted:
            expected = f"have {wanted} tab-separated columns: {columns}"
            raise rejected(function, where, expected, f"{len(cells)}: {brief(line.strip())}")
        if not cells[-1]:
            raise rejected(function, where, "have a label after the last tab", f"none: {brief(line.strip())}")
        if not all(cells[:-1]):
            tally.add(_EMPTY, number)
            continue
        made.texts.append(cells[0])
        made.labels.append(cells[-1])
        made.places.append(number)
        if made.others is not None:
            made.others.append(cells[1])
    if not len(made):
        raise rejected(function, name, "have lines with a text and a label", "none" if number else "an empty file")
    first = [made.texts[0], *(made.others or [])[:1], made.labels[0]]
    if is_header(first, made.labels):
        tally.add(_HEADER, made.places[0])
    return replace(made, lines=number, counts=tally.counts())


_L = TypeVar("_L", bound=Labelled)


def split_labelled(examples: _L, held_out: float, *, seed: int = 0) -> tuple[_L, _L]:
    """Split examples into a training set and a held-out set, stratified by label; equal examples stay together.

    The split depends only on the examples' content and the seed (through a checksum), not on their order.

    Parameters
    ----------
    examples : Labelled
    held_out : float
        The share, in (0, 1).
    seed : int

    Raises
    ------
    ValueError
        If no label has two distinct examples.

    Examples
    --------
    >>> learn, held = split_labelled(LabelledTexts(list("abcdef"), ["x", "y"] * 3), 0.3)
    >>> len(learn), sorted(held.labels)
    (4, ['x', 'y'])
    """
    if not 0 < held_out < 1:
        raise rejected("split_labelled", "held_out", "be in (0, 1)", held_out)
    keys = examples.keys()
    strata: dict[str, dict[str, None]] = {}
    known: dict[str, str] = {}
    for key, label in zip(keys, examples.labels):  # an example with several labels counts for its first
        strata.setdefault(known.setdefault(key, label), {})[key] = None
    salt, held = str(seed).encode(), set()

    def place(key: str) -> tuple[bytes, str]:
        return hashlib.blake2b(key.encode(), digest_size=8, key=salt).digest(), key

    for stratum in strata.values():
        # Each label keeps at least one training example and, if it has two, gets one held-out example.
        count = min(max(round(held_out * len(stratum)), 1), len(stratum) - 1)
        held.update(sorted(stratum, key=place)[:count])
    if not held:
        noun = examples.noun
        raise ValueError(
            f"train: {examples.name} has no label with two different {noun}s, so none can be held out: add {noun}s, or "
            "pass --valid."
        )
    rows: tuple[list[int], list[int]] = [], []
    for row, key in enumerate(keys):
        rows[key in held].append(row)
    return examples.take(rows[False], "training"), examples.take(rows[True], "held out")


def shown_labels(names: Sequence[str]) -> str:
    """Format labels for a message."""
    listed = ", ".join(brief(name) for name in names[:_SHOWN])
    return listed if len(names) <= _SHOWN else f"{listed}, … ({len(names)} in all)"
