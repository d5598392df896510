"""The pronouncer: what it accepts, and what it answers."""

from __future__ import annotations

import pytest
import torch

from regard._utils.errors import RegardWarning
from regard_lab.data.pairs import Pairs
from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.models import RecurrentConfig, RecurrentEncoderDecoder
from regard_lab.tasks.pronunciation.pronouncer import Pronouncer
from regard_lab.text.vocabulary import UNKNOWN, SymbolVocabulary
from regard_lab.training.options import TrainingOptions

PAIRS = Pairs(["abcdefghijklm", "nopqrstuvwxyz'-.", "nopqrstuvwxyz'-."], ["A B", "K", "T S"])


@pytest.fixture
def pronouncer() -> Pronouncer:
    made = Pronouncer.untrained(PAIRS, embedding=8, encoder=8, decoder=8, features=8)
    torch.manual_seed(0)
    torch.nn.init.normal_(made.model.model.output.weight, std=3.0)
    made.model.model.output.bias.data[UNKNOWN] = -99.0
    return made


@pytest.mark.parametrize(
    ("word", "plain"), [("Cat", "cat"), (" dog\n", "dog"), ("don’t", "don't"), ("x-ray", "x-ray"), ("a.m.", "a.m.")]
)
def test_spelling_is_normalized(pronouncer: Pronouncer, word: str, plain: str) -> None:
    assert pronouncer.read(word) == plain


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("", "pronounce: word must not be empty, got ''."),
        ("  ", "pronounce: word must not be empty, got '  '."),
        ("cat5", "pronounce: word must be spelled with a–z ' - ., got 'cat5', which has '5'."),
        ("naïve", "pronounce: word must be spelled with a–z ' - ., got 'naïve', which has 'ï'."),
        ("two words", "pronounce: word must be spelled with a–z ' - ., got 'two words', which has ' '."),
        ("\udce9", "pronounce: word must be spelled with a–z ' - ., got '\\udce9', which has '\\udce9'."),
        ("--", "pronounce: word must have a letter, got '--'."),
        ("a" * 65, "pronounce: word must have at most 64 letters, got '" + "a" * 60 + "', which has 65."),
    ],
)
def test_bad_words_are_named(pronouncer: Pronouncer, word: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        pronouncer.pronounce(["cat", word])
    assert str(caught.value) == message


def test_the_spelling_is_that_of_the_model() -> None:
    french = Pronouncer.untrained(Pairs(["L’Été"], ["L E T E"]), encoder=4, decoder=4)
    assert french.read("LE\u0301") == "lé"
    assert french.read("l’été") == "l’été"
    with pytest.raises(ValueError, match='word must be spelled with l t é ’, got "l\'", which has "\'"'):
        french.read("l'")
    few = Pronouncer.untrained(PAIRS, encoder=4, decoder=4, attention="location", max_length=5)
    with pytest.raises(ValueError, match="word must have at most 5 letters, got 'abcdef', which has 6"):
        few.read("abcdef")


def test_answers_come_in_order_with_their_weights(pronouncer: Pronouncer) -> None:
    words = ["Dog", "cat", "dog", "a"]
    spoken = pronouncer.pronounce(words)
    assert [each.source for each in spoken] == ["dog", "cat", "dog", "a"]
    assert spoken[0].tokens == spoken[2].tokens
    for each in spoken:
        assert each.text.split() == list(each.tokens)
        assert each.source_tokens == tuple(each.source)
        assert each.alignment.shape == (1, len(each.tokens), len(each.source))
        torch.testing.assert_close(each.alignment.sum(-1), torch.ones(1, len(each.tokens)))


def test_a_word_is_pronounced_the_same_in_any_company(pronouncer: Pronouncer) -> None:
    words = ["a", "zyx", "abcdefgh", "q-q", "don't"]
    together = [each.tokens for each in pronouncer.pronounce(words)]
    assert together == [pronouncer.pronounce([word])[0].tokens for word in words]
    _, said = pronouncer.evaluate(Pairs(words, ["K"] * 5))
    assert said == dict(zip(words, together))


def test_each_word_is_scored_against_its_nearest_pronunciation(pronouncer: Pronouncer) -> None:
    said = pronouncer.pronounce(["abc"])[0].text
    rates, _ = pronouncer.evaluate(Pairs(["abc", "abc", "Über"], ["A", said, "B"]))
    assert (rates.sequences, rates.wrong <= 1, rates.symbols) == (2, True, len(said.split()) + 1)


def test_making_one_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    Pronouncer.untrained(PAIRS, seed=1, encoder=4, decoder=4)
    assert torch.equal(torch.rand(3), expected)


def test_what_it_is_stands_in_its_folder(pronouncer: Pronouncer, tmp_path) -> None:
    folder = pronouncer.save(tmp_path / "model")
    assert SequenceModel.load(folder).about == {"task": "pronunciation"}
    again = Pronouncer.load(folder)
    assert [each.tokens for each in again.pronounce(["cat"])] == [each.tokens for each in pronouncer.pronounce(["cat"])]


@pytest.mark.parametrize("about", [{}, {"task": "translation"}, {"task": ["x" * 100]}])
def test_a_model_of_another_task_is_refused(pronouncer: Pronouncer, tmp_path, about: dict) -> None:
    pronouncer.model.about = about
    with pytest.raises(
        ValueError, match=r"config.json must describe a model of letters and phonemes, .* got task"
    ) as e:
        Pronouncer.load(pronouncer.save(tmp_path / "model"))
    assert len(str(e.value)) < 300 + len(str(tmp_path))


def test_a_model_of_other_symbols_is_refused(tmp_path) -> None:
    vocabulary = SymbolVocabulary.train(["K AE T"], " ")
    model = RecurrentEncoderDecoder(RecurrentConfig(len(vocabulary), len(vocabulary), encoder=4, decoder=4))
    folder = SequenceModel(model, vocabulary, vocabulary, {"task": "pronunciation"}).save(tmp_path / "model")
    with pytest.raises(ValueError, match="must describe a model of letters and phonemes"):
        Pronouncer.load(folder)


def test_words_that_it_cannot_spell_are_told_or_refused() -> None:
    known = Pairs(["cat", "tack"] * 9, ["K AE T", "T AE K"] * 9)
    few = TrainingOptions(steps=1, metric="per")
    pronouncer = Pronouncer.untrained(known, encoder=4, decoder=4)
    some = Pairs([*known.sources, "cot"], [*known.targets, "K AE T"], "words")
    with pytest.warns(RegardWarning, match=r"^learn: words: 1 of 66 symbols .* \(first in words, row 19: 'o'\)$"):
        pronouncer.learn(some, few)
    other = Pairs(["cat"] * 3, ["P IH G"] * 3, "words")
    with pytest.raises(
        ValueError, match=r"^train: phonemes: 9 of 9 symbols \(100\.0%\).*'P', 'IH', 'G'.*or add max_unknown=1\.$"
    ):
        pronouncer.learn(other, few)
    with pytest.warns(RegardWarning, match="phonemes: 9 of 9"):
        pronouncer.learn(other, few, max_unknown=1.0)
