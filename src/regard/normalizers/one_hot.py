"""Hard attention: one key per query, the best one or a random draw."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._utils.constraints import positive
from regard._utils.mechanism import mechanism
from regard.normalizers.base import Normalizer, Statistic, Sweep, register
from regard.normalizers.softmax import Softmax


def one_hot_of_max(scores: Tensor) -> Tensor:
    """Return 1 at the largest score of each row (the first, on ties) and 0 elsewhere; 0 in fully masked rows.

    A row that contains NaN becomes NaN.
    """
    if scores.shape[-1] == 0:
        return torch.zeros_like(scores)
    peak, index = scores.max(-1, keepdim=True)
    hot = torch.arange(scores.shape[-1], device=scores.device) == index
    return torch.where(peak.isnan(), peak, (hot & (peak > -torch.inf)).to(scores.dtype))


def _tied(hot: Tensor, scores: Tensor) -> Tensor:
    """Connect weights to the autograd graph of the scores, with zero gradient."""
    return hot + 0 * torch.where(hot > 0, scores, 0).clamp(-1, 1)


def gumbel_like(scores: Tensor) -> Tensor:
    """Return independent draws from the standard Gumbel distribution: −log of an exponential variate."""
    uniform = torch.rand_like(scores)
    tiny = torch.finfo(scores.dtype).tiny
    return -(-uniform.clamp(min=tiny).log()).clamp(min=tiny).log()


@register("argmax")
@mechanism(
    formula="1 at the largest s_i",
    sources=("xu2015",),
    cost="O(L·S)",
)
class Argmax(Normalizer):
    """Hard argmax: weight 1 on the key with the largest score (the first, on ties). Scores get zero gradients.

    Examples
    --------
    >>> import torch
    >>> Argmax().weights(torch.tensor([[0.1, 0.7, 0.2]]))
    tensor([[0., 1., 0.]])
    """

    streams = True
    row_normalized = False
    smooth = False

    def weights(self, scores: Tensor) -> Tensor:
        return _tied(one_hot_of_max(scores.detach()), scores)

    def statistic(self, sweep: Sweep, like: Tensor) -> Statistic:
        """Find the index of the first maximum in one sweep, −1 in an empty row; the offset is NaN if a score is NaN."""
        peak, where = torch.full_like(like, -torch.inf), torch.full_like(like, -1, dtype=torch.long)

        def visit(scores: Tensor, kv_idx: Tensor) -> None:
            nonlocal peak, where
            best, index = scores.max(-1, keepdim=True)
            better = (best > peak) | (best.isnan() & ~peak.isnan())
            peak, where = torch.where(better, best, peak), torch.where(better, kv_idx[index], where)

        sweep(visit)
        return Statistic(where, torch.where(peak.isnan(), peak, 0.0))

    def tile_weights(self, scores: Tensor, row: Statistic, kv_idx: Tensor) -> Tensor:
        return _tied((kv_idx == row.shift) + row.offset, scores)

    def tile_slope(self, weights: Tensor) -> Tensor:
        return torch.zeros_like(weights)


@register("gumbel")
@mechanism(
    formula="1 at the largest s_i + Gumbel noise; softmax gradient",
    sources=("jang2017",),
    cost="O(L·S)",
)
class Gumbel(Normalizer):
    """Straight-through Gumbel-softmax: one key drawn from softmax, with a soft gradient (Jang et al. 2016, 1611.01144).

    The forward pass puts weight 1 on ``argmax(s + g)`` with Gumbel noise g, an exact draw from ``softmax(s)``. The
    backward pass uses the gradient of ``softmax((s + g) / temperature)``.

    Parameters
    ----------
    temperature : float, default 1.0
        Temperature of the backward pass. Smaller values are closer to the draw, with noisier gradients.

    Examples
    --------
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> Gumbel().weights(torch.tensor([[0.0, -torch.inf, 0.0]])).sum()
    tensor(1.)
    """

    random = True
    smooth = False

    def __init__(self, temperature: float = 1.0) -> None:
        positive(self, "temperature", temperature)
        self.temperature = float(temperature)

    def weights(self, scores: Tensor) -> Tensor:
        noisy = scores + gumbel_like(scores)
        soft = Softmax().weights(noisy / self.temperature)
        return one_hot_of_max(noisy.detach()) + (soft - soft.detach())


@register("sampled")
@mechanism(
    formula="1 at an i drawn from softmax(s)",
    sources=(
        "xu2015",
        "williams1992",
    ),
    cost="O(L·S)",
)
class Sampled(Normalizer):
    """One key drawn from ``softmax(s)``: stochastic hard attention (Xu et al. 2015, arXiv 1502.03044).

    The draw has no gradient. Train the scores with the :meth:`log_probability` of the draw, weighted by its reward
    (REINFORCE).

    Examples
    --------
    >>> import torch
    >>> scores = torch.tensor([[0.0, -torch.inf]], requires_grad=True)
    >>> weights = Sampled().weights(scores)
    >>> weights, Sampled.log_probability(scores, weights)
    (tensor([[1., 0.]]), tensor([0.], grad_fn=<SumBackward1>))
    """

    random = True
    smooth = False

    def weights(self, scores: Tensor) -> Tensor:
        scores = scores.detach()
        return one_hot_of_max(scores + gumbel_like(scores))

    @staticmethod
    def log_probability(scores: Tensor, weights: Tensor) -> Tensor:
        """Return the log-probability (..., L) of the draw in ``weights`` (..., L, S), differentiable in the scores."""
        drawn = weights != 0
        lse = torch.logsumexp(torch.where(drawn.any(-1, keepdim=True), scores, 0.0), -1, keepdim=True)
        return torch.where(drawn, scores - lse, 0.0).sum(-1)
