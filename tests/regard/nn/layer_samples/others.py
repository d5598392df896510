"""Samples of layers with other kinds of rows: channels, memories, graphs, bags, rows and columns of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.regard.nn.layer_samples.latents import cleared, linear
from tests.regard.nn.layer_samples.sample import Array, LayerCall, Padded, array, sample, softmax
from torch import Tensor, nn

from regard.nn.graph import GraphAttention
from regard.nn.heads.attention_free import AttentionFree
from regard.nn.heads.cross_covariance import CrossCovarianceAttention
from regard.nn.heads.pooling import GatedAttentionPooling
from regard.nn.image.coordinate import CoordinateAttention, GlobalContext
from regard.nn.image.criss_cross import CrissCrossAttention
from regard.nn.latents.agents import AgentAttention
from regard.nn.linear.efficient import EfficientAttention
from regard.nn.memory.external import ExternalAttention
from regard.nn.points import PointTransformerAttention

LENGTHS = torch.tensor([3, 5])


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _counts(x: Tensor, lengths: Tensor | None) -> list[int]:
    return [x.shape[1]] * len(x) if lengths is None else lengths.tolist()


def _projected(layer: Any, inputs: Array) -> list[Array]:
    """Return queries, keys and values, a list of heads (B, N, E) each, stacked."""
    return [
        np.stack(np.split(linear(part, inputs), layer.num_heads, -1), 1)
        for part in (layer.q_proj, layer.k_proj, layer.v_proj)
    ]


def _joined(layer: Any, read: Array) -> Array:
    return linear(layer.out_proj, np.concatenate(list(read.transpose(1, 0, 2, 3)), -1))


# Channels and memories ------------------------------------------------------------------------------------------------


def _channels(layer: Any, x: Tensor, lengths: Tensor | None = None) -> Array:
    q, k, v = _projected(layer, cleared(x, lengths))
    read = np.zeros_like(v)
    for b, n in enumerate(_counts(x, lengths)):
        for h in range(layer.num_heads):
            qs, ks, vs = (each[b, h, :n] for each in (q, k, v))
            qs, ks = (each / np.maximum(np.sqrt((each**2).sum(0)), 1e-12) for each in (qs, ks))
            weights = softmax(array(layer.temperature)[h, 0, 0] * qs.T @ ks)  # channels × channels
            read[b, h, :n] = (weights @ vs.T).T
    return _joined(layer, read)


def _efficient(layer: Any, x: Tensor, lengths: Tensor | None = None) -> Array:
    q, k, v = _projected(layer, cleared(x, lengths))
    read = np.zeros_like(v)
    for b, n in enumerate(_counts(x, lengths)):
        for h in range(layer.num_heads):
            means = softmax(k[b, h, :n].T) @ v[b, h, :n] if n else 0 * k[b, h, :1].T @ v[b, h, :1]
            read[b, h] = softmax(q[b, h]) @ means
    return _joined(layer, read)


def _agents(layer: Any, x: Tensor, lengths: Tensor | None = None) -> Array:
    q, k, v = _projected(layer, cleared(x, lengths))
    read, scale = np.zeros_like(v), q.shape[-1] ** -0.5
    for b, n in enumerate(_counts(x, lengths)):
        segment = np.arange(n) * layer.num_agents // max(n, 1)
        for h in range(layer.num_heads):
            if n:
                agents = np.stack([q[b, h, :n][segment == m].mean(0) for m in np.unique(segment)])
                gathered = softmax(agents @ k[b, h, :n].T * scale) @ v[b, h, :n]
                read[b, h] = softmax(q[b, h] @ agents.T * scale) @ gathered
            if layer.conv is not None:
                kernel = array(layer.conv.weight)[h, 0, :, 0]
                for i in range(x.shape[1]):
                    for offset, weight in enumerate(kernel, i - len(kernel) // 2):
                        if 0 <= offset < n:
                            read[b, h, i] += weight * v[b, h, offset]
    return _joined(layer, read)


def _external(layer: Any, x: Tensor, lengths: Tensor | None = None) -> Array:
    read = np.zeros((*x.shape[:2], layer.embed_dim))
    for b, n in enumerate(_counts(x, lengths)):
        if n:
            scores = array(x)[b, :n] @ array(layer.keys.weight).T
            share = softmax(scores.T).T
            read[b, :n] = share / share.sum(1, keepdims=True) @ array(layer.values.weight).T
    return read


padded, empty = Padded((0,), LENGTHS), torch.tensor([0, 4])
for name, build, formula in (
    ("AgentAttention", lambda **where: AgentAttention(6, 2, num_agents=4, conv_size=3, **where), _agents),
    ("CrossCovarianceAttention", lambda **where: CrossCovarianceAttention(6, 2, **where), _channels),
    ("EfficientAttention", lambda **where: EfficientAttention(6, 2, **where), _efficient),
    ("ExternalAttention", lambda **where: ExternalAttention(6, 4, **where), _external),
):
    sample(name, build, lambda new: ((new(2, 5, 6), LENGTHS), {}), formula, padded)
    sample(
        name, build, lambda new: ((new(2, 5, 6), empty), {}), formula, Padded((0,), empty), variant="an empty sequence"
    )


# AFT ------------------------------------------------------------------------------------------------------------------


def _attention_free(layer: Any, x: Tensor, lengths: Tensor | None = None, *, is_causal: bool = False) -> Array:
    inputs = cleared(x, lengths)
    q, k, v = (linear(part, inputs) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    read = np.zeros_like(v)
    for b, n in enumerate(_counts(x, lengths)):
        for t in range(x.shape[1]):
            seen = min(n, t + 1) if is_causal else n
            above, below = np.zeros(v.shape[2]), np.zeros(v.shape[2])
            for j in range(seen):
                w = array(layer.query_positions)[t] @ array(layer.key_positions)[j] if layer.rank else 0
                if layer.window is not None and abs(t - j) >= layer.window:
                    w = 0
                above += np.exp(k[b, j] + w) * v[b, j]
                below += np.exp(k[b, j] + w)
            read[b, t] = _sigmoid(q[b, t]) * above / np.where(below == 0, 1, below)
    return linear(layer.out_proj, read)


def _placed(layer: AttentionFree) -> AttentionFree:
    """Return a layer with larger biases of positions."""
    for rows in (layer.query_positions, layer.key_positions):
        assert rows is not None
        nn.init.normal_(rows)
    return layer


for variant, options in (("", {}), ("local", {"window": 2})):
    sample(
        "AttentionFree",
        lambda options=options, **where: _placed(AttentionFree(6, 5, rank=3, **options, **where)),
        lambda new: ((new(2, 5, 6), LENGTHS), {}),
        _attention_free,
        padded,
        variant=variant,
    )
sample(
    "AttentionFree",
    lambda **where: AttentionFree(6, rank=0, **where),
    lambda new: ((new(2, 5, 6), empty), {"is_causal": True}),
    _attention_free,
    Padded((0,), empty),
    variant="simple, causal, an empty sequence",
)


# Bags and graphs ------------------------------------------------------------------------------------------------------


def _pooled(layer: Any, x: Tensor, lengths: Tensor | None = None) -> Array:
    read = np.zeros((len(x), layer.num_pooled, x.shape[2]))
    for b, n in enumerate(_counts(x, lengths)):
        rows = array(x)[b, :n]
        hidden = np.tanh(linear(layer.hidden, rows))
        if layer.gate is not None:
            hidden = hidden * _sigmoid(linear(layer.gate, rows))
        if n:
            read[b] = softmax(linear(layer.score, hidden).T) @ rows
    return read


sample(
    "GatedAttentionPooling",
    lambda **where: GatedAttentionPooling(6, 4, 2, **where),
    lambda new: ((new(2, 5, 6), LENGTHS), {}),
    _pooled,
    padded,
)
sample(
    "GatedAttentionPooling",
    lambda **where: GatedAttentionPooling(6, 4, gated=False, bias=False, **where),
    lambda new: ((new(2, 5, 6), empty), {}),
    _pooled,
    Padded((0,), empty),
    variant="without gate, an empty bag",
)


def _graph(layer: Any, nodes: Tensor, edges: Tensor | None = None, lengths: Tensor | None = None) -> Array:
    """Return the nodes, one head, node and neighbour after the other."""
    inputs, D = cleared(nodes, lengths), layer.head_dim
    values = linear(layer.key, inputs)
    queries = values if layer.query is None else linear(layer.query, inputs)
    heads = np.zeros((*values.shape[:2], layer.num_heads, D))
    a = array(layer.a)
    for b, n in enumerate(_counts(nodes, lengths)):
        for h, i in np.ndindex(layer.num_heads, nodes.shape[1]):
            own = slice(h * D, (h + 1) * D)
            near = [j for j in range(n) if edges is None or edges[i, j] or (layer.self_loops and i == j)]
            scores = []
            for j in near:
                if layer.query is None:
                    e = a[h] @ values[b, i, own] + array(layer.b)[h] @ values[b, j, own]
                    scores.append(max(e, layer.negative_slope * e))
                else:
                    e = queries[b, i, own] + values[b, j, own]
                    scores.append(a[h] @ np.maximum(e, layer.negative_slope * e))
            if near:
                heads[b, i, h] = softmax(np.array(scores)) @ values[b, near, own]
    found = heads.reshape(*values.shape) if layer.concat else heads.mean(2)
    return found if layer.bias is None else found + array(layer.bias)


EDGES = torch.tensor([[0, 1, 0, 0, 1], [1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]).bool()
sample(
    "GraphAttention",
    lambda **where: GraphAttention(6, 3, 2, **where),
    lambda new: ((new(2, 5, 6), EDGES, LENGTHS), {}),
    _graph,
    padded,
)
sample(
    "GraphAttention",
    lambda **where: GraphAttention(6, 3, 2, version=1, concat=False, self_loops=False, **where),
    lambda new: ((new(2, 5, 6), EDGES), {}),
    _graph,
    Padded(()),
    variant="version 1, mean of heads, a node without neighbours",
)
NEAR = torch.tensor([[1, 4], [0, -1], [-1, -1], [2, 0], [4, 1]])
LISTED = torch.tensor([[0, 1, 0, 0, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 0, 0], [0, 1, 0, 0, 1]]).bool()
sample(
    "GraphAttention",
    lambda **where: GraphAttention(6, 3, 2, concat=False, **where),
    lambda new: ((new(2, 5, 6), NEAR, LENGTHS), {}),
    lambda layer, nodes, near, lengths: _graph(layer, nodes, LISTED, lengths),
    padded,
    variant="lists of neighbours",
)
sample(
    "GraphAttention",
    lambda **where: GraphAttention(6, 3, bias=False, **where),
    lambda new: ((new(2, 5, 6), None, LENGTHS), {}),
    _graph,
    padded,
    variant="all pairs",
)


# Points ---------------------------------------------------------------------------------------------------------------


def _points(layer: Any, x: Tensor, positions: Tensor, lengths: Tensor | None = None) -> Array:
    """Return the points, one after the other."""
    inputs, places = cleared(x, lengths), cleared(positions, lengths)
    q, k, v = (linear(part, inputs) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    read = np.zeros_like(v)
    for b, n in enumerate(_counts(x, lengths)):
        for i in range(x.shape[1]):
            distance = ((places[b, i] - places[b, :n]) ** 2).sum(-1)
            near = np.argsort(distance, kind="stable")[: layer.num_neighbours]
            if n:
                moved = linear(layer.place_in, places[b, i] - places[b, near])
                delta = linear(layer.place_out, np.maximum(moved, 0))
                hidden = np.maximum(linear(layer.score.up, q[b, i] - k[b, near] + delta), 0)
                weights = softmax(linear(layer.score.down, hidden).T).T  # over neighbours, channel by channel
                read[b, i] = (weights * (v[b, near] + delta)).sum(0)
    return read


sample(
    "PointTransformerAttention",
    lambda **where: PointTransformerAttention(6, 3, **where),
    lambda new: ((new(2, 7, 6), new(2, 7, 3), torch.tensor([2, 7])), {}),
    _points,
    Padded((0, 1), torch.tensor([2, 7])),
)
sample(
    "PointTransformerAttention",
    lambda **where: PointTransformerAttention(6, num_coordinates=2, **where),
    lambda new: ((new(2, 5, 6), new(2, 5, 2), empty), {}),
    _points,
    Padded((0, 1), empty),
    variant="all points, an empty set",
)


# Images ---------------------------------------------------------------------------------------------------------------


def _image(*shape: int) -> Callable[[Callable[..., Tensor]], LayerCall]:
    return lambda new: ((new(*shape),), {})


def _mapped(part: Any, x: Array) -> Array:
    """Return a 1 × 1 convolution of images (B, C, H, W)."""
    found = np.einsum("bchw,dc->bdhw", x, array(part.weight).reshape(len(part.weight), -1))
    return found + array(part.bias)[:, None, None]


def _crossed(layer: Any, x: Tensor) -> Array:
    found = array(x)
    for _ in range(layer.rounds):
        q, k, v = (_mapped(part, found) for part in (layer.query, layer.key, layer.value))
        read = np.zeros_like(found)
        (H, W), B = found.shape[2:], len(found)
        for b, i, j in np.ndindex(B, H, W):
            near = [(i, w) for w in range(W)] + [(h, j) for h in range(H) if h != i]
            weights = softmax(np.array([q[b, :, i, j] @ k[b, :, h, w] for h, w in near]))
            for weight, (h, w) in zip(weights, near):
                read[b, :, i, j] += weight * v[b, :, h, w]
        found = found + array(layer.gamma) * read
    return found


def _coordinates(layer: Any, x: Tensor) -> Array:
    whole = array(x)

    def hidden(pooled: Array) -> Array:
        squeezed = _mapped(layer.squeeze, pooled)
        mean, var, weight, bias = (
            array(getattr(layer.norm, name))[:, None, None]
            for name in ("running_mean", "running_var", "weight", "bias")
        )
        normed = (squeezed - mean) / np.sqrt(var + 1e-5) * weight + bias
        return normed * np.clip(normed + 3, 0, 6) / 6

    rows = _sigmoid(_mapped(layer.restore_rows, hidden(whole.mean(3, keepdims=True))))
    columns = _sigmoid(_mapped(layer.restore_columns, hidden(whole.mean(2, keepdims=True))))
    return whole * rows * columns


def _context(layer: Any, x: Tensor) -> Array:
    whole = array(x)
    found = np.zeros_like(whole)
    for b in range(len(whole)):
        pixels = whole[b].reshape(whole.shape[1], -1)
        context = pixels @ softmax(array(layer.score.weight)[0] @ pixels)
        hidden = linear(layer.squeeze, context)
        centred = hidden - hidden.mean()
        normed = centred / np.sqrt((centred**2).mean() + 1e-5) * array(layer.norm.weight) + array(layer.norm.bias)
        found[b] = whole[b] + linear(layer.restore, np.maximum(normed, 0))[:, None, None]
    return found


def _awake(layer: Any) -> Any:
    """Return a layer that starts as the identity with other numbers where it has zeros."""
    for name, tensor in layer.named_parameters():
        if name in ("gamma", "restore.weight", "restore.bias"):
            nn.init.normal_(tensor)
    return layer


sample(
    "CrissCrossAttention",
    lambda **where: _awake(CrissCrossAttention(4, 2, **where)),
    _image(2, 4, 3, 5),
    _crossed,
)
sample(
    "CrissCrossAttention",
    lambda **where: _awake(CrissCrossAttention(4, rounds=1, **where)),
    _image(2, 4, 1, 5),
    _crossed,
    variant="one round, one row",
)
sample("CoordinateAttention", lambda **where: CoordinateAttention(4, **where), _image(2, 4, 3, 5), _coordinates)
sample("GlobalContext", lambda **where: _awake(GlobalContext(8, 2, **where)), _image(2, 8, 3, 5), _context)
