"""Reading and splitting the pronouncing dictionary."""

from __future__ import annotations

import pytest

from regard_lab.tasks.pronunciation import pronouncer as dictionary


def test_stress_comments_and_variants() -> None:
    lines = [
        ";;; an old-style comment\n",
        "Aalborg AO1 L B AO0 R G # place, danish\n",
        "read R EH1 D\n",
        "read(2) R IY1 D\n",
        "read(3) R IY2 D # the same without stress\n",
        "\n",
        "# nothing here\n",
        "'bout B AW1 T\n",
    ]
    assert dictionary.read_dictionary(lines) == {
        "aalborg": [("AO", "L", "B", "AO", "R", "G")],
        "read": [("R", "EH", "D"), ("R", "IY", "D")],
        "'bout": [("B", "AW", "T")],
    }


@pytest.mark.parametrize("line", ["lonely", "(2) K AE1 T", "cat K 1 T"])
def test_a_line_that_is_no_entry_is_named(line: str) -> None:
    with pytest.raises(ValueError, match=r"read_dictionary: line 2 must be a word and its phonemes, got"):
        dictionary.read_dictionary(["a AH0", line])


def test_the_installed_dictionary() -> None:
    entries = dictionary.load_dictionary()
    assert len(entries) > 120_000
    assert entries["read"] == [("R", "EH", "D"), ("R", "IY", "D")]
    assert len({phoneme for spoken in entries.values() for each in spoken for phoneme in each}) == 39


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dictionary, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'regard-lab\[pronunciation\]'"):
        dictionary.load_dictionary()


def test_the_split_is_disjoint_complete_and_deterministic() -> None:
    entries = {f"{a}{b}{c}": [("K",)] for a in "abcdefghij" for b in "klmnopqrst" for c in "uvwxyz"}
    learn, held_out = dictionary.split_dictionary(entries, percent=20)
    assert not set(learn) & set(held_out)
    assert learn | held_out == entries
    assert 0.2 < len(held_out) / len(entries) < 0.25
    # The split is part of what is measured: it may not drift between versions or machines.
    assert sorted(held_out)[:6] == ["amu", "amy", "anv", "any", "apu", "apw"]
    backwards = dict(reversed(entries.items()))
    assert dictionary.split_dictionary(backwards, percent=20)[1] == held_out
    some = dict(list(entries.items())[::2])
    assert dictionary.split_dictionary(some, percent=20)[1].keys() == held_out.keys() & some.keys()


@pytest.mark.parametrize("percent", [-1, 101, float("nan")])
def test_the_share_held_out_is_a_percentage(percent: float) -> None:
    with pytest.raises(ValueError, match=r"split_dictionary: percent must be in \[0, 100\]"):
        dictionary.split_dictionary({}, percent=percent)
