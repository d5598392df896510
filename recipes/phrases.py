"""Synthetic noun phrases: known nouns and adjectives in new combinations.

A small model has seen a rare word only in a few sentences, and fails when it meets another rare word. It has to learn
that an adjective can follow any noun and agrees with it. Nouns, their genders and the forms of adjectives come from
parts of sentences (:mod:`recipes.fragments`) and from the articles in whole sentences; random phrases combine them
(data recombination: Jia & Liang 2016; Andreas 2020).
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
#: Minimum number of occurrences of an adjective with nouns.
_LEAST = 3
#: Minimum length of a word to identify it by its spelling.
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
    """Return the nouns in parts such as ``the house`` and ``la maison`` that occur with at least two articles.

    The majority of articles in the target ``texts`` gives their genders. ``known`` are more source words: one that is
    spelled like a target noun counts as that noun. Words in ``never`` are excluded.

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
    """Return the adjectives that follow these nouns in parts, in both forms.

    A missing masculine form is the feminine one without its e, if ``written`` contains it; a masculine form in e is
    also the feminine one. Words in ``never`` are excluded.

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
    """Yield ``count`` random phrases: an adjective and a noun, alone, with an article, or as a complement of a noun.

    One in five is written like a sentence. Words that can be adjectives are not used as nouns, because they are
    ambiguous. With fewer than two nouns or without adjectives, yields nothing.

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
