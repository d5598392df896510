"""Sequences of unequal lengths in one array, and as padded tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from regard_lab.models.base import PAD


@dataclass(frozen=True)
class Ragged:
    """Sequences of unequal lengths, concatenated in one array: a few bytes for each number.

    Attributes
    ----------
    numbers : ndarray (total,), int32
    offsets : ndarray (N + 1,), int64
        Sequence i is ``numbers[offsets[i] : offsets[i + 1]]``.

    Examples
    --------
    >>> ragged = Ragged.of([[5, 6], [], [7]])
    >>> len(ragged), ragged.lengths.tolist(), ragged[0].tolist()
    (3, [2, 0, 1], [5, 6])
    """

    numbers: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int]]) -> Ragged:
        """Return sequences as one array."""
        numbers: list[int] = []
        ends = [0]
        for sequence in sequences:
            numbers += sequence
            ends.append(len(numbers))
        return cls(np.array(numbers, np.int32), np.array(ends, np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self.numbers[self.offsets[row] : self.offsets[row + 1]]

    @cached_property
    def lengths(self) -> np.ndarray:
        """The length of each sequence, (N,)."""
        return np.diff(self.offsets)

    def take(self, rows: np.ndarray) -> Ragged:
        """Return the sequences with these indices, in this order; an index may repeat."""
        lengths = self.lengths[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        shift = np.repeat(self.offsets[rows] - offsets[:-1], lengths)
        return Ragged(self.numbers[shift + np.arange(offsets[-1])], offsets)

    def padded(self, rows: np.ndarray, *, ending: int | None = None) -> tuple[Tensor, Tensor]:
        """Return some sequences as one tensor (B, longest), padded with 0 on the right, and their lengths (B,).

        Parameters
        ----------
        rows : ndarray (B,)
        ending : int, optional
            A number to put behind each sequence.
        """
        lengths = self.lengths[rows]
        steps = np.arange(int(lengths.max(initial=0)) + (ending is not None))
        places = np.minimum(self.offsets[rows][:, None] + steps, max(len(self.numbers) - 1, 0))
        table = self.numbers[places].astype(np.int64) if len(self.numbers) else np.full(places.shape, PAD)
        table[steps >= lengths[:, None]] = PAD
        if ending is not None:
            table[np.arange(len(rows)), lengths] = ending
            lengths = lengths + 1
        return torch.from_numpy(table), torch.from_numpy(lengths)


def pad(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return sequences as one tensor (B, S), padded with 0 on the right, and their lengths (B,).

    Examples
    --------
    >>> pad([[5, 6], [7]])
    (tensor([[5, 6],
            [7, 0]]), tensor([2, 1]))
    """
    return Ragged.of(sequences).padded(np.arange(len(sequences)))
