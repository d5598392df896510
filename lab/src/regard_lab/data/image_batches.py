"""Batches of images with labels, changed at random from the seed and the batch's number alone.

Dimensions: N images, B batch, H and W pixels, C channels, K labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.errors import rejected
from regard._utils.options import Options, option
from regard_lab.data.batches import Batches
from regard_lab.data.preprocessing import Preprocessing
from regard_lab.text.ragged import Ragged


@dataclass(frozen=True)
class Augmentation(Options):
    """What is changed at random in an image before it is learned from; by default nothing."""

    flip: bool = option(False, "mirror every other image, left and right", flag="--flip",
                        short="Mirror every other image.")  # fmt: skip
    shift: int = option(0, "pixels that images are moved by at most, each way; those at the edge are repeated",
                        least=0, most=1 << 10, flag="--shift", short="Pixels that images are moved by.")  # fmt: skip
    cutout: int = option(0, "side of a square that is cut out at random places (DeVries 2017)", least=0, most=1 << 12,
                         flag="--cutout", short="Side of a square that is cut out.")  # fmt: skip
    mixup: float = option(0.0, "mix pairs of images, and their labels, by a share from Beta(α, α) of this α (Zhang "
                               "2017)", least=0, most=16, flag="--mixup",
                          short="Mix pairs of images by Beta(α, α).")  # fmt: skip

    def apply(self, images: Tensor, targets: Tensor, random: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return images (B, C, H, W) and their targets, changed as the generator draws it.

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
    """Return (B, 1, H, W) of 1, and of 0 in a square about a place of each image; it may reach over the edge."""
    top, left = (random.integers(0, n, (B, 1)) - side // 2 for n in (H, W))
    down, across = np.arange(H) - top, np.arange(W) - left
    inside = ((down >= 0) & (down < side))[:, :, None] & ((across >= 0) & (across < side))[:, None]
    return (~inside)[:, None].astype(np.float32)


@dataclass(frozen=True)
class ImageBatch:
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
        """How many images there are."""
        return len(self.images)

    @property
    def count(self) -> int:
        """How many images there are: of each, one label is learned."""
        return len(self.images)

    def logits(self, model: nn.Module) -> Tensor:
        """Return the logits (B, K) that a classifier makes of the images."""
        made: Tensor = model(self.images)
        return made

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ImageBatch:
        """Return the batch on another device."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> ImageBatch:
        """Return the batch in memory that is copied to a GPU without waiting."""
        return self._with(Tensor.pin_memory)

    def _with(self, change: Callable[[Tensor], Tensor]) -> ImageBatch:
        return ImageBatch(change(self.images), change(self.labels), change(self.targets))


class ImageBatches:
    """Shuffled batches, epoch after epoch without end.

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
        if len(labels) != len(pixels):
            raise rejected("ImageBatches", "labels", "be as many as images", f"{len(labels)} for {len(pixels)} images")
        self._pixels, self._labels, self._preprocessing = pixels, labels, preprocessing
        self._classes, self._seed, self._rank, self._world = classes, seed, rank, world
        self._augmentation = None if augmentation == Augmentation() else augmentation
        N = len(pixels)
        alike = Ragged(np.zeros(N, np.int32), np.arange(N + 1))  # all of one length: shuffled without stretches
        nothing = Ragged(np.zeros(0, np.int32), np.zeros(N + 1, np.int64))
        self._batches = Batches(alike, nothing, size=size, seed=seed, rank=rank, world=world)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._labels)

    @property
    def per_epoch(self) -> int:
        """How many batches an epoch has (for each process)."""
        return self._batches.per_epoch

    def batch(self, number: int) -> ImageBatch:
        """Return the batch of this number, counted from 0 through all epochs; any one at any time."""
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
        """Every image once, unchanged, in the same batches every time, made when they are asked for: to evaluate."""
        return _Once([batch.rows.numpy() for batch in self._batches.once() if batch.rows is not None], self._made)

    def _made(self, rows: np.ndarray) -> ImageBatch:
        images = self._preprocessing.normalized(torch.from_numpy(self._pixels[rows]))
        labels = torch.from_numpy(self._labels[rows])
        return ImageBatch(images, labels, labels)


class _Once(Sequence[ImageBatch]):
    """Batches that are made when they are asked for: as pixels they take a quarter of the memory."""

    def __init__(self, rows: list[np.ndarray], made: Callable[[np.ndarray], ImageBatch]) -> None:
        self._rows, self._made = rows, made

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> ImageBatch:  # type: ignore[override]
        return self._made(self._rows[index])
