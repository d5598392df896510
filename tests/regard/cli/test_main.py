"""The command itself: version, usage errors, missing packages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import regard_cli as cli
from regard_cli import startup


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
    command = f"{sys.executable} -m regard_cli {' '.join(arguments)} {shell}"
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.slow
def test_closed_streams_are_no_crash_and_what_an_encoding_lacks_is_replaced() -> None:
    done = run("catalogue", shell="<&-", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "exp(?" in done.stdout and done.stdout.isascii()
    done = run("--help", shell=">&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_goes_away_is_no_error() -> None:
    done = run("--help", shell="| true")
    assert done.stderr == ""
    assert done.returncode in (0, 1)


@pytest.mark.parametrize(("given", "expected"), [({}, "20000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_idle_threads_sleep_after_a_while_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # which is what is restored, also where it was not set
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    startup.prepare()
    startup.finish()
    assert os.environ["GOMP_SPINCOUNT"] == expected


def test_regress_without_its_packages_is_one_hint(regard, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("regard_cli.regress", "regard_cli.tables"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "regard_cli.regress", None)
    outcome = regard("regress", "no.csv", "--target", "y")
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and "pip install 'regard[regress]'" in outcome.err
