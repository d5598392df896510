"""The options of a run that learns to write captions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from regard._utils.errors import in_section, rejected
from regard_lab._options import Options, option, redeclared, section
from regard_lab.models.captioner import CAPTIONERS
from regard_lab.tasks.captioning.encoders import CNN, NAMES
from regard_lab.tasks.translation.tasks import VocabularyOptions
from regard_lab.training.options import RunOptions, TrainingOptions, absolute_path, unknown_option

TUNES = ("frozen", "full")
METRICS = ("loss", "bleu", "chrf", "rouge", "cider")
#: Data options that name files.
FILES = ("data", "valid", "images", "features")


@dataclass(frozen=True)
class CaptionDataOptions(Options):
    """The images and captions."""

    renamed: ClassVar[Mapping[str, str]] = {"longest": "max_length"}
    data: str = option("", "file of captions, image TAB caption; - is standard input", flag="--data")  # fmt: skip
    valid: str = option("", "file of captions to validate with; by default, some images are held out", flag="--valid")
    images: str = option("", "folder or tar archive of the images", flag="--images")  # fmt: skip
    features: str = option(
        "",
        "file that stores the image features of a frozen encoder, for other runs, too; by default, "
        "one in the run's folder",
        flag="--features",
    )
    side: int = option(0, "size in pixels to which images are resized and cropped; 0 for the encoder's default", ge=0)
    held_out: int = option(1000, "images to hold out for validation; by default, at most a tenth", ge=1)
    max_length: int = option(40, "maximum number of words; longer captions are skipped", ge=1)
    max_unknown: float = unknown_option()
    mirror: bool = option(True, "random horizontal flips of the training images")

    def check(self) -> None:
        """Raise where options contradict each other, or one has no effect."""
        if self.data == self.valid == "-":
            raise rejected("options", "valid", "be a file where standard input is something else", "- as data is")
        if self.valid:
            self.require_default("held_out", "where valid is given")


@dataclass(frozen=True)
class CaptionVocabularyOptions(VocabularyOptions):
    """How captions are tokenized."""

    size: int = option(4000, "number of subwords of the vocabulary", ge=4, flag="--vocabulary-size")
    joint: bool = option(False, "for other tasks only")
    lowercase: bool = redeclared(VocabularyOptions, "lowercase", True)
    dropout: float = option(0.0, "for other tasks only", ge=0, lt=1)
    rewrite: bool = option(False, "for other tasks only")
    languages: str = option("", "for other tasks only")

    def check(self) -> None:
        """Raise where an option has no effect."""
        super().check()
        for name in ("joint", "dropout", "rewrite", "languages"):
            self.require_default(name, "for captions")


@dataclass(frozen=True)
class CaptionTrainingOptions(TrainingOptions):
    """Training options with defaults for captioners."""

    batch_option: ClassVar[str] = "batch_images"
    #: Of 180 images, batches of 4 reach a CIDEr-D of 22, of 8 of 18, and of 32 of 11: each image has several captions.
    batch_range: ClassVar[tuple[int, int]] = (4, 32)
    epoch_steps: ClassVar[int] = 40

    epochs: float = option(20.0, "passes over the training images, unless steps is given", gt=0, flag="--epochs")
    steps: int = option(0, "training steps, instead of epochs; 0 to count in epochs", ge=0, resumable=True,
                       flag="--steps")  # fmt: skip
    batch_images: int = option(0, "images per batch; 0 to choose by the amount of data, 4 to 32", ge=0,
                               flag="--batch")  # fmt: skip
    captions: int = option(5, "captions of an image per epoch", ge=1)
    batch_tokens: int = option(4096, "for other tasks only", ge=2)
    #: Xu 2015, arXiv 1502.03044: doubly stochastic attention.
    coverage: float = option(0.0, "weight of the coverage loss, the mean of (1 − Σ α)² over image patches, where Σ α "
                             "is the attention that a patch gets from all words", ge=0)  # fmt: skip
    learning_rate: float = redeclared(TrainingOptions, "learning_rate", 1e-3)
    schedule: str = redeclared(TrainingOptions, "schedule", "cosine")
    warmup: float = redeclared(TrainingOptions, "warmup", 0.05)
    validate_every: int = option(0, "steps between validations; 0 for one each epoch", ge=0)
    metric: str = option("cider", "validation metric that selects the best checkpoint", choices=METRICS)
    keep: int = redeclared(TrainingOptions, "keep", 3)
    average: int = redeclared(TrainingOptions, "average", 3)

    def planned(self, per_epoch: int) -> Self:
        """Return the options with the steps and the validation interval that were left at 0."""
        each = math.ceil(per_epoch / self.accumulate)
        steps = self.steps or math.ceil(self.epochs * per_epoch / self.accumulate)
        return replace(self, steps=steps, validate_every=self.validate_every or min(each, steps))


@dataclass(frozen=True)
class CaptionRewardOptions(Options):
    """Rewards of sampled captions, for self-critical training; all weights 0 for none.

    Start from a trained captioner (``start``): the samples of an untrained one earn no reward.
    """

    cider: float = option(0.0, "weight of CIDEr-D (10 at most) as a reward for generated captions", ge=0,
                          flag="--reward-cider")  # fmt: skip
    bleu: float = option(
        0.0, "weight of BLEU-4 (1 at most) as a reward for generated captions", ge=0, flag="--reward-bleu"
    )
    draws: int = option(5, "captions to sample per image, which are compared with each other", ge=2)
    temperature: float = option(1.0, "sampling temperature: below 1, samples are closer to the best caption", gt=0)
    likelihood: float = option(0.0, "weight of the likelihood of the given captions, in addition to the rewards", ge=0)

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
    """All options of a run."""

    determined: ClassVar[frozenset[str]] = frozenset({"sources", "targets", "places"})

    task: str = option("captioner", "captioner", choices=("captioner",))
    data: CaptionDataOptions = section(CaptionDataOptions, "the images and captions")
    vocabularies: CaptionVocabularyOptions = section(CaptionVocabularyOptions, "how captions are tokenized")
    encoder: str = option(NAMES[0], f"image encoder: {', '.join(NAMES)}, or the folder of a Hugging Face vision model",
                         flag="--encoder")  # fmt: skip
    tune: str = option(TUNES[0], "whether to train the encoder, too: frozen or full", choices=TUNES, flag="--tune")
    kind: str = option("recurrent", "type of the decoder: recurrent or transformer", choices=CAPTIONERS, flag="--model",
                       short="Type of the decoder: rnn (default) or transformer.")  # fmt: skip
    preset: str = option("base", "size of the decoder: small or base, or xu2015", flag="--preset")
    model: dict[str, Any] = option({}, "fields of the model's config that replace the preset's")
    training: CaptionTrainingOptions = section(CaptionTrainingOptions, "how to train")
    reward: CaptionRewardOptions = section(CaptionRewardOptions, "rewards of sampled captions")
    start: str = option("", "folder of a captioner whose parameters and vocabulary to start from", flag="--start")

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
            raise rejected(
                "options", "tune", f"be 'full' where encoder is {CNN!r}, which is not pretrained", "'frozen'"
            )

    def _check_reward(self) -> None:
        """Raise if an untrained captioner would learn from rewards alone, or an option has no effect with rewards."""
        unused = ["teacher_forcing"]
        if not self.reward.likelihood:
            unused += ["label_smoothing", "coverage"]
            if not self.start:
                expected = "be the folder of a trained captioner where only rewards count"
                raise rejected("options", "start", expected, "none")
        with in_section("training"):
            for name in unused:
                self.training.require_default(name, "where rewards count")

    def with_absolute_paths(self) -> Self:
        """Return the options with the files' names from the root on."""
        files: dict[str, Any] = {name: absolute_path(getattr(self.data, name)) for name in FILES}
        encoder = absolute_path(self.encoder) if Path(self.encoder).is_dir() else self.encoder
        return replace(self, encoder=encoder, start=absolute_path(self.start), data=replace(self.data, **files))

    def model_config(self, features: int = 8, targets: int = 8, places: int = 49) -> Any:
        """Return the model's config for features of this width, or raise where an option is wrong."""
        return self.preset_config(CAPTIONERS[self.kind][0], features, targets, places=places)
