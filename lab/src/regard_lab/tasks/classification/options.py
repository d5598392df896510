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
    batch_range: ClassVar[tuple[int, int]] = (8, 32)
    #: A number of epochs chosen from the data: minimum, enough for this many steps, and maximum. From 200 questions of
    #: TREC, 3 epochs in batches of 32 name 19 % of the test set, and 20 epochs in batches of 8 54 %.
    fewest_epochs: ClassVar[float] = 3.0
    least_steps: ClassVar[int] = 500
    most_epochs: ClassVar[float] = 20.0

    epochs: float = option(
        0.0,
        "passes over the training examples, unless steps is given; 0 for 3 to 20 (of images, from 10), the fewer the "
        "more examples there are",
        ge=0,
        flag="--epochs",
    )
    steps: int = option(0, "training steps in place of epochs; 0 for as many as the epochs have", ge=0, resumable=True,
                       flag="--steps")  # fmt: skip
    batch_examples: int = option(0, "examples per batch; 0 for a number that suits the amount of data: from 8, of "
                                 "texts to 32, of images to 64", ge=0, flag="--batch")  # fmt: skip
    batch_tokens: int = option(4096, "for other tasks only", ge=2)
    learning_rate: float = option(0.0, "peak learning rate of AdamW; 0 for one that suits the model", ge=0,
                                  resumable=True, flag="--learning-rate")  # fmt: skip
    warmup: float = redeclared(TrainingOptions, "warmup", 0.1)
    beta2: float = redeclared(TrainingOptions, "beta2", 0.999)
    label_smoothing: float = redeclared(TrainingOptions, "label_smoothing", 0.0)
    validate_every: int = option(0, "steps between validations; 0 for one each epoch", ge=0)
    metric: str = option("accuracy", "validation metric that selects the best checkpoint", choices=METRICS)
    keep: int = redeclared(TrainingOptions, "keep", 1)

    def planned(self, per_epoch: int, rate: float) -> Self:
        """Return the options with epochs, steps, validations and rate, where they were left to the data.

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
        >>> [ClassifierTrainingOptions().planned(per_epoch, 1e-4).epochs for per_epoch in (10, 50, 1000)]
        [20.0, 10.0, 3.0]
        """
        each = math.ceil(per_epoch / self.accumulate)
        enough = min(max(self.fewest_epochs, math.ceil(self.least_steps / each)), self.most_epochs)
        epochs = self.epochs or float(enough)
        steps = self.steps or math.ceil(epochs * per_epoch / self.accumulate)
        every = self.validate_every or min(each, steps)
        rate = self.learning_rate or rate
        return replace(self, epochs=epochs, steps=steps, validate_every=every, learning_rate=rate)


class ClassifierOptions(RunOptions):
    """What a run that learns labels is asked for."""

    training: ClassifierTrainingOptions
