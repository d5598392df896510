"""What every run of training does around its steps: who speaks, what it begins under, and how its model is saved."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch

from regard._utils.errors import in_section, rejected
from regard_lab.training.options import RunOptions, TrainingOptions
from regard_lab.training.run_folder import RunFolder
from regard_lab.training.threads import set_threads

_O = TypeVar("_O", bound=RunOptions)
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
    from regard_lab.training.interrupts import unbroken
    from regard_lab.training.learner import TrainingError

    try:
        with unbroken():
            save()
    except OSError as error:
        raise TrainingError(
            f"train: {folder} must take the model, got {error.strerror or error}; the training is done, "
            "and its checkpoints are whole: mend that, and get the model with --resume."
        ) from error
