"""Noun phrases that nobody wrote: known nouns and adjectives in new company.

A small model knows a rare word in the few sentences that have it, and is at a loss where it meets another rare word.
What it needs is that an adjective goes behind any noun and agrees with it. Nouns, their genders and the two forms of
adjectives are read off parts of sentences (:mod:`recipes.fragments`) and the articles in whole ones; from them phrases
are drawn (recombined data: Jia & Liang 2016; Andreas 2020).
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

#: Determiners. Some French ones show the noun's gender.
_ENGLISH = {"the", "a", "an", "this", "that", "my", "your", "his", "her", "its", "our", "their", "no", "any"}
_MASCULINE = {"le", "un", "ce", "cet", "du", "aucun"}
_FEMININE = {"la", "une", "cette", "ma", "ta", "sa", "aucune"}
_EITHER = {"mon", "ton", "son", "notre", "votre", "leur"}
_BEFORE = re.compile(rf"^(?:(?:{'|'.join(sorted(_MASCULINE | _FEMININE | _EITHER))}) |l')")
_LETTERS = "[a-zà-öø-ÿœ-]+"
_WORD, _ELIDED = re.compile(_LETTERS), re.compile(rf"\b[ld]'({_LETTERS})")
_GENDERED = re.compile(rf"\b(?:({'|'.join(sorted(_MASCULINE))})|({'|'.join(sorted(_FEMININE))})) ({_LETTERS})")
_VOWEL = re.compile(r"[aeiouyàâéèêëîïôûœ]")
#: An adjective is believed that stood with nouns so often.
_LEAST = 3
#: Letters of a word from which on spelling tells what it is.
_SHORTEST = 4


class Noun(NamedTuple):
    """A noun with its translation, in the singular."""

    source: str
    target: str
    gender: str
    #: Whether articles lose their vowel before the translation.
    elides: bool


class Adjective(NamedTuple):
    """An adjective with its translation behind nouns of either gender."""

    source: str
    masculine: str
    feminine: str


def nouns(
    parts: Iterable[tuple[str, str]], texts: Iterable[str], known: Iterable[str], never: Container[str] = ()
) -> list[Noun]:
    """Return the nouns of parts such as ``the house`` and ``la maison``, those with two articles or more.

    Their genders are what most articles in the target ``texts`` tell. ``known`` are further source words: where one is
    spelled as a noun that some other word gave, it is taken for it. What else a word of ``never`` may be, it is no
    noun.

    Examples
    --------
    >>> parts = [("the house", "la maison"), ("a house", "une maison"), ("the area", "la zone"), ("no area", "ta zone")]
    >>> texts = ["la maison d'en face", "une zone interdite"]
    >>> [(noun.source, noun.target, noun.gender) for noun in nouns(parts, texts, ["zone"])]
    [('house', 'maison', 'f'), ('area', 'zone', 'f'), ('zone', 'zone', 'f')]
    """
    translations: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for source, target in parts:
        words, noun = source.split(), _BEFORE.sub("", target)
        if len(words) == 2 and words[0] in _ENGLISH and noun != target and all(map(_WORD.fullmatch, (words[1], noun))):
            translations[words[1]][noun] += 1
    #: How many more masculine articles than feminine ones.
    balance: Counter[str] = Counter()
    elided: set[str] = set()
    for text in texts:
        for masculine, _, word in _GENDERED.findall(text):
            balance[word] += 1 if masculine else -1
        elided.update(_ELIDED.findall(text))
    best = {source: found.most_common(1)[0] for source, found in translations.items()}
    sure = {source: target for source, (target, count) in best.items() if count > 1}
    called = {target for target, _ in best.values()}
    alike = {word: word for word in known if word in called and word not in best and len(word) >= _SHORTEST}
    return [
        Noun(source, target, "m" if balance[target] > 0 else "f", target in elided or bool(_VOWEL.match(target)))
        for source, target in (sure | alike).items()
        if source not in never and balance[target]
    ]


def adjectives(
    parts: Iterable[tuple[str, str]], among: Iterable[Noun], written: Container[str], never: Container[str] = ()
) -> list[Adjective]:
    """Return the adjectives that stand behind these nouns in parts, in both forms.

    A masculine form that no part has is the feminine one without its e, where that is ``written`` somewhere, and what
    ends in e is the same in both. What else a word of ``never`` may be, it is no adjective.

    Examples
    --------
    >>> houses = [Noun(word, word, "f", False) for word in ("villa", "station", "table")]
    >>> parts = [(f"national {noun.source}", f"{noun.target} nationale") for noun in houses]
    >>> adjectives(parts, houses, {"national"})
    [Adjective(source='national', masculine='national', feminine='nationale')]
    """
    genders = {(noun.source, noun.target): noun.gender for noun in among}
    forms: defaultdict[str, dict[str, Counter[str]]] = defaultdict(lambda: {"m": Counter(), "f": Counter()})
    for source, target in parts:
        words, after = source.split(), _BEFORE.sub("", target).split()
        words = words[1:] if words[0] in _ENGLISH else words
        if (
            len(words) == len(after) == 2
            and (gender := genders.get((words[1], after[0])))
            and _WORD.fullmatch(after[1])
        ):
            forms[words[0]][gender][after[1]] += 1
    found = []
    for source, counts in forms.items():
        if source in never or counts["m"].total() + counts["f"].total() < _LEAST:
            continue
        masculine, feminine = (next(iter(counts[gender].most_common(1)), ("", 0))[0] for gender in "mf")
        if not masculine and feminine.endswith("e") and feminine[:-1] in written:
            masculine = feminine[:-1]
        elif not feminine and masculine.endswith("e"):
            feminine = masculine
        if masculine and masculine[:3] == feminine[:3]:
            found.append(Adjective(source, masculine, feminine))
    return found


def phrases(
    names: Sequence[Noun], qualities: Sequence[Adjective], count: int, drawn: random.Random
) -> Iterator[tuple[str, str]]:
    """Yield so many phrases: an adjective and a noun, alone, with an article, and as what another noun is of.

    One of five is written as sentences are. What may be an adjective is taken for no noun: only company tells which it
    is. Of fewer than two nouns, or without an adjective, there is nothing to put together.

    Examples
    --------
    >>> names = [Noun("station", "gare", "f", False), Noun("state", "état", "m", True)]
    >>> qualities = [Adjective("national", "national", "nationale")]
    >>> for pair in phrases(names, qualities, 3, random.Random(5)):
    ...     print(" | ".join(pair))
    a state of station | un état de gare
    a national state | un état national
    The station of national state. | La gare d'état national.
    """
    either = {quality.source for quality in qualities}
    names = [name for name in names if name.source not in either]
    for _ in range(count if len(names) > 1 and qualities else 0):
        head, other = drawn.sample(names, 2)
        quality, form = drawn.choice(qualities), drawn.random()
        source = f"{quality.source} {other.source}"
        target = f"{other.target} {quality.masculine if other.gender == 'm' else quality.feminine}"
        if form > 0.8:
            source, target = other.source, other.target
        if form > 0.4:
            source, target = f"{head.source} of {source}", f"{head.target} {_of(other)}{target}"
            other = head
        if form > 0.2:
            source, target = _determined(source, target, other, drawn.random() < 0.7)
        if drawn.random() < 0.2:
            source, target = (f"{text[0].upper()}{text[1:]}." for text in (source, target))
        yield source, target


def _determined(source: str, target: str, noun: Noun, known: bool) -> tuple[str, str]:
    """Return both sides with an article."""
    masculine = noun.gender == "m"
    if known:
        return f"the {source}", ("l'" if noun.elides else "le " if masculine else "la ") + target
    return f"{'an' if source[0] in 'aeiou' else 'a'} {source}", f"{'un' if masculine else 'une'} {target}"


def _of(noun: Noun) -> str:
    return "d'" if noun.elides else "de "
