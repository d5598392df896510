"""The training step and validation, as a LightningModule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from regard_lab.training.objectives import Examples, Objective
from regard_lab.training.options import TrainingError, TrainingOptions

#: A loss must beat guessing by frequency by this much, in nats, to count as learning.
_LEARNED = 0.1
#: Computes validation metrics in addition to the loss, such as ``{"bleu": 31.2}``.
Score = Callable[[nn.Module], dict[str, float]]


class Stream:
    """An endless stream of training batches, starting at batch ``first``; resuming a run sets ``first``."""

    def __init__(self, batch: Callable[[int], Examples], first: int = 0) -> None:
        self._batch, self.first = batch, first

    def __iter__(self) -> Iterator[Examples]:
        """Yield batches forever."""
        number = self.first
        while True:
            yield self._batch(number)
            number += 1


def _no_clock() -> float:
    return 0.0


class Learner(LightningModule):
    """Trains a model on batches with an objective.

    The seed and the step number seed all random numbers of a step, so a resumed run draws the same numbers.

    Parameters
    ----------
    model : Module
    options : TrainingOptions
    stream : Stream
        Loading a checkpoint sets its start.
    objective : Objective
    score : callable, optional
        ``score(model)`` runs in the first process at each validation, and returns metrics to log with the loss.
    guess : float, optional
        The validation loss of guessing each symbol by its frequency.
    """

    def __init__(
        self,
        model: nn.Module,
        options: TrainingOptions,
        stream: Stream,
        objective: Objective,
        score: Score | None = None,
        guess: float = math.inf,
    ) -> None:
        super().__init__()
        self.model, self.options, self._score = model, options, score
        self.stream, self.objective, self.guess = stream, objective, guess
        #: The loss of the last validation; NaN before the first.
        self.valid_loss = math.nan
        #: The last batch's loss, and a function that returns the seconds of training so far.
        self.loss, self.seconds = math.nan, _no_clock
        self._sums: Tensor | None = None
        self._count = 0  # number of symbols in the batches of a step

    @property
    def at_frequency_baseline(self) -> bool:
        """Whether the last validation loss was no better than guessing symbols by their frequency."""
        return self.valid_loss > self.guess - _LEARNED

    def training_step(self, batch: Examples, number: int) -> Tensor:
        """Return the batch's mean loss; the sum over symbols if a step accumulates several batches."""
        accumulate = self.options.accumulate
        done = self.global_step * accumulate + number % accumulate
        # Processes that share a sharded model need the same data, masks and dropout.
        seed = _mixed(self.options.seed, done, self.options.data_place(self.global_rank, self.trainer.world_size)[0])
        # On a CPU, this takes a hundredth of the time of torch.manual_seed.
        torch.default_generator.manual_seed(seed) if self.device.type == "cpu" else torch.manual_seed(seed)
        with self._autocast():
            loss = self.objective.loss(self.model, batch)
        self.loss = loss.shown
        if not math.isfinite(self.loss):
            raise TrainingError(
                f"train: the loss is {self.loss} at step {self.global_step + 1}: lower "
                f"learning_rate (now {self.options.learning_rate:g}) or clip (now {self.options.clip:g}). "
                "Earlier checkpoints are intact."
            )
        if self.trainer.loggers:
            self.log("loss", self.loss, batch_size=batch.examples)
        self._count += loss.count
        return loss.value * loss.count if self._adds_up else loss.value

    @property
    def _adds_up(self) -> bool:
        """Whether a step sums the gradients of several batches."""
        return self.options.accumulate > 1 or self.trainer.world_size > 1

    def on_before_optimizer_step(self, optimizer: Any) -> None:  # noqa: ARG002
        """Scale the gradient to that of the mean over all symbols of a step, across batches and processes."""
        if self._adds_up:
            strategy = self.trainer.strategy
            count = torch.tensor(float(self._count), dtype=torch.float64, device=self.device)
            total = float(cast(Tensor, strategy.reduce(count, reduce_op="sum"))) / self.options.tensor
            # Undo the divisions by Lightning and DDP.
            divided = self.options.accumulate * (1 if self.options.divides else self.trainer.world_size)
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(divided / max(total, 1.0))
        self._count = 0

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Keep the norm of the gradient at most so large; of parameters that are divided, too."""
        if not self.options.divides:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val:
            from regard_lab.training.sharded import clip_gradients

            clip_gradients(self.parameters(), gradient_clip_val)

    def configure_model(self) -> None:
        """Shard the model across processes or enable activation checkpointing, if the options say so."""
        if self.options.divides:
            strategy: Any = self.trainer.strategy
            strategy.divide(self)
        elif self.options.checkpoint_activations:
            model: Any = self.model
            model.checkpoint_activations = True

    def on_validation_epoch_start(self) -> None:
        """Reset the sums."""
        self._sums = None

    def validation_step(self, batch: Examples, number: int) -> None:  # noqa: ARG002
        """Accumulate the validation losses."""
        with self._autocast():
            sums = self.objective.validation(self.model, batch).cpu()
        self._sums = sums if self._sums is None else self._sums + sums

    def on_validation_epoch_end(self) -> None:
        """Log the loss per symbol without label smoothing, and the task's metrics; the same in all processes."""
        strategy = self.trainer.strategy
        sums = torch.zeros(2, dtype=torch.float64) if self._sums is None else self._sums
        if self.trainer.world_size > 1:
            sums = cast(Tensor, strategy.reduce(sums.to(self.device), reduce_op="sum"))  # each has its own batches
        total, count, *counts = sums.tolist()
        self.valid_loss = total / max(count, 1.0)
        metrics = {"valid_loss": self.valid_loss}
        metrics |= {f"valid_{name}": value for name, value in self.objective.metrics(self.valid_loss, counts).items()}
        if self._score is not None:  # all processes have the same model: the first one computes the scores
            scores = self._score(self.model) if self.trainer.is_global_zero else {}
            metrics |= {f"valid_{name}": value for name, value in strategy.broadcast(scores).items()}
        self.log_dict(metrics, prog_bar=True)

    def configure_optimizers(self) -> Any:
        """Return AdamW with the learning rate schedule; weight decay applies to matrices, not to norms and biases."""
        options = self.options
        learned = [each for each in self.parameters() if each.requires_grad]
        matrices = [each for each in learned if each.dim() > 1]
        vectors = [each for each in learned if each.dim() < 2]
        groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=1.0, betas=(0.9, options.beta2), fused=True
        )
        # The schedule holds the whole rate, so that restoring the optimizer cannot undo a changed option.
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self._rate(step, self.seconds()))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def transfer_batch_to_device(self, batch: Examples, device: torch.device, dataloader_idx: int) -> Examples:  # noqa: ARG002
        """Return the batch on a device."""
        return batch.to(device)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue with the batch at which the checkpoint was saved."""
        self.stream.first = checkpoint["global_step"] * self.options.accumulate
        if not self.options.seconds:
            for state in checkpoint["optimizer_states"]:
                for group in state["param_groups"]:
                    group["lr"] = self._rate(checkpoint["global_step"], 0.0)

    def _rate(self, step: int, seconds: float) -> float:
        return self.options.learning_rate * self.options.rate(step, seconds)

    def _autocast(self) -> torch.autocast:
        # Lightning's mixed precision converts parameters at every use, and does not allow fused optimizers.
        narrow = is_bfloat16(self.options.precision, self.device.type)
        return torch.autocast(self.device.type, torch.bfloat16, enabled=narrow)


@cache
def is_bfloat16(precision: str, device: str = "cpu") -> bool:
    """Return whether matrix products run in bfloat16; for "auto", if the hardware supports it."""
    if precision != "auto":
        return precision == "bfloat16"
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    able: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return device == "cpu" and bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def _mixed(seed: int, number: int, rank: int) -> int:
    """Return the seed of a batch; the seeds of neighboring batches are unrelated."""
    mixed = (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB + 1) % (1 << 64)
    mixed ^= mixed >> 31
    return mixed * 0xD6E8FEB86659FD93 % (1 << 63)
