"""What a model learns from a batch: the interface of objectives, and writing sequences for sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from regard_lab.data.batches import Batch
from regard_lab.models.base import END, PAD, EncoderDecoder
from regard_lab.training.losses import alignment_loss, coverage_loss, cross_entropy
from regard_lab.training.options import TrainingOptions


class Examples(Protocol):
    """A batch: whatever tensors an objective reads."""

    @property
    def examples(self) -> int:
        """How many examples there are."""

    @property
    def count(self) -> int:
        """How many tokens there are, without padding."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the batch on another device."""


@dataclass(frozen=True)
class Loss:
    """What a batch costs.

    Attributes
    ----------
    value : Tensor ()
        What is differentiated.
    shown : float
        What is logged: the same without what only carries a gradient.
    count : int
        How many symbols it is the mean of: where gradients of several batches are added up, each counts so much.
    """

    value: Tensor
    shown: float
    count: int


class Objective(ABC):
    """What a model learns from a batch, and what it is validated by."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return the cost of a batch, in training."""

    @abstractmethod
    def validation(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the sum of the costs of a batch's symbols, and their count, (2,) of float64, without a gradient.

        Further sums may stand behind them, which :meth:`metrics` is given: whatever adds up over batches.
        """

    def metrics(self, loss: float, counts: Sequence[float] = ()) -> dict[str, float]:  # noqa: ARG002
        """Return what else a validation tells, of its mean cost of a symbol and of further sums."""
        return {}


class WriteTargets(Objective):
    """Write the targets of sources: cross-entropy, smoothed, and of attention with links where a batch has any.

    Parameters
    ----------
    teacher_forcing : float, default 1.0
        How often a step is given the right symbol before it.
    smoothing : float, default 0.0
        The share of the probability that goes to other symbols.
    guide : float, default 0.0
        Weight of the loss that guides attention.
    guided : str, optional
        The attention map that links guide, or that is to cover the source.
    coverage : float, default 0.0
        Weight of the loss of attention that does not cover the source.
    """

    def __init__(
        self,
        teacher_forcing: float = 1.0,
        smoothing: float = 0.0,
        guide: float = 0.0,
        guided: str = "",
        coverage: float = 0.0,
    ) -> None:
        self.teacher_forcing, self.smoothing, self.guide, self.guided = teacher_forcing, smoothing, guide, guided
        self.coverage = coverage

    @classmethod
    def of(cls, options: TrainingOptions, guided: str = "") -> Self:
        """Return the objective that options of training ask for."""
        return cls(options.teacher_forcing, options.label_smoothing, options.guide, guided)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        assert isinstance(model, EncoderDecoder)
        value, log_likelihood, weights = self._cost(model, batch, self.teacher_forcing, self.smoothing)
        shown = float(value.detach())
        if model.stochastic:
            value = value + model.surrogate(log_likelihood, batch.target != PAD)
        if batch.links is not None and weights is not None:
            guide = self.guide * alignment_loss(weights, batch.links)
            value = value + guide
            shown += float(guide.detach())
        if self.coverage and weights is not None:
            value = value + self.coverage * coverage_loss(weights, batch.target != PAD)
        return Loss(value, shown, int((batch.target != PAD).sum()))

    def validation(self, model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(model, EncoderDecoder)
        _, log_likelihood, _ = self._cost(model, batch, 1.0, 0.0)
        return torch.stack([-log_likelihood.double().sum(), (batch.target != PAD).sum().double()])

    def _cost(
        self, model: EncoderDecoder, batch: Batch, teacher_forcing: float, smoothing: float
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the cross-entropy, how likely each symbol was, and the attention (B, T, S) if a loss goes by it."""
        given = batch.source, batch.lengths, shifted(batch.target), teacher_forcing
        if batch.links is None and not (self.coverage and model.training):
            features, weights = model.features(*given), None
        else:
            features, weights = model.features_and_attention(*given, name=self.guided)
        return *cross_entropy(features, model.projection, batch.target, smoothing), weights


def shifted(target: Tensor) -> Tensor:
    """Return what is read when targets (B, T) are written: an end mark, and all of each but the last."""
    return torch.cat([torch.full_like(target[:, :1], END), target[:, :-1]], 1)
