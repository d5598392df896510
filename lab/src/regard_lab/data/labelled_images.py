"""Images with labels: a folder for each label, IDX files as MNIST has them, or NumPy arrays.

Dimensions: N images, H and W pixels, C channels.
"""

from __future__ import annotations

import hashlib
import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from regard._utils.errors import available_memory, rejected, rejection
from regard._utils.files import read_bytes
from regard_lab.data.images import ImageFileError, ImageProcessor, Preprocessing, open_images
from regard_lab.data.labelled import Labelled
from regard_lab.models.folders import brief

#: The magic numbers of IDX files of bytes, by their dimensions.
_MAGIC = {0x00000801: 1, 0x00000803: 3}
_LARGEST = 1 << 34
#: Maximum number of files to name in a report.
_SHOWN = 5
#: Default side of images from files; largest share of free memory to use for pixels.
SIDE, _SHARE = 64, 0.8


@dataclass(frozen=True)
class LabelledImages(Labelled):
    """Images of one size, and their labels.

    Attributes
    ----------
    pixels : ndarray (N, H, W, C) of uint8
    labels : list of N str
    name : str
        Where they came from.
    files : list of N str, optional
    left_out : tuple of (str, str)
        Files that are no images, and why.
    empty : tuple of str
        Labels without an image.

    Examples
    --------
    >>> images = LabelledImages(np.zeros((3, 8, 8, 1), np.uint8), ["cat", "dog", "dog"])
    >>> images.names(), images.majority()[0], images.take([0], "some").labels
    (['cat', 'dog'], 'dog', ['cat'])
    """

    pixels: np.ndarray
    labels: list[str]
    name: str = "images"
    files: list[str] | None = None
    left_out: tuple[tuple[str, str], ...] = ()
    empty: tuple[str, ...] = ()
    noun: ClassVar[str] = "image"

    def place(self, row: int) -> str:
        """Return the file of an image, or its number."""
        return f"{self.name}, image {row:,}" if self.files is None else f"{self.name}/{self.files[row]}"

    def keys(self) -> list[str]:
        """Return a checksum of each image's pixels."""
        return [hashlib.blake2b(each.tobytes(), digest_size=16).hexdigest() for each in self.pixels]

    def checksum(self) -> str:
        """Return a checksum of pixels and labels in their order."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{self.pixels.shape}\n".encode())
        for pixels, label in zip(self.pixels, self.labels):
            digest.update(pixels.tobytes())
            digest.update(f"{label}\n".encode())
        return digest.hexdigest()

    def take(self, rows: Sequence[int], what: str) -> Self:
        """Return some of the images."""
        files = None if self.files is None else [self.files[row] for row in rows]
        labels = [self.labels[row] for row in rows]
        pixels = self.pixels[np.asarray(rows, np.int64)]
        return replace(
            self, pixels=pixels, labels=labels, files=files, name=f"{self.name} ({what})", left_out=(), empty=()
        )

    def report(self) -> list[str]:
        """Return lines about the images read, unreadable files, and labels without images."""
        height, width, channels = self.pixels.shape[1:]
        made = [f"{self.summary()}; {height} × {width} pixels, {'gray' if channels == 1 else 'colour'}"]
        made += [f"skipped, a label without images: {brief(name)}" for name in self.empty]
        return [*made, *self.contradictions(), *unreadable(self.left_out)]


def unreadable(files: Sequence[tuple[str, str]]) -> list[str]:
    """Return lines about unreadable files: their number, and the first ones with the reasons."""
    if not files:
        return []
    rest = [f"… and {len(files) - _SHOWN:,} more"] if len(files) > _SHOWN else []
    listed = [f"  {name} {why}" for name, why in files[:_SHOWN]] + [f"  {each}" for each in rest]
    return [f"skipped, unreadable images: {len(files):,}", *listed]


def reason(error: ImageFileError) -> str:
    """Return why a file cannot be read, without its name."""
    found = rejection(error)
    return str(error) if found is None else f"must {found.expected}, got {found.got}"


def read_labelled_images(
    path: str | Path,
    preprocessing: Preprocessing | ImageProcessor | None = None,
    *,
    function: str = "read_labelled_images",
) -> LabelledImages:
    """Read images and their labels.

    Parameters
    ----------
    path : str or Path
        A folder or tar archive with a folder of images per label; an IDX file of images
        (``train-images-idx3-ubyte``, optionally gzip-compressed) or a NumPy file (``.npy``), with the labels in a file
        of the same name with ``labels`` instead of ``images`` (and ``idx1`` instead of ``idx3``); or an ``.npz`` with
        arrays ``images`` and ``labels``. Arrays are (N, H, W) or (N, H, W, C) with C = 1 or 3, of uint8, or of floats
        from 0 to 1.
    preprocessing : Preprocessing or ImageProcessor, optional
        Size and channels of the result. By default, image files are center-cropped to 64 × 64 color pixels, and arrays
        do not change.
    function : str
        Prefix of error messages.

    Raises
    ------
    ValueError
        If there is nothing to read, a file is damaged or of an unknown format, or the numbers of labels and images
        differ; the message names the file. Unreadable image files are skipped, counted and named.
    """
    path = Path(path)
    if path.is_dir() or ".tar" in path.name.lower() or path.suffix == ".tgz":
        return _read_folder(path, preprocessing, function)
    if path.suffix == ".npz":
        images, labels = _read_npz(path, function)
    elif path.suffix == ".npy":
        images, labels = _read_npy(path, function), _read_npy(_labels_path(path, function), function)
    else:
        images, labels = _read_idx(path, 3, function), _read_idx(_labels_path(path, function), 1, function)
    pixels = _as_pixels(images, str(path), function)
    names = _as_labels(labels, len(pixels), str(path), function)
    if preprocessing is not None and pixels.shape[1:] != (*preprocessing.shape, preprocessing.channels):
        fitted = _room(len(pixels), preprocessing, str(path), function)
        for row, each in enumerate(pixels):
            fitted[row] = preprocessing.fit(each)
        pixels = fitted
    return LabelledImages(pixels, names, str(path))


def _read_folder(path: Path, preprocessing: Preprocessing | ImageProcessor | None, function: str) -> LabelledImages:
    how: Preprocessing | ImageProcessor = preprocessing or Preprocessing(SIDE, (SIDE, SIDE))
    with open_images(path, function) as images:
        found = [name for name in images.names if "/" in name and not name.split("/")[0].startswith(".")]
        if not found:
            expected = "have a folder of images for each label"
            raise rejected(function, str(path), expected, f"{len(images):,} images in it and none in folders")
        pixels = _room(len(found), how, str(path), function)
        kept: list[str] = []
        left_out: list[tuple[str, str]] = []
        for name in found:
            try:
                pixels[len(kept)] = how.fit(images.read(name, side=how.side, function=function))
            except ImageFileError as error:
                left_out.append((name, reason(error)))
            else:
                kept.append(name)
    if not kept:
        name, why = left_out[0]
        raise rejected(function, str(path), "have images that can be read", f"none: {name} {why}")
    labels = [name.split("/")[0] for name in kept]
    folders = {each.name for each in path.iterdir() if each.is_dir()} if path.is_dir() else set()
    folders |= {name.split("/")[0] for name in found}
    empty = sorted(each for each in folders - set(labels) if not each.startswith("."))
    return LabelledImages(pixels[: len(kept)], labels, str(path), kept, tuple(left_out), tuple(empty))


def _room(count: int, how: Preprocessing | ImageProcessor, name: str, function: str) -> np.ndarray:
    """Return an array for so many images, or raise where the memory that is free does not hold it."""
    shape = (count, *how.shape, how.channels)
    free, needed = available_memory(), math.prod(shape) * np.dtype(how.dtype).itemsize
    if free is not None and needed > _SHARE * free:
        expected = f"fit into the {free / 1e9:.1f} GB of memory that are free; lower data.size"
        raise rejected(function, name, expected, f"{count:,} images of {needed / 1e9:.1f} GB")
    return np.empty(shape, how.dtype)


def _labels_path(path: Path, function: str) -> Path:
    """Return the file of the labels of a file of images."""
    other = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))
    if other == path:
        expected = "be a folder of one folder per label, an .npz, or a file of images next to its file of labels"
        raise rejected(function, str(path), expected, "something else")
    return other


def _read_idx(path: Path, dimensions: int, function: str) -> np.ndarray:
    """Return the bytes of an IDX file of so many dimensions."""
    data = read_bytes(path, function, _LARGEST)
    magic = int.from_bytes(data[:4], "big")
    if len(data) < 4 or _MAGIC.get(magic) != dimensions:
        wanted = next(f"{number:#010x}" for number, count in _MAGIC.items() if count == dimensions)
        expected = f"be an IDX file of bytes in {dimensions} dimension{'s' * (dimensions > 1)}, which begins {wanted}"
        raise rejected(function, str(path), expected, f"{data[:4].hex(' ') or 'an empty file'}")
    begin = 4 * (1 + dimensions)
    shape = tuple(int.from_bytes(data[at : at + 4], "big") for at in range(4, begin, 4))
    if len(data) != begin + math.prod(shape):
        expected = f"have {begin + math.prod(shape):,} bytes, as its header says of {' × '.join(map(str, shape))}"
        raise rejected(function, str(path), expected, f"{len(data):,}")
    return np.frombuffer(data, np.uint8, offset=begin).reshape(shape)


def _read_npy(path: Path, function: str) -> np.ndarray:
    try:
        found: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise rejected(function, str(path), "exist", "no such file") from None
    except (ValueError, OSError, EOFError) as error:
        raise rejected(function, str(path), "be a NumPy array that is whole", brief(error)) from None
    if not isinstance(found, np.ndarray):
        raise rejected(function, str(path), "be one NumPy array", type(found).__name__)
    return found


def _read_npz(path: Path, function: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if not {"images", "labels"} <= set(arrays.files):
                listed = ", ".join(arrays.files) or "none"
                raise rejected(function, str(path), "have arrays 'images' and 'labels'", listed)
            return arrays["images"], arrays["labels"]
    except FileNotFoundError:
        raise rejected(function, str(path), "exist", "no such file") from None
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise rejected(function, str(path), "be an .npz that is whole", brief(error)) from None
    except ValueError as error:
        if hasattr(error, "rejection"):
            raise
        raise rejected(function, str(path), "hold arrays of numbers", brief(error)) from None


def _as_pixels(images: np.ndarray, name: str, function: str) -> np.ndarray:
    """Return images as (N, H, W, C) of uint8, or raise."""
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[-1] not in (1, 3) or 0 in images.shape[1:]:
        expected = "hold images (N, H, W) or (N, H, W, C) of 1 or 3 channels"
        raise rejected(function, name, expected, f"shape {images.shape}")
    if not len(images):
        raise rejected(function, name, "hold at least one image", "none")
    if images.dtype == np.uint8:
        return np.ascontiguousarray(images)
    if images.dtype.kind != "f":
        raise rejected(function, name, "hold images of uint8, or of floats from 0 to 1", images.dtype)
    made = np.empty(images.shape, np.uint8)
    for row, each in enumerate(images):
        if not (each >= 0).all() or not (each <= 1).all():  # also rejects NaN
            odd = each[~((each >= 0) & (each <= 1))].flat[0]
            raise rejected(function, f"{name}, image {row:,}", "hold numbers from 0 to 1", odd)
        made[row] = np.round(each * 255)
    return made


def _as_labels(labels: np.ndarray, count: int, name: str, function: str) -> list[str]:
    """Return labels as text, or raise where they are not one whole number or text for each image."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iuU":
        got = f"{labels.dtype} of shape {labels.shape}"
        raise rejected(function, f"the labels of {name}", "be one whole number, or text, for each image", got)
    if len(labels) != count:
        raise rejected(function, f"the labels of {name}", f"be {count:,}, as many as images", f"{len(labels):,}")
    if labels.dtype.kind == "i" and len(labels) and int(labels.min()) < 0:
        raise rejected(function, f"the labels of {name}", "be at least 0", int(labels.min()))
    return [str(each) for each in labels.tolist()]
