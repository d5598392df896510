"""How long each engine takes: a model fitted on measurements, by which ``engine="auto"`` chooses on a CPU.

``costs.json`` holds, for each cost_key (engine, family of scores, kind of mask, with or without a backward pass), the
seconds that each of :data:`TERMS` costs. ``python -m benchmarks.costs`` measures and writes it anew.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from regard import masks, scores
from regard.engines.problem import Problem
from regard.scores.dot_products import DotLike
from regard.scores.kernels import Distance

#: What costs time: the call, each sequence, each visible pair, its features, its values, each number of the inputs.
TERMS = ("call", "sequences", "pairs", "pairs·features", "pairs·values", "numbers")

#: Pairs times features and values up to which looking at the mask would cost more than it could tell.
SMALL = 1 << 28

#: Pairs up to which a mask that is a function is evaluated as a whole.
SHORT = 1 << 16


def family(problem: Problem) -> str:
    """Return what kind of score a problem has."""
    score = problem.score
    if isinstance(score, (scores.Additive, scores.Concat)):
        return "additive"
    if isinstance(score, Distance):
        return "compact" if score.can_return_neg_inf else "gaussian"
    return "dot" if isinstance(score, DotLike) and type(score).compare is DotLike.compare else "other"


def cost_key(problem: Problem) -> str:
    """Return under which name, below the engine's, a call's costs are kept."""
    mask = problem.mask
    if mask is None:
        kind = "all"
    elif isinstance(mask, masks.Dense) or (mask.calls_a_function() and problem.extent.L * problem.extent.S <= SHORT):
        kind = "matrix"  # so is what a function says of a short sequence
    elif mask.has_bias:
        kind = "bias"
    else:  # a mask that differs from sequence to sequence, as padding does, may have to be applied to one at a time
        kind = "ragged" if mask.sizes()[0] not in (None, 1) else "structure"
    return f"{family(problem)}/{kind}/{'backward' if problem.wants_grad else 'forward'}"


def terms(problem: Problem) -> tuple[float, ...]:
    """Return how much there is of each of :data:`TERMS`."""
    e = problem.extent
    C, V = problem.query.shape[-1], problem.value.shape[-1]
    if family(problem) == "additive":
        C = problem.score.tensors()[0].shape[-1]  # w_v: as many features are compared
    pairs = float(e.B * e.H * e.L * e.S)
    if reads_mask_values(problem):
        pairs *= problem.visible_share
    numbers = e.B * (e.H * e.L * (C + V) + problem.key.shape[1] * e.S * (C + V))
    return 1.0, float(e.B), pairs, pairs * C, pairs * V, float(numbers)


def reads_mask_values(problem: Problem) -> bool:
    """Whether the choice depends on how much a mask shows."""
    if problem.mask is None or isinstance(problem.mask, masks.Dense):
        return False
    e = problem.extent
    return float(e.B * e.H * e.L * e.S) * (problem.query.shape[-1] + problem.value.shape[-1]) > SMALL


@cache
def table() -> dict[str, list[float]]:
    """Return the seconds of each cost_key's terms."""
    return dict(json.loads(files("regard.engines").joinpath("costs.json").read_text(encoding="utf-8"))["lanes"])


def seconds(names: list[str], problem: Problem) -> dict[str, float]:
    """Return how long a call should take on each of these engines, of those that something like it was measured on."""
    place = cost_key(problem)
    rates = {name: found for name in names if (found := table().get(f"{name}/{place}")) is not None}
    amounts = terms(problem) if rates else ()
    return {name: sum(rate * amount for rate, amount in zip(found, amounts)) for name, found in rates.items()}
