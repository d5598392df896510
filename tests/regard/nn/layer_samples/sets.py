"""Samples of the Set Transformer's blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tests.regard.nn.layer_samples.sample import Array, Padded, array, sample, softmax
from torch import Tensor

from regard.nn.sets import ISAB, MAB, PMA, SAB

LENGTHS = torch.tensor([3, 5])


def _linear(part: Any, x: Array) -> Array:
    return x @ array(part.weight).T + array(part.bias)


def _norm(part: Any, x: Array) -> Array:
    if not hasattr(part, "weight"):
        return x
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * array(part.weight) + array(part.bias)


def _real(lengths: Tensor | None, elements: int) -> Array:
    """Return which elements are real, (B or 1, N)."""
    if lengths is None:
        return np.ones((1, elements), dtype=bool)
    return np.arange(elements) < array(lengths)[:, None]


def _mab(mab: Any, query: Array, key: Array, real: Array, scale: float | None = None) -> Array:
    """Return the block, one head after the other."""
    key = np.where(real[..., None], key, 0)
    q, k, v = _linear(mab.fc_q, query), _linear(mab.fc_k, key), _linear(mab.fc_v, key)
    width = mab.hidden_size // mab.num_heads
    read = np.zeros_like(q)
    for h in range(mab.num_heads):
        own = slice(h * width, (h + 1) * width)
        scores = np.einsum("ble,bse->bls", q[..., own], k[..., own]) * (width**-0.5 if scale is None else scale)
        read[..., own] = softmax(scores, real[:, None]) @ v[..., own]
    hidden = _norm(mab.ln0, q + read)
    return _norm(mab.ln1, hidden + np.maximum(_linear(mab.fc_o, hidden), 0))


def _of_mab(layer: Any, query: Tensor, key: Tensor, lengths: Tensor, query_lens: Tensor | None = None) -> Array:
    real = _real(query_lens, query.shape[1])
    query = torch.where(torch.from_numpy(real)[..., None], query, 0.0)
    found = _mab(layer, array(query), array(key), _real(lengths, key.shape[1]), layer.scale)
    return np.where(real[..., None], found, 0)


def _of_sab(layer: Any, x: Tensor, lengths: Tensor | None = None) -> Array:
    real = _real(lengths, x.shape[1])
    inside = np.where(real[..., None], array(x), 0)
    return np.where(real[..., None], _mab(layer.mab, inside, inside, real), 0)


def _of_isab(layer: Any, x: Tensor, lengths: Tensor | None = None) -> Array:
    real = _real(lengths, x.shape[1])
    inside = np.where(real[..., None], array(x), 0)
    points = np.repeat(array(layer.I), len(inside), 0)
    summary = _mab(layer.mab0, points, inside, real)
    return np.where(real[..., None], _mab(layer.mab1, inside, summary, np.ones((1, layer.num_inducing), dtype=bool)), 0)


def _of_pma(layer: Any, x: Tensor, lengths: Tensor | None = None) -> Array:
    real = _real(lengths, x.shape[1])
    inside = np.where(real[..., None], array(x), 0)
    fed = inside if layer.fc is None else np.maximum(_linear(layer.fc, inside), 0)
    return _mab(layer.mab, np.repeat(array(layer.S), len(inside), 0), fed, real)


padded = Padded((0,), LENGTHS)
sample(
    "MAB",
    lambda **where: MAB(3, 4, 6, 2, **where),
    lambda new: ((new(2, 4, 3), new(2, 5, 4), LENGTHS), {}),
    _of_mab,
    Padded((1,), LENGTHS),
)
sample(
    "MAB",
    lambda **where: MAB(3, 4, 6, 2, layer_norm=False, scale=6**-0.5, **where),
    lambda new: ((new(2, 5, 3), new(2, 5, 4), LENGTHS), {"query_lens": LENGTHS}),
    _of_mab,
    Padded((0, 1), LENGTHS),
    variant="as the authors' code, both sets padded",
)
sample("SAB", lambda **where: SAB(3, 6, 2, **where), lambda new: ((new(2, 5, 3), LENGTHS), {}), _of_sab, padded)
sample(
    "SAB",
    lambda **where: SAB(3, 6, 3, layer_norm=False, **where),
    lambda new: ((new(2, 5, 3),), {}),
    _of_sab,
    Padded(()),
    variant="plain",
)
sample("ISAB", lambda **where: ISAB(3, 6, 2, 4, **where), lambda new: ((new(2, 5, 3), LENGTHS), {}), _of_isab, padded)
sample("PMA", lambda **where: PMA(6, 2, 3, **where), lambda new: ((new(2, 5, 6), LENGTHS), {}), _of_pma, padded)
sample(
    "PMA",
    lambda **where: PMA(6, 2, feedforward=False, layer_norm=False, **where),
    lambda new: ((new(2, 5, 6), LENGTHS), {}),
    _of_pma,
    padded,
    variant="as the authors' code",
)
