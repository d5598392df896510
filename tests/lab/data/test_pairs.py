"""Pairs: what is read, what is left out and told, what is refused, and how they are split."""

from __future__ import annotations

import gzip
import io
import random
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard_lab.data.pairs import Count, Pairs, read_pairs, read_texts, split_pairs
from regard_lab.text.words import normalize


def _file(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def _refused(*arguments: object, **options: object) -> str:
    with pytest.raises(ValueError) as caught:
        read_pairs(*arguments, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


@given(st.text(), st.booleans())
def test_normalizing_is_idempotent_composed_and_single_spaced(text: str, lowercase: bool) -> None:
    plain = normalize(text, lowercase)
    assert normalize(plain, lowercase) == plain
    assert unicodedata.is_normalized("NFC", plain)
    assert plain == " ".join(plain.split())


def test_half_a_surrogate_pair_becomes_a_mark() -> None:
    assert normalize("a\udce9b 😀") == "a\ufffdb 😀"


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "marked"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
def test_columns_are_read_in_whatever_dress(tmp_path: Path, pack, mark: bytes, end: str) -> None:
    text = end.join(["Go.\tVa\u202f!", "cafe\u0301  bar \ttasse\tCC-BY 2.0 (France)", "x\ty\tz\tw"])
    pairs = read_pairs(_file(tmp_path, "pairs.txt", pack(mark + text.encode())))
    assert list(pairs) == [("Go.", "Va !"), ("café bar", "tasse"), ("x", "y")]
    assert pairs.counts == (Count("extra columns ignored", 2, 2),)


def test_two_files_stay_side_by_side(tmp_path: Path) -> None:
    # Only a line feed ends a line: the separators of Unicode, and a carriage return alone, are white space.
    source = _file(tmp_path, "a", "one\u2028two\nthree\rfour\n\n")
    target = _file(tmp_path, "b.gz", gzip.compress(b"eins\ndrei\tvier\nleer"))
    pairs = read_pairs(source, target)
    assert list(pairs) == [("one two", "eins"), ("three four", "drei vier")]
    assert pairs.counts == (Count("skipped, one side is empty", 1, 3),)
    assert pairs.name == f"{source}, {target}"


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(pack(b"a\tA\nb\tB\n"))))
    pairs = read_pairs("-")
    assert list(pairs) == [("a", "A"), ("b", "B")]
    assert pairs.report() == ["standard input: 2 pairs of 2 lines"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n")))
    assert list(read_pairs("-", _file(tmp_path, "b", "A\nB\n"))) == [("a", "A"), ("b", "B")]
    assert _refused("-", "-") == ("read_pairs: target must be another file than source, got standard input for both.")


def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    lines = ["a\tb", "\tb", "a\t ", "", "one two three\tb", "a\tb", "abcdefghijkl\tb", "same\tsame", "a\tc", "a\tb"]
    path = _file(tmp_path, "pairs.tsv", "\n".join(lines) + "\n")
    pairs = read_pairs(path, max_length=11, words=2, copies=False)
    assert list(pairs) == [("a", "b"), ("a", "c")]
    assert pairs.report() == [
        f"{path}: 2 pairs of 10 lines",
        "skipped, one side is empty: 3 (first in line 2)",
        "skipped, one side has more than 11 characters or 2 words: 2 (first in line 5)",
        "skipped, duplicate pairs: 2 (first in line 6)",
        "skipped, both sides are the same: 1 (first in line 8)",
    ]
    kept = read_pairs(path, max_length=None, words=None, duplicates=True)
    assert len(kept) == 7
    assert kept.counts == (Count("skipped, one side is empty", 3, 2), Count("both sides are the same", 1, 8))
    assert len(kept) + kept.counts[0].count == len(lines)


def test_lower_case(tmp_path: Path) -> None:
    path = _file(tmp_path, "pairs.tsv", "ÉTÉ\tSummer\nété\tsummer\n")
    assert list(read_pairs(path, lowercase=True)) == [("été", "summer")]
    assert len(read_pairs(path)) == 2


def test_bad_files_are_named(tmp_path: Path) -> None:
    good = _file(tmp_path, "good", "a\nb\nc\n")
    missing, empty = tmp_path / "missing.tsv", _file(tmp_path, "empty", "")
    assert _refused(missing) == f"read_pairs: {missing} must exist, got no such file."
    assert _refused(good, missing) == f"read_pairs: {missing} must exist, got no such file."
    assert _refused(tmp_path) == f"read_pairs: {tmp_path} must be a file, got a folder."
    assert _refused(empty) == f"read_pairs: {empty} must have lines, got an empty file."
    binary = _file(tmp_path, "binary", b"a\tb\nPNG\0\0\n")
    assert _refused(binary) == (
        f"read_pairs: {binary} must be text in UTF-8, got a binary file (zero bytes in line 2)."
    )
    latin = _file(tmp_path, "latin", "a\tb\nc\tété\n".encode("latin-1"))
    assert _refused(latin) == (
        f"read_pairs: {latin}, line 2 must be text in UTF-8, got byte 0xe9 at column 3 (save it in UTF-8)."
    )
    wide = _file(tmp_path, "wide", "a\tb\n".encode("utf-16"))
    assert _refused(wide) == f"read_pairs: {wide} must be text in UTF-8, got UTF-16 (save it in UTF-8)."
    assert _refused(good) == (f"read_pairs: {good}, line 1 must have two columns separated by a tab, got one: 'a'.")
    mixed = _file(tmp_path, "mixed", "a\tb\n" + "long " * 30)
    assert _refused(mixed).startswith(f"read_pairs: {mixed}, line 2 must have two columns separated by a tab, got")
    blank = _file(tmp_path, "blank", "\n\t\n")
    assert _refused(blank) == (
        f"read_pairs: {blank} has no usable pairs: skipped, one side is empty: 2 (first in line 1)."
    )


@pytest.mark.parametrize(("ours", "theirs"), [(2, 3), (3, 2), (0, 2)])
def test_sides_of_unequal_length(tmp_path: Path, ours: int, theirs: int) -> None:
    source, target = _file(tmp_path, "a", "x\n" * ours), _file(tmp_path, "b", "y\n" * theirs)
    expected = f"read_pairs: {target} must have as many lines as {source} ({ours}), got {theirs}."
    assert _refused(source, target) == expected


def test_texts_are_their_own_targets_and_long_ones_come_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "texts"
    path.write_text("One two  three four five\n\none two three\nsix\n")
    texts = read_texts(path, words=3, lowercase=True)
    assert texts.sources == ["one two three", "four five", "six"] and texts.targets is texts.sources
    assert texts.report()[0].endswith("texts: 3 texts of 3 lines")
    assert texts.counts == (Count("skipped, duplicate texts", 1, 2),)
    assert len(read_texts(path, words=3, lowercase=True, duplicates=True)) == 4
    with pytest.raises(ValueError, match="exist, got no such file or folder"):
        read_texts(tmp_path / "nothing")


def test_a_damaged_gzip_file(tmp_path: Path) -> None:
    chance = random.Random(0)
    whole = gzip.compress("".join(f"{chance.random()}\t{n}\n" for n in range(2000)).encode())
    path = _file(tmp_path, "cut.gz", whole[: len(whole) // 2])
    assert _refused(path).startswith(
        f"read_pairs: {path} must be a whole gzip file, got one that is cut short or damaged after line "
    )
    broken = bytearray(whole)
    broken[len(whole) // 2] ^= 0xFF
    _refused(_file(tmp_path, "broken.gz", bytes(broken)))


def test_limits_are_positive() -> None:
    assert _refused("x", max_length=0) == "read_pairs: max_length must be at least 1 or None, got 0."
    assert _refused("x", words=0) == "read_pairs: words must be at least 1 or None, got 0."
    with pytest.raises(ValueError, match="Pairs: targets must have one entry per source, got 1 for 0 sources"):
        Pairs([], ["a"])


def test_references_are_different_and_in_order() -> None:
    pairs = Pairs(["b", "a", "b", "b"], ["1", "2", "3", "1"])
    assert pairs.references() == {"b": ["1", "3"], "a": ["2"]}


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), min_size=2, max_size=60),
    st.floats(0.01, 0.99),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_a_split_is_by_source_whatever_the_order(
    numbers: list[tuple[int, int]], share: float, seed: int, chance: random.Random
) -> None:
    sources, targets = [f"s{a}" for a, _ in numbers], [f"t{b}" for _, b in numbers]
    unique = len(set(sources))
    if unique < 2:
        return
    learn, held = split_pairs(Pairs(sources, targets), share, seed=seed)
    assert not set(learn.sources) & set(held.sources)
    assert sorted([*learn, *held]) == sorted(zip(sources, targets))
    assert len(set(held.sources)) == min(max(round(share * unique), 1), unique - 1)
    mixed = list(zip(sources, targets))
    chance.shuffle(mixed)
    again = split_pairs(Pairs(*map(list, zip(*mixed))), share, seed=seed)  # type: ignore[arg-type]
    assert set(again[1].sources) == set(held.sources)


def test_a_split_follows_its_seed_and_may_be_counted() -> None:
    pairs = Pairs([str(n) for n in range(100)], [str(n) for n in range(100)])
    one, two, other = (split_pairs(pairs, 10, seed=seed)[1].sources for seed in (0, 0, 1))
    assert one == two != other
    assert len(one) == 10
    assert one == sorted(one, key=int)


@pytest.mark.parametrize("held_out", [0, 3, -1])
def test_a_split_leaves_no_part_empty(held_out: int) -> None:
    with pytest.raises(ValueError, match="split_pairs: held_out must be from 1 to 2, fewer than the sources, got"):
        split_pairs(Pairs(["a", "b", "c"], ["a", "b", "c"]), held_out)


def test_a_split_has_a_sensible_share() -> None:
    with pytest.raises(ValueError, match=r"held_out must be in \(0, 1\), or a whole number of sources, got 1.5"):
        split_pairs(Pairs(["a", "b"], ["a", "b"]), 1.5)
    with pytest.raises(ValueError, match="split_pairs: there are no two different sources, so none can be"):
        split_pairs(Pairs(["a", "a"], ["a", "b"]), 0.5)
