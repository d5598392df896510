"""The masks of torch's multi-head attention, in which True hides, as masks of ours, in which True shows."""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import masks
from regard._errors import described, rejected, shape
from regard._tracing import is_blind
from regard.masks import Extent, Mask, MaskLike, as_mask


def combined(
    padding: Tensor | None,
    attn_mask: MaskLike | None,
    is_causal: bool,
    extent: Extent,
    start: int,
    appended: int,
    device: torch.device,
) -> Mask | None:
    """Return one mask of all that a call of multi-head attention is given.

    Parameters
    ----------
    padding : Tensor (B, S), optional
        Bool, True hides; or float, added.
    attn_mask : Tensor (L, S) or (B·H, L, S), or Mask, optional
        Likewise; a Mask is taken as it is.
    is_causal : bool
    extent : Extent
        B, H, L and S, without the appended keys.
    start : int
        How many keys come before the first query.
    appended : int
        How many keys after those of the extent everyone sees.
    device : torch.device
    """
    found: list[Mask] = []
    if is_causal and not start and is_causal_matrix(attn_mask):
        attn_mask = None
    if padding is not None:
        seen = _extended(padding, appended)
        found.append(masks.key_padding(seen) if seen.dtype == torch.bool else masks.dense(seen[:, None, None]))
    if isinstance(attn_mask, Tensor):
        seen = _extended(attn_mask, appended)
        found.append(masks.dense(seen if seen.dim() == 2 else seen.unflatten(0, (extent.B, extent.H))))
    elif attn_mask is not None:
        found.append(masks.as_mask(attn_mask))
    if is_causal and start + 1 < extent.S:  # else there is nothing to hide
        causal = masks.causal(offset=start)
        if appended:
            causal = causal | masks.key_padding(torch.arange(extent.S + appended, device=device) >= extent.S)
        found.append(causal)
    return reduce(and_, found) if found else None


def check(layer: object, padding: Any, attn_mask: MaskLike | None, extent: Extent, appended: int) -> None:
    """Raise for a mask of another type or shape than the layer's call needs."""
    name, (B, H, L, S) = type(layer).__name__, (extent.B, extent.H, extent.L, extent.S)
    shapes = {"(L, S)": (L, S), "(B·H, L, S)": (B * H, L, S)}
    for argument, mask, fits in (("key_padding_mask", padding, {"(B, S)": (B, S)}), ("attn_mask", attn_mask, shapes)):
        if argument == "attn_mask" and isinstance(mask, Mask):
            if appended:
                raise rejected(name, argument, "be a tensor where keys are appended", described(mask), TypeError)
            continue
        if mask is None:
            continue
        if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
            kinds = "be a bool tensor (True hides) or a float tensor (added to the score)"
            kinds += ", or a Mask" if argument == "attn_mask" else ""
            raise rejected(name, argument, kinds, described(mask), TypeError)
        if tuple(mask.shape) not in fits.values():
            expected = " or ".join(f"{legend} = {sizes}" for legend, sizes in fits.items())
            raise rejected(name, argument, f"have shape {expected}", shape(mask))


def hidden(mask: Tensor) -> Tensor:
    """Return where a mask hides."""
    return mask if mask.dtype == torch.bool else mask.isneginf()


def unseen(padding: Tensor | None, attn_mask: MaskLike | None, extent: Extent, device: torch.device) -> Tensor | None:
    """Return which keys (B or 1, S) no query of the call may attend to."""
    found = None if padding is None else hidden(padding)
    if attn_mask is None:
        return found
    if not isinstance(attn_mask, Tensor):
        seen = as_mask(attn_mask).bind(extent, device).seen(extent)
        return ~seen.any(1) if found is None else found | ~seen.any(1)
    nowhere = hidden(attn_mask).all(-2)  # (S,) or (B·H, S)
    nowhere = nowhere.unsqueeze(0) if nowhere.dim() == 1 else nowhere.unflatten(0, (extent.B, extent.H)).all(1)
    return nowhere if found is None else found | nowhere


def without_garbage(rows: Tensor, padding: Tensor | None) -> Tensor:
    """Return rows (B, N, E) with 0 for what is not finite in padding, where ``padding`` (B, N) is True or −inf."""
    if padding is None:
        return rows
    return torch.where(hidden(padding).unsqueeze(-1) & ~rows.isfinite(), 0.0, rows)


def is_causal_matrix(mask: Any) -> bool:
    """Return whether a mask is a matrix that hides what ``is_causal=True`` hides; False where it cannot be read."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.requires_grad or mask.device.type != "cpu":
        return False
    if is_blind(mask):
        return False
    later = torch.ones(mask.shape, dtype=torch.bool).triu(1)
    if mask.dtype != torch.bool:
        later = torch.zeros(mask.shape, dtype=mask.dtype).masked_fill(later, -torch.inf)
    return torch.equal(mask, later)


def _extended(mask: Tensor, appended: int) -> Tensor:
    """Return a mask in which True shows, with so many more keys that all may see."""
    if mask.dtype == torch.bool:
        return F.pad(~mask, (0, appended), value=True) if appended else ~mask
    return F.pad(mask, (0, appended)) if appended else mask
