"""Words that a vocabulary cannot spell: what stands for them in a text that was written.

Dimensions: T target tokens, S source tokens.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from regard.text.normalization import normalize
from regard.text.vocabulary import UNKNOWN, Codec, Word


def whole_words(codec: Codec, text: str, tokens: int) -> list[str]:
    """Return the word of a text itself in which each of its tokens stands, punctuation around it apart."""
    text = normalize(text, codec.lowercase)
    words = [(word, len(codec.encode(word))) for word in text.split()]
    found = [word for word, tokens in words for _ in range(tokens)]
    found = list(text) if len(found) < tokens else found  # spaces are tokens, too: each character is
    signs = "".join(sign for sign in set(text) if unicodedata.category(sign).startswith("P"))
    return [word.strip(signs) or word for word in found]


def spelled(codec: Codec, text: str, numbers: Sequence[int]) -> list[Word]:
    """Return the words of a text's numbers; those that are not wholly known are as the text has them."""
    words = codec.words(numbers)
    if UNKNOWN not in numbers:
        return words
    whole = whole_words(codec, text, len(numbers))
    unknown = [UNKNOWN in numbers[word.tokens.start : word.tokens.stop] for word in words]
    return [replace(word, text=whole[word.tokens.start]) if new else word for word, new in zip(words, unknown)]


def replaced(
    codec: Codec, numbers: Sequence[int], words: Sequence[Word], whole: Sequence[str], alignment: Tensor
) -> tuple[str, list[Word]]:
    """Return a text and its words, of which those that are not wholly known become the source words looked at.

    Parameters
    ----------
    codec : Codec
    numbers : sequence of int (T,)
    words : sequence of Word
        Which of them make up words.
    whole : sequence of str (S,)
        The word of the source in which each of its tokens stands.
    alignment : Tensor (T, S)
    """
    most = alignment.argmax(-1).tolist()  # (T,)
    known: list[int] = []
    found, replacements = [], []
    for word in words:
        own = list(numbers[word.tokens.start : word.tokens.stop])
        if UNKNOWN in own:
            word = replace(word, text=whole[most[word.tokens.start + own.index(UNKNOWN)]])
            replacements.append(" " * codec.tokens(own[:1])[0].startswith("▁") + word.text)
            own = [UNKNOWN]
        known += own
        found.append(word)
    return codec.decode(known, replacements), found
