"""From text to a language model in a folder, where everything that a run was asked for is kept, to go on with it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regard._utils.errors import RegardWarning, rejected
from regard._utils.files import leaving_nothing
from regard_lab.data.documents import read_documents
from regard_lab.data.packing import LanguageBatches, PackedBatches, StreamBatches
from regard_lab.data.shards import MANIFEST, TokenShards, write_shards
from regard_lab.models import DecoderLM, EncoderLM, load, save
from regard_lab.tasks.language.objectives import MaskedTokens, NextTokens
from regard_lab.tasks.language.options import KINDS, SIZED, TOKENIZERS, LanguageOptions
from regard_lab.text.tokenizer import Tokenizer
from regard_lab.training.run import FolderRun, data_place, place, restore_conditions, save_unbroken
from regard_lab.training.run_folder import RunFolder
from regard_lab.training.sampled_softmax import SampledSoftmax

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from regard_lab.training.loop import TrainingResult
    from regard_lab.training.objectives import Objective

#: Where a run keeps its tokens: what is to learn from, and what to validate with.
LEARN, VALID = "tokens/learn", "tokens/valid"
#: Characters that a tokenizer is learned from at most.
_CHARACTERS = 1 << 28
#: Rows are cut from one stream where documents are longer than so many rows, on average.
_LONG = 2.0
#: Tokens whose frequencies say what guessing costs.
_COUNTED = 10_000_000


class Pretraining(FolderRun[LanguageOptions]):
    """A run that learns language from text, in a folder."""

    @classmethod
    def files(cls, folder: str | Path) -> RunFolder[LanguageOptions]:
        return RunFolder(Path(folder), LanguageOptions)

    def check(self) -> None:
        if not self.options.start:
            self.options.model_config(1000)

    def train(
        self, *, resume: bool = False, callbacks: Iterable[Callback] = ()
    ) -> tuple[DecoderLM | EncoderLM, TrainingResult]:
        """Read the text, train, and save the model and its tokenizer to the folder.

        Raises
        ------
        ValueError
            If a file or an option is wrong, the folder holds another run, or its tokens were changed.
        TrainingError
            If training cannot go on.
        """
        from regard_lab.training.learner import Learner, Stream
        from regard_lab.training.loop import train

        training = self.options.training
        files, here = self.open(resume)
        if resume:
            begun = files.read_record()
            restore_conditions(begun, here, self.say)
        else:
            begun = self._begun(files, here) if place()[0] == 0 else files.wait_for_record()
        tokenizer = Tokenizer.load(self.folder)
        learn, valid = TokenShards.open(self.folder / LEARN), TokenShards.open(self.folder / VALID)
        model = self._model(tokenizer)
        if self.options.skip_gram.epochs and not resume:
            self._learn_vectors(model, learn, tokenizer)
        count = sum(parameter.numel() for parameter in model.parameters())
        self.say(f"{self.options.kind}, {count:,} parameters, vocabulary of {len(tokenizer):,}")
        batches, checks = self._batches(learn, tokenizer), self._batches(valid, tokenizer)
        self.say(f"an epoch has {batches.per_epoch:,} batches; {batches.padding:.1%} of their places are padding")
        bytes_per_token = begun["bytes"] / max(valid.tokens, 1) if tokenizer.keeps_spaces else math.nan
        objective = self._objective(batches, learn, tokenizer, bytes_per_token)
        guess = _guess(learn, valid) if not self.options.masked else math.inf
        learner = Learner(model, training, Stream(batches.batch), objective, guess=guess)
        ended = train(learner, list(checks.once()), training, self.folder, resume=resume, callbacks=callbacks)
        if training.divides:
            from regard.distributed import gather_model

            model = gather_model(model)
        if ended.reason != "interrupt" and place()[0] == 0:
            save_unbroken(lambda: save(model.eval(), self.folder), self.folder)
        return model, ended

    def _model(self, tokenizer: Tokenizer) -> DecoderLM | EncoderLM:
        if self.options.start:
            model = load(self.options.start, dtype=torch.float32, hosted=False)
            kind = KINDS[self.options.kind][1]
            if not isinstance(model, kind):
                got = f"{type(model).__name__} in {self.options.start}"
                raise rejected("train", "start", f"be the folder of a {self.options.kind}", got)
            if model.config.vocabulary < len(tokenizer):
                expected = f"have a vocabulary of the tokenizer's {len(tokenizer):,}"
                raise rejected("train", "start", expected, f"{model.config.vocabulary:,}")
            return model.train()
        kind, config, training = (
            KINDS[self.options.kind][1],
            self.options.model_config(len(tokenizer)),
            self.options.training,
        )
        if training.divides:
            with torch.device("meta"):  # each process draws its own part of it, later
                return kind(config)
        model = kind(config)
        torch.manual_seed(training.seed)
        model.reset_parameters()  # as they are drawn where processes divide the model
        return model

    def _learn_vectors(self, model: DecoderLM | EncoderLM, learn: TokenShards, tokenizer: Tokenizer) -> None:
        """Give the embedding the vectors that the text's neighbouring tokens make; each process makes the same."""
        from regard_lab.tasks.language.skip_gram import token_vectors

        width = model.embedding.weight.shape[1]
        marks = tuple(set(tokenizer.roles().values()))
        seed = self.options.training.seed
        made = token_vectors(learn, width, self.options.skip_gram, skip=marks, seed=seed, say=self.say)
        with torch.no_grad():
            model.embedding.weight[: len(made)] = made

    def _batches(self, shards: TokenShards, tokenizer: Tokenizer) -> LanguageBatches:
        data, training = self.options.data, self.options.training
        rank, world = data_place(training)
        rows = data.rows
        if rows == "auto":
            long = shards.tokens / len(shards) > _LONG * data.length
            rows = "stream" if long and not self.options.masked else "packed"
        kind = StreamBatches if rows == "stream" else PackedBatches
        return kind(
            shards, length=data.length, rows=training.batch_tokens // data.length, seed=training.seed, rank=rank,
            world=world, pad=tokenizer.pad or 0,
        )  # fmt: skip

    def _objective(
        self, batches: LanguageBatches, learn: TokenShards, tokenizer: Tokenizer, bytes_per_token: float
    ) -> Objective:
        data, training = self.options.data, self.options.training
        draws = training.sampled_softmax
        sampled = SampledSoftmax(_counts(learn), draws) if draws else None
        if self.options.masked:
            return MaskedTokens(tokenizer, data.masked_share, data.whole_words, sampled)
        return NextTokens(batches.separate, training.label_smoothing, bytes_per_token, sampled, data.both_ways)

    def _begun(self, files: RunFolder[LanguageOptions], here: dict[str, Any]) -> dict[str, Any]:
        """Write what the run begins with: tokenizer, tokens, options and checksums; return the record."""
        data = self.options.data
        if not data.data:
            raise rejected("train", "data", "be given: files of text", "none")
        documents = _repeatable(lambda: self._documents(data.data), data.data)
        learn, valid = (documents, None) if data.valid else _held_out(documents, data.held_out)
        if valid is None:
            valid = _repeatable(lambda: self._documents(data.valid), data.valid)
        tokenizer = self._tokenizer(learn)
        if self.options.masked and (tokenizer.mask is None or tokenizer.pad is None):
            raise rejected("train", "tokenizer", "have a mask and padding where tokens are masked", repr(tokenizer))
        with leaving_nothing(self.folder):
            return self._written(files, here, tokenizer, learn, valid)

    def _written(
        self,
        files: RunFolder[LanguageOptions],
        here: dict[str, Any],
        tokenizer: Tokenizer,
        learn: Callable[[], Iterable[str]],
        valid: Callable[[], Iterable[str]],
    ) -> dict[str, Any]:
        """Write tokenizer, tokens, options and checksums; return the record."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(self.folder)
        size = 0

        def counted(texts: Iterable[str]) -> Iterator[str]:
            nonlocal size
            for text in texts:
                size += len(text.encode())
                yield text

        for name in (LEARN, VALID):  # of an attempt that was killed before it was a run
            (self.folder / name / MANIFEST).unlink(missing_ok=True)
        shards = write_shards(learn(), tokenizer, self.folder / LEARN)
        checks = write_shards(counted(valid()), tokenizer, self.folder / VALID)
        for name, each in (("to learn from", shards), ("to validate with", checks)):
            self.say(f"{name}: {each.tokens:,} tokens in {len(each):,} documents")
        record = {"data": self._checksum(LEARN), "valid": self._checksum(VALID), "bytes": size, **here}
        files.write(record, self.options)
        return record

    def _checksum(self, name: str) -> str:
        from regard_lab.models.folders import read_json

        return str(read_json(self.folder / name / MANIFEST)["sha256"])

    def _documents(self, paths: list[str]) -> Iterator[str]:
        return read_documents(paths, per=self.options.data.per, field=self.options.data.field, function="train")

    def _tokenizer(self, documents: Callable[[], Iterator[str]]) -> Tokenizer:
        """Return the tokenizer of a model to begin with, or of a folder, or one that is learned."""
        options = self.options.tokenizer
        if self.options.start:
            return Tokenizer.load(self.options.start)
        if options.kind not in TOKENIZERS:
            return Tokenizer.load(options.kind)
        specials = ("end", "pad", "mask", "cls", "sep") if self.options.masked else ("end", "pad")
        size = options.size if options.kind in SIZED else None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RegardWarning)
            made = Tokenizer.learn(
                _first(documents(), _CHARACTERS), size, options.kind, options.lowercase, specials=specials
            )
        for each in caught:
            self.say(str(each.message).partition(": ")[2])
        return made


def _repeatable(read: Callable[[], Iterator[str]], paths: list[str]) -> Callable[[], Iterator[str]]:
    """Return what reads documents each time that it is called; those of standard input are kept."""
    if "-" not in paths:
        return read
    kept = list(read())
    return lambda: iter(kept)


def _held_out(
    documents: Callable[[], Iterator[str]], share: float
) -> tuple[Callable[[], Iterator[str]], Callable[[], Iterator[str]]]:
    """Return documents to learn from and to validate with: every so many-th; of a single one its end."""
    first = list(islice(documents(), 2))
    if len(first) < 2:
        cut = int(len(first[0]) * (1 - share))
        return (lambda: iter([first[0][:cut]])), (lambda: iter([first[0][cut:]]))
    step = max(2, round(1 / share))
    return (
        lambda: (text for i, text in enumerate(documents()) if (i + 1) % step),
        # Of few documents, the last one.
        lambda: _non_empty((text for i, text in enumerate(documents()) if not (i + 1) % step), documents),
    )


def _non_empty(chosen: Iterator[str], documents: Callable[[], Iterator[str]]) -> Iterator[str]:
    first = next(chosen, None)
    if first is None:
        *_, first = documents()
    return chain([first], chosen)


def _first(texts: Iterator[str], characters: int) -> Iterator[str]:
    """Yield texts until there were so many characters."""
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def _guess(learn: TokenShards, valid: TokenShards) -> float:
    """Return the mean cross-entropy of a token to validate with, guessed by its frequency alone, in nats."""
    before, after = _counts(learn).astype(np.float64), _counts(valid)
    shares = (before + 1) / (before + 1).sum()
    return float(-(after @ np.log(shares)) / after.sum())


def _counts(shards: TokenShards) -> np.ndarray:
    """Return how often each token stands among the first of a text, (N,)."""
    return np.bincount(shards.gather(np.arange(min(shards.tokens, _COUNTED))), minlength=shards.vocabulary)
