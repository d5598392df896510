"""Softmax with a sink: a logit that takes a share of the weight and has no value."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._utils.errors import described, rejected, shape
from regard._utils.mechanism import mechanism
from regard.normalizers.base import Normalizer, Statistic, Sweep, register
from regard.normalizers.softmax import row_max, sum_of_powers


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
