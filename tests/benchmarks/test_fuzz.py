"""Damaged files through the loaders: the first of the cases of `make fuzz`, and those that were wrong once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.fuzz.cases import Cases

#: Numbers of cases that had a traceback, or a sentence that was not ours.
ONCE: tuple[int, ...] = (23, 157, 1463, 4440, 7232, 8608, 9081)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cases]:
    yield Cases(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("block", range(8))
def test_damaged_files_are_loaded_or_refused_in_a_sentence(cases: Cases, block: int) -> None:
    for number in range(25 * block + 1, 25 * block + 26):
        outcome = cases.run(number)
        assert outcome.verdict in ("accepted", "refused"), outcome


def test_what_was_wrong_once(cases: Cases) -> None:
    for number in ONCE:
        outcome = cases.run(number)
        assert outcome.verdict in ("accepted", "refused"), outcome


def test_a_number_draws_the_same_case_again(cases: Cases, tmp_path: Path) -> None:
    for number in range(1, 9):
        _, one = cases.arguments(number)
        files = {path.name: path.read_bytes() for path in cases.here.rglob("*") if path.is_file()}
        _, other = cases.arguments(number)
        assert one == other
        assert files == {path.name: path.read_bytes() for path in cases.here.rglob("*") if path.is_file()}
