"""A mask given as a function: FlexAttention's mask_mod."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from regard._elementwise import meaning, per_element
from regard._tracing import is_symbolic
from regard.masks.base import Mask
from regard.masks.tiling import Tiling


@final
class Predicate(Mask):
    """Pairs for which ``mask_mod(b, h, q_idx, kv_idx)`` is True; made by :func:`~regard.masks.as_mask`.

    As in FlexAttention the function is called for one pair, with 0-d tensors, and must work under ``torch.vmap``.
    Tensors it closes over are not seen by engines: they must be on the query's device.
    """

    def __init__(self, mask_mod: Callable[..., Any]) -> None:
        self.mask_mod = mask_mod

    def structure(self) -> tuple[Any, ...]:
        """Return what is known of the function; the plan for an unknown one does not depend on its answers."""
        return Predicate, meaning(self.mask_mod)

    @property
    def is_fixed(self) -> bool:
        """Whether the function answers the same as long as its meaning is the same."""
        return meaning(self.mask_mod) is not None

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
    """Return what a mask_mod says of each pair; a dimension on which a function does not depend has size 1."""
    if isinstance(mask_mod, Mask):
        shown = mask_mod.visible(b, h, q_idx, kv_idx)
        return torch.ones((), dtype=torch.bool, device=kv_idx.device) if shown is None else shown
    seen = per_element(mask_mod, b, h, q_idx, kv_idx, kind="bool", blame=("masks.as_mask", "mask_mod"))
    for dim, stride in enumerate(seen.stride()):
        if not is_symbolic(stride) and stride == 0:
            seen = seen.narrow(dim, 0, 1)
    return seen
