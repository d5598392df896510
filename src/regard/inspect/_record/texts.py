"""The texts and images that a model reads, as tokens, and the words that tokens form."""

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


# Tokens of a text, and the image whose patches some of them are -------------------------------------------------------


@dataclass(frozen=True)
class Patches:
    """An image that is cut into patches, one token each.

    Attributes
    ----------
    image : bytes
        The contents of an image file: PNG, JPEG, WebP or GIF.
    rows, cols : int
        The rows and columns of the grid of patches.
    first : int
        The position of the first patch among the tokens; the others follow row by row.
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
        """The media type of the image, from the first bytes of its file."""
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
        One string for each token of the sequence.
    special : tuple of int
        The positions of special tokens, such as ``[CLS]``.
    patches : Patches, optional
        The image whose patches some tokens are.

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
            raise rejected("Text", "special", f"be below {len(self.tokens)}, the number of tokens", self.special)
        if self.patches is not None:
            end = self.patches.first + self.patches.rows * self.patches.cols
            if end > len(self.tokens):
                raise rejected("Text", "patches", f"end by token {len(self.tokens)}", end)


def as_texts(given: Sequence[Text | Sequence[str]]) -> tuple[Text, ...]:
    """Return sequences of tokens as texts: one, or the text that was read and the text that was written.

    Raises
    ------
    ValueError
        If there are more than two.
    """
    texts = tuple(each if isinstance(each, Text) else Text(tuple(each)) for each in given)
    if len(texts) > 2:
        raise rejected("record", "texts", "be one text, or the texts read and written", f"{len(texts)} texts")
    return texts


def texts_of(texts: Sequence[Text], run: LayerRecord) -> tuple[Text, Text]:
    """Return the texts of a layer's queries and keys; numbers if there are no texts.

    Raises
    ------
    ValueError
        If no text has as many tokens as the matrix has rows or columns.
    """
    _, _, L, S = run.shape
    if not texts:
        queries, keys = (Text(tuple(map(str, range(size)))) for size in (L, S))
        return (keys, keys) if L == S else (queries, keys)
    if L != S and len(texts) == 1 and len(texts[0].tokens) == S:  # the last tokens of a text, with a cache of the rest
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


# Merge the tokens of each word, and their attention -------------------------------------------------------------------
# Dimensions: L queries, S keys, M and N words.


#: Special tokens: [CLS], <s>, <|endoftext|>, ...; but <0xE2> is a byte of text.
_SPECIAL = re.compile(r"\[[A-Z][A-Z0-9_]*\]|<(?!0x[0-9A-F]{2}>)[^<>\s]+>")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def merge_tokens(weights: Tensor, groups: Sequence[int], key_groups: Sequence[int] | None = None) -> Tensor:
    """Return the weights between words: summed over the keys of a word, averaged over its queries.

    ``merged[m, n] = 1/|m| · Σ_{i ∈ m} Σ_{j ∈ n} weights[i, j]`` (Clark et al. 2019, arXiv 1906.04341). Rows still sum
    to one.

    Parameters
    ----------
    weights : Tensor (..., L, S)
    groups : sequence of L int
        The number of each query's word, from 0 to M − 1, as returned by :func:`words_of`.
    key_groups : sequence of S int, optional
        The same for the keys, if they belong to another sequence.

    Returns
    -------
    Tensor (..., M, N)

    Raises
    ------
    ValueError
        If the number of entries differs from the number of tokens, or a word has no token.

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
    """Return the word that each token belongs to, and the words.

    A special token such as ``[CLS]`` or ``</s>`` is a word by itself. So is punctuation in WordPiece; schemes that only
    mark spaces attach it to the preceding word.

    Parameters
    ----------
    tokens : sequence of str
        The output of a tokenizer.
    scheme : {"wordpiece", "sentencepiece", "byte-level", "subword-nmt", "suffix", "none"}, optional
        How tokens mark word boundaries: ``##`` before a continuation (BERT), ``▁`` for a space (T5, Llama), ``Ġ`` for
        a space byte (GPT-2), ``@@`` after a token that continues (subword-nmt), ``</w>`` after the last token of a word
        (CLIP). By default the first scheme whose mark occurs, in the order suffix, subword-nmt, wordpiece, byte-level,
        sentencepiece; without any mark, each token is a word.

    Returns
    -------
    groups : list of int
        The number of each token's word, from 0.
    words : list of str
        The words, without marks.

    Raises
    ------
    ValueError
        If the scheme is unknown.

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
        scheme = scheme_of(tokens)
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


def scheme_of(tokens: Sequence[str]) -> str:
    """Return how tokens mark word boundaries, as :func:`words_of` names it.

    Examples
    --------
    >>> scheme_of(["un", "##believ", "##able"])
    'wordpiece'
    """
    return next((name for name, marks in _MARKS.items() if any(map(marks, tokens))), "none")


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
    """Return the printable character that stands for each byte in byte-level tokenizers (Radford 2019).

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


#: For each scheme, a function from a token to whether it begins a word, its text, and whether it ends a word.
_PARTS: dict[str, Callable[[str], tuple[bool, bytes, bool]]] = {
    "wordpiece": _wordpiece,
    "sentencepiece": _sentencepiece,
    "byte-level": _byte_level,
    "subword-nmt": _subword_nmt,
    "suffix": _suffix,
    "none": _none,
}
#: How to recognize each scheme, in the order in which they are tried.
_MARKS: dict[str, Callable[[str], bool]] = {
    "suffix": lambda token: token.endswith("</w>"),
    "subword-nmt": lambda token: token.endswith("@@"),
    "wordpiece": lambda token: token.startswith("##"),
    "byte-level": lambda token: token.startswith(("Ġ", "Ċ")),
    "sentencepiece": lambda token: "▁" in token,
}


def _membership(name: str, groups: Sequence[int], weights: Tensor, dim: int) -> Tensor:
    """Return a matrix (tokens, words) with a one where a token belongs to a word."""
    count, numbers = weights.shape[dim], [int(each) for each in groups]
    if len(numbers) != count:
        raise rejected("merge_tokens", name, f"be {count} numbers, one for each token", len(numbers))
    if sorted(set(numbers)) != list(range(max(numbers, default=-1) + 1)):
        raise rejected("merge_tokens", name, "be numbers from 0 without gaps", numbers)
    index = torch.tensor(numbers, device=weights.device)
    return torch.nn.functional.one_hot(index, len(set(numbers))).to(weights.dtype)
