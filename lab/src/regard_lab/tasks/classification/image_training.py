"""From images with labels to a classifier in a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from regard._utils.errors import rejected
from regard_lab.data.batches import Augmentation, ImageBatches
from regard_lab.data.images import Preprocessing
from regard_lab.data.labelled_images import SIDE, LabelledImages, read_labelled_images
from regard_lab.models import ImageClassifier, ResNet, VisionTransformer, load
from regard_lab.tasks.classification.image_options import KINDS, ImageClassificationOptions
from regard_lab.tasks.classification.images import ImageClassificationPipeline
from regard_lab.tasks.classification.training import ClassificationRun, Prepared, classification_metrics
from regard_lab.training.run import place


class ImageTraining(ClassificationRun[ImageClassificationOptions, LabelledImages, ImageClassificationPipeline]):
    """A run in a folder that learns labels of images; parameters as :class:`ClassificationRun` has them."""

    kind = ImageClassificationOptions

    def __init__(
        self, options: ImageClassificationOptions, folder: str | Path, say: Callable[[str], None] = print
    ) -> None:
        super().__init__(options, folder, say)
        #: How images are read; None before it is known.
        self._preprocessing = self._asked()
        self._valid: LabelledImages | None = None

    def check(self) -> None:
        if not self.options.start:
            self.options.model_config()

    def sources(self) -> tuple[str, str, float]:
        data = self.options.data
        if not data.images:
            raise rejected("train", "images", "be given: a folder with one for each label, or arrays", "none")
        return data.images, data.valid, data.held_out

    def read(self, source: str, function: str = "train") -> LabelledImages:
        images = read_labelled_images(source, self._preprocessing, function=function)
        if self._preprocessing is None:  # arrays as they are: so are those to validate with
            height, width, channels = images.pixels.shape[1:]
            if height != width:
                got = f"{height} × {width}"
                raise rejected(function, source, "have square images, or be made so by data.side", got)
            self._preprocessing = Preprocessing(height, (height, width), (0.5,) * channels, (0.5,) * channels)
        return images

    def prepare(
        self,
        learn: LabelledImages,
        valid: LabelledImages,
        names: list[str],
        resume: bool,  # noqa: ARG002
    ) -> Prepared[ImageClassificationPipeline]:
        assert self._preprocessing is not None
        self._valid = valid
        how = self._preprocessing if self.options.start else self._preprocessing.with_statistics(learn.pixels)
        how = replace(how, flip_test=how.flip_test or self.options.flip_test)
        torch.manual_seed(self.options.training.seed)
        model = self._model(how, names)
        kind = "vision transformer" if isinstance(model.model, VisionTransformer) else "residual network"
        counts = [(each.numel(), each.requires_grad) for each in model.parameters()]
        learned, count = sum(n for n, learns in counts if learns), sum(n for n, _ in counts)
        which = "" if learned == count else f", of which {learned:,} learn"
        self.say(f"{kind}, {count:,} parameters{which}; images of {how.shape[0]} × {how.shape[1]} pixels")
        return Prepared(
            model,
            self._batches(learn, names, how, self.options.augmentation),
            self._batches(valid, names, how, None).once,
            self.options.suitable_rate(model.model),
            lambda: ImageClassificationPipeline(model.eval(), how),
        )

    def scores(self, made: ImageClassificationPipeline) -> dict[str, float]:
        """Return the accuracy and the F1 of a classifier on the images that the training validated with."""
        assert self._valid is not None, "there are some when it was trained"
        true, K = self._valid.numbers(made.labels), len(made.labels)
        named = made.probabilities(self._valid.pixels).argmax(1).numpy()
        measures = classification_metrics(np.bincount(K * true + named, minlength=K * K).reshape(K, K), made.labels)
        return {name: measures[name] for name in ("accuracy", "f1")}

    def _asked(self) -> Preprocessing | None:
        """Return how images are read where the options say it."""
        options = self.options
        if options.start:
            return Preprocessing.load(options.start)
        arrays = Path(options.data.images).is_file() and ".tar" not in options.data.images.lower()
        if not options.data.side and not options.data.gray and arrays:
            return None
        side, middle = options.data.side or SIDE, (0.5,) * (1 if options.data.gray else 3)
        return Preprocessing(side, (side, side), middle, middle)

    def _model(self, how: Preprocessing, names: list[str]) -> ImageClassifier:
        """Return the classifier to train."""
        options = self.options
        if not options.start:
            config = options.model_config(how.shape[0], how.channels)
            return ImageClassifier(KINDS[options.kind][1](config), names, options.dropout).train()
        loaded = load(options.start, dtype=torch.float32, hosted=False)
        trunk = loaded.model if isinstance(loaded, ImageClassifier) else loaded
        if not isinstance(trunk, VisionTransformer | ResNet):
            raise rejected("train", options.start, "be the folder of a model of images", type(loaded).__name__)
        model = ImageClassifier(trunk, names, options.dropout)
        if isinstance(loaded, ImageClassifier) and loaded.labels == model.labels:
            model.output.load_state_dict(loaded.output.state_dict())
        if options.tune == "frozen":
            model.model.requires_grad_(False)
        return model.train()

    def _batches(
        self, images: LabelledImages, names: list[str], how: Preprocessing, augmentation: Augmentation | None
    ) -> ImageBatches:
        training = self.options.training
        rank, world = place()
        return ImageBatches(
            images.pixels, images.numbers(names), how, size=training.batch_examples, classes=len(names),
            augmentation=augmentation, seed=training.seed, rank=rank, world=world,
        )  # fmt: skip
