"""The correct result in float64, from NumPy formulas, or from a part's own code if it has no formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from regard.masks import Extent, Mask
from regard.normalizers import Softmax, SoftmaxSink
from regard.normalizers.base import Normalizer
from regard.scores import Cosine, Score, ScoreMod
from regard.testing.case import MODS, named
from regard.testing.formulas import FORMULAS, NORMALIZER_FORMULAS, Array, Formula, NormalizerFormula, attributes
from regard.testing.line import Line
from regard.testing.statement import NumpyCall, indices

if TYPE_CHECKING:
    from regard.testing.statement import NumpyCall


# For parts without a formula: their own code in float64 ---------------------------------------------------------------


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64))


class OwnComparison:
    """A score's own ``project`` and ``compare``, in float64, with gradients by autograd."""

    def __init__(self, score: Score, query: Array, key: Array) -> None:
        K, B = query.shape[:2]
        self.sources = [_tensor(rows.reshape(K * B, *rows.shape[2:])).requires_grad_() for rows in (query, key)]
        self.score = score.map_tensors(_leaf)
        with torch.enable_grad():
            self._scores = self.score.compare(*self.score.project(*self.sources))
        self.values = self._scores.detach().numpy().reshape(K, B, *self._scores.shape[1:]).astype(query.dtype)

    def pull(self, grad: Array, amplitude: Array) -> dict[str, tuple[Array, Array]]:  # noqa: ARG002
        names = ["query", "key", *(name for name, _ in named("score", self.score))]
        leaves = [*self.sources, *self.score.tensors()]
        K, B = grad.shape[:2]
        found: dict[str, tuple[Array, Array]] = {}
        parts = []
        for k in range(K):  # one problem at a time, because all share the score's tensors
            share = np.zeros_like(grad)
            share[k] = np.where(self.values[k] > -np.inf, grad[k], 0)
            parts.append(self._pulled(leaves, share.reshape(K * B, *grad.shape[2:])))
        for i, name in enumerate(names):
            if not name:
                continue
            each = [part[i].reshape(K, B, *part[i].shape[1:])[k] if i < 2 else part[i] for k, part in enumerate(parts)]
            found[name] = (np.stack(each), np.abs(np.stack(each)))
        return found

    def _pulled(self, leaves: list[Tensor], grad: Array) -> list[Array]:
        if not self._scores.requires_grad:
            return [np.zeros(leaf.shape) for leaf in leaves]
        found = torch.autograd.grad(self._scores, leaves, _tensor(grad), retain_graph=True, allow_unused=True)
        return [np.zeros(leaf.shape) if g is None else g.numpy() for leaf, g in zip(leaves, found)]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().double().cpu().requires_grad_() if tensor.is_floating_point() else tensor


def own_modification(statement: NumpyCall, scores: Array) -> tuple[Array, Array]:
    """Apply a score's ``modify`` to scaled scores (K, B, H, L, S), and return the result and its derivative."""
    from regard.testing.statement import indices

    score = statement.score
    if type(score).modify is Score.modify:
        return scores, np.ones_like(scores)
    index = indices(statement.extent)
    found = []
    for each in scores:
        source = _tensor(each).requires_grad_()
        with torch.enable_grad():
            moved = score.map_tensors(_leaf).modify(source, *index)
        (slope,) = torch.autograd.grad(moved, source, torch.ones_like(moved), allow_unused=True)
        found.append((moved.detach().numpy(), np.zeros(moved.shape) if slope is None else slope.numpy()))
    values, slopes = (np.stack(part).astype(scores.dtype) for part in zip(*found))
    return values, slopes


class OwnWeighing(NormalizerFormula):
    """A normalizer's own definition, with its gradient by autograd."""

    def __init__(self) -> None:
        super().__init__(_own_weights, lambda weights, _: weights)

    def pull(self, scores: Array, weights: Array, grad: Array, normalizer: Normalizer) -> Array:  # noqa: ARG002
        """Return the gradient with respect to the scores, given that with respect to the weights."""
        source = _tensor(scores).requires_grad_()
        with torch.enable_grad():
            found = normalizer.map_tensors(_leaf).weights(source)
        if not found.requires_grad:
            return np.zeros_like(grad)
        return torch.autograd.grad(found, source, _tensor(grad))[0].numpy().astype(grad.dtype)

    def pull_tensors(self, scores: Array, weights: Array, grad: Array, normalizer: Normalizer) -> list[Array]:  # noqa: ARG002
        """Return the gradients (K, ...) of the normalizer's tensors, one problem at a time."""
        found = []
        for each, own in zip(scores, grad):
            twin = normalizer.map_tensors(_leaf)
            with torch.enable_grad():
                output = twin.weights(_tensor(each))
            leaves = twin.tensors()
            parts = torch.autograd.grad(output, leaves, _tensor(own), allow_unused=True) if leaves else ()
            found.append([np.zeros(t.shape) if g is None else g.numpy() for t, g in zip(leaves, parts)])
        return [np.stack(each) for each in zip(*found)]

    def amplitude(self, weights: Array, grad: Array, normalizer: Normalizer) -> Array:  # noqa: ARG002
        """Return the amplitude of the gradient, approximated by that of softmax."""
        return weights * (grad + (weights * grad).sum(-1, keepdims=True))


def _own_weights(scores: Array, normalizer: Normalizer) -> Array:
    with torch.no_grad():
        return normalizer.map_tensors(_leaf).weights(_tensor(scores)).numpy().astype(scores.dtype)


# Compare queries and keys, with derivatives: by a formula, or by the score's own code ---------------------------------


#: The imaginary step for derivatives; its square is negligible.
STEP = 2.0**-100
#: The most numbers held at once for derivatives.
_NUMBERS = 2**18

#: A gradient and its amplitude.
Pair = tuple[Array, Array]


class Comparison(Protocol):
    """Scores before any scale, and their derivative."""

    values: Array

    def pull(self, grad: Array, amplitude: Array) -> dict[str, Pair]:
        """Return gradients and amplitudes of query, key and each tensor of the score, given those of the scores."""
        ...


def comparison_of(score: Score, query: Array, key: Array, tensors: list[Array]) -> Comparison:
    """Compare query (K, B, H, L, E) with key (K, B, H, S, E), with gradients for tensors that require them."""
    base = stated(score)
    formula = FORMULAS.get(type(base))
    if formula is None:
        return OwnComparison(base, query, key)
    return _Stated(formula, base, query, key, tensors)


def stated(score: Score) -> Score:
    """Return the score to look up a formula for: the base of a ScoreMod, otherwise the score itself."""
    while isinstance(score, ScoreMod):
        score = score.base
    return score


def has_formula(score: Score) -> bool:
    """Return whether a score has a formula."""
    return type(stated(score)) in FORMULAS


class _Stated:
    """A formula differentiated by complex steps, which are exact because nothing is subtracted."""

    def __init__(self, formula: Formula, score: Score, query: Array, key: Array, tensors: list[Array]) -> None:
        self.formula, self.score, self.query, self.key, self.tensors = formula, score, query, key, tensors
        with np.errstate(all="ignore"):
            self.values = self._at(query, key, tensors)

    def _at(self, query: Array, key: Array, tensors: list[Array]) -> Array:
        remaining = iter(tensors)
        return self.formula(query, key, attributes(self.score, lambda _: next(remaining)))

    def _slopes(self, at: Callable[[Array], Array], source: Array) -> Array:
        """Return the derivative of all scores with respect to each feature of the rows: (width, K, B, H, L, S)."""
        width = source.shape[-1]
        steps = (1j * STEP * np.eye(width, dtype=source.dtype)).reshape(width, *(1,) * (source.ndim - 1), width)
        # Process as many features at once as fit in the cache: a formula may hold the features of every pair.
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
            taken = self._along(self.query[..., :, None, :] if axis == -1 else self.key[..., None, :, :])
            sizes = abs(slopes + taken) + abs(taken)
            pulled = [(d * slope).sum(axis) for d, slope in ((grad, slopes), (amplitude, sizes))]
            found[name] = tuple(np.moveaxis(p, 0, -1) for p in pulled)
        for i, (name, _) in enumerate(named("score", self.score)):
            if name:
                found[name] = self._pull_tensor(i, self.tensors[i], grad, amplitude)
        return found

    def _along(self, rows: Array) -> Array:
        """Return what is subtracted in the derivative of a cosine: its part along the row itself; of others, 0.

        For each feature (width, K, B, H, L, S), or numbers that broadcast to it.
        """
        if type(self.score) is not Cosine:
            return np.zeros((), self.values.dtype)
        squares = (rows * rows).sum(-1, keepdims=True)
        direction = rows / np.where(squares > 0, squares, np.inf)
        return np.where(self.values > -np.inf, self.values, 0) * np.moveaxis(direction, -1, 0)

    def _pull_tensor(self, i: int, tensor: Array, grad: Array, amplitude: Array) -> Pair:
        """Return the gradient with respect to one of the score's tensors, (K, *shape), one element at a time."""
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
    """Return the derivative of a mask's bias with respect to its i-th tensor: (B · H · L · S, numel)."""
    tensors = [t.detach().double() if t.is_floating_point() else t for t in mask.tensors()]
    shape = tuple(extent)
    pairs, numel = math.prod(shape), tensors[i].numel()
    if not pairs or not numel:
        return np.zeros((pairs, numel))

    def bias(tensor: torch.Tensor) -> Any:
        found = mask.with_tensors([tensor if j == i else t for j, t in enumerate(tensors)]).bias(*indices(extent, mask))
        assert found is not None
        return found.expand(shape).reshape(-1)

    # Copy, because forward mode rejects tensors whose elements share memory.
    return torch.func.jacfwd(bias)(tensors[i].contiguous()).reshape(pairs, numel).cpu().numpy()


# The oracle: attention in NumPy, in a precision wider than the call's, with gradients by complex steps ----------------
# The oracle shares no code with the engines: scores and weights come from :mod:`~regard.testing.formulas`, and masks
# are evaluated for each pair. It uses 80-bit numbers for float64 calls where the platform has them, and float64 for
# narrower calls.


class WithAmplitude(NamedTuple):
    """A result and its amplitude: the sum of the absolute values of its terms."""

    value: Array
    amplitude: Array


@dataclass(frozen=True)
class Oracle:
    """The correct answers for a statement, each computed on first use.

    All arrays have the neighbours K in front.

    Attributes
    ----------
    statement : NumpyCall
    keeps_lse : bool
        Whether the backward pass keeps only the log-sum-exp of each row, whose rounding then counts.
    """

    statement: NumpyCall
    keeps_lse: bool = False

    @cached_property
    def _rows(self) -> tuple[Array, Array, Array]:
        """Return query (K, B, H, L, E), and key and value repeated for each query head."""
        s = self.statement
        rows = [s.canonical(s.array(t)) for t in (s.query, s.key, s.value)]
        return tuple(np.repeat(r, s.heads // r.shape[2], 2) if r.shape[2] else r for r in rows)  # type: ignore[return-value]

    @cached_property
    def comparison(self) -> Comparison:
        """The scores of queries and keys, and their derivative."""
        query, key, _ = self._rows
        s = self.statement
        return comparison_of(s.score, query, key, [s.array(t) for t in s.score.tensors()])

    @cached_property
    def _scored(self) -> tuple[Array, Array]:
        """Return the final scores (K, B, H, L, S), and their derivative with respect to the comparison's scores."""
        s = self.statement
        raw = self.comparison.values
        excluded = raw == -np.inf
        scores = np.where(excluded, 0, raw) * s.scales.astype(s.wide).reshape(-1, 1, 1, 1, 1)
        slope = np.broadcast_to(s.scales.astype(s.wide).reshape(-1, 1, 1, 1, 1), scores.shape)
        scores, change = self._modified(scores)
        slope = slope * change
        excluded |= scores == -np.inf
        if s.softcap is not None:
            tanh = np.tanh(np.where(excluded, 0, scores) / s.wide(s.softcap))
            scores, slope = s.wide(s.softcap) * tanh, slope * (1 - tanh * tanh)
        if s.bias is not None:
            scores = scores + s.bias
        if s.shifts is not None:
            scores = scores + s.shifts
        hidden = excluded | ~s.visible
        return np.where(hidden, -np.inf, scores), np.where(hidden, 0, slope)

    def _modified(self, scores: Array) -> tuple[Array, Array]:
        """Apply a score_mod to scaled scores, and return the result and its derivative."""
        s = self.statement
        if not isinstance(s.score, ScoreMod) or s.score.score_mod not in MODS:
            return own_modification(s, scores)
        index = [i.cpu().numpy() for i in indices(s.extent)]
        step = 2.0**-100
        moved = MODS[s.score.score_mod](scores + 1j * step, *index)
        return moved.real, np.where(np.isfinite(moved.real), moved.imag / step, 0)

    @property
    def scores(self) -> Array:
        """Scores after scale, softcap, bias and mask (K, B, H, L, S)."""
        return self._scored[0]

    @cached_property
    def _weighing(self) -> NormalizerFormula:
        found = NORMALIZER_FORMULAS.get(type(self.statement.normalizer))
        return OwnWeighing() if found is None else found

    @cached_property
    def weights(self) -> Array:
        """Weights (K, B, H, L, S), before dropout."""
        return self._weighing.weigh(self.scores, self.statement.normalizer)

    @cached_property
    def line(self) -> Line | None:
        """The lines of order 1."""
        s = self.statement
        if not s.ridge:
            return None
        query, key, _ = self._rows
        return Line(stated(s.score), [s.array(t) for t in s.score.tensors()], query, key, self.weights, s.ridge)

    @property
    def effective(self) -> Array:
        """The factors of the values (K, B, H, L, S): the weights, or those of lines."""
        return self.weights if self.line is None else self.line.weights

    @cached_property
    def output(self) -> WithAmplitude:
        """Σ weights · values (K, B, H, L, V). Values that are not finite count as 0 where their weight is 0."""
        value, keep = self._rows[2], self._keep
        if self.line is not None:
            return WithAmplitude(self.effective @ value, abs(self.effective) @ np.abs(value))
        shaken = self.weights + self.shaken(self.statement.query.dtype, by_lse=False)
        return WithAmplitude((keep * self.weights) @ value, (keep * shaken) @ np.abs(value))

    @property
    def _keep(self) -> Array:
        s = self.statement
        return np.ones((), s.wide) if s.keep is None else s.keep.astype(s.wide)

    def shaken(self, dtype: torch.dtype, by_lse: bool) -> Array:
        """Return the effect on each weight (K, B, H, L, S) of rounding the statistic of its row.

        The statistic is a number that must be held in the dtype of calculation: a threshold always, a log-sum-exp
        where there is nothing else to make the weights from. In units of one rounding of ``dtype``.
        """
        s = self.statement
        moved = self._weighing.shaken(self.weights, s.normalizer)
        if by_lse and isinstance(s.normalizer, (Softmax, SoftmaxSink)):
            moved = moved + self.weights * abs(np.where(np.isfinite(self.lse), self.lse, 0))[..., None]
        calculated = torch.promote_types(s.query.dtype, torch.float32)
        return moved * (torch.finfo(calculated).eps / torch.finfo(dtype).eps)

    def _lost(self, dtype: torch.dtype) -> Array:
        """Return the effect on each weight (K, B, H, L, S) of rounding biased scores, like :meth:`shaken`.

        Beside a bias of −1e9 nothing is left of a score in float32: weights become even, and the gradient of a key
        near a kernel's rim, where a small weight meets a steep slope, is that of another weight, whatever the formula.
        """
        s = self.statement
        if s.bias is None:
            return np.zeros_like(self.weights)
        calculated = torch.promote_types(s.query.dtype, torch.float32)
        largest = torch.finfo(calculated).max
        held = torch.from_numpy(np.minimum(self.scores, largest).astype(np.float64)).to(calculated)
        weights = self._weighing.weigh(held.double().numpy().astype(s.wide), s.normalizer)
        return abs(weights - self.weights) / torch.finfo(dtype).eps

    @cached_property
    def lse(self) -> Array:
        """Log of the sum of the exponentials of each row's scores (K, B, H, L)."""
        peak = self.scores.max(-1, initial=-np.inf)
        safe = np.where(peak == -np.inf, 0, peak)
        with np.errstate(divide="ignore"):
            return np.log(np.exp(self.scores - safe[..., None]).sum(-1)) + safe

    def gradients(self, grad: Array) -> dict[str, WithAmplitude]:
        """Return the gradients of ``(output · grad).sum()``, named as in :meth:`CaseCall.leaves`; grad (B, H, L, V)."""
        s, value, keep = self.statement, self._rows[2], self._keep
        grad = np.broadcast_to(grad.astype(s.wide), (*self.weights.shape[:-1], value.shape[-1]))
        d_weights, a_weights = (
            keep * (g @ np.swapaxes(v, -1, -2)) for g, v in ((grad, value), (abs(grad), abs(value)))
        )
        through_places: dict[str, Pair] = {}
        if self.line is not None:
            (d_weights, a_weights), through_places = self.line.pull((d_weights, a_weights))
        shaken = self.shaken(s.query.dtype, self.keeps_lse)
        d_scores = self._weighing.pull(self.scores, self.weights, d_weights, s.normalizer)
        moved = shaken + self._lost(s.query.dtype)
        bent = self._weighing.bend(s.normalizer) * moved / np.where(self.weights > 0, self.weights, 1)
        a_scores = (1 + abs(bent)) * self._weighing.amplitude(self.weights, a_weights, s.normalizer)
        slope = self._scored[1]
        found = self.comparison.pull(d_scores * slope, a_scores * abs(slope))
        for name, pair in through_places.items():
            found[name] = (found[name][0] + pair[0], found[name][1] + pair[1])
        parts = ((keep * self.effective, grad), (keep * (abs(self.effective) + shaken), abs(grad)))
        found["value"] = tuple(np.swapaxes(w, -1, -2) @ g for w, g in parts)
        for name, shape in (("query", s.query.shape), ("key", s.key.shape), ("value", s.value.shape)):
            found[name] = tuple(self._ungrouped(part, shape) for part in found[name])  # type: ignore[assignment]
        found |= self._bias_gradients(np.where(s.visible, d_scores, 0), np.where(s.visible, a_scores, 0))
        found |= self._normalizer_gradients(d_weights, a_weights, shaken)
        return {name: WithAmplitude(*parts) for name, parts in found.items()}

    def _normalizer_gradients(self, d_weights: Array, a_weights: Array, shaken: Array) -> dict[str, Any]:
        """Return the gradients with respect to the normalizer's tensors."""
        s = self.statement
        given = (self.weights, d_weights), (self.weights + shaken, a_weights)
        pulled, sizes = (self._weighing.pull_tensors(self.scores, *each, s.normalizer) for each in given)
        names = [name for name, _ in named("normalizer", s.normalizer)]
        return {name: (value, abs(size)) for name, value, size in zip(names, pulled, sizes) if name}

    def lse_gradients(self, grad: Array) -> dict[str, WithAmplitude]:
        """Return the gradients of ``(lse · grad).sum()`` over rows with a visible key, like :meth:`gradients`."""
        s = self.statement
        safe = np.where(np.isfinite(self.lse), self.lse, np.inf)
        weights = np.exp(self.scores - safe[..., None])  # softmax, whatever the normalizer
        d_scores, a_scores = (
            weights * grad[..., None],
            weights * (1 + abs(safe.clip(-1e6, 1e6)))[..., None] * abs(grad)[..., None],
        )
        slope = self._scored[1]
        found = self.comparison.pull(d_scores * slope, a_scores * abs(slope))
        for name, shape in (("query", s.query.shape), ("key", s.key.shape)):
            found[name] = tuple(self._ungrouped(part, shape) for part in found[name])  # type: ignore[assignment]
        found |= self._bias_gradients(np.where(s.visible, d_scores, 0), np.where(s.visible, a_scores, 0))
        for name, tensor in named("normalizer", s.normalizer):
            if name:
                found[name] = (np.zeros((len(self.scores), *tensor.shape)),) * 2
        return {name: WithAmplitude(*parts) for name, parts in found.items()}

    def _ungrouped(self, rows: Array, shape: torch.Size) -> Array:
        """Sum (K, B, H, n, width) over the heads of each group and over broadcast dimensions."""
        K, B, H, length, width = rows.shape
        heads = shape[-3] if len(shape) > 3 else 1
        if heads:
            rows = rows.reshape(K, B, heads, H // heads, length, width).sum(3)
        return self.statement.summed(rows, tuple(shape[1:]))

    def _bias_gradients(self, d_scores: Array, a_scores: Array) -> dict[str, tuple[Array, Array]]:
        """Return the gradients with respect to the mask's tensors, through the derivative of its bias."""
        mask = self.statement.mask
        if mask is None or not mask.has_bias:
            return {}
        found = {}
        for i, (name, tensor) in enumerate(named("mask", mask)):
            if name:
                jacobian = bias_jacobian(mask, i, self.statement.extent)  # (B · H · L · S, numel)
                pulled = [
                    d.reshape(d.shape[0], len(j)) @ j for d, j in ((d_scores, jacobian), (a_scores, abs(jacobian)))
                ]
                found[name] = tuple(p.reshape(len(p), *tensor.shape) for p in pulled)
        return found  # type: ignore[return-value]
