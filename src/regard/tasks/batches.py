"""Examples of unequal lengths as padded batches, with little padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard._errors import rejected
from regard.tasks.vocabulary import END, PAD


@dataclass(frozen=True)
class Batch:
    """Sequences to read and the sequences to write for them, padded with 0.

    Attributes
    ----------
    source : Tensor (B, S)
        Numbers of the symbols to read.
    lengths : Tensor (B,)
        How many of them are real.
    target : Tensor (B, T)
        Numbers of the symbols to write, each sequence closed by the end mark.
    """

    source: Tensor
    lengths: Tensor
    target: Tensor


def pad(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return sequences as one tensor (B, S), padded with 0 behind, and their lengths (B,).

    Examples
    --------
    >>> pad([[5, 6], [7]])
    (tensor([[5, 6],
            [7, 0]]), tensor([2, 1]))
    """
    lengths = np.fromiter((len(sequence) for sequence in sequences), dtype=np.int64, count=len(sequences))
    padded = np.full((len(sequences), int(lengths.max(initial=0))), PAD, dtype=np.int64)
    for row, sequence in zip(padded, sequences):
        row[: len(sequence)] = sequence
    return torch.from_numpy(padded), torch.from_numpy(lengths)


class Batches:
    """An endless stream of shuffled batches, epoch after epoch; sequences of similar lengths go together.

    Parameters
    ----------
    sources, targets : sequence of sequence of int
        N sequences to read, and the N to write for them (without the end mark).
    size : int
        Sequences in a batch; an epoch's last batch may have fewer.
    seed : int
        The same seed gives the same batches.

    Examples
    --------
    >>> batch = next(iter(Batches([[2, 3]], [[5]], size=2)))
    >>> batch.source, batch.target
    (tensor([[2, 3]]), tensor([[5, 1]]))
    """

    def __init__(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], *, size: int, seed: int = 0):
        if len(sources) != len(targets) or not sources:
            got = f"{len(targets)} for {len(sources)} sources"
            raise rejected("Batches", "targets", "be as many as sources, and at least one", got)
        if size < 1:
            raise rejected("Batches", "size", "be at least 1", size)
        self.size = size
        self._random = np.random.default_rng(seed)
        self._source, self._lengths = pad(sources)
        self._target, self._target_lengths = pad([[*target, END] for target in targets])

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches for ever."""
        while True:
            yield from self._epoch()

    def _epoch(self) -> Iterator[Batch]:
        # Sort by source length, then target length; the noise below 1 mixes equal lengths anew in every epoch.
        lengths = self._lengths.numpy(), self._target_lengths.numpy()
        order = np.lexsort((lengths[1] + self._random.random(len(lengths[1])), lengths[0]))
        # A random first cut moves all the others, so that words at a border of lengths do not always meet the same.
        first = int(self._random.integers(1, self.size + 1))
        cuts = np.split(order, range(first, len(order), self.size))
        for number in self._random.permutation(len(cuts)):
            rows = torch.from_numpy(cuts[number])
            if len(rows):
                yield self._batch(rows)

    def _batch(self, rows: Tensor) -> Batch:
        lengths, width = self._lengths[rows], int(self._target_lengths[rows].max())
        return Batch(self._source[rows, : int(lengths.max())], lengths, self._target[rows, :width])
