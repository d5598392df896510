"""Tokenizers in Hugging Face's file format, and streaming decoding."""

from __future__ import annotations

import codecs
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, final

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from regard._utils.errors import described, rejected, unknown_name
from regard._utils.files import write_together
from regard.inspect._record.texts import byte_letters
from regard_lab.models.folders import file_error
from regard_lab.text import tokenizer_training
from regard_lab.text.ragged import Ragged
from regard_lab.text.tokenizer_training import spelling

# Streaming decoding: text is returned as soon as no later token can change it -----------------------------------------


#: The replacement character, for bytes that are not (yet) a character.
_INCOMPLETE = "\ufffd"
#: A character has at most four bytes, so waiting for more tokens than this does not complete it.
_LONGEST = 8


class DecodeStream(ABC):
    """Decodes tokens one at a time; made by :meth:`Tokenizer.decode_stream`.

    All that :meth:`push` and :meth:`close` return, one behind the other, is the text of all tokens.
    """

    @abstractmethod
    def push(self, number: int) -> str:
        """Add a token, and return the text that has become final: possibly empty, never part of a character."""

    @abstractmethod
    def close(self) -> str:
        """Return the text held back so far, after the last token, and start anew."""


@final
class ByteStream(DecodeStream):
    """Decodes tokens that stand for bytes.

    Parameters
    ----------
    to_bytes : callable
        Returns the bytes of a token, given its number.

    Examples
    --------
    >>> stream = ByteStream(lambda number: bytes([number]))
    >>> [stream.push(byte) for byte in "né".encode()], stream.close()
    (['n', '', 'é'], '')
    """

    def __init__(self, to_bytes: Callable[[int], bytes]) -> None:
        self._to_bytes = to_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, number: int) -> str:
        return self._decoder.decode(self._to_bytes(number))

    def close(self) -> str:
        return self._decoder.decode(b"", True)


@final
class WindowStream(DecodeStream):
    """Decodes tokens whose text depends on their neighbours: returns what a token adds to the text of the last few.

    Parameters
    ----------
    decode : callable
        Returns the text of several tokens.
    begun : callable, optional
        Returns how many of the last tokens are the beginning of a character; by default, all may be where their text
        ends with U+FFFD.
    before : iterable of int
        The tokens that come first, whose text is not returned.

    Examples
    --------
    >>> stream = WindowStream(lambda numbers: " ".join(map(str, numbers)))
    >>> [stream.push(number) for number in (3, 1, 4)]
    ['3', ' 1', ' 4']
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        begun: Callable[[Sequence[int]], int] | None = None,
        before: Iterable[int] = (),
    ) -> None:
        self._decode, self._begun = decode, begun
        self._shown = list(before)  # the last tokens returned, which determine the spacing of the next
        self._held: list[int] = []

    def push(self, number: int) -> str:
        self._held.append(number)
        if self._begun is not None:
            ready = len(self._held) - self._begun(self._held)
            text = self._added(self._held[:ready])
            return self._released(ready, text)
        text = self._added(self._held)
        waits = text.endswith(_INCOMPLETE) and len(self._held) < _LONGEST
        return "" if waits else self._released(len(self._held), text)

    def close(self) -> str:
        text = self._added(self._held)
        self._shown, self._held = [], []
        return text

    def _released(self, count: int, text: str) -> str:
        """Return the text of the first held tokens, and release them."""
        if text:
            self._shown, self._held = self._held[:count], self._held[count:]  # all of it: a part may decode differently
        return text

    def _added(self, held: Sequence[int]) -> str:
        before, after = self._decode(self._shown), self._decode([*self._shown, *held])
        return after[len(before) :] if after.startswith(before) else ""


# Tokenizers from Hugging Face model folders: ``tokenizer.json`` and its companion files -------------------------------
# Loading never runs code from a folder: these files hold only data, and their sizes are limited.


TOKENIZER, CONFIG, MAP, VOCABULARY = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"
#: Hugging Face's names of special tokens.
ROLES = {
    "end": "eos_token",
    "pad": "pad_token",
    "begin": "bos_token",
    "mask": "mask_token",
    "cls": "cls_token",
    "sep": "sep_token",
    "unknown": "unk_token",
}
#: Texts of special tokens, the most likely first, for folders that do not name their roles.
_USUAL = {
    "end": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
    "begin": ("<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>"),
    "mask": ("<mask>", "[MASK]", "<|mask|>"),
    "cls": ("[CLS]", "<cls>", "<|cls|>"),
    "sep": ("[SEP]", "<sep>", "<|sep|>"),
    "unknown": ("<unk>", "[UNK]"),
}
#: Limits: bytes of a tokenizer.json (34 million for 256,000 tokens), bytes of the other files, number of tokens.
_LARGEST, _LARGEST_CONFIG, _MOST = 1 << 27, 1 << 22, 1 << 24
#: Fields of tokenizer_config.json that name code, or paths on the author's machine.
_LEFT_OUT = ("auto_map", "name_or_path", "tokenizer_file", "special_tokens_map_file")


def read_folder(folder: str | Path) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[str, Any]]:
    """Return the tokenizer in a folder, the text of each special token, and the rest of its configuration.

    Raises
    ------
    ModelFileError
        If there is none that can be read; the message says which file and why.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise file_error(folder, f"be a folder with {TOKENIZER}", "a file" if folder.exists() else "no such folder")
    config, named = (_read_object(folder / name) for name in (CONFIG, MAP))
    path = folder / TOKENIZER
    if path.exists():
        engine = _engine(path)
    elif (folder / VOCABULARY).exists():
        path = folder / VOCABULARY
        engine = _word_piece(path, config)
    else:
        raise _none(folder)
    if max(engine.get_vocab().values(), default=_MOST) >= _MOST:
        raise file_error(path, f"number tokens, from 0 to at most {_MOST:,}", "none, or a higher number")
    return engine, _specials(engine, config, named), {k: v for k, v in config.items() if k not in _LEFT_OUT}


def to_config(names: Mapping[str, str], rest: Mapping[str, Any]) -> bytes:
    """Return a tokenizer_config.json with the special tokens by role, null for missing ones."""
    roles = {field: names.get(role) for role, field in ROLES.items()}
    whole = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **rest, **roles}
    return (json.dumps(whole, indent=2, ensure_ascii=False) + "\n").encode()


def _engine(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(_read(path, _LARGEST).decode())
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except UnicodeDecodeError:
        raise file_error(path, "be a tokenizer in JSON", "something else, not in UTF-8") from None
    except BaseException as error:  # the library panics on some files, which is not an Exception
        if isinstance(error, ValueError):  # raised by reading
            raise
        raise file_error(path, "be a tokenizer in JSON", f"something else ({_brief(error)})") from None


def _word_piece(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return BERT's tokenizer, from its vocabulary file alone."""
    try:
        pieces = _read(path, _LARGEST).decode().splitlines()
    except UnicodeDecodeError:
        raise file_error(path, "be text in UTF-8", "something else") from None
    numbers = {piece.strip(): number for number, piece in enumerate(pieces)}
    missing = [piece for piece in ("[UNK]", "[CLS]", "[SEP]") if piece not in numbers]
    if missing or not any(piece.startswith("##") for piece in numbers):
        got = f"no {missing[0]}" if missing else "no piece that begins with ##"
        raise file_error(path, f"be a WordPiece vocabulary, where there is no {TOKENIZER}", got)
    engine = tokenizers.Tokenizer(models.WordPiece(vocab=numbers, unk_token="[UNK]", max_input_chars_per_word=100))
    accents, chinese = config.get("strip_accents"), config.get("tokenize_chinese_chars", True)
    engine.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(chinese),
        strip_accents=accents if isinstance(accents, bool) else None,
        lowercase=bool(config.get("do_lower_case", True)),
    )
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece(prefix="##")
    engine.post_processor = processors.BertProcessing(("[SEP]", numbers["[SEP]"]), ("[CLS]", numbers["[CLS]"]))
    known = [piece for piece in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if piece in numbers]
    engine.add_special_tokens(known)
    return engine


def _specials(engine: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each special token: from the files, or else the usual one."""
    added = {token.content for token in engine.get_added_tokens_decoder().values()}
    around = _around(engine)
    found: dict[str, str] = {}
    for role, field in ROLES.items():
        said = next((each[field] for each in (config, named) if field in each), ...)
        if said is ...:
            usual = next((name for name in _USUAL[role] if name in added), None)
            if role == "unknown":
                usual = getattr(engine.model, "unk_token", None) or usual
            text = around.get(role, usual)
        else:
            text = said.get("content") if isinstance(said, dict) else said
        if isinstance(text, str) and engine.token_to_id(text) is not None:
            found[role] = text
    return found


def _around(engine: tokenizers.Tokenizer) -> dict[str, str]:
    """Return the tokens that the post-processor of BERT or RoBERTa puts before and after a text."""
    if engine.post_processor is None:
        return {}
    state = json.loads(engine.post_processor.__getstate__())
    if state.get("type") not in ("BertProcessing", "RobertaProcessing"):
        return {}
    return {role: state[role][0] for role in ("cls", "sep")}


def _none(folder: Path) -> Exception:
    sentence_piece = sorted(path.name for path in folder.glob("*.model"))
    if sentence_piece:
        got = (
            f"only a SentencePiece model, {sentence_piece[0]}, which is not read (transformers makes {TOKENIZER} "
            "of it: AutoTokenizer.from_pretrained(folder).save_pretrained(folder))"
        )
    else:
        got = "neither"
    return file_error(folder, f"have a {TOKENIZER}, or the {VOCABULARY} of BERT", got)


def _read_object(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file next to the tokenizer; an empty dict if it does not exist."""
    if not path.exists():
        return {}
    try:
        said = json.loads(_read(path, _LARGEST_CONFIG))
    except (ValueError, RecursionError) as error:
        if getattr(error, "rejection", None) is not None:
            raise
        raise file_error(path, "be JSON", f"something else ({_brief(error)})") from None
    if not isinstance(said, dict):
        raise file_error(path, "hold a JSON object", _brief(said))
    return said


def _read(path: Path, most: int) -> bytes:
    try:
        if not path.is_file():
            raise file_error(path, "be a file", "a folder or device")
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise file_error(path, "be readable", error.strerror or type(error).__name__) from None
    if len(data) > most:
        raise file_error(path, f"have at most {most:,} bytes", "more")
    return data


def _brief(value: object) -> str:
    text = str(value) if isinstance(value, BaseException) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def metaspaces(parts: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether decoders, given as JSON, turn ``▁`` into a space."""
    return any(part.get("type") == "Metaspace" or part.get("pattern") == {"String": "▁"} for part in parts)


# Token ids of texts for language models, in the files that Hugging Face libraries read and write ----------------------


#: Tokens by number.
Numbers = tuple[int, ...]
#: Number of characters to encode at once: the library's results take many times the memory of the text.
_BLOCK = 1 << 22


class Tokenizer:
    """Turns texts into token ids and back: a Hugging Face ``tokenizers.Tokenizer`` with its special tokens by role.

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
            if name not in ROLES:
                raise unknown_name("Tokenizer", "specials", name, ROLES)
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
        """Train a tokenizer on texts; deterministic.

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
        engine, specials, config = read_folder(folder)
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
                folder / TOKENIZER: self._engine.to_str(pretty=True).encode() + b"\n",
                folder / CONFIG: to_config(self._names, self._config),
            }
        )
        return folder

    def __len__(self) -> int:
        """Return the number of tokens: the smallest vocabulary size of a model."""
        return self._size

    def __repr__(self) -> str:
        return f"Tokenizer of {len(self):,} tokens"

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens of a text, if ``tokenizer_config.json`` states it."""
        most = self._config.get("model_max_length")
        return int(most) if isinstance(most, int | float) and 0 < most < 1 << 31 else None

    def limited(self, max_length: int) -> Tokenizer:
        """Return the same tokenizer with another maximum number of tokens, which its folder states."""
        return Tokenizer(self._engine, self._names, config={**self._config, "model_max_length": max_length})

    def checksum(self) -> str:
        """Return a checksum of everything that affects encoding."""
        return hashlib.sha256(self._engine.to_str().encode()).hexdigest()

    def encode(self, text: str, *, specials: bool = False, parse_specials: bool = False) -> list[int]:
        """Return the token ids of a text.

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
        """Return the span of characters, start and end, of each token that :meth:`encode` returns.

        Examples
        --------
        >>> Tokenizer.learn([], kind="bytes").spans("né")
        [(0, 1), (1, 2), (1, 2)]
        """
        with spelling("spans", [("text", text)]):
            found: list[tuple[int, int]] = self._plain.encode(text, add_special_tokens=False).offsets
        return found

    def unknown_characters(self, text: str, *, parse_specials: bool = False) -> list[str]:
        """Return the characters of a text that the vocabulary lacks: those in unknown tokens, or skipped.

        Parameters
        ----------
        text, parse_specials : as in :meth:`encode`

        Examples
        --------
        >>> Tokenizer.learn(["to be or not"], kind="characters").unknown_characters("née")
        ['é']
        """
        if self._byte_level or self._fallback:
            return []
        engine = self._engine if parse_specials else self._plain
        with spelling("unknown_characters", [("text", text)]):
            if self.unknown is None:
                lost = {each for each in {*text} if self._is_left_out(each)}
                return [each for each in text if each in lost]
            encoding = engine.encode(text, add_special_tokens=False)
        spans = [span for number, span in zip(encoding.ids, encoding.offsets) if number == self.unknown]
        return [text[at] for at in sorted({at for span in spans for at in range(*span)})]

    def _is_left_out(self, character: str) -> bool:
        """Return whether a character has no token, although it normalizes to more than spaces."""
        normal = self._plain.normalizer.normalize_str(character) if self._plain.normalizer else character
        return bool(normal.strip().strip("▁")) and not self._plain.encode(character, add_special_tokens=False).ids

    def encode_pair(self, first: str, second: str, *, parse_specials: bool = False) -> tuple[list[int], list[int]]:
        """Return the token ids of two texts with special tokens around them, and the segment of each, 0 or 1."""
        engine = self._engine if parse_specials else self._plain
        with spelling("encode_pair", [("first", first), ("second", second)]):
            encoding = engine.encode(first, second)
        return encoding.ids, encoding.type_ids

    def encode_all(self, texts: Iterable[str], *, specials: bool = False, parse_specials: bool = False) -> Ragged:
        """Return the token ids of many texts, encoded on all cores."""
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
        """Return the special tokens around one text, those around and between two, and the segment of the second.

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
        """Whether its models take segments as input, if the tokenizer's files list their inputs."""
        named = self._config.get("model_input_names")
        return not isinstance(named, list) or "token_type_ids" in named

    def surrounded(self, begin: int | None, between: int | None, end: int | None) -> Tokenizer:
        """Return the same tokenizer with these special tokens around a text, and between two.

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
        """Return the text of token ids.

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

    def decode_stream(self, before: Iterable[int] = ()) -> DecodeStream:
        """Return a streaming decoder: ``push(number)`` returns the text that has become final, without special tokens.

        Parameters
        ----------
        before : iterable of int
            The tokens that the others continue, such as a prompt: the first word may need a space before it.

        Examples
        --------
        >>> tokenizer = Tokenizer.learn([], kind="bytes")
        >>> stream = tokenizer.decode_stream()
        >>> [stream.push(number) for number in tokenizer.encode("né!")], stream.close()
        (['n', '', 'é', '!'], '')
        """
        if self._byte_level:
            return ByteStream(lambda number: b"" if number in self._hidden else self._bytes(number))
        return WindowStream(self.decode, self._begun if self._fallback else None, before)

    def tokens(self, numbers: Iterable[int]) -> list[str]:
        """Return the label of each token in pictures: spaces as ``▁``, bytes of incomplete characters as ``<0xF0>``."""
        return [self._shown(number) for number in _listed(numbers, "tokens")]

    @property
    def keeps_spaces(self) -> bool:
        """Whether tokens preserve the spaces of a text; False for WordPiece, as in BERT.

        Examples
        --------
        >>> Tokenizer.learn([], kind="bytes").keeps_spaces
        True
        """
        return not self._continuing

    @cached_property
    def word_starts(self) -> np.ndarray:
        """Which tokens begin a word, (len(self),) bool; the others continue one."""
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
        """Return the ids of the special tokens, by role.

        Examples
        --------
        >>> Tokenizer.learn([], kind="bytes").roles()
        {'end': 256, 'pad': 257, 'begin': 256}
        """
        found = {role: self._special(role) for role in ROLES}
        return {role: number for role, number in found.items() if number is not None}

    def unknown_places(self, numbers: Sequence[int] | np.ndarray) -> list[int]:
        """Return the positions of unknown tokens; none for a tokenizer that falls back to bytes.

        Examples
        --------
        >>> tokenizer = Tokenizer.learn(["to be or not"], kind="characters")
        >>> tokenizer.unknown_places(tokenizer.encode("bones"))
        [4]
        """
        if self.unknown is None or self.unknown in self._hidden:
            return []
        return np.flatnonzero(np.asarray(numbers) == self.unknown).tolist()

    @cached_property
    def _hidden(self) -> frozenset[int]:
        # GPT-2 uses one token as both the end and the unknown token.
        shown = {self.unknown} - {number for role, number in self.roles().items() if role != "unknown"}
        return self._special_numbers - shown

    @cached_property
    def _decoders(self) -> list[dict[str, Any]]:
        """The parts of the decoder, as JSON."""
        state = json.loads(self._engine.decoder.__getstate__()) if self._engine.decoder is not None else {}
        return state["decoders"] if state.get("type") == "Sequence" else [state]

    @cached_property
    def _byte_level(self) -> bool:
        return any(part.get("type") == "ByteLevel" for part in self._decoders)

    @cached_property
    def _fallback(self) -> dict[int, int]:
        """The byte of each byte-fallback token (SentencePiece's), by id."""
        if not any(part.get("type") == "ByteFallback" for part in self._decoders):
            return {}
        numbers = ((byte, self._engine.token_to_id(f"<0x{byte:02X}>")) for byte in range(256))
        return {number: byte for byte, number in numbers if number is not None}

    def _in_characters(self, numbers: list[int]) -> list[int]:
        """Return token ids with only the invalid bytes replaced by U+FFFD.

        The library would replace every byte of a run that contains an invalid one, including valid characters.
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
        """Return how many of the last tokens are an incomplete character, special tokens included."""
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
        return metaspaces(self._decoders)

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
    """Yield texts in batches to encode together."""
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
    """Return the tokens before a text, of the text, and after it."""
    places = [at for at, each in enumerate(sequences) if each == which]
    begin, end = (places[0], places[-1] + 1) if places else (len(numbers), len(numbers))
    return tuple(numbers[:begin]), tuple(numbers[begin:end]), tuple(numbers[end:])


def _listed(numbers: Iterable[int], function: str) -> list[int]:
    listed = numbers.tolist() if hasattr(numbers, "tolist") else list(numbers)
    for number in listed:
        if not isinstance(number, int | np.integer) or number < 0:
            raise rejected(function, "numbers", "be whole numbers of at least 0", described(number))
    return listed
