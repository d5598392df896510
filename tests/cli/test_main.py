"""The command itself: version, usage errors, missing packages."""

from __future__ import annotations

import pytest

from regard import cli


def test_the_version(regard) -> None:
    outcome = regard("--version")
    assert outcome.code == 0
    assert outcome.out.startswith("regard 0.")


@pytest.mark.parametrize(
    "arguments", [["say"], ["demo", "--seconds", "soon"], ["demo", "--seconds", "0"], ["demo", "--seed", "-1"]]
)
def test_wrong_usage(regard, arguments: list[str]) -> None:
    outcome = regard(*arguments)
    assert outcome.code == 2
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("seconds", ["nan", "inf"])
def test_seconds_are_finite(regard, seconds: str) -> None:
    outcome = regard("demo", "--train", "--seconds", seconds)
    assert outcome.code == 2
    assert "--seconds" in outcome.err


def test_a_missing_package_is_one_hint(regard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    outcome = regard("--version")
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert "pip install 'regard[cli]'" in outcome.err
