"""Samples of layers whose state is a network, as loops over steps in which autograd differentiates each step's loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.regard.nn.layer_samples.recurrent import LENGTHS, Read, heads, merged, rms, silu, times, unit
from tests.regard.nn.layer_samples.sample import Array, Padded, array, sample, softmax
from torch import Tensor

from regard import nn


def _double(rows: Array) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def _net(weights: list[Tensor], row: Tensor, bias: bool) -> Tensor:
    for i, w in enumerate(weights):
        row = F.gelu(row, approximate="tanh") if i else row
        row = row @ w[:-1] + w[-1] if bias else row @ w
    return row


class Learner:
    """The network of one head: its weights move after each step, along gradients that autograd takes before the block.

    ``loss(output, key, value)`` is what autograd differentiates.
    """

    def __init__(self, initial: list[Tensor], block: int, bias: bool, loss: Callable[[Tensor, Tensor, Tensor], Tensor]):
        self.initial, self.block, self.bias, self.loss = initial, block, bias, loss
        self.reset()

    def reset(self) -> None:
        self.start = self.current = self.initial
        self.pushed, self.place = [torch.zeros_like(each) for each in self.initial], 0

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rate: float,
        keep: float = 1,
        momentum: float = 0,
        share: float = 1,
    ) -> Tensor:
        """Learn a pair of key and value, and return what the network makes of a query."""
        with torch.enable_grad():
            leaves = [each.clone().requires_grad_() for each in self.start]
            grads = torch.autograd.grad(self.loss(_net(leaves, key, self.bias), key, value), leaves)
        self.pushed = [momentum * s - rate * g for s, g in zip(self.pushed, grads)]
        self.current = [keep * w + s for w, s in zip(self.current, self.pushed)]
        seen = [w + share * (c - w) for w, c in zip(self.start, self.current)]
        self.place = (self.place + 1) % self.block
        if not self.place:
            self.start = self.current = seen
        return _net(seen, query, self.bias)


def _begins(read: Read, b: int, t: int) -> bool:
    return t == 0 or bool(read.ids[b, t] != read.ids[b, t - 1])


def _turned(row: Tensor, place: int) -> Tensor:
    angle = place * 10000.0 ** (-torch.arange(0, len(row), 2, dtype=torch.float64) / len(row))
    a, b = row.chunk(2)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()])


def ttt(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read, H, D = Read(x, **kwargs), layer.num_heads, layer.head_dim
    mixed = read.conv(layer.conv, np.tile(times(read.x, layer.qk), 2))
    q, k, v = (heads(each, H) for each in (*np.split(mixed, 2, -1), times(read.x, layer.value)))
    share = (1 / np.arange(1, layer.block_size + 1) + array(layer.share)).clip(0)
    rate = layer.learning_rate / D * _sigmoid(times(read.x, layer.rate))
    scale, shift, weight, bias = (
        _double(array(each)) for each in (layer.scale, layer.shift, layer.norm.weight, layer.norm.bias)
    )

    def normed(row: Tensor, h: int) -> Tensor:
        return F.layer_norm(row, row.shape, scale[h], shift[h], layer.norm_eps)

    found = np.zeros_like(q)
    for b, h in np.ndindex(len(q), H):
        initial = [_double(array(each)[h]) for each in layer.initial]
        loss = lambda row, k, v, h=h: 0.5 * (k + normed(row, h) - v).square().sum()  # noqa: E731
        learner = Learner(initial, layer.block_size, True, loss)
        for t in range(read.L):
            if _begins(read, b, t):
                learner.reset()
            if read.real[b, t]:
                query, key, value = (_double(each[b, t, h]) for each in (q, k, v))
                if layer.rotary is not None:
                    query, key = _turned(query, learner.place), _turned(key, learner.place)
                seen = learner.step(query, key, value, rate[b, t, h], share=share[learner.place])
                found[b, t, h] = array(query + normed(seen, h))
    answer = array(F.layer_norm(_double(merged(found)), (H * D,), weight, bias, layer.norm_eps))
    gate = 1 if layer.gate is None else array(F.gelu(_double(times(read.x, layer.gate)), approximate="tanh"))
    return times(answer * gate, layer.out)


def _sigmoid(rows: Array) -> Array:
    return array(torch.sigmoid(_double(rows)))


def _memories(layer: Any) -> list[Learner]:
    """Return a learner of Titans' memory for each head."""

    def surprise(row: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (row - value).square().sum()

    initial = [[_double(array(each)[h]) for each in layer.initial] for h in range(layer.num_heads)]
    return [Learner(each, layer.block_size, False, surprise) for each in initial]


def _gates(layer: Any, x: Array) -> tuple[Array, Array, Array]:
    """Return the rate, what is kept, and the momentum (…, H) of rows."""
    rate, forget, momentum = (_sigmoid(each) for each in np.split(times(x, layer.rates), 3, -1))
    return rate, 1 - forget, momentum


def _remembered(layer: Any, read: Read) -> Array:
    """Return what the heads of Titans' memory read (B, L, H, D)."""
    rows = read.conv(layer.conv, times(read.x, layer.qkv))
    q, k, v = (heads(each, layer.num_heads) for each in np.split(rows, 3, -1))
    q, k, gates = unit(q), unit(k), _gates(layer, read.x)
    found = np.zeros_like(q)
    for b in range(len(q)):
        memories = _memories(layer)
        for t, h in np.ndindex(read.L, layer.num_heads):
            if _begins(read, b, t):
                memories[h].reset()
            if read.real[b, t]:
                query, key, value = (_double(each[b, t, h]) for each in (q, k, v))
                found[b, t, h] = array(memories[h].step(query, key, value, *(each[b, t, h] for each in gates)))
    return found


def _gated(layer: Any, read: Read, memory: Array) -> Array:
    return merged(rms(memory, array(layer.norm.weight), layer.norm.eps)) * silu(times(read.x, layer.gate))


def titans(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read = Read(x, **kwargs)
    return times(_gated(layer, read, _remembered(layer, read)), layer.out)


def _near(layer: Any, read: Read, rows: Array) -> Array:
    """Return what attention to a window and to persistent keys reads (B, L, H, D)."""
    q, k, v = (heads(each, layer.num_heads) for each in np.split(times(rows, layer.attended), 3, -1))
    keys, values = array(layer.persistent)
    found = np.zeros_like(q)
    for b, t, h in np.ndindex(*q.shape[:3]):
        if read.real[b, t]:
            seen = [j for j in range(max(0, t - layer.window + 1), t + 1) if read.ids[b, j] == read.ids[b, t]]
            query = _double(q[b, t, h])
            own = [float(_turned(query, t) @ _turned(_double(k[b, j, h]), j)) for j in seen]
            scores = np.concatenate([keys[h] @ q[b, t, h], own]) / np.sqrt(layer.head_dim)
            found[b, t, h] = softmax(scores) @ np.concatenate([values[h], v[b, seen, h]])
    return found


def _combined(layer: Any, near: Array, memory: Array) -> Array:
    gate = _sigmoid(rms(memory, array(layer.memory_norm.weight), layer.norm_eps))
    return times(rms(near, array(layer.norm.weight), layer.norm_eps) * gate, layer.out)


def titans_mag(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read = Read(x, **kwargs)
    return _combined(layer, merged(_near(layer, read, read.x)), merged(_remembered(layer, read)))


def titans_mal(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read = Read(x, **kwargs)
    rows = times(_gated(layer, read, _remembered(layer, read)), layer.memory_out)
    return times(merged(_near(layer, read, rows)), layer.out)


def titans_mac(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read, H = Read(x, **kwargs), layer.num_heads
    near, answers = np.zeros_like(read.x), np.zeros_like(read.x)

    def parts(row: Array, linear: Any) -> list[Array]:  # queries, keys and values (H, D)
        return [each.reshape(H, -1) for each in np.split(times(row, linear), 3, -1)]

    for b in range(len(read.x)):
        memories, place = _memories(layer), 0
        for t in range(read.L):
            if _begins(read, b, t):
                place = 0
                for each in memories:
                    each.reset()
            if not read.real[b, t]:
                continue
            if place == 0:  # pairs are keys and values (H, D) of the segment so far
                pairs, before = list[tuple[Array, Array]](), [each.current for each in memories]
            recalling = unit(silu(parts(read.x[b, t], layer.qkv)[0]))
            recalled = np.concatenate([array(_net(net, _double(row), False)) for net, row in zip(before, recalling)])
            q, *own = parts(read.x[b, t], layer.attended)
            recalled = rms(recalled, array(layer.recalled_norm.weight), layer.norm_eps)
            for k, v in (parts(recalled, layer.attended)[1:], own):
                pairs.append((np.stack([array(_turned(_double(each), place)) for each in k]), v))
            keys, values = array(layer.persistent)
            read_by = []
            for h in range(H):
                query = array(_turned(_double(q[h]), place))
                seen = np.concatenate([keys[h], [k[h] for k, _ in pairs]])
                weights = softmax(seen @ query / np.sqrt(layer.head_dim))
                read_by.append(weights @ np.concatenate([values[h], [v[h] for _, v in pairs]]))
            y = near[b, t] = times(np.concatenate(read_by), layer.attended_out)
            mq, mk, mv = (silu(each) for each in parts(y, layer.qkv))
            gates = _gates(layer, y)
            rows = zip(memories, unit(mq), unit(mk), mv, *gates)
            answers[b, t] = np.concatenate([array(m.step(*map(_double, each[:3]), *each[3:])) for m, *each in rows])
            place = (place + 1) % layer.segment
    return _combined(layer, near, answers)


def _made(kind: type[Any], *sizes: int, **options: Any) -> Callable[..., Any]:
    def build(**where: Any) -> Any:
        layer = kind(8, *sizes, **options, **where)
        with torch.no_grad():  # weights that make a difference
            for each in layer.parameters():
                each += 0.1 * torch.randn(each.shape, generator=torch.Generator().manual_seed(each.numel())).to(each)
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
            "": _made(nn.TitansMemory, 2),
            "blocks": _made(nn.TitansMemory, 2, block_size=3),
            "deep": _made(nn.TitansMemory, 2, head_dim=3, block_size=4, depth=2, conv_size=2),
        },
        titans,
    ),
    "TitansMAG": ({"": _made(nn.TitansMAG, 2, window=3, num_persistent=2)}, titans_mag),
    "TitansMAL": ({"": _made(nn.TitansMAL, 2, window=3, block_size=4, num_persistent=2)}, titans_mal),
    "TitansMAC": (
        {
            "": _made(nn.TitansMAC, 2, segment=4, num_persistent=3),
            "deep": _made(nn.TitansMAC, 2, segment=6, depth=2),
        },
        titans_mac,
    ),
    "TTTMLP": ({"": _made(nn.TTTMLP, 2, block_size=4)}, ttt),
}
for name, (variants, formula) in LAYERS.items():
    for variant, build in variants.items():
        sample(
            name, build, lambda new: ((new(2, 6, 8),), {"valid_lens": LENGTHS}), formula, Padded((0,), LENGTHS), variant
        )
