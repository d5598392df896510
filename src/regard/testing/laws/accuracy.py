"""Laws 3 and 6: the definition, and the error budget of outputs, gradients and auxiliary fields."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from regard.engines import Engine
from regard.testing.budget import Budget, array, error, one_rounding
from regard.testing.case import Case, CaseCall, gradients, has_graph
from regard.testing.formulas import NORMALIZER_FORMULAS, Array
from regard.testing.laws.base import law, require
from regard.testing.oracle import Oracle, WithAmplitude, has_formula
from regard.testing.trial import Trial, is_judged, keeps_lse

# Law 6, the error budget: outputs, gradients and auxiliary outputs ----------------------------------------------------


def judged(case: Case) -> Case | None:
    """Keep cases that have an oracle."""
    call = CaseCall.of(case)
    if is_judged(call):
        return case
    return None if call.normalizer.random else case.but(dtype="float32")


@law("budget", "An output's error is at most twice the eager formula's, plus one rounding.", judged, share=2)
def budget(case: Case, engine: Engine) -> None:
    """Law 6 for outputs."""
    call = CaseCall.of(case)
    output = call.run(engine)
    require(output.dtype == call.query.dtype, f"the output is {output.dtype}, the query {call.query.dtype}")
    Trial(call).check_output(output)


@law("gradient budget", "So are the gradients of query, key, value, and tensors of score and mask.", judged, share=2)
def gradient_budget(case: Case, engine: Engine) -> None:
    """Law 6 for gradients."""
    call = CaseCall.of(case)
    leaves = call.leaves()
    Trial(call, keeps_lse=keeps_lse(engine)).check_call(call.run(engine), leaves)


def _is_drawn(case: Case) -> Case | None:
    return case.but(layout="plain") if CaseCall.of(case).normalizer.random else None


@law("drawn", "A random draw gives one visible key of each row weight 1, and outputs its value.", _is_drawn)
def drawn(case: Case, engine: Engine) -> None:
    """A random normalizer has one-hot weights, and the output follows from them."""
    call = CaseCall.of(case)
    output, aux = call.run_with_aux(engine, weights=True, scores=True)
    assert aux.weights is not None and aux.scores is not None
    weights, visible = aux.weights.detach().double(), aux.scores.detach() > -torch.inf
    require(((weights == 0) | visible).all(), "a hidden key has weight")
    require(((weights == 0) | (weights == 1)).all(), "a weight is neither 0 nor 1")
    require((weights.sum(-1) == visible.any(-1)).all(), "a row did not draw exactly one key")
    value = call.value.detach().double().repeat_interleave(case.group, -3)
    rounding = torch.finfo(output.dtype).eps * float(value.abs().max()) if value.numel() else 0.0
    apart = (weights @ value - output.detach().double()).abs()
    worst = float(apart.max()) if apart.numel() else 0.0
    require(worst <= rounding, f"the output is {worst:.3g} off the value that was drawn")


#: How to compute each field of Aux from the oracle, and from the scores and weights of the eager formula.
Field = tuple[Callable[[Oracle], Array], Callable[[Tensor, Tensor], Tensor]]


def _surprise(weights: Array) -> Array:
    return np.where(weights > 0, -weights * np.log(np.where(weights > 0, weights, 1)), 0).sum(-1)


def _entropy(weights: Tensor) -> Tensor:
    return -torch.special.xlogy(weights, weights).sum(-1)


def _peak(scores: Tensor) -> Tensor:
    return scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)


FIELDS: dict[str, Field] = {
    "lse": (lambda o: o.lse, lambda s, w: torch.logsumexp(s, -1)),  # noqa: ARG005
    "max": (lambda o: o.scores.max(-1, initial=-np.inf), lambda s, w: _peak(s)),  # noqa: ARG005
    "entropy": (lambda o: _surprise(o.weights), lambda s, w: _entropy(w)),  # noqa: ARG005
    "received": (lambda o: o.effective.sum(-2), lambda s, w: w.sum(-2)),  # noqa: ARG005
    "weights": (lambda o: o.effective, lambda s, w: w),  # noqa: ARG005
    "scores": (lambda o: o.scores, lambda s, w: s),  # noqa: ARG005
}


@law("aux", "Auxiliary outputs are within budget, too.", judged)
def aux_fields(case: Case, engine: Engine) -> None:
    """Every field of Aux against the oracle, except in undecided rows.

    Some cases request only the log-sum-exp, which engines compute anyway; other fields may need another pass.
    """
    call = CaseCall.of(case)
    alone = case.seed % 3 == 0
    k = 0 if alone else case.seed % 5
    wanted = [name for i, name in enumerate(FIELDS) if (case.seed >> i & 1 and not alone) or name == "lse"]
    wanted = [name for name in wanted if name != "entropy" or not case.ridge]
    _, aux = call.run_with_aux(engine, topk=k, **dict.fromkeys(wanted, True))
    trial = Trial(call)
    decided = ~trial.undecided
    for name in wanted:
        found = getattr(aux, name)
        require(found is not None, f"aux.{name} was requested and is missing")
        if name == "received" and not decided.all():
            continue  # a sum over rows, some of them undecided
        _check_field(trial, name, found, decided)
    if k:
        assert aux.topk is not None
        _check_topk(trial, aux.topk.weights, aux.topk.indices, decided, k)


def _check_field(trial: Trial, name: str, found: Tensor, decided: Array) -> None:
    ours, theirs = FIELDS[name]
    right = ours(trial.oracle)
    eager = theirs(trial.eager.scores.detach(), trial.eager.effective.detach()).double().numpy()
    eager = eager.reshape(right.shape)
    got = array(found, right.dtype).reshape(right.shape[1:])
    if name != "received":
        mask = decided if right.ndim == 4 else decided[..., None]
        right, eager, got = (np.where(mask, x, 0) for x in (right, eager, got))
    finite = np.where(np.isfinite(right), abs(right), 0)
    amplitude = _amplitude(trial, name, finite)
    budget = Budget.of(WithAmplitude(right, amplitude), torch.from_numpy(eager.astype("float64")), found.dtype)
    budget.check(f"aux.{name}", torch.from_numpy(got.astype("float64")))


def _amplitude(trial: Trial, name: str, finite: Array) -> Array:
    """Return the amplitude of a field."""
    scores, weights = trial.oracle.scores, trial.oracle.weights
    peak = np.where(np.isfinite(scores), abs(scores), 0).max(-1, initial=0)
    dtype = torch.promote_types(trial.call.query.dtype, torch.float32)
    if name == "max":
        return finite + peak
    if name == "lse":
        # The sum is rounded, which changes its logarithm by one rounding of 1, however small the logarithm is. Eager
        # has a smaller error if a row has a single key, because its sum is then exactly 1.
        return finite + peak + (scores > -np.inf).any(-1)
    if name == "weights":
        return finite + trial.oracle.shaken(dtype, by_lse=False)
    shaken = trial.oracle.shaken(dtype, by_lse=True)
    if name == "entropy":  # Σ weight · (lse − score), or Σ −weight · log weight
        return finite + peak + (shaken * (1 + abs(np.log(np.where(weights > 0, weights, 1))))).sum(-1)
    if name == "received":
        return (abs(trial.oracle.effective) + shaken).sum(-2)
    return finite


def _check_topk(trial: Trial, top: Tensor, keys: Tensor, decided: Array, k: int) -> None:
    """Check that the weights are the k largest, and that the indices are their keys."""
    weights, scores = trial.oracle.effective, trial.oracle.scores
    shape = (*weights.shape[1:-1], k)
    require(
        top.numel() == np.prod(shape) and keys.shape == top.shape, f"topk has shape {tuple(top.shape)}, not {shape}"
    )
    known = torch.from_numpy(decided[..., None])
    missing = max(k - weights.shape[-1], 0)
    ranked = -np.sort(-np.where(scores > -np.inf, weights, -np.inf), axis=-1)  # a line's may be negative
    ranked = np.pad(np.where(ranked > -np.inf, ranked, 0), [(0, 0)] * 4 + [(0, missing)])[..., :k]
    eager = trial.eager.effective.detach().double().masked_fill(trial.eager.scores.detach() == -torch.inf, -torch.inf)
    eager = eager.sort(-1, descending=True).values
    eager = eager.masked_fill(eager == -torch.inf, 0.0)
    eager = torch.nn.functional.pad(eager, (0, missing))[..., :k].reshape(ranked.shape)
    right = WithAmplitude(
        ranked * decided[..., None],
        abs(ranked) + trial.oracle.shaken(top.dtype, by_lse=True).max(-1, keepdims=True, initial=0),
    )
    budget = Budget.of(right, eager * known, top.dtype)
    budget.check("aux.topk.weights", top.detach().cpu().reshape(shape).double() * known)
    index = keys.cpu().numpy().reshape(shape)
    seen = (scores[0] > -np.inf).sum(-1)
    _check_indices(index, seen, weights[0], array(top).reshape(shape), decided, budget.limit)


def _check_indices(index: Array, seen: Array, weights: Array, top: Array, decided: Array, limit: float) -> None:
    for place in np.argwhere(decided):
        row, size = index[tuple(place)], int(seen[tuple(place)])
        real = row[row >= 0]
        where = f"row {tuple(int(i) for i in place)}"
        require(
            len(real) == min(len(row), size), f"aux.topk.indices has {len(real)} keys for {size} visible ones, {where}"
        )
        require(len(set(real.tolist())) == len(real), f"aux.topk.indices repeats a key, {where}: {row}")
        indexed = weights[tuple(place)][real]
        off = np.abs(indexed - top[tuple(place)][: len(real)]).max(initial=0)
        require(off <= limit, f"aux.topk.indices has keys whose weights are {off:.3g} off, {where}: {row}")


@law("lse gradient", "A differentiable log-sum-exp has a gradient within budget.", judged, share=0.3)
def lse_gradient(case: Case, engine: Engine) -> None:
    """The gradient of ``AuxRequest(lse="grad")`` for any engine."""
    call = CaseCall.of(case)
    leaves = {name: leaf for name, leaf in call.leaves().items() if name != "value"}
    output, aux = call.run_with_aux(engine, lse="grad")
    assert aux.lse is not None
    trial = Trial(call, keeps_lse=True)
    lse = aux.lse.cpu().reshape(trial.oracle.lse.shape[1:])
    rows = torch.from_numpy(np.isfinite(trial.oracle.lse[0]) & ~trial.undecided)
    require(output.requires_grad == has_graph(output, call.leaves()), 'lse="grad" changes the graph of the output')
    grad = torch.randn(lse.shape, generator=torch.Generator().manual_seed(1)).to(lse.dtype) * rows
    found = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    if lse.requires_grad:
        found = gradients(torch.where(rows, lse, 0.0), leaves, grad)
    right, eager = trial.oracle.lse_gradients(array(grad, trial.statement.wide)), trial.eager.lse_gradients(grad)
    for name, gradient in found.items():
        Budget.of(right[name], eager[name], gradient.dtype).check(f"gradient of lse to {name}", gradient)


# Compare a part's code with its formula -------------------------------------------------------------------------------


def _stated(case: Case) -> Case | None:
    call = CaseCall.of(case)
    if call.normalizer.random or not has_formula(call.score) or type(call.normalizer) not in NORMALIZER_FORMULAS:
        return None
    return case.but(dtype="float64", wide=False)


@law("definition", "Scores and normalizers compute their formulas.", _stated)
def definition(case: Case, engine: Engine) -> None:  # noqa: ARG001
    """The eager formula, built from the parts' own code and run in float64, is correct to one rounding of float32.

    A part that differs from its formula has the same error in float64 and float32. The error budget cannot detect it,
    because the eager formula uses the same code.
    """
    call = CaseCall.of(case)
    trial = Trial(call)
    if trial.undecided.any():
        return
    K = trial.statement.query.shape[0]
    eager = trial.eager.output.unflatten(0, (K, -1))
    upstream = trial.upstream(eager.detach()[0])
    right = {"output": trial.oracle.output}
    right |= trial.oracle.gradients(array(upstream, trial.statement.wide))
    found = {"output": eager, **trial.eager.gradients(upstream)}
    # Use the largest amplitude of all, because a gradient that is mathematically 0 has none.
    rounding = max(one_rounding(right[name].amplitude, torch.float32) for name in found)
    for name, result in found.items():
        off = error(right[name].value, result)
        require(
            off <= rounding,
            f"the eager formula's {name} is off by {off:.3g} in float64; a rounding of float32 is {rounding:.3g}: "
            "a score or normalizer does not compute its formula",
        )
