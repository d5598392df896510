"""Tokenizers: texts come back, transformers gives the same numbers, and folders of others are read."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiers import examples
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from regard import RegardWarning
from regard_lab.models.folders import ModelFileError
from regard_lab.text.tokenizer import Tokenizer
from regard_lab.text.tokenizer_training import KINDS

TEXTS = [
    "The cat sat on the mat; the dog didn't sit on the cat.\n",
    "Qu'est-ce que c'est ? C'est l'État, « aujourd'hui » !\r\n\r\n",
    "if x == 10245:\n\treturn  [y for y in range(3)]\n\n\n",
    "नमस्ते दुनिया, 東京タワーへ行きます。 👩‍👩‍👧 ❤️",
] * 3
ALL = ("end", "pad", "begin", "mask", "cls", "sep")


def learned(kind: str, specials: Sequence[str] = ("end", "pad"), lowercase: bool = False) -> Tokenizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RegardWarning)
        return Tokenizer.learn(TEXTS, 400 if kind == "bpe" else None, kind, lowercase, specials=specials)


TOKENIZERS = {kind: learned(kind) for kind in KINDS}
#: Whatever UTF-8 can hold, and much of what pre-tokenizers look at.
ANY = st.text() | st.text(st.sampled_from(" \n\t\r'sd0123aé\u0301\u2028\x00\x1f<|endof>🌹\ufffd\u0935\u094d"))


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(text=ANY)
@example("<|endoftext|> <|pad|>")
@example("".join(map(chr, range(0x300))))
@example("  a   b \n \n\n  c\t\t\x00\x7f\x85\u00a0\u3000\ufeff")
def test_every_text_comes_back(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    numbers = tokenizer.encode(text)
    assert tokenizer.decode(numbers) == text
    assert not {tokenizer.end, tokenizer.pad} & set(numbers)
    assert tokenizer.encode_all([text, "", text])[2].tolist() == numbers
    assert len(tokenizer.tokens(numbers)) == len(numbers)
    assert all(shown.isprintable() for shown in tokenizer.tokens(numbers))
    if kind == "bytes":
        assert numbers == list(text.encode())


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(text=ANY)
def test_characters_come_back_where_they_are_known(text: str) -> None:
    tokenizer, known = TOKENIZERS["characters"], set("".join(TEXTS))
    assert tokenizer.decode(tokenizer.encode(text)) == "".join(c if c in known else "\ufffd" for c in text)
    assert len(tokenizer.encode(text)) == len(text)


def test_words_are_one_token_wherever_they_stand() -> None:
    with pytest.warns(RegardWarning, match="60 tokens are more than these texts support"):
        tokenizer = Tokenizer.learn(["the cat, (the) cats' \u00c9tat \u00e9tat!"] * 3, 60, "wordpiece", True)
    plain, behind, within = (tokenizer.encode(text) for text in ("the", " the", "(the)"))
    assert plain == behind == within[1:2] and len(plain) == 1 and len(within) == 3
    assert tokenizer.tokens(tokenizer.encode("cats \u00c9TAT")) == ["cats", "\u00e9tat"]
    unseen = tokenizer.encode("cat \u6771 the")
    assert unseen[1] == tokenizer.unknown and tokenizer.decode(unseen) == "cat \ufffd the"
    pieces = tokenizer.encode("cathe")
    assert len(pieces) > 1 and tokenizer.decode(pieces) == "cathe"
    assert tokenizer.word_starts[pieces].tolist() == [True] + [False] * (len(pieces) - 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [300, 400])
def test_the_same_texts_make_the_same_tokenizer(kind: str, size: int) -> None:
    rare = "".join(chr(0x4E00 + n) + " ab"[n % 3] for n in range(500))  # as frequent as each other, and too many
    texts = [*TEXTS, rare, "stars rats arts tars star rat art tar"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RegardWarning)
        made = [Tokenizer.learn(texts, None if kind == "bytes" else size, kind) for _ in range(4)]
    assert len({each.checksum() for each in made}) == 1
    assert kind == "bytes" or len(made[0]) <= size


@pytest.mark.parametrize("lowercase", [False, True])
def test_word_pieces_are_those_of_the_library(lowercase: bool) -> None:
    theirs = tokenizers.BertWordPieceTokenizer(lowercase=lowercase, strip_accents=False)
    texts = [text for text in TEXTS if "cat" in text] + ["a rose is a rose, is it?", "R\u00f6schen rot, roses red"] * 3
    theirs.train_from_iterator(texts, 120, 2, special_tokens=["[UNK]"], show_progress=False)
    with pytest.warns(RegardWarning, match="120 tokens are more than these texts support"):
        ours = Tokenizer.learn(texts, 120, "wordpiece", lowercase, specials=())
    for text in (*texts, "Roses sat on 10245 mats.", "the end"):
        shown = [token.replace("[UNK]", "\ufffd") for token in theirs.encode(text, add_special_tokens=False).tokens]
        assert [ours._engine.id_to_token(number) for number in ours.encode(text)] == shown


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(numbers=st.lists(st.integers(0, 500), max_size=40))
def test_a_stream_of_any_numbers_is_their_text(kind: str, numbers: list[int]) -> None:
    tokenizer = TOKENIZERS[kind]
    stream = tokenizer.decode_stream()
    assert "".join([*map(stream.push, numbers), stream.close()]) == tokenizer.decode(numbers)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(text=ANY)
def test_a_stream_shows_no_half_character(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    stream, shown = tokenizer.decode_stream(), ""
    whole = tokenizer.decode(tokenizer.encode(text))
    for number in tokenizer.encode(text):
        shown += stream.push(number)
        assert whole.startswith(shown)
    assert shown + stream.close() == whole


@pytest.fixture(scope="module", params=[(kind, low, names) for kind in KINDS for low in (0, 1) for names in ((), ALL)])
def pair(request: Any, tmp_path_factory: Any) -> tuple[Tokenizer, Any, Any]:
    kind, lowercase, names = request.param
    tokenizer = learned(kind, names or ("end", "pad"), bool(lowercase))
    folder = tokenizer.save(tmp_path_factory.mktemp("tokenizer"))
    return tokenizer, PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")), folder


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(text=ANY.filter(lambda text: "<|" not in text), specials=st.booleans())
def test_transformers_gives_the_same_numbers(pair: tuple[Tokenizer, Any, Any], text: str, specials: bool) -> None:
    ours, theirs, _ = pair
    assert ours.encode(text, specials=specials) == theirs(text, add_special_tokens=specials)["input_ids"]


def test_transformers_reads_what_is_saved(pair: tuple[Tokenizer, Any, Any]) -> None:
    ours, _, folder = pair
    for theirs in (AutoTokenizer.from_pretrained(folder), PreTrainedTokenizerFast.from_pretrained(folder)):
        assert len(theirs) == len(ours)
        roles = {"end": theirs.eos_token_id, "pad": theirs.pad_token_id, "begin": theirs.bos_token_id}
        roles |= {"mask": theirs.mask_token_id, "cls": theirs.cls_token_id, "sep": theirs.sep_token_id}
        assert roles == {role: getattr(ours, role) for role in roles}
        assert theirs.unk_token_id == ours.unknown
        numbers = ours.encode("The cat, <|endoftext|> 東京", parse_specials=True, specials=True)
        assert theirs("The cat, <|endoftext|> 東京")["input_ids"] == numbers
        assert theirs.decode(numbers) == ours.decode(numbers, specials=True)
        first, second = ours.encode_pair("the", "dog")
        both = theirs("the", "dog", return_token_type_ids=True)
        assert (both["input_ids"], both["token_type_ids"]) == (first, second)


def test_what_is_saved_is_read(pair: tuple[Tokenizer, Any, Any], tmp_path: Path) -> None:
    ours, _, folder = pair
    again = Tokenizer.load(folder)
    assert again.checksum() == ours.checksum()
    assert again.roles() == ours.roles()
    again.save(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_names_of_special_tokens_are_text_unless_asked() -> None:
    tokenizer = TOKENIZERS["bpe"]
    assert tokenizer.end is not None
    assert tokenizer.encode("<|endoftext|>", parse_specials=True) == [tokenizer.end]
    assert tokenizer.end not in tokenizer.encode("<|endoftext|>")
    assert tokenizer.end not in tokenizer.encode_all(["<|endoftext|>"]).numbers
    numbers = [tokenizer.end, *tokenizer.encode("cat"), tokenizer.end]
    assert tokenizer.decode(numbers) == "cat"
    assert tokenizer.decode(numbers, specials=True) == "<|endoftext|>cat<|endoftext|>"
    assert tokenizer.encode("cat", specials=True) == numbers[:-1]
    assert tokenizer.decode(torch.tensor(numbers)) == tokenizer.decode(np.array(numbers)) == "cat"


def test_the_same_texts_give_the_same_tokenizer() -> None:
    sums = {learned("bpe").checksum() for _ in range(3)}
    assert len(sums) == 1


def test_size_is_what_was_asked() -> None:
    assert len(learned("bpe")) == 400
    assert len(Tokenizer.learn(["abc" * 3, "ab", "a"], 5, "characters", specials=("end",))) == 5
    assert "c" not in Tokenizer.learn(["abc" * 3, "ab", "a"], 4, "characters", specials=("end",)).decode([0, 1, 2, 3])
    with pytest.warns(RegardWarning, match="400 tokens are more than these texts support: 259"):
        Tokenizer.learn(["aa aa"], 400)


def test_word_starts() -> None:
    tokenizer = TOKENIZERS["bpe"]
    numbers = tokenizer.encode("the mat, 東京")
    text = "".join(
        ("|" if tokenizer.word_starts[number] else "") + shown
        for number, shown in zip(numbers, tokenizer.tokens(numbers))
    )
    assert text.startswith("the|▁")
    assert "|," in text
    assert tokenizer.word_starts[tokenizer.end]


def test_many_texts_are_encoded_in_blocks(monkeypatch: Any) -> None:
    monkeypatch.setattr("regard_lab.text.tokenizer._BLOCK", 64)
    tokenizer, texts = TOKENIZERS["bpe"], [*TEXTS, "", "x"] * 3
    ragged = tokenizer.encode_all(iter(texts))
    assert [row.tolist() for row in ragged] == [tokenizer.encode(text) for text in texts]
    assert len(tokenizer.encode_all([])) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_encoded(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    half = r"^encode: text must be text that UTF-8 can hold, got half a surrogate pair, U\+D83D, at character 1\.$"
    with pytest.raises(ValueError, match=half):
        tokenizer.encode("a\ud83d")
    with pytest.raises(ValueError, match=r"^encode_all: text 1 must be text that UTF-8 can hold, got half"):
        tokenizer.encode_all(["a", "\udc00"])
    with pytest.raises(TypeError, match=r"^encode: text must be a str, got 5\.$"):
        tokenizer.encode(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^encode_all: texts must be several texts"):
        tokenizer.encode_all("abc")
    with pytest.raises(ValueError, match=r"^encode_pair: second must be text"):
        tokenizer.encode_pair("a", "\udc00")
    with pytest.raises(ValueError, match=r"^decode: numbers must be whole numbers of at least 0, got -100\.$"):
        tokenizer.decode([-100])
    assert tokenizer.decode([9999999]) == ""
    assert tokenizer.tokens([9999999]) == ["<9999999>"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kind": "words"}, "kind must be one of 'bpe', 'bytes', 'characters', 'wordpiece', got 'words'"),
        ({"size": 200}, "size must be at least 258, for 256 bytes and 2 special tokens, got 200"),
        ({"size": 200, "kind": "bytes"}, "size must be at least 258, or None"),
        ({"size": 1, "kind": "characters"}, "size must be at least 4"),
        ({"size": 3, "kind": "wordpiece"}, "size must be at least 4, for a character, the unknown one and"),
        ({"specials": ("stop",)}, "specials must be one of"),
        ({"specials": ("cls",)}, "have both or neither of 'cls' and 'sep'"),
        ({"texts": [], "size": 300}, "texts must have a text that is not empty, got none"),
        ({"texts": ["", " \n"], "kind": "wordpiece"}, "texts must have a text that is not empty, got none"),
        ({"texts": ["", ""], "kind": "characters"}, "texts must have a text that is not empty, got none"),
        ({"texts": ["a", "\ud800"], "size": 300}, "text 1 must be text that UTF-8 can hold"),
    ],
)
def test_what_cannot_be_learned(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Tokenizer.learn(**{"texts": TEXTS, **options})


def test_texts_must_be_texts() -> None:
    with pytest.raises(TypeError, match="texts must be several texts"):
        Tokenizer.learn("abc")
    with pytest.raises(TypeError, match="text 0 must be a str, got 3"):
        Tokenizer.learn([3], 300)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="be a token that has a number, got '<s>'"):
        Tokenizer(tokenizers.Tokenizer(models.BPE()), {"begin": "<s>"})


# --- folders of others ---


def word_piece(lower: bool = True) -> tokenizers.Tokenizer:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "sat", ",", "c", "##a", "T", "!"]
    engine = tokenizers.Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    engine.normalizer = normalizers.BertNormalizer(lowercase=lower)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    engine.decoder = decoders.WordPiece()
    engine.add_special_tokens(pieces[:5])
    return engine


def byte_level(specials: Sequence[str], roberta: bool = False) -> tokenizers.Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    numbers = {c: i for i, c in enumerate([*(specials if roberta else ()), *letters])}
    engine = tokenizers.Tokenizer(models.BPE(numbers, []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens(list(specials))
    if roberta:
        engine.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    else:
        engine.post_processor = processors.ByteLevel()
    return engine


def llama() -> tokenizers.Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "b", "é"]
    engine = tokenizers.Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    engine.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    engine.add_special_tokens(pieces[:3])
    engine.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return engine


def albert() -> tokenizers.Tokenizer:
    pieces = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]", "▁the", "▁", "cat", "s", "▁c"]
    engine = tokenizers.Tokenizer(models.Unigram([(p, -1.0 - i / 9) for i, p in enumerate(pieces)], unk_id=1))
    engine.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()])
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.decoder = decoders.Metaspace()
    engine.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    engine.add_special_tokens(pieces[:5])
    return engine


FAMILIES: dict[str, tuple[tokenizers.Tokenizer, dict[str, Any], dict[str, int]]] = {
    "gpt2": (byte_level(["<|endoftext|>"]), {"model_max_length": 1024}, {"end": 256}),
    "gpt2 that says more": (
        byte_level(["<|endoftext|>"]),
        {"eos_token": {"content": "<|endoftext|>"}, "bos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
        {"end": 256, "begin": 256, "unknown": 256},
    ),
    "roberta": (
        byte_level(["<s>", "<pad>", "</s>", "<unk>", "<mask>"], roberta=True),
        {},
        {"end": 2, "pad": 1, "begin": 0, "mask": 4, "cls": 0, "sep": 2, "unknown": 3},
    ),
    "bert": (word_piece(), {"do_lower_case": True}, {"pad": 0, "mask": 4, "cls": 2, "sep": 3, "unknown": 1}),
    "llama": (
        llama(),
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None},
        {"end": 2, "begin": 1, "unknown": 0},
    ),
    "llama 3": (
        byte_level(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        {"end": 258, "begin": 256},
    ),
    "albert": (
        albert(),
        {"bos_token": "[CLS]", "eos_token": "[SEP]"},
        {"end": 3, "pad": 0, "begin": 2, "mask": 4, "cls": 2, "sep": 3, "unknown": 1},
    ),
}


def folder_of(name: str, folder: Path) -> Path:
    engine, config, _ = FAMILIES[name]
    engine.enable_padding(length=1_000_000)
    engine.enable_truncation(4)
    (folder / "tokenizer.json").write_text(engine.to_str(), encoding="utf-8")
    engine.no_padding()
    engine.no_truncation()
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "auto_map": {"AutoTokenizer": "evil.py"}}))
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_others(name: str, tmp_path: Path) -> None:
    engine, _, roles = FAMILIES[name]
    tokenizer = Tokenizer.load(folder_of(name, tmp_path))
    assert tokenizer.roles() == roles
    assert len(tokenizer) == engine.get_vocab_size()
    for text in ("the cats sat, a béa", "THE cat!", "", "日本 a"):
        for specials in (False, True):
            assert tokenizer.encode(text, specials=specials) == engine.encode(text, add_special_tokens=specials).ids
        numbers = tokenizer.encode(text, specials=True)
        stream = tokenizer.decode_stream()
        assert "".join([*map(stream.push, numbers), stream.close()]) == tokenizer.decode(numbers)
        assert len(tokenizer.tokens(numbers)) == len(numbers)
        first = tokenizer.encode(text.partition(" ")[0], specials=True)
        if first == numbers[: len(first)]:
            stream = tokenizer.decode_stream(first)
            rest = "".join([*map(stream.push, numbers[len(first) :]), stream.close()])
            assert tokenizer.decode(first) + rest == tokenizer.decode(numbers), "spaced as behind what comes first"
    assert len(tokenizer.word_starts) == len(tokenizer)
    tokenizer.save(tmp_path / "again")
    again = Tokenizer.load(tmp_path / "again")
    assert (again.roles(), again.checksum()) == (roles, tokenizer.checksum())
    assert "auto_map" not in (tmp_path / "again" / "tokenizer_config.json").read_text()
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "again")
    assert theirs("the cats")["input_ids"] == tokenizer.encode("the cats", specials=True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("bpe", ""), ("bytes", ""), ("characters", "ЖжŽ"), ("wordpiece", "ЖжŽx"), ("lower case", "ЖжŽ")],
)
def test_characters_that_a_vocabulary_cannot_spell(name: str, expected: str) -> None:
    kind = {"lower case": "characters"}.get(name, name)
    tokenizer = learned(kind, ALL, lowercase=name == "lower case")
    assert "".join(tokenizer.unknown_characters("The\tcat Жж Žx")) == expected
    assert not tokenizer.unknown_characters("") and not tokenizer.unknown_characters(TEXTS[0])
    marked = tokenizer.unknown_characters("the <|mask|>Ж", parse_specials=True)
    assert marked == ["Ж"] * bool(expected)


def test_characters_that_are_left_out_without_a_word_are_unknown_too() -> None:
    engine = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    assert Tokenizer(engine).unknown_characters("ab éa") == ["é"], "there is no unknown token"
    engine.normalizer = normalizers.StripAccents()
    assert Tokenizer(engine).unknown_characters("a\u0301b") == [], "normalizing is no loss"


def test_a_stream_of_byte_fallback_and_pieces() -> None:
    tokenizer = Tokenizer(llama())
    numbers = tokenizer.encode("a 日本é b")
    stream = tokenizer.decode_stream()
    pushed = [stream.push(number) for number in numbers]
    assert "\ufffd" not in "".join(pushed)
    assert "".join(pushed) == "a 日本é b"
    assert "日" in pushed
    endless = [tokenizer.decode_stream().push(3 + 0xE6) for _ in range(20)]
    assert endless == [""] * 20
    stream = tokenizer.decode_stream()
    assert "".join(stream.push(3 + 0xE6) for _ in range(20))  # never a character: it does not wait for ever


def test_words_of_word_piece_begin_without_hashes() -> None:
    tokenizer = Tokenizer(word_piece())
    assert tokenizer.word_starts[tokenizer.encode("the cats sat")].tolist() == [True, True, False, True]
    assert Tokenizer(albert()).word_starts[5:].tolist() == [True, True, False, False, True]


def test_special_tokens_map_says_what_the_configuration_does_not(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level(["<|a|>", "<|b|>", "<pad>"]).to_str(), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|a|>", "pad_token": null, "mask_token": "none"}')
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|b|>", "bos_token": {"content": "<|b|>"}}')
    assert Tokenizer.load(tmp_path).roles() == {"end": 256, "begin": 257}


def test_a_vocabulary_of_bert_alone(tmp_path: Path) -> None:
    pieces = word_piece().get_vocab()
    (tmp_path / "vocab.txt").write_text("\n".join(sorted(pieces, key=pieces.__getitem__)) + "\n")
    for lower in (True, False):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
        tokenizer, engine = Tokenizer.load(tmp_path), word_piece(lower)
        assert tokenizer.encode("The cats, [MASK]!", specials=True, parse_specials=True) == (
            engine.encode("The cats, [MASK]!").ids
        )
        assert tokenizer.roles() == {"pad": 0, "mask": 4, "cls": 2, "sep": 3, "unknown": 1}
    (tmp_path / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\nC\nO\n")
    with pytest.raises(ModelFileError, match=r"be a WordPiece vocabulary, .* got no piece that begins with ##"):
        Tokenizer.load(tmp_path)


def test_folders_that_cannot_be_read(tmp_path: Path, monkeypatch: Any) -> None:
    def refused(sentence: str) -> None:
        with pytest.raises(ModelFileError, match=sentence):
            Tokenizer.load(tmp_path)

    with pytest.raises(ModelFileError, match=r"be a folder with tokenizer\.json, got no such folder"):
        Tokenizer.load(tmp_path / "none")
    refused("have a tokenizer.json, or the vocab.txt of BERT, got neither")
    (tmp_path / "spiece.model").write_bytes(b"\n\x0e\n")
    refused(r"got only a SentencePiece model, spiece\.model, which is not read")
    path = tmp_path / "tokenizer.json"
    for text in ("", "{}", "[1]", '{"model": 3}', "\0", '{"model":{"type":"BPE","vocab":{},"merges":["a b"]}}'):
        path.write_text(text)
        refused("be a tokenizer in JSON, got something else")
    path.write_bytes(b"\xff\xfe")
    refused("not in UTF-8")
    # The library panics on this one.
    path.write_text('{"model":{"type":"BPE","continuing_subword_prefix":"##","vocab":{"a":0,"b":1},"merges":["a b"]}}')
    refused("be a tokenizer in JSON, got something else")
    path.write_text('{"model":{"type":"BPE","vocab":{"a":4000000000},"merges":[]}}')
    refused("number tokens, from 0 to at most")
    path.write_text(byte_level(["<|endoftext|>"]).to_str(), encoding="utf-8")
    for text, sentence in (("{", "be JSON"), ("[1]", "hold a JSON object"), ("[" * 100_000, "be JSON")):
        (tmp_path / "tokenizer_config.json").write_text(text)
        refused(sentence)
    (tmp_path / "tokenizer_config.json").unlink()
    Tokenizer.load(tmp_path)
    monkeypatch.setattr("regard_lab.text.tokenizer._LARGEST", 100)
    refused("have at most 100 bytes, got more")


def _with_byte_fallback() -> Tokenizer:
    """Return a tokenizer as SentencePiece's are: what has no token of its own is written as bytes."""
    pieces = [
        ("<unk>", 0.0),
        *((f"<0x{byte:02X}>", 0.0) for byte in range(256)),
        ("▁", -1.0),
        ("a", -2.0),
        ("▁a", -1.5),
    ]
    engine = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0, byte_fallback=True))
    engine.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    parts = tokenizers.decoders
    engine.decoder = parts.Sequence(
        [parts.Replace("▁", " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(" ", 1, 0)]
    )
    return Tokenizer(engine)


@pytest.mark.parametrize("text", ["水火木金土" * 6, "a 水a🌹🌹🌹水水é a", "🌹" * 9])
def test_characters_that_are_written_as_bytes_appear_whole(text: str) -> None:
    tokenizer = _with_byte_fallback()
    numbers, stream = tokenizer.encode(text), tokenizer.decode_stream()
    parts = [*map(stream.push, numbers), stream.close()]
    assert "".join(parts) == text == tokenizer.decode(numbers)
    assert not any("\ufffd" in part for part in parts)


def test_a_wrong_byte_takes_no_character_beside_it_along() -> None:
    tokenizer = _with_byte_fallback()
    numbers = tokenizer.encode("水火木")
    assert tokenizer.decode(numbers[:4] + numbers[5:]) == "水�木"
    random_bytes, all_numbers = random.Random(0), tokenizer.encode("水a🌹é a")
    for _ in range(300):
        drawn = [random_bytes.choice(all_numbers) for _ in range(random_bytes.randint(1, 30))]
        stream = tokenizer.decode_stream()
        assert "".join([*map(stream.push, drawn), stream.close()]) == tokenizer.decode(drawn)
