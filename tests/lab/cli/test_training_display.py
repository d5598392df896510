"""How training goes, in a terminal and in a pipe."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from regard_lab.cli.training_display import TrainingDisplay
from regard_lab.data.batches import Batch
from regard_lab.training.options import TrainingOptions

BATCH = Batch(torch.ones(128, 3, dtype=torch.long), torch.full((128,), 3), torch.ones(128, 2, dtype=torch.long))


def _shown(*, terminal: str = "", validation: bool = False, **budget: Any) -> str:
    """Return what a terminal of this type, or else a pipe, gets in a hundred steps of two seconds and 128 pairs."""
    console = Console(
        file=io.StringIO(), force_terminal=bool(terminal), width=100, color_system=None, _environ={"TERM": terminal}
    )
    pairs = "" if validation else "words"
    options = TrainingOptions(**{"steps": 100} | budget)
    display = TrainingDisplay(console, options, pairs)
    trainer: Any = SimpleNamespace(global_step=0, is_global_zero=True, sanity_checking=False)
    trainer.enable_validation, trainer.callback_metrics = validation, {}
    module: Any = SimpleNamespace(
        seconds=lambda: 2.0 * trainer.global_step, loss=0.25, guess=0.1, at_frequency_baseline=True
    )
    module.options = options
    display.on_train_start(trainer, module)
    for step in range(1, 101):
        trainer.global_step = step
        display.on_train_batch_end(trainer, module, None, BATCH, step)
        if validation and step % 50 == 0:
            trainer.callback_metrics = {"loss": torch.tensor(0.25), "valid_loss": torch.tensor(1 / step)}
            module.at_frequency_baseline = step < 100
            display.on_validation_end(trainer, module)
    display.on_train_end(trainer, module)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("terminal", ["", "dumb"])
def test_pipes_and_terminals_without_a_cursor_get_a_few_plain_lines(terminal: str) -> None:
    for budget in ({}, {"steps": 10**9, "seconds": 200.0}):
        lines = _shown(terminal=terminal, **budget).splitlines()
        assert len(lines) == 10
        assert lines[4] == "training  50%  loss 0.250, 64 words/s, 1:40 left"
        assert lines[9] == "training 100%  loss 0.250, 64 words/s, 0:00 left"


def test_a_validation_has_a_line_of_its_own() -> None:
    lines = _shown(validation=True).splitlines()
    assert lines == [
        "step 50  loss 0.02  no better than guessing by frequency, 0.1  (loss 0.250, 320 tokens/s, 1:40 left)",
        "step 100  loss 0.01  (loss 0.250, 320 tokens/s, 0:00 left)",
    ]


def test_a_terminal_gets_a_bar() -> None:
    for budget, step in (({}, "step 100 of 100"), ({"steps": 10**9, "seconds": 200.0}, "step 100 ")):
        shown = _shown(terminal="xterm", **budget)
        last = shown.rsplit("step", 1)[1]
        assert f"step{last}".startswith(step)
        assert "━" in last
        assert "loss 0.250, 64 words/s, 0:00 left" in last
        assert "training" not in shown
