"""Every law, on cases that hypothesis draws, for every engine; and once on every combination of parts."""

import pytest
from engines_here import HERE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import sized

from regard import engines
from regard.testing import LAWS, judge
from regard.testing.case import CaseCall
from regard.testing.case_generator import CaseSampler
from regard.testing.conformance import combinations, draw_for, sweep
from regard.testing.strategies import cases

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

#: Examples for each law and engine: a law that takes long to check has a small share.
EXAMPLES = sized(32, 5)
#: Of every so many scores all combinations are checked.
STEP = sized(1, 16)


def concerned(law, engine):
    """Whether a law says anything of an engine: some only speak of parts, or of dropout, that it does not run."""
    among = combinations(engines.TABLE[engine])
    drawn = (draw_for(CaseSampler(seed), LAWS[law], engines.TABLE[engine], among) for seed in range(20))
    return any(case is not None and CaseCall.of(case).refusal(engines.TABLE[engine]) is None for case in drawn)


PAIRS = [(law, engine) for law in LAWS for engine in HERE]


@pytest.mark.quick(keep=20)
@pytest.mark.parametrize(("law", "engine"), PAIRS, ids=[f"{law}-{engine}" for law, engine in PAIRS])
def test_law(law, engine):
    if not concerned(law, engine):
        pytest.skip("the law does not concern this engine")

    @settings(
        max_examples=max(int(EXAMPLES * min(LAWS[law].share, 1)), 1 if LAWS[law].share < 0.1 else 3),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(law, engine))
    def holds(case):
        verdict = judge(law, engine, case)
        assert verdict.outcome == "held", str(verdict)

    holds()


@pytest.mark.slow
@pytest.mark.parametrize("engine", HERE)
def test_gradients_of_every_combination(engine):
    pairs = {pair[:2] for pair in combinations(engines.TABLE[engine])}
    names = sorted({score for score, _ in pairs})[::STEP]
    verdicts = [each for name in names for each in sweep("gradient budget", engine, name, every_dtype=False)]
    broken = [str(verdict) for verdict in verdicts if verdict.outcome == "broken"]
    assert not broken, "\n".join(broken)
    judged = {(v.case.score, v.case.normalizer) for v in verdicts if v.outcome == "held"}
    judgeable = {pair for pair in pairs if pair[0] in names and pair[1] not in ("gumbel", "sampled")}
    assert len(judged) >= 0.8 * len(judgeable)


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_a_case_prints_as_code_that_makes_it(data):
    from regard.testing import Case

    case = data.draw(cases())
    assert eval(str(case), {"Case": Case}) == case
