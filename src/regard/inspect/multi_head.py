"""A call of torch's multi-head layer that multiplies queries and keys itself, because somebody asks for weights.

Dimensions: B batch, H heads, L queries, S keys, C width of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.inspect.calls import Attended


@torch.no_grad()
def multi_head(given: Mapping[str, Any]) -> Attended:
    """Return the call of ``torch.nn.functional.multi_head_attention_forward`` with these arguments."""
    rows, H = [given["query"], given["key"]], given["num_heads"]
    if rows[0].dim() == 2:
        rows = [each.unsqueeze(1) for each in rows]
    C = rows[0].shape[-1]
    if given["use_separate_proj_weight"]:
        matrices = [given["q_proj_weight"], given["k_proj_weight"]]
    else:
        matrices = list(given["in_proj_weight"][: 2 * C].split(C))
    bias = given["in_proj_bias"]
    biases = [None, None] if bias is None else list(bias[: 2 * C].split(C))
    query, key = (F.linear(each, matrix, b) for each, matrix, b in zip(rows, matrices, biases))  # (L, B, C), (S, B, C)
    B = query.shape[1]
    if given["static_k"] is not None:
        key = given["static_k"].view(B, H, -1, C // H)
    else:
        if given["bias_k"] is not None:
            key = torch.cat([key, given["bias_k"].expand(1, B, C)])
        key = _heads(key, H)
    if given["add_zero_attn"]:
        key = F.pad(key, (0, 0, 0, 1))
    return Attended(_heads(query, H), key, _mask(given, B, H, key.shape[2]))


def _heads(rows: Tensor, H: int) -> Tensor:
    """Return rows (L, B, C) as (B, H, L, C / H)."""
    return rows.unflatten(-1, (H, -1)).permute(1, 2, 0, 3)


def _mask(given: Mapping[str, Any], B: int, H: int, S: int) -> Tensor | None:
    """Return what a call hides, (B or 1, H or 1, L or 1, S), where torch's True is False; or what it adds."""
    pairs, keys = given["attn_mask"], given["key_padding_mask"]
    found: Tensor | None = None
    if pairs is not None:
        found = pairs.view(B, H, *pairs.shape[-2:]) if pairs.dim() == 3 else pairs[None, None]
    if keys is not None:
        keys = keys.view(B, 1, 1, keys.shape[-1])
        found = keys if found is None else _joined(found, keys)
    if found is None:
        return None
    found = ~found if found.dtype == torch.bool else found
    # Keys that the layer itself has added behind are seen by all.
    return F.pad(found, (0, S - found.shape[-1]), value=True if found.dtype == torch.bool else 0.0)


def _joined(first: Tensor, second: Tensor) -> Tensor:
    if first.dtype == second.dtype == torch.bool:
        return first | second
    numbers = [
        torch.zeros(each.shape, device=each.device).masked_fill(each, -torch.inf) if each.dtype == torch.bool else each
        for each in (first, second)
    ]
    return numbers[0] + numbers[1]
