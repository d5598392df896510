"""A classifier of images with how it reads them, as a folder holds them: pixels in, probabilities of labels out.

Dimensions: N images, H and W pixels, C channels, K labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from regard._utils.errors import rejected
from regard._utils.files import write_atomically
from regard_lab.data.images import PREPROCESSOR, ImageProcessor, Preprocessing
from regard_lab.models import ImageClassifier, load, save
from regard_lab.models.folders import json_bytes
from regard_lab.models.hugging_face.hosted import HostedImageClassifier


class ImageClassificationPipeline:
    """A model that names labels of images, and how images are read for it.

    Parameters
    ----------
    model : ImageClassifier or HostedImageClassifier
    preprocessing : Preprocessing or ImageProcessor

    Raises
    ------
    ValueError
        If the model has other channels than images are read with.

    Examples
    --------
    >>> from regard_lab.models import ResNet, ResNetConfig
    >>> model = ImageClassifier(ResNet(ResNetConfig(features=4, layers=1)), ["cat", "dog"]).eval()
    >>> classifier = ImageClassificationPipeline(model, Preprocessing(16, (16, 16)))
    >>> pixels = classifier.fit([np.zeros((20, 30, 3), np.uint8), np.zeros((9, 9, 3), np.uint8)])
    >>> classifier.probabilities(pixels).shape
    torch.Size([2, 2])
    """

    def __init__(
        self, model: ImageClassifier | HostedImageClassifier, preprocessing: Preprocessing | ImageProcessor
    ) -> None:
        self.model, self.preprocessing = model, preprocessing
        if isinstance(model, HostedImageClassifier):
            return
        channels = model.model.config.channels
        if channels != preprocessing.channels:
            expected = f"read images of {channels} channels, as its model"
            raise rejected("ImageClassificationPipeline", "preprocessing", expected, preprocessing.channels)

    @classmethod
    def load(cls, folder: str | Path, function: str = "load", model: nn.Module | None = None) -> Self:
        """Return the classifier in a folder, of ours or of Hugging Face.

        Parameters
        ----------
        folder : str or Path
        function : str
            What error messages begin with.
        model : Module, optional
            The model in it, where that was loaded before.

        Raises
        ------
        ValueError
            If there is none, or it is damaged, in one sentence.
        """
        model = load(folder, dtype=torch.float32) if model is None else model
        if isinstance(model, HostedImageClassifier):
            return cls(model, ImageProcessor.load(folder))
        if not isinstance(model, ImageClassifier):
            got = f"{type(model).__name__} in {folder}"
            raise rejected(function, "model", "be the folder of a classifier of images", got)
        return cls(model, Preprocessing.load(folder))

    def save(self, folder: str | Path) -> None:
        """Write the model and how it reads images to a folder, which :meth:`load` and maybe transformers read."""
        if isinstance(self.model, HostedImageClassifier) or isinstance(self.preprocessing, ImageProcessor):
            got = type(self.model).__name__
            raise rejected("save", "model", "be one of ours, not one that transformers computes", got)
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_atomically(Path(folder) / PREPROCESSOR, json_bytes(self.preprocessing.described(), 1))
        save(self.model, folder)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the K labels."""
        return self.model.labels

    def fit(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """Return images (H, W, 3) of uint8, each of any size, as arrays (N, h, w, C) of the model's."""
        return np.stack([self.preprocessing.fit(each) for each in images])

    @torch.no_grad()
    def probabilities(self, pixels: np.ndarray, *, batch: int = 128, precision: str = "float32") -> Tensor:
        """Return the probability of each label, (N, K), on the CPU; of a regression, the value of each.

        Where the preprocessing says so, it is the mean of those of an image and of its mirror image.

        Parameters
        ----------
        pixels : ndarray (N, h, w, C)
            What :meth:`fit` returned.
        batch : int, default 128
            Images at once.
        precision : {"float32", "bfloat16"}
            Of matrix products.
        """
        device = next(self.model.parameters()).device
        made = torch.empty(len(pixels), len(self.labels))
        for begin in range(0, len(pixels), batch):
            part = torch.from_numpy(np.array(pixels[begin : begin + batch]))  # a copy: pixels may be read-only
            images = self.preprocessing.normalized(part).to(device)
            sides = [images, images.flip(-1)] if self.preprocessing.flip_test else [images]
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                shares = [self.model.predictions(self.model(side).float()) for side in sides]
            made[begin : begin + batch] = torch.stack(shares).mean(0).cpu()
        return made
