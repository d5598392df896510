"""Parts of a caller's own: changed after a call, and made by overriding a method of one of ours."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from regard import _plan
from regard.engines import Engine
from regard.normalizers import Normalizer
from regard.scores import Score, ScoreMod
from regard.testing.case import Call, Case
from regard.testing.laws.accuracy import judged
from regard.testing.laws.base import law, require
from regard.testing.trial import Trial


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
    call = Call.of(case)
    if call.but(score=Stretched(1.0)).refusal(engine) is not None:
        return
    _plan.forget()
    part = Stretched(1.0)
    call.but(score=part).run(engine)
    part.factor = 3.0
    torch.manual_seed(case.seed)
    changed = call.but(score=part).run(engine)
    torch.manual_seed(case.seed)
    fresh = call.but(score=Stretched(1.0)).run(engine)
    Trial(call).check_output(fresh, "the output of a part that is as another was before it was changed")
    _plan.forget()
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
    call = Call.of(case)
    if isinstance(call.score, ScoreMod) or (call.mask is not None and call.mask.has_bias) or call.normalizer.random:
        return None
    return judged(case.but(softcap=None, learned=False, magnitude=min(case.magnitude, 1.0)))


@law(
    "subclassed parts", "An override in a subclass of a score or a normalizer is what is computed.", _without_bias, 0.2
)
def overridden(case: Case, engine: Engine) -> None:
    """No engine takes a shortcut past an override: twice the score is twice the scale."""
    call = Call.of(case)
    scale = call.score.default_scale(case.width) if case.scale is None else case.scale
    doubled = call.but(scale=2 * scale)
    score = subclassed(call.score, compare=_twice_the_score)
    normalizer = subclassed(call.normalizer, weights=_of_twice_the_scores)
    for name, own in (("score", call.but(score=score)), ("normalizer", call.but(normalizer=normalizer))):
        for way in (engine, "auto"):
            if isinstance(way, str) or own.refusal(way) is None:
                Trial(doubled).check_output(own.run(way), f"the output with a {name} of a subclass")
