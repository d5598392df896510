"""The log of a run as a table, which goes on where the run that is resumed had got to."""

from __future__ import annotations

import csv
import io
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from regard._writing import write_atomically
from regard.training.learner import TrainingError


class Log(CSVLogger):
    """``metrics.csv`` in a folder; Lightning's own would be deleted where a run is resumed."""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """What writes the rows."""
        if self._experiment is None:
            self._experiment = _Rows(self.log_dir)
        return self._experiment

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Note what was measured; not Lightning's epochs, which are how often the run was started."""
        super().log_metrics({name: value for name, value in metrics.items() if name != "epoch"}, step)

    def save(self) -> None:
        """Write the rows that were added."""
        try:
            super().save()
        except OSError as error:
            raise TrainingError(
                f"train: {Path(self.log_dir)} must take the log, got {error.strerror or error}; checkpoints are whole: "
                "mend that, and go on with --resume."
            ) from error

    def finalize(self, status: str) -> None:
        """Write the last rows; where a run has failed, that is what is to be told."""
        with suppress(TrainingError) if status == "failed" else nullcontext():
            super().finalize(status)

    def begin(self, step: int) -> None:
        """Keep the rows of the steps before this one: those behind it come again."""
        rows = self.experiment
        if isinstance(rows, _Rows):  # the first process's
            rows.begin(step)


class _Rows(ExperimentWriter):
    def _check_log_dir_exists(self) -> None:
        """Leave what is there to :meth:`begin`."""

    def begin(self, step: int) -> None:
        path = Path(self.metrics_file_path)
        if not path.exists():
            return
        text = path.read_text(encoding="utf-8")
        reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))  # a last line that was cut is none
        kept = [row for row in reader if (row.get("step") or "").isdecimal() and int(row["step"]) < step]
        if not kept:
            path.unlink()
            return
        self.metrics_keys = list(reader.fieldnames or ())
        made = io.StringIO()
        writer = csv.DictWriter(made, self.metrics_keys)
        writer.writeheader()
        writer.writerows(kept)
        write_atomically(path, made.getvalue().encode())
