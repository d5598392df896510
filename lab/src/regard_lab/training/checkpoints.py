"""Checkpoints, written whole or not at all, and the log of a run that is kept with them."""

from __future__ import annotations

import csv
import io
import math
import pickle
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from regard._utils.files import remove_unfinished, write_atomically
from regard_lab.training.learner import Learner
from regard_lab.training.options import TrainingError, TrainingOptions

# The log of a run as a CSV table; a resumed run continues it ----------------------------------------------------------


#: Steps between two writes of the file.
_EVERY = 100


class Log(Logger):
    """Write ``metrics.csv`` in a folder; Lightning's own logger deletes it when a run is resumed.

    Omits Lightning's epochs, which count how often the run was started.
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
        """Do nothing; the options file holds them."""

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
                f"train: cannot write the log to {self._path.parent}: {error.strerror or error}. The checkpoints are "
                "intact: fix the problem and continue with --resume."
            ) from error

    def finalize(self, status: str) -> None:
        """Write the last rows; after a failed run, ignore write errors to report the original one."""
        with suppress(TrainingError) if status == "failed" else nullcontext():
            self.save()

    @rank_zero_only
    def begin(self, step: int) -> None:
        """Keep only the rows of steps before this one; later steps will run again."""
        if self._path.exists():
            text = self._path.read_text(encoding="utf-8")
            rows = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))  # without an incomplete last line
            self._rows = [row for row in rows if (row.get("step") or "").isdecimal() and int(row["step"]) < step]
            if not self._rows:
                self._path.unlink()


# Atomic checkpoints: the best ones, and the last one to resume from ---------------------------------------------------


CHECKPOINTS, LAST, BEST = "checkpoints", "last.ckpt", "best"
#: Key in the checkpoints of sharded training: the name of the folder with the tensors.
SHARDS = "shards"
#: Key of the training clock among the callbacks of a checkpoint.
CLOCK = "_Stop"


class AtomicCheckpoints(TorchCheckpointIO):
    """Checkpoints that are written atomically, even if the power fails, and that contain no code."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:  # noqa: ARG002
        """Write to a temporary file, and replace the old one when all data is on disk."""
        data = io.BytesIO()
        torch.save(checkpoint, data)
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data.getvalue())
        except OSError as error:
            saved = (path.parent / LAST).exists()
            resume = "The previous checkpoint is intact: fix the problem and continue with --resume."
            after = resume if saved else "No checkpoint exists yet: fix the problem and start again."
            raise TrainingError(
                f"train: cannot write a checkpoint to {path.parent}: {error.strerror or error}. {after}"
            ) from error

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:  # noqa: ARG002
        """Read tensors and plain values, never code. The folder may have been moved since it was saved."""
        try:
            state = torch.load(path, map_location=map_location, weights_only=True)
            for name, each in state["callbacks"].items():
                if name.startswith("ModelCheckpoint"):
                    state["callbacks"][name] = _moved(each, Path(path).parent)
        except FileNotFoundError:
            raise TrainingError(f"resume: {path} does not exist: the run has no checkpoint yet.") from None
        except OSError as error:
            raise TrainingError(f"resume: cannot read {path}: {error.strerror or error}.") from error
        except (RuntimeError, pickle.UnpicklingError, KeyError, EOFError, AttributeError, ValueError) as error:
            raise TrainingError(f"resume: {path} is damaged or not a checkpoint ({type(error).__name__}).") from None
        return state


def _moved(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a ModelCheckpoint's state with its paths moved to this folder, without missing files."""
    folder = folder.resolve()  # ModelCheckpoint compares resolved paths

    def here(path: str) -> str:
        return str(folder / Path(path).name) if path else path

    kept = {here(path): score for path, score in state["best_k_models"].items() if Path(here(path)).exists()}
    paths = ("best_model_path", "kth_best_model_path", "last_model_path")
    return state | {"dirpath": str(folder), "best_k_models": kept} | {name: here(state[name]) for name in paths}


class Best(ModelCheckpoint):
    """Keep the best checkpoints; of equal ones the later, because at BLEU 0 the first has learned least.

    Files that are no longer among the best are deleted only after the checkpoint to resume from has been saved.
    """

    @property
    def state_key(self) -> str:
        """The key of Lightning's ModelCheckpoint in checkpoints."""
        return super().state_key.replace(type(self).__name__, ModelCheckpoint.__name__, 1)

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Return whether this checkpoint is among the best."""
        if super().check_monitor_top_k(trainer, current):
            return True
        return current is not None and bool(current == self.best_k_models.get(self.kth_best_model_path, math.nan))

    def ranked(self) -> list[str]:
        """Return the best checkpoint files, the best first."""
        sign = 1 if self.mode == "max" else -1

        def rank(path: str) -> tuple[float, int]:
            return sign * float(self.best_k_models[path]), int(Path(path).stem.rpartition("=")[2])

        return sorted(self.best_k_models, key=rank, reverse=True)

    # The only private Lightning hook in use: there is no other way to delay the deletion.
    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Do nothing; :meth:`tidy` deletes the file later."""

    def tidy(self) -> None:
        """Delete checkpoints that are not among the best."""
        kept = {Path(path).name for path in self.best_k_models}
        for path in Path(str(self.dirpath)).glob(f"{BEST}-*.ckpt"):
            if path.name not in kept:
                path.unlink(missing_ok=True)
        remove_unused_shards(Path(str(self.dirpath)))


def remove_unused_shards(folder: Path) -> None:
    """Delete shard folders that no checkpoint refers to, left by replaced or unfinished checkpoints."""
    if not any(folder.glob("*.shards")):
        return
    from regard_lab.training.sharded.checkpoint import remove_unreferenced

    named = [torch.load(path, weights_only=True).get(SHARDS, "") for path in folder.glob("*.ckpt")]
    remove_unreferenced(folder, named)


class Last(Checkpoint):
    """Save the checkpoint to resume from, every ``save_every`` steps and at the end.

    Lightning calls checkpoint callbacks after all others and in order, so this one records the best checkpoints. A
    step with a validation is saved after it, so that a resumed run knows the result.
    """

    def __init__(self, path: Path, options: TrainingOptions, validated: bool, best: Best | None) -> None:
        self.path, self.every, self._best = path, options.save_every, best
        self._validate_every = options.validate_every if validated else 0
        self._steps = options.steps
        self._mid_step = False

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Delete files that a killed process left unfinished, and log rows of steps that will run again."""
        if trainer.is_global_zero:
            remove_unfinished(self.path.parent)
        self._tidy(trainer)
        for log in trainer.loggers:
            if isinstance(log, Log):
                log.begin(trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, number: int) -> None:  # noqa: ARG002
        """Save after whole steps, not between accumulated batches."""
        self._mid_step = (number + 1) % trainer.accumulate_grad_batches > 0
        if not (self._mid_step or trainer.global_step % self.every or self._is_validated(trainer.global_step)):
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        """Save the step that was validated."""
        if trainer.global_step % self.every == 0:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Save the last step."""
        self._save(trainer)

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Save after SIGTERM, which Lightning raises after a step."""
        due = self._is_validated(trainer.global_step)
        if isinstance(exception, SIGTERMException) and not due and not self._mid_step:
            self._save(trainer)

    def _is_validated(self, step: int) -> bool:
        return bool(self._validate_every) and (step % self._validate_every == 0 or step >= self._steps)

    def _save(self, trainer: Trainer) -> None:
        state: Any = trainer.lightning_module.parameters()
        own = (each.to_local() if hasattr(each, "to_local") else each for each in state)
        finite = all(bool(torch.isfinite(each).all()) for each in own)
        if trainer.strategy.reduce_boolean_decision(finite):  # otherwise keep the previous checkpoint
            for log in trainer.loggers:
                log.save()
            trainer.save_checkpoint(self.path)
            self._tidy(trainer)

    def _tidy(self, trainer: Trainer) -> None:
        if self._best is not None and trainer.is_global_zero:
            self._best.tidy()


def load_best_average(learner: Learner, best: Best, average: int) -> None:
    """Load the mean of the best checkpoints' parameters into the model."""
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
