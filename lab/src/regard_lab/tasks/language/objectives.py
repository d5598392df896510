"""What language models learn: the next token, or tokens that are masked.

Dimensions: B rows, T tokens of a row, R targets, E width, N vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import masks
from regard_lab.data.corruption import mask_tokens
from regard_lab.data.packing import IGNORE_INDEX, NO_DOCUMENT, LanguageBatch
from regard_lab.models import DecoderLM, EncoderLM
from regard_lab.text.tokenizer import Tokenizer
from regard_lab.training.losses import cross_entropy
from regard_lab.training.objectives import Loss, Objective
from regard_lab.training.sampled_softmax import Projection, SampledSoftmax


class NextTokens(Objective):
    """Predict every token from those before it in its document.

    Parameters
    ----------
    separate : bool
        Whether rows have several documents, which do not see each other.
    smoothing : float, default 0.0
        The share of the probability that goes to other tokens.
    bytes_per_token : float, default NaN
        Of the text to validate with.
    sampled : SampledSoftmax, optional
        Chooses what tokens are told apart from, in training.
    both_ways : bool, default False
        Whether each row is read backward in every other step, about: its tokens are predicted from those behind them.
    """

    def __init__(
        self,
        separate: bool,
        smoothing: float = 0.0,
        bytes_per_token: float = math.nan,
        sampled: SampledSoftmax | None = None,
        both_ways: bool = False,
    ) -> None:
        self.separate, self.smoothing, self.bytes_per_token = separate, smoothing, bytes_per_token
        self.sampled, self.both_ways = sampled, both_ways

    def loss(self, model: nn.Module, batch: LanguageBatch) -> Loss:
        if self.both_ways:
            batch = batch.turned((torch.rand(batch.examples) < 0.5).to(batch.tokens.device))
        value, _, count = self._cost(model, batch, self.smoothing, self.sampled)
        return Loss(value, float(value.detach()), count)

    def validation(self, model: nn.Module, batch: LanguageBatch) -> Tensor:
        _, log_likelihood, count = self._cost(model, batch, 0.0)
        return _sums(log_likelihood, count)

    def metrics(self, loss: float, counts: Sequence[float] = ()) -> dict[str, float]:  # noqa: ARG002
        told = {"perplexity": math.exp(min(loss, 700.0))}
        if not math.isnan(self.bytes_per_token):
            told["bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
        return told

    def _cost(
        self, model: nn.Module, batch: LanguageBatch, smoothing: float, sampled: SampledSoftmax | None = None
    ) -> tuple[Tensor, Tensor, int]:
        """Return the mean cost, how likely each token was, and how many there were: of this process's part of rows."""
        assert isinstance(model, DecoderLM)
        mask = masks.document(batch.documents) if self.separate else None
        tokens, targets, positions = _parts(model, batch.tokens, batch.targets, batch.positions)
        features = model.features(tokens, mask=mask, positions=positions if self.separate else None)
        value, log_likelihood = _named(features, model.projection, targets, sampled, smoothing)
        return value, log_likelihood, int((targets != IGNORE_INDEX).sum())


class MaskedTokens(Objective):
    """Name tokens that are masked, from all others of their document (Devlin 2019, arXiv 1810.04805).

    Which are masked is drawn anew in each step from torch's generator; in validation they are always the same.

    Parameters
    ----------
    tokenizer : Tokenizer
        With a number for the mask.
    share : float, default 0.15
        Of the tokens.
    whole_words : bool, default False
    sampled : SampledSoftmax, optional
        Chooses what tokens are told apart from, in training.
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
        features = model.masked_features(rows[masked]).unsqueeze(0)  # (1, R, W): no others are needed
        value, log_likelihood = _named(features, model.projection, targets[masked].unsqueeze(0), sampled)
        return log_likelihood[0], value

    def _masked(self, batch: LanguageBatch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return tokens of which some are masked, and those as targets."""
        return mask_tokens(
            batch.tokens, self.mask, self.vocabulary, generator, share=self.share, specials=self.specials,
            real=batch.documents != NO_DOCUMENT, word_starts=self.word_starts,
        )  # fmt: skip


class HostedNextTokens(NextTokens):
    """Predict every token, by a model that transformers computes: to validate, document by document."""

    def validation(self, model: nn.Module, batch: LanguageBatch) -> Tensor:
        return _apart(model, batch, batch.tokens, batch.targets)


class HostedMaskedTokens(MaskedTokens):
    """Name masked tokens, by a model that transformers computes: to validate, document by document."""

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
    """Return of tensors (B, T) what this process has of their rows."""
    if model.context is None:
        return list(whole)
    at = model.context.positions(whole[0].shape[1], whole[0].device)
    return [each[:, at] for each in whole]


def _sums(log_likelihood: Tensor, count: int) -> Tensor:
    """Return the sum of the costs of tokens, and their count, (2,)."""
    return torch.stack(
        [-log_likelihood.double().sum(), torch.tensor(float(count), dtype=torch.float64).to(log_likelihood.device)]
    )
