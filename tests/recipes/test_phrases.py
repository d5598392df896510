"""What the model in the box learns from: noun phrases that nobody wrote."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from recipes.phrases import Adjective, Noun, adjectives, nouns, phrases

GENDERS = {"m": ("le", "un"), "f": ("la", "une")}
NOUNS = {"house": ("maison", "f"), "book": ("livre", "m"), "door": ("porte", "f"), "area": ("zone", "f")}
FORMS = {"red": ("rouge", "rouge"), "green": ("vert", "verte"), "public": ("public", "publique")}


@pytest.fixture(scope="module")
def parts() -> list[tuple[str, str]]:
    """Return every noun with both articles, and behind it every adjective."""
    found = []
    for source, (target, gender) in NOUNS.items():
        for english, french in zip(("the", "a"), GENDERS[gender]):
            found.append((f"{english} {source}", f"{french} {target}"))
            for quality, forms in FORMS.items():
                found.append((f"{english} {quality} {source}", f"{french} {target} {forms[gender == 'f']}"))
    return found


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Return what is written in the language that has genders."""
    return [f"C'est {GENDERS[gender][1]} {target} qui brûle" for target, gender in NOUNS.values()]


def test_nouns_have_their_gender(parts, texts) -> None:
    found = {noun.source: noun for noun in nouns(parts, texts, [])}
    assert {source: (noun.target, noun.gender) for source, noun in found.items()} == NOUNS


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(("the eyes", "les yeux"), id="plural"),
        pytest.param(("the Tower", "la tour"), id="a name"),
        pytest.param(("the lamp", "la lampe"), id="seen once"),
        pytest.param(("some lamp", "la lampe"), id="no article"),
        pytest.param(("the girl's", "la fille"), id="not a word"),
    ],
)
def test_what_is_no_noun(parts, texts, extra) -> None:
    texts = [*texts, "la tour", "la lampe", "la fille", "le sien"]
    assert nouns([*parts, extra], texts, []) == nouns(parts, texts, [])


def test_most_articles_tell_the_gender(parts, texts) -> None:
    parts = [*parts, ("the tour", "le tour"), ("a tour", "un tour")]
    for written, gender in (
        (["la tour", "une tour", "le tour"], "f"),
        (["le tour", "ce tour", "la tour"], "m"),
        (["le tour", "la tour"], None),
        (["son tour", "leur tour"], None),
    ):
        found = {noun.source: noun.gender for noun in nouns(parts, [*texts, *written], [])}
        assert found.get("tour") == gender, written


def test_words_spelled_alike_are_nouns_if_no_part_says_otherwise(parts, texts) -> None:
    found = {noun.source: noun.target for noun in nouns(parts, texts, ["zone", "livre", "red"], {"livre"})}
    assert found["zone"] == "zone"
    assert "livre" not in found and "red" not in found
    both, texts = [*parts, ("the zone", "la région"), ("a zone", "une région")], [*texts, "la région"]
    assert {noun.source: noun.target for noun in nouns(both, texts, ["zone"])}["zone"] == "région"


def test_articles_lose_their_vowel_before_one() -> None:
    given = [("a man", "un homme"), ("the man", "l'homme"), ("a tree", "un arbre"), ("this tree", "cet arbre")]
    given += [("a hero", "un héros"), ("the hero", "le héros")]
    found = nouns(given, ["un homme de l'arbre et l'homme", "un arbre", "le héros"], [])
    assert {noun.target: noun.elides for noun in found} == {"homme": True, "arbre": True, "héros": False}


def test_adjectives_have_both_forms(parts, texts) -> None:
    found = adjectives(parts, nouns(parts, texts, []), set())
    assert {each.source: (each.masculine, each.feminine) for each in found} == FORMS


def test_a_form_that_no_part_has(parts, texts) -> None:
    """The masculine one is found in what is written; the feminine one is the same where that may be."""
    among = nouns(parts, texts, [])
    feminine = [pair for pair in parts if "livre" not in pair[1]]
    assert adjectives(feminine, among, {"vert"}) == [Adjective("green", "vert", "verte")]
    masculine = [pair for pair in parts if "livre" in pair[1]] * 2
    assert adjectives(masculine, among, {"vert"}) == [Adjective("red", "rouge", "rouge")]


def test_adjectives_are_believed_that_came_several_times_and_are_nothing_else(parts, texts) -> None:
    among = nouns(parts, texts, [])
    rare = [*parts, ("the odd house", "la maison bizarre"), ("an odd book", "le livre bizarre")]
    assert "odd" not in {each.source for each in adjectives(rare, among, set())}
    assert "red" not in {each.source for each in adjectives(parts, among, set(), {"red"})}


def test_phrases_agree(parts, texts) -> None:
    names, qualities = nouns(parts, texts, []), adjectives(parts, nouns(parts, texts, []), set())
    made = list(phrases(names, qualities, 400, random.Random(0)))
    assert len(made) == 400
    sizes = Counter(len(source.split()) for source, _ in made)
    assert set(sizes) == {2, 3, 4, 5} and min(sizes.values()) > 40
    sentences = [pair for pair in made if pair[0].endswith(".")]
    assert 40 < len(sentences) < 120 and all(text[0].isupper() for pair in sentences for text in pair)
    for source, target in made:
        assert source.endswith(".") == target.endswith(".")
        source, target = (text[0].lower() + text[1:].removesuffix(".") for text in (source, target))
        *head, last = source.split()
        noun, gender = NOUNS[last]
        quality = FORMS.get(head[-1]) if head else None
        want = noun if quality is None else f"{noun} {quality[gender == 'f']}"
        if "of" in head:
            first, gender = NOUNS[head[1]]
            want = f"{first} de {want}"
        if head[0] in ("the", "a", "an"):
            want = f"{GENDERS[gender][head[0] != 'the']} {want}"
        assert target == want
    begins = Counter(source.lower().split()[0] for source, _ in made)
    assert begins["the"] > begins["a"] + begins["an"] > 40 and {"a house", "an area"} <= {
        " ".join(source.lower().split()[:2]) for source, _ in made
    }


def test_phrases_elide() -> None:
    names = [Noun("star", "étoile", "f", True), Noun("man", "homme", "m", True)]
    made = dict(phrases(names, [Adjective("big", "grand", "grande")], 99, random.Random(1)))
    assert made["the big star"] == "l'étoile grande" and made["a big star"] == "une étoile grande"
    assert made["the star of big man"] == "l'étoile d'homme grand"
    assert made["the man of star"] == "l'homme d'étoile"


@pytest.mark.parametrize("names", [[], [Noun("star", "étoile", "f", True)]])
def test_of_too_few_words_there_is_no_phrase(names) -> None:
    assert list(phrases(names, [Adjective("big", "grand", "grande")], 9, random.Random(0))) == []
    assert list(phrases(names * 3, [], 9, random.Random(0))) == []


def test_what_may_be_an_adjective_is_taken_for_no_noun() -> None:
    names = [Noun(word, word, "m", False) for word in ("plan", "club", "secret")]
    made = list(phrases(names, [Adjective("secret", "secret", "secrète")], 50, random.Random(0)))
    assert made and not any(source.rstrip(".").endswith("secret") or "secret of" in source for source, _ in made)
