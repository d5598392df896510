"""Samples of approximations of softmax attention: each is exactly its own formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tests.regard.nn.layer_samples.latents import cleared, linear
from tests.regard.nn.layer_samples.sample import Array, Padded, array, sample, softmax
from torch import Tensor

from regard.nn.approximate.linformer import LinformerAttention
from regard.nn.approximate.lsh import LSHAttention
from regard.nn.approximate.nystrom import NystromAttention
from regard.nn.approximate.performer import PerformerAttention

LENGTHS = torch.tensor([3, 5])


def _split(layer: Any, part: Any, x: Array) -> Array:
    """Return the projected heads (B, H, N, E)."""
    rows = linear(part, x)
    return rows.reshape(*rows.shape[:2], layer.num_heads, -1).transpose(0, 2, 1, 3)


def _merged(layer: Any, read: Array) -> Array:
    rows = read.transpose(0, 2, 1, 3)
    return linear(layer.out_proj, rows.reshape(*rows.shape[:2], -1))


def _lengths(x: Tensor, lengths: Tensor | None) -> list[int]:
    return [x.shape[1]] * len(x) if lengths is None else lengths.tolist()


# Performer ------------------------------------------------------------------------------------------------------------


def _performer(layer: Any, x: Tensor, lengths: Tensor | None = None, *, is_causal: bool = False) -> Array:
    inputs = cleared(x, lengths)
    q, k, v = (_split(layer, part, inputs) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    read, width = np.zeros_like(v), q.shape[-1]
    for b, n in enumerate(_lengths(x, lengths)):
        for h, i in np.ndindex(*v.shape[1:3]):
            weights = np.zeros(min(n, i + 1) if is_causal else n)
            for w in array(layer.projection):
                a, c = q[b, h, i] / width**0.25, k[b, h, : len(weights)] / width**0.25
                if layer.kernel == "relu":
                    weights += (max(0, w @ a) + 1e-3) * (np.maximum(c @ w, 0) + 1e-3)
                else:
                    weights += np.exp(w @ a - a @ a / 2) * np.exp(c @ w - (c**2).sum(-1) / 2)
            read[b, h, i] = weights @ v[b, h, : len(weights)] / max(weights.sum(), 1e-300)
    return _merged(layer, read)


sample(
    "PerformerAttention",
    lambda **where: PerformerAttention(6, 2, num_features=7, **where),
    lambda new: ((new(2, 5, 6), LENGTHS), {}),
    _performer,
    Padded((0,), LENGTHS),
)
sample(
    "PerformerAttention",
    lambda **where: PerformerAttention(6, 2, num_features=3, orthogonal=False, **where),
    lambda new: ((new(2, 5, 6), torch.tensor([0, 5])), {"is_causal": True}),
    _performer,
    Padded((0,), torch.tensor([0, 5])),
    variant="causal, an empty sequence",
)
sample(
    "PerformerAttention",
    lambda **where: PerformerAttention(6, 2, num_features=7, kernel="relu", bias=False, **where),
    lambda new: ((new(2, 5, 6), LENGTHS), {"is_causal": True}),
    _performer,
    Padded((0,), LENGTHS),
    variant="relu",
)


# Nyström --------------------------------------------------------------------------------------------------------------


def _nystrom(layer: Any, x: Tensor, lengths: Tensor | None = None) -> Array:
    inputs, M = cleared(x, lengths), layer.num_landmarks
    q, k, v = (_split(layer, part, inputs) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    read, scale = np.zeros_like(v), q.shape[-1] ** -0.5
    for b, n in enumerate(_lengths(x, lengths)):
        for h in range(layer.num_heads):
            if n == 0:
                continue
            if x.shape[1] <= M:
                read[b, h] = softmax(q[b, h] @ k[b, h, :n].T * scale) @ v[b, h, :n]
            else:
                segment = np.arange(n) * M // n
                q_mean, k_mean = (
                    np.stack([each[b, h, :n][segment == m].mean(0) for m in np.unique(segment)]) for each in (q, k)
                )
                A = softmax(q_mean @ k_mean.T * scale)
                inverse = np.linalg.pinv(A)
                if layer.iterations:
                    inverse, eye = A.T / A.sum(0).max(), np.eye(len(A))
                    for _ in range(layer.iterations):
                        y = A @ inverse
                        inverse = inverse @ (13 * eye - y @ (15 * eye - y @ (7 * eye - y))) / 4
                gathered = softmax(q_mean @ k[b, h, :n].T * scale) @ v[b, h, :n]
                read[b, h] = softmax(q[b, h] @ k_mean.T * scale) @ inverse @ gathered
            if layer.conv is not None:
                kernel = array(layer.conv.weight)[h, 0, :, 0]
                for i in range(x.shape[1]):
                    for offset, weight in enumerate(kernel, i - len(kernel) // 2):
                        if 0 <= offset < n:
                            read[b, h, i] += weight * v[b, h, offset]
    return _merged(layer, read)


sample(
    "NystromAttention",
    lambda **where: NystromAttention(6, 2, num_landmarks=3, **where),
    lambda new: ((new(2, 9, 6),), {}),
    _nystrom,
    Padded(()),
)
sample(
    "NystromAttention",
    lambda **where: NystromAttention(6, 2, num_landmarks=4, iterations=4, conv_size=3, **where),
    lambda new: ((new(3, 7, 6), torch.tensor([3, 7, 0])), {}),
    _nystrom,
    Padded((0,), torch.tensor([3, 7, 0])),
    variant="with a convolution, fewer rows than landmarks",
)
sample(
    "NystromAttention",
    lambda **where: NystromAttention(6, 2, num_landmarks=5, **where),
    lambda new: ((new(2, 5, 6), LENGTHS), {}),
    _nystrom,
    Padded((0,), LENGTHS),
    variant="exact",
)


# Linformer ------------------------------------------------------------------------------------------------------------


def _linformer(layer: Any, x: Tensor, lengths: Tensor | None = None) -> Array:
    inputs = cleared(x, lengths)
    q, k, v = (_split(layer, part, inputs) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    read = np.zeros_like(v)
    key_mix = array(layer.key_mix)
    value_mix = key_mix if layer.value_mix is None else array(layer.value_mix)
    for b, n in enumerate(_lengths(x, lengths)):
        for h in range(layer.num_heads):
            if n:
                keys = np.sum([np.outer(key_mix[:, j], k[b, h, j]) for j in range(n)], 0)
                values = np.sum([np.outer(value_mix[:, j], v[b, h, j]) for j in range(n)], 0)
                read[b, h] = softmax(q[b, h] @ keys.T / np.sqrt(q.shape[-1])) @ values
    return _merged(layer, read)


sample(
    "LinformerAttention",
    lambda **where: LinformerAttention(6, 2, 8, num_projected=3, **where),
    lambda new: ((new(2, 5, 6), LENGTHS), {}),
    _linformer,
    Padded((0,), LENGTHS),
)
sample(
    "LinformerAttention",
    lambda **where: LinformerAttention(6, 2, 5, num_projected=3, share=True, **where),
    lambda new: ((new(2, 5, 6), torch.tensor([0, 5])), {}),
    _linformer,
    Padded((0,), torch.tensor([0, 5])),
    variant="shared, an empty sequence",
)


# Reformer -------------------------------------------------------------------------------------------------------------


def _reformer(layer: Any, x: Tensor, lengths: Tensor | None = None, *, is_causal: bool = False) -> Array:
    """Return the rows, one round, chunk and row after the other."""
    inputs, C, N = cleared(x, lengths), layer.chunk, x.shape[1]
    q, v = _split(layer, layer.q_proj, inputs), _split(layer, layer.v_proj, inputs)
    read, width = np.zeros_like(v), q.shape[-1]
    for b, n in enumerate(_lengths(x, lengths)):
        for h in range(layer.num_heads):
            k = q[b, h] / np.sqrt((q[b, h] ** 2).mean(-1, keepdims=True) + 1e-6) / np.sqrt(width)
            chunks: list[list[int]] = []
            for r in range(layer.rounds if N > C else 1):
                turned = q[b, h] @ array(layer.rotations)[h, r]
                bucket = np.argmax(np.concatenate([turned, -turned], -1), -1)
                order = np.argsort(np.where(np.arange(N) < n, bucket, layer.num_buckets), kind="stable").tolist()
                order += list(range(N, N + -N % C))
                chunks += [order[i : i + C] for i in range(0, len(order), C)] if N > C else [list(range(N))]
            totals = np.zeros(N)
            sums = np.zeros((N, width))
            for m, chunk in enumerate(chunks):
                near = (chunks[m - 1] if N > C else []) + chunk
                for i in chunk:
                    others = [j for j in near if j < n and not (is_causal and j > i) and i < N]
                    weights = np.array([np.exp(q[b, h, i] @ k[j]) if j != i else 1e-30 for j in others])
                    if others:
                        totals[i] += weights.sum()
                        sums[i] += weights @ v[b, h, others]
            read[b, h] = sums / np.where(totals == 0, 1, totals)[:, None]
    return _merged(layer, read)


sample(
    "LSHAttention",
    lambda **where: LSHAttention(6, 2, num_buckets=4, chunk=3, rounds=2, **where),
    lambda new: ((new(2, 7, 6), LENGTHS), {}),
    _reformer,
    Padded((0,), LENGTHS),
)
sample(
    "LSHAttention",
    lambda **where: LSHAttention(6, 2, num_buckets=4, chunk=4, rounds=1, bias=False, **where),
    lambda new: ((new(2, 8, 6), torch.tensor([0, 8])), {"is_causal": True}),
    _reformer,
    Padded((0,), torch.tensor([0, 8])),
    variant="causal, one round, an empty sequence",
)
sample(
    "LSHAttention",
    lambda **where: LSHAttention(6, 2, num_buckets=4, chunk=5, **where),
    lambda new: ((new(2, 5, 6), LENGTHS), {"is_causal": True}),
    _reformer,
    Padded((0,), LENGTHS),
    variant="exact",
)
