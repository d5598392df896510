"""Autocast, as torch's SDPA meets it: inputs are cast once, and what is inside decides its own precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def is_active(device: str) -> bool:
    """Whether autocast is on for a device type; some, like meta, know none."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def cast(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors in autocast's dtype, if it is on."""
    device = tensors[0].device.type
    if not is_active(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors]


def suspended(device: str) -> AbstractContextManager[object]:
    """Return a context in which autocast is off."""
    return torch.autocast(device, enabled=False) if is_active(device) else nullcontext()
