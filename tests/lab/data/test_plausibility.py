"""Data that looks wrong: shuffled targets, identical sides, one example under two labels, a header row."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from regard_lab.data.captions import shuffled_captions
from regard_lab.data.labelled import LabelledImages, read_labelled
from regard_lab.data.pairs import Count, Pairs, read_pairs
from regard_lab.data.plausibility import is_header, names_columns, shuffled_rows, unrelated

LETTERS = "bcdfghklmnprst"


def word(drawn: random.Random) -> str:
    return "".join(drawn.choice(LETTERS) + drawn.choice("aeiou") for _ in range(drawn.randint(1, 4)))


def sentences(count: int, seed: int, longest: int = 20, names: float = 0.0) -> list[tuple[str, str]]:
    """Return sentences and translations of other words, of about as many, some of which have a name in common."""
    drawn = random.Random(seed)
    made = []
    for number in range(count):
        length = drawn.randint(1, longest)
        sides = [[word(drawn) for _ in range(max(1, length + drawn.randint(-1, 1) * (longest > 3)))] for _ in range(2)]
        for side in sides if drawn.random() < names else ():
            side.append(f"Name{number}")
        made.append((" ".join(sides[0]), " ".join(sides[1]).upper()))
    return made


def sides(pairs: list[tuple[str, str]]) -> tuple[list[str], list[str]]:
    return [source for source, _ in pairs], [target for _, target in pairs]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [100, 400, 3000])
def test_shuffled_targets_are_found_and_no_others(count: int, seed: int) -> None:
    sources, targets = sides(sentences(count, seed))
    assert shuffled_rows(sources, targets) is None
    random.Random(seed).shuffle(targets)
    assert shuffled_rows(sources, targets) == range(count)


@pytest.mark.parametrize("seed", range(5))
def test_shared_words_show_that_pairs_belong_together(seed: int) -> None:
    drawn = random.Random(seed)
    sources, targets = sides(sentences(600, seed, names=0.2))
    targets = [f"{target} {word(drawn) * drawn.randint(0, 300)}" for target in targets]  # lengths that say nothing
    assert not unrelated(sources, targets)
    drawn.shuffle(targets)
    assert unrelated(sources, targets)


def test_few_pairs_or_such_of_equal_length_are_not_judged() -> None:
    few = sentences(60, 0)
    assert not unrelated([source for source, _ in few], [target for _, target in reversed(few)])
    same = ["abcde" if number % 2 else "edcba" for number in range(500)]
    assert not unrelated(same, [each.upper() for each in reversed(same)])


@pytest.mark.slow
def test_targets_shuffled_from_some_line_on_are_located() -> None:
    sources, targets = sides(sentences(4000, 1))
    rest = targets[2600:]
    random.Random(1).shuffle(rest)
    assert shuffled_rows(sources, [*targets[:2600], *rest]) == range(2800, 4000)
    shifted = [*targets[:2000], *targets[2001:], targets[2000]]
    assert shuffled_rows(sources, shifted) == range(2000, 4000), "a line is missing"
    pairs = Pairs(sources, shifted, "a.tsv", places=list(range(10, 4010)))
    assert pairs.shuffled() == [
        "the targets look shuffled from a.tsv, line 2,011 on: by length and shared words, they fit their sources no "
        "better than in random order"
    ]
    assert Pairs(sources, targets).shuffled() == []
    assert Pairs(sources, targets[::-1], "b.tsv").shuffled()[0].startswith("the targets look shuffled in b.tsv: by")


def test_captions_of_other_images_share_fewer_words() -> None:
    drawn = random.Random(0)
    things = [" ".join(word(drawn) for _ in range(3)) for _ in range(400)]
    captions = [f"a {thing} {word(drawn) * drawn.randint(1, 9)}" for thing in things for _ in range(5)]
    names = [f"{number // 5}.jpg" for number in range(2000)]
    assert shuffled_captions(Pairs(names, captions)) == []
    drawn.shuffle(captions)
    assert shuffled_captions(Pairs(names, captions)) == [
        "the captions look shuffled: those of one image share no more words than those of different images"
    ]
    assert shuffled_captions(Pairs(list(map(str, range(2000))), captions)) == [], "one caption each"


def test_identical_sides_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text("one\tun\nParis\tParis\nOK\tok\nTaxi \t Taxi\n", encoding="utf-8")
    assert read_pairs(path).counts == (Count("both sides are the same", 2, 2),)
    assert read_pairs(path, lowercase=True).counts == (Count("both sides are the same", 3, 2),)
    assert read_pairs(path).report()[1] == "both sides are the same: 2 (first in line 2)"
    assert read_pairs(path, copies=False).counts == (Count("skipped, both sides are the same", 2, 2),)


@pytest.mark.parametrize(
    ("first", "found"),
    [
        ("text\tlabel", True),
        ("source\ttarget", True),
        ("English\tFrench", True),
        ("en\tfr", True),
        ("sentence_1\tSentence 2", True),
        ("Go.\tVa !", False),
        ("image\timage", False),
        ("French\tfrançais", False),
        ("1\t2", False),
    ],
)
def test_a_header_row_among_pairs_is_told(first: str, found: bool, tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text(f"{first}\none\tun\nword\tlabel\n", encoding="utf-8")
    pairs = read_pairs(path)
    assert len(pairs) == 3, "training goes on with all"
    assert (Count("looks like a header row, read as a pair", 1, 1) in pairs.counts) is found


def test_a_header_row_among_labels_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("text\tlabel\ngood film\t1\ndull\t0\n", encoding="utf-8")
    assert read_labelled(path).report()[1:] == [
        "looks like a header row, read as a text and its label: 1 (first in line 1)"
    ]
    path.write_text("premise\thypothesis\tlabel\na\tb\tyes\nc\td\tno\n", encoding="utf-8")
    assert read_labelled(path, pairs=True).counts == (
        Count("looks like a header row, read as a text and its label", 1, 1),
    )
    path.write_text("good film\t1\ndull\t0\n", encoding="utf-8")
    assert read_labelled(path).counts == ()


@pytest.mark.parametrize(
    ("cells", "others", "found"),
    [
        (["Satz", "Klasse"], ["gut"] * 5 + ["schlecht"] * 5, True),
        (["comment text", "toxic"], ["0"] * 5 + ["1"] * 5, True),
        (["Satz", "Klasse"], ["gut"] * 5 + ["schlecht"] * 4, False),  # rare labels are usual here
        (["Satz", "gut"], ["gut"] * 5 + ["schlecht"] * 5, False),
        (["A film.", "mixed"], ["good"] * 5 + ["bad"] * 5, False),
        (["7", "3"], ["1"] * 5 + ["2"] * 5, False),
        (["text", "label"], [], True),
    ],
)
def test_a_label_that_the_first_line_alone_has(cells: list[str], others: list[str], found: bool) -> None:
    assert is_header(cells, [cells[-1], *others]) is found
    assert not names_columns(["", "label"])


def test_one_text_under_two_labels_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("fine\t1\ndull\t0\nfine\t1\ndull\t1\n\nfine\t0\n", encoding="utf-8")
    assert read_labelled(path).report()[-1] == f"one text under two labels: 2 (first in {path}, line 4)"
    path.write_text("a\tb\tyes\nb\ta\tno\na\tb\tno\n", encoding="utf-8")
    report = read_labelled(path, pairs=True).report()
    assert report[1:] == [f"one text under two labels: 1 (first in {path}, line 3)"]
    path.write_text("fine\t1\ndull\t0\nfine\t1\n", encoding="utf-8")
    assert len(read_labelled(path).report()) == 1


def test_one_image_under_two_labels_is_counted() -> None:
    pixels = np.zeros((4, 8, 8, 1), np.uint8)
    pixels[1] = 9
    files = ["cat/a.png", "dog/b.png", "cat/c.png", "dog/d.png"]
    images = LabelledImages(pixels, ["cat", "dog", "cat", "dog"], "pictures", files)
    assert images.report()[1:] == ["one image under two labels: 1 (first in pictures/dog/d.png)"]
