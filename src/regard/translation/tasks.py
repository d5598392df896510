"""What a task is: how its texts become symbols, and how what a model writes is scored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from regard._errors import in_section, unknown_name
from regard.data.pairs import Pairs
from regard.text.vocabulary import Codec, SymbolCodec
from regard.translation.metrics import bleu, chrf, error_rates


@dataclass(frozen=True)
class Vocabularies:
    """How symbols are made of texts, for tasks that leave it open.

    Attributes
    ----------
    kind : str
        ``"bpe"``, ``"unigram"`` or ``"characters"``.
    size : int
    joint : bool
        Whether both sides have one vocabulary.
    lowercase : bool
    dropout : float
        The share of BPE's merges that are left out when training texts are split (Provilkov 2020, arXiv 1910.13267).
        They are split several times, each time differently, and an epoch goes through all; what is rare is learned
        from its parts.
    """

    kind: str = "bpe"
    size: int = 8000
    joint: bool = False
    lowercase: bool = False
    dropout: float = 0.0


class Task(ABC):
    """Pairs of texts to learn from, and a score."""

    #: Its name on the command line, the metric that a run goes by, and all that there are.
    name: str
    metric: str
    names: tuple[str, ...]

    @abstractmethod
    def codecs(self, pairs: Pairs, vocabularies: Vocabularies) -> tuple[Codec, Codec]:
        """Return what turns sources and targets into numbers, learned from the pairs."""

    @abstractmethod
    def scores(self, written: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        """Return the scores of what was written, each against all its references; the metric among them."""


@final
class Translation(Task):
    """Sentences into sentences: subwords, BLEU and chrF."""

    name, metric, names = "translation", "bleu", ("bleu", "chrf")

    def codecs(self, pairs: Pairs, vocabularies: Vocabularies) -> tuple[Codec, Codec]:
        from regard.text.subwords import SubwordCodec

        kind, size, lowercase = vocabularies.kind, vocabularies.size, vocabularies.lowercase
        # Characters are as many as there are.
        count = None if kind == "characters" else size
        with in_section("vocabularies"):
            if vocabularies.joint:
                codec = SubwordCodec.train([*pairs.sources, *pairs.targets], kind, count, lowercase=lowercase)
                return codec, codec
            source, target = (
                SubwordCodec.train(texts, kind, count, lowercase=lowercase) for texts in (pairs.sources, pairs.targets)
            )
            return source, target

    def scores(self, written: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        listed = [list(each) for each in references]
        return {"bleu": bleu(list(written), listed).value, "chrf": chrf(list(written), listed).value}


@final
class Pronunciation(Task):
    """Words into phonemes separated by spaces: symbols, phoneme and word error rates."""

    name, metric, names = "pronunciation", "wer", ("per", "wer")

    def codecs(self, pairs: Pairs, vocabularies: Vocabularies) -> tuple[Codec, Codec]:  # noqa: ARG002
        return SymbolCodec.train(pairs.sources, lowercase=True), SymbolCodec.train(pairs.targets, separator=" ")

    def scores(self, written: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        said = {str(i): tuple(text.split()) for i, text in enumerate(written)}
        right = {str(i): [tuple(text.split()) for text in each] for i, each in enumerate(references)}
        rates = error_rates(said, right)
        return {"per": rates.symbol, "wer": rates.sequence}


#: By name.
TASKS: Mapping[str, Task] = {task.name: task for task in (Translation(), Pronunciation())}


def task_of(name: str) -> Task:
    """Return the task of this name."""
    if name not in TASKS:
        raise unknown_name("train", "task", name, TASKS)
    return TASKS[name]
