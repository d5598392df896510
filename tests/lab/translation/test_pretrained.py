"""The model in the box: small, attributed, and right about what the project's texts promise of it."""

from __future__ import annotations

import pytest
import torch

from regard_lab import pretrained
from regard_lab.generation.predictions import PredictionOptions
from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.tasks.translation.alignment.maps import alignment


@pytest.fixture(scope="module")
def translator() -> SequenceModel:
    return pretrained.load()


def test_it_is_small_and_says_where_it_comes_from() -> None:
    folder = pretrained.path(pretrained.TRANSLATOR)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 12_000_000
    card = (folder / pretrained.CARD).read_text(encoding="utf-8")
    for said in ("CC-BY 2.0", "Tatoeba", "manythings.org/anki", "BLEU", "make pretrained"):
        assert said in card


def test_the_card_tells_what_the_model_is(translator: SequenceModel) -> None:
    card = (pretrained.path(pretrained.TRANSLATOR) / pretrained.CARD).read_text(encoding="utf-8")
    assert f"{sum(each.numel() for each in translator.model.parameters()):,} parameters" in card
    assert f"| BLEU | {translator.about['scores']['bleu']:.2f} " in card
    assert f"{translator.about['pairs']:,} pairs" in card


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="english-french"):
        pretrained.load("english-german")


def looked_at(translator: SequenceModel, sentence: str) -> tuple[str, dict[str, str]]:
    """Return the translation, and for each of its words the source word with the most attention."""
    (written,) = translator.predict([sentence], PredictionOptions(alignment=True))
    seen = alignment(written)
    torch.testing.assert_close(seen.weights.sum(-1), torch.ones(len(seen.target)))
    return written.text, {word: seen.source[int(row.argmax())] for word, row in zip(seen.target, seen.weights)}


def test_each_word_looks_at_its_own(translator: SequenceModel) -> None:
    text, looks = looked_at(translator, "My sister has never seen the sea.")
    assert text == "Ma sœur n'a jamais vu la mer."
    assert (looks["sœur"], looks["jamais"], looks["vu"], looks["mer"]) == ("sister", "never", "seen", "sea")


def test_a_pronoun_moves_before_the_verb(translator: SequenceModel) -> None:
    """Worked example 5 of the catalogue."""
    text, looks = looked_at(translator, "I love you")
    assert text == "je t'aime"
    assert looks["je"] == "I" and looks["t'aime"] in ("love", "you")


def test_nouns_and_adjectives_change_places(translator: SequenceModel) -> None:
    """Worked example 5."""
    text, looks = looked_at(translator, "the zone of international control")
    assert text == "la zone de contrôle international"
    assert looks == {"la": "the", "zone": "zone", "de": "of", "contrôle": "control", "international": "international"}


def test_words_that_are_given_look_at_their_own(translator: SequenceModel) -> None:
    (pair,) = translator.align(["the black cat"], ["le chat noir"])
    seen = alignment(pair)
    looks = {word: seen.source[int(row.argmax())] for word, row in zip(seen.target, seen.weights)}
    assert looks == {"le": "the", "chat": "cat", "noir": "black"}


def test_a_last_mark_is_not_needed(translator: SequenceModel) -> None:
    sentences = {"my sister has never seen the sea": "ma sœur n'a jamais vu la mer", "a red house": "une maison rouge"}
    assert {each.source: each.text for each in translator.predict(sentences)} == sentences
