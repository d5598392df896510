"""Shared code of layers: the sequences of a call, and one mask from lengths and masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard import masks
from regard._constraints import TensorOf, floats
from regard.masks import Mask, MaskLike
from regard.masks.convert import is_matrix


def sequences(layer: object, argument: str, value: Any, width: int | None = None) -> Tensor:
    """Return a tensor (B, N, E) of floats, of this width where one is given, or raise for the layer's call."""
    return floats(layer, argument, value, "B", "N", "E" if width is None else width)


def combined_mask(layer: object, valid_lens: Any, attn_mask: MaskLike | None) -> Mask | None:
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
        mask = masks.padding(TensorOf(("B",), ("B", "L"), integer=True)(layer, "valid_lens", valid_lens))
    if attn_mask is not None:
        if is_matrix(attn_mask) and attn_mask.dim() == 3:
            attn_mask = attn_mask.unsqueeze(1)
        other = masks.as_mask(attn_mask)
        mask = other if mask is None else mask & other
    return mask


def attention_inputs(layer: object, query: Any, key: Any, value: Any, valid_lens: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (B, 1, N, E) of a call of one head; keys are queries, values keys by default.

    Widths are those of the layer's ``query_size`` and ``key_size``, where it has them. In self-attention the padding of
    the keys is that of the queries, and is cleared in both: nothing may come of what it holds, nor gradients.
    """
    query = sequences(layer, "query", query, getattr(layer, "query_size", None))
    keys = sequences(layer, "key", query if key is None else key, getattr(layer, "key_size", None))
    values = keys if value is None else sequences(layer, "value", value)
    if isinstance(valid_lens, Tensor):
        B, L, _ = query.shape
        TensorOf((B,), (B, L), integer=True)(layer, "valid_lens", valid_lens)
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
