"""Image files as pixels, from a folder or a tar archive, whatever somebody has put there.

Dimensions: H rows, W columns of pixels.
"""

from __future__ import annotations

import io
import os
import re
import stat
import tarfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

import numpy as np

from regard._utils.errors import rejected
from regard._utils.files import display_name, read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

#: Formats that are read, as Pillow calls them: none that runs a program, as PostScript does.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
#: What the names of image files end in.
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm"})
#: Bytes that a file may have, and pixels that are decoded at most; of a JPEG that is decoded smaller, those.
LARGEST, MOST_PIXELS = 1 << 28, 1 << 27
#: A JPEG is decoded at a scale at which its sides have at least so many times the pixels that are wanted.
_OVERSAMPLED = 2


class ImageFileError(ValueError):
    """An image that cannot be used; the message says which file and why."""


def read_image(path: str | Path, *, side: int = 0, function: str = "read_image") -> np.ndarray:
    """Return the pixels of an image file.

    Parameters
    ----------
    path : str or Path
        ``"-"`` is standard input.
    side, function
        As :func:`decode_image` takes them.

    Returns
    -------
    ndarray (H, W, 3) of uint8

    Raises
    ------
    ImageFileError
        As :func:`decode_image`, or if the file cannot be read.
    """
    return decode_image(read_image_file(path, function), display_name(path), side=side, function=function)


def read_image_file(path: str | Path, function: str = "read_image") -> bytes:
    """Return the bytes of an image file, of which there may be :data:`LARGEST` at most."""
    try:
        return read_bytes(path, function, LARGEST)
    except ValueError as error:
        raise _as_image_error(error) from None


def decode_image(data: bytes, name: str, *, side: int = 0, function: str = "read_image") -> np.ndarray:
    """Return the pixels of an image: upright as EXIF says, over white where it is transparent, its first frame.

    Parameters
    ----------
    data : bytes
        What the file holds: one of :data:`FORMATS`.
    name : str
        What error messages call it.
    side : int, default 0
        Pixels that each side must still have at least, where it has more: a large JPEG is then decoded at a half, a
        quarter or an eighth of its size. 0 for its own size.
    function : str
        What error messages begin with.

    Returns
    -------
    ndarray (H, W, 3) of uint8

    Raises
    ------
    ImageFileError
        If it is no image, damaged, cut short, or has more than :data:`MOST_PIXELS`.
    """
    from PIL import Image, UnidentifiedImageError

    def refused(expected: str, got: object) -> Exception:
        return rejected(function, name, expected, got, ImageFileError)

    if not data:
        raise refused("be an image", "an empty file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes, which are judged here, and of damaged tags
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                shape = f"{image.width:,} × {image.height:,}"
                if side and not image.info.get("progressive"):  # which needs memory for all of it in any case
                    image.draft("RGB", (_OVERSAMPLED * side, _OVERSAMPLED * side))
                if image.width * image.height <= MOST_PIXELS:
                    return _pixels(image)
        raise refused(f"have at most {MOST_PIXELS:,} pixels", shape)
    except ImageFileError:
        raise
    except UnidentifiedImageError:
        raise refused(f"be an image ({', '.join(FORMATS)})", f"{data[:8]!r} at its beginning") from None
    except Image.DecompressionBombError as error:
        count = re.search(r"\((\d+) pixels", str(error))
        got = f"{int(count[1]):,}" if count else "more"
        raise refused(f"have at most {MOST_PIXELS:,} pixels", got) from None
    except MemoryError:
        raise refused("fit in memory", "more") from None
    except Exception as error:  # what decoders raise of damaged files has no common base
        raise refused("be a whole image", f"one that is cut short or damaged ({error})") from None


def resize_image(pixels: np.ndarray, side: int) -> np.ndarray:
    """Return the middle of an image, as large a square as it has, with sides of so many pixels.

    Parameters
    ----------
    pixels : ndarray (H, W, 3) of uint8
    side : int

    Returns
    -------
    ndarray (side, side, 3) of uint8

    Examples
    --------
    >>> resize_image(np.zeros((30, 50, 3), np.uint8), 8).shape
    (8, 8, 3)
    """
    from PIL import Image

    H, W = pixels.shape[:2]
    if side == H == W:
        return pixels
    least = min(H, W)
    top, left = (H - least) // 2, (W - least) // 2
    square = Image.fromarray(pixels[top : top + least, left : left + least])
    return np.asarray(square.resize((side, side), Image.Resampling.BICUBIC))


class Images(ABC):
    """The image files below a folder, or in a tar archive, by their names.

    Attributes
    ----------
    path : Path
    names : tuple of str
        Of all files whose names end as those of images do, with ``/`` between folders; in the order in which they are
        read fastest.
    """

    path: Path
    names: tuple[str, ...]

    def __init__(self, path: Path, names: Mapping[str, Any]) -> None:
        self.path, self.names = path, tuple(names)
        self._by_last: dict[str, str | None] = {}
        for name in self.names:
            last = name.rpartition("/")[2]
            self._by_last[last] = None if last in self._by_last else name
        self._known = frozenset(self.names)

    def __len__(self) -> int:
        """Return how many images there are."""
        return len(self.names)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027 - a folder has nothing to close
        """Close the archive."""

    def find(self, name: str) -> str | None:
        """Return the name here of a file that a list calls so: the same, or without folders if only one ends so."""
        plain = str(PurePosixPath(name.replace(os.sep, "/")))
        return plain if plain in self._known else self._by_last.get(plain.rpartition("/")[2])

    @abstractmethod
    def read_file(self, name: str, function: str = "read_image") -> bytes:
        """Return the bytes of one of the files.

        Raises
        ------
        ImageFileError
            If it cannot be read, or has more than :data:`LARGEST` bytes.
        """

    def read(self, name: str, *, side: int = 0, function: str = "read_image") -> np.ndarray:
        """Return the pixels (H, W, 3) of one of the files, as :func:`decode_image` does."""
        return decode_image(self.read_file(name, function), f"{self.path}/{name}", side=side, function=function)


class ImageFolder(Images):
    """The image files below a folder; links are followed only where they stay below it."""

    def __init__(self, path: Path) -> None:
        root = os.path.realpath(path)
        found = []
        for folder, inner, files in os.walk(path):
            inner.sort()
            for name in files:
                full = Path(folder, name)
                if full.suffix.lower() in SUFFIXES and Path(os.path.realpath(full)).is_relative_to(root):
                    found.append(full.relative_to(path).as_posix())
        super().__init__(path, dict.fromkeys(sorted(found)))

    def read_file(self, name: str, function: str = "read_image") -> bytes:
        return read_image_file(self.path / name, function)


class ImageArchive(Images):
    """The image files in a tar archive, compressed or not; nothing is ever unpacked to disk."""

    def __init__(self, path: Path, function: str = "read_image") -> None:
        try:
            self._archive = tarfile.open(path)  # noqa: SIM115 - closed by close
            members = {
                str(PurePosixPath(member.name.lstrip("/"))): member
                for member in self._archive
                if member.isfile() and PurePosixPath(member.name).suffix.lower() in SUFFIXES
            }
        except (tarfile.TarError, EOFError, OSError, ValueError) as error:
            expected = "be a folder of images, or a tar archive that is whole"
            raise rejected(function, str(path), expected, getattr(error, "strerror", None) or error) from None
        self._members = members
        super().__init__(path, members)

    def close(self) -> None:
        self._archive.close()

    def read_file(self, name: str, function: str = "read_image") -> bytes:
        member, where = self._members[name], f"{self.path}/{name}"
        if member.size > LARGEST:
            raise rejected(function, where, f"have at most {LARGEST:,} bytes", f"{member.size:,}", ImageFileError)
        try:
            file: IO[bytes] | None = self._archive.extractfile(member)
            data = b"" if file is None else file.read()
        except (tarfile.TarError, EOFError, OSError, ValueError) as error:
            raise rejected(function, where, "be readable", error, ImageFileError) from None
        if len(data) < member.size:
            raise rejected(function, where, f"have {member.size:,} bytes", f"{len(data):,}", ImageFileError)
        return data


def open_images(path: str | Path, function: str = "read_image") -> Images:
    """Return the images of a folder or a tar archive.

    Raises
    ------
    ValueError
        If there is no such folder or archive, or no image in it.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        reason = "nothing there" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", None) or error
        raise rejected(function, str(path), "be a folder of images, or a tar archive of them", reason) from None
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise rejected(function, str(path), "be a folder of images, or a tar archive of them", "something else")
    images: Images = ImageFolder(path) if stat.S_ISDIR(mode) else ImageArchive(path, function)
    if not images.names:
        images.close()
        endings = ", ".join(sorted(SUFFIXES))
        raise rejected(function, str(path), f"have files that end in one of {endings}", "none")
    return images


def _pixels(image: Image) -> np.ndarray:
    """Return the pixels (H, W, 3) of an image's first frame."""
    import PIL.Image
    from PIL import ImageOps

    image.load()
    try:
        image = ImageOps.exif_transpose(image)
    except Exception:  # a damaged tag says nothing of the pixels
        image = image.copy()
    if image.mode == "F":
        raise ValueError("floating-point pixels, whose range no file tells")
    if image.mode.startswith("I"):  # 16 bits of grey
        deep = np.clip(np.asarray(image).astype(np.int64), 0, None)
        grey = deep / 257 if deep.max() < 1 << 16 else deep / ((1 << 31) - 1) * 255
        return np.repeat(np.round(grey).astype(np.uint8)[..., None], 3, 2)
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        above = image.convert("RGBA")
        image = PIL.Image.new("RGBA", above.size, "white")
        image.alpha_composite(above)
    return np.array(image.convert("RGB"))


def _as_image_error(error: ValueError) -> Exception:
    """Return an error of a file as one of an image."""
    made = ImageFileError(*error.args)
    made.__dict__.update(error.__dict__)
    return made
