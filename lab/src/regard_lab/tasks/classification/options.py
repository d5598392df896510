"""The options of training a classifier of texts or images."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self

from regard._utils.errors import in_section, rejected
from regard_lab._options import Options, option, redeclared, section
from regard_lab.data.batches import Augmentation
from regard_lab.models import (
    DecoderLM,
    EncoderLM,
    ResNet,
    ResNetConfig,
    VisionTransformer,
    VisionTransformerConfig,
)
from regard_lab.models.pooling import MOST_FILTERS, WIDEST, WINDOW
from regard_lab.tasks.language.options import KINDS, TOKENIZERS, TokenizerOptions
from regard_lab.training.options import RunOptions, TrainingOptions, absolute_path, unknown_option

METRICS = ("loss", "accuracy", "f1", "matthews")


@dataclass(frozen=True)
class ClassifierTrainingOptions(TrainingOptions):
    """Training options with defaults for classifiers; 0 lets the data and the model decide."""

    batch_option: ClassVar[str] = "batch_examples"
    batch_range: ClassVar[tuple[int, int]] = (8, 32)
    #: For a number of epochs chosen from the data: its minimum, the steps it should give, and its maximum. Trained on
    #: 200 questions of TREC, 3 epochs in batches of 32 reach an accuracy of 19 %, and 20 in batches of 8 one of 54 %.
    fewest_epochs: ClassVar[float] = 3.0
    least_steps: ClassVar[int] = 500
    most_epochs: ClassVar[float] = 20.0

    epochs: float = option(
        0.0,
        "passes over the training examples, unless steps is given; 0 for 3 to 20 (images: 10 to 20), fewer for many "
        "examples",
        ge=0,
        flag="--epochs",
    )
    steps: int = option(0, "training steps, instead of epochs; 0 to count in epochs", ge=0, resumable=True,
                       flag="--steps")  # fmt: skip
    batch_examples: int = option(0, "examples per batch; 0 to choose by the amount of data: 8 to 32 texts, or 8 "
                                 "to 64 images", ge=0, flag="--batch")  # fmt: skip
    batch_tokens: int = option(4096, "for other tasks only", ge=2)
    learning_rate: float = option(0.0, "peak learning rate of AdamW; 0 to choose by the model", ge=0,
                                  resumable=True, flag="--learning-rate")  # fmt: skip
    warmup: float = redeclared(TrainingOptions, "warmup", 0.1)
    beta2: float = redeclared(TrainingOptions, "beta2", 0.999)
    label_smoothing: float = redeclared(TrainingOptions, "label_smoothing", 0.0)
    validate_every: int = option(0, "steps between validations; 0 for one each epoch", ge=0)
    metric: str = option("accuracy", "validation metric that selects the best checkpoint", choices=METRICS)
    keep: int = redeclared(TrainingOptions, "keep", 1)

    def planned(self, per_epoch: int, rate: float) -> Self:
        """Return the options with the epochs, steps, validation interval and learning rate that were left at 0.

        Parameters
        ----------
        per_epoch : int
            Batches of an epoch.
        rate : float
            The default learning rate.

        Examples
        --------
        >>> options = ClassifierTrainingOptions(epochs=2.5).planned(100, 1e-4)
        >>> options.steps, options.validate_every, options.learning_rate
        (250, 100, 0.0001)
        >>> [ClassifierTrainingOptions().planned(per_epoch, 1e-4).epochs for per_epoch in (10, 50, 1000)]
        [20.0, 10.0, 3.0]
        """
        each = math.ceil(per_epoch / self.accumulate)
        enough = min(max(self.fewest_epochs, math.ceil(self.least_steps / each)), self.most_epochs)
        epochs = self.epochs or float(enough)
        steps = self.steps or math.ceil(epochs * per_epoch / self.accumulate)
        every = self.validate_every or min(each, steps)
        rate = self.learning_rate or rate
        return replace(self, epochs=epochs, steps=steps, validate_every=every, learning_rate=rate)


class ClassifierOptions(RunOptions):
    """The options of training a classifier."""

    training: ClassifierTrainingOptions


# Texts ----------------------------------------------------------------------------------------------------------------


TUNES = ("full", "embedding", "frozen", "lora")
#: Fields of a model's config that do not affect its parameters.
CHANGEABLE = ("dropout", "attention_dropout", "pooling", "window")
#: Learning rates that suit a model of width 768 (Devlin 2019; adapters: Hu 2021); narrower ones take larger steps.
#: Short runs on SST-2 chose among 5e-4, 1e-3 and 3e-3 from scratch at width 128: 78.6, 77.9 and 74.3 %.
RATES = {"full": 5e-5, "embedding": 2e-4, "lora": 5e-4, "frozen": 2e-3, "scratch": 1e-4}
_WIDTH, _HIGHEST = 768, 5e-3


@dataclass(frozen=True)
class LabelledOptions(Options):
    """The labelled texts."""

    data: str = option("", "file of labelled texts, text TAB label; - is standard input", flag="--data")  # fmt: skip
    valid: str = option("", "file of labelled texts to validate with; by default, some of each label are held out",
                        flag="--valid")  # fmt: skip
    held_out: float = option(0.1, "share of each label's texts to hold out for validation", gt=0, lt=1)
    max_unknown: float = unknown_option()
    pairs: bool = option(False, "lines hold two texts and a label: text TAB text TAB label", flag="--pairs")
    length: int = option(256, "maximum number of tokens; longer texts are truncated", ge=2, le=1 << 20, flag="--length")

    def check(self) -> None:
        """Raise where options contradict each other, or one has no effect."""
        if self.data == self.valid == "-":
            raise rejected("options", "valid", "be a file where standard input is something else", "- as data is")
        if self.valid:
            self.require_default("held_out", "where valid is given")


@dataclass(frozen=True)
class LoRAOptions(Options):
    """Low-rank adapters (Hu 2021, arXiv 2106.09685)."""

    rank: int = option(8, "rank of the adapters", ge=1, le=1 << 12)
    alpha: float = option(16.0, "scale of the adapters, times their rank", gt=0)
    dropout: float = option(0.0, "dropout of the adapters' inputs", ge=0, lt=1)


@dataclass(frozen=True)
class HeadOptions(Options):
    """The classification head: on the pooled row of a text, or on convolution filters over its tokens."""

    filters: int = option(0, "convolution filters of each width, max- and mean-pooled for the classifier (Kim 2014); "
                          "0 to classify the pooled row of the model", ge=0, le=MOST_FILTERS)  # fmt: skip
    window: int = option(WINDOW, "width of the widest filter, in tokens", ge=1, le=WIDEST)
    narrowest: int = option(1, "width of the narrowest filter, in tokens", ge=1, le=WIDEST)
    means: bool = option(True, "pool each filter by its mean, too, not only by its maximum")
    both_ways: bool = option(False, "filters read the token embeddings and the outputs of a decoder that reads the "
                             "text in both directions (Peters 2018)")  # fmt: skip
    dropout: float = option(0.5, "dropout after the filters", ge=0, lt=1)

    def check(self) -> None:
        """Raise where an option has no effect."""
        if not self.filters:
            for name in (*self.filtering, "dropout"):
                self.require_default(name, "without filters")
        elif self.narrowest > self.window:
            raise rejected("options", "narrowest", f"be at most window, which is {self.window}", self.narrowest)

    @property
    def filtering(self) -> dict[str, Any]:
        """The sizes of the filters."""
        return {name: value for name, value in asdict(self).items() if name != "dropout"}


@dataclass(frozen=True)
class TextTrainingOptions(ClassifierTrainingOptions):
    """Training options with defaults for text classifiers."""

    adversarial: float = option(
        0.0,
        "adversarial training (Miyato 2017): perturbation of the embeddings, as a share of their norm; 0 for none",
        ge=0,
        le=1,
    )


@dataclass(frozen=True)
class ClassificationOptions(ClassifierOptions):
    """All options of training a text classifier."""

    determined: ClassVar[frozenset[str]] = frozenset({"vocabulary", "masked_head"})

    task: str = option("classifier", "classifier", choices=("classifier",))
    data: LabelledOptions = section(LabelledOptions, "the texts and labels")
    start: str = option("", "folder of a language model to start from, with its tokenizer", flag="--start",
                        short="Folder of a language model, or with --images of an image model, to start "
                        "from.")  # fmt: skip
    tune: str = option(
        "full",
        "what to train of the start model: full, all of it; embedding; frozen, only the new head; "
        "lora, low-rank adapters",
        choices=TUNES,
        flag="--tune",
    )
    lora: LoRAOptions = section(LoRAOptions, "low-rank adapters")
    kind: str = option(
        "encoder", "type of a new model, without start: encoder or decoder", choices=tuple(KINDS), flag="--kind",
        short="Type of a new model, without --start: encoder (default) or decoder; of images, resnet (default) or "
        "transformer.",
    )  # fmt: skip
    preset: str = option(
        "tiny", "size of a new model, without start: tiny, small or base, or a published one such as bert-base",
        flag="--preset", short="Size of a new model, without --start: tiny (default), small or base, or a published "
        "one such as bert-base or vit-base.",
    )  # fmt: skip
    tokenizer: TokenizerOptions = section(TokenizerOptions, "how text is tokenized")
    model: dict[str, Any] = option({}, "fields of the model's config that replace the preset's; with start, only "
                                   "dropout, attention_dropout, pooling and window")  # fmt: skip
    head: HeadOptions = section(HeadOptions, "the classification head")
    training: TextTrainingOptions = section(TextTrainingOptions, "how to train")

    def check(self) -> None:
        """Raise where options contradict each other, or one has no effect."""
        with in_section("training"):
            for name in ("teacher_forcing", "guide", "guided", "validate_most", "batch_tokens"):
                self.training.require_default(name, "for a classifier")
        if self.tune != "lora" and self.lora != LoRAOptions():
            raise rejected("options", "lora", "be left out unless tune is 'lora'", "others")
        if self.head.filters:
            for name in ("pooling", "pooled"):
                if name in self.model:
                    expected = "be left out where filters score labels, in place of such a row"
                    raise rejected("options", f"model.{name}", expected, repr(self.model[name]))
        if not self.start:
            if self.tune != "full":
                expected = "be 'full' without start: a new model has to be trained"
                raise rejected("options", "tune", expected, repr(self.tune))
            return
        for name in self.model:
            if name not in CHANGEABLE:
                expected = f"be left out with start, which has its own (only {', '.join(CHANGEABLE)} may differ)"
                raise rejected("options", f"model.{name}", expected, repr(self.model[name]))
        for name in ("kind", "preset"):
            if getattr(self, name) != getattr(ClassificationOptions(), name):
                raise rejected("options", name, "be left out with start, which has its own", getattr(self, name))
        if self.tokenizer != TokenizerOptions():
            raise rejected("options", "tokenizer", "be left out with start, which has its own", "others")

    def with_absolute_paths(self) -> Self:
        """Return the options with the files' names from the root on."""
        data = replace(self.data, data=absolute_path(self.data.data), valid=absolute_path(self.data.valid))
        kind = self.tokenizer.kind
        tokenizer = self.tokenizer if kind in TOKENIZERS else replace(self.tokenizer, kind=absolute_path(kind))
        return replace(self, start=absolute_path(self.start), data=data, tokenizer=tokenizer)

    def model_config(self, vocabulary: int = 1000) -> Any:
        """Return the model's config for a vocabulary of this size, or raise where an option is wrong."""
        own = {"max_length": self.data.length, "vocabulary": vocabulary}
        if self.kind == "encoder":
            own |= {"masked_head": False} | ({"pooled": False} if self.head.filters else {})
        return self.preset_config(KINDS[self.kind][0], **own)

    def suitable_rate(self, model: EncoderLM | DecoderLM) -> float:
        """Return the default learning rate for a model and ``tune``."""
        base = RATES[self.tune if self.start else "scratch"]
        return min(base * _WIDTH / model.config.width, _HIGHEST) if self.tune != "frozen" else base


# Images ---------------------------------------------------------------------------------------------------------------


IMAGE_TASK = "image-classification"
#: Kinds of image models with their configs.
IMAGE_MODELS: dict[str, tuple[type[Any], type[Any]]] = {
    "resnet": (ResNetConfig, ResNet),
    "transformer": (VisionTransformerConfig, VisionTransformer),
}
IMAGE_TUNES = ("full", "frozen")
#: Peak learning rates: of residual networks, of transformers from scratch at width 128 (larger for narrower ones), of a
#: pretrained model, and of a head alone.
IMAGE_RATES = {"resnet": 3e-3, "transformer": 1e-3, "full": 1e-4, "frozen": 2e-3}
_IMAGE_WIDTH, _IMAGE_HIGHEST = 128, 3e-3


@dataclass(frozen=True)
class LabelledImageOptions(Options):
    """The labelled images, and the size at which they are read."""

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
    """Training options with defaults for image classifiers."""

    unit: ClassVar[str] = "images"
    batch_range: ClassVar[tuple[int, int]] = (8, 64)
    fewest_epochs: ClassVar[float] = 10.0

    schedule: str = redeclared(ClassifierTrainingOptions, "schedule", "cosine")
    weight_decay: float = redeclared(ClassifierTrainingOptions, "weight_decay", 0.05)
    label_smoothing: float = redeclared(ClassifierTrainingOptions, "label_smoothing", 0.1)


@dataclass(frozen=True)
class ImageClassificationOptions(ClassifierOptions):
    """All options of training an image classifier."""

    determined: ClassVar[frozenset[str]] = frozenset({"channels", "image"})

    task: str = option(IMAGE_TASK, IMAGE_TASK, choices=(IMAGE_TASK,))
    data: LabelledImageOptions = section(LabelledImageOptions, "the images and labels")
    augmentation: Augmentation = section(Augmentation, "data augmentation")
    start: str = option("", "folder of an image model to start from", flag="--start")
    tune: str = option(
        "full",
        "what to train of the start model: full, all of it; frozen, only the new head",
        choices=IMAGE_TUNES,
        flag="--tune",
    )
    kind: str = option(
        "resnet",
        "type of a new model, without start: resnet or transformer",
        choices=tuple(IMAGE_MODELS),
        flag="--kind",
    )
    preset: str = option("tiny", "size of a new model, without start", flag="--preset")
    model: dict[str, Any] = option({}, "fields of the model's config that replace the preset's")
    flip_test: bool = option(False, "predict with test-time augmentation: average over an image and its mirror image, "
                             "in twice the time")  # fmt: skip
    dropout: float = option(0.0, "dropout before the classification head", ge=0, lt=1)
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
                raise rejected("options", "tune", "be 'full' without start: a new model has to be trained", "'frozen'")
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
        """Return the model's config for images of this size and number of channels; raise for a wrong option."""
        own = {"channels": channels} | ({"image": side} if self.kind == "transformer" else {})
        return self.preset_config(IMAGE_MODELS[self.kind][0], **own)

    def suitable_rate(self, model: VisionTransformer | ResNet) -> float:
        """Return the default learning rate for a model and ``tune``."""
        if self.start:
            return IMAGE_RATES[self.tune]
        if isinstance(model, ResNet):
            return IMAGE_RATES["resnet"]
        return min(IMAGE_RATES["transformer"] * _IMAGE_WIDTH / model.config.width, _IMAGE_HIGHEST)
