"""Training runs in folders: options, threads, starting and resuming."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import nn

from regard._utils.errors import in_section, rejected
from regard._utils.files import write_atomically
from regard_lab._options import read_toml
from regard_lab.models.folders import CONFIG, OPTIONS, ModelFileError, read_json
from regard_lab.training.options import RunOptions, TrainingError, TrainingOptions

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from regard_lab.training.learner import Score
    from regard_lab.training.loop import TrainingResult
    from regard_lab.training.objectives import Examples, Objective

# Threads --------------------------------------------------------------------------------------------------------------


def set_threads(count: int) -> None:
    """Set torch's number of threads.

    Raises
    ------
    ValueError
        If the machine cannot start that many: OpenMP would kill the process.
    """
    most = _startable(count)
    if most < count:
        raise rejected("train", "training.threads", f"be at most {most:,}, the machine's limit", f"{count:,}")
    torch.set_num_threads(count)


def _startable(count: int) -> int:
    """Return how many of ``count`` threads the machine can run at once."""
    end = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count - 1):  # the current thread counts
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:  # the system refuses another thread
        pass
    finally:
        end.set()
        for thread in started:
            thread.join()
    return len(started) + 1


# The folder of a run --------------------------------------------------------------------------------------------------


#: The options and data checksums that a run started with, to validate a resumption.
RECORD = "run.json"
_RECORDED = ("data", "valid", "threads", "bfloat16", "options")
_O = TypeVar("_O", bound=RunOptions)


class RunFolder(Generic[_O]):
    """The files of a run.

    Parameters
    ----------
    path : Path
    options : type of RunOptions
        Only its section ``training`` may change when a run is resumed.
    """

    def __init__(self, path: Path, options: type[_O]) -> None:
        from regard_lab.training.checkpoints import CHECKPOINTS, LAST

        self.path, self._options = path, options
        self.has_checkpoint = (path / CHECKPOINTS / LAST).exists()

    def check_new(self, otherwise: str = "") -> None:
        """Raise ValueError if the path is a file, or a folder with a run or model that training would overwrite."""
        if self.path.is_file():
            raise rejected("train", "out", "be a new folder", f"a file, {self.path}")
        if self.has_checkpoint:
            raise rejected("train", "out", f"be a new folder{otherwise}", f"{self.path}, which has a run")
        if (self.path / CONFIG).exists():
            raise rejected("train", "out", "be a new folder", f"{self.path}, which has a model")

    def check_resumable(self) -> None:
        """Raise ValueError if there is no checkpoint."""
        if not self.has_checkpoint:
            raise ValueError(f"resume: {self.path} has no checkpoints/last.ckpt: start the run again without --resume.")

    def seconds_used(self) -> float:
        """Return the training time up to the last checkpoint, over all starts."""
        from regard_lab.training.checkpoints import CHECKPOINTS, CLOCK, LAST, AtomicCheckpoints

        self.check_resumable()
        try:
            state = AtomicCheckpoints().load_checkpoint(self.path / CHECKPOINTS / LAST, "cpu")
            return float(state["callbacks"][CLOCK]["used"])
        except (TrainingError, KeyError):
            raise self._damaged(f"{CHECKPOINTS}/{LAST}") from None

    def read_options(self) -> tuple[_O, _O]:
        """Return the options that the run started with, and those in its folder now.

        Raises
        ------
        ValueError
            If there is no run, or if options outside the section ``training`` were edited.
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
                expected = f"be {had.get(name)!r}, as when the run started"
                raise rejected("resume", f"{name} in {self.path / OPTIONS}", expected, repr(has.get(name)))
        return before, edited

    def read_record(self) -> dict[str, Any]:
        """Return the record of the run's start: options, data checksums, threads and precision."""
        record = self.read_table(RECORD)
        if not record.keys() >= set(_RECORDED):
            raise self._damaged(RECORD)
        return record

    def wait_for_record(self) -> dict[str, Any]:
        """Wait until the first process has written the record, and return it; torchrun kills waiting processes."""
        while not (self.path / OPTIONS).exists():
            time.sleep(0.05)
        return self.read_record()

    def write(self, record: dict[str, Any], options: _O) -> None:
        """Write the record, and the options file for users to edit."""
        import tomli_w

        table = options.to_table()
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / RECORD, json.dumps({**record, "options": table}, indent=1).encode())
        # Written last: this file marks the folder as a run.
        write_atomically(self.path / OPTIONS, tomli_w.dumps(table).encode())

    def read_table(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file of the run; raise if it is damaged."""
        try:
            data = read_json(self.path / name)
        except ModelFileError:
            data = None
        if not isinstance(data, dict):
            raise self._damaged(name)
        return data

    def _damaged(self, name: str) -> Exception:
        return ValueError(f"resume: {self.path / name} is damaged: the run cannot be resumed.")


# Runs -----------------------------------------------------------------------------------------------------------------


Say = Callable[[str], None]


class FolderRun(ABC, Generic[_O]):
    """A training run in a folder.

    Parameters
    ----------
    options : RunOptions
    folder : str or Path
    say : callable
        Called with each line of output for the user.
    """

    def __init__(self, options: _O, folder: str | Path, say: Say = print) -> None:
        self.options = options.with_absolute_paths()  # so that a run can be resumed from any directory
        self.folder = Path(folder)
        self.say = from_first(say)
        self.check()
        check_processes(options.training)

    #: The type of the options.
    kind: ClassVar[type[Any]]

    @classmethod
    def files(cls, folder: str | Path) -> RunFolder[_O]:
        """Return the run folder of this kind of run."""
        return RunFolder(Path(folder), cls.kind)

    @classmethod
    def resumed(cls, folder: str | Path, changes: dict[str, Any], say: Say = print) -> Self:
        """Return the run in a folder, to resume it; ``changes`` are new values of training options."""
        return cls(resumed_options(cls.files(folder), changes, from_first(say)), folder, say)

    @abstractmethod
    def check(self) -> None:
        """Raise if the options are invalid; called before any data is read."""

    def module(self, made: Any) -> nn.Module:
        """Return the module inside the result of :meth:`train`."""
        module: nn.Module = made.model
        return module

    def cache_bytes(self, made: Any) -> tuple[float, float] | None:  # noqa: ARG002
        """Return the bytes that decoding caches per token of a sequence, and for one of any length; None by default."""
        return None

    def size_batches(self, count: int, what: str) -> None:
        """Choose the batch size by the amount of data, unless the options have one, and report it."""
        training = self.options.training.sized(count)
        name = training.batch_option
        if training != self.options.training:
            self.options = self.options.with_changes({"training": training})
            flag = dict(training.declared())[name].metadata["flag"]
            size = getattr(training, name)
            self.say(f"batches of {size:,} {what}, chosen for {count:,} to learn from; {flag} sets another size")

    def open(self, resume: bool) -> tuple[RunFolder[_O], dict[str, Any]]:
        """Return the run's folder and its training conditions.

        Raises
        ------
        ValueError
            If this machine lacks a device that the options require, if there is no run to resume, or if a new run
            would overwrite another one.
        """
        from regard_lab.training.loop import check_devices

        check_devices(self.options.training)
        files = self.files(self.folder)
        files.check_resumable() if resume else files.check_new(", or be resumed (--resume)")
        return files, conditions(self.options.training)

    def fit(
        self,
        model: nn.Module,
        batch: Callable[[int], Examples],
        checks: Sequence[Examples],
        objective: Objective,
        score: Score | None = None,
        guess: float = math.inf,
        *,
        resume: bool,
        callbacks: Iterable[Callback],
    ) -> TrainingResult:
        """Train a model on numbered batches; other arguments as in :class:`Learner` and :func:`train`."""
        from regard_lab.training.learner import Learner, Stream
        from regard_lab.training.loop import train

        training = self.options.training
        learner = Learner(model, training, Stream(batch), objective, score, guess)
        return train(learner, checks, training, self.folder, resume=resume, callbacks=callbacks)


def place() -> tuple[int, int]:
    """Return this process's rank and the world size, as torchrun sets them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def from_first(say: Say) -> Say:
    """Return ``say`` in the first process, and a function that prints nothing in the others."""
    return say if place()[0] == 0 else lambda _: None


def data_place(training: TrainingOptions) -> tuple[int, int]:
    """Return the index of the data shard that this process reads, and the number of shards."""
    return training.data_place(*place())


def check_processes(training: TrainingOptions) -> None:
    """Raise unless the number of processes matches the options."""
    _, world = place()
    if world != training.devices:
        expected = f"be {world}, the number of processes of torchrun" if world > 1 else "be 1 without torchrun"
        raise rejected("train", "training.devices", expected, training.devices)


def resumed_options(files: RunFolder[_O], changes: dict[str, Any], say: Say) -> _O:
    """Return the options of a resumed run; ``changes`` are new values of training options.

    New ``seconds`` count from this start. Users can also change options in the folder's options file, where
    ``seconds`` counts all starts.
    """
    before, edited = files.read_options()
    was = before.training
    with in_section("training"):
        training = edited.training.with_changes(changes)
        if changes.get("seconds"):
            training = replace(training, seconds=round(training.seconds + files.seconds_used(), 2))
        changed = training.changed_from(was)
    for name in changed:
        say(f"{name} changed from {getattr(was, name)} to {getattr(training, name)}")
    return before.with_changes({"training": training})


def conditions(training: TrainingOptions) -> dict[str, Any]:
    """Set the number of threads; return the conditions that bitwise reproducibility depends on."""
    from regard_lab.training.learner import is_bfloat16

    if training.threads:
        set_threads(training.threads)
    return {"threads": torch.get_num_threads(), "bfloat16": is_bfloat16(training.precision)}


def restore_conditions(begun: dict[str, Any], here: dict[str, Any], say: Say) -> None:
    """Restore the run's number of threads, which changes the order of sums and so the last bits of results."""
    if begun["threads"] != here["threads"]:
        say(f"threads: {begun['threads']}, as when the run started")
        set_threads(begun["threads"])
    if begun["bfloat16"] != here["bfloat16"]:
        was, now = ("bfloat16" if narrow else "float32" for narrow in (begun["bfloat16"], here["bfloat16"]))
        say(f"matrix products were in {was} when the run started and are in {now} here: results will differ slightly")


def save_unbroken(save: Callable[[], object], folder: Path) -> None:
    """Save the model at the end of training; a keyboard interrupt waits until it is saved."""
    from regard_lab.training.loop import unbroken

    try:
        with unbroken():
            save()
    except OSError as error:
        raise TrainingError(
            f"train: cannot write the model to {folder}: {error.strerror or error}. Training is complete and the "
            "checkpoints are intact: fix the problem, then write the model with --resume."
        ) from error
