"""Every option of training."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from regard._utils.errors import in_section, rejected, unknown_name
from regard_lab._options import Options, option

SCHEDULES = ("inverse_sqrt", "cosine", "linear", "constant")
PRECISIONS = ("auto", "float32", "bfloat16")
#: The largest share of unknown symbols that is accepted by default. The vocabulary of the included model lacks at most
#: 3 % of texts of other kinds in its own languages, 0.2 to 28 % of other languages in Latin letters (German 3.3,
#: Spanish 4.7, Polish 7.9, Hungarian 13.5, Turkish 14.5), and 68 % and more of those in other scripts.
MOST_UNKNOWN = 0.1
METRICS = ("loss", "bleu", "chrf", "wer", "per")
#: Maximum share of the budget for a warm-up that is given in steps, so that a short run learns, too.
_RISING = 0.3


class TrainingError(RuntimeError):
    """Training that cannot continue; the message says where to look."""


def absolute_path(name: str) -> str:
    """Return a path as an absolute path; "-" for standard input and "" are unchanged."""
    return str(Path(name).absolute()) if name not in ("", "-") else name


def unknown_option() -> Any:
    """Declare the option that limits how many symbols of the data a vocabulary may lack."""
    return option(MOST_UNKNOWN, "maximum share of unknown symbols in the training data", ge=0, le=1)


class RunOptions(Options):
    """The options of a run of any task: those of its data, of its model and of training."""

    #: Fields of the model's config that the data determines.
    determined: ClassVar[frozenset[str]] = frozenset()
    preset: str
    model: dict[str, Any]
    training: TrainingOptions

    def model_config(self) -> Any:
        """Return the model's config, or raise where an option is wrong; subclasses take sizes of the data."""
        raise NotImplementedError

    def preset_config(self, config: type[Any], *sizes: int, **fields_set: Any) -> Any:
        """Return a config: a preset with the fields set here, and those of ``model``, or raise for an unknown one.

        ``sizes`` are the positional arguments of ``config.preset``.
        """
        known = {each.name for each in fields(config)} - self.determined
        for name in self.model:
            if name not in known:
                raise unknown_name(config.__name__, f"model.{name}", name, known)
        with in_section("model"):
            return config.preset(self.preset, *sizes, **(fields_set | self.model))

    def unset_model_fields(self) -> dict[str, Any]:
        """Return the fields of the model's config that were not set, with the preset's values."""
        found = asdict(self.model_config()).items()
        return {
            name: value for name, value in found if name not in {*self.determined, *self.model} and value is not None
        }

    def with_absolute_paths(self) -> Self:
        """Return the same with paths that do not depend on where a command is run."""
        return self


@dataclass(frozen=True)
class TrainingOptions(Options):
    """The options of training. Every field is an option of the command line and a line of the options file.

    Examples
    --------
    >>> TrainingOptions(steps=100).with_changes({"clip": 0.5}).clip
    0.5
    """

    #: The option for the batch size.
    batch_option: ClassVar[str] = "batch_tokens"
    #: The unit of the batch size and of the displayed speed.
    unit: ClassVar[str] = "tokens"
    #: For a batch size chosen from the data: its minimum and maximum, and the minimum number of steps per epoch. In
    #: three minutes on 1,500 pairs of Tatoeba, batches of 1,024 tokens reach a BLEU of 4.4, of 4,096 of 2.1.
    batch_range: ClassVar[tuple[int, int]] = (1024, 4096)
    epoch_steps: ClassVar[int] = 20

    steps: int = option(
        20_000,
        "stop after this many training steps, including those before a resume",
        ge=1,
        resumable=True,
        flag="--steps",
    )
    seconds: float = option(
        0.0,
        "stop after this many seconds of training, including those before a resume; 0 for no limit",
        ge=0,
        resumable=True,
        flag="--seconds",
        short="Stop after this many seconds of training, counted from this start.",
    )
    batch_tokens: int = option(0, "maximum number of tokens per batch, with padding, on both sides of a pair; 0 to "
                               "choose by the amount of data, by default at most 4,096", ge=0,
                               flag="--batch-tokens")  # fmt: skip
    accumulate: int = option(1, "batches per step, whose gradients are summed", ge=1, resumable=True)
    learning_rate: float = option(2e-3, "peak learning rate of AdamW", ge=0, resumable=True, flag="--learning-rate")
    schedule: str = option("linear", "learning-rate schedule after the warm-up", choices=SCHEDULES)
    warmup: float = option(
        500.0,
        f"warm-up: steps over which the learning rate rises from 0, at most {_RISING:.0%} of the "
        "budget; below 1, a share of the budget",
        ge=0,
    )
    weight_decay: float = option(0.01, "weight decay of AdamW", ge=0)
    beta2: float = option(0.98, "β₂ of AdamW, the decay rate of its mean squared gradient", ge=0, lt=1)
    clip: float = option(1.0, "gradient clipping: maximum norm; 0 for none", ge=0, resumable=True)
    label_smoothing: float = option(
        0.1, "label smoothing: share of the probability that goes to other symbols", ge=0, lt=1
    )
    teacher_forcing: float = option(
        1.0,
        "teacher forcing: probability that a decoder step reads the correct previous symbol rather than its own output",
        ge=0,
        le=1,
    )
    guide: float = option(0.3, "weight of the loss that guides attention to given word links", ge=0)
    guided: str = option("", "attention map to guide; by default 'alignment' if the model has it, or else the first "
                             "head of a Transformer's last layer but one")  # fmt: skip
    precision: str = option("auto", "number format of matrix products; auto: bfloat16 where that is fast",
                             choices=PRECISIONS)  # fmt: skip
    seed: int = option(0, "random seed", ge=0, flag="--seed")
    validate_every: int = option(500, "steps between validations", ge=1)
    validate_most: int = option(1000, "maximum number of sequences to decode in a validation", ge=1)
    metric: str = option("bleu", "validation metric that selects the best checkpoint", choices=METRICS)
    patience: int = option(0, "stop after this many validations without improvement; 0 for never", ge=0, resumable=True)
    save_every: int = option(500, "steps between checkpoints to resume from", ge=1, resumable=True)
    keep: int = option(5, "best checkpoints to keep", ge=1)
    average: int = option(1, "best checkpoints to average into the model", ge=1)
    tensorboard: bool = option(False, "also write a TensorBoard log", resumable=True)
    threads: int = option(0, "CPU threads; 0 for one per core", ge=0, le=1024)
    devices: int = option(1, "processes or GPUs; start more than one with torchrun", ge=1, resumable=True)
    strategy: str = option("auto", "ddp: each process holds the model; fsdp: they share it (language models); or "
                           "another strategy of Lightning")  # fmt: skip
    shard: int = option(0, "fsdp: processes that share parameters, gradients and optimizer state; groups of them hold "
                        "copies; 0 for all", ge=0, resumable=True)  # fmt: skip
    tensor: int = option(
        1,
        "fsdp: tensor parallelism, the number of processes that split heads and hidden features",
        ge=1,
        resumable=True,
    )
    context: int = option(
        1, "fsdp: context parallelism, the number of processes that split each sequence", ge=1, resumable=True
    )
    checkpoint_activations: bool = option(False, "language models: recompute activations in the backward pass, to save "
                                          "memory (activation checkpointing)", resumable=True)  # fmt: skip
    accelerator: str = option("auto", "accelerator of Lightning, such as cpu or gpu")

    def check(self) -> None:
        """Raise where more checkpoints are averaged than kept."""
        if self.average > self.keep:
            raise rejected("options", "average", f"be at most keep, which is {self.keep}", self.average)
        if not self.divides:
            for name in ("shard", "tensor", "context"):
                self.require_default(name, "unless strategy is fsdp")
        elif self.devices % (self.tensor * self.context * max(self.shard, 1)):
            expected = f"be a multiple of shard × tensor × context, {max(self.shard, 1) * self.tensor * self.context}"
            raise rejected("options", "devices", expected, self.devices)

    def sized(self, count: int) -> Self:
        """Return the options with a batch size that suits the data, unless they have one.

        It is the largest power of two that leaves enough steps in an epoch, within the bounds of the task.

        Parameters
        ----------
        count : int
            How many examples, or tokens, there are to learn from.

        Examples
        --------
        >>> [TrainingOptions().sized(count).batch_tokens for count in (3_000, 50_000, 3_000_000)]
        [1024, 2048, 4096]
        """
        if getattr(self, self.batch_option):
            return self
        least, most = self.batch_range
        each = count // (self.epoch_steps * self.accumulate * self.data_place(0, self.devices)[1])
        return self.with_changes({self.batch_option: min(max(1 << each.bit_length() >> 1, least), most)})

    @property
    def divides(self) -> bool:
        """Whether processes divide the model among them."""
        return self.strategy == "fsdp"

    @property
    def mesh(self) -> dict[str, int]:
        """How many processes there are along each dimension, where they divide the model."""
        inner = self.tensor * self.context
        shard = self.shard or self.devices // inner
        return {"data": self.devices // (inner * shard), "shard": shard, "context": self.context, "tensor": self.tensor}

    def data_place(self, rank: int, world: int) -> tuple[int, int]:
        """Return which examples a process reads, and how many processes read others; neighbours read the same."""
        inner = self.tensor * self.context
        return rank // inner, world // inner

    @property
    def minimizes(self) -> bool:
        """Whether a smaller metric is better."""
        return self.metric in ("loss", "wer", "per")

    def changed_from(self, before: TrainingOptions) -> list[str]:
        """Return the options that differ from those a run began with; raise for one that may not."""
        changed = [each for each in fields(self) if getattr(self, each.name) != getattr(before, each.name)]
        for each in changed:
            if not each.metadata["resumable"]:
                came = f"{getattr(self, each.name)!r}"
                expected = f"be {getattr(before, each.name)!r}, as the run that is resumed began"
                raise rejected("resume", each.name, expected, came)
        was = before.accumulate * before.data_place(0, before.devices)[1]
        now = self.accumulate * self.data_place(0, self.devices)[1]
        if was != now:
            expected = f"make {was} batches of a step, over all processes, as the run that is resumed began"
            raise rejected("resume", "accumulate", expected, f"{now}")
        return [each.name for each in changed]

    def progress(self, steps: int, seconds: float) -> float:
        """Return the share of the budget that is used: of the steps or of the seconds, whichever is further."""
        return max(steps / self.steps, seconds / self.seconds if self.seconds else 0.0)

    def rate(self, step: int, seconds: float = 0.0) -> float:
        """Return the learning rate at a step, as a share of its peak.

        Parameters
        ----------
        step : int
            Counted from 0.
        seconds : float
            Of training so far; they count where there is a budget of seconds.

        Examples
        --------
        >>> options = TrainingOptions(warmup=10, steps=100, schedule="inverse_sqrt")
        >>> [round(options.rate(step), 3) for step in (0, 4, 9, 39)]
        [0.1, 0.5, 1.0, 0.5]
        >>> options = TrainingOptions(warmup=0.1, seconds=60, schedule="linear")
        >>> [round(options.rate(0, seconds), 3) for seconds in (3, 6, 33, 60)]
        [0.5, 1.0, 0.5, 0.0]

        A warm-up that is longer than a short run ends where 30 % of the run are done:

        >>> options = TrainingOptions(warmup=500, steps=59, schedule="constant")
        >>> [round(options.rate(step), 3) for step in (0, 8, 17, 58)]
        [0.056, 0.5, 1.0, 1.0]
        """
        done, end = step + 1, self.steps + 1  # the last step still learns
        used = max(done / end, seconds / self.seconds if self.seconds else 0.0)
        by_share = 0 < self.warmup < 1
        risen = used / self.warmup if by_share else max(done / max(self.warmup, 1), used / _RISING)
        if self.schedule == "inverse_sqrt":
            return min(risen, risen**-0.5)
        falling = 1 - (self.warmup if self.warmup < 1 else min(self.warmup / end, _RISING))
        left = min(max(1 - used, 0.0) / max(falling, 1 / end), 1.0)
        fall = {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}[self.schedule]
        return min(risen, 1.0) * fall
