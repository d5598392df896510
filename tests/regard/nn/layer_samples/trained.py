"""Samples of layers whose state is a network, as loops over steps in which autograd differentiates each step's loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.regard.nn.layer_samples.recurrent import DOCUMENTS, LENGTHS, Read, heads, merged, rms, silu, times, unit
from tests.regard.nn.layer_samples.sample import Array, Padded, array, sample
from torch import Tensor

from regard import nn


def _double(rows: Array) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def _net(weights: list[Tensor], row: Tensor, bias: bool) -> Tensor:
    for i, w in enumerate(weights):
        row = F.gelu(row, approximate="tanh") if i else row
        row = row @ w[:-1] + w[-1] if bias else row @ w
    return row


def learning(
    read: Read,
    layer: Any,
    query: Array,
    key: Array,
    value: Array,
    rate: Array,
    initial: list[Array],
    *,
    bias: bool,
    loss: Callable[[Tensor, Tensor, Tensor, int], Tensor],
    answer: Callable[[Tensor, Tensor, int], Tensor],
    keep: Array | None = None,
    momentum: Array | None = None,
    share: Array | None = None,
    turn: bool = False,
) -> Array:
    """Return what each head answers (B, L, H, D): the network's weights move after each step of a block.

    ``loss(output, key, value, h)`` is differentiated by autograd at the weights before the block. Weights are kept by
    the factors ``keep``, as is momentum by its own (B, L, H).
    """
    B, L, H, _ = query.shape
    found = torch.zeros(query.shape, dtype=torch.float64)
    for b, h in ((b, h) for b in range(B) for h in range(H)):
        place = 0
        for t in range(L):
            if not t or read.ids[b, t] != read.ids[b, t - 1]:
                start = [_double(each[h]) for each in initial]
                current, pushed, place = start, [torch.zeros_like(each) for each in start], 0
            if not read.real[b, t]:
                continue
            q, k, v = (_double(each[b, t, h]) for each in (query, key, value))
            if turn:
                q, k = _turned(q, place), _turned(k, place)
            with torch.enable_grad():
                leaves = [each.clone().requires_grad_() for each in start]
                grads = torch.autograd.grad(loss(_net(leaves, k, bias), k, v, h), leaves)
            m = 0.0 if momentum is None else momentum[b, t, h]
            pushed = [m * s - rate[b, t, h] * g for s, g in zip(pushed, grads)]
            current = [(1.0 if keep is None else keep[b, t, h]) * w + s for w, s in zip(current, pushed)]
            part = 1.0 if share is None else share[place]
            seen = [w + part * (c - w) for w, c in zip(start, current)]
            found[b, t, h] = answer(q, _net(seen, q, bias), h)
            place = (place + 1) % layer.block_size
            if not place:
                start = current = seen
    return array(found)


def _turned(row: Tensor, place: int) -> Tensor:
    angle = place * 10000.0 ** (-torch.arange(0, len(row), 2, dtype=torch.float64) / len(row))
    a, b = row.chunk(2)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()])


def ttt(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read, H, D = Read(x, **kwargs), layer.num_heads, layer.head_dim
    rows = np.tile(times(read.x, layer.qk), 2)
    q, k = (heads(each, H) for each in np.split(read.conv(layer.conv, rows), 2, -1))
    share = (1 / np.arange(1, layer.block_size + 1) + array(layer.share)).clip(0)
    rate = layer.learning_rate / D * _sigmoid(times(read.x, layer.rate))
    scale, shift, weight, bias = (
        _double(array(each)) for each in (layer.scale, layer.shift, layer.norm.weight, layer.norm.bias)
    )

    def normed(row: Tensor, h: int) -> Tensor:
        return F.layer_norm(row, row.shape, scale[h], shift[h], layer.norm_eps)

    found = learning(
        read, layer, q, k, heads(times(read.x, layer.value), H), rate, [array(each) for each in layer.initial],
        bias=True, turn=layer.rotary is not None, share=share,
        loss=lambda row, k, v, h: 0.5 * (k + normed(row, h) - v).square().sum(),
        answer=lambda q, row, h: q + normed(row, h),
    )  # fmt: skip
    answer = array(F.layer_norm(_double(merged(found)), (H * D,), weight, bias, layer.norm_eps))
    gate = 1 if layer.gate is None else array(F.gelu(_double(times(read.x, layer.gate)), approximate="tanh"))
    return times(answer * gate, layer.out)


def _sigmoid(rows: Array) -> Array:
    return array(torch.sigmoid(_double(rows)))


def remember(layer: Any, read: Read, x: Array, q: Array, k: Array, v: Array) -> Array:
    """Return what the heads of Titans' memory read (B, L, H, D), with gates of rows x."""
    rate, forget, momentum = (_sigmoid(each) for each in np.split(times(x, layer.rates), 3, -1))
    return learning(
        read, layer, q, k, v, rate, [array(each) for each in layer.initial], bias=False, keep=1 - forget,
        momentum=momentum, loss=lambda row, k, v, h: (row - v).square().sum(), answer=lambda q, row, h: row,
    )  # fmt: skip


def titans(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read = Read(x, **kwargs)
    q, k, v = (
        heads(each, layer.num_heads) for each in np.split(read.conv(layer.conv, times(read.x, layer.qkv)), 3, -1)
    )
    found = rms(remember(layer, read, read.x, unit(q), unit(k), v), array(layer.norm.weight), layer.norm.eps)
    return times(merged(found) * silu(times(read.x, layer.gate)), layer.out)


def _made(kind: type[Any], *sizes: int, **options: Any) -> Callable[..., Any]:
    def build(**where: Any) -> Any:
        layer = kind(8, *sizes, **options, **where)
        with torch.no_grad():  # weights that make a difference
            for each in layer.parameters():
                each += 0.3 * torch.randn(each.shape, generator=torch.Generator().manual_seed(each.numel())).to(each)
        return layer

    return build


#: Layers by name: how each is built, by variant, and its formula.
LAYERS: dict[str, tuple[dict[str, Callable[..., Any]], Callable[..., Array]]] = {
    "TTTLinear": (
        {
            "": _made(nn.TTTLinear, 2, block_size=3),
            "plain": _made(nn.TTTLinear, 2, head_dim=3, block_size=4, rotary=False, output_gate=False, conv_size=2),
        },
        ttt,
    ),
    "TitansMemory": (
        {
            "": _made(nn.TitansMemory, 2, block_size=3),
            "deep": _made(nn.TitansMemory, 2, head_dim=3, block_size=4, depth=2, conv_size=2),
        },
        titans,
    ),
    "TTTMLP": ({"": _made(nn.TTTMLP, 2, block_size=4)}, ttt),
}
for name, (variants, formula) in LAYERS.items():
    for variant, build in variants.items():
        call: dict[str, Tensor] = {"valid_lens": LENGTHS} | ({} if variant else {"documents": DOCUMENTS})
        padded = Padded((0,), LENGTHS)
        sample(name, build, lambda new, call=call: ((new(2, 6, 8),), call), formula, padded, variant)
