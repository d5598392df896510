"""What a run is asked for: data, vocabularies, model and training, from and to a table of TOML."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from regard._errors import described, in_section, rejected, unknown_name
from regard.alignment.aligners import ALIGNERS
from regard.models import RecurrentConfig
from regard.models.registry import MODELS
from regard.text.subwords import SUBWORDS
from regard.training.options import TrainingOptions
from regard.translation.tasks import VocabularyOptions

#: What a table of options has beside the tables of data, vocabularies and training.
_PLAIN = ("task", "start", "kind", "preset", "model")


#: The options of data that name files.
FILES = ("data", "targets", "valid", "valid_targets", "alignments")


@dataclass(frozen=True)
class DataOptions:
    """Where the pairs come from.

    Attributes
    ----------
    data : str
        A file of pairs separated by a tab; or, with ``targets``, of sources; "-" is standard input.
    targets : str
    valid, valid_targets : str
        The same to validate with; by default ``held_out`` sources are held out of the data.
    held_out : int
        By default at most a tenth of the sources.
    longest : int
        The most words that a side may have.
    duplicates : bool
        Whether to keep pairs to learn from that are identical to an earlier one: a pair given twice counts twice.
    alignments : str
        A file with the links of each line's words, in Pharaoh's format, that guide attention.
    tokenized : bool
        Whether these links count what spaces separate, not words and signs.
    align : bool
        Whether to make such links of the pairs to learn from.
    aligner : str
        What makes them: one of :data:`regard.alignment.aligners.ALIGNERS`.
    """

    data: str = ""
    targets: str = ""
    valid: str = ""
    valid_targets: str = ""
    held_out: int = 1000
    longest: int = 100
    duplicates: bool = False
    alignments: str = ""
    tokenized: bool = False
    align: bool = False
    aligner: str = "lexical"

    def __post_init__(self) -> None:
        piped = [name for name in FILES if getattr(self, name) == "-"]
        if len(piped) > 1:
            raise rejected("train", piped[1], "be a file where standard input is something else", f"- as {piped[0]} is")
        if self.targets and not self.data:
            raise rejected("train", "data", "be given with targets", "none")
        if self.valid_targets and not self.valid:
            raise rejected("train", "valid", "be given with valid_targets", "none")
        for name in ("held_out", "longest"):
            if getattr(self, name) < 1:
                raise rejected("train", name, "be at least 1", getattr(self, name))
        if self.aligner not in ALIGNERS:
            raise unknown_name("train", "data.aligner", self.aligner, ALIGNERS)
        if self.alignments and self.align:
            raise rejected("train", "data.align", "be left out where data.alignments are given", True)
        if not self.alignments:
            _left_out("data.tokenized", "without data.alignments", self.tokenized, False)
        if not self.align:
            _left_out("data.aligner", "without data.align", self.aligner, DataOptions.aligner)
        if self.valid:
            _left_out("data.held_out", "where valid is given", self.held_out, DataOptions.held_out)


@dataclass(frozen=True)
class ExperimentOptions:
    """Everything that a run is asked for.

    Attributes
    ----------
    task : str
    data : DataOptions
    vocabularies : VocabularyOptions
    kind : str
        Of the model: one of :data:`regard.models.registry.MODELS`.
    preset : str
    model : dict
        Fields of the model's config, in place of the preset's.
    training : TrainingOptions
    start : str
        The folder of a model whose parameters and vocabularies the run begins with, if there is one.
    """

    task: str = "translation"
    data: DataOptions = field(default_factory=DataOptions)
    vocabularies: VocabularyOptions = field(default_factory=VocabularyOptions)
    kind: str = "recurrent"
    preset: str = "base"
    model: dict[str, Any] = field(default_factory=dict)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    start: str = ""

    def __post_init__(self) -> None:
        guided = self.data.alignments or self.data.align
        if guided and not self.training.guide:
            raise rejected("train", "training.guide", "be above 0 where links are to guide attention", 0.0)
        if not guided:
            _left_out("training.guided", "without data.alignments or data.align", self.training.guided, "")
        for name in ("alignments", "align") if self.task == "pronunciation" else ():
            where = "for pronunciation, where letters and phonemes are the symbols"
            _left_out(f"data.{name}", where, getattr(self.data, name), getattr(DataOptions, name))
        for name in ("kind", "size", "joint", "dropout") if self.task == "pronunciation" else ():
            where = "for pronunciation, where letters and phonemes are the symbols"
            _left_out(f"vocabularies.{name}", where, getattr(self.vocabularies, name), getattr(VocabularyOptions, name))
        if self.vocabularies.kind not in SUBWORDS:
            raise unknown_name("options", "vocabularies.kind", self.vocabularies.kind, SUBWORDS)
        if self.vocabularies.kind == "characters":
            size = self.vocabularies.size
            _left_out("vocabularies.size", "for characters, all of which count", size, VocabularyOptions.size)
        dropout = self.vocabularies.dropout
        if self.vocabularies.kind != "bpe":
            _left_out("vocabularies.dropout", "but for bpe, which has merges", dropout, VocabularyOptions.dropout)
        if not 0 <= dropout < 1:
            raise rejected("options", "vocabularies.dropout", "be in [0, 1)", dropout)

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> Self:
        """Return the options that a table of TOML holds; raise where a name is unknown or a value wrong."""
        table = dict(table)
        kinds: dict[str, Any] = {"data": DataOptions, "vocabularies": VocabularyOptions, "training": TrainingOptions}
        made: dict[str, Any] = {}
        for name, kind in kinds.items():
            given = dict(_table("options", name, table.pop(name, {})))
            known = {each.name: type(each.default) for each in fields(kind)}
            for key, value in given.items():
                if key not in known:
                    raise unknown_name("options", f"{name}.{key}", key, known)
                if known[key] is float and type(value) is int:
                    given[key] = float(value)
                elif name != "training" and type(value) is not known[key]:
                    raise rejected(
                        "options", f"{name}.{key}", f"be of type {known[key].__name__}", described(value), TypeError
                    )
            with in_section(name):
                made[name] = kind(**given)
        _table("options", "model", table.get("model", {}))
        for key in table:
            if key not in _PLAIN:
                raise unknown_name("options", "name", key, (*_PLAIN, *kinds))
            if key != "model" and not isinstance(table[key], str):
                raise rejected("options", key, "be of type str", described(table[key]), TypeError)
        return cls(**made, **table)

    def to_table(self) -> dict[str, Any]:
        """Return a table of TOML."""
        return asdict(self)

    def flat(self) -> dict[str, Any]:
        """Return all options by their places, such as ``training.clip``."""
        flat: dict[str, Any] = {}
        for name, value in self.to_table().items():
            flat |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
        return flat

    def with_absolute_paths(self) -> Self:
        """Return the options with the files' names from the root on."""
        files: dict[str, Any] = {name: _absolute(getattr(self.data, name)) for name in FILES}
        return replace(self, start=_absolute(self.start), data=replace(self.data, **files))

    def model_config(self, sources: int, targets: int) -> Any:
        """Return the model's config for vocabularies of these sizes, or raise where an option is wrong."""
        if self.kind not in MODELS:
            raise unknown_name("train", "kind", self.kind, MODELS)
        config, _ = MODELS[self.kind]
        known = {each.name for each in fields(config)} - {"sources", "targets"}
        for name in self.model:
            if name not in known:
                raise unknown_name(config.__name__, f"model.{name}", name, known)
        with in_section("model"):
            return config.preset(self.preset, sources, targets, **self.model)

    def unset_model_fields(self) -> dict[str, Any]:
        """Return the fields of the model that were not asked for, as the preset has them."""
        fixed = {"sources", "targets", *self.model}
        config = asdict(self.model_config(8, 8))
        return {name: value for name, value in config.items() if name not in fixed and value is not None}

    def check_model(self) -> None:
        """Raise where a field of the model was asked for that has no effect beside the others."""
        config = self.model_config(8, 8)
        if isinstance(config, RecurrentConfig):
            used = {"window": config.scope != "global", "longest": config.attention == "location"}
            needed = {"window": "scope 'local-m' or 'local-p'", "longest": "attention 'location'"}
        else:
            used = {"longest": config.positions == "learned" or config.score == "location"}
            needed = {"longest": "positions 'learned' or score 'location'"}
        for name, value in self.model.items():
            if not used.get(name, True):
                raise rejected("train", f"model.{name}", f"be left out without {needed[name]}", value)


def _absolute(name: str) -> str:
    return str(Path(name).absolute()) if name not in ("", "-") else name


def _left_out(name: str, where: str, value: Any, default: Any) -> None:
    """Raise where an option is given that would have no effect."""
    if value != default:
        raise rejected("train", name, f"be left out {where}", repr(value))


def _table(function: str, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise rejected(function, name, "be a table of options", repr(value))
    return value
