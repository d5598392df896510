"""The log of a run as a table, which goes on where the run that is resumed had got to."""

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
    """Write ``metrics.csv`` in a folder; Lightning's own logger deletes it where a run is resumed.

    Lightning's epochs are left out: they count how often the run was started.
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
        """Leave them to the file of options."""

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
                f"train: {self._path.parent} must take the log, got {error.strerror or error}; checkpoints are whole: "
                "mend that, and go on with --resume."
            ) from error

    def finalize(self, status: str) -> None:
        """Write the last rows; where a run has failed, that is what is to be told."""
        with suppress(TrainingError) if status == "failed" else nullcontext():
            self.save()

    @rank_zero_only
    def begin(self, step: int) -> None:
        """Keep the rows of the steps before this one: those behind it come again."""
        if self._path.exists():
            text = self._path.read_text(encoding="utf-8")
            rows = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))  # a last line that was cut is none
            self._rows = [row for row in rows if (row.get("step") or "").isdecimal() and int(row["step"]) < step]
            if not self._rows:
                self._path.unlink()
