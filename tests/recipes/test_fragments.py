"""What the model in the box learns from: parts of sentences that are translations of each other."""

from __future__ import annotations

import random

import pytest
from recipes.fragments import fragments

NOUNS = {"house": "maison", "car": "voiture", "door": "porte", "table": "table", "rose": "rose"}
KINDS = {"red": "rouge", "old": "vieille", "wide": "large", "dear": "chère"}
VERBS = {"burns": "brûle", "shines": "brille", "waits": "attend"}
WORDS = {**NOUNS, **KINDS, **VERBS, "the": "la", "this": "cette", "today": "aujourd'hui"}


def spoken(words: list[str]) -> list[str]:
    """Return the French of English words: what tells a noun's kind comes behind it."""
    order = list(words)
    for place in range(1, len(order)):
        if order[place - 1] in KINDS and order[place] in NOUNS:
            order[place - 1 : place + 1] = order[place], order[place - 1]
    return [WORDS[word] for word in order]


@pytest.fixture(scope="module")
def sentences() -> list[list[str]]:
    drawn = random.Random(0)
    made = []
    for _ in range(400):
        kind = [drawn.choice(list(KINDS))] if drawn.random() < 0.7 else []
        late = ["today"] if drawn.random() < 0.3 else []
        noun, verb = drawn.choice(list(NOUNS)), drawn.choice(list(VERBS))
        made.append([drawn.choice(["the", "this"]), *kind, noun, verb, *late])
    return made


def test_parts_are_translations(sentences) -> None:
    found = fragments(
        [" ".join(each) for each in sentences], [" ".join(spoken(each)) for each in sentences], frequent=0
    )
    assert len(found) > 100
    wrong = [pair for pair in found if pair[1].split() != spoken(pair[0].split())]
    assert not wrong
    assert {("red car", "voiture rouge"), ("this old door", "cette porte vieille"), ("house", "maison")} <= set(found)


def test_frequent_words_and_signs_end_no_part(sentences) -> None:
    texts = [" ".join(each) for each in sentences]
    found = fragments([f"{text}, yes" for text in texts], [f"{text}, yes" for text in texts], frequent=3)
    assert found and not any("," in source or source.endswith((" the", " this", " yes")) for source, _ in found)
