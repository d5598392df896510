"""The options of a run that learns labels of texts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from regard._utils.errors import in_section, rejected, unknown_name
from regard_lab._options import Options, option, section
from regard_lab.models import DecoderLM, EncoderLM
from regard_lab.models.pooling import MOST_FILTERS, WIDEST, WINDOW
from regard_lab.tasks.classification.options import ClassifierOptions, ClassifierTrainingOptions
from regard_lab.tasks.language.options import KINDS, TOKENIZERS, TokenizerOptions
from regard_lab.training.options import absolute_path, unknown_option

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
    """Everything that a run is asked for."""

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

    def model_config(self, vocabulary: int) -> Any:
        """Return the model's config for a vocabulary of this size, or raise where an option is wrong."""
        config, _ = KINDS[self.kind]
        own = {"max_length": self.data.length, "vocabulary": vocabulary}
        if self.kind == "encoder":
            own |= {"masked_head": False} | ({"pooled": False} if self.head.filters else {})
        known = {each.name for each in fields(config)} - {"vocabulary", "masked_head"}
        for name in self.model:
            if name not in known:
                raise unknown_name(config.__name__, f"model.{name}", name, known)
        with in_section("model"):
            return config.preset(self.preset, **(own | self.model))

    def suitable_rate(self, model: EncoderLM | DecoderLM) -> float:
        """Return the learning rate that suits a model and what of it learns."""
        base = RATES[self.tune if self.start else "scratch"]
        return min(base * _WIDTH / model.config.width, _HIGHEST) if self.tune != "frozen" else base
