"""What the model in the box learns from: parts of sentences that are translations of each other."""

from __future__ import annotations

import random

import pytest
from recipes import pairs
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


def test_what_is_written(tmp_path, capsys) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text("The cat sees.\tLe chat voit.\nSee the cat!\tVois le chat !\n" * 2, encoding="utf-8")
    pairs.main([str(path), "--share", "1.0"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["The cat sees.\tLe chat voit.", "See the cat!\tVois le chat !"]
    assert "the cat sees\tle chat voit" in lines
    assert all(line.count("\t") == 1 for line in lines)


def test_rare_words_come_several_times(tmp_path, capsys) -> None:
    path = tmp_path / "pairs.tsv"
    often = [f"I see {n} cats.\tJe vois {n} chats." for n in range(50)]
    path.write_text("\n".join([*often, "I see zebras.\tJe vois des zèbres."]) + "\n", encoding="utf-8")
    pairs.main([str(path), "--share", "1.0", "--enough", "40", "--copies", "8"])
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("I see zebras.\tJe vois des zèbres.") == 1
    assert lines.count("I see zebras\tJe vois des zèbres") == 8
    assert lines.count("I see 7 cats\tJe vois 7 chats") == 1
