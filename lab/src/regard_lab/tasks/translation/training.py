"""Training of encoder–decoders on pairs: run folders, warm starts from another model, and the run."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regard._utils.errors import RegardWarning, rejected
from regard._utils.files import write_atomically
from regard_lab.data.batches import Batches
from regard_lab.data.corruption import hide_spans
from regard_lab.data.pairs import Pairs, split_pairs
from regard_lab.generation.beam_search import SearchOptions
from regard_lab.generation.predictions import Prediction, PredictionOptions, report_truncated
from regard_lab.generation.sequence_model import REWRITING, SOURCE, TARGET, SequenceModel
from regard_lab.models import EncoderDecoder
from regard_lab.models.registry import MODELS
from regard_lab.tasks.translation.alignment.attention import best_map
from regard_lab.tasks.translation.alignment.guidance import Guidance
from regard_lab.tasks.translation.options import DataOptions, ExperimentOptions
from regard_lab.tasks.translation.tasks import SpanCorruption, Task, Translation, get_task
from regard_lab.text.ragged import Ragged
from regard_lab.text.rewriting import PLACES, Rewriting
from regard_lab.text.unknown import check_unknown
from regard_lab.text.vocabulary import Vocabulary
from regard_lab.text.words import PARAGRAPHS, sentences
from regard_lab.training.objectives import Frequencies, Seq2SeqObjective
from regard_lab.training.run import FolderRun, RunFolder, place, restore_conditions, save_unbroken

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from regard_lab.training.loop import TrainingResult


# Run folders ----------------------------------------------------------------------------------------------------------


class PairRunFolder(RunFolder[ExperimentOptions]):
    """The files of a run on pairs.

    Parameters
    ----------
    path : Path
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, ExperimentOptions)

    def read_vocabularies(self) -> tuple[Vocabulary, Vocabulary]:
        """Return the run's vocabularies."""
        read = (Vocabulary.from_json(self.read_table(name), str(self.path / name)) for name in (SOURCE, TARGET))
        source, target = read
        return source, target

    def read_rewriting(self) -> Rewriting:
        """Return how the run rewrites texts."""
        return Rewriting.from_json(self.read_table(REWRITING), str(self.path / REWRITING))

    def write_rewriting(self, rewriting: Rewriting) -> None:
        """Write how a new run rewrites texts."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / REWRITING, json.dumps(rewriting.to_json(), ensure_ascii=False).encode())

    def write_vocabularies(self, source: Vocabulary, target: Vocabulary) -> None:
        """Write the vocabularies of a new run."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name, vocabulary in ((SOURCE, source), (TARGET, target)):
            write_atomically(self.path / name, json.dumps(vocabulary.to_json(), ensure_ascii=False).encode())


# Warm start: training from the parameters and vocabularies of another model -------------------------------------------


#: Fields of a model's config that do not affect its parameters.
_FREE = ("dropout", "attention_dropout", "activation_dropout")


def inherit_options(table: Mapping[str, Any], start: SequenceModel) -> dict[str, Any]:
    """Return the options completed with those that the start model determines.

    Raises
    ------
    ValueError
        If the options contradict the start model.
    """
    made = dict(table)
    task = start.about.get("task", made["task"])
    # Span corruption can be fine-tuned to translation, but not the other way round: sentinels would be missing.
    if task != made["task"] and not (task == SpanCorruption.name and made["task"] == Translation.name):
        raise rejected("train", "start", f"be a model for {made['task']}", f"one for {task}")
    if made.setdefault("kind", start.kind) != start.kind:
        raise _settled("kind", start.kind, made["kind"])
    config = start.model.config
    preset = made.setdefault("preset", ExperimentOptions.preset)
    usual = asdict(config.preset(preset, config.sources, config.targets))
    own = {name: value for name, value in asdict(config).items() if value != usual[name]}
    given = made.get("model", {})
    for name, value in own.items():
        if "preset" in table and isinstance(given, dict) and name not in (*given, *_FREE):
            expected = "be the start model's preset, or be left out"
            raise rejected("train", "preset", expected, f"{preset!r}, whose {name} is {usual[name]!r}, not {value!r}")
    vocabularies = _vocabularies(start)
    sections = (("model", asdict(config), own), ("vocabularies", vocabularies, vocabularies))
    for section, known, missing in sections:
        given = made.get(section, {})
        if not isinstance(given, dict):
            continue  # reported later
        for name, value in given.items():
            if name in known and name not in _FREE and value != known[name]:
                raise _settled(f"{section}.{name}", known[name], value)
        made[section] = {**missing, **given}
    return made


def copy_parameters(model: EncoderDecoder, start: SequenceModel) -> None:
    """Copy the parameters of the start model.

    Raises
    ------
    ValueError
        If the configs differ in fields that affect parameters.
    """
    free = {name: value for name, value in asdict(model.config).items() if name in _FREE}
    if replace(start.model.config, **free) != model.config:
        raise rejected("train", "start", f"have the config {model.config}", start.model.config)
    model.load_state_dict(start.model.state_dict())


def _vocabularies(start: SequenceModel) -> dict[str, Any]:
    source, target = start.source.to_json(), start.target.to_json()
    if target["kind"] == "symbols":
        return {}
    options = {"kind": target["kind"], "joint": source == target, "lowercase": start.target.lowercase}
    options["rewrite"] = start.rewriting is not None
    if start.rewriting is not None:
        options["languages"] = "-".join(filter(None, start.rewriting.languages))
    return options if target["kind"] == "characters" else options | {"size": len(start.target)}


def _settled(name: str, known: Any, got: Any) -> Exception:
    return rejected("train", name, f"be {known!r}, as in the start model", repr(got))


# The run --------------------------------------------------------------------------------------------------------------


#: If at least this share of training lines has several sentences, the model translates whole lines.
_SEVERAL = 0.1
#: Number of sampled tokenizations of each training text.
_SPLITS = 4


def rewritten(pairs: Pairs, rewriting: Rewriting) -> Pairs:
    """Return pairs as a model reads and writes them; each row begins with another placeholder."""
    sources, targets = [], []
    for row, pair in enumerate(pairs):
        source, target = rewriting.read_pair(*pair, row % PLACES)
        sources.append(source.placed.text)
        targets.append(target.placed.text)
    return replace(pairs, sources=sources, targets=targets)


def _found(pairs: Pairs, texts: Sequence[str], rows: np.ndarray, row: int) -> tuple[str, str]:
    """Return the place of a tokenized text in the data, and the text."""
    number = int(rows[row]) % len(pairs)
    return pairs.place(number), texts[number]


class Experiment(FolderRun[ExperimentOptions]):
    """A training run of an encoder–decoder on pairs."""

    task: Task

    def __init__(self, options: ExperimentOptions, folder: str | Path, say: Callable[[str], None] = print) -> None:
        super().__init__(options, folder, say)
        self._reported: set[str] = set()

    @classmethod
    def files(cls, folder: str | Path) -> PairRunFolder:
        return PairRunFolder(Path(folder))

    def check(self) -> None:
        options = self.options
        self.task = get_task(options.task)
        config = options.model_config()
        self._guidance = Guidance(options, self.folder, config)
        if getattr(config, "tied", None) == "all" and not (options.vocabularies.joint or self.task.joint):
            raise rejected("train", "model.tied", "be 'none' or 'target' without a joint vocabulary", "'all'")
        if options.training.metric not in ("loss", *self.task.names):
            expected = f"be {' or one of '.join(filter(None, ('loss', ', '.join(self.task.names))))} for {options.task}"
            raise rejected("train", "training.metric", expected, repr(options.training.metric))

    def train(
        self, *, resume: bool = False, callbacks: Iterable[Callback] = ()
    ) -> tuple[SequenceModel, TrainingResult]:
        """Read the data, train, and save the model to the folder.

        Raises
        ------
        ValueError
            If a file or an option is invalid, the folder holds another run, or the data changed since the run started.
        TrainingError
            If training fails.
        """
        training = self.options.training
        (_, here), files = self.open(resume), self.files(self.folder)
        learn, valid = self._pairs(resume)
        self._valid = valid
        start = SequenceModel.load(self.options.start) if self.options.start and not resume else None
        rewriting = self._rewriting(files, learn, start, resume=resume)
        marks = {"data": learn.checksum(), "valid": valid.checksum()}
        originals = learn, valid
        if rewriting is not None:
            learn, valid = rewritten(learn, rewriting), rewritten(valid, rewriting)
        if resume:
            source, target = self._resumed(files, learn, marks, here)
        else:
            source, target = self._vocabularies(learn, start)
        torch.manual_seed(training.seed)
        model = MODELS[self.options.kind][1](self.options.model_config(len(source), len(target)))
        guided = self._guidance.map_of(model, training.guided)
        if start is not None:
            copy_parameters(model, start)
        count = sum(parameter.numel() for parameter in model.parameters())
        self.say(
            f"{self.options.kind} model, {count:,} parameters, vocabularies of {len(source):,} (source) and "
            f"{len(target):,} (target)"
        )
        rank, world = place()
        sequence_model = SequenceModel(model, source, target, self._about(learn), rewriting)
        numbers, rows = self._numbers(learn, sequence_model, sampled=True)
        checks, kept = self._numbers(valid, sequence_model, sampled=False)
        if not resume:
            self._check_unknown(learn, (source, target), numbers, rows, self.options.data.max_unknown)
            self._check_unknown(valid, (source, target), checks, kept, 1.0)
            self._begin(files, learn, {**marks, **here}, sequence_model)
        sharing: dict[str, Any] = {"seed": training.seed, "rank": rank, "world": world}
        guide = self._guidance.guide(learn, (source, target), numbers, rows)
        if guide is not None:
            self.say(str(self._guidance))
        self.size_batches(sum(len(each) + int(each.lengths.sum()) for each in numbers), "tokens")
        training = self.options.training
        if rank == 0:
            files.write(files.read_record(), self.options)
        batches = Batches(*numbers, tokens=training.batch_tokens, links=guide, **sharing)
        once = Batches(*checks, tokens=training.batch_tokens, **sharing)
        self.say(f"an epoch has {batches.per_epoch:,} batches")
        frequencies = Frequencies.of(numbers[1], len(target))
        if start is None:
            frequencies.set_bias(model)
        guess = frequencies.loss(checks[1])
        objective = Seq2SeqObjective.of(training, guided)
        score = self._score(sequence_model, originals[1])
        ended = self.fit(
            model, batches.batch, list(once.once()), objective, score, guess, resume=resume, callbacks=callbacks
        )
        if ended.reason != "interrupt" and rank == 0:
            sequence_model.model.eval()
            aligning = guided or ("" if self.task.hides else best_map(sequence_model, *originals))
            self._save(sequence_model, ended, len(learn), aligning)
        return sequence_model, ended

    def _save(self, sequence_model: SequenceModel, ended: TrainingResult, pairs: int, aligning: str) -> None:
        """Save the model, with how it was trained and which attention map aligns words best."""
        if len(sequence_model.model.maps) > 1 and aligning:
            self.say(f"the attention map that aligns words best: {aligning}")
            sequence_model.about["aligning"] = aligning
        sequence_model.about["training"] = {
            "pairs": pairs,
            "steps": ended.steps,
            "seconds": round(ended.seconds, 1),
            "seed": self.options.training.seed,
            "threads": torch.get_num_threads(),
            "best": ended.best if math.isfinite(ended.best) else None,
        }
        save_unbroken(lambda: sequence_model.save(self.folder), self.folder)

    def _numbers(
        self, pairs: Pairs, sequence_model: SequenceModel, *, sampled: bool
    ) -> tuple[tuple[Ragged, Ragged], np.ndarray]:
        """Tokenize the pairs, and return the indices of those kept; skip and report pairs that are too long."""
        sides = ((sequence_model.source, pairs.sources), (sequence_model.target, pairs.targets))
        dropout, seed = self.options.vocabularies.dropout, 2 * self.options.training.seed
        if sampled and dropout:
            sources, targets = (
                vocabulary.sample_all(texts, dropout, seed + side, _SPLITS)
                for side, (vocabulary, texts) in enumerate(sides)
            )
        else:
            sources, targets = (vocabulary.encode_all(texts) for vocabulary, texts in sides)
        if self.task.hides:
            sources, targets = self._hidden(sources, sequence_model.source, sampled)
        fits = np.ones(len(sources), bool)
        for ragged, most in zip((sources, targets), sequence_model.max_lengths):
            fits &= True if most is None else ragged.lengths <= most
        fit = np.flatnonzero(fits)
        if len(fit) < len(fits):
            each = f", counting {_SPLITS} tokenizations of each" if len(fits) > len(pairs) else ""
            self.say(f"skipped, longer than model.max_length: {len(fits) - len(fit):,} of {len(fits):,} pairs{each}")
        if not len(fit):
            raise ValueError(
                "train: all pairs are longer than model.max_length tokens: raise it, or use shorter pairs."
            )
        return (sources.take(fit), targets.take(fit)), fit

    def _check_unknown(
        self,
        pairs: Pairs,
        vocabularies: Sequence[Vocabulary],
        numbers: Sequence[Ragged],
        rows: np.ndarray,
        most: float,
    ) -> None:
        """Report the symbols of each side that its vocabulary lacks; raise if they are a larger share."""
        names = ("text",) if self.task.hides else ("source", "target")
        for name, vocabulary, ragged, texts in zip(names, vocabularies, numbers, (pairs.sources, pairs.targets)):
            find = partial(_found, pairs, texts, rows)
            for line in check_unknown(name, vocabulary, [ragged.numbers], ragged.offsets[1:], find, most):
                self.say(line)

    def _hidden(self, texts: Ragged, vocabulary: Vocabulary, sampled: bool) -> tuple[Ragged, Ragged]:
        """Return texts with hidden spans, and the spans; training texts several times, with different spans."""
        from regard_lab.text.vocabulary import SubwordVocabulary

        assert isinstance(vocabulary, SubwordVocabulary)
        data, seed = self.options.data, self.options.training.seed
        spans_of_longest = round(round(data.span_share * int(texts.lengths.max())) / data.span_length)
        if spans_of_longest > len(vocabulary.sentinels):
            expected = f"be small enough for at most {len(vocabulary.sentinels)} spans per text"
            raise rejected(
                "train", "data.max_length", expected, f"{data.max_length}, which gives {spans_of_longest} spans"
            )
        spans: dict[str, Any] = {
            "share": data.span_share,
            "mean_length": data.span_length,
            "times": _SPLITS if sampled else 1,
        }
        return hide_spans(texts, vocabulary.sentinels, 2 * seed + sampled, **spans)

    def scores(self, sequence_model: SequenceModel) -> dict[str, float]:
        """Return the task's metrics on the held-out sources, with beam search."""
        references = self._valid.references()
        return self._scores_of(sequence_model.predict(references, PredictionOptions(SearchOptions())), references)

    def _pairs(self, resume: bool) -> tuple[Pairs, Pairs]:
        """Return the training and validation pairs."""
        data, lowercase = self.options.data, self.options.vocabularies.lowercase
        if not data.data:
            what = "text" if self.task.hides else "tab-separated pairs"
            raise ValueError(f"train: --data is required: a file of {what}.")
        reading: dict[str, Any] = {"words": data.max_length, "lowercase": lowercase}
        learn = self.task.read(data.data, data.targets or None, duplicates=data.duplicates, **reading)
        self._report(learn)
        if not resume:
            self._guidance.read(learn)
        if data.valid:
            valid = self.task.read(data.valid, data.valid_targets or None, **reading)
            self._report(valid)
            known, held = set(learn.sources), set(valid.sources)
            if known & held:
                self.say(
                    f"{len(known & held):,} of the {len(held):,} validation sources are also in the training data: "
                    "validation scores will be too high"
                )
        else:
            count = data.held_out
            if count == DataOptions.held_out:
                count = min(count, max(1, len(set(learn.sources)) // 10))
            learn, valid = split_pairs(learn, count)
            what = "texts" if self.task.hides else f"sources with {len(valid):,} targets"
            self.say(f"held out for validation: {len(set(valid.sources)):,} {what}")
        return learn, valid

    def _report(self, pairs: Pairs) -> None:
        """Report what was read, and what looks wrong."""
        for line in pairs.report() + ([] if self.task.hides else pairs.shuffled()):
            self.say(line)

    def _rewriting(
        self, files: PairRunFolder, learn: Pairs, start: SequenceModel | None, *, resume: bool
    ) -> Rewriting | None:
        """Return how texts are rewritten, if they are: as the start model does, else as learned from the pairs."""
        options = self.options.vocabularies
        if not options.rewrite:
            return None
        if resume:
            return files.read_rewriting()
        if start is not None:
            return start.rewriting
        source, _, target = options.languages.partition("-")
        return Rewriting.learn(learn, (source, target))

    def _resumed(
        self, files: PairRunFolder, learn: Pairs, marks: Mapping[str, str], here: dict[str, Any]
    ) -> tuple[Vocabulary, Vocabulary]:
        """Return the run's vocabularies, and restore the conditions of its start."""
        begun = files.read_record()
        for name, mark in marks.items():
            if begun.get(name) != mark:
                raise rejected("resume", name, "be the pairs of the original run", "others")
        self._guidance.find(learn, begun.get("links", ""))
        restore_conditions(begun, here, self.say)
        if place()[0] == 0:
            files.write(begun, self.options)  # keep changed options for the next resumption
        return files.read_vocabularies()

    def _vocabularies(self, learn: Pairs, start: SequenceModel | None) -> tuple[Vocabulary, Vocabulary]:
        """Return new vocabularies, or those of the start model."""
        if start is not None:
            return start.source, start.target
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RegardWarning)
            source, target = self.task.build_vocabularies(learn, self.options.vocabularies)
        for each in caught:
            self.say(str(each.message).partition(": ")[2])
        return source, target

    def _begin(self, files: PairRunFolder, learn: Pairs, record: dict[str, Any], model: SequenceModel) -> None:
        """Write what a resumption needs: vocabularies, rewriting, links, and the run's record."""
        first = place()[0] == 0
        if first:
            files.write_vocabularies(model.source, model.target)
            if model.rewriting is not None:
                files.write_rewriting(model.rewriting)
        mark = self._guidance.find(learn, keep=first)
        if first:
            files.write({**record, "links": mark}, self.options)

    def _score(self, sequence_model: SequenceModel, valid: Pairs) -> Callable[[Any], dict[str, float]] | None:
        """Return the validation metric: the task's scores of greedy decoding on some held-out sources."""
        if not self.task.names:
            return None
        references = dict(list(valid.references().items())[: self.options.training.validate_most])
        options = PredictionOptions(SearchOptions(beams=1))

        return lambda _: self._scores_of(sequence_model.predict(references, options), references)

    def _scores_of(self, written: Sequence[Prediction], references: dict[str, list[str]]) -> dict[str, float]:
        """Return the task's scores; report truncated sources once."""
        for line in report_truncated(written):
            if line not in self._reported:
                self._reported.add(line)
                self.say(line)
        return self.task.scores([each.text for each in written], list(references.values()))

    def _about(self, learn: Pairs) -> dict[str, Any]:
        """Return the metadata of the model, which validations use, too."""
        several = sum(len(sentences(text)) > 1 for text in learn.sources) >= _SEVERAL * len(learn)
        return {"task": self.options.task} | ({"lines": PARAGRAPHS} if several else {})
