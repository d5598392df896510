"""Training of tokenizers: byte-level byte-pair encoding, WordPiece, single bytes, single characters."""

from __future__ import annotations

import heapq
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryFile

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from regard._utils.errors import RegardWarning, described, rejected, unknown_name
from regard.inspect._record.texts import byte_letters

KINDS = ("bpe", "wordpiece", "bytes", "characters")
#: Names of the special tokens of a new tokenizer. A single token separates documents.
NAMES = {
    "end": "<|endoftext|>",
    "pad": "<|pad|>",
    "begin": "<|begin|>",
    "mask": "<|mask|>",
    "cls": "<|cls|>",
    "sep": "<|sep|>",
}
#: The token for characters that were not in the training texts.
UNKNOWN_TEXT = "\ufffd"
#: Default vocabulary size.
_SIZE = 8000
#: WordPiece keeps this many of the most frequent characters; a word with any other is unknown (BERT's limit).
_LETTERS = 1000
#: Tokens do not cross the boundaries of these matches: GPT-2's words, plus combining marks (vowels of Devanagari are
#: marks), and at most three digits of a number.
_PARTS = Regex(
    r"'(?:[sdmt]|ll|ve|re)| ?[\p{L}\p{M}]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"
)  # fmt: skip


def learned(
    texts: Iterable[str], size: int | None, kind: str, lowercase: bool, specials: Sequence[str]
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Train a tokenizer, and return it with the text of each special token; see :meth:`Tokenizer.learn`."""
    function = "Tokenizer.learn"
    if kind not in KINDS:
        raise unknown_name(function, "kind", kind, KINDS)
    for name in specials:
        if name not in NAMES:
            raise unknown_name(function, "specials", name, NAMES)
    if len({"cls", "sep"} & set(specials)) == 1:
        raise rejected(function, "specials", "have both or neither of 'cls' and 'sep'", tuple(specials))
    names = {name: text for name, text in NAMES.items() if name in specials}
    lower = normalizers.Lowercase() if lowercase else None
    engine = _MAKERS[kind](_checked(texts, function), size, len(names), lower)
    if engine.normalizer is None:
        engine.normalizer = lower
    engine.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in names.values()])
    if "end" in names:  # the end token of one document starts the next
        names.setdefault("begin", names["end"])
    if (template := _template(names, engine)) is not None:
        engine.post_processor = template
    if kind in ("characters", "wordpiece"):
        names["unknown"] = UNKNOWN_TEXT
    return engine, names


def _checked(texts: Iterable[str], function: str) -> Iterator[str]:
    if isinstance(texts, str):
        raise rejected(function, "texts", "be several texts, such as [text]", "one str", TypeError)
    for number, text in enumerate(texts):
        yield checked_text(text, function, f"text {number}")


def checked_text(text: object, function: str, name: str) -> str:
    """Return a text that can be written in UTF-8.

    Raises
    ------
    TypeError
        If it is no str.
    ValueError
        If it has half a surrogate pair.
    """
    if not isinstance(text, str):
        raise rejected(function, name, "be a str", described(text), TypeError)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"half a surrogate pair, U+{ord(text[error.start]):04X}, at character {error.start}"
        raise rejected(function, name, "be text that UTF-8 can hold", half) from None
    return text


@contextmanager
def spelling(function: str, texts: Iterable[tuple[str, str]]) -> Iterator[None]:
    """Raise a one-sentence error for texts that cannot be encoded; only then are they and their names read."""
    try:
        yield
    except TypeError:
        for name, text in texts:
            checked_text(text, function, name)
        raise
    except Exception as error:
        if type(error) is not Exception:  # the engine raises plain Exception
            raise
        raise rejected(function, "text", "be spelled by the tokenizer", str(error).partition("\n")[0][:120]) from None


def _byte_pairs(
    texts: Iterable[str], size: int | None, special: int, lower: normalizers.Normalizer | None
) -> tokenizers.Tokenizer:
    asked, least = _SIZE if size is None else size, 256 + special
    _check_size(asked, least, f"be at least {least}, for 256 bytes and {special} special tokens")
    engine = tokenizers.Tokenizer(models.BPE())
    engine.normalizer = lower  # must precede training
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_PARTS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=asked - special, min_frequency=2, initial_alphabet=sorted(byte_letters()), show_progress=False
    )
    counted = _Counted(texts)
    engine.train_from_iterator(counted, trainer)
    if not counted.characters:
        raise rejected("Tokenizer.learn", "texts", "have a text that is not empty", "none")
    _warn_of_fewer(engine, size, special)
    return engine


class _Counted:
    """Iterates over texts, and counts their characters."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts, self.characters = texts, 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            self.characters += len(text)
            yield text


def _word_pieces(
    texts: Iterable[str], size: int | None, special: int, lower: normalizers.Normalizer | None
) -> tokenizers.Tokenizer:
    asked, least = _SIZE if size is None else size, special + 2
    _check_size(asked, least, f"be at least {least}, for a character, the unknown one and special tokens")
    engine = tokenizers.Tokenizer(models.WordPiece(unk_token=UNKNOWN_TEXT))
    # Keep accents, unlike BERT's uncased vocabularies: they distinguish words.
    engine.normalizer = normalizers.BertNormalizer(lowercase=lower is not None, strip_accents=False)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    with TemporaryFile("w+", encoding="utf-8", newline="\n") as spooled:
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(engine.normalizer.normalize_str(text))
            spooled.write(f"{text}\n")
        counts = Counter({letter: count for letter, count in counts.items() if not letter.isspace()})
        if not counts:
            raise rejected("Tokenizer.learn", "texts", "have a text that is not empty", "none")
        # Each letter needs two tokens, at the start of a word and inside it: too many would fill the vocabulary.
        letters = _frequent(counts, min(_LETTERS, (asked - special - 1) // 2))
        # The library numbers characters in a random order and breaks ties by number; numbering these first fixes it.
        within = [f"##{letter}" for letter in letters]
        trainer = trainers.WordPieceTrainer(
            vocab_size=asked - special, min_frequency=2, special_tokens=[UNKNOWN_TEXT, *within],
            initial_alphabet=letters, limit_alphabet=len(letters), show_progress=False,
        )  # fmt: skip
        spooled.seek(0)
        engine.train_from_iterator(spooled, trainer)
    # Use a second engine: in this one, the unknown token is not text, even if a text contains its name.
    made = tokenizers.Tokenizer(models.WordPiece(engine.get_vocab(with_added_tokens=False), unk_token=UNKNOWN_TEXT))
    made.normalizer, made.pre_tokenizer = engine.normalizer, engine.pre_tokenizer
    made.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    _warn_of_fewer(made, size, special)
    return made


def _frequent(counts: Counter[str], most: int) -> list[str]:
    """Return the most frequent characters, in code point order; of equally frequent ones, the first."""
    return sorted(heapq.nsmallest(most, counts, key=lambda letter: (-counts[letter], letter)))


def _warn_of_fewer(engine: tokenizers.Tokenizer, size: int | None, special: int) -> None:
    if size is not None and engine.get_vocab_size() + special < size:
        reached = f"{size:,} tokens are more than these texts support: {engine.get_vocab_size() + special:,}."
        warnings.warn(f"Tokenizer.learn: {reached}", RegardWarning, stacklevel=5)


def _bytes(
    texts: Iterable[str],  # noqa: ARG001 - bytes are there before texts
    size: int | None,
    special: int,
    lower: normalizers.Normalizer | None,  # noqa: ARG001
) -> tokenizers.Tokenizer:
    _check_size(size, 256 + special, f"be at least {256 + special}, or None, for bytes and special tokens")
    numbers = {letter: byte for byte, letter in enumerate(byte_letters())}
    engine = tokenizers.Tokenizer(models.BPE(vocab=numbers, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = decoders.ByteLevel()
    return engine


def _characters(
    texts: Iterable[str], size: int | None, special: int, lower: normalizers.Normalizer | None
) -> tokenizers.Tokenizer:
    least = special + 2
    _check_size(size, least, f"be at least {least}, for a character, the unknown one and special tokens")
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text if lower is None else lower.normalize_str(text))
    counts.pop(UNKNOWN_TEXT, None)
    if not counts:
        raise rejected("Tokenizer.learn", "texts", "have a text that is not empty", "none")
    most = len(counts) if size is None else size - special - 1
    numbers = {letter: number for number, letter in enumerate([*_frequent(counts, most), UNKNOWN_TEXT])}
    engine = tokenizers.Tokenizer(models.BPE(vocab=numbers, merges=[], unk_token=UNKNOWN_TEXT))
    engine.decoder = decoders.Fuse()
    return engine


def _check_size(size: int | None, least: int, expected: str) -> None:
    if size is not None and (not isinstance(size, int) or size < least):
        raise rejected("Tokenizer.learn", "size", expected, described(size))


def _template(names: dict[str, str], engine: tokenizers.Tokenizer) -> processors.TemplateProcessing | None:
    """Return the special tokens around a text: cls and sep, or begin."""
    used: tuple[str, ...]
    if "cls" in names:
        cls, sep = names["cls"], names["sep"]
        single, pair, used = f"{cls} $A {sep}", f"{cls} $A {sep} $B:1 {sep}:1", (cls, sep)
    elif "begin" in names:
        begin = names["begin"]
        single, pair, used = f"{begin} $A", f"{begin} $A {begin}:1 $B:1", (begin,)
    else:
        return None
    numbered = [(text, engine.token_to_id(text)) for text in used]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=numbered)


def template(
    engine: tokenizers.Tokenizer, begin: Sequence[str], between: Sequence[str], end: Sequence[str]
) -> processors.TemplateProcessing:
    """Return the post-processor that puts these tokens around a text, and between two."""
    pair = [*begin, "$A", *between, "$B:1", *(f"{each}:1" for each in end)]
    numbered = [(each, engine.token_to_id(each)) for each in sorted({*begin, *between, *end})]
    return processors.TemplateProcessing(single=[*begin, "$A", *end], pair=pair, special_tokens=numbered)


_MAKERS: dict[str, Callable[..., tokenizers.Tokenizer]] = {
    "bpe": _byte_pairs,
    "wordpiece": _word_pieces,
    "bytes": _bytes,
    "characters": _characters,
}
