"""Documents of files: read lazily, cut where they are long, and refused where they are no text."""

from __future__ import annotations

import gzip
import io
import json
import re
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from regard_lab.data import documents
from regard_lab.data.documents import read_documents

TEXT = "One.\nStill one.\n\n\r\n  \nTwo,\r\ntwo.\n\nThree"


def test_what_a_document_is(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    assert list(read_documents(path)) == [TEXT]
    assert list(read_documents(path, per="line")) == ["One.", "Still one.", "Two,", "two.", "Three"]
    assert list(read_documents([path], per="paragraph")) == ["One.\nStill one.", "Two,\r\ntwo.", "Three"]


def test_folders_json_and_gzip(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "c.txt").write_text("hidden")
    (tmp_path / "b" / "z.txt.gz").write_bytes(gzip.compress("zé".encode()))
    (tmp_path / "b" / "a.txt").write_text("a")
    (tmp_path / "c.txt").write_text("   \n\n")
    lines = [{"text": "1\n\n1"}, {"text": ""}, {"text": "\ud83d\ude00 \ud83d", "n": 1}]
    data = "\ufeff" + "\n\n".join(map(json.dumps, lines))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(data.encode()))
    (tmp_path / "e.ndjson").write_text('{"body": "e", "text": null}\n')
    expected = ["1\n\n1", "😀 \ufffd", "e"]
    assert list(read_documents([tmp_path / "d.jsonl.gz"], per="line")) == expected[:2]
    assert list(read_documents(tmp_path / "e.ndjson", field="body")) == expected[2:]
    (tmp_path / "e.ndjson").unlink()
    assert list(read_documents(str(tmp_path))) == [*expected[:2], "a", "zé"]
    assert list(read_documents([tmp_path / "b", tmp_path / "b" / "a.txt"])) == ["a", "zé", "a"]


def test_standard_input(monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("x\ny é".encode())))
    assert list(read_documents("-", per="line")) == ["x", "y é"]


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(text=st.text(st.sampled_from("ab é\n🌹\r")), max_length=st.integers(1, 9), piece=st.integers(1, 7))
def test_nothing_is_lost_where_documents_are_cut(tmp_path_factory: Any, text: str, max_length: int, piece: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_bytes((text + "x").encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_PIECE", piece)
        parts = list(documents._assembled(documents._pieces(path, "f"), "file", max_length))
        assert "".join(parts) == text + "x"
        assert all(len(part) <= max_length for part in parts)
        lines = list(read_documents(path, per="line"))
        assert lines == [line.rstrip("\r") for line in f"{text}x".split("\n") if line.strip()]
        whole = list(read_documents(path, per="paragraph"))
        assert "".join(whole).split() == f"{text}x".split() or len(whole) > 1
        assert re.sub(r"\s", "", "".join(whole)) == re.sub(r"\s", "", f"{text}x")


def test_what_is_cut_ends_with_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc\n" * 5 + "de")
    assert list(read_documents(tmp_path, max_length=10)) == ["abc\nabc\n", "abc\nabc\n", "abc\nde"]


def test_an_endless_line_takes_bounded_memory(tmp_path: Path, monkeypatch: Any) -> None:
    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, target: Any) -> int:
            target[:] = b"a" * len(target)
            return len(target)

    monkeypatch.setattr("regard._utils.files._standard_input", lambda: io.BufferedReader(Endless()))
    for per in documents.UNITS:
        tracemalloc.start()
        parts = [len(part) for part in islice(read_documents("-", per=per, max_length=1 << 20), 10)]
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert parts == [1 << 20] * 10
        assert most < 8 << 20


def test_documents_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("fine\nfine")
    (tmp_path / "b.txt").write_bytes(b"\0")
    reading = read_documents(tmp_path, per="line")
    assert [next(reading), next(reading)] == ["fine", "fine"]
    with pytest.raises(ValueError, match="be text in UTF-8"):
        next(reading)


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("a.txt", b"a\nb\0c\n", r"a\.txt must be text in UTF-8, got a binary file \(zero bytes in line 2\)\.$"),
        ("a.txt", b"a\nb\xe9c\n", r"a\.txt, line 2 must be text in UTF-8, got byte 0xe9 at column 2 \(save"),
        ("a.txt", b"abcdefgh\xe9c\n", r"a\.txt, line 1 must be text in UTF-8, got byte 0xe9 at column 9 "),
        ("a.txt", "abcé".encode()[:-1], r"a\.txt, line 1 must be text in UTF-8, got byte 0xc3 at column 4 "),
        ("a.txt", "a".encode("utf-16"), r"got UTF-16 \(save it in UTF-8\)\.$"),
        (
            "a.txt",
            gzip.compress(b"some text " * 99, mtime=0)[:-9],
            r"be a whole gzip file, got one that is cut short or damaged",
        ),
        ("a.txt", b" \n\n", r"a\.txt must have a document that is not empty, got none\.$"),
        ("a.jsonl", b'\n{"text": "a"}\n{', r"a\.jsonl, line 3 must be a JSON object .* 'text', got no JSON \("),
        ("a.json", b"[1]", "got JSON of type list"),
        ("a.json", b'{"a": 1, "b": 2}', r"got no such field, but 'a', 'b'\.$"),
        ("a.json", b'{"text": 5}', r"got 5\.$"),
        ("a.json", b"[" * 100_000, "got no JSON"),
        ("a.json", b'{"text": "\xe9"}', r"a\.json, line 1 must be text in UTF-8, got byte 0xe9 at column 11 "),
        ("a.json", b"\0", "a binary file"),
    ],
)
def test_files_that_are_no_documents(tmp_path: Path, monkeypatch: Any, name: str, data: bytes, sentence: str) -> None:
    monkeypatch.setattr(documents, "_PIECE", 5)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=sentence):
        list(read_documents(tmp_path / name))


def test_arguments(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(ValueError, match=r"none\.txt must exist, got no such file or folder\.$"):
        read_documents(tmp_path / "none.txt")
    with pytest.raises(ValueError, match=r"train: per must be one of .*, got 'files'"):
        read_documents(tmp_path, per="files", function="train")
    with pytest.raises(ValueError, match="paths must name a file or folder, got none"):
        read_documents([])
    with pytest.raises(ValueError, match="max_length must be at least 1"):
        read_documents(tmp_path, max_length=0)
    with pytest.raises(ValueError, match="must have a document that is not empty, got none"):
        list(read_documents(tmp_path))
    monkeypatch.setattr(documents, "_LONGEST_JSON", 20)
    (tmp_path / "a.jsonl").write_text('{"text": "' + "a" * 50)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1 must have fewer than 20 bytes, got more"):
        list(read_documents(tmp_path))
