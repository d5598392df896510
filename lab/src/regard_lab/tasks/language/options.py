"""The options of a run that learns language from text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from regard._utils.errors import in_section, rejected, unknown_name
from regard_lab._options import Options, option, redeclared, section
from regard_lab.data.documents import UNITS
from regard_lab.models import DecoderLM, DecoderLMConfig, EncoderLM, EncoderLMConfig
from regard_lab.training.options import RunOptions, TrainingOptions, absolute_path, unknown_option

#: Kinds of language models with their configs.
KINDS: dict[str, tuple[type[Any], type[Any]]] = {
    "decoder": (DecoderLMConfig, DecoderLM),
    "encoder": (EncoderLMConfig, EncoderLM),
}
TOKENIZERS = ("bpe", "wordpiece", "bytes", "characters")
#: Tokenizers whose vocabulary has the requested size.
SIZED = ("bpe", "wordpiece")
ROWS = ("auto", "packed", "stream")


@dataclass(frozen=True)
class TextOptions(Options):
    """The text, and how it is cut into sequences."""

    data: list[str] = option(
        [],
        "files or folders of text or JSON lines, also in gzip; - is standard input",
        flag="--data",
        short="File or folder of text or JSON lines, also in gzip; - is standard input. May be repeated.",
    )
    valid: list[str] = option(
        [],
        "files or folders to validate with; by default, some of data are held out",
        flag="--valid",
        short="File or folder to validate with; by default, some of --data are held out. May be repeated.",
    )
    held_out: float = option(
        0.1, "share of the documents to hold out for validation, or of a single document its end", gt=0, lt=1
    )
    max_unknown: float = unknown_option()
    per: str = option(
        "file", "what a document is in files of text: a file, line or paragraph", choices=UNITS, flag="--per"
    )
    field: str = option("text", "field of JSON lines that holds the text")
    length: int = option(256, "tokens of a training sequence (context length)", ge=2, le=1 << 20, flag="--length")
    rows: str = option("auto", "packed: several documents in a sequence, which do not attend to each other; stream: "
                       "one text, cut into sequences; auto: stream if documents are longer than a sequence",
                       choices=ROWS)  # fmt: skip
    masked_share: float = option(0.15, "share of tokens to mask", gt=0, lt=1)
    whole_words: bool = option(False, "mask whole words")
    both_ways: bool = option(False, "reverse half of the sequences, for classifiers that read texts in both directions")

    def check(self) -> None:
        """Raise where options contradict each other, or one has no effect."""
        if "-" in self.data and "-" in self.valid:
            raise rejected("options", "valid", "be a file where standard input is something else", "- as data is")
        if self.valid:
            self.require_default("held_out", "where valid is given")


@dataclass(frozen=True)
class TokenizerOptions(Options):
    """How text is tokenized."""

    kind: str = option("bpe", "tokenizer: bpe, wordpiece, bytes, characters, or the folder of a trained one",
                      flag="--tokenizer")  # fmt: skip
    size: int = option(8000, "vocabulary size of bpe and wordpiece, with special tokens", ge=260, le=1 << 20,
                      flag="--vocabulary-size")  # fmt: skip
    lowercase: bool = option(False, "lowercase the text")

    def check(self) -> None:
        """Raise where options contradict each other."""
        if self.kind not in TOKENIZERS and not Path(self.kind).is_dir():
            raise unknown_name("options", "kind", self.kind, {*TOKENIZERS, "a folder"})
        if self.kind not in SIZED:
            self.require_default("size", f"where the tokenizer is not {' or '.join(SIZED)}")


@dataclass(frozen=True)
class SkipGramOptions(Options):
    """Skip-gram pretraining of the embedding (Mikolov 2013, arXiv 1310.4546)."""

    epochs: int = option(0, "epochs of skip-gram that train the embedding before the model; 0 for none", ge=0, le=1000)
    window: int = option(5, "maximum distance between a token and its context tokens", ge=1, le=1000)
    negatives: int = option(5, "weight of the negative samples: how many count for each context token", ge=1, le=1000)
    draws: int = option(10, "negative samples to draw for a token, shared by its context tokens", ge=1, le=1000)
    sample: float = option(1e-4, "subsampling threshold: more frequent tokens are skipped at random; 0 for none",
                           ge=0, le=1)  # fmt: skip
    learning_rate: float = option(0.04, "initial learning rate, which decays to 0", gt=0)

    def check(self) -> None:
        """Raise where an option has no effect."""
        if not self.epochs:
            for name in ("window", "negatives", "draws", "sample", "learning_rate"):
                self.require_default(name, "without epochs")


@dataclass(frozen=True)
class LanguageTrainingOptions(TrainingOptions):
    """Training options with defaults for language models."""

    batch_range: ClassVar[tuple[int, int]] = (1024, 8192)

    learning_rate: float = redeclared(TrainingOptions, "learning_rate", 1e-3)
    batch_tokens: int = option(0, "most tokens per batch; 0 for a number that suits the amount of data, by default at "
                               "most 8,192", ge=0, flag="--batch-tokens")  # fmt: skip
    schedule: str = redeclared(TrainingOptions, "schedule", "cosine")
    warmup: float = redeclared(TrainingOptions, "warmup", 0.03)
    weight_decay: float = redeclared(TrainingOptions, "weight_decay", 0.1)
    label_smoothing: float = redeclared(TrainingOptions, "label_smoothing", 0.0)
    metric: str = redeclared(TrainingOptions, "metric", "loss")
    keep: int = redeclared(TrainingOptions, "keep", 1)
    sampled_softmax: int = option(0, "sampled softmax (Jean 2015): tokens to draw per batch as negative samples, in "
                                  "place of the whole vocabulary; 0 for all", ge=0, le=1 << 20)  # fmt: skip

    indexer: str = option("selected", "what the indexers of dsa layers learn: selected, the attention to the selected "
                          "keys, while the model is trained; all, the attention to all keys, as a warm-up in which "
                          "only the indexers are trained",
                          choices=("selected", "all"))  # fmt: skip

    def check(self) -> None:
        """Raise where options contradict each other."""
        super().check()
        if self.sampled_softmax:
            self.require_default("label_smoothing", "with sampled_softmax, which does not score all tokens")
            if self.divides:
                expected = "be 0 where processes divide the model"
                raise rejected("options", "sampled_softmax", expected, self.sampled_softmax)


@dataclass(frozen=True)
class LanguageOptions(RunOptions):
    """All options of a run."""

    determined: ClassVar[frozenset[str]] = frozenset({"vocabulary"})

    task: str = option("language-model", "language-model", choices=("language-model",))
    data: TextOptions = section(TextOptions, "the text")
    tokenizer: TokenizerOptions = section(TokenizerOptions, "how text is tokenized")
    skip_gram: SkipGramOptions = section(SkipGramOptions, "skip-gram pretraining of the embedding")
    masked: bool = option(False, "train a masked language model, such as BERT, instead of one that generates text",
                          flag="--masked")  # fmt: skip
    preset: str = option(
        "small", "size of the model: tiny, small or base, or a published one such as gpt2", flag="--preset"
    )
    model: dict[str, Any] = option({}, "fields of the model's config that replace the preset's")
    training: LanguageTrainingOptions = section(LanguageTrainingOptions, "how to train")
    start: str = option("", "folder of a model to start from, with its tokenizer", flag="--start")  # fmt: skip

    def check(self) -> None:
        """Raise where options contradict each other, or one has no effect."""
        with in_section("training"):
            for name in ("teacher_forcing", "guide", "guided", "validate_most"):
                self.training.require_default(name, "for a language model")
            if self.masked:
                self.training.require_default("label_smoothing", "where tokens are masked")
                self.training.require_default("indexer", "where tokens are masked")
            if self.training.metric != "loss":
                raise rejected("options", "metric", "be 'loss' for a language model", repr(self.training.metric))
            if 0 < self.training.batch_tokens < self.data.length:
                expected = f"be at least data.length, which is {self.data.length}"
                raise rejected("options", "batch_tokens", expected, self.training.batch_tokens)
            if self.data.length % (2 * self.training.context):
                expected = f"divide half of data.length, {self.data.length}"
                raise rejected("options", "context", expected, self.training.context)
        if not self.masked:
            with in_section("data"):
                self.data.require_default("masked_share", "unless tokens are masked")
                self.data.require_default("whole_words", "unless tokens are masked")
        else:
            if self.data.rows == "stream":
                raise rejected("options", "data.rows", "be 'packed' where tokens are masked", "'stream'")
            with in_section("data"):
                self.data.require_default("both_ways", "where tokens are masked, which are named from both sides")
        if self.skip_gram.epochs and self.training.divides:
            raise rejected(
                "options", "skip_gram.epochs", "be 0 where processes divide the model", self.skip_gram.epochs
            )
        if self.start:
            with in_section("skip_gram"):
                self.skip_gram.require_default("epochs", "with start, whose embedding is trained already")
            for name in ("preset", "model"):
                if getattr(self, name) != getattr(LanguageOptions(), name):
                    raise rejected("options", name, "be left out with start, which has its own", getattr(self, name))
            if self.tokenizer != TokenizerOptions():
                raise rejected("options", "tokenizer", "be left out with start, which has its own", "others")

    @property
    def kind(self) -> str:
        """The type of the model: decoder or encoder."""
        return "encoder" if self.masked else "decoder"

    def with_absolute_paths(self) -> Self:
        """Return the options with the files' names from the root on."""
        data = replace(
            self.data, data=[*map(absolute_path, self.data.data)], valid=[*map(absolute_path, self.data.valid)]
        )
        kind = self.tokenizer.kind
        tokenizer = self.tokenizer if kind in TOKENIZERS else replace(self.tokenizer, kind=absolute_path(kind))
        return replace(self, start=absolute_path(self.start), data=data, tokenizer=tokenizer)

    def model_config(self, vocabulary: int = 1000) -> Any:
        """Return the model's config for a vocabulary of this size, or raise where an option is wrong."""
        made = self.preset_config(KINDS[self.kind][0], vocabulary=vocabulary, max_length=self.data.length)
        if made.positions == "learned" and made.max_length < self.data.length:
            expected = f"be at least data.length, which is {self.data.length}"
            raise rejected("options", "model.max_length", expected, made.max_length)
        return made
