"""Training pairs of the included model: whole sentences, sentences as users type them, and parts of sentences.

``python -m recipes.pairs PAIRS`` writes to standard output, for ``regard train --data -``: all pairs; a share of them
again without final punctuation and initial capital; parts of sentences, without punctuation; and synthetic phrases
from words in those parts. A model trained only on whole sentences fails on anything else. Pairs with rare words are
repeated, because most words occur in too few sentences for a small model to learn.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence

from recipes.fragments import fragments
from recipes.phrases import adjectives, nouns, phrases
from regard_lab.data import read_pairs

_END = re.compile(r"\s*[.!?…]+$")
_WORD = re.compile(r"[^\W\d_]+")
#: Number of most frequent words to exclude as nouns and adjectives: they are function words or ambiguous.
_COMMON = 80


def usual(texts: Iterable[str]) -> Counter[str]:
    """Count words inside sentences, where capitalization is meaningful."""
    return Counter(word for text in texts for word in _WORD.findall(text)[1:])


def plain(text: str, inside: Counter[str]) -> str:
    """Return a sentence without final punctuation, with its first word capitalized as inside sentences.

    Examples
    --------
    >>> inside = usual(["Do they know it?", "So do I.", "Is that Tom?"])
    >>> plain("They do !", inside), plain("I do.", inside), plain("Tom?", inside)
    ('they do', 'I do', 'Tom')
    """
    text = _END.sub("", text)
    first = _WORD.match(text)
    if first is None:
        return text
    word = first[0]
    lower = word[0].lower() + word[1:]
    return lower + text[len(word) :] if inside[lower] > inside[word] else text


def copies(source: str, counts: Counter[str], enough: int, most: int) -> int:
    """Return how often to repeat a pair so that the rarest word of its source occurs about ``enough`` times.

    Examples
    --------
    >>> [copies(text, Counter({"the": 900, "control": 30, "zone": 1}), 40, 8) for text in ("the control", "The zone")]
    [2, 8]
    """
    rarest = min((counts[word.lower()] for word in _WORD.findall(source)), default=enough)
    return min(most, -(-enough // max(rarest, 1)))


def main(given: Sequence[str] | None = None) -> None:
    """Write the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", help="tab-separated pairs, optionally gzip-compressed")
    parser.add_argument("--share", type=float, default=0.6, help="share of pairs to repeat as users type them; 0.6")
    parser.add_argument("--enough", type=int, default=40, help="desired occurrences of each word; 40")
    parser.add_argument("--copies", type=int, default=8, help="maximum repetitions of a pair; 8")
    parser.add_argument("--phrases", type=int, default=60_000, help="number of synthetic phrases; 60,000")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(given)
    pairs = read_pairs(arguments.pairs, longest=None, words=None)
    inside, drawn = (usual(pairs.sources), usual(pairs.targets)), random.Random(arguments.seed)
    typed = [(plain(source, inside[0]), plain(target, inside[1])) for source, target in pairs]
    counts = Counter(word for text in pairs.sources for word in {each.lower() for each in _WORD.findall(text)})
    again = [pair for pair in typed if drawn.random() < arguments.share]
    parts = fragments(*zip(*typed))
    common = {word for word, _ in counts.most_common(_COMMON)}
    names = nouns(parts, (target for _, target in typed), inside[0], common)
    qualities = adjectives(parts, names, usual(pairs.targets), common)
    for pair in (*pairs, *phrases(names, qualities, arguments.phrases, drawn)):
        sys.stdout.write("\t".join(pair) + "\n")
    for pair in (*again, *(pair for pair, count in parts.items() if count > 1)):
        number = copies(pair[0], counts, arguments.enough, arguments.copies)
        sys.stdout.write(("\t".join(pair) + "\n") * number)


if __name__ == "__main__":
    main()
