"""From pixels of any size to what a model of images reads, by transformers' own image processor of the folder.

Dimensions: H and W pixels, h and w those that a model reads, B batch, C channels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from torch import Tensor

from regard_lab.data.preprocessing import PREPROCESSOR
from regard_lab.models.folders import brief, file_error, read_json
from regard_lab.models.hugging_face.hosted import refuses_folder

#: Height and width of the image that shows what a processor makes.
_PROBE = (48, 64)


class ImageProcessor:
    """How a model that transformers computes reads images: by Pillow, whatever else is installed.

    Takes the place of :class:`~regard_lab.data.preprocessing.Preprocessing`, whose arrays are numbers already.

    Parameters
    ----------
    processor : transformers.BaseImageProcessor
    path : Path
        The file that describes it, for error messages.

    Attributes
    ----------
    shape : (int, int)
        Height h and width w of what a model reads.
    channels : int

    Raises
    ------
    ModelFileError
        If it makes something else than one array of an image.
    """

    #: Of the arrays that :meth:`fit` returns.
    dtype: ClassVar[type] = np.float32
    #: Images are read in their own size: transformers' processors shrink them.
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
        """Return the processor of a folder; no code that the folder carries is run.

        Raises
        ------
        ModelFileError
            If there is none, or transformers does not load it without torchvision.
        """
        from transformers import AutoImageProcessor

        path = Path(folder) / PREPROCESSOR
        described = read_json(path)
        named = described.get("auto_map") if isinstance(described, dict) else None
        if not isinstance(described, dict) or named:
            expected = "describe how images are read, without auto_map, which names code that is never run"
            raise file_error(path, expected, brief(named or described))
        try:
            processor = AutoImageProcessor.from_pretrained(
                folder, backend="pil", local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            if not refuses_folder(error):
                raise
            got = " ".join(str(error).split())[:200]
            raise file_error(path, "describe an image processor that transformers has for Pillow", got) from None
        return cls(processor, path)

    def fit(self, image: np.ndarray) -> np.ndarray:
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
        """Return what :meth:`fit` returned of images, (B, h, w, C), as images (B, C, h, w)."""
        return pixels.permute(0, 3, 1, 2)

    def _processed(self, image: np.ndarray) -> np.ndarray:
        found = self._processor(image, return_tensors="np", input_data_format="channels_last")
        pixels = found.get("pixel_values")
        if set(found) != {"pixel_values"} or np.ndim(pixels) != 4 or len(pixels) != 1:
            got = f"{type(self._processor).__name__}, which makes {', '.join(sorted(found))}"
            raise file_error(self._path, "describe a processor that makes one array of pixels of an image", got)
        return np.ascontiguousarray(pixels[0].transpose(1, 2, 0), np.float32)
