"""Texts with labels: what is read, what is refused, and how they are split."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from regard_lab.data.labelled import LabelledTexts, read_labelled, split_labelled


def test_lines_are_read_with_an_account(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(gzip.compress("\ufeffgood film \t1\r\n\n  \t0\nfine\t 1\ndull\t0".encode()))
    texts = read_labelled(path)
    assert (texts.texts, texts.labels, texts.places) == (["good film", "fine", "dull"], ["1", "1", "0"], [1, 4, 5])
    assert texts.report() == [
        f"{path}: 3 texts, 2 labels; 66.7% are '1'",
        "skipped, the text is empty: 2 (first in line 2)",
    ]
    assert texts.names() == ["0", "1"] and texts.numbers(texts.names()).tolist() == [1, 1, 0]
    path.write_text("a\tb\tyes\nb\t\tno\n")
    pairs = read_labelled(path, pairs=True)
    assert (pairs.texts, pairs.others, pairs.labels) == (["a"], ["b"], ["yes"])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"good\t1\nfilm\n", "line 2 must have 2 tab-separated columns: text, label, got 1: 'film'"),
        (b"a\tb\t1\n", "line 1 must have 2 tab-separated columns.* got 3"),
        (b"good\t1\nfilm\t \n", "line 2 must have a label after the last tab, got none"),
        (b"", "must have lines with a text and a label, got an empty file"),
        (b"\n \t \n", "must have lines with a text and a label, got none"),
        (b"a\t\x00\n", "must be text in UTF-8, got a binary file"),
        (b"caf\xe9\t1\n", "line 1 must be text in UTF-8, got byte 0xe9"),
        (gzip.compress(b"a\t1\n" * 999, mtime=0)[:-9], "be a whole gzip file"),
    ],
)
def test_what_is_refused(content: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(content)
    with pytest.raises(ValueError, match=sentence) as caught:
        read_labelled(tmp_path / "a.tsv", function="train")
    assert str(caught.value).startswith(f"train: {tmp_path}")


def test_labels_that_are_unknown_are_named_with_their_line(tmp_path: Path) -> None:
    texts = LabelledTexts(["a", "b"], ["x", "z"], name="file.tsv", places=[1, 3])
    with pytest.raises(ValueError, match=r"file.tsv, line 3 must have a label among 'x', 'y', got 'z'"):
        texts.numbers(["x", "y"])
    many = [str(i) for i in range(99)]
    with pytest.raises(ValueError, match=r"'7', … \(99 in all\)"):
        texts.numbers(many)
    assert LabelledTexts(["a"] * 3, ["10", "9", "x"]).names() == ["10", "9", "x"], "not all of them are numbers"
    assert LabelledTexts(["a"] * 3, ["10", "9", "1"]).names() == ["1", "9", "10"]


def test_a_split_takes_a_share_of_each_label_and_no_text_twice() -> None:
    names = ["a"] * 50 + ["b"] * 10 + ["c"]
    texts = LabelledTexts([f"text {i}" for i in range(61)] + ["text 3", "text 55"], [*names, "a", "b"])
    learn, held = split_labelled(texts, 0.2, seed=1)
    assert len(learn) + len(held) == 63 and not set(learn.texts) & set(held.texts)
    count = {label: len({t for t, each in zip(held.texts, held.labels) if each == label}) for label in "abc"}
    assert count == {"a": 10, "b": 2, "c": 0}
    order = list(range(62, -1, -1))
    _, again = split_labelled(texts.take(order, "backwards"), 0.2, seed=1)
    assert set(again.texts) == set(held.texts), "the order of lines does not matter"
    assert set(split_labelled(texts, 0.2, seed=2)[1].texts) != set(held.texts)
    refusal = (
        r"^train: .* has no label with two different texts, so none can be held out: add texts, or pass --valid\.$"
    )
    with pytest.raises(ValueError, match=refusal):
        split_labelled(LabelledTexts(["a", "a", "b"], ["x", "x", "y"]), 0.5)
