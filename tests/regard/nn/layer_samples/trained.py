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


def orthogonal(matrix: Array) -> Array:
    """Return Muon's step: five polynomials of the singular values."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / (np.sqrt((values**2).sum()) + 1e-7)
    for a, b, c in zip(
        (4.0848, 3.9505, 3.7418, 2.8769, 2.8366),
        (-6.8946, -6.3029, -5.5913, -3.1427, -3.0525),
        (2.927, 2.6377, 2.3037, 1.2046, 1.2012),
    ):
        values = a * values + b * values**3 + c * values**5
    return (left * values) @ right


class Chunks:
    """LaCT's memory of one head, whose gradients autograd takes at the weights before the chunk."""

    def __init__(self, layer: Any, h: int) -> None:
        self.layer, self.initial = layer, [_double(array(each)[h]) for each in layer.initial]
        self.reset()

    def reset(self) -> None:
        self.weights, self.momentum = self.initial, [torch.zeros_like(each) for each in self.initial]
        self.steps: list[tuple[list[Tensor], float]] = []

    def _applied(self, weights: list[Tensor], row: Tensor) -> Tensor:
        return (F.silu(row @ weights[0]) * (row @ weights[1])) @ weights[2]

    def step(self, query: Tensor, key: Tensor, value: Tensor, rates: Array, gate: float) -> Tensor:
        """Return what the network makes of a query, and learn after the last step of a chunk."""
        read = self._applied(self.weights, query)
        with torch.enable_grad():
            leaves = [each.clone().requires_grad_() for each in self.weights]
            grads = torch.autograd.grad(self._applied(leaves, key) @ value, leaves)
        self.steps.append(([float(rate) * grad for rate, grad in zip(rates, grads)], gate))
        if len(self.steps) == self.layer.chunk_size:
            kept = sum(gate for _, gate in self.steps) / len(self.steps)
            change = [sum(grads) + kept * old for grads, old in zip(zip(*(g for g, _ in self.steps)), self.momentum)]
            made = [_double(orthogonal(array(each))) if self.layer.muon else each for each in change]
            new = [weight + each for weight, each in zip(self.weights, made)]
            norms, firsts = ([each.square().sum(0).sqrt() for each in of] for of in (new, self.initial))
            self.weights = [each / (a + 1e-5) * b for each, a, b in zip(new, norms, firsts)]
            self.momentum, self.steps = change, []
        return read


def lact(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read, A, H = Read(x, **kwargs), layer.num_heads, layer.num_memories
    rows = np.split(times(read.x, layer.qkv), 3, -1)
    rows[:2] = [rms(each, array(n.weight), n.eps) for each, n in zip(rows, (layer.query_norm, layer.key_norm))]
    q, k, v = (heads(each, A) for each in rows)
    near = np.zeros_like(q)
    for b, t, h in np.ndindex(*q.shape[:3]):
        if read.real[b, t]:
            seen = [j for j in range(max(0, t - layer.window + 1), t + 1) if read.ids[b, j] == read.ids[b, t]]
            scores = [float(_turned(_double(q[b, t, h]), t) @ _turned(_double(k[b, j, h]), j)) for j in seen]
            near[b, t, h] = softmax(np.array(scores) / np.sqrt(q.shape[-1])) @ v[b, seen, h]
    rows[:2] = [each * a + b for each, a, b in zip(rows, array(layer.scale), array(layer.shift))]
    q, k, v = (silu(heads(each, H)) for each in rows)
    q, k = unit(q), unit(k)
    rates = np.logaddexp(0, heads(times(read.x, layer.rates), H))
    gates = np.zeros(rates.shape[:3]) if layer.momentum is None else _sigmoid(times(read.x, layer.momentum))
    found = np.zeros_like(q)
    for b, h in np.ndindex(len(q), H):
        chunks = Chunks(layer, h)
        for t in range(read.L):
            if _begins(read, b, t):
                chunks.reset()
            if read.real[b, t]:
                query, key, value = (_double(each[b, t, h]) for each in (q, k, v))
                found[b, t, h] = array(chunks.step(query, key, value, rates[b, t, h], gates[b, t, h]))
    found = rms(found, array(layer.norm.weight), layer.norm.eps) * silu(times(read.x, layer.share))[..., None]
    return times(merged(near) + merged(found), layer.out)


def _products(layer: Any, row: Array) -> Array:
    """Return all products of at most p columns, by degree, with their coefficients."""
    found = []
    for d, a in enumerate(array(layer.coefficients)):
        places = [p for p in np.ndindex(*d * [len(row)]) if list(p) == sorted(p)]
        found += [a * np.prod(row[list(p)]) for p in places]
    return np.array(found)


def atlas(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read, H = Read(x, **kwargs), layer.num_heads
    rows, D = read.conv(layer.conv, times(read.x, layer.qkv)), H * layer.key_dim
    q, k, v = (heads(each, H) for each in np.split(rows, [D, 2 * D], -1))
    q, k = (np.apply_along_axis(lambda row: _products(layer, row), -1, unit(each)) for each in (q, k))
    rate, forget, theta, gamma = np.split(_sigmoid(times(read.x, layer.rates)), 4, -1)

    def applied(weights: list[Tensor], row: Tensor) -> Tensor:
        for i, w in enumerate(weights):
            row = (F.silu(row) if i else row) @ w
        return row

    found = np.zeros_like(v)
    for b, h in np.ndindex(len(q), H):
        for t in range(read.L):
            if _begins(read, b, t):
                start = current = [_double(array(each)[h]) for each in layer.initial]
                pushed, pairs = [torch.zeros_like(each) for each in start], list[tuple[Tensor, Tensor, float]]()
            if not read.real[b, t]:
                continue
            pairs.append((_double(k[b, t, h]), _double(v[b, t, h]), float(gamma[b, t, h])))
            with torch.enable_grad():
                leaves = [each.clone().requires_grad_() for each in start]
                losses = [g * (applied(leaves, key) - value).square().sum() for key, value, g in pairs[-layer.window :]]
                grads = torch.autograd.grad(torch.stack(losses).sum(), leaves)
            pushed = [float(theta[b, t, h]) * s + grad for s, grad in zip(pushed, grads)]
            steps = [_double(orthogonal(array(each))) if layer.muon else each for each in pushed]
            kept, eta = 1 - float(forget[b, t, h]), float(rate[b, t, h])
            current = [kept * each - eta * step for each, step in zip(current, steps)]
            start = start if len(pairs) % layer.block_size else current
            found[b, t, h] = array(applied(current, _double(q[b, t, h])))
    return times(_gated(layer, read, found), layer.out)


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
    "Atlas": (
        {
            "": _made(nn.Atlas, 2, key_dim=2, window=2, block_size=3, muon=False),
            "muon": _made(nn.Atlas, 2, key_dim=2, value_dim=2, degree=1, window=3, block_size=2, conv_size=2),
            "deep": _made(nn.Atlas, 2, key_dim=2, value_dim=3, degree=3, window=1, block_size=4, depth=2, muon=False),
        },
        atlas,
    ),
    "LaCT": (
        {
            "": _made(nn.LaCT, 2, chunk_size=2, window=3, muon=False),
            "muon": _made(nn.LaCT, 2, num_memories=4, hidden_dim=3, chunk_size=2, window=2),
            "plain": _made(nn.LaCT, 2, num_memories=1, hidden_dim=5, chunk_size=4, muon=False, momentum=False),
        },
        lact,
    ),
    "TTTMLP": ({"": _made(nn.TTTMLP, 2, block_size=4)}, ttt),
}
for name, (variants, formula) in LAYERS.items():
    for variant, build in variants.items():
        sample(
            name, build, lambda new: ((new(2, 6, 8),), {"valid_lens": LENGTHS}), formula, Padded((0,), LENGTHS), variant
        )
