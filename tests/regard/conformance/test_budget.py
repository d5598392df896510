"""The error budget: an excess is confirmed with a larger sample of eager's errors."""

import pytest
import torch

from regard.testing import Case, judge
from regard.testing.budget import CONFIRMING, FEW, Budget, BudgetError, larger_sample, neighbours
from regard.testing.laws.base import Law
from regard.testing.oracle import WithAmplitude


def test_an_excess_is_checked_again_with_more_neighbours() -> None:
    counts = []

    def check(*_: object) -> None:
        counts.append(neighbours(4096))
        raise BudgetError("too far")

    verdict = judge(Law("always", "Nothing is right.", check, lambda case: case, 1.0), "reference", Case())
    assert verdict.outcome == "broken" and verdict.reason == "too far"
    assert counts == [neighbours(4096), *(times * neighbours(4096) for times in CONFIRMING)]


@pytest.mark.parametrize("enough", [2, 60])
def test_what_a_larger_sample_explains_holds(enough: int) -> None:
    counts = []

    def check(*_: object) -> None:
        counts.append(neighbours(10**5))
        if counts[-1] < enough:
            raise BudgetError("too far")

    assert judge(Law("rare", "Errors are rare.", check, lambda case: case, 1.0), "reference", Case()).outcome == "held"
    assert counts == [1, FEW, 16 * FEW][: len(counts)] and counts[-1] >= enough


def test_other_failures_are_not_checked_again() -> None:
    counts = []

    def check(*_: object) -> None:
        counts.append(1)
        raise AssertionError("a NaN")

    law = Law("never", "Nothing is right.", check, lambda case: case, 1.0)
    assert judge(law, "reference", Case()).reason == "a NaN" and counts == [1]


def test_a_larger_sample_ends_with_its_block() -> None:
    before = neighbours(7)
    with pytest.raises(KeyError), larger_sample(16):
        assert neighbours(7) == 16 * before
        raise KeyError
    assert neighbours(7) == before


def test_the_limit_is_twice_the_eager_error_and_one_rounding() -> None:
    oracle = WithAmplitude(torch.tensor([[1.0, 2.0]]).double().numpy(), torch.tensor([[1.0, 2.0]]).double().numpy())
    budget = Budget.of(oracle, torch.tensor([[1.0, 2.25]]), torch.float32)
    assert budget.limit == 0.5 + 2 * torch.finfo(torch.float32).eps
    budget.check("it", torch.tensor([1.5, 2.0]))
    with pytest.raises(BudgetError, match=r"it is off by 0\.501; the limit is 0\.5"):
        budget.check("it", torch.tensor([1.501, 2.0]))
