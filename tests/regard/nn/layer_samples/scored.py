"""Samples of one-headed attention by its score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.regard.nn.layer_samples.sample import Array, LayerCall, Padded, array, first, sample, softmax
from torch import Tensor

from regard import nn

LENGTHS = torch.tensor([3, 5])


def _call(query: int, key: int, value: int) -> Callable[[Callable[..., Tensor]], LayerCall]:
    return lambda new: ((new(2, 4, query), new(2, 5, key), new(2, 5, value), LENGTHS), {})


def _read(score: Callable[[Any, Array, Array], Array]) -> Callable[..., Array]:
    def formula(layer: Any, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Array:
        scores = score(layer, array(query), array(key))
        return softmax(scores, first(array(lengths), query.shape[1], key.shape[1])) @ array(value)

    return formula


def _dots(query: Array, key: Array) -> Array:
    return np.einsum("ble,bse->bls", query, key)


def _hidden(query: Array, key: Array, w_q: Array, w_k: Array, w_v: Array) -> Array:
    each = np.einsum("ble,ce->blc", query, w_q)[:, :, None] + np.einsum("bse,ce->bsc", key, w_k)[:, None]
    return np.tanh(each) @ w_v


def _self(layer: Any, x: Array, lengths: Array) -> Array:
    x = np.where((np.arange(x.shape[1]) < lengths[:, None])[..., None], x, 0)
    scores = np.einsum("ble,ef,bsf->bls", x, array(layer.weight), x)
    return softmax(scores, first(lengths, x.shape[1], x.shape[1])) @ x


def _apart(layer: Any, query: Array, key: Array) -> Array:
    return (query[:, :, None] - key[:, None]) / np.exp(array(layer.log_width))


def _squares(layer: Any, query: Array, key: Array) -> Array:
    return (_apart(layer, query, key) ** 2).sum(-1)


def _cosine(layer: Any, query: Array, key: Array) -> Array:
    norms = np.linalg.norm(query, axis=-1)[..., None] * np.linalg.norm(key, axis=-1)[:, None]
    return array(layer.beta) * _dots(query, key) / norms


padded = Padded((1, 2), LENGTHS)
sample(
    "DotProductAttention",
    lambda **_: nn.DotProductAttention(),
    _call(6, 6, 3),
    _read(lambda _, q, k: _dots(q, k) / np.sqrt(6)),
    padded,
)
sample(
    "GeneralAttention",
    lambda **where: nn.GeneralAttention(4, 6, **where),
    _call(4, 6, 3),
    _read(lambda layer, q, k: np.einsum("ble,ef,bsf->bls", q, array(layer.weight), k)),
    padded,
)
sample(
    "GeneralAttention",
    lambda **where: nn.GeneralAttention(4, **where),
    lambda new: ((new(2, 5, 4),), {"valid_lens": LENGTHS}),
    lambda layer, x, valid_lens: _self(layer, array(x), array(valid_lens)),
    Padded((0,), LENGTHS),
    variant="self",
)
sample(
    "AdditiveAttention",
    lambda **where: nn.AdditiveAttention(4, 6, 7, **where),
    _call(4, 6, 3),
    _read(lambda layer, q, k: _hidden(q, k, array(layer.w_q), array(layer.w_k), array(layer.w_v))),
    padded,
)
sample(
    "ConcatAttention",
    lambda **where: nn.ConcatAttention(4, 6, 7, **where),
    _call(4, 6, 3),
    _read(lambda layer, q, k: _hidden(q, k, array(layer.weight)[:, :4], array(layer.weight)[:, 4:], array(layer.w_v))),
    padded,
)
sample(
    "LocationAttention",
    lambda **where: nn.LocationAttention(4, 9, **where),
    _call(4, 6, 3),
    _read(lambda layer, q, k: np.einsum("ble,se->bls", q, array(layer.weight)[: k.shape[1]])),
    padded,
)
sample(
    "KernelAttention",
    lambda **where: nn.KernelAttention(width=1.5, num_features=6, **where),
    _call(6, 6, 3),
    _read(lambda layer, q, k: -0.5 * _squares(layer, q, k)),
    padded,
)
sample(
    "KernelAttention",
    lambda **where: nn.KernelAttention("epanechnikov", 5.0, learn_width=False, **where),
    _call(6, 6, 3),
    _read(lambda layer, q, k: np.log(np.maximum(1 - _squares(layer, q, k), 1e-300))),
    padded,
    variant="epanechnikov",
)
sample(
    "KernelAttention",
    lambda **where: nn.KernelAttention("laplacian", 1.5, num_features=6, **where),
    _call(6, 6, 3),
    _read(lambda layer, q, k: -np.abs(_apart(layer, q, k)).sum(-1)),
    padded,
    variant="laplacian",
)
sample("CosineAttention", lambda **where: nn.CosineAttention(3.0, **where), _call(6, 6, 3), _read(_cosine), padded)
