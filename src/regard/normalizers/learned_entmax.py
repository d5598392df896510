"""α-entmax whose α is learned, one for each head."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._utils.errors import described, rejected, shape
from regard._utils.mechanism import mechanism
from regard.normalizers.base import Normalizer, register

#: Halvings of the interval that has the threshold: the bits of float64.
_HALVINGS = 60
#: Below this logit α is 1 + 1.2e-4: softmax, but for rounding.
_LEAST = -9.0


@register("learned_entmax")
@mechanism(
    formula="max(0, (α − 1) s_i − τ)^(1 / (α − 1)), which sum to 1, α = 1 + σ(a)",
    sources=("correia2019",),
    learned="a, or one for each head",
    cost="O(L·S)",
)
class LearnedEntmax(Normalizer):
    """α-entmax with a learned α, ``α = 1 + σ(a)``: heads between softmax and sparsemax (Correia 2019, 1909.00015).

    The gradient in a is exact. α differs between heads and with training, so weights are computed from whole rows, in
    float64 and in memory that grows with L×S; for a fixed α use :class:`Entmax`, which streams.

    Parameters
    ----------
    logit : Tensor (), (1,) or (H,), optional
        a; it gets a gradient. The default is 0, α = 1.5. Below −9, where weights are softmax's, it counts as −9.

    Examples
    --------
    >>> import torch
    >>> LearnedEntmax(torch.tensor([-9.0, 9.0])).weights(torch.tensor([[[2.0, 0.0]], [[2.0, 0.0]]])).squeeze(1)
    tensor([[0.8808, 0.1192],
            [1.0000, 0.0000]])
    """

    def __init__(self, logit: Tensor | None = None) -> None:
        logit = torch.zeros(()) if logit is None else logit
        if not isinstance(logit, Tensor) or not logit.is_floating_point() or logit.dim() > 1:
            expected = "be a floating-point tensor of one number, or one for each head"
            raise rejected("LearnedEntmax", "logit", expected, described(logit))
        self.logit = logit

    def check(self, heads: int) -> None:
        if self.logit.numel() not in (1, heads):
            expected = f"have one number, or one for each of query's {heads} heads"
            raise rejected("LearnedEntmax", "logit", expected, shape(self.logit))

    def weights(self, scores: Tensor) -> Tensor:
        wide = torch.float32 if scores.device.type == "mps" else torch.float64
        rest = torch.sigmoid(self.logit.to(scores.device, wide).clamp(min=_LEAST))  # α − 1
        rest = rest.view(-1, 1, 1) if rest.dim() else rest
        hidden = scores == -torch.inf
        given = torch.where(hidden, 0.0, scores.to(wide))
        t = _threshold(given.detach(), hidden, rest.detach())
        for _ in range(2):  # Newton steps from the root: they carry its first and second derivatives
            weights, slopes = _sides(given, hidden, t, rest)
            slope = slopes.sum(-1, keepdim=True)
            t = t + (weights.sum(-1, keepdim=True) - 1) / torch.where(slope == 0, 1.0, slope)
        return _sides(given, hidden, t, rest)[0].to(scores.dtype)

    @classmethod
    def sample(cls, generator: torch.Generator) -> LearnedEntmax:
        return cls(2 * torch.randn((), generator=generator))


def _threshold(scores: Tensor, hidden: Tensor, rest: Tensor) -> Tensor:
    """Return the thresholds (..., 1), by bisection: one for each row, where the largest weight is 1 to 1/S."""
    peak = torch.where(hidden, -torch.inf, scores).amax(-1, keepdim=True) if scores.shape[-1] else scores.sum(-1, True)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    low, high = peak - 1 / rest, peak - max(scores.shape[-1], 1) ** -rest / rest
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = _sides(scores, hidden, middle, rest)[0].sum(-1, keepdim=True) >= 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return low


def _sides(scores: Tensor, hidden: Tensor, t: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights for a threshold, and their slopes, ``weight^(2−α)``; both 0 where hidden."""
    base = rest * (scores - t)
    none = hidden | (base <= 0)
    base = torch.where(none, 1.0, base)
    weights, slopes = base ** (1 / rest), base ** ((1 - rest) / rest)
    return torch.where(none, 0.0, weights), torch.where(none, 0.0, slopes)
