"""Shards: numbers come back from files and arrays alike, and what is not whole is refused."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from regard_lab.data import packing as module
from regard_lab.data.packing import MANIFEST, TokenShards, write_shards
from regard_lab.text.tokenizer import Tokenizer

BYTES = Tokenizer.learn([], kind="bytes")
E = 256


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(texts=st.lists(st.text(max_size=20), min_size=1, max_size=12), size=st.integers(1, 40))
def test_documents_come_back(tmp_path_factory: Any, texts: list[str], size: int) -> None:
    folder = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard_lab.text.tokenizer._BLOCK", 10)
        shards = write_shards(iter(texts), BYTES, folder, size=size)
    expected = [[E, *text.encode(), E] for text in texts]
    again = TokenShards.open(folder)
    memory = TokenShards.of(expected, len(BYTES))
    unpickled = pickle.loads(pickle.dumps(again)), pickle.loads(pickle.dumps(memory))
    for each in (shards, again, memory, *unpickled):
        assert len(each) == len(texts)
        assert each.tokens == sum(map(len, expected))
        assert each.vocabulary == 258
        assert [each.document(row).tolist() for row in range(len(each))] == expected
        places = np.arange(each.tokens)[::-1].reshape(1, -1)
        assert each.gather(places)[0, ::-1].tolist() == [number for row in expected for number in row]
    assert again.tokenizer == BYTES.checksum()
    assert all(path.stat().st_size % 2 == 0 for path in folder.glob("tokens-*"))


def test_what_stands_around_documents(tmp_path: Path) -> None:
    def written(tokenizer: Tokenizer, name: str, **options: Any) -> list[list[int]]:
        shards = write_shards(["a", "bc", ""], tokenizer, tmp_path / name, **options)
        return [shards.document(row).tolist() for row in range(len(shards))]

    assert written(BYTES, "plain", specials=False) == [[97], [98, 99], []]
    assert written(BYTES, "both") == [[E, 97, E], [E, 98, 99, E], [E, E]]
    both = Tokenizer.learn([], kind="bytes", specials=("end", "begin"))
    assert written(both, "two") == [[257, 97, 256], [257, 98, 99, 256], [257, 256]]
    encoder = Tokenizer.learn([], kind="bytes", specials=("cls", "sep"))
    assert written(encoder, "encoder") == [[256, 97, 257], [256, 98, 99, 257], [256, 257]]
    bare = Tokenizer.learn([], kind="bytes", specials=("pad",))
    assert written(bare, "bare") == [[97], [98, 99], []]
    no_template = Tokenizer(bare._engine, {"end": "<|pad|>"})
    assert written(no_template, "end") == [[97, 256], [98, 99, 256], [256]]


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    letters = "".join(map(chr, [*range(0x20, 0xD800), *range(0xE000, 0x14000)]))
    tokenizer = Tokenizer.learn([letters], kind="characters")
    shards = write_shards([letters[-9:]], tokenizer, tmp_path)
    assert json.loads((tmp_path / MANIFEST).read_text())["dtype"] == "uint32"
    assert tokenizer.decode(shards.document(0)) == letters[-9:]


def test_memory_is_bounded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("regard_lab.text.tokenizer._BLOCK", 1 << 14)
    calls: list[tuple[int, int]] = []
    most = []
    for count in (20, 200):
        tracemalloc.start()
        shards = write_shards(
            ("a b c " * 1000 for _ in range(count)), BYTES, tmp_path / str(count), progress=lambda *n: calls.append(n)
        )
        most.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert most[1] < 1.3 * most[0]
    assert calls[-1] == (200, shards.tokens)


def test_an_interrupted_writing_is_noticed(tmp_path: Path) -> None:
    def interrupted() -> Any:
        yield "a" * 100
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(interrupted(), BYTES, tmp_path, size=10)
    with pytest.raises(ValueError, match=r"have a shards\.json, got a writing that was interrupted: write it again\.$"):
        TokenShards.open(tmp_path)
    write_shards(["b"], BYTES, tmp_path)
    assert TokenShards.open(tmp_path).document(0).tolist() == [E, 98, E]
    with pytest.raises(ValueError, match=r"have no shards yet, got one with shards\.json"):
        write_shards(["c"], BYTES, tmp_path)


def test_files_that_were_changed(tmp_path: Path) -> None:
    def refused(sentence: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=sentence):
            TokenShards.open(tmp_path, **options)

    refused("got none")
    with pytest.raises(ValueError, match="be a folder of shards, got no such folder"):
        TokenShards.open(tmp_path / "none")
    write_shards(["abc", "def"], BYTES, tmp_path)
    path, ends, manifest = (tmp_path / name for name in ("tokens-00000.bin", "ends.bin", MANIFEST))
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    refused(r"tokens-00000\.bin must have 20 bytes, got 19: cut short or changed\.$")
    path.write_bytes(b"\xff" * len(data))
    refused(r"tokens-00000\.bin must be the file that shards\.json was written with, got one with another checksum")
    with pytest.raises(ValueError, match=r"have numbers below 258, got 65535"):
        TokenShards.open(tmp_path, verify=False).document(0)
    path.unlink()
    refused("exist, got no such file")
    path.write_bytes(data)
    known = ends.read_bytes()
    ends.write_bytes(np.array([15, 10], "<i8").tobytes())
    refused("end documents in order, got something else", verify=False)
    ends.write_bytes(known)
    text = manifest.read_text()
    for changed, sentence in (
        (text.replace("258", "300"), "be as it was written, got one that was changed since"),
        (text.replace("regard.shards", "other"), "be of format regard.shards, version 1, got another"),
        (text[:-5], "something else"),
        ("[]", "something else"),
        ("\udcff", "something else"),
        ("[" * 100_000, "something else"),
    ):
        manifest.write_text(changed, errors="surrogateescape")
        refused(sentence)
    said = json.loads(text)
    for change in (
        {"files": {"../x": said["files"]["ends.bin"]}},
        {"dtype": "float64"},
        {"tokens": "many"},
        {"files": 5},
    ):
        forged = {**said, **change}
        forged.pop("sha256")
        manifest.write_text(json.dumps({**forged, "sha256": module._sealed(forged)}))
        refused("something else")
    manifest.write_text(text)
    TokenShards.open(tmp_path, verify=True)


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="documents must have a document that is not empty, got none"):
        write_shards([], BYTES, tmp_path)
    with pytest.raises(ValueError, match="size must be at least 1"):
        write_shards(["a"], BYTES, tmp_path, size=0)
    with pytest.raises(ValueError, match="documents must have numbers from 0, got -1"):
        TokenShards.of([[1, -1]])
    with pytest.raises(ValueError, match="documents must have numbers from 0 to 4, got 5"):
        TokenShards.of([[1, 5]], 5)
    with pytest.raises(IndexError):
        TokenShards.of([[1]]).document(1)
    assert TokenShards.of([]).tokens == 0
