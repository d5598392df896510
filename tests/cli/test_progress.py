"""The progress of training, in a terminal and in a pipe."""

from __future__ import annotations

import io

from rich.console import Console

from regard.cli.progress import TrainingDisplay
from regard.tasks.training import Progress


def _shown(*, terminal: bool, width: int = 80) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)
    with TrainingDisplay(console, seconds=200) as display:
        for step in range(1, 101):
            seen = Progress(steps=step, sequences=128 * step, seconds=2.0 * step, fraction=step / 100, loss=1 / step)
            display.update(seen)
    return console.file.getvalue()


def test_a_pipe_gets_a_few_plain_lines() -> None:
    lines = _shown(terminal=False).splitlines()
    assert len(lines) == 10
    assert lines[4] == "training  50%  loss 0.020  64 words/s  1:40 left"
    assert lines[9].endswith("0:00 left")


def test_a_terminal_gets_a_bar() -> None:
    shown = _shown(terminal=True)
    last = shown.rsplit("training", 1)[1].splitlines()[0]
    assert "━" in last
    assert "loss 0.010  64 words/s  0:00 left" in last
