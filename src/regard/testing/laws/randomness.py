"""Laws 8 and 10: dropout, and the same bits every time."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from regard.engines import Engine
from regard.testing.budget import Budget, array
from regard.testing.case import Call, Case, gradients
from regard.testing.laws.accuracy import judged
from regard.testing.laws.base import law, require
from regard.testing.trial import Trial, keeps_lse

#: Draws of dropout that are averaged, and the chance that a correct engine fails for each number compared.
DRAWS, CHANCE = 256, 1e-12


def _dropping(case: Case) -> Case | None:
    if not case.keys or not case.queries:
        return None
    case_or_none = judged(case)
    return None if case_or_none is None else case_or_none.but(dropout_p=(0.1, 0.25, 0.5)[case.seed % 3])


@law("dropout", "A seed decides what is dropped; a probability of 1 drops all; aux tells weights before.", _dropping)
def dropout(case: Case, engine: Engine) -> None:
    """Law 8: what can be told from single calls."""
    call = Call.of(case)
    outputs = []
    for _ in range(2):
        torch.manual_seed(case.seed)
        outputs.append(call.run(engine))
    require(torch.equal(*outputs), "the same seed drops differently")
    _, aux = call.look(engine, weights=True)
    _, whole = call.but(dropout_p=0.0).look("reference", weights=True)
    assert aux.weights is not None and whole.weights is not None
    require(torch.equal(aux.weights, whole.weights), "aux.weights are not those before dropout")
    leaves = call.leaves()
    nothing = call.but(dropout_p=1.0).run(engine)
    require((nothing == 0).all(), "dropout_p=1 leaves something")
    if nothing.requires_grad:
        for name, gradient in gradients(nothing, leaves, torch.ones_like(nothing)).items():
            require((gradient == 0).all(), f"dropout_p=1 leaves a gradient to {name}")


@law("dropout gradient", "Gradients are those of what was kept.", _dropping)
def dropout_gradient(case: Case, engine: Engine) -> None:
    """Law 8: values that are unit vectors show what was kept; the same seed keeps the same for other values."""
    case = case.but(value_width=case.keys, layout="plain")
    call = Call.of(case)
    unit = torch.eye(case.keys, dtype=call.value.dtype, device=call.value.device).expand(call.value.shape).contiguous()
    leaves = call.leaves()
    torch.manual_seed(case.seed)
    with torch.no_grad():
        shown = call.but(value=unit).run(engine)
    torch.manual_seed(case.seed)
    output = call.run(engine)
    plain = Trial(call)
    kept = array(plain.canonical(shown)) != 0
    hidden = plain.oracle.weights[0] <= np.finfo(np.float32).tiny  # whether these were dropped does not show
    keep = np.where(kept | hidden, 1 / (1 - case.dropout_p), 0.0)
    Trial(call, keep, keeps_lse(engine)).check_call(output, leaves)


def _repeated(case: Case) -> Case | None:
    if case.mask is not None and case.mask[0] not in ("dense", "everything"):
        case = case.but(mask=None)
    dropping = _dropping(case)
    if dropping is None or not dropping.extent.B or case.score.startswith("score_mod"):  # may depend on the sequence
        return None
    return dropping.but(lead=(1,), layout="plain", mask=None, queries=min(case.queries, 4), learned=False)


@law("dropout mean", "Over many draws, dropout changes no output on average.", _repeated, share=0.2)
def dropout_mean(case: Case, engine: Engine) -> None:
    """Law 8: the mean of many draws, against Bernstein's bound for what is kept with the stated probability."""
    call = Call.of(case)
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
    require(off <= 0, f"the mean of {DRAWS} draws is {off:.3g} further off than chance allows")


def _many(tensor: Tensor) -> Tensor:
    return tensor.detach().expand(DRAWS, *tensor.shape[1:])


@law("determinism", "The same inputs give the same bits, gradients included.")
def determinism(case: Case, engine: Engine) -> None:
    """Law 10; what is drawn is drawn from the same seed."""
    found = []
    for _ in range(2):
        call = Call.of(case)
        leaves = call.leaves()
        torch.manual_seed(case.seed)
        output = call.run(engine)
        grads = gradients(output, leaves, torch.ones_like(output)) if output.requires_grad else {}
        found.append({"output": output.detach(), **{f"gradient to {name}": g for name, g in grads.items()}})
    for name in found[0]:
        first, second = (one[name] for one in found)
        require(torch.equal(first.nan_to_num(), second.nan_to_num()), f"{name} differs between two equal calls")


@law("purity", "A call changes none of its arguments, and returns memory of its own.", share=0.5)
def purity(case: Case, engine: Engine) -> None:
    """Neither the forward nor the backward pass writes into what it was given."""
    call = Call.of(case)
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
