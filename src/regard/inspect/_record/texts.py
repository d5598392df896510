"""The texts and images that were read, token by token, and the words that tokens make up."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard._utils.errors import described, rejected, shape, unknown_name

if TYPE_CHECKING:
    from regard.inspect._record.layer_record import LayerRecord


# What was read, token by token, and the image whose patches some tokens are -------------------------------------------


@dataclass(frozen=True)
class Patches:
    """An image that was cut into patches, each of which is a token.

    Attributes
    ----------
    image : bytes
        The picture's file: PNG, JPEG, WebP or GIF.
    rows, cols : int
        How many patches stand below and beside each other.
    first : int
        The number of the first patch among the tokens; the others follow, row by row.
    """

    image: bytes
    rows: int
    cols: int
    first: int = 0

    def __post_init__(self) -> None:
        if min(self.rows, self.cols) < 1 or self.first < 0:
            got = f"{self.rows} × {self.cols} from {self.first}"
            raise rejected("Patches", "rows and cols", "be at least 1, and first at least 0", got)
        if self.media_type is None:
            raise rejected("Patches", "image", "be a file of PNG, JPEG, WebP or GIF", f"{self.image[:8]!r}")

    @property
    def media_type(self) -> str | None:
        """The kind of image, by how its file begins."""
        begins = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif"}
        if self.image[:4] == b"RIFF" and self.image[8:12] == b"WEBP":
            return "image/webp"
        return next((f"image/{kind}" for start, kind in begins.items() if self.image.startswith(start)), None)


@dataclass(frozen=True)
class Text:
    """A sequence that a model read or wrote.

    Attributes
    ----------
    tokens : tuple of str
        One string for each of the sequence's numbers.
    special : tuple of int
        Which of them are special tokens, such as ``[CLS]``.
    patches : Patches, optional
        The image that some of them stand for.

    Examples
    --------
    >>> Text(("[CLS]", "a", "cat"), special=(0,)).tokens[1:]
    ('a', 'cat')
    """

    tokens: tuple[str, ...]
    special: tuple[int, ...] = ()
    patches: Patches | None = None

    def __post_init__(self) -> None:
        if isinstance(self.tokens, str) or not all(isinstance(each, str) for each in self.tokens):
            raise rejected("Text", "tokens", "be a sequence of str", described(self.tokens), TypeError)
        object.__setattr__(self, "tokens", tuple(self.tokens))
        object.__setattr__(self, "special", tuple(self.special))
        if any(not 0 <= each < len(self.tokens) for each in self.special):
            raise rejected("Text", "special", f"be below {len(self.tokens)}, as many as there are tokens", self.special)
        if self.patches is not None:
            end = self.patches.first + self.patches.rows * self.patches.cols
            if end > len(self.tokens):
                raise rejected("Text", "patches", f"end by token {len(self.tokens)}", end)


def as_texts(given: Sequence[Text | Sequence[str]]) -> tuple[Text, ...]:
    """Return sequences of tokens as texts: one, or what was read and what was written.

    Raises
    ------
    ValueError
        If there are more than two.
    """
    texts = tuple(each if isinstance(each, Text) else Text(tuple(each)) for each in given)
    if len(texts) > 2:
        raise rejected("record", "texts", "be one, or what was read and what was written", f"{len(texts)} texts")
    return texts


def texts_of(texts: Sequence[Text], run: LayerRecord) -> tuple[Text, Text]:
    """Return the texts that a layer's queries and keys are of; numbers where nobody has named any.

    Raises
    ------
    ValueError
        If no text has as many tokens as the matrix has rows or columns.
    """
    _, _, L, S = run.shape
    if not texts:
        queries, keys = (Text(tuple(map(str, range(size)))) for size in (L, S))
        return (keys, keys) if L == S else (queries, keys)
    if L != S and len(texts) == 1 and len(texts[0].tokens) == S:  # the last rows of a text whose first have been read
        special = tuple(each - (S - L) for each in texts[0].special if each >= S - L)
        return Text(texts[0].tokens[S - L :], special), texts[0]
    reader, read = texts[-1], texts[0]
    if run.kind == "self" and len(reader.tokens) != len(read.tokens):
        reader = read = reader if len(reader.tokens) == S else read
    elif run.kind == "self":
        reader = read = reader if "decoder" in run.name.lower() else read
    for text, size, which in ((reader, L, "rows"), (read, S, "columns")):
        if len(text.tokens) != size:
            counts = " and ".join(str(len(each.tokens)) for each in texts)
            expected = f"have as many tokens as {run.name or 'the layer'} has {which}, {size}"
            raise rejected("record", "texts", expected, counts)
    return reader, read


# Merge the tokens of a word: which tokens make one, and what its attention is -----------------------------------------
# Dimensions: L queries, S keys, M and N words.


#: Tokens that are no part of a text: [CLS], <s>, <|endoftext|>, ...; <0xE2> is a byte of one.
_SPECIAL = re.compile(r"\[[A-Z][A-Z0-9_]*\]|<(?!0x[0-9A-F]{2}>)[^<>\s]+>")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def merge_tokens(weights: Tensor, groups: Sequence[int], key_groups: Sequence[int] | None = None) -> Tensor:
    """Return the weights between words: sums over the keys of a word, means over its queries.

    ``merged[m, n] = 1/|m| · Σ_{i ∈ m} Σ_{j ∈ n} weights[i, j]`` (Clark et al. 2019, arXiv 1906.04341): rows that
    sum to one still do.

    Parameters
    ----------
    weights : Tensor (..., L, S)
    groups : sequence of L int
        The number of each query's word, as :func:`words_of` gives it: 0 to M − 1.
    key_groups : sequence of S int, optional
        The same of the keys, where they are of another sequence.

    Returns
    -------
    Tensor (..., M, N)

    Raises
    ------
    ValueError
        If there are not as many numbers as tokens, or a word has none.

    Examples
    --------
    >>> import torch
    >>> from regard.inspect import merge_tokens
    >>> merge_tokens(torch.tensor([[0.2, 0.3, 0.5], [0.4, 0.0, 0.6], [0.1, 0.7, 0.2]]), [0, 1, 1])
    tensor([[0.2000, 0.8000],
            [0.2500, 0.7500]])
    """
    if weights.dim() < 2:
        raise rejected("merge_tokens", "weights", "have dimensions (..., L, S)", f"shape {shape(weights)}")
    key_groups = groups if key_groups is None else key_groups
    rows = _membership("groups", groups, weights, -2)
    cols = _membership("key_groups" if key_groups is not groups else "groups", key_groups, weights, -1)
    return (rows / rows.sum(0)).mT @ weights @ cols


def words_of(tokens: Sequence[str], scheme: str | None = None) -> tuple[list[int], list[str]]:
    """Return which tokens make a word, and the words.

    A special token such as ``[CLS]`` or ``</s>`` is a word of its own. Punctuation is one in WordPiece, and belongs to
    the word before it in the schemes that mark spaces alone.

    Parameters
    ----------
    tokens : sequence of str
        As a tokenizer writes them.
    scheme : {"wordpiece", "sentencepiece", "byte-level", "subword-nmt", "suffix", "none"}, optional
        How a token says that it goes on with a word or begins one: ``##`` before one that goes on (BERT), ``▁`` in
        place of a space (T5, Llama), ``Ġ`` in place of a space byte (GPT-2), ``@@`` behind one that another follows,
        ``</w>`` behind the last one (CLIP). By default the first whose mark is there, in the order suffix,
        subword-nmt, wordpiece, byte-level, sentencepiece; without any mark each token is a word.

    Returns
    -------
    groups : list of int
        The number of each token's word, from 0.
    words : list of str
        The words, without marks.

    Raises
    ------
    ValueError
        If the scheme is not known.

    Examples
    --------
    >>> from regard.inspect import words_of
    >>> words_of(["[CLS]", "un", "##believ", "##able", "!"])
    ([0, 1, 1, 1, 2], ['[CLS]', 'unbelievable', '!'])
    >>> words_of(["▁The", "▁un", "believ", "able", "▁c", "at", "</s>"])
    ([0, 1, 1, 1, 2, 2, 3], ['The', 'unbelievable', 'cat', '</s>'])
    >>> words_of(["The", "Ġna", "Ã¯", "ve", "Ġcat"])
    ([0, 1, 1, 1, 2], ['The', 'naïve', 'cat'])
    """
    tokens = list(tokens)
    if scheme is None:
        scheme = next((name for name, marks in _MARKS.items() if any(map(marks, tokens))), "none")
    elif scheme not in _PARTS:
        raise unknown_name("words_of", "scheme", scheme, _PARTS)
    groups: list[int] = []
    words: list[bytes] = []
    ended = True  # whether the next token begins a word
    for token in tokens:
        special = bool(_SPECIAL.fullmatch(token))
        begins, text, ends = (True, token.encode(), True) if special else _PARTS[scheme](token)
        if ended or begins:
            words.append(b"")
        groups.append(len(words) - 1)
        words[-1] += text
        ended = ends
    texts = (word.decode(errors="replace") for word in words)
    return groups, [text.strip() or text for text in texts]


def _wordpiece(token: str) -> tuple[bool, bytes, bool]:
    return not token.startswith("##"), token.removeprefix("##").encode(), False


def _sentencepiece(token: str) -> tuple[bool, bytes, bool]:
    byte = _BYTE.fullmatch(token)
    return token.startswith("▁"), bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode(), False


def _byte_level(token: str) -> tuple[bool, bytes, bool]:
    letters = _letters()
    text = bytes(letters[each] for each in token) if all(each in letters for each in token) else token.encode()
    return text[:1].isspace(), text, text[-1:].isspace() and not text.endswith(b" ")


def byte_letters() -> list[str]:
    """Return the letter that stands for each byte in files of byte-level tokenizers (Radford 2019): printable ones.

    Examples
    --------
    >>> letters = byte_letters()
    >>> letters[ord("a")], letters[ord(" ")], len(set(letters))
    ('a', 'Ġ', 256)
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


@functools.cache
def _letters() -> dict[str, int]:
    return {letter: byte for byte, letter in enumerate(byte_letters())}


def _subword_nmt(token: str) -> tuple[bool, bytes, bool]:
    return False, token.removesuffix("@@").encode(), not token.endswith("@@")


def _suffix(token: str) -> tuple[bool, bytes, bool]:
    return False, token.removesuffix("</w>").encode(), token.endswith("</w>")


def _none(token: str) -> tuple[bool, bytes, bool]:
    return True, token.encode(), True


#: For each scheme, whether a token begins a word, its text, and whether it ends one.
_PARTS: dict[str, Callable[[str], tuple[bool, bytes, bool]]] = {
    "wordpiece": _wordpiece,
    "sentencepiece": _sentencepiece,
    "byte-level": _byte_level,
    "subword-nmt": _subword_nmt,
    "suffix": _suffix,
    "none": _none,
}
#: What tells a scheme, in the order in which they are tried.
_MARKS: dict[str, Callable[[str], bool]] = {
    "suffix": lambda token: token.endswith("</w>"),
    "subword-nmt": lambda token: token.endswith("@@"),
    "wordpiece": lambda token: token.startswith("##"),
    "byte-level": lambda token: token.startswith(("Ġ", "Ċ")),
    "sentencepiece": lambda token: "▁" in token,
}


def _membership(name: str, groups: Sequence[int], weights: Tensor, dim: int) -> Tensor:
    """Return which token is of which word, (tokens, words), as zeros and ones."""
    count, numbers = weights.shape[dim], [int(each) for each in groups]
    if len(numbers) != count:
        raise rejected("merge_tokens", name, f"be {count} numbers, one for each token", len(numbers))
    if sorted(set(numbers)) != list(range(max(numbers, default=-1) + 1)):
        raise rejected("merge_tokens", name, "be numbers from 0, none left out", numbers)
    index = torch.tensor(numbers, device=weights.device)
    return torch.nn.functional.one_hot(index, len(set(numbers))).to(weights.dtype)
