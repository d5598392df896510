"""Samples of positions: those added to rows or turning them, and those added to scores, read through an attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.regard.nn.layer_samples.sample import Array, LayerCall, Padded, array, first, sample, softmax
from torch import Tensor, nn

from regard import masks
from regard.engines.aux import AuxRequest
from regard.functional import attention
from regard.nn.positions.encodings import LearnedPositions, SinusoidalPositions
from regard.nn.positions.relative import AlibiBias, RelativeBias, RelativePositions
from regard.nn.positions.rotary import Rotary

LENGTHS = torch.tensor([3, 5])
OFFSETS = torch.tensor([4, 0])
HEADS, WIDTH, REACH = 3, 4, 2


def _places(offset: Any, batch: int, length: int) -> Array:
    """Return positions (B, L)."""
    start = np.broadcast_to(array(offset) if isinstance(offset, Tensor) else np.array(offset), (batch,))
    return np.stack([np.arange(begin, begin + length) for begin in start])


def _sinusoidal(layer: Any, x: Tensor, offset: Any = 0) -> Array:
    found, places = array(x), _places(offset, *x.shape[:2])
    for column in range(layer.embed_dim):
        wave = np.cos if column % 2 else np.sin
        found[..., column] += wave(places / layer.base ** ((column - column % 2) / layer.embed_dim))
    return found


def _learned(layer: Any, x: Tensor, offset: Any = 0) -> Array:
    return array(x) + array(layer.weight)[_places(offset, *x.shape[:2])]


def _rotary(layer: Any, x: Tensor, offset: Any = 0) -> Array:
    """Multiply pairs of columns, as complex numbers, by powers of e^(iθ)."""
    found, places = array(x), _places(offset, x.shape[0], x.shape[2])[:, None]
    for i in range(layer.turned // 2):
        a, b = (2 * i, 2 * i + 1) if layer.interleaved else (i, i + layer.turned // 2)
        turned = (found[..., a] + 1j * found[..., b]) * np.exp(1j * places / layer.base ** (2 * i / layer.turned))
        found[..., a], found[..., b] = turned.real, turned.imag
    return found


def _rows(width: int, **named: Any) -> Callable[[Callable[..., Tensor]], LayerCall]:
    return lambda new: ((new(2, 5, width),), named)


def _heads(**named: Any) -> Callable[[Callable[..., Tensor]], LayerCall]:
    return lambda new: ((new(2, 3, 5, 8),), named)


sample("SinusoidalPositions", lambda **_: SinusoidalPositions(6), _rows(6), _sinusoidal)
sample(
    "SinusoidalPositions",
    lambda **_: SinusoidalPositions(7, base=50.0),
    _rows(7, offset=OFFSETS),
    _sinusoidal,
    variant="odd",
)
sample("LearnedPositions", lambda **where: LearnedPositions(9, 6, **where), _rows(6, offset=3), _learned)
sample(
    "LearnedPositions",
    lambda **where: LearnedPositions(9, 6, **where),
    _rows(6, offset=OFFSETS),
    _learned,
    variant="offsets",
)
sample("Rotary", lambda **_: Rotary(8), _heads(offset=3), _rotary)
sample("Rotary", lambda **_: Rotary(8, interleaved=True), _heads(offset=OFFSETS), _rotary, variant="interleaved")
sample("Rotary", lambda **_: Rotary(8, 100.0, fraction=0.5), _heads(), _rotary, variant="half")


class Read(nn.Module):
    """An attention whose scores get a layer's bias: rows (B, N, H·D) in, heads (B, H, L, D) out.

    One engine is named, as the test compares bit by bit, also with and without gradients, where "auto" may choose two.
    """

    positions: Any

    def __init__(self, positions: nn.Module) -> None:
        super().__init__()
        self.positions = positions

    def forward(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, offset: Any = 1) -> Tensor:
        """Return what queries read; query i stands at key i + offset."""
        query, key, value = (t.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for t in (query, key, value))
        shaw = isinstance(self.positions, RelativePositions)
        bias = self.positions(query, offset) if shaw else self.positions(offset)
        mask = masks.padding(lengths) & bias
        if not shaw or self.positions.value_weight is None:
            return attention(query, key, value, mask, engine="streaming")
        output, aux = attention(query, key, value, mask, engine="streaming", return_aux=AuxRequest(weights=True))
        return output + self.positions.values(aux.weights, offset)

    def reset_parameters(self) -> None:
        """Draw the layer's anew."""
        self.positions.reset_parameters()


def bucket(distance: int, side: int, reach: int, bidirectional: bool) -> int:
    """Return T5's bucket of k − q, counting edges by the formula of a real logarithm.

    A little is added, as distances may lie right on an edge.
    """
    n, exact = (abs(distance) if bidirectional else max(-distance, 0)), side // 2
    upper = side if bidirectional and distance > 0 else 0
    if n < exact:
        return upper + n
    far = exact + math.floor(math.log(n / exact) / math.log(reach / exact) * (side - exact) + 1e-9)
    return upper + min(far, side - 1)


def _t5(layer: Any, _: Array, gap: int) -> Array:
    side = layer.num_buckets // 2 if layer.bidirectional else layer.num_buckets
    found: Array = array(layer.weight)[bucket(gap, side, layer.max_distance, layer.bidirectional)]
    return found


def _shaw(layer: Any, query: Array, gap: int) -> Array:
    found: Array = query @ array(layer.key_weight)[min(max(gap, -REACH), REACH) + REACH] / np.sqrt(WIDTH)
    return found


def _alibi(layer: Any, _: Array, gap: int) -> Array:
    found: Array = -array(layer.slopes) * abs(gap)
    return found


def _read(bias: Callable[[Any, Array, int], Array]) -> Callable[..., Array]:
    """Return the formula of a read whose score of (q, k) gets ``bias(layer, q (H, D), k − q)`` (H)."""

    def formula(read: Any, *ends: Tensor, offset: Any = 1) -> Array:
        layer, (query, key, value) = read.positions, (array(t).reshape(*t.shape[:2], HEADS, WIDTH) for t in ends[:3])
        places = _places(offset, *query.shape[:2])
        seen = first(array(ends[3]), query.shape[1], key.shape[1])
        scores = np.einsum("blhd,bshd->bhls", query, key) / np.sqrt(WIDTH)
        for b, i, j in np.ndindex(len(query), query.shape[1], key.shape[1]):
            scores[b, :, i, j] += bias(layer, query[b, i], j - places[b, i])
        weights = softmax(scores, seen[:, None])
        output = np.einsum("bhls,bshd->bhld", weights, value)
        if getattr(layer, "value_weight", None) is None:
            return output
        for b, i, j in np.ndindex(len(query), query.shape[1], key.shape[1]):
            row = array(layer.value_weight)[min(max(j - places[b, i], -REACH), REACH) + REACH]
            output[b, :, i] += weights[b, :, i, j, None] * row
        return output

    return formula


def reads_call(**named: Any) -> Callable[[Callable[..., Tensor]], LayerCall]:
    """Return the call of a :class:`Read` with padding."""
    width = HEADS * WIDTH
    return lambda new: ((new(2, 4, width), new(2, 5, width), new(2, 5, width), LENGTHS), named)


def reads(
    name: str, build: Callable[..., nn.Module], bias: Callable[..., Array], variant: str = "", **how: Any
) -> None:
    """Make the sample of a layer that returns a bias of the distance, for a query."""
    sample(name, lambda **where: Read(build(**where)), reads_call(**how), _read(bias), Padded((1, 2), LENGTHS), variant)


reads("RelativeBias", lambda **where: RelativeBias(HEADS, 8, 4, **where), _t5)
reads("RelativeBias", lambda **where: RelativeBias(HEADS, 6, 20, False, **where), _t5, "one-sided", offset=OFFSETS)
reads("RelativePositions", lambda **where: RelativePositions(WIDTH, REACH, **where), _shaw, offset=OFFSETS)
reads("RelativePositions", lambda **where: RelativePositions(WIDTH, REACH, value_dim=WIDTH, **where), _shaw, "values")
reads("AlibiBias", lambda **where: AlibiBias(HEADS, **where), _alibi)
reads("AlibiBias", lambda **where: AlibiBias(HEADS, learn=True, **where), _alibi, "learned", offset=OFFSETS)
