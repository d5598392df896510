"""The options of a run: data, vocabularies, model and training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from regard._utils.errors import in_section, rejected
from regard_lab._options import Options, option, section
from regard_lab.models import RecurrentConfig
from regard_lab.models.registry import MODELS
from regard_lab.tasks.translation.alignment.links import ALIGNERS
from regard_lab.tasks.translation.tasks import TASKS, VocabularyOptions
from regard_lab.training.options import RunOptions, TrainingOptions, absolute_path, unknown_option

#: Data options that name files.
FILES = ("data", "targets", "valid", "valid_targets", "alignments")


@dataclass(frozen=True)
class DataOptions(Options):
    """The sentence pairs."""

    renamed: ClassVar[Mapping[str, str]] = {"longest": "max_length"}
    data: str = option(
        "",
        "file of sentence pairs, source TAB target; with targets, of sources; - is standard input",
        flag="--data",
        short="File of sentence pairs, source TAB target; with --targets, of sources; - is standard input.",
    )
    targets: str = option("", "file of targets, one line per source", flag="--targets")  # fmt: skip
    valid: str = option("", "file of pairs to validate with; by default, some of data are held out", flag="--valid",
                        short="File of pairs to validate with; by default, some of --data are held out.")  # fmt: skip
    valid_targets: str = option("", "file of targets, one line per source of valid", flag="--valid-targets",
                                short="File of targets, one line per source of --valid.")  # fmt: skip
    held_out: int = option(1000, "sources to hold out for validation; by default, at most a tenth", ge=1)
    max_length: int = option(100, "maximum number of words of a sentence; pairs with longer ones are skipped", ge=1)
    duplicates: bool = option(False, "keep repeated training pairs")
    max_unknown: float = unknown_option()
    alignments: str = option("", "file of word alignments in Pharaoh format, one line per pair, that guide attention",
                             flag="--alignments")  # fmt: skip
    tokenized: bool = option(
        False, "the alignments count words separated by spaces; otherwise, punctuation marks count as words"
    )
    align: bool = option(
        False, "align the words of the training pairs first, and guide attention by the alignments", flag="--align"
    )
    aligner: str = option("lexical", "aligner for align", choices=ALIGNERS)
    #: Raffel 2020, arXiv 1910.10683.
    span_share: float = option(0.15, "span-corruption: share of tokens to hide", gt=0, lt=1)
    span_length: float = option(3.0, "span-corruption: mean tokens of a hidden span", ge=1)

    def check(self) -> None:
        """Raise where options contradict each other, or one has no effect."""
        piped = [name for name in FILES if getattr(self, name) == "-"]
        if len(piped) > 1:
            expected = "be a file where standard input is something else"
            raise rejected("options", piped[1], expected, f"- as {piped[0]} is")
        for name, needed in (("targets", "data"), ("valid_targets", "valid")):
            if getattr(self, name) and not getattr(self, needed):
                raise rejected("options", needed, f"be given with {name}", "none")
        if self.alignments:
            self.require_default("align", "where data.alignments are given")
        else:
            self.require_default("tokenized", "without data.alignments")
        if not self.align:
            self.require_default("aligner", "without data.align")
        if self.valid:
            self.require_default("held_out", "where valid is given")


@dataclass(frozen=True)
class ExperimentOptions(RunOptions):
    """All options of a run."""

    determined: ClassVar[frozenset[str]] = frozenset({"sources", "targets"})

    task: str = option("translation", "translation, pronunciation or span-corruption", choices=TASKS)
    data: DataOptions = section(DataOptions, "the sentence pairs")
    vocabularies: VocabularyOptions = section(VocabularyOptions, "how texts are tokenized")
    kind: str = option("recurrent", "type of the model: recurrent or transformer", choices=MODELS, flag="--model")
    preset: str = option(
        "base", "size of the model: small or base, or a published one such as vaswani2017-base", flag="--preset"
    )
    model: dict[str, Any] = option({}, "fields of the model's config that replace the preset's")
    training: TrainingOptions = section(TrainingOptions, "how to train")
    start: str = option("", "folder of a model whose parameters and vocabularies to start from", flag="--start")

    def check(self) -> None:
        """Raise where options contradict each other, or one has no effect."""
        guided = self.data.alignments or self.data.align
        if guided and not self.training.guide:
            raise rejected("options", "training.guide", "be above 0 where links are to guide attention", 0.0)
        if not guided:
            with in_section("training"):
                self.training.require_default("guided", "without data.alignments or data.align")
        if self.vocabularies.rewrite:
            with in_section("data"):
                self.data.require_default("alignments", "with vocabularies.rewrite, which changes the words they count")
        for place, where in TASKS[self.task].refused.items():
            part, _, name = place.partition(".")
            with in_section(part):
                getattr(self, part).require_default(name, where)

    def with_absolute_paths(self) -> Self:
        """Return the options with the files' names from the root on."""
        files: dict[str, Any] = {name: absolute_path(getattr(self.data, name)) for name in FILES}
        return replace(self, start=absolute_path(self.start), data=replace(self.data, **files))

    def model_config(self, sources: int = 8, targets: int = 8) -> Any:
        """Return the model's config for vocabularies of these sizes, or raise where an option is wrong."""
        return self.preset_config(MODELS[self.kind][0], sources, targets)

    def check_model(self) -> None:
        """Raise if a field in ``model`` has no effect with the other fields."""
        config = self.model_config()
        if isinstance(config, RecurrentConfig):
            used = {"window": config.scope != "global", "max_length": config.attention == "location"}
            needed = {"window": "scope 'local-m' or 'local-p'", "max_length": "attention 'location'"}
        else:
            used = {"max_length": config.positions == "learned" or config.score == "location"}
            needed = {"max_length": "positions 'learned' or score 'location'"}
        for name, value in self.model.items():
            if not used.get(name, True):
                raise rejected("train", f"model.{name}", f"be left out without {needed[name]}", value)
