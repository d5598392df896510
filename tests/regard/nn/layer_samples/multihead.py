"""Samples of multi-head attention and of the Transformer's layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tests.regard.nn.layer_samples.sample import Array, LayerCall, Padded, array, sample, softmax
from torch import Tensor

from regard import masks
from regard.nn.heads.multihead import MultiheadAttention
from regard.nn.heads.scored import GeneralAttention
from regard.nn.heads.self_attention import SelfAttention
from regard.nn.positions.rotary import Rotary
from regard.nn.transformer import (
    FeedForward,
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

LENGTHS = torch.tensor([3, 5])
PADDING = torch.arange(5) >= LENGTHS.unsqueeze(1)
REAL = array(~PADDING)[:, None]


def attended(layer: Any, query: Array, key: Array, value: Array, visible: Array, weight: Any = None) -> Array:
    """Return multi-head attention of (B, N, E), head by head; ``visible`` (B, L, S); ``weight`` of a general score."""
    D, group = layer.head_dim, layer.num_heads // layer.num_kv_heads
    if layer.in_proj_weight is not None:
        w_q, w_k, w_v = np.split(array(layer.in_proj_weight), 3)
    else:
        w_q, w_k, w_v = (array(getattr(layer, f"{name}_proj_weight")) for name in "qkv")
    b_q, b_k, b_v = np.split(array(layer.in_proj_bias), [len(w_q), len(w_q) + len(w_k)])
    q, k, v = query @ w_q.T + b_q, key @ w_k.T + b_k, value @ w_v.T + b_v
    for extra_k, extra_v in _appended(layer, k.shape[-1]):
        k = np.concatenate([k, np.broadcast_to(extra_k, (len(k), 1, k.shape[-1]))], 1)
        v = np.concatenate([v, np.broadcast_to(extra_v, (len(v), 1, v.shape[-1]))], 1)
        visible = np.concatenate([visible, np.ones((*visible.shape[:-1], 1), bool)], -1)
    heads = []
    for h in range(layer.num_heads):
        mine, shared = slice(h * D, (h + 1) * D), slice(h // group * D, (h // group + 1) * D)
        left = q[..., mine] / np.sqrt(D) if weight is None else q[..., mine] @ weight
        scores = np.einsum("bld,bsd->bls", left, k[..., shared])
        heads.append(softmax(scores, visible) @ v[..., shared])
    joined = np.concatenate(heads, -1) @ array(layer.out_proj.weight).T
    return joined + array(layer.out_proj.bias)


def _appended(layer: Any, width: int) -> list[tuple[Array, Array]]:
    found = [] if layer.bias_k is None else [(array(layer.bias_k), array(layer.bias_v))]
    return found + ([(np.zeros((1, 1, width)), np.zeros((1, 1, width)))] if layer.add_zero_attn else [])


def _layer_norm(norm: Any, x: Array) -> Array:
    centered = x - x.mean(-1, keepdims=True)
    scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + norm.eps)
    return scaled * array(norm.weight) + array(norm.bias)


def _feed_forward(layer: Any, x: Array) -> Array:
    hidden = np.maximum(x @ array(layer.linear1.weight).T + array(layer.linear1.bias), 0)
    return hidden @ array(layer.linear2.weight).T + array(layer.linear2.bias)


def _causal(rows: int) -> Array:
    return np.tril(np.ones((1, rows, rows), bool))


def encoded(layer: Any, x: Array, visible: Array) -> Array:
    """Return an encoder layer's output."""
    if layer.norm_first:
        inner = _layer_norm(layer.norm1, x)
        x = x + attended(layer.self_attn, inner, inner, inner, visible)
        return x + _feed_forward(layer, _layer_norm(layer.norm2, x))
    x = _layer_norm(layer.norm1, x + attended(layer.self_attn, x, x, x, visible))
    return _layer_norm(layer.norm2, x + _feed_forward(layer, x))


def decoded(layer: Any, x: Array, memory: Array, real: Array) -> Array:
    """Return a causal decoder layer's output, norms first; ``real`` (B, 1, S) says which of the memory is."""
    inner = _layer_norm(layer.norm1, x)
    x = x + attended(layer.self_attn, inner, inner, inner, _causal(x.shape[1]))
    x = x + attended(layer.multihead_attn, _layer_norm(layer.norm2, x), memory, memory, real)
    return x + _feed_forward(layer, _layer_norm(layer.norm3, x))


def _formula(layer: Any, query: Tensor, key: Tensor, value: Tensor, **masks: Any) -> Array:
    visible = np.broadcast_to(REAL, (2, query.shape[1], key.shape[1]))
    if "attn_mask" in masks:
        visible = visible & ~array(masks["attn_mask"])
    weight = array(layer.score.weight) if isinstance(layer.score, GeneralAttention) else None
    return attended(layer, array(query), array(key), array(value), visible, weight)


def _call(width: int, kdim: int, vdim: int, **named: Any) -> Any:
    def call(new: Any) -> LayerCall:
        return (new(2, 4, width), new(2, 5, kdim), new(2, 5, vdim)), {"key_padding_mask": PADDING, **named}

    return call


padded = Padded((1, 2), LENGTHS)
sample(
    "MultiheadAttention",
    lambda **where: MultiheadAttention(12, 3, batch_first=True, **where),
    _call(12, 12, 12, attn_mask=torch.ones(4, 5, dtype=torch.bool).triu(2)),
    _formula,
    padded,
)
sample(
    "MultiheadAttention",
    lambda **where: MultiheadAttention(
        12, 3, add_bias_kv=True, add_zero_attn=True, kdim=7, vdim=5, batch_first=True, **where
    ),
    _call(12, 7, 5, need_weights=False),
    _formula,
    padded,
    variant="appended",
)
sample(
    "MultiheadAttention",
    lambda **where: MultiheadAttention(
        16, 4, batch_first=True, num_kv_heads=2, score=GeneralAttention(4, **where), **where
    ),
    _call(16, 16, 16, average_attn_weights=False),
    _formula,
    padded,
    variant="grouped",
)


sample(
    "TransformerEncoderLayer",
    lambda **where: TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True, **where),
    lambda new: ((new(2, 5, 8),), {"src_key_padding_mask": PADDING}),
    lambda layer, src, **_: encoded(layer, array(src), REAL),
)
sample(
    "TransformerDecoderLayer",
    lambda **where: TransformerDecoderLayer(8, 2, 12, 0.0, batch_first=True, norm_first=True, **where),
    lambda new: ((new(2, 4, 8), new(2, 5, 8)), {"tgt_is_causal": True, "memory_key_padding_mask": PADDING}),
    lambda layer, tgt, memory, **_: decoded(layer, array(tgt), array(memory), REAL),
    Padded((1,), LENGTHS),
)


def _encoder(**where: Any) -> TransformerEncoder:
    return TransformerEncoder(TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True, norm_first=True, **where), 2)


def _stack_formula(model: Any, src: Tensor, **_: Any) -> Array:
    x = array(src)
    for layer in model.layers:
        x = encoded(layer, x, _causal(x.shape[1]))
    return x


def _decoder(**where: Any) -> TransformerDecoder:
    layer = TransformerDecoderLayer(8, 2, 12, 0.0, batch_first=True, norm_first=True, **where)
    return TransformerDecoder(layer, 2, torch.nn.LayerNorm(8, **where))


def _decoder_formula(model: Any, tgt: Tensor, memory: Tensor, **_: Any) -> Array:
    x = array(tgt)
    for layer in model.layers:
        x = decoded(layer, x, array(memory), REAL)
    return _layer_norm(model.norm, x)


sample(
    "TransformerEncoder",
    _encoder,
    lambda new: ((new(2, 5, 8),), {"is_causal": True}),
    _stack_formula,
)
sample(
    "TransformerDecoder",
    _decoder,
    lambda new: ((new(2, 4, 8), new(2, 5, 8)), {"tgt_is_causal": True, "memory_key_padding_mask": PADDING}),
    _decoder_formula,
    Padded((1,), LENGTHS),
)


def _both_formula(model: Any, src: Tensor, tgt: Tensor, **_: Any) -> Array:
    memory, x = array(src), array(tgt)
    for layer in model.encoder.layers:
        memory = encoded(layer, memory, np.ones((1, 1, 5), bool))
    for layer in model.decoder.layers:
        x = decoded(layer, x, _layer_norm(model.encoder.norm, memory), np.ones((1, 1, 5), bool))
    return _layer_norm(model.decoder.norm, x)


sample(
    "Transformer",
    lambda **where: Transformer(8, 2, 2, 1, 12, 0.0, batch_first=True, norm_first=True, **where),
    lambda new: ((new(2, 5, 8), new(2, 4, 8)), {"tgt_is_causal": True}),
    _both_formula,
)


def _turned(rows: Array) -> Array:
    """Return rows (B, L, D) turned by rotary positions of base 100: column i with i + D/2."""
    half = rows.shape[-1] // 2
    angles = np.arange(rows.shape[1])[:, None] * 100.0 ** (-np.arange(half) / half)
    a, b = rows[..., :half], rows[..., half:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], -1)


def _self_attended(layer: Any, x: Tensor, attn_mask: Any = None) -> Array:
    """Return self-attention of (B, L, E), head by head; a causal mask if there is one."""
    D, H, G = layer.head_dim, layer.num_heads, layer.num_kv_heads
    rows = array(x) @ array(layer.qkv.weight).T + (0 if layer.qkv.bias is None else array(layer.qkv.bias))
    pieces = [rows[..., i * D : (i + 1) * D] for i in range(H + 2 * G)]
    turn = (lambda part: part) if layer.rotary is None else _turned
    visible = np.ones((1, x.shape[1], x.shape[1]), bool) if attn_mask is None else _causal(x.shape[1])
    heads = []
    for h in range(H):
        key, value = pieces[H + h // (H // G)], pieces[H + G + h // (H // G)]
        scores = np.einsum("bld,bsd->bls", turn(pieces[h]), turn(key)) / np.sqrt(D)
        heads.append(softmax(scores, visible) @ value)
    bias = 0 if layer.out.bias is None else array(layer.out.bias)
    return np.concatenate(heads, -1) @ array(layer.out.weight).T + bias


sample(
    "SelfAttention",
    lambda **where: SelfAttention(12, 3, **where),
    lambda new: ((new(2, 5, 12),), {}),
    _self_attended,
)
sample(
    "SelfAttention",
    lambda **where: SelfAttention(
        12, 4, num_kv_heads=2, head_dim=6, bias=False, out_bias=True, rotary=Rotary(6, 100.0), **where
    ),
    lambda new: ((new(2, 5, 12), masks.causal()), {}),
    _self_attended,
    variant="rotary",
)


def _fed_forward(layer: Any, x: Tensor) -> Array:
    def linear(part: Any, rows: Array) -> Array:
        return rows @ array(part.weight).T + (0 if part.bias is None else array(part.bias))

    rise = {"relu": lambda a: np.maximum(a, 0), "silu": lambda a: a / (1 + np.exp(-a))}[layer.activation]
    up = linear(layer.up, array(x))
    hidden = rise(up) if layer.gate is None else rise(linear(layer.gate, array(x))) * up
    return linear(layer.down, hidden)


sample(
    "FeedForward",
    lambda **where: FeedForward(6, 9, "relu", **where),
    lambda new: ((new(2, 5, 6),), {}),
    _fed_forward,
)
sample(
    "FeedForward",
    lambda **where: FeedForward(6, 9, "silu", gated=True, bias=False, **where),
    lambda new: ((new(2, 5, 6),), {}),
    _fed_forward,
    variant="gated",
)
