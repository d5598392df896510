"""The interface of models that read one sequence and write another.

Dimensions: B batch, S source steps, T target steps, K beams, N target vocabulary, P width of the features that logits
are made of, A attention maps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, Self

import torch.nn.functional as F
from torch import Tensor, nn

#: Ids of padding, and of the end mark (with which decoders also begin).
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
        """The output projection: weight (N, P) and bias (N,)."""

    @abstractmethod
    def features(self, source: Tensor, lengths: Tensor, target: Tensor, teacher_forcing: float = 1.0) -> Tensor:
        """Return the decoder features (B, T, P), the input of :meth:`logits`; arguments as in :meth:`forward`.

        A loss can compute logits from them in chunks: all logits of a batch take more memory than the rest of a model.
        """

    def features_and_attention(
        self, source: Tensor, lengths: Tensor, target: Tensor, teacher_forcing: float = 1.0, *, name: str
    ) -> tuple[Tensor, Tensor]:
        """Return :meth:`features`, and the attention weights (B, T, S) of the map ``name``, one of :attr:`maps`.

        Both come from the same pass and carry gradients, so a loss can guide the attention.
        """
        raise NotImplementedError(f"{type(self).__name__} does not return attention weights for guided attention")

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor, teacher_forcing: float = 1.0) -> Tensor:
        """Return the logits (B, T, N) of every next symbol.

        Parameters
        ----------
        source : Tensor (B, S)
        lengths : Tensor (B,)
        target : Tensor (B, T)
            Target prefixes, beginning with :data:`END`. A source may have several consecutive targets, the same number
            for every source; the batch then has fewer than B sources, and each is encoded once.
        teacher_forcing : float, default 1.0
            Probability that a step reads the target's symbol instead of the model's own most likely one.
        """
        return self.logits(self.features(source, lengths, target, teacher_forcing))

    def logits(self, features: Tensor, state: Any = None) -> Tensor:  # noqa: ARG002
        """Return the logits (..., N) for features (..., P); a state may hold tensors that speed this up."""
        return F.linear(features, *self.projection)

    @abstractmethod
    def start(self, memory: Any, beams: int) -> Rows:
        """Return the initial decoder state for K beams per sequence: B·K rows, the beams of a sequence adjacent."""

    @abstractmethod
    def advance(self, last: Tensor, memory: Any, state: Any) -> tuple[Tensor, Any]:
        """Return the features (B, K, P) after the symbols ``last`` (B, K), and the new state (B·K rows)."""

    def step(self, last: Tensor, memory: Any, state: Any) -> tuple[Tensor, Any]:
        """Return the logits (B, K, N) after the symbols ``last`` (B, K), and the new state (B·K rows)."""
        features, state = self.advance(last, memory, state)
        return self.logits(features, state), state

    @abstractmethod
    def align(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Return the attention weights (B, A, T, S) that :meth:`forward` computes for the same arguments."""

    def posterior(self, source: Tensor, lengths: Tensor, target: Tensor, written: Tensor, name: str | None) -> Tensor:  # noqa: ARG002
        """Return the posterior attention (B, T, S): how much each target step depends on each source step.

        Rows sum to 1, or to 0 if the step reads nothing.

        Ordinary attention is computed before a symbol is generated. Posterior attention also uses the generated
        symbol, and aligns better (Shankar & Sarawagi 2019, openreview BkltNhC9FX). Models that cannot compute it
        return their ordinary attention.

        Parameters
        ----------
        source : Tensor (B, S)
        lengths : Tensor (B,)
        target : Tensor (B, T)
            The decoder input, as in :meth:`align`.
        written : Tensor (B, T)
            The generated symbols.
        name : str or None
            One of :attr:`maps`; None for their mean.
        """
        weights = self.align(source, lengths, target)
        return weights.mean(1) if name is None else weights[:, self.maps.index(name)]

    @property
    def saturates(self) -> bool:
        """Whether features are bounded, so that gradients vanish when they saturate."""
        return False

    @property
    def stochastic(self) -> bool:
        """Whether attention samples positions without a gradient, and learns through :meth:`surrogate`."""
        return False

    def surrogate(self, log_likelihood: Tensor, real: Tensor | None = None) -> Tensor:
        """Return the term to add to the loss if attention is :attr:`stochastic`.

        Parameters
        ----------
        log_likelihood : Tensor (B, T)
            Log-likelihood of each target symbol in the last :meth:`forward` in training, detached; 0 for padding.
        real : Tensor (B, T) of bool, optional
            True for real symbols, False for padding.
        """
        raise NotImplementedError(f"{type(self).__name__} does not sample attention")
