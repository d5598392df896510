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
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 20_000_000
    card = (folder / pretrained.CARD).read_text(encoding="utf-8")
    for said in ("CC-BY 2.0", "Tatoeba", "manythings.org/anki", "BLEU", "make pretrained"):
        assert said in card


def test_what_licences_ask_for_is_in_the_notice() -> None:
    notice = (pretrained.path(pretrained.TRANSLATOR) / "NOTICE").read_text(encoding="utf-8")
    asked = ("CC BY 2.0 FR", "© European Union", "Koehn", "Open Government Licence", "CC BY 4.0", "CC BY-SA 4.0",
             "CC BY-SA 3.0", "MPL 2.0")  # fmt: skip
    assert all(each in notice for each in asked)
    # Every collection that is trained on stands in it.
    for name in ("MGSM", "African Storybook", "React", "Raspberry Pi", "GNOME", "Debian", "Mozilla", "Python", "CLDR"):
        assert name in notice


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


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ("Hello!", ("Bonjour !", "Salut !")),
        ("Hi!", ("Salut !", "Bonjour !")),
        ("hi", ("salut", "Salut", "bonjour")),
        ("No.", ("Non.",)),
        ("Yes.", ("Oui.",)),
        ("Good morning!", ("Bonjour !",)),
        ("Good night.", ("Bonne nuit.",)),
        ("Goodbye!", ("Au revoir !",)),
        ("Thank you very much.", ("Merci beaucoup.",)),
        ("How are you?", ("Comment vas-tu ?", "Comment allez-vous ?", "Comment ça va ?")),
        ("I don't know.", ("Je ne sais pas.", "Je l'ignore.")),
        ("I don’t know.", ("Je ne sais pas.", "Je l’ignore.")),
        ("i don't know", ("Je ne sais pas", "je ne sais pas", "Je ne sais pas.")),
        ("I DON'T KNOW.", ("JE NE SAIS PAS.", "JE L'IGNORE.")),
        ("I am not hungry.", ("Je n'ai pas faim.",)),
        ("Don't move!", ("Ne bougez pas !", "Ne bouge pas !")),
        ("What time is it?", ("Quelle heure est-il ?",)),
        ("WHERE IS THE STATION?", ("OÙ EST LA GARE ?", "OÙ SE TROUVE LA GARE ?")),
        ("twenty-three", ("vingt-trois",)),
        ("It costs $15.50.", ("Ça coûte 15,50 $.", "Cela coûte 15,50 $.", "Il coûte 15,50 $.")),
        ("3,500 people came.", ("3 500 personnes sont venues.", "3 500 personnes vinrent.")),
        ("He was born in 1987.", ("Il est né en 1987.", "Il naquit en 1987.")),
        ("My name is Zuzana.", ("Je m'appelle Zuzana.", "Mon nom est Zuzana.")),
        ("Hello 😀", ("Bonjour 😀", "Salut 😀")),
        ("<b>Hello</b>", ("<b>Bonjour</b>", "<b>Bonjour.</b>", "<b>Salut</b>")),
    ],
)
def test_what_users_type_first(translator: SequenceModel, source: str, texts: tuple[str, ...]) -> None:
    (prediction,) = translator.predict([source])
    assert prediction.text in texts and not prediction.note


@pytest.mark.parametrize(
    ("source", "copied"),
    [
        ("See https://example.com/a?b=1 for more.", "https://example.com/a?b=1"),
        ("Write to anna@example.org, please.", "anna@example.org"),
        ("I am in Ouagadougou with Przemysław.", "Przemysław"),
        ("The code is 8675309.", "8675309"),
        ("He arrived on 5 March 2019.", "5 mars 2019"),
        ("I like it 👍🏽 #sunday", "#sunday"),
    ],
)
def test_what_is_copied(translator: SequenceModel, source: str, copied: str) -> None:
    (prediction,) = translator.predict([source])
    assert copied in prediction.text


def test_the_best_known_example_of_alignment(translator: SequenceModel) -> None:
    """The sentence of Bahdanau 2014, figure 3."""
    text, looks = looked_at(translator, "The agreement on the European Economic Area was signed in August 1992.")
    assert text.startswith("L'accord sur") and text.endswith("a été signé en août 1992.")
    assert (looks["signé"], looks["août"], looks["1992"]) == ("signed", "August", "1992")


def test_a_text_in_another_language_is_reported(translator: SequenceModel) -> None:
    from regard_lab.generation.sequence_model import UNUSUAL

    foreign = ["Ich habe gestern meinen Schlüssel verloren.", "Привет, как дела?"]
    assert all(UNUSUAL in each.note for each in translator.predict(foreign))
    usual = ["I have lost my keys.", "Thank you for your help.", "Where do you live?"]
    assert not any(each.note for each in translator.predict(usual))


def test_short_answers_come_out_as_references(translator: SequenceModel) -> None:
    known = {
        "Hello.": "Bonjour.", "Yes.": "Oui.", "No.": "Non.", "Please.": "S'il vous plaît.", "Sorry.": "Désolé.",
        "Thanks.": "Merci !", "Perhaps.": "Peut-être.", "Never.": "Jamais.", "Always.": "Toujours.",
    }  # fmt: skip
    assert {each.source: each.text for each in translator.predict(known)} == known
