"""Rows of a fixed length to learn language from: documents packed side by side, or one stream cut into crops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard._utils.errors import rejected
from regard_lab.data.row_layout import Rows, Runs, best_fit, ranges, windows
from regard_lab.data.shards import TokenShards

#: What stands for a target where there is none; ``torch.nn.functional.cross_entropy`` leaves it out by default.
IGNORE_INDEX = -100
#: The document of padding.
NO_DOCUMENT = -1


@dataclass(frozen=True)
class LanguageBatch:
    """Rows of tokens, and the token that follows each.

    Attributes
    ----------
    tokens : Tensor (B, T), int64
        To read.
    targets : Tensor (B, T), int64
        The next token of the same document, or :data:`IGNORE_INDEX` where none is to be predicted.
    documents : Tensor (B, T), int64
        Which document of its row a token is of, from 0; :data:`NO_DOCUMENT` for padding, which stands behind.
    positions : Tensor (B, T), int64
        Where in its document, or the part of it that is in the row; from 0 for padding too.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor
    positions: Tensor

    @property
    def examples(self) -> int:
        """How many rows there are."""
        return len(self.tokens)

    @property
    def count(self) -> int:
        """How many targets there are."""
        return int((self.targets != IGNORE_INDEX).sum())

    def turned(self, rows: Tensor) -> LanguageBatch:
        """Return the batch with some rows backward: what a token was to predict is read, and predicts that token.

        Parameters
        ----------
        rows : Tensor (B,) of bool

        Examples
        --------
        >>> batch = PackedBatches(TokenShards.of([[5, 6, 7], [8, 9]]), length=4, rows=1).batch(0)
        >>> turned = batch.turned(torch.tensor([True]))
        >>> turned.tokens.tolist(), turned.targets.tolist()
        ([[0, 9, 7, 6]], [[-100, 8, 6, 5]])
        >>> turned.documents.tolist(), turned.positions.tolist()
        ([[-1, 1, 0, 0]], [[0, 0, 0, 1]])
        """
        missing = self.targets == IGNORE_INDEX
        tokens = torch.where(missing, self.tokens, self.targets).flip(1)
        targets = self.tokens.masked_fill(missing, IGNORE_INDEX).flip(1)
        documents = self.documents.flip(1)
        steps = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        begins = F.pad(documents.diff() != 0, (1, 0))
        positions = steps - (steps * begins).cummax(1).values
        made = zip((tokens, targets, documents, positions), (self.tokens, self.targets, self.documents, self.positions))
        return LanguageBatch(*(torch.where(rows[:, None], back, forward) for back, forward in made))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> LanguageBatch:
        """Return the batch on another device."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> LanguageBatch:
        """Return the batch in memory that is copied to a GPU without waiting."""
        return self._with(Tensor.pin_memory)

    def _with(self, change: Callable[[Tensor], Tensor]) -> LanguageBatch:
        return LanguageBatch(*map(change, (self.tokens, self.targets, self.documents, self.positions)))


class LanguageBatches(ABC):
    """Shuffled batches of rows, epoch after epoch without end.

    Batch number k depends on the data, the seed and k alone, so that a run that stopped goes on exactly where it was.
    In every epoch each token that has one before it in its document is a target once. All batches have one shape; the
    rows that are missing for whole batches are empty ones, evenly spread.

    Parameters
    ----------
    shards : TokenShards
        Read where a batch needs it.
    length : int
        T, tokens of a row.
    rows : int
        B, rows of a batch.
    seed : int, default 0
    rank, world : int, default 0 and 1
        Of ``world`` processes that train one model, each takes other rows, and equally many batches. (With one row in
        a batch, the last batch of some may be empty.)
    pad : int, default 0
        The number that padding has.

    Attributes
    ----------
    separate : bool
        Whether rows have several documents, which are not to see each other.

    Raises
    ------
    ValueError
        If no document has two tokens, there are fewer rows than processes, or an argument is out of its range.
    """

    separate: bool

    def __init__(
        self,
        shards: TokenShards,
        *,
        length: int,
        rows: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        pad: int = 0,
    ) -> None:
        name = type(self).__name__
        for argument, value, least in (
            ("length", length, 1),
            ("rows", rows, 1),
            ("seed", seed, 0),
            ("world", world, 1),
        ):
            if value < least:
                raise rejected(name, argument, f"be at least {least}", value)
        if not 0 <= rank < world:
            raise rejected(name, "rank", f"be from 0 to {world - 1}, below world", rank)
        if not 0 <= pad < max(shards.vocabulary, 1):
            raise rejected(name, "pad", f"be from 0 to {shards.vocabulary - 1}, below the vocabulary", pad)
        self._shards, self._length, self._size, self._seed, self._pad = shards, length, rows, seed, pad
        self._rank, self._world = rank, world
        # What can be predicted: a document of n tokens has n - 1 places to read at.
        self._begins, self._reads = self._stretches()
        self.targets = int(self._reads.sum())
        if not self.targets:
            raise rejected(name, "shards", "have a document of two tokens or more", repr(shards))
        self._drawn: tuple[int, Rows] | None = None
        self._rows = self._count()
        if world > self._rows:
            raise rejected(name, "world", f"be at most the number of rows, {self._rows}", world)

    @abstractmethod
    def _stretches(self) -> tuple[np.ndarray, np.ndarray]:
        """Return where documents begin, and how many of their tokens have one behind them."""

    @abstractmethod
    def _count(self) -> int:
        """Return how many rows an epoch has."""

    @abstractmethod
    def _epoch(self, random: np.random.Generator) -> Rows:
        """Return the rows of an epoch."""

    @property
    def per_epoch(self) -> int:
        """How many batches an epoch has (for each process)."""
        return self._steps(self._rows)

    @property
    def padding(self) -> float:
        """The share of places in the rows of an epoch that have no target."""
        return 1 - self.targets / (self._rows * self._length)

    def batch(self, number: int) -> LanguageBatch:
        """Return the batch of this number, counted from 0 through all epochs; any one at any time.

        Raises
        ------
        ValueError
            If the number is negative.
        """
        if number < 0:
            raise rejected("batch", "number", "be at least 0", number)
        epoch, step = divmod(number, self.per_epoch)
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = (epoch, self._epoch(np.random.default_rng([self._seed, epoch])))
        return self._made(self._drawn[1], step)

    def starting(self, number: int = 0) -> Iterator[LanguageBatch]:
        """Yield batches from this number on, for ever."""
        while True:
            yield self.batch(number)
            number += 1

    def __iter__(self) -> Iterator[LanguageBatch]:
        """Yield batches from the first on, for ever."""
        return self.starting()

    def once(self, stride: int | None = None) -> Iterator[LanguageBatch]:
        """Yield every target once, the same batches every time: to evaluate.

        What is longer than a row is read by a window of T tokens that moves on by ``stride``; of each, the targets
        behind those of the one before it count, which see at least T − stride tokens. A smaller stride gives more
        context, and takes T / stride times as long. With several processes, each yields equally many batches.

        Parameters
        ----------
        stride : int, optional
            From 1 to T; T by default.
        """
        stride = self._length if stride is None else stride
        if not 1 <= stride <= self._length:
            raise rejected("once", "stride", f"be from 1 to {self._length}, the length of rows", stride)
        rows = best_fit(windows(self._begins, self._reads, self._length, stride), self._length)
        return (self._made(rows, step) for step in range(self._steps(len(rows.order))))

    def _steps(self, rows: int) -> int:
        return -(-rows // (self._size * self._world))

    def _made(self, rows: Rows, step: int) -> LanguageBatch:
        """Return this process's batch of a step: its part of the rows that all processes' batches share evenly."""
        count = len(rows.order)
        groups = self._steps(count) * self._world
        begin, end = (count * (step * self._world + self._rank + i) // groups for i in (0, 1))
        chosen = rows.order[begin:end]
        B, T = self._size, self._length
        slots, which = ranges(rows.firsts[chosen], rows.firsts[chosen + 1] - rows.firsts[chosen])
        run = rows.runs_of[slots]
        lengths = rows.runs.lengths[run]
        within, _ = ranges(np.zeros_like(lengths), lengths)
        there = np.repeat(which * T + rows.offsets[slots], lengths) + within
        places = np.repeat(rows.runs.starts[run], lengths) + within
        tokens, targets = np.full(B * T, self._pad), np.full(B * T, IGNORE_INDEX)
        documents, positions = np.full(B * T, NO_DOCUMENT), np.empty(B * T, np.int64)
        used = np.bincount(which, lengths, minlength=B).astype(np.int64)
        positions[:] = (np.arange(T) - used[:, None]).ravel()
        tokens[there] = self._shards.gather(places)
        follows = self._shards.gather(places + 1)
        follows[within < np.repeat(rows.runs.skips[run], lengths)] = IGNORE_INDEX
        targets[there] = follows
        documents[there] = np.repeat(slots - rows.firsts[chosen][which], lengths)
        positions[there] = within
        return LanguageBatch(
            *(torch.from_numpy(each.reshape(B, T)) for each in (tokens, targets, documents, positions))
        )


@final
class PackedBatches(LanguageBatches):
    """Rows filled with documents side by side, each of which is to see itself alone.

    Documents longer than a row are cut into parts of T places; all parts are put into rows by best fit, the longest
    first, once. In each epoch, parts of equal lengths are drawn into their places anew, and rows are shuffled.

    Best fit leaves little room empty, and cuts no document that fits a row (Ding 2024, arXiv 2404.10830). What is put
    where depends on lengths alone, so it is found for each length rather than for each document.

    Parameters
    ----------
    shards, length, rows, seed, rank, world, pad
        As of :class:`LanguageBatches`.

    Examples
    --------
    >>> shards = TokenShards.of([[5, 6, 7], [8, 9]])
    >>> batches = PackedBatches(shards, length=4, rows=1)
    >>> batch = batches.batch(0)
    >>> batch.tokens.tolist(), batch.targets.tolist()
    ([[5, 6, 8, 0]], [[6, 7, 9, -100]])
    >>> batch.documents.tolist(), batch.positions.tolist()
    ([[0, 0, 1, -1]], [[0, 1, 0, 0]])
    """

    separate = True

    def _stretches(self) -> tuple[np.ndarray, np.ndarray]:
        ends = np.asarray(self._shards.ends)
        begins = np.concatenate([[0], ends[:-1]])
        reads = np.maximum(ends - begins - 1, 0)
        return begins[reads > 0], reads[reads > 0]

    def _count(self) -> int:
        T = self._length
        parts = -(-self._reads // T)
        number, whose = ranges(np.zeros_like(parts), parts)
        starts, lengths = self._begins[whose] + number * T, np.minimum(self._reads[whose] - number * T, T)
        self._layout = best_fit(Runs(starts, lengths, np.zeros(1, np.int64).repeat(len(starts))), T)
        # Runs of one length change places; both are in the order of their lengths.
        self._slots = np.argsort(lengths[self._layout.runs_of], kind="stable")
        self._sorted = self._layout.runs_of[self._slots]
        self._ties = np.cumsum(np.diff(lengths[self._sorted], prepend=0) != 0, dtype=np.float64)
        return len(self._layout.order)

    def _epoch(self, random: np.random.Generator) -> Rows:
        runs_of = np.empty_like(self._sorted)
        runs_of[self._slots] = self._sorted[np.argsort(self._ties + random.random(len(self._ties)))]
        layout = self._layout
        return Rows(layout.runs, layout.firsts, layout.offsets, runs_of, random.permutation(self._rows))


@final
class StreamBatches(LanguageBatches):
    """Rows cut from all documents one behind the other, which see each other: for one long text, or as GPT-2 learned.

    In each epoch the stream is cut from another place on, as if its end were joined to its beginning; but nothing is
    predicted across this, and the row where it lies has two documents.

    Parameters
    ----------
    shards, length, rows, seed, rank, world, pad
        As of :class:`LanguageBatches`.

    Examples
    --------
    >>> batches = StreamBatches(TokenShards.of([[0, 1, 2, 3, 4], [5, 6, 7, 8]]), length=4, rows=2)
    >>> sorted(batches.batch(0).targets.flatten().tolist())
    [1, 2, 3, 4, 5, 6, 7, 8]
    """

    separate = False

    def _stretches(self) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(1, np.int64), np.array([max(self._shards.tokens - 1, 0)])

    def _count(self) -> int:
        return -(-self.targets // self._length)

    def _epoch(self, random: np.random.Generator) -> Rows:
        T, M, count = self._length, self.targets, self._rows
        starts = (int(random.integers(M)) + T * np.arange(count)) % M
        lengths = np.full(count, T)
        lengths[-1] = M - T * (count - 1)
        firsts, offsets = np.arange(count + 1), np.zeros(count, np.int64)
        joined = np.flatnonzero(starts + lengths > M)  # one row at most
        if len(joined):
            row = int(joined[0])
            before = M - int(starts[row])
            rest = int(lengths[row]) - before
            lengths[row] = before
            starts, lengths = np.insert(starts, row + 1, 0), np.insert(lengths, row + 1, rest)
            offsets = np.insert(offsets, row + 1, before)
            firsts[row + 1 :] += 1
        runs = Runs(starts, lengths, np.zeros(len(starts), np.int64))
        return Rows(runs, firsts, offsets, np.arange(len(starts)), random.permutation(count))
