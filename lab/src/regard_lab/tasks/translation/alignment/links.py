"""Word alignment links between a sentence and its translation: files, scores, and aligners.

A link (i, j) joins word i of the source to word j of the target, both counted from 0.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from regard._utils.errors import rejected, unknown_name
from regard._utils.files import display_name
from regard_lab.data.pairs import Pairs, read_lines

if TYPE_CHECKING:
    from regard_lab.text.words import WordFinder


# Links between the words of a sentence and those of its translation: read, written, symmetrized and scored ------------


Link = tuple[int, int]
Links = frozenset[Link]

#: ``3-4`` is a sure link; ``3?4`` and ``3p4`` are possible ones.
_LINK = re.compile(r"([0-9]{1,12})([-?p])([0-9]{1,12})")
#: Neighbours of a link, horizontal, vertical and diagonal.
_NEAR = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]


@dataclass(frozen=True)
class Gold:
    """The gold links of a pair of sentences.

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
    """Agreement of links with gold links, over all sentences (Och & Ney 2003, doi 10.1162/089120103321337421).

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
        """Compare predicted links of sentence pairs with gold links; without any of a kind, its score is perfect."""
        a = s = p = in_s = in_p = 0
        for links, right in zip(predicted, gold, strict=True):
            a, s, p = a + len(links), s + len(right.sure), p + len(right.possible)
            in_s, in_p = in_s + len(links & right.sure), in_p + len(links & right.possible)
        return cls(
            in_p / a if a else 1.0, in_s / s if s else 1.0, 1 - (in_s + in_p) / (a + s) if a + s else 0.0, a, s, p
        )


def parse_links(line: str, where: str) -> Gold:
    """Return the links in a line: ``0-0 1-2`` sure ones, ``1?2`` or ``1p2`` possible ones (Pharaoh's format).

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
    """Read a file with the links of one pair of sentences per line.

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
    """Return the links in a file for pairs that were read; the file has a line for each line of the pairs' file.

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
    while waiting:  # also visit the neighbours of new links
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


#: Symmetrization methods.
METHODS: Mapping[str, Callable[[Links, Links], Links]] = {
    "intersection": lambda forward, backward: forward & backward,
    "union": lambda forward, backward: forward | backward,
    "grow-diag": _grown,
    "grow-diag-final": lambda forward, backward: _grown(forward, backward, "or"),
    "grow-diag-final-and": lambda forward, backward: _grown(forward, backward, "and"),
}


def merge_pieces(links: Iterable[Link], sources: Sequence[int], targets: Sequence[int]) -> Links:
    """Return links between parts of words as links between whole words."""
    return frozenset((sources[i], targets[j]) for i, j in links)


# Aligners: which word of one sentence goes with which of its translation, learned from the pairs themselves -----------
# Dimensions: P pairs of sentences, J target words in all, N candidates for them, V kinds of candidates.


#: Aligners of other packages.
_PACKAGES = ("eflomal",)
#: Sentences as words.
Sentences = Sequence[Sequence[str]]
#: Maximum number of word pairs to process at once, to learn from, and of a sentence pair.
_BLOCK, _MOST, _LARGEST = 1 << 22, 1 << 26, 1 << 22
#: Of the lexical aligner (Dyer 2013): iterations, the prior of the empty word, and the pseudo-count of a translation.
_ITERATIONS, _EMPTY, _SPARSE = 5, 0.08, 0.01
#: Its preference λ for the diagonal: initial value, minimum, maximum, and learning rate.
_TENSION, _SLACK, _STEEPEST, _RATE = 4.0, 0.1, 14.0, 20.0
#: Probability of an unseen translation.
_UNSEEN = 1e-9
#: A bound on the number of distinct words of a side.
_WORDS = 1 << 32


def align_words(
    sources: Sentences, targets: Sentences, aligner: str = "lexical", method: str = "grow-diag-final-and"
) -> list[Links]:
    """Return the links of each pair of sentences, found in both directions and symmetrized.

    Parameters
    ----------
    sources, targets : sequence of sequence of str
        The words, of as many sentences. Words of equal spelling but for capitals count as the same.
    aligner : {"lexical", "eflomal"}
        Ours, or the package eflomal (Östling & Tiedemann 2016), which must be installed.
    method : str
        As :func:`regard_lab.tasks.translation.alignment.links.symmetrize` takes it.

    Raises
    ------
    ValueError
        If there are not as many targets as sources, or eflomal is missing or fails.

    Examples
    --------
    >>> english = ["a house".split(), "a dog".split(), "my dog".split(), "my house".split()]
    >>> french = ["une maison".split(), "un chien".split(), "mon chien".split(), "ma maison".split()]
    >>> sorted(align_words(english, french)[0])
    [(0, 0), (1, 1)]
    """
    require_aligner(aligner)
    if len(sources) != len(targets):
        raise rejected("align", "targets", f"be as many as sources, {len(sources):,}", f"{len(targets):,}")
    directions = ALIGNERS[aligner](*lowercase(sources, targets))
    return [symmetrize(forward, backward, method) for forward, backward in directions]


def require_aligner(name: str) -> None:
    """Raise ValueError unless an aligner of this name is known and installed."""
    if name not in ALIGNERS:
        raise unknown_name("align", "aligner", name, ALIGNERS)
    try:
        import_module(name if name in _PACKAGES else __name__)
    except ImportError:
        raise rejected("align", "aligner", "be installed (pip install 'regard-lab[align]')", repr(name)) from None


def lowercase(*sides: Sentences) -> list[Sentences]:
    """Return the lowercase words of both sides: aligners ignore case."""
    return [[[word.lower() for word in words] for words in sentences] for sentences in sides]


def lexical(sources: Sentences, targets: Sentences) -> Iterator[tuple[Links, Links]]:
    """Yield the links of both directions, each target word's and each source word's, by attention with a dictionary.

    ::

        α(j → i) ∝ t(f_j | e_i) · exp(−λ |i/I − j/J|)

    t and λ are learned by expectation–maximization, t with a Dirichlet prior (Dyer, Chahuneau & Smith 2013,
    aclanthology N13-1073: IBM's model 2 with the diagonal as its prior). Sentences of thousands of words, with more
    than four million pairs of words, are left without links.
    """
    fits = [len(source) * len(target) <= _LARGEST for source, target in zip(sources, targets)]
    source, target = (_Side.of([words if fit else () for words, fit in zip(side, fits)]) for side in (sources, targets))
    for ahead, back in zip(_best_links(source, target), _best_links(target, source)):
        yield ahead, frozenset((j, i) for i, j in back)


class _Side(NamedTuple):
    """All words of one side's sentences one behind the other, numbered from 1 on, and where sentences begin and end."""

    words: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, sentences: Sentences) -> _Side:
        known: dict[str, int] = {}
        numbers = (known.setdefault(word, len(known) + 1) for each in sentences for word in each)
        words = np.fromiter(numbers, np.int64)
        return cls(words, np.concatenate([[0], np.cumsum([len(each) for each in sentences], dtype=np.int64)]))


class _Candidates:
    """The candidates of every target word of some sentences: the empty word, and each word of its source.

    Attributes
    ----------
    counts : ndarray (P,)
        Target words of each pair of sentences.
    starts : ndarray (J,)
        Where the candidates of each target word begin, all sentences' words one behind the other.
    row, word, target : ndarray (N,)
        Of each candidate: its target word, and the places of source word (−1 is the empty one) and target word in
        their sentences.
    apart : ndarray (N,)
        How far it is from the diagonal.
    kinds : ndarray (N,)
        Source word and target word as one number.
    """

    def __init__(self, source: _Side, target: _Side, first: int, stop: int) -> None:
        read, self.counts = np.diff(source.offsets[first : stop + 1]), np.diff(target.offsets[first : stop + 1])
        width = np.repeat(read + 1, self.counts)  # candidates of each target word
        self.starts = np.cumsum(width) - width
        self.row = np.repeat(np.arange(len(width)), width)
        self.word = np.arange(len(self.row)) - self.starts[self.row] - 1
        place = np.arange(len(width)) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        self.target = place[self.row]
        lengths = np.repeat(np.maximum(read, 1), self.counts), np.repeat(self.counts, self.counts)
        apart = (self.word + 1) / lengths[0][self.row] - ((place + 1) / lengths[1])[self.row]
        self.apart = np.abs(apart).astype(np.float32)
        begin = np.repeat(source.offsets[first:stop], self.counts)
        words = np.concatenate([source.words, [0]])[begin[self.row] + np.maximum(self.word, 0)]
        target_words = target.words[target.offsets[first] : target.offsets[stop]]
        self.kinds = np.where(self.word < 0, 0, words) * _WORDS + target_words[self.row]

    def prior(self, tension: float) -> np.ndarray:
        """Return the prior probability of each candidate."""
        near = self.shares(np.where(self.word < 0, 0, np.exp(-tension * self.apart)))
        return np.where(self.word < 0, _EMPTY, (1 - _EMPTY) * near)

    def shares(self, scores: np.ndarray) -> np.ndarray:
        """Return scores normalized for each target word."""
        total = np.add.reduceat(scores, self.starts)
        return scores / np.where(total == 0, 1, total)[self.row]


def _best_links(source: _Side, target: _Side) -> Iterator[Links]:
    """Yield the links (source word, target word) of each pair of sentences: every target word's likeliest candidate."""
    sizes = (np.diff(source.offsets) + 1) * np.diff(target.offsets)
    blocks = list(_blocks(sizes))
    seen = np.cumsum([sizes[first:stop].sum() for first, stop in blocks])
    learning = [block for block, size in zip(blocks, seen) if size <= _MOST] or blocks[:1]
    kinds, table, tension = _train([_Candidates(source, target, *block) for block in learning])
    for first, stop in blocks:
        candidates = _Candidates(source, target, first, stop)
        if not len(candidates.starts):
            yield from (frozenset() for _ in range(first, stop))
            continue
        place = np.minimum(np.searchsorted(kinds, candidates.kinds), len(kinds) - 1)
        known = np.where(kinds[place] == candidates.kinds, table[place], _UNSEEN)
        scores = known * candidates.prior(tension)
        best = np.maximum.reduceat(scores, candidates.starts)[candidates.row]
        hits = np.flatnonzero(scores == best)
        hits = hits[np.unique(candidates.row[hits], return_index=True)[1]]  # the first of ties
        words, targets, ends = candidates.word[hits], candidates.target[hits], np.cumsum(candidates.counts)
        for begin, end in zip(ends - candidates.counts, ends):
            best_links = zip(words[begin:end].tolist(), targets[begin:end].tolist())
            yield frozenset(link for link in best_links if link[0] >= 0)


def _blocks(sizes: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield from where to where sentences go together."""
    ends, begin = np.cumsum(sizes), 0
    while begin < len(sizes):
        before = ends[begin - 1] if begin else 0
        stop = max(begin + 1, int(np.searchsorted(ends, before + _BLOCK, "right")))
        yield begin, stop
        begin = stop


def _train(blocks: Sequence[_Candidates]) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the kinds of candidates (V,) in order, how likely a source word's translation each is, and the tension."""
    blocks = [each for each in blocks if len(each.starts)]
    if not blocks:
        return np.zeros(1, np.int64), np.zeros(1), _TENSION
    kinds = np.unique(np.concatenate([np.unique(each.kinds) for each in blocks]))
    places = [np.searchsorted(kinds, each.kinds) for each in blocks]
    words, rows = kinds // _WORDS, sum(len(each.starts) for each in blocks)
    spread = np.bincount(words) * _SPARSE
    table, tension = np.ones(len(kinds)), _TENSION
    for _ in range(_ITERATIONS):
        counts, apart, expected = np.zeros(len(kinds)), 0.0, 0.0
        for each, place in zip(blocks, places):
            prior, real = each.prior(tension), each.word >= 0
            share = each.shares(table[place] * prior)
            counts += np.bincount(place, share, len(kinds))
            apart += float((share * each.apart)[real].sum())
            expected += float((prior * each.apart)[real].sum()) / (1 - _EMPTY)
        high = torch.digamma(torch.from_numpy(counts + _SPARSE)).numpy()
        low = torch.digamma(torch.from_numpy(np.bincount(words, counts) + spread)).numpy()
        table = np.exp(high - low[words])
        # Move λ towards the value whose expected distance from the diagonal is the observed one.
        tension = float(np.clip(tension + _RATE * (expected - apart) / rows, _SLACK, _STEEPEST))
    return kinds, table, tension


def eflomal(sources: Sentences, targets: Sentences) -> Iterator[tuple[Links, Links]]:
    """Yield the links of both directions found by the package eflomal (Östling & Tiedemann 2016)."""
    from eflomal import Aligner

    with tempfile.TemporaryDirectory() as folder:
        names = [str(Path(folder) / name) for name in ("forward", "backward")]
        sides = [[" ".join(word.replace(" ", "_") for word in each) for each in side] for side in (sources, targets)]
        try:
            Aligner().align(*sides, links_filename_fwd=names[0], links_filename_rev=names[1], quiet=True)
        except (OSError, subprocess.SubprocessError, RuntimeError) as error:
            raise ValueError(f"align: eflomal has failed: {error}") from error
        lines = [Path(name).read_text(encoding="utf-8").splitlines() for name in names]
    if [len(each) for each in lines] != [len(sources)] * 2:
        raise rejected("align", "eflomal", f"give a line for each of {len(sources):,} pairs", "others")
    for forward, backward in zip(*lines):
        yield parse_links(forward, "eflomal's answer").sure, parse_links(backward, "eflomal's answer").sure


#: Names of the aligners.
ALIGNERS: Mapping[str, Callable[[Sentences, Sentences], Iterator[tuple[Links, Links]]]] = {
    "lexical": lexical,
    "eflomal": eflomal,
}
