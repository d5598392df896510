"""A trial of one call: what any engine should answer, and how far off it may be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from regard.engines import Engine
from regard.testing import compare
from regard.testing.budget import Budget, array, neighbours, one_rounding, overflowed
from regard.testing.case import Call, gradients, has_graph
from regard.testing.eager import Eager
from regard.testing.formulas import Array
from regard.testing.normalizer_formulas import WEIGHINGS
from regard.testing.oracle import Oracle, Sized
from regard.testing.statement import Statement

#: Copies of a problem, off by rounding errors, by which it is told which rows hang on them.
WOBBLES = 4


@dataclass(frozen=True)
class Trial:
    """The oracle and the budget of one call.

    Attributes
    ----------
    call : Call
    keep : array (B, H, L, S), optional
        What each weight is multiplied by before the values are read, as dropout does.
    keeps_lse : bool
        Whether the engine's backward pass knows a row's statistic through its log-sum-exp alone; see :func:`keeps_lse`.
    """

    call: Call
    keep: Array | None = None
    keeps_lse: bool = False

    @cached_property
    def statement(self) -> Statement:
        """The call and its neighbours in NumPy."""
        extent = self.call.problem().extent
        count = neighbours(extent.B * extent.H * extent.L * extent.S)
        return Statement.of(self.call, count).but(keep=self.keep)

    @cached_property
    def oracle(self) -> Oracle:
        """The right answer."""
        return Oracle(self.statement, self.keeps_lse)

    @cached_property
    def eager(self) -> Eager:
        """The answer of the plain formula."""
        return Eager(self.statement)

    @cached_property
    def undecided(self) -> Array:
        """Rows (B, H, L) whose choice of keys hangs on rounding: a tie for the maximum, a key at a kernel's rim.

        Nothing is said of them: weights jump there, and either side is right.
        """
        s = self.statement
        weighing = WEIGHINGS.get(type(s.normalizer))
        jumps = weighing is not None and weighing.sparse
        if not jumps and not s.score.excludes:
            return np.zeros((s.extent.B, s.extent.H, s.extent.L), dtype=bool)
        oracle, found = self.oracle, np.zeros(self.oracle.scores.shape[:-1], dtype=bool)
        generator = np.random.default_rng(0)
        eps = torch.finfo(torch.promote_types(s.query.dtype, torch.float32)).eps * (s.query.shape[-1] + 4)
        for i in range(WOBBLES):
            moved = Oracle(s.but(query=_wobbled(s.query, eps, generator), key=_wobbled(s.key, eps, generator)))
            found |= ((moved.scores == -np.inf) != (oracle.scores == -np.inf)).any(-1)
            if jumps and weighing is not None:
                against = eps * _against(oracle.weights, i, generator)
                for scores in (moved.scores, oracle.scores):  # the latter have exact ties, as those of equal keys
                    shaken = scores + against * (1 + _finite(scores))
                    weights = weighing.weigh(shaken.astype(oracle.scores.dtype), s.normalizer)
                    found |= ((weights > 0) != (oracle.weights > 0)).any(-1)
        hangs: Array = np.asarray(found.any(0))
        return hangs

    def check_output(self, output: Tensor, what: str = "output") -> float:
        """Raise AssertionError unless an output (..., H, L, V) is within budget."""
        decided = ~self.undecided[..., None]
        right = self.oracle.output
        K = right.value.shape[0]
        eager = self.eager.output.detach().unflatten(0, (K, -1)).double() * torch.from_numpy(decided)
        budget = Budget.of(Sized(right.value * decided, right.amplitude * decided), eager, output.dtype)
        return budget.check(what, self.canonical(output).double() * torch.from_numpy(decided))

    def upstream(self, like: Tensor) -> Tensor:
        """Return a gradient to the output, random, and 0 in rows that are undecided."""
        generator = torch.Generator().manual_seed(1)
        grad = torch.randn(like.shape, generator=generator)
        decided = torch.from_numpy(~self.undecided).unsqueeze(-1).expand(self.canonical(grad).shape).reshape(like.shape)
        return (grad * decided).to(like.device, like.dtype)

    def check_gradients(self, found: dict[str, Tensor], upstream: Tensor) -> float:
        """Raise AssertionError unless the gradients, by the names of :meth:`Call.leaves`, are within budget."""
        grad = self.canonical(upstream)
        right = self.oracle.gradients(array(grad, self.statement.wide))
        eager = self.eager.gradients(grad.cpu())
        worst = 0.0
        for name, gradient in found.items():
            budget = Budget.of(right[name], eager[name], gradient.dtype)
            worst = max(worst, budget.check(f"gradient to {name}", gradient))
        return worst

    def check_finite(self, found: dict[str, Tensor], upstream: Tensor, what: str) -> None:
        """Raise AssertionError if a gradient is NaN, or infinite where its dtype has a number for the right one.

        α-entmax for α > 2 gives small weights a slope beyond all bounds: weights of ⅙ have one of 6⁶ for α = 8. Such
        gradients exceed float16, and infinity is then the right answer.
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
    """Return whether an engine's backward pass knows a row's statistic through its log-sum-exp alone.

    Fused kernels keep nothing else of a row. A weight is then exp(score − lse), and one rounding of the log-sum-exp
    changes it by so much, relatively, also where one key has all the weight and eager errs by nothing. An engine
    that says so (``keeps_lse = True``) has this rounding added to the budget of its gradients.
    """
    return bool(getattr(engine, "keeps_lse", engine.name == "sdpa"))


def is_judged(call: Call) -> bool:
    """Return whether a call has an oracle: nothing in it is drawn, and its score is stated in a wider precision."""
    if call.normalizer.random:
        return False
    stated = compare.has_formula(call.score) and type(call.normalizer) in WEIGHINGS
    return stated or call.query.dtype != torch.float64


def _finite(scores: Array) -> Array:
    return np.abs(np.where(scores == -np.inf, 0, scores))


def _against(weights: Array, i: int, generator: np.random.Generator) -> Array:
    """Return changes of scores that are bent on changing who has weight: against all that have, against the least."""
    if i == 0:
        return np.where(weights > 0, -1.0, 1.0)
    if i == 1:
        least = np.where(weights > 0, weights, np.inf).min(-1, keepdims=True, initial=np.inf)
        return np.where(weights <= least, -1.0, 1.0)
    return generator.uniform(-1, 1, weights.shape)


def _wobbled(rows: Tensor, size: float, generator: np.random.Generator) -> Tensor:
    noise = torch.from_numpy(generator.uniform(-size, size, tuple(rows.shape)))
    return rows.detach().double().cpu() * (1 + noise)
