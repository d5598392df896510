"""A mask given as a function: FlexAttention's mask_mod."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from regard._errors import described, rejected
from regard.masks.base import Mask
from regard.masks.tiling import Tiling


@final
class Predicate(Mask):
    """Pairs for which ``mask_mod(b, h, q_idx, kv_idx)`` is True; made by :func:`~regard.masks.as_mask`.

    The function is called with index tensors that broadcast against each other. Tensors it closes over are
    not seen by engines: they must be on the query's device.
    """

    def __init__(self, mask_mod: Callable[..., Any]) -> None:
        self.mask_mod = mask_mod

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return what the function says."""
        return called(self.mask_mod, b, h, q_idx, kv_idx)

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return that nothing is known."""
        # What will be looked into pair by pair may differ per sequence and head.
        shape = (tiling.extent.B, tiling.extent.H, 1, 1) if tiling.exact else ()
        unknown = torch.ones(shape, dtype=torch.bool, device=tiling.device)
        return unknown, ~unknown

    def __repr__(self) -> str:
        return f"as_mask({getattr(self.mask_mod, '__name__', type(self.mask_mod).__name__)})"


def called(mask_mod: Callable[..., Any], b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Return what a user's mask_mod answers, which must be a bool tensor."""
    seen = mask_mod(b, h, q_idx, kv_idx)
    if isinstance(seen, Tensor) and seen.dtype == torch.bool:
        return seen
    raise rejected("masks.as_mask", "mask_mod", "return a bool tensor", described(seen), TypeError)
