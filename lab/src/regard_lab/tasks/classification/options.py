"""The options of a run that learns labels, of texts or of images."""

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
    """How to train, with what suits classifiers; some are found when the data and the model are known."""

    batch_option: ClassVar[str] = "batch_examples"
    batch_range: ClassVar[tuple[int, int]] = (8, 32)
    #: A number of epochs chosen from the data: minimum, enough for this many steps, and maximum. From 200 questions of
    #: TREC, 3 epochs in batches of 32 name 19 % of the test set, and 20 epochs in batches of 8 54 %.
    fewest_epochs: ClassVar[float] = 3.0
    least_steps: ClassVar[int] = 500
    most_epochs: ClassVar[float] = 20.0

    epochs: float = option(
        0.0,
        "passes over the training examples, unless steps is given; 0 for 3 to 20 (of images, from 10), the fewer the "
        "more examples there are",
        ge=0,
        flag="--epochs",
    )
    steps: int = option(0, "training steps in place of epochs; 0 for as many as the epochs have", ge=0, resumable=True,
                       flag="--steps")  # fmt: skip
    batch_examples: int = option(0, "examples per batch; 0 for a number that suits the amount of data: from 8, of "
                                 "texts to 32, of images to 64", ge=0, flag="--batch")  # fmt: skip
    batch_tokens: int = option(4096, "for other tasks only", ge=2)
    learning_rate: float = option(0.0, "peak learning rate of AdamW; 0 for one that suits the model", ge=0,
                                  resumable=True, flag="--learning-rate")  # fmt: skip
    warmup: float = redeclared(TrainingOptions, "warmup", 0.1)
    beta2: float = redeclared(TrainingOptions, "beta2", 0.999)
    label_smoothing: float = redeclared(TrainingOptions, "label_smoothing", 0.0)
    validate_every: int = option(0, "steps between validations; 0 for one each epoch", ge=0)
    metric: str = option("accuracy", "validation metric that selects the best checkpoint", choices=METRICS)
    keep: int = redeclared(TrainingOptions, "keep", 1)

    def planned(self, per_epoch: int, rate: float) -> Self:
        """Return the options with epochs, steps, validations and rate, where they were left to the data.

        Parameters
        ----------
        per_epoch : int
            Batches of an epoch.
        rate : float
            The learning rate that suits.

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
    """The options of a run that learns labels."""

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
    """Where texts and their labels come from."""

    data: str = option("", "file of labelled texts, text TAB label; - is standard input", flag="--data")  # fmt: skip
    valid: str = option("", "file of labelled texts to validate with; by default, some of each label are held out",
                        flag="--valid")  # fmt: skip
    held_out: float = option(0.1, "share of each label's texts to hold out for validation", gt=0, lt=1)
    max_unknown: float = unknown_option()
    pairs: bool = option(False, "lines hold two texts and a label: text TAB text TAB label", flag="--pairs")
    length: int = option(256, "most tokens of a text; longer ones are truncated", ge=2, le=1 << 20, flag="--length")

    def check(self) -> None:
        """Raise where options contradict each other, or one has no effect."""
        if self.data == self.valid == "-":
            raise rejected("options", "valid", "be a file where standard input is something else", "- as data is")
        if self.valid:
            self.require_default("held_out", "where valid is given")


@dataclass(frozen=True)
class LoRAOptions(Options):
    """Low-rank adapters (Hu 2021, arXiv 2106.09685)."""

    rank: int = option(8, "rank of the matrices that are added", ge=1, le=1 << 12)
    alpha: float = option(16.0, "rank times the factor of these matrices", gt=0)
    dropout: float = option(0.0, "dropout of their inputs", ge=0, lt=1)


@dataclass(frozen=True)
class HeadOptions(Options):
    """What scores labels: one row that stands for a text, or what filters find in windows of tokens."""

    filters: int = option(0, "convolution filters of each width, whose largest and mean values are classified (Kim "
                          "2014); 0 to classify one row of the model", ge=0, le=MOST_FILTERS)  # fmt: skip
    window: int = option(WINDOW, "tokens of the widest window", ge=1, le=WIDEST)
    narrowest: int = option(1, "tokens of the narrowest window", ge=1, le=WIDEST)
    means: bool = option(True, "classify the mean value of each filter, too, not only the largest")
    both_ways: bool = option(False, "filters read each token's embedding, and the outputs of a decoder for the text "
                             "forward and backward (Peters 2018)")  # fmt: skip
    dropout: float = option(0.5, "dropout of the values of filters", ge=0, lt=1)

    def check(self) -> None:
        """Raise where an option has no effect."""
        if not self.filters:
            for name in (*self.filtering, "dropout"):
                self.require_default(name, "without filters")
        elif self.narrowest > self.window:
            raise rejected("options", "narrowest", f"be at most window, which is {self.window}", self.narrowest)

    @property
    def filtering(self) -> dict[str, Any]:
        """What filters there are."""
        return {name: value for name, value in asdict(self).items() if name != "dropout"}


@dataclass(frozen=True)
class TextTrainingOptions(ClassifierTrainingOptions):
    """How to train, with what suits classifiers of texts."""

    adversarial: float = option(
        0.0,
        "adversarial training (Miyato 2017): share of their length by which the vectors of a text are moved in the "
        "direction that raises the loss, to learn its label there, too; 0 for none",
        ge=0,
        le=1,
    )


@dataclass(frozen=True)
class ClassificationOptions(ClassifierOptions):
    """All options of a run that learns labels of texts."""

    determined: ClassVar[frozenset[str]] = frozenset({"vocabulary", "masked_head"})

    task: str = option("classifier", "classifier", choices=("classifier",))
    data: LabelledOptions = section(LabelledOptions, "where texts and labels come from")
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
    tokenizer: TokenizerOptions = section(TokenizerOptions, "how text is split")
    model: dict[str, Any] = option({}, "fields of the model's config in place of the preset's; with start dropout, "
                                   "attention_dropout, pooling and window in place of its own")  # fmt: skip
    head: HeadOptions = section(HeadOptions, "what scores labels")
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
                expected = "be 'full' without start: nothing was learned before"
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
        """Return the learning rate that suits a model and what of it learns."""
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
#: Learning rates at the peak: of residual networks, of transformers from scratch at width 128 (narrower ones take
#: larger steps), of a pretrained model, and of a head alone.
IMAGE_RATES = {"resnet": 3e-3, "transformer": 1e-3, "full": 1e-4, "frozen": 2e-3}
_IMAGE_WIDTH, _IMAGE_HIGHEST = 128, 3e-3


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
    """All options of a run that learns labels of images."""

    determined: ClassVar[frozenset[str]] = frozenset({"channels", "image"})

    task: str = option(IMAGE_TASK, IMAGE_TASK, choices=(IMAGE_TASK,))
    data: LabelledImageOptions = section(LabelledImageOptions, "where images and labels come from")
    augmentation: Augmentation = section(Augmentation, "what is changed in images at random")
    start: str = option("", "the folder of a model of images that the run begins with", flag="--start")
    tune: str = option(
        "full", "what of that model learns: all of it, or its head alone", choices=IMAGE_TUNES, flag="--tune"
    )
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
        own = {"channels": channels} | ({"image": side} if self.kind == "transformer" else {})
        return self.preset_config(IMAGE_MODELS[self.kind][0], **own)

    def suitable_rate(self, model: VisionTransformer | ResNet) -> float:
        """Return the learning rate that suits a model and what of it learns."""
        if self.start:
            return IMAGE_RATES[self.tune]
        if isinstance(model, ResNet):
            return IMAGE_RATES["resnet"]
        return min(IMAGE_RATES["transformer"] * _IMAGE_WIDTH / model.config.width, _IMAGE_HIGHEST)
