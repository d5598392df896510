"""That a part's code is its formula: what the error budget, which both share, cannot tell."""

from __future__ import annotations

import torch

from regard.engines import Engine
from regard.testing import compare
from regard.testing.budget import array, error, one_rounding
from regard.testing.case import Call, Case
from regard.testing.laws.base import law, require
from regard.testing.simplex import WEIGHINGS
from regard.testing.trial import Trial

#: The least factor by which a right formula's error shrinks from float32 to float64, of the 2²⁹ it should.
SHRINKS = 2.0**14


def _stated(case: Case) -> Case | None:
    call = Call.of(case)
    if call.normalizer.random or not compare.has_formula(call.score) or type(call.normalizer) not in WEIGHINGS:
        return None
    return case.but(dtype="float64", wide=False)


@law("definition", "The plain formula's error vanishes with the precision: parts compute what is written of them.", _stated)
def definition(case: Case, engine: Engine) -> None:  # noqa: ARG001
    """The eager formula, made of the parts' own code, against the oracle in two precisions.

    A part that computes something else than its formula errs by as much in float64 as in float32. The error budget
    does not see that, as the eager formula has the part's code from the part.
    """
    found = {dtype: _errors(case, dtype) for dtype in (torch.float32, torch.float64)}
    for name, (wrong, rounding) in found[torch.float64].items():
        narrow = found[torch.float32][name][0]
        require(
            wrong <= narrow / SHRINKS + rounding,
            f"the plain formula's {name} errs by {wrong:.3g} in float64 and by {narrow:.3g} in float32: "
            "a score or normalizer does not compute its formula",
        )


def _errors(case: Case, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """Return the eager formula's error, and one rounding, for the output and each gradient."""
    call = Call.of(case)
    values = {name: getattr(call, name).float().to(dtype) for name in ("query", "key", "value")}
    score = call.score.map_tensors(lambda t: t.detach().float().to(dtype).requires_grad_(t.requires_grad))
    trial = Trial(call.but(score=score, **values))
    if trial.undecided.any():
        return {}
    K = trial.statement.query.shape[0]
    right, eager = trial.oracle.output, trial.eager.output
    upstream = trial.upstream(eager.detach().unflatten(0, (K, -1))[0])
    found = {"output": (error(right.value, eager.unflatten(0, (K, -1))), one_rounding(right.amplitude, dtype))}
    gradients = trial.oracle.gradients(array(upstream, trial.statement.wide))
    for name, gradient in trial.eager.gradients(upstream).items():
        if name in gradients:
            exact = gradients[name]
            found[f"gradient to {name}"] = (error(exact.value, gradient), one_rounding(exact.amplitude, dtype))
    return found
