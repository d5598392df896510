"""Parts of a user's own, changed after a call or with overridden methods, and what plans keep."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import regard
from regard import engines
from regard._call.plan import choose_engine, clear_plans
from regard.engines import Engine
from regard.normalizers import Normalizer
from regard.scores import Score, ScoreMod
from regard.testing.case import Case, CaseCall, gradients
from regard.testing.laws.accuracy import judged
from regard.testing.laws.base import law, require
from regard.testing.trial import Trial

# Parts of a caller's own: changed after a call, and made by overriding a method of one of ours ------------------------


class Stretched(Score):
    """A dot product times a number of its own."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        return self.factor * (query @ key.mT)


def _of_equal_widths(case: Case) -> Case | None:
    return judged(case.but(key_width=0, score="dot", learned=False))


@law(
    "mutated parts",
    "A part that is changed after a call changes later calls with it, and no others.",
    _of_equal_widths,
    0.3,
)
def mutated(case: Case, engine: Engine) -> None:
    """A plan keeps nothing that its caller can change."""
    call = CaseCall.of(case)
    if call.but(score=Stretched(1.0)).refusal(engine) is not None:
        return
    clear_plans()
    part = Stretched(1.0)
    call.but(score=part).run(engine)
    part.factor = 3.0
    torch.manual_seed(case.seed)
    changed = call.but(score=part).run(engine)
    torch.manual_seed(case.seed)
    fresh = call.but(score=Stretched(1.0)).run(engine)
    Trial(call).check_output(fresh, "the output of a part that is as another was before it was changed")
    clear_plans()
    torch.manual_seed(case.seed)
    require(torch.equal(changed.nan_to_num(), call.but(score=part).run(engine).nan_to_num()), "a change has no effect")


def subclassed(part: Any, **methods: Any) -> Any:
    """Return a copy of a part, of a subclass of its class with some methods overridden."""
    twin = copy.copy(part)
    twin.__class__ = type(f"Own{type(part).__name__}", (type(part),), methods)
    return twin


def _twice_the_score(self: Score, query: Tensor, key: Tensor) -> Tensor:
    return 2 * super(type(self), self).compare(query, key)


def _of_twice_the_scores(self: Normalizer, scores: Tensor) -> Tensor:
    return super(type(self), self).weights(2 * scores)


def _without_bias(case: Case) -> Case | None:
    call = CaseCall.of(case)
    if isinstance(call.score, ScoreMod) or (call.mask is not None and call.mask.has_bias) or call.normalizer.random:
        return None
    return judged(case.but(softcap=None, learned=False, magnitude=min(case.magnitude, 1.0)))


@law(
    "subclassed parts", "An override in a subclass of a score or a normalizer is what is computed.", _without_bias, 0.2
)
def overridden(case: Case, engine: Engine) -> None:
    """No engine takes a shortcut past an override: twice the score is twice the scale."""
    call = CaseCall.of(case)
    scale = call.score.default_scale(case.width) if case.scale is None else case.scale
    doubled = call.but(scale=2 * scale)
    score = subclassed(call.score, compare=_twice_the_score)
    normalizer = subclassed(call.normalizer, weights=_of_twice_the_scores)
    for name, own in (("score", call.but(score=score)), ("normalizer", call.but(normalizer=normalizer))):
        for way in (engine, "auto"):
            if isinstance(way, str) or own.refusal(way) is None:
                Trial(doubled).check_output(own.run(way), f"the output with a {name} of a subclass")


# Check the promises about a call other than its numbers: plans, refusals, and that asking changes nothing -------------


@law("asking", "Asking for more than the output does not change it by a bit.")
def asking(case: Case, engine: Engine) -> None:
    """Aux never changes the output."""
    call = CaseCall.of(case)
    wishes: list[dict[str, Any]] = [{"lse": True}, {"topk": 2, "entropy": True}, {"received": True, "max": True}]
    wishes += [{"weights": True}, {"scores": True, "lse": True}, {}, {"lse": "grad"}]
    torch.manual_seed(case.seed)
    plain = call.run(engine)
    wish = wishes[case.seed % len(wishes)]
    torch.manual_seed(case.seed)
    asked, aux = call.look(engine, **wish)
    require(torch.equal(plain.nan_to_num(), asked.nan_to_num()), f"asking for {wish} changes the output")
    for name in ("lse", "max", "entropy", "topk", "received", "weights", "scores"):
        given = getattr(aux, name) is not None
        require(given == (name in wish), f"aux.{name} is {'given' if given else 'missing'} after asking for {wish}")


@law("plan", "What explain says is what runs.", share=0.5)
def plan(case: Case, engine: Engine) -> None:
    """The plan names every engine once, and the chosen one runs, to the same bits as when it is named."""
    call = CaseCall.of(case)
    told = regard.explain(**call.arguments(), engine="auto")
    names = {told.engine.name, *told.others}
    require(names == set(engines.TABLE), f"the plan speaks of {sorted(names)}, not of every engine")
    for name, reason in told.others.items():
        refusal = call.refusal(engines.TABLE[name])
        says = reason.startswith("unsupported")
        require(says == (refusal is not None), f"the plan says of {name} {reason!r}; it refuses because {refusal}")
    named = regard.explain(**call.arguments(), engine=engine)
    require(named.engine is engine, f"explain names {named.engine.name} where {engine.name} was asked for")
    require(str(told) and str(named), "a plan does not print")
    if told.engine is not engine:
        return
    ways = {"auto": lambda: call.run("auto")}
    if (case.score, case.normalizer) == ("scaled_dot", "softmax"):  # the plainest of these go to torch directly
        arguments = {name: x for name, x in call.arguments().items() if name not in ("score", "normalizer")}
        ways["auto, its parts left out,"] = lambda: regard.attention(**arguments)
    for name, run in ways.items():
        torch.manual_seed(case.seed)
        chosen = run()
        torch.manual_seed(case.seed)
        same = torch.equal(chosen.nan_to_num(), call.run(engine).nan_to_num())
        require(same, f"{name} gives other bits than its engine")


@law("planned once", "A call planned by an earlier one gives what it gives when planned for itself.", share=0.5)
def planned_once(case: Case, engine: Engine) -> None:
    """Nothing of the first call's tensors is left in the plan that a later call of its structure finds."""
    found = []
    for earlier in (None, CaseCall.of(case)):
        clear_plans()
        if earlier is not None:
            earlier.run(engine)
        later = CaseCall.of(replace(case, seed=case.seed + 1))
        leaves = later.leaves() if case.seed % 2 else {}
        torch.manual_seed(case.seed)
        output = later.run(engine)
        grads = gradients(output, leaves, torch.ones_like(output)) if output.requires_grad and leaves else {}
        found.append({"output": output.detach(), **{f"gradient to {name}": g for name, g in grads.items()}})
    for name in found[0]:
        alone, planned = (each[name].nan_to_num() for each in found)
        require(torch.equal(alone, planned), f"{name} differs where an earlier call was planned")


@law("workspace", "Auto never picks an engine that grows with L×S where another does not.", share=0.3)
def workspace(case: Case, engine: Engine) -> None:
    """The rule of the choice, over all engines."""
    problem = CaseCall.of(case).problem()
    chosen = choose_engine(problem, "auto")
    steady = engine.refusal(problem) is None and not engine.grows(problem)
    require(
        not (steady and chosen.grows(problem)), f"auto picks {chosen.name}, which grows, though {engine.name} does not"
    )
    cost = engine.cost(problem)
    require(cost.grows == engine.grows(problem), "cost().grows is not grows()")
    require(min(cost.flops, cost.bytes_read, cost.workspace) >= 0, f"a negative cost: {cost}")


def refused(case: Case, engine: Engine) -> None:
    """Check that an engine which refuses a call says so when it is named, with its reason."""
    call = CaseCall.of(case)
    reason = call.refusal(engine)
    assert reason is not None
    try:
        call.run(engine)
    except ValueError as error:
        require(engine.name in str(error) and reason in str(error), f"the error does not tell the reason: {error}")
    else:
        raise AssertionError(f"{engine.name} runs what it refuses because {reason}")
