"""Unknown characters and symbols: of texts that a model reads, and of those that it is trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np

from regard_lab.text.tokenizer import Tokenizer

#: The largest share of a text's characters that the vocabulary may lack, by default.
MAX_UNKNOWN = 0.2
#: The most characters to list.
_SHOWN = 5


@dataclass(frozen=True)
class UnknownCharacters:
    """Counts of characters in texts that a vocabulary lacks; counts can be added.

    Attributes
    ----------
    counts : Counter of str
    total : int
        The number of all characters.

    Examples
    --------
    >>> tokenizer = Tokenizer.learn(["to be or not"], kind="characters")
    >>> print(UnknownCharacters.of(tokenizer, ["née", "to be"]))
    the model's vocabulary lacks 1 of 8 characters: 'é'
    """

    counts: Counter[str] = field(default_factory=Counter)
    total: int = 0

    @classmethod
    def of(cls, tokenizer: Tokenizer, texts: Iterable[str], *, parse_specials: bool = False) -> Self:
        """Count the unknown characters of texts.

        Parameters
        ----------
        tokenizer : Tokenizer
        texts : iterable of str
        parse_specials : bool, default False
            Read names of special tokens in the texts as these tokens.
        """
        counts, total = Counter[str](), 0
        for text in texts:
            for line in text.splitlines(keepends=True):  # encoding takes many times the memory of what is encoded
                counts.update(tokenizer.unknown_characters(line, parse_specials=parse_specials))
            total += len(text)
        return cls(counts, total)

    @property
    def share(self) -> float:
        """The share of all characters."""
        return self.counts.total() / max(self.total, 1)

    def __add__(self, other: Self) -> Self:
        return type(self)(self.counts + other.counts, self.total + other.total)

    def __bool__(self) -> bool:
        return bool(self.counts)

    def __str__(self) -> str:
        listed = ", ".join(repr(character) for character, _ in self.counts.most_common(_SHOWN))
        more = f" and {len(self.counts) - _SHOWN:,} more" if len(self.counts) > _SHOWN else ""
        return f"the model's vocabulary lacks {self.counts.total():,} of {self.total:,} characters: {listed}{more}"


# Symbols of training data -------------------------------------------------------------------------------------------


class Speller(Protocol):
    """A vocabulary or tokenizer."""

    def unknown_places(self, numbers: np.ndarray) -> list[int]:
        """Return the positions of unknown symbols."""

    def unknown_characters(self, text: str) -> list[str]:
        """Return the characters or symbols of a text that are unknown, in order."""


def check_unknown(
    what: str,
    vocabulary: Speller,
    blocks: Iterable[np.ndarray],
    ends: np.ndarray,
    find: Callable[[int], tuple[str, str]],
    most: float,
    allow: str = "--set data.max_unknown=1",
) -> list[str]:
    """Return a line about the unknown symbols of texts, or nothing if there are none.

    Parameters
    ----------
    what : str
        The texts' name in messages, such as the side of pairs.
    vocabulary : Vocabulary or Tokenizer
    blocks : iterable of ndarray
        The numbers of all texts, one behind the other.
    ends : ndarray (N,)
        Where each text ends.
    find : callable
        Maps the index of a text to its place in the data, for messages, and the text.
    most : float
        The largest share of unknown symbols to accept.
    allow : str
        How users accept more.

    Raises
    ------
    ValueError
        If a larger share is unknown.

    Examples
    --------
    >>> from regard_lab.text import Ragged, SymbolVocabulary
    >>> vocabulary, texts = SymbolVocabulary("abcdefghij"), ["badge", "bay"]
    >>> numbers = vocabulary.encode_all(texts)
    >>> find = lambda row: (f"line {row + 1}", texts[row])
    >>> check_unknown("source", vocabulary, [numbers.numbers], numbers.offsets[1:], find, most=0.2)
    ["source: 1 of 8 symbols (12.5%) are unknown to the vocabulary (first in line 2: 'y')"]
    """
    unknown = total = first = 0
    for block in blocks:
        places = vocabulary.unknown_places(block)
        if places and not unknown:
            first = total + places[0]
        unknown, total = unknown + len(places), total + len(block)
    if not unknown:
        return []
    place, text = find(int(np.searchsorted(ends, first, side="right")))
    lacking = list(dict.fromkeys(vocabulary.unknown_characters(text)))
    shown = ", ".join(map(repr, lacking[:_SHOWN])) + ", …" * (len(lacking) > _SHOWN)
    line = f"{what}: {unknown:,} of {total:,} symbols ({unknown / total:.1%}) are unknown to the vocabulary"
    line += f" (first in {place}: {shown})"
    if unknown > most * total:
        raise ValueError(f"train: {line}. Use texts that it can spell or another vocabulary, or add {allow}.")
    return [line]
