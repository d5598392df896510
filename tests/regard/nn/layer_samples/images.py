"""Samples of layers over images; convolutions are written as loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from tests.regard.nn.layer_samples.sample import Array, LayerCall, array, sample, softmax
from torch import Tensor, nn

from regard.nn.image.channels import (
    CBAM,
    ECA,
    ChannelAttention,
    MultiheadConvAttention,
    SpatialAttention,
    SqueezeExcitation,
)
from regard.nn.image.non_local import NonLocalBlock, SelfAttention2d

_M = TypeVar("_M", bound=nn.Module)


def _call(*shape: int, inputs: int = 1) -> Callable[[Callable[..., Tensor]], LayerCall]:
    return lambda new: (tuple(new(*shape) for _ in range(inputs)), {})


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _plus_bias(part: Any, scores: Array, axis: int) -> Array:
    if part.bias is None:
        return scores
    shape = [1] * scores.ndim
    shape[axis] = -1
    return scores + array(part.bias).reshape(shape)


def _linear(part: Any, x: Array) -> Array:
    return _plus_bias(part, np.einsum("...c,dc->...d", x, array(part.weight)), -1)


def _conv(x: Array, kernel: Array) -> Array:
    """Return the convolution (B, D, H − k + 1, W − k + 1) of (B, C, H, W) by (D, C, k, k)."""
    k = kernel.shape[-1]
    found = np.zeros((x.shape[0], kernel.shape[0], x.shape[2] - k + 1, x.shape[3] - k + 1))
    for i in range(found.shape[2]):
        for j in range(found.shape[3]):
            window = x[:, :, i : i + k, j : j + k]
            found[:, :, i, j] = np.einsum("bcuv,dcuv->bd", window, kernel)
    return found


def _transposed(x: Array, kernel: Array) -> Array:
    """Return the transposed convolution (B, C, H + k − 1, W + k − 1) of (B, D, H, W) by (D, C, k, k)."""
    k = kernel.shape[-1]
    found = np.zeros((x.shape[0], kernel.shape[1], x.shape[2] + k - 1, x.shape[3] + k - 1))
    for i in range(x.shape[2]):
        for j in range(x.shape[3]):
            found[:, :, i : i + k, j : j + k] += np.einsum("bd,dcuv->bcuv", x[:, :, i, j], kernel)
    return found


def _mlp(layer: Any, pooled: Array) -> Array:
    return _linear(layer.fc2, np.maximum(_linear(layer.fc1, pooled), 0))


def _excited(layer: Any, x: Tensor) -> Array:
    means = array(x).mean((2, 3))
    return array(x) * _sigmoid(_mlp(layer, means))[:, :, None, None]


def _eca(layer: Any, x: Tensor) -> Array:
    kernel, means = array(layer.conv.weight)[0, 0], array(x).mean((2, 3))
    scores = np.zeros_like(means)
    for c in range(means.shape[1]):
        for offset in range(len(kernel)):
            neighbour = c + offset - len(kernel) // 2
            if 0 <= neighbour < means.shape[1]:
                scores[:, c] += kernel[offset] * means[:, neighbour]
    return array(x) * _sigmoid(scores)[:, :, None, None]


def _channels(layer: Any, x: Array) -> Array:
    scores = _mlp(layer, x.mean((2, 3))) + _mlp(layer, x.max((2, 3)))
    return x * _sigmoid(scores)[:, :, None, None]


def _places(layer: Any, x: Array) -> Array:
    kernel = array(layer.conv.weight)
    around = kernel.shape[-1] // 2
    both = np.stack([x.mean(1), x.max(1)], 1)
    scores = _conv(np.pad(both, ((0, 0), (0, 0), (around, around), (around, around))), kernel)
    return x * _sigmoid(_plus_bias(layer.conv, scores, 1))


def _convolved(layer: Any, *inputs: Tensor) -> Array:
    x = np.concatenate([array(each) for each in inputs], 1)
    H, W = x.shape[2:]
    heads = []
    for squeeze, restore in zip(layer.squeeze, layer.restore):
        k = squeeze.weight.shape[-1]
        canvas = np.zeros((*x.shape[:2], max(H, k), max(W, k)))
        inside: Any = (..., *(slice(max(0, k - n) // 2, max(0, k - n) // 2 + n) for n in (H, W)))
        canvas[inside] = x
        hidden = np.maximum(_plus_bias(squeeze, _conv(canvas, array(squeeze.weight)), 1), 0)
        heads.append(_plus_bias(restore, _transposed(hidden, array(restore.weight)), 1)[inside])
    joined = np.stack(heads).mean(0) if layer.combine == "mean" else np.stack(heads).sum(0)
    return x * _sigmoid(joined)


def _rows(x: Array) -> Array:
    return np.stack([x[:, :, i, j] for i in range(x.shape[2]) for j in range(x.shape[3])], 1)


def _largest(rows: Array, H: int, W: int, pool: int) -> Array:
    grid = rows.reshape(len(rows), H, W, -1)
    windows = [(i, j) for i in range(0, H, pool) for j in range(0, W, pool)]
    return np.stack([grid[:, i : i + pool, j : j + pool].max((1, 2)) for i, j in windows], 1)


def _image(rows: Array, H: int, W: int) -> Array:
    return np.moveaxis(rows.reshape(len(rows), H, W, -1), -1, 1)


def _pairwise(layer: Any, queries: Array, keys: Array) -> Array:
    """Return f(x_i, x_j) / C(x), pair by pair."""
    found = np.zeros((len(queries), queries.shape[1], keys.shape[1]))
    for b in range(len(queries)):
        for i, query in enumerate(queries[b]):
            for j, key in enumerate(keys[b]):
                if layer.mode == "concat":
                    found[b, i, j] = max(0.0, array(layer.w_f) @ np.concatenate([query, key]))
                else:
                    found[b, i, j] = query @ key
    return softmax(found) if layer.mode in ("gaussian", "embedded") else found / keys.shape[1]


def _non_local(layer: Any, x: Tensor) -> Array:
    whole, (H, W) = array(x), x.shape[2:]
    here = _rows(whole)
    queries, keys = (here if part is None else _linear(part, here) for part in (layer.theta, layer.phi))
    values = _largest(_linear(layer.g, here), H, W, layer.pool)
    added = _image(_linear(layer.w_z, _pairwise(layer, queries, _largest(keys, H, W, layer.pool)) @ values), H, W)
    if layer.norm is not None:
        mean, var, weight, bias = (
            array(getattr(layer.norm, name))[:, None, None]
            for name in ("running_mean", "running_var", "weight", "bias")
        )
        added = (added - mean) / np.sqrt(var + 1e-5) * weight + bias
    return whole + added


def _sagan(layer: Any, x: Tensor) -> Array:
    whole, (H, W) = array(x), x.shape[2:]
    here = _rows(whole)
    f, h = (_largest(_linear(part, here), H, W, layer.pool) for part in (layer.f, layer.h))
    beta = softmax(np.einsum("bjc,bic->bji", _linear(layer.g, here), f))
    return array(layer.gamma) * _image(_linear(layer.v, beta @ h), H, W) + whole


def _awake(layer: _M) -> _M:
    """Return a layer that begins as the identity with other numbers where it has zeros."""
    for name, tensor in layer.state_dict().items():
        if name in ("gamma", "w_z.weight", "w_z.bias", "norm.weight", "norm.bias", "norm.running_mean"):
            nn.init.normal_(tensor)
        elif name == "norm.running_var":
            nn.init.uniform_(tensor, 0.5, 2.0)
    return layer


sample("SqueezeExcitation", lambda **where: SqueezeExcitation(4, 2, **where), _call(2, 4, 3, 5), _excited)
sample(
    "SqueezeExcitation",
    lambda **where: SqueezeExcitation(4, bias=True, **where),
    _call(2, 4, 1, 1),
    _excited,
    variant="biases, one pixel",
)
sample("ECA", lambda **where: ECA(16, **where), _call(2, 16, 3, 5), _eca)
sample("ECA", lambda **where: ECA(4, 7, **where), _call(2, 4, 3, 5), _eca, variant="wider than the channels")
sample(
    "ChannelAttention",
    lambda **where: ChannelAttention(4, 2, **where),
    _call(2, 4, 3, 5),
    lambda layer, x: _channels(layer, array(x)),
)
sample(
    "SpatialAttention",
    SpatialAttention,
    _call(2, 4, 3, 5),
    lambda layer, x: _places(layer, array(x)),
)
sample(
    "SpatialAttention",
    lambda **where: SpatialAttention(3, bias=True, **where),
    _call(2, 4, 1, 2),
    lambda layer, x: _places(layer, array(x)),
    variant="small, bias",
)
sample(
    "CBAM",
    lambda **where: CBAM(4, 2, 3, **where),
    _call(2, 4, 3, 5),
    lambda layer, x: _places(layer.spatial, _channels(layer.channel, array(x))),
)
for mode in ("embedded", "gaussian", "dot", "concat"):
    sample(
        "NonLocalBlock",
        lambda mode=mode, **where: _awake(NonLocalBlock(4, mode=mode, **where)),
        _call(2, 4, 3, 5),
        _non_local,
        variant=mode,
    )
    sample(
        "NonLocalBlock",
        lambda mode=mode, **where: _awake(NonLocalBlock(4, 3, mode=mode, pool=2, batch_norm=True, bias=True, **where)),
        _call(2, 4, 3, 5),
        _non_local,
        variant=f"{mode}, pooled, batch norm",
    )
sample("SelfAttention2d", lambda **where: _awake(SelfAttention2d(4, 2, **where)), _call(2, 4, 3, 5), _sagan)
sample(
    "SelfAttention2d",
    lambda **where: _awake(SelfAttention2d(4, pool=2, bias=True, **where)),
    _call(2, 4, 3, 5),
    _sagan,
    variant="pooled",
)
sample("MultiheadConvAttention", lambda **where: MultiheadConvAttention(4, **where), _call(2, 4, 6, 7), _convolved)
sample(
    "MultiheadConvAttention",
    lambda **where: MultiheadConvAttention(6, (2, 3, 5), 2.0, combine="mean", bias=False, **where),
    _call(2, 2, 1, 4, inputs=3),
    _convolved,
    variant="three inputs smaller than a kernel",
)
