"""The texts and images that a model reads, as tokens, and the words that tokens form."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from regard._utils.errors import described, rejected, shape, unknown_name

if TYPE_CHECKING:
    from regard.inspect._record.layer_record import LayerRecord


# Tokens of a text, and the image whose patches some of them are -------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """The part of an image that a token shows.

    Attributes
    ----------
    token : int
        The position of the token.
    x, y, width, height : float
        A rectangle in pixels of the image, from its top left corner.
    """

    token: int
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Patches:
    """An image, or a part of one, that is cut into patches, one token each.

    Attributes
    ----------
    image : bytes
        The contents of an image file: PNG, JPEG, WebP or GIF.
    rows, cols : int
        The rows and columns of the grid of patches.
    first : int
        The position of the first patch among the tokens; the others follow row by row.
    step : int, optional
        Tokens from the first patch of a row to the first patch of the next; ``cols`` by default. Larger where other
        tokens, such as line breaks, stand between rows.
    box : tuple of 4 float, optional
        The part of the image that the grid covers: x, y, width and height in pixels. The whole image by default. What
        lies outside the image is padding.
    name : str
        What pages call the image; several grids of one image, such as tiles, share its name.
    seconds : float, optional
        The time of a frame of a video.

    Examples
    --------
    >>> import io, PIL.Image
    >>> file = io.BytesIO()
    >>> PIL.Image.new("RGB", (60, 40)).save(file, "PNG")
    >>> [(place.token, place.x, place.width) for place in Patches(file.getvalue(), 1, 3, first=5).places()]
    [(5, 0.0, 20.0), (6, 20.0, 20.0), (7, 40.0, 20.0)]
    """

    image: bytes
    rows: int
    cols: int
    first: int = 0
    step: int | None = None
    box: tuple[float, float, float, float] | None = None
    name: str = ""
    seconds: float | None = None

    def __post_init__(self) -> None:
        if min(self.rows, self.cols) < 1 or self.first < 0:
            got = f"{self.rows} × {self.cols} from {self.first}"
            raise rejected("Patches", "rows and cols", "be at least 1, and first at least 0", got)
        if self.media_type is None:
            raise rejected("Patches", "image", "be a file of PNG, JPEG, WebP or GIF", f"{self.image[:8]!r}")
        if self.step is not None and self.step < self.cols:
            raise rejected("Patches", "step", f"be at least {self.cols}, the number of columns", self.step)
        if self.box is not None:
            object.__setattr__(self, "box", tuple(map(float, self.box)))
            if len(self.box) != 4 or not all(map(math.isfinite, self.box)) or min(self.box[2:]) <= 0:
                raise rejected("Patches", "box", "be x, y, width and height, the latter above 0", self.box)

    @property
    def media_type(self) -> str | None:
        """The media type of the image, from the first bytes of its file."""
        begins = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif"}
        if self.image[:4] == b"RIFF" and self.image[8:12] == b"WEBP":
            return "image/webp"
        return next((f"image/{kind}" for start, kind in begins.items() if self.image.startswith(start)), None)

    @property
    def size(self) -> tuple[int, int]:
        """The width and height of the image in pixels, from the header of its file.

        Raises
        ------
        ValueError
            If the header is cut short.
        """
        found = _size_of(self.image)
        if found is None or min(found) < 1:
            raise rejected("Patches", "image", "be a file with a width and a height", "a damaged one")
        return found

    @property
    def end(self) -> int:
        """The position after the last patch."""
        return self.first + (self.rows - 1) * (self.step or self.cols) + self.cols

    def places(self) -> Iterator[Place]:
        """Yield the place of each token that shows something of the image, without what is padding."""
        width, height = self.size
        x, y, w, h = self.box or (0.0, 0.0, float(width), float(height))
        w, h, step = w / self.cols, h / self.rows, self.step or self.cols
        for row in range(self.rows):
            for col in range(self.cols):
                left, top = max(x + col * w, 0.0), max(y + row * h, 0.0)
                right, bottom = min(x + (col + 1) * w, float(width)), min(y + (row + 1) * h, float(height))
                if left < right and top < bottom:
                    yield Place(self.first + row * step + col, left, top, right - left, bottom - top)


def _size_of(image: bytes) -> tuple[int, int] | None:
    """Return the width and height in the header of an image file; None if it is cut short."""

    def number(at: int, count: int, order: Literal["big", "little"]) -> int:
        return int.from_bytes(image[at : at + count], order) if at + count <= len(image) else 0

    if image.startswith(b"\x89PNG"):
        return number(16, 4, "big"), number(20, 4, "big")
    if image.startswith(b"GIF8"):
        return number(6, 2, "little"), number(8, 2, "little")
    if image.startswith(b"RIFF"):
        if image[12:16] == b"VP8X":
            return number(24, 3, "little") + 1, number(27, 3, "little") + 1
        if image[12:16] == b"VP8L":
            bits = number(21, 4, "little")
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        return number(26, 2, "little") & 0x3FFF, number(28, 2, "little") & 0x3FFF
    at = 2  # JPEG: segments of 2 bytes of a marker and 2 bytes of a length, until a frame's header
    while at + 9 <= len(image) and image[at] == 0xFF:
        marker = image[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return number(at + 7, 2, "big"), number(at + 5, 2, "big")
        at += 1 if marker == 0xFF else 2 + number(at + 2, 2, "big")
    return None


@dataclass(frozen=True)
class Text:
    """A sequence that a model read or wrote.

    Attributes
    ----------
    tokens : tuple of str
        One string for each token of the sequence.
    special : tuple of int
        The positions of special tokens, such as ``[CLS]``.
    patches : tuple of Patches
        The images, tiles and frames whose patches some tokens are; one of them or none may be given, too.
    seconds : tuple of (float, float) or None
        When each token of a recording begins and ends; None for other tokens, and empty without a recording.

    Examples
    --------
    >>> Text(("[CLS]", "a", "cat"), special=(0,)).tokens[1:]
    ('a', 'cat')
    """

    tokens: tuple[str, ...]
    special: tuple[int, ...] = ()
    patches: tuple[Patches, ...] = ()
    seconds: tuple[tuple[float, float] | None, ...] = ()

    def __init__(
        self, tokens: Sequence[str], special: Sequence[int] = (), patches: Patches | Sequence[Patches] | None = (),
        seconds: Sequence[tuple[float, float] | None] = (),
    ) -> None:  # fmt: skip
        if isinstance(tokens, str) or not all(isinstance(each, str) for each in tokens):
            raise rejected("Text", "tokens", "be a sequence of str", described(tokens), TypeError)
        grids = (patches,) if isinstance(patches, Patches) else tuple(patches or ())
        given = {"tokens": tuple(tokens), "special": tuple(special), "patches": grids, "seconds": tuple(seconds)}
        for name, value in given.items():
            object.__setattr__(self, name, value)
        if any(not 0 <= each < len(self.tokens) for each in self.special):
            raise rejected("Text", "special", f"be below {len(self.tokens)}, the number of tokens", self.special)
        for each in self.patches:
            if each.end > len(self.tokens):
                raise rejected("Text", "patches", f"end by token {len(self.tokens)}", each.end)
        if self.seconds and len(self.seconds) != len(self.tokens):
            raise rejected("Text", "seconds", f"be {len(self.tokens)}, one for each token", len(self.seconds))

    def last(self, count: int) -> Text:
        """Return its last tokens, with the images that they hold whole."""
        first = len(self.tokens) - count
        special = tuple(each - first for each in self.special if each >= first)
        patches = tuple(replace(each, first=each.first - first) for each in self.patches if each.first >= first)
        return Text(self.tokens[first:], special, patches, self.seconds[first:])


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
        return texts[0].last(L), texts[0]
    reader, read = texts[-1], texts[0]
    if run.kind != "cross" and len(reader.tokens) != len(read.tokens):
        reader = read = reader if len(reader.tokens) == S else read
    elif run.kind != "cross":
        reader = read = reader if "decoder" in run.name.lower() else read
    if run.skipped and len(reader.tokens) == L + run.skipped:
        reader = reader.last(L)
    for text, size, which in ((reader, L, "rows"), (read, S, "columns")):
        if len(text.tokens) != size:
            counts = " and ".join(str(len(each.tokens)) for each in texts)
            expected = f"have as many tokens as {run.name or 'the layer'} has {which}, {size}"
            raise rejected("record", "texts", expected, counts)
    return reader, read


# Merge the tokens of each word, and their attention -------------------------------------------------------------------
# Dimensions: L queries, S keys, M and N words.


#: Special tokens: [CLS], <s>, <|endoftext|>, ...; but <0xE2> is a byte of text.
SPECIAL = re.compile(r"\[[A-Z][A-Z0-9_]*\]|<(?!0x[0-9A-F]{2}>)[^<>\s]+>")
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
        special = bool(SPECIAL.fullmatch(token))
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
