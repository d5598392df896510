"""The options of training that suit classifiers, whatever they classify."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from regard_lab._options import option, redeclared
from regard_lab.training.options import RunOptions, TrainingOptions

METRICS = ("loss", "accuracy", "f1", "matthews")


@dataclass(frozen=True)
class ClassifierTrainingOptions(TrainingOptions):
    """How to train, with what suits classifiers; some are found when the data and the model are known."""

    batch_option: ClassVar[str] = "batch_examples"

    epochs: float = option(3.0, "times that each example is read, where steps is 0", gt=0, flag="--epochs",
                           short="Times that each example is read.")  # fmt: skip
    steps: int = option(0, "steps at most; 0 for those of the epochs", ge=0, resumable=True, flag="--steps",
                        short="Steps at most, in place of epochs.")  # fmt: skip
    batch_examples: int = option(32, "examples of a batch", ge=1, flag="--batch")
    batch_tokens: int = option(4096, "of other tasks", ge=2)
    learning_rate: float = option(0.0, "of AdamW at its peak; 0 for what suits the model's width, and what of it "
                                  "learns", ge=0, resumable=True, flag="--learning-rate",
                                  short="Of AdamW at its peak.")  # fmt: skip
    warmup: float = redeclared(TrainingOptions, "warmup", 0.1)
    beta2: float = redeclared(TrainingOptions, "beta2", 0.999)
    label_smoothing: float = redeclared(TrainingOptions, "label_smoothing", 0.0)
    validate_every: int = option(0, "steps between validations; 0 for one each epoch", ge=0)
    metric: str = option("accuracy", "what best and patience go by", choices=METRICS)
    keep: int = redeclared(TrainingOptions, "keep", 1)

    def planned(self, per_epoch: int, rate: float) -> Self:
        """Return the options with steps, validations and rate, where they were to be found.

        Parameters
        ----------
        per_epoch : int
            Batches of an epoch.
        rate : float
            The learning rate that suits.

        Examples
        --------
        >>> options = ClassifierTrainingOptions(epochs=2.5).planned(100, 1e-4)
        >>> options.steps, options.validate_every, options.learning_rate
        (250, 100, 0.0001)
        """
        each = math.ceil(per_epoch / self.accumulate)
        steps = self.steps or math.ceil(self.epochs * per_epoch / self.accumulate)
        every = self.validate_every or min(each, steps)
        return replace(self, steps=steps, validate_every=every, learning_rate=self.learning_rate or rate)


class ClassifierOptions(RunOptions):
    """What a run that learns labels is asked for."""

    training: ClassifierTrainingOptions
