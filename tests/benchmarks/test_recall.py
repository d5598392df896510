"""The benchmark of associative recall: what it asks for can be known, and it prints a row for each kind."""

from __future__ import annotations

import pytest
import torch
from benchmarks.recall import SYMBOLS, main, texts


def test_every_key_that_is_asked_for_has_its_value() -> None:
    drawn = texts(torch.Generator().manual_seed(0), 5, 6)
    for text in drawn.tolist():
        pairs = list(zip(text[::2], text[1::2]))
        assert sorted(pairs[:6]) == sorted(pairs[6:]) and len(dict(pairs)) == 6
        assert all(key < SYMBOLS <= value for key, value in pairs)
    assert drawn[:, :12].ne(drawn[:, 12:]).any()


def test_a_row_for_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--kinds", "delta,titans", "--steps", "2", "--pairs", "2"])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("delta        seed 0") and second.startswith("titans       seed 0") and "%" in second
