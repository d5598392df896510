"""Runs that are ended by a signal."""

from __future__ import annotations

import os
import signal
from typing import Any

from lightning.pytorch import Callback


class StopAt(Callback):  # type: ignore[misc]
    """Ends a run in a step, as Ctrl-C does."""

    number = signal.SIGINT

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == self.at:
            os.kill(os.getpid(), self.number)
