"""Softmax, and what differs from it by one thing: scalable softmax, softmax with a sink, cog attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._utils.constraints import Number
from regard._utils.errors import described, rejected, shape
from regard._utils.mechanism import mechanism
from regard.normalizers.base import Normalizer, Statistic, Sweep, register


def row_max(scores: Tensor) -> Tensor:
    """Return the largest score of each row (..., L, 1), detached; 0 in fully masked rows."""
    if scores.shape[-1] == 0:
        return scores.new_zeros(*scores.shape[:-1], 1)
    peak = scores.detach().amax(-1, keepdim=True)
    return torch.where(peak == -torch.inf, 0.0, peak)


def sum_of_powers(sweep: Sweep, peak: Tensor, total: Tensor) -> Statistic:
    """Return the largest score of each row, and the log of the sum of exponentials relative to it, in one sweep.

    ``peak`` and ``total`` (..., L, 1) are those of logits that are not among the scores: −inf and 0 for none.
    """

    def visit(scores: Tensor, kv_idx: Tensor) -> None:  # noqa: ARG001
        nonlocal peak, total
        new = torch.maximum(peak, scores.amax(-1, keepdim=True))
        shift = torch.where(new == -torch.inf, 0.0, new)
        total = total * torch.exp(peak - shift) + torch.exp(scores - shift).sum(-1, keepdim=True)
        peak = new

    sweep(visit)
    empty = peak == -torch.inf
    return Statistic(torch.where(empty, 0.0, peak), torch.where(empty, 1.0, total).log())


@register("softmax")
@mechanism(
    formula="exp(s_i) / Σ_j exp(s_j)",
    cost="O(L·S)",
)
class Softmax(Normalizer):
    """Softmax, ``exp(s_i) / Σ_j exp(s_j)``; fully masked rows get zeros.

    Examples
    --------
    >>> import torch
    >>> Softmax().weights(torch.tensor([[0.0, 0.0, -torch.inf], [-torch.inf, -torch.inf, -torch.inf]]))
    tensor([[0.5000, 0.5000, 0.0000],
            [0.0000, 0.0000, 0.0000]])
    """

    streams = True
    online = True

    def weights(self, scores: Tensor) -> Tensor:
        powers = torch.exp(scores - row_max(scores))
        total = powers.sum(-1, keepdim=True)
        return powers / torch.where(total == 0, 1, total)

    def statistic(self, sweep: Sweep, like: Tensor) -> Statistic:
        """Compute the maximum, and the log of the sum of exponentials relative to it, in one sweep."""
        return sum_of_powers(sweep, torch.full_like(like, -torch.inf), torch.zeros_like(like))

    def tile_weights(self, scores: Tensor, row: Statistic, kv_idx: Tensor) -> Tensor:  # noqa: ARG002
        return torch.exp(scores - row.shift - row.offset)

    def tile_slope(self, weights: Tensor) -> Tensor:
        return weights


# Scores that grow with the logarithm of the number of keys ------------------------------------------------------------


@register("scalable_softmax")
@mechanism(
    formula="exp(a log(n) s_i) / Σ_j exp(a log(n) s_j), n the number of visible keys",
    sources=("nakanishi2025",),
    learned="a, or one for each head",
    cost="O(L·S)",
)
class ScalableSoftmax(Normalizer):
    """Scalable softmax (SSMax), ``softmax(a log(n) s)`` for n visible keys (Nakanishi 2025, arXiv 2501.19399).

    Softmax over more keys is flatter; the factor log n undoes that. A row that sees one key gives it weight 1.

    n is counted in each row, so weights are computed from whole rows, in memory that grows with L×S. In causal
    attention without padding n is the position + 1: queries multiplied by ``a · log(position + 1)`` give the same on
    every engine.

    Parameters
    ----------
    factor : float or Tensor (), (1,) or (H,), default 0.43
        a. A tensor gets a gradient. The default is the paper's initial value.

    Examples
    --------
    >>> import torch
    >>> ScalableSoftmax(1.0).weights(torch.tensor([[1.0, 0.0, -torch.inf], [1.0, -torch.inf, -torch.inf]]))
    tensor([[0.6667, 0.3333, 0.0000],
            [1.0000, 0.0000, 0.0000]])
    """

    def __init__(self, factor: float | Tensor = 0.43) -> None:
        if isinstance(factor, Tensor):
            if not factor.is_floating_point() or factor.dim() > 1:
                expected = "be a number, or a floating-point tensor of one number, or one for each head"
                raise rejected("ScalableSoftmax", "factor", expected, described(factor))
            self.factor: float | Tensor = factor
        else:
            self.factor = Number(note=" or a tensor")(self, "factor", factor)

    def check(self, heads: int) -> None:
        if isinstance(self.factor, Tensor) and self.factor.numel() not in (1, heads):
            expected = f"have one number, or one for each of query's {heads} heads"
            raise rejected("ScalableSoftmax", "factor", expected, shape(self.factor))

    def weights(self, scores: Tensor) -> Tensor:
        hidden = scores == -torch.inf
        count = (~hidden).sum(-1, keepdim=True).clamp(min=1).to(scores.dtype)
        factor = self.factor
        if isinstance(factor, Tensor):
            factor = factor.to(scores.dtype)
            factor = factor.view(-1, 1, 1) if factor.dim() else factor
        scaled = torch.where(hidden, 0.0, scores) * (factor * count.log())
        return Softmax().weights(torch.where(hidden, -torch.inf, scaled))

    @classmethod
    def sample(cls, generator: torch.Generator) -> ScalableSoftmax:
        return cls(0.2 + torch.rand((), generator=generator))


# A sink: a logit that takes a share of the weight and has no value ----------------------------------------------------


@register("softmax_sink")
@mechanism(
    formula="exp(s_i) / (exp(z) + Σ_j exp(s_j))",
    sources=("openai2025", "miller2023"),
    learned="z, or one for each head",
    cost="O(L·S)",
)
class SoftmaxSink(Normalizer):
    """Softmax with a sink, ``exp(s_i) / (exp(z) + Σ_j exp(s_j))``: a row may give little weight to all of its keys.

    The logit z of the sink competes with the scores, and what it takes is lost. gpt-oss learns one for each head
    (OpenAI 2025, arXiv 2508.10925). A sink of 0, the default, is softmax-plus-one (Miller 2023). A row that sees no key
    gets weights of 0, and −inf is no sink at all.

    The fields of :class:`regard.Aux` leave the sink out: ``lse`` is the log-sum-exp of the scores of keys alone. The
    log of the denominator is ``logaddexp(lse, z)``, and the weights of a row sum to ``sigmoid(lse − z)``. ``entropy``
    is ``−Σ w log w`` over keys.

    Parameters
    ----------
    sink : float or Tensor (), (1,) or (H,), default 0.0
        The logit z, after the scale of the scores. A tensor gets a gradient.

    Examples
    --------
    >>> import torch
    >>> SoftmaxSink().weights(torch.tensor([[0.0, 0.0, -torch.inf]]))
    tensor([[0.3333, 0.3333, 0.0000]])
    >>> sink = torch.tensor([0.0, 40.0])  # of two heads
    >>> SoftmaxSink(sink).weights(torch.zeros(2, 1, 1)).flatten()
    tensor([5.0000e-01, 4.2484e-18])
    """

    streams = True
    convex = False

    def __init__(self, sink: float | Tensor = 0.0) -> None:
        if isinstance(sink, Tensor):
            if not sink.is_floating_point() or sink.dim() > 1:
                expected = "be a number, or a floating-point tensor of one logit, or one for each head"
                raise rejected("SoftmaxSink", "sink", expected, described(sink))
        elif isinstance(sink, bool) or not isinstance(sink, (int, float)):
            expected = "be a number or a tensor"
            raise rejected("SoftmaxSink", "sink", expected, described(sink), TypeError)
        elif not sink < math.inf:
            raise rejected("SoftmaxSink", "sink", "be less than infinity", sink)
        self.sink = sink if isinstance(sink, Tensor) else float(sink)

    def check(self, heads: int) -> None:
        if isinstance(self.sink, Tensor) and self.sink.numel() not in (1, heads):
            expected = f"have one logit, or one for each of query's {heads} heads"
            raise rejected("SoftmaxSink", "sink", expected, shape(self.sink))

    def logits(self, like: Tensor) -> Tensor:
        """Return the logits, in a shape that broadcasts with scores (..., H, L, S), in the dtype of ``like``."""
        if not isinstance(self.sink, Tensor):
            return like.new_full((), self.sink)
        return self.sink.to(like.dtype).view(-1, 1, 1) if self.sink.dim() else self.sink.to(like.dtype)

    def weights(self, scores: Tensor) -> Tensor:
        sink = self.logits(scores)
        peak = torch.maximum(row_max(scores), sink.detach())
        powers = torch.exp(scores - peak)
        total = powers.sum(-1, keepdim=True) + torch.exp(sink - peak)
        return powers / torch.where(total == 0, 1, total)

    def statistic(self, sweep: Sweep, like: Tensor) -> Statistic:
        """Compute the largest logit, and the log of the sum of exponentials relative to it, in one sweep."""
        sink = self.logits(like).expand_as(like)
        total = torch.exp(sink - torch.where(sink == -torch.inf, 0.0, sink.detach()))
        return sum_of_powers(sweep, sink.detach(), total)

    def tile_weights(self, scores: Tensor, row: Statistic, kv_idx: Tensor) -> Tensor:  # noqa: ARG002
        return torch.exp(scores - row.shift - row.offset)

    def tile_slope(self, weights: Tensor) -> Tensor:
        return weights

    def slope_total(self, total: Tensor) -> Tensor:
        return torch.ones_like(total)

    def pull(self, row: Statistic, grad: Tensor) -> list[Tensor]:
        if not isinstance(self.sink, Tensor):
            return []
        share = torch.exp(self.logits(grad) - row.shift - row.offset)
        return [(share * grad).sum_to_size(self.logits(grad).shape).view_as(self.sink).to(self.sink.dtype)]

    @classmethod
    def sample(cls, generator: torch.Generator) -> SoftmaxSink:
        return cls(torch.randn((), generator=generator))


# Weights with the signs of the scores ---------------------------------------------------------------------------------


@register("cog")
@mechanism(
    formula="sgn(s_i) exp(|s_i|) / Σ_j exp(|s_j|)",
    sources=("lv2024",),
    cost="O(L·S)",
)
class Cog(Normalizer):
    """Cog attention, ``sgn(s) · softmax(|s|)``: a key that scores below 0 is subtracted (Lv 2024, arXiv 2411.07176).

    The absolute weights of a row sum to 1. The sign depends on more than the distance to one number per row, so weights
    are computed from whole rows, in memory that grows with L×S.

    Examples
    --------
    >>> import torch
    >>> Cog().weights(torch.tensor([[1.0, -1.0, -torch.inf]]))
    tensor([[ 0.5000, -0.5000,  0.0000]])
    """

    convex = False
    monotone = False

    def weights(self, scores: Tensor) -> Tensor:
        hidden = scores == -torch.inf
        shown = torch.where(hidden, 0.0, scores)
        return shown.sign() * Softmax().weights(torch.where(hidden, -torch.inf, shown.abs()))
