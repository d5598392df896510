"""Text as numbers for language models, in the files that Hugging Face libraries read and write."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from regard._utils.errors import described, rejected, unknown_name
from regard._utils.files import write_together
from regard.inspect._record.texts import byte_letters
from regard_lab.text import tokenizer_files, tokenizer_training
from regard_lab.text.decode_stream import ByteStream, DecodeStream, WindowStream
from regard_lab.text.ragged import Ragged
from regard_lab.text.tokenizer_training import spelling

#: Tokens, by their numbers.
Numbers = tuple[int, ...]
#: Characters of texts that are encoded at once: what the library returns of them takes many times their memory.
_BLOCK = 1 << 22


class Tokenizer:
    """Turn texts into numbers and back; a Hugging Face ``tokenizers.Tokenizer`` whose special tokens are known.

    Make one by :meth:`learn` or :meth:`load`. Names of special tokens in a text are text like any other, so that no
    document can end itself, unless ``parse_specials`` is given. Padding and truncation that a file asks for are not
    done.

    Parameters
    ----------
    engine : tokenizers.Tokenizer
        Copied.
    specials : mapping of str to str, optional
        The text of some of the special tokens named below. Each must have a number.
    config : mapping, optional
        Further fields of ``tokenizer_config.json``, kept for :meth:`save`.

    Attributes
    ----------
    end, pad, begin, mask, cls, sep, unknown : int or None
        The numbers of special tokens. ``end`` and ``begin`` may be one.

    Raises
    ------
    ValueError
        If a special token has no number.

    Examples
    --------
    >>> tokenizer = Tokenizer.learn(["a rose is a rose", "is a rose"], 262)
    >>> numbers = tokenizer.encode("a rose 🌹")
    >>> tokenizer.tokens(numbers)
    ['a', '▁rose', '▁', '<0xF0>', '<0x9F>', '<0x8C>', '<0xB9>']
    >>> tokenizer.decode(numbers), tokenizer.end, len(tokenizer)
    ('a rose 🌹', 260, 262)
    """

    def __init__(
        self,
        engine: tokenizers.Tokenizer,
        specials: Mapping[str, str] | None = None,
        *,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._engine = tokenizers.Tokenizer.from_str(engine.to_str())
        self._engine.no_padding()
        self._engine.no_truncation()
        self._names, self._config = dict(specials or {}), dict(config or {})
        for name in self._names:
            if name not in tokenizer_files.ROLES:
                raise unknown_name("Tokenizer", "specials", name, tokenizer_files.ROLES)
        self._plain = tokenizers.Tokenizer.from_str(self._engine.to_str())
        self._plain.encode_special_tokens = True
        self.end, self.pad, self.begin = map(self._special, ("end", "pad", "begin"))
        self.mask, self.cls, self.sep = map(self._special, ("mask", "cls", "sep"))
        self.unknown = self._special("unknown")
        self._size = max(self._engine.get_vocab().values(), default=-1) + 1

    @classmethod
    def learn(
        cls,
        texts: Iterable[str],
        size: int | None = None,
        kind: str = "bpe",
        lowercase: bool = False,
        *,
        specials: Sequence[str] = ("end", "pad"),
    ) -> Tokenizer:
        """Learn a tokenizer from texts: the same one from the same texts.

        Parameters
        ----------
        texts : iterable of str
            Gone through once; counts of words are held, not texts.
        size : int, optional
            How many numbers there may be, special tokens included. By default 8,000 for byte pairs and pieces of
            words, and as many as there are bytes or characters.
        kind : {"bpe", "wordpiece", "bytes", "characters"}, default "bpe"
            Byte-pair encoding of bytes (Sennrich 2016, arXiv 1508.07909; Radford 2019); words and pieces of words, the
            same whether a space stands before them or not (Schuster 2012; Devlin 2019, arXiv 1810.04805); the 256
            bytes, each its own number; or the characters of the texts. With byte pairs and bytes, every text comes
            back exactly; with the others, words or characters that were not seen are ``unknown``.
        lowercase : bool, default False
            Read texts in lower case.
        specials : sequence of str, default ("end", "pad")
            Special tokens, among ``"end"``, ``"pad"``, ``"begin"``, ``"mask"``, ``"cls"`` and ``"sep"``. They are
            numbered behind all others. Without ``"begin"``, the end of a document is the beginning of the next.

        Raises
        ------
        ValueError
            If there is no text, ``size`` has no room for the alphabet, or a name is unknown.

        Warns
        -----
        RegardWarning
            If the texts have fewer byte pairs than ``size`` asks for.

        Examples
        --------
        >>> tokenizer = Tokenizer.learn(["to be or not"], kind="characters")
        >>> tokenizer.encode("bone"), tokenizer.decode(tokenizer.encode("bones"))
        ([1, 4, 3, 2], 'bone�')
        >>> Tokenizer.learn([], kind="bytes").encode("né")
        [110, 195, 169]
        """
        return cls(*tokenizer_training.learned(texts, size, kind, lowercase, specials))

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read the tokenizer of a model folder that a Hugging Face library or :meth:`save` wrote.

        Reads ``tokenizer.json``, else ``vocab.txt`` of BERT. Special tokens are those that ``tokenizer_config.json``
        and ``special_tokens_map.json`` name, else those with the names that are usual.

        Raises
        ------
        ModelFileError
            If a file is missing, too large, or not what it should be; or if there is a SentencePiece model alone.
        """
        engine, specials, config = tokenizer_files.read_folder(folder)
        return cls(engine, specials, config=config)

    def save(self, folder: str | Path) -> Path:
        """Write ``tokenizer.json`` and ``tokenizer_config.json``, which ``transformers`` reads too; return the folder.

        Raises
        ------
        OSError
            If a file cannot be written; then neither is changed.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_together(
            {
                folder / tokenizer_files.TOKENIZER: self._engine.to_str(pretty=True).encode() + b"\n",
                folder / tokenizer_files.CONFIG: tokenizer_files.to_config(self._names, self._config),
            }
        )
        return folder

    def __len__(self) -> int:
        """Return how many numbers there are: the least vocabulary of a model."""
        return self._size

    def __repr__(self) -> str:
        return f"Tokenizer of {len(self):,} tokens"

    @property
    def longest(self) -> int | None:
        """Tokens that a model reads of a text at most, if ``tokenizer_config.json`` says so."""
        most = self._config.get("model_max_length")
        return int(most) if isinstance(most, int | float) and 0 < most < 1 << 31 else None

    def limited(self, longest: int) -> Tokenizer:
        """Return the same tokenizer, whose folder says that a model reads so many tokens of a text at most."""
        return Tokenizer(self._engine, self._names, config={**self._config, "model_max_length": longest})

    def checksum(self) -> str:
        """Return a checksum of how texts are encoded."""
        return hashlib.sha256(self._engine.to_str().encode()).hexdigest()

    def encode(self, text: str, *, specials: bool = False, parse_specials: bool = False) -> list[int]:
        """Return the numbers of a text.

        Parameters
        ----------
        text : str
        specials : bool, default False
            Put begin, or cls and sep, around it: what its ``tokenizer.json`` says.
        parse_specials : bool, default False
            Read names of special tokens in the text, such as ``[MASK]``, as these tokens, as ``transformers`` does.

        Raises
        ------
        TypeError
            If it is no str.
        ValueError
            If it has half a surrogate pair.
        """
        engine = self._engine if parse_specials else self._plain
        with spelling("encode", [("text", text)]):
            return engine.encode(text, add_special_tokens=specials).ids

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return which characters of a text each number of :meth:`encode` stands for: the first, and where it ends.

        Examples
        --------
        >>> Tokenizer.learn([], kind="bytes").spans("né")
        [(0, 1), (1, 2), (1, 2)]
        """
        with spelling("spans", [("text", text)]):
            found: list[tuple[int, int]] = self._plain.encode(text, add_special_tokens=False).offsets
        return found

    def encode_pair(self, first: str, second: str, *, parse_specials: bool = False) -> tuple[list[int], list[int]]:
        """Return the numbers of two texts with special tokens around them, and the segment, 0 or 1, of each number."""
        engine = self._engine if parse_specials else self._plain
        with spelling("encode_pair", [("first", first), ("second", second)]):
            encoding = engine.encode(first, second)
        return encoding.ids, encoding.type_ids

    def encode_all(self, texts: Iterable[str], *, specials: bool = False, parse_specials: bool = False) -> Ragged:
        """Return the numbers of many texts, encoded on all cores."""
        if isinstance(texts, str):
            raise rejected("encode_all", "texts", "be several texts, such as [text]", "one str", TypeError)
        engine = self._engine if parse_specials else self._plain
        parts: list[np.ndarray] = [np.zeros(0, np.int32)]
        lengths: list[int] = [0]
        count = 0
        for block in text_blocks(texts):
            with spelling("encode_all", ((f"text {n}", text) for n, text in enumerate(block, start=count))):
                encodings = engine.encode_batch_fast(block, add_special_tokens=specials)
            numbers = [np.array(encoding.ids, np.int32) for encoding in encodings]
            parts.append(np.concatenate(numbers))
            lengths += map(len, numbers)
            count += len(block)
        return Ragged(np.concatenate(parts), np.cumsum(lengths, dtype=np.int64))

    def surroundings(self) -> tuple[tuple[Numbers, Numbers], tuple[Numbers, Numbers, Numbers], int]:
        """Return what stands before and behind one text; before, between and behind two; and the second's segment.

        These are the special tokens that its ``tokenizer.json`` puts there.

        Examples
        --------
        >>> Tokenizer.learn([], kind="bytes", specials=("end", "pad", "cls", "sep")).surroundings()
        (((258,), (259,)), ((258,), (259,), (259,)), 1)
        """
        single, pair = self._plain.encode("a"), self._plain.encode("a", "a")
        begin, _, end = _cut(single.ids, single.sequence_ids, 0)
        first, _, rest = _cut(pair.ids, pair.sequence_ids, 0)
        between, second, behind = _cut(rest, pair.sequence_ids[len(pair.ids) - len(rest) :], 1)
        at = len(pair.ids) - len(behind) - len(second)
        return (begin, end), (first, between, behind), pair.type_ids[at] if second else 0

    @property
    def gives_segments(self) -> bool:
        """Whether models that go with it are given the segments of tokens, if its files say which inputs they have."""
        named = self._config.get("model_input_names")
        return not isinstance(named, list) or "token_type_ids" in named

    def surrounded(self, begin: int | None, between: int | None, end: int | None) -> Tokenizer:
        """Return the same tokenizer, which puts these tokens around a text, and between two.

        Its folder says so, so that ``transformers`` reads texts in the same way.

        Examples
        --------
        >>> tokenizer = Tokenizer.learn([], kind="bytes")
        >>> tokenizer.surrounded(tokenizer.begin, tokenizer.end, tokenizer.end).encode("no", specials=True)
        [256, 110, 111, 256]
        """
        engine = tokenizers.Tokenizer.from_str(self._engine.to_str())
        texts = ([] if each is None else [str(engine.id_to_token(each))] for each in (begin, between, end))
        engine.post_processor = tokenizer_training.template(engine, *texts)
        return Tokenizer(engine, self._names, config=self._config)

    def decode(self, numbers: Iterable[int], *, specials: bool = False) -> str:
        """Return the text of numbers.

        Numbers without a token, which a model whose vocabulary is larger may write, are left out. Bytes that are no
        characters become U+FFFD.

        Parameters
        ----------
        numbers : iterable of int
        specials : bool, default False
            Show special tokens by their names, which are left out otherwise, but for ``unknown``.

        Raises
        ------
        ValueError
            If a number is negative.
        """
        listed = _listed(numbers, "decode")
        if not specials:
            listed = [number for number in listed if number not in self._hidden]
        if self._fallback:
            listed = self._in_characters(listed)
        return self._engine.decode(listed, skip_special_tokens=False)

    def decode_stream(self) -> DecodeStream:
        """Return an object whose ``push(number)`` returns the text that is certain so far; special tokens are left out.

        Examples
        --------
        >>> tokenizer = Tokenizer.learn([], kind="bytes")
        >>> stream = tokenizer.decode_stream()
        >>> [stream.push(number) for number in tokenizer.encode("né!")], stream.close()
        (['n', '', 'é', '!'], '')
        """
        if self._byte_level:
            return ByteStream(lambda number: b"" if number in self._hidden else self._bytes(number))
        return WindowStream(self.decode, self._begun if self._fallback else None)

    def tokens(self, numbers: Iterable[int]) -> list[str]:
        """Return what a picture shows of each number: spaces as ``▁``, bytes of no whole character as ``<0xF0>``."""
        return [self._shown(number) for number in _listed(numbers, "tokens")]

    @property
    def keeps_spaces(self) -> bool:
        """Whether the numbers of a text tell its spaces: not with pieces of words as BERT's.

        Examples
        --------
        >>> Tokenizer.learn([], kind="bytes").keeps_spaces
        True
        """
        return not self._continuing

    @cached_property
    def word_starts(self) -> np.ndarray:
        """Which numbers begin a word, (len(self),) bool: what follows one that does not begin a word continues it."""
        starts = np.ones(len(self), bool)
        for number in range(len(self)):
            token = self._engine.id_to_token(number)
            if token is None or number in self._special_numbers:
                continue
            if self._byte_level:
                token = self._bytes(number).decode(errors="ignore")
                starts[number] = bool(token) and not token[0].isalnum()
            elif self._metaspace:
                starts[number] = not token[0].isalnum() and not token.startswith("<0x")
            elif self._continuing:
                starts[number] = not token.startswith(self._continuing)
            else:
                starts[number] = not token[:1].isalnum()
        return starts

    def _special(self, role: str) -> int | None:
        if (text := self._names.get(role)) is None:
            return None
        number = self._engine.token_to_id(text)
        if number is None:
            raise rejected("Tokenizer", f"specials[{role!r}]", "be a token that has a number", repr(text))
        return number

    @cached_property
    def _special_numbers(self) -> frozenset[int]:
        added = self._engine.get_added_tokens_decoder()
        return frozenset({number for number, token in added.items() if token.special} | {*self.roles().values()})

    def roles(self) -> dict[str, int]:
        """Return the number of each special token that there is, by its role.

        Examples
        --------
        >>> Tokenizer.learn([], kind="bytes").roles()
        {'end': 256, 'pad': 257, 'begin': 256}
        """
        found = {role: self._special(role) for role in tokenizer_files.ROLES}
        return {role: number for role, number in found.items() if number is not None}

    @cached_property
    def _hidden(self) -> frozenset[int]:
        # GPT-2 calls one token the end and the unknown one.
        shown = {self.unknown} - {number for role, number in self.roles().items() if role != "unknown"}
        return self._special_numbers - shown

    @cached_property
    def _decoders(self) -> list[dict[str, Any]]:
        """The parts of the decoder, as JSON describes them."""
        state = json.loads(self._engine.decoder.__getstate__()) if self._engine.decoder is not None else {}
        return state["decoders"] if state.get("type") == "Sequence" else [state]

    @cached_property
    def _byte_level(self) -> bool:
        return any(part.get("type") == "ByteLevel" for part in self._decoders)

    @cached_property
    def _fallback(self) -> dict[int, int]:
        """The bytes of the tokens, by number, that stand for bytes of what has no token (SentencePiece's)."""
        if not any(part.get("type") == "ByteFallback" for part in self._decoders):
            return {}
        numbers = ((byte, self._engine.token_to_id(f"<0x{byte:02X}>")) for byte in range(256))
        return {number: byte for byte, number in numbers if number is not None}

    def _in_characters(self, numbers: list[int]) -> list[int]:
        """Return numbers in which bytes that are no character stand for U+FFFD.

        The library makes that of every byte of a run in which one is wrong, and so of characters beside it.
        """
        made: list[int] = []
        for is_byte, run in groupby(numbers, self._fallback.__contains__):
            if is_byte:
                text = bytes(self._fallback[number] for number in run).decode(errors="replace")
                made += [self._number_of[byte] for byte in text.encode() if byte in self._number_of]
            else:
                made += run
        return made

    def _begun(self, numbers: Sequence[int]) -> int:
        """Return how many of the last numbers are some but not all bytes of a character, with what is not shown."""
        at = [place for place, number in enumerate(numbers) if number not in self._hidden]
        last = list(takewhile(lambda place: numbers[place] in self._fallback, reversed(at)))[::-1]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(bytes(self._fallback[numbers[place]] for place in last))
        begun = len(decoder.getstate()[0])
        return len(numbers) - last[-begun] if begun else 0

    @cached_property
    def _number_of(self) -> dict[int, int]:
        return {byte: number for number, byte in self._fallback.items()}

    @cached_property
    def _metaspace(self) -> bool:
        return tokenizer_files.metaspaces(self._decoders)

    @cached_property
    def _continuing(self) -> str:
        return next((part["prefix"] for part in self._decoders if part.get("type") == "WordPiece"), "")

    def _bytes(self, number: int) -> bytes:
        """Return the bytes of a token of a byte-level tokenizer."""
        token = self._engine.id_to_token(number) or ""
        letters = [_BYTES.get(letter) for letter in token]
        known = [byte for byte in letters if byte is not None]
        return bytes(known) if len(known) == len(letters) else token.encode()

    def _shown(self, number: int) -> str:
        token = self._engine.id_to_token(number)
        if token is None:
            return f"<{number}>"
        if self._byte_level and number not in self._special_numbers:
            try:
                token = self._bytes(number).decode()
            except UnicodeDecodeError:
                return "".join(f"<0x{byte:02X}>" for byte in self._bytes(number))
        token = token.replace(" ", "▁")
        return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in token)


_BYTES = {letter: byte for byte, letter in enumerate(byte_letters())}


def text_blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield texts, as many at a time as are encoded at once."""
    block: list[str] = []
    size = 0
    for text in texts:
        block.append(text)
        size += len(text) if isinstance(text, str) else 0
        if size >= _BLOCK or len(block) >= _BLOCK >> 6:
            yield block
            block, size = [], 0
    if block:
        yield block


def _cut(numbers: Sequence[int], sequences: Sequence[int | None], which: int) -> tuple[Numbers, Numbers, Numbers]:
    """Return what stands before, in and behind the tokens of a text."""
    places = [at for at, each in enumerate(sequences) if each == which]
    begin, end = (places[0], places[-1] + 1) if places else (len(numbers), len(numbers))
    return tuple(numbers[:begin]), tuple(numbers[begin:end]), tuple(numbers[end:])


def _listed(numbers: Iterable[int], function: str) -> list[int]:
    listed = numbers.tolist() if hasattr(numbers, "tolist") else list(numbers)
    for number in listed:
        if not isinstance(number, int | np.integer) or number < 0:
            raise rejected(function, "numbers", "be whole numbers of at least 0", described(number))
    return listed
