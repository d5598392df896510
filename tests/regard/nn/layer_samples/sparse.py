"""Samples of layers with compact or selected keys, and causal ones; formulas are written out query by query."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tests.regard.nn.layer_samples.sample import Array, Padded, array, sample, softmax
from torch import Tensor

from regard import masks
from regard.nn.heads.blocks import MixtureOfBlockAttention, NativeSparseAttention
from regard.nn.heads.factorized import MultiMatrixFactorizationAttention
from regard.nn.heads.forgetting import ForgettingAttention
from regard.nn.heads.indexed import DeepSeekSparseAttention
from regard.nn.heads.latent import MultiheadLatentAttention
from regard.nn.heads.tensor_product import TensorProductAttention
from regard.nn.heads.tied import GroupedTiedAttention
from regard.nn.linear.path import PathAttention
from regard.nn.positions.rotary import Rotary

LENGTHS = torch.tensor([3, 11])


def linear(layer: Any, rows: Array) -> Array:
    """Return a linear layer's rows."""
    return rows @ array(layer.weight).T + (0 if layer.bias is None else array(layer.bias))


def turned(rows: Array, base: float = 10000.0, interleaved: bool = False) -> Array:
    """Return rows (..., L, R) turned by rotary positions, column by column."""
    out, R = rows.copy(), rows.shape[-1]
    for i in range(R // 2):
        one, other = (2 * i, 2 * i + 1) if interleaved else (i, i + R // 2)
        angle = np.arange(rows.shape[-2]) * base ** (-2 * i / R)
        out[..., one] = rows[..., one] * np.cos(angle) - rows[..., other] * np.sin(angle)
        out[..., other] = rows[..., one] * np.sin(angle) + rows[..., other] * np.cos(angle)
    return out


def _rms(norm: Any, rows: Array) -> Array:
    return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + norm.eps) * array(norm.weight)


def latent_parts(layer: Any, x: Array) -> tuple[Array, Array, Array, Array]:
    """Return what queries are linear in, queries and keys (B, H, L, D + R), and values (B, H, L, V)."""
    H, D, C, R = layer.num_heads, layer.head_dim, layer.latent_dim, layer.rotary_dim
    asked = x
    if layer.query_latent_dim is not None:
        asked = _rms(layer.query_norm, linear(layer.query_latent, x))
        asked = asked * np.sqrt(layer.embed_dim / layer.query_latent_dim) if layer.scale_latents else asked
    q = linear(layer.query, asked).reshape(*x.shape[:2], H, D + R).transpose(0, 2, 1, 3)
    both = linear(layer.latent, x)
    latent, shared = _rms(layer.latent_norm, both[..., :C]), both[..., C:]
    latent = latent * np.sqrt(layer.embed_dim / C) if layer.scale_latents else latent
    kv = linear(layer.key_value, latent).reshape(*x.shape[:2], H, D + layer.value_dim).transpose(0, 2, 1, 3)
    q_turned = turned(q[..., D:], interleaved=True) if layer.rotary is not None else q[..., D:]
    shared = turned(shared, interleaved=True) if layer.rotary is not None else shared
    shared = np.broadcast_to(shared[:, None], (*kv.shape[:3], R))
    return asked, np.concatenate([q[..., :D], q_turned], -1), np.concatenate([kv[..., :D], shared], -1), kv[..., D:]


def latent_attention(layer: Any, x: Array, visible: Array) -> Array:
    """Return multi-head latent attention of (B, L, E); ``visible`` broadcasts to (B, H, L, S)."""
    _, q, k, v = latent_parts(layer, x)
    scores = q @ k.swapaxes(2, 3) * layer.mscale**2 / np.sqrt(q.shape[-1])
    heads = softmax(scores, visible) @ v
    return linear(layer.out, heads.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1))


def index_scores(indexer: Any, x: Array, asked: Array, R: int) -> Array:
    """Return the indexer's scores (B, L, S), head by head, with R columns turned."""
    H, D = indexer.num_heads, indexer.head_dim
    k = linear(indexer.key, x)
    k = k - k.mean(-1, keepdims=True)
    k = k / np.sqrt((k**2).mean(-1, keepdims=True) + 1e-6) * array(indexer.key_norm.weight)
    k = k + array(indexer.key_norm.bias)
    k[..., :R] = turned(k[..., :R]) if R else k[..., :R]
    q, w = linear(indexer.query, asked), linear(indexer.weight, x) / np.sqrt(H)
    total = np.zeros((*x.shape[:2], x.shape[1]))
    for h in range(H):
        rows = q[..., h * D : (h + 1) * D].copy()
        rows[..., :R] = turned(rows[..., :R]) if R else rows[..., :R]
        total += w[..., h, None] * np.maximum(rows @ k.swapaxes(1, 2) / np.sqrt(D), 0)
    return total


def chosen_keys(scores: Array, visible: Array, topk: int) -> Array:
    """Return which keys (B, L, S) have the largest visible scores, sorting each row."""
    found = np.zeros(scores.shape, bool)
    for place in np.ndindex(scores.shape[:2]):
        keys = [j for j in np.argsort(-scores[place], kind="stable") if visible[place[1], j]]
        found[(*place, keys[:topk])] = True
    return found


def _causal(rows: int) -> Array:
    return np.tril(np.ones((rows, rows), bool))


sample(
    "MultiheadLatentAttention",
    lambda **where: MultiheadLatentAttention(
        12, 3, latent_dim=5, head_dim=4, value_dim=3, rotary=Rotary(2, interleaved=True), **where
    ),
    lambda new: ((new(2, 5, 12), masks.causal()), {}),
    lambda layer, x, _: latent_attention(layer, array(x), _causal(x.shape[1])),
)
sample(
    "MultiheadLatentAttention",
    lambda **where: MultiheadLatentAttention(
        12, 2, latent_dim=5, head_dim=4, rotary_dim=3, query_latent_dim=6, mscale=1.3, scale_latents=True, bias=True,
        **where,
    ),
    lambda new: ((new(2, 5, 12),), {}),
    lambda layer, x: latent_attention(layer, array(x), np.ones((1, 1), bool)),
    variant="low rank",
)  # fmt: skip


def _sparse(layer: Any, x: Tensor, *, is_causal: bool, loss: str) -> Array:
    rows = array(x)
    asked = latent_parts(layer, rows)[0]
    scores = index_scores(layer.indexer, rows, asked, layer.rotary_dim)
    return latent_attention(layer, rows, chosen_keys(scores, _causal(x.shape[1]), layer.indexer.topk)[:, None])


sample(
    "DeepSeekSparseAttention",
    lambda **where: DeepSeekSparseAttention(
        12, 3, latent_dim=5, head_dim=4, rotary=Rotary(2, interleaved=True), query_latent_dim=6, index_heads=12,
        index_dim=6, topk=4, **where,
    ),
    lambda new: ((new(2, 11, 12),), {"is_causal": True, "loss": "selected"}),
    _sparse,
)  # fmt: skip


def _cleared(x: Tensor, lengths: Tensor) -> Array:
    rows = array(x)
    return np.where((np.arange(x.shape[1]) < array(lengths)[:, None])[..., None], rows, 0)


def _heads(layer: Any, rows: Array) -> Iterator[tuple[int, int, int, Array, Array, Array]]:
    """Yield sequence, head and group, and the rows of its query, key and value."""
    H, G = layer.num_heads, layer.num_kv_heads
    pieces = np.split(linear(layer.qkv, rows), H + 2 * G, -1)
    turn = (lambda part: part) if layer.rotary is None else turned
    for b in range(len(rows)):
        for h in range(H):
            g = h // (H // G)
            yield b, h, g, turn(pieces[h][b]), turn(pieces[H + g][b]), pieces[H + G + g][b]


def _row(query: Array, keys: Array, values: Array) -> Array:
    return softmax(keys @ query / np.sqrt(len(query))) @ values if len(keys) else np.zeros(values.shape[1])


def _seen(t: int, length: int, blocks: Any, size: int) -> list[int]:
    return [j for j in range(min(t + 1, length)) if j // size in blocks]


def block_mixture(layer: Any, x: Tensor, lengths: Tensor) -> Array:
    """Return mixture of block attention, query by query."""
    rows, C = _cleared(x, lengths), layer.block_size
    heads = np.zeros((*x.shape[:2], layer.num_heads, layer.head_dim))
    for b, h, _, q, k, v in _heads(layer, rows):
        for t in range(x.shape[1]):
            past = sorted(range(t // C), key=lambda c: -float(q[t] @ k[c * C : (c + 1) * C].mean(0)))
            seen = _seen(t, int(lengths[b]), {t // C, *past[: layer.topk - 1]}, C)
            heads[b, t, h] = _row(q[t], k[seen], v[seen])
    return linear(layer.out, heads.reshape(*x.shape[:2], -1))


def native_sparse(layer: Any, x: Tensor, lengths: Tensor) -> Array:
    """Return native sparse attention as flash-linear-attention defines it, query by query."""
    rows, C, size = _cleared(x, lengths), layer.block_size, x.shape[1]
    gates = 1 / (1 + np.exp(-linear(layer.gate, rows).reshape(*x.shape[:2], layer.num_heads, 3)))
    heads = np.zeros((*x.shape[:2], layer.num_heads, layer.head_dim))
    weights = np.zeros((*x.shape[:2], layer.num_kv_heads, -(-size // C)))
    every = list(_heads(layer, rows))
    for b, h, g, q, k, v in every:
        for t in range(size):
            past = range((t + 1) // C)
            keys = np.array([k[c * C : (c + 1) * C].mean(0) for c in past]).reshape(-1, layer.head_dim)
            values = np.array([v[c * C : (c + 1) * C].mean(0) for c in past]).reshape(-1, layer.head_dim)
            if past:
                heads[b, t, h] += gates[b, t, h, 0] * _row(q[t], keys, values)
                weights[b, t, g, : len(past)] += softmax(keys @ q[t] / np.sqrt(layer.head_dim))
    for b, h, g, q, k, v in every:
        for t in range(size):
            own, past = t // C, (t + 1) // C
            forced = [c for c in dict.fromkeys((0, own - 1, own)) if c >= 0]
            rest = sorted(set(range(past)) - set(forced), key=lambda c: -weights[b, t, g, c])
            seen = _seen(t, int(lengths[b]), [*forced, *rest][: layer.num_blocks], C)
            heads[b, t, h] += gates[b, t, h, 1] * _row(q[t], k[seen], v[seen])
            near = [j for j in range(min(t + 1, int(lengths[b]))) if j > t - layer.window]
            if near:
                heads[b, t, h] += gates[b, t, h, 2] * _row(q[t], k[near], v[near])
    return linear(layer.out, heads.reshape(*x.shape[:2], -1))


def forgetful(layer: Any, x: Tensor, lengths: Tensor) -> Array:
    """Return forgetting attention, with a product of gates for each pair."""
    rows = _cleared(x, lengths)
    gates = 1 / (1 + np.exp(-linear(layer.gate, rows)))  # (B, L, H)
    heads = np.zeros((*x.shape[:2], layer.num_heads, layer.head_dim))
    for b, h, _, q, k, v in _heads(layer, rows):
        for t in range(x.shape[1]):
            seen = min(t + 1, int(lengths[b]))
            powers = np.exp(k[:seen] @ q[t] / np.sqrt(layer.head_dim))
            powers *= [gates[b, j + 1 : t + 1, h].prod() for j in range(seen)]
            heads[b, t, h] = powers / powers.sum() @ v[:seen]
    return linear(layer.out, heads.reshape(*x.shape[:2], -1))


def _biased(layer: Any) -> Any:
    """Give queries and keys biases, so that blocks of padding differ, too: of equal ones any may be chosen."""
    torch.nn.init.normal_(layer.qkv.bias)
    return layer


padded = Padded((0,), LENGTHS)
sample(
    "MixtureOfBlockAttention",
    lambda **where: _biased(
        MixtureOfBlockAttention(
            12, 4, block_size=2, topk=3, num_kv_heads=2, head_dim=4, bias=True, rotary=Rotary(4), **where
        )
    ),
    lambda new: ((new(2, 11, 12), LENGTHS), {}),
    block_mixture,
    padded,
)
sample(
    "NativeSparseAttention",
    lambda **where: _biased(
        NativeSparseAttention(
            12,
            4,
            block_size=2,
            num_blocks=4,
            window=3,
            num_kv_heads=2,
            head_dim=4,
            bias=True,
            rotary=Rotary(4),
            **where,
        )
    ),
    lambda new: ((new(2, 11, 12), LENGTHS), {}),
    native_sparse,
    padded,
)
sample(
    "ForgettingAttention",
    lambda **where: ForgettingAttention(12, 4, num_kv_heads=2, head_dim=4, gate_bias=0.5, **where),
    lambda new: ((new(2, 11, 12), LENGTHS), {}),
    forgetful,
    padded,
)


def _by_head(rows: Array, heads: int) -> Array:
    """Return rows (B, L, H·D) as heads (B, H, L, D)."""
    return rows.reshape(*rows.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def _causal_heads(layer: Any, q: Array, k: Array, v: Array, added: Array | float = 0.0) -> Array:
    """Return causal attention of heads (B, H, L, D) with padding, and a score of every pair; then the projection."""
    group, L = q.shape[1] // k.shape[1], q.shape[2]
    k, v = np.repeat(k, group, 1), np.repeat(v, q.shape[1] // v.shape[1], 1)
    visible = _causal(L) & (np.arange(L) < array(LENGTHS)[:, None, None])[:, None]
    read = softmax(q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1]) + added, visible) @ v
    return linear(layer.out, read.transpose(0, 2, 1, 3).reshape(q.shape[0], L, -1))


def _zeroed(x: Tensor, lengths: Tensor) -> Array:
    """Return rows with zeros in padding."""
    return np.where((np.arange(x.shape[1]) < array(lengths)[:, None])[..., None], array(x), 0)


def _tensor_product(layer: Any, x: Tensor, lengths: Tensor) -> Array:
    rows, made = _zeroed(x, lengths), []
    for i, rank in enumerate((layer.query_rank, layer.key_rank, layer.value_rank)):
        factors, total = linear(layer.qkv[i], rows), 0.0
        for r in range(rank):
            start = rank * layer.num_heads + r * layer.head_dim
            by_head = factors[..., r * layer.num_heads : (r + 1) * layer.num_heads]
            by_channel = factors[..., start : start + layer.head_dim]
            by_channel = turned(by_channel) if i < 2 and layer.rotary is not None else by_channel
            total = total + np.stack([by_head[..., h, None] * by_channel for h in range(layer.num_heads)], 1) / rank
        made.append(total)
    return _causal_heads(layer, *made)


def _factorized(layer: Any, x: Tensor, lengths: Tensor) -> Array:
    rows = _zeroed(x, lengths)
    q = _by_head(linear(layer.qkv["queries"], linear(layer.qkv["factors"], rows)), layer.num_heads)
    k, v = np.split(linear(layer.qkv["keys_values"], rows)[:, None], 2, -1)
    return _causal_heads(layer, turned(q), turned(k), v)


def _tied(layer: Any, x: Tensor, lengths: Tensor) -> Array:
    rows, half = _zeroed(x, lengths), layer.head_dim // 2
    q, found = _by_head(linear(layer.qkv["queries"], rows), layer.num_heads), linear(layer.qkv["rows"], rows)
    v = _by_head(found[..., :-half], layer.num_kv_heads)
    shared = np.broadcast_to(turned(found[..., -half:])[:, None], (*v.shape[:3], half))
    q = np.concatenate([q[..., :half], turned(q[..., half:])], -1)
    return _causal_heads(layer, q, np.concatenate([v[..., :half], shared], -1), v)


def _path(layer: Any, x: Tensor, lengths: Tensor) -> Array:
    """Return PaTH attention: the key of each pair is reflected token by token."""
    rows, H, G, D = _zeroed(x, lengths), layer.num_heads, layer.num_kv_heads, layer.head_dim
    q, k, v = (_by_head(each, len_) for each, len_ in zip(np.split(
        linear(layer.qkv, rows), [H * D, (H + G) * D], -1), (H, G, G)))  # fmt: skip
    raw, weight = linear(layer.turns, rows), array(layer.conv.weight)[:, 0]
    w = sum(np.pad(raw, ((0, 0), (j, 0), (0, 0)))[:, : x.shape[1]] * weight[:, -1 - j] for j in range(layer.conv.width))
    w = _by_head(w / (1 + np.exp(-w)), G)
    w = w / np.sqrt((w**2).sum(-1, keepdims=True) + 1e-6)
    rate = 2 / (1 + np.exp(-linear(layer.rate, rows)))
    added, fading = np.zeros((*q.shape[:3], x.shape[1])), 0.0
    for b, h, t in np.ndindex(*q.shape[:3]):
        g = h // (H // G)
        for j in range(t + 1):
            key = k[b, g, j]
            for s in range(j + 1, t + 1):
                key = key - rate[b, s, g] * w[b, g, s] * (w[b, g, s] @ key)
            added[b, h, t, j] = q[b, h, t] @ (key - k[b, g, j]) / np.sqrt(D)
    if layer.forget is not None:
        total = -np.logaddexp(0, -linear(layer.forget, rows)).cumsum(1).transpose(0, 2, 1)
        fading = total[..., None] - total[:, :, None]
    return _causal_heads(layer, q, k, v, added + fading)


for name, build, formula in (
    (
        "TensorProductAttention",
        lambda **where: TensorProductAttention(
            12, 3, query_rank=3, key_rank=2, value_rank=1, rotary=Rotary(4), bias=True, **where
        ),
        _tensor_product,
    ),
    (
        "MultiMatrixFactorizationAttention",
        lambda **where: MultiMatrixFactorizationAttention(
            12, 3, query_rank=5, head_dim=6, rotary=Rotary(6), bias=True, **where
        ),
        _factorized,
    ),
    (
        "GroupedTiedAttention",
        lambda **where: GroupedTiedAttention(12, 4, num_kv_heads=2, head_dim=8, rotary=Rotary(4), **where),
        _tied,
    ),
    ("PathAttention", lambda **where: PathAttention(12, 4, num_kv_heads=2, **where), _path),
):
    sample(name, build, lambda new: ((new(2, 11, 12), LENGTHS), {}), formula, padded)
sample(
    "PathAttention",
    lambda **where: PathAttention(12, 2, bias=True, conv_size=2, forget=True, **where),
    lambda new: ((new(2, 11, 12), LENGTHS), {}),
    _path,
    padded,
    variant="forgetful",
)
