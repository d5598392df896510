"""The training loop, on Lightning: stopping and saving."""

from __future__ import annotations

import logging
import math
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
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from regard._utils.errors import fitting, rejected, unknown_name
from regard_lab.training.checkpoints import (
    BEST,
    CHECKPOINTS,
    CLOCK,
    LAST,
    AtomicCheckpoints,
    Best,
    Last,
    Log,
    load_best_average,
)
from regard_lab.training.learner import Learner
from regard_lab.training.objectives import Examples
from regard_lab.training.options import TrainingError, TrainingOptions

# Stopping: time limits and keyboard interrupts ------------------------------------------------------------------------


class Stopping(Callback):
    """End training after a step if the time limit is reached or the user interrupts. Keeps the clock."""

    def __init__(self, options: TrainingOptions) -> None:
        self.seconds, self.steps, self.patience = options.seconds, options.steps, options.patience
        self.validate_every = options.validate_every
        self.reason, self.pairs = "", 0
        self._before, self._began, self._ended = 0.0, math.inf, math.inf
        self._agreed: float | None = None

    @property
    def state_key(self) -> str:
        """The callback's key in checkpoints."""
        return CLOCK

    def used(self) -> float:
        """Return the seconds of training; with several processes, the first one's time at this step."""
        if self._agreed is not None:
            return self._agreed
        return self._before + max(min(time.monotonic(), self._ended) - self._began, 0.0)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Agree on the time across processes, because the learning rate and the end of training depend on it."""
        if self.seconds and trainer.world_size > 1:
            self._agreed = None
            self._agreed = trainer.strategy.broadcast(self.used())

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Start the clock; stop at once if the resumed run had ended."""
        if self.seconds and self._before >= self.seconds:
            self.reason = "seconds"
        patient = [each for each in trainer.callbacks if isinstance(each, EarlyStopping)]
        for each in patient:
            each.patience = self.patience  # overrides the checkpoint's value
        if self.reason or any(each.wait_count >= each.patience for each in patient):
            trainer.should_stop = True
            trainer.limit_val_batches = 0
        self._began = time.monotonic()

    def on_train_end(self, *_: Any) -> None:
        """Stop the clock."""
        self._ended = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Examples, number: int) -> None:  # noqa: ARG002
        """Check the clock and interrupts."""
        self.pairs += batch.examples
        if (number + 1) % trainer.accumulate_grad_batches:
            return
        at_end = trainer.global_step >= self.steps
        if at_end:
            trainer.should_stop = True  # makes Lightning validate after the last step
        late = bool(self.seconds) and self.used() >= self.seconds
        # A signal may reach only one process, but all must stop together.
        asked = trainer.strategy.reduce_boolean_decision(self.reason == "interrupt", all=False)
        if asked or late:
            self.reason = "interrupt" if asked else "seconds"
            trainer.should_stop = True
            if asked and trainer.global_step % self.validate_every and not at_end:
                # Lightning validates when it stops, but the resumed run must not have an extra validation.
                trainer.limit_val_batches = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds and pairs used so far."""
        return {"used": self.used(), "pairs": self.pairs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the counts."""
        self._before, self.pairs = state_dict["used"], state_dict["pairs"]


@contextmanager
def interruptible(stop: Stopping) -> Iterator[None]:
    """Let the first keyboard interrupt finish the current step, and the second one stop at once."""
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
def unbroken() -> Iterator[None]:
    """Delay keyboard interrupts until the block ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda *given: asked.append(given[0]))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if asked:
            signal.raise_signal(signal.SIGINT)


# Lost processes -------------------------------------------------------------------------------------------------------


#: Parts of the backends' messages about a dead or unresponsive process; they have no exception type for it.
_SIGNS = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "NCCL")


class LostProcessError(TrainingError):
    """Another process died or does not respond."""


def lost_process(error: BaseException) -> LostProcessError | None:
    """Return a :class:`LostProcessError` if an error says that another process is lost; None otherwise."""
    if isinstance(error, TrainingError) and not any(sign in str(error) for sign in _SIGNS):
        return None
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    text = str(error)
    by_type = isinstance(error, getattr(dist, "DistError", ()))
    if not (by_type or any(sign in text for sign in _SIGNS) or "of the group died" in text):
        return None
    reason = (text.splitlines() or [type(error).__name__])[0].split("] ", 1)[-1].split(". ")[0].rstrip(".")
    return LostProcessError(
        f"train: another process died or hangs ({reason}). The last checkpoint is intact: check the output of that "
        "process, and continue with --resume."
    )


# The training loop ----------------------------------------------------------------------------------------------------


LOG = "log"


@dataclass(frozen=True)
class TrainingResult:
    """The outcome of a run.

    Attributes
    ----------
    steps, pairs : int
        Number of steps, and of pairs that this process trained on.
    reason : str
        ``"steps"``, ``"seconds"``, ``"patience"`` or ``"interrupt"``.
    best : float
        The best value of the metric; NaN without a validation.
    seconds : float
        Training time, including the time before a resumption.
    at_frequency_baseline : bool
        Whether the last validation loss was no better than guessing symbols by their frequency.
    """

    steps: int
    pairs: int
    reason: str
    best: float
    seconds: float = field(compare=False)
    at_frequency_baseline: bool = False


def train(
    learner: Learner,
    valid: Sequence[Examples],
    options: TrainingOptions,
    folder: str | Path | None,
    *,
    resume: bool = False,
    callbacks: Iterable[Callback] = (),
) -> TrainingResult:
    """Train until the step or time budget is used up, validation stops improving, or the user interrupts.

    The model ends with the mean of the parameters of the best ``options.average`` validations, or without validation
    with the last parameters. An interrupt finishes the current step, saves and returns; a second one raises at once.

    Parameters
    ----------
    learner : Learner
    valid : sequence of batches
        The validation set; empty for no validation.
    options : TrainingOptions
    folder : str, Path or None
        Receives ``checkpoints`` and ``log``. With None nothing is written, and the model keeps its last parameters.
    resume : bool, default False
        Resume from the last checkpoint in the folder, with the same batches and random numbers; on a CPU, bit for bit
        as if the run had never stopped.
    callbacks : iterable of Callback
        For example a progress bar.

    Returns
    -------
    TrainingResult

    Raises
    ------
    TrainingError
        If the loss is not finite, or if memory or the disk is full. The last checkpoint stays intact.
    """
    folder = None if folder is None else Path(folder)
    stop = Stopping(options)
    learner.seconds = stop.used
    best, hooks, last = _hooks(options, folder, bool(valid))
    learner.train()  # Lightning does not change the mode
    with _quiet(), interruptible(stop):
        # The checkpoint to resume from comes last, because it records the best one.
        watching = [*hooks, *callbacks, stop, *([] if last is None else [last])]
        trainer = _trainer(options, folder, watching, validates=bool(valid))
        size = options.batch_option
        memory = (
            f"train: out of memory: start again with a lower {size} (now {getattr(options, size)}), and raise "
            f"accumulate (now {options.accumulate}) by the same factor."
        )
        with fitting(memory, TrainingError):
            validation: Any = DataLoader(valid, batch_size=None) if valid else None  # type: ignore[arg-type]
            begin = last.path if resume and last is not None else None
            with _ends(stop):
                trainer.fit(learner, learner.stream, validation, ckpt_path=begin)
    reason = stop.reason or ("steps" if trainer.global_step >= options.steps else "patience")
    if best is not None and reason != "interrupt":
        load_best_average(learner, best, options.average)
    score = None if best is None else best.best_model_score
    best_score = float("nan") if score is None else float(score)
    return TrainingResult(
        trainer.global_step, stop.pairs, reason, best_score, stop.used(), learner.at_frequency_baseline
    )


def _trainer(options: TrainingOptions, folder: Path | None, callbacks: list[Callback], *, validates: bool) -> Trainer:
    """Return a Lightning trainer for these options."""
    return Trainer(
        default_root_dir=folder,
        accelerator=options.accelerator if options.accelerator != "auto" or torch.cuda.is_available() else "cpu",
        devices=options.devices,
        strategy=_strategy(options),
        max_steps=options.steps,
        max_epochs=-1,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=options.clip or None,
        val_check_interval=options.validate_every * options.accumulate if validates else None,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=folder is not None,
        use_distributed_sampler=False,
        logger=False if folder is None else _loggers(folder, options),
        callbacks=callbacks,
        plugins=[AtomicCheckpoints()],
    )


@contextmanager
def _ends(stop: Stopping) -> Iterator[None]:
    """Translate Lightning's exceptions when training ends early: an interrupt, or a lost process."""
    try:
        yield
    except SIGTERMException:
        stop.reason = "interrupt"
    except RuntimeError as error:
        lost = lost_process(error)
        if lost is None:
            raise
        raise lost from error
    except SystemExit as ended:  # Lightning turns a second keyboard interrupt into this
        if isinstance(ended.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise


def check_devices(options: TrainingOptions) -> None:
    """Raise if Lightning does not know the strategy or accelerator, or if this machine lacks the accelerator."""
    strategies, accelerators = StrategyRegistry.available_strategies(), AcceleratorRegistry.available_accelerators()
    for name, known in (("strategy", strategies), ("accelerator", {*accelerators, "gpu"})):
        if getattr(options, name) not in {"auto", *known}:
            raise unknown_name("options", name, getattr(options, name), {"auto", *known})
    wanted = options.accelerator
    kinds = ("cuda", "mps") if wanted == "gpu" else () if wanted == "auto" else (wanted,)
    if kinds and not any(AcceleratorRegistry[kind]["accelerator"].is_available() for kind in kinds):
        raise rejected("options", "accelerator", "be available on this machine", repr(wanted))


def _hooks(
    options: TrainingOptions, folder: Path | None, validated: bool
) -> tuple[Best | None, list[Callback], Last | None]:
    """Return the callback for the best checkpoints, all validation callbacks, and the one for the last checkpoint."""
    best, metric = None, f"valid_{options.metric}"
    hooks: list[Callback] = []
    mode = "min" if options.minimizes else "max"
    if folder is not None and validated:
        best = Best(
            folder / CHECKPOINTS, f"{BEST}-{{step}}", monitor=metric, mode=mode, save_top_k=options.keep,
            auto_insert_metric_name=True, save_weights_only=True, enable_version_counter=False,
        )  # fmt: skip
        hooks.append(best)
    if options.patience and validated:
        hooks.append(EarlyStopping(metric, patience=options.patience, mode=mode, min_delta=0.0))
    return best, hooks, None if folder is None else Last(folder / CHECKPOINTS / LAST, options, validated, best)


def _strategy(options: TrainingOptions) -> Any:
    """Return Lightning's strategy, or ours for sharded training: Lightning's FSDP is FSDP1, and supports only GPUs."""
    if not options.divides:
        return options.strategy
    from regard_lab.training.strategy import ShardedStrategy

    return ShardedStrategy(options)


def _loggers(folder: Path, options: TrainingOptions) -> list[Logger]:
    loggers: list[Logger] = [Log(folder / LOG)]
    return [*loggers, TensorBoardLogger(folder, name=LOG, version="")] if options.tensorboard else loggers


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's tips, and its warnings about intended behavior."""
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
