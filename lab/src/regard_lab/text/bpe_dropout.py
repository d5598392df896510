"""Byte-pair merges that are left out at random, so that a word is read in more than one way (BPE dropout)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from random import Random


def merge_pairs(word: str, ranks: Mapping[tuple[str, str], int], dropout: float, drawn: Random) -> list[str]:
    """Return the pieces of a word.

    Of the pairs of neighbours that have a rule, each is passed over with probability ``dropout``, and the one whose
    rule comes first is merged; until none is left (Provilkov 2020, arXiv 1910.13267). With 0 this is byte-pair
    encoding.

    Examples
    --------
    >>> ranks = {("l", "o"): 0, ("lo", "w"): 1}
    >>> merge_pairs("low", ranks, 0.0, Random(0)), merge_pairs("low", ranks, 0.9, Random(0))
    (['low'], ['l', 'o', 'w'])
    """
    pieces = list(word)
    while len(pieces) > 1:
        known = [
            (ranks[pair], place)
            for place, pair in enumerate(pairwise(pieces))
            if pair in ranks and drawn.random() >= dropout
        ]
        if not known:
            break
        _, place = min(known)
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    return pieces
