"""Points in an order in which neighbours stand together, so that whole tiles of them are out of reach."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

#: Features by which points are ordered, and steps on each of their axes as a power of two.
AXES, BITS = 3, 10


@cache
def _spread(axes: int) -> Tensor:
    """Return for every coordinate its bits ``axes`` places apart."""
    steps = torch.arange(1 << BITS, device="cpu")
    bits = [(steps >> bit & 1) << bit * axes for bit in range(BITS)]
    return torch.stack(bits).sum(0).to(torch.int32)


def morton_order(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of queries (B, H, L) and keys (B, G, S) along a Z-order curve.

    Parameters
    ----------
    query : Tensor (B, H, L, C)
    key : Tensor (B, G, S, C)
        Both in units of the width. The curve spans the keys; queries beyond are moved to its ends.
    """
    query, key = (t.detach().nan_to_num(0.0, 0.0, 0.0) for t in (query, key))
    low, high = key.amin((0, 1, 2)), key.amax((0, 1, 2))
    axes = (high - low).topk(min(AXES, key.shape[-1])).indices
    low, extent = low[axes], (high - low)[axes].clamp(min=torch.finfo(key.dtype).tiny)
    return _order(query[..., axes], low, extent), _order(key[..., axes], low, extent)


def _order(points: Tensor, low: Tensor, extent: Tensor) -> Tensor:
    axes = points.shape[-1]
    steps = ((points - low) / extent * ((1 << BITS) - 1)).clamp(0, (1 << BITS) - 1).long()
    if axes == 1:
        return points[..., 0].argsort(-1)
    table = _spread(axes)
    code = table[steps[..., 0]]
    for axis in range(1, axes):
        code = code | table[steps[..., axis]] << axis
    return code.argsort(-1)


def take(rows: Tensor, order: Tensor) -> Tensor:
    """Return rows (B, H, N, ...) in an order (B, H, N)."""
    B, H, N = order.shape
    first = torch.arange(0, B * H * N, max(N, 1), device="cpu").view(B, H, 1)
    flat = rows.expand(B, H, *rows.shape[2:]).reshape(B * H * N, *rows.shape[3:])
    return flat.index_select(0, (order + first).flatten()).view(B, H, N, *rows.shape[3:])


def inverse(order: Tensor) -> Tensor:
    """Return the order that undoes another."""
    places = torch.arange(order.shape[-1], device="cpu").expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def boxes(key: Tensor, tile: int) -> Tensor:
    """Return the box around each tile of keys (B, G, S, C): (B, G, tiles, 2 · C), the least and the largest."""
    S = key.shape[2]
    padded = torch.nn.functional.pad(key, (0, 0, 0, -S % tile), value=torch.nan).unflatten(2, (-1, tile))
    low = torch.where(padded.isnan(), torch.inf, padded).amin(3)
    high = torch.where(padded.isnan(), -torch.inf, padded).amax(3)
    return torch.cat((low, high), -1).contiguous()
