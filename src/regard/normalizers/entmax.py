"""α-entmax: weights that can be exactly zero; sparsemax and entmax-1.5 are its best-known members."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard._catalogue import mechanism
from regard._errors import described, rejected
from regard._tracing import in_transform, is_blind
from regard.normalizers.base import Normalizer, Statistic, Sweep, register
from regard.normalizers.softmax import row_max

#: Newton steps at most: far more than any α in (1, 2] needs, and bisection steps enough for the rest.
STEPS = 64
#: Newton steps where convergence cannot be looked at; α ≤ 2 takes about ten.
BLIND_STEPS = 24


#: ``moments(t)`` returns (Σ weights, Σ slopes), each (..., L, 1), with t relative to the row maximum.
Moments = Callable[[Tensor], tuple[Tensor, Tensor]]


def solve_threshold(moments: Moments, like: Tensor) -> Tensor:
    """Return the offset t (..., L, 1) in [−1/(α−1), 0] at which the weights of each row sum to 1.

    Parameters
    ----------
    moments : callable
        The sums of each row at a threshold.
    like : Tensor (..., L, 1)
        Where to start: the lower end of the interval, at which the sum is ≥ 1.

    Notes
    -----
    The sum falls in t, and is convex for α ≤ 2: Newton from the left then rises to the root and never passes it.
    Where a step leaves the bracket (α > 2), bisection takes its place.
    """
    low, high, t = like, torch.zeros_like(like), like
    blind = is_blind(like)
    steps = 1 if like.is_meta else BLIND_STEPS if blind else STEPS
    for _ in range(steps):
        total, slope = moments(t)
        low, high = torch.where(total >= 1, t, low), torch.where(total < 1, t, high)
        step = t + (total - 1) / torch.where(slope > 0, slope, 1)
        new = torch.where((step >= low) & (step <= high) & (slope > 0), step, (low + high) / 2)
        if not blind and torch.equal(new, t):
            break
        t = new
    return t


def differentiated(scores: Tensor) -> bool:
    """Whether somebody may take a derivative of what is made of these scores."""
    return in_transform() or (torch.is_grad_enabled() and scores.requires_grad)


class _Threshold(Normalizer):
    """``weight = [(α−1)(s − t)]₊^{1/(α−1)}``, with the threshold t of each row chosen so that the weights sum to 1."""

    streams = True
    alpha: float

    def weights(self, scores: Tensor) -> Tensor:
        relative = scores - row_max(scores)

        def moments(t: Tensor) -> tuple[Tensor, Tensor]:
            weights = self._power(relative, t)
            return weights.sum(-1, keepdim=True), self.tile_slope(weights).sum(-1, keepdim=True)

        start = relative.detach().new_full((*relative.shape[:-1], 1), -1 / (self.alpha - 1))
        return self._power(relative, self._solve(moments, start, scores))

    def statistic(self, sweep: Sweep, like: Tensor) -> Statistic:
        """Return the row maximum and the threshold relative to it: one sweep, then one for each Newton step."""
        peak, seen = torch.full_like(like, -torch.inf), like

        def find_peak(scores: Tensor, kv_idx: Tensor) -> None:  # noqa: ARG001
            nonlocal peak, seen
            peak, seen = torch.maximum(peak, scores.detach().amax(-1, keepdim=True)), scores

        sweep(find_peak)
        shift = torch.where(peak == -torch.inf, 0.0, peak)

        def moments(t: Tensor) -> tuple[Tensor, Tensor]:
            total, slope = torch.zeros_like(like), torch.zeros_like(like)

            def add(scores: Tensor, kv_idx: Tensor) -> None:  # noqa: ARG001
                nonlocal total, slope
                weights = self._power(scores - shift, t)
                total = total + weights.sum(-1, keepdim=True)
                slope = slope + self.tile_slope(weights).sum(-1, keepdim=True)

            sweep(add)
            return total, slope

        return Statistic(shift, self._solve(moments, torch.full_like(like, -1 / (self.alpha - 1)), seen))

    @staticmethod
    def _solve(moments: Moments, start: Tensor, scores: Tensor) -> Tensor:
        """Return the threshold, differentiable in the scores to second order where somebody may ask for that."""
        with torch.no_grad():
            t = solve_threshold(moments, start).detach()
        if differentiated(scores):
            for _ in range(2):  # a Newton step at the root changes nothing but carries one more order of derivative
                total, slope = moments(t)
                t = t + torch.where(slope > 0, (total - 1) / torch.where(slope > 0, slope, 1), 0.0)
        return t

    def tile_weights(self, scores: Tensor, row: Statistic, kv_idx: Tensor) -> Tensor:  # noqa: ARG002
        return self._power(scores - row.shift, row.offset)

    def tile_slope(self, weights: Tensor) -> Tensor:
        support = weights > 0
        return torch.where(support, torch.where(support, weights, 1.0) ** (2 - self.alpha), 0.0)

    def _power(self, relative: Tensor, t: Tensor) -> Tensor:
        base = (self.alpha - 1) * (relative - t)
        support = base > 0  # −inf, NaN and the rest weigh nothing, and the power's slope at 0 stays out
        return torch.where(support, torch.where(support, base, 1.0) ** (1 / (self.alpha - 1)), 0.0)


@register("sparsemax")
@mechanism(
    formula="max(0, s_i − τ), which sum to 1",
    sources=("martins2016",),
    cost="O(L·S)",
)
class Sparsemax(_Threshold):
    """Sparsemax: the Euclidean projection of the scores onto the simplex (Martins & Astudillo 2016, arXiv 1602.02068).

    Examples
    --------
    >>> import torch
    >>> Sparsemax().weights(torch.tensor([[1.0, 0.5, -1.0]]))
    tensor([[0.7500, 0.2500, 0.0000]])
    """

    alpha = 2.0


@register("entmax15")
@mechanism(
    formula="max(0, s_i / 2 − τ)², which sum to 1",
    sources=("peters2019",),
    cost="O(L·S)",
)
class Entmax15(_Threshold):
    """Entmax with α = 1.5, between softmax and sparsemax (Peters et al. 2019, arXiv 1905.05702).

    Examples
    --------
    >>> import torch
    >>> Entmax15().weights(torch.tensor([[0.0, 0.0, -9.0]]))
    tensor([[0.5000, 0.5000, 0.0000]])
    """

    alpha = 1.5


@register("entmax")
@mechanism(
    formula="max(0, (α − 1) s_i − τ)^(1 / (α − 1)), which sum to 1",
    sources=("peters2019",),
    cost="O(L·S)",
)
class Entmax(_Threshold):
    """α-entmax for any α > 1: α → 1 is softmax, 2 sparsemax (Peters et al. 2019, arXiv 1905.05702).

    Parameters
    ----------
    alpha : float, default 1.5
        How sparse; greater than 1.

    Examples
    --------
    >>> import torch
    >>> Entmax(1.2).weights(torch.tensor([[1.0, 1.0, 1.0, 1.0]]))
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """

    def __init__(self, alpha: float = 1.5) -> None:
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
            raise rejected("Entmax", "alpha", "be a number", described(alpha), TypeError)
        if not 1 < alpha < math.inf:
            raise rejected("Entmax", "alpha", "be greater than 1 and finite (1 is softmax)", alpha)
        self.alpha = float(alpha)

    @classmethod
    def sample(cls, generator: torch.Generator) -> Entmax:  # noqa: ARG003
        return cls(1.3)
