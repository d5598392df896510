"""The laws catch engines that are wrong, each by the law that speaks of its fault."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from regard import engines, masks
from regard.engines import EngineOutput, Reference
from regard.engines.tiles import Grid, Tiles
from regard.normalizers import entmax as threshold
from regard.testing import LAWS, Case, judge
from regard.testing.case_generator import CaseSampler
from regard.testing.conformance import combinations, draw_for


class Wrong(Reference):
    """The reference, but for a fault that a subclass puts in."""

    name = "wrong"
    keeps_lse = False
    parts = None

    def refusal(self, problem):
        # Faults are sought with softmax and few scores, which is quick; they have nothing to do with either.
        plain = type(problem.normalizer).__name__ == "Softmax" and type(problem.score).__name__ in (
            "ScaledDot",
            "Gaussian",
        )
        return None if plain else "wrong engines are tried on few parts"

    def scores(self, problem):
        """Return all scores, masked, without care for what is not finite."""
        return Tiles.of(problem, False, Grid.whole(problem)).scores(0, 0)

    def read(self, problem, weights):
        value = problem.value.repeat_interleave(weights.shape[1] // problem.value.shape[1], 1)
        return (weights @ value.to(weights.dtype)).to(problem.query.dtype)

    def plain(self, problem):
        return 0 not in (*problem.query.shape, *problem.value.shape)


class LeaksNaN(Wrong):
    def run(self, problem):
        if not self.plain(problem):
            return super().run(problem)
        scores = self.scores(problem)
        weights = torch.where((scores == -torch.inf).all(-1, keepdim=True), 0.0, scores.softmax(-1))
        return EngineOutput(self.read(problem, weights))


class UniformEmptyRows(Wrong):
    def run(self, problem):
        if not self.plain(problem):
            return super().run(problem)
        return EngineOutput(self.read(problem, self.scores(problem).clamp(min=-1e9).softmax(-1)))


class OffByOne(Wrong):
    def run(self, problem):
        mask = problem.mask
        if isinstance(mask, masks.Band) and mask.name == "causal":
            wider = masks.causal(offset=1).bind(problem.extent, problem.query.device)
            problem = replace(problem, mask=wider)
        return super().run(problem)


class WrongScale(Wrong):
    def run(self, problem):
        return super().run(replace(problem, scale=problem.scale * 1.001))


class NoSoftcap(Wrong):
    def run(self, problem):
        return super().run(replace(problem, softcap=None))


class Noisy(Wrong):
    def run(self, problem):
        outcome = super().run(problem)
        return replace(outcome, output=outcome.output * (1 + 1e-3 * torch.randn_like(outcome.output)))


class Narrow(Wrong):
    def run(self, problem):
        if problem.query.dtype != torch.float32:
            return super().run(problem)
        cast = {name: getattr(problem, name).bfloat16().float() for name in ("query", "key", "value")}
        return super().run(replace(problem, **cast))


class SlightlyNarrow(Wrong):
    """Float64 calculated in float32: right to seven digits."""

    def run(self, problem):
        if problem.query.dtype != torch.float64:
            return super().run(problem)
        cast = {name: getattr(problem, name).float() for name in ("query", "key", "value")}
        outcome = super().run(replace(problem, **cast))
        return EngineOutput(outcome.output.double())


class NoKeyGradient(Wrong):
    def run(self, problem):
        return super().run(replace(problem, key=problem.key.detach()))


class HalfGradient(Wrong):
    """A gradient to the query that is one part in a thousand off."""

    def run(self, problem):
        if problem.query.requires_grad:
            query = problem.query * 1.0
            query.register_hook(lambda grad: grad * 1.001)
            problem = replace(problem, query=query)
        return super().run(problem)


class WrongLse(Wrong):
    def run(self, problem):
        outcome = super().run(problem)
        scores = outcome.scores
        if scores is None or not scores.numel():
            return outcome
        return EngineOutput(outcome.output, scores.logsumexp(-1) / torch.tensor(2.0).log())


class Overflows(Wrong):
    def run(self, problem):
        if not self.plain(problem):
            return super().run(problem)
        powers = self.scores(problem).exp()
        total = powers.sum(-1, keepdim=True)
        return EngineOutput(self.read(problem, powers / torch.where(total == 0, 1, total)))


class Unscaled(Wrong):
    """Dropout that does not make up for what it drops."""

    def run(self, problem):
        outcome = super().run(problem)
        return replace(outcome, output=outcome.output * (1 - problem.dropout_p))


class ForgetsSeed(Wrong):
    """Dropout whose backward pass drops something else."""

    def run(self, problem):
        if not problem.dropout_p or not self.plain(problem):
            return super().run(problem)
        whole = super().run(replace(problem, dropout_p=0.0))
        kept = self.read(problem, F.dropout(whole.weights.detach(), problem.dropout_p))
        other = self.read(problem, F.dropout(whole.weights, problem.dropout_p))
        return replace(whole, output=kept.detach() + other - other.detach())


class AboveAll(Wrong):
    def run(self, problem):
        outcome = super().run(problem)
        return replace(outcome, output=outcome.output * 1.5)


class KnowsOrder(Wrong):
    """Later keys count a little more."""

    def run(self, problem):
        if not self.plain(problem):
            return super().run(problem)
        scores = self.scores(problem)
        scores = scores + 0.01 * torch.arange(scores.shape[-1])
        return (
            super().run(problem) if problem.mask is not None else EngineOutput(self.read(problem, scores.softmax(-1)))
        )


class OtherTypes(Wrong):
    def run(self, problem):
        return replace(super().run(problem), output=super().run(problem).output.double())


FAULTS = [
    (LeaksNaN, "no leak"),
    (LeaksNaN, "contained"),
    (UniformEmptyRows, "empty rows"),
    (OffByOne, "causality"),
    (OffByOne, "budget"),
    (WrongScale, "budget"),
    (NoSoftcap, "budget"),
    (Noisy, "budget"),
    (Noisy, "permutation"),
    (Narrow, "budget"),
    (SlightlyNarrow, "budget"),
    (NoKeyGradient, "gradient budget"),
    (NoKeyGradient, "gradcheck"),
    (HalfGradient, "gradient budget"),
    (WrongLse, "aux"),
    (Overflows, "large scores"),
    (Unscaled, "dropout mean"),
    (ForgetsSeed, "dropout gradient"),
    (AboveAll, "convexity"),
    (KnowsOrder, "permutation"),
    (OtherTypes, "budget"),
]


@pytest.fixture
def registered():
    """Return a function that registers an engine until the test ends."""
    before = dict(engines.TABLE)
    yield engines.register
    engines.TABLE.clear()
    engines.TABLE.update(before)


def first_broken(law, engine, tries):
    """Return the first verdict of a law that is broken, of so many cases."""
    for i in range(tries):
        case = draw_for(CaseSampler(i), LAWS[law], engine, combinations(engine))
        if case is not None:
            verdict = judge(law, engine, case)
            if verdict.outcome == "broken":
                return verdict
    return None


@pytest.mark.campaign(keep=10)
@pytest.mark.parametrize(("fault", "law"), FAULTS, ids=[f"{fault.__name__}-{law}" for fault, law in FAULTS])
def test_the_law_catches_the_fault(fault, law, registered):
    engine = registered(fault())
    verdict = first_broken(law, engine, 100)
    assert verdict is not None, f"{fault.__name__} keeps the law {law!r} in 100 cases"
    assert "Error: " not in verdict.reason  # by what the law says, not by a crash


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("law", ["budget", "gradient budget", "no leak", "empty rows", "causality", "permutation"])
def test_no_law_catches_an_engine_without_fault(law, registered):
    verdict = first_broken(law, registered(Wrong()), 20)
    assert verdict is None, str(verdict)


@pytest.mark.parametrize("normalizer", ["sparsemax", "entmax15"])
def test_a_search_for_a_threshold_that_stops_early_is_no_measure_of_what_is_fair(normalizer, monkeypatch):
    plain = threshold.solve

    def early(scores, alpha):
        shift, offset = plain(scores, alpha)
        return shift, offset - 2.0**-18

    case = Case("scaled_dot", normalizer, "float32", queries=13, keys=13)
    assert judge("budget", "reference", case).outcome == "held"
    monkeypatch.setattr(threshold, "solve", early)
    assert judge("budget", "reference", case).outcome == "broken"


def test_an_engine_that_draws_is_not_deterministic(registered):
    class Draws(Wrong):
        def run(self, problem):
            outcome = super().run(problem)
            fresh = torch.Generator().manual_seed(id(outcome) % 1009)
            return replace(outcome, output=outcome.output + 1e-6 * torch.randn(outcome.output.shape, generator=fresh))

    assert first_broken("determinism", registered(Draws()), 60) is not None


def test_an_engine_must_refuse_with_its_reason(registered):
    class Shy(Wrong):
        name = "shy"

        def refusal(self, problem):
            return "it is shy"

    engine = registered(Shy())
    assert judge("budget", engine, Case()).outcome == "refused"

    class Mumbles(Shy):
        asked = 0

        def refusal(self, problem):
            self.asked += 1
            return f"it is shy for the {self.asked}th time"

    verdict = judge("budget", registered(Mumbles()), Case())
    assert verdict.outcome == "broken" and "does not state the reason" in verdict.reason


class WithoutGradients(Reference):
    """Refuses gradients with its reason."""

    name = "without gradients"

    def refusal(self, problem):
        return "no gradients here" if problem.wants_grad else None


class Fails(WithoutGradients):
    """Raises something else."""

    name = "fails"

    def run(self, problem):
        raise ValueError("a row is missing")

    def prepare(self, problem, request):
        return self.run


@pytest.mark.parametrize(("engine", "outcome"), [(WithoutGradients(), "refused"), (Fails(), "broken")])
def test_a_law_about_gradients_is_refused_with_the_engines_reason_alone(registered, engine, outcome):
    registered(engine)
    assert judge("gradient budget" if outcome == "refused" else "budget", engine, Case()).outcome == outcome
