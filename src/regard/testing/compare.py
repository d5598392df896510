"""Compare queries and keys, with the derivative: by a written-out formula, or by the score's own code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from regard.masks import Extent, Mask
from regard.scores import Score, ScoreMod
from regard.testing.case import named
from regard.testing.fallback_oracle import OwnComparison
from regard.testing.formulas import FORMULAS, Array, Formula, attributes
from regard.testing.statement import indices

#: The imaginary step by which derivatives are taken: its square vanishes beside anything.
STEP = 2.0**-100
#: Numbers that are held at once where slopes are taken.
_NUMBERS = 2**18

#: A gradient and its amplitude.
Pair = tuple[Array, Array]


class Comparison(Protocol):
    """Scores before any scale, and their derivative."""

    values: Array

    def pull(self, grad: Array, amplitude: Array) -> dict[str, Pair]:
        """Return gradient and amplitude for query, key and each tensor of the score, given those of the scores."""
        ...


def of(score: Score, query: Array, key: Array, tensors: list[Array]) -> Comparison:
    """Compare query (K, B, H, L, E) with key (K, B, H, S, E); gradients go to those of its tensors that want them."""
    base = stated(score)
    formula = FORMULAS.get(type(base))
    if formula is None:
        return OwnComparison(base, query, key)
    return _Stated(formula, base, query, key, tensors)


def stated(score: Score) -> Score:
    """Return the score whose formula is asked for: inside a ScoreMod, its base."""
    while isinstance(score, ScoreMod):
        score = score.base
    return score


def has_formula(score: Score) -> bool:
    """Return whether a score is judged by a formula, and not by its own code."""
    return type(stated(score)) in FORMULAS


class _Stated:
    """A formula, differentiated by complex steps: exact to the last digit, as nothing is subtracted."""

    def __init__(self, formula: Formula, score: Score, query: Array, key: Array, tensors: list[Array]) -> None:
        self.formula, self.score, self.query, self.key, self.tensors = formula, score, query, key, tensors
        with np.errstate(all="ignore"):
            self.values = self._at(query, key, tensors)

    def _at(self, query: Array, key: Array, tensors: list[Array]) -> Array:
        remaining = iter(tensors)
        return self.formula(query, key, attributes(self.score, lambda _: next(remaining)))

    def _slopes(self, at: Callable[[Array], Array], source: Array) -> Array:
        """Return the derivative of all scores to each feature of the rows: (width, K, B, H, L, S)."""
        width = source.shape[-1]
        steps = (1j * STEP * np.eye(width, dtype=source.dtype)).reshape(width, *(1,) * (source.ndim - 1), width)
        # So many features at once as stay near the processor: a formula may hold every pair's features.
        parts = min(max(width, 1), 1 + self.values.size * width**2 // _NUMBERS)
        with np.errstate(all="ignore"):
            moved = np.concatenate(
                [
                    np.broadcast_to(at(source + step).imag / STEP, (len(step), *self.values.shape))
                    for step in np.array_split(steps, parts)
                ]
            )
        return np.broadcast_to(np.where(self.values > -np.inf, moved, 0), (width, *self.values.shape))

    def pull(self, grad: Array, amplitude: Array) -> dict[str, Pair]:
        by_query = self._slopes(lambda q: self._at(q, self.key, self.tensors), self.query)
        by_key = self._slopes(lambda k: self._at(self.query, k, self.tensors), self.key)
        found = {}
        for name, slopes, axis in (("query", by_query, -1), ("key", by_key, -2)):
            pulled = [(d * slope).sum(axis) for d, slope in ((grad, slopes), (amplitude, abs(slopes)))]
            found[name] = tuple(np.moveaxis(p, 0, -1) for p in pulled)
        for i, (name, _) in enumerate(named("score", self.score)):
            if name:
                found[name] = self._pull_tensor(i, self.tensors[i], grad, amplitude)
        return found

    def _pull_tensor(self, i: int, tensor: Array, grad: Array, amplitude: Array) -> Pair:
        """Return the gradient to one of the score's tensors, (K, *shape), one number at a time."""
        found = np.zeros((2, grad.shape[0], tensor.size), dtype=grad.dtype)
        for place in range(tensor.size):
            step = np.zeros(tensor.size, dtype=np.result_type(tensor.dtype, np.complex64))
            step[place] = 1j * STEP
            moved = [t + step.reshape(t.shape) if j == i else t for j, t in enumerate(self.tensors)]
            with np.errstate(all="ignore"):
                slope = self._at(self.query, self.key, moved).imag / STEP
            slope = np.where(self.values > -np.inf, slope, 0)
            for result, d, by in ((found[0], grad, slope), (found[1], amplitude, abs(slope))):
                result[:, place] = (d * by).reshape(d.shape[0], -1).sum(-1)
        shape = (grad.shape[0], *tensor.shape)
        return found[0].reshape(shape), found[1].reshape(shape)


def bias_jacobian(mask: Mask, i: int, extent: Extent) -> Array:
    """Return the derivative of a mask's bias to its i-th tensor: (B · H · L · S, numel)."""
    tensors = [t.detach().double() if t.is_floating_point() else t for t in mask.tensors()]
    shape = (extent.B, extent.H, extent.L, extent.S)
    pairs, numel = math.prod(shape), tensors[i].numel()
    if not pairs or not numel:
        return np.zeros((pairs, numel))

    def bias(tensor: torch.Tensor) -> Any:
        found = mask.with_tensors([tensor if j == i else t for j, t in enumerate(tensors)]).bias(*indices(extent, mask))
        assert found is not None
        return found.expand(shape).reshape(-1)

    # A copy: forward mode takes no tensor whose elements share memory.
    return torch.func.jacfwd(bias)(tensors[i].contiguous()).reshape(pairs, numel).cpu().numpy()
