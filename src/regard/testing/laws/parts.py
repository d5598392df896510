"""User-defined parts, changed after a call or with overridden methods, and the promises of plans."""

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

# User-defined parts: changed after a call, and subclasses of ours with overridden methods -----------------------------


class Stretched(Score):
    """A dot product times a factor."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        return self.factor * (query @ key.mT)


def _of_equal_widths(case: Case) -> Case | None:
    return judged(case.but(key_width=0, score="dot", learned=False, ridge=0.0))


@law(
    "mutated parts",
    "A part that is changed after a call changes later calls with it, and no others.",
    _of_equal_widths,
    0.3,
)
def mutated(case: Case, engine: Engine) -> None:
    """A plan keeps no state that its caller can change."""
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
    """Return a copy of a part whose class is a subclass with some methods overridden."""
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
    return judged(case.but(softcap=None, learned=False, magnitude=min(case.magnitude, 1.0), ridge=0.0))


@law("subclassed parts", "Engines respect overridden methods of scores and normalizers.", _without_bias, 0.2)
def overridden(case: Case, engine: Engine) -> None:
    """No engine bypasses an override: twice the score equals twice the scale."""
    call = CaseCall.of(case)
    scale = call.score.default_scale(case.width) if case.scale is None else case.scale
    doubled = call.but(scale=2 * scale)
    score = subclassed(call.score, compare=_twice_the_score)
    normalizer = subclassed(call.normalizer, weights=_of_twice_the_scores)
    for name, own in (("score", call.but(score=score)), ("normalizer", call.but(normalizer=normalizer))):
        for way in (engine, "auto"):
            if isinstance(way, str) or own.refusal(way) is None:
                Trial(doubled).check_output(own.run(way), f"the output with a {name} of a subclass")


# Check promises beyond the numbers: plans, refusals, and that auxiliary requests change nothing -----------------------


@law("asking", "Requesting auxiliary outputs does not change a bit of the output.")
def asking(case: Case, engine: Engine) -> None:
    """Aux never changes the output."""
    call = CaseCall.of(case)
    wishes: list[dict[str, Any]] = [{"lse": True}, {"topk": 2, "entropy": True}, {"received": True, "max": True}]
    wishes += [{"weights": True}, {"scores": True, "lse": True}, {}, {"lse": "grad"}]
    torch.manual_seed(case.seed)
    plain = call.run(engine)
    wish = wishes[case.seed % len(wishes)]
    if case.ridge:
        wish = {name: value for name, value in wish.items() if name != "entropy"}
    torch.manual_seed(case.seed)
    asked, aux = call.run_with_aux(engine, **wish)
    require(torch.equal(plain.nan_to_num(), asked.nan_to_num()), f"requesting {wish} changes the output")
    for name in ("lse", "max", "entropy", "topk", "received", "weights", "scores"):
        given = getattr(aux, name) is not None
        require(given == (name in wish), f"aux.{name} is {'present' if given else 'missing'} after requesting {wish}")


@law("plan", "The engine that explain reports is the one that runs.", share=0.5)
def plan(case: Case, engine: Engine) -> None:
    """The plan names every engine once, and the chosen one gives the same bits as when requested by name."""
    call = CaseCall.of(case)
    plan = regard.explain(**call.arguments(), engine="auto")
    names = {plan.engine.name, *plan.others}
    require(names == set(engines.TABLE), f"the plan names {sorted(names)}, not every engine")
    for name, reason in plan.others.items():
        refusal = call.refusal(engines.TABLE[name])
        says = reason.startswith("unsupported")
        require(
            says == (refusal is not None), f"the plan gives {reason!r} for {name}; the engine's own reason is {refusal}"
        )
    named = regard.explain(**call.arguments(), engine=engine)
    require(named.engine is engine, f"explain names {named.engine.name} instead of {engine.name}")
    require(str(plan) and str(named), "a plan does not print")
    if plan.engine is not engine:
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
        require(same, f"{name} gives different bits than its engine")


@law("planned once", "A call that reuses a plan gives the same result as with a plan of its own.", share=0.5)
def planned_once(case: Case, engine: Engine) -> None:
    """A plan contains no tensors of the first call when a later call of the same structure reuses it."""
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
        require(torch.equal(alone, planned), f"{name} differs with a reused plan")


@law("workspace", "Auto picks no engine whose memory grows with L×S if another's does not.", share=0.3)
def workspace(case: Case, engine: Engine) -> None:
    """The selection rule over all engines."""
    problem = CaseCall.of(case).problem()
    chosen = choose_engine(problem, "auto")
    steady = engine.why_not(problem) is None and not engine.grows(problem)
    require(
        not (steady and chosen.grows(problem)), f"auto picks {chosen.name}, which grows, though {engine.name} does not"
    )
    cost = engine.cost(problem)
    require(cost.grows == engine.grows(problem), "cost().grows is not grows()")
    require(min(cost.flops, cost.bytes_read, cost.workspace) >= 0, f"a negative cost: {cost}")


def refused(case: Case, engine: Engine) -> None:
    """Check that an engine which refuses a call raises an error with its reason when requested by name."""
    call = CaseCall.of(case)
    reason = call.refusal(engine)
    assert reason is not None
    try:
        call.run(engine)
    except ValueError as error:
        require(engine.name in str(error) and reason in str(error), f"the error does not state the reason: {error}")
    else:
        raise AssertionError(f"{engine.name} runs a call that it refuses because {reason}")
