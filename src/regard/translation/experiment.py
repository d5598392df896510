"""From files of pairs to a model in a folder, where everything that a run was asked for is kept, to go on with it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regard._errors import RegardWarning, in_section, rejected, unknown_name
from regard._writing import write_atomically
from regard.alignment.attention import best_map
from regard.alignment.guidance import Guidance
from regard.data.batches import Batches
from regard.data.pairs import Pairs, read_pairs, split
from regard.data.toml import read_toml
from regard.decoding.beam_search import SearchOptions
from regard.decoding.predictions import WritingOptions, Written, cut
from regard.decoding.sequence_model import SequenceModel
from regard.models import EncoderDecoder, RecurrentConfig
from regard.models.folders import CONFIG, OPTIONS, ModelFileError, read_json
from regard.models.registry import MODELS
from regard.text.ragged import Ragged
from regard.text.sentences import PARAGRAPHS, sentences
from regard.text.vocabulary import Codec
from regard.training.frequencies import Frequencies
from regard.training.threads import set_threads
from regard.translation.options import DataOptions, ExperimentOptions
from regard.translation.tasks import Task, task_of
from regard.translation.warm_start import begin

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from regard.training.loop import Ended

#: From this share of lines of several sentences on, a model learns to read such lines, and is given them whole.
_SEVERAL = 0.1
#: How often the training texts are split where that is drawn.
_SPLITS = 4
#: What a run's folder holds beside checkpoints, log, model and options: what it began with.
BEGUN, SOURCE, TARGET = "run.json", "source.json", "target.json"
_BEGUN = ("data", "valid", "threads", "bfloat16", "options")


class Experiment:
    """A run in a folder.

    Parameters
    ----------
    options : ExperimentOptions
    folder : str or Path
    say : callable
        Called with every line that a user should read.
    """

    def __init__(self, options: ExperimentOptions, folder: str | Path, say: Callable[[str], None] = print) -> None:
        # A run is resumed from anywhere.
        data = options.data
        self.options = replace(options, start=_absolute(options.start), data=replace(
            data, data=_absolute(data.data), targets=_absolute(data.targets), valid=_absolute(data.valid),
            valid_targets=_absolute(data.valid_targets), alignments=_absolute(data.alignments),
        ))  # fmt: skip
        self.folder = Path(folder)
        self.say = _once(say)
        self._said: set[str] = set()
        self.task: Task = task_of(options.task)
        if options.kind not in MODELS:
            raise unknown_name("train", "kind", options.kind, MODELS)
        config = self._config(8, 8)  # what is wrong with it is said before anything is read
        self._guidance = Guidance(self.options, self.folder, config)
        if getattr(config, "tied", None) == "all" and not options.vocabularies.joint:
            raise rejected("train", "model.tied", "be 'none' or 'target' without a joint vocabulary", "'all'")
        if options.training.metric not in ("loss", *self.task.names):
            expected = f"be loss or one of {', '.join(self.task.names)} for {options.task}"
            raise rejected("train", "training.metric", expected, repr(options.training.metric))
        _, world = _place()
        if world != options.training.devices:
            expected = f"be {world}, as many as torchrun has started" if world > 1 else "be 1 without torchrun"
            raise rejected("train", "training.devices", expected, options.training.devices)

    @classmethod
    def resumed(cls, folder: str | Path, changes: dict[str, Any], say: Callable[[str], None] = print) -> Experiment:
        """Return the run in a folder, to go on; ``changes`` are options of training that may differ now.

        What may change may also be changed in the folder's options file.
        """
        folder = Path(folder)
        if not (folder / OPTIONS).exists():
            raise rejected("resume", str(folder), "be the folder of a run", f"no {OPTIONS} in it")
        before = ExperimentOptions.from_table(_read(folder / BEGUN, _BEGUN)["options"])
        edited = ExperimentOptions.from_table(read_toml(folder / OPTIONS))
        say = _once(say)
        with in_section("training"):
            training = edited.training.with_changes(changes)
            changed = training.resumable(before.training)
        for name in changed:
            say(f"{name} is now {getattr(training, name)}, was {getattr(before.training, name)}")
        had, has = _flat(before), _flat(edited)
        for name in sorted(had.keys() | has.keys()):
            if had.get(name) != has.get(name):
                expected = f"be {had.get(name)!r}, as the run that is resumed began"
                raise rejected("resume", f"{name} in {folder / OPTIONS}", expected, repr(has.get(name)))
        return cls(replace(before, training=training), folder, say)

    def train(self, *, resume: bool = False, callbacks: Iterable[Callback] = ()) -> tuple[SequenceModel, Ended]:
        """Read the data, train, and save the model to the folder.

        Raises
        ------
        ValueError
            If a file or an option is wrong, the folder holds another run, or the data is not that of the run.
        TrainingError
            If training cannot go on.
        """
        from regard.training.checkpoints import CHECKPOINTS, LAST
        from regard.training.interrupts import unbroken
        from regard.training.learner import Learner, Stream, TrainingError, is_bfloat16
        from regard.training.loop import check_devices, train

        training = self.options.training
        check_devices(training)
        if not resume:
            self.check_new(", or be resumed (--resume)")
        elif not (self.folder / CHECKPOINTS / LAST).exists():
            expected = "have been saved once to be resumed; begin anew"
            raise rejected("resume", str(self.folder), expected, f"no {CHECKPOINTS}/{LAST} in it")
        if training.threads:
            set_threads(training.threads)
        learn, valid = self._pairs(resume)
        self._valid = valid
        start = SequenceModel.load(self.options.start) if self.options.start and not resume else None
        here = {"threads": torch.get_num_threads(), "bfloat16": is_bfloat16(training.precision)}
        if resume:
            source, target = self._resumed(learn, valid, here)
        else:
            source, target = self._begun(learn, valid, here, start)
        torch.manual_seed(training.seed)
        model = MODELS[self.options.kind][1](self._config(len(source), len(target)))
        guided = self._guidance.map_of(model, training.guided)
        if start is not None:
            begin(model, start)
        count = sum(parameter.numel() for parameter in model.parameters())
        self.say(
            f"{self.options.kind} model, {count:,} parameters, vocabularies of {len(source):,} and {len(target):,}"
        )
        rank, world = _place()
        writer = SequenceModel(model, source, target, self._about(learn))
        numbers, rows = self._numbers(learn, writer, sampled=True)
        checks, _ = self._numbers(valid, writer, sampled=False)
        sharing: dict[str, Any] = {"seed": training.seed, "rank": rank, "world": world}
        guide = self._guidance.guide(learn, (source, target), numbers, rows)
        if guide is not None:
            self.say(str(self._guidance))
        batches = Batches(*numbers, tokens=training.batch_tokens, links=guide, **sharing)
        once = Batches(*checks, tokens=training.batch_tokens, **sharing)
        self.say(f"an epoch has {batches.per_epoch:,} batches")
        frequencies = Frequencies.of(numbers[1], len(target))
        if start is None:
            frequencies.set_bias(model)
        guess = frequencies.loss(checks[1])
        learner = Learner(model, training, Stream(batches.batch), self._score(writer, valid), guess, guided)
        ended = train(learner, list(once.once()), training, self.folder, resume=resume, callbacks=callbacks)
        if ended.reason != "interrupt" and rank == 0:
            writer.model.eval()
            aligning = guided or best_map(writer, learn, valid)
            if len(model.maps) > 1 and aligning:
                self.say(f"words are aligned by {aligning}")
                writer.about["aligning"] = aligning
            writer.about["training"] = {
                "pairs": len(learn),
                "steps": ended.steps,
                "seconds": round(ended.seconds, 1),
                "seed": training.seed,
                "threads": torch.get_num_threads(),
                "best": ended.best if math.isfinite(ended.best) else None,
            }
            try:
                with unbroken():
                    writer.save(self.folder)
            except OSError as error:
                raise TrainingError(
                    f"train: {self.folder} must take the model, got {error.strerror or error}; the training is done, "
                    "and its checkpoints are whole: mend that, and get the model with --resume."
                ) from error
        return writer, ended

    def check_new(self, otherwise: str = "") -> None:
        """Raise ValueError if it is a file, or holds what training would overwrite: a run, or a model."""
        from regard.training.checkpoints import CHECKPOINTS, LAST

        if self.folder.is_file():
            raise rejected("train", "out", "be a new folder", f"a file, {self.folder}")
        if (self.folder / CHECKPOINTS / LAST).exists():
            raise rejected("train", "out", f"be a new folder{otherwise}", f"{self.folder}, which has a run")
        if (self.folder / CONFIG).exists():
            raise rejected("train", "out", "be a new folder", f"{self.folder}, which has a model")

    def _numbers(
        self, pairs: Pairs, writer: SequenceModel, *, sampled: bool
    ) -> tuple[tuple[Ragged, Ragged], np.ndarray]:
        """Return the pairs as numbers, and which they are; what the model is too short for is left out, and told."""
        sides = ((writer.source, pairs.sources), (writer.target, pairs.targets))
        dropout, seed = self.options.vocabularies.dropout, 2 * self.options.training.seed
        if sampled and dropout:
            sources, targets = (
                codec.sample_all(texts, dropout, seed + side, _SPLITS) for side, (codec, texts) in enumerate(sides)
            )
        else:
            sources, targets = (codec.encode_all(texts) for codec, texts in sides)
        fits = np.ones(len(sources), bool)
        for ragged, most in zip((sources, targets), writer.longest):
            fits &= True if most is None else ragged.lengths <= most
        fit = np.flatnonzero(fits)
        if len(fit) < len(fits):
            each = f", each split in {_SPLITS} ways" if len(fits) > len(pairs) else ""
            self.say(
                f"left out, longer than model.longest allows: {len(fits) - len(fit):,} of {len(fits):,} pairs{each}"
            )
        if not len(fit):
            raise rejected("train", "model.longest", "be at least the length of some pair in tokens", "less than any")
        return (sources.take(fit), targets.take(fit)), fit

    def scores(self, writer: SequenceModel) -> dict[str, float]:
        """Return the task's scores of a model on the sources that the training held out, by beam search."""
        references = self._valid.references()
        return self._told(writer.write(references, WritingOptions(SearchOptions())), references)

    def _pairs(self, resume: bool) -> tuple[Pairs, Pairs]:
        """Return the pairs to learn from and to validate with."""
        data, lowercase = self.options.data, self.options.vocabularies.lowercase
        if not data.data:
            raise rejected("train", "data", "be given: a file of pairs separated by a tab", "none")
        reading: dict[str, Any] = {"words": data.longest, "lowercase": lowercase}
        learn = read_pairs(data.data, data.targets or None, duplicates=data.duplicates, **reading)
        for line in learn.report():
            self.say(line)
        if not resume:
            self._guidance.read(learn)
        if data.valid:
            valid = read_pairs(data.valid, data.valid_targets or None, **reading)
            for line in valid.report():
                self.say(line)
            known, held = set(learn.sources), set(valid.sources)
            if known & held:
                self.say(
                    f"{len(known & held):,} of the {len(held):,} sources to validate with are also to learn from: "
                    "scores of validations are better than those of new sentences"
                )
        else:
            count = data.held_out
            if count == DataOptions.held_out:
                count = min(count, max(1, len(set(learn.sources)) // 10))
            learn, valid = split(learn, count)
            self.say(f"held out to validate: {len(set(valid.sources)):,} sources with {len(valid):,} targets")
        return learn, valid

    def _resumed(self, learn: Pairs, valid: Pairs, here: dict[str, Any]) -> tuple[Codec, Codec]:
        """Return the codecs that the run began with, and make this process as those were that it began in."""
        begun = _read(self.folder / BEGUN, _BEGUN)
        for name, mark in (("data", _mark(learn)), ("valid", _mark(valid))):
            if begun.get(name) != mark:
                raise rejected("resume", name, "be the pairs that the run began with", "others")
        self._guidance.find(learn, begun.get("links", ""))
        # The order of sums, and so their last bits, goes by the number of threads.
        if begun["threads"] != here["threads"]:
            self.say(f"threads: {begun['threads']}, as the run began")
            set_threads(begun["threads"])
        if begun["bfloat16"] != here["bfloat16"]:
            was, now = ("bfloat16" if narrow else "float32" for narrow in (begun["bfloat16"], here["bfloat16"]))
            self.say(f"matrix products were in {was} where the run began and are in {now} here: the bits will differ")
        source, target = (
            Codec.from_json(_read(self.folder / name), str(self.folder / name)) for name in (SOURCE, TARGET)
        )
        self._write(begun)  # what was changed stays changed when the run is resumed again
        return source, target

    def _begun(
        self, learn: Pairs, valid: Pairs, here: dict[str, Any], start: SequenceModel | None
    ) -> tuple[Codec, Codec]:
        """Return codecs that are learned, or those of a model, and write what the run begins with."""
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", RegardWarning)
            source, target = (
                self.task.codecs(learn, self.options.vocabularies) if start is None else (start.source, start.target)
            )
        for each in told:
            self.say(str(each.message).partition(": ")[2])
        if _place()[0] == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, codec in ((SOURCE, source), (TARGET, target)):
                write_atomically(self.folder / name, json.dumps(codec.to_json(), ensure_ascii=False).encode())
        mark = self._guidance.find(learn, keep=_place()[0] == 0)
        self._write({"data": _mark(learn), "valid": _mark(valid), "links": mark, **here})
        return source, target

    def _write(self, begun: dict[str, Any]) -> None:
        """Write the options as a person may edit them, and beside what else the run began with as it was."""
        if _place()[0] == 0:
            import tomli_w

            table = self.options.to_table()
            write_atomically(self.folder / BEGUN, json.dumps({**begun, "options": table}, indent=1).encode())
            # Last: a folder that has it is a run's.
            write_atomically(self.folder / OPTIONS, tomli_w.dumps(table).encode())

    def _config(self, sources: int, targets: int) -> Any:
        """Return the model's config for vocabularies of these sizes, or raise where an option is wrong."""
        config, _ = MODELS[self.options.kind]
        known = {each.name for each in fields(config)} - {"sources", "targets"}
        for name in self.options.model:
            if name not in known:
                raise unknown_name(config.__name__, f"model.{name}", name, known)
        with in_section("model"):
            return config.preset(self.options.preset, sources, targets, **self.options.model)

    def defaults(self) -> dict[str, Any]:
        """Return the fields of the model that were not asked for, as the preset has them."""
        fixed = {"sources", "targets", *self.options.model}
        config = asdict(self._config(8, 8))
        return {name: value for name, value in config.items() if name not in fixed and value is not None}

    def check_model(self) -> None:
        """Raise where a field of the model was asked for that has no effect beside the others."""
        config = self._config(8, 8)
        if isinstance(config, RecurrentConfig):
            used = {"window": config.scope != "global", "longest": config.attention == "location"}
            needed = {"window": "scope 'local-m' or 'local-p'", "longest": "attention 'location'"}
        else:
            used = {"longest": config.positions == "learned" or config.score == "location"}
            needed = {"longest": "positions 'learned' or score 'location'"}
        for name, value in self.options.model.items():
            if not used.get(name, True):
                raise rejected("train", f"model.{name}", f"be left out without {needed[name]}", value)

    def _score(self, writer: SequenceModel, valid: Pairs) -> Callable[[EncoderDecoder], dict[str, float]]:
        """Return what a validation asks beside the loss: greedy search for some of the held-out sources."""
        references = dict(list(valid.references().items())[: self.options.training.validate_most])
        options = WritingOptions(SearchOptions(beams=1))

        return lambda _: self._told(writer.write(references, options), references)

    def _told(self, written: Sequence[Written], references: dict[str, list[str]]) -> dict[str, float]:
        """Return the task's scores, and say once what was cut."""
        for line in cut(written):
            if line not in self._said:
                self._said.add(line)
                self.say(line)
        return self.task.scores([each.text for each in written], list(references.values()))

    def _about(self, learn: Pairs) -> dict[str, Any]:
        """Return what the model's folder tells of it, from the start on: validations go by it, too."""
        several = sum(len(sentences(text)) > 1 for text in learn.sources) >= _SEVERAL * len(learn)
        return {"task": self.options.task} | ({"lines": PARAGRAPHS} if several else {})


def _read(path: Path, names: Iterable[str] = ()) -> dict[str, Any]:
    """Return what a JSON file of a run holds, with these names in it."""
    try:
        found = read_json(path)
    except ModelFileError:
        found = None
    if not isinstance(found, dict) or not found.keys() >= set(names):
        raise rejected("resume", str(path), "be the file that the run began with", "one that is damaged")
    return found


def _flat(options: ExperimentOptions) -> dict[str, Any]:
    """Return all options but those of training, by their places."""
    found: dict[str, Any] = {}
    for name, value in options.to_table().items():
        section = {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
        found |= section if name != "training" else {}
    return found


def _mark(pairs: Pairs) -> str:
    """Return a checksum of pairs in their order."""
    return hashlib.blake2b("\n".join(f"{s}\t{t}" for s, t in pairs).encode(), digest_size=16).hexdigest()


def _once(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return what says it in one process alone."""
    return say if _place()[0] == 0 else lambda _: None


def _absolute(name: str) -> str:
    return str(Path(name).absolute()) if name not in ("", "-") else name


def _place() -> tuple[int, int]:
    """Return this process's number and how many there are, as torchrun says."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
