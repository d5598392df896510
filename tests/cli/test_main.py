"""The command itself: version, usage errors, missing packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def run(*arguments: str, shell: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} -m regard {' '.join(arguments)} {shell}"
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip


def test_closed_streams_are_no_crash(tmp_path: Path) -> None:
    for closed in ("<&-", ">&-"):
        done = run("demo", "--out", str(tmp_path), shell=closed)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_goes_away_is_no_error() -> None:
    done = run("catalogue", shell="| true")
    assert done.stderr == ""
    assert done.returncode in (0, 1)


def test_what_an_encoding_lacks_is_replaced(tmp_path: Path) -> None:
    done = run("demo", "--out", str(tmp_path), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Ma s?ur n'a jamais vu la mer.\n" in done.stdout


@pytest.mark.parametrize("arguments", [["train", "translation"], ["compare"], ["demo", "--out", "o", "--train"]])
def test_threads_of_training_sleep_after_a_while(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The process starts anew, with the same words: OpenMP reads its settings before anything can be set."""
    begun: list[list[str]] = []

    def begin(program: str, words: list[str]) -> None:
        begun.append([program, *words, os.environ["GOMP_SPINCOUNT"]])
        raise SystemExit

    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "execv", begin)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "argv", ["regard", *arguments])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "regard", *arguments])
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):  # what a user has set stands
        monkeypatch.setenv(name, "7")
        cli._tame_threads(arguments)
        monkeypatch.delenv(name)
    cli._tame_threads(["translate", *arguments])
    assert not begun
    with pytest.raises(SystemExit):
        cli.main()
    assert begun == [[sys.executable, sys.executable, "-m", "regard", *arguments, "20000"]]
