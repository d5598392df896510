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
    """Where images and captions come from."""

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
    side: int = option(0, "side in pixels of the square that is read of an image; 0 for the encoder's own", ge=0)
    held_out: int = option(1000, "images to hold out for validation; by default, at most a tenth", ge=1)
    max_length: int = option(40, "most words of a caption; longer ones are skipped", ge=1)
    max_unknown: float = unknown_option()
    mirror: bool = option(True, "mirror half of the training images, left and right")

    def check(self) -> None:
        """Raise where options contradict each other, or one has no effect."""
        if self.data == self.valid == "-":
            raise rejected("options", "valid", "be a file where standard input is something else", "- as data is")
        if self.valid:
            self.require_default("held_out", "where valid is given")


@dataclass(frozen=True)
class CaptionVocabularyOptions(VocabularyOptions):
    """How tokens are made of captions."""

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
    """How to train, with what suits captioners."""

    batch_option: ClassVar[str] = "batch_images"
    #: Of 180 images, batches of 4 reach a CIDEr-D of 22, of 8 of 18, and of 32 of 11: each image has several captions.
    batch_range: ClassVar[tuple[int, int]] = (4, 32)
    epoch_steps: ClassVar[int] = 40

    epochs: float = option(20.0, "passes over the training images, unless steps is given", gt=0, flag="--epochs")
    steps: int = option(0, "training steps in place of epochs; 0 for as many as the epochs have", ge=0, resumable=True,
                       flag="--steps")  # fmt: skip
    batch_images: int = option(0, "images per batch; 0 for a number that suits the amount of data, 4 to 32", ge=0,
                               flag="--batch")  # fmt: skip
    captions: int = option(5, "captions of an image per epoch", ge=1)
    batch_tokens: int = option(4096, "for other tasks only", ge=2)
    #: Xu 2015, arXiv 1502.03044: doubly stochastic attention.
    coverage: float = option(0.0, "weight of the coverage loss, the mean of (1 − Σ α)² over places, which lets the "
                             "words of a caption attend to every place once in all", ge=0)  # fmt: skip
    learning_rate: float = redeclared(TrainingOptions, "learning_rate", 1e-3)
    schedule: str = redeclared(TrainingOptions, "schedule", "cosine")
    warmup: float = redeclared(TrainingOptions, "warmup", 0.05)
    validate_every: int = option(0, "steps between validations; 0 for one each epoch", ge=0)
    metric: str = option("cider", "validation metric that selects the best checkpoint", choices=METRICS)
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
    data: CaptionDataOptions = section(CaptionDataOptions, "where images and captions come from")
    vocabularies: CaptionVocabularyOptions = section(CaptionVocabularyOptions, "how tokens are made of captions")
    encoder: str = option(NAMES[0], f"image encoder: {', '.join(NAMES)}, or the folder of a Hugging Face vision model",
                         flag="--encoder")  # fmt: skip
    tune: str = option(TUNES[0], "whether to train the encoder, too: frozen or full", choices=TUNES, flag="--tune")
    kind: str = option("recurrent", "type of the decoder: recurrent or transformer", choices=CAPTIONERS, flag="--model",
                       short="Type of the decoder: rnn (default) or transformer.")  # fmt: skip
    preset: str = option("base", "size of the decoder: small or base, or xu2015", flag="--preset")
    model: dict[str, Any] = option({}, "fields of the model's config in place of the preset's")
    training: CaptionTrainingOptions = section(CaptionTrainingOptions, "how to train")
    reward: CaptionRewardOptions = section(CaptionRewardOptions, "scores to learn from")
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

    def model_config(self, features: int = 8, targets: int = 8, places: int = 49) -> Any:
        """Return the model's config for features of this width, or raise where an option is wrong."""
        return self.preset_config(CAPTIONERS[self.kind][0], features, targets, places=places)
