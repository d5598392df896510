"""Frequencies of target symbols: the output bias that training begins with, and the loss of guessing by them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from regard_lab.models.base import END, EncoderDecoder
from regard_lab.text.ragged import Ragged


@dataclass(frozen=True)
class Frequencies:
    """The share of each symbol among those that are to be written, end marks included.

    Attributes
    ----------
    shares : ndarray (N,)
        They sum to 1, and none is 0: each symbol counts as if it stood there once more.

    Examples
    --------
    >>> targets = Ragged.of([[2, 3], [2]])
    >>> frequencies = Frequencies.of(targets, 4)
    >>> frequencies.shares.tolist(), round(frequencies.loss(targets), 3)
    ([0.1111111111111111, 0.3333333333333333, 0.3333333333333333, 0.2222222222222222], 1.18)
    """

    shares: np.ndarray

    @classmethod
    def of(cls, targets: Ragged, size: int) -> Frequencies:
        """Return the frequencies of a vocabulary's symbols in sequences, without their end marks."""
        counts = _counts(targets, size) + 1.0
        return cls(counts / counts.sum())

    def loss(self, targets: Ragged) -> float:
        """Return the mean cross-entropy per symbol, in nats, of guessing by frequency."""
        counts = _counts(targets, len(self.shares))
        return float(-(counts @ np.log(self.shares)) / counts.sum())

    def set_bias(self, model: EncoderDecoder) -> None:
        """Initialize the output bias to log-frequencies, if the model's features can saturate.

        Adam moves the bias by at most the learning rate per step, so it learns frequencies slowly. The features would
        learn them instead, saturate, and no longer distinguish sources.
        """
        if model.saturates:
            _, bias = model.projection
            with torch.no_grad():
                bias.copy_(torch.from_numpy(np.log(self.shares)))


def _counts(targets: Ragged, size: int) -> np.ndarray:
    counts = np.bincount(targets.numbers, minlength=size).astype(np.float64)
    counts[END] += len(targets)
    return counts
