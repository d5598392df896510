"""Texts as numbers and back: subwords learned from texts, or fixed symbols such as letters and phonemes.

Numbers 0, 1 and 2 are padding, the end mark, and what a vocabulary does not know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from regard._utils.errors import rejected
from regard_lab.models.base import END, PAD
from regard_lab.models.folders import ModelFileError
from regard_lab.text.normalization import normalize
from regard_lab.text.ragged import Ragged

#: The number of whatever a vocabulary does not know.
UNKNOWN = 2
#: The first number that stands for a symbol.
FIRST = 3
#: What stands in a text where a symbol is unknown.
UNKNOWN_TEXT = "\ufffd"
#: How texts can be made into subwords.
SUBWORDS = ("bpe", "unigram", "characters")
FORMAT, VERSION = "regard.codec", 1
_SHOWN = ("<pad>", "</s>", "<unk>")


@dataclass(frozen=True)
class Word:
    """Neighbouring tokens that together are a word, a number, or a run of signs.

    Attributes
    ----------
    text : str
    tokens : range
        Their places in the sequence.
    """

    text: str
    tokens: range


class Vocabulary(ABC):
    """Turns texts into numbers and back; can be written as JSON.

    ``decode(encode(text))`` is ``normalize(text)`` where nothing in the text is unknown.

    Attributes
    ----------
    lowercase : bool
        Whether texts are read in lower case.
    """

    lowercase: bool

    @abstractmethod
    def __len__(self) -> int:
        """Return how many numbers there are: the size of a model's vocabulary."""

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self):,} symbols"

    @abstractmethod
    def encode_all(self, texts: Iterable[str]) -> Ragged:
        """Return the numbers of many texts, without end marks."""

    def sample_all(self, texts: Iterable[str], dropout: float, seed: int, times: int = 1) -> Ragged:  # noqa: ARG002
        """Return numbers as :meth:`encode_all`, but each word in one of several spellings, drawn at random.

        Parameters
        ----------
        texts : iterable of str
        dropout : float
            The share of the merges of byte-pair encoding that are left out, in [0, 1).
        seed : int
        times : int
            How often all of the texts come, one time behind the other, spelled anew.

        Raises
        ------
        ValueError
            If there are no such merges.
        """
        raise rejected(
            f"{type(self).__name__}.sample_all", "vocabulary", "have the merges of 'bpe'", self.to_json()["kind"]
        )

    def encode(self, text: str) -> list[int]:
        """Return the numbers of a text, without an end mark."""
        return self.encode_all([text])[0].tolist()

    @abstractmethod
    def decode(self, numbers: Iterable[int], replacements: Iterable[str] = ()) -> str:
        """Return the text of numbers, up to the first end mark.

        Parameters
        ----------
        numbers : iterable of int
        replacements : iterable of str, optional
            What to write for unknown symbols, in turn; U+FFFD where there are no more.
        """

    @abstractmethod
    def words(self, text: str | Iterable[int]) -> list[Word]:
        """Return which tokens make up each word of a text, or of numbers up to the first end mark."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return all that :meth:`from_json` needs, as JSON can hold it."""

    @abstractmethod
    def _shown(self, number: int) -> str:
        """Return how pictures show the number of a symbol."""

    def tokens(self, numbers: Iterable[int]) -> list[str]:
        """Return what pictures show for each number, the end mark and padding included; ``▁`` is a space."""
        return [_SHOWN[number] if number < FIRST else self._shown(number) for number in map(int, numbers)]

    def unknown(self, numbers: Iterable[int]) -> list[int]:
        """Return the places at which something unknown stands."""
        return [place for place, number in enumerate(numbers) if number == UNKNOWN]

    @staticmethod
    def from_json(data: object, name: str = "vocabulary") -> Vocabulary:
        """Return the vocabulary that :meth:`to_json` described.

        Parameters
        ----------
        data : object
            What a JSON file held.
        name : str
            What error messages call it: the file.

        Raises
        ------
        ModelFileError
            If that is not a vocabulary, of another version, or contradicts itself.
        """
        from regard_lab.text.subwords import SubwordVocabulary

        stored_format = data.get("format") if isinstance(data, dict) else data
        if not isinstance(data, dict) or stored_format != FORMAT:
            raise vocabulary_error(name, f"describe a vocabulary of format {FORMAT!r}", stored_format)
        if data.get("version") != VERSION:
            raise vocabulary_error(name, f"be of version {VERSION}", data.get("version"))
        if not isinstance(data.get("lowercase"), bool):
            raise vocabulary_error(name, "say true or false for 'lowercase'", data.get("lowercase"))
        try:
            return (SymbolVocabulary if data.get("kind") == SymbolVocabulary.kind else SubwordVocabulary).read(
                data, name
            )
        except ModelFileError:
            raise
        except ValueError as error:
            raise rejected(
                "load", name, "describe a vocabulary", f"this: {str(error).rstrip('.')}", ModelFileError
            ) from None


class SymbolVocabulary(Vocabulary):
    """Fixed symbols: the characters of a text, or what stands between its spaces.

    Parameters
    ----------
    symbols : iterable of str
        All different; numbered from 3 on.
    separator : str
        ``""`` for characters, ``" "`` for symbols with spaces between them.
    lowercase : bool, default False

    Examples
    --------
    >>> phonemes = SymbolVocabulary.train(["K AE T", "T AE K"], separator=" ")
    >>> phonemes.encode("T AE D"), phonemes.decode([4, 3, 5, 1])
    ([5, 3, 2], 'K AE T')
    """

    kind = "symbols"

    def __init__(self, symbols: Iterable[str], separator: str = "", *, lowercase: bool = False) -> None:
        self.symbols = tuple(symbols)
        self.separator = separator
        self.lowercase = lowercase
        if separator not in ("", " "):
            raise rejected("SymbolVocabulary", "separator", "be '' or ' '", repr(separator))
        self._numbers = {symbol: number for number, symbol in enumerate(self.symbols, start=FIRST)}
        if len(self._numbers) != len(self.symbols):
            repeated = f"{len(self.symbols) - len(self._numbers)} repeated"
            raise rejected("SymbolVocabulary", "symbols", "all be different", repeated)
        for symbol in self.symbols:
            if (symbol.split() != [symbol]) if separator else (len(symbol) != 1):
                what = "be without spaces" if separator else "be single characters"
                raise rejected("SymbolVocabulary", "symbols", what, repr(symbol))

    @classmethod
    def train(cls, texts: Iterable[str], separator: str = "", *, lowercase: bool = False) -> SymbolVocabulary:
        """Return a vocabulary of all symbols in these texts, sorted."""
        symbols: set[str] = set()
        for text in texts:
            plain = normalize(text, lowercase)
            symbols.update(plain.split() if separator else plain)
        return cls(sorted(symbols), separator, lowercase=lowercase)

    def __len__(self) -> int:
        return len(self.symbols) + FIRST

    def encode_all(self, texts: Iterable[str]) -> Ragged:
        return Ragged.of([self._numbers.get(symbol, UNKNOWN) for symbol in self._cut(text)] for text in texts)

    def decode(self, numbers: Iterable[int], replacements: Iterable[str] = ()) -> str:
        return normalize(self.separator.join(self._texts(numbers, replacements)))

    def words(self, text: str | Iterable[int]) -> list[Word]:
        """Return every symbol by itself: an alignment is shown symbol by symbol."""
        numbers = self.encode(text) if isinstance(text, str) else text
        return [Word(symbol, range(place, place + 1)) for place, symbol in enumerate(self._texts(numbers))]

    def to_json(self) -> dict[str, Any]:
        return to_header(self.kind, self.lowercase, separator=self.separator, symbols=list(self.symbols))

    @classmethod
    def read(cls, data: Mapping[str, Any], name: str) -> SymbolVocabulary:
        """Return the vocabulary that JSON describes, as :meth:`Vocabulary.from_json` does."""
        return cls(read_strings(data, "symbols", name), data.get("separator", ""), lowercase=data["lowercase"])

    def _cut(self, text: str) -> list[str]:
        plain = normalize(text, self.lowercase)
        return plain.split() if self.separator else list(plain)

    def _texts(self, numbers: Iterable[int], replacements: Iterable[str] = ()) -> list[str]:
        fill = iter(replacements)
        return [
            next(fill, UNKNOWN_TEXT) if number == UNKNOWN else "" if number == PAD else self.symbols[number - FIRST]
            for number in until_end_mark(numbers)
        ]

    def _shown(self, number: int) -> str:
        return self.symbols[number - FIRST]


def until_end_mark(numbers: Iterable[int]) -> Iterator[int]:
    """Yield numbers up to the first end mark."""
    for number in map(int, numbers):
        if number == END:
            return
        yield number


def to_header(kind: str, lowercase: bool, **rest: Any) -> dict[str, Any]:
    """Return the JSON of a vocabulary."""
    return {"format": FORMAT, "version": VERSION, "kind": kind, "lowercase": lowercase, **rest}


def read_strings(data: Mapping[str, Any], key: str, name: str) -> list[str]:
    """Return a list of strings, none empty, from the JSON of a vocabulary."""
    values = data.get(key)
    if not isinstance(values, list) or not all(isinstance(each, str) and each for each in values):
        raise vocabulary_error(name, f"have a list of strings {key!r}", values)
    return values


def vocabulary_error(name: str, expected: str, got: object) -> Exception:
    """Return the error for a vocabulary's JSON that says something else than expected."""
    text = repr(got)
    return rejected("load", name, expected, text if len(text) <= 60 else f"{text[:57]}...", ModelFileError)
