"""What stands for a sequence: one row of a model's, or what all its rows have in common.

Dimensions: B batch, L tokens, E width.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: What can stand for a sequence of a model that reads both ways, and of one that reads forward.
OF_ENCODERS, OF_DECODERS = ("first", "mean", "max"), ("last", "mean", "max")


def pooled(pooling: str, rows: Tensor, keep: Tensor | None = None) -> Tensor:
    """Return one row (B, E) for each sequence.

    Parameters
    ----------
    pooling : {"first", "last", "mean", "max"}
    rows : Tensor (B, L, E)
    keep : Tensor (B, L) of bool, optional
        Which rows are of real tokens; all by default. A sequence without any has a row of zeros as its mean.

    Examples
    --------
    >>> rows, keep = torch.tensor([[[1.0, 5.0], [3.0, 1.0], [9.0, 9.0]]]), torch.tensor([[True, True, False]])
    >>> [pooled(each, rows, keep).tolist() for each in ("first", "last", "mean", "max")]
    [[[1.0, 5.0]], [[3.0, 1.0]], [[2.0, 3.0]], [[3.0, 5.0]]]
    """
    if pooling == "first":
        return rows[:, 0]
    if keep is None:
        return rows[:, -1] if pooling == "last" else rows.mean(1) if pooling == "mean" else rows.amax(1)
    if pooling == "last":
        last = (keep * torch.arange(1, keep.shape[1] + 1, device=keep.device)).amax(1) - 1
        return rows[torch.arange(len(rows), device=rows.device), last.clamp(min=0)]
    real = keep.unsqueeze(-1)
    if pooling == "max":
        return torch.where(real | ~real.any(1, keepdim=True), rows, -torch.inf).amax(1)
    share = real.to(rows.dtype)
    return (rows * share).sum(1) / share.sum(1).clamp(min=1)
