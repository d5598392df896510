"""Training of captioners: by likelihood, then by rewards.

Dimensions: B sources, K samples per source, T steps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from regard._utils.errors import RegardWarning, in_section, rejected
from regard._utils.files import write_atomically
from regard_lab.data.batches import Batch
from regard_lab.data.captions import (
    CaptionBatches,
    FeatureGrids,
    Grids,
    PixelGrids,
    read_captions,
    shuffled_captions,
    with_images,
)
from regard_lab.data.images import Images, open_images
from regard_lab.data.pairs import Pairs, split_pairs
from regard_lab.generation.beam_search import SearchOptions
from regard_lab.generation.predictions import PredictionOptions
from regard_lab.generation.sampling import drawn
from regard_lab.models.base import END, PAD, EncoderDecoder
from regard_lab.models.captioner import CAPTIONERS
from regard_lab.models.folders import json_bytes
from regard_lab.tasks.captioning.captioner import LONGEST, TARGET, Captioner, copy_captioner
from regard_lab.tasks.captioning.encoders import Features, ImageEncoder, open_encoder, write_features
from regard_lab.tasks.captioning.metrics import CaptionReward, caption_scores
from regard_lab.tasks.captioning.options import CaptionDataOptions, CaptionOptions
from regard_lab.text.ragged import Ragged
from regard_lab.text.unknown import check_unknown
from regard_lab.text.vocabulary import Vocabulary
from regard_lab.training.objectives import Frequencies, Loss, Seq2SeqObjective, cross_entropy, shifted
from regard_lab.training.run import FolderRun, RunFolder, restore_conditions, save_unbroken

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from regard_lab.training.loop import TrainingResult


# Learning from rewards (policy gradient) ------------------------------------------------------------------------------


#: Returns the rewards (B, K) of K targets per source, (B · K, T) padded after their end marks, for source rows (B,).
Reward = Callable[[Tensor, Tensor], Tensor]


class PolicyGradientObjective(Seq2SeqObjective):
    """Maximize the expected reward by policy gradient (Williams 1992; Rennie 2017, arXiv 1612.00563).

    The model samples K targets y for each source. The baseline of each is the mean reward of the others (Luo 2020,
    arXiv 2003.09971)::

        −1/N Σ_k (r_k − mean of r_j over j ≠ k) Σ_t log p(y_kt),  N sampled symbols in total

    p is the softmax of the logits divided by the temperature. The logged loss is the negative mean reward.

    Parameters
    ----------
    reward : callable
        ``reward(written, rows)`` returns the rewards of targets.
    draws : int
        K, at least 2.
    max_length : int
        Maximum target length T, including the end mark.
    temperature : float, default 1.0
        Below 1, samples are closer to the results of a search.
    likelihood : float, default 0.0
        Weight of the loss of :class:`Seq2SeqObjective`, added if positive.
    smoothing, guided, coverage
        As in :class:`Seq2SeqObjective`.
    """

    def __init__(
        self,
        reward: Reward,
        draws: int,
        max_length: int,
        temperature: float = 1.0,
        likelihood: float = 0.0,
        *,
        smoothing: float = 0.0,
        guided: str = "",
        coverage: float = 0.0,
    ) -> None:
        super().__init__(smoothing=smoothing, guided=guided, coverage=coverage)
        self.reward, self.draws, self.max_length = reward, draws, max_length
        self.temperature, self.likelihood = temperature, likelihood

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        assert isinstance(model, EncoderDecoder)
        assert batch.rows is not None
        learning = model.training
        written = draw_targets(model.eval(), batch.source, batch.lengths, self.draws, self.max_length, self.temperature)
        model.train(learning)
        earned = self.reward(written, batch.rows)  # (B, K)
        others = (earned.sum(1, keepdim=True) - earned) / (self.draws - 1)
        gain = (earned - others).to(batch.lengths.device, torch.float32).flatten()[:, None].expand(written.shape)
        features = model.features(batch.source, batch.lengths, shifted(written)) / self.temperature
        weight, bias = model.projection
        value, log_likelihood = cross_entropy(features, (weight, bias / self.temperature), written, weight=gain)
        if model.stochastic:
            value = value + model.surrogate(gain * log_likelihood, written != PAD)
        if self.likelihood:
            value = value + self.likelihood * super().loss(model, batch).value
        return Loss(value, -float(earned.mean()), int((written != PAD).sum()))


@torch.no_grad()
def draw_targets(
    model: EncoderDecoder, source: Tensor, lengths: Tensor, draws: int, max_length: int, temperature: float = 1.0
) -> Tensor:
    """Sample targets (B · K, T) from a model, each with an end mark followed by padding.

    Uses torch's global random generator. Put the model in evaluation mode to disable dropout.

    Examples
    --------
    >>> from regard_lab.models import RecurrentConfig, RecurrentEncoderDecoder
    >>> model = RecurrentEncoderDecoder(RecurrentConfig(sources=30, targets=41, encoder=8, decoder=8)).eval()
    >>> draw_targets(model, torch.tensor([[3, 4], [5, 0]]), torch.tensor([2, 1]), draws=3, max_length=6).shape[0]
    6
    """
    memory = model.encode(source, lengths)
    state = model.start(memory, draws)
    last = torch.full((len(source), draws), END, device=source.device)
    going, written = torch.ones_like(last, dtype=torch.bool), []
    for step in range(max_length):
        if step == max_length - 1:
            written.append(torch.where(going, END, PAD))
            break
        logits, state = model.step(last, memory, state)
        logits = logits.float() / temperature
        logits[..., PAD] = -torch.inf
        last = drawn(logits.softmax(-1), torch.rand(last.shape, dtype=torch.float64, device=last.device))
        written.append(torch.where(going, last, PAD))
        going = going & (last != END)
        if not bool(going.any()):
            break
    return torch.stack(written, -1).flatten(0, 1)


# The run --------------------------------------------------------------------------------------------------------------


#: The file of image features in a run folder.
FEATURES = "features.safetensors"
Progress = Callable[[int, int], None]


class Captioning(FolderRun[CaptionOptions]):
    """A training run of a captioner; parameters as in :class:`FolderRun`.

    Attributes
    ----------
    progress : callable, optional
        Called with the number of images that a frozen encoder has processed, and the total.
    """

    kind = CaptionOptions
    progress: Progress | None = None

    def check(self) -> None:
        self.options.model_config()
        if self.options.training.devices > 1:
            raise rejected("train", "training.devices", "be 1 for captions", self.options.training.devices)

    def train(self, *, resume: bool = False, callbacks: Iterable[Callback] = ()) -> tuple[Captioner, TrainingResult]:
        """Read images and captions, train, and save the captioner to the folder.

        Raises
        ------
        ValueError
            If a file or an option is invalid, or the folder holds another run.
        TrainingError
            If training fails.
        """
        files, here = self.open(resume)
        start = Captioner.load(self.options.start) if self.options.start and not resume else None
        with self._images() as images:
            learn, valid = self._captions(images)
            torch.manual_seed(self.options.training.seed)  # for encoders without pretrained weights
            encoder = open_encoder(self.options.encoder, self.options.data.side)
            if start is not None:  # report a mismatch before computing features
                copy_captioner(self._captioner(encoder, start.vocabulary), start)
                self._check_unknown(start.vocabulary, learn, self.options.data.max_unknown)
                self._check_unknown(start.vocabulary, valid, 1.0)
            learn, valid, sides = self._grids(images, encoder, learn, valid)
            record = {"data": learn.checksum(), "valid": valid.checksum(), "encoder": encoder.checksum(), **here}
            vocabulary = self._begun(files, record, learn, valid, resume, None if start is None else start.vocabulary)
            torch.manual_seed(self.options.training.seed)
            captioner = self._captioner(encoder, vocabulary)
            learned = sum(each.numel() for each in captioner.model.parameters())
            self.say(
                f"{self.options.kind} captioner, {learned:,} trainable parameters, vocabulary size "
                f"{len(vocabulary):,}, {self.options.encoder} with {encoder.rows} × {encoder.cols} positions"
            )
            if start is not None:
                copy_captioner(captioner, start)
            self.size_batches(len(set(learn.sources)), "images")
            batches, checks = (
                self._batches(pairs, grids, vocabulary, mirror)
                for pairs, grids, mirror in zip((learn, valid), sides, (self.options.data.mirror, False))
            )
            self.options = replace(self.options, training=self.options.training.planned(batches.per_epoch))
            training = self.options.training
            if not resume:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_atomically(self.folder / TARGET, json_bytes(vocabulary.to_json()))
            files.write(files.read_record() if resume else record, self.options)
            self.say(f"{training.steps:,} steps, {batches.per_epoch:,} batches per epoch")
            targets = vocabulary.encode_all(learn.targets)
            frequencies = Frequencies.of(targets, len(vocabulary))
            if start is None:
                frequencies.set_bias(captioner.model)
            guess = frequencies.loss(vocabulary.encode_all(valid.targets))
            objective = self._objective(captioner, learn, targets)
            score = None if training.metric == "loss" else self._score(captioner, valid, sides[1])
            ended = self.fit(
                captioner.model, batches.batch, list(checks.once()), objective, score, guess, resume=resume,
                callbacks=callbacks,
            )  # fmt: skip
        if ended.reason != "interrupt":
            captioner.about["training"] = {
                "images": len(set(learn.sources)),
                "captions": len(learn),
                "steps": ended.steps,
                "seconds": round(ended.seconds, 1),
                "seed": training.seed,
                "best": ended.best if math.isfinite(ended.best) else None,
            }
            grid: Any = captioner.model.grid
            grid.network = None  # the encoder is saved separately
            save_unbroken(lambda: captioner.save(self.folder), self.folder)
        return captioner, ended

    def _images(self) -> Images:
        data = self.options.data
        for name, what in (("data", "a file of image names, tabs and captions"), ("images", "a folder or tar archive")):
            if not getattr(data, name):
                raise ValueError(f"train: --{name} is required: {what}.")
        return open_images(data.images, "train")

    def _captions(self, images: Images) -> tuple[Pairs, Pairs]:
        """Return the training and validation captions of existing images; no image is in both sets."""
        data, lowercase = self.options.data, self.options.vocabularies.lowercase
        learn = self._read(data.data, images, words=data.max_length, lowercase=lowercase)
        if data.valid:
            valid = self._read(data.valid, images, words=None, lowercase=lowercase)
            learn = self._apart(learn, {name: name for name in valid.sources}, "are also in the validation data")
        else:
            count = data.held_out
            if count == CaptionDataOptions.held_out:
                count = min(count, max(1, len(set(learn.sources)) // 10))
            learn, valid = split_pairs(learn, count)
            self.say(f"held out for validation: {len(set(valid.sources)):,} images")
        without = len(images) - len({*learn.sources, *valid.sources})
        if without:
            name = next(each for each in images.names if each not in {*learn.sources, *valid.sources})
            self.say(f"{images.path}: {without:,} of {len(images):,} images have no caption (the first {name!r})")
        return learn, valid

    def _read(self, path: str, images: Images, *, words: int | None, lowercase: bool) -> Pairs:
        pairs = read_captions(path, words=words, lowercase=lowercase)
        for line in pairs.report():
            self.say(line)
        pairs, lines = with_images(pairs, images)
        for line in lines + shuffled_captions(pairs):
            self.say(line)
        return pairs

    def _apart(self, learn: Pairs, others: dict[str, str], why: str) -> Pairs:
        """Return the training captions without those of the images in ``others``, and report these."""
        shared = [name for name in dict.fromkeys(learn.sources) if name in others]
        if not shared:
            return learn
        kept = [row for row, name in enumerate(learn.sources) if name not in others]
        self.say(f"skipped in training: {len(shared):,} images that {why} (the first {shared[0]!r})")
        if not kept:
            raise ValueError("train: the validation data contains all training images: use other images.")
        return replace(learn.take(kept, "training"), name=learn.name)

    def _grids(
        self, images: Images, encoder: ImageEncoder, learn: Pairs, valid: Pairs
    ) -> tuple[Pairs, Pairs, tuple[Grids, Grids]]:
        """Return the captions of readable images, and the features or pixels for batches."""
        if self.options.tune != "frozen":
            sides = tuple(
                PixelGrids(images, list(dict.fromkeys(each.sources)), encoder.side, encoder.rows * encoder.cols)
                for each in (learn, valid)
            )
            return learn, valid, (sides[0], sides[1])
        features = self._features(images, encoder, list(dict.fromkeys([*learn.sources, *valid.sources])))
        at = {name: row for row, name in enumerate(features.names)}
        learn, valid = (self._usable(each, at) for each in (learn, valid))
        marks = {features.marks[at[name]]: name for name in valid.sources}
        same = {name: marks[mark] for name in learn.sources if (mark := features.marks[at[name]]) in marks}
        learn = self._apart(learn, same, "are identical to validation images")
        index = [np.array([at[name] for name in dict.fromkeys(each.sources)]) for each in (learn, valid)]
        ours, theirs = (FeatureGrids(features.values, each, features.rows, features.cols) for each in index)
        return learn, valid, (ours, theirs)

    def _features(self, images: Images, encoder: ImageEncoder, names: list[str]) -> Features:
        """Return the image features from disk; compute them if any are missing."""
        path = Path(self.options.data.features or self.folder / FEATURES)
        if path.exists():
            features = Features.load(path, encoder)
            missing = sorted(set(names) - {*features.names, *features.bad})
            if not missing:
                self.say(f"{path}: features of {len(features.names):,} images")
                return features
            self.say(f"{path}: lacks {len(missing):,} images (the first {missing[0]!r}): computing features again")
            names = [name for name in images.names if name in {*names, *features.names}]
        self.say(f"computing features of {len(names):,} images: {path}")
        wanted = set(names)
        ordered = [name for name in images.names if name in wanted]  # the fastest order to read
        bad = write_features(path, images, ordered, encoder, say=self.say, progress=self.progress)
        if bad:
            self.say(f"skipped: {len(bad):,} of {len(names):,} images, which cannot be read")
        return Features.load(path, encoder)

    def _usable(self, pairs: Pairs, known: dict[str, int]) -> Pairs:
        rows = [row for row, name in enumerate(pairs.sources) if name in known]
        if not rows:
            raise ValueError(f"train: none of the images in {pairs.name} can be read.")
        return pairs if len(rows) == len(pairs) else replace(pairs.take(rows, "usable"), name=pairs.name)

    def _begun(
        self,
        files: RunFolder[CaptionOptions],
        record: dict[str, Any],
        learn: Pairs,
        valid: Pairs,
        resume: bool,
        vocabulary: Vocabulary | None,
    ) -> Vocabulary:
        """Return the resumed run's vocabulary, or a new one."""
        if resume:
            begun = files.read_record()
            for name, what in (("data", "captions"), ("valid", "captions"), ("encoder", "encoder")):
                if begun.get(name) != record[name]:
                    raise rejected("resume", name, f"be the {what} of the original run", "others")
            restore_conditions(begun, record, self.say)
            return Vocabulary.from_json(files.read_table(TARGET), str(self.folder / TARGET))
        from regard_lab.text.vocabulary import SubwordVocabulary

        if vocabulary is None:
            options = self.options.vocabularies
            size = None if options.kind == "characters" else options.size
            with in_section("vocabularies"), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", RegardWarning)
                vocabulary = SubwordVocabulary.train(
                    learn.targets, options.kind, size, lowercase=options.lowercase, name=f"the captions of {learn.name}"
                )
            for each in caught:
                self.say(str(each.message).partition(": ")[2])
            self._check_unknown(vocabulary, learn, self.options.data.max_unknown)
            self._check_unknown(vocabulary, valid, 1.0)
        return vocabulary

    def _check_unknown(self, vocabulary: Vocabulary, pairs: Pairs, most: float) -> None:
        """Report the symbols of captions that the vocabulary lacks; raise if they are a larger share."""
        numbers = vocabulary.encode_all(pairs.targets)
        lines = check_unknown(
            "captions", vocabulary, [numbers.numbers], numbers.offsets[1:],
            lambda row: (pairs.place(row), pairs.targets[row]), most,
        )  # fmt: skip
        for line in lines:
            self.say(line)

    def _captioner(self, encoder: ImageEncoder, vocabulary: Vocabulary) -> Captioner:
        places = encoder.rows * encoder.cols
        config = self.options.model_config(encoder.width, len(vocabulary), places)
        model = CAPTIONERS[self.options.kind][1](config)
        if self.options.tune == "full":
            model.grid.network = encoder
        return Captioner(model, encoder, vocabulary)

    def _batches(self, pairs: Pairs, grids: Grids, vocabulary: Vocabulary, mirror: bool) -> CaptionBatches:
        number = {name: row for row, name in enumerate(dict.fromkeys(pairs.sources))}
        owners = np.array([number[name] for name in pairs.sources])
        captions: Ragged = vocabulary.encode_all(pairs.targets)
        training = self.options.training
        each: dict[str, Any] = {"size": training.batch_images, "each": training.captions, "seed": training.seed}
        return CaptionBatches(grids, captions, owners, mirror=mirror, **each)

    def _objective(self, captioner: Captioner, learn: Pairs, targets: Ragged) -> Seq2SeqObjective:
        """Return the training objective: likelihood of reference captions, or rewards."""
        training, reward = self.options.training, self.options.reward
        guided = captioner.model.maps[0] if training.coverage and captioner.model.maps else ""
        others: dict[str, Any] = {
            "smoothing": training.label_smoothing,
            "guided": guided,
            "coverage": training.coverage,
        }
        if not reward.some:
            return Seq2SeqObjective(training.teacher_forcing, **others)
        earned = CaptionReward(
            list(learn.references().values()), captioner.vocabulary, cider=reward.cider, bleu=reward.bleu
        )
        max_length = int(targets.lengths.max()) + 1
        return PolicyGradientObjective(
            earned, reward.draws, max_length, reward.temperature, reward.likelihood, **others
        )

    def _score(self, captioner: Captioner, valid: Pairs, grids: Grids) -> Callable[[Any], dict[str, float]]:
        """Return the validation metrics: scores of greedy decoding on some held-out images."""
        references = list(valid.references().items())[: self.options.training.validate_most]
        options = PredictionOptions(SearchOptions(beams=1, max_length=LONGEST))
        names, listed = [name for name, _ in references], [each for _, each in references]

        def score(_: Any) -> dict[str, float]:
            written: list[str] = []
            for first in range(0, len(names), options.batch):
                rows = np.arange(first, min(first + options.batch, len(names)))
                some = grids.take(rows, np.zeros(len(rows), bool))
                some = captioner.features(list(some.numpy())) if some.dtype == torch.uint8 else some
                written += [each.text for each in captioner.caption(some, names[first:], options)]
            scores = caption_scores(written, listed)
            return {name: scores[name] for name in ("bleu", "chrf", "rouge", "cider")}

        return score
