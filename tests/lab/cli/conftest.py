"""A tiny model in a folder, and a way to run the command line that shows what a user would see."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from regard_cli import main
from regard_lab.data.pairs import Pairs
from regard_lab.tasks.pronunciation.pronouncer import Pronouncer
from regard_lab.text.vocabulary import UNKNOWN


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def model(tmp_path: Path) -> Path:
    pairs = Pairs(["abcdefghijklm", "nopqrstuvwxyz'-.", "nopqrstuvwxyz'-."], ["AH B", "K", "T S"])
    pronouncer = Pronouncer.untrained(pairs, embedding=8, encoder=8, decoder=8, features=8)
    torch.manual_seed(0)
    torch.nn.init.normal_(pronouncer.model.model.output.weight, std=3.0)
    pronouncer.model.model.output.bias.data[UNKNOWN] = -99.0
    return pronouncer.save(tmp_path / "model")


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Hear keyboard interrupts, also in a process that was started in the background and ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def regard(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    def run(*arguments: object, stdin: str | bytes = "") -> Outcome:
        binary = io.BytesIO(stdin if isinstance(stdin, bytes) else stdin.encode())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(binary, encoding="utf-8"))
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(int(caught.value.code or 0), captured.out, captured.err)

    return run
