"""``regard catalogue``."""

from __future__ import annotations

import json

from regard import catalogue


def test_the_terminal_shows_every_row(regard) -> None:
    result = regard("catalogue")
    assert result.code == 0
    for row in catalogue():
        assert row.name in result.out


def test_brackets_of_formulas_are_shown(regard, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert "w_vᵀ tanh(W [q; k])" in regard("catalogue", "Concat").out


def test_json(regard) -> None:
    rows = json.loads(regard("catalogue", "--json").out)
    assert [row["name"] for row in rows] == [row.name for row in catalogue()]
    assert {"formula", "source", "learned", "engines", "cost", "references"} <= set(rows[0])


def test_words_choose_rows(regard) -> None:
    rows = json.loads(regard("catalogue", "--json", "bahdanau").out)
    assert {row["name"] for row in rows} >= {"Additive", "AdditiveAttention"}
    assert all("Bahdanau" in row["source"] for row in rows)


def test_an_unknown_word_is_an_error(regard) -> None:
    result = regard("catalogue", "nothing-like-it")
    assert result.code == 2
    assert "catalogue: no name, source or title contains 'nothing-like-it'." in result.err


def test_two_formats_are_an_error(regard) -> None:
    result = regard("catalogue", "--json", "--markdown")
    assert result.code == 2
    assert "--json must not be given together with --markdown" in result.err
