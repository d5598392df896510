"""Symbols as numbers: letters, phonemes, words, whatever a model reads or writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from regard._errors import rejected

#: The number of padding, and the number that marks where a sequence ends (and, to a decoder, where it begins).
PAD, END = 0, 1
_FIRST = 2


@dataclass(frozen=True)
class Vocabulary:
    """A fixed list of symbols, numbered from 2 on: 0 is padding and 1 marks the end.

    Attributes
    ----------
    symbols : tuple of str
        All different.

    Examples
    --------
    >>> letters = Vocabulary.of(["cab", "bad"])
    >>> letters.symbols, letters.encode("bad"), letters.decode([3, 2, 5, 1, 0])
    (('a', 'b', 'c', 'd'), [3, 2, 5], ('b', 'a', 'd'))
    """

    symbols: tuple[str, ...]
    _numbers: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers = {symbol: number for number, symbol in enumerate(self.symbols, start=_FIRST)}
        if len(numbers) != len(self.symbols):
            raise rejected("Vocabulary", "symbols", "all be different", f"{len(self.symbols) - len(numbers)} repeated")
        object.__setattr__(self, "_numbers", numbers)

    @classmethod
    def of(cls, sequences: Iterable[Iterable[str]]) -> Vocabulary:
        """Return the vocabulary of every symbol in these sequences, sorted."""
        return cls(tuple(sorted({symbol for sequence in sequences for symbol in sequence})))

    def __len__(self) -> int:
        """Return how many numbers there are, padding and end included."""
        return len(self.symbols) + _FIRST

    def __contains__(self, symbol: object) -> bool:
        return symbol in self._numbers

    def encode(self, sequence: Sequence[str]) -> list[int]:
        """Return the numbers of these symbols. Raises ValueError where one is not in the vocabulary."""
        try:
            return [self._numbers[symbol] for symbol in sequence]
        except KeyError as error:
            raise rejected("encode", "sequence", "be of symbols in the vocabulary", repr(error.args[0])) from None

    def decode(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """Return the symbols of these numbers, up to the end mark."""
        found: list[str] = []
        for number in numbers:
            if number == END:
                break
            if number >= _FIRST:
                found.append(self.symbols[number - _FIRST])
        return tuple(found)
