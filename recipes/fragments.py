"""Parts of sentences with their translations, found by how words of many pairs go together.

Words are aligned in both directions by expectation maximization (IBM's model 1, Brown 1993, with a preference for the
diagonal as Dyer 2013), and parts that no alignment leaves are taken (Och & Ney 2004).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

#: Words and signs. What a French apostrophe ends is a word, and what follows it another.
_ENGLISH = re.compile(r"[\w'’-]+|[^\w\s]")
_FRENCH = re.compile(r"aujourd['’]hui|\w+['’](?=\w)|[\w-]+|[^\w\s]")
_ROUNDS, _DIAGONAL = 5, 4.0
#: Words of a part, in either language.
_LONGEST = 5


def fragments(
    sources: Sequence[str], targets: Sequence[str], *, share: float = 0.3, frequent: int = 80
) -> dict[tuple[str, str], int]:
    """Return how often parts go together that do so for at least this share of the times that the source comes.

    So many of the most frequent source words end none: most go together with what comes next.

    Examples
    --------
    >>> sources = ["a red house", "a red car", "a blue house", "a blue car"]
    >>> targets = ["une maison rouge", "une voiture rouge", "une maison bleue", "une voiture bleue"]
    >>> sorted(fragments(sources, targets, frequent=0))[-2:]
    [('red car', 'voiture rouge'), ('red house', 'maison rouge')]
    """
    s, t = _Side(sources, _ENGLISH), _Side(targets, _FRENCH)
    forth, back = _links(s, t), _links(t, s)
    counts: Counter[tuple[str, str]] = Counter()
    for row, (source, target) in enumerate(zip(sources, targets)):
        both = {(i, j) for j, i in enumerate(forth[row]) if i >= 0 and back[row][i] == j}
        counts.update(_parts(source, target, s.spans[row], t.spans[row], both))
    whole: Counter[str] = Counter()
    for (source, _), count in counts.items():
        whole[source] += count
    words = Counter(word for text in sources for word in text.lower().split())
    unfinished = {word for word, _ in words.most_common(frequent)}
    return {
        (source, target): count
        for (source, target), count in counts.items()
        if count >= share * whole[source] and source.lower().split()[-1] not in unfinished
    }


class _Side:
    """The words of texts: their places in the text, and numbers for them."""

    def __init__(self, texts: Sequence[str], word: re.Pattern[str]) -> None:
        self.spans = [[found.span() for found in word.finditer(text)] for text in texts]
        known: dict[str, int] = {}
        self.numbers = [
            np.array([known.setdefault(text[a:b].lower(), len(known)) for a, b in spans], np.int64)
            for text, spans in zip(texts, self.spans)
        ]
        self.count = len(known)


def _links(s: _Side, t: _Side) -> list[list[int]]:
    """Return for each target word of each pair the source word that it goes with, −1 for none."""
    places = [(len(a), len(b)) for a, b in zip(s.numbers, t.numbers)]
    # Each target word meets each source word and, last, none: a number of its own.
    left = np.concatenate([np.tile(np.append(a, s.count), len(b)) for a, b in zip(s.numbers, t.numbers)])
    right = np.concatenate([np.repeat(b, len(a) + 1) for a, b in zip(s.numbers, t.numbers)])
    widths = np.concatenate([np.full(b, a + 1) for a, b in places])
    near = np.concatenate([_nearness(a, b) for a, b in places])
    begins = np.concatenate([[0], np.cumsum(widths)[:-1]])
    pairs, which = np.unique(left * t.count + right, return_inverse=True)
    owner = pairs // t.count
    chance = np.full(len(pairs), 1.0)
    for _ in range(_ROUNDS):
        weight = chance[which] * near
        weight /= np.repeat(np.add.reduceat(weight, begins), widths)
        counts = np.bincount(which, weight, len(pairs))
        chance = counts / np.bincount(owner, counts, s.count + 1)[owner]
    weight = chance[which] * near
    found: list[list[int]] = []
    at = 0
    for a, b in places:
        table = weight[at : at + (a + 1) * b].reshape(b, a + 1)
        best = table.argmax(1)
        found.append(np.where(best == a, -1, best).tolist())
        at += (a + 1) * b
    return found


def _nearness(sources: int, targets: int) -> np.ndarray:
    """Return how likely words at these places are to go together, (targets · (sources + 1),)."""
    far = np.abs((np.arange(targets)[:, None] + 0.5) / targets - (np.arange(sources) + 0.5) / sources)
    return np.pad(np.exp(-_DIAGONAL * far), ((0, 0), (0, 1)), constant_values=0.1).ravel()


def _parts(
    source: str, target: str, s: list[tuple[int, int]], t: list[tuple[int, int]], links: set[tuple[int, int]]
) -> Iterator[tuple[str, str]]:
    """Yield the parts of a pair that go together: words, the first and the last aligned, none of them outside."""
    ahead, behind = dict(links), {j: i for i, j in links}
    for i in ahead:
        for last in range(i, min(i + _LONGEST, len(s))):
            if last not in ahead:
                continue
            reached = [ahead[k] for k in range(i, last + 1) if k in ahead]
            j, end = min(reached), max(reached)
            if end - j >= _LONGEST + 1 or (i, last) == (0, len(s) - 1):
                continue
            if any(not i <= behind[k] <= last for k in range(j, end + 1) if k in behind):
                continue
            pair = source[s[i][0] : s[last][1]], target[t[j][0] : t[end][1]]
            if all(re.fullmatch(r"[\w'’ -]*\w", part) for part in pair):
                yield pair
