"""A part that is registered is tested, unasked."""

import numpy as np
import pytest
import torch
from tiers import sized

from regard import engines, masks
from regard._utils import mechanism as _catalogue
from regard.engines import Reference
from regard.normalizers import Softmax
from regard.normalizers.base import TABLE as NORMALIZERS
from regard.normalizers.base import register as register_normalizer
from regard.scores import Score
from regard.scores.base import TABLE as SCORES
from regard.scores.base import register as register_score
from regard.testing import sweep
from regard.testing.campaign import Plan, run
from regard.testing.case import KINDS, build_mask
from regard.testing.case_generator import CaseSampler, mask
from regard.testing.formulas import formula_of

QUICK = ["budget", "gradient budget", "empty rows", "no leak", "permutation"]


@pytest.fixture(autouse=True)
def tables():
    """Forget what a test registers."""
    before = [(table, dict(table)) for table in (SCORES, NORMALIZERS, engines.TABLE, KINDS, _catalogue._TABLE)]
    yield
    for table, entries in before:
        table.clear()
        table.update(entries)


class Laplace(Score):
    def __init__(self, width):
        self.width = width

    def compare(self, query, key):
        return -(query.unsqueeze(-2) - key.unsqueeze(-3)).abs().sum(-1) / self.width

    @classmethod
    def sample(cls, query_width, key_width, keys, generator):
        return cls(0.5 + torch.rand((), generator=generator))


def laplace(query, key, score):
    apart = query[..., :, None, :] - key[..., None, :, :]
    return -(np.sign(apart.real) * apart).sum(-1) / score.width


@pytest.mark.parametrize("law", QUICK)
def test_a_new_score_is_tested(law):
    register_score("laplace")(Laplace)
    verdicts = sweep(law, "streaming", score="laplace", normalizer="softmax")
    assert {v.outcome for v in verdicts} <= {"held", "refused"}, [str(v) for v in verdicts]
    assert any(v.outcome == "held" and v.case.score == "laplace" for v in verdicts)


@pytest.mark.slow
def test_a_new_score_is_judged_by_its_formula():
    register_score("laplace")(Laplace)
    with formula_of(Laplace, laplace):
        verdicts = sweep("gradient budget", "reference", score="laplace", normalizer="softmax")
        assert verdicts and all(v.outcome in ("held", "refused") for v in verdicts), [str(v) for v in verdicts]
        assert any(v.case.dtype == "float64" for v in verdicts)  # which its own code in float64 could not judge
        assert not [
            str(v)
            for v in sweep("definition", "reference", score="laplace", normalizer="softmax")
            if v.outcome == "broken"
        ]
    with formula_of(Laplace, lambda q, k, s: 1.001 * laplace(q, k, s)):
        assert any(
            v.outcome == "broken" for v in sweep("definition", "reference", score="laplace", normalizer="softmax")
        )


@pytest.mark.slow
def test_a_new_normalizer_is_tested():
    @register_normalizer("tempered")
    class Tempered(Softmax):
        online = streams = False

        def weights(self, scores):
            return super().weights(scores / 2)

    for law in QUICK:
        verdicts = sweep(law, "reference", score="scaled_dot", normalizer="tempered")
        assert any(v.outcome == "held" for v in verdicts), law
        assert not [str(v) for v in verdicts if v.outcome == "broken"]


def classes_in(mask):
    """Return the classes of a mask and of those that it is made of."""
    inner = [x for value in vars(mask).values() for x in (value if isinstance(value, tuple) else (value,))]
    return {type(mask)}.union(*(classes_in(x) for x in inner if isinstance(x, masks.Mask)))


def test_every_mask_is_drawn():
    extent, generator = masks.Extent(2, 2, 4, 5), torch.Generator().manual_seed(0)
    recipes = [mask(CaseSampler(seed), 2, True) for seed in range(300)]
    drawn = set().union(*(classes_in(build_mask(recipe, extent, generator, torch.float32)) for recipe in recipes))
    public = {value for value in vars(masks).values() if isinstance(value, type) and issubclass(value, masks.Mask)}
    # The two bases, and what torch's BlockMask becomes, which tests of FlexAttention's masks make.
    assert public - {masks.Mask, masks.Aligned, masks.BlockSparse} <= drawn


@pytest.mark.slow
def test_a_normalizer_that_is_not_convex_must_say_so():
    @register_normalizer("generous")
    class Generous(Softmax):
        online = streams = False

        def weights(self, scores):
            return 1.01 * super().weights(scores)

    assert any(
        v.outcome == "broken" for v in sweep("convexity", "reference", score="scaled_dot", normalizer="generous")
    )


@pytest.mark.slow
def test_a_new_engine_is_tested():
    class Twin(Reference):
        name = "twin"

    engines.register(Twin())
    tally = run(sized(60, 25), Plan(engines=("twin",)), progress=False)
    assert tally.total() > sized(40, 15) and not tally.broken
    assert {engine for _, engine, _ in tally.counts} == {"twin"}
