"""From texts with labels to a classifier in a folder, where what a run was asked for is kept, to go on with it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regard._errors import RegardWarning, rejected
from regard.data.label_batches import LabelBatches
from regard.data.labelled import LabelledTexts, read_labelled, split_labelled
from regard.language.classification_options import ClassificationOptions
from regard.language.classifier import TextClassifier, bare, input_layout, readable_length
from regard.language.folders import check_tokenizer
from regard.language.labels_objective import NameLabels
from regard.language.options import KINDS, TOKENIZERS
from regard.models import DecoderLM, EncoderLM, SequenceClassifier, load
from regard.models.lora import add_lora, merge_lora
from regard.text.inputs import Inputs
from regard.text.tokenizer import Tokenizer
from regard.training.run import FolderRun, place, restore_conditions, save_unbroken
from regard.training.run_folder import RunFolder

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from regard.training.loop import TrainingResult


class FineTuning(FolderRun[ClassificationOptions]):
    """A run that learns labels of texts, in a folder."""

    @classmethod
    def files(cls, folder: str | Path) -> RunFolder[ClassificationOptions]:
        return RunFolder(Path(folder), ClassificationOptions)

    def check(self) -> None:
        if not self.options.start:
            self.options.model_config(1000)

    def train(
        self, *, resume: bool = False, callbacks: Iterable[Callback] = ()
    ) -> tuple[TextClassifier, TrainingResult]:
        """Read the texts, train, and save the classifier and its tokenizer to the folder.

        Raises
        ------
        ValueError
            If a file or an option is wrong, or the folder holds another run.
        TrainingError
            If training cannot go on.
        """
        from regard.training.learner import Learner, Stream
        from regard.training.loop import train

        files, here = self.open(resume)
        learn, valid = self._texts(report=not resume)
        record = {"data": learn.checksum(), "valid": valid.checksum(), **here}
        names = learn.names()
        if len(names) < 2:
            raise rejected("train", learn.name, "have two labels or more", f"one: {names[0]!r}, of all texts")
        numbers = valid.numbers(names)
        if resume:
            self._check(files.read_record(), record)
        elif place()[0]:
            files.wait_for_record()
        tokenizer = self._tokenizer(learn) if not resume and place()[0] == 0 else Tokenizer.load(self.folder)
        torch.manual_seed(self.options.training.seed)
        model = self._model(tokenizer, names)
        self._describe(model, tokenizer)
        length = self._length(model, say=not resume)
        read = self._read(learn, model, tokenizer, length), self._read(valid, model, tokenizer, length)
        batches = self._batches(read[0], learn.numbers(names))
        rate = self.options.suitable_rate(model.model)
        self.options = replace(self.options, training=self.options.training.planned(batches.per_epoch, rate))
        training = self.options.training
        self.say(f"{training.steps:,} steps, {batches.per_epoch:,} batches an epoch, rate {training.learning_rate:.3g}")
        if place()[0] == 0:
            if not resume:
                tokenizer.limited(length).save(self.folder)
            files.write(files.read_record() if resume else record, self.options)
        learner = Learner(model, training, Stream(batches.batch), NameLabels(names, training.label_smoothing))
        checks = list(self._batches(read[1], numbers).once())
        ended = train(learner, checks, training, self.folder, resume=resume, callbacks=callbacks)
        merge_lora(model)
        classifier = TextClassifier(model.eval(), tokenizer, length)
        if ended.reason != "interrupt" and place()[0] == 0:
            save_unbroken(lambda: classifier.save(self.folder), self.folder)
        if training.metric == "accuracy" and ended.best <= valid.majority()[1]:
            self.say("It is right no more often than naming the most frequent label would be.")
        return classifier, ended

    def _texts(self, report: bool) -> tuple[LabelledTexts, LabelledTexts]:
        """Return the texts to learn from, and those to validate with."""
        data, seed = self.options.data, self.options.training.seed
        if not data.data:
            raise rejected("train", "data", "be given: lines of text, tab, label", "none")
        texts = read_labelled(data.data, pairs=data.pairs, function="train")
        if report:
            for line in texts.report():
                self.say(line)
        if not data.valid:
            learn, valid = split_labelled(texts, data.held_out, seed=seed)
            if report:
                self.say(f"held out: {len(valid):,} texts")
            return learn, valid
        valid = read_labelled(data.valid, pairs=data.pairs, function="train")
        if report:
            for line in valid.report():
                self.say(line)
        return texts, valid

    def _check(self, begun: dict[str, Any], record: dict[str, Any]) -> None:
        """Raise where the texts are not those that the run began with; go on under its conditions."""
        for name in ("data", "valid"):
            if begun[name] != record[name]:
                changed = name if self.options.data.valid else "data"  # of which some were held out
                raise rejected("resume", changed, "be the texts that the run began with", "others")
        restore_conditions(begun, record, self.say)

    def _tokenizer(self, learn: LabelledTexts) -> Tokenizer:
        """Return the tokenizer of the model to begin with, or of a folder, or one that is learned from the texts."""
        options = self.options.tokenizer
        if self.options.start:
            return Tokenizer.load(self.options.start)
        if options.kind not in TOKENIZERS:
            return Tokenizer.load(options.kind)
        specials = ("end", "pad", "mask", "cls", "sep") if self.options.kind == "encoder" else ("end", "pad")
        size = options.size if options.kind == "bpe" else None
        texts = learn.texts + (learn.others or [])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RegardWarning)
            made = Tokenizer.learn(texts, size, options.kind, options.lowercase, specials=specials)
        for each in caught:
            self.say(str(each.message).partition(": ")[2])
        return made

    def _model(self, tokenizer: Tokenizer, names: list[str]) -> SequenceClassifier:
        """Return the classifier to train: of what it is made, as much learns as was asked for."""
        options = self.options
        if not options.start:
            trunk = KINDS[options.kind][1](options.model_config(len(tokenizer)))
            return SequenceClassifier(trunk, names, trunk.config.dropout).train()
        loaded = load(options.start, dtype=torch.float32)
        trunk = loaded if isinstance(loaded, EncoderLM | DecoderLM) else loaded.model
        check_tokenizer(trunk, tokenizer, "train", options.start)
        trunk = bare(trunk, options.model)
        same = isinstance(loaded, SequenceClassifier) and loaded.labels == tuple(names)
        bias = not same or loaded.output.bias is not None
        model = SequenceClassifier(trunk, names, trunk.config.dropout, bias=bias)
        if same:
            model.output.load_state_dict(loaded.output.state_dict())
        if options.tune == "frozen":
            model.model.requires_grad_(False)
        elif options.tune == "lora":
            add_lora(model.model, options.lora.rank, options.lora.alpha, dropout=options.lora.dropout)
        if isinstance(model.model, EncoderLM) and model.model.pooler is not None:
            model.model.pooler.requires_grad_(True)  # it belongs to the head: no language model needs one
        return model.train()

    def _describe(self, model: SequenceClassifier, tokenizer: Tokenizer) -> None:
        kind = "decoder" if isinstance(model.model, DecoderLM) else "encoder"
        counts = [(each.numel(), each.requires_grad) for each in model.parameters()]
        learned, count = sum(n for n, learns in counts if learns), sum(n for n, _ in counts)
        which = "" if learned == count else f", of which {learned:,} learn"
        self.say(f"{kind}, {count:,} parameters{which}, vocabulary of {len(tokenizer):,}")

    def _length(self, model: SequenceClassifier, say: bool) -> int:
        asked = self.options.data.length
        length = readable_length(model.model, asked)
        if length < asked and say:
            self.say(f"of a text {length:,} tokens are read at most: the model has learned no more positions")
        return length

    def _read(self, texts: LabelledTexts, model: SequenceClassifier, tokenizer: Tokenizer, length: int) -> Inputs:
        layout = input_layout(model.model, tokenizer)
        inputs = layout.read(tokenizer, texts.texts, texts.others, length=length)
        if cut := int(inputs.cut.sum()):
            self.say(f"{texts.name}: {cut:,} of {len(texts):,} texts were cut to {length:,} tokens")
        return inputs

    def _batches(self, inputs: Inputs, labels: Any) -> LabelBatches:
        training = self.options.training
        rank, world = place()
        return LabelBatches(inputs, labels, size=training.batch_texts, seed=training.seed, rank=rank, world=world)
