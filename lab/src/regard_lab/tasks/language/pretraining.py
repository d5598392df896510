"""Pretraining of language models: the next token, masked tokens, and skip-gram embeddings.

Dimensions: B rows, T tokens of a row, R targets, E width, N vocabulary.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import masks
from regard._utils.errors import RegardWarning, rejected
from regard._utils.files import leaving_nothing
from regard_lab.data.corruption import mask_tokens
from regard_lab.data.documents import read_documents
from regard_lab.data.packing import (
    IGNORE_INDEX,
    MANIFEST,
    NO_DOCUMENT,
    LanguageBatch,
    LanguageBatches,
    PackedBatches,
    StreamBatches,
    TokenShards,
    write_shards,
)
from regard_lab.models import DecoderLM, EncoderLM, load, save
from regard_lab.tasks.language.options import KINDS, SIZED, TOKENIZERS, LanguageOptions, SkipGramOptions
from regard_lab.text.tokenizer import Tokenizer
from regard_lab.text.unknown import check_unknown
from regard_lab.training.objectives import Loss, Objective, Projection, SampledSoftmax, cross_entropy
from regard_lab.training.run import FolderRun, RunFolder, data_place, place, restore_conditions, save_unbroken

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from regard_lab.training.loop import TrainingResult
    from regard_lab.training.objectives import Objective


# Objectives: the next token, or masked tokens -------------------------------------------------------------------------


class NextTokens(Objective):
    """Predict every token from those before it in its document.

    Parameters
    ----------
    separate : bool
        Whether rows hold several documents, which do not attend to each other.
    smoothing : float, default 0.0
        Label smoothing.
    bytes_per_token : float, default NaN
        Of the validation text.
    sampled : SampledSoftmax, optional
        Samples negative tokens in training, instead of the full softmax.
    both_ways : bool, default False
        Read each row backward in about half of the steps, predicting each token from the ones after it.
    indexer : {"selected", "all"}, default "selected"
        What the indexers of dsa layers learn: the attention to the keys that they choose, beside the model; or as a
        warm-up the attention to all keys, and nothing else learns.
    """

    def __init__(
        self,
        separate: bool,
        smoothing: float = 0.0,
        bytes_per_token: float = math.nan,
        sampled: SampledSoftmax | None = None,
        both_ways: bool = False,
        indexer: Literal["selected", "all"] = "selected",
    ) -> None:
        self.indexer = indexer
        self.separate, self.smoothing, self.bytes_per_token = separate, smoothing, bytes_per_token
        self.sampled, self.both_ways = sampled, both_ways

    def loss(self, model: nn.Module, batch: LanguageBatch) -> Loss:
        if self.both_ways:
            batch = batch.turned((torch.rand(batch.examples) < 0.5).to(batch.tokens.device))
        losses: list[Tensor] = []
        value, _, count = self._cost(model, batch, self.smoothing, self.sampled, losses)
        shown = float(value.detach())
        if self.indexer == "all":
            if not losses:
                raise rejected("train", "training.indexer", "be 'selected' without layers of kind dsa", "'all'")
            value = torch.zeros_like(value)
        return Loss(sum(losses, value), shown, count)

    def validation(self, model: nn.Module, batch: LanguageBatch) -> Tensor:
        _, log_likelihood, count = self._cost(model, batch, 0.0)
        return _sums(log_likelihood, count)

    def metrics(self, loss: float, counts: Sequence[float] = ()) -> dict[str, float]:  # noqa: ARG002
        metrics = {"perplexity": math.exp(min(loss, 700.0))}
        if not math.isnan(self.bytes_per_token):
            metrics["bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
        return metrics

    def _cost(
        self,
        model: nn.Module,
        batch: LanguageBatch,
        smoothing: float,
        sampled: SampledSoftmax | None = None,
        losses: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, int]:
        """Return the mean cost, how likely each token was, and how many there were: of this process's part of rows."""
        assert isinstance(model, DecoderLM)
        mask = masks.document(batch.documents) if self.separate else None
        tokens, targets, positions = _parts(model, batch.tokens, batch.targets, batch.positions)
        places = positions if self.separate else None
        asked = None if losses is None else self.indexer
        features = model.features(tokens, mask=mask, positions=places, losses=losses, index_loss=asked)
        value, log_likelihood = _named(features, model.projection, targets, sampled, smoothing)
        return value, log_likelihood, int((targets != IGNORE_INDEX).sum())


class MaskedTokens(Objective):
    """Predict masked tokens from all others of their document (Devlin 2019, arXiv 1810.04805).

    Which are masked is drawn anew in each step from torch's generator; in validation they are always the same.

    Parameters
    ----------
    tokenizer : Tokenizer
        With a mask token.
    share : float, default 0.15
        Share of tokens to mask.
    whole_words : bool, default False
    sampled : SampledSoftmax, optional
        Samples negative tokens in training, instead of the full softmax.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        share: float = 0.15,
        whole_words: bool = False,
        sampled: SampledSoftmax | None = None,
    ) -> None:
        assert tokenizer.mask is not None
        self.mask, self.vocabulary, self.share = tokenizer.mask, len(tokenizer), share
        self.specials = sorted(set(tokenizer.roles().values()))
        self.word_starts = torch.from_numpy(tokenizer.word_starts) if whole_words else None
        self.sampled = sampled

    def loss(self, model: nn.Module, batch: LanguageBatch) -> Loss:
        generator = torch.Generator(batch.tokens.device)
        generator.manual_seed(int(torch.randint(2**62, ())))
        log_likelihood, value = self._cost(model, batch, generator, self.sampled)
        return Loss(value, float(value.detach()), log_likelihood.numel())

    def validation(self, model: nn.Module, batch: LanguageBatch) -> Tensor:
        generator = torch.Generator(batch.tokens.device)
        generator.manual_seed(int(batch.tokens.sum()))
        log_likelihood, _ = self._cost(model, batch, generator)
        return _sums(log_likelihood, log_likelihood.numel())

    def metrics(self, loss: float, counts: Sequence[float] = ()) -> dict[str, float]:  # noqa: ARG002
        return {"perplexity": math.exp(min(loss, 700.0))}

    def _cost(
        self, model: nn.Module, batch: LanguageBatch, generator: torch.Generator, sampled: SampledSoftmax | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return how likely each masked token was, (R,), and the mean cost."""
        assert isinstance(model, EncoderLM)
        tokens, targets = self._masked(batch, generator)
        tokens, targets, positions = _parts(model, tokens, targets, batch.positions)
        rows = model(tokens, mask=masks.document(batch.documents), positions=positions)
        masked = targets != IGNORE_INDEX
        features = model.masked_features(rows[masked]).unsqueeze(0)  # (1, R, W), of masked places only
        value, log_likelihood = _named(features, model.projection, targets[masked].unsqueeze(0), sampled)
        return log_likelihood[0], value

    def _masked(self, batch: LanguageBatch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return tokens with some of them masked, and the masked ones as targets."""
        return mask_tokens(
            batch.tokens, self.mask, self.vocabulary, generator, share=self.share, specials=self.specials,
            real=batch.documents != NO_DOCUMENT, word_starts=self.word_starts,
        )  # fmt: skip


class HostedNextTokens(NextTokens):
    """Validation of a causal language model of transformers, document by document."""

    def validation(self, model: nn.Module, batch: LanguageBatch) -> Tensor:
        return _apart(model, batch, batch.tokens, batch.targets)


class HostedMaskedTokens(MaskedTokens):
    """Validation of a masked language model of transformers, document by document."""

    def validation(self, model: nn.Module, batch: LanguageBatch) -> Tensor:
        generator = torch.Generator(batch.tokens.device)
        generator.manual_seed(int(batch.tokens.sum()))
        return _apart(model, batch, *self._masked(batch, generator))


def _apart(model: nn.Module, batch: LanguageBatch, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the costs of targets (B, T), and their count, (2,), of documents that are read one by one."""
    total = torch.zeros(2, dtype=torch.float64)
    for row in range(len(tokens)):
        documents, positions = batch.documents[row], batch.positions[row]
        begins = (documents[1:] != documents[:-1]) | (positions[1:] != positions[:-1] + 1)
        ends = [*(begins.nonzero()[:, 0] + 1).tolist(), len(documents)]
        for begin, end in zip([0, *ends[:-1]], ends):
            wanted = targets[row, begin:end]
            if not bool((wanted != IGNORE_INDEX).any()):
                continue
            logits = model(tokens[row : row + 1, begin:end])[0].float()
            cost = F.cross_entropy(logits, wanted, ignore_index=IGNORE_INDEX, reduction="sum")
            total += torch.tensor([float(cost), float((wanted != IGNORE_INDEX).sum())], dtype=torch.float64)
    return total


def _named(
    features: Tensor,
    projection: Projection,
    targets: Tensor,
    sampled: SampledSoftmax | None,
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the mean cost of naming targets (B, T), among all tokens or some, and how likely each was."""
    if sampled is not None:
        projection, targets = sampled.among(projection, targets, IGNORE_INDEX)
    return cross_entropy(features, projection, targets, smoothing, ignore_index=IGNORE_INDEX)


def _parts(model: DecoderLM | EncoderLM, *whole: Tensor) -> list[Tensor]:
    """Return this process's part of the rows of tensors (B, T)."""
    if model.context is None:
        return list(whole)
    at = model.context.positions(whole[0].shape[1], whole[0].device)
    return [each[:, at] for each in whole]


def _sums(log_likelihood: Tensor, count: int) -> Tensor:
    """Return the sum of the costs of tokens, and their count, (2,)."""
    return torch.stack(
        [-log_likelihood.double().sum(), torch.tensor(float(count), dtype=torch.float64).to(log_likelihood.device)]
    )


# Initial embeddings by skip-gram with negative sampling (Mikolov 2013, arXiv 1310.4546) -------------------------------
# Dimensions: N tokens of the vocabulary, E width.


#: Root mean square of a vector's elements, larger than what untrained blocks add.
SCALE = 0.3
#: Number of tokens per block; a run can be interrupted between two blocks.
_BLOCK = 1 << 20
#: Size of the table to sample negatives from, and the power of the frequency to sample them by.
_TABLE, _POWER = 1 << 22, 0.75


def token_vectors(
    shards: TokenShards,
    width: int,
    options: SkipGramOptions,
    *,
    skip: tuple[int, ...] = (),
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> Tensor:
    """Train skip-gram token vectors with negative sampling (Mikolov 2013).

    For a token c, its neighbors o, and negative tokens n sampled by frequency to the power 0.75, the loss is::

        −Σ_o log σ(u_o · v_c) − k/m Σ_n log σ(−u_n · v_c),   m samples, weighted as k per neighbor

    It is minimized by SGD, one token at a time, with a learning rate that decreases to 0. Frequent tokens are skipped
    at random. The result is v, scaled to a root mean square of 0.3; tokens that do not occur keep their initial
    vectors. The same text, options and seed give the same vectors on one machine.

    Parameters
    ----------
    shards : TokenShards
        Neighbors never cross document boundaries.
    width : int
        E.
    options : SkipGramOptions
    skip : tuple of int
        Special tokens to ignore.
    seed : int, default 0
    say : callable
        Called with a line for each pass.

    Returns
    -------
    Tensor (N, E) of float32

    Examples
    --------
    >>> shards = TokenShards.of([[0, 1] * 50, [2, 3] * 50])
    >>> token_vectors(shards, 8, SkipGramOptions(epochs=1), say=lambda line: None).shape
    torch.Size([4, 8])
    """
    drawn = np.random.default_rng(seed)
    counts = np.zeros(shards.vocabulary, np.int64)
    for first in range(0, shards.tokens, _BLOCK):
        counts += np.bincount(_block(shards, first), minlength=shards.vocabulary)
    counts[list(skip)] = 0
    table, keep = _negatives(counts), _kept(counts, options.sample)
    vectors = ((drawn.random((shards.vocabulary, width), np.float32) - 0.5) / width).astype(np.float32)
    outputs = np.zeros_like(vectors)
    learn = _kernel()
    total = options.epochs * shards.tokens
    for epoch in range(options.epochs):
        cost, terms = 0.0, 0
        for first in range(0, shards.tokens, _BLOCK):
            numbers = _block(shards, first)
            documents = np.searchsorted(shards.ends, np.arange(first, first + len(numbers)), side="right")
            shown = keep[numbers] > drawn.random(len(numbers))
            done = (epoch * shards.tokens + first) / total
            found = learn(
                numbers[shown], documents[shown], table, vectors, outputs,
                np.float32(options.learning_rate * (1 - done)), options.window, options.draws,
                np.float32(options.negatives / options.draws), int(drawn.integers(1 << 31)),
            )  # fmt: skip
            cost, terms = cost + found[0], terms + found[1]
        say(f"token vectors, pass {epoch + 1} of {options.epochs}: {cost / max(terms, 1):.3f} nats a neighbour")
    made = torch.from_numpy(vectors)
    return made * (SCALE / made[torch.from_numpy(counts > 0)].square().mean().sqrt())


def _block(shards: TokenShards, first: int) -> np.ndarray:
    return shards.gather(np.arange(first, min(first + _BLOCK, shards.tokens)))


def _negatives(counts: np.ndarray) -> np.ndarray:
    """Return a table of tokens, each repeated in proportion to its probability of being drawn."""
    shares = counts.astype(np.float64) ** _POWER
    ends = np.round(shares.cumsum() / shares.sum() * _TABLE).astype(np.int64)
    return np.repeat(np.arange(len(counts)), np.diff(ends, prepend=0)).astype(np.int32)


def _kept(counts: np.ndarray, sample: float) -> np.ndarray:
    """Return the probability of keeping each token."""
    shares = counts / counts.sum()
    return np.where(counts > 0, np.sqrt(sample / np.maximum(shares, 1e-12)), 0.0) if sample else counts > 0


@cache
def _kernel() -> Any:
    """Return the compiled pass over a block of tokens, which returns the sum of costs and the number of neighbours."""
    import numba

    @numba.njit(fastmath=True, error_model="numpy", nogil=True)
    def learn(  # type: ignore[no-untyped-def]
        numbers, documents, table, vectors, outputs, rate, window, draws, weight, seed
    ):
        np.random.seed(seed)
        width = vectors.shape[1]
        step = np.empty(width, np.float32)
        cost, terms = 0.0, 0
        for center_at in range(len(numbers)):
            center = vectors[numbers[center_at]]
            reach = 1 + int(np.random.random() * window)  # nearer neighbours are used more often
            step[:] = 0
            found = 0
            for other in range(max(0, center_at - reach), min(len(numbers), center_at + reach + 1)):
                if other == center_at or documents[other] != documents[center_at]:
                    continue
                output = outputs[numbers[other]]
                score = np.float32(0)
                for e in range(width):
                    score += center[e] * output[e]
                share = np.float32(1) / (np.float32(1) + np.exp(-score))
                cost -= np.log(share + 1e-9)
                found += 1
                slope = rate * (np.float32(1) - share)
                for e in range(width):
                    step[e] += slope * output[e]
                    output[e] += slope * center[e]
            if found == 0:
                continue
            terms += found
            for _ in range(draws):
                output = outputs[table[int(np.random.random() * len(table))]]
                score = np.float32(0)
                for e in range(width):
                    score += center[e] * output[e]
                share = np.float32(1) / (np.float32(1) + np.exp(-score))
                cost -= np.log(1 - share + 1e-9) * weight * found
                slope = -rate * weight * np.float32(found) * share
                for e in range(width):
                    step[e] += slope * output[e]
                    output[e] += slope * center[e]
            for e in range(width):
                center[e] += step[e]
        return cost, terms

    return learn


# The run --------------------------------------------------------------------------------------------------------------


#: Subfolders of a run with the training and validation tokens.
LEARN, VALID = "tokens/learn", "tokens/valid"
#: The most characters to train a tokenizer on.
_CHARACTERS = 1 << 28
#: If documents are longer than this many rows on average, rows are cut from one stream.
_LONG = 2.0
#: Number of tokens after which what is cached is measured, and measured again.
_CACHED = 16
#: Number of tokens to estimate token frequencies from.
_COUNTED = 10_000_000


class Pretraining(FolderRun[LanguageOptions]):
    """A training run of a language model."""

    kind = LanguageOptions

    def check(self) -> None:
        if not self.options.start:
            self.options.model_config()

    def train(
        self, *, resume: bool = False, callbacks: Iterable[Callback] = ()
    ) -> tuple[DecoderLM | EncoderLM, TrainingResult]:
        """Read the text, train, and save the model and its tokenizer to the folder.

        Raises
        ------
        ValueError
            If a file or an option is invalid, the folder holds another run, or its token files changed.
        TrainingError
            If training fails.
        """
        files, here = self.open(resume)
        if resume:
            begun = files.read_record()
            restore_conditions(begun, here, self.say)
        else:
            begun = self._begun(files, here) if place()[0] == 0 else files.wait_for_record()
        tokenizer = Tokenizer.load(self.folder)
        learn, valid = TokenShards.open(self.folder / LEARN), TokenShards.open(self.folder / VALID)
        self.size_batches(learn.tokens, "tokens")
        training = self.options.training
        if place()[0] == 0:
            files.write(begun, self.options)
        model = self._model(tokenizer)
        if self.options.skip_gram.epochs and not resume:
            self._learn_vectors(model, learn, tokenizer)
        count = sum(parameter.numel() for parameter in model.parameters())
        self.say(f"{self.options.kind}, {count:,} parameters, vocabulary size {len(tokenizer):,}")
        batches, checks = self._batches(learn, tokenizer), self._batches(valid, tokenizer)
        self.say(f"{batches.per_epoch:,} batches per epoch, {batches.padding:.1%} padding")
        bytes_per_token = begun["bytes"] / max(valid.tokens, 1) if tokenizer.keeps_spaces else math.nan
        objective = self._objective(batches, learn, tokenizer, bytes_per_token)
        guess = _guess(learn, valid) if not self.options.masked else math.inf
        ended = self.fit(
            model, batches.batch, list(checks.once()), objective, guess=guess, resume=resume, callbacks=callbacks
        )
        if training.divides:
            from regard_lab.training.sharded import gather_model

            model = gather_model(model)
        if ended.reason != "interrupt" and place()[0] == 0:
            save_unbroken(lambda: save(model.eval(), self.folder), self.folder)
        return model, ended

    @torch.no_grad()
    def scores(self, model: DecoderLM | EncoderLM) -> dict[str, float]:
        """Return the loss on the held-out text, and the metrics computed from it."""
        tokenizer = Tokenizer.load(self.folder)
        learn, valid = TokenShards.open(self.folder / LEARN), TokenShards.open(self.folder / VALID)
        size = self.files(self.folder).read_record()["bytes"] / max(valid.tokens, 1)
        batches = self._batches(valid, tokenizer)
        objective = self._objective(batches, learn, tokenizer, size if tokenizer.keeps_spaces else math.nan)
        model.eval()
        costs = [objective.validation(model, batch) for batch in batches.once()]
        nats, count = torch.stack(costs).sum(0).tolist()
        return {"loss": nats / count} | objective.metrics(nats / count)

    def module(self, made: DecoderLM | EncoderLM) -> nn.Module:
        """Return the model itself."""
        return made

    @torch.no_grad()
    def cache_bytes(self, made: DecoderLM | EncoderLM) -> tuple[float, float] | None:
        """Return the bytes that decoding caches for each token of a sequence, and for a sequence of any length."""
        if not isinstance(made, DecoderLM):
            return None
        caches, sizes = made.eval().caches(), []
        for _ in range(2):
            made.features(torch.zeros(1, _CACHED, dtype=torch.long), caches=caches)
            held = [each for cache in caches for each in cache.sequence(0)]
            sizes.append(sum(each.numel() * each.element_size() for each in held))
        per_token = (sizes[1] - sizes[0]) / _CACHED
        return per_token, sizes[0] - _CACHED * per_token

    def _model(self, tokenizer: Tokenizer) -> DecoderLM | EncoderLM:
        if self.options.start:
            model = load(self.options.start, dtype=torch.float32, hosted=False)
            kind = KINDS[self.options.kind][1]
            if not isinstance(model, kind):
                got = f"{type(model).__name__} in {self.options.start}"
                raise rejected("train", "start", f"be the folder of a {self.options.kind}", got)
            if model.config.vocabulary < len(tokenizer):
                expected = f"have a vocabulary of at least {len(tokenizer):,}, the size of the tokenizer"
                raise rejected("train", "start", expected, f"{model.config.vocabulary:,}")
            return model.train()
        kind, config, training = (
            KINDS[self.options.kind][1],
            self.options.model_config(len(tokenizer)),
            self.options.training,
        )
        if training.divides:
            with torch.device("meta"):  # each process initializes its shard later
                return kind(config)
        model = kind(config)
        torch.manual_seed(training.seed)
        model.reset_parameters()  # the same initialization as for sharded models
        return model

    def _learn_vectors(self, model: DecoderLM | EncoderLM, learn: TokenShards, tokenizer: Tokenizer) -> None:
        """Initialize the embedding with skip-gram vectors; each process computes the same ones."""
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
            shards, length=data.length, rows=max(training.batch_tokens // data.length, 1), seed=training.seed,
            rank=rank, world=world, pad=tokenizer.pad or 0,
        )  # fmt: skip

    def _objective(
        self, batches: LanguageBatches, learn: TokenShards, tokenizer: Tokenizer, bytes_per_token: float
    ) -> Objective:
        data, training = self.options.data, self.options.training
        draws = training.sampled_softmax
        sampled = SampledSoftmax(_counts(learn), draws) if draws else None
        if self.options.masked:
            return MaskedTokens(tokenizer, data.masked_share, data.whole_words, sampled)
        more: dict[str, Any] = {"both_ways": data.both_ways, "indexer": training.indexer}
        return NextTokens(batches.separate, training.label_smoothing, bytes_per_token, sampled, **more)

    def _begun(self, files: RunFolder[LanguageOptions], here: dict[str, Any]) -> dict[str, Any]:
        """Prepare and write the tokenizer, tokens, options and checksums; return the record."""
        data = self.options.data
        if not data.data:
            raise ValueError("train: --data is required: files of text.")
        documents = _repeatable(lambda: self._documents(data.data), data.data)
        learn, valid = (documents, None) if data.valid else _held_out(documents, data.held_out)
        if valid is None:
            valid = _repeatable(lambda: self._documents(data.valid), data.valid)
        tokenizer = self._tokenizer(learn)
        if self.options.masked and (tokenizer.mask is None or tokenizer.pad is None):
            raise rejected("train", "tokenizer", "have mask and padding tokens to train with --masked", repr(tokenizer))
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

        for name in (LEARN, VALID):  # left by a process that was killed while preparing
            (self.folder / name / MANIFEST).unlink(missing_ok=True)
        shards = write_shards(learn(), tokenizer, self.folder / LEARN)
        checks = write_shards(counted(valid()), tokenizer, self.folder / VALID)
        limit = self.options.data.max_unknown
        for name, each, texts, most in (("training", shards, learn, limit), ("validation", checks, valid, 1.0)):
            self.say(f"{name}: {each.tokens:,} tokens in {len(each):,} documents")
            blocks = (_block(each, first) for first in range(0, each.tokens, _BLOCK))
            find = partial(_document, texts)
            for line in check_unknown(name, tokenizer, blocks, each.ends, find, most):
                self.say(line)
        record = {"data": self._checksum(LEARN), "valid": self._checksum(VALID), "bytes": size, **here}
        files.write(record, self.options)
        return record

    def _checksum(self, name: str) -> str:
        from regard_lab.models.folders import read_json

        return str(read_json(self.folder / name / MANIFEST)["sha256"])

    def _documents(self, paths: list[str]) -> Iterator[str]:
        return read_documents(paths, per=self.options.data.per, field=self.options.data.field, function="train")

    def _tokenizer(self, documents: Callable[[], Iterator[str]]) -> Tokenizer:
        """Return the start model's tokenizer, one from a folder, or a new one."""
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
    """Return a function that reads the documents each time; those of standard input are kept in memory."""
    if "-" not in paths:
        return read
    kept = list(read())
    return lambda: iter(kept)


def _document(documents: Callable[[], Iterable[str]], row: int) -> tuple[str, str]:
    """Return the place of a document, for messages, and its text."""
    return f"document {row + 1:,}", next(islice(documents(), row, None))


def _held_out(
    documents: Callable[[], Iterator[str]], share: float
) -> tuple[Callable[[], Iterator[str]], Callable[[], Iterator[str]]]:
    """Split documents into training and validation: every n-th document is held out; of a single one, its end."""
    first = list(islice(documents(), 2))
    if len(first) < 2:
        cut = int(len(first[0]) * (1 - share))
        return (lambda: iter([first[0][:cut]])), (lambda: iter([first[0][cut:]]))
    step = max(2, round(1 / share))
    return (
        lambda: (text for i, text in enumerate(documents()) if (i + 1) % step),
        # With few documents, hold out the last one.
        lambda: _non_empty((text for i, text in enumerate(documents()) if not (i + 1) % step), documents),
    )


def _non_empty(chosen: Iterator[str], documents: Callable[[], Iterator[str]]) -> Iterator[str]:
    first = next(chosen, None)
    if first is None:
        *_, first = documents()
    return chain([first], chosen)


def _first(texts: Iterator[str], characters: int) -> Iterator[str]:
    """Yield texts, at most ``characters`` characters in total."""
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def _guess(learn: TokenShards, valid: TokenShards) -> float:
    """Return the validation loss per token, in nats, of guessing by token frequency."""
    before, after = _counts(learn).astype(np.float64), _counts(valid)
    shares = (before + 1) / (before + 1).sum()
    return float(-(after @ np.log(shares)) / after.sum())


def _counts(shards: TokenShards) -> np.ndarray:
    """Return the counts (N,) of each token in the beginning of the data."""
    return np.bincount(shards.gather(np.arange(min(shards.tokens, _COUNTED))), minlength=shards.vocabulary)
