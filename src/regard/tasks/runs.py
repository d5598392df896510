"""A training run: checkpoints that are whole or not there, and going on exactly where one was saved."""

from __future__ import annotations

import io
import logging
import math
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader

from regard.tasks.batches import Batch
from regard.tasks.files import write_atomically
from regard.tasks.learner import Learner, TrainingError
from regard.tasks.options import TrainingOptions

CHECKPOINTS, LAST, BEST, LOG = "checkpoints", "last.ckpt", "best", "log"


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes
    ----------
    steps, pairs : int
        How many steps there were, and how many pairs this process learned from in them.
    reason : str
        ``"steps"``, ``"seconds"``, ``"patience"`` or ``"interrupt"``.
    best : float
        The best value of the metric; NaN where there was no validation.
    seconds : float
        Of training; what came before an interrupted run was resumed is counted in.
    """

    steps: int
    pairs: int
    reason: str
    best: float
    seconds: float = field(compare=False)


def train(
    learner: Learner,
    valid: Sequence[Batch],
    options: TrainingOptions,
    folder: str | Path | None,
    *,
    resume: bool = False,
    callbacks: Iterable[Callback] = (),
) -> Ended:
    """Train until the budget is used up, validation finds nothing better, or a keyboard interrupt.

    The parameters end as those of the best validation (the mean of the best ``options.average``), or the last where
    there was none. An interrupt ends the step at hand, saves, and returns; a second one ends the process.

    Parameters
    ----------
    learner : Learner
    valid : sequence of Batch
        Walked through by every validation; empty for none.
    options : TrainingOptions
    folder : str, Path or None
        Gets ``checkpoints`` and ``log``; with None nothing is written, and the parameters end as the last.
    resume : bool, default False
        Go on from the last checkpoint in the folder: same batches, same random numbers, and on a CPU the same bits as
        a run that was never stopped.
    callbacks : iterable of Callback
        Such as a progress bar.

    Returns
    -------
    Ended

    Raises
    ------
    TrainingError
        If the loss is not finite, memory or the disk is full; the last checkpoint is whole.
    """
    folder = None if folder is None else Path(folder)
    stop = _Stop(options)
    learner.seconds = stop.used
    best, hooks, last = _hooks(options, folder, bool(valid))
    learner.train()  # Lightning trains a model in the mode that it finds it in
    with _quiet(), _interruptible(stop):
        trainer = Trainer(
            default_root_dir=folder,
            accelerator=options.accelerator if options.accelerator != "auto" or torch.cuda.is_available() else "cpu",
            devices=options.devices,
            strategy=options.strategy,
            max_steps=options.steps,
            max_epochs=-1,
            accumulate_grad_batches=options.accumulate,
            gradient_clip_val=options.clip or None,
            val_check_interval=options.validate_every * options.accumulate if valid else None,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            log_every_n_steps=10,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=best is not None,
            use_distributed_sampler=False,
            logger=False if folder is None else _loggers(folder, options),
            # What is saved last comes last, so that it knows of the best.
            callbacks=[*hooks, *callbacks, stop, *([] if last is None else [last])],
            plugins=[AtomicCheckpoints()],
        )
        with _explained(options, folder):
            validation: Any = DataLoader(valid, batch_size=None) if valid else None  # type: ignore[arg-type]
            begin = last.path if resume and last is not None else None
            try:
                trainer.fit(learner, learner.stream, validation, ckpt_path=begin)
            except SIGTERMException:
                stop.reason = "interrupt"
    reason = stop.reason or ("steps" if trainer.global_step >= options.steps else "patience")
    if best is not None and reason != "interrupt":
        _take_best(learner, best, options.average)
    score = None if best is None else best.best_model_score
    found = float("nan") if score is None else float(score)
    return Ended(trainer.global_step, stop.pairs, reason, found, stop.used())


def _hooks(
    options: TrainingOptions, folder: Path | None, validated: bool
) -> tuple[ModelCheckpoint | None, list[Callback], _Last | None]:
    """Return what keeps the best, it and whatever else looks at validations, and what saves where to go on."""
    best, metric = None, f"valid_{options.metric}"
    hooks: list[Callback] = []
    mode = "min" if options.minimizes else "max"
    if folder is not None and validated:
        best = ModelCheckpoint(
            folder / CHECKPOINTS, f"{BEST}-{{step}}", monitor=metric, mode=mode, save_top_k=options.keep,
            auto_insert_metric_name=True, save_weights_only=True, enable_version_counter=False,
        )  # fmt: skip
        hooks.append(best)
    if options.patience and validated:
        hooks.append(EarlyStopping(metric, patience=options.patience, mode=mode, min_delta=0.0))
    return best, hooks, None if folder is None else _Last(folder / CHECKPOINTS / LAST, options, validated)


class AtomicCheckpoints(TorchCheckpointIO):
    """Checkpoints that appear whole or not at all, also when the power fails, and that carry no code."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:  # noqa: ARG002
        """Write beside the old file, and replace it when all is on the disk."""
        data = io.BytesIO()
        torch.save(checkpoint, data)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data.getvalue())

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:  # noqa: ARG002
        """Read tensors and plain values; what would run code is refused. The folder may have been moved."""
        try:
            state = torch.load(path, map_location=map_location, weights_only=True)
            for name, each in state["callbacks"].items():
                if name.startswith("ModelCheckpoint"):
                    state["callbacks"][name] = _moved(each, Path(path).parent)
        except FileNotFoundError:
            raise TrainingError(f"resume: {path} must exist, got no such file: the run had not saved yet.") from None
        except (RuntimeError, pickle.UnpicklingError, KeyError, EOFError, AttributeError, ValueError) as error:
            raise TrainingError(
                f"resume: {path} must be a whole checkpoint of tensors, got one that is damaged or something else "
                f"({type(error).__name__})."
            ) from None
        return state


def _moved(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what a ModelCheckpoint knows, its files in this folder; those that are gone are forgotten."""

    def here(path: str) -> str:
        return str(folder / Path(path).name) if path else path

    kept = {here(path): score for path, score in state["best_k_models"].items() if Path(here(path)).exists()}
    paths = ("best_model_path", "kth_best_model_path", "last_model_path")
    return state | {"dirpath": str(folder), "best_k_models": kept} | {name: here(state[name]) for name in paths}


class _Last(Checkpoint):
    """Saves what is needed to go on, every so many steps and at the end.

    Lightning calls checkpoints after all other callbacks, and in their order; so this one knows of the best. Where a
    step is validated it is saved after that: a run that goes on must know what was found.
    """

    def __init__(self, path: Path, options: TrainingOptions, validated: bool) -> None:
        self.path, self.every = path, options.save_every
        self._validated_every = options.validate_every if validated else 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Save after steps, not between batches of one."""
        if trainer.fit_loop._should_accumulate() or trainer.global_step % self.every:
            return
        if not self._validated_every or trainer.global_step % self._validated_every:
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        """Save what was put off."""
        if trainer.global_step % self.every == 0:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Save the end."""
        self._save(trainer)

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Save where somebody asked the process to terminate, which Lightning tells after a step."""
        due = self._validated_every and trainer.global_step % self._validated_every == 0
        if isinstance(exception, SIGTERMException) and not due and not trainer.fit_loop._should_accumulate():
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        state = trainer.lightning_module.parameters()
        if all(bool(torch.isfinite(parameter).all()) for parameter in state):  # else the one before is kept
            trainer.save_checkpoint(self.path)


class _Stop(Callback):
    """Ends training after a step: when time is up, or somebody asked. It holds the clock."""

    def __init__(self, options: TrainingOptions) -> None:
        self.seconds, self.validate_every, self.patience = options.seconds, options.validate_every, options.patience
        self.reason, self.pairs = "", 0
        self._before, self._began, self._ended = 0.0, math.inf, math.inf

    def used(self) -> float:
        """Return the seconds of training."""
        return self._before + max(min(time.monotonic(), self._ended) - self._began, 0.0)

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

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Batch, number: int) -> None:  # noqa: ARG002
        """Look at the clock."""
        self.pairs += len(batch.source)
        if self.seconds and not self.reason and self.used() >= self.seconds:
            self.reason = "seconds"
        if trainer.fit_loop._should_accumulate():
            return
        # Processes stop together: their clocks differ, and a signal may reach one alone.
        if trainer.strategy.reduce_boolean_decision(bool(self.reason), all=False):
            self.reason = self.reason or "interrupt"
            trainer.should_stop = True
            if self.reason == "interrupt" and trainer.global_step % self.validate_every:
                # Lightning validates whenever it stops; the run that goes on would know of one validation more.
                trainer.limit_val_batches = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds and pairs that were used."""
        return {"used": self.used(), "pairs": self.pairs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self._before, self.pairs = state_dict["used"], state_dict["pairs"]


@contextmanager
def _interruptible(stop: _Stop) -> Iterator[None]:
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
def _explained(options: TrainingOptions, folder: Path | None) -> Iterator[None]:
    """Say in one sentence what to do where memory or the disk is full."""
    try:
        yield
    except OSError as error:
        if folder is None:
            raise
        raise TrainingError(
            f"train: {folder} must take a checkpoint, got {error.strerror or error}; what was there before is whole: "
            "mend that, and go on with --resume."
        ) from error
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        if isinstance(error, TrainingError) or (isinstance(error, RuntimeError) and not _is_memory(error)):
            raise
        raise TrainingError(
            f"train: a batch must fit in memory, got an allocation that failed; begin anew with lower batch_tokens "
            f"(now {options.batch_tokens}), and accumulate (now {options.accumulate}) raised by the same factor."
        ) from error


def _is_memory(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text or "out of memory" in text


def _take_best(learner: Learner, best: ModelCheckpoint, average: int) -> None:
    """Give the model the mean of the parameters of the best checkpoints."""
    ranked = sorted(best.best_k_models.items(), key=lambda item: float(item[1]), reverse=best.mode == "max")
    paths = [path for path, _ in ranked[:average] if os.path.exists(path)]  # noqa: PTH110
    if not paths:
        return
    total: dict[str, Tensor] = {}
    for path in paths:
        state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
        for name, tensor in state.items():
            total[name] = tensor.double() if name not in total else total[name] + tensor
    learner.load_state_dict({name: (tensor / len(paths)).to(state[name].dtype) for name, tensor in total.items()})


def _loggers(folder: Path, options: TrainingOptions) -> list[Logger]:
    found: list[Logger] = [CSVLogger(folder, name=LOG, version="")]
    return [*found, TensorBoardLogger(folder, name=LOG, version="")] if options.tensorboard else found


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning from advertising and from warning about what is meant to be so."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
