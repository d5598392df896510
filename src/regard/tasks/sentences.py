"""Lines of several sentences, for models that learned single ones: taken apart, and what was written put together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from regard.tasks.codecs import Word
from regard.tasks.pairs import normalize
from regard.tasks.written import Written

#: What a model's ``about["lines"]`` says where it learned from lines of several sentences.
PARAGRAPHS = "paragraphs"
#: Ends of sentences in Chinese and Japanese, where no white space stands behind them.
_DENSE = "\u3002\uff01\uff1f\uff0e"
_CLOSING, _OPENING = (
    "\"'\u201d\u2019\u00bb\u201c)]\u300d\u300f\uff09",
    "\"'\u201c\u2018\u00ab\u201e([\u00bf\u00a1\u300c\u300e",
)
_ENDING = ".!?\u2026\u203d\u061f\u06d4\u0964\u0965"
#: What may end a sentence, with the quotes and brackets that close behind it.
_MARK = re.compile(
    rf"(?<![{_ENDING}])[{_ENDING}]++[{re.escape(_CLOSING)}]*+(?: \u00bb)?(?= )|[{_DENSE}]++[{re.escape(_CLOSING)}]*+"
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
    found: list[str] = []
    first, last = 0, _last_letter(text)
    for mark in _MARK.finditer(text):
        if letters and letters[0] < mark.start() and mark.end() <= last and _ends(text, first, mark):
            found.append(text[first : mark.end()])
            first = mark.end() + (text[mark.end()] == " ")
            letters = [match.start() for match in (_LETTER.search(text, first),) if match]
    return [*found, text[first:]]


def joined(line: str, parts: Sequence[Written], count: int = 1, *, ranked: bool = True) -> Written:
    """Return what was written for the sentences of a line as what was written for the line.

    Texts stand one behind the other, and so do tokens and words; no sentence attends to another. Scores are added up.

    Parameters
    ----------
    line : str
    parts : sequence of Written
        For each sentence; at least one.
    count : int, default 1
        How many texts are wanted, the best and its alternatives: those whose ``normalized`` add up to the most.
    ranked : bool, default True
        Whether alternatives are the next best, which are combined, and not samples, which go together in their order.
    """
    if len(parts) == 1:
        return replace(parts[0], source=line)
    each = [(part, *part.alternatives) for part in parts]
    if not ranked:
        return best_of([_joined(line, sample) for sample in zip(*each)])
    best: list[tuple[Written, ...]] = [()]
    for options in each:
        longer = [(*before, option) for before in best for option in options]
        best = sorted(longer, key=lambda chosen: -sum(part.normalized for part in chosen))[:count]
    return distinct([_joined(line, chosen) for chosen in best], count)


def distinct(written: Sequence[Written], count: int) -> Written:
    """Return the first of these, the next with other texts its alternatives: so many in all at most."""
    kept: dict[str, Written] = {}
    for each in written:
        kept.setdefault(each.text, each)
    return best_of(list(kept.values())[:count])


def best_of(written: Sequence[Written]) -> Written:
    """Return the first of these, the others its alternatives."""
    return replace(written[0], alternatives=tuple(written[1:]))


def _joined(line: str, parts: Sequence[Written]) -> Written:
    text = ""
    for part in parts:
        text += " " * bool(text and part.text and text[-1] not in _DENSE) + part.text
    return Written(
        line,
        text,
        tuple(token for part in parts for token in part.source_tokens),
        tuple(token for part in parts for token in part.tokens),
        sum(part.score for part in parts),
        sum(part.normalized for part in parts),
        maps=parts[0].maps,
        alignment=_diagonal([part.alignment for part in parts if part.alignment is not None]),
        aligning=parts[0].aligning,
        source_words=_behind([(part.source_words, len(part.source_tokens)) for part in parts]),
        words=_behind([(part.words, len(part.tokens)) for part in parts]),
        note="; ".join(dict.fromkeys(part.note for part in parts if part.note)),
    )


def _diagonal(blocks: Sequence[Tensor]) -> Tensor | None:
    """Return blocks (A, T, S) as one of all rows and columns, 0 elsewhere."""
    if not blocks:
        return None
    rows, columns = (sum(block.shape[side] for block in blocks) for side in (1, 2))
    made, row, column = blocks[0].new_zeros(len(blocks[0]), rows, columns), 0, 0
    for block in blocks:
        made[:, row : row + block.shape[1], column : column + block.shape[2]] = block
        row, column = row + block.shape[1], column + block.shape[2]
    return made


def _behind(parts: Sequence[tuple[Sequence[Word], int]]) -> tuple[Word, ...]:
    """Return the words of parts of so many tokens, one behind the other."""
    found: list[Word] = []
    first = 0
    for words, count in parts:
        found += [Word(word.text, range(first + word.tokens.start, first + word.tokens.stop)) for word in words]
        first += count
    return tuple(found)


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
