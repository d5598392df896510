"""Check the results of an engine against the oracle, within the error budget."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.engines import Engine
from regard.normalizers.base import Normalizer
from regard.testing.budget import Budget, array, neighbours, one_rounding, overflowed
from regard.testing.case import CaseCall, gradients, has_graph, named
from regard.testing.formulas import NORMALIZER_FORMULAS, Array, NormalizerFormula, alpha_of
from regard.testing.oracle import Oracle, WithAmplitude, has_formula
from regard.testing.statement import NumpyCall, indices

# The plain eager formula in the dtype of the call, whose error sets the budget ----------------------------------------


@dataclass(frozen=True)
class Eager:
    """Score, scale, softcap, mask, normalize, read, each written in one line of torch, nothing upcast.

    It runs on a statement's problems at once, the neighbours K stacked into the batch.
    """

    statement: NumpyCall

    @cached_property
    def leaves(self) -> dict[str, Tensor]:
        """Return the tensors to differentiate: the inputs (K, ...) and the tensors of the parts."""
        s = self.statement
        found = {name: getattr(s, name).detach().clone().requires_grad_() for name in ("query", "key", "value")}
        for what, part in (("score", s.score), ("mask", s.mask), ("normalizer", s.normalizer)):
            found |= {name: t.detach().clone().requires_grad_() for name, t in named(what, part) if name}
        return found

    def _rows(self, name: str) -> Tensor:
        s = self.statement
        rows: Tensor = s.canonical(self.leaves[name]).flatten(0, 1)
        return rows.repeat_interleave(s.heads // rows.shape[1], 1) if rows.shape[1] else rows

    def _part(self, what: str) -> list[Tensor]:
        s = self.statement
        part = {"score": s.score, "mask": s.mask, "normalizer": s.normalizer}[what]
        tensors = [self.leaves.get(name, t) for name, t in named(what, part)]
        # A mask wider than 16-bit inputs is added in float32, as in torch.
        wide = torch.promote_types(s.query.dtype, torch.float32) if what == "mask" else s.query.dtype
        dtypes = (s.query.dtype if t.dtype == s.query.dtype else wide for t in tensors)
        return [t.to(dtype) if t.is_floating_point() else t for t, dtype in zip(tensors, dtypes)]

    @cached_property
    def scores(self) -> Tensor:
        """Scores after scale, softcap, bias and mask (K·B, H, L, S)."""
        s = self.statement
        score = s.score.with_tensors(self._part("score"))
        b, h, q_idx, kv_idx = (i.to(s.query.device) for i in indices(s.extent))
        with torch.enable_grad():
            scores = score.compare(*score.project(self._rows("query"), self._rows("key")))
            excluded = scores == -torch.inf
            # Torch multiplies narrower dtypes by a Python number in float32, with one rounding.
            scale = torch.from_numpy(s.scales).to(scores.device, torch.promote_types(s.query.dtype, torch.float32))
            scale = scale.repeat_interleave(s.extent.B).view(-1, 1, 1, 1)
            scores = (torch.where(excluded, 0.0, scores) * scale).to(s.query.dtype)
            scores = score.modify(scores, b.repeat(s.query.shape[0], 1, 1, 1), h, q_idx, kv_idx).to(s.query.dtype)
            excluded = excluded | (scores == -torch.inf)
            if s.softcap is not None:
                scores = s.softcap * torch.tanh(scores / s.softcap)
            if s.mask is not None and s.mask.has_bias:
                bias = s.mask.with_tensors(self._part("mask")).bias(b, h, q_idx, kv_idx)
                assert bias is not None
                scores = scores + bias.expand(s.visible.shape).repeat(s.query.shape[0], 1, 1, 1)
            if s.shifts is not None:
                scores = scores + torch.from_numpy(s.shifts).to(scores).expand(-1, s.extent.B, -1, -1, -1).flatten(0, 1)
            visible = torch.from_numpy(s.visible).to(scores.device).repeat(s.query.shape[0], 1, 1, 1)
            return torch.where(visible & ~excluded, scores, -torch.inf)

    @cached_property
    def weights(self) -> Tensor:
        """Weights (K·B, H, L, S)."""
        normalizer = self.statement.normalizer
        weighing = NORMALIZER_FORMULAS.get(type(normalizer))
        with torch.enable_grad():
            if weighing is not None and weighing.threshold is not None:
                return _Thresholded.apply(self.scores, normalizer, weighing)
            return normalizer.with_tensors(self._part("normalizer")).weights(self.scores)

    @cached_property
    def effective(self) -> Tensor:
        """The factors of the values (K·B, H, L, S): the weights, or those of lines."""
        s = self.statement
        if not s.ridge or not s.query.shape[-1] or not s.key.shape[-2]:
            return self.weights
        with torch.enable_grad():
            wide = torch.promote_types(s.query.dtype, torch.float32)  # torch solves nothing in 16 bits
            query, key, weights = (t.to(wide) for t in (*self._places(), self.weights))
            D, mean = query.shape[-1], weights @ key
            apart = key.unsqueeze(-3) - mean.unsqueeze(-2)
            moments = torch.einsum("...ls,...lsa,...lsb->...lab", weights, apart, apart)
            square = (weights * (key.unsqueeze(-3) - query.unsqueeze(-2)).square().sum(-1)).sum(-1)[..., None, None]
            square = torch.where(square == 0, 1.0, square)
            slope = torch.linalg.solve(moments + s.ridge / D * square * torch.eye(D, dtype=wide), query - mean)
            return weights * (1 + (apart @ slope.unsqueeze(-1)).squeeze(-1))

    def _places(self) -> tuple[Tensor, Tensor]:
        score = self.statement.score.with_tensors(self._part("score"))
        places = score.positions(self._rows("query"), self._rows("key"))
        assert places is not None
        return places

    @cached_property
    def output(self) -> Tensor:
        """Σ weights · values (K·B, H, L, V)."""
        s = self.statement
        with torch.enable_grad():
            weights = self.effective
            if s.keep is not None:
                keep = torch.from_numpy(s.keep.astype("float64")).to(weights)
                weights = weights * keep.repeat(s.query.shape[0], 1, 1, 1)
            value = self._rows("value")
            return weights.to(value.dtype) @ value

    def gradients(self, grad: Tensor) -> dict[str, Tensor]:
        """Return the gradients of ``(output · grad).sum()`` of each problem, (K, ...); grad (B, H, L, V)."""
        K = self.statement.query.shape[0]
        grads = grad.to(self.output.dtype).repeat(K, 1, 1, 1)
        rows = {name: self.leaves[name] for name in ("query", "key", "value")}
        found = _autograd(self.output, rows, grads)
        shared = {name: leaf for name, leaf in self.leaves.items() if name not in rows}
        if shared:  # one problem at a time for tensors that the problems share
            each = []
            for k in range(K):
                share = torch.zeros_like(grads).unflatten(0, (K, -1))
                share[k] = grad
                each.append(_autograd(self.output, shared, share.flatten(0, 1)))
            found |= {name: torch.stack([one[name] for one in each]) for name in shared}
        return found

    def lse_gradients(self, grad: Tensor) -> dict[str, Tensor]:
        """Return the gradients of ``(lse · grad).sum()`` over rows that see something; grad (B, H, L)."""
        K = self.statement.query.shape[0]
        rows = (self.scores > -torch.inf).any(-1)
        with torch.enable_grad():
            lse = torch.logsumexp(torch.where(rows.unsqueeze(-1), self.scores, 0.0), -1)
        if not lse.requires_grad:
            lse = torch.zeros_like(lse, requires_grad=True)
        grads = torch.where(rows, grad.to(lse.dtype).repeat(K, 1, 1), 0.0)
        found = _autograd(lse, {name: self.leaves[name] for name in ("query", "key")}, grads)
        for name in (name for name in self.leaves if name not in ("query", "key", "value")):
            each = []
            for k in range(K):
                share = torch.zeros_like(grads).unflatten(0, (K, -1))
                share[k] = grads.unflatten(0, (K, -1))[k]
                each.append(_autograd(lse, {name: self.leaves[name]}, share.flatten(0, 1))[name])
            found[name] = torch.stack(each)
        return found


class _Thresholded(torch.autograd.Function):
    """``[(α−1)(s − t)]₊^{1/(α−1)}`` with the best threshold that the dtype can hold.

    The normalizer's own search for it is what is judged: its error is no measure of what is fair.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, normalizer: Normalizer, weighing: NormalizerFormula) -> Tensor:
        assert weighing.threshold is not None
        wide = scores.detach().cpu().double().numpy().astype(np.longdouble)
        size = weighing.threshold(weighing.weigh(wide, normalizer), normalizer)  # −t, relative to the maximum
        t = -torch.from_numpy(size.astype(np.float64)).to(scores)
        peak = scores.amax(-1, keepdim=True) if scores.shape[-1] else t
        alpha = alpha_of(normalizer)
        base = (alpha - 1) * (scores - torch.where(peak == -torch.inf, 0.0, peak) - t)
        weights = torch.where(base > 0, base.clamp(min=0) ** (1 / (alpha - 1)), 0.0)
        ctx.alpha = alpha
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weights,) = ctx.saved_tensors
        slope = torch.where(weights > 0, weights ** (2 - ctx.alpha), 0.0)
        total = slope.sum(-1, keepdim=True)
        mean = (slope * grad).sum(-1, keepdim=True) / torch.where(total == 0, 1, total)
        return slope * (grad - mean), None, None


def _autograd(output: Tensor, leaves: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(output, list(leaves.values()), grad, retain_graph=True, allow_unused=True)
    return {name: torch.zeros_like(t) if g is None else g for (name, t), g in zip(leaves.items(), found)}


# A trial of one call: the correct answer and its error budget ---------------------------------------------------------


#: How many perturbed copies of a problem serve to find rows that depend on rounding.
PERTURBATIONS = 4


@dataclass(frozen=True)
class Trial:
    """The oracle and the budget of one call.

    Attributes
    ----------
    call : CaseCall
    keep : array (B, H, L, S), optional
        Factors for the weights, as from dropout.
    keeps_lse : bool
        Whether the engine's backward pass keeps only the log-sum-exp of a row; see :func:`keeps_lse`.
    """

    call: CaseCall
    keep: Array | None = None
    keeps_lse: bool = False

    @cached_property
    def statement(self) -> NumpyCall:
        """The call and its neighbours in NumPy."""
        extent = self.call.problem().extent
        count = neighbours(extent.B * extent.H * extent.L * extent.S)
        return NumpyCall.of(self.call, count).but(keep=self.keep)

    @cached_property
    def oracle(self) -> Oracle:
        """The correct answer."""
        return Oracle(self.statement, self.keeps_lse)

    @cached_property
    def eager(self) -> Eager:
        """The answer of the plain formula."""
        return Eager(self.statement)

    @cached_property
    def undecided(self) -> Array:
        """Rows (B, H, L) whose keys depend on rounding: a tie for the maximum, or a key at the edge of a kernel.

        They are not checked: weights are discontinuous there, and both sides are correct.
        """
        s = self.statement
        weighing = NORMALIZER_FORMULAS.get(type(s.normalizer))
        jumps = weighing is not None and weighing.sparse
        if not jumps and not s.score.can_return_neg_inf:
            return np.zeros((s.extent.B, s.extent.H, s.extent.L), dtype=bool)
        oracle, found = self.oracle, np.zeros(self.oracle.scores.shape[:-1], dtype=bool)
        generator = np.random.default_rng(0)
        eps = torch.finfo(torch.promote_types(s.query.dtype, torch.float32)).eps * (s.query.shape[-1] + 4)
        for i in range(PERTURBATIONS):
            moved = Oracle(s.but(query=_perturbed(s.query, eps, generator), key=_perturbed(s.key, eps, generator)))
            found |= ((moved.scores == -np.inf) != (oracle.scores == -np.inf)).any(-1)
            if jumps and weighing is not None:
                against = eps * _against(oracle.weights, i, generator)
                for scores in (moved.scores, oracle.scores):  # only the latter keep exact ties, such as equal keys
                    shaken = scores + against * (1 + _finite(scores))
                    weights = weighing.weigh(shaken.astype(oracle.scores.dtype), s.normalizer)
                    found |= ((weights > 0) != (oracle.weights > 0)).any(-1)
        undecided: Array = np.asarray(found.any(0))
        return undecided

    def check_output(self, output: Tensor, what: str = "output") -> float:
        """Raise AssertionError unless an output (..., H, L, V) is within budget."""
        decided = ~self.undecided[..., None]
        right = self.oracle.output
        K = right.value.shape[0]
        eager = self.eager.output.detach().unflatten(0, (K, -1)).double() * torch.from_numpy(decided)
        budget = Budget.of(WithAmplitude(right.value * decided, right.amplitude * decided), eager, output.dtype)
        return budget.check(what, self.canonical(output).cpu().double() * torch.from_numpy(decided))

    def upstream(self, like: Tensor) -> Tensor:
        """Return a random gradient of the output, with 0 in undecided rows."""
        generator = torch.Generator().manual_seed(1)
        grad = torch.randn(like.shape, generator=generator)
        decided = torch.from_numpy(~self.undecided).unsqueeze(-1).expand(self.canonical(grad).shape).reshape(like.shape)
        return (grad * decided).to(like.device, like.dtype)

    def check_gradients(self, found: dict[str, Tensor], upstream: Tensor) -> float:
        """Raise AssertionError unless the gradients, by the names of :meth:`CaseCall.leaves`, are within budget."""
        grad = self.canonical(upstream)
        right = self.oracle.gradients(array(grad, self.statement.wide))
        eager = self.eager.gradients(grad.cpu())
        worst = 0.0
        for name, gradient in found.items():
            budget = Budget.of(right[name], eager[name], gradient.dtype)
            worst = max(worst, budget.check(f"gradient to {name}", gradient))
        return worst

    def check_finite(self, found: dict[str, Tensor], upstream: Tensor, what: str) -> None:
        """Raise AssertionError if a gradient is NaN, or infinite although the dtype can represent the correct value.

        α-entmax with α > 2 has unbounded slopes at small weights: 6⁶ at a weight of ⅙ for α = 8. Such gradients exceed
        float16, and infinity is then correct.
        """
        if all(gradient.isfinite().all() for gradient in found.values()):
            return
        right = self.oracle.gradients(array(self.canonical(upstream), self.statement.wide))
        for name, gradient in found.items():
            value, amplitude = (part[0] for part in right[name])
            got = array(gradient, value.dtype).reshape(value.shape)
            limit = torch.finfo(gradient.dtype).max - one_rounding(amplitude, gradient.dtype)
            if not (np.isfinite(got) | overflowed(value, got, limit)).all():
                raise AssertionError(f"{what} the gradient to {name} not finite")

    def check_call(self, output: Tensor, leaves: dict[str, Tensor]) -> float:
        """Raise AssertionError unless an output and its gradients to the leaves are within budget."""
        worst = self.check_output(output)
        if not has_graph(output, leaves):
            return worst
        upstream = self.upstream(output)
        return max(worst, self.check_gradients(gradients(output, leaves, upstream), upstream))

    def canonical(self, rows: Tensor) -> Tensor:
        """Return (..., H, L, V) or (L, V) rows as (B, H, L, V)."""
        extent = self.statement.extent
        return rows.reshape(extent.B, extent.H, *rows.shape[-2:])


def keeps_lse(engine: Engine) -> bool:
    """Return whether an engine's backward pass keeps only the log-sum-exp of a row.

    Fused kernels do. A weight is then exp(score − lse), and rounding the log-sum-exp changes it by the same relative
    amount, even if one key has all the weight and eager is exact. For an engine with ``keeps_lse = True``, this
    rounding is part of the gradient budget.
    """
    return bool(getattr(engine, "keeps_lse", engine.name == "sdpa"))


def is_judged(call: CaseCall) -> bool:
    """Return whether a call has an oracle: it is not random, and its score has a formula or a wider dtype."""
    if call.normalizer.random:
        return False
    stated = has_formula(call.score) and type(call.normalizer) in NORMALIZER_FORMULAS
    return stated or call.query.dtype != torch.float64


def _finite(scores: Array) -> Array:
    return np.abs(np.where(scores == -np.inf, 0, scores))


def _against(weights: Array, i: int, generator: np.random.Generator) -> Array:
    """Return score changes that may change the support: against all keys with weight, against the least, or random."""
    if i == 0:
        return np.where(weights > 0, -1.0, 1.0)
    if i == 1:
        least = np.where(weights > 0, weights, np.inf).min(-1, keepdims=True, initial=np.inf)
        return np.where(weights <= least, -1.0, 1.0)
    return generator.uniform(-1, 1, weights.shape)


def _perturbed(rows: Tensor, size: float, generator: np.random.Generator) -> Tensor:
    noise = torch.from_numpy(generator.uniform(-size, size, tuple(rows.shape)))
    return rows.detach().double().cpu() * (1 + noise)
