"""Batches of texts with labels, those of similar lengths together.

Dimensions: B batch, L tokens, N texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from regard._utils.errors import rejected
from regard_lab.data.batches import Batch, Batches
from regard_lab.text.inputs import Inputs
from regard_lab.text.ragged import Ragged


@dataclass(frozen=True)
class LabelBatch:
    """Texts, padded with 0 behind, and their labels.

    Attributes
    ----------
    tokens : Tensor (B, L), int64
    labels : Tensor (B,), int64
        Their numbers.
    keep : Tensor (B, L) of bool or None
        Which tokens are real; None where all are.
    segments : Tensor (B, L), int64, or None
        The segment of each token, where there are second texts.
    """

    tokens: Tensor
    labels: Tensor
    keep: Tensor | None = None
    segments: Tensor | None = None

    @property
    def targets(self) -> Tensor:
        """What is learned: the labels."""
        return self.labels

    def logits(self, model: nn.Module) -> Tensor:
        """Return the logits (B, C) that a classifier makes of the texts."""
        beside = {"keep": self.keep} | ({} if self.segments is None else {"segments": self.segments})
        made: Tensor = model(self.tokens, **beside)
        return made

    @property
    def examples(self) -> int:
        """How many texts there are."""
        return len(self.tokens)

    @property
    def count(self) -> int:
        """How many tokens there are, without padding."""
        return self.tokens.numel() if self.keep is None else int(self.keep.sum())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> LabelBatch:
        """Return the batch on another device."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> LabelBatch:
        """Return the batch in memory that is copied to a GPU without waiting."""
        return self._with(Tensor.pin_memory)

    def _with(self, change: Callable[[Tensor], Tensor]) -> LabelBatch:
        keep, segments = (None if each is None else change(each) for each in (self.keep, self.segments))
        return LabelBatch(change(self.tokens), change(self.labels), keep, segments)


def label_batch(inputs: Inputs, labels: np.ndarray, rows: np.ndarray) -> LabelBatch:
    """Return some texts as a batch; ``labels`` are those of all texts."""
    tokens, lengths = inputs.tokens.padded(rows)
    steps = torch.arange(tokens.shape[1])
    keep = steps < lengths[:, None]
    segments = None
    if inputs.second is not None and inputs.segment:
        behind = steps >= torch.from_numpy(inputs.second[rows].astype(np.int64))[:, None]
        segments = inputs.segment * (behind & keep).long()
    return LabelBatch(tokens, torch.from_numpy(labels[rows]), None if bool(keep.all()) else keep, segments)


class LabelBatches:
    """Shuffled batches, epoch after epoch without end; see :class:`~regard_lab.data.batches.Batches`.

    Batch number k depends on the data, the seed and k alone.

    Parameters
    ----------
    inputs : Inputs
        N texts as tokens.
    labels : ndarray (N,) of int64
    size : int
        Texts in a batch; some batches may have fewer.
    seed : int, default 0
    rank, world : int, default 0 and 1
        Of ``world`` processes that train one model, each takes other batches, and equally many.

    Raises
    ------
    ValueError
        If there are no texts, or fewer than processes, or an argument is out of its range.

    Examples
    --------
    >>> from regard_lab.text.inputs import Inputs
    >>> inputs = Inputs(Ragged.of([[5, 6], [7]]), None, 0, np.zeros(2, bool))
    >>> batch = LabelBatches(inputs, np.array([1, 0]), size=2).batch(0)
    >>> sorted(zip(batch.tokens.tolist(), batch.labels.tolist())), batch.count
    ([([5, 6], 1), ([7, 0], 0)], 3)
    """

    def __init__(
        self, inputs: Inputs, labels: np.ndarray, *, size: int, seed: int = 0, rank: int = 0, world: int = 1
    ) -> None:
        if len(labels) != len(inputs):
            raise rejected("LabelBatches", "labels", "be as many as texts", f"{len(labels)} for {len(inputs)} texts")
        self._inputs, self._labels = inputs, labels
        nothing = Ragged(np.zeros(0, np.int32), np.zeros(len(inputs) + 1, np.int64))
        self._batches = Batches(inputs.tokens, nothing, size=size, seed=seed, rank=rank, world=world)

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self._labels)

    @property
    def per_epoch(self) -> int:
        """How many batches an epoch has (for each process)."""
        return self._batches.per_epoch

    def batch(self, number: int) -> LabelBatch:
        """Return the batch of this number, counted from 0 through all epochs; any one at any time."""
        return self._made(self._batches.batch(number))

    def once(self) -> Iterator[LabelBatch]:
        """Yield every text once, from short to long, in the same batches every time: to evaluate."""
        return map(self._made, self._batches.once())

    def _made(self, batch: Batch) -> LabelBatch:
        assert batch.rows is not None
        return label_batch(self._inputs, self._labels, batch.rows.numpy())
