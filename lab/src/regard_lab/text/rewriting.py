"""Texts as translation models read and write them: one typography, marks for capitals, placeholders for copies.

A small model wastes much of its vocabulary on capitals and on curly quotes, and cannot spell what it never saw. With a
:class:`Rewriting`, it reads and writes small letters behind marks of case (as in Etchegoyhen & Gete 2020, LREC), one
form of each quote and dash, English contractions with their apostrophe, and a placeholder for every number, name,
address or sign that is only copied (as in Luong et al. 2015, arXiv 1410.8206, there for unknown words). What it wrote
is restored, with the places of each character, so that alignments are of the texts that users see.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from regard._utils.errors import rejected
from regard_lab.models.folders import ModelFileError
from regard_lab.text.vocabulary import MARKS
from regard_lab.text.words import Span, normalize

# Marks and placeholders: characters of Unicode's private use area -----------------------------------------------------


#: Marks: the next letter is a capital; all letters of the next word are capitals.
CAPITAL, CAPITALS = map(chr, MARKS[:2])
#: Maximum number of placeholders of each kind in a text; further parts are not replaced.
PLACES = 8
_KINDS = ("number", "name", "other")
_FIRST = {kind: MARKS[16 * (i + 1)] for i, kind in enumerate(_KINDS)}
_PLACEHOLDERS = {chr(first + i): (kind, i) for kind, first in _FIRST.items() for i in range(PLACES)}
#: How pictures show the marks.
_SHOWN = {CAPITAL: "⇧", CAPITALS: "⇪"}


def is_placeholder(text: str) -> bool:
    """Return whether a text is a placeholder character."""
    return text in _PLACEHOLDERS


# What is copied -------------------------------------------------------------------------------------------------------


_EMOJI = "\u2190-\u21ff\u2300-\u23ff\u2460-\u27bf\u2900-\u297f\u2b00-\u2bff\U0001f000-\U0001faff"
_COPIED = "|".join(
    (
        r"`[^`]+`",  # code
        r"(?:https?|ftp)://[^\s<>\"'«»]*[^\s<>\"'«».,;:!?)\]}]|www\.[\w-]+\.[^\s<>\"'«»]*[\w/]",
        r"(?<![\w.+-])[\w.+-]*\w@\w[\w-]*(?:\.[\w-]*\w)+",  # e-mail addresses
        r"(?<![\w-])\w[\w-]*\.(?:com|org|net|edu|gov|info|io|fr|uk|de|eu|ca)\b(?:/[\w./?=&%#-]*[\w/])?",
        r"<!--.{0,500}?-->|</?[A-Za-z][^<>]{0,500}>|&(?:[a-z]+|\#\d+);",  # tags
        r"\{\{.{0,100}?\}\}|\$?\{[^{}\s]{1,40}\}|%\(\w+\)[sd]|(?<!\w)%\d?\$?[sd]\b|\[\[[^\[\]]*\]\]",  # variables
        r"(?<!\w)[@#][^\W\d_]\w*",  # mentions and hashtags
        r"\b\w+(?:_\w+)+\b|\b_\w+|(?<![\w-])\w[\w-]*\.(?:py|txt|csv|json|html|xml|js|md|pdf|jpg|png|zip|exe|sh|toml|yml)\b",
        r"(?<![\w.])(?:~|\.{0,2})/[\w.-]+(?:/[\w.-]+)*/?|(?<!\w)--\w[\w-]*",  # paths and options
        r"\b\d+(?:\.\d+){2,}\b|(?<![\w-])\+?\d{2,}(?:-\d{2,})+(?![\w-])",  # versions, telephone numbers, dates
        rf"[{_EMOJI}](?:[\ufe0e\ufe0f\u200d\U0001f3fb-\U0001f3ff]|(?<=\u200d)[{_EMOJI}])*",
        r"(?<!\w)(?:[:;]-?[)(DP]|<3)(?!\w)",  # emoticons
    )
)
_NUMBER = r"(?<![\w.,])\d+(?:[.,]\d+)*(?!\d)"
#: A word with its apostrophes, or with digits in it, as in H1N1.
_LETTERS = r"[^\W\d_]+(?:['’ʼ‘][^\W\d_]+)*(?:\d\w*)?"
_PARTS = re.compile(rf"(?P<copied>{_COPIED})|(?P<number>{_NUMBER})|(?P<word>{_LETTERS})|(?P<sign>.)", re.DOTALL)
_RUN = re.compile(r"[^\W\d_]+")
_OWNER = re.compile(r"(.+)['’ʼ‘]s")


@dataclass(frozen=True)
class Typography:
    """How a language writes numbers, quotes, and spaces next to signs.

    Attributes
    ----------
    thousands, point : str
        What separates groups of three digits, and decimals.
    quotes : (str, str) or None
        Opening and closing quotes with spaces inside; None for quotes without spaces.
    narrow_before : tuple of str
        Signs with a narrow no-break space before them.
    no_break_before, no_break_after : tuple of str
        Signs with a no-break space before or after them.
    """

    thousands: str = ""
    point: str = "."
    quotes: tuple[str, str] | None = None
    narrow_before: tuple[str, ...] = ()
    no_break_before: tuple[str, ...] = ()
    no_break_after: tuple[str, ...] = ()


_PLAIN = Typography()
#: By language code. Other languages are written as :data:`_PLAIN`, and their numbers are not rewritten.
_TYPOGRAPHY = {
    "en": Typography(","),
    "fr": Typography(" ", ",", ("«", "»"), (";", "!", "?"), (":", "»", "%"), ("«",)),
}
_NUMBERS = {
    language: re.compile(
        rf"(?<![\w.,])(?:\d{{1,3}}(?:{re.escape(form.thousands)}\d{{3}})+|\d+)(?:{re.escape(form.point)}\d+)?"
        r"(?![.,]?\d)"
    )
    for language, form in _TYPOGRAPHY.items()
}

# Typography -----------------------------------------------------------------------------------------------------------


_SAME = {
    "\u2018": "'", "\u2019": "'", "\u02bc": "'", "\u201b": "'", "\u2032": "'", "\uff07": "'",
    "\u201a": ",", "\u2010": "-", "\u2011": "-", "\u2012": "-", "\u2013": "-", "\u2014": "-", "\u2015": "-",
    "\u2212": "-", "\u2026": "...", "\u00ad": "", "\u200b": "", "\u200c": "", "\u200d": "", "\u2060": "", "\ufeff": "",
    "\u2022": "-", "\u00ba": "°",
}  # fmt: skip
_QUOTES = '"\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb\u2039\u203a'
_LIGATURES = {chr(code): unicodedata.normalize("NFKC", chr(code)) for code in range(0xFB00, 0xFB07)}
_FULL_WIDTH = {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
_FORMS = _LIGATURES | _FULL_WIDTH | _SAME
#: Signs of a typographic text.
_TYPOGRAPHIC = re.compile("[\u2018\u2019\u201c\u201d\u2026\u00ab\u00bb]")


def uniform(text: str, language: str = "") -> str:
    r"""Return a text with one form of each apostrophe, dash, ellipsis, and quote, which depends on the language.

    Examples
    --------
    >>> uniform("“Don’t…” – he said")
    '"Don\'t..." - he said'
    >>> uniform('"Oui" !', "fr")
    '« Oui » !'
    """
    return "".join(part for part, _ in _uniform(text, language))


def _uniform(text: str, language: str) -> Iterator[tuple[str, int]]:
    """Yield the replacement of each character of a text, with its position."""
    quotes, opens = _TYPOGRAPHY.get(language, _PLAIN).quotes, True
    for place, letter in enumerate(text):
        if letter in _QUOTES:
            if quotes is None:
                yield '"', place
                continue
            opening = letter in "\u201c\u201e\u00ab\u2039" or (letter not in "\u201d\u00bb\u203a" and opens)
            before, behind = text[place - 1 : place], text[place + 1 : place + 2]
            yield (quotes[0] + " " * (behind != " ") if opening else " " * (before != " ") + quotes[1]), place
            opens = not opening
        else:
            yield _FORMS.get(letter, letter), place


# The rewriting of a model ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copy:
    """A part of a text that its translation copies.

    Attributes
    ----------
    kind : {"number", "name", "other"}
    text : str
        As the source has it.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Placed:
    """A text derived from another one, with the correspondence of positions.

    Attributes
    ----------
    text : str
    starts : tuple of int
        Where the parts begin that the text is made of.
    spans : tuple of Span
        What each of them stands for in the other text.
    """

    text: str
    starts: tuple[int, ...]
    spans: tuple[Span, ...]

    @classmethod
    def joined(cls, parts: Iterable[tuple[str, int, int]]) -> Self:
        """Return the text made of parts, each with the span of the other text that it stands for."""
        starts: list[int] = []
        spans: list[Span] = []
        texts: list[str] = []
        at = 0
        for text, start, stop in parts:
            if text or spans:
                starts.append(at)
                spans.append(Span(start, stop))
                texts.append(text)
                at += len(text)
        return cls("".join(texts), tuple(starts), tuple(spans))

    def origin(self, start: int, stop: int) -> Span:
        """Return the span of the other text that ``text[start:stop]`` stands for."""
        if not self.starts:
            return Span(0, 0)
        first = max(bisect_right(self.starts, start) - 1, 0)
        last = max(bisect_right(self.starts, max(stop - 1, start)) - 1, first)
        return Span(self.spans[first].start, self.spans[last].stop)

    def image(self, start: int, stop: int) -> Span:
        """Return the span of ``text`` that stands for ``[start, stop)`` of the other text, whose parts are in order."""
        if not self.starts:
            return Span(0, 0)
        first = min(bisect_right(self.spans, start, key=lambda span: span.stop), len(self.starts) - 1)
        behind = bisect_left(self.spans, stop, key=lambda span: span.start)
        begin = self.starts[first]
        end = self.starts[behind] if behind < len(self.starts) else len(self.text)
        return Span(begin, max(begin, end))


@dataclass(frozen=True)
class Rewritten:
    """A source as a model reads it.

    Attributes
    ----------
    placed : Placed
        The rewritten text, and what it stands for in the normalized source.
    copies : mapping of str to Copy
        What each placeholder stands for.
    typographic : bool
        Whether the source has typographic quotes or apostrophes.
    capitals : bool
        Whether the source is all in capitals: it is read in small letters, and its translation is written in capitals.
    """

    placed: Placed
    copies: Mapping[str, Copy] = field(default_factory=dict)
    typographic: bool = False
    capitals: bool = False

    def is_glued(self, text: str, before: str, behind: str) -> bool:
        """Return whether a text is a space next to a tag that the source does not have."""
        if text != " ":
            return False
        opening, closing = self.copies.get(before), self.copies.get(behind)
        if opening is not None and opening.text.startswith("<") and not opening.text.startswith("</"):
            return f"{before} " not in self.placed.text
        return closing is not None and closing.text.startswith("</") and f" {behind}" not in self.placed.text


@dataclass(frozen=True)
class Rewriting:
    r"""How a model's texts are rewritten before it reads them, and what it writes is restored.

    Parameters
    ----------
    languages : (str, str)
        Of sources and targets, such as ``("en", "fr")``: numbers are written anew for the second where both are known,
        and copied as they are otherwise.
    letters : str
        The characters that the model knows; words with others are copied.
    known : frozenset of str
        Words of the training sources, in small letters. Other words with a capital are names, which are copied; where
        no word is known, there are no names.

    Examples
    --------
    >>> rewriting = Rewriting(("en", "fr"), "".join(map(chr, range(32, 127))))
    >>> read = rewriting.read("Ask Ann for 1,500 e-mails to a@b.org!")
    >>> rewriting.shown(read.placed.text)
    '⇧ ask ⇧ ann for {number 1} e-mails to {other 1}!'
    >>> written = "\ue000 demande à \ue000 ann \ue010 messages pour \ue030 !"
    >>> rewriting.write(written, read).text
    'Demande à Ann 1 500 messages pour a@b.org !'
    """

    languages: tuple[str, str] = ("", "")
    letters: str = ""
    known: frozenset[str] = frozenset()

    # Reading ----------------------------------------------------------------------------------------------------------

    def read(self, text: str, usable: Container[str] = _PLACEHOLDERS) -> Rewritten:
        """Return a source as the model reads it; its places are those of the normalized text.

        Parameters
        ----------
        text : str
        usable : container of str, optional
            The placeholders that the model knows: those that its training texts had. By default, all.
        """
        copies: dict[str, Copy] = {}
        text = normalize(text)
        capitals = self._is_in_capitals(text)
        placed = self._placed(text, copies, usable, marked=not capitals)
        return Rewritten(placed, copies, bool(_TYPOGRAPHIC.search(text)), capitals)

    @cached_property
    def _letters(self) -> frozenset[str]:
        return frozenset(self.letters)

    def _is_in_capitals(self, text: str) -> bool:
        """Return whether a text is in capitals throughout and is no abbreviation."""
        text = re.sub(_COPIED, " ", text, flags=re.DOTALL)
        letters = [letter for letter in text if letter.isalpha()]
        if len(letters) < 2 or not all(map(_has_case, letters)):
            return False
        words = _RUN.findall(text)
        return len(words) > 1 or (len(words[0]) > 3 and words[0].lower() in self.known)

    def read_pair(self, source: str, target: str, shift: int = 0) -> tuple[Rewritten, Rewritten]:
        """Return both texts of a pair, to train on or to align: only what occurs in both becomes a placeholder.

        Parameters
        ----------
        source, target : str
        shift : int, default 0
            Which placeholder of each kind comes first: training meets them all.
        """
        source, target = normalize(source), normalize(target)
        drafts: dict[str, Copy] = {}
        self._placed(source, drafts)
        wanted = {(copy.kind, self._value(copy, self.languages[0])) for copy in drafts.values()}
        chosen: dict[tuple[str, str], str] = {}
        number: Counter[str] = Counter()
        found = list(self._candidates(target, self.languages[1], wanted, drafts.values()))
        shared = {(copy.kind, self._value(copy, self.languages[1])) for copy, _ in found}
        for copy in drafts.values():
            key = (copy.kind, self._value(copy, self.languages[0]))
            if key in shared and key not in chosen:
                chosen[key] = chr(_FIRST[copy.kind] + (shift + number[copy.kind]) % PLACES)
                number[copy.kind] += 1
        sides = []
        for side, (whole, language) in enumerate(zip((source, target), self.languages)):
            spans, copies = {}, {}
            for copy, span in found if side else self._copied(whole):
                mark = chosen.get((copy.kind, self._value(copy, language)))
                if mark is not None:
                    spans[span], copies[mark] = mark, copy
            sides.append(Rewritten(Placed.joined(_parts(whole, language, spans)), copies))
        return sides[0], sides[1]

    def _placed(
        self, text: str, copies: dict[str, Copy], usable: Container[str] = _PLACEHOLDERS, *, marked: bool = True
    ) -> Placed:
        """Return a rewritten source, and append what its placeholders stand for to ``copies``."""
        spans: dict[Span, str] = {}
        places: dict[tuple[str, str], str] = {}
        number: Counter[str] = Counter()
        for copy, span in self._copied(text, names=marked):
            key = (copy.kind, copy.text)
            if key not in places:
                mark = chr(_FIRST[copy.kind] + number[copy.kind])
                if number[copy.kind] == PLACES or mark not in usable:
                    continue
                places[key] = mark
                number[copy.kind] += 1
                copies[places[key]] = copy
            spans[span] = places[key]
        return Placed.joined(_parts(text, self.languages[0], spans, marked=marked))

    def _copied(self, text: str, *, names: bool = True) -> Iterator[tuple[Copy, Span]]:
        """Yield the parts of a text that are copied, with their positions."""
        known = self._letters
        # In a title or a text in capitals, a capital does not show a name.
        words = [match[0] for match in _RUN.finditer(text)]
        several = sum(word[0].isupper() for word in words) * 2 > len(words) and len(words) > 3
        for part in _PARTS.finditer(text):
            kind, what = part.lastgroup, part[0]
            span = Span(*part.span())
            if kind == "copied":
                yield Copy("other", what), span
            elif kind == "number":
                if self._is_copied_number(what):
                    yield Copy("number", what), span
            elif kind == "word":
                if (owner := _OWNER.fullmatch(what)) is not None:  # Anna's
                    what = owner[1]
                    span = Span(span.start, span.start + len(what))
                plain = "".join(_FORMS.get(letter, letter) for letter in what)
                if any(letter.isdigit() for letter in what) or (known and not set(plain.lower()) <= known):
                    yield Copy("other", what), span
                elif names and self.known and not several and self._is_name(plain, text, span):
                    yield Copy("name", what), span
            elif known and not what.isspace() and what not in _FORMS and what not in _QUOTES and what not in known:
                yield Copy("other", what), span

    def _is_copied_number(self, text: str) -> bool:
        """Return whether a number is copied: not with one or two digits, which may affect the forms of words."""
        if len(text) < 3:
            return False
        pattern = _NUMBERS.get(self.languages[0])
        return text.isdigit() if pattern is None else pattern.fullmatch(text) is not None

    def _is_name(self, word: str, text: str, span: Span) -> bool:
        runs = _RUN.findall(word)
        if not any(run[0].isupper() for run in runs) or len(word) < 3:
            return False
        lower = word.lower()
        if lower in self.known or all(run.lower() in self.known for run in runs):
            return False
        if len(runs) > 1 and lower.rpartition("'")[0] in self.known:
            return False
        if _ANY_LETTER.search(text, 0, span.start):
            return True
        # Every first word has a capital: it is a name only if another name or something owned follows.
        behind = _RUN.search(text, span.stop)
        return behind is not None and (
            behind[0] == "s" or (behind[0][0].isupper() and behind[0].lower() not in self.known)
        )

    def _value(self, copy: Copy, language: str) -> str:
        """Return a key that is equal for two copies of the same thing."""
        if copy.kind != "number":
            return copy.text
        form = _TYPOGRAPHY.get(language, _PLAIN)
        return copy.text.replace(form.thousands, "").replace(form.point, ".")

    def _candidates(
        self, text: str, language: str, wanted: Container[tuple[str, str]], copies: Iterable[Copy]
    ) -> Iterator[tuple[Copy, Span]]:
        """Yield the positions in a target of what occurs in its source."""
        taken: list[Span] = []
        for copy in copies:
            if copy.kind == "number":
                continue
            # A name after an elided article is still a name: d'Anna.
            for match in re.finditer(rf"(?<![^\W_])(?<![\w@#]){re.escape(copy.text)}(?!\w)", text):
                span = Span(*match.span())
                if not any(span.start < other.stop and other.start < span.stop for other in taken):
                    taken.append(span)
                    yield copy, span
        numbers = _NUMBERS.get(language)
        for match in (numbers or re.compile(_NUMBER)).finditer(text):
            copy, span = Copy("number", match[0]), Span(*match.span())
            if ("number", self._value(copy, language)) in wanted and not any(
                span.start < other.stop and other.start < span.stop for other in taken
            ):
                yield copy, span

    def known_share(self, text: str) -> float:
        """Return the share of a source's words that the model knows; 1 for a source or model without words.

        Examples
        --------
        >>> Rewriting(known=frozenset(["hello", "world"])).known_share("Hello WORLD, привет 7")
        0.6666666666666666
        """
        text = re.sub(_COPIED, " ", uniform(normalize(text)), flags=re.DOTALL)
        words = [word.lower() for word in _RUN.findall(text)]
        if not words or not self.known:
            return 1.0
        return sum(word in self.known for word in words) / len(words)

    # Writing ----------------------------------------------------------------------------------------------------------

    def write(self, text: str, source: Rewritten) -> Placed:
        """Return the model's output in its final form, with the positions of that output.

        Parameters
        ----------
        text : str
            What the model wrote.
        source : Rewritten
            What it read.
        """
        parts = list(self._restored(text, source))
        if source.typographic:
            parts = _typographic(parts, self.languages[1])
        if source.capitals:
            kept = {copy.text for copy in source.copies.values()}
            parts = [(part if part in kept else part.upper(), start, stop) for part, start, stop in parts]
        return Placed.joined(parts)

    def _restored(self, text: str, source: Rewritten) -> Iterator[tuple[str, int, int]]:
        for part in _MARKED.finditer(text):
            start, stop = part.span()
            if part["letter"]:
                yield part["letter"].upper(), start, stop
            elif part["word"]:
                behind = part.start("word")
                yield part["word"][0].upper(), start, behind + 1
                yield from ((letter.upper(), i, i + 1) for i, letter in enumerate(part["word"][1:], start=behind + 1))
            elif part["mark"] or source.is_glued(part[0], text[start - 1 : start], text[stop : stop + 1]):
                yield "", start, stop  # a mark before a part without case, or a space that the source lacks
            elif part[0] in _PLACEHOLDERS:
                copy = source.copies.get(part[0])
                yield "" if copy is None else self._formatted(copy), start, stop
            else:
                yield part[0], start, stop

    def _formatted(self, copy: Copy) -> str:
        """Return a copied part in the typography of the target language."""
        if copy.kind != "number" or not all(language in _TYPOGRAPHY for language in self.languages):
            return copy.text
        theirs, ours = (_TYPOGRAPHY[language] for language in self.languages)
        whole, _, rest = copy.text.partition(theirs.point)
        return whole.replace(theirs.thousands, ours.thousands) + (ours.point + rest if rest else "")

    @staticmethod
    def shown(text: str, copies: Mapping[str, Copy] | None = None) -> str:
        """Return a rewritten text with its marks made visible: ⇧ for a capital, ⇪ for capitals, and placeholders.

        Parameters
        ----------
        text : str
        copies : mapping of str to Copy, optional
            What placeholders stand for, to show instead of their names.
        """
        made = []
        for letter in text:
            if letter in _PLACEHOLDERS:
                kind, place = _PLACEHOLDERS[letter]
                copy = None if copies is None else copies.get(letter)
                made.append(f"{{{kind} {place + 1}}}" if copy is None else copy.text)
            else:
                made.append(_SHOWN.get(letter, letter))
        return "".join(made)

    # Learning and storing ---------------------------------------------------------------------------------------------

    @classmethod
    def learn(
        cls, pairs: Iterable[tuple[str, str]], languages: tuple[str, str] = ("", ""), *, rare: float = 1e-6
    ) -> Self:
        """Return the rewriting for pairs to train on: which characters and words it knows.

        A word is not known if it always has a capital within sentences, its translations mostly have it too, and it
        comes at most ten times: the model learns to copy it.

        Parameters
        ----------
        pairs : iterable of (str, str)
        languages : (str, str), optional
        rare : float, default 1e-6
            Characters that are a smaller share of the texts than this are not known.
        """
        letters: Counter[str] = Counter()
        words: Counter[str] = Counter()
        named: Counter[str] = Counter()
        copied: Counter[str] = Counter()
        for source, target in pairs:
            source, target = uniform(normalize(source), languages[0]), uniform(normalize(target), languages[1])
            letters.update(source.lower())
            letters.update(target.lower())
            theirs = set(_RUN.findall(target))
            for i, run in enumerate(_RUN.findall(source)):
                lower = run.lower()
                words[lower] += 1
                if run != lower and i:
                    named[lower] += 1
                    copied[lower] += run in theirs
        least = rare * letters.total()
        kept = "".join(sorted(letter for letter, count in letters.items() if count >= least or letter == " "))
        names = {
            word
            for word, count in copied.items()
            if words[word] <= _RARE_NAME and 2 * count > named[word] and 2 * named[word] > words[word] and len(word) > 2
        }
        return cls(languages, kept, frozenset(word for word in words if word not in names))

    def to_json(self) -> dict[str, Any]:
        """Return the content for :meth:`from_json`."""
        return {"languages": list(self.languages), "letters": self.letters, "known": " ".join(sorted(self.known))}

    @classmethod
    def from_json(cls, data: object, name: str = "rewriting") -> Self:
        """Return the rewriting that :meth:`to_json` described.

        Raises
        ------
        ModelFileError
            If that is something else.
        """
        if not isinstance(data, dict) or set(data) != {"languages", "letters", "known"}:
            raise rejected("load", name, "have languages, letters and known words", repr(data)[:60], ModelFileError)
        languages, letters, known = (data[each] for each in ("languages", "letters", "known"))
        if not (
            isinstance(languages, list) and len(languages) == 2 and all(isinstance(each, str) for each in languages)
        ):
            raise rejected("load", name, "have two 'languages'", repr(languages)[:60], ModelFileError)
        if not isinstance(letters, str) or not isinstance(known, str):
            raise rejected("load", name, "have strings 'letters' and 'known'", "others", ModelFileError)
        return cls((languages[0], languages[1]), letters, frozenset(known.split()))


#: A name that is more frequent in training is learned like any word.
_RARE_NAME = 10
_ANY_LETTER = re.compile(r"[^\W_]")
#: Contractions up to the apostrophe that they lack. Not those that are other words: its, were, wont, well, ill, shell.
_BARE = {
    "en": re.compile(
        r"(?<!['\w])(?:(?:do|does|did|is|are|was|have|has|had|would|could|should|ca|must|need)n(?=t(?!['\w]))"
        r"|(?:that|what|there|here|who|where|how|he|she)(?=s(?!['\w]))|i(?=m(?!['\w]))|(?:you|they)(?=re(?!['\w]))"
        r"|(?:i|you|they|we)(?=ve(?!['\w]))|(?:you|they|it|that)(?=ll(?!['\w])))",
        re.IGNORECASE,
    )
}
#: Words with their apostrophes, for capitals.
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")
_MARKED = re.compile(
    rf"{CAPITAL} ?(?P<letter>[^\W\d_])|{CAPITALS} ?(?P<word>[^\W\d_]+(?:'[^\W\d_]+)*)|"
    rf"(?P<mark>[{CAPITAL}{CAPITALS}]) ?|.",
    re.DOTALL,
)


def _parts(
    text: str, language: str, spans: Mapping[Span, str], *, marked: bool = True
) -> Iterator[tuple[str, int, int]]:
    """Yield the parts of a rewritten text: placeholders stand for spans, and marks for capitals if ``marked``."""
    at = 0
    for span in sorted(spans):
        yield from _cased(text, at, span.start, language, marked=marked)
        yield spans[span], span.start, span.stop
        at = span.stop
    yield from _cased(text, at, len(text), language, marked=marked)


def _cased(text: str, start: int, stop: int, language: str, *, marked: bool) -> Iterator[tuple[str, int, int]]:
    """Yield the parts of ``text[start:stop]``: typography made uniform, small letters."""
    forms = [(part, start + place) for part, place in _uniform(text[start:stop], language)]
    whole = "".join(part for part, _ in forms)
    origins = [place for part, place in forms for _ in part]
    if language in _BARE:
        whole, origins = _with_apostrophes(whole, origins, _BARE[language])
    at = 0
    for word in _WORD.finditer(whole):
        yield from _each(whole, at, word.start(), origins)
        begin, end = word.span()
        shouts = _shouts(word[0])
        if shouts or not marked:
            if shouts and marked:
                yield f"{CAPITALS} ", origins[begin], origins[begin] + 1
            yield from ((whole[i].lower(), origins[i], origins[i] + 1) for i in range(begin, end))
        else:
            for i in range(begin, end):
                if _has_case(whole[i]):
                    yield f"{CAPITAL} {whole[i].lower()}", origins[i], origins[i] + 1
                else:
                    yield whole[i], origins[i], origins[i] + 1
        at = end
    yield from _each(whole, at, len(whole), origins)


def _has_case(letter: str) -> bool:
    """Return whether a letter is a capital that its lowercase letter maps back to."""
    lower = letter.lower()
    return lower != letter and len(lower) == 1 and lower.upper() == letter


def _shouts(word: str) -> bool:
    """Return whether a word has two or more capitals and no lowercase letter."""
    letters = [letter for letter in word if letter != "'"]
    return len(letters) > 1 and all(map(_has_case, letters))


def _with_apostrophes(whole: str, origins: list[int], bare: re.Pattern[str]) -> tuple[str, list[int]]:
    """Return a text with missing apostrophes added: "dont" would lose its negation."""
    for word in reversed(list(bare.finditer(whole))):
        at = word.end()
        whole, origins = f"{whole[:at]}'{whole[at:]}", [*origins[:at], origins[at], *origins[at:]]
    return whole, origins


def _each(whole: str, start: int, stop: int, origins: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    return ((whole[i], origins[i], origins[i] + 1) for i in range(start, stop))


def _typographic(parts: Sequence[tuple[str, int, int]], language: str) -> list[tuple[str, int, int]]:
    """Return parts with typographic apostrophes, quotes and ellipses, and the language's no-break spaces."""
    form, texts = _TYPOGRAPHY.get(language, _PLAIN), [part[0] for part in parts]
    made = list(texts)
    opens = True
    for i, text in enumerate(texts):
        behind = texts[i + 1] if i + 1 < len(texts) else ""
        before = texts[i - 1] if i else ""
        if text == "'":
            made[i] = "\u2019" if before[-1:].isalnum() or not behind[:1].isalnum() else "\u2018"
        elif text == '"' and form.quotes is None:
            made[i] = "\u201c" if opens else "\u201d"
            opens = not opens
        elif text == " " and behind[:1] in form.narrow_before:
            made[i] = "\u202f"
        elif text == " " and (behind[:1] in form.no_break_before or before[-1:] in form.no_break_after):
            made[i] = "\u00a0"
        elif text == "." and texts[i : i + 3] == [".", ".", "."]:
            made[i], made[i + 1], made[i + 2] = "\u2026", "", ""
            texts[i + 1] = texts[i + 2] = ""
    return [(text, start, stop) for text, (_, start, stop) in zip(made, parts)]
