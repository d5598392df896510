"""Compare a part's code with its formula, which the error budget, shared by both, cannot do."""

from __future__ import annotations

import torch

from regard.engines import Engine
from regard.testing import compare
from regard.testing.budget import array, error, one_rounding
from regard.testing.case import Call, Case
from regard.testing.laws.base import law, require
from regard.testing.normalizer_formulas import WEIGHINGS
from regard.testing.trial import Trial


def _stated(case: Case) -> Case | None:
    call = Call.of(case)
    if call.normalizer.random or not compare.has_formula(call.score) or type(call.normalizer) not in WEIGHINGS:
        return None
    return case.but(dtype="float64", wide=False)


@law("definition", "Scores and normalizers compute what is written of them.", _stated)
def definition(case: Case, engine: Engine) -> None:  # noqa: ARG001
    """The eager formula, made of the parts' own code and run in float64, is right to one rounding of float32.

    A part that computes something else than its formula errs by as much in float64 as in float32. The error budget
    does not see that, as the eager formula has the part's code from the part.
    """
    call = Call.of(case)
    trial = Trial(call)
    if trial.undecided.any():
        return
    K = trial.statement.query.shape[0]
    eager = trial.eager.output.unflatten(0, (K, -1))
    upstream = trial.upstream(eager.detach()[0])
    right = {"output": trial.oracle.output}
    right |= trial.oracle.gradients(array(upstream, trial.statement.wide))
    found = {"output": eager, **trial.eager.gradients(upstream)}
    # Of the largest of all amplitudes, as a gradient that is 0 on paper is none to be measured by.
    rounding = max(one_rounding(right[name].amplitude, torch.float32) for name in found)
    for name, result in found.items():
        off = error(right[name].value, result)
        require(
            off <= rounding,
            f"the plain formula's {name} errs by {off:.3g} in float64, where a rounding of float32 is {rounding:.3g}: "
            "a score or normalizer does not compute its formula",
        )
