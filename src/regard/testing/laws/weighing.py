"""Laws 3, 4, 7, 8 and 10: normalization, permutations, large numbers, dropout and determinism."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from regard import masks
from regard.engines import Engine
from regard.testing.budget import Budget, array
from regard.testing.case import Case, CaseCall, gradients
from regard.testing.laws.accuracy import judged
from regard.testing.laws.base import law, require
from regard.testing.oracle import Oracle, WithAmplitude
from regard.testing.statement import NumpyCall
from regard.testing.trial import Trial, keeps_lse

# Laws 8 and 10: dropout and determinism -------------------------------------------------------------------------------


#: How many dropout samples to average, and the probability that a correct engine fails for each number compared.
DRAWS, CHANCE = 256, 1e-12


def _dropping(case: Case) -> Case | None:
    if not case.keys or not case.queries:
        return None
    case_or_none = judged(case)
    return None if case_or_none is None else case_or_none.but(dropout_p=(0.1, 0.25, 0.5)[case.seed % 3], ridge=0.0)


@law("dropout", "A seed determines dropout; probability 1 drops all; aux has the weights before dropout.", _dropping)
def dropout(case: Case, engine: Engine) -> None:
    """Law 8 for single calls."""
    call = CaseCall.of(case)
    outputs = []
    for _ in range(2):
        torch.manual_seed(case.seed)
        outputs.append(call.run(engine))
    require(torch.equal(*outputs), "the same seed drops differently")
    _, aux = call.run_with_aux(engine, weights=True)
    _, whole = call.but(dropout_p=0.0).run_with_aux("reference", weights=True)
    assert aux.weights is not None and whole.weights is not None
    require(torch.equal(aux.weights, whole.weights), "aux.weights are not the weights before dropout")
    leaves = call.leaves()
    nothing = call.but(dropout_p=1.0).run(engine)
    require((nothing == 0).all(), "dropout_p=1 leaves an output that is not 0")
    if nothing.requires_grad:
        for name, gradient in gradients(nothing, leaves, torch.ones_like(nothing)).items():
            require((gradient == 0).all(), f"dropout_p=1 leaves a gradient to {name}")


@law("dropout gradient", "Gradients flow only through kept weights.", _dropping)
def dropout_gradient(case: Case, engine: Engine) -> None:
    """Law 8: unit vectors as values reveal the kept weights; the same seed keeps the same for other values."""
    case = case.but(value_width=case.keys, layout="plain")
    call = CaseCall.of(case)
    unit = torch.eye(case.keys, dtype=call.value.dtype, device=call.value.device).expand(call.value.shape).contiguous()
    leaves = call.leaves()
    torch.manual_seed(case.seed)
    with torch.no_grad():
        shown = call.but(value=unit).run(engine)
    torch.manual_seed(case.seed)
    output = call.run(engine)
    plain = Trial(call)
    kept = array(plain.canonical(shown)) != 0
    hidden = np.abs(plain.oracle.weights[0]) <= np.finfo(np.float32).tiny  # dropout of these is not visible
    keep = np.where(kept | hidden, 1 / (1 - case.dropout_p), 0.0)
    Trial(call, keep, keeps_lse(engine)).check_call(output, leaves)


def _repeated(case: Case) -> Case | None:
    if case.mask is not None and case.mask[0] not in ("dense", "everything"):
        case = case.but(mask=None)
    dropping = _dropping(case)
    if dropping is None or not dropping.extent.B or case.score.startswith("score_mod"):  # may depend on the sequence
        return None
    return dropping.but(lead=(1,), layout="plain", mask=None, queries=min(case.queries, 4), learned=False)


@law("dropout mean", "Dropout does not change the mean output.", _repeated, share=0.2)
def dropout_mean(case: Case, engine: Engine) -> None:
    """Law 8: the mean of many samples against Bernstein's bound for the stated probability."""
    call = CaseCall.of(case)
    many = call.but(**{name: _many(getattr(call, name)) for name in ("query", "key", "value")})
    torch.manual_seed(case.seed)
    mean = array(many.run(engine)).mean(0)
    trial = Trial(call)
    weights, value = trial.oracle.weights[0], trial.statement.canonical(trial.statement.array(call.value[None]))[0]
    value = np.repeat(value, case.group, 1)
    p = case.dropout_p
    variance = p / (1 - p) * (weights**2) @ (value**2)
    bound = max(p, 1 - p) / (1 - p) * (weights[..., None] * abs(value[:, :, None])).max(-2, initial=0)
    log = math.log(2 / CHANCE)
    slack = bound * log / (3 * DRAWS) + np.sqrt((bound * log / (3 * DRAWS)) ** 2 + 2 * variance * log / DRAWS)
    eager = trial.eager.output.unflatten(0, (-1, weights.shape[0]))
    slack = slack + Budget.of(trial.oracle.output, eager, call.query.dtype).limit
    apart = np.abs(mean - trial.oracle.output.value[0]) * ~trial.undecided[..., None]
    off = np.max(apart - slack, initial=0)
    require(off <= 0, f"the mean of {DRAWS} samples exceeds its confidence bound by {off:.3g}")


def _many(tensor: Tensor) -> Tensor:
    return tensor.detach().expand(DRAWS, *tensor.shape[1:])


@law("determinism", "The same inputs give the same bits, gradients included.")
def determinism(case: Case, engine: Engine) -> None:
    """Law 10; random normalizers and dropout use the same seed."""
    found = []
    for _ in range(2):
        call = CaseCall.of(case)
        leaves = call.leaves()
        torch.manual_seed(case.seed)
        output = call.run(engine)
        grads = gradients(output, leaves, torch.ones_like(output)) if output.requires_grad else {}
        found.append({"output": output.detach(), **{f"gradient to {name}": g for name, g in grads.items()}})
    for name in found[0]:
        first, second = (one[name] for one in found)
        require(torch.equal(first.nan_to_num(), second.nan_to_num()), f"{name} differs between two equal calls")


@law("purity", "A call changes none of its arguments, and returns new memory.", share=0.5)
def purity(case: Case, engine: Engine) -> None:
    """Neither the forward nor the backward pass writes to its arguments."""
    call = CaseCall.of(case)
    leaves = call.leaves()
    parts = [part for part in (call.score, call.mask, call.normalizer) if part is not None]
    given = [*leaves.values(), *(t for part in parts for t in part.tensors())]
    before = [t.detach().clone() for t in given]
    output = call.run(engine)
    shared = {t.untyped_storage().data_ptr() for t in given if t.numel()}
    require(
        not output.numel() or output.untyped_storage().data_ptr() not in shared, "the output is an argument's memory"
    )
    if output.requires_grad:
        gradients(output, leaves, torch.ones_like(output))
    for old, new in zip(before, given):
        require(torch.equal(old.nan_to_num(), new.detach().nan_to_num()), "a call changes one of its arguments")


# Laws 3, 4 and 7: weights that sum to 1, permutations, and the largest scores -----------------------------------------


def _convex(case: Case) -> Case | None:
    case_or_none = judged(case)
    if case_or_none is None or not CaseCall.of(case_or_none).normalizer.convex:
        return None
    return case_or_none.but(ridge=0.0)  # a line has negative weights


@law("convexity", "Weights are ≥ 0 and sum to 1; outputs lie in the convex hull of visible values.", _convex)
def convexity(case: Case, engine: Engine) -> None:
    """Law 3."""
    call = CaseCall.of(case)
    output, aux = call.run_with_aux(engine, weights=True)
    assert aux.weights is not None
    trial = Trial(call)
    weights = aux.weights.detach().double().cpu()
    require((weights >= 0).all(), "a weight is negative")
    some = (trial.oracle.scores > -np.inf).any(-1) & ~trial.undecided
    total = np.where(some, 1.0, 0.0)
    eager = array(trial.eager.weights).sum(-1).reshape(total.shape) * some
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    # Each weight is rounded, and so is their denominator or threshold. Eager may be exact in a narrower dtype if equal
    # weights are powers of two.
    amplitude = 2 * total + trial.oracle.shaken(dtype, by_lse=False).sum(-1)
    budget = Budget.of(WithAmplitude(total, amplitude), torch.from_numpy(eager), dtype)
    found = weights.sum(-1).reshape(total.shape[1:]) * torch.from_numpy(some[0])
    budget.check("the sum of a row's weights", found)
    _check_hull(trial, output)


def _check_hull(trial: Trial, output: Tensor) -> None:
    """Check that each output feature lies between the least and the greatest visible value, within budget."""
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
    """Law 4, with a dense mask permuted accordingly."""
    call = CaseCall.of(case)
    trial = Trial(call)
    generator = torch.Generator().manual_seed(case.seed)
    p = torch.randperm(case.queries, generator=generator)
    r = torch.randperm(case.keys, generator=generator)
    if call.score.positional or call.normalizer.positional:
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
    if not CaseCall.of(case).normalizer.bounded:
        return None
    return case.but(magnitude=1.0, mask=None if case.seed % 2 else case.mask)


@law("large scores", "Scores up to the largest number of the dtype give finite outputs.", _enlarged)
def large_scores(case: Case, engine: Engine) -> None:
    """Law 7: queries and keys are multiplied until a score nearly overflows."""
    call = CaseCall.of(case)
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
    require(output.isfinite().all(), f"finite scores give an infinite or NaN output at input size {size * peak:.3g}")


def _stays_finite(call: CaseCall, limit: float) -> bool:
    """Return whether all scores, before and after scale and bias, are finite in the dtype."""
    if not (call.query.isfinite().all() and call.key.isfinite().all()):
        return False
    oracle = Oracle(NumpyCall.of(call))
    raw, final = oracle.comparison.values, oracle.scores
    return all(np.abs(np.where(s == -np.inf, 0, s)).max(initial=0) <= limit for s in (raw, final))


def _with_large_values(case: Case) -> Case | None:
    case_or_none = judged(case)
    if case_or_none is None or not CaseCall.of(case_or_none).normalizer.convex:
        return None
    return case_or_none.but(values=1.0, dropout_p=0.0, ridge=0.0)  # a line leaves the hull


@law("large values", "Values up to the dtype's largest number give outputs in their hull.", _with_large_values, 0.4)
def large_values(case: Case, engine: Engine) -> None:
    """Law 3 for values whose sum overflows although their mean does not."""
    call = CaseCall.of(case)
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
    if case.dtype != "float16":  # its range is too small
        trial.check_output((output.detach().double() / 2**16).to(output.dtype), "the output, made smaller,")
    if leaves and output.requires_grad:
        found = torch.autograd.grad(output, large.value, torch.ones_like(output))[0]
        require(found.isfinite().all(), "large values have a gradient that is not finite")
