"""The log of a run as a CSV table; a resumed run continues it."""

from __future__ import annotations

import csv
import io
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from regard._utils.files import write_atomically
from regard_lab.training.options import TrainingError

#: Steps between two writes of the file.
_EVERY = 100


class Log(Logger):
    """Write ``metrics.csv`` in a folder; Lightning's own logger deletes it when a run is resumed.

    Omits Lightning's epochs, which count how often the run was started.
    """

    name, version = None, None

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._path = folder / "metrics.csv"
        self._rows: list[dict[str, Any]] = []

    @property
    def save_dir(self) -> str:
        """The folder."""
        return str(self._path.parent)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add a row."""
        self._rows.append({name: float(value) for name, value in metrics.items() if name != "epoch"} | {"step": step})
        if step is not None and (step + 1) % _EVERY == 0:
            self.save()

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing; the options file holds them."""

    @rank_zero_only
    def save(self) -> None:
        """Write all rows."""
        if not self._rows:
            return
        table = io.StringIO()
        writer = csv.DictWriter(table, sorted(set().union(*self._rows)))
        writer.writeheader()
        writer.writerows(self._rows)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, table.getvalue().encode())
        except OSError as error:
            raise TrainingError(
                f"train: cannot write the log to {self._path.parent}: {error.strerror or error}. The checkpoints are "
                "intact: fix the problem and continue with --resume."
            ) from error

    def finalize(self, status: str) -> None:
        """Write the last rows; after a failed run, ignore write errors to report the original one."""
        with suppress(TrainingError) if status == "failed" else nullcontext():
            self.save()

    @rank_zero_only
    def begin(self, step: int) -> None:
        """Keep only the rows of steps before this one; later steps will run again."""
        if self._path.exists():
            text = self._path.read_text(encoding="utf-8")
            rows = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))  # without an incomplete last line
            self._rows = [row for row in rows if (row.get("step") or "").isdecimal() and int(row["step"]) < step]
            if not self._rows:
                self._path.unlink()
