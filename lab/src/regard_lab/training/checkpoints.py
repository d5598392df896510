"""Checkpoints that are whole or not there: the best, and the last, from which a run goes on."""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from regard._utils.files import remove_unfinished, write_atomically
from regard_lab.training.learner import Learner
from regard_lab.training.logs import Log
from regard_lab.training.options import TrainingError, TrainingOptions

CHECKPOINTS, LAST, BEST = "checkpoints", "last.ckpt", "best"
#: What in a checkpoint names the folder beside it that has the tensors, where processes write their own parts.
SHARDS = "shards"


class AtomicCheckpoints(TorchCheckpointIO):
    """Checkpoints that appear whole or not at all, also when the power fails, and that carry no code."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:  # noqa: ARG002
        """Write beside the old file, and replace it when all is on the disk."""
        data = io.BytesIO()
        torch.save(checkpoint, data)
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data.getvalue())
        except OSError as error:
            saved = (path.parent / LAST).exists()
            on = "what was there before is whole: mend that, and go on with --resume"
            after = on if saved else "nothing was saved before: mend that, and begin anew"
            raise TrainingError(
                f"train: {path.parent} must take a checkpoint, got {error.strerror or error}; {after}."
            ) from error

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:  # noqa: ARG002
        """Read tensors and plain values; what would run code is refused. The folder may have been moved."""
        try:
            state = torch.load(path, map_location=map_location, weights_only=True)
            for name, each in state["callbacks"].items():
                if name.startswith("ModelCheckpoint"):
                    state["callbacks"][name] = _moved(each, Path(path).parent)
        except FileNotFoundError:
            raise TrainingError(f"resume: {path} must exist, got no such file: the run had not saved yet.") from None
        except OSError as error:
            raise TrainingError(f"resume: {path} must be readable, got {error.strerror or error}.") from error
        except (RuntimeError, pickle.UnpicklingError, KeyError, EOFError, AttributeError, ValueError) as error:
            raise TrainingError(
                f"resume: {path} must be a whole checkpoint of tensors, got one that is damaged or something else "
                f"({type(error).__name__})."
            ) from None
        return state


def _moved(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what a ModelCheckpoint knows, its files in this folder; those that are gone are forgotten."""
    folder = folder.resolve()  # as ModelCheckpoint does: it would not believe in a folder of another name

    def here(path: str) -> str:
        return str(folder / Path(path).name) if path else path

    kept = {here(path): score for path, score in state["best_k_models"].items() if Path(here(path)).exists()}
    paths = ("best_model_path", "kth_best_model_path", "last_model_path")
    return state | {"dirpath": str(folder), "best_k_models": kept} | {name: here(state[name]) for name in paths}


class Best(ModelCheckpoint):
    """Keeps the best, of equally good ones the later: where all have BLEU 0, the first has learned least.

    What is no longer among them goes only when what a run is resumed from says so, too.
    """

    @property
    def state_key(self) -> str:
        """Lightning's name of it, in checkpoints."""
        return super().state_key.replace(type(self).__name__, ModelCheckpoint.__name__, 1)

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Return whether this is among the best."""
        if super().check_monitor_top_k(trainer, current):
            return True
        return current is not None and bool(current == self.best_k_models.get(self.kth_best_model_path, math.nan))

    def ranked(self) -> list[str]:
        """Return the files of the best, the very best first."""
        sign = 1 if self.mode == "max" else -1

        def rank(path: str) -> tuple[float, int]:
            return sign * float(self.best_k_models[path]), int(Path(path).stem.rpartition("=")[2])

        return sorted(self.best_k_models, key=rank, reverse=True)

    # A private hook of Lightning's, the only one that is used: there is no other way to keep a file for a while.
    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Leave that to :meth:`tidy`."""

    def tidy(self) -> None:
        """Remove what is not among the best."""
        kept = {Path(path).name for path in self.best_k_models}
        for path in Path(str(self.dirpath)).glob(f"{BEST}-*.ckpt"):
            if path.name not in kept:
                path.unlink(missing_ok=True)
        remove_unused_shards(Path(str(self.dirpath)))


def remove_unused_shards(folder: Path) -> None:
    """Remove folders of tensors that no checkpoint names: of those that were replaced, or not finished."""
    if not any(folder.glob("*.shards")):
        return
    from regard_lab.training.sharded.checkpoint import remove_unreferenced

    named = [torch.load(path, weights_only=True).get(SHARDS, "") for path in folder.glob("*.ckpt")]
    remove_unreferenced(folder, named)


class Last(Checkpoint):
    """Saves what is needed to go on, every so many steps and at the end.

    Lightning calls checkpoints after all other callbacks, and in their order; so this one knows of the best. Where a
    step is validated it is saved after that: a run that goes on must know what was found.
    """

    def __init__(self, path: Path, options: TrainingOptions, validated: bool, best: Best | None) -> None:
        self.path, self.every, self._best = path, options.save_every, best
        self._validate_every = options.validate_every if validated else 0
        self._steps = options.steps
        self._mid_step = False

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Take away what a process that was killed left half written, and what it logged of steps that come again."""
        if trainer.is_global_zero:
            remove_unfinished(self.path.parent)
        self._tidy(trainer)
        for log in trainer.loggers:
            if isinstance(log, Log):
                log.begin(trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, number: int) -> None:  # noqa: ARG002
        """Save after steps, not between batches of one."""
        self._mid_step = (number + 1) % trainer.accumulate_grad_batches > 0
        if not (self._mid_step or trainer.global_step % self.every or self._is_validated(trainer.global_step)):
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
        due = self._is_validated(trainer.global_step)
        if isinstance(exception, SIGTERMException) and not due and not self._mid_step:
            self._save(trainer)

    def _is_validated(self, step: int) -> bool:
        return bool(self._validate_every) and (step % self._validate_every == 0 or step >= self._steps)

    def _save(self, trainer: Trainer) -> None:
        state: Any = trainer.lightning_module.parameters()
        own = (each.to_local() if hasattr(each, "to_local") else each for each in state)
        finite = all(bool(torch.isfinite(each).all()) for each in own)
        if trainer.strategy.reduce_boolean_decision(finite):  # else the one before is kept
            for log in trainer.loggers:
                log.save()
            trainer.save_checkpoint(self.path)
            self._tidy(trainer)

    def _tidy(self, trainer: Trainer) -> None:
        if self._best is not None and trainer.is_global_zero:
            self._best.tidy()


def load_best_average(learner: Learner, best: Best, average: int) -> None:
    """Give the model the mean of the parameters of the best checkpoints."""
    paths = [path for path in best.ranked()[:average] if Path(path).exists()]
    if not paths:
        return
    if learner.options.divides:
        strategy: Any = learner.trainer.strategy
        strategy.load_mean(learner, [Path(path) for path in paths])
        return
    total: dict[str, Tensor] = {}
    for path in paths:
        state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
        for name, tensor in state.items():
            total[name] = tensor.double() if name not in total else total[name] + tensor
    learner.load_state_dict({name: (tensor / len(paths)).to(state[name].dtype) for name, tensor in total.items()})
