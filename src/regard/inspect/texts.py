"""What was read, token by token, and the image whose patches some tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regard._errors import described, rejected

if TYPE_CHECKING:
    from regard.inspect.layer_record import LayerRecord


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
