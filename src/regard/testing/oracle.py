"""The oracle: attention in NumPy, in a precision wider than the call's, with gradients by complex steps.

The oracle shares no code with the engines: scores are the written-out :data:`~regard.testing.formulas.FORMULAS`,
weights those of :mod:`~regard.testing.normalizer_formulas`, and masks are asked for each pair. It calculates in 80-bit
numbers where the platform has them and the call is in float64, and in float64 for narrower calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from regard.normalizers import Softmax
from regard.scores import ScoreMod
from regard.testing import compare
from regard.testing.case import named
from regard.testing.fallback_oracle import OwnWeighing, own_modification
from regard.testing.formulas import Array
from regard.testing.normalizer_formulas import WEIGHINGS, Weighing
from regard.testing.samples import MODS
from regard.testing.statement import Statement, indices


class Sized(NamedTuple):
    """A result and its amplitude: the sum of the absolute values of the terms that the result is a sum of."""

    value: Array
    amplitude: Array


@dataclass(frozen=True)
class Oracle:
    """The right answers to a statement; each is calculated when first asked for.

    All arrays have the neighbours K in front.

    Attributes
    ----------
    statement : Statement
    keeps_lse : bool
        Whether gradients are made from the log-sum-exp of each row alone, which its rounding then belongs to.
    """

    statement: Statement
    keeps_lse: bool = False

    @cached_property
    def _rows(self) -> tuple[Array, Array, Array]:
        """Return query (K, B, H, L, E), and key and value repeated for each query head."""
        s = self.statement
        rows = [s.canonical(s.array(t)) for t in (s.query, s.key, s.value)]
        return tuple(np.repeat(r, s.heads // r.shape[2], 2) if r.shape[2] else r for r in rows)  # type: ignore[return-value]

    @cached_property
    def comparison(self) -> compare.Comparison:
        """The scores of queries and keys, and their derivative."""
        query, key, _ = self._rows
        s = self.statement
        return compare.of(s.score, query, key, [s.array(t) for t in s.score.tensors()])

    @cached_property
    def _scored(self) -> tuple[Array, Array]:
        """Return the final scores (K, B, H, L, S), and their derivative to what the comparison yields."""
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
        hidden = excluded | ~s.visible
        return np.where(hidden, -np.inf, scores), np.where(hidden, 0, slope)

    def _modified(self, scores: Array) -> tuple[Array, Array]:
        """Return what a score_mod makes of scaled scores, and its derivative."""
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
    def _weighing(self) -> Weighing:
        found = WEIGHINGS.get(type(self.statement.normalizer))
        return OwnWeighing() if found is None else found

    @cached_property
    def weights(self) -> Array:
        """Weights (K, B, H, L, S), before dropout."""
        return self._weighing.weigh(self.scores, self.statement.normalizer)

    @cached_property
    def output(self) -> Sized:
        """Σ weights · values (K, B, H, L, V). What is not finite and weighs nothing counts nothing."""
        value, keep = self._rows[2], self._keep
        shaken = self.weights + self.shaken(self.statement.query.dtype, by_lse=False)
        return Sized((keep * self.weights) @ value, (keep * shaken) @ np.abs(value))

    @property
    def _keep(self) -> Array:
        s = self.statement
        return np.ones((), s.wide) if s.keep is None else s.keep.astype(s.wide)

    def shaken(self, dtype: torch.dtype, by_lse: bool) -> Array:
        """Return by how much a rounding of its row's statistic moves each weight (K, B, H, L, S).

        The statistic is a number that must be held in the dtype of calculation: a threshold always, a log-sum-exp
        where there is nothing else to make the weights from. In units of one rounding of ``dtype``.
        """
        s = self.statement
        moved = self._weighing.shaken(self.weights, s.normalizer)
        if by_lse and isinstance(s.normalizer, Softmax):
            moved = moved + self.weights * abs(np.where(np.isfinite(self.lse), self.lse, 0))[..., None]
        calculated = torch.promote_types(s.query.dtype, torch.float32)
        return moved * (torch.finfo(calculated).eps / torch.finfo(dtype).eps)

    def _lost(self, dtype: torch.dtype) -> Array:
        """Return by how much a rounding of biased scores moves each weight (K, B, H, L, S), as :meth:`shaken` does.

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

    def gradients(self, grad: Array) -> dict[str, Sized]:
        """Return the gradients of ``(output · grad).sum()``, by the names of :meth:`Call.leaves`; grad (B, H, L, V)."""
        s, value, keep = self.statement, self._rows[2], self._keep
        grad = np.broadcast_to(grad.astype(s.wide), (*self.weights.shape[:-1], value.shape[-1]))
        d_weights, a_weights = (
            keep * (g @ np.swapaxes(v, -1, -2)) for g, v in ((grad, value), (abs(grad), abs(value)))
        )
        shaken = self.shaken(s.query.dtype, self.keeps_lse)
        d_scores = self._weighing.pull(self.scores, self.weights, d_weights, s.normalizer)
        moved = shaken + self._lost(s.query.dtype)
        bent = self._weighing.bend(s.normalizer) * moved / np.where(self.weights > 0, self.weights, 1)
        a_scores = (1 + abs(bent)) * self._weighing.amplitude(self.weights, a_weights, s.normalizer)
        slope = self._scored[1]
        found = self.comparison.pull(d_scores * slope, a_scores * abs(slope))
        parts = ((keep * self.weights, grad), (keep * (self.weights + shaken), abs(grad)))
        found["value"] = tuple(np.swapaxes(w, -1, -2) @ g for w, g in parts)
        for name, shape in (("query", s.query.shape), ("key", s.key.shape), ("value", s.value.shape)):
            found[name] = tuple(self._ungrouped(part, shape) for part in found[name])  # type: ignore[assignment]
        found |= self._bias_gradients(np.where(s.visible, d_scores, 0), np.where(s.visible, a_scores, 0))
        return {name: Sized(*parts) for name, parts in found.items()}

    def lse_gradients(self, grad: Array) -> dict[str, Sized]:
        """Return the gradients of ``(lse · grad).sum()`` over rows that see something, as :meth:`gradients` does."""
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
        return {name: Sized(*parts) for name, parts in found.items()}

    def _ungrouped(self, rows: Array, shape: torch.Size) -> Array:
        """Sum (K, B, H, n, width) over the heads of each group and over broadcast dimensions."""
        K, B, H, length, width = rows.shape
        heads = shape[-3] if len(shape) > 3 else 1
        if heads:
            rows = rows.reshape(K, B, heads, H // heads, length, width).sum(3)
        return self.statement.summed(rows, tuple(shape[1:]))

    def _bias_gradients(self, d_scores: Array, a_scores: Array) -> dict[str, tuple[Array, Array]]:
        """Return the gradients to the mask's tensors, through the derivative of its bias."""
        mask = self.statement.mask
        if mask is None or not mask.has_bias:
            return {}
        found = {}
        for i, (name, tensor) in enumerate(named("mask", mask)):
            if name:
                jacobian = compare.bias_jacobian(mask, i, self.statement.extent)  # (B · H · L · S, numel)
                pulled = [
                    d.reshape(d.shape[0], len(j)) @ j for d, j in ((d_scores, jacobian), (a_scores, abs(jacobian)))
                ]
                found[name] = tuple(p.reshape(len(p), *tensor.shape) for p in pulled)
        return found  # type: ignore[return-value]
