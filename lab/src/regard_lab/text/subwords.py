"""Subword vocabularies learned from texts by Hugging Face ``tokenizers``: byte-pair encoding, unigram, characters."""

from __future__ import annotations

import codecs
import math
import warnings
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models

from regard._utils.errors import RegardWarning, rejected, unknown_name
from regard_lab.text.bpe_dropout import merge_pairs
from regard_lab.text.normalization import normalize
from regard_lab.text.ragged import Ragged
from regard_lab.text.subword_training import PARTS, alphabet, learned
from regard_lab.text.vocabulary import (
    FIRST,
    SUBWORDS,
    UNKNOWN,
    UNKNOWN_TEXT,
    Vocabulary,
    Word,
    read_strings,
    to_header,
    until_end_mark,
    vocabulary_error,
)
from regard_lab.text.words import Span, find_words, locate_tokens

#: How many subwords are learned where nothing else is asked.
_SIZE = 8000
#: In how many ways a word is split, where that is drawn.
_WAYS = 8
#: Unicode's area for private use, whose last part are sentinels: texts use the first, if any.
_SENTINELS = range(0xF000, 0xF900)
#: The numbers of a text's words are looked up for so many different words at a time.
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
        # A space behind keeps these from being found in a text: only at its beginning does a part have one.
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
    ) -> SubwordVocabulary:
        """Learn pieces from texts: the same ones from the same texts, in whatever order and on however many threads.

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
            expected = f"be at least {least}, for the {len(letters)} characters of these texts"
            raise rejected("SubwordVocabulary.train", "size", expected, asked)
        if dropped:
            away = str.maketrans(dict.fromkeys(dropped, " "))
            lines = [f" {' '.join(line.translate(away).split())}" for line in lines]
        pieces, rules = learned(lines, kind, asked - special, letters)
        vocabulary = cls(kind, pieces, rules, lowercase=lowercase, byte_fallback=byte_fallback)
        if size is not None and len(vocabulary) < size:
            reached = f"a vocabulary of size {size:,} is more than these texts support: {len(vocabulary):,}."
            warnings.warn(f"SubwordVocabulary.train: {reached}", RegardWarning, stacklevel=2)
        return vocabulary

    def with_sentinels(self, count: int) -> SubwordVocabulary:
        """Return the vocabulary with so many more pieces behind the others, which stand in no text.

        Each is a character of Unicode's private use area; of unigrams they are the least likely.
        """
        made = tuple(map(chr, _SENTINELS[:count]))
        rules = (*self.rules, *[min(self.rules, default=0.0)] * count) if self.kind == "unigram" else self.rules
        more = {"lowercase": self.lowercase, "byte_fallback": self.byte_fallback}
        return SubwordVocabulary(self.kind, (*self.pieces, *made), rules, **more)

    @property
    def sentinels(self) -> list[int]:
        """The numbers of the pieces of :meth:`with_sentinels`."""
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
        """Return the numbers of a word that is split in another way; of one with unknown characters, as it is."""
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
        """Return the different words, which of them stand in the texts, and behind which each text ends."""
        # No piece goes beyond a space: different words are looked up once each, however often they come.
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
        whole, places = self.placed(self.encode(text) if isinstance(text, str) else text)
        firsts = [word.start for word in find_words(whole)]
        # A token belongs to the word in which its first character other than a space lies.
        owners = [max(0, bisect_right(firsts, at + (whole[at : at + 1] == " ")) - 1) for at, _ in places]
        grouped: list[Word] = []
        begin = 0
        for place in range(1, len(owners) + 1):
            if place == len(owners) or owners[place] != owners[begin]:
                end = places[place].start if place < len(owners) else len(whole)
                grouped.append(Word(whole[places[begin].start : end].strip(), range(begin, place)))
                begin = place
        return grouped

    def placed(self, numbers: Iterable[int]) -> tuple[str, list[Span]]:
        """Return the text of numbers as it is put together, and the part of it that each of them stands for.

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
        """Return the tokens that have a character of each word of a text, given its numbers.

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
