"""Words and sentences: normalization and segmentation of text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

# The form in which models read text: composed Unicode, single spaces --------------------------------------------------


def normalize(text: str, lowercase: bool = False) -> str:
    r"""Return text as models read it: composed (Unicode NFC), every run of white space one space, none at the ends.

    Halves of surrogate pairs, which no file in UTF-8 can hold, become U+FFFD.

    Examples
    --------
    >>> normalize(" Cafe\u0301\u202f! \n", lowercase=True)
    'café !'
    """
    if lowercase:
        text = text.lower()
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return " ".join(text.split())


# Words of a text, as readers, links and aligners count them: by their places in it ------------------------------------


#: Scripts written without spaces between words.
_DENSE = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"
#: U+FFFD marks an unknown character, usually a letter.
_LETTER = rf"[[\p{{L}}\p{{M}}\p{{N}}\ufffd]&&[^{_DENSE}]]"
#: A word. In scripts without spaces, each character is one.
_WORDS = Split(
    Regex(rf"{_LETTER}+(?:[-'’.,_]{_LETTER}+)*|[{_DENSE}]\p{{M}}*|[^ \p{{L}}\p{{M}}\p{{N}}]+|\p{{M}}+"),
    "removed",
    invert=True,
)
_RUNS = Split(Regex(rf"[{_DENSE}]{{2,}}"), "removed", invert=True)
_APOSTROPHES = re.compile(r"['’]+")


class Span(NamedTuple):
    """A part of a text: ``text[start:stop]``."""

    start: int
    stop: int


#: Matches the words of a text.
WordFinder = Callable[[str], list[Span]]


def find_words(text: str) -> list[Span]:
    """Return the words of a text, with their apostrophes, and every run of punctuation.

    Examples
    --------
    >>> text = "L'homme dort-il ?"
    >>> [text[word.start : word.stop] for word in find_words(text)]
    ["L'homme", 'dort-il', '?']
    """
    return [Span(*place) for _, place in _WORDS.pre_tokenize_str(text)]


def is_unspaced(text: str) -> bool:
    """Return whether characters of a text count as words because its script, such as Chinese, has no spaces.

    Examples
    --------
    >>> is_unspaced("我是学生。"), is_unspaced("我 是 人"), is_unspaced("I am")
    (True, False, False)
    """
    return bool(_RUNS.pre_tokenize_str(text))


def split_at_spaces(text: str) -> list[Span]:
    """Return the strings between spaces: the words of a tokenized text.

    Examples
    --------
    >>> split_at_spaces("l' homme dort .")
    [Span(start=0, stop=2), Span(start=3, stop=8), Span(start=9, stop=13), Span(start=14, stop=15)]
    """
    return [Span(*match.span()) for match in re.finditer(r"\S+", text)]


def split_elisions(text: str, words: list[Span]) -> tuple[list[Span], list[int]]:
    """Return the parts of words that an aligner uses, split after apostrophes, and the word of each.

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
        if unknown[token] and not any(unknown[token + 1 : token + 2]):  # up to the next known token
            behind = next((later for later in range(token + 1, len(places)) if unknown[later]), len(places))
            known = decoded[stop : places[behind - 1].stop]
            end = text.find(known, end) if known and behind < len(places) else len(text) - len(known)
        spans.append(Span(at, max(end, at)))
        at = spans[-1].stop
    return text, spans


# Sentences of a text, by rules that know abbreviations, initials, numbers and quotes ----------------------------------


#: The value of a model's ``about["lines"]`` if it was trained on lines of several sentences.
PARAGRAPHS = "paragraphs"
#: Ends of sentences in Chinese and Japanese, which no white space follows.
DENSE = "\u3002\uff01\uff1f\uff0e"
_CLOSING, _OPENING = (
    "\"'\u201d\u2019\u00bb\u201c)]\u300d\u300f\uff09",
    "\"'\u201c\u2018\u00ab\u201e([\u00bf\u00a1\u300c\u300e",
)
_ENDING = ".!?\u2026\u203d\u061f\u06d4\u0964\u0965"
#: Ends of sentences, with closing quotes and brackets.
_MARK = re.compile(
    rf"(?<![{_ENDING}])[{_ENDING}]++[{re.escape(_CLOSING)}]*+(?: \u00bb)?(?= )|[{DENSE}]++[{re.escape(_CLOSING)}]*+"
)
_ANY_LETTER = re.compile(r"[^\W\d_]")
#: The beginning of a name that starts with a small letter: iPhone, max_length.
_SMALL_NAME = re.compile(r"[^\W\d_]+?[A-Z_]")
_DOTTED = re.compile(r"[^\W\d_]{1,2}\.[^\W\d_]{1,2}")
_INITIALS = re.compile(r"[^\W\d_](?:\.[^\W\d_])+")
#: Abbreviations before names, before numbers, inside sentences, and those that may also end a sentence.
_TITLES = {
    "Mr", "Mrs", "Ms", "Dr", "Prof", "St", "Ste", "Gen", "Col", "Sgt", "Capt", "Cpl", "Maj", "Lt", "Adm", "Rev", "Hon",
    "Pres", "Gov", "Sen", "Rep", "Messrs", "M", "Mme", "Mmes", "Mlle", "Mlles", "MM", "Mgr", "Pr", "Hr", "Fr", "Frl",
    "Sr", "Sra", "Srta", "Ud", "Uds", "Sig", "Dott",
}  # fmt: skip
_NUMBERED = {
    "no", "nos", "nr", "p", "pp", "vol", "fig", "figs", "ch", "chap", "sec", "art", "par", "eq", "jan", "feb", "mar",
    "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec", "janv", "févr", "avr", "juil", "déc",
}  # fmt: skip
_MEDIAL = {"vs", "cf", "ca", "av", "approx", "bzw", "viz", "resp", "incl", "excl"}
_FINAL = {"etc", "usw", "inc", "ltd", "co", "corp", "jr", "al", "dept", "est", "a.m", "p.m"}


def sentences(text: str) -> list[str]:
    """Return the sentences of a text in order, with white space normalized.

    A sentence ends at ``. ! ? …`` and their like before a space, and at the full-width marks of Chinese and Japanese.
    It does not end

    - after an abbreviation (``Mr.``, ``e.g.``, ``No.`` before a number), an initial, or letters with dots (``U.S.``);
    - after a full stop before a lowercase letter (``Ph.D. in physics``), unless a name such as ``iPhone`` follows, or
      the sentence itself begins with a small letter, as in text without capitals;
    - after an ellipsis before a lowercase letter;
    - after ``!`` or ``?`` in closing quotes, unless others open (``"Why?" Tom asked.``);
    - while it has no letter (``1.``).

    The rules are the same for all languages, and no list of abbreviations is complete. A wrong split never loses text.

    Examples
    --------
    >>> sentences("Mr. Smith paid 3.50 at 5 p.m. for it... again. Why? I don't know.")
    ['Mr. Smith paid 3.50 at 5 p.m. for it... again.', 'Why?', "I don't know."]
    >>> sentences('"Who?" Tom asked. "Me!" "No."')
    ['"Who?" Tom asked.', '"Me!"', '"No."']
    """
    text = normalize(text)
    letters = [match.start() for match in (_ANY_LETTER.search(text),) if match]
    parts: list[str] = []
    first, last = 0, _last_letter(text)
    for mark in _MARK.finditer(text):
        if letters and letters[0] < mark.start() and mark.end() <= last and _ends(text, first, letters[0], mark):
            parts.append(text[first : mark.end()])
            first = mark.end() + (text[mark.end()] == " ")
            letters = [match.start() for match in (_ANY_LETTER.search(text, first),) if match]
    return [*parts, text[first:]]


def _last_letter(text: str) -> int:
    return next((place for place in range(len(text) - 1, -1, -1) if _ANY_LETTER.match(text[place])), -1)


def _ends(text: str, first: int, letter: int, mark: re.Match[str]) -> bool:
    """Return whether a sentence ends at a mark that letters follow, from ``letter`` on."""
    signs = mark[0].rstrip(_CLOSING + " ")
    closes, following = len(signs) < len(mark[0]), text[mark.end() : mark.end() + 2].lstrip()[0]
    if closes and signs[-1] != ".":
        return following in _OPENING
    if signs != ".":
        return signs[-1] in "!?" or (following not in _CLOSING and not following.islower())
    if closes:
        return not following.islower()
    begin = max(text.rfind(" ", first, mark.start()) + 1, first)
    word = text[begin : mark.start()].lstrip(_OPENING)
    lower = following.islower() and not _SMALL_NAME.match(text, mark.end() + 1)
    if lower and (text[letter].isupper() or _DOTTED.fullmatch(word) or word.title() in _TITLES):
        return False
    if word in _TITLES or word.lower() in _MEDIAL:
        return False
    if word.lower() in _NUMBERED:
        return not following.isdigit()
    if word.lower() in _FINAL:
        return not lower
    if len(word) == 1 and word.isalpha() and word != "I":  # an initial, or as in "z. B."; but a unit in "17 h."
        before = max(text.rfind(" ", first, max(begin - 1, first)) + 1, first)
        return before < begin and (text[begin - 2].isdigit() or (word.isupper() and text[before].islower()))
    return not _INITIALS.fullmatch(word)
