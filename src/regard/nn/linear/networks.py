"""Weights of small networks as the state of a layer.

Dimensions: B batch, H heads, P numbers of a head's network.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: One matrix (B, H, K, V) for each layer of the network, or what belongs to them: gradients, a momentum.
Weights = tuple[Tensor, ...]


def packed(rows: Sequence[Weights]) -> Tensor:
    """Return several of them as one tensor (B, H, R, P)."""
    return torch.stack([torch.cat([each.flatten(-2) for each in row], -1) for row in rows], 2)


def unpacked(state: Tensor, initial: Sequence[Tensor]) -> list[Weights]:
    """Return the rows of a tensor (B, H, R, P), in the shapes of the initial weights (H, K, V)."""
    sizes = [each[0].numel() for each in initial]
    return [
        tuple(part.unflatten(-1, each.shape[1:]) for part, each in zip(row.split(sizes, -1), initial))
        for row in state.unbind(2)
    ]


def chosen(which: Tensor, weights: Weights, others: Weights) -> Weights:
    """Return the weights of the sequences (B,) that are chosen, and others for the rest."""
    return tuple(torch.where(which.view(-1, 1, 1, 1), a, b) for a, b in zip(weights, others))


def added(weights: Sequence[Tensor], others: Sequence[Tensor], factor: float = 1.0) -> Weights:
    """Return weights plus a factor times others."""
    return tuple(a + factor * b for a, b in zip(weights, others))
