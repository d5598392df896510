"""Scores and normalizers written out in NumPy, independently of the library's own code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from regard import normalizers, scores
from regard.normalizers.base import Normalizer
from regard.scores.base import Score
from regard.scores.kernels import Distance, kernels

# Every score written out in NumPy, independently of the library's own code --------------------------------------------


#: Real or complex, of any precision.
Array = npt.NDArray[Any]

#: ``formula(query, key, score)``: (..., L, Eq), (..., S, Ek) and the score's attributes as arrays -> (..., L, S).
Formula = Callable[[Array, Array, Any], Array]

#: The formula of each score. It must be analytic, because gradients use complex steps: branch only on ``.real``, and do
#: not use ``abs`` or ``conj``.
FORMULAS: dict[type[Score], Formula] = {}


def register_formula(cls: type[Score], formula: Formula) -> Formula:
    """Register the formula of a score, which serves as its oracle in the conformance suite.

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
    """Register a formula for the duration of a ``with`` block."""
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
    """Return the formula of a kernel from its function of the distance."""

    def formula(query: Array, key: Array, score: Any) -> Array:
        apart = (query[..., :, None, :] - key[..., None, :, :]) / score.width
        if cls.manhattan:
            reach = distance = (apart * np.sign(apart.real)).sum(-1)
        else:
            reach = (apart * apart).sum(-1)
            moved = reach.real > np.finfo(reach.real.dtype).tiny ** 0.5  # ignore the complex step itself
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


#: Where queries and keys lie for order 1: ``places(query, key, score) -> (query, key)``, as analytic as scores are.
Places = Callable[[Array, Array, Any], tuple[Array, Array]]


def _as_they_are(query: Array, key: Array, score: Any) -> tuple[Array, Array]:  # noqa: ARG001
    return query, key


def _in_units(query: Array, key: Array, score: Any) -> tuple[Array, Array]:
    width = np.asarray(score.width)
    return (query / width, key / width) if width.ndim else (query, key)


def _on_sphere(query: Array, key: Array, score: Any) -> tuple[Array, Array]:  # noqa: ARG001
    zeros = ((rows.real == 0).all(-1, keepdims=True) for rows in (query, key))
    query, key = (_unit(np.where(zero, 0, rows)) for zero, rows in zip(zeros, (query, key)))
    return query, key


#: The positions of each score, by its class or a base of it.
POSITIONS: dict[type[Any], Places] = {
    scores.Dot: _as_they_are,
    scores.ScaledDot: _as_they_are,
    scores.General: lambda query, key, score: (query @ score.weight, key),
    scores.Cosine: _on_sphere,
    Distance: _in_units,
}


# Formulas of the normalizers in NumPy: sorting and bisection instead of Newton's method, and its derivative -----------


#: The most bisection steps, far more than any precision here needs.
HALVINGS = 400


@dataclass(frozen=True)
class NormalizerFormula:
    """A normalizer's weights, written independently of the library.

    Attributes
    ----------
    weigh : callable
        ``weigh(scores, normalizer)``: (..., L, S) -> weights (..., L, S); −inf is masked.
    slope : callable
        ``slope(weights, normalizer)``: d weight / d score where everything else in the row stays.
    row_normalized : bool
        Whether the weights of a row are tied by their sum: then ``d score`` is ``slope`` times ``d weight`` less its
        mean, weighted by slopes.
    sparse : bool
        Whether a finite score may get a weight of exactly 0, so that weights or slopes may jump.
    threshold : callable, optional
        ``threshold(weights, normalizer)``: the size (..., L, 1) of the threshold of each row, relative to its maximum.
    bend : callable
        ``bend(normalizer)``: d log slope / d log weight.
    """

    weigh: Callable[[Array, Normalizer], Array]
    slope: Callable[[Array, Normalizer], Array]
    row_normalized: bool = True
    sparse: bool = False
    threshold: Callable[[Array, Normalizer], Array] | None = None
    bend: Callable[[Normalizer], float] = lambda _: 1.0

    def shaken(self, weights: Array, normalizer: Normalizer) -> Array:
        """Return the effect on each weight of rounding the row's stored threshold."""
        if self.threshold is None:
            return np.zeros_like(weights)
        return self.slope(weights, normalizer) * self.threshold(weights, normalizer)

    def pull(self, scores: Array, weights: Array, grad: Array, normalizer: Normalizer) -> Array:  # noqa: ARG002
        """Return the gradient with respect to the scores, given that with respect to the weights."""
        slope = self.slope(weights, normalizer)
        if not self.row_normalized:
            return slope * grad
        total = slope.sum(-1, keepdims=True)
        mean = (slope * grad).sum(-1, keepdims=True) / np.where(total == 0, 1, total)
        return slope * (grad - mean)

    def pull_tensors(self, scores: Array, weights: Array, grad: Array, normalizer: Normalizer) -> list[Array]:  # noqa: ARG002
        """Return the gradients (K, ...) of the normalizer's tensors, given that with respect to the weights."""
        return []

    def amplitude(self, weights: Array, grad: Array, normalizer: Normalizer) -> Array:
        """Return the sum of the absolute terms of :meth:`pull`, for ``grad`` ≥ 0."""
        slope = self.slope(weights, normalizer)
        if not self.row_normalized:
            return slope * grad
        total = slope.sum(-1, keepdims=True)
        return slope * (grad + (slope * grad).sum(-1, keepdims=True) / np.where(total == 0, 1, total))


def _relative(scores: Array) -> tuple[Array, Array]:
    """Return scores relative to the largest of their row, and which rows have a finite one."""
    peak = scores.max(-1, keepdims=True, initial=-np.inf)
    return scores - np.where(peak == -np.inf, 0, peak), peak > -np.inf


def softmax(scores: Array, normalizer: Normalizer | None = None) -> Array:  # noqa: ARG001
    """Return exp(s) / Σ exp(s); 0 in rows where every score is −inf."""
    relative, _ = _relative(scores)
    powers = np.exp(relative)
    total = powers.sum(-1, keepdims=True)
    return powers / np.where(total == 0, 1, total)


def sparsemax(scores: Array, normalizer: Normalizer | None = None) -> Array:  # noqa: ARG001
    """Return the projection onto the simplex by sorting (Held, Wolfe and Crowder 1974)."""
    relative, some = _relative(scores)
    if not scores.shape[-1]:
        return scores
    ordered = -np.sort(-relative, axis=-1)
    count = np.arange(1, scores.shape[-1] + 1)
    finite = np.where(ordered == -np.inf, 0, ordered)
    held = (ordered > -np.inf) & (1 + count * finite > np.cumsum(finite, -1))
    size = np.maximum(held.sum(-1, keepdims=True), 1)
    threshold = (np.where(held, finite, 0).sum(-1, keepdims=True) - 1) / size
    return np.where(some, np.maximum(relative - threshold, 0), 0)


def entmax(scores: Array, alpha: float) -> Array:
    """Return α-entmax by bisection for the threshold at which the weights sum to 1."""
    relative, some = _relative(scores)
    slope = scores.dtype.type(alpha) - 1
    rows = relative.reshape(math.prod(scores.shape[:-1]), scores.shape[-1])
    low, high = np.full(len(rows), -1 / slope, dtype=scores.dtype), np.zeros(len(rows), dtype=scores.dtype)
    doubles = rows.astype(np.float64), float(slope), low.astype(np.float64)
    is_wide = scores.dtype != np.float64  # powers are then slow: begin near the threshold in double precision
    if slope <= 1:  # the sum of the weights is convex in the threshold: Newton's steps stay below the solution
        near, error = _newton(*doubles).astype(scores.dtype), 8 * np.finfo(scores.dtype).eps
        near = _newton(rows, slope, near * scores.dtype.type(1 + 1e-14)) if is_wide else near
    elif is_wide:
        near, error = _bisected(*doubles, high.astype(np.float64))[0].astype(scores.dtype), scores.dtype.type(1e-13)
    if slope <= 1 or is_wide:
        below, above = near * (1 + error), near * (1 - error)
        low = np.where(_reaches_one(rows, slope, below), np.maximum(below, low), low)
        high = np.where(_reaches_one(rows, slope, above), high, above)
    low, _ = _bisected(rows, slope, low, high)
    return np.where(some, _powers(relative, slope, low.reshape(*scores.shape[:-1], 1)), 0)


def _newton(rows: Array, slope: Any, threshold: Array) -> Array:
    """Return each row's threshold up to a few roundings, from one that is too low."""
    threshold, left = threshold.copy(), np.arange(len(rows))
    for _ in range(HALVINGS):
        above = np.maximum(slope * (rows[left] - threshold[left, None]), 0)
        powers = np.power(above, 1 / slope - 1, out=np.zeros_like(above), where=above > 0)
        step = ((powers * above).sum(-1) - 1) / np.maximum(powers.sum(-1), np.finfo(rows.dtype).tiny)
        threshold[left] += step
        left = left[step > 4 * np.finfo(rows.dtype).eps * np.abs(threshold[left])]
        if not len(left):
            break
    return threshold


def _bisected(rows: Array, slope: Any, low: Array, high: Array) -> tuple[Array, Array]:
    """Return adjacent numbers between which each row's threshold is; one near 0 needs many steps."""
    low, high, left = low.copy(), high.copy(), np.arange(len(rows))
    for _ in range(HALVINGS):
        middle = (low[left] + high[left]) / 2
        between = (middle != low[left]) & (middle != high[left])
        left, middle = left[between], middle[between]
        if not len(left):
            break
        enough = _reaches_one(rows[left], slope, middle)
        low[left[enough]], high[left[~enough]] = middle[enough], middle[~enough]
    return low, high


def _reaches_one(rows: Array, slope: Any, threshold: Array) -> Array:
    sums: Array = _powers(rows, slope, threshold[:, None]).sum(-1)
    return sums >= 1


def _powers(rows: Array, slope: Any, threshold: Array) -> Array:
    above = np.maximum(slope * (rows - threshold), 0)
    found: Array = np.power(above, 1 / slope, out=np.zeros_like(above), where=above > 0)
    return found


def sigmoid(scores: Array, normalizer: Normalizer | None = None) -> Array:  # noqa: ARG001
    """Return 1 / (1 + exp(−s))."""
    small = np.exp(-np.abs(scores))
    return np.where(scores >= 0, 1, small) / (1 + small)


def argmax(scores: Array, normalizer: Normalizer | None = None) -> Array:  # noqa: ARG001
    """Return 1 at the first largest score of each row."""
    if not scores.shape[-1]:
        return scores
    first = np.arange(scores.shape[-1]) == scores.argmax(-1)[..., None]
    return (first & (scores > -np.inf)).astype(scores.dtype)


def relu(scores: Array, normalizer: Normalizer) -> Array:
    """Return max(s, 0) to the power of 1 or 2."""
    return np.where(scores > 0, scores, np.where(np.isnan(scores), scores, 0)) ** _power(normalizer)


def _power(normalizer: Normalizer) -> int:
    return int(vars(normalizer)["power"])


def _relu_slope(weights: Array, normalizer: Normalizer) -> Array:
    return np.where(weights > 0, 1.0 if _power(normalizer) == 1 else 2 * np.sqrt(np.where(weights > 0, weights, 0)), 0)


class _Sticks(NormalizerFormula):
    """Stick-breaking, key by key from the last."""

    def __init__(self) -> None:
        super().__init__(_stick_weights, lambda weights, _: weights)

    def pull(self, scores: Array, weights: Array, grad: Array, normalizer: Normalizer) -> Array:  # noqa: ARG002
        """Return ``(1 − σ_i) w_i g_i − σ_i Σ_{j < i} w_j g_j``."""
        share, before = sigmoid(scores), np.cumsum(weights * grad, -1) - weights * grad
        return (1 - share) * weights * grad - share * before

    def amplitude(self, weights: Array, grad: Array, normalizer: Normalizer) -> Array:  # noqa: ARG002
        return np.cumsum(weights * grad, -1)


def _stick_weights(scores: Array, normalizer: Normalizer) -> Array:  # noqa: ARG001
    left, found = np.ones_like(scores[..., :1]), np.zeros_like(scores)
    for i in reversed(range(scores.shape[-1])):
        share = sigmoid(scores[..., i : i + 1])
        found[..., i : i + 1] = share * left
        left = left * sigmoid(-scores[..., i : i + 1])
    return found


def _entmax_slope(weights: Array, alpha: float) -> Array:
    return np.where(weights > 0, np.where(weights > 0, weights, 1) ** (2 - alpha), 0)


def _threshold(weights: Array, alpha: float) -> Array:
    # The largest weight is [(α−1) · −t]^(1/(α−1)).
    return weights.max(-1, keepdims=True, initial=0) ** (alpha - 1) / (alpha - 1)


def _of_family(weigh: Callable[[Array, Normalizer], Array]) -> NormalizerFormula:
    return NormalizerFormula(
        weigh,
        lambda weights, n: _entmax_slope(weights, alpha_of(n)),
        sparse=True,
        threshold=lambda weights, n: _threshold(weights, alpha_of(n)),
        bend=lambda n: 2 - alpha_of(n),
    )


class _WithSink(NormalizerFormula):
    """Softmax with a sink: the weights sum to less than 1, and the sink has a gradient."""

    def __init__(self) -> None:
        super().__init__(lambda scores, n: _with_sink(scores, n)[0], lambda weights, _: weights)

    def pull(self, scores: Array, weights: Array, grad: Array, normalizer: Normalizer) -> Array:  # noqa: ARG002
        return weights * (grad - (weights * grad).sum(-1, keepdims=True))

    def amplitude(self, weights: Array, grad: Array, normalizer: Normalizer) -> Array:  # noqa: ARG002
        return weights * (grad + (weights * grad).sum(-1, keepdims=True))

    def pull_tensors(self, scores: Array, weights: Array, grad: Array, normalizer: Normalizer) -> list[Array]:
        pulled = -_with_sink(scores, normalizer)[1] * (weights * grad).sum(-1, keepdims=True)  # (K, B, H, L, 1)
        by_head, tensors = pulled.sum((1, 3, 4)), normalizer.tensors()
        return [by_head if t.shape == by_head.shape[1:] else by_head.sum(1).reshape(-1, *t.shape) for t in tensors]


def _with_sink(scores: Array, normalizer: Normalizer) -> tuple[Array, Array]:
    """Return exp(s) / (exp(z) + Σ exp(s)), and the weight of the sink."""
    logits: Any = vars(normalizer)["sink"]
    logits = logits.detach().double().cpu().numpy() if hasattr(logits, "detach") else logits
    sink = np.asarray(logits, dtype=scores.dtype).reshape(-1, 1, 1)
    peak = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sink)
    powers, own = np.exp(scores - peak), np.exp(sink - peak)
    total = powers.sum(-1, keepdims=True) + own
    return powers / total, own / total


def alpha_of(normalizer: Normalizer) -> float:
    """Return the α of a member of the entmax family."""
    return float(getattr(normalizer, "alpha", 1.5))


#: The formula of each normalizer. Random normalizers, and those not listed, have no oracle.
NORMALIZER_FORMULAS: dict[type[Normalizer], NormalizerFormula] = {
    normalizers.Softmax: NormalizerFormula(softmax, lambda weights, _: weights),
    normalizers.SoftmaxSink: _WithSink(),
    normalizers.Sparsemax: _of_family(sparsemax),
    normalizers.Entmax15: _of_family(lambda scores, _: entmax(scores, 1.5)),
    normalizers.Entmax: _of_family(lambda scores, n: entmax(scores, alpha_of(n))),
    normalizers.ReLU: NormalizerFormula(relu, _relu_slope, row_normalized=False, sparse=True),
    normalizers.StickBreaking: _Sticks(),
    normalizers.Sigmoid: NormalizerFormula(sigmoid, lambda weights, _: weights * (1 - weights), row_normalized=False),
    normalizers.Argmax: NormalizerFormula(
        argmax, lambda weights, _: np.zeros_like(weights), row_normalized=False, sparse=True
    ),
}


def register_weighing(cls: type[Normalizer], weighing: NormalizerFormula) -> NormalizerFormula:
    """Register the formula of a normalizer, which serves as its oracle in the conformance suite."""
    NORMALIZER_FORMULAS[cls] = weighing
    return weighing
