"""Order 1 in NumPy: weighted least squares with a free constant, by the normal equations, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from regard.scores import Score
from regard.testing.case import named
from regard.testing.formulas import POSITIONS, Array, attributes

#: The imaginary step for derivatives; its square is negligible.
STEP = 2.0**-100

#: A gradient and its amplitude.
Pair = tuple[Array, Array]


def solved(matrix: Array, right: Array) -> Array:
    """Solve positive definite systems (..., n, n) for right sides (..., n, m) by elimination, in any precision."""
    n = matrix.shape[-1]
    both = np.concatenate((matrix, right), -1)
    for i in range(n):
        both[..., i, :] = both[..., i, :] / both[..., i, i, None]
        others = np.arange(n) != i
        both[..., others, :] = both[..., others, :] - both[..., others, i, None] * both[..., None, i, :]
    return both[..., n:]


class Line:
    """The weights of lines, ``p_i = w_i x_i·a`` with ``x_i = (1, k_i − q)`` and ``(Σ w x xᵀ + λ J) a = e_0``.

    J leaves the constant free. All arrays have the neighbours K in front.

    Parameters
    ----------
    score : Score
        Without modifications.
    tensors : list of array
        Those of the score.
    query, key : array (K, B, H, L, E) and (K, B, H, S, Ek)
    weights : array (K, B, H, L, S)
        Of order 0.
    ridge : float
    """

    def __init__(
        self, score: Score, tensors: list[Array], query: Array, key: Array, weights: Array, ridge: float
    ) -> None:
        self.score, self.tensors, self.query, self.key, self.softmax = score, tensors, query, key, weights
        self.places = next(places for cls, places in POSITIONS.items() if isinstance(score, cls))
        q, k = self._at(query, key, tensors)
        self.apart = np.where(weights[..., None] > 0, k[..., None, :, :] - q[..., :, None, :], 0)  # (…, L, S, D)
        self.width = self.apart.shape[-1]
        self.share = weights.dtype.type(ridge) / max(self.width, 1)
        self.rows = np.concatenate((np.ones((*weights.shape, 1), weights.dtype), self.apart), -1)
        matrix = np.swapaxes(self.rows, -1, -2) @ (weights[..., None] * self.rows)
        penalty = self.share * (weights * self.squares).sum(-1)
        penalty = np.where(penalty > 0, penalty, 1)[..., None] * np.append(0, np.ones(self.width)).astype(weights.dtype)
        empty = ~(weights > 0).any(-1)
        one = np.eye(self.width + 1, dtype=weights.dtype)
        matrix = matrix + penalty[..., None] * one
        matrix[..., 0, 0] += empty
        self.inverse = solved(matrix, np.broadcast_to(one, matrix.shape))

    @cached_property
    def squares(self) -> Array:
        """Squared distances (K, B, H, L, S)."""
        return (self.apart * self.apart).sum(-1)

    @cached_property
    def factors(self) -> Array:
        """Weights of lines over those of means, ``x_i·a``."""
        return (self.rows @ self.inverse[..., :1])[..., 0]

    @property
    def weights(self) -> Array:
        """Weights of lines (K, B, H, L, S)."""
        return self.softmax * self.factors

    def _at(self, query: Array, key: Array, tensors: list[Array]) -> tuple[Array, Array]:
        remaining = iter(tensors)
        return self.places(query, key, attributes(self.score, lambda _: next(remaining)))

    def pull(self, grad: Pair) -> tuple[Pair, dict[str, Pair]]:
        """Return the gradients of the weights of order 0, and of query, key and tensors through the positions.

        ``grad`` is that of the weights of lines, (K, B, H, L, S); each comes with its amplitude.
        """
        w, f, x, z = self.softmax, self.factors, self.rows, self.apart
        slope = self.inverse[..., :, 0]  # a
        adjoint = (self.inverse @ ((w * grad[0])[..., None, :] @ x).swapaxes(-1, -2))[..., 0]
        sizes = abs(self.inverse) @ ((w * grad[1])[..., None, :] @ abs(x)).swapaxes(-1, -2)
        along, along_size = (x @ adjoint[..., None])[..., 0], (abs(x) @ sizes)[..., 0]
        both = (adjoint[..., 1:] * slope[..., 1:]).sum(-1)[..., None]
        both_size = (sizes[..., 1:, 0] * abs(slope[..., 1:])).sum(-1)[..., None]
        d_weights = f * (grad[0] - along) - self.share * both * self.squares
        a_weights = abs(f) * (grad[1] + along_size) + self.share * both_size * self.squares
        d_apart = (
            (w * (grad[0] - along))[..., None] * slope[..., None, 1:]
            - (w * f)[..., None] * adjoint[..., None, 1:]
            - 2 * self.share * both[..., None] * w[..., None] * z
        )
        a_apart = (
            (w * (grad[1] + along_size))[..., None] * abs(slope[..., None, 1:])
            + (w * abs(f))[..., None] * sizes[..., None, 1:, 0]
            + 2 * self.share * both_size[..., None] * w[..., None] * abs(z)
        )
        return (d_weights, a_weights), self._to_rows((d_apart, a_apart))

    def _to_rows(self, apart: Pair) -> dict[str, Pair]:
        """Return gradients of query, key and the score's tensors, given those of key − query (K, B, H, L, S, D)."""
        query, key, tensors = self.query, self.key, self.tensors
        by_query, by_key = (apart[0].sum(-2), apart[1].sum(-2)), (apart[0].sum(-3), apart[1].sum(-3))
        by_step = self._along(lambda step: self._at(query + step, key, tensors)[0], query.shape[-1], by_query)
        found = {
            "query": (-by_step[0], by_step[1]),
            "key": self._along(lambda step: self._at(query, key + step, tensors)[1], key.shape[-1], by_key),
        }
        for i, (name, tensor) in enumerate(named("score", self.score)):
            if name:
                found[name] = self._to_tensor(i, tuple(tensor.shape), by_query, by_key)
        return found

    def _along(self, at: Callable[[Array], Array], width: int, grad: Pair) -> Pair:
        parts = []
        for i in range(width):
            step = 1j * STEP * (np.arange(width) == i).astype(self.query.dtype)
            with np.errstate(all="ignore"):
                moved = at(step).imag / STEP
            parts.append([(grad[0] * moved).sum(-1), (grad[1] * abs(moved)).sum(-1)])
        if not parts:
            return grad[0][..., :0], grad[1][..., :0]
        return np.stack([p[0] for p in parts], -1), np.stack([p[1] for p in parts], -1)

    def _to_tensor(self, i: int, shape: tuple[int, ...], by_query: Pair, by_key: Pair) -> Pair:
        tensor: Any = self.tensors[i]
        found = np.zeros((2, self.query.shape[0], tensor.size), dtype=self.query.dtype)
        for place in range(tensor.size):
            step = np.zeros(tensor.size, dtype=np.result_type(tensor.dtype, np.complex64))
            step[place] = 1j * STEP
            moved = [t + step.reshape(t.shape) if j == i else t for j, t in enumerate(self.tensors)]
            with np.errstate(all="ignore"):
                q, k = (np.imag(rows) / STEP for rows in self._at(self.query, self.key, moved))
            parts = (-by_query[0] * q, by_key[0] * k), (by_query[1] * abs(q), by_key[1] * abs(k))
            for result, pair in zip(found, parts):
                result[:, place] = sum(part.reshape(part.shape[0], -1).sum(-1) for part in pair)
        return tuple(f.reshape(len(f), *shape) for f in found)
