"""Image captions: reading, matching with images, and batching by image.

Dimensions: I images of a batch, K captions per image, S grid positions, F features, X image side in pixels, T steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from regard._utils.errors import rejected
from regard_lab.data.batches import Batch
from regard_lab.data.images import Images, resize_image
from regard_lab.data.pairs import Pairs, read_pairs
from regard_lab.data.plausibility import unrelated
from regard_lab.models.base import END, PAD
from regard_lab.text.ragged import Ragged

_BEFORE_SIGN = re.compile(r"\s+([.,;:!?])")


def plain_caption(text: str, lowercase: bool = True) -> str:
    """Normalize a caption: lowercase, no spaces before punctuation, no final period.

    Examples
    --------
    >>> plain_caption("Two dogs , in the snow .")
    'two dogs, in the snow'
    """
    text = _BEFORE_SIGN.sub(r"\1", " ".join((text.lower() if lowercase else text).split()))
    return text.rstrip(" .") or text


def read_captions(path: str, *, words: int | None = None, lowercase: bool = True) -> Pairs:
    """Return the captions in a file of lines ``image TAB caption``, normalized by :func:`plain_caption`.

    Parameters
    ----------
    path : str
        ``"-"`` is standard input.
    words : int, optional
        The most words of a caption; longer ones are skipped and counted.
    lowercase : bool

    Raises
    ------
    ValueError
        As in :func:`~regard_lab.data.pairs.read_pairs`.
    """
    pairs = read_pairs(path, max_length=None, words=words)
    return replace(pairs, targets=[plain_caption(each, lowercase) for each in pairs.targets])


def with_images(captions: Pairs, images: Images) -> tuple[Pairs, list[str]]:
    """Return the captions whose image exists, with the images' names, and report lines about missing images.

    Raises
    ------
    ValueError
        If no image exists.
    """
    places = {name: images.find(name) for name in dict.fromkeys(captions.sources)}
    rows = [row for row, name in enumerate(captions.sources) if places[name] is not None]
    missing = [name for name, place in places.items() if place is None]
    if not rows:
        expected = f"name images in {images.path}"
        raise rejected("train", captions.name, expected, f"none of {len(places):,}, the first {missing[0]!r}")
    sources = [str(places[captions.sources[row]]) for row in rows]
    kept = replace(captions, sources=sources, targets=[captions.targets[row] for row in rows], places=None)
    count = len(captions) - len(kept)
    if not missing:
        return kept, []
    return kept, [f"skipped, no such image: {count:,} captions of {len(missing):,} images (the first {missing[0]!r})"]


def shuffled_captions(captions: Pairs) -> list[str]:
    """Return a line about captions that look shuffled, if an image's have no more in common than those of others."""
    several = [each for each in captions.references().values() if len(each) > 1]
    if not several or not unrelated([each[0] for each in several], [each[1] for each in several]):
        return []
    return ["the captions look shuffled: those of one image share no more words than those of different images"]


class Grids(Protocol):
    """Images to batch: features or pixels."""

    def __len__(self) -> int:
        """Return the number of images."""

    def take(self, rows: np.ndarray, mirrored: np.ndarray) -> Tensor:
        """Return the images (I, ...) at ``rows``; flip those where ``mirrored`` (I,) is True."""

    @property
    def places(self) -> int:
        """The number of grid positions S."""


@dataclass(frozen=True)
class FeatureGrids:
    """Precomputed image features.

    Attributes
    ----------
    values : ndarray (N, rows · cols, F) of float16
        For example a memory map.
    index : ndarray (M,)
        The rows of ``values`` to use.
    rows, cols : int
    """

    values: np.ndarray
    index: np.ndarray
    rows: int
    cols: int

    def __len__(self) -> int:
        return len(self.index)

    @property
    def places(self) -> int:
        return self.rows * self.cols

    def take(self, rows: np.ndarray, mirrored: np.ndarray) -> Tensor:
        taken = self.values[self.index[rows]].astype(np.float32)  # (I, S, F)
        if mirrored.any():
            grids = taken[mirrored].reshape(-1, self.rows, self.cols, taken.shape[-1])
            taken[mirrored] = grids[:, :, ::-1].reshape(-1, *taken.shape[1:])
        return torch.from_numpy(taken)


@dataclass(frozen=True)
class PixelGrids:
    """Images read on demand, for a trainable encoder.

    Attributes
    ----------
    images : Images
    names : sequence of str
    side : int
        X.
    places : int
        S.
    """

    images: Images
    names: Sequence[str]
    side: int
    places: int

    def __len__(self) -> int:
        return len(self.names)

    def take(self, rows: np.ndarray, mirrored: np.ndarray) -> Tensor:
        pixels = [self._pixels(int(row), bool(turned)) for row, turned in zip(rows, mirrored)]
        return torch.from_numpy(np.stack(pixels))

    def _pixels(self, row: int, mirrored: bool) -> np.ndarray:
        pixels = resize_image(self.images.read(self.names[row], side=self.side, function="train"), self.side)
        return pixels[:, ::-1] if mirrored else pixels


class CaptionBatches:
    """Shuffled batches of images with several captions each, so that the encoder runs once per image.

    Batch k depends only on the data, the seed and k, so that a resumed run continues exactly. Each epoch contains
    every image once.

    Parameters
    ----------
    grids : Grids
        N images.
    captions : Ragged
        M captions, without end marks.
    owners : ndarray (M,)
        The image of each caption.
    size : int
        Images per batch.
    each : int
        Captions K per image and epoch: a random choice of them, or padded with empty rows if there are fewer.
    mirror : bool
        Flip half of the images horizontally.
    seed : int

    Examples
    --------
    >>> grids = FeatureGrids(np.zeros((2, 4, 3), np.float16), np.arange(2), 2, 2)
    >>> batches = CaptionBatches(grids, Ragged.of([[5], [6, 7], [8]]), np.array([0, 0, 1]), size=2, each=2)
    >>> batch = batches.batch(0)
    >>> batch.source.shape, batch.target.shape, int((batch.target == 1).sum())
    (torch.Size([2, 4, 3]), torch.Size([4, 3]), 3)
    """

    def __init__(
        self,
        grids: Grids,
        captions: Ragged,
        owners: np.ndarray,
        *,
        size: int = 32,
        each: int = 5,
        mirror: bool = False,
        seed: int = 0,
    ) -> None:
        self._grids, self._captions, self._mirror, self._seed = grids, captions, mirror, seed
        self._size, self._each = size, each
        order = np.argsort(owners, kind="stable")
        self._own = np.split(order, np.cumsum(np.bincount(owners, minlength=len(grids)))[:-1])
        self._epoch: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._own)

    @property
    def per_epoch(self) -> int:
        """The number of batches per epoch."""
        return -(-len(self) // self._size)

    def batch(self, number: int) -> Batch:
        """Return batch ``number``, counted from 0 across epochs; random access."""
        epoch, step = divmod(number, self.per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self)))
        random = np.random.default_rng([self._seed, epoch, step])
        rows = self._epoch[1][step * self._size : (step + 1) * self._size]
        drawn = [random.permutation(self._own[row])[: self._each] for row in rows]
        return self._made(rows, drawn, self._each, random.random(len(rows)) < 0.5 * self._mirror)

    def once(self) -> Iterator[Batch]:
        """Yield every image once with all its captions, in fixed order, for evaluation."""
        for first in range(0, len(self), self._size):
            rows = np.arange(first, min(first + self._size, len(self)))
            drawn = [self._own[row] for row in rows]
            yield self._made(rows, drawn, max(map(len, drawn)), np.zeros(len(rows), bool))

    def _made(self, rows: np.ndarray, drawn: list[np.ndarray], each: int, mirrored: np.ndarray) -> Batch:
        places = np.full((len(rows), each), -1)
        for row, some in zip(places, drawn):
            row[: len(some)] = some
        flat = places.ravel()
        written, _ = self._captions.padded(flat[flat >= 0], ending=END)
        target = torch.full((len(flat), written.shape[1]), PAD)
        target[torch.from_numpy(flat >= 0)] = written
        lengths = torch.full((len(rows),), self._grids.places)
        return Batch(self._grids.take(rows, mirrored), lengths, target, torch.from_numpy(rows.astype(np.int64)))
