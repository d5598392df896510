"""From pixels of any size to what a model of images reads, as ``preprocessor_config.json`` describes it.

Dimensions: B batch, H and W pixels, h and w those that a model reads, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from regard_lab.models.folders import brief, file_error, read_json

#: The file of a folder that describes it, as Hugging Face's transformers reads and writes it.
PREPROCESSOR = "preprocessor_config.json"
#: No side is longer.
_SIDE = 1 << 14
#: Pillow's number of bilinear interpolation.
_BILINEAR = 2


@dataclass(frozen=True)
class Preprocessing:
    """How images of any size become arrays of one size, and pixels become numbers.

    Attributes
    ----------
    size : int or (int, int)
        What the shorter side, or height and width, are made.
    crop : (int, int), optional
        Height and width of the middle that is kept; zeros stand where an image is smaller.
    mean, std : tuple of C float
        Of the channels, from 0 to 1.
    resample : int
        Pillow's number of an interpolation.
    flip_test : bool
        Whether labels are named by an image and its mirror image together; transformers reads past it.

    Examples
    --------
    >>> how = Preprocessing(4, (4, 4), (0.5,), (0.5,))
    >>> pixels = how.fit(np.full((6, 9, 3), 255, np.uint8))
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
        """How many channels C a model reads: 1 for gray, 3 for red, green and blue."""
        return len(self.mean)

    @property
    def dtype(self) -> type:
        """Of the arrays that :meth:`fit` returns."""
        return np.uint8

    @property
    def side(self) -> int:
        """Pixels that each side of an image must have at least where it is read smaller than it is."""
        return self.size if isinstance(self.size, int) else max(self.size)

    @property
    def shape(self) -> tuple[int, int]:
        """Height h and width w of what a model reads."""
        if self.crop is not None:
            return self.crop
        assert not isinstance(self.size, int)
        return self.size

    def with_statistics(self, pixels: np.ndarray) -> Self:
        """Return the same with the mean and the deviation of each channel of pixels (N, h, w, C)."""
        total = np.zeros((2, pixels.shape[-1]))
        for begin in range(0, len(pixels), 1024):  # in float64 a whole data set takes eight times its memory
            part = pixels[begin : begin + 1024].reshape(-1, pixels.shape[-1]) / 255
            total += part.sum(0), (part * part).sum(0)
        mean, square = total / (pixels.size // pixels.shape[-1])
        deviation = np.sqrt(np.maximum(square - mean * mean, 1e-6))
        return replace(self, mean=_rounded(mean), std=_rounded(deviation))

    def fit(self, image: np.ndarray) -> np.ndarray:
        """Return an image (H, W, 1 or 3) of uint8 as (h, w, C)."""
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
        """Return pixels (B, h, w, C) of uint8 as images (B, C, h, w) of mean 0 and deviation 1."""
        mean, std = (torch.tensor(each, device=pixels.device) for each in (self.mean, self.std))
        return ((pixels.float() / 255 - mean) / std).permute(0, 3, 1, 2)

    def shown(self, images: Tensor) -> Tensor:
        """Return images (B, C, h, w) as pixels (B, h, w, C) from 0 to 1: what :meth:`normalized` was given."""
        mean, std = (torch.tensor(each, device=images.device) for each in (self.mean, self.std))
        return (images.permute(0, 2, 3, 1) * std + mean).clamp(0, 1)

    def described(self) -> dict[str, Any]:
        """Return what ``preprocessor_config.json`` holds."""
        size = {"shortest_edge": self.size} if isinstance(self.size, int) else _sides(self.size)
        table: dict[str, Any] = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "size": size}
        table |= {"resample": self.resample, "do_center_crop": self.crop is not None}
        table |= {} if self.crop is None else {"crop_size": _sides(self.crop)}
        table |= {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
        table |= {"flip_test": True} if self.flip_test else {}
        return table | {"image_mean": list(self.mean), "image_std": list(self.std)}

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Return what a folder's ``preprocessor_config.json`` describes, ours or one of transformers.

        Raises
        ------
        ModelFileError
            If it is missing or damaged, or describes what is not done here.
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
    """Return a shortest edge, or height and width; a bare number is, as ViT's processor reads it, a square's."""
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
