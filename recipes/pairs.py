"""The pairs that the model in the box learns from: sentences whole and as people type them, and parts of them.

``python -m recipes.pairs PAIRS`` writes to standard output, to be read by ``regard train --data -``, all the pairs; a
share of them again without their last mark and first capital; and parts of sentences, which nobody ends with a mark. A
model that only ever saw whole sentences is at a loss where one is not.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence

from recipes.fragments import fragments
from regard.tasks.pairs import read_pairs

_END = re.compile(r"\s*[.!?…]+$")
_WORD = re.compile(r"[^\W\d_]+")


def usual(texts: Iterable[str]) -> Counter[str]:
    """Count words as they are written inside of sentences, where a capital means something."""
    return Counter(word for text in texts for word in _WORD.findall(text)[1:])


def plain(text: str, inside: Counter[str]) -> str:
    """Return a sentence without its last mark, its first letter as the word is written inside of sentences.

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


def main(given: Sequence[str] | None = None) -> None:
    """Write the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", help="tab-separated, gzip or not")
    parser.add_argument("--share", type=float, default=0.6, help="of the pairs that come again; 0.6")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(given)
    pairs = read_pairs(arguments.pairs, longest=None, words=None)
    inside, drawn = (usual(pairs.sources), usual(pairs.targets)), random.Random(arguments.seed)
    typed = [(plain(source, inside[0]), plain(target, inside[1])) for source, target in pairs]
    again = [pair for pair in typed if drawn.random() < arguments.share]
    for pair in (*pairs, *again, *fragments(*zip(*typed))):
        sys.stdout.write("\t".join(pair) + "\n")


if __name__ == "__main__":
    main()
