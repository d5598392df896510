"""The options of a run that learns labels of images."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from regard._utils.errors import in_section, rejected, unknown_name
from regard_lab._options import Options, option, redeclared, section
from regard_lab.data.batches import Augmentation
from regard_lab.models import ResNet, ResNetConfig, VisionTransformer, VisionTransformerConfig
from regard_lab.tasks.classification.options import ClassifierOptions, ClassifierTrainingOptions
from regard_lab.training.options import absolute_path

TASK = "image-classification"
#: Kinds of image models with their configs.
IMAGE_MODELS: dict[str, tuple[type[Any], type[Any]]] = {
    "resnet": (ResNetConfig, ResNet),
    "transformer": (VisionTransformerConfig, VisionTransformer),
}
TUNES = ("full", "frozen")
#: Learning rates at the peak: of residual networks, of transformers from scratch at width 128 (narrower ones take
#: larger steps), of a pretrained model, and of a head alone.
RATES = {"resnet": 3e-3, "transformer": 1e-3, "full": 1e-4, "frozen": 2e-3}
_WIDTH, _HIGHEST = 128, 3e-3
#: Fields of a config that the data determines.
_FOUND = ("channels", "image")


@dataclass(frozen=True)
class LabelledImageOptions(Options):
    """Where images and their labels come from."""

    images: str = option("", "labelled images: a folder or tar archive with one folder per label, an IDX or .npy file "
                         "next to its labels, or an .npz of both", flag="--images")  # fmt: skip
    valid: str = option(
        "", "labelled images to validate with; by default, some of each label are held out", flag="--valid"
    )
    held_out: float = option(0.1, "share of each label's images to hold out for validation", gt=0, lt=1)
    side: int = option(0, "side in pixels of the square that images are cropped and resized to; 0 for the size of "
                       "arrays, and 64 for files", ge=0, le=1 << 12, flag="--side")  # fmt: skip
    gray: bool = option(False, "read images in gray", flag="--gray")

    def check(self) -> None:
        """Raise where an option has no effect."""
        if self.valid:
            self.require_default("held_out", "where valid is given")


@dataclass(frozen=True)
class ImageTrainingOptions(ClassifierTrainingOptions):
    """How to train, with what suits classifiers of images."""

    unit: ClassVar[str] = "images"
    batch_range: ClassVar[tuple[int, int]] = (8, 64)
    fewest_epochs: ClassVar[float] = 10.0

    schedule: str = redeclared(ClassifierTrainingOptions, "schedule", "cosine")
    weight_decay: float = redeclared(ClassifierTrainingOptions, "weight_decay", 0.05)
    label_smoothing: float = redeclared(ClassifierTrainingOptions, "label_smoothing", 0.1)


@dataclass(frozen=True)
class ImageClassificationOptions(ClassifierOptions):
    """Everything that a run is asked for."""

    task: str = option(TASK, TASK, choices=(TASK,))
    data: LabelledImageOptions = section(LabelledImageOptions, "where images and labels come from")
    augmentation: Augmentation = section(Augmentation, "what is changed in images at random")
    start: str = option("", "the folder of a model of images that the run begins with", flag="--start")
    tune: str = option("full", "what of that model learns: all of it, or its head alone", choices=TUNES, flag="--tune")
    kind: str = option("resnet", "what the model is, without start", choices=tuple(IMAGE_MODELS), flag="--kind")
    preset: str = option("tiny", "the sizes of the model, without start", flag="--preset")
    model: dict[str, Any] = option({}, "fields of the model's config in place of the preset's")
    flip_test: bool = option(False, "name labels by an image and its mirror image together, in twice the time, once "
                             "training is over; for images whose left and right mean nothing")  # fmt: skip
    dropout: float = option(0.0, "share of the features zeroed before labels are scored", ge=0, lt=1)
    training: ImageTrainingOptions = section(ImageTrainingOptions, "how to train")

    def check(self) -> None:
        """Raise where options contradict each other, or one has no effect."""
        with in_section("training"):
            refused = ("teacher_forcing", "guide", "guided", "validate_most", "batch_tokens", "checkpoint_activations")
            for name in refused:
                self.training.require_default(name, "for a classifier of images")
            if self.training.divides:
                raise rejected("options", "strategy", "be 'auto' or 'ddp' for a classifier of images", "'fsdp'")
        if not self.start:
            if self.tune != "full":
                raise rejected("options", "tune", "be 'full' without start: nothing was learned before", "'frozen'")
            return
        for name in ("model", "kind", "preset"):
            if getattr(self, name) != getattr(ImageClassificationOptions(), name):
                raise rejected("options", name, "be left out with start, which has its own", getattr(self, name))
        with in_section("data"):
            self.data.require_default("side", "with start, which has its own")
            self.data.require_default("gray", "with start, which has its own")

    def with_absolute_paths(self) -> Self:
        """Return the options with the files' names from the root on."""
        data = replace(self.data, images=absolute_path(self.data.images), valid=absolute_path(self.data.valid))
        return replace(self, start=absolute_path(self.start), data=data)

    def model_config(self, side: int = 1 << 8, channels: int = 3) -> Any:
        """Return the model's config for images of such a side and so many channels, or raise where one is wrong."""
        config, _ = IMAGE_MODELS[self.kind]
        known = {each.name for each in fields(config)} - set(_FOUND)
        for name in self.model:
            if name not in known:
                raise unknown_name(config.__name__, f"model.{name}", name, known)
        found = {"channels": channels} | ({"image": side} if self.kind == "transformer" else {})
        with in_section("model"):
            return config.preset(self.preset, **self.model, **found)

    def suitable_rate(self, model: VisionTransformer | ResNet) -> float:
        """Return the learning rate that suits a model and what of it learns."""
        if self.start:
            return RATES[self.tune]
        if isinstance(model, ResNet):
            return RATES["resnet"]
        return min(RATES["transformer"] * _WIDTH / model.config.width, _HIGHEST)
