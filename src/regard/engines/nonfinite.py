"""Care for what is not finite: where a mask hides it, nothing of it may show."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard._problem import Problem


def zeroed(problem: Problem) -> Problem:
    """Return the problem with zeros in place of everything in keys and values that is not finite."""
    return replace(problem, key=_finite(problem.key), value=_finite(problem.value))


def _finite(tensor: Tensor) -> Tensor:
    return torch.where(tensor.isfinite(), tensor, 0.0)


def is_visible(problem: Problem) -> bool:
    """Whether any query may attend to a key or value that holds something not finite."""
    extent, mask = problem.extent, problem.mask
    bad = ~(problem.key.isfinite().all(-1) & problem.value.isfinite().all(-1))  # (B, G, S)
    kv_idx = bad.any(0).any(0).nonzero().squeeze(-1)
    if mask is None or not len(kv_idx):
        return bool(len(kv_idx))
    bad = bad[:, :, kv_idx].repeat_interleave(extent.H // bad.shape[1], 1).unsqueeze(-2)
    device = problem.query.device
    b, h = torch.arange(extent.B, device=device).view(-1, 1, 1, 1), torch.arange(extent.H, device=device).view(-1, 1, 1)
    step = max((1 << 22) // max(extent.B * extent.H * len(kv_idx), 1), 1)
    for rows in torch.arange(extent.L, device=device).split(step):
        visible = mask.visible(b, h, rows.unsqueeze(1), kv_idx)
        if visible is None or bool((visible & bad).any()):
            return True
    return False
