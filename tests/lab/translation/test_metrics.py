"""Edit distance, error rates and BLEU, by hand and against definitions written out; chrF against sacreBLEU itself."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard_lab.tasks.translation.metrics import ErrorRates, bleu, chrf, edit_distance, error_rates, tokenized_bleu

words = st.text("abc", max_size=7)


def _by_definition(ours: str, theirs: str) -> int:
    @cache
    def distance(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return i + j
        same = distance(i - 1, j - 1) + (ours[i - 1] != theirs[j - 1])
        return min(same, distance(i - 1, j) + 1, distance(i, j - 1) + 1)

    return distance(len(ours), len(theirs))


@given(words, words)
def test_edit_distance_is_its_definition(ours: str, theirs: str) -> None:
    assert edit_distance(ours, theirs) == _by_definition(ours, theirs)


@given(words, words, words)
def test_edit_distance_is_a_metric(a: str, b: str, c: str) -> None:
    assert (edit_distance(a, b) == 0) == (a == b)
    assert edit_distance(a, b) == edit_distance(b, a)
    assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)


def test_rates_by_hand() -> None:
    references = {
        "cat": [("K", "AE", "T")],
        "read": [("R", "EH", "D"), ("R", "IY", "D")],
        "a": [("AH",), ("EY",)],
        "unsaid": [("X",)],
    }
    said = {"cat": ("K", "AE", "T", "S"), "read": ("R", "IY", "D"), "a": ()}
    # One insertion; the second pronunciation exactly; one deletion: 2 edits on 3 + 3 + 1 phonemes, 2 of 3 words wrong.
    rates = error_rates(said, references)
    assert rates == ErrorRates(2, 7, 2, 3)
    assert rates.symbol == pytest.approx(200 / 7)
    assert rates.sequence == pytest.approx(200 / 3)


def test_the_nearest_reference_counts_with_its_own_length() -> None:
    rates = error_rates({"w": tuple("abcd")}, {"w": [tuple("ab"), tuple("abcde")]})
    assert rates == ErrorRates(1, 5, 1, 1)


def test_what_cannot_be_scored_is_refused() -> None:
    with pytest.raises(ValueError, match="error_rates: predictions must have at least one word, got none"):
        error_rates({}, {})
    with pytest.raises(ValueError, match="references must have an entry for every word, got none for 'dog'"):
        error_rates({"dog": ("D",)}, {"cat": [("K",)]})


SAID = ["the cat sat on the mat today", "hello there , my dear friend", "it is raining again in the city"]
RIGHT = [
    ["the cat sat on a mat", "a cat was sitting on the mat today"],
    ["hello there , my friend"],
    ["it is raining in the city again", "again it is raining in the city", "rain again in the city"],
]


def _bleu_by_definition(hypotheses: list[str], references: list[list[str]]) -> float:
    """Return Papineni's BLEU-4 of words between spaces: clipped counts, the nearest length, the shorter of two."""

    def grams(text: str, n: int) -> Counter[tuple[str, ...]]:
        words = text.split()
        return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))

    logs = 0.0
    for n in range(1, 5):
        hits = total = 0
        for said, right in zip(hypotheses, references):
            most: Counter[tuple[str, ...]] = Counter()
            for each in right:
                most |= grams(each, n)
            hits += (grams(said, n) & most).total()
            total += grams(said, n).total()
        logs += math.log(hits / total) / 4
    ours = sum(len(said.split()) for said in hypotheses)
    theirs = sum(
        min((abs(len(each.split()) - len(said.split())), len(each.split())) for each in right)[1]
        for said, right in zip(hypotheses, references)
    )
    return 100 * math.exp(logs + min(0.0, 1 - theirs / ours))


def test_bleu_is_its_definition_for_any_number_of_references() -> None:
    for hypotheses, references in ((SAID, RIGHT), (SAID[::-1], RIGHT[::-1]), (SAID, [right[:1] for right in RIGHT])):
        expected = pytest.approx(_bleu_by_definition(hypotheses, references))
        assert tokenized_bleu(hypotheses, references).value == expected
        assert bleu(hypotheses, references).value == expected  # these texts have the same words by both
    short = [said.rsplit(" ", 1)[0] for said in SAID]
    assert tokenized_bleu(short, RIGHT).value == pytest.approx(_bleu_by_definition(short, RIGHT))


def test_the_order_of_references_does_not_count() -> None:
    assert bleu(SAID, RIGHT) == bleu(SAID, [right[::-1] for right in RIGHT])
    assert chrf(SAID, RIGHT) == chrf(SAID, [right[::-1] for right in RIGHT])


def test_a_sentence_without_further_references_does_not_profit_from_those_of_others() -> None:
    alone = bleu(SAID[1:2], RIGHT[1:2]).value
    assert bleu(SAID[1:2] * 2, [RIGHT[1], RIGHT[1] * 3]).value == pytest.approx(alone)
    assert chrf(SAID[1:2] * 2, [RIGHT[1], RIGHT[1] * 3]).value == pytest.approx(chrf(SAID[1:2], RIGHT[1:2]).value)


def test_signatures_say_what_was_measured() -> None:
    signatures = [each(SAID, RIGHT).signature for each in (bleu, tokenized_bleu, chrf)]
    assert all(signature.startswith("nrefs:var|case:mixed|eff:") for signature in signatures)
    assert ["tok:13a" in signatures[0], "tok:none" in signatures[1], "nc:6" in signatures[2]] == [True] * 3
    assert bleu(SAID, [right[:1] for right in RIGHT]).signature.startswith("nrefs:1|")
    lower = bleu([said.upper() for said in SAID], RIGHT, lowercase=True)
    assert lower.value == pytest.approx(bleu(SAID, RIGHT).value)
    assert "case:lc" in lower.signature
    lower = chrf([said.upper() for said in SAID], [[text.lower() for text in right] for right in RIGHT], lowercase=True)
    assert lower.value == pytest.approx(
        chrf([said.lower() for said in SAID], [[t.lower() for t in r] for r in RIGHT]).value
    )
    assert "case:lc" in lower.signature
    assert bleu(["a, b."], [["a , b ."]]).name == "BLEU"
    assert chrf(["same"], [["other", "same"]]).value == 100
    assert bleu(SAID, RIGHT).details.startswith("BLEU = ")


def test_tokenization_is_asked_for() -> None:
    said, right = ["Well, this is it."], [["Well , this is it ."]]
    assert bleu(said, right).value == pytest.approx(100)
    assert tokenized_bleu(said, right).value < 50
    assert tokenized_bleu(right[0], right).value == pytest.approx(100)


@pytest.mark.parametrize("score", [bleu, tokenized_bleu, chrf])
def test_scores_of_nothing_are_refused(score) -> None:
    name = score.__name__
    for hypotheses, references, message in (
        ([], [], "hypotheses must have at least one sentence, got none."),
        (["a"], [], "references must be as many as hypotheses, got 0 for 1 hypotheses."),
        (["a", "b"], [["a"], []], "references must have at least one for each sentence, got none for number 2."),
        (["a"], ["a"], "references must be a list of references for each sentence, got a string for one."),
    ):
        with pytest.raises(ValueError) as caught:
            score(hypotheses, references)
        assert str(caught.value) == f"{name}: {message}"


def test_an_unknown_tokenizer_is_named() -> None:
    with pytest.raises(ValueError, match=r"bleu: tokenize must be one of .*, got '13b' \(did you mean '13a'\?\)"):
        bleu(SAID, RIGHT, tokenize="13b")
