"""What classifiers learn: the label of each example.

Dimensions: B batch, C labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard_lab.tasks.classification.metrics import classification_metrics
from regard_lab.training.objectives import Loss, Objective


class Labelled(Protocol):
    """A batch of examples with labels."""

    @property
    def labels(self) -> Tensor:
        """The number of each example's label, (B,)."""

    @property
    def targets(self) -> Tensor:
        """What is learned: those numbers, or probabilities of labels (B, C)."""

    def logits(self, model: nn.Module) -> Tensor:
        """Return the logits (B, C) that a classifier makes of the examples."""


class NameLabels(Objective):
    """Name the label of each example: the cross-entropy of labels.

    Parameters
    ----------
    labels : sequence of C str
    smoothing : float, default 0.0
        The share of the probability that goes to all labels alike, in training.
    """

    def __init__(self, labels: Sequence[str], smoothing: float = 0.0) -> None:
        self.labels, self.smoothing = tuple(labels), smoothing

    def loss(self, model: nn.Module, batch: Labelled) -> Loss:
        logits = batch.logits(model).float()
        value = F.cross_entropy(logits, batch.targets, label_smoothing=self.smoothing)
        return Loss(value, float(value.detach()), len(logits))

    def validation(self, model: nn.Module, batch: Labelled) -> Tensor:
        """Return the sum of the costs, the count, and how often each label was named each, (2 + C²,)."""
        logits = batch.logits(model).double()
        cost, C = F.cross_entropy(logits, batch.labels, reduction="sum"), len(self.labels)
        named = torch.bincount(C * batch.labels + logits.argmax(1), minlength=C * C)
        return torch.cat([cost.view(1), cost.new_tensor([len(logits)]), named.double()])

    def metrics(self, loss: float, counts: Sequence[float] = ()) -> dict[str, float]:  # noqa: ARG002
        C = len(self.labels)
        return classification_metrics(np.array(counts).round().astype(np.int64).reshape(C, C), self.labels)
