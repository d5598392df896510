"""What layers share: how arguments are checked, and how lengths and masks become one mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard import masks
from regard._errors import NUMBERS, described, rejected, shape
from regard.masks import Mask, MaskLike
from regard.masks.convert import is_matrix

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def size(layer: object, argument: str, value: Any, least: int = 1) -> int:
    """Return a whole number of at least ``least``, or raise for the layer's constructor."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise rejected(type(layer).__name__, argument, f"be an int of at least {least}", described(value), TypeError)
    if value < least:
        raise rejected(type(layer).__name__, argument, f"be an int of at least {least}", value)
    return value


def probability(layer: object, argument: str, value: Any) -> float:
    """Return a probability, or raise for the layer's constructor."""
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise rejected(type(layer).__name__, argument, "be a probability in [0, 1]", described(value), TypeError)
    if not 0 <= value <= 1:
        raise rejected(type(layer).__name__, argument, "be a probability in [0, 1]", value)
    return float(value)


def rows(layer: object, argument: str, value: Any, width: int | None = None) -> Tensor:
    """Return a tensor (B, N, E) of floats, of this width where one is given, or raise for the layer's call."""
    wanted = "(B, N, E)" if width is None else f"(B, N, {width})"
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise rejected(type(layer).__name__, argument, f"be a float tensor {wanted}", described(value), TypeError)
    if value.dim() != 3 or (width is not None and value.shape[-1] != width):
        raise rejected(type(layer).__name__, argument, f"have shape {wanted}", shape(value))
    return value


def joined(layer: object, valid_lens: Any, attn_mask: MaskLike | None) -> Mask | None:
    """Return the mask of a call: lengths (B,) or (B, L), and a mask or tensor (L, S), (B, L, S) or (B, H, L, S).

    Parameters
    ----------
    layer : Module
        Whose call it is, for errors.
    valid_lens : Tensor of int, or None
        How many keys each sequence, or each query, may see.
    attn_mask : Tensor, Mask, callable or None
        As :func:`regard.attention` takes it; three dimensions are (B, L, S).
    """
    mask: Mask | None = None
    if valid_lens is not None:
        if not isinstance(valid_lens, Tensor) or valid_lens.dtype not in INTEGERS or valid_lens.dim() not in (1, 2):
            expected = "be an integer tensor (B,) or (B, L)"
            raise rejected(type(layer).__name__, "valid_lens", expected, described(valid_lens), TypeError)
        mask = masks.padding(valid_lens)
    if attn_mask is not None:
        if is_matrix(attn_mask) and attn_mask.dim() == 3:
            attn_mask = attn_mask.unsqueeze(1)
        other = masks.as_mask(attn_mask)
        mask = other if mask is None else mask & other
    return mask


def ends(layer: object, query: Any, key: Any, value: Any, valid_lens: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (B, 1, N, E) of a call of one head; keys are queries, values keys by default.

    Widths are those of the layer's ``query_size`` and ``key_size``, where it has them. In self-attention the padding of
    the keys is that of the queries, and is cleared in both: nothing may come of what it holds, nor gradients.
    """
    query = rows(layer, "query", query, getattr(layer, "query_size", None))
    keys = rows(layer, "key", query if key is None else key, getattr(layer, "key_size", None))
    values = keys if value is None else rows(layer, "value", value)
    if isinstance(valid_lens, Tensor):
        B, L, _ = query.shape
        if tuple(valid_lens.shape) not in ((B,), (B, L)):
            raise rejected(type(layer).__name__, "valid_lens", f"have shape ({B},) or ({B}, {L})", shape(valid_lens))
        if keys is query and L:
            lengths = valid_lens if valid_lens.dim() == 1 else valid_lens.amax(1)
            clear = cleared(query, lengths)
            query, keys, values = clear, clear, clear if values is query else values
    return query.unsqueeze(1), keys.unsqueeze(1), values.unsqueeze(1)


def cleared(sequences: Tensor, lengths: Tensor | None) -> Tensor:
    """Return sequences (B, N, E) with zeros behind each one's length (B,), whatever stood there."""
    if lengths is None:
        return sequences
    real = torch.arange(sequences.shape[1], device=sequences.device) < lengths.to(sequences.device).unsqueeze(1)
    return torch.where(real.unsqueeze(2), sequences, 0.0)


def parameter(*sizes: int, device: Any = None, dtype: Any = None) -> nn.Parameter:
    """Return a parameter of this shape that ``reset_parameters`` is to fill."""
    return nn.Parameter(torch.empty(sizes, device=device, dtype=dtype))
