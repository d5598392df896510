"""Scalable softmax: scores grow with the logarithm of the number of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._utils.constraints import Number
from regard._utils.errors import described, rejected, shape
from regard._utils.mechanism import mechanism
from regard.normalizers.base import Normalizer, register
from regard.normalizers.softmax import Softmax


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
