"""Samples of layers with a decaying state, and their formulas as loops over steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.regard.nn.layer_samples.sample import Array, LayerCall, Padded, array, sample, softmax
from torch import Tensor

from regard import nn

LENGTHS = torch.tensor([3, 6])
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 1], [4, 4, 4, 7, 7, 2]])


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    return np.logaddexp(0, x)


def rms(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def unit(x: Array) -> Array:
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


class Read:
    """What every formula begins with: rows without padding, and which document each belongs to."""

    def __init__(self, x: Tensor, valid_lens: Tensor | None = None, documents: Tensor | None = None) -> None:
        B, self.L = x.shape[:2]
        lens = np.full(B, self.L) if valid_lens is None else array(valid_lens)
        self.real = np.arange(self.L) < lens[:, None]  # (B, L)
        self.x = np.where(self.real[..., None], array(x), 0)
        self.ids = np.zeros((B, self.L)) if documents is None else array(documents)

    def conv(self, layer: Any, rows: Array) -> Array:
        """Return the short convolution of rows (B, L, C)."""
        weight, found = array(layer.weight)[:, 0], np.zeros_like(rows)
        for b, t in np.ndindex(*rows.shape[:2]):
            for j in range(layer.width):
                if t - j >= 0 and (self.ids[b, t - j : t + 1] == self.ids[b, t]).all():
                    found[b, t] += weight[:, -1 - j] * rows[b, t - j]
        found += 0 if layer.bias is None else array(layer.bias)
        return silu(found) if layer.activation else found

    def recur(
        self,
        query: Array,
        key: Array,
        value: Array,
        scale: float,
        decay: Array | None = None,
        rate: Array | None = None,
        delta: bool = False,
        erase: tuple[Array, Array] | None = None,
        bonus: Array | None = None,
    ) -> Array:
        """Return what each head reads (B, L, H, V): ``scale · qᵀS`` with the state after each step.

        With a ``bonus`` the state is that before the step, and its own key counts times the bonus.
        """
        B, L, H, V = value.shape
        G, K = key.shape[2:]
        found = np.zeros((B, L, H, V))
        for b, h in np.ndindex(B, H):
            state, g = np.zeros((K, V)), h // (H // G)
            for t in range(L):
                if t and self.ids[b, t] != self.ids[b, t - 1]:
                    state = np.zeros((K, V))
                old = state
                if self.real[b, t]:
                    state = state if decay is None else state * np.exp(decay[b, t, h]).reshape(-1, 1)
                    state = state if erase is None else state - np.outer(erase[0][b, t, h], erase[1][b, t, h] @ old)
                    k, beta = key[b, t, g], 1.0 if rate is None else rate[b, t, h]
                    state = state + beta * np.outer(k, value[b, t, h] - (k @ state if delta else 0))
                if bonus is not None and self.real[b, t]:
                    found[b, t, h] = scale * query[b, t, g] @ (old + np.outer(bonus[h] * key[b, t, g], value[b, t, h]))
                else:
                    found[b, t, h] = scale * query[b, t, g] @ (state if bonus is None else old)
        return found

    def by_level(
        self,
        query: Array,
        key: Array,
        value: Array,
        scale: float,
        decay: Array,
        rate: Array,
        levels: Array,
        delta: bool,
    ) -> Array:
        """Return what each head reads (B, L, H, V): what each step wrote, times its level's weight."""
        B, L, H, V = value.shape
        found = np.zeros((B, L, H, V))
        for b, h in np.ndindex(B, H):
            kept: list[Array] = []  # of each real step of the document
            g = h // (H // key.shape[2])
            for t in range(L):
                kept = [] if t and self.ids[b, t] != self.ids[b, t - 1] else kept
                k, place = key[b, t, g], len(kept)
                if self.real[b, t]:
                    kept = [each * np.exp(decay[b, t, h]) for each in kept]
                    kept = [each - rate[b, t, h] * np.outer(k, k @ each) for each in kept] if delta else kept
                    kept.append(rate[b, t, h] * np.outer(k, value[b, t, h]))
                for j, each in enumerate(kept):
                    level = (place ^ j).bit_length()
                    found[b, t, h] += scale * levels[b, t, h, level] * (query[b, t, g] @ each)
        return found

    def fitted(self, query: Array, key: Array, value: Array, ridge: Array, decay: Array, rate: Array) -> Array:
        """Return what each head reads (B, L, H, D): predictions of a weighted ridge regression on the steps so far."""
        B, L, H, D = value.shape
        found = np.zeros((B, L, H, D))
        for b, h in np.ndindex(B, H):
            for t in range(L):
                same = (self.ids[b, : t + 1] == self.ids[b, t]) & self.real[b, : t + 1]
                steps = np.flatnonzero(same)
                fading = [decay[b, j + 1 : t + 1, h][self.real[b, j + 1 : t + 1]].sum() for j in steps]
                root = np.sqrt(rate[b, steps, h] * np.exp(fading))[:, None]
                inputs = np.concatenate([root * key[b, steps, h], np.diag(np.sqrt(ridge[h]))])
                targets = np.concatenate([root * value[b, steps, h], np.zeros((D, D))])
                found[b, t, h] = query[b, t, h] @ np.linalg.lstsq(inputs, targets, rcond=None)[0]
        return found

    def change(self) -> Array:
        """Return the row before each row of its document, or zeros, less the row itself (B, L, E)."""
        before = np.zeros_like(self.x)
        for b, t in np.ndindex(*self.x.shape[:2]):
            if t and self.ids[b, t] == self.ids[b, t - 1]:
                before[b, t] = self.x[b, t - 1]
        return before - self.x


def times(rows: Array, linear: Any) -> Array:
    return rows @ array(linear.weight).T + (0 if linear.bias is None else array(linear.bias))


def heads(rows: Array, count: int) -> Array:
    return rows.reshape(*rows.shape[:2], count, -1)


def merged(rows: Array) -> Array:
    return rows.reshape(*rows.shape[:2], -1)


def _qkv(layer: Any, read: Read) -> tuple[Array, Array, Array]:
    """Return queries, keys and values of the layers of the delta rule."""
    rows = read.conv(layer.conv, times(read.x, layer.qkv))
    width, n = layer.num_key_heads * layer.key_dim, layer.num_steps
    q, k, v = np.split(rows, [width, (1 + n) * width], -1)
    k, v = (each.reshape(len(each), n * read.L, -1) for each in (k, v))
    q = np.repeat(q, n, 1)
    return unit(heads(q, layer.num_key_heads)), unit(heads(k, layer.num_key_heads)), heads(v, layer.num_heads)


def _normed(layer: Any, read: Array) -> Array:
    return rms(read, array(layer.norm.weight), layer.norm.eps)


def delta_net(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read = Read(x, **kwargs)
    q, k, v = _qkv(layer, read)
    found = read.recur(q, k, v, layer.key_dim**-0.5, rate=sigmoid(times(read.x, layer.rate)), delta=True)
    return times(merged(_normed(layer, found)), layer.out)


def _levels(layer: Any, read: Read) -> Array:
    """Return the weights of levels (B, L, H, N)."""
    return softplus(heads(times(read.x, layer.levels), layer.num_heads) * array(layer.level_scale))


def gated_delta(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read = Read(x, **kwargs)
    q, k, v = _qkv(layer, read)
    n, H = layer.num_steps, layer.num_heads
    rate, decay = np.split(times(read.x, layer.rates), [n * H], -1)
    every = np.zeros((len(q), n * read.L, H))
    every[:, ::n] = -np.exp(array(layer.A_log)) * softplus(decay + array(layer.dt_bias))
    rate = sigmoid(rate).reshape(every.shape) * (2 if layer.negative_eigenvalues else 1)
    steps = Read.__new__(Read)
    steps.real, steps.ids = (np.repeat(each, n, 1) for each in (read.real, read.ids))
    if isinstance(layer, nn.LogLinearGatedDeltaNet):
        found = read.by_level(q, k, v, layer.key_dim**-0.5, every, rate, _levels(layer, read), delta=True)
    else:
        found = steps.recur(q, k, v, layer.key_dim**-0.5, every, rate, delta=True)[:, n - 1 :: n]
    return times(merged(_normed(layer, found)) * silu(times(read.x, layer.gate)), layer.out)


def comba(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read, each = Read(x, **kwargs), layer.num_heads // layer.num_key_heads
    q, k, v = _qkv(layer, read)
    rate, decay = np.split(times(read.x, layer.rates), 2, -1)
    rate, decay = sigmoid(rate), -np.exp(array(layer.A_log)) * softplus(decay + array(layer.dt_bias))
    b, d = array(layer.feedback)[:, None], array(layer.correction)[:, None]
    erase = rate[..., None] * np.repeat(k, each, 2), np.repeat(sigmoid(b) * k, each, 2)
    found = read.recur(q - d * k, k, v, layer.key_dim**-0.5, decay, rate, erase=erase)
    return times(merged(_normed(layer, found)) * sigmoid(times(read.x, layer.gate)), layer.out)


def kimi(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read = Read(x, **kwargs)
    q, k, v = _qkv(layer, read)
    decay = heads(times(times(read.x, layer.decay_down), layer.decay_up) + array(layer.dt_bias), layer.num_heads)
    decay = -np.exp(array(layer.A_log))[:, None] * softplus(decay)
    found = read.recur(q, k, v, layer.key_dim**-0.5, decay, sigmoid(times(read.x, layer.rate)), delta=True)
    gate = sigmoid(times(times(read.x, layer.gate_down), layer.gate_up))
    return times(merged(_normed(layer, found)) * gate, layer.out)


def mamba2(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read = Read(x, **kwargs)
    H, G, inner = layer.num_heads, layer.num_groups, layer.num_heads * layer.head_dim
    z, rows, step = np.split(times(read.x, layer.proj), [inner, 2 * inner + 2 * G * layer.state_dim], -1)
    rows = read.conv(layer.conv, rows)
    value, key, query = np.split(rows, [inner, inner + G * layer.state_dim], -1)
    value, step = heads(value, H), softplus(step + array(layer.dt_bias))
    decay = -np.exp(array(layer.A_log)) * step
    query, key = heads(query, G), heads(key, G)
    if isinstance(layer, nn.LogLinearMamba2):
        found = read.by_level(query, key, value, 1.0, decay, step, _levels(layer, read), delta=False)
    else:
        found = read.recur(query, key, value, 1.0, decay, step)
    found += array(layer.D)[:, None] * np.where(read.real[..., None, None], value, 0)
    grouped = heads(merged(found) * silu(z), G)
    normed = merged(rms(grouped, np.ones(1), layer.norm_eps)) * array(layer.norm_weight)
    return times(normed, layer.out)


def mamba(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read = Read(x, **kwargs)
    rows, z = np.split(times(read.x, layer.proj), 2, -1)
    rows, N = read.conv(layer.conv, rows), layer.A_log.shape[1]
    low, key, query = np.split(times(rows, layer.selected), [-2 * N, -N], -1)
    rows, step, a = (
        np.where(read.real[..., None], rows, 0),
        softplus(times(low, layer.step)),
        -np.exp(array(layer.A_log)),
    )
    found = np.zeros_like(rows)
    for b in range(len(rows)):
        state = np.zeros_like(a)
        for t in range(read.L):
            state = np.zeros_like(a) if t and read.ids[b, t] != read.ids[b, t - 1] else state
            if read.real[b, t]:
                state = np.exp(step[b, t, :, None] * a) * state + np.outer(step[b, t] * rows[b, t], key[b, t])
            found[b, t] = state @ query[b, t]
    return times((found + array(layer.D) * rows) * silu(z), layer.out)


def mesa(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read, H = Read(x, **kwargs), layer.num_heads
    q, k = (unit(heads(each, H)) for each in np.split(read.conv(layer.conv, times(read.x, layer.qk)), 2, -1))
    rate, decay = (sigmoid(each) for each in np.split(times(read.x, layer.rates), 2, -1))
    ridge = layer.least_ridge + softplus(array(layer.ridge))
    found = merged(_normed(layer, read.fitted(q, k, heads(times(read.x, layer.value), H), ridge, np.log(decay), rate)))
    return times(found * (1 if layer.gate is None else silu(times(read.x, layer.gate))), layer.out)


def retention(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read = Read(x, **kwargs)
    E, H = layer.embed_dim, layer.num_heads
    q, k, v = np.split(times(read.x, layer.qkv), [E, 2 * E], -1)
    angle = np.arange(read.L)[:, None] * 10000.0 ** (-np.arange(0, E // H, 2) / (E // H))

    def turned(rows: Array) -> Array:
        a, b = np.split(heads(rows, H), 2, -1)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    decay = np.log(1 - 2.0 ** (-5 - np.arange(H))) * np.ones((*x.shape[:2], 1))
    found = read.recur(turned(q), turned(k), heads(v, H), (E // H) ** -0.5, decay)
    return times(merged(_normed(layer, found)) * silu(times(read.x, layer.gate)), layer.out)


def gated_linear(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read = Read(x, **kwargs)
    E, H = layer.embed_dim, layer.num_heads
    q, k, v = (heads(each, H) for each in np.split(times(read.x, layer.qkv), [E // 2, E], -1))
    decay = np.log(sigmoid(heads(times(times(read.x, layer.decay_down), layer.decay_up), H))) / 16
    found = read.recur(q, k, v, (E // 2 // H) ** -0.5, decay)
    return times(merged(_normed(layer, found)) * silu(times(read.x, layer.gate)), layer.out)


def gated_slots(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read, H, M = Read(x, **kwargs), layer.num_heads, layer.num_slots
    rows = times(read.x, layer.qkv)
    rows = rows if layer.conv is None else read.conv(layer.conv, rows)
    widths = [H * layer.key_dim, 2 * H * layer.key_dim]
    q, k, v = (heads(silu(each), H) for each in np.split(rows, widths, -1))
    kept = sigmoid(heads(times(read.x, layer.slots), H)) ** (1 / layer.damping)
    found = np.zeros_like(v)
    for b, h in np.ndindex(len(v), H):
        slots = np.zeros((M, k.shape[-1] + v.shape[-1]))
        for t in range(read.L):
            slots = slots * (t == 0 or read.ids[b, t] == read.ids[b, t - 1])
            if read.real[b, t]:
                alpha = kept[b, t, h][:, None]
                slots = alpha * slots + (1 - alpha) * np.concatenate([k[b, t, h], v[b, t, h]])
                keys, values = np.split(slots, [k.shape[-1]], -1)
                found[b, t, h] = softmax(keys @ q[b, t, h]) @ values
    return times(_normed(layer, silu(merged(found))), layer.out)


def hgrn2(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read = Read(x, **kwargs)
    q, f, v = (heads(each, layer.num_heads) for each in np.split(times(read.x, layer.qfv), 3, -1))
    forget = layer.lower_bound + (1 - layer.lower_bound) * sigmoid(f)
    found = read.recur(silu(q), 1 - forget, v, q.shape[-1] ** -0.5, np.log(forget))
    return times(_normed(layer, merged(found)), layer.out)


def lightning(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read = Read(x, **kwargs)
    H = layer.num_heads
    q, k, v = (heads(silu(each), H) for each in np.split(times(read.x, layer.qkv), 3, -1))
    decay = -layer.slope * 2.0 ** (-8 * (np.arange(H) + 1) / H) * np.ones((*x.shape[:2], 1))
    found = read.recur(q, k, v, 1.0, decay)
    return times(_normed(layer, merged(found)) * sigmoid(times(read.x, layer.gate)), layer.out)


def _head_normed(layer: Any, read: Array) -> Array:
    """Return what each head read (B, L, H, V), normed over the columns of the head, as rows (B, L, E)."""
    mean, variance = read.mean(-1, keepdims=True), read.var(-1, keepdims=True)
    rows = merged((read - mean) / np.sqrt(variance + layer.norm.eps))
    return rows * array(layer.norm.weight) + array(layer.norm.bias)


def rwkv6(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read, H = Read(x, **kwargs), layer.num_heads
    change = read.change()
    own = np.tanh(times(read.x + change * array(layer.mix), layer.mix_down))
    own = own.reshape(*own.shape[:2], 5, -1)
    w, k, v, r, g = (
        read.x + change * (array(layer.mixes)[i] + own[:, :, i] @ array(layer.mix_up)[i]) for i in range(5)
    )
    decay = -np.exp(times(np.tanh(times(w, layer.decay.down)), layer.decay.up))
    r, k, v = times(r, layer.receptance), times(k, layer.key), times(v, layer.value)
    found = read.recur(heads(r, H), heads(k, H), heads(v, H), 1.0, heads(decay, H), bonus=array(layer.bonus))
    return times(_head_normed(layer, found) * silu(times(g, layer.gate)), layer.out)


def rwkv7(layer: Any, x: Tensor, first_values: Tensor | None = None, **kwargs: Any) -> Array:
    read, H = Read(x, **kwargs), layer.num_heads
    r, w, k, v, a, g = (read.x + read.change() * array(layer.mixes)[i] for i in range(6))
    decay = -np.exp(-0.5) * sigmoid(times(np.tanh(times(w, layer.decay.down)), layer.decay.up))
    rate = sigmoid(times(times(a, layer.rate.down), layer.rate.up))
    gate = times(sigmoid(times(g, layer.gate.down)), layer.gate.up)
    r, k, values = times(r, layer.receptance), times(k, layer.key), times(v, layer.value)
    if first_values is not None:
        share = sigmoid(times(times(v, layer.value_residual.down), layer.value_residual.up))
        values = values + (array(first_values) - values) * share
    erased = unit(heads(k * array(layer.unit_factor), H))
    k = heads(k * (1 + (rate - 1) * array(layer.key_factor)), H)
    r, values, erase = heads(r, H), heads(values, H), (erased * heads(rate, H), erased)
    found = read.recur(r, k, values, 1.0, heads(decay, H), erase=erase)
    own = (r * k * array(layer.bonus)).sum(-1, keepdims=True) * values * read.real[..., None, None]
    return times((_head_normed(layer, found) + merged(own)) * gate, layer.out)


def short_convolution(layer: Any, x: Tensor, **kwargs: Any) -> Array:
    read = Read(x, **kwargs)
    return read.conv(layer, read.x)


def _call(**kwargs: Any) -> Callable[[Callable[..., Tensor]], LayerCall]:
    return lambda new: ((new(2, 6, 8),), kwargs)


def _made(kind: type[Any], *sizes: int, **options: Any) -> Callable[..., Any]:
    return lambda **where: kind(8, *sizes, **options, **where)


#: Layers by name: how each is built, by variant, and its formula.
LAYERS: dict[str, tuple[dict[str, Callable[..., Any]], Callable[..., Array]]] = {
    "DeltaNet": ({"": _made(nn.DeltaNet, 2)}, delta_net),
    "GatedDeltaNet": (
        {
            "": _made(nn.GatedDeltaNet, 4, num_key_heads=2),
            "wide": _made(nn.GatedDeltaNet, 2, key_dim=3, value_dim=5, conv_size=2, negative_eigenvalues=True),
            "product": _made(nn.GatedDeltaNet, 4, num_key_heads=2, num_steps=3, negative_eigenvalues=True),
        },
        gated_delta,
    ),
    "Comba": (
        {
            "": _made(nn.Comba, 4, num_key_heads=2, key_dim=3),
            "wide": _made(nn.Comba, 2, key_dim=3, value_dim=5, conv_size=2, correction=0.02),
        },
        comba,
    ),
    "KimiDeltaAttention": (
        {"": _made(nn.KimiDeltaAttention, 2), "wide": _made(nn.KimiDeltaAttention, 2, head_dim=3)},
        kimi,
    ),
    "Mamba2": (
        {
            "": _made(nn.Mamba2, 4, state_dim=3),
            "groups": _made(nn.Mamba2, 4, head_dim=3, state_dim=5, num_groups=2, conv_bias=False, bias=True),
        },
        mamba2,
    ),
    "LogLinearGatedDeltaNet": (
        {
            "": _made(nn.LogLinearGatedDeltaNet, 4, num_key_heads=2, key_dim=4),
            "wide": _made(nn.LogLinearGatedDeltaNet, 2, max_len=6, key_dim=3, negative_eigenvalues=True),
        },
        gated_delta,
    ),
    "LogLinearMamba2": (
        {
            "": _made(nn.LogLinearMamba2, 4, state_dim=3),
            "groups": _made(nn.LogLinearMamba2, 4, max_len=8, state_dim=5, num_groups=2, conv_bias=False, bias=True),
        },
        mamba2,
    ),
    "Mamba": (
        {
            "": _made(nn.Mamba, state_dim=3),
            "wide": _made(nn.Mamba, inner_dim=5, step_rank=2, conv_bias=False, bias=True),
        },
        mamba,
    ),
    "MesaNet": (
        {"": _made(nn.MesaNet, 2), "gate": _made(nn.MesaNet, 2, head_dim=3, least_ridge=0.1, output_gate=True)},
        mesa,
    ),
    "Retention": ({"": _made(nn.Retention, 2)}, retention),
    "GatedLinearAttention": ({"": _made(nn.GatedLinearAttention, 2, rank=3)}, gated_linear),
    "GatedSlotAttention": (
        {
            "": _made(nn.GatedSlotAttention, 2, num_slots=3),
            "wide": _made(nn.GatedSlotAttention, 2, key_dim=3, value_dim=5, damping=2.0, conv_size=2),
        },
        gated_slots,
    ),
    "HGRN2": ({"": _made(nn.HGRN2, 2), "bound": _made(nn.HGRN2, 2, lower_bound=0.3)}, hgrn2),
    "LightningAttention": ({"": _made(nn.LightningAttention, 2, head_dim=3, slope=0.5)}, lightning),
    "RWKV6Attention": ({"": _made(nn.RWKV6Attention, 2, mix_rank=3, decay_rank=2)}, rwkv6),
    "RWKV7Attention": ({"": _made(nn.RWKV7Attention, 2, decay_rank=2, rate_rank=3, gate_rank=2)}, rwkv7),
    "ShortConvolution": (
        {"": _made(nn.ShortConvolution), "bias": _made(nn.ShortConvolution, 3, bias=True, activation=False)},
        short_convolution,
    ),
}
for name, (variants, formula) in LAYERS.items():
    for variant, build in variants.items():
        sample(name, build, _call(valid_lens=LENGTHS), formula, Padded((0,), LENGTHS), variant)
    build = next(iter(variants.values()))
    hidden = Padded((0,), LENGTHS)
    sample(name, build, _call(valid_lens=LENGTHS, documents=DOCUMENTS), formula, hidden, "documents")
sample(
    "RWKV7Attention",
    _made(nn.RWKV7Attention, 2, value_residual=True, value_rank=3),
    lambda new: ((new(2, 6, 8),), {"valid_lens": LENGTHS, "first_values": new(2, 6, 8)}),
    rwkv7,
    Padded((0,), LENGTHS),
    "residual",
)
