"""One step of training, and validation, as a module of Lightning."""

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

#: A loss that is not lower than guessing by frequency by so much, in nats, says that nothing else was learned.
_LEARNED = 0.1
#: What a validation finds beside the loss, such as ``{"bleu": 31.2}``.
Score = Callable[[nn.Module], dict[str, float]]


class Stream:
    """Training batches from the n-th on; where it begins is set when a run is resumed."""

    def __init__(self, batch: Callable[[int], Examples], first: int = 0) -> None:
        self._batch, self.first = batch, first

    def __iter__(self) -> Iterator[Examples]:
        """Yield batches for ever."""
        number = self.first
        while True:
            yield self._batch(number)
            number += 1


def _no_clock() -> float:
    return 0.0


class Learner(LightningModule):
    """A model that learns from batches what an objective says.

    Everything random in a step is drawn from a generator seeded by the seed and the step's number: a run that was
    killed and goes on from a checkpoint draws what it would have drawn.

    Parameters
    ----------
    model : Module
    options : TrainingOptions
    stream : Stream
        Its beginning is moved when a checkpoint is loaded.
    objective : Objective
    score : callable, optional
        ``score(model)`` is called by every validation, in the first process, and returns what is logged beside the
        loss.
    guess : float, optional
        The loss of a validation in which each symbol is guessed by its frequency alone.
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
        #: The loss of the last validation; NaN before there was one.
        self.valid_loss = math.nan
        #: The last batch's loss, and the seconds of training so far, where somebody holds the clock.
        self.loss, self.seconds = math.nan, _no_clock
        self._sums: Tensor | None = None
        self._count = 0  # of symbols in the batches of a step

    @property
    def at_frequency_baseline(self) -> bool:
        """Whether the last validation found no more learned than how often each symbol is written."""
        return self.valid_loss > self.guess - _LEARNED

    def training_step(self, batch: Examples, number: int) -> Tensor:
        """Return the loss of a batch; where others are added, times the number of symbols that it is the mean of."""
        accumulate = self.options.accumulate
        done = self.global_step * accumulate + number % accumulate
        # Those that divide a model read, mask and drop the same.
        seed = _mixed(self.options.seed, done, self.options.data_place(self.global_rank, self.trainer.world_size)[0])
        # Where there is no GPU, this takes a hundredth of the time of torch.manual_seed.
        torch.default_generator.manual_seed(seed) if self.device.type == "cpu" else torch.manual_seed(seed)
        with self._autocast():
            loss = self.objective.loss(self.model, batch)
        self.loss = loss.shown
        if not math.isfinite(self.loss):
            raise TrainingError(
                f"train: the loss must be finite, got {self.loss} at step {self.global_step + 1}: lower "
                f"learning_rate (now {self.options.learning_rate:g}) or clip (now {self.options.clip:g}); "
                "checkpoints from before it are kept."
            )
        if self.trainer.loggers:
            self.log("loss", self.loss, batch_size=batch.examples)
        self._count += loss.count
        return loss.value * loss.count if self._adds_up else loss.value

    @property
    def _adds_up(self) -> bool:
        """Whether a step's gradient is made of several batches."""
        return self.options.accumulate > 1 or self.trainer.world_size > 1

    def on_before_optimizer_step(self, optimizer: Any) -> None:  # noqa: ARG002
        """Let the gradient be that of the mean over all symbols of a step, whoever read them, and not of means."""
        if self._adds_up:
            strategy = self.trainer.strategy
            count = torch.tensor(float(self._count), dtype=torch.float64, device=self.device)
            total = float(cast(Tensor, strategy.reduce(count, reduce_op="sum"))) / self.options.tensor
            # What Lightning divides by, and then DDP.
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
        """Divide the model among processes, if that is asked for."""
        if self.options.divides:
            strategy: Any = self.trainer.strategy  # which knows how a model is divided
            strategy.divide(self)
        elif self.options.checkpoint_activations:
            model: Any = self.model
            model.checkpoint_activations = True

    def on_validation_epoch_start(self) -> None:
        """Forget the last validation."""
        self._sums = None

    def validation_step(self, batch: Examples, number: int) -> None:  # noqa: ARG002
        """Add up the losses of symbols."""
        with self._autocast():
            sums = self.objective.validation(self.model, batch).cpu()
        self._sums = sums if self._sums is None else self._sums + sums

    def on_validation_epoch_end(self) -> None:
        """Log the loss of a symbol without smoothing, and what the task says: the same in all processes."""
        strategy = self.trainer.strategy
        sums = torch.zeros(2, dtype=torch.float64) if self._sums is None else self._sums
        if self.trainer.world_size > 1:
            sums = cast(Tensor, strategy.reduce(sums.to(self.device), reduce_op="sum"))  # each has its own batches
        total, count, *counts = sums.tolist()
        self.valid_loss = total / max(count, 1.0)
        metrics = {"valid_loss": self.valid_loss}
        metrics |= {f"valid_{name}": value for name, value in self.objective.metrics(self.valid_loss, counts).items()}
        if self._score is not None:  # the models are alike: one process asks, the others wait
            scores = self._score(self.model) if self.trainer.is_global_zero else {}
            metrics |= {f"valid_{name}": value for name, value in strategy.broadcast(scores).items()}
        self.log_dict(metrics, prog_bar=True)

    def configure_optimizers(self) -> Any:
        """Return AdamW with the schedule; matrices decay, and vectors do not: norms and biases have nowhere to go."""
        options = self.options
        learned = [each for each in self.parameters() if each.requires_grad]
        matrices = [each for each in learned if each.dim() > 1]
        vectors = [each for each in learned if each.dim() < 2]
        groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=1.0, betas=(0.9, options.beta2), fused=True
        )
        # The rate is all in the schedule: what a checkpoint restores of the optimizer must not undo a changed option.
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self._rate(step, self.seconds()))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def transfer_batch_to_device(self, batch: Examples, device: torch.device, dataloader_idx: int) -> Examples:  # noqa: ARG002
        """Return the batch on a device."""
        return batch.to(device)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Let the batches go on where the checkpoint was saved."""
        self.stream.first = checkpoint["global_step"] * self.options.accumulate
        if not self.options.seconds:
            for state in checkpoint["optimizer_states"]:
                for group in state["param_groups"]:
                    group["lr"] = self._rate(checkpoint["global_step"], 0.0)

    def _rate(self, step: int, seconds: float) -> float:
        return self.options.learning_rate * self.options.rate(step, seconds)

    def _autocast(self) -> torch.autocast:
        # Lightning's own mixed precision converts parameters anew at every use, and allows no fused optimizer.
        narrow = is_bfloat16(self.options.precision, self.device.type)
        return torch.autocast(self.device.type, torch.bfloat16, enabled=narrow)


@cache
def is_bfloat16(precision: str, device: str = "cpu") -> bool:
    """Return whether matrix products run in bfloat16: for "auto" where the device multiplies it in hardware."""
    if precision != "auto":
        return precision == "bfloat16"
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    able: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return device == "cpu" and bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def _mixed(seed: int, number: int, rank: int) -> int:
    """Return a seed for one batch: neighbours have nothing in common."""
    mixed = (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB + 1) % (1 << 64)
    mixed ^= mixed >> 31
    return mixed * 0xD6E8FEB86659FD93 % (1 << 63)
