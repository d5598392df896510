"""Quantiles of the targets around a query.

Without a line, shares of blocks of sorted targets first, then within one block; with one, targets move with the query.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard import AuxRequest, attention
from regard.regression._kernel_smoother import Smoother

#: Shares of blocks, and weights within blocks, that are held at one time.
HELD = 1 << 20
#: Points of a block at least.
SIZE = 32
#: A share that is met but for so many roundings counts as met.
ROUNDINGS = 64


def local_quantiles(smoother: Smoother, query: Tensor, bandwidth: Tensor, target: Tensor, shares: Tensor) -> Tensor:
    """Return for each query the least targets up to which these shares of the weight lie.

    Parameters
    ----------
    smoother : Smoother
    query : Tensor (L, C)
    bandwidth : Tensor (n_features,)
    target : Tensor (N,)
        One for each of the smoother's points.
    shares : Tensor (q,)

    Returns
    -------
    Tensor (L, q)
        NaN where no point reaches.
    """
    score = smoother.kernel.score(smoother.coordinate_bandwidth(bandwidth))
    order = target.argsort()
    met = 1 - ROUNDINGS * torch.finfo(query.dtype).eps
    shares = shares.double()
    # Shares of blocks come from fused kernels; the weights within one are written out, which takes longer.
    size = min(len(order), max(SIZE, round(len(order) ** 0.5 / 4)))
    missing = -len(order) % size
    # Blocks of equal size: what fills the last one has no weight.
    weight = pad(smoother.point_weights()[order, 0], (0, missing)).view(-1, size, 1)
    order = pad(order, (0, missing), value=int(order[-1])).view(-1, size)
    key = smoother.key[order]
    parts = [query.new_zeros(0, len(shares))]
    for rows in query.split(max(1, HELD // max(len(order), size * len(shares)))):
        read, aux = attention(
            rows.expand(len(order), -1, -1)[:, None], key[:, None], weight[:, None], score=score,
            engine=smoother.engine, return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        assert aux.lse is not None
        logs = aux.lse[:, 0].T.double()  # (l, blocks)
        most = logs.amax(1, keepdim=True)
        reached = most > -torch.inf
        mass = (logs - torch.where(reached, most, 0.0)).exp() * read[:, 0, :, 0].T
        before = pad(mass.cumsum(1), (1, 0))
        # Of share 0, the first point that has any weight.
        wanted = (shares * before[:, -1:] * met).clamp(min=torch.finfo(mass.dtype).tiny)  # (l, q)
        block = torch.searchsorted(before[:, 1:].contiguous(), wanted).clamp(max=len(order) - 1)
        _, aux = attention(
            rows[:, None, None].expand(-1, len(shares), 1, -1), key[block], weight[block][..., :0], score=score,
            engine="reference", return_aux=AuxRequest(weights=True),
        )  # fmt: skip
        assert aux.weights is not None
        within = aux.weights[:, :, 0].double() * weight[block][..., 0]
        within = within / within.sum(2, keepdim=True).clamp(min=torch.finfo(within.dtype).tiny)
        share = before.gather(1, block)[..., None] + mass.gather(1, block)[..., None] * within.cumsum(2)
        place = torch.searchsorted(share.contiguous(), wanted[..., None])
        # The block's last point with a weight, where rounding leaves the sum below what is wanted.
        last = torch.where(within > 0, torch.arange(size, device=within.device), 0).amax(2, keepdim=True)
        found = target[order[block].gather(2, torch.minimum(place, last))[..., 0]]
        parts.append(torch.where(reached, found.to(query.dtype), torch.nan))
    return torch.cat(parts)


def local_linear_quantiles(smoother: Smoother, query: Tensor, bandwidth: Tensor, shares: Tensor) -> Tensor:
    """Return for each query the least targets, moved along its local line, up to which these shares of the weight lie.

    So the residuals about the line keep their weights and stand about the line's value at the query, which is their
    mean: the mean-corrected estimate of a conditional distribution of Hyndman, Bashtannyk and Grunwald (1996).

    Parameters
    ----------
    smoother : Smoother
    query : Tensor (L, C)
    bandwidth : Tensor (n_features,)
    shares : Tensor (q,)

    Returns
    -------
    Tensor (L, M, q)
        NaN where no point reaches.
    """
    parts = [query.new_zeros(0, smoother.target.shape[1], len(shares))]
    met = 1 - ROUNDINGS * torch.finfo(query.dtype).eps
    for weights, targets in smoother.shifted_targets(query, bandwidth):
        some = weights > 0
        values, order = torch.where(some, targets, torch.inf).sort(2)
        share = weights.expand_as(order).gather(2, order).cumsum(2)
        wanted = (shares * share[..., -1:] * met).clamp(min=torch.finfo(share.dtype).tiny)
        # The last point with a weight, where rounding leaves the sum below what is wanted.
        last = (some.sum(1) - 1).clamp(min=0)[:, None].expand(*share.shape[:2], 1)
        place = torch.minimum(torch.searchsorted(share, wanted), last)
        found = torch.where(some.any(1)[:, None], values.gather(2, place), torch.nan)
        parts.append(found.transpose(0, 1))
    return torch.cat(parts)
