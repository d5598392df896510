"""Replace words that a vocabulary cannot spell, by the source words that were attended to.

Dimensions: T target tokens, S source tokens.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from regard_lab.text.normalization import normalize
from regard_lab.text.vocabulary import UNKNOWN, Vocabulary, Word


def words_of_tokens(vocabulary: Vocabulary, text: str, tokens: int) -> list[str]:
    """Return the word of a text itself in which each of its tokens stands, punctuation around it apart."""
    text = normalize(text, vocabulary.lowercase)
    words = [(word, len(vocabulary.encode(word))) for word in text.split()]
    words_of = [word for word, tokens in words for _ in range(tokens)]
    words_of = list(text) if len(words_of) < tokens else words_of  # spaces are tokens, too: each character is
    signs = "".join(sign for sign in set(text) if unicodedata.category(sign).startswith("P"))
    return [word.strip(signs) or word for word in words_of]


def restore_words(vocabulary: Vocabulary, text: str, numbers: Sequence[int]) -> list[Word]:
    """Return the words of a text's numbers; those that are not wholly known are as the text has them."""
    words = vocabulary.words(numbers)
    if UNKNOWN not in numbers:
        return words
    whole = words_of_tokens(vocabulary, text, len(numbers))
    unknown = [UNKNOWN in numbers[word.tokens.start : word.tokens.stop] for word in words]
    return [replace(word, text=whole[word.tokens.start]) if new else word for word, new in zip(words, unknown)]


def replace_unknown(
    vocabulary: Vocabulary, numbers: Sequence[int], words: Sequence[Word], whole: Sequence[str], alignment: Tensor
) -> tuple[str, list[Word]]:
    """Return a text and its words, of which those that are not wholly known become the source words looked at.

    Parameters
    ----------
    vocabulary : Vocabulary
    numbers : sequence of int (T,)
    words : sequence of Word
        Which of them make up words.
    whole : sequence of str (S,)
        The word of the source in which each of its tokens stands.
    alignment : Tensor (T, S)
    """
    most = alignment.argmax(-1).tolist()  # (T,)
    known: list[int] = []
    replaced, replacements = [], []
    for word in words:
        own = list(numbers[word.tokens.start : word.tokens.stop])
        if UNKNOWN in own:
            word = replace(word, text=whole[most[word.tokens.start + own.index(UNKNOWN)]])
            replacements.append(" " * vocabulary.tokens(own[:1])[0].startswith("▁") + word.text)
            own = [UNKNOWN]
        known += own
        replaced.append(word)
    return vocabulary.decode(known, replacements), replaced
