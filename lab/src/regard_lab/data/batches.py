"""Padded batches of pairs, of labelled texts and of labelled images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.errors import rejected
from regard_lab._options import Options, option
from regard_lab.data.images import Preprocessing
from regard_lab.models.base import END, PAD
from regard_lab.text.inputs import Inputs
from regard_lab.text.ragged import Ragged

_B = TypeVar("_B")

# Examples of unequal lengths as padded batches, with little padding ---------------------------------------------------


#: Batches are mixed if padding grows by at most this share of the symbols, and batches lose at most this share of
#: pairs.
_WASTE = 0.05
#: Maximum number of tokens of a side to read at once, with padding.
_PLACES = 8192
#: Numbers of batches to fill from pairs of similar lengths, in the order to try them.
_MIXED = (16, 8, 4, 2)


def length_batches(lengths: Sequence[int], most: int, *, alike: bool = False) -> Iterator[list[int]]:
    """Yield the rows of batches of non-empty sequences, at most ``most`` each, from the longest to the shortest.

    With ``alike``, only sequences of one length go together, so that none is padded: some models of transformers, such
    as those with convolutions, make other rows of a sequence where padding follows it.

    Examples
    --------
    >>> list(length_batches([3, 0, 7, 4], 2)), list(length_batches([3, 0, 7, 3], 2, alike=True))
    ([[2, 3], [0]], [[2], [0, 3]])
    """
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
    begin = 0
    while begin < len(order):
        longest = lengths[order[begin]]
        count = min(most, max(1, _PLACES // longest))
        if alike:
            count = [lengths[i] for i in order[begin : begin + count]].count(longest)
        yield order[begin : begin + count]
        begin += count


class TensorBatch:
    """A batch whose fields are tensors, or None."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the batch on another device."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return the batch in pinned memory."""
        return self._with(Tensor.pin_memory)

    def _with(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(**{name: None if each is None else change(each) for name, each in vars(self).items()})


class Endless(ABC, Generic[_B]):
    """Base of endless batches that are accessed by number."""

    @abstractmethod
    def batch(self, number: int) -> _B:
        """Return a batch by its number, counted from 0 over all epochs, in any order."""

    def starting(self, number: int = 0) -> Iterator[_B]:
        """Yield batches endlessly, beginning with this number."""
        return map(self.batch, count(number))

    def __iter__(self) -> Iterator[_B]:
        """Yield batches endlessly, beginning with the first."""
        return self.starting()


@dataclass(frozen=True)
class Batch(TensorBatch):
    """Source and target sequences, padded with 0.

    Attributes
    ----------
    source : Tensor (B, S)
        Numbers of the symbols to read.
    lengths : Tensor (B,)
        How many of them are real.
    target : Tensor (B, T)
        Numbers of the symbols to write, each sequence closed by the end mark.
    rows : Tensor (B,), optional
        Which pairs of the data these are.
    links : Tensor (M, 3), optional
        Tokens that belong together: a row of the batch, a step of its target, a step of its source.
    """

    source: Tensor
    lengths: Tensor
    target: Tensor
    rows: Tensor | None = None
    links: Tensor | None = None

    @property
    def examples(self) -> int:
        """The number of pairs."""
        return len(self.source)

    @property
    def count(self) -> int:
        """The number of source and target symbols, without padding."""
        return int(self.lengths.sum()) + int((self.target != PAD).sum())


class Batches(Endless[Batch]):
    """Endless shuffled batches of pairs; sequences of similar lengths are in one batch.

    Batch k depends only on the data, the seed and k, so that a resumed run continues exactly where it stopped.
    In every epoch each pair comes once. All epochs have equally many batches of the same sizes: pairs are sorted by
    their lengths once, and cut into stretches of similar lengths that fill some batches; in each epoch pairs of equal
    lengths are drawn into their places anew, stretches are shuffled, and so are the batches.

    Parameters
    ----------
    sources, targets : Ragged or sequence of sequence of int
        N sequences to read, none empty, and the N to write for them (without the end mark).
    tokens : int, optional
        The most places, padding and end marks included, in source and target of a batch together; a longer pair has a
        batch of its own. 4096 if ``size`` is not given either.
    size : int, optional
        Pairs in a batch, instead; some batches may have fewer.
    seed : int, default 0
    rank, world : int, default 0 and 1
        Of ``world`` processes that train one model, each takes other batches, and equally many.
    links : callable, optional
        ``links(row)`` returns the pairs (target step, source step) of tokens of a pair that belong together.

    Raises
    ------
    ValueError
        If there are no pairs, or fewer than processes, or an argument is out of its range.

    Examples
    --------
    >>> batches = Batches([[2, 3], [4]], [[5], []], size=1)
    >>> batches.per_epoch, sorted(batches.batch(k).target.tolist() for k in range(2))
    (2, [[[1]], [[5, 1]]])
    """

    def __init__(
        self,
        sources: Ragged | Sequence[Sequence[int]],
        targets: Ragged | Sequence[Sequence[int]],
        *,
        tokens: int | None = None,
        size: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        links: Callable[[int], Iterable[tuple[int, int]]] | None = None,
    ) -> None:
        if len(sources) != len(targets) or not len(sources):
            got = f"{len(targets)} for {len(sources)} sources"
            raise rejected("Batches", "targets", "be as many as sources, and at least one", got)
        if tokens is not None and size is not None:
            raise rejected("Batches", "tokens or size", "be given, not both", f"{tokens} and {size}")
        for name, value, least in (("tokens", tokens, 1), ("size", size, 1), ("seed", seed, 0), ("world", world, 1)):
            if value is not None and value < least:
                raise rejected("Batches", name, f"be at least {least}", value)
        if not 0 <= rank < world:
            raise rejected("Batches", "rank", f"be from 0 to {world - 1}, below world", rank)
        if world > len(sources):
            raise rejected("Batches", "world", f"be at most the number of pairs, {len(sources)}", world)
        self._sources = sources if isinstance(sources, Ragged) else Ragged.of(sources)
        self._targets = targets if isinstance(targets, Ragged) else Ragged.of(targets)
        self._seed, self._rank, self._world, self._links = seed, rank, world, links
        s, t = self._sources.lengths, self._targets.lengths + 1
        if not s.min():
            raise rejected("Batches", "sources", "not be empty", f"an empty one at {int(s.argmin())}")
        self._order = _by_length(s, t)
        s, t = s[self._order], t[self._order]
        tied = (np.diff(s, prepend=0) != 0) | (np.diff(t, prepend=0) != 0)
        self._tie = np.cumsum(tied, dtype=np.float64)
        stretches, self._cuts = _layout(s, t, tokens or 4096, size)
        self._stretch = np.repeat(np.arange(len(stretches), dtype=np.float64), stretches)
        self._cuts = _divisible(self._cuts, world)
        self._epoch: tuple[int, np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._order)

    @property
    def per_epoch(self) -> int:
        """The number of batches per epoch (for each process)."""
        return (len(self._cuts) - 1) // self._world

    def batch(self, number: int) -> Batch:
        """Return a batch by its number, counted from 0 over all epochs, in any order.

        Raises
        ------
        ValueError
            If the number is negative.
        """
        if number < 0:
            raise rejected("batch", "number", "be at least 0", number)
        epoch, step = divmod(number, self.per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, *self._drawn(epoch))
        _, order, chosen = self._epoch
        cut = chosen[step]
        return self._made(order[self._cuts[cut] : self._cuts[cut + 1]])

    def once(self) -> Iterator[Batch]:
        """For evaluation: yield every pair once, from short to long, always in the same batches.

        With several processes, each yields as many batches as the others, and its own share of the pairs.
        """
        for cut in range(self._rank, len(self._cuts) - 1, self._world):
            yield self._made(self._order[self._cuts[cut] : self._cuts[cut + 1]])

    def _drawn(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the order of pairs in an epoch, and the order of this process's batches."""
        random = np.random.default_rng([self._seed, epoch])
        order = self._order[np.argsort(self._tie + random.random(len(self)))]
        order = order[np.argsort(self._stretch + random.random(len(self)))]
        # The processes' batches of one step have similar lengths, so that none waits long for another.
        steps = random.permutation(self.per_epoch)
        whose = random.random((self.per_epoch, self._world)).argsort(1)[:, self._rank]
        return order, steps * self._world + whose

    def _made(self, rows: np.ndarray) -> Batch:
        source, lengths = self._sources.padded(rows)
        target, _ = self._targets.padded(rows, ending=END)
        batch = Batch(source, lengths, target, torch.from_numpy(rows.astype(np.int64)))
        if self._links is None:
            return batch
        links = [(place, *link) for place, row in enumerate(rows.tolist()) for link in self._links(row)]
        return replace(batch, links=torch.tensor(links, dtype=torch.int64).view(-1, 3))


def _by_length(s: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Return the pairs from short to long sources; target lengths alternately rise and fall, without jumps."""
    rising = np.where(s % 2, t, -t)
    return np.lexsort((rising, s))


def _layout(s: np.ndarray, t: np.ndarray, tokens: int, size: int | None) -> tuple[list[int], np.ndarray]:
    """Return the sizes of stretches, and where batches begin and end, for pairs in order of their lengths."""
    N, at = len(s), 0
    stretches: list[int] = []
    cuts = [0]
    area = np.concatenate([[0], np.cumsum(s + t)])
    while at < N:
        alone = _rows(s[at:], t[at:], tokens, 1) if size is None else size
        for batches in (*_MIXED, 1):
            rows = _rows(s[at:], t[at:], tokens, batches) if size is None else size
            end = min(N, at + batches * rows)
            places = int(s[at:end].max() + t[at:end].max()) * (end - at)
            if rows >= (1 - _WASTE) * alone and places <= (1 + _WASTE) * (area[end] - area[at]):
                break
        stretches.append(end - at)
        cuts += [*range(at + rows, end, rows), end]
        at = end
    return stretches, np.array(cuts)


def _rows(s: np.ndarray, t: np.ndarray, tokens: int, batches: int) -> int:
    """Return how many of the first pairs fit into one batch if they fill this many batches in any order."""
    rows = max(1, tokens // int(s[0] + t[0]))
    if batches == 1:
        widths = np.maximum.accumulate(s[:rows]) + np.maximum.accumulate(t[:rows])
        return max(1, int((widths * np.arange(1, len(widths) + 1) <= tokens).sum()))
    while True:
        reach = rows * batches
        fit = max(1, tokens // int(s[:reach].max() + t[:reach].max()))
        if fit >= rows:
            return rows
        rows = fit


def _divisible(cuts: np.ndarray, world: int) -> np.ndarray:
    """Return cuts into a number of batches that ``world`` divides: the largest batches are halved.

    Where the pairs do not suffice for that, each batch has one; then some of the shortest pairs share a batch.
    """
    while over := (len(cuts) - 1) % world:
        sizes = np.diff(cuts)
        largest = np.argsort(-sizes, kind="stable")[: min(world - over, int((sizes > 1).sum()))]
        if not len(largest):
            return np.delete(cuts, np.arange(1, 2 * over, 2))
        cuts = np.sort(np.concatenate([cuts, cuts[largest] + sizes[largest] // 2]))
    return cuts


# Batches of labelled texts of similar lengths -------------------------------------------------------------------------
# Dimensions: B batch, L tokens, N texts.


@dataclass(frozen=True)
class LabelBatch(TensorBatch):
    """Texts, padded on the right with 0, and their labels.

    Attributes
    ----------
    tokens : Tensor (B, L), int64
    labels : Tensor (B,), int64
        Label ids.
    attention_mask : Tensor (B, L) of bool or None
        True for real tokens, False for padding; None without padding.
    segments : Tensor (B, L), int64, or None
        The segment of each token, if texts come in pairs.
    """

    tokens: Tensor
    labels: Tensor
    attention_mask: Tensor | None = None
    segments: Tensor | None = None

    @property
    def targets(self) -> Tensor:
        """The training targets: the labels."""
        return self.labels

    def logits(self, model: nn.Module) -> Tensor:
        """Return a classifier's logits (B, C) for the texts."""
        inputs = {} if self.segments is None else {"segments": self.segments}
        logits: Tensor = model(self.tokens, attention_mask=self.attention_mask, **inputs)
        return logits

    @property
    def examples(self) -> int:
        """The number of texts."""
        return len(self.tokens)

    @property
    def count(self) -> int:
        """The number of tokens, without padding."""
        return self.tokens.numel() if self.attention_mask is None else int(self.attention_mask.sum())


def label_batch(inputs: Inputs, labels: np.ndarray, rows: np.ndarray) -> LabelBatch:
    """Return the texts at ``rows`` as a batch; ``labels`` holds the labels of all texts."""
    tokens, lengths = inputs.tokens.padded(rows)
    steps = torch.arange(tokens.shape[1])
    real = steps < lengths[:, None]
    segments = None
    if inputs.second is not None and inputs.segment:
        behind = steps >= torch.from_numpy(inputs.second[rows].astype(np.int64))[:, None]
        segments = inputs.segment * (behind & real).long()
    return LabelBatch(tokens, torch.from_numpy(labels[rows]), None if bool(real.all()) else real, segments)


class _Labelled(Endless[_B]):
    """Batches of labelled examples, in the order that :class:`Batches` draws for their lengths."""

    #: The labelled texts.
    _noun: ClassVar[str]

    def __init__(self, lengths: Ragged, labels: np.ndarray, **drawn: Any) -> None:
        if len(labels) != len(lengths):
            got = f"{len(labels)} for {len(lengths)} {self._noun}"
            raise rejected(type(self).__name__, "labels", f"be as many as {self._noun}", got)
        self._labels = labels
        nothing = Ragged(np.zeros(0, np.int32), np.zeros(len(lengths) + 1, np.int64))
        self._batches = Batches(lengths, nothing, **drawn)

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._labels)

    @property
    def per_epoch(self) -> int:
        """The number of batches per epoch (for each process)."""
        return self._batches.per_epoch


class LabelBatches(_Labelled[LabelBatch]):
    """Endless shuffled batches; see :class:`~regard_lab.data.batches.Batches`.

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

    _noun = "texts"

    def __init__(
        self, inputs: Inputs, labels: np.ndarray, *, size: int, seed: int = 0, rank: int = 0, world: int = 1
    ) -> None:
        super().__init__(inputs.tokens, labels, size=size, seed=seed, rank=rank, world=world)
        self._inputs = inputs

    def batch(self, number: int) -> LabelBatch:
        """Return a batch by its number, counted from 0 over all epochs, in any order."""
        return self._made(self._batches.batch(number))

    def once(self) -> Iterator[LabelBatch]:
        """For evaluation: yield every text once, from short to long, always in the same batches."""
        return map(self._made, self._batches.once())

    def _made(self, batch: Batch) -> LabelBatch:
        assert batch.rows is not None
        return label_batch(self._inputs, self._labels, batch.rows.numpy())


# Batches of images with labels, changed at random from the seed and the batch's number alone --------------------------
# Dimensions: N images, B batch, H and W pixels, C channels, K labels.


@dataclass(frozen=True)
class Augmentation(Options):
    """Random augmentation of training images; none by default."""

    flip: bool = option(False, "mirror half of the training images, left and right", flag="--flip")  # fmt: skip
    shift: int = option(0, "shift training images at random, by at most this many pixels", ge=0, le=1 << 10,
                       flag="--shift")  # fmt: skip
    cutout: int = option(0, "cut out a square of this side at a random place of training images (DeVries 2017)", ge=0,
                         le=1 << 12, flag="--cutout")  # fmt: skip
    mixup: float = option(0.0, "mix pairs of training images and their labels, by a share drawn from Beta(α, α) with "
                          "this α (Zhang 2017)", ge=0, le=16, flag="--mixup")  # fmt: skip

    def apply(self, images: Tensor, targets: Tensor, random: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return randomly augmented images (B, C, H, W) and their targets.

        Targets are probabilities of labels (B, K) where images are mixed. What is cut out is 0, the mean of the data.
        """
        B, _, H, W = images.shape
        rows, columns = np.arange(H)[None].repeat(B, 0), np.arange(W)[None].repeat(B, 0)
        if self.flip:
            columns = np.where(random.random((B, 1)) < 0.5, columns[:, ::-1], columns)
        if self.shift:
            images = F.pad(images, (self.shift,) * 4, mode="replicate")
            moved = random.integers(0, 2 * self.shift + 1, (2, B, 1))
            rows, columns = rows + moved[0], columns + moved[1]
        if self.flip or self.shift:
            at = torch.from_numpy(rows)[:, None, :, None], torch.from_numpy(columns)[:, None, None, :]
            images = images[torch.arange(B)[:, None, None, None], torch.arange(images.shape[1])[:, None, None], *at]
        if self.cutout:
            images = images * torch.from_numpy(_squares(B, H, W, self.cutout, random))
        if self.mixup:
            share, order = float(random.beta(self.mixup, self.mixup)), torch.from_numpy(random.permutation(B))
            images = share * images + (1 - share) * images[order]
            targets = share * targets + (1 - share) * targets[order]
        return images, targets


def _squares(B: int, H: int, W: int, side: int, random: np.random.Generator) -> np.ndarray:
    """Return masks (B, 1, H, W): 0 in a square around a position of each image, which may cross the edge, else 1."""
    top, left = (random.integers(0, n, (B, 1)) - side // 2 for n in (H, W))
    down, across = np.arange(H) - top, np.arange(W) - left
    inside = ((down >= 0) & (down < side))[:, :, None] & ((across >= 0) & (across < side))[:, None]
    return (~inside)[:, None].astype(np.float32)


@dataclass(frozen=True)
class ImageBatch(TensorBatch):
    """Images and their labels.

    Attributes
    ----------
    images : Tensor (B, C, H, W) of float32
    labels : Tensor (B,) of int64
        Their numbers.
    targets : Tensor (B,) of int64, or (B, K) of float32
        What is learned: the labels, or probabilities where images were mixed.
    """

    images: Tensor
    labels: Tensor
    targets: Tensor

    @property
    def examples(self) -> int:
        """The number of images."""
        return len(self.images)

    @property
    def count(self) -> int:
        """The number of labels: one per image."""
        return len(self.images)

    def logits(self, model: nn.Module) -> Tensor:
        """Return a classifier's logits (B, K) for the images."""
        made: Tensor = model(self.images)
        return made


class ImageBatches(_Labelled[ImageBatch]):
    """Endless shuffled batches.

    Batch number k, and what is changed in it, depends on the data, the seed and k alone: a run that was stopped goes on
    with the same pixels.

    Parameters
    ----------
    pixels : ndarray (N, H, W, C) of uint8
    labels : ndarray (N,) of int64
    preprocessing : Preprocessing
        How pixels become numbers.
    size : int
        Images in a batch; the last of an epoch may have fewer.
    classes : int
        How many labels K there are.
    augmentation : Augmentation, optional
    seed : int, default 0
    rank, world : int, default 0 and 1
        Of ``world`` processes that train one model, each takes other batches, and equally many.

    Raises
    ------
    ValueError
        If there are no images, or fewer than processes, or an argument is out of its range.

    Examples
    --------
    >>> pixels, labels = np.zeros((3, 4, 4, 1), np.uint8), np.array([0, 1, 1])
    >>> batches = ImageBatches(pixels, labels, Preprocessing((4, 4), None, (0.0,), (1.0,)), size=2, classes=2)
    >>> batches.per_epoch, batches.batch(0).images.shape, sum(each.count for each in batches.once)
    (2, torch.Size([2, 1, 4, 4]), 3)
    """

    _noun = "images"

    def __init__(
        self,
        pixels: np.ndarray,
        labels: np.ndarray,
        preprocessing: Preprocessing,
        *,
        size: int,
        classes: int,
        augmentation: Augmentation | None = None,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        alike = Ragged(np.zeros(len(pixels), np.int32), np.arange(len(pixels) + 1))  # all of one length
        super().__init__(alike, labels, size=size, seed=seed, rank=rank, world=world)
        self._pixels, self._preprocessing = pixels, preprocessing
        self._classes, self._seed, self._rank, self._world = classes, seed, rank, world
        self._augmentation = None if augmentation == Augmentation() else augmentation

    def batch(self, number: int) -> ImageBatch:
        """Return a batch by its number, counted from 0 over all epochs, in any order."""
        batch = self._batches.batch(number)
        assert batch.rows is not None
        made = self._made(batch.rows.numpy())
        if self._augmentation is None:
            return made
        random = np.random.default_rng([self._seed, number * self._world + self._rank, 1])
        targets = F.one_hot(made.labels, self._classes).float() if self._augmentation.mixup else made.labels
        images, targets = self._augmentation.apply(made.images, targets, random)
        return ImageBatch(images, made.labels, targets)

    @property
    def once(self) -> Sequence[ImageBatch]:
        """For evaluation: every image once, unchanged, always in the same batches, which are made on demand."""
        return _Once([batch.rows.numpy() for batch in self._batches.once() if batch.rows is not None], self._made)

    def _made(self, rows: np.ndarray) -> ImageBatch:
        images = self._preprocessing.normalized(torch.from_numpy(self._pixels[rows]))
        labels = torch.from_numpy(self._labels[rows])
        return ImageBatch(images, labels, labels)


class _Once(Sequence[ImageBatch]):
    """Batches made on demand: stored as pixels, they take a quarter of the memory."""

    def __init__(self, rows: list[np.ndarray], made: Callable[[np.ndarray], ImageBatch]) -> None:
        self._rows, self._made = rows, made

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> ImageBatch:  # type: ignore[override]
        return self._made(self._rows[index])
