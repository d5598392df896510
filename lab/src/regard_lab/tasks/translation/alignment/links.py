"""Links between the words of a sentence and those of its translation: read, written, symmetrized and scored.

A link (i, j) joins word i of the source to word j of the target, both counted from 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from regard._utils.errors import rejected, unknown_name
from regard._utils.files import display_name
from regard_lab.data.pairs import Pairs, read_lines

if TYPE_CHECKING:
    from regard_lab.text.words import WordFinder

Link = tuple[int, int]
Links = frozenset[Link]

#: ``3-4`` is sure; ``3?4`` and ``3p4`` are possible.
_LINK = re.compile(r"([0-9]{1,12})([-?p])([0-9]{1,12})")
#: Neighbours of a link: at its sides, above and below it, and diagonally.
_NEAR = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]


@dataclass(frozen=True)
class Gold:
    """The links that people have made in a pair of sentences.

    Attributes
    ----------
    sure : frozenset of (int, int)
        What must be found.
    possible : frozenset of (int, int)
        What may be found: the sure links and others.
    """

    sure: Links
    possible: Links


@dataclass(frozen=True)
class Agreement:
    """How links agree with those of people, over all sentences (Och & Ney 2003, doi 10.1162/089120103321337421).

    Attributes
    ----------
    precision : float
        |A ∩ P| / |A|, the share of the links A that are possible.
    recall : float
        |A ∩ S| / |S|, the share of the sure links that were found.
    aer : float
        The alignment error rate 1 − (|A ∩ S| + |A ∩ P|) / (|A| + |S|).
    links, sure, possible : int
        |A|, |S| and |P|.

    Examples
    --------
    >>> gold = Gold(frozenset({(0, 0)}), frozenset({(0, 0), (1, 1)}))
    >>> agreement = Agreement.of([frozenset({(0, 0), (2, 1)})], [gold])
    >>> agreement.precision, agreement.recall, round(agreement.aer, 3)
    (0.5, 1.0, 0.333)
    """

    precision: float
    recall: float
    aer: float
    links: int
    sure: int
    possible: int

    @classmethod
    def of(cls, predicted: Iterable[Links], gold: Iterable[Gold]) -> Agreement:
        """Compare the links of pairs of sentences with people's; where nothing is asked or predicted, all is right."""
        a = s = p = in_s = in_p = 0
        for links, right in zip(predicted, gold, strict=True):
            a, s, p = a + len(links), s + len(right.sure), p + len(right.possible)
            in_s, in_p = in_s + len(links & right.sure), in_p + len(links & right.possible)
        return cls(
            in_p / a if a else 1.0, in_s / s if s else 1.0, 1 - (in_s + in_p) / (a + s) if a + s else 0.0, a, s, p
        )


def parse_links(line: str, where: str) -> Gold:
    """Return the links that a line names: ``0-0 1-2`` sure ones, ``1?2`` or ``1p2`` possible ones (Pharaoh's format).

    Parameters
    ----------
    line : str
    where : str
        What error messages call the line.

    Raises
    ------
    ValueError
        If something is no link.

    Examples
    --------
    >>> sorted(parse_links("0-0 1?1", "line 1").possible)
    [(0, 0), (1, 1)]
    """
    sure: set[Link] = set()
    possible: set[Link] = set()
    for each in line.split():
        match = _LINK.fullmatch(each)
        if match is None:
            shown = each if len(each) <= 20 else f"{each[:20]}…"
            raise rejected("links", where, "have links such as 0-0, or 0?0 for possible ones", repr(shown))
        link = int(match[1]), int(match[3])
        possible.add(link)
        if match[2] == "-":
            sure.add(link)
    return Gold(frozenset(sure), frozenset(possible))


def format_links(links: Iterable[Link]) -> str:
    """Return links as a line of Pharaoh's format, in the order of the target's words.

    Examples
    --------
    >>> format_links({(1, 0), (0, 1)})
    '1-0 0-1'
    """
    return " ".join(f"{i}-{j}" for i, j in sorted(links, key=lambda link: (link[1], link[0])))


def read_links(path: str | Path) -> list[Gold]:
    """Read a file that has the links of one pair of sentences in each line.

    Raises
    ------
    ValueError
        If the file cannot be read, or a line is not one of links. The message names the line.
    """
    name = display_name(path)
    return [
        parse_links(line, f"{name}, line {number}") for number, line in enumerate(read_lines(path, "links"), start=1)
    ]


def read_pair_links(path: str | Path, pairs: Pairs, cut: WordFinder) -> list[Gold]:
    """Return the links that a file has for pairs that were read: a line for each line that they were read from.

    Parameters
    ----------
    path : str or Path
    pairs : Pairs
        As :func:`regard_lab.data.pairs.read_pairs` returns them, or some of them.
    cut : callable
        Finds the words of a text.

    Raises
    ------
    ValueError
        If the file has not as many lines, or a line links a word that there is not. The message names the line.
    """
    name, pair_links = display_name(path), []
    read = read_links(path)
    assert pairs.places is not None
    if len(read) != pairs.lines:
        expected = f"have a line for each of the {pairs.lines:,} lines of {pairs.name}"
        raise rejected("links", name, expected, f"{len(read):,}")
    for (source, target), place in zip(pairs, pairs.places):
        counts = len(cut(source)), len(cut(target))
        for i, j in sorted(read[place].possible):
            for side, number, count in zip(("source", "target"), (i, j), counts):
                if number >= count:
                    where = f"{name}, line {place + 1}"
                    words = f"words 0 to {count - 1}" if count > 1 else "word 0, the only one,"
                    raise rejected("links", where, f"link {words} of the {side}", f"{i}-{j}")
        pair_links.append(read[place])
    return pair_links


def symmetrize(forward: Links, backward: Links, method: str = "grow-diag-final-and") -> Links:
    """Join the links of two directions: each target word's to source words, and each source word's to target words.

    Parameters
    ----------
    forward, backward : frozenset of (int, int)
        Both as (source, target).
    method : {"intersection", "union", "grow-diag", "grow-diag-final", "grow-diag-final-and"}
        What both directions have; what either has; or the intersection, grown by the union's links next to it whose
        source word or target word has none yet, and at the end ("final") by other links of either direction of
        words without one; "and": only where both words have none (Koehn, Och & Marcu 2003, aclanthology N03-1017).

    Examples
    --------
    >>> forward, backward = frozenset({(0, 0), (1, 1)}), frozenset({(0, 0), (1, 0)})
    >>> sorted(symmetrize(forward, backward)), sorted(symmetrize(forward, backward, "intersection"))
    ([(0, 0), (1, 0), (1, 1)], [(0, 0)])
    """
    if method not in METHODS:
        raise unknown_name("links", "method", method, METHODS)
    return METHODS[method](forward, backward)


def _grown(forward: Links, backward: Links, final: str = "") -> Links:
    union = forward | backward
    grown = set(forward & backward)
    sources, targets = {i for i, _ in grown}, {j for _, j in grown}
    waiting = sorted(grown)
    while waiting:  # links that were added are looked around, too
        i, j = waiting.pop(0)
        for di, dj in _NEAR:
            link = i + di, j + dj
            if link in union and link not in grown and not (link[0] in sources and link[1] in targets):
                grown.add(link)
                waiting.append(link)
                sources.add(link[0])
                targets.add(link[1])
    for links in (forward, backward) if final else ():
        for i, j in sorted(links - grown):
            free = i not in sources, j not in targets
            if all(free) if final == "and" else any(free):
                grown.add((i, j))
                sources.add(i)
                targets.add(j)
    return frozenset(grown)


#: The ways to symmetrize.
METHODS: Mapping[str, Callable[[Links, Links], Links]] = {
    "intersection": lambda forward, backward: forward & backward,
    "union": lambda forward, backward: forward | backward,
    "grow-diag": _grown,
    "grow-diag-final": lambda forward, backward: _grown(forward, backward, "or"),
    "grow-diag-final-and": lambda forward, backward: _grown(forward, backward, "and"),
}


def merge_pieces(links: Iterable[Link], sources: Sequence[int], targets: Sequence[int]) -> Links:
    """Return links of parts of words as links of the words that the parts belong to."""
    return frozenset((sources[i], targets[j]) for i, j in links)
