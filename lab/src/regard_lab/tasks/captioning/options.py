"""The options of a run that learns to write captions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from regard._utils.errors import in_section, rejected, unknown_name
from regard_lab._options import Options, option, redeclared, section
from regard_lab.models.captioner import CAPTIONERS
from regard_lab.tasks.captioning.encoders import CNN, NAMES
from regard_lab.tasks.translation.tasks import VocabularyOptions
from regard_lab.training.options import RunOptions, TrainingOptions, absolute_path, unknown_option

TUNES = ("frozen", "full")
METRICS = ("loss", "bleu", "chrf", "rouge", "cider")
#: The options of data that name files.
FILES = ("data", "valid", "images", "features")


@dataclass(frozen=True)
class CaptionDataOptions(Options):
    """Where images and captions come from."""

    renamed: ClassVar[Mapping[str, str]] = {"longest": "max_length"}
    data: str = option("", "lines of an image's file, a tab and a caption; - is standard input", flag="--data",
                       short="Lines of file, tab, caption; - stdin.")  # fmt: skip
    valid: str = option("", "such lines to validate with; by default some images are held out", flag="--valid",
                        short="Such lines to validate with.")  # fmt: skip
    images: str = option("", "the folder or tar archive of the images", flag="--images",
                         short="Folder or .tar of the images.")  # fmt: skip
    features: str = option("", "a file that keeps what a frozen encoder makes of the images, for other runs, too; by "
                           "default one in the run's folder", flag="--features",
                           short="File that keeps the images' features.")  # fmt: skip
    side: int = option(0, "pixels of the square that is read of an image; 0 for what the encoder is used to", ge=0)
    held_out: int = option(1000, "images that are held out; by default at most a tenth", ge=1)
    max_length: int = option(40, "words that a caption may have at most", ge=1)
    max_unknown: float = unknown_option()
    mirror: bool = option(True, "exchange left and right in half of the images to learn from")

    def check(self) -> None:
        """Raise where options contradict each other, or one has no effect."""
        if self.data == self.valid == "-":
            raise rejected("options", "valid", "be a file where standard input is something else", "- as data is")
        if self.valid:
            self.require_default("held_out", "where valid is given")


@dataclass(frozen=True)
class CaptionVocabularyOptions(VocabularyOptions):
    """How tokens are made of captions."""

    size: int = option(4000, "how many subwords", ge=4, flag="--vocabulary-size")
    joint: bool = option(False, "of other tasks")
    lowercase: bool = redeclared(VocabularyOptions, "lowercase", True)
    dropout: float = option(0.0, "of other tasks", ge=0, lt=1)

    def check(self) -> None:
        """Raise where an option has no effect."""
        super().check()
        for name in ("joint", "dropout"):
            self.require_default(name, "for captions")


@dataclass(frozen=True)
class CaptionTrainingOptions(TrainingOptions):
    """How to train, with what suits captioners."""

    batch_option: ClassVar[str] = "batch_images"

    epochs: float = option(20.0, "times that each image is seen, where steps is 0", gt=0, flag="--epochs",
                           short="Times that each image is seen.")  # fmt: skip
    steps: int = option(0, "steps at most; 0 for those of the epochs", ge=0, resumable=True, flag="--steps",
                        short="Steps at most, in place of epochs.")  # fmt: skip
    batch_images: int = option(32, "images of a batch", ge=1, flag="--batch")
    captions: int = option(5, "captions of an image that are learned from at a time", ge=1)
    batch_tokens: int = option(4096, "of other tasks", ge=2)
    #: Xu 2015, arXiv 1502.03044: doubly stochastic attention.
    coverage: float = option(0.0, "weight of the mean of (1 − Σ α)² over places: how far the attention of all words to "
                             "each is from 1", ge=0)  # fmt: skip
    learning_rate: float = redeclared(TrainingOptions, "learning_rate", 1e-3)
    schedule: str = redeclared(TrainingOptions, "schedule", "cosine")
    warmup: float = redeclared(TrainingOptions, "warmup", 0.05)
    validate_every: int = option(0, "steps between validations; 0 for one each epoch", ge=0)
    metric: str = option("cider", "what best and patience go by", choices=METRICS)
    keep: int = redeclared(TrainingOptions, "keep", 3)
    average: int = redeclared(TrainingOptions, "average", 3)

    def planned(self, per_epoch: int) -> Self:
        """Return the options with steps and validations, where they were to be found in the data."""
        each = math.ceil(per_epoch / self.accumulate)
        steps = self.steps or math.ceil(self.epochs * per_epoch / self.accumulate)
        return replace(self, steps=steps, validate_every=self.validate_every or min(each, steps))


@dataclass(frozen=True)
class CaptionRewardOptions(Options):
    """What captions earn that the captioner draws itself, to learn from that; all weights 0 to learn none of it.

    Begin with a captioner that has learned captions of people (``start``): one that knows nothing draws nothing that
    earns anything.
    """

    cider: float = option(0.0, "weight of CIDEr-D, which is 10 at most", ge=0, flag="--reward-cider",
                          short="Learn from CIDEr-D, with this weight.")  # fmt: skip
    bleu: float = option(0.0, "weight of a caption's BLEU-4, which is 1 at most", ge=0, flag="--reward-bleu",
                         short="Learn from BLEU-4, with this weight.")  # fmt: skip
    draws: int = option(5, "captions that are drawn of an image, and compared", ge=2)
    temperature: float = option(1.0, "of draws: below 1 they are closer to what a search finds", gt=0)
    likelihood: float = option(0.0, "weight of the likelihood of people's captions beside it", ge=0)

    @property
    def some(self) -> bool:
        """Whether there are any rewards."""
        return self.cider > 0 or self.bleu > 0

    def check(self) -> None:
        """Raise where an option has no effect."""
        if not self.some:
            for name in ("draws", "temperature", "likelihood"):
                self.require_default(name, "where no score has a weight")


@dataclass(frozen=True)
class CaptionOptions(RunOptions):
    """Everything that a run is asked for."""

    task: str = option("captioner", "captioner", choices=("captioner",))
    data: CaptionDataOptions = section(CaptionDataOptions, "where images and captions come from")
    vocabularies: CaptionVocabularyOptions = section(CaptionVocabularyOptions, "how tokens are made of captions")
    encoder: str = option(NAMES[0], f"what reads images: {', '.join(NAMES)}, or the folder of a vision model of "
                          "Hugging Face", flag="--encoder",
                          short=f"{NAMES[0]} … 2, {NAMES[-1]}, or a folder.")  # fmt: skip
    tune: str = option(TUNES[0], "of the encoder: it stays as it is, or learns", choices=TUNES, flag="--tune",
                       short="frozen, or full: the encoder learns.")  # fmt: skip
    kind: str = option("recurrent", "what writes: recurrent or transformer", choices=CAPTIONERS, flag="--model",
                       short="rnn or transformer.")  # fmt: skip
    preset: str = option("base", "the sizes of the model", flag="--preset", short="Sizes: base, small, ...")
    model: dict[str, Any] = option({}, "fields of the model's config in place of the preset's")
    training: CaptionTrainingOptions = section(CaptionTrainingOptions, "how to train")
    reward: CaptionRewardOptions = section(CaptionRewardOptions, "scores to learn from")
    start: str = option("", "the folder of a captioner whose parameters and vocabulary the run begins with",
                        flag="--start", short="A captioner to begin with.")  # fmt: skip

    def check(self) -> None:
        """Raise where options contradict each other, or one has no effect."""
        for name in ("guide", "guided", "batch_tokens"):
            with in_section("training"):
                self.training.require_default(name, "for captions")
        if self.reward.some:
            self._check_reward()
        if self.tune != "frozen":
            with in_section("data"):
                self.data.require_default("features", "where the encoder learns")
        elif self.encoder == CNN:
            raise rejected("options", "tune", f"be 'full' where encoder is {CNN!r}, which knows nothing", "'frozen'")

    def _check_reward(self) -> None:
        """Raise where captions are drawn of a captioner that knows nothing, or an option has no effect on them."""
        unused = ["teacher_forcing"]
        if not self.reward.likelihood:
            unused += ["label_smoothing", "coverage"]
            if not self.start:
                expected = "be given where only rewards count: a captioner that has learned captions of people"
                raise rejected("options", "start", expected, "none")
        with in_section("training"):
            for name in unused:
                self.training.require_default(name, "where rewards count")

    def with_absolute_paths(self) -> Self:
        """Return the options with the files' names from the root on."""
        files: dict[str, Any] = {name: absolute_path(getattr(self.data, name)) for name in FILES}
        encoder = absolute_path(self.encoder) if Path(self.encoder).is_dir() else self.encoder
        return replace(self, encoder=encoder, start=absolute_path(self.start), data=replace(self.data, **files))

    def model_config(self, features: int, targets: int, places: int) -> Any:
        """Return the model's config for features of this width, or raise where an option is wrong."""
        config, _ = CAPTIONERS[self.kind]
        known = {each.name for each in fields(config)} - {"sources", "targets", "places"}
        for name in self.model:
            if name not in known:
                raise unknown_name(config.__name__, f"model.{name}", name, known)
        with in_section("model"):
            return config.preset(self.preset, features, targets, places=places, **self.model)

    def unset_model_fields(self) -> dict[str, Any]:
        """Return the fields of the model that were not asked for, as the preset has them."""
        fixed = {"sources", "targets", "places", *self.model}
        config = asdict(self.model_config(8, 8, 49))
        return {name: value for name, value in config.items() if name not in fixed and value is not None}
