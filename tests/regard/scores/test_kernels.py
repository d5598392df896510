"""What kernels of a distance state of themselves, against what they do."""

import numpy as np
import pytest
import torch

from regard.engines.fused.arguments import COMPACT
from regard.engines.fused.families import KINDS
from regard.regression import NadarayaWatsonRegressor
from regard.scores.base import TABLE
from regard.scores.kernels import Distance, Radial, kernels

KERNELS = pytest.mark.parametrize("name", kernels())


@KERNELS
def test_a_profile_is_the_weight_at_a_distance(name):
    cls, u = kernels()[name], np.linspace(0, 3, 61)
    rows = torch.from_numpy(u)[:, None]
    np.testing.assert_allclose(cls.profile(u), cls(1.0).compare(rows[:1], rows)[0].exp(), rtol=1e-14, atol=1e-15)
    assert cls.profile(0) == 1


@KERNELS
def test_where_a_kernel_ends(name):
    cls = kernels()[name]
    assert (cls.profile(1.0001) == 0) == cls.compact == cls.can_return_neg_inf


@KERNELS
def test_which_distance_a_kernel_measures(name):
    cls = kernels()[name]
    corner = torch.full((1, 2), 0.3)
    distance = 0.6 if cls.manhattan else 0.3 * 2**0.5
    assert cls(1.0).compare(torch.zeros(1, 2), corner).exp().item() == pytest.approx(cls.profile(distance), rel=1e-6)


@KERNELS
def test_whether_the_width_can_be_learned(name):
    cls, width = kernels()[name], torch.ones((), requires_grad=True)
    (gradient,) = torch.autograd.grad(cls(width).compare(torch.zeros(1, 1), torch.full((1, 1), 0.5)).sum(), width)
    assert bool(gradient != 0) == cls.smooth


@KERNELS
def test_the_variance_is_that_of_the_profile(name):
    """By shells: a distance u has u^(C − 1) of the volume; the Manhattan distance has the same in its own shape."""
    cls = kernels()[name]
    u = (np.arange(200_000) + 0.5) * ((1 if cls.compact else 60) / 200_000)
    for features in (1, 2, 5):
        if cls.variance(features) == np.inf:  # no sum over shells would end
            continue
        mass = cls.profile(u) * u ** (features - 1)
        square = (mass @ u**2) / mass.sum()
        share = 2 / (features * (features + 1)) if cls.manhattan else 1 / features
        assert cls.variance(features) == pytest.approx(square * share, rel=1e-4)


class Student(Radial):
    """(1 + u²)^−power: a Cauchy kernel for power 1."""

    power = 1.0

    @classmethod
    def log_profile(cls, u):
        return -cls.power * np.log1p(u * u)

    def log_weight(self, square):
        return -self.power * torch.log1p(square)


@KERNELS
@pytest.mark.parametrize("features", [1, 2, 5, 40])
def test_a_kernel_that_states_no_variance_gets_that_of_its_profile(name, features):
    cls = kernels()[name]
    assert Distance.variance.__func__(cls, features) == pytest.approx(cls.variance(features), rel=1e-7)


def test_heavy_tails_have_a_variance_or_none():
    assert Student.variance(1) == np.inf  # Cauchy
    wide = type("Wide", (Student,), {"power": 2.5})
    # Student's t with ν = 2 power − C degrees of freedom, of variance 1 / (ν − 2) at this scale.
    assert [wide.variance(features) for features in (1, 2, 3)] == pytest.approx([1 / 2, 1, np.inf])


def test_a_rule_of_thumb_needs_a_kernel_with_a_variance(monkeypatch):
    monkeypatch.setitem(TABLE, "student", Student)
    X, y = np.linspace(0, 1, 30)[:, None], np.linspace(0, 1, 30)
    with pytest.raises(ValueError, match="the kernel has no variance by which to scale a rule, got 'scott' with"):
        NadarayaWatsonRegressor("student").fit(X, y)
    assert NadarayaWatsonRegressor("student", bandwidth=0.1).fit(X, y).score(X, y) > 0.9


def test_the_compiled_kernels_agree_on_what_is_compact():
    assert all((kind >= COMPACT) == cls.compact for cls, kind in KINDS.items())
