"""Vocabularies: texts to ids and back, for fixed symbols such as letters and phonemes, and for learned subwords."""

from __future__ import annotations

import codecs
import json
import math
import warnings
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, models, trainers
from tokenizers.pre_tokenizers import Split

from regard._utils.errors import RegardWarning, rejected, unknown_name
from regard_lab.models.base import END, PAD
from regard_lab.models.folders import ModelFileError
from regard_lab.text.ragged import Ragged
from regard_lab.text.words import Span, find_words, locate_tokens, normalize

# Ids 0, 1 and 2 are padding, the end mark, and the unknown symbol.


#: The number of the unknown symbol.
UNKNOWN = 2
#: The number of the first symbol.
FIRST = 3
#: The text of the unknown symbol.
UNKNOWN_TEXT = "\ufffd"
#: Kinds of subwords.
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
    """Turns texts into ids and back; can be written as JSON.

    ``decode(encode(text))`` is ``normalize(text)`` where nothing in the text is unknown.

    Attributes
    ----------
    lowercase : bool
        Whether texts are read in lower case.
    """

    lowercase: bool

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of ids: the vocabulary size of a model."""

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self):,} symbols"

    @abstractmethod
    def encode_all(self, texts: Iterable[str]) -> Ragged:
        """Return the ids of many texts, without end marks."""

    def sample_all(self, texts: Iterable[str], dropout: float, seed: int, times: int = 1) -> Ragged:  # noqa: ARG002
        """Return ids as :meth:`encode_all` does, with each word in a random one of its tokenizations.

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
        """Return the ids of a text, without an end mark."""
        return self.encode_all([text])[0].tolist()

    @abstractmethod
    def decode(self, numbers: Iterable[int], replacements: Iterable[str] = ()) -> str:
        """Return the text of ids, up to the first end mark.

        Parameters
        ----------
        numbers : iterable of int
        replacements : iterable of str, optional
            What to write for unknown symbols, in turn; U+FFFD where there are no more.
        """

    @abstractmethod
    def words(self, text: str | Iterable[int]) -> list[Word]:
        """Return the tokens of each word of a text, or of ids up to the first end mark."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the content for :meth:`from_json`, in JSON types."""

    @abstractmethod
    def _shown(self, number: int) -> str:
        """Return the label of an id in pictures."""

    def tokens(self, numbers: Iterable[int]) -> list[str]:
        """Return the label of each id in pictures, including the end mark and padding; ``▁`` is a space."""
        return [_SHOWN[number] if number < FIRST else self._shown(number) for number in map(int, numbers)]

    def unknown_places(self, numbers: Sequence[int] | np.ndarray) -> list[int]:
        """Return the positions of unknown symbols."""
        return np.flatnonzero(np.asarray(numbers) == UNKNOWN).tolist()

    @abstractmethod
    def unknown_characters(self, text: str) -> list[str]:
        """Return the unknown characters of a text, or its unknown symbols between spaces."""

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


def group_tokens(text: str, places: Sequence[Span]) -> list[Word]:
    """Return the words of a text as ranges of its tokens, given their spans in order.

    A token belongs to the word in which its first character other than a space lies.

    Examples
    --------
    >>> group_tokens("so rare", [Span(0, 2), Span(2, 5), Span(5, 7)])
    [Word(text='so', tokens=range(0, 1)), Word(text='rare', tokens=range(1, 3))]
    """
    firsts = [word.start for word in find_words(text)]
    owners = [max(0, bisect_right(firsts, at + (text[at : at + 1] == " ")) - 1) for at, _ in places]
    grouped: list[Word] = []
    begin = 0
    for place in range(1, len(owners) + 1):
        if place == len(owners) or owners[place] != owners[begin]:
            end = places[place].start if place < len(owners) else len(text)
            grouped.append(Word(text[places[begin].start : end].strip(), range(begin, place)))
            begin = place
    return grouped


class SymbolVocabulary(Vocabulary):
    """A vocabulary of fixed symbols: characters, or strings between spaces.

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

    def unknown_characters(self, text: str) -> list[str]:
        return [symbol for symbol in self._cut(text) if symbol not in self._numbers]

    def decode(self, numbers: Iterable[int], replacements: Iterable[str] = ()) -> str:
        return normalize(self.separator.join(self._texts(numbers, replacements)))

    def words(self, text: str | Iterable[int]) -> list[Word]:
        """Return each symbol as a word: alignments are shown symbol by symbol."""
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
    """Yield ids up to the first end mark."""
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
    """Return the error for unexpected content of a vocabulary's JSON."""
    text = repr(got)
    return rejected("load", name, expected, text if len(text) <= 60 else f"{text[:57]}...", ModelFileError)


# Subwords: training, and tokenizing texts -----------------------------------------------------------------------------


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


# How pieces of words are learned from texts, by the trainers of Hugging Face ``tokenizers`` ---------------------------


#: Maximum length of a piece in characters.
_LONGEST = 16
#: Characters that stand for marks and placeholders in rewritten texts (:mod:`regard_lab.text.rewriting`).
MARKS = range(0xE000, 0xE100)
_MARK = f"{chr(MARKS.start)}-{chr(MARKS.stop - 1)}"
#: Pieces do not cross the boundaries of these matches, each with the space before it: a word with its apostrophes, a
#: digit, a mark, or signs.
PARTS = Split(
    Regex(
        rf" ?\p{{L}}[\p{{L}}\p{{M}}]*(?:['’]\p{{L}}[\p{{L}}\p{{M}}]*)*| ?\p{{N}}| ?[{_MARK}]|"
        rf" ?[^ \p{{L}}\p{{N}}{_MARK}]+"
    ),
    "isolated",
)


def alphabet(lines: list[str], rare: float) -> tuple[list[str], list[str]]:
    """Return the characters with at least this share of the texts, including the space, and the rarer ones."""
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line)
    least = rare * counts.total()
    # The trainers take a zero byte as the end of a word. Each text begins with a space.
    dropped = sorted(letter for letter, count in counts.items() if count < least or letter == "\0")
    return sorted({" ", *counts}.difference(dropped)), [letter for letter in dropped if letter != " "]


def learned(lines: list[str], kind: str, size: int, letters: list[str]) -> tuple[list[str], list[Any]]:
    """Return at most ``size`` pieces, these letters among them, and the rules of this kind."""
    if kind == "characters":
        return letters, []
    tokenizer = Tokenizer(models.BPE() if kind == "bpe" else models.Unigram())
    tokenizer.pre_tokenizer = PARTS
    shared: dict[str, Any] = {"vocab_size": size, "show_progress": False, "special_tokens": []}
    if kind == "bpe":
        shared |= {"initial_alphabet": letters, "limit_alphabet": len(letters), "max_token_length": _LONGEST}
        tokenizer.train_from_iterator(lines, trainers.BpeTrainer(min_frequency=2, **shared))
        numbers = tokenizer.get_vocab()
        return sorted(numbers, key=numbers.__getitem__), [tuple(rule) for rule in _model(tokenizer)["merges"]]
    trainer = trainers.UnigramTrainer(max_piece_length=_LONGEST, unk_token=None, **shared)
    tokenizer.train_from_iterator(lines, trainer)
    # Sums over several threads differ in their last digits; rounded, the same texts give the same file.
    scores = _settled({piece: round(score, 6) for piece, score in _model(tokenizer)["vocab"]})
    pieces = sorted(scores, key=lambda piece: (-scores[piece], piece))
    # Near the minimum size, the trainer returns more pieces than requested.
    long = [piece for piece in pieces if len(piece) > 1]
    surplus = set(long[max(0, len(long) - max(0, len(pieces) - size)) :])
    pieces = [piece for piece in pieces if piece not in surplus]
    return pieces, [scores[piece] for piece in pieces]


def _settled(scores: dict[str, float]) -> dict[str, float]:
    """Return scores in which letters that the trainer added last, each a step below another by chance, are equal."""
    last: list[str] = []
    for piece in sorted(scores, key=scores.__getitem__):
        if len(piece) > 1 or (last and not math.isclose(scores[piece] - scores[last[-1]], 1e-4, abs_tol=2e-6)):
            break
        last.append(piece)
    return scores | dict.fromkeys(last, min(scores.values()))


def _model(tokenizer: Tokenizer) -> dict[str, Any]:
    return json.loads(tokenizer.to_str())["model"]


# Subword vocabularies learned from texts by Hugging Face ``tokenizers``: byte-pair encoding, unigram, characters ------


#: Default number of subwords.
_SIZE = 8000
#: Number of random splits of a word with BPE dropout.
_WAYS = 8
#: Unicode's private use area. Sentinels are at its end; texts that use it use its beginning.
_SENTINELS = range(0xF000, 0xF900)
#: Number of distinct words to look up at a time.
_BLOCK = 1 << 16


class SubwordVocabulary(Vocabulary):
    """Texts as pieces of words. A piece that begins a word has the space before it, so texts come back exactly.

    Make one by :meth:`train`.

    Parameters
    ----------
    kind : str
        ``"bpe"``, ``"unigram"`` or ``"characters"``.
    pieces : sequence of str
        All different; numbered behind the special numbers and, if any, the bytes.
    rules : sequence
        For BPE, the pairs of pieces to merge, in order; for unigram, the log-probability of each piece; else empty.
    lowercase : bool, default False
    byte_fallback : bool, default False
        Spell characters that no piece has by the bytes of UTF-8, for which there are 256 further numbers, so that
        nothing is unknown.

    Examples
    --------
    >>> vocabulary = SubwordVocabulary.train(["a rose is a rose"] * 2, kind="characters")
    >>> vocabulary.tokens(vocabulary.encode("so rare"))
    ['▁', 's', 'o', '▁', 'r', 'a', 'r', 'e']
    >>> vocabulary.decode(vocabulary.encode("so rare")), [word.text for word in vocabulary.words("so rare")]
    ('so rare', ['so', 'rare'])
    """

    def __init__(
        self,
        kind: str,
        pieces: Sequence[str],
        rules: Sequence[Any] = (),
        *,
        lowercase: bool = False,
        byte_fallback: bool = False,
    ) -> None:
        if kind not in SUBWORDS:
            raise unknown_name("SubwordVocabulary", "kind", kind, SUBWORDS)
        self.kind, self.pieces, self.rules = kind, tuple(pieces), tuple(rules)
        self.lowercase, self.byte_fallback = lowercase, byte_fallback
        self._check()
        spelled = [bytes([byte]) for byte in range(256)] if byte_fallback else []
        self._first = FIRST + len(spelled)
        self._bytes = [b"", b"", UNKNOWN_TEXT.encode(), *spelled, *(piece.encode() for piece in self.pieces)]
        # The trailing space keeps these from matching text: pieces have a space only at their beginning.
        reserved = [f"{number} " for number in range(self._first)]
        vocabulary = [*reserved, *self.pieces]
        if kind == "unigram":
            scores = [0.0] * self._first + list(self.rules)
            model: Any = models.Unigram(list(zip(vocabulary, scores)), unk_id=UNKNOWN)
        else:
            numbers = {piece: number for number, piece in enumerate(vocabulary)}
            merges = [tuple(rule) for rule in self.rules]
            model = models.BPE(vocab=numbers, merges=merges, unk_token=reserved[UNKNOWN])
        self._tokenizer = Tokenizer(model)
        self._tokenizer.pre_tokenizer = PARTS

    def _check(self) -> None:
        if len(set(self.pieces)) != len(self.pieces):
            repeated = f"{len(self.pieces) - len(set(self.pieces))} repeated"
            raise rejected("SubwordVocabulary", "pieces", "all be different", repeated)
        for piece in self.pieces:
            if not piece or " " in piece[1:]:
                raise rejected("SubwordVocabulary", "pieces", "have a space at most at their beginning", repr(piece))
        if self.kind == "unigram":
            finite = all(isinstance(score, float | int) and math.isfinite(score) for score in self.rules)
            if len(self.rules) != len(self.pieces) or not finite:
                raise rejected("SubwordVocabulary", "rules", "be a finite score for each piece", "something else")
        elif self.kind == "characters":
            if self.rules or any(len(piece) != 1 for piece in self.pieces):
                raise rejected("SubwordVocabulary", "pieces", "be single characters, without rules", "others")
        else:
            known = set(self.pieces)
            for rule in self.rules:
                if len(rule) != 2 or not {*rule, "".join(rule)} <= known:
                    raise rejected("SubwordVocabulary", "rules", "merge two pieces into one", repr(rule))

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        kind: str = "bpe",
        size: int | None = None,
        *,
        lowercase: bool = False,
        byte_fallback: bool = False,
        rare: float = 1e-6,
        name: str = "these texts",
    ) -> SubwordVocabulary:
        """Learn pieces from texts; the order of the texts and the number of threads do not matter.

        Parameters
        ----------
        texts : iterable of str
            For one vocabulary of both sides, the texts of both.
        kind : str, default "bpe"
            ``"bpe"`` (Sennrich 2016, arXiv 1508.07909), ``"unigram"`` (Kudo 2018, arXiv 1804.10959), ``"characters"``.
        size : int, optional
            How many numbers there are to be, special ones included; 8000 by default, and for characters all.
        lowercase, byte_fallback : bool, default False
            As of the class.
        rare : float, default 1e-6
            Characters that are a smaller share of the texts than this are left unknown; 0 keeps all.
        name : str
            What messages call the texts.

        Raises
        ------
        ValueError
            If there is no text, or ``size`` has no room for the alphabet.

        Warns
        -----
        RegardWarning
            If the texts have fewer pieces than ``size``.
        """
        if kind not in SUBWORDS:
            raise unknown_name("SubwordVocabulary.train", "kind", kind, SUBWORDS)
        if not 0 <= rare < 1:
            raise rejected("SubwordVocabulary.train", "rare", "be in [0, 1)", rare)
        lines = [f" {text}" for text in (normalize(text, lowercase) for text in texts) if text]
        if not lines:
            raise rejected("SubwordVocabulary.train", "texts", "have a text that is not empty", "none")
        letters, dropped = alphabet(lines, rare)
        special = FIRST + 256 * byte_fallback
        least = special + len(letters)
        usual = least if kind == "characters" else max(_SIZE, least)
        asked = usual if size is None else size
        if asked < least:
            expected = f"be at least {least}, for the {len(letters)} characters of {name}"
            raise rejected("SubwordVocabulary.train", "size", expected, asked)
        if dropped:
            away = str.maketrans(dict.fromkeys(dropped, " "))
            lines = [f" {' '.join(line.translate(away).split())}" for line in lines]
        pieces, rules = learned(lines, kind, asked - special, letters)
        vocabulary = cls(kind, pieces, rules, lowercase=lowercase, byte_fallback=byte_fallback)
        if size is not None and len(vocabulary) < size:
            reached = f"a vocabulary of size {size:,} is more than {name} support: {len(vocabulary):,}."
            warnings.warn(f"SubwordVocabulary.train: {reached}", RegardWarning, stacklevel=2)
        return vocabulary

    def with_sentinels(self, count: int) -> SubwordVocabulary:
        """Return the vocabulary with this many further pieces at its end, which no text contains.

        Each is a character of Unicode's private use area; of unigrams they are the least likely.
        """
        made = tuple(map(chr, _SENTINELS[:count]))
        rules = (*self.rules, *[min(self.rules, default=0.0)] * count) if self.kind == "unigram" else self.rules
        more = {"lowercase": self.lowercase, "byte_fallback": self.byte_fallback}
        return SubwordVocabulary(self.kind, (*self.pieces, *made), rules, **more)

    @property
    def sentinels(self) -> list[int]:
        """The ids of the pieces added by :meth:`with_sentinels`."""
        return [number for piece, number in self._numbers.items() if len(piece) == 1 and ord(piece) in _SENTINELS]

    def __len__(self) -> int:
        return len(self._bytes)

    def encode_all(self, texts: Iterable[str]) -> Ragged:
        words, indices, ends = self._looked_up(texts)
        return self._joined(Ragged.of(self._spelled(words)), indices, ends)

    def sample_all(self, texts: Iterable[str], dropout: float, seed: int, times: int = 1) -> Ragged:
        if self.kind != "bpe":
            return super().sample_all(texts, dropout, seed, times)
        words, indices, ends = self._looked_up(texts)
        ends = np.concatenate([ends[:1], *(ends[1:] + len(indices) * time for time in range(times))])
        indices = np.tile(indices, times)
        ways, drawn = list(self._spelled(words)), Random(seed)
        for _ in range(_WAYS):
            ways += [self._another(word, plain, dropout, drawn) for word, plain in zip(words, ways[: len(words)])]
        chosen = np.random.default_rng(seed).integers(1, _WAYS + 1, len(indices))
        return self._joined(Ragged.of(ways), indices + len(words) * chosen, ends)

    def _another(self, word: str, plain: list[int], dropout: float, drawn: Random) -> list[int]:
        """Return the ids of a word in another tokenization; a word with unknown characters keeps its own."""
        numbers: list[int] = []
        for part, _ in PARTS.pre_tokenize_str(word):
            for piece in merge_pairs(part, self._ranks, dropout, drawn):
                if piece not in self._numbers:
                    return plain
                numbers.append(self._numbers[piece])
        return numbers

    @cached_property
    def _ranks(self) -> dict[tuple[str, str], int]:
        return {tuple(rule): rank for rank, rule in enumerate(self.rules)}

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {piece: number for number, piece in enumerate(self.pieces, start=self._first)}

    def _looked_up(self, texts: Iterable[str]) -> tuple[list[str], np.ndarray, np.ndarray]:
        """Return the distinct words, the index of each word of the texts, and where each text ends."""
        # Pieces do not cross spaces, so each distinct word is looked up once.
        words: defaultdict[str, int] = defaultdict()
        words.default_factory = words.__len__
        indices: list[int] = []
        ends = [0]
        for text in texts:
            indices.extend(map(words.__getitem__, normalize(text, self.lowercase).split()))
            ends.append(len(indices))
        return [f" {word}" for word in words], np.array(indices, np.int64), np.array(ends, np.int64)

    @staticmethod
    def _joined(words: Ragged, indices: np.ndarray, ends: np.ndarray) -> Ragged:
        numbers = words.take(indices)
        return Ragged(numbers.numbers, numbers.offsets[ends])

    def _spelled(self, words: list[str]) -> Iterable[list[int]]:
        for first in range(0, len(words), _BLOCK):
            block = words[first : first + _BLOCK]
            for word, encoding in zip(block, self._tokenizer.encode_batch_fast(block)):
                numbers = encoding.ids
                if self.byte_fallback and UNKNOWN in numbers:
                    yield self._by_bytes(word)
                else:
                    yield numbers

    def unknown_characters(self, text: str) -> list[str]:
        if self.byte_fallback:
            return []
        words = [f" {word}" for word in normalize(text, self.lowercase).split()]
        return [
            letter
            for word, encoding in zip(words, self._tokenizer.encode_batch(words))
            for number, (start, end) in zip(encoding.ids, encoding.offsets)
            for letter in word[start:end].strip()
            if number == UNKNOWN
        ]

    def _by_bytes(self, word: str) -> list[int]:
        encoding, numbers = self._tokenizer.encode(word), []
        for number, (start, end) in zip(encoding.ids, encoding.offsets):
            numbers += [FIRST + byte for byte in word[start:end].encode()] if number == UNKNOWN else [number]
        return numbers

    def decode(self, numbers: Iterable[int], replacements: Iterable[str] = ()) -> str:
        fill = iter(replacements)
        encoded = bytearray()
        for number in until_end_mark(numbers):
            encoded += next(fill, UNKNOWN_TEXT).encode() if number == UNKNOWN else self._bytes[number]
        return normalize(encoded.decode(errors="replace"))

    def words(self, text: str | Iterable[int]) -> list[Word]:
        return group_tokens(*self.placed(self.encode(text) if isinstance(text, str) else text))

    def placed(self, numbers: Iterable[int]) -> tuple[str, list[Span]]:
        """Return the text of ids, and the span of each in it.

        It may begin with a space; a token whose bytes end in the midst of a character has what is whole of it.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        starts: list[int] = []
        whole = ""
        for number in until_end_mark(numbers):
            starts.append(len(whole))
            whole += decoder.decode(self._bytes[number])
        whole += decoder.decode(b"", True)
        return whole, [Span(*place) for place in pairwise([*starts, len(whole)])]

    def covering(self, text: str, numbers: Iterable[int], words: Iterable[Span]) -> list[range]:
        """Return the tokens that share a character with each word of a text, given its ids.

        Parameters
        ----------
        text : str
            Normalized.
        numbers : iterable of int
            In any spelling of the text.
        words : iterable of Span

        Examples
        --------
        >>> vocabulary = SubwordVocabulary.train(["a rose is a rose"] * 2, kind="characters")
        >>> vocabulary.covering("so rare", vocabulary.encode("so rare"), find_words("so rare"))
        [range(0, 3), range(3, 8)]
        """
        numbers = list(until_end_mark(numbers))
        whole, places = self.placed(numbers)
        if UNKNOWN in numbers:
            whole, places = locate_tokens(text, whole, places, [number == UNKNOWN for number in numbers])
        shift = len(whole) - len(text)  # the first word has a space before it
        starts = [at + (whole[at : at + 1] == " ") - shift for at, _ in places]
        stops = [max(stop - shift, start + 1) for start, (_, stop) in zip(starts, places)]
        return [range(bisect_right(stops, begin), bisect_left(starts, end)) for begin, end in words]

    def to_json(self) -> dict[str, Any]:
        rules = [list(rule) if self.kind == "bpe" else rule for rule in self.rules]
        rest = {"byte_fallback": self.byte_fallback, "pieces": list(self.pieces), "rules": rules}
        return to_header(self.kind, self.lowercase, **rest)

    @classmethod
    def read(cls, data: Mapping[str, Any], name: str) -> SubwordVocabulary:
        """Return the vocabulary that JSON describes, as :meth:`Vocabulary.from_json` does."""
        kind, rules, fallback = data.get("kind"), data.get("rules"), data.get("byte_fallback")
        if kind not in SUBWORDS:
            raise vocabulary_error(name, f"be of a kind among symbols, {', '.join(SUBWORDS)}", kind)
        if not isinstance(fallback, bool):
            raise vocabulary_error(name, "say true or false for 'byte_fallback'", fallback)
        if not isinstance(rules, list):
            raise vocabulary_error(name, "have a list 'rules'", rules)
        for rule in rules if kind == "bpe" else ():
            if not isinstance(rule, list) or len(rule) != 2 or not all(isinstance(piece, str) for piece in rule):
                raise vocabulary_error(name, "have pairs of strings as 'rules'", rule)
        pieces = read_strings(data, "pieces", name)
        pairs = [tuple(rule) for rule in rules] if kind == "bpe" else rules
        return cls(kind, pieces, pairs, lowercase=data["lowercase"], byte_fallback=fallback)

    def _shown(self, number: int) -> str:
        if number < self._first:
            return f"<0x{number - FIRST:02X}>"
        return self.pieces[number - self._first].replace(" ", "▁")
