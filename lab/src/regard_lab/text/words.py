"""Words of a text, as readers, links and aligners count them: by their places in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

#: Scripts written without spaces between words.
_DENSE = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"
#: U+FFFD stands for what is unknown: as a rule a letter.
_LETTER = rf"[[\p{{L}}\p{{M}}\p{{N}}\ufffd]&&[^{_DENSE}]]"
#: What a reader calls a word. Of dense scripts each character is one, and tokens that begin at different ones differ.
_WORDS = Split(
    Regex(rf"{_LETTER}+(?:[-'’.,_]{_LETTER}+)*|[{_DENSE}]\p{{M}}*|[^ \p{{L}}\p{{M}}\p{{N}}]+|\p{{M}}+"),
    "removed",
    invert=True,
)
_APOSTROPHES = re.compile(r"['’]+")


class Span(NamedTuple):
    """A part of a text: ``text[start:stop]``."""

    start: int
    stop: int


#: Finds the words of a text.
WordFinder = Callable[[str], list[Span]]


def find_words(text: str) -> list[Span]:
    """Return the words of a text: what a reader calls so, with its apostrophes, and every run of signs.

    Examples
    --------
    >>> text = "L'homme dort-il ?"
    >>> [text[word.start : word.stop] for word in find_words(text)]
    ["L'homme", 'dort-il', '?']
    """
    return [Span(*place) for _, place in _WORDS.pre_tokenize_str(text)]


def split_at_spaces(text: str) -> list[Span]:
    """Return what spaces separate: the words of a text that is tokenized.

    Examples
    --------
    >>> split_at_spaces("l' homme dort .")
    [Span(start=0, stop=2), Span(start=3, stop=8), Span(start=9, stop=13), Span(start=14, stop=15)]
    """
    return [Span(*match.span()) for match in re.finditer(r"\S+", text)]


def split_elisions(text: str, words: list[Span]) -> tuple[list[Span], list[int]]:
    """Return the parts of words that an aligner counts, cut behind apostrophes, and the word that each belongs to.

    What is elided means something of its own: of "l'homme", "l'" goes with "the" and "homme" with "man".

    Examples
    --------
    >>> text = "L'homme dort"
    >>> places, owners = split_elisions(text, find_words(text))
    >>> [text[start:stop] for start, stop in places], owners
    (["L'", 'homme', 'dort'], [0, 0, 1])
    """
    places: list[Span] = []
    owners: list[int] = []
    for number, (start, stop) in enumerate(words):
        for match in _APOSTROPHES.finditer(text, start + 1, stop):
            if match.end() < stop:
                places.append(Span(start, match.end()))
                owners.append(number)
                start = match.end()
        places.append(Span(start, stop))
        owners.append(number)
    return places, owners


def locate_tokens(text: str, decoded: str, places: Sequence[Span], unknown: Sequence[bool]) -> tuple[str, list[Span]]:
    """Return the places in a text of tokens that say it but for unknown ones, which may stand for several characters.

    Parameters
    ----------
    text : str
    decoded : str
        What the tokens say, with one character for each that is unknown. It may begin with a space before the text.
    places : sequence of Span
        Of the tokens, in ``said``.
    unknown : sequence of bool
        Of the tokens.

    Returns
    -------
    (str, list of Span)
        The text, with that space, and the places in it.

    Examples
    --------
    >>> locate_tokens("a ЖЖ", "a ?", [Span(0, 2), Span(2, 3)], [False, True])[1]
    [Span(start=0, stop=2), Span(start=2, stop=4)]
    """
    text = " " * decoded.startswith(" ") + text
    spans: list[Span] = []
    at = 0
    for token, (start, stop) in enumerate(places):
        end = at + stop - start
        if unknown[token] and not any(unknown[token + 1 : token + 2]):  # up to what is known behind it
            behind = next((later for later in range(token + 1, len(places)) if unknown[later]), len(places))
            known = decoded[stop : places[behind - 1].stop]
            end = text.find(known, end) if known and behind < len(places) else len(text) - len(known)
        spans.append(Span(at, max(end, at)))
        at = spans[-1].stop
    return text, spans
