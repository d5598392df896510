"""Every score written out in NumPy, independently of the library's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from regard import scores
from regard.scores.base import Score
from regard.scores.distance import Distance, kernels

#: Real or complex, of any precision.
Array = npt.NDArray[Any]

#: ``formula(query, key, score)``: (..., L, Eq), (..., S, Ek) and the score's attributes as arrays -> (..., L, S).
Formula = Callable[[Array, Array, Any], Array]

#: The formula of each score. It must be analytic, as gradients are taken by complex steps: branch on ``.real``
#: alone, and write no ``abs`` or ``conj``.
FORMULAS: dict[type[Score], Formula] = {}


def register_formula(cls: type[Score], formula: Formula) -> Formula:
    """OnlineSoftmax the formula of a score, by which the conformance suite judges it.

    A score without a formula is judged by its own ``compare`` in float64.

    Parameters
    ----------
    cls : type of Score
    formula : callable
        ``formula(query, key, score)`` takes arrays (..., L, Eq) and (..., S, Ek), whose leading dimensions end in
        (batch, heads), and an object with the score's attributes, tensors as arrays. It returns the scores
        (..., L, S) before any scale; −inf where a pair never meets. It must be analytic: the inputs may be complex.

    Examples
    --------
    >>> import torch
    >>> from regard.scores import Score
    >>> class Product(Score):
    ...     def compare(self, query, key):
    ...         return torch.log1p(query @ key.mT)
    >>> _ = register_formula(Product, lambda query, key, score: np.log(1 + query @ np.swapaxes(key, -1, -2)))
    >>> Product in FORMULAS
    True
    >>> del FORMULAS[Product]
    """
    FORMULAS[cls] = formula
    return formula


@contextmanager
def formula_of(cls: type[Score], formula: Formula) -> Iterator[None]:
    """OnlineSoftmax a formula for the duration of a ``with`` block."""
    before = FORMULAS.get(cls)
    FORMULAS[cls] = formula
    try:
        yield
    finally:
        if before is None:
            del FORMULAS[cls]
        else:
            FORMULAS[cls] = before


def attributes(score: Score, convert: Callable[[Any], Array]) -> SimpleNamespace:
    """Return the score's attributes, tensors converted to arrays, in a plain object."""
    return SimpleNamespace(**{
        name: convert(value) if hasattr(value, "detach") else value for name, value in vars(score).items()
    })  # fmt: skip


def _transposed(matrix: Array) -> Array:
    return np.swapaxes(matrix, -1, -2)


def _dot(query: Array, key: Array, score: Any) -> Array:  # noqa: ARG001
    return query @ _transposed(key)


def _general(query: Array, key: Array, score: Any) -> Array:
    return query @ (score.weight @ _transposed(key))


def _hidden(features: Array, w_v: Array) -> Array:
    # (H, C) meets (..., H, L, S, C): each head has weights of its own.
    return (np.tanh(features) * (w_v if w_v.ndim == 1 else w_v[:, None, None, :])).sum(-1)


def _additive(query: Array, key: Array, score: Any) -> Array:
    if score.w_q is not None:
        query = query @ _transposed(score.w_q)
    if score.w_k is not None:
        key = key @ _transposed(score.w_k)
    return _hidden(query[..., :, None, :] + key[..., None, :, :], score.w_v)


def _concat(query: Array, key: Array, score: Any) -> Array:
    rows = np.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    L, S = query.shape[-2], key.shape[-2]
    query = np.broadcast_to(query[..., :, None, :], (*rows, L, S, query.shape[-1]))
    key = np.broadcast_to(key[..., None, :, :], (*rows, L, S, key.shape[-1]))
    return _hidden(np.concatenate((query, key), -1) @ _transposed(score.weight), score.w_v)


def _location(query: Array, key: Array, score: Any) -> Array:
    wanted = query @ _transposed(score.weight)  # (..., L, S_max)
    wanted = wanted[..., : key.shape[-2]]
    return wanted + np.zeros((*key.shape[:-2], 1, 1))


def _unit(rows: Array) -> Array:
    length = np.sqrt((rows * rows).sum(-1, keepdims=True))
    # A zero vector has cosine 0 with everything, and no direction to move in.
    return np.where(length.real > 0, rows / np.where(length.real > 0, length, 1), 0)


def _cosine(query: Array, key: Array, score: Any) -> Array:
    zero = (query.real == 0).all(-1, keepdims=True)
    zero_key = (key.real == 0).all(-1, keepdims=True)
    query, key = (_unit(np.where(z, 0, rows)) for z, rows in ((zero, query), (zero_key, key)))
    return query @ _transposed(key) / score.temperature


def _kernel(cls: type[Distance]) -> Formula:
    """Return the formula of a kernel, from its own of the distance."""

    def formula(query: Array, key: Array, score: Any) -> Array:
        apart = (query[..., :, None, :] - key[..., None, :, :]) / score.width
        if cls.manhattan:
            reach = distance = (apart * np.sign(apart.real)).sum(-1)
        else:
            reach = (apart * apart).sum(-1)
            moved = reach.real > np.finfo(reach.real.dtype).tiny ** 0.5  # a complex step alone is no distance
            distance = np.where(moved, np.sqrt(np.where(moved, reach, 1)), 0)
        met = (reach.real <= 1) | (not cls.compact)
        with np.errstate(divide="ignore"):
            found = cls.log_profile(np.where(met, distance, 0))
        return np.where(met & np.isfinite(found.real), found, -np.inf)

    return formula


def _constant(query: Array, key: Array, score: Any) -> Array:  # noqa: ARG001
    return np.zeros((*np.broadcast_shapes(query.shape[:-2], key.shape[:-2]), query.shape[-2], key.shape[-2]))


FORMULAS |= {
    scores.Dot: _dot,
    scores.ScaledDot: _dot,
    scores.General: _general,
    scores.Additive: _additive,
    scores.Concat: _concat,
    scores.Location: _location,
    scores.Cosine: _cosine,
    scores.Constant: _constant,
    **{cls: _kernel(cls) for cls in kernels().values()},
}
