"""When training ends: time that is up, keyboard interrupts, and what must not be broken off."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping

from regard_lab.training.objectives import Examples
from regard_lab.training.options import TrainingOptions


class Stopping(Callback):
    """End training after a step: when time is up, or somebody asked. It holds the clock."""

    def __init__(self, options: TrainingOptions) -> None:
        self.seconds, self.steps, self.patience = options.seconds, options.steps, options.patience
        self.validate_every = options.validate_every
        self.reason, self.pairs = "", 0
        self._before, self._began, self._ended = 0.0, math.inf, math.inf
        self._agreed: float | None = None

    @property
    def state_key(self) -> str:
        """Its name in checkpoints."""
        return "_Stop"

    def used(self) -> float:
        """Return the seconds of training; where several processes train, as the first of them had it at this step."""
        if self._agreed is not None:
            return self._agreed
        return self._before + max(min(time.monotonic(), self._ended) - self._began, 0.0)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Agree on the time: clocks differ, and what goes by it must not, neither the learning rate nor the end."""
        if self.seconds and trainer.world_size > 1:
            self._agreed = None
            self._agreed = trainer.strategy.broadcast(self.used())

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Start the clock, unless the run that is resumed had ended."""
        if self.seconds and self._before >= self.seconds:
            self.reason = "seconds"
        patient = [each for each in trainer.callbacks if isinstance(each, EarlyStopping)]
        for each in patient:
            each.patience = self.patience  # the checkpoint has restored its own
        if self.reason or any(each.wait_count >= each.patience for each in patient):
            trainer.should_stop = True
            trainer.limit_val_batches = 0
        self._began = time.monotonic()

    def on_train_end(self, *_: Any) -> None:
        """Stop the clock."""
        self._ended = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Examples, number: int) -> None:  # noqa: ARG002
        """Look at the clock."""
        self.pairs += batch.examples
        if (number + 1) % trainer.accumulate_grad_batches:
            return
        at_end = trainer.global_step >= self.steps
        if at_end:
            trainer.should_stop = True  # so that Lightning validates the last step, too
        late = bool(self.seconds) and self.used() >= self.seconds
        # Processes stop together: a signal may reach one alone.
        asked = trainer.strategy.reduce_boolean_decision(self.reason == "interrupt", all=False)
        if asked or late:
            self.reason = "interrupt" if asked else "seconds"
            trainer.should_stop = True
            if asked and trainer.global_step % self.validate_every and not at_end:
                # Lightning validates whenever it stops; the run that goes on would know of one validation more.
                trainer.limit_val_batches = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds and pairs that were used."""
        return {"used": self.used(), "pairs": self.pairs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self._before, self.pairs = state_dict["used"], state_dict["pairs"]


@contextmanager
def interruptible(stop: Stopping) -> Iterator[None]:
    """Let the first keyboard interrupt end the step at hand, and the next one everything."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: Any) -> None:  # noqa: ARG001
        stop.reason = "interrupt"
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def unbroken() -> Iterator[None]:
    """Let a keyboard interrupt wait until what is at hand is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda *given: asked.append(given[0]))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if asked:
            signal.raise_signal(signal.SIGINT)
