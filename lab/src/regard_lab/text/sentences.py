"""Sentences of a text, by rules that know abbreviations, initials, numbers and quotes."""

from __future__ import annotations

import re

from regard_lab.text.normalization import normalize

#: What a model's ``about["lines"]`` says where it learned from lines of several sentences.
PARAGRAPHS = "paragraphs"
#: Ends of sentences in Chinese and Japanese, where no white space stands behind them.
DENSE = "\u3002\uff01\uff1f\uff0e"
_CLOSING, _OPENING = (
    "\"'\u201d\u2019\u00bb\u201c)]\u300d\u300f\uff09",
    "\"'\u201c\u2018\u00ab\u201e([\u00bf\u00a1\u300c\u300e",
)
_ENDING = ".!?\u2026\u203d\u061f\u06d4\u0964\u0965"
#: What may end a sentence, with the quotes and brackets that close behind it.
_MARK = re.compile(
    rf"(?<![{_ENDING}])[{_ENDING}]++[{re.escape(_CLOSING)}]*+(?: \u00bb)?(?= )|[{DENSE}]++[{re.escape(_CLOSING)}]*+"
)
_LETTER = re.compile(r"[^\W\d_]")
_INITIALS = re.compile(r"[^\W\d_](?:\.[^\W\d_])+")
#: Abbreviations before names; those before numbers; those in the middle; and those that may also end a sentence.
_TITLES = {
    "Mr", "Mrs", "Ms", "Dr", "Prof", "St", "Gen", "Col", "Sgt", "Capt", "Lt", "Rev", "Hon", "Pres", "Gov", "Sen", "Rep",
    "Mme", "Mmes", "Mlle", "Mlles", "MM", "Mgr", "Hr", "Fr", "Frl", "Sr", "Sra", "Srta", "Ud", "Uds", "Sig", "Dott",
}  # fmt: skip
_NUMBERED = {"no", "nos", "nr", "p", "pp", "vol", "fig", "ch", "sec", "art", "eq"}
_MEDIAL = {"vs", "cf", "ca", "approx", "bzw", "viz"}
_FINAL = {"etc", "usw", "inc", "ltd", "co", "corp", "jr", "al", "dept", "est", "a.m", "p.m"}


def sentences(text: str) -> list[str]:
    """Return the sentences of a text in order, its white space normalized.

    A sentence ends at ``. ! ? …`` and their like before a space, and at the full-width marks of Chinese and Japanese.
    It goes on

    - behind an abbreviation (``Mr.``, ``e.g.``, ``No.`` before a number), an initial, or letters with dots (``U.S.``);
    - behind an ellipsis before a small letter;
    - behind ``!`` or ``?`` in quotes that close, unless others open (``"Why?" Tom asked.``);
    - as long as it has no letter (``1.``).

    Languages are not told apart and no list of abbreviations is complete: where a sentence is cut at one, all of it is
    there still, in two parts.

    Examples
    --------
    >>> sentences("Mr. Smith paid 3.50 at 5 p.m. for it... again. Why? I don't know.")
    ['Mr. Smith paid 3.50 at 5 p.m. for it... again.', 'Why?', "I don't know."]
    >>> sentences('"Who?" Tom asked. "Me!" "No."')
    ['"Who?" Tom asked.', '"Me!"', '"No."']
    """
    text = normalize(text)
    letters = [match.start() for match in (_LETTER.search(text),) if match]
    parts: list[str] = []
    first, last = 0, _last_letter(text)
    for mark in _MARK.finditer(text):
        if letters and letters[0] < mark.start() and mark.end() <= last and _ends(text, first, mark):
            parts.append(text[first : mark.end()])
            first = mark.end() + (text[mark.end()] == " ")
            letters = [match.start() for match in (_LETTER.search(text, first),) if match]
    return [*parts, text[first:]]


def _last_letter(text: str) -> int:
    return next((place for place in range(len(text) - 1, -1, -1) if _LETTER.match(text[place])), -1)


def _ends(text: str, first: int, mark: re.Match[str]) -> bool:
    """Return whether the sentence that begins at ``first`` ends at a mark, behind which there are letters."""
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
    if word in _TITLES or word.lower() in _MEDIAL:
        return False
    if word.lower() in _NUMBERED:
        return not following.isdigit()
    if word.lower() in _FINAL:
        return not following.islower()
    if len(word) == 1 and word.isalpha() and word != "I":  # of a name, or as in "z. B."
        before = max(text.rfind(" ", first, max(begin - 1, first)) + 1, first)
        return word.isupper() and before < begin and text[before].islower()
    return not _INITIALS.fullmatch(word)
