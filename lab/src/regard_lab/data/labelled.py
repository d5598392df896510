"""Labelled examples: texts, pairs of texts and images, and stratified splits."""

from __future__ import annotations

import hashlib
import math
import zipfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from regard._utils.errors import available_memory, rejected, rejection
from regard._utils.files import display_name, read_bytes
from regard_lab.data.images import ImageFileError, ImageProcessor, Preprocessing, open_images
from regard_lab.data.pairs import Count, Tally, read_lines
from regard_lab.data.plausibility import is_header
from regard_lab.models.folders import brief

_EMPTY = "skipped, the text is empty"
_HEADER = "looks like a header row, read as a text and its label"
#: The most labels in a message.
_SHOWN = 8


class Labelled(ABC):
    """Base class of labelled examples.

    Attributes
    ----------
    labels : list of str
    name : str
        Where they come from.
    """

    #: The name of an example in messages.
    noun: ClassVar[str] = "example"
    labels: list[str]
    name: str

    def __len__(self) -> int:
        return len(self.labels)

    def names(self) -> list[str]:
        """Return the labels that occur, in order: of numbers if all are, else of the alphabet."""
        found = set(self.labels)
        numeric = all(each.isascii() and each.isdigit() for each in found)
        return sorted(found, key=lambda name: (int(name), name)) if numeric else sorted(found)

    def numbers(self, names: Sequence[str], function: str = "train") -> np.ndarray:
        """Return the number of each example's label, (N,), or raise for one that is not among the names."""
        number = {name: i for i, name in enumerate(names)}
        for row, label in enumerate(self.labels):
            if label not in number:
                expected = f"have a label among {shown_labels(names)}"
                raise rejected(function, self.place(row), expected, brief(label))
        return np.array([number[label] for label in self.labels], np.int64)

    def majority(self) -> tuple[str, float]:
        """Return the most frequent label, and its share."""
        label, count = Counter(self.labels).most_common(1)[0]
        return label, count / len(self)

    def summary(self) -> str:
        """Return how many examples and labels there are, and which is the most frequent."""
        label, share = self.majority()
        kinds = len(set(self.labels))
        count = f"{len(self):,} {self.noun}{'s' * (len(self) > 1)}, {kinds} label{'s' * (kinds > 1)}"
        return f"{self.name}: {count}; {share:.1%} are {brief(label)}"

    def contradictions(self) -> list[str]:
        """Return a line about equal examples with different labels, if any."""
        known: dict[str, str] = {}
        rows = [
            row
            for row, (key, label) in enumerate(zip(self.keys(), self.labels))
            if known.setdefault(key, label) != label
        ]
        return [f"one {self.noun} under two labels: {len(rows):,} (first in {self.place(rows[0])})"] if rows else []

    @abstractmethod
    def place(self, row: int) -> str:
        """Return what messages call the place that an example came from."""

    @abstractmethod
    def keys(self) -> list[str]:
        """Return a text for each example that equal ones share."""

    @abstractmethod
    def checksum(self) -> str:
        """Return a checksum of examples and labels in their order."""

    @abstractmethod
    def take(self, rows: Sequence[int], what: str) -> Self:
        """Return some of the examples."""

    @abstractmethod
    def report(self) -> list[str]:
        """Return what was read, and a line for each kind of example that was left out or looks wrong."""


@dataclass(frozen=True)
class LabelledTexts(Labelled):
    """Texts and their labels.

    Attributes
    ----------
    texts : list of str
    labels : list of str
        Of equal length.
    others : list of str or None
        The second text of each, where labels are of pairs.
    name : str
        Where they came from.
    lines : int
        How many lines were read.
    counts : tuple of Count
        What was left out, or looks wrong.
    places : list of int, optional
        The line of each, counted from 1.

    Examples
    --------
    >>> texts = LabelledTexts(["fine", "dull", "great"], ["good", "bad", "good"])
    >>> texts.names(), texts.numbers(["bad", "good"]).tolist(), len(texts)
    (['bad', 'good'], [1, 0, 1], 3)
    """

    texts: list[str]
    labels: list[str]
    others: list[str] | None = None
    name: str = "texts"
    lines: int = 0
    counts: tuple[Count, ...] = ()
    places: list[int] | None = None
    noun: ClassVar[str] = "text"

    def __post_init__(self) -> None:
        for what, each in (("labels", self.labels), ("others", self.others)):
            if each is not None and len(each) != len(self.texts):
                got = f"{len(each)} for {len(self.texts)} texts"
                raise rejected("LabelledTexts", what, "have one entry per text", got)

    def place(self, row: int) -> str:
        """Return the file and line of a text."""
        return self.name if self.places is None else f"{self.name}, line {self.places[row]:,}"

    def keys(self) -> list[str]:
        """Return each text, or for pairs both texts joined by a tab."""
        return [text if self.others is None else f"{text}\t{self.others[row]}" for row, text in enumerate(self.texts)]

    def checksum(self) -> str:
        """Return a checksum of texts and labels, which depends on their order."""
        digest = hashlib.blake2b(digest_size=16)
        for row, (text, label) in enumerate(zip(self.texts, self.labels)):
            other = "" if self.others is None else self.others[row]
            digest.update(f"{text}\t{other}\t{label}\n".encode())
        return digest.hexdigest()

    def take(self, rows: Sequence[int], what: str) -> Self:
        """Return the texts at these rows."""
        others = None if self.others is None else [self.others[row] for row in rows]
        places = None if self.places is None else [self.places[row] for row in rows]
        return replace(
            self, texts=[self.texts[row] for row in rows], labels=[self.labels[row] for row in rows],
            others=others, places=places, name=f"{self.name} ({what})", counts=(),
        )  # fmt: skip

    def report(self) -> list[str]:
        """Return a line that summarizes the texts, and one for each reason why lines were skipped or look wrong."""
        counts = [f"{each.what}: {each.count:,} (first in line {each.line:,})" for each in self.counts]
        return [self.summary(), *counts, *self.contradictions()]


def read_labelled(path: str | Path, *, pairs: bool = False, function: str = "read_labelled") -> LabelledTexts:
    r"""Read lines ``text TAB label``, or ``text TAB text TAB label``.

    Files are UTF-8, with or without a byte order mark, and may be gzip-compressed. Lines without a text are skipped
    and counted, and a first line that looks like a header is reported. White space around texts and labels is stripped.

    Parameters
    ----------
    path : str or Path
        ``"-"`` is standard input.
    pairs : bool, default False
        Whether a line has two texts.
    function : str
        Prefix of error messages.

    Raises
    ------
    ValueError
        If the file is missing, unreadable, empty, binary or not UTF-8, or if a line has the wrong number of columns or
        no label. The message names the file and line.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.tsv").write_text("fine\tgood\ndull\tbad\n")
    ...     read_labelled(Path(folder, "a.tsv")).labels
    ['good', 'bad']
    """
    name, wanted = display_name(path), 3 if pairs else 2
    columns = "text, text, label" if pairs else "text, label"
    made = LabelledTexts([], [], [] if pairs else None, name, places=[])
    tally, number = Tally(_EMPTY, _HEADER), 0
    assert made.places is not None
    for number, line in enumerate(read_lines(path, function), start=1):
        if not line.strip():
            tally.add(_EMPTY, number)
            continue
        cells = [cell.strip() for cell in line.rstrip("\r\n").split("\t")]
        where = f"{name}, line {number:,}"
        if len(cells) != wanted:
            expected = f"have {wanted} tab-separated columns: {columns}"
            raise rejected(function, where, expected, f"{len(cells)}: {brief(line.strip())}")
        if not cells[-1]:
            raise rejected(function, where, "have a label after the last tab", f"none: {brief(line.strip())}")
        if not all(cells[:-1]):
            tally.add(_EMPTY, number)
            continue
        made.texts.append(cells[0])
        made.labels.append(cells[-1])
        made.places.append(number)
        if made.others is not None:
            made.others.append(cells[1])
    if not len(made):
        raise rejected(function, name, "have lines with a text and a label", "none" if number else "an empty file")
    first = [made.texts[0], *(made.others or [])[:1], made.labels[0]]
    if is_header(first, made.labels):
        tally.add(_HEADER, made.places[0])
    return replace(made, lines=number, counts=tally.counts())


_L = TypeVar("_L", bound=Labelled)


def split_labelled(examples: _L, held_out: float, *, seed: int = 0) -> tuple[_L, _L]:
    """Split examples into a training set and a held-out set, stratified by label; equal examples stay together.

    The split depends only on the examples' content and the seed (through a checksum), not on their order.

    Parameters
    ----------
    examples : Labelled
    held_out : float
        The share, in (0, 1).
    seed : int

    Raises
    ------
    ValueError
        If no label has two distinct examples.

    Examples
    --------
    >>> learn, held = split_labelled(LabelledTexts(list("abcdef"), ["x", "y"] * 3), 0.3)
    >>> len(learn), sorted(held.labels)
    (4, ['x', 'y'])
    """
    if not 0 < held_out < 1:
        raise rejected("split_labelled", "held_out", "be in (0, 1)", held_out)
    keys = examples.keys()
    strata: dict[str, dict[str, None]] = {}
    known: dict[str, str] = {}
    for key, label in zip(keys, examples.labels):  # an example with several labels counts for its first
        strata.setdefault(known.setdefault(key, label), {})[key] = None
    salt, held = str(seed).encode(), set()

    def place(key: str) -> tuple[bytes, str]:
        return hashlib.blake2b(key.encode(), digest_size=8, key=salt).digest(), key

    for stratum in strata.values():
        # Each label keeps at least one training example and, if it has two, gets one held-out example.
        count = min(max(round(held_out * len(stratum)), 1), len(stratum) - 1)
        held.update(sorted(stratum, key=place)[:count])
    if not held:
        noun = examples.noun
        raise ValueError(
            f"train: {examples.name} has no label with two different {noun}s, so none can be held out: add {noun}s, or "
            "pass --valid."
        )
    rows: tuple[list[int], list[int]] = [], []
    for row, key in enumerate(keys):
        rows[key in held].append(row)
    return examples.take(rows[False], "training"), examples.take(rows[True], "held out")


def shown_labels(names: Sequence[str]) -> str:
    """Format labels for a message."""
    listed = ", ".join(brief(name) for name in names[:_SHOWN])
    return listed if len(names) <= _SHOWN else f"{listed}, … ({len(names)} in all)"


# Images: a folder for each label, IDX files as MNIST has them, or NumPy arrays ----------------------------------------
# Dimensions: N images, H and W pixels, C channels.


#: The magic numbers of IDX files of bytes, by their dimensions.
_MAGIC = {0x00000801: 1, 0x00000803: 3}
_LARGEST = 1 << 34
#: Maximum number of files to name in a report.
_NAMED = 5
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
    rest = [f"… and {len(files) - _NAMED:,} more"] if len(files) > _NAMED else []
    listed = [f"  {name} {why}" for name, why in files[:_NAMED]] + [f"  {each}" for each in rest]
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
            fitted[row] = preprocessing.transform(each)
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
                pixels[len(kept)] = how.transform(images.read(name, side=how.side, function=function))
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
