"""Fixtures that run the command line in this process, and show what a user would see."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from regard_cli import main


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Hear keyboard interrupts, also in a process that was started in the background and ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def regard(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Return a function that runs a command."""

    def run(*arguments: object, stdin: str | bytes = "") -> Outcome:
        binary = io.BytesIO(stdin if isinstance(stdin, bytes) else stdin.encode())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(binary, encoding="utf-8"))
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(int(caught.value.code or 0), captured.out, captured.err)

    return run
