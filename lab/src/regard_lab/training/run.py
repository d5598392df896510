"""A run of training in its folder: its options, its threads, its beginning and its resumption."""

from __future__ import annotations

import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch

from regard._utils.errors import in_section, rejected
from regard._utils.files import write_atomically
from regard_lab.data.toml import read_toml
from regard_lab.models.folders import CONFIG, OPTIONS, ModelFileError, read_json
from regard_lab.training.options import RunOptions, TrainingOptions

# Set the number of torch's threads, or say that the machine cannot start so many --------------------------------------


def set_threads(count: int) -> None:
    """Let torch use so many threads.

    Raises
    ------
    ValueError
        If the machine cannot start them: OpenMP would end the process.
    """
    most = _startable(count)
    if most < count:
        raise rejected("train", "training.threads", f"be at most {most:,}, all that can be started here", f"{count:,}")
    torch.set_num_threads(count)


def _startable(count: int) -> int:
    """Return how many threads of so many can be there at once."""
    end = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count - 1):  # this one is there
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:  # what Python says where the system refuses one
        pass
    finally:
        end.set()
        for thread in started:
            thread.join()
    return len(started) + 1


# The folder of a run: the options that it began with, so that it can be resumed from anywhere -------------------------


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
        tasks = next((each.metadata["choices"] for each in fields(self._options) if each.name == "task"), None)
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


# What every run of training does around its steps: who speaks, what it begins under, and how its model is saved -------


Say = Callable[[str], None]


class FolderRun(ABC, Generic[_O]):
    """A run of training in a folder: what it was asked for, where it stands, and who is told.

    Parameters
    ----------
    options : RunOptions
    folder : str or Path
    say : callable
        Called with every line that a user should read.
    """

    def __init__(self, options: _O, folder: str | Path, say: Say = print) -> None:
        self.options = options.with_absolute_paths()  # a run is resumed from anywhere
        self.folder = Path(folder)
        self.say = from_first(say)
        self.check()
        check_processes(options.training)

    @classmethod
    @abstractmethod
    def files(cls, folder: str | Path) -> RunFolder[_O]:
        """Return the files of a run of this kind in a folder."""

    @classmethod
    def resumed(cls, folder: str | Path, changes: dict[str, Any], say: Say = print) -> Self:
        """Return the run in a folder, to go on; ``changes`` are options of training that may differ now."""
        return cls(resumed_options(cls.files(folder), changes, from_first(say)), folder, say)

    @abstractmethod
    def check(self) -> None:
        """Raise for what is wrong with the options and needs no data to be seen."""

    def open(self, resume: bool) -> tuple[RunFolder[_O], dict[str, Any]]:
        """Return the run's files and the conditions that it trains under.

        Raises
        ------
        ValueError
            If this machine lacks what the options ask for, or the folder holds no run to go on with, or another one.
        """
        from regard_lab.training.loop import check_devices

        check_devices(self.options.training)
        files = self.files(self.folder)
        files.check_resumable() if resume else files.check_new(", or be resumed (--resume)")
        return files, conditions(self.options.training)


def place() -> tuple[int, int]:
    """Return this process's number and how many there are, as torchrun says."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def from_first(say: Say) -> Say:
    """Return what says it in one process alone."""
    return say if place()[0] == 0 else lambda _: None


def data_place(training: TrainingOptions) -> tuple[int, int]:
    """Return which part of the examples this process reads, and how many parts there are."""
    return training.data_place(*place())


def check_processes(training: TrainingOptions) -> None:
    """Raise unless there are as many processes as the options say."""
    _, world = place()
    if world != training.devices:
        expected = f"be {world}, as many as torchrun has started" if world > 1 else "be 1 without torchrun"
        raise rejected("train", "training.devices", expected, training.devices)


def resumed_options(files: RunFolder[_O], changes: dict[str, Any], say: Say) -> _O:
    """Return the options of a run that goes on; ``changes`` are options of training that may differ now.

    What may change may also be changed in the folder's options file.
    """
    before, edited = files.read_options()
    was = before.training
    with in_section("training"):
        training = edited.training.with_changes(changes)
        changed = training.changed_from(was)
    for name in changed:
        say(f"{name} is now {getattr(training, name)}, was {getattr(was, name)}")
    return before.with_changes({"training": training})


def conditions(training: TrainingOptions) -> dict[str, Any]:
    """Set the threads that are asked for; return what the last bits of a run go by."""
    from regard_lab.training.learner import is_bfloat16

    if training.threads:
        set_threads(training.threads)
    return {"threads": torch.get_num_threads(), "bfloat16": is_bfloat16(training.precision)}


def restore_conditions(begun: dict[str, Any], here: dict[str, Any], say: Say) -> None:
    """Let a run go on as it began: the order of sums, and so their last bits, goes by the number of threads."""
    if begun["threads"] != here["threads"]:
        say(f"threads: {begun['threads']}, as the run began")
        set_threads(begun["threads"])
    if begun["bfloat16"] != here["bfloat16"]:
        was, now = ("bfloat16" if narrow else "float32" for narrow in (begun["bfloat16"], here["bfloat16"]))
        say(f"matrix products were in {was} where the run began and are in {now} here: the bits will differ")


def save_unbroken(save: Callable[[], object], folder: Path) -> None:
    """Save a model at the end of its training, whatever somebody presses meanwhile."""
    from regard_lab.training.loop import unbroken
    from regard_lab.training.options import TrainingError

    try:
        with unbroken():
            save()
    except OSError as error:
        raise TrainingError(
            f"train: {folder} must take the model, got {error.strerror or error}; the training is done, "
            "and its checkpoints are whole: mend that, and get the model with --resume."
        ) from error
