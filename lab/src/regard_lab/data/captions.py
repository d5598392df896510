"""Captions of images: read from lists, matched with images, and batched image by image.

Dimensions: I images of a batch, K captions of each, S places of a grid, F features, X pixels of a side, T steps.
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
from regard_lab.models.base import END, PAD
from regard_lab.text.ragged import Ragged

_BEFORE_SIGN = re.compile(r"\s+([.,;:!?])")


def plain_caption(text: str, lowercase: bool = True) -> str:
    """Return a caption without what lists differ in: capitals, spaces before signs, and the full stop at its end.

    Examples
    --------
    >>> plain_caption("Two dogs , in the snow .")
    'two dogs, in the snow'
    """
    text = _BEFORE_SIGN.sub(r"\1", " ".join((text.lower() if lowercase else text).split()))
    return text.rstrip(" .") or text


def read_captions(path: str, *, words: int | None = None, lowercase: bool = True) -> Pairs:
    """Return the captions in a file of lines ``image TAB caption``, made plain.

    Parameters
    ----------
    path : str
        ``"-"`` is standard input.
    words : int, optional
        Words that a caption may have at most; a longer one is left out, and counted.
    lowercase : bool

    Raises
    ------
    ValueError
        As :func:`~regard_lab.data.pairs.read_pairs`.
    """
    pairs = read_pairs(path, longest=None, words=words)
    return replace(pairs, targets=[plain_caption(each, lowercase) for each in pairs.targets])


def with_images(captions: Pairs, images: Images) -> tuple[Pairs, list[str]]:
    """Return the captions whose image is there, called as it is there, and a line for each kind that is not.

    Raises
    ------
    ValueError
        If none is left.
    """
    places = {name: images.find(name) for name in dict.fromkeys(captions.sources)}
    rows = [row for row, name in enumerate(captions.sources) if places[name] is not None]
    lost = [name for name, place in places.items() if place is None]
    if not rows:
        expected = f"name images in {images.path}"
        raise rejected("train", captions.name, expected, f"none of {len(places):,}, the first {lost[0]!r}")
    sources = [str(places[captions.sources[row]]) for row in rows]
    kept = replace(captions, sources=sources, targets=[captions.targets[row] for row in rows], places=None)
    count = len(captions) - len(kept)
    told = (
        f"left out, no such image: {count:,} captions of {len(lost):,} images (the first {lost[0]!r})" if lost else ""
    )
    return kept, [told] if lost else []


class Grids(Protocol):
    """Images that a batch is made of: features, or pixels."""

    def __len__(self) -> int:
        """Return how many there are."""

    def take(self, rows: np.ndarray, mirrored: np.ndarray) -> Tensor:
        """Return some images (I, ...), those of which ``mirrored`` (I,) says so with left and right exchanged."""

    @property
    def places(self) -> int:
        """S."""


@dataclass(frozen=True)
class FeatureGrids:
    """Features of images, some or all of a file.

    Attributes
    ----------
    values : ndarray (N, rows · cols, F) of float16
        Such as a memory map.
    index : ndarray (M,)
        Which of them.
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
    """Images that are read whenever they are needed, for an encoder that learns.

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
    """Shuffled batches of images, each with several of its captions: what is made of an image is made once for all.

    Batch number k depends on the data, the seed and k alone, so that a run that stopped goes on exactly where it was.
    In every epoch each image comes once.

    Parameters
    ----------
    grids : Grids
        Of N images.
    captions : Ragged
        Of M captions, without end marks.
    owners : ndarray (M,)
        Whose each is.
    size : int
        Images of a batch.
    each : int
        K, captions of an image in an epoch: drawn where there are more; where there are fewer, rows of padding.
    mirror : bool
        Whether half of the images have left and right exchanged.
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
        """How many batches an epoch has."""
        return -(-len(self) // self._size)

    def batch(self, number: int) -> Batch:
        """Return the batch of this number, counted from 0 through all epochs; any one at any time."""
        epoch, step = divmod(number, self.per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self)))
        random = np.random.default_rng([self._seed, epoch, step])
        rows = self._epoch[1][step * self._size : (step + 1) * self._size]
        drawn = [random.permutation(self._own[row])[: self._each] for row in rows]
        return self._made(rows, drawn, self._each, random.random(len(rows)) < 0.5 * self._mirror)

    def once(self) -> Iterator[Batch]:
        """Yield every image once with all its captions, in the same batches every time: to evaluate."""
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
