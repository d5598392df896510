"""What every run of training does around its steps: who speaks, what it begins under, and how its model is saved."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from regard._errors import in_section, rejected
from regard.training.options import RunOptions, TrainingOptions
from regard.training.run_folder import RunFolder
from regard.training.threads import set_threads

_O = TypeVar("_O", bound=RunOptions)
Say = Callable[[str], None]


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
    from regard.training.learner import is_bfloat16

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
    from regard.training.interrupts import unbroken
    from regard.training.learner import TrainingError

    try:
        with unbroken():
            save()
    except OSError as error:
        raise TrainingError(
            f"train: {folder} must take the model, got {error.strerror or error}; the training is done, "
            "and its checkpoints are whole: mend that, and get the model with --resume."
        ) from error
