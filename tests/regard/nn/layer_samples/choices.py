"""Samples of hard, local, positional, decomposable and intra attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.regard.nn.layer_samples.sample import Array, LayerCall, Padded, array, filled, first, sample, softmax
from torch import Tensor

from regard.nn.heads.decomposable import DecomposableAttention
from regard.nn.heads.local import LocalAttention
from regard.nn.heads.stochastic import HardAttention
from regard.nn.heads.synthesizer import FactorizedPositionalAttention, PositionalAttention
from regard.nn.memory.intra import IntraAttention

LENGTHS = torch.tensor([3, 5])
KEYS = Padded((1, 2), LENGTHS)
FIRST = Padded((0,), LENGTHS)


def _call(query: int, key: int, value: int) -> Callable[[Callable[..., Tensor]], LayerCall]:
    return lambda new: ((new(2, 4, query), new(2, 5, key), new(2, 5, value), LENGTHS), {})


def _alone(width: int, **more: Any) -> Callable[[Callable[..., Tensor]], LayerCall]:
    return lambda new: ((new(2, 5, width), LENGTHS), more)


def _score(layer: Any, kind: str, query: Array, key: Array) -> Array:
    """Return the scores (B, L, S), pair by pair."""
    part = layer.scorer

    def of(q: Array, k: Array) -> Any:
        if kind == "dot":
            return q @ k
        if kind == "general":
            return q @ array(part.weight) @ k
        if kind == "concat":
            return array(part.w_v) @ np.tanh(array(part.weight) @ np.concatenate([q, k]))
        return array(part.w_v) @ np.tanh(array(part.w_q) @ q + array(part.w_k) @ k)

    return np.array([[[of(q, k) for k in keys] for q in queries] for queries, keys in zip(query, key)])


def _hard(kind: str) -> Callable[..., Array]:
    def formula(layer: Any, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Array:
        scores = _score(layer, kind, array(query), array(key))
        best = [row[:, :n].argmax(-1) for row, n in zip(scores, array(lengths).astype(int))]
        return np.stack([v[index] for v, index in zip(array(value), best)])

    return formula


def _local(kind: str, gaussian: str = "") -> Callable[..., Array]:
    """Return the formula for a window of 2; the Gaussian comes after the softmax, inside it, or not at all."""

    def formula(
        layer: Any, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, positions: Tensor | None = None
    ) -> Array:
        scores, sizes = _score(layer, kind, array(query), array(key)), array(lengths)
        center = np.broadcast_to(np.arange(query.shape[1]), scores.shape[:2])
        if gaussian:
            wanted = np.tanh(array(query) @ array(layer.w_p).T) @ array(layer.v_p)
            center = sizes[:, None] / (1 + np.exp(-wanted))
        if positions is not None:
            center = np.broadcast_to(array(positions), scores.shape[:2])
        distance = np.arange(key.shape[1]) - center[..., None]
        near = (np.abs(distance) <= 2) & first(sizes, *scores.shape[1:])
        bell = np.exp(-(distance**2) / (2 * (2 / 2) ** 2))
        if gaussian == "after":
            return (softmax(scores, near) * bell) @ array(value)
        return softmax(scores + np.log(bell) if gaussian else scores, near) @ array(value)

    return formula


def _positional(matrix: Callable[[Any], Array], causal: bool = False) -> Callable[..., Array]:
    def formula(layer: Any, value: Tensor, lengths: Tensor, **_: Any) -> Array:
        N = value.shape[1]
        seen = first(array(lengths), N, N) & (np.tri(N, dtype=bool) if causal else True)
        return softmax(np.broadcast_to(matrix(layer)[:N, :N], seen.shape), seen) @ array(value)

    return formula


def _network(layers: Any, x: Array) -> Array:
    for linear in (layers[1], layers[4]):
        x = np.maximum(array(linear.weight) @ x + array(linear.bias), 0)
    return x


def _judged(layer: Any, a: Array, b: Array) -> Array:
    """Return the logits of one pair of sentences without padding."""
    scores = np.array([[_network(layer.attend, x) @ _network(layer.attend, y) for y in b] for x in a])
    beta, alpha = softmax(scores) @ b, softmax(scores.T) @ a
    u = sum(_network(layer.compare, np.concatenate(pair)) for pair in zip(a, beta))
    w = sum(_network(layer.compare, np.concatenate(pair)) for pair in zip(b, alpha))
    found = _network(layer.aggregate, np.concatenate([u, w]))
    return array(layer.classify.weight) @ found + array(layer.classify.bias)


def _decomposable(layer: Any, a: Tensor, b: Tensor, *lengths: Tensor) -> Array:
    sizes = [array(each).astype(int) for each in lengths] or [np.full(len(t), t.shape[1]) for t in (a, b)]
    pairs = zip(array(a), array(b), *sizes)
    return np.stack([_judged(layer, x[:m], y[:n]) for x, y, m, n in pairs])


def _both(call: LayerCall, value: float) -> LayerCall:
    (a, b, a_lens, b_lens), kwargs = call
    return (filled(a, a_lens, value), filled(b, b_lens, value), a_lens, b_lens), kwargs


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _lstmn(layer: Any, x: Tensor, state: None = None, lengths: Tensor | None = None) -> Array:
    C, T = layer.hidden_size, x.shape[1]
    out = np.zeros((len(x), T, C))
    w_v, w_h, w_x, w_s = (array(getattr(layer, name)) for name in ("w_v", "w_h", "w_x", "w_s"))
    bias = 0 if layer.bias is None else array(layer.bias)
    for b, steps in enumerate([T] * len(x) if lengths is None else array(lengths).astype(int)):
        cells = np.zeros((T, C))
        summary = np.zeros(C)
        for t in range(steps):
            now = array(x)[b, t]
            scores = np.array([w_v @ np.tanh(w_h @ h + w_x @ now + w_s @ summary) for h in out[b, :t]])
            weights = softmax(scores) if t else scores
            summary, memory = weights @ out[b, :t], weights @ cells[:t]
            i, f, o, g = np.split(array(layer.weight) @ np.concatenate([summary, now]) + bias, 4)
            cells[t] = _sigmoid(f) * memory + _sigmoid(i) * np.tanh(g)
            out[b, t] = _sigmoid(o) * np.tanh(cells[t])
    return out


for _kind in ("additive", "concat", "general"):
    sample(
        "HardAttention",
        lambda kind=_kind, **where: HardAttention(4, 6, 7, score=kind, **where),
        _call(4, 6, 3),
        _hard(_kind),
        KEYS,
        variant=_kind,
    )
sample(
    "HardAttention",
    lambda **where: HardAttention(6, score="dot", **where),
    _call(6, 6, 3),
    _hard("dot"),
    KEYS,
    variant="dot",
)

sample(
    "LocalAttention",
    lambda **where: LocalAttention(4, 2, 6, 7, **where),
    _call(4, 6, 3),
    _local("general", "after"),
    KEYS,
    variant="predictive",
)
sample(
    "LocalAttention",
    lambda **where: LocalAttention(4, 2, 6, 7, score="concat", renormalize=True, **where),
    _call(4, 6, 3),
    _local("concat", "inside"),
    KEYS,
    variant="renormalized",
)
sample(
    "LocalAttention",
    lambda **where: LocalAttention(6, 2, score="dot", **where),
    _call(6, 6, 3),
    _local("dot", "after"),
    KEYS,
    variant="dot",
)
sample(
    "LocalAttention",
    lambda **where: LocalAttention(4, 2, 6, mode="monotonic", **where),
    _call(4, 6, 3),
    _local("general"),
    KEYS,
    variant="monotonic",
)
sample(
    "LocalAttention",
    lambda **where: LocalAttention(4, 2, 6, 7, mode="monotonic", score="concat", **where),
    lambda new: (
        (new(2, 4, 4), new(2, 5, 6), new(2, 5, 3), LENGTHS),
        {"positions": torch.tensor([[3, 1, 0, 0], [0, 2, 4, 9]])},
    ),
    _local("concat"),
    KEYS,
    variant="positions",
)

sample(
    "PositionalAttention",
    lambda **where: PositionalAttention(9, **where),
    _alone(3),
    _positional(lambda layer: array(layer.weight)),
    FIRST,
)
sample(
    "PositionalAttention",
    lambda **where: PositionalAttention(5, **where),
    _alone(3, is_causal=True),
    _positional(lambda layer: array(layer.weight), causal=True),
    FIRST,
    variant="causal",
)
sample(
    "FactorizedPositionalAttention",
    lambda **where: FactorizedPositionalAttention(9, 3, **where),
    _alone(3),
    _positional(lambda layer: array(layer.rows) @ array(layer.columns).T),
    FIRST,
)
sample(
    "FactorizedPositionalAttention",
    lambda **where: FactorizedPositionalAttention(5, 3, **where),
    _alone(3, is_causal=True),
    _positional(lambda layer: array(layer.rows) @ array(layer.columns).T, causal=True),
    FIRST,
    variant="causal",
)

sample(
    "DecomposableAttention",
    lambda **where: DecomposableAttention(4, 6, 3, **where),
    lambda new: ((new(2, 5, 4), new(2, 6, 4), LENGTHS, torch.tensor([6, 2])), {}),
    _decomposable,
    _both,
)
sample(
    "DecomposableAttention",
    lambda **where: DecomposableAttention(4, 6, 3, **where),
    lambda new: ((new(2, 5, 4), new(2, 6, 4)), {}),
    _decomposable,
    variant="whole",
)

sample(
    "IntraAttention",
    lambda **where: IntraAttention(4, 6, 7, **where),
    lambda new: ((new(2, 5, 4), None, LENGTHS), {}),
    _lstmn,
    FIRST,
)
sample(
    "IntraAttention",
    lambda **where: IntraAttention(4, 6, bias=False, **where),
    lambda new: ((new(2, 5, 4),), {}),
    _lstmn,
    Padded(()),
    variant="whole",
)
