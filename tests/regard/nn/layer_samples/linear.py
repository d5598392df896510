"""Samples of linear attention and of fast weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.regard.nn.layer_samples.sample import Array, LayerCall, Padded, array, first, sample
from torch import Tensor

from regard import masks
from regard.nn.linear.attention import LinearAttention
from regard.nn.linear.fast_weights import FastWeights
from regard.nn.linear.self_attention import LinearSelfAttention

LENGTHS = torch.tensor([3, 5])

#: φ by the name of the layer's ``feature_map``.
FEATURES: dict[Any, Callable[[Array], Array]] = {
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))) + 1,
    "relu": lambda x: np.maximum(x, 0),
    "identity": lambda x: x,
}


def powers(x: Tensor) -> Tensor:
    """Return a feature map of a user's own, twice as wide as its input."""
    return torch.cat([x.square(), x.exp()], -1)


FEATURES[powers] = lambda x: np.concatenate([x**2, np.exp(x)], -1)


def _heads(layer: Any, query: Tensor, key: Tensor | None, value: Tensor | None, lengths: Tensor) -> list[Array]:
    """Return queries, keys and values by head (B, H, N, E), which keys (B, S) are real, and their rows (B, S, C)."""
    keys = array(query if key is None else key)
    real = first(array(lengths), 1, keys.shape[1])[:, 0]
    keys = np.where(real[..., None], keys, 0)
    queries = keys if key is None else array(query)
    values = keys if value is None else np.where(real[..., None], array(value), 0)
    found = []
    for part, each in ((layer.q_proj, queries), (layer.k_proj, keys), (layer.v_proj, values)):
        mapped = each @ array(part.weight).T + array(part.bias)
        found.append(mapped.reshape(*mapped.shape[:2], layer.num_heads, -1).swapaxes(1, 2))
    return [*found, real, keys]


def _out(layer: Any, heads: Array) -> Array:
    merged = heads.swapaxes(1, 2).reshape(len(heads), heads.shape[2], -1)
    return merged @ array(layer.out_proj.weight).T + array(layer.out_proj.bias)


def _linear(
    layer: Any, query: Tensor, key: Tensor | None, value: Tensor | None, lengths: Tensor, is_causal: bool = False
) -> Array:
    """Return the quadratic formula: weights φ(q)·φ(k) of visible keys over their sum."""
    q, k, v, real, _ = _heads(layer, query, key, value, lengths)
    phi = FEATURES[layer.feature_map]
    weights = np.where(real[:, None, None], np.einsum("bhle,bhse->bhls", phi(q), phi(k)), 0)
    weights = np.tril(weights) if is_causal else weights
    total = weights.sum(-1, keepdims=True) if layer.normalize else np.ones(1)
    return _out(layer, weights / np.where(total == 0, 1, total) @ v)


def _fast(layer: Any, query: Tensor, key: Tensor | None, value: Tensor | None, lengths: Tensor) -> Array:
    """Return the rule as it is written, for one sequence, head and step after another."""
    q, k, v, real, x = _heads(layer, query, key, value, lengths)
    q, k = (FEATURES[layer.feature_map](each) for each in (q, k))
    if layer.feature_norm:
        order = int(layer.feature_norm[1])
        norms = [np.linalg.norm(each, order, -1, keepdims=True) for each in (q, k)]
        q, k = (each / np.where(norm == 0, 1, norm) for each, norm in zip((q, k), norms))
    found = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, h in np.ndindex(*q.shape[:2]):
        fast = np.zeros((v.shape[-1], k.shape[-1]))
        for t in range(q.shape[2]):
            if real[b, t] and layer.rule == "delta":
                beta = 1 / (1 + np.exp(-(array(layer.beta_proj.weight)[h] @ x[b, t] + array(layer.beta_proj.bias)[h])))
                fast += beta * np.outer(v[b, h, t] - fast @ k[b, h, t], k[b, h, t])
            elif real[b, t]:
                fast += np.outer(v[b, h, t], k[b, h, t])
            found[b, h, t] = fast @ q[b, h, t]
    return _out(layer, found)


def _itself(**kwargs: Any) -> Callable[[Callable[..., Tensor]], LayerCall]:
    return lambda new: ((new(2, 5, 8), None, None, LENGTHS), kwargs)


def _other(queries: int) -> Callable[[Callable[..., Tensor]], LayerCall]:
    return lambda new: ((new(2, queries, 8), new(2, 5, 6), new(2, 5, 7), LENGTHS), {})


def _layer(kind: type[Any], **options: Any) -> Callable[..., Any]:
    return lambda **where: kind(8, 2, **options, **where)


own, others = Padded((0,), LENGTHS), Padded((1, 2), LENGTHS)
LINEAR: dict[str, dict[str, Any]] = {
    "elu": {},
    "relu": {"feature_map": "relu"},
    "identity": {"feature_map": "identity", "normalize": False},
    "own": {"feature_map": powers},
}
FAST: dict[str, dict[str, Any]] = {
    "delta": {},
    "delta-chunks": {"chunk": 2},
    "delta-steps": {"form": "recurrent"},
    "delta-unit": {"feature_map": "identity", "feature_norm": "l2"},
    "sum": {"rule": "sum"},
    "sum-chunks": {"rule": "sum", "chunk": 2},
    "sum-own": {"rule": "sum", "feature_map": powers},
}
for name, options in LINEAR.items():
    sample("LinearAttention", _layer(LinearAttention, **options), _itself(), _linear, own, name)
    causal = _itself(is_causal=True)
    sample("LinearAttention", _layer(LinearAttention, **options), causal, _linear, own, f"{name}-causal")
for form in ("parallel", "chunked", "recurrent"):
    built, causal = _layer(LinearAttention, form=form, chunk=2), _itself(is_causal=True)
    sample("LinearAttention", built, causal, _linear, own, f"{form}-causal")
sample("LinearAttention", _layer(LinearAttention, kdim=6, vdim=7), _other(4), _linear, others, "cross")
for name, options in FAST.items():
    sample("FastWeights", _layer(FastWeights, **options), _itself(), _fast, own, name)
sample("FastWeights", _layer(FastWeights, kdim=6, vdim=7), _other(5), _fast, others, "cross")


def _linear_self(layer: Any, x: Tensor, attn_mask: Any = None) -> Array:
    """Return what each of (B, L, C) reads of the rows up to it, of its own document if there are any."""
    rows, D, H, G = array(x) @ array(layer.qkv.weight).T, layer.head_dim, layer.num_heads, layer.num_kv_heads
    rows = rows + (0 if layer.qkv.bias is None else array(layer.qkv.bias))
    pieces = [rows[..., i * D : (i + 1) * D] for i in range(H + 2 * G)]
    visible = np.tri(x.shape[1], dtype=bool)[None]
    if attn_mask is not None:
        ids = array(attn_mask.ids)
        visible = visible & (ids[..., :, None] == ids[..., None, :])
    heads = []
    for h in range(H):
        query, key = (FEATURES[layer.feature_map](each) for each in (pieces[h], pieces[H + h // (H // G)]))
        weights = np.where(visible, np.einsum("bld,bsd->bls", query, key), 0.0)
        heads.append(weights / weights.sum(-1, keepdims=True) @ pieces[H + G + h // (H // G)])
    return np.concatenate(heads, -1) @ array(layer.out.weight).T + array(layer.out.bias)


sample(
    "LinearSelfAttention",
    lambda **where: LinearSelfAttention(8, 4, num_kv_heads=2, **where),
    lambda new: ((new(2, 5, 8),), {}),
    _linear_self,
)
sample(
    "LinearSelfAttention",
    lambda **where: LinearSelfAttention(8, 2, head_dim=3, bias=False, out_bias=True, **where),
    lambda new: ((new(2, 5, 8), masks.document(torch.tensor([0, 0, 1, 1, 1]))), {}),
    _linear_self,
    variant="documents",
)
