"""Symbols that a vocabulary or tokenizer does not know: counted, shown, and refused above a limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from regard_lab.text.ragged import Ragged
from regard_lab.text.tokenizer import Tokenizer
from regard_lab.text.unknown import Speller, check_unknown
from regard_lab.text.vocabulary import SubwordVocabulary, SymbolVocabulary
from regard_lab.training.options import MOST_UNKNOWN

TEXTS = ["the cat sat", "a cat", "the hat"] * 3


def _lines(speller: Speller, numbers: Ragged, texts: Sequence[str], most: float = MOST_UNKNOWN) -> list[str]:
    blocks = np.array_split(numbers.numbers, 3)  # the first unknown symbol may be in any
    return check_unknown(
        "target", speller, blocks, numbers.offsets[1:], lambda row: (f"line {row}", texts[row]), most
    )  # fmt: skip


@pytest.mark.parametrize(
    ("vocabulary", "text", "unknown"),
    [
        (SymbolVocabulary.train(TEXTS, lowercase=True), "The cow", ["o", "w"]),
        (SymbolVocabulary.train(["K AE T"], " "), "K OW T ER", ["OW", "ER"]),
        (SubwordVocabulary.train(TEXTS), "the cow мяу", ["o", "w", "м", "я", "у"]),
        (SubwordVocabulary.train(TEXTS, "characters"), "the cow", ["o", "w"]),
        (SubwordVocabulary.train(TEXTS, "unigram"), "the м", ["м"]),
        (SubwordVocabulary.train(TEXTS, "bpe", byte_fallback=True), "cow мяу \ufffd", []),
        (Tokenizer.learn(TEXTS, kind="characters"), "cow\n", ["o", "w", "\n"]),
        (Tokenizer.learn(TEXTS, kind="wordpiece"), "the cow sat", ["c", "o", "w"]),
        (Tokenizer.learn(TEXTS), "cow мяу \ufffd", []),
        (Tokenizer.learn([], kind="bytes"), "cow мяу \ufffd", []),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_what_is_unknown_is_found_in_numbers_and_texts(vocabulary, text: str, unknown: list[str]) -> None:
    numbers = vocabulary.encode(text)
    assert vocabulary.unknown_characters(text) == unknown
    places = vocabulary.unknown_places(numbers)
    assert len(places) == (1 if text == "the cow sat" else len(unknown)), "WordPiece has one token for an unknown word"
    assert vocabulary.unknown_places(np.array(numbers)) == places


def test_one_token_may_be_the_end_and_the_unknown_one() -> None:
    made = Tokenizer.learn(TEXTS)
    names = {"end": "<|endoftext|>", "unknown": "<|endoftext|>"}
    gpt = Tokenizer(made._engine, names)  # as GPT-2's files say
    assert gpt.unknown == gpt.end and gpt.unknown_places([gpt.end, gpt.end]) == []


def test_the_share_is_told_with_the_first_unknown_symbols() -> None:
    vocabulary, texts = SymbolVocabulary("abc"), ["abc" * 3, "ab", "abcabc zyxwvzy", "q"]
    numbers = vocabulary.encode_all(texts)
    assert _lines(vocabulary, numbers.take(np.arange(2)), texts) == []
    assert _lines(vocabulary, numbers, texts, most=1.0) == [
        "target: 9 of 26 symbols (34.6%) are unknown to the vocabulary (first in line 2: ' ', 'z', 'y', 'x', 'w', …)"
    ]
    with pytest.raises(ValueError) as caught:
        _lines(vocabulary, numbers, texts)
    assert str(caught.value) == (
        "train: target: 9 of 26 symbols (34.6%) are unknown to the vocabulary (first in line 2: ' ', 'z', 'y', 'x', "
        "'w', …). Use texts that it can spell or another vocabulary, or add --set data.max_unknown=1."
    )


def test_the_limit_itself_is_accepted() -> None:
    vocabulary = SymbolVocabulary("abc")
    for text, accepted in (("abcabcabcz", True), ("abcabcabz", False)):
        numbers = vocabulary.encode_all([text])
        if accepted:
            assert _lines(vocabulary, numbers, [text]) == [
                "target: 1 of 10 symbols (10.0%) are unknown to the vocabulary (first in line 0: 'z')"
            ]
        else:
            with pytest.raises(ValueError, match=r"1 of 9 symbols \(11\.1%\)"):
                _lines(vocabulary, numbers, [text])


def test_characters_that_a_new_vocabulary_drops_are_told() -> None:
    texts = ["abc abc"] * 100 + ["abz"]
    vocabulary = SubwordVocabulary.train(texts, "characters", rare=0.01)
    assert _lines(vocabulary, vocabulary.encode_all(texts), texts) == [
        "target: 1 of 804 symbols (0.1%) are unknown to the vocabulary (first in line 100: 'z')"
    ]
