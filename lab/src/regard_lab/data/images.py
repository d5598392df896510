"""Images: reading files, and preprocessing described by ``preprocessor_config.json``.

Dimensions: B batch, H and W image size in pixels, h and w model input size, C channels.
"""

from __future__ import annotations

import io
import math
import os
import re
import stat
import tarfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from regard._utils.errors import rejected
from regard._utils.files import display_name, read_bytes
from regard_lab.models.folders import brief, file_error, read_json
from regard_lab.models.hugging_face.hosted import reading_folder

if TYPE_CHECKING:
    from PIL.Image import Image


# Preprocessing described by ``preprocessor_config.json`` --------------------------------------------------------------


#: The preprocessing file of a model folder, in the format of Hugging Face's transformers.
PREPROCESSOR = "preprocessor_config.json"
#: Maximum side in pixels.
_SIDE = 1 << 14
#: Pillow's code for bilinear interpolation.
_BILINEAR = 2


@dataclass(frozen=True)
class Preprocessing:
    """Resizing, cropping and normalization of images.

    Attributes
    ----------
    size : int or (int, int)
        Resize the shorter side to this, or the image to this height and width.
    crop : (int, int), optional
        Height and width of the center crop; smaller images are zero-padded.
    mean, std : tuple of C float
        Per channel, for pixels from 0 to 1.
    resample : int
        Pillow's code of an interpolation.
    flip_test : bool
        Average the predictions for an image and its mirror image; transformers ignores this.

    Examples
    --------
    >>> how = Preprocessing(4, (4, 4), (0.5,), (0.5,))
    >>> pixels = how.transform(np.full((6, 9, 3), 255, np.uint8))
    >>> pixels.shape, how.normalized(torch.from_numpy(pixels[None])).unique().tolist()
    ((4, 4, 1), [1.0])
    """

    size: int | tuple[int, int]
    crop: tuple[int, int] | None = None
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    resample: int = _BILINEAR
    flip_test: bool = False

    @property
    def channels(self) -> int:
        """The number of channels C: 1 for grayscale, 3 for RGB."""
        return len(self.mean)

    @property
    def dtype(self) -> type:
        """The dtype of the arrays that :meth:`transform` returns."""
        return np.uint8

    @property
    def side(self) -> int:
        """The smallest side that an image may have if it is decoded at reduced size."""
        return self.size if isinstance(self.size, int) else max(self.size)

    @property
    def shape(self) -> tuple[int, int]:
        """Height h and width w of the model input."""
        if self.crop is not None:
            return self.crop
        assert not isinstance(self.size, int)
        return self.size

    def with_statistics(self, pixels: np.ndarray) -> Self:
        """Return a copy with the mean and standard deviation of each channel of pixels (N, h, w, C)."""
        total = np.zeros((2, pixels.shape[-1]))
        for begin in range(0, len(pixels), 1024):  # a whole data set in float64 takes eight times its memory
            part = pixels[begin : begin + 1024].reshape(-1, pixels.shape[-1]) / 255
            total += part.sum(0), (part * part).sum(0)
        mean, square = total / (pixels.size // pixels.shape[-1])
        deviation = np.sqrt(np.maximum(square - mean * mean, 1e-6))
        return replace(self, mean=_rounded(mean), std=_rounded(deviation))

    def transform(self, image: np.ndarray) -> np.ndarray:
        """Resize and crop an image (H, W, 1 or 3) of uint8 to (h, w, C)."""
        high, wide = self._resized(*image.shape[:2])
        if image.shape == (high, wide, self.channels) and self.shape == (high, wide):
            return image
        from PIL import Image

        picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
        picture = picture.convert("L" if self.channels == 1 else "RGB")
        if (high, wide) != (picture.height, picture.width):
            picture = picture.resize((wide, high), resample=Image.Resampling(self.resample))
        if self.crop is not None and self.crop != (high, wide):
            top, left = (high - self.crop[0]) // 2, (wide - self.crop[1]) // 2
            picture = picture.crop((left, top, left + self.crop[1], top + self.crop[0]))
        return np.array(picture).reshape(*self.shape, self.channels)

    def normalized(self, pixels: Tensor) -> Tensor:
        """Normalize pixels (B, h, w, C) of uint8 to images (B, C, h, w)."""
        mean, std = (torch.tensor(each, device=pixels.device) for each in (self.mean, self.std))
        return ((pixels.float() / 255 - mean) / std).permute(0, 3, 1, 2)

    def shown(self, images: Tensor) -> Tensor:
        """Undo :meth:`normalized`: return images (B, C, h, w) as pixels (B, h, w, C) from 0 to 1."""
        mean, std = (torch.tensor(each, device=images.device) for each in (self.mean, self.std))
        return (images.permute(0, 2, 3, 1) * std + mean).clamp(0, 1)

    def described(self) -> dict[str, Any]:
        """Return the content of ``preprocessor_config.json``."""
        size = {"shortest_edge": self.size} if isinstance(self.size, int) else _sides(self.size)
        table: dict[str, Any] = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "size": size}
        table |= {"resample": self.resample, "do_center_crop": self.crop is not None}
        table |= {} if self.crop is None else {"crop_size": _sides(self.crop)}
        table |= {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
        table |= {"flip_test": True} if self.flip_test else {}
        return table | {"image_mean": list(self.mean), "image_std": list(self.std)}

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Load a folder's ``preprocessor_config.json``, written by regard or transformers.

        Raises
        ------
        ModelFileError
            If it is missing or damaged, or uses unsupported preprocessing.
        """
        path = Path(folder) / PREPROCESSOR
        table = read_json(path)
        if not isinstance(table, dict):
            raise file_error(path, "describe how images are read", brief(table))
        for name in ("do_resize", "do_rescale", "do_normalize"):
            if table.get(name, True) is not True:
                raise file_error(path, f"have {name} true", brief(table[name]))
        factor = table.get("rescale_factor", 1 / 255)
        if not isinstance(factor, float) or not math.isclose(factor, 1 / 255):
            raise file_error(path, "have a rescale_factor of 1/255", brief(factor))
        resample = table.get("resample", _BILINEAR)
        if resample not in range(6):
            raise file_error(path, "have a resample from 0 to 5", brief(resample))
        flip_test = table.get("flip_test", False)
        if not isinstance(flip_test, bool):
            raise file_error(path, "have a flip_test that is true or false", brief(flip_test))
        mean, std = (_numbers(path, name, table.get(name, [0.5, 0.5, 0.5])) for name in ("image_mean", "image_std"))
        if len(mean) not in (1, 3) or len(std) != len(mean) or min(std) <= 0:
            raise file_error(path, "have an image_mean and image_std of 1 or 3 channels", brief((mean, std)))
        size = _size(path, "size", table.get("size", 224))
        crop = None
        if table.get("do_center_crop", "crop_size" in table and "do_center_crop" not in table):
            crop = _square(_size(path, "crop_size", table.get("crop_size")))
        if isinstance(size, int) and crop is None:
            raise file_error(path, "have a crop_size where its size is a shortest_edge", "none")
        return cls(size, crop, mean, std, int(resample), flip_test)

    def _resized(self, high: int, wide: int) -> tuple[int, int]:
        if not isinstance(self.size, int):
            return self.size
        short, long = min(high, wide), max(high, wide)
        other = int(self.size * long / short)  # as transformers rounds
        return (self.size, other) if high <= wide else (other, self.size)


def _square(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _sides(size: tuple[int, int]) -> dict[str, int]:
    return {"height": size[0], "width": size[1]}


def _rounded(values: np.ndarray) -> tuple[float, ...]:
    return tuple(round(float(value), 6) for value in values)


def _size(path: Path, name: str, given: Any) -> int | tuple[int, int]:
    """Return a shortest edge, or height and width; as in ViT's processor, a single number means a square."""
    found: Any = (given, given) if isinstance(given, int) else given
    if isinstance(given, dict):
        found = given.get("shortest_edge", (given.get("height"), given.get("width")))
    sides = found if isinstance(found, tuple) else (found,)
    if not all(isinstance(each, int) and not isinstance(each, bool) and 1 <= each <= _SIDE for each in sides):
        raise file_error(path, f"have a {name} of height and width, or shortest_edge, up to {_SIDE:,}", brief(given))
    return found


def _numbers(path: Path, name: str, given: Any) -> tuple[float, ...]:
    listed: Sequence[Any] = given if isinstance(given, list) else [given]
    if not all(isinstance(each, int | float) and math.isfinite(each) for each in listed):
        raise file_error(path, f"have an {name} of finite numbers", brief(given))
    return tuple(float(each) for each in listed)


# Preprocessing by transformers' image processors ----------------------------------------------------------------------
# Dimensions: H and W image size in pixels, h and w model input size, B batch, C channels.


#: Height and width of a test image, to find a processor's output shape.
_PROBE = (48, 64)


class ImageProcessor:
    """An image processor of transformers, always with its Pillow backend.

    Replaces :class:`~regard_lab.data.images.Preprocessing`; its arrays are already normalized.

    Parameters
    ----------
    processor : transformers.BaseImageProcessor
    path : Path
        Its config file, for error messages.

    Attributes
    ----------
    shape : (int, int)
        Height h and width w of the model input.
    channels : int

    Raises
    ------
    ModelFileError
        If its output is not one array per image.
    """

    #: The dtype of the arrays that :meth:`transform` returns.
    dtype: ClassVar[type] = np.float32
    #: 0: decode images at full size, because transformers' processors resize them.
    side: ClassVar[int] = 0
    flip_test: ClassVar[bool] = False

    def __init__(self, processor: Any, path: Path) -> None:
        self._processor, self._path = processor, path
        *self._shape, self.channels = self._processed(np.zeros((*_PROBE, 3), np.uint8)).shape

    @property
    def shape(self) -> tuple[int, int]:
        height, width = self._shape
        return height, width

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Load the processor from a folder; never runs code from the folder.

        Raises
        ------
        ModelFileError
            If there is none, or transformers cannot load it without torchvision.
        """
        from transformers import AutoImageProcessor

        path = Path(folder) / PREPROCESSOR
        described = read_json(path)
        named = described.get("auto_map") if isinstance(described, dict) else None
        if not isinstance(described, dict) or named:
            expected = "describe how images are read, without auto_map, which names code that is never run"
            raise file_error(path, expected, brief(named or described))
        with reading_folder(path, "describe an image processor that transformers has for Pillow"):
            processor = AutoImageProcessor.from_pretrained(
                folder, backend="pil", local_files_only=True, trust_remote_code=False
            )
        return cls(processor, path)

    def transform(self, image: np.ndarray) -> np.ndarray:
        """Return an image (H, W, 1 or 3) of uint8 as (h, w, C) of float32.

        Raises
        ------
        ModelFileError
            If it becomes another size than others, so that images do not stand side by side.
        """
        made = self._processed(np.repeat(image, 3, -1) if image.shape[-1] == 1 else image)
        if made.shape[:2] != self.shape:
            expected = "describe a processor that makes all images one size"
            got = f"{self.shape[0]} × {self.shape[1]} and {made.shape[0]} × {made.shape[1]}"
            raise file_error(self._path, expected, f"{type(self._processor).__name__}, which makes {got}")
        return made

    def normalized(self, pixels: Tensor) -> Tensor:
        """Return what :meth:`transform` returned of images, (B, h, w, C), as images (B, C, h, w)."""
        return pixels.permute(0, 3, 1, 2)

    def _processed(self, image: np.ndarray) -> np.ndarray:
        found = self._processor(image, return_tensors="np", input_data_format="channels_last")
        pixels = found.get("pixel_values")
        if set(found) != {"pixel_values"} or np.ndim(pixels) != 4 or len(pixels) != 1:
            got = f"{type(self._processor).__name__}, which makes {', '.join(sorted(found))}"
            raise file_error(self._path, "describe a processor that makes one array of pixels of an image", got)
        return np.ascontiguousarray(pixels[0].transpose(1, 2, 0), np.float32)


# Reading image files from folders and tar archives --------------------------------------------------------------------
# Dimensions: H rows, W columns of pixels.


#: Accepted formats, by Pillow's names. PostScript and others that run programs are not among them.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
#: Suffixes of image files.
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm"})
#: Maximum size of a file in bytes, and of a decoded image in pixels (of a JPEG, after it is scaled down in decoding).
LARGEST, MOST_PIXELS = 1 << 28, 1 << 27
#: A JPEG is scaled down in decoding as long as its sides have at least this many times the requested pixels.
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
    """Return the bytes of an image file, at most :data:`LARGEST`."""
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
            warnings.simplefilter("ignore")  # about sizes, which are checked here, and damaged tags
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                shape = f"{image.width:,} × {image.height:,}"
                if side and not image.info.get("progressive"):  # progressive ones need memory for the full size anyway
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
    except Exception as error:  # errors of decoders have no common base class
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
    except Exception:  # the pixels are intact even if a tag is damaged
        image = image.copy()
    if image.mode == "F":
        raise ValueError("floating-point pixels of unknown range")
    if image.mode.startswith("I"):  # 16-bit gray
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
