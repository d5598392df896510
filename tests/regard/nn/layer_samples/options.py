"""Samples of what is done to queries, keys, values and outputs of heads, and of positions within a head."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from tests.regard.nn.layer_samples.positions import HEADS, LENGTHS, OFFSETS, WIDTH, Read, reads, reads_call
from tests.regard.nn.layer_samples.sample import Array, LayerCall, Padded, array, first, sample, softmax
from torch import Tensor

from regard import masks
from regard.functional import attention
from regard.nn.heads.cross_layer import CrossLayerAttention
from regard.nn.heads.differential import DifferentialAttention
from regard.nn.heads.laser import LaserAttention
from regard.nn.heads.multi_token import MultiTokenAttention
from regard.nn.heads.options import ExclusiveOutput, HeadScale, OutputGate, QueryKeyNorm, ValueResidual
from regard.nn.heads.self_attention import KeysValues, SelfAttention
from regard.nn.positions.contextual import ContextualPositions, SelectiveBias
from regard.nn.positions.disentangled import DisentangledPositions
from regard.nn.positions.fire import FireBias
from regard.nn.positions.kerple import KerpleBias
from regard.nn.positions.multi_axis import MultiAxisRotary
from regard.nn.positions.polar import PolarPositions
from regard.nn.positions.rotary import Rotary, XPos
from regard.nn.positions.rotary_scaling import LongRopeScaling, NTKScaling, YarnScaling
from regard.nn.positions.transformer_xl import TransformerXLPositions
from regard.normalizers import SoftmaxSink

# Before and after the weighted sum ------------------------------------------------------------------------------------


def _rms(x: Array, eps: float, weight: Any = 1.0) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _unit(x: Array) -> Array:
    return x / np.sqrt((x * x).sum(-1, keepdims=True))


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _heads(*shapes: tuple[int, ...]) -> Any:
    return lambda new: (tuple(new(*shape) for shape in shapes), {})


def _normed(layer: Any, query: Tensor, key: Tensor) -> Array:
    return _unit(array(query)) if layer.kind == "l2" else _rms(array(query), layer.eps, array(layer.query.weight))


def _shaken(layer: Any) -> Any:
    """Return a layer whose parameters are not what they begin with."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for each in layer.parameters():
            if each.device.type != "meta":
                each += 0.3 * torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each.dtype)
    return layer


both = _heads((2, 4, 5, 6), (2, 2, 5, 6))
sample("QueryKeyNorm", lambda **where: _shaken(QueryKeyNorm(6, eps=0.01, **where)), both, _normed)
sample("QueryKeyNorm", lambda **where: QueryKeyNorm(6, "l2", **where), both, _normed, variant="l2")
sample(
    "ValueResidual",
    lambda **where: _shaken(ValueResidual(**where)),
    _heads((2, 2, 5, 6), (2, 2, 5, 6)),
    lambda layer, v, first: array(layer.weight)[0] * array(first) + array(layer.weight)[1] * array(v),
)


def _excluded(layer: Any, heads: Tensor, value: Tensor) -> Array:
    own = np.repeat(_unit(array(value)), 2, 1)
    share = 1.0 if layer.weight is None else np.tanh(array(layer.weight))[:, None, None]
    return array(heads) - share * (array(heads) * own).sum(-1, keepdims=True) * own


sample("ExclusiveOutput", lambda **_: ExclusiveOutput(4), both, _excluded)
sample(
    "ExclusiveOutput", lambda **where: _shaken(ExclusiveOutput(4, True, **where)), both, _excluded, variant="learned"
)
sample(
    "HeadScale",
    lambda **where: _shaken(HeadScale(4, **where)),
    _heads((2, 4, 5, 6)),
    lambda layer, heads: array(heads) * array(layer.weight)[:, None, None],
)


def _gated(layer: Any, heads: Tensor, x: Tensor) -> Array:
    gates = _sigmoid(array(x) @ array(layer.gate.weight).T + (0 if layer.gate.bias is None else array(layer.gate.bias)))
    return array(heads) * np.moveaxis(gates.reshape(*gates.shape[:2], 4, -1), 2, 1)


asked = _heads((2, 4, 5, 6), (2, 5, 7))
sample("OutputGate", lambda **where: _shaken(OutputGate(7, 4, 6, **where)), asked, _gated)
sample("OutputGate", lambda **where: OutputGate(7, 4, 6, "head", bias=False, **where), asked, _gated, variant="head")

# Whole layers ---------------------------------------------------------------------------------------------------------


def _pieces(layer: Any, x: Tensor) -> tuple[list[Array], list[Array], list[Array]]:
    """Return queries, keys and values (B, L, D) of each head."""
    D, H, G = layer.head_dim, layer.num_heads, layer.num_kv_heads
    rows = array(x) @ array(layer.qkv.weight).T + (0 if layer.qkv.bias is None else array(layer.qkv.bias))
    pieces = [rows[..., i * D : (i + 1) * D] for i in range(H + 2 * G)]
    return pieces[:H], pieces[H : H + G], pieces[H + G :]


def _out(layer: Any, heads: list[Array]) -> Array:
    joined = np.concatenate(heads, -1) @ array(layer.out.weight).T
    return joined + (0 if layer.out.bias is None else array(layer.out.bias))


def _optioned(layer: Any, x: Tensor, attn_mask: Any, first_values: Tensor | None = None) -> Array:
    """Return self-attention with all options, head by head, causal."""
    q, k, v = _pieces(layer, x)
    group, heads, causal = len(q) // len(k), [], np.tril(np.ones((1, x.shape[1], x.shape[1]), bool))
    for h in range(len(q)):
        g = h // group
        if layer.qk_norm.kind == "l2":
            left, right = _unit(q[h]), _unit(k[g])
        else:
            left, right = (
                _rms(rows, 1e-6, array(norm.weight))
                for rows, norm in ((q[h], layer.qk_norm.query), (k[g], layer.qk_norm.key))
            )
        scores = np.einsum("bld,bsd->bls", left, right)
        scores = scores * (0.7 if layer.score_scale is None else array(layer.score_scale)[h])
        scores = scores if layer.softcap is None else layer.softcap * np.tanh(scores / layer.softcap)
        value = v[g]
        if first_values is not None:
            share = array(layer.value_residual.weight)
            value = share[0] * array(first_values)[:, g] + share[1] * value
        if isinstance(layer.normalizer, str):
            weights = softmax(scores, causal)
        else:
            powers = np.where(causal, np.exp(scores), 0)
            weights = powers / (powers.sum(-1, keepdims=True) + np.exp(array(layer.normalizer.part().sink)[h]))
        read = weights @ value
        if layer.exclusive is not None:
            share = 1.0 if layer.exclusive.weight is None else np.tanh(array(layer.exclusive.weight)[h])
            read = read - share * (read * _unit(value)).sum(-1, keepdims=True) * _unit(value)
        if layer.head_scale is not None:
            read = read * array(layer.head_scale.weight)[h]
        gate = layer.output_gate.gate
        gates = _sigmoid(array(x) @ array(gate.weight).T + (0 if gate.bias is None else array(gate.bias)))
        heads.append(read * gates.reshape(*gates.shape[:2], len(q), -1)[:, :, h])
    return _out(layer, heads)


sample(
    "SelfAttention",
    lambda **where: _shaken(
        SelfAttention(
            12, 4, num_kv_heads=2, qk_norm="rms", scale=0.7, softcap=3.0, exclusive="learned", value_residual=True,
            head_scale=True, output_gate="channel", **where,
        )
    ),
    lambda new: ((new(2, 5, 12), masks.causal()), {"first_values": new(2, 2, 5, 3)}),
    _optioned,
    variant="options",
)  # fmt: skip


def _across(layer: Any, x: Tensor, keys: Any, is_causal: bool) -> Array:
    """Return attention to given keys and values, head by head: a row sees all keys but those after its own."""
    L, D, (key, value, *_) = x.shape[1], layer.head_dim, keys
    rows = array(x) @ array(layer.qkv.weight).T + (0 if layer.qkv.bias is None else array(layer.qkv.bias))
    visible, heads = np.tril(np.ones((1, L, key.shape[2]), bool)), []
    for h in range(4):
        query = _rms(rows[..., h * D : (h + 1) * D], 1e-6, array(layer.qk_norm.query.weight))
        own = array(value)[:, h // 2]
        read = softmax(np.einsum("bld,bsd->bls", query, array(key)[:, h // 2]) / math.sqrt(D), visible) @ own
        heads.append(read - (read * _unit(own)).sum(-1, keepdims=True) * _unit(own))
    return _out(layer, heads)


sample(
    "CrossLayerAttention",
    lambda **where: _shaken(CrossLayerAttention(12, 4, num_kv_heads=2, qk_norm="rms", exclusive="fixed", **where)),
    lambda new: ((new(2, 5, 12), KeysValues(new(2, 2, 5, 3), new(2, 2, 5, 3))), {"is_causal": True}),
    _across,
)


def _laser(layer: Any, x: Tensor, attn_mask: Any) -> Array:
    """Return causal attention that reads the logarithm of averaged exponentials, head by head."""
    q, k, v = _pieces(layer, x)
    group, D = len(q) // len(k), layer.head_dim
    causal = np.tril(np.ones((1, x.shape[1], x.shape[1]), bool))
    weights = [softmax(np.einsum("bld,bsd->bls", q[h], k[h // group]) / math.sqrt(D), causal) for h in range(len(q))]
    return _out(layer, [np.log(weights[h] @ np.exp(v[h // group])) for h in range(len(q))])


sample(
    "LaserAttention",
    lambda **where: LaserAttention(12, 4, num_kv_heads=2, **where),
    lambda new: ((new(2, 5, 12), masks.causal()), {}),
    _laser,
)


def _with_sinks(**where: Any) -> SelfAttention:
    sinks = SoftmaxSink(torch.nn.Parameter(torch.empty(4, **where)))
    options: dict[str, Any] = {"qk_norm": "l2", "learn_scale": True, "exclusive": "fixed", "output_gate": "head"}
    return SelfAttention(12, 4, bias=False, normalizer=sinks, **options, **where)


class _Sinks(SelfAttention):
    """Self-attention whose ``reset_parameters`` also draws its sinks."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        torch.nn.init.normal_(self.normalizer.sink)


def _sinking(**where: Any) -> SelfAttention:
    layer = _with_sinks(**where)
    layer.__class__ = _Sinks
    layer.reset_parameters()
    return _shaken(layer)


sample(
    "SelfAttention",
    _sinking,
    lambda new: ((new(2, 5, 12), masks.causal()), {}),
    _optioned,
    variant="sinks",
)


def _differential(layer: Any, x: Tensor, attn_mask: Any = None) -> Array:
    """Return differential attention, pair by pair; causal if there is a mask."""
    q, k, v = _pieces(layer, x)
    H, G, D = len(q), len(k), layer.head_dim
    visible = np.ones((1, x.shape[1], x.shape[1]), bool) if attn_mask is None else np.tril(np.ones((1, 5, 5), bool))
    zero = 0.8 - 0.6 * math.exp(-0.3 * layer.depth)
    a = [array(getattr(layer, f"lambda_{name}")) for name in ("q1", "k1", "q2", "k2")]
    share = math.exp(a[0] @ a[1]) - math.exp(a[2] @ a[3]) + zero
    heads = []
    for pair in range(H // 2):
        group = pair // (H // G)
        i, j = ((2 * pair, 2 * pair + 1), (2 * group, 2 * group + 1)) if layer.pairing == "adjacent" else (
            (pair, pair + H // 2), (group, group + G // 2)
        )  # fmt: skip
        weights = [softmax(np.einsum("bld,bsd->bls", q[i[n]], k[j[n]]) / math.sqrt(D), visible) for n in (0, 1)]
        read = (weights[0] - share * weights[1]) @ np.concatenate([v[j[0]], v[j[1]]], -1)
        weight = 1.0 if layer.norm.weight is None else array(layer.norm.weight)
        heads.append((1 - zero) * _rms(read, layer.norm_eps, weight))
    return _out(layer, heads)


sample(
    "DifferentialAttention",
    lambda **where: DifferentialAttention(12, 4, depth=2, norm_weight=True, **where),
    lambda new: ((new(2, 5, 12),), {}),
    _differential,
)
sample(
    "DifferentialAttention",
    lambda **where: DifferentialAttention(12, 4, num_kv_heads=2, pairing="halves", bias=False, **where),
    lambda new: ((new(2, 5, 12), masks.causal()), {}),
    _differential,
    variant="halves",
)

# Positions within a head ----------------------------------------------------------------------------------------------


def _turned(rows: Array, angles: Array) -> Array:
    """Turn pairs (i, i + R/2) of rows by angles (..., R/2)."""
    half = angles.shape[-1]
    a, b, rest = rows[..., :half], rows[..., half : 2 * half], rows[..., 2 * half :]
    pair = (a + 1j * b) * np.exp(1j * angles)
    return np.concatenate([pair.real, pair.imag, rest], -1)


def _ladder(layer: Any, n: int = 4) -> Array:
    return layer.base ** (-np.arange(n) / n)


def _call(new: Any) -> LayerCall:
    return (new(2, 3, 5, 8),), {"offset": 6}


def _ntk(layer: Any, x: Tensor, offset: int) -> Array:
    scaling, length = layer.scaling, offset + 5
    kappa = scaling.factor
    if scaling.original_length is not None:
        kappa = max(kappa * length / scaling.original_length - kappa + 1, 1)
    base = layer.base * kappa ** (8 / 6)
    return _turned(array(x), np.arange(offset, length)[:, None] * base ** (-np.arange(4) / 4))


sample("NTKScaling", lambda **_: Rotary(8, scaling=NTKScaling(3.0)), _call, _ntk)
sample("NTKScaling", lambda **_: Rotary(8, scaling=NTKScaling(3.0, 7)), _call, _ntk, variant="dynamic")


def _yarn(layer: Any, x: Tensor, offset: int) -> Array:
    scaling = layer.scaling
    ends = [8 * math.log(scaling.original_length / (2 * math.pi * n)) / (2 * math.log(layer.base)) for n in (4, 0.5)]
    low, high = (math.floor(ends[0]), math.ceil(ends[1])) if scaling.truncate else ends
    shares = [min(max((i - max(low, 0)) / (min(high, 7) - max(low, 0)), 0), 1) for i in range(4)]
    frequencies = [(1 - r) * f + r * f / scaling.factor for r, f in zip(shares, _ladder(layer))]
    factor = 0.1 * math.log(scaling.factor) + 1 if scaling.attention_factor is None else scaling.attention_factor
    return factor * _turned(array(x), np.arange(offset, offset + 5)[:, None] * np.array(frequencies))


sample("YarnScaling", lambda **_: Rotary(8, 50.0, scaling=YarnScaling(4.0, 60, 4.0, 0.5)), _call, _yarn)
sample(
    "YarnScaling",
    lambda **_: Rotary(8, 50.0, scaling=YarnScaling(4.0, 60, 4.0, 0.5, attention_factor=0.9, truncate=False)),
    _call,
    _yarn,
    variant="exact",
)


def _long(layer: Any, x: Tensor, offset: int) -> Array:
    scaling = layer.scaling
    divisors = scaling.long if offset + 5 > scaling.original_length else scaling.short
    factor = math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_length))
    return factor * _turned(array(x), np.arange(offset, offset + 5)[:, None] * _ladder(layer) / np.array(divisors))


TABLES = (1.0, 1.1, 1.2, 1.3), (1.0, 2.0, 4.0, 8.0)
for _name, _length in (("", 10), ("short", 11)):
    sample(
        "LongRopeScaling",
        lambda _length=_length, **_: Rotary(8, scaling=LongRopeScaling(*TABLES, original_length=_length, factor=8.0)),
        _call,
        _long,
        variant=_name,
    )


def _multi(layer: Any, x: Tensor, positions: Tensor) -> Array:
    sections = layer.sections
    if layer.layout == "axial":
        axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
        frequencies = np.concatenate([layer.base ** (-np.arange(n) / n) for n in sections])
    else:
        frequencies = _ladder(layer, sum(sections))
        axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
        if layer.layout == "interleaved":
            turn, left = [], list(sections)
            while len(turn) < sum(sections):
                axis = len(turn) % len(sections)
                axis = axis if left[axis] else 0
                left[axis] -= 1
                turn.append(axis)
            axes = turn
    places = array(positions)[..., axes]
    angles = places * frequencies
    return _turned(array(x), angles if angles.ndim == 2 else angles[:, None])


GRID = MultiAxisRotary.grid(2, 2, 2)
for _layout, _sections, _places in (
    ("axial", (1, 2, 1), GRID),
    ("sections", (2, 1, 1), torch.stack([GRID, 3 * GRID])),
    ("interleaved", (3, 1, 1), GRID + 4),
):
    sample(
        "MultiAxisRotary",
        lambda _layout=_layout, _sections=_sections, **_: MultiAxisRotary(12, _sections, _layout, base=50.0),
        lambda new, _places=_places: ((new(2, 3, 8, 12),), {"positions": _places}),
        _multi,
        variant="" if _layout == "axial" else _layout,
    )


def _xpos(layer: Any, x: Tensor, offset: int) -> Array:
    places = np.arange(offset, offset + 5)[:, None]
    zeta = (np.arange(4) / 4 + 0.4) / 1.4
    power = zeta ** ((places - layer.center) / layer.decay)
    return _turned(array(x), places * _ladder(layer)) * np.tile(power, 2)


sample("XPos", lambda **_: XPos(8, decay=4.0, center=3), _call, _xpos)


def _polar(layer: Any, x: Tensor, **_: Any) -> Array:
    """Return self-attention of (B, L, E) with polar positions, summing cosines, causal."""
    q, k, v = _pieces(layer, x)
    D, group, heads = layer.head_dim, len(q) // len(k), []
    places = np.arange(x.shape[1])
    angle = (places[None, :] - places[:, None])[..., None] * layer.rotary.base ** (-np.arange(D) / D)
    for h in range(len(q)):
        g = h // group
        phase = np.clip(array(layer.rotary.phase)[g], -2 * math.pi, 0)
        soft = [np.log1p(np.exp(rows)) for rows in (q[h], k[g])]
        scores = np.einsum("blc,bsc,lsc->bls", *soft, np.cos(angle + phase)) / math.sqrt(D)
        heads.append(softmax(scores, np.tril(np.ones((1, len(places), len(places)), bool))) @ v[g])
    return _out(layer, heads)


def _phased(**where: Any) -> SelfAttention:
    layer = SelfAttention(12, 4, num_kv_heads=2, rotary=PolarPositions(2, 3, 50.0, **where), **where)
    with torch.no_grad():
        layer.rotary.phase -= 0.5
    return layer


sample(
    "PolarPositions",
    _phased,
    lambda new: ((new(2, 5, 12),), {"is_causal": True}),
    _polar,
)

# Biases made of distances and of scores -------------------------------------------------------------------------------


def _kerple(layer: Any, _: Array, gap: int) -> Array:
    slope, rate = np.exp(array(layer.log_slope)), array(layer.log_rate)
    if layer.kind == "log":
        return -slope * np.log(1 + np.exp(rate) * abs(gap))
    return -slope * float(abs(gap)) ** (2 * _sigmoid(rate))


reads("KerpleBias", lambda **where: _shaken(KerpleBias(HEADS, **where)), _kerple, offset=OFFSETS)
reads("KerpleBias", lambda **where: _shaken(KerpleBias(HEADS, "power", **where)), _kerple, "power")


def _fire(layer: Any, place: int, gap: int) -> Array:
    """Return the bias of the query at a position, and of the key at a distance from it."""

    def psi(x: Any) -> Any:
        return np.log(1 + array(layer.c) * x)

    x = psi(abs(gap)) / psi(max(place + 1, float(array(layer.threshold))))
    hidden = np.maximum(array(layer.hidden.weight)[:, 0] * x + array(layer.hidden.bias), 0)
    found: Array = array(layer.output.weight) @ hidden + array(layer.output.bias)
    return found


def _fire_read(read: Any, *ends: Tensor, offset: int = 1) -> Array:
    query, key, value = (array(t).reshape(*t.shape[:2], HEADS, WIDTH) for t in ends[:3])
    scores = np.einsum("blhd,bshd->bhls", query, key) / np.sqrt(WIDTH)
    for i, j in np.ndindex(query.shape[1], key.shape[1]):
        scores[:, :, i, j] += _fire(read.positions, i + offset, j - i - offset)
    weights = softmax(scores, first(array(ends[3]), query.shape[1], key.shape[1])[:, None])
    return np.einsum("bhls,bshd->bhld", weights, value)


sample(
    "FireBias",
    lambda **where: Read(FireBias(HEADS, 5, 3.3, **where)),
    reads_call(offset=2),
    _fire_read,
    Padded((1, 2), LENGTHS),
)


class Contextual(torch.nn.Module):
    """Causal attention whose scores get a bias of queries and keys: rows (B, L, H·D) in, heads (B, H, L, D) out."""

    def __init__(self, positions: Any) -> None:
        super().__init__()
        self.positions = positions

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return what queries read."""
        q, k, v = (t.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for t in (query, key, value))
        if isinstance(self.positions, TransformerXLPositions):
            q, bias = self.positions(q)
            return attention(q, k, v, masks.causal() & bias, enable_gqa=True, engine="streaming")
        scale = getattr(self.positions, "scale", None)
        mask = masks.causal() & self.positions(q, k)
        return attention(q, k, v, mask, scale=scale, enable_gqa=True, engine="streaming")

    def reset_parameters(self) -> None:
        """Draw the layer's anew."""
        self.positions.reset_parameters()


def _contextual(read: Any, *ends: Tensor) -> Array:
    query, key, value = (array(t).reshape(*t.shape[:2], -1, WIDTH) for t in ends)
    key, value = (np.repeat(t, query.shape[2] // t.shape[2], 2) for t in (key, value))
    scores = np.einsum("blhd,bshd->bhls", query, key) / np.sqrt(WIDTH)
    found, L = scores.copy(), scores.shape[-1]
    if isinstance(read.positions, SelectiveBias):
        for t, j, u in np.ndindex(L, L, L):
            if u < t and 0 < j < u:
                found[:, :, t, j] -= np.maximum(scores[:, read.positions.head, u, j], 0)[:, None]
    else:
        table, most = array(read.positions.weight), read.positions.max_positions - 1
        for b, h, t in np.ndindex(*scores.shape[:3]):
            for j in range(t + 1):
                place = min(_sigmoid(scores[b, h, t, j : t + 1]).sum(), most)
                low = min(int(place), most - 1)
                row = (1 - place + low) * table[low] + (place - low) * table[low + 1]
                found[b, h, t, j] += query[b, t, h] @ row
    weights = softmax(found, np.tril(np.ones((L, L), bool)))
    return np.einsum("bhls,bshd->bhld", weights, value)


grouped = lambda new: ((new(2, 6, 4 * WIDTH), new(2, 6, 2 * WIDTH), new(2, 6, 2 * WIDTH)), {})  # noqa: E731
sample(
    "ContextualPositions",
    lambda **where: Contextual(_shaken(ContextualPositions(WIDTH, 3, **where))),
    grouped,
    _contextual,
)
sample("SelectiveBias", lambda **_: Contextual(SelectiveBias(2)), grouped, _contextual)


def _transformer_xl(read: Any, *ends: Tensor) -> Array:
    query, key, value = (array(t).reshape(*t.shape[:2], -1, WIDTH) for t in ends)
    key, value = (np.repeat(t, query.shape[2] // t.shape[2], 2) for t in (key, value))
    layer, L = read.positions, query.shape[1]
    scores = np.einsum("blhd,bshd->bhls", query + array(layer.content_bias), key)
    matrix = array(layer.weight).reshape(-1, WIDTH, layer.embed_dim)
    theta = 10000.0 ** (-np.arange(0, layer.embed_dim, 2) / layer.embed_dim)
    for t, j in np.ndindex(L, L):
        gap = min(max(t - j, -layer.max_distance), layer.max_distance)
        wave = np.concatenate([np.sin(gap * theta), np.cos(gap * theta)])
        scores[:, :, t, j] += np.einsum("bhd,hde,e->bh", query[:, t] + array(layer.position_bias), matrix, wave)
    weights = softmax(scores / np.sqrt(WIDTH), np.tril(np.ones((L, L), bool)))
    return np.einsum("bhls,bshd->bhld", weights, value)


sample(
    "TransformerXLPositions",
    lambda **where: Contextual(_shaken(TransformerXLPositions(4, WIDTH, 4, embed_dim=6, **where))),
    grouped,
    _transformer_xl,
)


def _place(layer: DisentangledPositions, gap: int) -> int:
    """Return the bucket of q − k, as the paper and the code of its second version have it."""
    half, n = len(layer.weight) // 2, abs(gap)
    if layer.num_buckets is not None and n > half // 2:
        exact, most = half // 2, layer.max_distance - 1
        n = exact + math.ceil((exact - 1) * math.log(n / exact) / math.log(most / exact) - 1e-9)
    return int(np.clip(half + np.sign(gap) * n, 0, 2 * half - 1))


def _disentangled(read: Any, *ends: Tensor) -> Array:
    query, key, value = (array(t).reshape(*t.shape[:2], -1, WIDTH) for t in ends)
    key, value = (np.repeat(t, query.shape[2] // t.shape[2], 2) for t in (key, value))
    layer, L = read.positions, query.shape[1]
    scores = np.einsum("blhd,bshd->bhls", query, key)
    for t, j in np.ndindex(L, L):
        row = array(layer.weight)[_place(layer, t - j)]
        content = (array(layer.key_weight) @ row + array(layer.key_bias)).reshape(-1, WIDTH)
        position = (array(layer.query_weight) @ row + array(layer.query_bias)).reshape(-1, WIDTH)
        scores[:, :, t, j] += (query[:, t] * content + key[:, j] * position).sum(-1)
    weights = softmax(scores / np.sqrt(3 * WIDTH), np.tril(np.ones((L, L), bool)))
    return np.einsum("bhls,bshd->bhld", weights, value)


for variant, buckets in (("", None), ("buckets", 8)):
    sample(
        "DisentangledPositions",
        lambda buckets=buckets, **where: Contextual(
            _shaken(DisentangledPositions(4, WIDTH, 5, buckets, embed_dim=6, **where))
        ),
        grouped,
        _disentangled,
        variant=variant,
    )


def _multi_token(layer: Any, x: Tensor, **_: Any) -> Array:
    """Return multi-token attention, causal, by loops over the kernel."""
    q, k, v = _pieces(layer, x)
    L, group = x.shape[1], len(q) // len(k)
    causal, kernel = np.tril(np.ones((L, L), bool)), array(layer.kernel)
    weights = []
    for h in range(len(q)):
        scores = np.where(causal, np.einsum("bld,bsd->bls", q[h], k[h // group]) / math.sqrt(layer.head_dim), 0)
        mixed = np.zeros_like(scores)
        for t, j, a, b in np.ndindex(L, L, layer.query_kernel, layer.key_kernel):
            row, column = t - a, j - (b - (layer.key_kernel - 1) // 2)
            if row >= 0 and 0 <= column < L:
                mixed[:, t, j] += kernel[h, a, b] * scores[:, row, column]
        weights.append(softmax(mixed, causal))
    heads = []
    for h in range(len(q)):
        c = layer.head_kernel
        share = np.ones((1, 1, 1)) if layer.mixing is None else array(layer.mixing)
        first_head = h // c * c
        both = sum(share[h // c if c > 1 else 0, h % c, n] * weights[first_head + n] for n in range(c))
        heads.append(both @ v[h // group])
    return _out(layer, heads)


sample(
    "MultiTokenAttention",
    lambda **where: _shaken(MultiTokenAttention(12, 4, 3, 4, head_kernel=2, num_kv_heads=2, **where)),
    lambda new: ((new(2, 6, 12),), {"is_causal": True}),
    _multi_token,
)
sample(
    "MultiTokenAttention",
    lambda **where: _shaken(MultiTokenAttention(12, 4, 2, 3, bias=False, **where)),
    lambda new: ((new(2, 6, 12),), {"is_causal": True}),
    _multi_token,
    variant="alone",
)
