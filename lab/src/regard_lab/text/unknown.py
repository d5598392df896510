"""Characters that the vocabulary of a tokenizer cannot spell, counted in texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from regard_lab.text.tokenizer import Tokenizer

#: The largest share of a text's characters that the vocabulary may lack, by default.
MAX_UNKNOWN = 0.2
#: The most characters to list.
_SHOWN = 5


@dataclass(frozen=True)
class UnknownCharacters:
    """How often texts have characters that a vocabulary cannot spell; those of several texts can be added.

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
