"""Vocabularies: texts come back, numbers are stable, words are found, and files are checked."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard import RegardWarning
from regard_lab.models.base import END, PAD
from regard_lab.models.folders import ModelFileError
from regard_lab.text.vocabulary import FORMAT, SUBWORDS, UNKNOWN, SubwordVocabulary, SymbolVocabulary, Vocabulary, Word
from regard_lab.text.words import normalize

TEXTS = [
    "Qu'est-ce que c'est ? C'est l'État, « aujourd'hui » !",
    "The cat sat on the mat; the dog didn't sit on the cat.",
    "Il a 1984 ans et 3,14 € dans sa poche... N'est-ce pas ?",
    "你好,世界。你好吗?",
    "東京タワーへ行きます。",
    "नमस्ते दुनिया",
    "e\u0302tre ou ne pas e\u0302tre ? 👩‍👩‍👧 ❤️ 1️⃣",
] * 3


def _trained(kind: str, **options: Any) -> SubwordVocabulary:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RegardWarning)
        return SubwordVocabulary.train(TEXTS, kind, **options)


VOCABULARIES = {kind: _trained(kind) for kind in SUBWORDS}
SPELLING = {kind: _trained(kind, byte_fallback=True, lowercase=kind == "bpe") for kind in SUBWORDS}


@pytest.mark.parametrize("kind", SUBWORDS)
def test_known_texts_come_back(kind: str) -> None:
    vocabulary = VOCABULARIES[kind]
    for text in TEXTS:
        numbers = vocabulary.encode(text)
        assert vocabulary.decode([*numbers, END, *numbers]) == normalize(text)
        assert not vocabulary.unknown_places(numbers)
        assert "".join(vocabulary.tokens(numbers)) == "▁" + normalize(text).replace(" ", "▁")
        assert all(number > UNKNOWN for number in numbers)


@pytest.mark.parametrize("kind", SUBWORDS)
@given(text=st.text())
def test_any_text_comes_back_with_bytes(kind: str, text: str) -> None:
    vocabulary = SPELLING[kind]
    numbers = vocabulary.encode(text)
    assert vocabulary.decode(numbers) == normalize(text, vocabulary.lowercase)
    assert not vocabulary.unknown_places(numbers)


@pytest.mark.parametrize("kind", SUBWORDS)
@given(text=st.text(st.sampled_from(sorted(set("".join(TEXTS)))), max_size=40))
def test_any_text_of_known_characters_comes_back(kind: str, text: str) -> None:
    plain = normalize(text)
    if set(plain) <= set("".join(map(normalize, TEXTS))):
        assert VOCABULARIES[kind].decode(VOCABULARIES[kind].encode(text)) == plain


@given(text=st.text())
def test_symbols_come_back(text: str) -> None:
    for separator in ("", " "):
        vocabulary = SymbolVocabulary.train([text], separator)
        assert vocabulary.decode(vocabulary.encode(text)) == normalize(text)


@pytest.mark.parametrize("vocabulary", [*VOCABULARIES.values(), *SPELLING.values()])
@given(chance=st.randoms(use_true_random=False))
def test_words_part_any_tokens_in_order(vocabulary: SubwordVocabulary, chance: random.Random) -> None:
    numbers = [chance.randrange(UNKNOWN, len(vocabulary)) for _ in range(chance.randint(0, 20))]
    words = vocabulary.words([*numbers, END, 5])
    assert [place for word in words for place in word.tokens] == list(range(len(numbers)))
    assert all(len(word.tokens) for word in words)
    assert len(vocabulary.tokens(numbers)) == len(numbers)
    vocabulary.decode(numbers)  # whatever a model writes has a text


@pytest.mark.parametrize("kind", SUBWORDS)
def test_words_are_what_a_reader_calls_so(kind: str) -> None:
    vocabulary = SPELLING[kind]
    text = "L'État n'est-il pas 3,14 fois « grand » ?! Łódź"
    expected = ["L'État", "n'est-il", "pas", "3,14", "fois", "«", "grand", "»", "?!", "Łódź"]
    found = vocabulary.words(text)
    assert [word.text for word in found] == [normalize(word, vocabulary.lowercase) for word in expected]
    assert found == vocabulary.words(vocabulary.encode(text))
    assert [word.text for word in vocabulary.words("好世界")] in (
        ["好", "世", "界"],
        ["好", "世界"],
        ["好世", "界"],
        ["好世界"],
    )


def test_the_special_numbers_are_shown_and_cannot_be_written_in_a_text() -> None:
    vocabulary = VOCABULARIES["bpe"]
    assert vocabulary.tokens([PAD, END, UNKNOWN]) == ["<pad>", "</s>", "<unk>"]
    for other in (*VOCABULARIES.values(), *SPELLING.values()):
        for text in ("<pad>", "</s>", "0", "1 2", "<0x41>"):
            assert not {PAD, END} & set(other.encode(text))
    assert SPELLING["bpe"].tokens(SPELLING["bpe"].encode("Ω"))[-2:] == ["<0xCF>", "<0x89>"]


def test_unknown_characters_are_told_and_replaced() -> None:
    vocabulary = VOCABULARIES["bpe"]
    numbers = vocabulary.encode("the Ωmega Ж")
    assert [vocabulary.tokens(numbers)[place] for place in vocabulary.unknown_places(numbers)] == ["<unk>", "<unk>"]
    assert vocabulary.decode(numbers) == "the \ufffdmega \ufffd"
    assert vocabulary.decode(numbers, ["O", "Zh"]) == "the Omega Zh"
    assert vocabulary.decode(numbers, ["O"]) == "the Omega \ufffd"
    assert [word.text for word in vocabulary.words(numbers)] == ["the", "\ufffdmega", "\ufffd"]


def test_many_texts_are_encoded_as_each() -> None:
    texts = [*TEXTS, "", "  ", "the cat"]
    for vocabulary in (
        *VOCABULARIES.values(),
        *SPELLING.values(),
        SymbolVocabulary.train(TEXTS),
        SymbolVocabulary.train(TEXTS, " "),
    ):
        assert [each.tolist() for each in vocabulary.encode_all(texts)] == [vocabulary.encode(text) for text in texts]


@pytest.mark.slow
def test_training_does_not_depend_on_order_threads_or_hashes(monkeypatch) -> None:
    program = (
        "import sys, json, random; from regard_lab.text.vocabulary import SubwordVocabulary\n"
        "from regard_lab.text.vocabulary import SUBWORDS\n"
        "chance = random.Random(1)\n"
        "texts = [' '.join(''.join(chance.choices('aaabcdéx', k=chance.randint(1, 5))) for _ in range(8))"
        " for _ in range(300)]\n"
        "random.Random(int(sys.argv[1])).shuffle(texts)\n"
        "print(json.dumps([SubwordVocabulary.train(texts, kind).to_json() for kind in SUBWORDS]))"
    )
    with monkeypatch.context() as here, redirect_stdout(StringIO()) as said:  # this process has hashes of its own
        here.setattr(sys, "argv", ["", "1"])
        exec(program, {})
    environment = {**os.environ, "PYTHONHASHSEED": "2", "RAYON_NUM_THREADS": "2"}
    command = [sys.executable, "-c", program, "2"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found = [said.getvalue(), done.stdout]
    assert found[0] == found[1]
    assert [len(each["pieces"]) > 40 for each in json.loads(found[0])] == [True, True, False]


def test_a_size_is_reached_or_refused() -> None:
    assert len(SubwordVocabulary.train(TEXTS, "bpe", 150)) == 150
    assert len(SubwordVocabulary.train(TEXTS, "bpe", 420, byte_fallback=True)) == 420
    for kind in SUBWORDS:
        with pytest.warns(RegardWarning, match=r"size 5,000 is more than these texts support: \d+\.$"):
            vocabulary = SubwordVocabulary.train(TEXTS, kind, 5000)
        least = 3 + len(set("".join(map(normalize, TEXTS))))
        assert len(vocabulary) >= least
        assert len(SubwordVocabulary.train(TEXTS, kind, least)) == least
        expected = (
            f"SubwordVocabulary.train: size must be at least {least}, for the {least - 3} characters of these texts"
        )
        with pytest.raises(ValueError) as caught:
            SubwordVocabulary.train(TEXTS, kind, least - 1)
        assert str(caught.value) == f"{expected}, got {least - 1}."


def test_rare_characters_are_left_unknown() -> None:
    texts = ["abc abc"] * 100 + ["abz"]
    assert len(SubwordVocabulary.train(texts, "characters")) == 3 + 5
    vocabulary = SubwordVocabulary.train(texts, "bpe", rare=0.01)
    assert vocabulary.unknown_places(vocabulary.encode("az")) and not vocabulary.unknown_places(
        vocabulary.encode("cab")
    )
    assert "\0" not in SubwordVocabulary.train(["a\0b"] * 3).pieces


@pytest.mark.parametrize("vocabulary", [VOCABULARIES["bpe"], SPELLING["bpe"]], ids=["plain", "bytes"])
def test_sampled_texts_are_the_texts_in_other_pieces(vocabulary: SubwordVocabulary) -> None:
    texts = [*TEXTS, "", "Zoë isn't here."]
    plain = vocabulary.encode_all(texts)
    assert all((vocabulary.sample_all(texts, 0.0, 0)[i] == plain[i]).all() for i in range(len(texts)))
    sampled = vocabulary.sample_all(texts, 0.5, 1, 3)
    assert len(sampled) == 3 * len(texts)
    for i in range(len(sampled)):
        written = vocabulary.decode(sampled[i].tolist())
        assert written == vocabulary.decode(plain[i % len(texts)].tolist())
    assert len(sampled.numbers) > 1.2 * 3 * len(plain.numbers)
    several = {tuple(sampled[i].tolist()) for i in range(0, len(sampled), len(texts))}
    assert len(several) == 3, "each time spelled anew"
    again = vocabulary.sample_all(texts, 0.5, 1, 3)
    assert (again.numbers == sampled.numbers).all() and (again.offsets == sampled.offsets).all()


@pytest.mark.parametrize("kind", SUBWORDS)
def test_sentinels_stand_behind_all_others_and_in_no_text(kind: str) -> None:
    plain = SubwordVocabulary.train(TEXTS, kind, 85 if kind != "characters" else None)
    made = plain.with_sentinels(5)
    assert made.sentinels == list(range(len(plain), len(plain) + 5)) and plain.sentinels == []
    assert all(made.encode(text) == plain.encode(text) for text in TEXTS)
    again = Vocabulary.from_json(json.loads(json.dumps(made.to_json())))
    assert isinstance(again, SubwordVocabulary) and again.sentinels == made.sentinels
    assert len(made.decode([*plain.encode(TEXTS[0]), made.sentinels[2]])) == len(normalize(TEXTS[0])) + 1


def test_what_has_no_merges_is_not_sampled() -> None:
    with pytest.raises(
        ValueError, match=r"SubwordVocabulary\.sample_all: vocabulary must have the merges of 'bpe', got unigram"
    ):
        VOCABULARIES["unigram"].sample_all(TEXTS, 0.1, 0)
    with pytest.raises(
        ValueError, match=r"SymbolVocabulary\.sample_all: vocabulary must have the merges of 'bpe', got symbols"
    ):
        SymbolVocabulary(["a"]).sample_all(["a"], 0.1, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([" "],), "SubwordVocabulary.train: texts must have a text that is not empty, got none."),
        ((["a"], "word"), "SubwordVocabulary.train: kind must be one of 'bpe', 'characters', 'unigram', got 'word'."),
        ((["a"], "bpe", 2), "size must be at least 5, for the 2 characters of these texts, got 2."),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        SubwordVocabulary.train(*arguments)
    assert message in str(caught.value)
    with pytest.raises(ValueError, match=r"train: rare must be in \[0, 1\), got 1"):
        SubwordVocabulary.train(["a"], rare=1)


def test_symbols() -> None:
    phonemes = SymbolVocabulary.train(["K AE T", "T AE K"], " ")
    assert phonemes.symbols == ("AE", "K", "T")
    assert (len(phonemes), phonemes.encode(" T  AE D")) == (6, [5, 3, UNKNOWN])
    assert phonemes.decode([4, UNKNOWN, PAD, 5, END, 3], ["B"]) == "K B T"
    assert phonemes.tokens([4, UNKNOWN, END]) == ["K", "<unk>", "</s>"]
    assert phonemes.words("T AE") == [Word("T", range(1)), Word("AE", range(1, 2))]
    letters = SymbolVocabulary.train(["Été là"], lowercase=True)
    assert letters.decode(letters.encode("LA\u0300 ÉTÉ")) == "là été"
    for symbols, separator, message in (
        ("aa", "", "SymbolVocabulary: symbols must all be different, got 1 repeated."),
        (["ab"], "", "SymbolVocabulary: symbols must be single characters, got 'ab'."),
        (["a b"], " ", "SymbolVocabulary: symbols must be without spaces, got 'a b'."),
        ("ab", "-", "SymbolVocabulary: separator must be '' or ' ', got '-'."),
    ):
        with pytest.raises(ValueError) as caught:
            SymbolVocabulary(symbols, separator)
        assert str(caught.value) == message


SAVED: dict[str, Vocabulary] = {
    **VOCABULARIES,
    "bytes": SPELLING["bpe"],
    "symbols": SymbolVocabulary.train(TEXTS, lowercase=True),
}


@pytest.mark.parametrize("name", SAVED)
def test_codecs_survive_a_file(name: str) -> None:
    vocabulary = SAVED[name]
    again = Vocabulary.from_json(json.loads(json.dumps(vocabulary.to_json(), allow_nan=False)))
    assert type(again) is type(vocabulary)
    assert (len(again), again.to_json()) == (len(vocabulary), vocabulary.to_json())
    for text in (*TEXTS, "Unseen Ω"):
        assert again.encode(text) == vocabulary.encode(text)


def _edited(name: str, **changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(SAVED[name].to_json()), **changes}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "describe a vocabulary of format 'regard.codec', got []."),
        ({}, "describe a vocabulary of format 'regard.codec', got None."),
        ({"format": "x" * 99}, f"describe a vocabulary of format {FORMAT!r}, got 'xxxxx"),
        (_edited("bpe", version=2), "be of version 1, got 2."),
        (_edited("bpe", kind="word"), "be of a kind among symbols, bpe, unigram, characters, got 'word'."),
        (_edited("bpe", kind=["bpe"]), "be of a kind among symbols, bpe, unigram, characters, got ['bpe']."),
        (_edited("bpe", lowercase=1), "say true or false for 'lowercase', got 1."),
        (_edited("bpe", byte_fallback=None), "say true or false for 'byte_fallback', got None."),
        (_edited("bpe", pieces="abc"), "have a list of strings 'pieces', got 'abc'."),
        (_edited("bpe", pieces=["a", 1]), "have a list of strings 'pieces', got ['a', 1]."),
        (_edited("bpe", pieces=["a", "a"], rules=[]), "got this: SubwordVocabulary: pieces must all be different"),
        (_edited("bpe", pieces=["a", "b c"], rules=[]), "have a space at most at their beginning, got 'b c'."),
        (_edited("bpe", pieces=["a", "\ud800"], rules=[]), "describe a vocabulary"),
        (_edited("bpe", pieces=["a", "b"], rules=[["a", "b"]]), "rules must merge two pieces into one, got ('a', 'b')"),
        (_edited("bpe", rules=[["a"]]), "have pairs of strings as 'rules', got ['a']."),
        (_edited("bpe", rules=[["a", 2]]), "have pairs of strings as 'rules', got ['a', 2]."),
        (_edited("bpe", rules={}), "have a list 'rules', got {}."),
        (_edited("unigram", rules=[1.0]), "rules must be a finite score for each piece"),
        (_edited("unigram", pieces=["a"], rules=[float("nan")]), "rules must be a finite score for each piece"),
        (_edited("unigram", pieces=["a"], rules=["a"]), "rules must be a finite score for each piece"),
        (_edited("characters", pieces=["ab"]), "pieces must be single characters, without rules"),
        (_edited("symbols", symbols=["a", ""]), "have a list of strings 'symbols', got ['a', '']."),
        (_edited("symbols", symbols=["a", "a"]), "symbols must all be different, got 1 repeated"),
        (_edited("symbols", separator=3), "separator must be '' or ' ', got 3"),
    ],
)
def test_files_that_are_not_codecs_are_refused(data: object, message: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        Vocabulary.from_json(data, "model/source.json")
    assert str(caught.value).startswith("load: model/source.json must ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
