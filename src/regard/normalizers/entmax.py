"""α-entmax: weights that can be exactly zero; sparsemax and entmax-1.5 are its best-known members."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._catalogue import mechanism
from regard._constraints import Interval
from regard.normalizers.base import Normalizer, Statistic, Sweep, register
from regard.normalizers.threshold import powers, slopes, threshold


class _Threshold(Normalizer):
    """``weight = [(α−1)(s − t)]₊^{1/(α−1)}``, with the threshold t of each row chosen so that the weights sum to 1."""

    streams = True
    gathers = True
    alpha: float

    def weights(self, scores: Tensor) -> Tensor:
        return powers(scores, *threshold(scores, self.alpha), self.alpha)

    def statistic(self, sweep: Sweep, like: Tensor) -> Statistic:
        """Return the threshold, as two numbers that sum to it, in one sweep."""
        tiles: list[Tensor] = []
        sweep(lambda scores, kv_idx: tiles.append(scores))  # noqa: ARG005
        scores = tiles[0] if len(tiles) == 1 else torch.cat(tiles, -1) if tiles else like[..., :0]
        return Statistic(*threshold(scores, self.alpha))

    def tile_weights(self, scores: Tensor, row: Statistic, kv_idx: Tensor) -> Tensor:  # noqa: ARG002
        return powers(scores, row.shift, row.offset, self.alpha)

    def tile_slope(self, weights: Tensor) -> Tensor:
        return slopes(weights, self.alpha)


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
        Interval(1, math.inf, "()", note=" (1 is softmax)")(self, "alpha", alpha)
        self.alpha = float(alpha)

    @classmethod
    def sample(cls, generator: torch.Generator) -> Entmax:
        alphas = (1.3, 1.05, 1.5, 1.8, 2.0, 3.0, 8.0)
        return cls(alphas[int(torch.randint(len(alphas), (), generator=generator))])
