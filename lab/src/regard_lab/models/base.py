"""The interface of models that read one sequence and write another.

Dimensions: B batch, S source steps, T target steps, K beams, N target vocabulary, P width of the features that logits
are made of, A attention maps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, Self

import torch.nn.functional as F
from torch import Tensor, nn

#: The number of padding, and the number that marks where a sequence ends (and, to a decoder, where it begins).
PAD, END = 0, 1


class Rows(Protocol):
    """Tensors with one row for each sequence or beam."""

    def select(self, rows: Tensor) -> Self:
        """Return these rows (an int64 tensor) in this order; a row may be named more than once."""


class EncoderDecoder(nn.Module, ABC):
    """A model that reads a source once and writes a target symbol by symbol.

    ``forward`` scores whole targets at once, for training; ``encode``, ``start`` and ``step`` (or ``advance``, and
    ``logits`` of as many rows as are wanted at once) write, keeping what was
    computed before. Both give the same logits to rounding. Whatever stands behind a sequence's end has no influence.

    Attributes
    ----------
    config : dataclass
        With ``sources`` and ``targets``, the sizes of the vocabularies, and what else rebuilds the model.
    """

    config: Any

    @property
    @abstractmethod
    def maps(self) -> tuple[str, ...]:
        """The names of the A attention maps that :meth:`align` returns."""

    @property
    def symbols(self) -> int:
        """N, how many symbols it can write."""
        count: int = self.config.targets
        return count

    @abstractmethod
    def encode(self, source: Tensor, lengths: Tensor) -> Rows:
        """Read the sources, once; the result has B rows.

        Parameters
        ----------
        source : Tensor (B, S)
            Numbers of the symbols; whatever stands behind a sequence's end is ignored.
        lengths : Tensor (B,)
            How many symbols of each sequence are real, at least 1.
        """

    @property
    @abstractmethod
    def projection(self) -> tuple[Tensor, Tensor]:
        """The weight (N, P) and the bias (N,) that make logits of features."""

    @abstractmethod
    def features(self, source: Tensor, lengths: Tensor, target: Tensor, teacher_forcing: float = 1.0) -> Tensor:
        """Return the rows (B, T, P) that the logits of every next symbol are made of; arguments as :meth:`forward`'s.

        A loss needs no more: all logits of a batch at once take more memory than the rest of a model.
        """

    def features_and_attention(
        self, source: Tensor, lengths: Tensor, target: Tensor, teacher_forcing: float = 1.0, *, name: str
    ) -> tuple[Tensor, Tensor]:
        """Return :meth:`features`, and the weights (B, T, S) of one of :attr:`maps` that they were made with.

        The weights are of the same pass, and part of its graph: for a loss that guides attention.
        """
        raise NotImplementedError(f"{type(self).__name__} tells no attention that a loss could guide")

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor, teacher_forcing: float = 1.0) -> Tensor:
        """Return the logits (B, T, N) of every next symbol.

        Parameters
        ----------
        source : Tensor (B, S)
        lengths : Tensor (B,)
        target : Tensor (B, T)
            The symbols so far, beginning with :data:`END`. There may be several targets of each source, as many of one
            as of another, which stand together: the sources, fewer than B then, are read once.
        teacher_forcing : float, default 1.0
            The probability with which a step is given the target's symbol instead of the model's own likeliest.
        """
        return self.logits(self.features(source, lengths, target, teacher_forcing))

    def logits(self, features: Tensor, state: Any = None) -> Tensor:  # noqa: ARG002
        """Return the logits (..., N) of rows (..., P); a state may hold what makes that faster."""
        return F.linear(features, *self.projection)

    @abstractmethod
    def start(self, memory: Any, beams: int) -> Rows:
        """Return the decoder's first state for K beams of each sequence: B·K rows, a sequence's beams together."""

    @abstractmethod
    def advance(self, last: Tensor, memory: Any, state: Any) -> tuple[Tensor, Any]:
        """Return the rows (B, K, P) after the symbols ``last`` (B, K), and the state after them (B·K rows)."""

    def step(self, last: Tensor, memory: Any, state: Any) -> tuple[Tensor, Any]:
        """Return the logits (B, K, N) after the symbols ``last`` (B, K), and the state after them (B·K rows)."""
        features, state = self.advance(last, memory, state)
        return self.logits(features, state), state

    @abstractmethod
    def align(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Return the attention weights (B, A, T, S) that :meth:`forward` uses for the same arguments."""

    def posterior(self, source: Tensor, lengths: Tensor, target: Tensor, written: Tensor, name: str | None) -> Tensor:  # noqa: ARG002
        """Return how much of each step of a target is due to each step of its source, (B, T, S).

        Rows sum to 1, or to 0 where nothing is read.

        Attention is what a model reads before it writes; where it is known what was written, that tells more (Shankar
        & Sarawagi 2019, openreview BkltNhC9FX). A model that cannot tell returns its attention.

        Parameters
        ----------
        source : Tensor (B, S)
        lengths : Tensor (B,)
        target : Tensor (B, T)
            What was read in writing, as for :meth:`align`.
        written : Tensor (B, T)
            What was written.
        name : str or None
            One of :attr:`maps`; None for their mean.
        """
        weights = self.align(source, lengths, target)
        return weights.mean(1) if name is None else weights[:, self.maps.index(name)]

    @property
    def saturates(self) -> bool:
        """Whether features are bounded, and gradients vanish where all of them stand at their bounds."""
        return False

    @property
    def stochastic(self) -> bool:
        """Whether attention draws where it reads, without a gradient, and learns by :meth:`surrogate`."""
        return False

    def surrogate(self, log_likelihood: Tensor, real: Tensor | None = None) -> Tensor:
        """Return what to add to the loss where the attention is :attr:`stochastic`.

        Parameters
        ----------
        log_likelihood : Tensor (B, T)
            How likely the last :meth:`forward` in training made each target symbol, detached; 0 for padding.
        real : Tensor (B, T) of bool, optional
            Which symbols are no padding.
        """
        raise NotImplementedError(f"{type(self).__name__} draws nothing")
