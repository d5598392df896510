"""Samples of layers in which latents, slots, patterns, points or earlier layers are read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from tests.regard.nn.layer_samples.sample import Array, LayerCall, Padded, array, filled, first, sample, softmax
from torch import Tensor, nn

from regard.nn.depth import AttentionResidual
from regard.nn.image.deformable import DeformableAttention
from regard.nn.latents.perceiver import GatedCrossAttention, PerceiverAttention, PerceiverResampler
from regard.nn.latents.slots import SlotAttention
from regard.nn.memory.hopfield import HopfieldAttention
from regard.nn.memory.product_keys import ProductKeyMemory

LENGTHS = torch.tensor([3, 5])


def linear(part: Any, x: Array) -> Array:
    found: Array = x @ array(part.weight).T
    return found if part.bias is None else found + array(part.bias)


def norm(part: Any, x: Array) -> Array:
    if part is None or not hasattr(part, "weight"):
        return x
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * array(part.weight) + array(part.bias)


def cleared(x: Tensor, lengths: Tensor | None) -> Array:
    return array(x if lengths is None else filled(x, lengths, 0.0))


def heads(q: Array, k: Array, v: Array, count: int, scale: float, visible: Array | bool = True) -> Array:
    """Return softmax attention of rows (B, N, HD), one head after the other; ``visible`` is (B, L, S)."""
    read = []
    for qs, ks, vs in zip(*(np.split(each, count, -1) for each in (q, k, v))):
        read.append(softmax(np.einsum("ble,bse->bls", qs, ks) * scale, visible) @ vs)
    return np.concatenate(read, -1)


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf)(x)


def _fed(part: Any, x: Array) -> Array:
    hidden = linear(part.up, x)
    risen = np.maximum(hidden, 0) if part.activation == "relu" else hidden * (1 + _erf(hidden / np.sqrt(2))) / 2
    return linear(part.down, risen)


# Perceiver and Flamingo -----------------------------------------------------------------------------------------------


def _perceiver(layer: Any, latents: Array, context: Array, real: Array | bool) -> Array:
    rows, keys = norm(layer.norm, latents), norm(layer.context_norm, context)
    visible = np.broadcast_to(real, (len(rows), rows.shape[1], keys.shape[1]))
    if layer.include_latents:
        keys = np.concatenate([rows, keys], 1)
        visible = np.concatenate([np.ones((*visible.shape[:2], rows.shape[1]), bool), visible], 2)
    q, k, v = linear(layer.q_proj, rows), linear(layer.k_proj, keys), linear(layer.v_proj, keys)
    latents = latents + linear(layer.out_proj, heads(q, k, v, layer.num_heads, layer.head_dim**-0.5, visible))
    return latents + _fed(layer.feedforward, norm(layer.feedforward_norm, latents))


def _seen(lengths: Tensor | None, queries: int, keys: int) -> Array | bool:
    return True if lengths is None else first(array(lengths), queries, keys)


def _of_perceiver(layer: Any, latents: Tensor, context: Tensor, lengths: Tensor | None = None) -> Array:
    real = _seen(lengths, latents.shape[1], context.shape[1])
    return _perceiver(layer, array(latents), cleared(context, lengths), real)


def _of_resampler(layer: Any, context: Tensor, lengths: Tensor | None = None) -> Array:
    latents = np.repeat(array(layer.latents)[None], len(context), 0)
    for each in layer.layers:
        real = _seen(lengths, latents.shape[1], context.shape[1])
        latents = _perceiver(each, latents, cleared(context, lengths), real)
    return norm(layer.norm, latents)


def _gated(layer: Any, x: Tensor, context: Tensor, lengths: Tensor, attn_mask: Tensor) -> Array:
    rows, keys = array(x), cleared(context, lengths)
    visible = first(array(lengths), x.shape[1], context.shape[1]) & array(attn_mask)
    q, k, v = linear(layer.q_proj, norm(layer.norm, rows)), linear(layer.k_proj, keys), linear(layer.v_proj, keys)
    read = linear(layer.out_proj, heads(q, k, v, layer.num_heads, layer.head_dim**-0.5, visible))
    rows = rows + np.tanh(array(layer.attention_gate)) * read
    fed = _fed(layer.feedforward, norm(layer.feedforward_norm, rows))
    return rows + np.tanh(array(layer.feedforward_gate)) * fed


def _opened(layer: GatedCrossAttention) -> GatedCrossAttention:
    nn.init.constant_(layer.attention_gate, 0.5)
    nn.init.constant_(layer.feedforward_gate, -0.7)
    return layer


sample(
    "PerceiverAttention",
    lambda **where: PerceiverAttention(6, 2, hidden_dim=5, **where),
    lambda new: ((new(2, 3, 6), new(2, 5, 6), LENGTHS), {}),
    _of_perceiver,
    Padded((1,), LENGTHS),
)
sample(
    "PerceiverAttention",
    lambda **where: PerceiverAttention(
        6, 2, include_latents=False, context_dim=4, head_dim=5, bias=True, activation="relu", **where
    ),
    lambda new: ((new(2, 3, 6), new(2, 5, 4), torch.tensor([0, 5])), {}),
    _of_perceiver,
    Padded((1,), torch.tensor([0, 5])),
    variant="Perceiver, an empty context",
)
sample(
    "PerceiverResampler",
    lambda **where: PerceiverResampler(6, 3, 2, 2, **where),
    lambda new: ((new(2, 5, 6), LENGTHS), {}),
    _of_resampler,
    Padded((0,), LENGTHS),
)
sample(
    "GatedCrossAttention",
    lambda **where: _opened(GatedCrossAttention(6, 2, context_dim=4, **where)),
    lambda new: (
        (new(2, 3, 6), new(2, 5, 4), LENGTHS),
        {"attn_mask": torch.tensor([[0, 0, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()},
    ),
    _gated,
    Padded((1,), LENGTHS),
)


# Slots ----------------------------------------------------------------------------------------------------------------


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def slots_of(layer: Any, inputs: Tensor, lengths: Tensor | None = None, *, slots: Tensor | None = None) -> Array:
    """Return the slots, one sequence, round and slot after the other."""
    if slots is None:
        torch.manual_seed(5)  # that of the tests
        noise = torch.randn(len(inputs), layer.num_slots, layer.slot_dim)
        slots = layer.mean + layer.log_std.exp() * noise.double()
    found = array(slots).copy()
    for b in range(len(found)):
        x = norm(layer.input_norm, array(inputs)[b, : None if lengths is None else int(lengths[b])])
        k, v = linear(layer.k_proj, x), linear(layer.v_proj, x)
        for _ in range(layer.rounds):
            q = linear(layer.q_proj, norm(layer.slot_norm, found[b]))
            share = softmax(k @ q.T / np.sqrt(layer.slot_dim))  # (n, K): over slots
            for i in range(len(q)):
                weights = share[:, i] + layer.eps
                update = weights @ v / weights.sum() if weights.sum() else np.zeros(v.shape[1])
                given = array(layer.gru.weight_ih) @ update + array(layer.gru.bias_ih)
                held = array(layer.gru.weight_hh) @ found[b, i] + array(layer.gru.bias_hh)
                (r, z, n), (hr, hz, hn) = np.split(given, 3), np.split(held, 3)
                keep, fresh = _sigmoid(z + hz), np.tanh(n + _sigmoid(r + hr) * hn)
                found[b, i] = (1 - keep) * fresh + keep * found[b, i]
            found[b] += _fed(layer.mlp, norm(layer.mlp_norm, found[b]))
    return found


sample(
    "SlotAttention",
    lambda **where: SlotAttention(6, 3, input_dim=4, **where),
    lambda new: ((new(2, 5, 4), LENGTHS), {}),
    slots_of,
    Padded((0,), LENGTHS),
)
sample(
    "SlotAttention",
    lambda **where: SlotAttention(4, 3, rounds=2, eps=0.1, hidden_dim=7, **where),
    lambda new: ((new(2, 5, 4), torch.tensor([0, 4])), {}),
    slots_of,
    Padded((0,), torch.tensor([0, 4])),
    variant="large ε, no inputs",
)


# Memories -------------------------------------------------------------------------------------------------------------


def _hopfield(layer: Any, x: Tensor, patterns: Tensor | None = None, lengths: Tensor | None = None) -> Array:
    stored = cleared(x if patterns is None else patterns, lengths)
    states = stored if patterns is None else array(x)
    visible = True if lengths is None else first(array(lengths), states.shape[1], stored.shape[1])
    stored = norm(layer.pattern_norm, stored)
    q, k = linear(layer.q_proj, norm(layer.state_norm, states)), linear(layer.k_proj, stored)
    beta = layer.head_dim**-0.5 if layer.beta is None else layer.beta
    for _ in range(layer.rounds - 1):
        q = heads(q, k, k, layer.num_heads, beta, visible)
    return linear(layer.out_proj, heads(q, k, linear(layer.v_proj, stored), layer.num_heads, beta, visible))


sample(
    "HopfieldAttention",
    lambda **where: HopfieldAttention(6, 2, pattern_dim=4, head_dim=5, rounds=3, beta=1.5, **where),
    lambda new: ((new(2, 3, 6), new(2, 5, 4), LENGTHS), {}),
    _hopfield,
    Padded((1,), LENGTHS),
)
sample(
    "HopfieldAttention",
    lambda **where: HopfieldAttention(6, layer_norm=False, bias=False, **where),
    lambda new: ((new(2, 5, 6), None, LENGTHS), {}),
    _hopfield,
    Padded((0,), LENGTHS),
    variant="one round of states among themselves",
)


def _product_keys(layer: Any, x: Tensor) -> Array:
    """Return the reads, by scoring all n² keys."""
    rows, n = array(x).reshape(-1, x.shape[-1]), layer.num_keys
    queries = linear(layer.q_proj, rows).reshape(len(rows), layer.num_heads, layer.query_dim)
    if isinstance(layer.norm, nn.BatchNorm1d):
        mean, var = (array(layer.norm.get_buffer(name)) for name in ("running_mean", "running_var"))
        queries = (queries - mean) / np.sqrt(var + 1e-5) * array(layer.norm.weight) + array(layer.norm.bias)
    else:
        queries = norm(layer.norm, queries)
    keys, read = array(layer.keys), np.zeros((len(rows), layer.value_dim))
    for i in range(len(rows)):
        for h in range(layer.num_heads):
            scores = np.array([queries[i, h] @ np.concatenate([a, b]) for a in keys[0, h] for b in keys[1, h]])
            best = np.argsort(-scores)[: layer.topk]
            read[i] += softmax(scores[best]) @ array(layer.values)[best]
    assert len(array(layer.values)) == n * n
    return read.reshape(*x.shape[:-1], -1)


sample(
    "ProductKeyMemory",
    lambda **where: ProductKeyMemory(6, 4, 2, 3, **where),
    lambda new: ((new(2, 5, 6),), {}),
    _product_keys,
)
sample(
    "ProductKeyMemory",
    lambda **where: ProductKeyMemory(5, 4, 1, 4, value_dim=3, query_norm="layer", **where),
    lambda new: ((new(7, 5),), {}),
    _product_keys,
    variant="layer norm, rows alone",
)


# Points of feature maps -----------------------------------------------------------------------------------------------


def _bilinear(grid: Array, x: float, y: float) -> Array:
    """Return a map (H, W, D) at (x, y) from 0 to 1, pixel by pixel; 0 outside."""
    H, W = grid.shape[:2]
    across, down = x * W - 0.5, y * H - 0.5
    found = np.zeros(grid.shape[2])
    for i in (math.floor(down), math.floor(down) + 1):
        for j in (math.floor(across), math.floor(across) + 1):
            if 0 <= i < H and 0 <= j < W:
                found += (1 - abs(down - i)) * (1 - abs(across - j)) * grid[i, j]
    return found


def _deformable(
    layer: Any, query: Tensor, maps: Tensor, shapes: Any, reference: Tensor, *, keep: Tensor | None = None
) -> Array:
    (B, L, E), H, M, P = query.shape, layer.num_heads, layer.num_levels, layer.num_points
    kept = np.ones(maps.shape[:2], bool) if keep is None else array(keep)
    value = np.where(kept[..., None], linear(layer.value_proj, np.where(kept[..., None], array(maps), 0)), 0)
    offsets = linear(layer.sampling_offsets, array(query)).reshape(B, L, H, M, P, 2)
    weights = softmax(linear(layer.attention_weights, array(query)).reshape(B, L, H, M * P)).reshape(B, L, H, M, P)
    near, read, start, D = array(reference), np.zeros((B, L, E)), 0, E // H
    near = np.broadcast_to(near if near.ndim == 4 else near[..., None, :], (B, L, M, near.shape[-1]))
    for m, (height, width) in enumerate(shapes):
        grids = value[:, start : start + height * width].reshape(B, height, width, H, D)
        start += height * width
        for b, i, h, p in np.ndindex(B, L, H, P):
            x, y, *box = near[b, i, m]
            dx, dy = offsets[b, i, h, m, p] / ((2 * P / box[0], 2 * P / box[1]) if box else (width, height))
            point = _bilinear(grids[b, :, :, h], x + dx, y + dy)
            read[b, i, h * D : (h + 1) * D] += weights[b, i, h, m, p] * point
    return linear(layer.output_proj, read)


def _pixels(call: LayerCall, value: float) -> LayerCall:
    (query, maps, *rest), kwargs = call
    return (query, torch.where(kwargs["keep"].unsqueeze(2), maps, value), *rest), kwargs


def _moved(layer: DeformableAttention) -> DeformableAttention:
    """Return a layer whose offsets and weights depend on the query."""
    for part in (layer.sampling_offsets, layer.attention_weights):
        nn.init.normal_(part.weight, std=0.5)
    return layer


KEEP = torch.arange(18).remainder(5).ne(0).expand(2, 18)
sample(
    "DeformableAttention",
    lambda **where: _moved(DeformableAttention(8, 2, num_levels=2, num_points=3, value_dim=5, **where)),
    lambda new: ((new(2, 3, 8), new(2, 18, 5), [(4, 3), (2, 3)], new(2, 3, 2).sigmoid()), {"keep": KEEP}),
    _deformable,
    _pixels,
)
sample(
    "DeformableAttention",
    lambda **where: _moved(DeformableAttention(6, 3, num_levels=1, num_points=2, **where)),
    lambda new: ((new(2, 3, 6), new(2, 12, 6), [(4, 3)], new(2, 3, 1, 4).sigmoid()), {}),
    _deformable,
    variant="around boxes",
)


# Depth ----------------------------------------------------------------------------------------------------------------


def _depth(layer: Any, outputs: list[Tensor]) -> Array:
    found = np.zeros(outputs[0].shape)
    for b, i in np.ndindex(*outputs[0].shape[:2]):
        u = np.stack([array(each)[b, i] for each in outputs])
        unit = u / np.sqrt((u**2).mean(-1, keepdims=True) + layer.eps)
        weights = softmax(unit * array(layer.weight) @ array(layer.query))
        found[b, i] = weights @ (unit if layer.normalize_values else u)
    return found


def _asking(layer: AttentionResidual) -> AttentionResidual:
    nn.init.normal_(layer.query)
    return layer


for normalized in (False, True):
    sample(
        "AttentionResidual",
        lambda normalized=normalized, **where: _asking(AttentionResidual(6, normalize_values=normalized, **where)),
        lambda new: (([new(2, 5, 6) for _ in range(4)],), {}),
        _depth,
        variant="normalized values" if normalized else "",
    )
