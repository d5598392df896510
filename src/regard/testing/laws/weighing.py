"""Laws 3, 4 and 7: weights that sum to 1, permutations, and scores as large as can be."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from regard import masks
from regard.engines import Engine
from regard.testing.budget import Budget, array
from regard.testing.case import Call, Case
from regard.testing.laws.accuracy import judged
from regard.testing.laws.base import law, require
from regard.testing.oracle import Oracle, Sized
from regard.testing.statement import Statement
from regard.testing.trial import Trial


def _convex(case: Case) -> Case | None:
    case_or_none = judged(case)
    if case_or_none is None or not Call.of(case_or_none).normalizer.convex:
        return None
    return case_or_none


@law("convexity", "Weights are ≥ 0 and sum to 1; outputs lie in the hull of visible values.", _convex)
def convexity(case: Case, engine: Engine) -> None:
    """Law 3."""
    call = Call.of(case)
    output, aux = call.look(engine, weights=True)
    assert aux.weights is not None
    trial = Trial(call)
    weights = aux.weights.detach().double().cpu()
    require((weights >= 0).all(), "a weight is negative")
    some = (trial.oracle.scores > -np.inf).any(-1) & ~trial.undecided
    total = np.where(some, 1.0, 0.0)
    eager = array(trial.eager.weights).sum(-1).reshape(total.shape) * some
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    # Each weight is rounded, and so is what all of them are divided by, or their threshold. Eager may err by nothing in
    # a narrower dtype, where equal weights are powers of two.
    amplitude = 2 * total + trial.oracle.shaken(dtype, by_lse=False).sum(-1)
    budget = Budget.of(Sized(total, amplitude), torch.from_numpy(eager), dtype)
    found = weights.sum(-1).reshape(total.shape[1:]) * torch.from_numpy(some[0])
    budget.check("the sum of a row's weights", found)
    _check_hull(trial, output)


def _check_hull(trial: Trial, output: Tensor) -> None:
    """Each output feature lies between the least and the greatest visible value, but for its budget."""
    visible = (trial.oracle.scores[0] > -np.inf)[..., None]  # (B, H, L, S, 1)
    statement = trial.statement
    value = statement.canonical(statement.array(statement.value))[0]
    value = np.repeat(value, statement.heads // max(value.shape[1], 1), 1)[:, :, None]  # (B, H, 1, S, V)
    least = np.where(visible, value, np.inf).min(-2, initial=np.inf)
    greatest = np.where(visible, value, -np.inf).max(-2, initial=-np.inf)
    right, K = trial.oracle.output, statement.query.shape[0]
    slack = Budget.of(right, trial.eager.output.unflatten(0, (K, -1)), output.dtype).limit
    got = array(trial.canonical(output))
    seen = visible.any(-2) & ~trial.undecided[..., None]
    require((~seen | (got >= least - slack)).all(), "an output lies below all visible values")
    require((~seen | (got <= greatest + slack)).all(), "an output lies above all visible values")


def _permutable(case: Case) -> Case | None:
    if case.layout == "broadcast" or case.score.startswith("score_mod"):
        return None
    return judged(case)


@law(
    "permutation", "Permuting queries permutes outputs; permuting keys with their values changes nothing.", _permutable
)
def permutation(case: Case, engine: Engine) -> None:
    """Law 4: the mask is written out, and permuted along."""
    call = Call.of(case)
    trial = Trial(call)
    generator = torch.Generator().manual_seed(case.seed)
    p = torch.randperm(case.queries, generator=generator)
    r = torch.randperm(case.keys, generator=generator)
    if call.score.positional:
        r = torch.arange(case.keys)
    mask = None
    if call.mask is not None:
        seen, bias = trial.statement.visible, trial.statement.bias
        values = torch.from_numpy(seen)
        if bias is not None:
            values = torch.from_numpy(np.where(seen, bias, -np.inf)).to(
                torch.float64 if case.dtype == "float64" else torch.float32
            )
        mask = masks.dense(values[:, :, p][..., r].to(call.query.device))
    moved = call.but(
        query=call.query.detach()[..., p, :],
        key=call.key.detach()[..., r, :],
        value=call.value.detach()[..., r, :],
        mask=mask,
    )
    if moved.refusal(engine) is not None:
        return
    output = moved.run(engine)[..., p.argsort(), :]
    trial.check_output(output, "the permuted output")


def _enlarged(case: Case) -> Case | None:
    if 0 in (case.width, case.keys, case.queries, case.extent.B) or case.scale == 0.0:
        return None
    return case.but(magnitude=1.0, mask=None if case.seed % 2 else case.mask)


@law("large scores", "Scores up to the dtype's finite limit give finite outputs.", _enlarged)
def large_scores(case: Case, engine: Engine) -> None:
    """Law 7: queries and keys are multiplied until a score nearly overflows."""
    call = Call.of(case)
    limit = torch.finfo(call.query.dtype).max / 8
    peak = max(float(call.query.abs().max()), float(call.key.abs().max()), 1e-30)
    size = min(limit**0.5, limit) / peak
    for _ in range(64):
        large = call.but(
            query=(call.query.double() * size).to(call.query.dtype), key=(call.key.double() * size).to(call.key.dtype)
        )
        if _stays_finite(large, limit):
            break
        size /= 4
    else:
        return
    output = large.run(engine)
    require(output.isfinite().all(), f"finite scores give an output that is not, at inputs of size {size * peak:.3g}")


def _stays_finite(call: Call, limit: float) -> bool:
    """Return whether no score, before or after scale and bias, leaves the dtype."""
    if not (call.query.isfinite().all() and call.key.isfinite().all()):
        return False
    oracle = Oracle(Statement.of(call))
    raw, final = oracle.comparison.values, oracle.scores
    return all(np.abs(np.where(s == -np.inf, 0, s)).max(initial=0) <= limit for s in (raw, final))


def _with_large_values(case: Case) -> Case | None:
    case_or_none = judged(case)
    if case_or_none is None or not Call.of(case_or_none).normalizer.convex:
        return None
    return case_or_none.but(values=1.0, dropout_p=0.0)


@law("large values", "Values up to the dtype's largest give finite outputs in their hull.", _with_large_values, 0.4)
def large_values(case: Case, engine: Engine) -> None:
    """Law 3 where a sum of values overflows and their mean does not."""
    call = Call.of(case)
    if not call.value.numel():
        return
    largest = torch.finfo(call.value.dtype).max
    share = (0.05, 0.3, 0.9)[case.seed % 3]
    size = call.value.detach().double().abs().max().clamp(min=1e-30)
    value = (call.value.detach().double() / size * (share * largest)).to(call.value.dtype)
    large = call.but(value=value)
    leaves = large.leaves() if case.seed % 2 else {}
    output = large.run(engine)
    require(output.isfinite().all(), f"values of {share} of the largest number give an output that is not finite")
    trial = Trial(large.but(value=(value.double() / 2**16).to(value.dtype)))
    if case.dtype != "float16":  # whose smallest numbers are not far from here
        trial.check_output((output.detach().double() / 2**16).to(output.dtype), "the output, made smaller,")
    if leaves and output.requires_grad:
        found = torch.autograd.grad(output, large.value, torch.ones_like(output))[0]
        require(found.isfinite().all(), "large values have a gradient that is not finite")
