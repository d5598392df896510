"""The pronouncer: what it accepts, and what it answers."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from regard.tasks import Pronouncer

ENTRIES = {"abcdefghijklm": [("A", "B")], "nopqrstuvwxyz'-.": [("K",), ("T", "S")]}


@pytest.fixture
def pronouncer() -> Pronouncer:
    made = Pronouncer.untrained(ENTRIES, embedding=8, encoder=8, decoder=8, features=8)
    torch.manual_seed(0)
    torch.nn.init.normal_(made.model.output.weight, std=3.0)
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
        ("a" * 65, "pronounce: word must have at most 64 letters, got 65 ('aaaaaaaaaaaa'...)."),
    ],
)
def test_bad_words_are_named(pronouncer: Pronouncer, word: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        pronouncer.pronounce(["cat", word])
    assert str(caught.value) == message


def test_answers_come_in_order_with_their_weights(pronouncer: Pronouncer) -> None:
    words = ["Dog", "cat", "dog", "a"]
    spoken = pronouncer.pronounce(words)
    assert [each.word for each in spoken] == ["dog", "cat", "dog", "a"]
    assert spoken[0].phonemes == spoken[2].phonemes
    for each in spoken:
        assert each.weights.shape == (len(each.phonemes), len(each.word))
        torch.testing.assert_close(each.weights.sum(-1), torch.ones(len(each.phonemes)))


def test_a_word_is_pronounced_the_same_in_any_company(pronouncer: Pronouncer) -> None:
    words = ["a", "zyx", "abcdefgh", "q-q", "don't"]
    together = pronouncer.say(words)
    assert together == {word: pronouncer.say([word])[word] for word in words}


def test_making_one_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    Pronouncer.untrained(ENTRIES, seed=1, encoder=4, decoder=4)
    assert torch.equal(torch.rand(3), expected)


def test_batches_hold_every_pronunciation(pronouncer: Pronouncer) -> None:
    batch = next(iter(pronouncer.batches(ENTRIES, size=3)))
    assert len(batch.source) <= 3
    singles = islice(pronouncer.batches(ENTRIES, size=1), 6)
    assert len({tuple(batch.target[0].tolist()) for batch in singles}) == 3
