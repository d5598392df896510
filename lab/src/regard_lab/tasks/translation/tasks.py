"""The registry of tasks: how the texts of each become symbols, and by which metrics it is scored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from regard._utils.errors import in_section, rejected, unknown_name
from regard_lab._options import Options, option
from regard_lab.data.pairs import Pairs, read_pairs, read_texts
from regard_lab.tasks.translation.metrics import bleu, chrf, error_rates
from regard_lab.text.vocabulary import SUBWORDS, SymbolVocabulary, Vocabulary

#: Maximum number of hidden spans per text, as in T5.
_SENTINELS = 100
_SYMBOLS = "for pronunciation, where letters and phonemes are the symbols"
_TEXTS = "for span-corruption, which has texts and no pairs"


@dataclass(frozen=True)
class VocabularyOptions(Options):
    """How symbols are made of texts, for tasks that leave it open."""

    kind: str = option("bpe", "units of text: subwords by bpe or unigram, or characters", choices=SUBWORDS,
                       flag="--vocabulary")  # fmt: skip
    size: int = option(8000, "number of subwords of a vocabulary", flag="--vocabulary-size")
    joint: bool = option(False, "one vocabulary for both languages; by default, one for each", flag="--joint/--apart")
    lowercase: bool = option(False, "read and write lower-case text")
    #: Provilkov 2020, arXiv 1910.13267. Each text is split at random several times; an epoch contains all versions.
    #: Rare words are learned from their parts.
    dropout: float = option(0.0, "BPE dropout: share of merges to skip when training texts are split",
                            ge=0, lt=1)  # fmt: skip
    #: See :mod:`regard_lab.text.rewriting`.
    rewrite: bool = option(
        False,
        "read lower-case text with markers for capitals, plain quotes and dashes, and placeholders for names, "
        "numbers and signs to copy",
        flag="--rewrite",
    )
    languages: str = option("", "codes of both languages, such as en-fr; with rewrite, numbers are written as in each")

    def check(self) -> None:
        """Raise where an option has no effect."""
        if not self.rewrite:
            self.require_default("languages", "without rewrite")
        elif self.lowercase:
            raise rejected("options", "lowercase", "be false with rewrite, which keeps capitals by marks", "true")
        elif self.languages and len(self.languages.split("-")) != 2:
            raise rejected("options", "languages", "be two codes such as en-fr", repr(self.languages))
        if self.kind == "characters":
            self.require_default("size", "for characters, all of which count")
        if self.kind != "bpe":
            self.require_default("dropout", "but for bpe, which has merges")


class Task(ABC):
    """Pairs of texts to learn from, and a score."""

    #: Name on the command line; the metric that selects checkpoints; all metrics.
    name: str
    metric: str
    names: tuple[str, ...]
    #: Default kind of model; whether both sides always share a vocabulary.
    kind = "recurrent"
    joint = False
    #: Whether the model reads texts with hidden spans, and writes these spans.
    hides = False
    #: Options without effect on this task, by section and name, with the end of their error message.
    refused: dict[str, str] = dict.fromkeys(
        ("data.span_share", "data.span_length"), "unless the task is span-corruption"
    )

    def read(self, source: str, target: str | None, **how: Any) -> Pairs:
        """Return the pairs of a file, or of two; ``how`` as :func:`~regard_lab.data.pairs.read_pairs` takes it."""
        return read_pairs(source, target, **how)

    @abstractmethod
    def build_vocabularies(self, pairs: Pairs, options: VocabularyOptions) -> tuple[Vocabulary, Vocabulary]:
        """Return what turns sources and targets into numbers, learned from the pairs."""

    @abstractmethod
    def scores(self, written: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        """Return the scores of what was written, each against all its references; the metric among them."""


@final
class Translation(Task):
    """Sentences into sentences: subwords, BLEU and chrF."""

    name, metric, names = "translation", "bleu", ("bleu", "chrf")

    def build_vocabularies(self, pairs: Pairs, options: VocabularyOptions) -> tuple[Vocabulary, Vocabulary]:
        from regard_lab.text.vocabulary import SubwordVocabulary

        kind, size, lowercase = options.kind, options.size, options.lowercase
        # The number of characters is not an option.
        count = None if kind == "characters" else size
        with in_section("vocabularies"):
            if options.joint:
                texts, name = [*pairs.sources, *pairs.targets], f"both sides of {pairs.name}"
                vocabulary = SubwordVocabulary.train(texts, kind, count, lowercase=lowercase, name=name)
                return vocabulary, vocabulary
            source, target = (
                SubwordVocabulary.train(texts, kind, count, lowercase=lowercase, name=f"the {side} of {pairs.name}")
                for side, texts in (("sources", pairs.sources), ("targets", pairs.targets))
            )
            return source, target

    def scores(self, written: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        listed = [list(each) for each in references]
        return {"bleu": bleu(list(written), listed).value, "chrf": chrf(list(written), listed).value}


@final
class Pronunciation(Task):
    """Words into phonemes separated by spaces: symbols, phoneme and word error rates."""

    name, metric, names = "pronunciation", "wer", ("per", "wer")
    refused = (
        Task.refused
        | dict.fromkeys(("data.alignments", "data.align"), _SYMBOLS)
        | {f"vocabularies.{name}": _SYMBOLS for name in ("kind", "size", "joint", "dropout", "rewrite")}
    )

    def build_vocabularies(self, pairs: Pairs, options: VocabularyOptions) -> tuple[Vocabulary, Vocabulary]:  # noqa: ARG002
        return SymbolVocabulary.train(pairs.sources, lowercase=True), SymbolVocabulary.train(
            pairs.targets, separator=" "
        )

    def scores(self, written: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        predictions = {str(i): tuple(text.split()) for i, text in enumerate(written)}
        right = {str(i): [tuple(text.split()) for text in each] for i, each in enumerate(references)}
        rates = error_rates(predictions, right)
        return {"per": rates.symbol, "wer": rates.sequence}


@final
class SpanCorruption(Task):
    """Texts with spans hidden into these spans: what a model can learn before translation (Raffel 2020)."""

    name, metric, names = "span-corruption", "loss", ()
    kind, joint, hides = "transformer", True, True
    refused = dict.fromkeys(
        (
            "data.targets",
            "data.valid_targets",
            "data.alignments",
            "data.align",
            "vocabularies.joint",
            "vocabularies.rewrite",
        ),
        _TEXTS,
    )

    def read(self, source: str, target: str | None, **how: Any) -> Pairs:  # noqa: ARG002
        return read_texts(source, **how)

    def build_vocabularies(self, pairs: Pairs, options: VocabularyOptions) -> tuple[Vocabulary, Vocabulary]:
        from regard_lab.text.vocabulary import SubwordVocabulary

        kind, lowercase = options.kind, options.lowercase
        count = None if kind == "characters" else options.size
        with in_section("vocabularies"):
            name = f"the texts of {pairs.name}"
            vocabulary = SubwordVocabulary.train(pairs.sources, kind, count, lowercase=lowercase, name=name)
        vocabulary = vocabulary.with_sentinels(_SENTINELS)
        return vocabulary, vocabulary

    def scores(self, written: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:  # noqa: ARG002
        return {}


#: Tasks by name.
TASKS: Mapping[str, Task] = {task.name: task for task in (Translation(), Pronunciation(), SpanCorruption())}


def get_task(name: str) -> Task:
    """Return the task of this name."""
    if name not in TASKS:
        raise unknown_name("train", "task", name, TASKS)
    return TASKS[name]
