"""Objectives of training: cross-entropy without all logits at once, sampled softmax, frequencies, and tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.errors import rejected
from regard_lab.data.batches import Batch
from regard_lab.models.base import END, PAD, EncoderDecoder
from regard_lab.text.ragged import Ragged
from regard_lab.training.options import TrainingOptions

# Frequencies of target symbols: the output bias that training begins with, and the loss of guessing by them -----------


@dataclass(frozen=True)
class Frequencies:
    """The share of each symbol among those that are to be written, end marks included.

    Attributes
    ----------
    shares : ndarray (N,)
        They sum to 1, and none is 0: each symbol counts as if it stood there once more.

    Examples
    --------
    >>> targets = Ragged.of([[2, 3], [2]])
    >>> frequencies = Frequencies.of(targets, 4)
    >>> frequencies.shares.tolist(), round(frequencies.loss(targets), 3)
    ([0.1111111111111111, 0.3333333333333333, 0.3333333333333333, 0.2222222222222222], 1.18)
    """

    shares: np.ndarray

    @classmethod
    def of(cls, targets: Ragged, size: int) -> Frequencies:
        """Return the frequencies of a vocabulary's symbols in sequences, without their end marks."""
        counts = _counts(targets, size) + 1.0
        return cls(counts / counts.sum())

    def loss(self, targets: Ragged) -> float:
        """Return the mean cross-entropy per symbol, in nats, of guessing by frequency."""
        counts = _counts(targets, len(self.shares))
        return float(-(counts @ np.log(self.shares)) / counts.sum())

    def set_bias(self, model: EncoderDecoder) -> None:
        """Initialize the output bias to log-frequencies, if the model's features can saturate.

        Adam moves the bias by at most the learning rate per step, so it learns frequencies slowly. The features would
        learn them instead, saturate, and no longer distinguish sources.
        """
        if model.saturates:
            _, bias = model.projection
            with torch.no_grad():
                bias.copy_(torch.from_numpy(np.log(self.shares)))


def _counts(targets: Ragged, size: int) -> np.ndarray:
    counts = np.bincount(targets.numbers, minlength=size).astype(np.float64)
    counts[END] += len(targets)
    return counts


# Training objectives: chunked cross-entropy, sampled softmax, and the losses of tasks ---------------------------------
# Dimensions: B batch, T target steps, P feature size, N target vocabulary size, R rows that are not padding.


# Chunked cross-entropy: computes logits from features in chunks, never all at once ------------------------------------


#: Number of logits per chunk; on a CPU few enough for the cache, and enough for fast products.
_LOGITS = {"cpu": 3 << 20}
_LOGITS_ELSEWHERE = 1 << 26
#: Lower bound on attention weights in the alignment loss.
_LEAST = 1e-9
#: Round the number of rows up to a multiple of this, because oneDNN caches a kernel for every shape.
_GRAIN = 32


def cross_entropy(
    features: Tensor,
    projection: tuple[Tensor, Tensor | None],
    target: Tensor,
    smoothing: float = 0.0,
    *,
    ignore_index: int = PAD,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy of all symbols except padding, and the log-likelihood of each.

    With logits z = W f + b and smoothing s, the loss of a symbol y is −(1 − s) log softmax(z)_y − s · mean of
    log softmax(z) (Szegedy 2015, arXiv 1512.00567). Logits and the gradients with respect to W, b and f are computed in
    chunks of rows. Under autocast, products run in its dtype, and everything else in float32. torch's own chunked
    ``linear_cross_entropy`` does not support label smoothing.

    Parameters
    ----------
    features : Tensor (B, T, P)
    projection : Tensor (N, P), Tensor (N,) or None
        W and b.
    target : Tensor (B, T)
        Symbol ids.
    smoothing : float, default 0
        Label smoothing in [0, 1).
    ignore_index : int, default 0
        Target id to ignore, such as padding.
    weight : Tensor (B, T), optional
        Factor of each symbol's loss, before the mean; may be negative, and gets no gradient.

    Returns
    -------
    loss : Tensor ()
        In nats; float64 for float64 features, otherwise float32; 0 if all symbols are padding.
    log_likelihood : Tensor (B, T)
        Log-probability of each symbol, detached; 0 for padding.

    Raises
    ------
    ValueError
        If the shapes do not match, or the smoothing is out of range.

    Notes
    -----
    Second derivatives are not supported. The forward pass computes the gradients, so loss scaling cannot prevent
    underflow in float16: use autocast with bfloat16.

    Examples
    --------
    >>> features, vocabulary = torch.zeros(1, 3, 8), (torch.ones(4, 8), torch.zeros(4))
    >>> loss, log_likelihood = cross_entropy(features, vocabulary, torch.tensor([[2, 3, 0]]), smoothing=0.1)
    >>> loss.exp(), log_likelihood.exp()
    (tensor(4.), tensor([[0.2500, 0.2500, 1.0000]]))
    """
    if features.shape[:2] != target.shape:
        expected = f"have the shape {tuple(features.shape[:2])} of the features' rows"
        raise rejected("cross_entropy", "target", expected, tuple(target.shape))
    if features.shape[2:] != projection[0].shape[1:]:
        expected = f"have width {projection[0].shape[-1]}, as the vocabulary's weight"
        raise rejected("cross_entropy", "features", expected, tuple(features.shape))
    if not 0 <= smoothing < 1:
        raise rejected("cross_entropy", "smoothing", "be in [0, 1)", smoothing)
    if weight is not None and weight.shape != target.shape:
        expected = f"have the shape {tuple(target.shape)} of the target"
        raise rejected("cross_entropy", "weight", expected, tuple(weight.shape))
    real = (target != ignore_index).flatten().nonzero()[:, 0]  # (R,)
    rows, symbols = features.flatten(0, 1).index_select(0, real), target.flatten()[real]
    kind = features.device.type
    lower = torch.is_autocast_enabled(kind) and features.dtype != torch.float64  # autocast does not change float64
    dtype = torch.get_autocast_dtype(kind) if lower else features.dtype
    scale = None if weight is None else weight.detach().flatten()[real]
    loss, likely = _Chunked.apply(rows, *projection, symbols, scale, smoothing, dtype, torch.is_grad_enabled())
    log_likelihood = likely.new_zeros(target.numel()).index_copy(0, real, likely)
    return loss, log_likelihood.view(target.shape)


def alignment_loss(weights: Tensor, links: Tensor) -> Tensor:
    """Return the mean cross-entropy between attention and alignment links, over target steps with links.

    For a step with links A, it is −1/|A| Σ log α over A (Chen 2016, arXiv 1607.01628; Garg 2019, arXiv 1909.02074).

    Parameters
    ----------
    weights : Tensor (B, T, S)
        The attention α of target steps to source steps.
    links : Tensor (M, 3)
        Batch row, target step and source step of each link.

    Returns
    -------
    Tensor ()
        In nats, float32; 0 without links.

    Examples
    --------
    >>> weights = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])
    >>> alignment_loss(weights, torch.tensor([[0, 0, 1]])).exp()
    tensor(2.)
    """
    row, step, source = links.unbind(1)
    flat = row * weights.shape[1] + step
    count = torch.bincount(flat, minlength=1)  # links of each step
    # Sparse normalizers give weights of exactly 0, which must not make the loss infinite.
    costs = -weights[row, step, source].float().clamp(min=_LEAST).log()
    return (costs / count[flat]).sum() / count.count_nonzero().clamp(min=1)


def coverage_loss(weights: Tensor, real: Tensor) -> Tensor:
    """Return the coverage loss: the mean over sources and their positions of (1 − Σ_t α_ts)².

    It encourages doubly stochastic attention (Xu 2015, arXiv 1502.03044): the weights of each step sum to 1, and those
    on each source position to about 1.

    Parameters
    ----------
    weights : Tensor (B, T, S)
    real : Tensor (B, T) of bool
        True for real steps; sources without any do not count in the mean.

    Returns
    -------
    Tensor ()

    Examples
    --------
    >>> weights = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    >>> coverage_loss(weights, torch.ones(1, 2, dtype=torch.bool))
    tensor(1.)
    """
    received = (weights.float() * real[..., None]).sum(1)  # (B, S)
    some = real.any(1)
    return ((1 - received).square().mean(1) * some).sum() / some.sum().clamp(min=1)


class _Chunked(torch.autograd.Function):
    """Computes the gradients in the forward pass, while the logits exist."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, symbols: Tensor, scale: Tensor | None,
        smoothing: float, dtype: torch.dtype, needed: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the mean of the scaled losses of rows (R, P), and their log-likelihoods (R,)."""
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        count, N = max(len(rows), 1), len(weight)
        matrix, padding = weight.to(dtype), -len(rows) % _GRAIN
        shift = None if bias is None else bias.to(wide)
        used, symbols = F.pad(rows.to(dtype), (0, 0, 0, padding)), F.pad(symbols, (0, padding))
        scales = None if scale is None else F.pad(scale.to(wide), (0, padding))[:, None]
        log_likelihood = rows.new_empty(len(rows), dtype=wide)
        evenly = torch.empty_like(log_likelihood) if smoothing else None  # the mean of log p of all symbols
        if needed:
            to_rows, to_weight = torch.empty_like(rows), torch.zeros_like(weight)
            to_bias = None if shift is None else torch.zeros_like(shift)
        step = max(_LOGITS.get(rows.device.type, _LOGITS_ELSEWHERE) // N // _GRAIN, 1) * _GRAIN
        with torch.autocast(rows.device.type, enabled=False):
            for first in range(0, len(rows), step):
                some, real = slice(first, first + step), min(len(rows) - first, step)
                at = symbols[some, None]  # (C, 1) of the chunk's C rows
                logits = F.linear(used[some], matrix).to(wide)  # (C, N)
                logits = logits if shift is None else logits.add_(shift)
                top = logits.amax(1, keepdim=True)
                picked = logits.gather(1, at)
                average = logits.mean(1, keepdim=True) if evenly is not None else None
                shares = logits.sub_(top).exp_()
                total = shares.sum(1, keepdim=True)
                normal = total.log().add_(top)  # log Σ exp z
                log_likelihood[some] = (picked - normal)[:real, 0]
                if evenly is not None and average is not None:
                    evenly[some] = (average - normal)[:real, 0]
                if needed:
                    # ∂loss/∂z = (softmax(z) − (1 − s)·onehot(y) − s/N) / R
                    shares.mul_(1 / (total * count))
                    if smoothing:
                        shares.sub_(smoothing / N / count)
                    shares.scatter_add_(1, at, torch.full_like(top, -(1 - smoothing) / count))
                    shares[real:] = 0
                    if scales is not None:
                        shares.mul_(scales[some])
                    if to_bias is not None:
                        to_bias += shares.sum(0)
                    slopes = shares.to(dtype)
                    to_rows[some] = (slopes @ matrix)[:real]
                    if dtype == to_weight.dtype:
                        to_weight.addmm_(slopes.t(), used[some])
                    else:
                        to_weight += slopes.t() @ used[some]
        if needed:
            ctx.save_for_backward(
                to_rows, to_weight, None if to_bias is None or bias is None else to_bias.to(bias.dtype)
            )
        ctx.mark_non_differentiable(log_likelihood)
        gains = log_likelihood
        if evenly is not None:  # without smoothing, an impossible symbol would give 0 · ∞
            gains = (1 - smoothing) * gains + smoothing * evenly
        gains = gains if scale is None else gains * scale.to(wide)
        return -gains.sum() / count, log_likelihood

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients with respect to rows, weight and bias."""
        if torch.is_grad_enabled():
            expected = "be False: second derivatives are not supported"
            raise rejected("cross_entropy", "create_graph", expected, True, RuntimeError)
        rows, weight, bias = (None if saved is None else saved * slope for saved in ctx.saved_tensors)
        return rows, weight, bias, None, None, None, None, None


# Sampled softmax: cross-entropy over the symbols of a batch and sampled negatives -------------------------------------
# Dimensions: B rows, T steps, P features, N vocabulary, M candidates.


#: Negatives are sampled by frequency to this power, as in skip-gram (Mikolov 2013), so that rare symbols occur, too.
POWER = 0.75

#: The output projection: weight (N, P), and bias (N,) or None.
Projection = tuple[Tensor, Tensor | None]


class SampledSoftmax:
    """Sampled softmax: choose candidates from the vocabulary, with a bias that corrects for the sampling.

    A step takes time and memory for M candidates instead of N symbols. The candidates are the symbols of the batch,
    which occur with frequency f, and K negatives sampled with q ∝ f^0.75. With n symbols in the batch, symbol i is a
    candidate with probability::

        π_i = 1 − (1 − f_i)ⁿ (1 − q_i)ᴷ

    Its logit becomes z_i − log π_i, so that the sum over candidates estimates the sum over all symbols (Bengio &
    Senécal 2008; Jean 2015, arXiv 1412.2007), and equals it for large K.

    Parameters
    ----------
    counts : ndarray (N,)
        Count of each symbol in the training text; 1 is added to each.
    draws : int
        Number of negatives K.

    Raises
    ------
    ValueError
        If there are no counts, one is negative, or draws is below 1.

    Examples
    --------
    >>> sampled = SampledSoftmax(np.array([4, 2, 1, 1]), draws=2)
    >>> projection, targets = sampled.among((torch.eye(4), None), torch.tensor([[1, 0, -100]]), ignore_index=-100)
    >>> len(projection[0]) <= 4, projection[0][targets[0, :2]].argmax(1).tolist(), int(targets[0, 2])
    (True, [1, 0], -100)
    """

    def __init__(self, counts: np.ndarray, draws: int) -> None:
        if counts.ndim != 1 or not len(counts) or counts.min() < 0:
            raise rejected("SampledSoftmax", "counts", "be one count, 0 or more, for each symbol", counts.shape)
        if draws < 1:
            raise rejected("SampledSoftmax", "draws", "be at least 1", draws)
        self.draws = draws
        frequencies = torch.from_numpy(counts.astype(np.float64) + 1)
        frequencies = frequencies / frequencies.sum()
        drawn = frequencies**POWER
        drawn = drawn / drawn.sum()
        # Sample by binary search in cumulative sums; torch.multinomial scans the whole vocabulary.
        self._sums = drawn.cumsum(0)
        # log(1 − f) and log(1 − q), finite even for a vocabulary of one symbol.
        self._missed = tuple(torch.log1p(-each.clamp(max=1 - 1e-12)) for each in (frequencies, drawn))

    def among(self, projection: Projection, targets: Tensor, ignore_index: int) -> tuple[Projection, Tensor]:
        """Return the projection (M, P) on candidates, with a bias (M,), and the targets' indices among them.

        Parameters
        ----------
        projection : Tensor (N, P), Tensor (N,) or None
        targets : Tensor (B, T) of int
        ignore_index : int
            Target id to ignore, which does not change.
        """
        weight, bias = projection
        device, real = targets.device, targets != ignore_index
        symbols = targets[real]
        places = torch.rand(self.draws, dtype=torch.float64)
        drawn = torch.searchsorted(self._sums, places).clamp(max=len(self._sums) - 1).to(device)
        candidates, at = torch.unique(torch.cat([symbols, drawn]), return_inverse=True)
        by_batch, by_draws = (each[candidates.cpu()] for each in self._missed)
        missing = -torch.log(-torch.expm1(len(symbols) * by_batch + self.draws * by_draws))  # −log π
        missing = missing.to(device, weight.dtype)
        placed = torch.full_like(targets, ignore_index)
        placed[real] = at[: len(symbols)]
        some = missing if bias is None else bias[candidates] + missing
        return (weight[candidates], some), placed


# The interface of objectives, and the objective of encoder–decoders ---------------------------------------------------


class Examples(Protocol):
    """A batch of examples for an objective."""

    @property
    def examples(self) -> int:
        """The number of examples."""

    @property
    def count(self) -> int:
        """The number of tokens, without padding."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the batch on another device."""


@dataclass(frozen=True)
class Loss:
    """The loss of a batch.

    Attributes
    ----------
    value : Tensor ()
        The loss to differentiate.
    shown : float
        The loss to log, without surrogate terms.
    count : int
        The number of symbols in the mean, which weights the batch in gradient accumulation.
    """

    value: Tensor
    shown: float
    count: int


class Objective(ABC):
    """A training loss with its validation metrics."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return the training loss of a batch."""

    @abstractmethod
    def validation(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the sum of the losses of a batch's symbols, and their count, (2,) of float64, without gradients.

        May append further sums for :meth:`metrics`; all are summed over batches.
        """

    def metrics(self, loss: float, counts: Sequence[float] = ()) -> dict[str, float]:  # noqa: ARG002
        """Return more validation metrics, from the mean loss per symbol and further sums."""
        return {}


class Seq2SeqObjective(Objective):
    """Cross-entropy of targets with label smoothing, plus optional alignment and coverage losses.

    Parameters
    ----------
    teacher_forcing : float, default 1.0
        Probability that a step reads the reference symbol.
    smoothing : float, default 0.0
        Label smoothing.
    guide : float, default 0.0
        Weight of the alignment loss.
    guided : str, optional
        The attention map for the alignment and coverage losses.
    coverage : float, default 0.0
        Weight of the coverage loss.
    """

    def __init__(
        self,
        teacher_forcing: float = 1.0,
        smoothing: float = 0.0,
        guide: float = 0.0,
        guided: str = "",
        coverage: float = 0.0,
    ) -> None:
        self.teacher_forcing, self.smoothing, self.guide, self.guided = teacher_forcing, smoothing, guide, guided
        self.coverage = coverage

    @classmethod
    def of(cls, options: TrainingOptions, guided: str = "") -> Self:
        """Return the objective described by training options."""
        return cls(options.teacher_forcing, options.label_smoothing, options.guide, guided)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        assert isinstance(model, EncoderDecoder)
        value, log_likelihood, weights = self._cost(model, batch, self.teacher_forcing, self.smoothing)
        shown = float(value.detach())
        if model.stochastic:
            value = value + model.surrogate(log_likelihood, batch.target != PAD)
        if batch.links is not None and weights is not None:
            guide = self.guide * alignment_loss(weights, batch.links)
            value = value + guide
            shown += float(guide.detach())
        if self.coverage and weights is not None:
            value = value + self.coverage * coverage_loss(weights, batch.target != PAD)
        return Loss(value, shown, int((batch.target != PAD).sum()))

    def validation(self, model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(model, EncoderDecoder)
        _, log_likelihood, _ = self._cost(model, batch, 1.0, 0.0)
        return torch.stack([-log_likelihood.double().sum(), (batch.target != PAD).sum().double()])

    def _cost(
        self, model: EncoderDecoder, batch: Batch, teacher_forcing: float, smoothing: float
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the cross-entropy, the log-likelihoods, and the attention (B, T, S) if a loss needs it."""
        given = batch.source, batch.lengths, shifted(batch.target), teacher_forcing
        if batch.links is None and not (self.coverage and model.training):
            features, weights = model.features(*given), None
        else:
            features, weights = model.features_and_attention(*given, name=self.guided)
        return *cross_entropy(features, model.projection, batch.target, smoothing), weights


def shifted(target: Tensor) -> Tensor:
    """Return the decoder input for targets (B, T): an end mark followed by all symbols but the last."""
    return torch.cat([torch.full_like(target[:, :1], END), target[:, :-1]], 1)
