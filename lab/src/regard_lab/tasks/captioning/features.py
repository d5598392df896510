"""Features of images on disk: computed once, in float16, and read by memory map.

A file is one of safetensors, so that other programs can read it: a tensor ``features`` (N, S, F), and in the metadata
the names of the N images, what their bytes were, the grid, and the checksum of the encoder.

Dimensions: N images, S places of the grid, F features of a place.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from regard._utils.errors import rejected
from regard._utils.files import naming
from regard_lab.data.images import ImageFileError, Images, decode_image, resize_image
from regard_lab.models.folders import brief, file_error, read_header
from regard_lab.tasks.captioning.encoders import TOGETHER, ImageEncoder

FORMAT = "regard.features"
#: Bytes of a header for each name, and beside them.
_PER_NAME, _BESIDE = 120, 4096
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Features:
    """Features of images, read by memory map.

    Attributes
    ----------
    values : ndarray (N, S, F) of float16
    names : tuple of str
    marks : tuple of str
        A checksum of the bytes of each image.
    bad : tuple of str
        Names of images that could not be used.
    rows, cols : int
    path : Path
    """

    values: np.ndarray
    names: tuple[str, ...]
    marks: tuple[str, ...]
    bad: tuple[str, ...]
    rows: int
    cols: int
    path: Path

    @classmethod
    def load(cls, path: str | Path, encoder: ImageEncoder) -> Features:
        """Return the features in a file that :func:`write_features` wrote.

        Raises
        ------
        ModelFileError
            If it is none, is damaged, or its features were made by another encoder.
        """
        path = Path(path)
        shapes = read_header(path)
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            about = json.loads(file.read(size)).get("__metadata__") or {}
        if about.get("format") != FORMAT or list(shapes) != ["features"] or shapes["features"][0] != "F16":
            raise file_error(path, f"be a file of features of format {FORMAT!r}", brief(about.get("format")))
        if about.get("encoder") != encoder.checksum():
            got = f"another one, {brief(about.get('described'))}"
            raise file_error(path, f"have features of this encoder, {brief(json.dumps(encoder.config))}", got)
        N, S, F = shapes["features"][1]
        names, marks, bad = (tuple(json.loads(about.get(each, "[]"))) for each in ("names", "marks", "bad"))
        if not len(names) == len(marks) == N or (encoder.rows * encoder.cols, encoder.width) != (S, F):
            raise file_error(path, f"have a name for each of its {N:,} images", f"{len(names):,} names")
        values = np.memmap(path, np.float16, "r", 8 + size, (N, S, F))
        return cls(values, names, marks, bad, encoder.rows, encoder.cols, path)


def write_features(
    path: str | Path,
    images: Images,
    names: Sequence[str],
    encoder: ImageEncoder,
    *,
    say: Callable[[str], None] = print,
    progress: Progress | None = None,
) -> list[str]:
    """Compute the features of images, and write them to a file that appears whole or not at all.

    Parameters
    ----------
    path : str or Path
    images : Images
    names : sequence of str
        Of images there.
    encoder : ImageEncoder
    say : callable
        Called with a line for each of the first images that cannot be used.
    progress : callable, optional
        Called with how many images are done, and of how many.

    Returns
    -------
    list of str
        The names of images that cannot be used, which are left out.

    Raises
    ------
    ValueError
        If none can be used, or the file cannot be written.
    """
    path = Path(path)
    is_new = not path.parent.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    space = _BESIDE + sum(len(json.dumps(name)) + _PER_NAME for name in names)
    space += -space % 8
    kept: list[tuple[str, str]] = []
    bad: list[str] = []
    try:
        with naming(path), beside.open("wb") as file:
            file.write(bytes(8 + space))
            for some in _batches(images, names, encoder.side, bad, say):
                pixels = torch.from_numpy(np.stack([each for _, _, each in some]))
                with torch.inference_mode():
                    made = encoder(pixels)
                file.write(made.half().numpy().tobytes())
                kept += [(name, mark) for name, mark, _ in some]
                if progress is not None:
                    progress(len(kept) + len(bad), len(names))
            if not kept:
                got = f"none of {len(names):,}"
                raise rejected("train", str(images.path), "have images that can be used", got, ImageFileError)
            _finish(file, space, kept, bad, encoder)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        if is_new:
            with suppress(OSError):
                path.parent.rmdir()
        raise
    return bad


def _batches(
    images: Images, names: Sequence[str], side: int, bad: list[str], say: Callable[[str], None]
) -> Iterator[list[tuple[str, str, np.ndarray]]]:
    """Yield names, checksums and pixels of some images at a time; those that cannot be used go to ``bad``."""
    some: list[tuple[str, str, np.ndarray]] = []
    for name in names:
        try:
            data = images.read_file(name, "train")
            pixels = resize_image(decode_image(data, name, side=side, function="train"), side)
        except ImageFileError as error:
            bad.append(name)
            say(f"left out: {str(error).removeprefix('train: ')}") if len(bad) <= 10 else None
            continue
        some.append((name, hashlib.blake2b(data, digest_size=8).hexdigest(), pixels))
        if len(some) == TOGETHER:
            yield some
            some = []
    if some:
        yield some


def _finish(file: IO[bytes], space: int, kept: list[tuple[str, str]], bad: list[str], encoder: ImageEncoder) -> None:
    """Write the header, which tells how many images there were in the end."""
    shape = [len(kept), encoder.rows * encoder.cols, encoder.width]
    described: dict[str, Any] = {name: each for name, each in encoder.config.items() if not isinstance(each, dict)}
    about = {
        "format": FORMAT,
        "encoder": encoder.checksum(),
        "described": json.dumps(described),
        "names": json.dumps([name for name, _ in kept]),
        "marks": json.dumps([mark for _, mark in kept]),
        "bad": json.dumps(bad),
    }
    tensor = {"dtype": "F16", "shape": shape, "data_offsets": [0, 2 * int(np.prod(shape))]}
    header = json.dumps({"__metadata__": about, "features": tensor}).encode()
    if len(header) > space:
        raise file_error(Path(file.name), f"have a header of at most {space:,} bytes", f"{len(header):,}")
    file.seek(0)
    file.write(struct.pack("<Q", space) + header.ljust(space))
    file.flush()
    os.fsync(file.fileno())
