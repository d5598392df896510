"""The folder of a run: the options that it began with, so that it can be resumed from anywhere."""

from __future__ import annotations

import json
import time
from dataclasses import fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from regard._utils.errors import rejected
from regard._utils.files import write_atomically
from regard_lab.data.toml import read_toml
from regard_lab.models.folders import CONFIG, OPTIONS, ModelFileError, read_json
from regard_lab.training.options import RunOptions

#: Beside the checkpoints, the log, the model and the options that a person may edit.
RECORD = "run.json"
_RECORDED = ("data", "valid", "threads", "bfloat16", "options")
_O = TypeVar("_O", bound=RunOptions)


class RunFolder(Generic[_O]):
    """The files of a run.

    Parameters
    ----------
    path : Path
    options : type of RunOptions
        Of its section ``training`` alone may options change.
    """

    def __init__(self, path: Path, options: type[_O]) -> None:
        from regard_lab.training.checkpoints import CHECKPOINTS, LAST

        self.path, self._options = path, options
        self.has_checkpoint = (path / CHECKPOINTS / LAST).exists()

    def check_new(self, otherwise: str = "") -> None:
        """Raise ValueError if it is a file, or holds what training would overwrite: a run, or a model."""
        if self.path.is_file():
            raise rejected("train", "out", "be a new folder", f"a file, {self.path}")
        if self.has_checkpoint:
            raise rejected("train", "out", f"be a new folder{otherwise}", f"{self.path}, which has a run")
        if (self.path / CONFIG).exists():
            raise rejected("train", "out", "be a new folder", f"{self.path}, which has a model")

    def check_resumable(self) -> None:
        """Raise ValueError if there is no checkpoint."""
        if not self.has_checkpoint:
            expected = "have been saved once to be resumed; begin anew"
            raise rejected("resume", str(self.path), expected, "no checkpoints/last.ckpt in it")

    def read_options(self) -> tuple[_O, _O]:
        """Return the options that the run began with, and those that its folder has now.

        Raises
        ------
        ValueError
            If there is no run, or options other than those of training were edited.
        """
        if not (self.path / OPTIONS).exists():
            raise rejected("resume", str(self.path), "be the folder of a run", f"no {OPTIONS} in it")
        table = self.read_record()["options"]
        tasks = next((each.metadata["known"] for each in fields(self._options) if each.name == "task"), None)
        if tasks and table.get("task") not in tasks:
            raise rejected("resume", str(self.path), f"be a run of {' or '.join(tasks)}", f"one of {table.get('task')}")
        before = self._options.from_table(table)
        edited = self._options.from_table(read_toml(self.path / OPTIONS))
        had, has = before.flat(), edited.flat()
        for name in sorted(had.keys() | has.keys()):
            if had.get(name) != has.get(name) and not name.startswith("training."):
                expected = f"be {had.get(name)!r}, as the run that is resumed began"
                raise rejected("resume", f"{name} in {self.path / OPTIONS}", expected, repr(has.get(name)))
        return before, edited

    def read_record(self) -> dict[str, Any]:
        """Return what the run began with: options, checksums of its data, threads and precision."""
        record = self.read_table(RECORD)
        if not record.keys() >= set(_RECORDED):
            raise self._damaged(RECORD)
        return record

    def wait_for_record(self) -> dict[str, Any]:
        """Return what the run begins with, when the first process has written it; torchrun ends those that wait."""
        while not (self.path / OPTIONS).exists():
            time.sleep(0.05)
        return self.read_record()

    def write(self, record: dict[str, Any], options: _O) -> None:
        """Write the record, and the options as a person may edit them."""
        import tomli_w

        table = options.to_table()
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / RECORD, json.dumps({**record, "options": table}, indent=1).encode())
        # Last: a folder that has it is a run's.
        write_atomically(self.path / OPTIONS, tomli_w.dumps(table).encode())

    def read_table(self, name: str) -> dict[str, Any]:
        """Return what a JSON file of the run holds, or raise where it is damaged."""
        try:
            data = read_json(self.path / name)
        except ModelFileError:
            data = None
        if not isinstance(data, dict):
            raise self._damaged(name)
        return data

    def _damaged(self, name: str) -> Exception:
        expected = "be the file that the run began with"
        return rejected("resume", str(self.path / name), expected, "one that is damaged")
