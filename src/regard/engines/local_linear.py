"""Order 1: weights of a line that is fitted at each query, in place of those of a mean."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from regard._utils.constraints import Integer, Number, OneOf
from regard._utils.errors import described, rejected, without_effect
from regard._utils.mechanism import mechanism
from regard._utils.part import Part

#: The least ridge, in roundings of the dtype: below it a singular matrix may have no Cholesky factor.
LEAST_RIDGE = 16


@mechanism(
    formula="w_i (1 + (k_i − k̄)·u), u = (Σ w (k − k̄)(k − k̄)ᵀ + λI)⁻¹ (q − k̄)",
    sources=("zuo2025", "cleveland1979"),
    cost="O(L·S·E²)",
    reads="gaussian",
    module="regard",
)
class LocalLinear(Part):
    """Local linear attention: ``order=1`` of :func:`regard.attention` (Zuo et al. 2025, arXiv 2510.01450).

    The softmax of the scores gives weights w_i. With ``order=0`` the output is their mean of the values, which is the
    constant that fits the values best. With ``order=1`` it is the line (an affine function of the key) that fits them
    best, evaluated at the query: the a of ::

        minimize  Σ_i w_i ‖v_i − a − B (k_i − q)‖² + λ_q ‖B‖²      λ_q = (ridge / E) Σ_i w_i ‖k_i − q‖²

    The output is ``Σ_i p_i v_i`` with weights ``p_i = w_i (1 + (k_i − k̄)·u)``, where ``k̄ = Σ w_i k_i`` and u solves
    ``(Σ w_i (k_i − k̄)(k_i − k̄)ᵀ + λ_q I) u = q − k̄``. They sum to 1, and may be negative: an output may lie outside the
    hull of the values.

    Queries and keys are points of one space. For a kernel of a distance these are query and key (in units of the width,
    if each feature has its own). For dot products the query is the point q itself, as in the paper, so its length
    counts: with another ``scale`` of the score the point stays where it is. For a general score it is ``qᵀ W``, and for
    the cosine both are of length 1.

    The ridge keeps u bounded where the keys with weight do not span the space. A row that sees one key gets its value,
    a row that sees few keys the line through them as far as these determine it, and a row that sees none gets 0. An
    affine function of the keys is recovered up to terms of the order of the ridge.

    Parameters
    ----------
    ridge : float, default 0.01
        λ, relative to the mean squared distance of keys from the query, per feature. At least 16 roundings of the dtype
        of calculation are used; errors in float32 grow like 1 / ridge.
    solver : {"exact", "cg"}, default "exact"
        How u is solved for. "exact" sums a matrix (E, E) for each query and factors it. "cg" takes steps of conjugate
        gradients, which cost 4·E operations for each pair in place of E², and **approximates**: with few steps the
        result lies between orders 0 and 1. Its gradients are exact gradients of the approximation.
    steps : int, optional
        Only with "cg": the most steps, 8 by default.
    tolerance : float, optional
        Only with "cg": a row is finished when the residual is this small, relative to that of u = 0; 1e-3 by default.

    Examples
    --------
    A mean is biased at the border of the data; a line is not:

    >>> import torch, regard
    >>> x = torch.linspace(0, 1, 11, dtype=torch.float64)[:, None]
    >>> ends = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    >>> score = regard.scores.Gaussian(0.2)
    >>> [regard.attention(ends, x, 3 * x, score=score, order=n).flatten().round(decimals=1).tolist() for n in (0, 1)]
    [[0.4, 2.6], [0.0, 3.0]]
    """

    def __init__(
        self,
        ridge: float = 1e-2,
        *,
        solver: Literal["exact", "cg"] = "exact",
        steps: int | None = None,
        tolerance: float | None = None,
    ) -> None:
        self.ridge = Number(gt=0)(self, "ridge", ridge)
        self.solver = OneOf(("exact", "cg"))(self, "solver", solver)
        for name, value in (("steps", steps), ("tolerance", tolerance)):
            if solver == "exact" and value is not None:
                raise without_effect("LocalLinear", name, "with the exact solver", value, "solver='cg'")
        self.steps = Integer(ge=1)(self, "steps", 8 if steps is None else steps)
        self.tolerance = Number(ge=0, lt=1)(self, "tolerance", 1e-3 if tolerance is None else tolerance)

    def __repr__(self) -> str:
        if self.solver == "exact":
            return f"LocalLinear(ridge={self.ridge:g})"
        return f"LocalLinear(ridge={self.ridge:g}, solver='cg', steps={self.steps}, tolerance={self.tolerance:g})"

    def pair_flops(self, width: int) -> int:
        """Return the operations for each pair of positions of this width, besides those of order 0."""
        solve = 4 * width * self.steps if self.solver == "cg" else width * (width + 1)
        return 4 * width + solve

    def weights(self, weights: Tensor, query: Tensor, key: Tensor, visible: Tensor | None = None) -> Tensor:
        """Return weights (..., l, s) of lines from those of means; differentiable to any order.

        Parameters
        ----------
        weights : Tensor (..., l, s)
            They sum to 1, or are all 0.
        query : Tensor (..., l, D)
        key : Tensor (..., s, D)
            Positions.
        visible : Tensor (..., l, s), optional
            Which pairs count at all; the positions of others may be anything but NaN.
        """
        D = query.shape[-1]
        if D == 0 or weights.shape[-1] == 0:
            return weights
        apart = key.unsqueeze(-3) - query.unsqueeze(-2)  # (..., l, s, D): with the query as origin, nothing cancels
        if visible is not None:
            apart = torch.where(visible.unsqueeze(-1), apart, 0.0)
        # The unit of length cancels, and squares of large and small numbers stay finite and positive.
        reach = torch.linalg.vector_norm(apart.detach(), torch.inf, (-2, -1), keepdim=True)
        apart = apart / torch.where(reach > 0, reach, 1.0)
        mean = (weights.unsqueeze(-2) @ apart).squeeze(-2)  # k̄ − q
        apart = apart - mean.unsqueeze(-2)
        slope = (self._by_steps if self.solver == "cg" else self._exactly)(weights, apart, mean)
        along = (apart @ slope.unsqueeze(-1)).squeeze(-1)
        # The mean of these products is 0 but for rounding; subtracted as they are, the errors cancel.
        return weights * (1 + (along - (weights * along).sum(-1, keepdim=True)))

    def _ridge(self, like: Tensor) -> float:
        """Return the ridge of a matrix whose trace is at most 1."""
        return max(self.ridge / like.shape[-1], LEAST_RIDGE * torch.finfo(like.dtype).eps)

    def _exactly(self, weights: Tensor, apart: Tensor, mean: Tensor) -> Tensor:
        """Return u (..., l, D), by the matrix of second moments."""
        moments = apart.mT @ (weights.unsqueeze(-1) * apart)
        square = _positive(moments.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True) + _squared(mean))
        eye = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
        factor = torch.linalg.cholesky_ex(moments / square.unsqueeze(-1) + self._ridge(mean) * eye).L
        return torch.cholesky_solve((-mean / square).unsqueeze(-1), factor).squeeze(-1)

    def _by_steps(self, weights: Tensor, apart: Tensor, mean: Tensor) -> Tensor:
        """Return u (..., l, D) by conjugate gradients, without the matrix."""
        spread = (weights * (apart * apart).sum(-1)).sum(-1, keepdim=True)
        square, ridge = _positive(spread + _squared(mean)), self._ridge(mean)
        share = weights / square
        residual = direction = -mean / square
        slope, size = torch.zeros_like(mean), _squared(residual)
        enough = self.tolerance**2 * size.detach()
        for _ in range(self.steps):
            going = size > enough
            along = (apart @ direction.unsqueeze(-1)).squeeze(-1)
            image = ((share * along).unsqueeze(-2) @ apart).squeeze(-2) + ridge * direction
            length = torch.where(going, (direction * image).sum(-1, keepdim=True), 1.0)
            step = torch.where(going, size / length, 0.0)
            slope = slope + step * direction
            residual = residual - step * image
            after = _squared(residual)
            turn = torch.where(going, after / torch.where(going, size, 1.0), 0.0)
            direction, size = residual + turn * direction, torch.where(going, after, size)
        return slope


def _squared(rows: Tensor) -> Tensor:
    return (rows * rows).sum(-1, keepdim=True)


def _positive(size: Tensor) -> Tensor:
    """Return a size, 1 in place of 0."""
    return torch.where(size == 0, 1.0, size)


def as_order(order: object) -> LocalLinear | None:
    """Return the fit that an argument ``order`` names; None for order 0."""
    if isinstance(order, LocalLinear):
        return order
    expected = "be 0, 1 or a LocalLinear"
    if isinstance(order, bool) or not isinstance(order, int):
        raise rejected("attention", "order", expected, described(order), TypeError)
    if order not in (0, 1):
        raise rejected("attention", "order", expected, order)
    return LocalLinear() if order else None
