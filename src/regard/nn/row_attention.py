"""Multi-head attention to rows that tables name: of beams to their steps, and of steps to sequences without padding.

Dimensions: B sequences, N their steps together, L queries of each, R queries, E width, H heads, D width of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._utils.torch_private import is_eager
from regard.functional import attention
from regard.nn.beam_cache import BeamCache, KeyRows, readable

if TYPE_CHECKING:
    from regard.nn.heads.multihead import MultiheadAttention

#: The function itself, where nobody looks for it to replace it.
_ATTENTION = (attention,)


def project_memory(layer: MultiheadAttention, states: Tensor, lengths: Tensor) -> KeyRows:
    """Return a layer's keys and values of sequences, to be read by :func:`cross_attention`.

    Parameters
    ----------
    layer : MultiheadAttention
    states : Tensor (N, E)
        The steps of B sequences, one after the other.
    lengths : Tensor (B,) of int64
        How many each has, at least 1.
    """
    E, width = layer.embed_dim, layer.num_kv_heads * layer.head_dim
    bias = None if layer.in_proj_bias is None else layer.in_proj_bias[E:]
    if layer.in_proj_weight is not None:
        both = F.linear(states, layer.in_proj_weight[E:], bias)
    else:
        biases = [None, None] if bias is None else bias.split(width)
        weights = layer.k_proj_weight, layer.v_proj_weight
        both = torch.cat([F.linear(states, w, b) for w, b in zip(weights, biases) if w is not None], -1)
    key, value = readable(both).unflatten(-1, (2, layer.num_kv_heads, layer.head_dim)).unbind(1)
    return KeyRows.of(key, value, lengths)


def cross_attention(layer: MultiheadAttention, query: Tensor, rows: KeyRows) -> Tensor:
    """Return what queries (R, E) read of the keys and values of sequences, as the layer's output (R, E).

    Those that read the same sequence stand together, as many of one as of another.
    """
    E, bias = layer.embed_dim, layer.in_proj_bias
    weight = layer.q_proj_weight if layer.in_proj_weight is None else layer.in_proj_weight[:E]
    assert weight is not None
    q = F.linear(query, weight, None if bias is None else bias[:E])
    output: Tensor = layer.out_proj(_attended(layer, q.view(-1, layer.num_heads, layer.head_dim), rows).flatten(1))
    return output


def packed_self_attention(layer: MultiheadAttention, states: Tensor, lengths: Tensor, which: Tensor) -> Tensor:
    """Return what the steps of sequences read of each other, (N, E), where :func:`can_attend_packed`.

    Parameters
    ----------
    layer : MultiheadAttention
    states : Tensor (N, E)
        The steps of B sequences, one after the other.
    lengths : Tensor (B,) of int64
        How many each has.
    which : Tensor (N,) of int64
        Which sequence each belongs to.
    """
    assert layer.in_proj_weight is not None
    rows = F.linear(states, layer.in_proj_weight, layer.in_proj_bias)
    q, k, v = rows.view(len(rows), 3, layer.num_heads, layer.head_dim).unbind(1)
    output: Tensor = layer.out_proj(KeyRows.of(readable(k), readable(v), lengths).read(q, which).flatten(1))
    return output


def can_attend_packed(layer: MultiheadAttention, like: Tensor) -> bool:
    """Whether :func:`packed_self_attention` can be used, on a tensor's device."""
    usual = layer.in_proj_weight is not None and layer.rotary is None and not layer._extends
    return usual and _has_kernel(layer, like)


def self_attention_step(layer: MultiheadAttention, x: Tensor, cache: BeamCache) -> Tensor:
    """Return what a step of beams (R, E) reads of the steps before it and of itself, as the layer's output (R, E).

    A call that fails leaves the cache as it was: it may be tried again.
    """
    E, H, D, bias = layer.embed_dim, layer.num_heads, layer.head_dim, layer.in_proj_bias
    if layer.in_proj_weight is not None:
        rows = F.linear(x, layer.in_proj_weight, bias).view(len(x), 3, H, D)
        q, both = rows[:, 0], rows[:, 1:]
    else:
        width = layer.num_kv_heads * D
        biases = [None] * 3 if bias is None else bias.split([E, width, width])
        weights = layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight
        query, *others = (F.linear(x, w, b) for w, b in zip(weights, biases) if w is not None)
        q, both = query.view(-1, H, D), torch.stack(others, 1).unflatten(-1, (-1, D))
    if layer.rotary is not None:
        q, key = (layer.rotary(each[:, :, None], len(cache))[:, :, 0] for each in (q, both[:, 0]))
        both = torch.stack([key, both[:, 1]], 1)
    cache.append(both)
    try:
        output: Tensor = layer.out_proj(_attended(layer, q, cache.rows).flatten(1))
    except BaseException:
        cache.truncate(len(cache) - 1)
        raise
    return output


def _attended(layer: MultiheadAttention, q: Tensor, rows: KeyRows) -> Tensor:
    """Return the heads' outputs (R, H, D) of queries (R, H, D); those that see the same rows stand together."""
    if _has_kernel(layer, q):
        return rows.read(q)
    k, v, mask = rows.gathered
    queries = q.unflatten(0, (len(k), -1)).transpose(1, 2)
    output, _ = layer._attend(queries, k.to(q.dtype), v.to(q.dtype), mask, False, None)
    return output.transpose(1, 2).flatten(0, 1)


def _has_kernel(layer: MultiheadAttention, like: Tensor) -> bool:
    """Whether a kernel of rows computes what a layer does: on the CPU, without gradients, while nobody looks on.

    Somebody who watches attention has put a function in the place of ours, which is to see the call.
    """
    usual = layer.score is None and layer.normalizer == "softmax" and layer.engine == "auto"
    alone = attention is _ATTENTION[0] and not (layer.training and layer.dropout) and not torch.is_grad_enabled()
    return usual and alone and like.device.type == "cpu" and is_eager()
