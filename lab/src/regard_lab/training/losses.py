"""The loss of training, from the features that logits are made of: the logits themselves never exist all at once.

Dimensions: B batch, T target steps, P width of features, N target vocabulary, R rows that are no padding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._utils.errors import rejected
from regard_lab.models.base import PAD

#: Logits that exist at once: on a CPU few, as they are gone through several times, and enough for fast products.
_LOGITS = {"cpu": 3 << 20}
_LOGITS_ELSEWHERE = 1 << 26
#: No weight of attention counts as smaller.
_LEAST = 1e-9
#: Products have a multiple of so many rows: oneDNN keeps a kernel for every shape that it ever saw.
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
    """Return the mean cross-entropy of the symbols that are no padding, and how likely each symbol was.

    With logits z = W f + b, a symbol y costs −(1 − s) log softmax(z)_y − s · mean of log softmax(z), s the smoothing
    (Szegedy 2015, arXiv 1512.00567). Logits are made, and the gradients with respect to W, b and f taken, for some rows
    at a time; under autocast products run in its dtype, and all else in float32. torch's own chunked
    ``linear_cross_entropy`` knows no smoothing.

    Parameters
    ----------
    features : Tensor (B, T, P)
    projection : Tensor (N, P), Tensor (N,) or None
        W and b.
    target : Tensor (B, T)
        Of the numbers of symbols.
    smoothing : float, default 0
        In [0, 1).
    ignore_index : int, default 0
        The target of what is not to be predicted: padding.
    weight : Tensor (B, T), optional
        What each symbol's cost is multiplied by, before the mean; it may be negative, and has no gradient.

    Returns
    -------
    loss : Tensor ()
        In nats, float32 or, of float64 features, float64; 0 where all is padding.
    log_likelihood : Tensor (B, T)
        The logarithm of each symbol's probability, detached; 0 for padding.

    Raises
    ------
    ValueError
        If the shapes do not fit, or the smoothing is out of range.

    Notes
    -----
    There is no second derivative. The gradients are made on the way forward, so a scale that is multiplied in later
    does not keep them from underflow in float16: let autocast use bfloat16.

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
    lower = torch.is_autocast_enabled(kind) and features.dtype != torch.float64  # which autocast leaves as it is
    dtype = torch.get_autocast_dtype(kind) if lower else features.dtype
    scale = None if weight is None else weight.detach().flatten()[real]
    loss, likely = _Chunked.apply(rows, *projection, symbols, scale, smoothing, dtype, torch.is_grad_enabled())
    log_likelihood = likely.new_zeros(target.numel()).index_copy(0, real, likely)
    return loss, log_likelihood.view(target.shape)


def alignment_loss(weights: Tensor, links: Tensor) -> Tensor:
    """Return the mean cross-entropy between attention and links, over the target steps that have any.

    Of a step with the links A, it is −1/|A| Σ log α over A (Chen 2016, arXiv 1607.01628; Garg 2019, arXiv 1909.02074).

    Parameters
    ----------
    weights : Tensor (B, T, S)
        The attention α of target steps to source steps.
    links : Tensor (M, 3)
        A row, a target step and a source step each.

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
    # A weight of exactly 0, as sparse normalizers have, must not make the loss infinite.
    costs = -weights[row, step, source].float().clamp(min=_LEAST).log()
    return (costs / count[flat]).sum() / count.count_nonzero().clamp(min=1)


def coverage_loss(weights: Tensor, real: Tensor) -> Tensor:
    """Return how unevenly the places of sources are attended to: the mean over sources and places of (1 − Σ_t α_ts)².

    It makes attention doubly stochastic (Xu 2015, arXiv 1502.03044): each step's weights sum to 1, and about so each
    place's.

    Parameters
    ----------
    weights : Tensor (B, T, S)
    real : Tensor (B, T) of bool
        Which steps count; rows without any are left out of the mean.

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
    """Takes the gradients on the way forward, where the logits are at hand."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, symbols: Tensor, scale: Tensor | None,
        smoothing: float, dtype: torch.dtype, needed: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the mean loss () of rows (R, P), each times its scale (R,), and log p (R,) of their symbols."""
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
        if evenly is not None:  # else an impossible symbol would make it 0 · ∞
            gains = (1 - smoothing) * gains + smoothing * evenly
        gains = gains if scale is None else gains * scale.to(wide)
        return -gains.sum() / count, log_likelihood

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients with respect to rows, weight and bias."""
        if torch.is_grad_enabled():
            expected = "be False, as the gradient is taken on the way forward and has none itself"
            raise rejected("cross_entropy", "create_graph", expected, True, RuntimeError)
        rows, weight, bias = (None if saved is None else saved * slope for saved in ctx.saved_tensors)
        return rows, weight, bias, None, None, None, None, None
