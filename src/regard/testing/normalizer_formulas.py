"""Formulas of the normalizers in NumPy: sorting and bisection instead of Newton's method, and its derivative."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from regard import normalizers
from regard.normalizers.base import Normalizer
from regard.testing.formulas import Array

#: Halvings at most, far more than any precision here leaves room for.
HALVINGS = 400


@dataclass(frozen=True)
class Weighing:
    """A normalizer's weights, written independently of the library.

    Attributes
    ----------
    weigh : callable
        ``weigh(scores, normalizer)``: (..., L, S) -> weights (..., L, S); −inf is masked.
    slope : callable
        ``slope(weights, normalizer)``: d weight / d score where everything else in the row stays.
    couples : bool
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
    couples: bool = True
    sparse: bool = False
    threshold: Callable[[Array, Normalizer], Array] | None = None
    bend: Callable[[Normalizer], float] = lambda _: 1.0

    def shaken(self, weights: Array, normalizer: Normalizer) -> Array:
        """Return by how much a rounding of the row's threshold, a number that must be held, moves each weight."""
        if self.threshold is None:
            return np.zeros_like(weights)
        return self.slope(weights, normalizer) * self.threshold(weights, normalizer)

    def pull(self, scores: Array, weights: Array, grad: Array, normalizer: Normalizer) -> Array:  # noqa: ARG002
        """Return the gradient to the scores, given that to the weights."""
        slope = self.slope(weights, normalizer)
        if not self.couples:
            return slope * grad
        total = slope.sum(-1, keepdims=True)
        mean = (slope * grad).sum(-1, keepdims=True) / np.where(total == 0, 1, total)
        return slope * (grad - mean)

    def amplitude(self, weights: Array, grad: Array, normalizer: Normalizer) -> Array:
        """Return what :meth:`pull` adds and subtracts, without its cancellation, for ``grad`` ≥ 0."""
        slope = self.slope(weights, normalizer)
        if not self.couples:
            return slope * grad
        total = slope.sum(-1, keepdims=True)
        return slope * (grad + (slope * grad).sum(-1, keepdims=True) / np.where(total == 0, 1, total))


def _relative(scores: Array) -> tuple[Array, Array]:
    """Return scores relative to the largest of their row, and which rows have any."""
    peak = scores.max(-1, keepdims=True, initial=-np.inf)
    return scores - np.where(peak == -np.inf, 0, peak), peak > -np.inf


def softmax(scores: Array, normalizer: Normalizer | None = None) -> Array:  # noqa: ARG001
    """Return exp(s) / Σ exp(s), 0 in rows of nothing but −inf."""
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
    slope, power = scores.dtype.type(alpha) - 1, 1 / (scores.dtype.type(alpha) - 1)
    low = np.full((*scores.shape[:-1], 1), -1 / slope, dtype=scores.dtype)
    high = np.zeros_like(low)
    for _ in range(HALVINGS):  # until no number lies between: a threshold near 0 has its digits far behind the point
        middle = (low + high) / 2
        if ((middle == low) | (middle == high)).all():
            break
        enough = (np.maximum(slope * (relative - middle), 0) ** power).sum(-1, keepdims=True) >= 1
        low, high = np.where(enough, middle, low), np.where(enough, high, middle)
    return np.where(some, np.maximum(slope * (relative - low), 0) ** power, 0)


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


def _entmax_slope(weights: Array, alpha: float) -> Array:
    return np.where(weights > 0, np.where(weights > 0, weights, 1) ** (2 - alpha), 0)


def _threshold(weights: Array, alpha: float) -> Array:
    # The largest weight is [(α−1) · −t]^(1/(α−1)).
    return weights.max(-1, keepdims=True, initial=0) ** (alpha - 1) / (alpha - 1)


def _of_family(weigh: Callable[[Array, Normalizer], Array]) -> Weighing:
    return Weighing(
        weigh,
        lambda weights, n: _entmax_slope(weights, alpha_of(n)),
        sparse=True,
        threshold=lambda weights, n: _threshold(weights, alpha_of(n)),
        bend=lambda n: 2 - alpha_of(n),
    )


def alpha_of(normalizer: Normalizer) -> float:
    """Return the α of a member of the entmax family."""
    return float(getattr(normalizer, "alpha", 1.5))


#: How each normalizer weighs. One that is random, or is not listed here, is not compared with an oracle.
WEIGHINGS: dict[type[Normalizer], Weighing] = {
    normalizers.Softmax: Weighing(softmax, lambda weights, _: weights),
    normalizers.Sparsemax: _of_family(sparsemax),
    normalizers.Entmax15: _of_family(lambda scores, _: entmax(scores, 1.5)),
    normalizers.Entmax: _of_family(lambda scores, n: entmax(scores, alpha_of(n))),
    normalizers.Sigmoid: Weighing(sigmoid, lambda weights, _: weights * (1 - weights), couples=False),
    normalizers.Argmax: Weighing(argmax, lambda weights, _: np.zeros_like(weights), couples=False, sparse=True),
}


def register_weighing(cls: type[Normalizer], weighing: Weighing) -> Weighing:
    """OnlineSoftmax how a normalizer weighs, by which the conformance suite judges it."""
    WEIGHINGS[cls] = weighing
    return weighing
